"""Several processes that train one model: torch's DistributedDataParallel (DDP) under torchrun. Every process, a rank,
runs the same program on its share of each batch; DDP takes the mean of the gradients. Rank 0 alone has the run folder,
the history and what the user asks for: by gloo, which never waits for a GPU, it tells the others before every step."""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import count
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from nbtools.errors import TrainError
from nbtools.train import device as devices
from nbtools.train.meter import put

TIMEOUT = 600.0  # seconds without an answer after which a rank counts as hung, unless NBTOOLS_TIMEOUT says otherwise
GLOO = ("gloo", "pair closure")  # in its errors, which have no class of their own
JOINS = count()  # runs of this process
PAUSE = timedelta(days=30)  # for which the others wait for rank 0, whose user may pause the run; not it for them
T = TypeVar("T")


class RankLost(TrainError):
    """Another rank ended, or does not answer."""


class Restarted(Exception):
    """Rank 0 begins its loop anew; its state follows."""


class Ended(Exception):
    """Rank 0 ended the run."""


class Ranks:
    """The processes of one run, as one of them sees them; without a device it is alone. again: started anew."""

    def __init__(self, device: torch.device | None = None):
        self.rank, self.world, self.device = 0, 1, device
        self.again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
        if device is not None:
            self.rank, self.world = dist.get_rank(), dist.get_world_size()
            self.control: Any = dist.new_group(backend="gloo", timeout=PAUSE if self.rank else limit())
        self.first = self.rank == 0

    def broadcast(self, what: Any = None) -> Any:
        """Return rank 0's object on every rank. Raises Restarted or Ended on others, whose loop rank 0 has left; after
        Ended the group is no more."""
        if self.world == 1:
            return what
        dist.broadcast_object_list(box := [what], 0, group=self.control)
        if isinstance(box[0], Ended):
            with suppress(RuntimeError):  # each has received it; who is gone first is no fault of the others
                dist.barrier(group=self.control)
            dist.destroy_process_group()
        if isinstance(box[0], Exception) and not self.first:
            raise box[0]
        return box[0]

    def gather(self, what: T) -> list[T]:
        """Return the objects of all ranks, in their order, on all of them. Raises as `broadcast` does."""
        objects = [self.broadcast(what)] * self.world  # first: rank 0 may have left amid an evaluation
        if self.world > 1:
            dist.all_gather_object(objects, what)
        return objects

    def total(self, loss_sum: Tensor, count: Tensor | float, shares: int) -> tuple[Tensor, Tensor | float]:
        """Return (loss sum, count) of a batch in so many shares over all ranks, on the device."""
        if self.world == 1:
            return loss_sum, count
        pair = torch.zeros(2, dtype=torch.float64, device=self.device)
        put(pair, loss_sum, count)
        dist.all_reduce(pair)
        pair /= self.world // shares
        return pair[0], pair[1]

    def shares(self, size: int) -> int:
        """Return how many shares a batch of so many samples has: one a rank, of at least two samples, which BatchNorm
        needs. A smaller batch is a single share, on which every rank trains."""
        return self.world if size >= 2 * self.world else 1

    def share(self, ids: np.ndarray) -> np.ndarray:
        return np.array_split(ids, shares := self.shares(len(ids)))[self.rank % shares]

    def seed(self, *numbers: int) -> None:
        """Give all ranks but the first random numbers that follow from these, so that no checkpoint keeps them."""
        if not self.first:
            torch.manual_seed(int(np.random.SeedSequence([*numbers, self.rank]).generate_state(1)[0]))

    def wrap(self, network: Any) -> Any:
        """Return the network with gradients that are the mean over all ranks."""
        if self.world == 1:
            return network
        wrapped = DistributedDataParallel(network, gradient_as_bucket_view=True, find_unused_parameters=True)
        wrapped.broadcast_buffers = False  # an argument until torch 2.12
        vars(wrapped)["freed_last"] = wrapped.process_group  # the reducer joins gloo's threads, which wait for the GIL
        return wrapped

    def align(self, buffers: Iterable[Tensor]) -> None:
        """Give rank 0's buffers, such as BatchNorm's running averages, to all."""
        for buffer in buffers if self.world > 1 else ():
            dist.broadcast(buffer, 0)

    def end(self) -> None:
        """Let the others leave, on rank 0 after its last checkpoint: each process is alone from here."""
        self.broadcast(Ended())


def join() -> Ranks:
    """Meet the other processes that torchrun started, if this is not the only one. Stage and pack before: the first to
    arrive waits here. Raises TrainError where processes cannot share work, RankLost."""
    if devices.world() == 1:
        return Ranks()
    device = devices.pick()
    backend: dict[str, Any] = {"backend": "gloo"}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend = {"backend": "nccl", "device_id": device}
    store, rank, world = next(rendezvous("env://", timeout=limit()))
    attempt = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and os.environ.get("TORCHELASTIC_RESTART_COUNT")
    store = PrefixStore(f"nbtools/{attempt}/{next(JOINS)}", store)  # an earlier run or attempt left its addresses
    dist.init_process_group(timeout=limit(), store=store, rank=rank, world_size=world, **backend)
    return Ranks(device)


def limit() -> timedelta:
    return timedelta(seconds=float(os.environ.get("NBTOOLS_TIMEOUT", TIMEOUT)))


@contextmanager
def naming() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(words in str(error) for words in GLOO):
            raise
        why = f"did not answer for {limit().total_seconds():g} s (NBTOOLS_TIMEOUT): {error}".splitlines()[0]
        fix = "start again to resume from the last checkpoint"
        raise RankLost(f"another rank of this run ended, or {why}; {fix}") from error
