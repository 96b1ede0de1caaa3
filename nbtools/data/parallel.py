"""The same work on many items, on all cores, with the results in order: by threads, or by processes where the results
are small and Python's own work between them is most of the time."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from time import monotonic
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from nbtools.data.feed import ignore_signals
from nbtools.data.progress import say
from nbtools.errors import HeldInterrupt, NbtoolsError

T = TypeVar("T")
R = TypeVar("R")
CHUNK = 128  # items that are worked on ahead
SMALL = 1 << 17  # bytes of a result: below, most of the time goes to Python, one thread at a time
SHORT = 1.0  # seconds in which all is done: not worth starting processes
SENT = 32  # small results that travel between processes at once
SHARES = 4  # of a chunk for each core: a thread takes one at a time, since a task for each item costs 80 CPU-µs
TRIES = 9  # of work that fails because of other threads


def cores() -> int:
    """CPU cores that this process may use, which containers make fewer than the machine's."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def side_by_side(work: Callable[[T], R], items: Iterable[T]) -> Generator[R, None, None]:
    """work(item) of each item, in order, on all cores. The first ones, by threads, tell whether processes are faster
    for the others: where results are small, on a system that forks."""
    items, since, size = [*items], monotonic(), 0
    for result in threaded(work, items[:CHUNK], CHUNK):
        size += len(pickle.dumps(result, pickle.HIGHEST_PROTOCOL))
        yield result
    rest = items[CHUNK:]
    short = (monotonic() - since) / CHUNK * len(rest) < SHORT
    if sys.platform != "linux" or not workers_pay() or size >= SMALL * CHUNK or short:
        yield from threaded(work, rest, CHUNK)
        return
    yield from by_workers(work, rest, SENT)


# -- threads


def threaded(work: Callable[[T], R], items: Iterable[T], chunk: int = 64) -> Generator[R, None, None]:
    """work(item) of each item, in order, by one thread per core: decoders release the interpreter's lock. While the
    results of one chunk are used, the next one is worked on; no third one waits in memory."""
    source, share = iter(items), max(1, chunk // (SHARES * cores()))
    with ThreadPoolExecutor(cores()) as pool:

        def begun() -> Iterable[list[R]]:
            part = [*islice(source, chunk)]
            shares = [part[k : k + share] for k in range(0, len(part), share)]
            return pool.map(lambda some: [*map(steady(work), some)], shares) if part else ()

        try:
            ahead = begun()
            while ahead:
                now, ahead = ahead, begun()
                for results in now:
                    yield from results
        finally:
            pool.shutdown(cancel_futures=True)


def steady(work: Callable[[T], R]) -> Callable[[T], R]:
    """work for a pool of threads, tried again when it raises SystemError: before Python 3.13 `ast.parse`, with which
    NumPy reads the header of an array, counts its recursion for all threads together, and raises that if they switch
    within it (python/cpython#106905)."""

    def tried(item: T) -> R:
        for _ in range(TRIES):
            with contextlib.suppress(SystemError):
                return work(item)
        return work(item)

    return tried


# -- processes


class Failure(NamedTuple):
    """An error of a worker process that names what to mend: a DataLoader would raise another one, with its text."""

    error: Exception


@dataclass(eq=False)
class Work(Dataset):
    """What becomes of items, for a DataLoader."""

    work: Callable[[Any], Any]

    def __getitem__(self, item: Any) -> Any:
        try:
            return self.work(item)
        except (OSError, NbtoolsError) as error:
            return Failure(error)


def workers_pay() -> bool:
    """Whether worker processes can be started, and do anything at once."""
    return cores() > 1 and not multiprocessing.current_process().daemon


def in_processes(work: Callable[[T], R], items: Sequence[T], processes: int | None = None) -> Generator[R, None, None]:
    """work(item) of each item, in order, by so many worker processes. 0: by threads of this one; None: by a process per
    core where there are many items, on a system that forks."""
    if processes is None:
        processes = cores() if sys.platform == "linux" and workers_pay() and len(items) > CHUNK else 0
    yield from by_workers(work, items, SENT, workers=processes) if processes else threaded(work, items)


def by_workers(
    work: Callable[[T], R], items: Sequence[T], size: int, method: str = "fork", workers: int | None = None
) -> Generator[R, None, None]:
    """work(item) of each item, in order, by so many worker processes, None: one per core; `size` of them at a time.
    Where the system kills one, this process does the rest. Items and results must be picklable, and with a method but
    fork the work too."""
    batches, done = [list(items[start : start + size]) for start in range(0, len(items), size)], 0
    loader = DataLoader(
        Work(work),
        batch_sampler=batches,
        num_workers=workers or cores(),
        collate_fn=list,
        worker_init_fn=begin_worker,
        generator=torch.Generator(),  # its own: the user's random numbers stay as they are
        multiprocessing_context=method,
    )
    crew = Loader(loader, batches)
    stream: Any = ()
    try:
        try:
            stream = crew.begin()
        except OSError as error:
            say(f"no worker processes ({error.strerror}); this process reads all")
        else:
            threading.Thread(target=watch, args=(crew, stream), daemon=True).start()
        for results in stream:
            for result in results:
                if isinstance(result, Failure):
                    raise result.error
                yield result
            done += len(results)
    except RuntimeError:
        killed = crew.killed()
        if "SIGKILL" not in killed:  # an item that crashes a decoder would crash this process too
            raise
        say(f"{killed}; this process reads the rest")
    finally:
        crew.end()  # a traceback keeps the loader, and it its workers
    yield from map(work, items[done:])


@dataclass
class Loader:
    """A DataLoader, its list of batches, to be filled, and its worker processes once it has begun."""

    loader: DataLoader
    batches: list[list[Any]]
    processes: list[BaseProcess] = field(default_factory=list)
    waiting: threading.RLock = field(default_factory=threading.RLock)  # else a second one finds a dead process alive

    def begin(self) -> Iterator[Any]:
        """Its stream. torch has SIGCHLD raise wherever this process is, as in the middle of a step; without that a
        killed worker is found where a batch is waited for, within 5 s. An interrupt is held while processes start: it
        could leave one that nobody ends, or a queue's lock held, on which closing the stream would wait for ever. With
        workers that are there it acts at once, as their last batches may be on a disk that does not respond."""
        with contextlib.nullcontext() if self.processes else HeldInterrupt():
            handler, others = signal.getsignal(signal.SIGCHLD), multiprocessing.active_children()
            try:
                return iter(self.loader)
            finally:
                self.processes += [process for process in multiprocessing.active_children() if process not in others]
                if threading.current_thread() is threading.main_thread():
                    theirs = getattr(handler, "__module__", "").startswith("torch.")  # of a loader of the user's
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL if theirs or handler is None else handler)

    def killed(self) -> str:
        """Which process was killed, in words, after ending the others; "" if all live. Its connection may end a moment
        before it does."""
        with self.waiting:
            ended = wait([process.sentinel for process in self.processes], 1.0 if self.processes else 0.0)
            for process in self.processes:
                if process.sentinel in ended:  # its files are closed, which comes before its end
                    process.join(1.0)
            gone = [process for process in self.processes if not process.is_alive()]
            if not gone:
                return ""
            self.end()  # one may wait for a lock that the killed one held
        code = gone[0].exitcode or 0
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        memory = ", as by a system whose memory runs out" if -code == signal.SIGKILL else ""
        return f"worker process {gone[0].pid} {how}{memory}"

    def end(self, first: Collection[Any] = ()) -> None:
        """Kill them all. first: sentinels of those that had already ended; `killed` reports one of them."""
        with self.waiting:
            self.processes.sort(key=lambda process: process.sentinel not in first)
            for process in self.processes:
                process.kill()
            for process in self.processes:
                process.join(5.0)  # a disk that does not answer holds it longer


def begin_worker(worker: int) -> None:
    """End with the parent, and at once: a full queue would hold a worker for ever."""
    ignore_signals(worker)

    def follow() -> None:
        parent = multiprocessing.parent_process()
        while parent is not None and os.getppid() == parent.pid:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


def watch(workers: Loader, stream: Any) -> None:
    """End all once one ends. Killed in the middle of sending, it has the lock that the others need to send; and whoever
    receives waits for the rest of it until nobody is left who could send it, this process included."""
    workers.end(first=wait([process.sentinel for process in workers.processes]))
    stream._worker_result_queue._writer.close()
