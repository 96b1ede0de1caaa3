"""History: a CSV that keeps every bit, survives a crash at any byte, and is followed while another process writes."""

import math
import string
import struct
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nbtools.train import KEYS, History, Record


def record(step, kind="step", **values):
    return Record(kind, 0, step, step * 16, values)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "history.csv"


NUMBERS = st.integers() | st.floats(allow_nan=False) | st.just(math.nan)
CELLS = NUMBERS | st.text(string.printable + "é→")
LINES = st.lists(st.dictionaries(st.sampled_from("abc"), CELLS), max_size=6)


def bits(rows):
    return [{name: struct.pack("d", v) if isinstance(v, float) else v for name, v in row.items()} for row in rows]


@settings(max_examples=20)
@given(LINES)
@example([{"a": x} for x in (5e-324, -0.0, 1e22, 0.1 + 0.2, math.inf, math.nan)])
@example(
    [{"a": text} for text in ("=1+1", "+1", "-1", "@SUM(A1)", "'quoted'", "12", "1_000", "nan", 'say "so"', "a,b")]
)
@example([{"a": "of several\n  lines\r\nhere"}, {"a": 1, "b": 2.5}])
def test_what_is_appended_is_read_back_bit_for_bit_a_line_a_row(lines):
    with TemporaryDirectory() as folder:
        history = History(Path(folder) / "history.csv")
        for step, values in enumerate(lines):
            history.append(record(step, **values))
        again = History(history.path)
        flat = [{k: " ".join(v.splitlines()) if isinstance(v, str) else v for k, v in r.items()} for r in history.rows]
        assert len(again) == sum(map(bool, lines)), "bare steps are no rows"
        assert bits(again.rows) == bits([{k: v for k, v in row.items() if v != ""} for row in flat])
        assert again.columns == history.columns


@pytest.mark.parametrize("text", ["=1+1", "+1", "@SUM(A1)", "-cer"])
def test_cells_that_a_spreadsheet_would_run_are_escaped(path, text):
    History(path).append(record(1, "event", what=text, loss=np.float64(0.1)))
    [cells] = pd.read_csv(path, dtype=str).to_dict("records")
    assert (cells["what"], cells["loss"]) == ("'" + text, "0.1")


def test_appended_rows_do_not_rewrite_the_file_and_a_new_column_widens_its_header(path):
    history = History(path)
    history.append(record(1, loss=0.5))
    node = path.stat().st_ino
    for step in range(2, 50):
        history.append(record(step, loss=1 / step))
    assert path.stat().st_ino == node
    assert len(path.read_text().splitlines()) == 50
    history.append(record(51, loss=0.25, lr=1e-3))
    assert path.read_text().splitlines()[0] == ",".join([*KEYS, "loss", "lr"])
    assert History(path).rows == history.rows


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


def test_series_and_frame_take_the_rows_of_a_kind():
    history = History()
    history.append(record(1, loss=1.0))
    history.append(record(2, "epoch", loss=3.0, val_loss=2))
    history.append(record(4, "event", what="paused"))
    assert history.series("loss") == ([1, 2], [1.0, 3.0])
    assert history.series("loss", "step") == ([1], [1.0])
    assert history.series("what") == ([], [])
    assert list(history.frame().columns) == [*KEYS, "loss", "val_loss", "what"]
    epochs = history.frame("epoch")
    assert list(epochs.columns) == [*KEYS, "loss", "val_loss"]
    assert epochs["val_loss"].tolist() == [2]
    assert history.frame("change").empty


def test_a_reader_follows_rows_columns_and_cuts_and_never_writes(path):
    writer, reader = History(path), History(path)
    assert not reader.refresh()
    writer.append(record(1, loss=0.5))
    assert reader.refresh()
    assert not reader.refresh()
    with path.open("ab") as file:
        file.write(b"step,0,3,4")  # half a line: another is under way
    size = path.stat().st_size
    assert not reader.refresh()
    assert reader.rows == writer.rows == History(path).rows
    assert path.stat().st_size == size
    with path.open("ab") as file:
        file.write(b"8,0.125\r\n")
    assert reader.refresh()
    assert reader.rows[-1] == {"kind": "step", "epoch": 0, "step": 3, "samples": 48, "loss": 0.125}
    more = record(4, loss=0.25, lr=1e-3)
    for change in (lambda: writer.append(more), lambda: writer.cut(1), lambda: writer.append(more)):
        change()
        assert reader.refresh()
        assert (reader.columns, reader.rows) == (writer.columns, writer.rows)
    assert [row["loss"] for row in reader.rows] == [0.5, 0.25]
    path.unlink()
    assert not reader.refresh()
    assert len(reader) == 2
