"""What a run finds out about itself: what limits it, how good it is where all of validation is looked at, and its
receipt."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

from nbtools import disk, measure
from nbtools.data import Pack
from nbtools.errors import NbtoolsError
from nbtools.live import Surface
from nbtools.run import EVALUATION, RECEIPT, VERDICT, Run
from nbtools.table import plural
from nbtools.train import History, Task, TrainState, fixed, scoring


@dataclass(frozen=True)
class Job:
    """One run under way."""

    task: Task
    pack: Pack
    folder: Path
    state: TrainState
    history: History


def finish(job: Job, surface: Surface, receipt: bool) -> None:
    """What is left to say, the evaluation that training left to its end, and the receipt."""
    if job.state.stopped:
        surface.tell(f"{job.state.stopped}; to go on, change the plan")
    if job.state.over and not surface.wishes.stop and scoring.is_partial(job.state.plan, job.pack.splits["val"]):
        evaluate_all(job, surface)
    path = job.folder / RECEIPT
    if not receipt or path.exists():
        return
    surface.tell("measuring the baseline beside this run …")
    try:
        disk.write_atomic(path, measure.receipt(job.task, job.pack, job.state.plan, job.state.device).to_json())
        if not judged(job):
            diagnose(job, surface, surface.tell)
    except (NbtoolsError, OSError, RuntimeError) as error:  # the run is trained and saved, whatever the baseline does
        surface.tell(f"no receipt: {type(error).__name__}: {error}")
    except KeyboardInterrupt:
        surface.tell("no receipt: stopped by you; run it again to measure it")


def evaluate_all(job: Job, surface: Surface) -> None:
    """Judge the best weights on the whole validation split, with all scales and the like, and keep what comes."""
    run, path = Run.open(job.folder, job.task), job.folder / EVALUATION
    asked = {"epoch": run.best.get("epoch"), "plan": json.loads(run.plan.to_json())}
    if not job.pack.splits["val"] or {name: run.final.get(name) for name in asked} == asked:
        return
    surface.tell("evaluating the best weights on the whole validation split …")
    start = monotonic()
    try:
        found = scoring.evaluate(job.task, run.model(job.state.device), job.pack, job.state.plan, "val")
        seconds = monotonic() - start
        disk.write_atomic(path, json.dumps({**asked, "values": found, "seconds": seconds}, indent=1))
    except (NbtoolsError, OSError, RuntimeError) as error:  # six scales may need memory that training did not
        surface.tell(f"no last evaluation: {type(error).__name__}: {error}")
        return
    except KeyboardInterrupt:
        surface.tell("no last evaluation: stopped by you; run it again for it")
        return
    shown = ", ".join(f"{name} {value:.4f}" for name, value in found.items())
    surface.tell(f"all {plural(job.pack.splits['val'], 'validation sample')}, in {seconds:.0f} s: {shown}")


def diagnose(job: Job, surface: Surface, say: Callable[[str], None]) -> None:
    """Measure what a step of this run consists of, on a model of its own; say the verdict, and write it down."""
    state = job.state
    kept = fixed(state.plan)
    surface.tell("measuring what a step consists of …", passing=True)
    try:
        profile = measure.step_profile(job.task, job.pack, state.plan, state.device, fixed=kept)
        found = measure.verdict(profile, state.plan, fixed=kept)
        disk.write_atomic(job.folder / VERDICT, json.dumps({"profile": profile.to_dict(), "verdict": found.to_dict()}))
    except (NbtoolsError, OSError, RuntimeError) as error:  # beside the run there may be no memory for a second one
        say(f"not measured: {type(error).__name__}: {error}")
        return
    say(found.sentence)
    if surface.panel is not None:
        surface.panel.propose(found.sentence, found.change)


def judged(job: Job) -> bool:
    """Whether the verdict that lies in the folder is of the plan that the run ended with."""
    path = job.folder / VERDICT
    return path.exists() and json.loads(path.read_text())["profile"]["plan"] == json.loads(job.state.plan.to_json())
