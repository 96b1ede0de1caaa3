"""The live panel of a run in two processes, in a real browser: what is typed and clicked reaches the processes."""

from __future__ import annotations

import browser
import pytest
import serving
from crew import notes
from serving import CLASSIC, LAB, until

CELLS = (
    """import os, torch; torch.set_num_threads(1); os.environ["CREW_STEP"] = "0.05"
import nbtools as nb, crew
from pathlib import Path
panel = nb.Panel(crew.PLAN.replace(epochs=100_000, schedule="constant"))
pack = crew.toy.make_pack(Path("toy"), count=400)""",
    'run = nb.launch(crew, pack, panel, "run", receipt=False, processes=2)',
    "print(run.history.rows[-1]['what'])",
)


@pytest.mark.full
@pytest.mark.alone
@pytest.mark.browser
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stack", [LAB, CLASSIC], ids=lambda stack: stack.name)
def test_the_panel_acts_on_two_processes_and_the_cells_after_it_run(stack, chromium, tmp_path):
    work = tmp_path / "work"
    with serving.serving(stack, tmp_path) as address, browser.chromium(chromium) as window:
        serving.write(work / "several.ipynb", list(CELLS))
        notebook = browser.OPENED[stack.name](window, address, at=1)
        notebook.open("several.ipynb")
        notebook.ready()
        notebook.run_all()
        until(lambda: len(notes(1, work)) > 10 and notebook.frames(), "steps and the live view", 120)
        waits = []
        for i in range(10):
            clicked = notebook.type("lr", str(0.005 + i / 1000))
            came = [until(lambda rank=rank, i=i: first(work, rank, 0.005 + i / 1000), "another lr") for rank in (0, 1)]
            waits.append(max(came) - clicked)
        notebook.click("Stop")
        until(lambda: "stopped by you after step" in notebook.output(2).inner_text(), "the cell after it")
    assert len(notes(0, work)) == len(notes(1, work)), "both stopped after the same step"
    assert sorted(waits)[-2] <= 0.5 + 0.1, f"half a second and a step: {waits}"
    assert notebook.errors == []


def first(work, rank: int, lr: float) -> float:
    """When a rank first trained with an lr; 0 where it has not."""
    return next((note["time"] for note in notes(rank, work) if note["lr"] == lr), 0.0)
