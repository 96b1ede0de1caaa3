"""The live panel of a run in two processes, in a real browser: what is typed and clicked reaches the processes."""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import browser
import pytest
import serving
from serving import CLASSIC, LAB, until
from test_live import late

PROMISED = 0.5  # seconds from click to effect, beyond one step
CELLS = (
    """import os, torch; torch.set_num_threads(1); os.environ["CREW_STEP"] = "0.05"
import nbtools as nb, crew
from pathlib import Path
panel = nb.Panel(crew.PLAN.replace(epochs=100_000, schedule="constant"))
pack = crew.toy.make_pack(Path("toy"), count=400)""",
    'run = nb.launch(crew, pack, panel, "run", receipt=False, processes=2)',
    "print(run.history.rows[-1]['what'])",
)
PANEL, TRAIN, AFTER = range(len(CELLS))


def notes(work: Path, rank: int) -> list[dict[str, Any]]:
    path = work / f"steps-{rank}.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


class Clicks:
    """Interactions, each followed until both processes show it. waits: seconds beyond the longest step meanwhile."""

    def __init__(self, notebook: browser.Notebook, work: Path):
        self.notebook, self.work = notebook, work
        self.waits: list[float] = []

    def turned(self, name: str, value: float) -> None:
        clicked = self.notebook.type(name, str(value))
        came = [until(lambda rank=rank: self.first(rank, name, value, clicked), f"{name} = {value}") for rank in (0, 1)]
        times = [note["time"] for note in notes(self.work, 0) if clicked - 1 < note["time"] <= max(came)]
        step = max(later - earlier for earlier, later in itertools.pairwise(times))
        self.waits.append(max(came) - clicked - step)

    def first(self, rank: int, name: str, value: float, since: float) -> float:
        found = (note["time"] for note in notes(self.work, rank) if note["time"] > since and note[name] == value)
        return next(found, 0.0)

    def paused(self) -> float:
        """Seconds without a step until Resume, which lets both go on."""
        clicked = self.notebook.click("Pause")
        until(lambda: time.time() - notes(self.work, 1)[-1]["time"] > 1, "a pause")
        last = max(notes(self.work, rank)[-1]["time"] for rank in (0, 1))
        self.waits.append(max(0.0, last - clicked))
        resumed = self.notebook.click("Resume")
        came = until(lambda: [n["time"] for n in notes(self.work, 1) if n["time"] > last], "steps after Resume")[0]
        self.waits.append(came - resumed)
        return came - last


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.browser
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stack", [LAB, CLASSIC], ids=lambda stack: stack.name)
def test_the_panel_acts_on_two_processes_within_half_a_second_and_a_step(stack, chromium, tmp_path):
    work = tmp_path / "work"
    with serving.serving(stack, tmp_path) as address, browser.chromium(chromium) as window:
        serving.write(work / "several.ipynb", list(CELLS))
        notebook = browser.OPENED[stack.name](window, address, at=TRAIN)
        notebook.open("several.ipynb")
        notebook.ready()
        notebook.run_all()
        until(lambda: len(notes(work, 1)) > 10 and notebook.frames(), "steps and the live view", 120)
        clicks = Clicks(notebook, work)
        for i in range(8):
            clicks.turned("lr", 0.005 + i / 1000)
            clicks.turned("batch_size", 20 + 2 * i)
        silence = clicks.paused()
        notebook.shot(f"{stack.name}-several", TRAIN)
        clicked = notebook.click("Stop")
        until(lambda: "stopped by you after step" in notebook.output(AFTER).inner_text(), "the cell after it")
        steps = [[n["time"] for n in notes(work, rank) if n["time"] > clicked] for rank in (0, 1)]
        clicks.waits.append(max(map(max, steps)) - clicked if all(steps) else 0.0)
    times = {"n": len(clicks.waits), "p95": late(clicks.waits), "max": max(clicks.waits), "waits": clicks.waits}
    (browser.SHOTS / f"{stack.name}-several.json").write_text(json.dumps(times, indent=1))
    assert silence > 1
    assert len(notes(work, 0)) == len(notes(work, 1)), "both stopped after the same step"
    assert late(clicks.waits) <= PROMISED, sorted(clicks.waits)[-5:]
    assert notebook.errors == []
