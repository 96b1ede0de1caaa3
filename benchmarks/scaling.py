"""One process and two on this CPU, on each task's network for CPUs: samples/s, bytes sent, and what advice expects.

    python -m benchmarks.scaling [--task captcha …] [--rounds 9] [--quick]

Three contestants train the plan of `nb.advise` in nbtools' own loop, in turns and without evaluations: one process with
one thread, one with two, and two joined by gloo with a thread each. In every round advice expects anew what two
processes give, by its model of a step (`nb.advise(task, pack, processes=2)`): the headline is the samples/s that it
expects over those found, of the task in which they are farthest apart. Run nothing else: processes wait for each other,
and so for whatever takes one of them its core.

Bytes are those that the kernel counted on the TCP connections of a process (TCP_INFO), a step: 2(N−1)/N times the bytes
of the gradients is the least that an all-reduce can send. A word is the smallest all-reduce; a step takes three.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import socket
import struct
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

import nbtools as nb
from benchmarks.paired import Figure, Receipt, in_turns, times
from nbtools import measure
from nbtools.data import Pack, cores
from nbtools.measure.several import WORDS, least_bytes
from nbtools.train import Plan, TrainState, join, obey

COUNTS = {"captcha": 2000, "hwdb": 400, "sign": 240, "segment": 160}
"""Samples of each task's demo."""
ROUNDS, SECONDS = 9, 2.0
ONE, BOTH, TWO = "1 process, 1 thread", "1 process, 2 threads", "2 processes, 1 thread each"
THREADS = {ONE: (1,), BOTH: (2,), TWO: (1, 1)}  # of each process
ACKED = 120  # bytes into TCP_INFO: tcpi_bytes_acked, 8 bytes (linux/tcp.h)


@dataclass(frozen=True)
class Turn:
    """What the first process of a contestant did."""

    samples: int
    steps: int
    seconds: float
    sent: int

    @property
    def rate(self) -> float:
        return self.samples / self.seconds


def sent() -> int:
    """Bytes that this process has sent over TCP, as far as their arrival is known."""
    total = 0
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            if not os.readlink(path).startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(path.name))) as one:
                if one.family in (socket.AF_INET, socket.AF_INET6):
                    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, ACKED + 8)
                    total += struct.unpack_from("Q", info, ACKED)[0]
    return total


def trained(name: str, folder: Path, plan: Mapping[str, Any]) -> Iterator[int]:
    """nbtools' own loop on the process's ranks: the samples of each step. Other ranks than the first stay in it."""
    task, pack, ranks = import_module(f"nbtools.tasks.{name}"), Pack.open(folder), join()
    state = TrainState(task, pack, task.Plan.from_dict(plan), ranks=ranks)
    if ranks is not None and not ranks.first:
        obey(task, state, pack)
        return
    before = 0
    for record in nb.train(task, state, pack):
        if record.kind == "step":
            yield record.samples - before
            before = record.samples


def process(name: str, folder: Path, plan: Mapping[str, Any], own: Mapping[str, str], threads: int, end: Connection):
    """Train for as many seconds as the pipe says, again and again."""
    os.environ.update(own)
    torch.set_num_threads(threads)
    steps = trained(name, folder, plan)
    next(steps, None)
    while True:
        seconds, done, samples, before, start = end.recv(), 0, 0, sent(), perf_counter()
        while done < 2 or perf_counter() - start < seconds:
            samples, done = samples + next(steps), done + 1
        end.send(Turn(samples, done, perf_counter() - start, sent() - before))


class Contestant:
    """Processes that train whenever they are called, each with so many threads."""

    def __init__(self, name: str, pack: Pack, plan: Plan, threads: tuple[int, ...]):
        context, self.turns = multiprocessing.get_context("forkserver"), list[Turn]()
        context.set_forkserver_preload(["benchmarks.scaling", "torch._dynamo"])
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        self.pipe, end = context.Pipe()
        self.processes = []
        for rank, count in enumerate(threads):
            own = {**meet, "WORLD_SIZE": str(len(threads)), "RANK": str(rank), "LOCAL_RANK": str(rank)}
            of = name, pack.folder, plan.to_dict(), own, count, end
            self.processes.append(context.Process(target=process, args=of, daemon=True))
            self.processes[-1].start()

    def __call__(self, seconds: float) -> float:
        self.pipe.send(seconds)
        self.turns.append(self.pipe.recv())
        return self.turns[-1].rate

    def end(self) -> None:
        for each in self.processes:
            each.kill()
            each.join()


class Advised:
    """What advice expects of two processes, each time measured anew."""

    def __init__(self, name: str, pack: Pack, plan: Plan):
        self.of, self.found = (import_module(f"nbtools.tasks.{name}"), pack, [plan], 2), list[measure.Scaling]()

    def __call__(self, seconds: float) -> float:
        self.found.append(measure.find_scaling(*self.of, 2 * seconds))
        return self.found[-1].rows[1].samples_per_s or 0.0


def compared(name: str, folder: Path, count: int, rounds: int, seconds: float) -> tuple[list[Figure], dict[str, Any]]:
    """(figures, conditions) of a task. Its last figure is what advice expected over what was found."""
    task: Any = import_module(f"nbtools.tasks.{name}")
    pack = task.pack(task.demo(folder / name, count=count), into=folder / f"{name}-pack", progress=False)
    plan = nb.advise(task, pack, measure=False).plan.replace(epochs=10**6, eval_every=10**6, early_stop=None)
    runs, advised = (
        {who: Contestant(name, pack, plan, threads) for who, threads in THREADS.items()},
        Advised(name, pack, plan),
    )
    try:
        for run in runs.values():
            run(seconds / 3)  # carries the start
            run.turns.clear()
        turns = {who: partial(run, seconds) for who, run in runs.items()}
        found = in_turns({**turns, "advice": partial(advised, seconds)}, rounds)
    finally:
        for run in runs.values():
            run.end()
    size = advised.found[0].gradient_bytes
    sent = [turn.sent / turn.steps for turn in runs[TWO].turns]
    words = [scaling.links[0].latency_s for scaling in advised.found]
    steps = [turn.seconds / turn.steps for turn in runs[TWO].turns]
    figures = [
        *(Figure.of(who, "samples/s", found[who]) for who in THREADS),
        Figure.of("2 processes over one with a thread", "×", times(found, TWO, ONE)),
        Figure.of("efficiency", "%", [50 * ratio for ratio in times(found, TWO, ONE)]),
        Figure.of("2 processes over one with two threads", "×", times(found, TWO, BOTH)),
        Figure.of("a step of 2 processes", "ms", [1e3 * step for step in steps]),
        Figure.of("sent by a process", "bytes/step", sent),
        Figure.of("sent over the least", "×", [each / least_bytes(size, 2) for each in sent]),
        Figure.of("a word", "µs", [1e6 * word for word in words]),
        Figure.of("words", "% of a step", [100 * WORDS * word / step for word, step in zip(words, steps, strict=True)]),
        Figure.of("all-reduce", "GB/s", [scaling.links[0].bytes_per_s / 1e9 for scaling in advised.found]),
        Figure.of("expected", "samples/s", found["advice"]),
        Figure.of("expected over found", "×", times(found, "advice", TWO)),
    ]
    conditions = {"samples": count, "batch": plan.batch_size, "network": plan.to_dict()["network"], "gradients": size}
    return [replace(figure, name=f"{name}: {figure.name}") for figure in figures], conditions


def main() -> None:
    parser = argparse.ArgumentParser(description="one process and two on this CPU, and what advice expects of two")
    parser.add_argument("--task", nargs="+", choices=COUNTS, default=list(COUNTS))
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--quick", action="store_true", help="one task for seconds, to see that it runs; no receipt")
    asked = parser.parse_args()
    if cores() < 2:
        raise SystemExit("two processes need a core each, but this process may use one only")
    torch.set_num_threads(2)
    counts, rounds, seconds = (COUNTS, asked.rounds, SECONDS) if not asked.quick else ({"sign": 64}, 1, 0.2)
    figures: list[Figure] = []
    ratios: list[Figure] = []
    conditions: dict[str, Any] = {"seconds_a_turn": seconds, "promise": "expected within 15 % of what was found"}
    with tempfile.TemporaryDirectory() as folder:
        for name in counts if asked.quick else asked.task:
            found, conditions[name] = compared(name, Path(folder), counts[name], rounds, seconds)
            print("\n".join(map(str, found)), flush=True)
            figures, ratios = [*figures, *found], [*ratios, found[-1]]
    worst = max(ratios, key=lambda figure: abs(math.log(figure.value)))
    result = Receipt(replace(worst, name="scaling_forecast"), tuple(figures), {**conditions, "worst": worst.name})
    if not asked.quick:
        result.write()
    print(result.headline)


if __name__ == "__main__":
    main()
