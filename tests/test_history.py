"""History: a CSV that keeps every bit and survives a crash at any byte."""

import math
import struct

import numpy as np
import pandas as pd
import pytest
import toy

import nbtools as nb
from nbtools.train import KEYS, History, Record


def record(step, kind="step", **values):
    return Record(kind, 0, step, step * 16, values)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "history.csv"


def test_floats_come_back_bit_for_bit(path):
    rng = np.random.default_rng(0)
    floats = rng.integers(0, 2**63, 300, dtype=np.int64).view(np.float64)
    history = History(path)
    for step, x in enumerate(
        [*floats[np.isfinite(floats)].tolist(), 5e-324, -0.0, 1e22, 0.1 + 0.2, math.inf, math.nan]
    ):
        history.append(record(step, loss=x))
    again = History(path)
    assert [struct.pack("d", r["loss"]) for r in again.rows] == [struct.pack("d", r["loss"]) for r in history.rows]


def test_numpy_floats_are_written_as_numbers(path):
    History(path).append(record(1, loss=np.float64(0.1)))
    assert History(path).rows[0]["loss"] == 0.1


def test_bare_steps_are_no_rows(path):
    history = History(path)
    history.append(record(1))
    assert len(history) == 0
    assert not path.exists()


def test_a_new_column_widens_the_header_and_keeps_the_rows(path):
    history = History(path)
    history.append(record(1, loss=0.5))
    history.append(record(2, loss=0.25, lr=1e-3))
    history.append(record(3, loss=0.125))
    assert path.read_text().splitlines()[0] == ",".join([*KEYS, "loss", "lr"])
    assert History(path).rows == history.rows
    assert "lr" not in History(path).rows[0]


def test_appended_rows_are_one_line_each_and_do_not_rewrite_the_file(path):
    history = History(path)
    history.append(record(1, loss=0.5))
    node = path.stat().st_ino
    for step in range(2, 50):
        history.append(record(step, loss=1 / step))
    assert path.stat().st_ino == node
    assert len(path.read_text().splitlines()) == 50


def test_cut_keeps_the_first_rows_in_memory_and_file(path):
    history = History(path)
    for step in range(6):
        history.append(record(step, loss=float(step)))
    history.cut(4)
    assert [row["step"] for row in history.rows] == [0, 1, 2, 3]
    assert History(path).rows == history.rows
    history.append(record(4, loss=9.0))
    assert [row["loss"] for row in History(path).rows] == [0.0, 1.0, 2.0, 3.0, 9.0]


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", '=HYPERLINK("http://x")', "-cer"])
def test_cells_that_a_spreadsheet_would_run_are_escaped(path, text):
    History(path).append(record(1, "event", what=text))
    cells = pd.read_csv(path, dtype=str)["what"]
    assert cells[0] == "'" + text
    assert History(path).rows[0]["what"] == text


@pytest.mark.parametrize("text", ["lr 0.001 → 0.0005", "a,b;c", 'say "so"', "'quoted'", "12", "1_000", "nan", " x "])
def test_text_comes_back_as_it_was(path, text):
    History(path).append(record(1, "event", what=text))
    assert History(path).rows[0]["what"] == text


def test_text_of_several_lines_takes_one_line_of_the_file(path):
    History(path).append(record(1, "event", what="out of memory:\n  tried 2 GiB\r\nhalved"))
    assert len(path.read_text().splitlines()) == 2
    assert History(path).rows[0]["what"] == "out of memory:   tried 2 GiB halved"


def test_after_a_crash_at_any_byte_whole_lines_stay_and_new_ones_follow(path):
    history = History(path)
    history.append(record(1, loss=0.123456, what="a"))
    history.append(record(2, loss=0.654321, what="lr 1 → 2"))
    whole = path.read_bytes()
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        kept = history.rows[: max(whole[:size].count(b"\n") - 1, 0)]
        again = History(path)
        assert again.rows == kept, size
        again.append(record(9, loss=1.0, what="next"))
        assert [row["step"] for row in History(path).rows] == [*(row["step"] for row in kept), 9], size


def test_a_file_saved_by_a_spreadsheet_is_read(path):
    text = "kind,epoch,step,samples,loss\nstep,0,1,16,0.5\n"
    path.write_bytes(text.encode("utf-8-sig"))
    history = History(path)
    assert history.columns == [*KEYS, "loss"]
    assert history.rows == [{"kind": "step", "epoch": 0, "step": 1, "samples": 16, "loss": 0.5}]


def test_series_takes_one_column_of_one_kind(path):
    history = History()
    history.append(record(1, loss=1.0))
    history.append(record(2, "epoch", loss=3.0, val_loss=2))
    history.append(record(3, lr=0.1))
    history.append(record(4, "event", what="paused"))
    assert history.series("loss") == ([1, 2], [1.0, 3.0])
    assert history.series("loss", "step") == ([1], [1.0])
    assert history.series("val_loss") == ([2], [2.0])
    assert history.series("what") == ([], [])


def test_frame_has_the_rows_of_a_kind_and_only_their_columns():
    history = History()
    history.append(record(1, loss=1.0))
    history.append(record(2, "epoch", val_loss=2.0))
    assert list(history.frame().columns) == [*KEYS, "loss", "val_loss"]
    epochs = history.frame("epoch")
    assert list(epochs.columns) == [*KEYS, "val_loss"]
    assert epochs["val_loss"].tolist() == [2.0]
    assert history.frame("change").empty


def test_a_reader_follows_a_file_that_another_process_writes_and_never_writes_to_it(path):
    writer = History(path)
    writer.append(record(1, loss=0.5))
    reader = History(path)
    assert not reader.refresh()
    writer.append(record(2, loss=0.25))
    with path.open("ab") as file:
        file.write(b"step,0,3,4")  # half a line: another is under way
    size = path.stat().st_size
    assert reader.refresh()
    assert reader.rows == writer.rows
    assert not reader.refresh()
    assert len(History(path).rows) == 2
    assert path.stat().st_size == size
    with path.open("ab") as file:
        file.write(b"8,0.125\r\n")
    assert reader.refresh()
    assert reader.rows[-1] == {"kind": "step", "epoch": 0, "step": 3, "samples": 48, "loss": 0.125}


def test_a_reader_sees_new_columns_also_in_a_file_that_got_the_number_of_an_older_one(path):
    """Two rewrites between two looks: the second new file takes the inode that the first one freed."""
    writer, other = History(path), History(path.with_name("other.csv"))
    for step in (1, 2):
        writer.append(record(step, loss=1 / step))
        other.append(record(step, loss=1 / step, lr=1e-3))
    reader = History(path)
    with path.open("r+b") as file:  # the same inode, and longer
        file.write(path.with_name("other.csv").read_bytes())
    assert reader.refresh()
    assert reader.columns == other.columns
    assert reader.rows == other.rows


def test_a_reader_of_a_file_that_goes_away_keeps_what_it_read(path):
    History(path).append(record(1, loss=0.5))
    reader = History(path)
    path.unlink()
    assert not reader.refresh()
    assert len(reader) == 1


def test_a_reader_follows_new_columns_and_rows_cut_by_a_resume(path):
    writer, reader = History(path), History(path)
    for step in (1, 2, 3):
        writer.append(record(step, loss=1 / step))
    assert reader.refresh()
    writer.append(record(4, loss=0.25, lr=1e-3))
    assert reader.refresh()
    assert reader.columns == writer.columns
    assert reader.rows == writer.rows
    writer.cut(1)
    assert reader.refresh()
    assert reader.rows == writer.rows


def test_it_shows_what_it_holds_and_its_last_rows_as_a_table(path):
    history = History(path)
    assert repr(history) == f"History {path}: 0 rows"
    for step in range(1, 13):
        history.append(record(step, loss=1 / 3, gpu_throttle="<b>idle</b>"))
    history.append(record(12, "epoch", train_loss=0.5))
    assert repr(history) == f"History {path}: 13 rows up to step 12: 12 step, 1 epoch"
    page = history._repr_html_()
    assert page.count("<tr") == 1 + 10
    for part in ("train_loss", "0.333", "&lt;b&gt;idle", "13 rows", "the last 10, frame() has all"):
        assert part in page
    assert "<b>" not in page


def test_what_a_person_looks_at_in_a_cell_says_what_it_is(tmp_path):
    pack = toy.make_pack(tmp_path, count=20)
    run = nb.fit(toy, pack, toy.PLAN.replace(epochs=1, batch_size=7), tmp_path / "run", receipt=False, progress=False)
    state = nb.TrainState(toy, pack, toy.PLAN, "cpu")
    for shown in (run, run.history, run.summary(), nb.compare(run), pack, pack.raw, state):
        assert " at 0x" not in repr(shown)
    assert "History" in repr(run.history)
    assert "<table" in run.history._repr_html_()
    assert repr(state) == "TrainState of toy: 0 steps, 0 of 3 epochs done, on cpu"
    assert repr(pack.raw).startswith(f"RawFiles {tmp_path / 'raw'}: 20 samples of the pack")
