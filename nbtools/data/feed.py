"""Batches of a pack on the device, in an order that is a pure function of (seed, epoch, position).

A raw batch is a dict of tensors: a fixed column (B, *shape); a ragged one zero-padded (B, L, *shape) with
`<column>_length` (B,); and `id` (B,) int64, the sample ids. B samples, L the longest of the batch.
"""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from multiprocessing import active_children
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from nbtools import show
from nbtools.data.pack import Column, Pack, Sample
from nbtools.data.progress import say
from nbtools.errors import HeldInterrupt, TrainError

Raw = dict[str, Tensor]
Segments = Sequence[Sequence[int]]  # [(batch size, batches done with it)] since the start of the epoch

RESIDENT_SHARE = 0.3  # of free GPU memory that a pack may take to live there
MEGABATCH = 32  # batches sorted by length together: about 2.5 % padding in simulated text lines, order still mixed


class Plan(Protocol):
    """What a feed needs of a plan: any object with these fields."""

    @property
    def feed(self) -> str: ...
    @property
    def seed(self) -> int: ...
    @property
    def batch_size(self) -> int: ...
    @property
    def workers(self) -> int: ...
    @property
    def prefetch(self) -> int: ...


class Feed(Protocol):
    """Called with the coming batches of ids, it yields a raw batch for each."""

    name: str

    def __call__(self, batches: Sequence[np.ndarray]) -> Iterator[Raw]: ...


def batches_left(
    ids: np.ndarray, lengths: np.ndarray | None, seed: int, epoch: int, segments: Segments
) -> list[np.ndarray]:
    """What remains of an epoch: batches of ids in order, after the given position.

    A change of batch size is a new segment: it regroups what the earlier ones left, so every id still comes exactly
    once. lengths (same order as ids) groups samples of like length; None if all are equal.
    """
    left = np.random.default_rng([seed, epoch]).permutation(len(ids))
    batches: list[np.ndarray] = []
    for k, (batch_size, done) in enumerate(segments):
        rng = np.random.default_rng([seed, epoch, k + 1])  # NumPy takes [seed, epoch, 0] for [seed, epoch]
        batches = grouped(left, lengths, batch_size, rng)
        taken = np.concatenate(batches[:done]) if done else left[:0]
        left = left[~np.isin(left, taken)]
        batches = batches[done:]
    return [ids[batch] for batch in batches]


def grouped(
    order: np.ndarray, lengths: np.ndarray | None, batch_size: int, rng: np.random.Generator
) -> list[np.ndarray]:
    """Positions cut into batches: by length within megabatches, whose batches are then shuffled."""
    if lengths is None:
        return split(order, batch_size)
    batches = []
    for mega in split(order, batch_size * MEGABATCH):
        batches += split(mega[np.argsort(lengths[mega], kind="stable")], batch_size)
    return [batches[i] for i in rng.permutation(len(batches))]


def split(order: np.ndarray, size: int) -> list[np.ndarray]:
    """Consecutive batches; a last one of a single sample, which BatchNorm refuses, gets another from the one before."""
    cuts = list(range(size, len(order), size))
    if size > 1 and cuts and len(order) - cuts[-1] == 1:
        cuts[-1:] = [cuts[-1] - 1] if size > 2 else []
    return [order[start:end] for start, end in pairwise([0, *cuts, len(order)])] if len(order) else []


def batches_in(count: int, batch_size: int) -> int:
    """How many batches an epoch over so many samples has, grouped by length or not: as `split` makes them."""
    return -(-count // batch_size) - (batch_size == 2 and count > 1 and count % 2)


def in_order(ids: np.ndarray, lengths: np.ndarray | None, batch_size: int) -> list[np.ndarray]:
    """Every id once, for evaluation: ascending, or by length so that little is padded."""
    return split(ids if lengths is None else ids[np.argsort(lengths, kind="stable")], batch_size)


def lengths_of(pack: Pack, ids: np.ndarray) -> np.ndarray | None:
    """The lengths that batches are grouped by; None where every sample has the same."""
    return pack.lengths(pack.card.bucket_by, ids) if pack.card.bucket_by else None


def choose(pack: Pack, plan: Plan, device: torch.device) -> tuple[str, str]:
    """(feed, reason) for `feed="auto"`, the plan's own otherwise."""
    if plan.feed != "auto":
        return plan.feed, "set in the plan"
    if device.type != "cuda":
        return "resident", "batches are read straight from the memory-mapped pack"
    room = RESIDENT_SHARE * torch.cuda.mem_get_info(device)[0]
    size = f"the pack is {show.size(pack.bytes)}, {show.percent(RESIDENT_SHARE)} of free GPU memory {show.size(room)}"
    return (
        ("resident", f"it stays on the GPU, {size}")
        if pack.bytes <= room
        else ("streamed", f"too large for the GPU, {size}")
    )


def auto_feed(device: torch.device) -> str:
    """What `feed="auto"` does on a device, whatever the pack."""
    if device.type != "cuda":
        return "a pack is memory-mapped and read in place"
    room = show.size(RESIDENT_SHARE * torch.cuda.mem_get_info(device)[0])
    share = show.percent(RESIDENT_SHARE)
    return f"a pack of up to {room} ({share} of free GPU memory) stays on the GPU, a larger one is streamed"


def open_feed(pack: Pack, plan: Plan, device: torch.device, tell: Callable[[str], object] = say) -> Feed:
    """The feed that the plan asks for. tell: takes messages about it. Raises TrainError if it cannot work here."""
    name, _ = choose(pack, plan, device)
    if name == "resident":
        return Resident(pack, device)
    if name == "streamed":
        return Streamed(pack, device, plan.prefetch)
    return Workers(pack, device, plan, tell)


class Resident:
    """All that batches hold as tensors on the device; a batch is one gather per column."""

    name = "resident"

    def __init__(self, pack: Pack, device: torch.device):
        self.pack, self.device = pack, device
        self.values = {name: torch.from_numpy(pack.arrays[name]).to(device) for name in pack.read}
        self.offsets = {name: torch.from_numpy(array).to(device) for name, array in pack.ragged.items()}
        self.fixed = [name for name in self.values if name not in self.offsets]

    def __call__(self, batches: Sequence[np.ndarray]) -> Iterator[Raw]:
        if not batches:
            return
        sizes = [len(batch) for batch in batches]
        order = np.concatenate(batches)
        starts = np.cumsum([0, *sizes[:-1]])  # lengths by the host, so that no batch waits for the device
        longest = {n: np.maximum.reduceat(self.pack.lengths(n, order), starts).tolist() for n in self.offsets}
        for k, ids in enumerate(torch.from_numpy(order).to(self.device).split(sizes)):
            raw = {name: self.values[name].index_select(0, ids) for name in self.fixed}
            for name in self.offsets:
                raw[name], raw[f"{name}_length"] = self.ragged(name, ids, longest[name][k])
            raw["id"] = ids
            yield raw

    def ragged(self, name: str, ids: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        offsets, values = self.offsets[name], self.values[name]
        start = offsets.index_select(0, ids)
        length = offsets.index_select(0, ids + 1) - start
        step = torch.arange(longest, device=self.device)
        padding = step >= length[:, None]  # (B, L)
        rows = (start[:, None] + step).masked_fill_(padding, 0)
        found = values.index_select(0, rows.view(-1))
        if found.device.type == "cpu":  # masked_fill visits every byte, 5 µs a text line; on CUDA nonzero would sync
            found.index_fill_(0, padding.view(-1).nonzero().view(-1), 0)
        else:
            found.masked_fill_(padding.view(-1, *[1] * (found.dim() - 1)), 0)
        return found.view(len(ids), longest, *values.shape[1:]), length


class Streamed:
    """One thread per call gathers batches from the memory map ahead of training; on CUDA through a ring of pinned
    buffers and a copy stream, so that neither the copy nor the gather waits in the step.

    The ring belongs to the call: an evaluation within an epoch would otherwise refill buffers that the epoch's copies
    still read. A new ring costs little, since torch keeps the pinned memory that the last one freed. The stream belongs
    to the feed: torch's allocator keeps freed GPU memory by stream, and each new stream would start without any.
    """

    name = "streamed"

    def __init__(self, pack: Pack, device: torch.device, prefetch: int):
        self.pack, self.device, self.prefetch = pack, device, prefetch
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batches: Sequence[np.ndarray]) -> Generator[Raw, None, None]:
        """Two queues in C code, since an interrupt within `queue.Queue` or an Event leaves their locks held."""
        ready: queue.SimpleQueue[Any] = queue.SimpleQueue()
        tickets: queue.SimpleQueue[None] = queue.SimpleQueue()  # a batch takes one
        left: list[bool] = []  # not empty once the caller has
        args = (batches, ready, tickets, left)
        thread = threading.Thread(target=self.produce, args=args, name="nbtools-feed", daemon=True)
        for _ in range(self.prefetch + 1):
            tickets.put(None)
        try:
            with HeldInterrupt():
                thread.start()
            for _ in batches:
                raw, copied = ready.get()
                tickets.put(None)
                if isinstance(raw, BaseException):
                    raise raw
                if copied is not None:
                    stream = torch.cuda.current_stream(self.device)
                    stream.wait_event(copied)
                    for tensor in raw.values():
                        tensor.record_stream(stream)
                yield raw
        finally:
            left.append(True)
            tickets.put(None)
            if thread.ident not in (None, threading.get_ident()):  # not started, or Python frees the stream in it
                while ready.get() is not None:  # and here, where the thread may wait for a disk that does not answer
                    continue
                with HeldInterrupt():
                    thread.join()

    def produce(
        self, batches: Sequence[np.ndarray], ready: queue.SimpleQueue, tickets: queue.SimpleQueue, left: list[bool]
    ) -> None:
        """Put (batch, when it is copied) for each of them, and None at the end."""
        try:
            ring = [Slot(self.device, self.stream) for _ in range(self.prefetch + 1)] if self.stream else []
            for k, ids in enumerate(batches):
                tickets.get()
                if left:
                    return
                raw = gather(self.pack, ids)
                ready.put(ring[k % len(ring)].send(raw) if ring else (on(self.device, raw), None))
        except BaseException as error:  # handed to the training thread, which raises it
            ready.put((error, None))
        finally:
            ready.put(None)


class Slot:
    """Pinned buffers for one batch on its way to the GPU; reused when the last copy is done."""

    def __init__(self, device: torch.device, stream: torch.cuda.Stream):
        self.device, self.stream = device, stream
        self.buffers: dict[str, Tensor] = {}
        self.copied = torch.cuda.Event()

    def send(self, raw: Raw) -> tuple[Raw, torch.cuda.Event]:
        self.copied.synchronize()
        sent = {}
        with torch.cuda.stream(self.stream):
            for name, tensor in raw.items():
                if name not in self.buffers or self.buffers[name].numel() < tensor.numel():
                    self.buffers[name] = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)
                pinned = self.buffers[name][: tensor.numel()].view(tensor.shape).copy_(tensor)
                sent[name] = pinned.to(self.device, non_blocking=True)
            self.copied = torch.cuda.Event()
            self.copied.record(self.stream)
        return sent, self.copied


def gather(pack: Pack, ids: np.ndarray) -> Raw:
    """A raw batch in host memory, copied from the memory map."""
    fixed = [name for name in pack.read if name not in pack.offsets]
    raw = {name: torch.from_numpy(np.take(pack.arrays[name], ids, axis=0)) for name in fixed}
    if ragged := pack.ragged:
        samples = [{n: pack.arrays[n][slice(*ends[i : i + 2])] for n, ends in ragged.items()} for i in ids]
        raw |= collate(samples, pack.columns)
    raw["id"] = torch.from_numpy(np.asarray(ids, np.int64))
    return raw


def collate(
    samples: Sequence[Sample], columns: Mapping[str, Column], unread: Collection[str] = ()
) -> dict[str, Tensor]:
    """Samples → raw batch: fixed (B, *shape); ragged zero-padded (B, longest, *shape) and `<column>_length` (B,);
    without the unread columns."""
    batch = {}
    for name in (name for name in samples[0] if name not in unread):
        arrays = [sample[name] for sample in samples]
        if name in columns and columns[name].kind == "ragged":
            lengths = np.array([len(a) for a in arrays])
            padded = np.zeros((len(arrays), lengths.max(initial=0), *arrays[0].shape[1:]), arrays[0].dtype)
            for row, array in zip(padded, arrays, strict=True):
                row[: len(array)] = array
            batch[name], batch[f"{name}_length"] = torch.from_numpy(padded), torch.from_numpy(lengths)
        else:
            batch[name] = torch.from_numpy(np.stack(arrays))
    return batch


def on(device: torch.device, raw: Raw) -> Raw:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in raw.items()}


class Workers:
    """A DataLoader over the source files, which decodes every sample at every access: as the guides do, kept as the
    baseline and for data that cannot be packed; same batches, same order. Its processes live from call to call; a call
    within another, such as an evaluation between two steps, has its own loader. Where one is killed, as the system does
    when memory runs out, others continue with the next batch."""

    name = "workers"

    def __init__(self, pack: Pack, device: torch.device, plan: Plan, tell: Callable[[str], object] = say):
        if pack.raw is None:
            raise TrainError(
                'Plan.feed = "workers" reads the source files, but they are not here: the pack was opened without '
                'them; stage the source again, or choose feed="auto"'
            )
        if plan.workers:
            require_shared_memory(pack, plan)
        self.raw, self.pack, self.device, self.plan, self.tell = pack.raw, pack, device, plan, tell
        self.idle: list[Loader] = []

    def open(self, first: np.ndarray) -> Loader:
        """A loader whose workers start with the first batch. Where the Dataset draws random numbers, they depend on
        that batch and the plan's seed, so that a resumed run does not repeat those with which the run began."""
        sampler: list[list[int]] = []
        generator = torch.Generator()  # its own: else every epoch draws from the stream that dropout uses
        if self.pack.options.get("random"):
            generator.manual_seed(int(np.random.default_rng([self.plan.seed, *first]).integers(2**63)))
        many, cuda = self.plan.workers > 0, self.device.type == "cuda"
        loader = DataLoader(
            self.raw,
            batch_sampler=sampler,
            num_workers=self.plan.workers,
            collate_fn=partial(collate, columns=self.pack.columns, unread=self.pack.unread),
            pin_memory=cuda,
            prefetch_factor=self.plan.prefetch if many else None,
            persistent_workers=many,
            worker_init_fn=ignore_signals,
            generator=generator,
            multiprocessing_context="forkserver" if many and cuda else None,  # fork + CUDA deadlocks
        )
        return Loader(loader, sampler)

    def __call__(self, batches: Sequence[np.ndarray]) -> Generator[Raw, None, None]:
        done, stuck = 0, -1
        while done < len(batches):
            loader = self.idle.pop() if self.idle else self.open(batches[done])
            loader.batches[:] = [batch.tolist() for batch in batches[done:]]
            try:
                with suppress(GeneratorExit):  # the caller left early: the next call drops what is on its way
                    for raw in loader.begin():
                        yield on(self.device, raw)
                        done += 1
                self.idle.append(loader)
                return
            except KeyboardInterrupt:  # whose traceback keeps the loader
                loader.end()
                raise
            except Exception as error:
                if not (killed := loader.killed()):
                    raise
                if done == stuck:
                    rule = f"{killed}, like the one before it, and no batch came between them"
                    fix = "set fewer workers or a smaller prefetch, which need less memory, or feed=auto"
                    raise TrainError(f"{rule}; {fix}, and run it again to resume", entry="The loader hangs") from error
            stuck = done
            self.tell(f"{killed}; others continue with the next batch")


@dataclass
class Loader:
    """A DataLoader, its list of batches, to be filled, and its worker processes once it has begun."""

    loader: DataLoader
    batches: list[list[Any]]
    processes: list[BaseProcess] = field(default_factory=list)
    waiting: threading.RLock = field(default_factory=threading.RLock)  # else a second one finds a dead process alive

    def begin(self) -> Iterator[Raw]:
        """Its stream. torch has SIGCHLD raise wherever this process is, as in the middle of a step; without that a
        killed worker is found where a batch is waited for, within 5 s. An interrupt is held while processes start: it
        could leave one that nobody ends, or a queue's lock held, on which closing the stream would wait for ever. With
        workers that are there it acts at once, as their last batches may be on a disk that does not respond."""
        with nullcontext() if self.processes else HeldInterrupt():
            handler, others = signal.getsignal(signal.SIGCHLD), active_children()
            try:
                return iter(self.loader)
            finally:
                self.processes += [process for process in active_children() if process not in others]
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


def ignore_signals(worker: int) -> None:
    """Let the run decide what an interrupt means: it reaches every process of a notebook or terminal. SIGTERM does not
    end a worker at once either: a kernel that shuts down sends it to all its children, and a dead worker would raise in
    the middle of the step that is to be finished and saved."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, end_soon)


def end_soon(*_: Any) -> None:
    """Live as long as a kernel's shutdown may take, but no longer: a process that waits for this one would hang."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.alarm(5)


def require_shared_memory(pack: Pack, plan: Plan) -> None:
    """Raise TrainError if /dev/shm, through which workers hand over batches, is too small: that is a bus error."""
    if not os.path.isdir("/dev/shm"):
        return
    stat = os.statvfs("/dev/shm")
    free = stat.f_bavail * stat.f_frsize
    need = int(pack.bytes / max(len(pack), 1) * plan.batch_size * plan.prefetch * plan.workers * 1.5)
    if need > free:
        raise TrainError(
            f"Plan.workers = {plan.workers} with prefetch {plan.prefetch} and batch {plan.batch_size} needs about "
            f"{show.size(need)} of shared memory, /dev/shm has {show.size(free)} free; lower workers or prefetch",
            entry="The loader hangs",
        )
