"""Long work: the same on many items by all cores; tqdm's bars, and messages above them: on stderr, in a notebook in the
output of the cell. `bar` counts; `work` shows the time left of what `phase` names and `tick` draws."""

import ctypes
import gc
import os
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import get_context
from pathlib import Path
from time import monotonic
from typing import Any, TypeVar

import torch
from tqdm import tqdm

from nbtools.errors import NbtoolsError

T = TypeVar("T")
R = TypeVar("R")
LOOK, SHORT = 0.1, 0.3  # seconds of work that say how long the rest takes; in which it is not worth starting processes
LEAST, PATIENCE = 0.25, 30.0  # seconds between updates: quicker ones hang a Colab tab (lightning#2517); in a log file
SLOW = 2.0  # seconds before there is a bar of work that may be short
BYTES = {"unit": "B", "unit_scale": True}  # options of a bar
CLOCK = {"bar_format": "{l_bar}{bar}| {remaining} left{postfix}", "smoothing": 0, "miniters": 0, "leave": False}

WORK: list[Callable[[Any], Any]] = []  # of a worker process
ongoing: list[tuple[tqdm, float]] = []  # (bar, start), the outermost first; those inside are not shown
attending: list[Callable[[], object]] = []


def bar(*arguments: Any, **options: Any) -> tqdm:
    options["mininterval"] = LEAST if in_notebook() or getattr(sys.stderr, "isatty", bool)() else PATIENCE
    if in_notebook():  # which shows stderr in red
        options |= {"file": sys.stdout, "ncols": 90}
    return tqdm(*arguments, **options)


@contextmanager
def work(doing: str, progress: bool = True) -> Iterator[None]:
    """Show the time left while the block lasts; without progress nothing, nor of work inside of it."""
    with bar(desc=doing, total=0, delay=SLOW, disable=not progress or bool(ongoing), **CLOCK) as shown:
        ongoing.append((shown, monotonic()))
        try:
            yield
        finally:
            ongoing.pop()


def phase(name: str, seconds: float) -> None:
    """Begin a phase of the work that is shown, if any is, which should end after these seconds."""
    for shown, start in ongoing:
        shown.total = monotonic() - start + seconds
        shown.set_postfix_str(name, refresh=False)
    tick()


def tick() -> None:
    """Draw the bar of the work that is shown, and call what `meanwhile` was given."""
    for shown, start in ongoing:
        shown.n = spent = monotonic() - start
        shown.total = max(shown.total, 1.1 * spent + 0.5)  # an estimate that is exceeded grows
        shown.update(0)
    for act in attending:
        act()


@contextmanager
def meanwhile(act: Callable[[], object]) -> Iterator[None]:
    attending.append(act)
    try:
        yield
    finally:
        attending.pop()


def say(message: str) -> None:
    """Show a line above the bars: in a notebook's cell, or on a terminal's stderr, since its stdout is for results."""
    tqdm.write(message, file=sys.stdout if in_notebook() else sys.stderr)


def in_notebook() -> bool:
    """Return whether a Jupyter kernel runs this: a terminal's IPython has no kernel."""
    core = sys.modules.get("IPython")
    return getattr(core and core.get_ipython(), "kernel", None) is not None


def cores() -> int:
    """Return the CPU cores that this process may use, which containers make fewer than the machine's."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with suppress(OSError, ValueError):  # no such file, or "max"
        quota, period = map(int, Path("/sys/fs/cgroup/cpu.max").read_text().split())
        count = min(count, max(1, quota // period))
    return count


def side_by_side(work: Callable[[T], R], items: Iterable[T]) -> Generator[R, None, None]:
    """Yield work(item) of each item: on Linux, where that pays, by a forked process a core; results must be picklable,
    and fit in memory. Raises NbtoolsError where the system kills a process."""
    items, spent, done, before = [*items], 0.0, 0, dict(positions())
    while done < len(items) and spent <= LOOK:
        start, result = monotonic(), work(items[done])
        spent, done = spent + monotonic() - start, done + 1
        yield result
    rest, moved = items[done:], any(at != before.get(file, at) for file, at in positions())
    if spent * len(rest) <= SHORT * done or cores() == 1 or sys.platform != "linux" or moved:
        yield from map(work, rest)
        return
    pool = ProcessPoolExecutor(cores(), get_context("fork"), begin, (work,))
    try:
        yield from pool.map(work_on, rest, chunksize=1 + done // 5)  # a fifth of LOOK
    except BrokenProcessPool:
        reason = "a worker process was killed, probably because memory ran out"
        raise NbtoolsError(f"{reason}; free memory, and run it again") from None
    finally:
        pool.shutdown(cancel_futures=True)


def positions() -> Iterator[tuple[str, int]]:
    """Yield how far each file that is open for reading has been read: forked processes would move it together."""
    for path in Path("/proc/self/fdinfo").glob("*"):
        with suppress(OSError):  # it has been closed
            at, flags = (line.split()[1] for line in path.read_text().splitlines()[:2])
            if not int(flags, 8) & os.O_ACCMODE:
                yield path.name, int(at)


def begin(work: Callable[[Any], Any]) -> None:
    """Begin a worker: it dies with its parent, to which it leaves interrupts and garbage, and has one core."""
    WORK[:] = [work]
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)  # else OpenMP may hang in the fork of a process that has used it
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def work_on(item: Any) -> Any:
    return WORK[0](item)
