"""The advised plan against each single change of a setting for speed, on every task's demo and on a task of one's own:
is anything missed?

    python -m benchmarks.knobs [--task captcha] [--rounds 7] [--quick]

Each change is trained in turns with the plan, in one process on one thread: the other precisions, the other layout, the
other feeds, twice and half the batch, compiled. A ratio is of samples/s within a round, once compiled; what the device
refuses is listed as refused. Where mixed precision is advised, five seeds train 50 steps in it and in float32: the
difference of their mean losses over the spread of float32's seeds says whether it learns the same.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import statistics
import tempfile
from importlib import import_module
from pathlib import Path
from time import process_time
from typing import Any

import torch

import nbtools as nb
from benchmarks.paired import Figure, Receipt, in_turns, times
from benchmarks.your_own import in_memory, network
from nbtools import measure
from nbtools.data import Pack, cores, open_feed
from nbtools.errors import NbtoolsError
from nbtools.train import Plan

OWN = "own"  # classes of small images, and a network of few layers
COUNTS = {"captcha": 2000, "hwdb": 400, "sign": 240, "segment": 160, OWN: 16000}
"""Samples of each: with fewer, an epoch would have too few steps for the batches that are fast on small images."""
ROUNDS, SECONDS, ADVISING = 7, 0.5, 20.0
STEPS, LAST, WARMUP, SEEDS = 50, 10, 10, (0, 1, 2, 3, 4)
PRECISIONS, FEEDS = ("off", "bf16", "fp16"), ("resident", "streamed", "workers")


def single_changes(plan: Plan, feed: str, train: int) -> dict[str, dict[str, Any]]:
    """Name → knobs that differ from the plan. feed: the one it has; train: samples there are."""
    found: dict[str, dict[str, Any]] = {f"amp={amp}": {"amp": amp} for amp in PRECISIONS if amp != plan.amp}
    found[f"channels_last={not plan.channels_last}"] = {"channels_last": not plan.channels_last}
    for name in FEEDS:
        if name != feed:
            found[f"feed={name}"] = {"feed": name, **({"workers": cores()} if name == "workers" else {})}
    if 2 * plan.batch_size <= train:
        found["batch × 2"] = {"batch_size": 2 * plan.batch_size}
    if plan.batch_size >= 4:
        found["batch ÷ 2"] = {"batch_size": plan.batch_size // 2}
    return {**found, "compile=True": {"compile": True}}


class Turns:
    """A plan in training; each call trains for a while and returns samples/s, `cpu` keeps those of the CPU's time (of
    this process: not of DataLoader workers)."""

    def __init__(self, task: Any, pack: Pack, plan: Plan, device: torch.device, seconds: float):
        self.stepper, self.seconds = measure.Stepper(task, pack, plan, device), seconds
        self.stepper.advance(steps=3)
        self.steps = 2 + 2 * self.stepper.ahead
        self.cpu: list[float] = []

    def __call__(self) -> float:
        began = process_time()
        turn = self.stepper.advance(self.seconds, self.steps)
        self.cpu.append(turn.samples / (process_time() - began))
        return turn.samples_per_s


def changed(
    name: str, task: Any, pack: Pack, plan: Plan, rounds: int, seconds: float
) -> tuple[list[Figure], dict[str, str]]:
    """(the ratio of every change to the plan, change → why the device refuses it)."""
    device = nb.TrainState(task, pack, plan).device
    turns, refused = {"advised": Turns(task, pack, plan, device, seconds)}, {}
    for change, knobs in single_changes(plan, open_feed(pack, plan, device).name, pack.splits["train"]).items():
        try:
            turns[change] = Turns(task, pack, plan.replace(**knobs), device, seconds)
        except NbtoolsError as error:
            refused[change] = str(error)
    found = in_turns(turns, rounds)
    cpu = {change: turn.cpu for change, turn in turns.items()}
    figures = [Figure.of(f"{name}: advised", "samples/s", found["advised"])]
    for change in list(turns)[1:]:
        figures.append(Figure.of(f"{name}: {change}", "×", times(found, change, "advised")))
        if "workers" not in change:
            figures.append(Figure.of(f"{name}: {change}, CPU time", "×", times(cpu, change, "advised")))
    return figures, refused


def learned(name: str, task: Any, pack: Pack, plan: Plan, steps: int) -> list[Figure]:
    """Losses at the end of a short run in the advised precision and in float32, a value each seed."""
    if plan.amp == "off":
        return []
    device = nb.TrainState(task, pack, plan).device
    epoch = math.ceil(pack.splits["train"] / plan.batch_size)
    short = plan.replace(
        epochs=math.ceil(steps / epoch), warmup_epochs=min(WARMUP, steps) / epoch / 2, eval_every=10**6, early_stop=None
    )
    losses: dict[str, list[float]] = {}
    for amp in (plan.amp, "off"):
        runs = [
            measure.first_losses(task, pack, short.replace(amp=amp, seed=seed), device, steps=steps) for seed in SEEDS
        ]
        losses[amp] = [statistics.mean(run[-LAST:]) for run in runs]
    far = abs(statistics.mean(losses[plan.amp]) - statistics.mean(losses["off"]))
    spread = max(losses["off"]) - min(losses["off"])
    return [
        Figure.of(f"{name}: loss after {steps} steps, {plan.amp}", "", losses[plan.amp]),
        Figure.of(f"{name}: loss after {steps} steps, float32", "", losses["off"]),
        Figure.of(f"{name}: difference of mean losses", "of the seeds' spread", [far / spread]),
    ]


def opened(name: str, folder: Path, count: int) -> tuple[Any, Pack]:
    if name == OWN:
        pack = nb.pack(in_memory(folder, count), into=folder / f"{name}-pack", progress=False)
        return nb.classify(network(16)), pack
    task: Any = import_module(f"nbtools.tasks.{name}")
    return task, task.pack(task.demo(folder / name, count=count), into=folder / f"{name}-pack", progress=False)


def judged(name: str, folder: Path, count: int, options: argparse.Namespace) -> tuple[list[Figure], dict[str, Any]]:
    """(figures, conditions) of a task."""
    task, pack = opened(name, folder, count)
    advice = nb.advise(task, pack, seconds=0.5 if options.quick else ADVISING)
    plan = advice.plan.replace(compile=False, graph=False)
    with measure.untouched(torch.device("cpu")):
        figures, refused = changed(name, task, pack, plan, options.rounds, 0.05 if options.quick else SECONDS)
        figures += learned(name, task, pack, plan, 4 if options.quick else STEPS)
    print("\n".join(map(str, figures)), flush=True)
    default = task.PLAN.to_dict()
    knobs = {k: v for k, v in plan.to_dict().items() if v != default[k]}
    return figures, {"samples": count, "advised": {"amp": plan.amp, **knobs}, "refused": refused, "note": advice.note}


def main() -> None:
    parser = argparse.ArgumentParser(description="the advised plan against every single change of a setting for speed")
    parser.add_argument("--task", choices=list(COUNTS), help="this one only")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="in seconds, to see that it runs; writes no receipt")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counts = COUNTS
    if options.quick:
        counts, options.rounds, options.task = dict.fromkeys(COUNTS, 64), 2, options.task or "captcha"
    best: list[Figure] = []
    with tempfile.TemporaryDirectory() as place:
        for name in [options.task] if options.task else counts:
            figures, conditions = judged(name, Path(place), counts[name], options)
            ratios = [figure for figure in figures if figure.unit == "×" and "CPU time" not in figure.name]
            best.append(max(ratios, key=lambda figure: figure.value))
            headline = dataclasses.replace(best[-1], name=f"knobs_{name}")
            conditions |= {"rounds": options.rounds, "seconds_a_turn": SECONDS, "best": best[-1].name}
            if not options.quick:
                Receipt(headline, tuple(figures), conditions, measure.machine()).write()
    fastest = max(best, key=lambda figure: figure.value)
    print(f"fastest single change: {fastest.name}\n{dataclasses.replace(fastest, name='knobs_gain')}")


if __name__ == "__main__":
    main()
