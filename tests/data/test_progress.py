"""Bars of long work: time left that learns, and in a notebook an output of their own of which a sentence stays."""

import re
import sys

import kernels
import pytest
import toy

import nbtools as nb
from nbtools import measure
from nbtools.data import progress
from nbtools.train import evaluation


@pytest.fixture
def at_once(monkeypatch):
    """Every state of every bar is shown."""
    for name in ("LEAST", "SLOW", "PATIENCE"):
        monkeypatch.setattr(f"nbtools.data.progress.{name}", 0)
    monkeypatch.setattr(evaluation, "SLOW", 0)


def test_advice_sweep_receipt_and_evaluation_say_how_long_they_take(at_once, pack, tmp_path, capsys, monkeypatch):
    for where, name, value in ((measure.Receipt, "SECONDS", 0.3), (measure.verdict, "SECONDS", 0.1)):
        monkeypatch.setattr(sys.modules[where.__module__], name, value)
    plan = toy.PLAN.replace(epochs=1)
    acts = {
        "measuring toy on this machine: ": lambda: nb.advise(toy, pack, seconds=0.3),
        "measuring the receipt: ": lambda: nb.fit(toy, pack, plan, tmp_path / "run"),
        "evaluating the test split: ": lambda: nb.evaluate(nb.Run.open(tmp_path / "run", toy), pack),
    }
    for name, act in acts.items():
        act()
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(name)]
        assert len(lines) > 1, name
        assert name.startswith("evaluating") or sum(" left" in line for line in lines) > 1, lines


def test_an_estimate_that_is_exceeded_grows(at_once, capsys, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(progress, "monotonic", lambda: clock[0])
    with progress.work("measuring"):
        progress.phase("first", 10.0)
        for _ in range(4):
            clock[0] += 8.0
            progress.tick()
            [(shown, *_)] = progress.ongoing
            assert shown.n == clock[0] < shown.total
    assert shown.total > 30


BARS = """
import time
from nbtools.data import bar
with bar(total=10**7, desc="copy", unit="B", unit_scale=True) as copied:
    for _ in range(3):
        time.sleep(0.3)
        copied.update(2_500_000)
"""


def test_in_a_notebook_a_bar_is_a_line_of_the_cell_with_its_speed_and_the_time_left(tmp_path):
    with kernels.started(kernels.MINE, tmp_path) as kernel:
        cell = kernel.client.execute(BARS)
        kernel.end(cell)
    streams = [message["content"] for message in kernel.said if message["msg_type"] == "stream"]
    assert {stream["name"] for stream in streams} == {"stdout"}, "stderr would be red"
    text = "".join(stream["text"] for stream in streams)
    assert re.search(r"copy:  50%.*5\.00M/10\.0M \[00:00<00:0\d, *[\d.]+MB/s\]", text), text
    assert len(text) < 2000, "at most four updates a second"
