"""The plan to start from: rules of thumb, and what measuring on this machine found better."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

from nbtools import disk
from nbtools.data import Pack, choose
from nbtools.errors import DiskError
from nbtools.measure import verdict
from nbtools.measure.advice import Advice
from nbtools.measure.finder import Finding, find_batch
from nbtools.measure.pace import machine
from nbtools.measure.profile import StepProfile, step_profile
from nbtools.measure.rules import decide, enough, inspect, suggested
from nbtools.measure.tries import choose_precision, find_precision
from nbtools.measure.verdict import Verdict
from nbtools.measure.workers import find_workers
from nbtools.train import Plan, task_name
from nbtools.train import device as devices

VERSION = 2  # of what is measured; stored with the advice, so that older advice is measured again (1: no bf16 on a CPU)
TURNS = 2  # changes to the measured plan, each based on a profile of its own
SECONDS = 20.0  # of looking for the batch size; a third of it for the profile, which takes two to three times its own
FREE = ("feed", "workers", "prefetch", "channels_last", "compile", "graph", "amp")
"""Knobs that advice turns by itself where that was measured faster: they leave the course of training as it is, but for
the precision of its arithmetic."""


def advise(
    task: Any,
    pack: Pack,
    measure: bool = True,
    seconds: float = SECONDS,
    noise: bool = False,
    compiling: bool = False,
) -> Advice:
    """The plan to start from, each field with its reason and, where it was measured here, the evidence.

    Measuring takes about two to three times `seconds`, once for a machine, a pack and a task: what was found is kept
    beside the pack. measure=False: what was found before, else rules of thumb alone, at once. noise: cap the batch by
    the gradient noise scale too. compiling: try torch.compile and CUDA graphs however short training is; a minute or
    two more. Raises TrainError where not even one sample fits.
    """
    thumb = by_rules(task, pack, {})
    place, asked = shelf(pack), (noise, compiling)
    wanted = [asked] if measure else list(product((True, False), repeat=2))  # else whatever was found, the most first
    labels = {given: label(task, pack, thumb, given) for given in wanted}
    found = next(filter(None, (kept(place, key, type(task.PLAN)) for key in labels.values())), None)
    if found is not None or not measure:
        return found or thumb
    print(f"measuring {task_name(task)} on this machine, about {2.5 * seconds:.0f} s …", file=sys.stderr)
    made = measured(task, pack, thumb, seconds, noise, compiling)
    try:
        keep(place, labels[asked], made)
    except DiskError as error:  # a pack may lie where nobody may write
        made = dataclasses.replace(made, note=f"{made.note} Not kept for the next time: {error}")
    return made


def by_rules(task: Any, pack: Pack, found: dict[str, tuple[Any, str]]) -> Advice:
    """What the rules make of what was found so far; where the batches come from is decided by the pack's size."""
    advice = decide(task, pack.card, inspect(), found)
    if "feed" in found:
        return advice
    name, why = choose(pack, advice.plan, devices.pick())
    return dataclasses.replace(advice, reasons={**advice.reasons, "feed": f"{name}: {why}"})


def measured(task: Any, pack: Pack, thumb: Advice, seconds: float, noise: bool, compiling: bool) -> Advice:
    """The precision first, at the rules' batch, then the batch in that precision, since all else depends on it; then
    what a step consists of, and the changes that it suggests."""
    own, start = suggested(task, pack.card, inspect()), perf_counter()
    found: dict[str, tuple[Any, str]] = {}
    evidence: dict[str, str] = {}
    precision = None if "amp" in own else find_precision(task, pack, thumb.plan, seconds=seconds / 6)
    if precision is not None:
        amp, evidence["amp"] = choose_precision(precision)
        found["amp"] = amp, "the faster one that learns the same, measured here"
    plan = by_rules(task, pack, found).plan
    batches = find_batch(task, pack, plan, seconds=seconds, most=enough(pack.card), noise=noise)
    if "batch_size" not in own and conclusive(batches, plan):
        found["batch_size"] = batches.batch_size, "the smallest within 5 % of the best rate"
    said = batches.why if "batch_size" in found else f"not taken for its speed alone: {batches.why}"
    if batches.micro_batch_size is not None:
        found["micro_batch_size"] = batches.micro_batch_size, "the whole batch does not fit at once"
    evidence["batch_size"] = said
    plan = by_rules(task, pack, found).plan
    crew = (
        find_workers(task, pack, plan, seconds=seconds / 3)
        if choose(pack, plan, devices.pick())[0] == "workers"
        else None
    )
    if crew is not None:
        found |= {"workers": (crew.workers, crew.reason), "prefetch": (crew.prefetch, crew.reason)}
        evidence["workers"] = crew.reason
    fixed = ["amp"] if precision is not None and not precision.agrees else []
    profile, judged = settled(task, pack, found, evidence, fixed, seconds / 6, compiling)
    made = by_rules(task, pack, found)
    took = perf_counter() - start
    note = f"Measured on {', '.join(machine().values())} in {took:.0f} s; what says rule of thumb was not."
    measurements = {"precision": precision, "batches": batches, "workers": crew, "profile": profile, "verdict": judged}
    return dataclasses.replace(made, note=note, evidence=evidence, **measurements)


def settled(
    task: Any,
    pack: Pack,
    found: dict[str, tuple[Any, str]],
    evidence: dict[str, str],
    fixed: list[str],
    seconds: float,
    compiling: bool,
) -> tuple[StepProfile, Verdict]:
    """Profile the plan and make the change that its verdict names, until it names none that advice makes by itself;
    the changes go into found and evidence. Returns the last plan's profile and verdict."""
    for turn in range(TURNS + 1):
        plan = by_rules(task, pack, found).plan
        profile = step_profile(task, pack, plan, seconds=seconds, fixed=fixed, compiling=compiling and not turn)
        judged = verdict(profile, plan)
        if turn == TURNS or not judged.change or not set(judged.change) <= set(FREE):
            break
        found |= {name: (value, "measured faster here") for name, value in judged.change.items()}
        evidence |= dict.fromkeys(judged.change, judged.sentence)
        fixed = [*fixed, *judged.change, "compile", "graph"]  # compiling takes a minute, and gained less than this
    return profile, judged


def conclusive(batches: Finding, plan: Plan) -> bool:
    """Whether the search ended by itself, or at least got as far as the rules' own batch: a machine busy with other
    things may not let it."""
    return batches.complete or max((row.batch_size for row in batches.rows if row.n), default=0) >= plan.batch_size


def shelf(pack: Pack) -> Path:
    """Beside the pack, and not in it: what is in a pack is verified."""
    return pack.folder.with_name(f"{pack.folder.name}.advice.json")


def label(task: Any, pack: Pack, thumb: Advice, asked: Sequence[bool]) -> str:
    """Changes with whatever the measurements depend on: machine and versions, data, task and its plan."""
    parts = [machine(), pack.card.digest, task_name(task), thumb.plan.to_dict(), asked]
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


def kept(place: Path, key: str, kind: type[Plan]) -> Advice | None:
    """What was found before; None where nothing was, or it was measured by an older version."""
    try:
        found = json.loads(place.read_text())[key]
        return Advice.from_dict(found, kind) if found.pop("version", 1) == VERSION else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def keep(place: Path, key: str, advice: Advice) -> None:
    """Raises DiskError."""
    try:
        shelved = json.loads(place.read_text())
    except (OSError, ValueError):
        shelved = {}
    with disk.explained("keeping the advice", place):
        disk.write_atomic(place, json.dumps({**shelved, key: {"version": VERSION, **advice.to_dict()}}))
