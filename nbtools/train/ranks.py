"""Several processes that train one model: DistributedDataParallel (DDP) under torchrun.

Every process, a rank, runs the same program on its share of each batch; DDP takes the mean of the gradients. Rank 0
alone has the run folder, the history and what the user asks for: it broadcasts an object before every step, and the
others obey. There are two process groups: the device's (nccl, or gloo on a CPU) for the tensors of a step, and one of
gloo for these objects, which never waits for a GPU. A single process has no `Ranks` at all.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import timedelta
from itertools import pairwise
from time import monotonic, sleep
from traceback import walk_tb
from typing import Any, TypeVar
from uuid import uuid4

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from nbtools.errors import TrainError
from nbtools.train import device as devices

TIMEOUT = 600.0  # seconds without an answer after which a rank counts as hung, unless NBTOOLS_TIMEOUT says otherwise
PROCESS = uuid4().hex
PAUSE = timedelta(days=30)  # for which the others wait for rank 0, whose user may pause the run
LOST = ("gloo", "Gloo", "NCCL", "onnection", "imed out", "imeout")  # in a RuntimeError of a process group
COMMUNICATING = ("torch.distributed", "torch.nn.parallel", "torch.autograd", __name__)  # modules that raise those

T = TypeVar("T")


class RankLost(TrainError):
    """Another rank ended, or does not answer."""


class Restarted(Exception):
    """Rank 0 begins its loop anew, with this state: plan (plain values), facts, tensors on the CPU."""


class Ended(Exception):
    """Rank 0 ended the run."""


def join() -> Ranks | None:
    """Meet the other processes that torchrun started; None if this is the only one. Stage and pack before: who comes
    first waits here. Raises TrainError on a device that processes cannot share work on, RankLost."""
    if devices.world() == 1:
        return None
    device = devices.pick()
    if device.type not in ("cuda", "cpu"):
        raise TrainError(
            f"several processes train on CUDA or the CPU, got {device.type}; start one, or set NBTOOLS_DEVICE=cpu"
        )
    limit = timedelta(seconds=float(os.environ.get("NBTOOLS_TIMEOUT", TIMEOUT)))
    store, rank, world = next(rendezvous("env://", timeout=limit))
    again = rank == 0 and store.compare_set("nbtools/met", "", PROCESS).decode() != PROCESS
    given: dict[str, Any] = {"store": fresh(store, rank, world, limit), "rank": rank, "world_size": world}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        given["device_id"] = device
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=limit, **given)
    return Ranks(device, again)


def fresh(store: Any, rank: int, world: int, limit: timedelta) -> PrefixStore:
    """A part of torchrun's store that only the processes of this start use. torchrun keeps the store when it starts all
    ranks again, and with it the addresses of those that died; its count of restarts differs between nodes. So rank 0
    chooses a name, and answers each process that asks, under a name of the process's own, until all have it."""
    name, end = uuid4().hex, monotonic() + limit.total_seconds()
    if rank > 0:
        store.set(f"nbtools/asks/{rank}", name)
        chosen = store.get(f"nbtools/answer/{name}").decode()
        store.set(f"{chosen}/{rank}", "")
        return PrefixStore(chosen, store)
    while missing := [other for other in range(1, world) if not store.check([f"{name}/{other}"])]:
        for asks in (f"nbtools/asks/{other}" for other in missing):
            if store.check([asks]):
                store.set(f"nbtools/answer/{store.get(asks).decode()}", name)
        if monotonic() > end:
            which = ", ".join(map(str, missing))
            raise RankLost(f"rank {which} of {world} did not start within {limit.total_seconds():g} s")
        sleep(0.02)
    return PrefixStore(name, store)


class Alone:
    """A single process, as `Ranks` of one."""

    rank, world, first = 0, 1, True

    def tell(self, what: Any = None) -> Any:
        return what

    def gather(self, what: T) -> list[T]:
        return [what]

    def total(self, loss_sum: Tensor, count: Tensor | float) -> tuple[Tensor, Tensor | float]:
        return loss_sum, count

    def share(self, batch: np.ndarray) -> np.ndarray:
        return batch

    def seed(self, *numbers: int) -> None:
        return

    def no_sync(self, network: Any) -> Any:
        return nullcontext()

    def same(self, buffers: Iterable[Tensor]) -> None:
        return

    def wrap(self, network: Any) -> Any:
        return network

    def counts(self, size: int) -> bool:
        return True

    def end(self) -> None:
        return


class Ranks(Alone):
    """The processes of one run, as one of them sees them. rank: from 0 to world - 1. again: rank 0: whether others of
    this torchrun have met before; its count of restarts leaves out those for a process lost on another node."""

    def __init__(self, device: torch.device, again: bool):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.first = self.rank == 0
        self.device, self.again, self.ended = device, again, False
        self.control: Any = dist.new_group(backend="gloo", timeout=PAUSE)

    def tell(self, what: Any = None) -> Any:
        """Return rank 0's object, on every rank: all of them call it. Where rank 0 has left the loop that the others
        are in, its message is raised there: Restarted or Ended."""
        box = [what]
        dist.broadcast_object_list(box, 0, group=self.control)
        if not self.first and isinstance(box[0], (Restarted, Ended)):
            if isinstance(box[0], Ended):
                self.leave()
            raise box[0]
        return box[0]

    def end(self) -> None:
        """Rank 0, after its last checkpoint: the others leave, and each process is alone from here."""
        if not self.ended:
            self.tell(Ended())
            self.leave()

    def leave(self) -> None:
        self.ended = True
        with suppress(RuntimeError):  # each has received it; who is gone first is no fault of the others
            dist.barrier(group=self.control)
        dist.destroy_process_group()

    def wrap(self, network: nn.Module) -> nn.Module:
        """The network with gradients that are the mean over all ranks. BatchNorm's running averages stay each rank's
        own until `same`."""
        found = WrappedNetwork(network, gradient_as_bucket_view=True, find_unused_parameters=True)
        found.broadcast_buffers = False  # an argument until torch 2.12
        return found

    def share(self, batch: np.ndarray) -> np.ndarray:
        return share(batch, self.rank, self.world)

    def no_sync(self, network: Any) -> Any:
        return network.no_sync()

    def seed(self, *numbers: int) -> None:
        """Give the ranks but the first random numbers of their own, which follow from these numbers, so that no
        checkpoint has to keep them; rank 0 draws those of a single process."""
        if not self.first:
            torch.manual_seed(int(np.random.SeedSequence([*numbers, self.rank]).generate_state(1)[0]))

    def counts(self, size: int) -> bool:
        """Whether this rank has samples of its own in a batch of so many."""
        return self.rank < len(shares(size, self.world)) - 1

    def gather(self, what: T) -> list[T]:
        """The objects of all ranks, in their order, on all of them. A rank that hangs counts as lost here."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, what)
        return found

    def total(self, loss_sum: Tensor, count: Tensor | float) -> tuple[Tensor, Tensor]:
        """(loss sum, count) over all ranks, float64 on the device."""
        pair = torch.zeros(2, dtype=torch.float64, device=self.device)
        devices.put(pair, loss_sum, count)
        dist.all_reduce(pair)
        return pair[0], pair[1]

    def same(self, buffers: Iterable[Tensor]) -> None:
        """Give rank 0's buffers to all."""
        for buffer in buffers:
            dist.broadcast(buffer, 0)


class WrappedNetwork(DistributedDataParallel):
    """DDP with the attributes of its network, which a task's loss may read."""

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


@contextmanager
def naming() -> Iterator[None]:
    """Turn an error of a process group into a sentence. Raises RankLost."""
    try:
        yield
    except RuntimeError as error:
        if not from_process_group(error):
            raise
        limit = os.environ.get("NBTOOLS_TIMEOUT", f"{TIMEOUT:g}")
        rule = f"another rank of this run ended, or did not answer for {limit} s (NBTOOLS_TIMEOUT)"
        what = f"{rule}: {str(error).splitlines()[0]}"
        raise RankLost(f"{what}; start again to resume from the last checkpoint") from error


def from_process_group(error: RuntimeError) -> bool:
    """Whether communication failed: by the error's class, or, as gloo's has none, by its words where torch or this
    module raised it; a task may speak of connections of its own."""
    if isinstance(error, dist.DistError):
        return True
    *_, (frame, _) = walk_tb(error.__traceback__)
    inside = frame.f_globals.get("__name__", "").startswith(COMMUNICATING)
    return inside and any(word in str(error) for word in LOST)


def shares(size: int, world: int) -> list[int]:
    """Where the shares of a batch of `size` samples begin and end: contiguous, as even as possible, and of at least two
    samples, which BatchNorm needs, so that a small batch has fewer than `world`."""
    count = max(min(world, size // 2), 1)
    return [size * i // count for i in range(count + 1)]


def share(batch: np.ndarray, rank: int, world: int) -> np.ndarray:
    """A rank's share of a batch of ids; where there is none, the first one as padding, whose loss does not count."""
    cuts = [*pairwise(shares(len(batch), world))]
    start, end = cuts[rank] if rank < len(cuts) else cuts[0]
    return batch[start:end]
