"""The same work on many items, on all cores, with the results in order."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from time import monotonic
from typing import Any, TypeVar

import torch

from nbtools.errors import NbtoolsError

T = TypeVar("T")
R = TypeVar("R")
LOOK = 0.1  # seconds of work that say whether the rest is worth starting processes
SHORT = 1.0  # seconds in which all is done: not worth it
CHEAP = 2e-4  # seconds: an item that costs less is done faster here than it travels between processes
WORK: list[Callable[[Any], Any]] = []  # of a worker process


def cores() -> int:
    """Return the CPU cores that this process may use, which containers make fewer than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def side_by_side(work: Callable[[T], R], items: Iterable[T], size: int = 16) -> Generator[R, None, None]:
    """Yield work(item) of each item: on Linux, where that pays, by a forked process a core, `size` items at a time;
    results must be picklable. Raises NbtoolsError where the system kills a process."""
    items, spent, done = [*items], 0.0, 0
    while done < len(items) and spent <= LOOK:
        start = monotonic()
        result = work(items[done])
        spent, done = spent + monotonic() - start, done + 1
        yield result
    rest, cost = items[done:], spent / max(done, 1)
    if not (cost > CHEAP and cost * len(rest) > SHORT and cores() > 1 and sys.platform == "linux"):
        yield from map(work, rest)
        return
    pool = ProcessPoolExecutor(cores(), get_context("fork"), begin, (work,))
    try:
        yield from in_order(pool, map_work, rest, size)
    except BrokenProcessPool:
        reason = "a worker process was killed, as by a system whose memory runs out"
        raise NbtoolsError(f"{reason}; free some, and run it again: packing continues where it was") from None


def threaded(work: Callable[[T], R], items: Iterable[T], size: int = 16) -> Generator[R, None, None]:
    """Yield work(item) of each item by a thread a core, `size` at a time: decoders release the interpreter's lock."""
    yield from in_order(ThreadPoolExecutor(cores()), lambda part: [*map(work, part)], [*items], size)


def begin(work: Callable[[Any], Any]) -> None:
    """Begin a worker: it dies with its parent, to which it leaves interrupts, and has one core."""
    WORK[:] = [work]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)  # else OpenMP may hang in the fork of a process that has used it
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def map_work(part: Sequence[Any]) -> list[Any]:
    return [*map(WORK[0], part)]


def in_order(
    pool: Executor, each: Callable[[Sequence[T]], list[R]], items: Sequence[T], size: int
) -> Generator[R, None, None]:
    """Yield the results of a pool; no more than two parts a core wait in memory."""
    begun: deque[Any] = deque()
    try:
        for start in range(0, len(items), size):
            begun.append(pool.submit(each, items[start : start + size]))
            if len(begun) > 2 * cores():
                yield from begun.popleft().result()
        while begun:
            yield from begun.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
