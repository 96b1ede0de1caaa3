"""What is measured once a run is trained and saved: the final evaluation, the receipt, what limits a step."""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic

from nbtools import disk, measure
from nbtools.data import Pack, release_runtime, say, work
from nbtools.errors import NbtoolsError, StageError
from nbtools.folder import Job
from nbtools.live import EVALUATING, MEASURING
from nbtools.run import EVALUATION, RECEIPT, VERDICT, Run
from nbtools.show import number, plural
from nbtools.train import Plan, TrainState, evaluation, fixed
from nbtools.train import device as devices

MEASURED = "measuring the receipt"


def afterwards(state: TrainState, pack: Pack, folder: Path, receipt: bool) -> str:
    """Return what follows training, and is not in the time left."""
    evaluated = evaluation.is_partial(state.plan, pack.splits["val"])
    measured = receipt and not (folder / RECEIPT).exists()
    return " + ".join(["final evaluation"] * evaluated + ["receipt"] * measured)


def finish(job: Job, receipt: bool) -> None:
    """Report why the run stopped early; evaluate what training left to its end; measure the receipt."""
    state, surface, path = job.state, job.surface, job.folder / RECEIPT
    if state.stopped:
        surface.report(f"{state.stopped}; to continue, give more epochs")
    if state.over and not surface.requests.stop and evaluation.is_partial(state.plan, job.pack.splits["val"]):
        evaluate_all(job)
    if not receipt or surface.requests.stop or path.exists():
        return
    if state.ranks.world > 1 and (epochs := job.history.of("epoch")):
        world, rate = state.ranks.world, epochs[-1]["samples_per_s"]
        surface.report(f"the receipt measures one of {world} processes; together they trained {rate:,.0f} samples/s")
    if not surface.progress:
        surface.report(f"{MEASURED} …")
    surface.announce(MEASURING)
    with optional("no receipt", surface.report), work(MEASURED, surface.progress):
        plan = one_share(state)
        disk.write_atomic(path, measure.receipt(job.task, job.pack, plan, state.device).to_json())
        known = Run.open(job.folder, job.task).stored(VERDICT)
        if not known or known["profile"]["plan"] != json.loads(plan.to_json()):  # of an earlier plan
            diagnose(job, surface.report)


@contextmanager
def optional(missing: str, tell: Callable[[str], None], again: str = "run it again to get it") -> Iterator[None]:
    """Turn the failure of a measurement after the run is saved, such as out of memory, into a message."""
    try:
        yield
    except (NbtoolsError, OSError, RuntimeError) as error:
        tell(f"{missing}: {type(error).__name__}: {error}")
    except KeyboardInterrupt:
        tell(f"{missing}: interrupted; {again}")


def evaluate_all(job: Job) -> None:
    """Evaluate the best weights on the whole validation split, with all scales and other costly options."""
    run, tell, count = Run.open(job.folder, job.task), job.surface.report, job.pack.splits["val"]
    about = {"epoch": run.best.get("epoch"), "plan": json.loads(run.plan.to_json())}
    if not count or about.items() <= run.stored(EVALUATION).items():
        return
    start, shows = monotonic(), job.surface.progress
    job.surface.announce(EVALUATING)
    with optional("no final evaluation", tell):
        values = evaluation.evaluate(job.task, run.model(job.state.device), job.pack, job.state.plan, "val", shows)
        about |= {"values": values, "seconds": monotonic() - start}
        disk.write_atomic(job.folder / EVALUATION, json.dumps(about, indent=1))
        shown = ", ".join(f"{name} {number(value)}" for name, value in values.items())
        tell(f"all {plural(count, 'validation sample')}, in {about['seconds']:.0f} s: {shown}")


def one_share(state: TrainState) -> Plan:
    """Return the plan of what one process does in a step: with several, its share of the batch."""
    plan, world = state.plan, state.ranks.world
    return plan if world == 1 else plan.replace(batch_size=max(plan.batch_size // world, 1))


def diagnose(job: Job, tell: Callable[[str], None]) -> None:
    """Measure what a step of this run consists of, on a separate model; report the verdict and save it."""
    state, surface = job.state, job.surface
    kept = {**fixed(state.plan), **({"batch_size": "the share of one process"} if state.ranks.world > 1 else {})}
    with optional("not measured", tell, "What limits it? measures again"):
        plan = one_share(state)
        profile = measure.step_profile(job.task, job.pack, plan, state.device, fixed=kept)
        verdict = measure.verdict(profile, plan, fixed=kept)
        disk.write_atomic(
            job.folder / VERDICT, json.dumps({"profile": profile.to_dict(), "verdict": verdict.to_dict()})
        )
        if surface.panel is not None:
            surface.panel.propose(verdict.sentence, verdict.change)
        tell(verdict.sentence)


def release(kept: bool) -> list[str]:
    """Free the memory of the GPU or the processor; on Colab give the machine back if the run is `kept` on another disk.
    Prints and returns why that was not possible: the run is complete either way."""
    gc.collect()
    devices.give_back(devices.pick())
    try:
        if kept:
            release_runtime()
    except StageError as error:
        say(str(error))
        return [str(error)]
    return []
