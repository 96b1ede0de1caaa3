"""History: a CSV that keeps every bit, survives a crash at any byte, and is followed while another process writes."""

import math
import struct

import pytest

from nbtools.train import KEYS, History, Record


def record(step, kind="step", **values):
    return Record(kind, 0, step, step * 16, values)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "history.csv"


EXTREME = (5e-324, -0.0, 1e22, 0.1 + 0.2, math.inf, math.nan, 7, 10**300)
FORMULAS = ("=1+1", "+1", "-1", "@SUM(A1)", "-cer")  # that a spreadsheet would run
TEXTS = (*FORMULAS, "'quoted'", "12", "1_000", "nan", 'say "so"', "a,b", "é→", "several\n  lines\r\nhere")


def bits(rows: list[dict]) -> list[dict]:
    return [{name: struct.pack("d", v) if isinstance(v, float) else v for name, v in row.items()} for row in rows]


def test_what_is_appended_is_read_back_bit_for_bit_a_line_a_row_and_none_of_its_cells_is_a_formula(path):
    history = History(path)
    for step, value in enumerate((*EXTREME, *TEXTS)):
        history.append(record(step, **{"abc"[step % 3]: value, "d": 2.5}))
    history.append(record(99))
    again = History(path)
    flat = [{k: " ".join(v.splitlines()) if isinstance(v, str) else v for k, v in r.items()} for r in history.rows]
    assert len(again) == len(EXTREME) + len(TEXTS), "bare steps are no rows"
    assert len(path.read_text().splitlines()) == 1 + len(again)
    assert (bits(again.rows), again.columns) == (bits(flat), history.columns)
    assert [text for text in FORMULAS if f",'{text}" not in path.read_text() or f",{text}" in path.read_text()] == []


def test_appended_rows_do_not_rewrite_the_file_and_a_new_column_widens_its_header(path):
    history, nodes = History(path), set()
    for step in range(1, 50):
        history.append(record(step, loss=1 / step))
        nodes.add(path.stat().st_ino)
    assert len(nodes) == 1
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


def test_a_reader_follows_rows_columns_and_cuts_and_never_writes(path):
    writer, reader = History(path), History(path)
    assert not reader.refresh()
    writer.append(record(1, loss=0.5))
    assert (reader.refresh(), reader.refresh()) == (True, False)
    for piece, news in ((b"step,0,3,4", False), (b"8,0.125\r\n", True)):  # half a line: another is under way
        with path.open("ab") as file:
            size = file.write(piece) + file.tell() - len(piece)
        assert (reader.refresh(), path.stat().st_size) == (news, size)
    assert reader.rows[-1] == {"kind": "step", "epoch": 0, "step": 3, "samples": 48, "loss": 0.125}
    more = record(4, loss=0.25, lr=1e-3)
    for change in (lambda: writer.append(more), lambda: writer.cut(1), lambda: writer.append(more)):
        change()
        assert reader.refresh()
        assert (reader.columns, reader.rows) == (writer.columns, writer.rows)
    path.unlink()
    assert not reader.refresh()
    assert [row["loss"] for row in reader.rows] == [0.5, 0.25]
