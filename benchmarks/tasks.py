"""Each task, and two problems of one's own, trained by nbtools, by the guide's settings and by nbtools' peers at best.

    python -m benchmarks.tasks [--task captcha] [--count 4000] [--peer pytorch] [--rounds 3] [--quick]

All train the same network with the same batches (a user's own Dataset each shuffles), augmentation and schedule
(`benchmarks.peers`, `.your_own`); nbtools by the plan that it advises, the peers with that plan's settings and the
levers that are fastest for each of them: precision, memory layout and DataLoader workers by a trial of a few seconds
each, compilation, which is the same call in all, by one of plain PyTorch. `guide` is the task's BASELINE with the same
network. Advice and trials are not counted, nbtools' packing is. Each run is a process of its own, so that none finds
what another left; rounds run all of them in turns, each round from another seed.

samples/s: of whole epochs after the first, evaluation and the best weights' file included. to target: until the first
evaluation on the validation split that reached it, from the call of the program; its imports are not counted. wait: the
share of training in which the loop waited for data. memory: the most that the process had, its workers not counted; on
a GPU of the GPU's.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import re
import statistics
import subprocess
import sys
import tempfile
import warnings
from contextlib import suppress
from dataclasses import asdict, replace
from functools import partial
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import torch

import nbtools as nb
from benchmarks import your_own
from benchmarks.paired import Figure, Receipt, in_turns, times
from benchmarks.peers import OURS, PROGRAMS, WARM, Enough, Job, Levers, Meter, best_metric, lines, package_of, run
from nbtools import measure
from nbtools.data import Pack, cores

ROUNDS, SECONDS = 3, 3.0
COMPILING = 120  # seconds after which a trial of compilation has lost
WORTH = 1.02  # times as fast: a lever that gains less stays as it was


class Case(NamedTuple):
    """Samples, epochs, and the score that the time is taken to; larger is better, so error rates are negative."""

    count: int
    epochs: int
    target: float


CASES = {
    "captcha": Case(4000, 5, 0.95),
    "hwdb": Case(1200, 6, -0.4),
    "sign": Case(960, 5, 0.5),
    "segment": Case(400, 4, 0.23),
    "photos": Case(1536, 10, 0.95),
    "arrays": Case(8192, 10, 0.95),
}
"""Minutes of training teach captchas; the other tasks get as far as their targets, which is not far."""


# -- in a process of its own: one run, or one peer's trials


def task_of(name: str) -> Any:
    """A module of ours; for a problem of one's own, whose programs build theirs, one of the same metrics."""
    return nb.classify(torch.nn.Identity()) if name in your_own.PROBLEMS else import_module(f"nbtools.tasks.{name}")


def open_job(given: dict[str, Any], task: Any, levers: Levers, meter: Meter) -> Job:
    """What a program is given; the pack was made before, and opens at once."""
    source, own = Path(given["source"]), given["task"] in your_own.PROBLEMS
    pack = Pack.open(given["pack"]) if own else task.pack(source, into=given["pack"], progress=False)
    plan = task.PLAN.replace(**given["plan"])
    return (your_own.Own if own else Job)(task, pack, source, plan, levers, meter)


def trial(given: dict[str, Any], levers: Levers) -> float:
    """samples/s of a program in training with these levers."""
    meter, task = Meter(seconds=given["seconds"]), task_of(given["task"])
    with tempfile.TemporaryDirectory() as folder, meter.watching(task), suppress(Enough):
        run(given["program"], open_job(given, task, levers, meter), Path(folder))
    first = min(WARM, len(meter.arrivals) - 2)
    took = meter.arrivals[-1] - meter.arrivals[first] - (meter.evaluated[-1] - meter.evaluated[first])
    return (len(meter.arrivals) - 1 - first) * given["plan"]["batch_size"] / took


def tune(given: dict[str, Any]) -> dict[str, Any]:
    """The levers with which a program is fastest, tried one after another, and what each trial found."""
    best, tried = Levers(**given["levers"]), {}
    tried["before"] = fastest = trial(given, best)
    for lever, value in given["candidates"]:
        candidate = replace(best, **{lever: value})
        try:
            tried[f"{lever}={value}"] = rate = trial(given, candidate)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            tried[f"{lever}={value}"] = f"refused: {str(error).splitlines()[0]}"
            continue
        if rate > WORTH * fastest:
            best, fastest = candidate, rate
    return {"levers": asdict(best), "tried": tried}


def train(given: dict[str, Any]) -> dict[str, float]:
    """What one whole run showed. target: seconds, infinite where it was not reached."""
    meter, task = Meter(), task_of(given["task"])
    for module in (PROGRAMS[given["program"]][1], "torch._dynamo"):  # the latter else by the first optimizer, of some
        import_module(module)
    with tempfile.TemporaryDirectory() as name, meter.watching(task):
        job, folder = open_job(given, task, Levers(**given["levers"]), meter), Path(name)
        start = perf_counter()
        run(given["program"], job, folder)
        ended = perf_counter()
        ours = nb.Run.open(folder / "run", task).history.of("epoch") if given["program"] in OURS else []
    steps, (metric, sign) = job.steps, best_metric(job.bound)
    second, last = steps, steps * (job.epochs - 1)  # the batches that begin those epochs
    seen = len(meter.arrivals) == steps * job.epochs  # a step that a CUDA graph repeats calls nothing in Python
    ends = [*meter.arrivals[steps::steps], ended] if seen else [meter.arrivals[0] + row["wall"] for row in ours]
    took = ends[-2] - ends[0]
    if ours:
        scores = [sign * row[f"val_{metric}"] for row in ours]
        waits = [row["data_wait"] * row["epoch_time"] for row in ours[1:]]
        wait = sum(waits) / sum(row["epoch_time"] for row in ours[1:])
    else:
        scores, ends = meter.scores, meter.ends
        wait = (meter.waited[last] - meter.waited[second]) / (took - meter.evaluated[last] + meter.evaluated[second])
    reached = [end - start for end, score in zip(ends, scores, strict=True) if score >= given["target"]]
    return {
        "rate": (job.epochs - 2) * job.pack.splits["train"] / took,
        "target": min(reached, default=math.inf),
        "start": meter.arrivals[0] - start,
        "wait": 100 * wait,
        "memory": max(peak_memory(job.device), *(row.get("gpu_memory_peak", 0.0) for row in ours), 0.0),
        "best": max(scores),
    }


def peak_memory(used: torch.device) -> float:
    """MiB. Not ru_maxrss, in which a process begins with what its parent had."""
    if used.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    return int(re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[0]) / 2**10


def child(text: str) -> None:
    given = json.loads(text)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # the peers' advice about workers and loggers
    print(json.dumps((tune if "seconds" in given else train)(given)))


# -- in the process that was started


def apart(given: dict[str, Any], timeout: float | None = None) -> dict[str, Any]:
    """What `child` prints at the end of a process of its own."""
    command = [sys.executable, "-m", "benchmarks.tasks", "--child", json.dumps(given)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    if ran.returncode:
        raise SystemExit(f"{given['program']} on {given['task']}: {ran.stderr}")
    return json.loads(ran.stdout.splitlines()[-1])


def levers_of(given: dict[str, Any], peers: list[str], seconds: float) -> dict[str, dict[str, Any]]:
    """peer → its fastest levers, and what was tried. Compilation is tried with plain PyTorch, for all of them."""
    candidates = [("bf16", True), ("channels_last", True), *(("workers", 2**k) for k in range(cores().bit_length()))]
    asked = {**given, "seconds": seconds, "levers": asdict(Levers()), "candidates": candidates}
    found = {peer: apart({**asked, "program": peer}) for peer in peers}
    plain = found["pytorch"]
    try:
        asked |= {"program": "pytorch", "levers": plain["levers"], "candidates": [("compile", True)]}
        compiled = apart(asked, COMPILING)
        rates = compiled["tried"]["before"], compiled["tried"]["compile=True"]
    except subprocess.TimeoutExpired:
        compiled, rates = {"levers": {"compile": False}}, f"took more than {COMPILING} s"
    plain["tried"]["compile=True, without and with it"] = rates
    for peer in peers:
        found[peer]["levers"]["compile"] = compiled["levers"]["compile"]
    return found


def compare(
    name: str, case: Case, peers: list[str], folder: Path, rounds: int, seconds: float, advising: float
) -> tuple[dict[str, dict[str, list[float]]], dict[str, Any]]:
    """({"rate", "target", "start", "wait", "memory", "best" → contestant → a value for each round}, conditions)."""
    own, task = name in your_own.PROBLEMS, task_of(name)
    if own:
        task, source, pack = your_own.prepare(name, folder, case.count)
    else:
        source = task.demo(folder / "raw", case.count)
        pack = task.pack(source, into=folder / "pack", progress=False)
    plan = shorten(nb.advise(task, pack, seconds=advising).plan, case.epochs)
    guide = plan if own else shorten(measure.comparable(task.BASELINE, plan, pack), case.epochs)
    given = {"task": name, "source": str(source), "pack": str(folder / "pack"), "target": case.target}
    levers = levers_of({**given, "plan": plan.to_dict()}, peers, seconds)
    values: dict[str, dict[str, list[float]]] = {}

    def turn(who: str) -> float:
        asked = {"program": who, "levers": levers[who]["levers"] if who in levers else asdict(Levers())}
        used = guide if who == "guide" else plan
        seed = plan.seed + len(values.get("rate", {}).get(who, ()))
        one = apart({**given, **asked, "plan": used.replace(seed=seed).to_dict()})
        for what, value in one.items():
            values.setdefault(what, {}).setdefault(who, []).append(value)
        return one["rate"]

    in_turns({who: partial(turn, who) for who in ("nbtools", *peers, *(() if own else ("guide",)))}, rounds)
    return values, {
        "samples": pack.splits,
        "epochs": case.epochs,
        "target": f"{task.BEST} of {abs(case.target)}",
        "plan": plan.to_dict(),
        "guide": guide.changes_from(plan),
        "levers": levers,
        "lines": {who: lines(who, your_own.Own if own else Job) for who in ("nbtools", *peers)},
        "versions": {"nbtools": nb.__version__, **{who: version(package_of(who)) for who in peers}},
    }


def shorten(plan: Any, epochs: int) -> Any:
    """The plan with its schedule over so many epochs, each with an evaluation of the whole validation split."""
    warmup = plan.warmup_epochs * epochs / plan.epochs
    return plan.replace(epochs=epochs, warmup_epochs=warmup, eval_every=1, eval_samples=None, early_stop=None)


UNITS = {"rate": "samples/s", "target": "s", "start": "s", "wait": "% of training", "memory": "MiB", "best": ""}


def figures(name: str, values: dict[str, dict[str, list[float]]]) -> list[Figure]:
    """All that a task showed; last, its headline: nbtools' samples/s over the fastest peer's, by their medians."""
    rates = values["rate"]
    fastest = max((who for who in rates if who not in OURS), key=lambda who: statistics.median(rates[who]))
    made = [
        Figure.of(f"{who}: {what}", UNITS[what], each)
        for what, by_name in values.items()
        for who, each in by_name.items()
        if all(map(math.isfinite, each))
    ]
    made += [Figure.of(f"nbtools over {who}", "×", times(rates, "nbtools", who)) for who in rates if who != "nbtools"]
    reached = {who: each for who, each in values["target"].items() if all(map(math.isfinite, each))}
    later = [who for who in reached if who != "nbtools"] if "nbtools" in reached else []
    made += [Figure.of(f"time to target, {who} over nbtools", "×", times(reached, who, "nbtools")) for who in later]
    return [*made, Figure.of(f"tasks_{name}", "×", times(rates, "nbtools", fastest))]


def main() -> None:
    parser = argparse.ArgumentParser(description="each task in nbtools, by its guide's settings, and in its peers")
    parser.add_argument("--task", choices=list(CASES), help="this one only")
    parser.add_argument("--count", type=int, help="samples of its demo")
    parser.add_argument("--peer", choices=[*PROGRAMS], help="beside this one only")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="in a minute, to see that it runs; writes no receipt")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        return child(options.child)
    cases, seconds, advising = CASES, SECONDS, 20.0
    peers = [options.peer] if options.peer else [p for p in PROGRAMS if p not in OURS and find_spec(package_of(p))]
    if options.quick:
        cases, options.rounds, seconds, advising = {"captcha": Case(64, 3, 0.0)}, 1, 0.05, 0.5
        peers = ["pytorch"]
    headlines: list[Figure] = []
    for name in [options.task] if options.task else cases:
        with tempfile.TemporaryDirectory() as folder:
            case = cases[name]._replace(count=options.count or cases[name].count)
            values, conditions = compare(name, case, peers, Path(folder), options.rounds, seconds, advising)
        *others, headline = figures(name, values)
        headlines.append(headline)
        result = Receipt(headline, tuple(others), conditions)
        if not options.quick:
            result.write()
        print(result, flush=True)
    print(replace(min(headlines, key=lambda figure: figure.value), name="tasks_ratio"))


if __name__ == "__main__":
    main()
