"""Bars of long work: time left that learns, and in a notebook an output of their own of which a sentence stays."""

import re
import sys

import kernels
import pytest
import toy

import nbtools as nb
from nbtools import measure
from nbtools.data import bar
from nbtools.train import evaluation


@pytest.fixture
def at_once(monkeypatch):
    """Every state of every bar is shown."""
    for name in ("LEAST", "SLOW", "PATIENCE"):
        monkeypatch.setattr(f"nbtools.data.progress.{name}", 0)
    monkeypatch.setattr(evaluation, "SLOW", 0)


def test_advice_sweep_receipt_and_evaluation_say_how_long_they_take(at_once, pack, tmp_path, capsys, monkeypatch):
    for where, name, value in ((measure.Receipt, "SECONDS", 0.05), (measure.step_profile, "SECONDS", 0.1)):
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


BARS = """
import time
from nbtools.data import bar
with bar(total=2000, desc="packing", unit=" samples") as counted:
    for _ in range(4):
        time.sleep(0.3)
        counted.update(500)
try:
    with bar(total=10**6, desc="copy", unit="B", unit_scale=True) as copied:
        copied.update(4000)
        1 / 0
except ZeroDivisionError:
    pass
"""


def test_in_a_notebook_a_bar_is_an_output_of_which_a_sentence_stays(tmp_path):
    with kernels.started(kernels.MINE, tmp_path) as kernel:
        cell = kernel.client.execute(BARS)
        kernel.end(cell)
    assert [m for m in kernel.said if m["msg_type"] == "stream"] == [], "stderr would be red"
    shown: dict[str, list[dict]] = {}
    for message in kernel.said:
        if message["msg_type"] in ("display_data", "update_display_data"):
            content = message["content"]
            shown.setdefault(content["transient"]["display_id"], []).append(content["data"])
    packing, copy = shown.values()
    assert any(re.fullmatch(r"packing: 50 %, 1,000 of 2,000 samples, 1 s left", d["text/plain"]) for d in packing)
    assert all("width:" in d["text/html"] for d in packing[:-1]), "the bar itself"
    last = [one[-1]["text/plain"] for one in (packing, copy)]
    assert re.fullmatch(r"packing: 2,000 samples in 1\.\d s", last[0])
    assert re.fullmatch(r"copy: 4.0 kB of 1.0 MB in 0\.\d s, then stopped", last[1])
    assert not any("width:" in one[-1]["text/html"] for one in (packing, copy))


def test_a_name_in_a_bar_cannot_be_markup(monkeypatch):
    found: list[dict] = []
    monkeypatch.setattr("nbtools.data.progress.in_notebook", lambda: True)
    monkeypatch.setattr("IPython.display.display", lambda data, **_: found.append(data))
    with bar(total=1, desc="copy <b>a</b>"):
        pass
    assert "<b>" not in found[0]["text/html"]
