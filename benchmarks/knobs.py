"""The advised plan against every change of one or two settings for speed, on each task's demo and a task of one's own.

    python -m benchmarks.knobs [--task captcha] [--count 2000] [--rounds 7] [--most 12] [--quick]

Precision × layout × {eager, graph} × batch {½, 1, 2}, as far as at most two of them differ from the plan; the other
feeds; and the plan compiled, on CUDA deterministic. Each is trained in turns with the plan, in one process, on a CPU on
one thread; a ratio is of samples/s within a round, compiled over the whole planned training with the compiler's time;
what the device refuses is listed as refused. Where mixed precision is advised, the difference of the mean losses of
five seeds after 50 steps in it and in float32, over the spread of float32's, says whether it learns the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import statistics
import tempfile
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

import nbtools as nb
from benchmarks.paired import Figure, Receipt, in_turns
from benchmarks.your_own import network, read_arrays, write_arrays
from nbtools import measure
from nbtools.data import Pack, cores, open_feed
from nbtools.errors import NbtoolsError
from nbtools.train import Plan, device

OWN = "own"  # classes of small images, and a network of few layers
COUNTS = {"captcha": 2000, "hwdb": 1600, "sign": 240, "segment": 160, OWN: 16000}
"""Samples of each: with fewer, an epoch would have too few steps for the batches that are fast on small images."""
LESS = "hwdb"  # on a CPU: CER 0.044 with batch 32, in 91 s, against 0.017 with the advised 16, in 96 s (8 epochs)
ROUNDS, SECONDS = 7, 0.5
STEPS, LAST, WARMUP, SEEDS = 50, 10, 10, (0, 1, 2, 3, 4)


def corners(plan: Plan, feed: str, train: int, cuda: bool) -> dict[str, dict[str, Any]]:
    """Return name → settings that differ from the plan, first what differs in one. feed: the one that it has; train:
    samples there are."""
    half, double = max(plan.batch_size // 2, 2), min(2 * plan.batch_size, train)
    values: dict[str, dict[Any, str]] = {
        "amp": {amp: f"amp={amp}" for amp in ("off", "bf16", "fp16")},
        "channels_last": {each: f"channels_last={each}" for each in (False, True)},
        "graph": {each: f"graph={each}" for each in ((False, True) if cuda else (plan.graph,))},
        "batch_size": {half: "batch ÷ 2", plan.batch_size: "batch", double: "batch × 2"},
    }
    made: dict[str, dict[str, Any]] = {}
    for row in itertools.product(*values.values()):
        changes = {name: value for name, value in zip(values, row, strict=True) if value != getattr(plan, name)}
        if 1 <= len(changes) <= 2:
            made[", ".join(values[name][value] for name, value in changes.items())] = changes
    singles = {f"feed={name}": {"feed": name} for name in ("resident", "streamed", "workers") if name != feed}
    singles = {name: {**each, "workers": cores()} if "workers" in name else each for name, each in singles.items()}
    singles |= {"compile=True": {"compile": True, "graph": False}}  # no graph replays what is compiled
    singles |= {"deterministic=True": {"deterministic": True}} if cuda else {}
    return dict(sorted({**singles, **made}.items(), key=lambda each: len(each[1])))  # before the pairs what compiles


class Turns:
    """A plan in training; each call trains for a while and returns samples/s."""

    def __init__(self, task: Any, pack: Pack, plan: Plan, seconds: float):
        self.stepper, self.seconds = measure.Stepper(task, pack, plan, device.pick()).warm_up(), seconds
        self.stepper.advance(steps=8 if plan.graph else 1)  # each shape is recorded at its third batch

    def __call__(self) -> float:
        return self.stepper.turn(self.seconds).samples_per_s


def changed(
    name: str, task: Any, pack: Pack, plan: Plan, options: argparse.Namespace, seconds: float
) -> tuple[list[Figure], dict[str, str]]:
    """Return (the ratio of every change to the plan, change → why the device refuses it)."""
    cuda, advised = device.pick().type == "cuda", Turns(task, pack, plan, seconds)
    feed, figures, refused = open_feed(pack, plan, device.pick()).name, list[Figure](), dict[str, str]()
    changes, samples = corners(plan, feed, pack.splits["train"], cuda), plan.epochs * pack.splits["train"]
    for change, settings in changes.items():
        if len(figures) == options.most:
            break
        began = perf_counter()
        try:
            other = Turns(task, pack, plan.replace(**settings), seconds)
        except (NbtoolsError, RuntimeError) as error:  # torch's own, of a kernel that is not deterministic
            refused[change] = str(error)
            continue
        cost = (perf_counter() - began) * settings.get("compile", False)
        found = in_turns({"advised": advised, change: other}, options.rounds)
        whole = [samples / a / (samples / b + cost) for a, b in zip(found["advised"], found[change], strict=True)]
        less = " learning less" * (name == LESS and not cuda and "batch × 2" in change)
        figures.append(Figure.of(f"{name}: {change}", f"×{less}", whole))
        other.stepper.batches.close()
        print(figures[-1], flush=True)
    return [Figure.of(f"{name}: advised", "samples/s", found["advised"]), *figures], refused


def learned(name: str, task: Any, pack: Pack, plan: Plan, steps: int) -> list[Figure]:
    """Return losses at the end of a short run in the advised precision and in float32, a value each seed."""
    if plan.amp == "off":
        return []
    epoch = math.ceil(pack.splits["train"] / plan.batch_size)
    short = plan.replace(epochs=math.ceil(steps / epoch), warmup_epochs=min(WARMUP, steps) / epoch / 2)
    losses: dict[str, list[float]] = {plan.amp: [], "off": []}
    for amp, seed in itertools.product(losses, SEEDS):
        run = measure.Stepper(task, pack, short.replace(amp=amp, seed=seed), device.pick(), learning=True)
        sums = [run.step(next(run.batches)) for _ in range(steps)][-LAST:]
        losses[amp].append(statistics.mean(float(total) / max(float(count), 1) for total, count in sums))
    far = abs(statistics.mean(losses[plan.amp]) - statistics.mean(losses["off"]))
    spread = max(losses["off"]) - min(losses["off"])
    return [
        Figure.of(f"{name}: loss after {steps} steps, {plan.amp}", "", losses[plan.amp]),
        Figure.of(f"{name}: loss after {steps} steps, float32", "", losses["off"]),
        Figure.of(f"{name}: difference of mean losses", "of the seeds' spread", [far / spread]),
    ]


def opened(name: str, folder: Path, count: int) -> tuple[Any, Pack]:
    if name == OWN:
        write_arrays(folder, count)
        pack = nb.pack(read_arrays(folder), into=folder / f"{name}-pack", progress=False)
        return nb.classify(network(16)), pack
    task: Any = import_module(f"nbtools.tasks.{name}")
    return task, task.pack(task.demo(folder / name, count=count), into=folder / f"{name}-pack", progress=False)


def judged(name: str, folder: Path, count: int, options: argparse.Namespace) -> tuple[list[Figure], dict[str, Any]]:
    """Return (figures, conditions) of a task."""
    task, pack = opened(name, folder, count)
    advice = nb.advise(task, pack, seconds=0.5 if options.quick else None)
    plan = advice.plan.replace(compile=False)
    with measure.untouched(device.pick()):
        figures, refused = changed(name, task, pack, plan, options, 0.05 if options.quick else SECONDS)
        figures += learned(name, task, pack, plan.replace(graph=False), 4 if options.quick else STEPS)
    advised = {"amp": plan.amp} | {name: getattr(plan, name) for name in plan.changes_from(task.PLAN)}
    return figures, {"samples": count, "advised": advised, "refused": refused, "note": advice.note}


def main() -> None:
    parser = argparse.ArgumentParser(description="the advised plan against changes of one or two settings for speed")
    parser.add_argument("--task", choices=list(COUNTS), help="this one only")
    parser.add_argument("--count", type=int, help="samples of its demo")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--most", type=int, help="changes to try of each task, single ones first; else all")
    parser.add_argument("--quick", action="store_true", help="in seconds, to see that it runs; writes no receipt")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.quick:
        options.rounds, options.task, options.count = 2, options.task or "captcha", 64
    best: list[Figure] = []
    with tempfile.TemporaryDirectory() as place:
        for name in [options.task] if options.task else COUNTS:
            figures, conditions = judged(name, Path(place), options.count or COUNTS[name], options)
            ratios = [figure for figure in figures if figure.unit == "×"]
            best.append(max(ratios, key=lambda figure: figure.value))
            headline = dataclasses.replace(best[-1], name=f"knobs_{name}")
            conditions |= {"rounds": options.rounds, "seconds_a_turn": SECONDS, "best": best[-1].name}
            if not options.quick:
                Receipt(headline, tuple(figures), conditions, measure.machine()).write()
    fastest = max(best, key=lambda figure: figure.value)
    print(f"fastest change: {fastest.name}\n{dataclasses.replace(fastest, name='knobs_gain')}")


if __name__ == "__main__":
    main()
