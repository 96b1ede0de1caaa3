"""What is measured once a run is trained and saved: the final evaluation, the receipt, what limits a step."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

from nbtools import disk, measure
from nbtools.data import work
from nbtools.errors import NbtoolsError
from nbtools.folder import Job
from nbtools.run import EVALUATION, RECEIPT, VERDICT, Run
from nbtools.show import number, plural
from nbtools.train import Plan, TrainState, evaluation, fixed


def finish(job: Job, receipt: bool) -> None:
    """Report why the run stopped early; evaluate what training left to its end; measure the receipt."""
    state, surface, path = job.state, job.surface, job.folder / RECEIPT
    if state.stopped:
        surface.report(f"{state.stopped}; to continue, give more epochs")
    if surface.requests.stop:
        return
    if state.over and evaluation.is_partial(state.plan, job.pack.splits["val"]):
        evaluate_all(job)
    if not receipt or path.exists():
        return
    if state.ranks.world > 1 and (epochs := job.history.of("epoch")):
        world, rate = state.ranks.world, epochs[-1]["samples_per_s"]
        surface.report(f"the receipt measures one of {world} processes; together they trained {rate:,.0f} samples/s")
    with optional("no receipt", surface.report), work("measuring the receipt", surface.progress):
        made = measure.receipt(job.task, job.pack, one_share(state), state.device)
        disk.write_atomic(path, made.to_json())
        diagnose(job, surface.report)


@contextmanager
def optional(missing: str, tell: Callable[[str], None]) -> Iterator[None]:
    """Turn the failure of a measurement after the run is saved, such as out of memory, into a message."""
    try:
        yield
    except (NbtoolsError, OSError, RuntimeError) as error:
        tell(f"{missing}: {type(error).__name__}: {error}")
    except KeyboardInterrupt:
        tell(f"{missing}: interrupted; run it again to get it")


def evaluate_all(job: Job) -> None:
    """Evaluate the best weights on the whole validation split, with all scales and other costly options."""
    run, count, start = Run.open(job.folder, job.task), job.pack.splits["val"], monotonic()
    about = {"epoch": run.best.get("epoch"), "plan": json.loads(run.plan.to_json())}
    if not count or about.items() <= run.stored(EVALUATION).items():
        return
    with optional("no final evaluation", job.surface.report):
        model, shows = run.model(job.state.device), job.surface.progress
        values = evaluation.evaluate(job.task, model, job.pack, job.state.plan, "val", shows)
        seconds = monotonic() - start
        disk.write_atomic(job.folder / EVALUATION, json.dumps({**about, "values": values, "seconds": seconds}))
        shown = ", ".join(f"{name} {number(value)}" for name, value in values.items())
        job.surface.report(f"all {plural(count, 'validation sample')}, in {seconds:.0f} s: {shown}")


def one_share(state: TrainState) -> Plan:
    """Return the plan of what one process does in a step: with several, its share of the batch."""
    plan, world = state.plan, state.ranks.world
    return plan if world == 1 else plan.replace(batch_size=max(plan.batch_size // world, 1))


def diagnose(job: Job, tell: Callable[[str], None]) -> None:
    """Measure what a step of this run consists of, on a separate model; report the verdict and save it."""
    state, surface, plan = job.state, job.surface, one_share(job.state)
    kept = {**fixed(plan), **({"batch_size": "the share of one process"} if state.ranks.world > 1 else {})}
    with optional("not measured", tell):
        profile = measure.step_profile(job.task, job.pack, plan, state.device, fixed=kept)
        verdict = measure.verdict(profile, plan, fixed=kept)
        content = json.dumps({"profile": profile.to_dict(), "verdict": verdict.to_dict()})
        disk.write_atomic(job.folder / VERDICT, content)
        if surface.panel is not None:
            surface.panel.propose(verdict.sentence, verdict.change)
        tell(verdict.sentence)
