"""Feeds: raw batches (see `batches`) on the device, from memory, from the memory map, or from the source files."""

from __future__ import annotations

import copy
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from multiprocessing.connection import wait
from typing import Any, Protocol, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from nbtools import show
from nbtools.data.batches import Padding, Raw, collate, gather, is_stored, on
from nbtools.data.pack import Pack
from nbtools.errors import TrainError

Plan = Any  # with feed, seed, workers, prefetch, and perhaps bucket
RESIDENT_SHARE = 0.3  # of free GPU memory that a pack may take to live there


class Feed(Protocol):
    """Called with the coming batches of ids, it yields a raw batch for each."""

    name: str

    def __call__(self, batches: Sequence[np.ndarray]) -> Iterator[Raw]: ...


def choose(pack: Pack, plan: Plan, device: torch.device) -> tuple[str, str]:
    """Return (feed, reason): the plan's own, or what `feed="auto"` does."""
    if not is_stored(pack):
        return "workers", "the pack stores no arrays (store=False)"
    if plan.feed != "auto":
        return plan.feed, "set in the plan"
    if device.type != "cuda":
        return "resident", "batches are read straight from the memory-mapped pack"
    room = RESIDENT_SHARE * torch.cuda.mem_get_info(device)[0]
    size = f"the pack is {show.size(pack.bytes)}, {show.percent(RESIDENT_SHARE)} of free GPU memory {show.size(room)}"
    if pack.bytes <= room:
        return "resident", f"it stays on the GPU, {size}"
    return "streamed", f"too large for the GPU, {size}"


def open_feed(pack: Pack, plan: Plan, device: torch.device) -> Feed:
    """Return the feed that the plan asks for. Raises TrainError if it cannot work here."""
    name, _ = choose(pack, plan, device)
    if name == "resident":
        return Resident(pack, device, plan)
    return Streamed(pack, device, plan) if name == "streamed" else Workers(pack, device, plan)


class Resident:
    """All that batches hold as tensors on the device; a batch is one gather per column."""

    name = "resident"

    def __init__(self, pack: Pack, device: torch.device, plan: Plan = None):
        self.pack, self.device, self.padding = pack, device, Padding(pack, plan)
        self.values = {name: torch.from_numpy(pack.arrays[name]).to(device) for name in pack.columns}
        self.offsets = {name: torch.from_numpy(array).to(device) for name, array in pack.offsets.items()}

    def padded(self, plan: Plan) -> Self:
        """Return a feed that shares the tensors and pads as this plan does."""
        other = copy.copy(self)
        other.padding = Padding(self.pack, plan)
        return other

    def __call__(self, batches: Sequence[np.ndarray]) -> Iterator[Raw]:
        if not batches:
            return
        longest = self.padding.of(self.pack, batches)
        order = torch.from_numpy(np.concatenate(batches)).to(self.device)
        for k, ids in enumerate(order.split([len(batch) for batch in batches])):
            raw: Raw = {}
            for name, values in self.values.items():
                if name in self.offsets:
                    raw[name], raw[f"{name}_length"] = self.ragged(name, ids, longest[name][k])
                else:
                    raw[name] = values.index_select(0, ids)
            yield {**raw, "id": ids}

    def ragged(self, name: str, ids: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        offsets, values = self.offsets[name], self.values[name]
        start = offsets.index_select(0, ids)
        length = offsets.index_select(0, ids + 1) - start
        step = torch.arange(longest, device=self.device)
        padding = step >= length[:, None]  # (B, L)
        rows = values.index_select(0, (start[:, None] + step).masked_fill_(padding, 0).view(-1))
        rows.masked_fill_(padding.view(-1, *[1] * (rows.dim() - 1)), 0)
        return rows.view(len(ids), longest, *values.shape[1:]), length


class Streamed:
    """A thread gathers batches from the memory map ahead of training; on CUDA it sends them through pinned memory on a
    stream of their own, so that neither the gather nor the copy waits in the step.

    The pinned memory belongs to the call: an evaluation within an epoch would refill what the epoch still copies. The
    stream belongs to the feed: torch's allocator keeps freed GPU memory by stream, and a new one starts without any.
    """

    name = "streamed"

    def __init__(self, pack: Pack, device: torch.device, plan: Plan):
        self.pack, self.device, self.prefetch, self.padding = pack, device, plan.prefetch, Padding(pack, plan)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batches: Sequence[np.ndarray]) -> Generator[Raw, None, None]:
        pool, begun, pinned = ThreadPoolExecutor(1, "nbtools-feed"), deque[Future](), dict[str, Tensor]()
        try:
            for ids in batches:
                begun.append(pool.submit(self.fetch, ids, pinned))
                if len(begun) > self.prefetch:
                    yield self.arrived(*begun.popleft().result())
            while begun:
                yield self.arrived(*begun.popleft().result())
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # not the gather under way: a disk may not answer

    def fetch(self, ids: np.ndarray, pinned: dict[str, Tensor]) -> tuple[Raw, Any]:
        """Return a batch on the device, and the event after which it is there."""
        raw, sent = gather(self.pack, ids, self.padding), {}
        if self.stream is None:
            return on(self.device, raw), None
        self.stream.synchronize()  # the last copy has left the pinned memory
        with torch.cuda.stream(self.stream):
            for name, tensor in raw.items():
                if name not in pinned or pinned[name].numel() < tensor.numel():
                    pinned[name] = torch.empty(tensor.numel(), dtype=tensor.dtype, pin_memory=True)
                buffer = pinned[name][: tensor.numel()].view(tensor.shape).copy_(tensor)
                sent[name] = buffer.to(self.device, non_blocking=True)
            return sent, self.stream.record_event()

    def arrived(self, raw: Raw, copied: Any) -> Raw:
        if copied is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(copied)
            for tensor in raw.values():
                tensor.record_stream(stream)
        return raw


class Workers:
    """A DataLoader over the source files, which decodes every sample at every access: as the guides do, kept as the
    baseline and for data that is not packed; same batches, same order. Its processes live from call to call; a call
    within another, such as an evaluation between two steps, has its own."""

    name = "workers"

    def __init__(self, pack: Pack, device: torch.device, plan: Plan):
        if pack.raw is None:
            raise TrainError(
                'Plan.feed = "workers" reads the source files, but they are not here: the pack was opened without '
                'them; stage the source again, or choose feed="auto"'
            )
        self.pack, self.device, self.plan, self.padding = pack, device, plan, Padding(pack, plan)
        self.idle: list[DataLoader] = []

    def open(self, first: np.ndarray) -> DataLoader:
        """Return a loader whose workers start with the first batch. Where the Dataset draws random numbers, they depend
        on that batch and the plan's seed, so that a resumed run does not repeat those with which the run began."""
        generator = torch.Generator()  # its own: else every epoch draws from the stream that dropout uses
        if self.pack.options.get("random"):
            generator.manual_seed(int(np.random.default_rng([self.plan.seed, *first]).integers(2**63)))
        many, cuda = self.plan.workers > 0, self.device.type == "cuda"
        return DataLoader(
            self.pack.raw,
            batch_sampler=[],
            num_workers=self.plan.workers,
            collate_fn=partial(collate, columns=self.pack.columns, unread=self.pack.unread, padding=self.padding),
            pin_memory=cuda,
            prefetch_factor=self.plan.prefetch if many else None,
            persistent_workers=many,
            worker_init_fn=ignore_signals,
            generator=generator,
            multiprocessing_context="forkserver" if many and cuda else None,  # fork + CUDA deadlocks
        )

    def __call__(self, batches: Sequence[np.ndarray]) -> Generator[Raw, None, None]:
        if not len(batches):
            return
        loader: Any = self.idle.pop() if self.idle else self.open(batches[0])
        loader.batch_sampler[:] = [batch.tolist() for batch in batches]
        try:
            for raw in begun(loader):
                yield on(self.device, raw)
        except GeneratorExit:  # the caller left early: the next call drops what is on its way
            pass
        except BaseException as error:
            workers = getattr(loader._iterator, "_workers", [])
            died = workers and isinstance(error, Exception) and wait([each.sentinel for each in workers], 1.0)
            for process in workers:  # they would live as long as the traceback
                process.kill()
            if not died:
                raise
            raise TrainError(
                "a worker process of the DataLoader died, as where memory or shared memory (/dev/shm) runs out; set "
                "fewer workers or a smaller prefetch, which need less of both, and run it again to resume",
                entry="The loader hangs",
            ) from error
        self.idle.append(loader)


def begun(loader: DataLoader) -> Iterator[Raw]:
    """Return a loader's stream. torch has SIGCHLD raise wherever this process is, as in the middle of a step; without
    that a dead worker is noticed where a batch is waited for, within 5 s."""
    handler = signal.getsignal(signal.SIGCHLD)
    try:
        return iter(loader)
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)


def ignore_signals(worker: int) -> None:
    """Let the run decide what an interrupt means: it reaches every process of a notebook or terminal, as does SIGTERM
    when a kernel shuts down, and the step under way is to be finished and saved."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(5))  # no longer: who waits for this process would hang
