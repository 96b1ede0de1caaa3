"""Feeds: batches on the device, from memory, from the memory map, or from the source files.

A raw batch is a dict of tensors: a fixed column (B, *shape); a ragged one zero-padded (B, L, *shape) with
`<column>_length` (B,); and `id` (B,) int64, the sample ids. B samples, L at least the longest of the batch.
"""

import copy
import gc
import pickle
import signal
import sys
import warnings
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from multiprocessing import get_context
from threading import current_thread, main_thread
from typing import Any, Self
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from nbtools import show
from nbtools.data.pack import Column, Pack, Sample
from nbtools.errors import PackError, TrainError

Raw = dict[str, Tensor]
Plan = Any  # with feed, seed, workers, prefetch, and perhaps bucket

RESIDENT_SHARE = 0.3  # of free GPU memory that a pack may take to live there


def lengths_of(pack: Pack, ids: np.ndarray) -> np.ndarray | None:
    """Return the lengths that batches are grouped by; None where every sample has the same, or nobody has read them."""
    by = pack.card.bucket_by
    return pack.lengths(by, ids) if by in pack.offsets else None


class Padding:
    """To what length samples are padded: a multiple of `Plan.bucket`, if it has one, but not beyond the longest of the
    pack. cuDNN, oneDNN, CUDA graphs and compiled code plan anew for each shape, and then see few."""

    def __init__(self, pack: Pack, plan: Plan = None):
        self.bucket = getattr(plan, "bucket", 1)
        self.longest = {name: int(np.diff(ends).max(initial=0)) for name, ends in pack.offsets.items()}

    def __call__(self, column: str, length: Any) -> Any:
        """Return the padded length, or (N,) lengths, of batches whose longest samples have these."""
        whole = -(-length // self.bucket) * self.bucket
        return np.minimum(whole, self.longest[column]) if column in self.longest else whole

    def of(self, pack: Pack, batches: Sequence[np.ndarray]) -> dict[str, list[int]]:
        """Return the length of each ragged column in each of these batches of ids, computed by the host alone."""
        order, starts = np.concatenate(batches), np.cumsum([0, *map(len, batches[:-1])])
        longest = {name: np.maximum.reduceat(pack.lengths(name, order), starts) for name in pack.offsets}
        return {name: self(name, lengths).tolist() for name, lengths in longest.items()}


def collate(samples: Sequence[Sample], columns: Mapping[str, Column], padding: Padding | None = None) -> Raw:
    """Return the raw batch of samples, of these columns, and their ids where they have some."""
    batch: Raw = {}
    for name in (name for name in samples[0] if name in columns or name == "id"):
        arrays = [sample[name] for sample in samples]
        if name == "id" or columns[name].kind == "fixed":
            batch[name] = torch.from_numpy(np.stack(arrays))
            continue
        lengths = np.array([len(array) for array in arrays])
        longest = lengths.max() if padding is None else padding(name, lengths.max())
        padded = np.zeros((len(arrays), longest, *arrays[0].shape[1:]), arrays[0].dtype)
        for row, array in zip(padded, arrays, strict=True):
            row[: len(array)] = array
        batch[name], batch[f"{name}_length"] = torch.from_numpy(padded), torch.from_numpy(lengths)
    return batch


def gather(pack: Pack, ids: np.ndarray, padding: Padding | None = None) -> Raw:
    """Return a raw batch in host memory, copied from the memory map, or read anew where the pack stores no arrays."""
    return collate([{**pack.sample(int(i)), "id": np.asarray(i, np.int64)} for i in ids], pack.columns, padding)


def on(device: torch.device, raw: Raw) -> Raw:
    cuda = device.type == "cuda"  # elsewhere a copy may read what is freed by then (pytorch#189690)
    return {name: tensor.to(device, non_blocking=cuda) for name, tensor in raw.items()}


class Feed:
    """Called with the coming batches of ids, it yields a raw batch for each."""

    def __init__(self, pack: Pack, device: torch.device, plan: Plan):
        self.name = type(self).__name__.lower()
        self.pack, self.device, self.plan, self.padding = pack, device, plan, Padding(pack, plan)

    def __call__(self, batches: Sequence[np.ndarray]) -> Iterator[Raw]:
        raise NotImplementedError


def choose(pack: Pack, plan: Plan, device: torch.device) -> tuple[str, str]:
    """Return (feed, reason): the plan's own, or what `feed="auto"` does."""
    if not pack.is_stored:
        return "workers", "the pack stores no arrays (store=False)"
    if plan.feed != "auto":
        return plan.feed, "set in the plan"
    if device.type != "cuda":
        return "resident", "batches are read straight from the memory-mapped pack"
    kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by torch, for what comes
    room = RESIDENT_SHARE * (torch.cuda.mem_get_info(device)[0] + kept)
    name, why = ("resident", "it stays on the GPU") if pack.bytes <= room else ("streamed", "too large for the GPU")
    share = f"{show.percent(RESIDENT_SHARE)} of free GPU memory: {show.size(room)}"
    return name, f"{why}, the pack is {show.size(pack.bytes)}, {share}"


def open_feed(pack: Pack, plan: Plan, device: torch.device) -> Feed:
    """Return the feed that the plan asks for. Raises TrainError if it cannot work here."""
    kinds = {"resident": Resident, "streamed": Streamed, "workers": Workers}
    return kinds[choose(pack, plan, device)[0]](pack, device, plan)


class Resident(Feed):
    """All that batches hold as tensors on the device; a batch is one gather per column."""

    def __init__(self, pack: Pack, device: torch.device, plan: Plan):
        super().__init__(pack, device, plan)
        with warnings.catch_warnings(action="ignore"):  # torch's, of a large map, which cannot be written
            self.values = {name: torch.from_numpy(array).to(device) for name, array in pack.arrays.items()}
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
        order = torch.from_numpy(np.concatenate(batches)).to(self.device, non_blocking=self.device.type == "cuda")
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


class Streamed(Feed):
    """A thread gathers batches from the memory map ahead of training; on CUDA it sends them through pinned memory on a
    stream of their own, so that neither the gather nor the copy waits in the step."""

    def __init__(self, pack: Pack, device: torch.device, plan: Plan):
        super().__init__(pack, device, plan)
        self.host = Resident(pack, torch.device("cpu"), plan)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def __call__(self, batches: Sequence[np.ndarray]) -> Generator[Raw, None, None]:
        start = partial(torch.cuda.set_device, self.stream.device) if self.stream else None  # else its device is GPU 0
        pool = ThreadPoolExecutor(1, "nbtools-feed", start)
        coming = (pool.submit(self.fetch, ids) for ids in batches)
        try:
            begun = deque(islice(coming, self.plan.prefetch + 1))
            while begun:
                raw, copied = begun.popleft().result()
                if copied is not None:
                    stream = torch.cuda.current_stream(self.device)
                    stream.wait_event(copied)
                    for tensor in raw.values():
                        tensor.record_stream(stream)
                elif self.stream is not None:
                    torch.cuda.empty_cache()
                    raw = on(self.device, raw)
                yield raw
                begun.extend(islice(coming, 1))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # not the gather under way: a disk may not answer

    def fetch(self, ids: np.ndarray) -> tuple[Raw, Any]:
        """Return a batch on the device, and the event after which it is there; where memory ran out, on the host."""
        raw = next(self.host([ids]))
        if self.stream is None:
            return on(self.device, raw), None
        with torch.cuda.stream(self.stream):  # torch uses pinned memory again, but not before its copy is over
            pinned = {name: tensor.pin_memory() for name, tensor in raw.items()}
            with suppress(torch.OutOfMemoryError):
                return on(self.device, pinned), self.stream.record_event()
        return raw, None


class Workers(Feed):
    """A DataLoader over the source files, decoded at every access: as the guides do, for the baseline and for data that
    is not packed. Its processes live from call to call; one within another, as of an evaluation, has its own."""

    def __init__(self, pack: Pack, device: torch.device, plan: Plan):
        if pack.raw is None:
            rule = 'Plan.feed = "workers" reads the source files, but the pack was opened without them'
            raise TrainError(f'{rule}; stage the source again, or choose feed="auto"')
        super().__init__(pack, device, plan)
        self.idle: list[DataLoader] = []
        self.start = start_method(pack.raw, device.type == "cuda") if plan.workers else None

    def open(self, ids: np.ndarray) -> DataLoader:
        """Return a loader whose workers start with the first batch. What a Dataset draws at random depends on that and
        the plan's seed: a resumed run does not repeat its beginning, and dropout's stream is left alone."""
        return DataLoader(
            self.pack.raw,
            batch_sampler=[],
            num_workers=self.plan.workers,
            collate_fn=partial(collate, columns=self.pack.columns, padding=self.padding),
            pin_memory=self.device.type == "cuda",
            prefetch_factor=self.plan.prefetch if self.plan.workers else None,
            persistent_workers=self.plan.workers > 0,
            worker_init_fn=begin,
            generator=torch.Generator().manual_seed(int(np.random.default_rng([self.plan.seed, *ids]).integers(2**63))),
            multiprocessing_context=self.start,
        )

    def __call__(self, batches: Sequence[np.ndarray]) -> Generator[Raw, None, None]:
        if not len(batches):
            return
        loader: Any = self.idle.pop() if self.idle else self.open(batches[0])
        loader.batch_sampler[:] = [batch.tolist() for batch in batches]
        handler = signal.getsignal(signal.SIGCHLD)
        try:
            hidden = ("__spec__", "__file__") if self.start == "forkserver" else ()  # else each would run the script
            with patch.dict(vars(sys.modules["__main__"]), dict.fromkeys(hidden)):
                stream = iter(loader)
            if current_thread() is main_thread():  # torch has it raise wherever this process is, as amid a step
                signal.signal(signal.SIGCHLD, handler or signal.SIG_DFL)
            for raw in stream:
                yield on(self.device, raw)
        except GeneratorExit:  # the caller left early: the next call drops what is on its way
            pass
        except BaseException as error:
            if loader._iterator is not None:  # garbage collection would do it in an order that takes 10 s per worker
                loader._iterator._shutdown_workers()
            if isinstance(error, PackError):  # of a worker with its traceback, which ends with the sentence
                raise PackError(str(error).rpartition("PackError: ")[2].strip()) from None
            lost = isinstance(error, ConnectionError | EOFError)  # of a worker that dies as it hands over a batch
            if not lost and not str(error).startswith("DataLoader worker (pid"):
                raise
            rule = "a worker process of the DataLoader died, probably because memory or /dev/shm ran out"
            fix = "set fewer workers or a smaller prefetch, and run it again to resume"
            raise TrainError(f"{rule}; {fix}", entry="The loader hangs") from error
        self.idle.append(loader)


def start_method(data: Any, cuda: bool) -> str:
    """Return how workers start: by fork, which may deadlock beside CUDA, where it is usual or no other has the data."""
    usual = not cuda and get_context().get_start_method() == "fork"
    with suppress(Exception):  # pickle raises whatever its objects do
        return "fork" if usual or b"__main__" in pickle.dumps(data) else "forkserver"
    return "fork"


def begin(worker: int) -> None:
    """Leave to the run its garbage, which may hold workers that only it can end, and what an interrupt means: that
    reaches every process of a notebook or terminal, as does SIGTERM when a kernel shuts down, amid a step to save."""
    gc.freeze()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda *_: signal.alarm(5))  # no longer: who waits for this process would hang
