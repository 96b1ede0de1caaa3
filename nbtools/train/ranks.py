"""Several processes that train one model: DistributedDataParallel (DDP) under torchrun, and what it leaves to its user.

Every process, a rank, runs the same program on its share of each batch. What they must agree on is in this module:

- who trains on which samples of a batch (`shares`), and the sums over all of them (`total`, `gather`);
- gradients, which DDP adds up while backward runs, and by hand in a step where memory may run out (`add_up`);
- memory that runs out on one rank: all give up the step together, and none is left waiting (`settle`);
- what rank 0 decides between steps. It alone has the run folder, the history and what the user asks for; the others
  hear its words: go on, here is another plan, wait, hand over your part of a checkpoint, take this state, end.

N ranks. There are two process groups: the device's (nccl, or gloo on a CPU) for tensors of a step, and one of gloo for
words and flags, which never wait for a GPU. A single process has no `Ranks` at all.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from nbtools.errors import TrainError

TIMEOUT = 600.0  # seconds without an answer after which a rank counts as hung, unless NBTOOLS_TIMEOUT says otherwise
WAIT_EVERY = 5.0  # seconds between the words with which rank 0, busy elsewhere, keeps the others from that timeout
PATIENCE = 5.0  # seconds for the other survivors to report, and for torchrun to end this rank if another one died
LOST = ("gloo", "NCCL", "onnection", "imed out")  # in the RuntimeErrors of process groups

GO, CALL, TALK = range(3)  # one broadcast number before each step: go on, something changed, an object follows
TELL, WAIT, COLLECT, SPREAD, END = "tell", "wait", "collect", "spread", "end"  # what the object is about

T = TypeVar("T")


class RankLost(TrainError):
    """A rank does not answer any more. ranks: which."""

    def __init__(self, message: str, ranks: list[int]):
        super().__init__(message)
        self.ranks = ranks


class Shortage(Exception):
    """Memory ran out on a rank, and all gave up the step together."""


class Anew(Exception):
    """Rank 0 begins its loop anew, with this state: plan (plain values), facts, tensors."""

    def __init__(self, plan: dict[str, Any], facts: dict[str, Any], tensors: dict[str, Tensor]):
        super().__init__()
        self.plan, self.facts, self.tensors = plan, facts, tensors


class Ended(Exception):
    """Rank 0 ended the run."""


def join(timeout: float | None = None) -> Ranks | None:
    """Meet the other processes that torchrun started; None if this is the only one.

    timeout: seconds without an answer after which a rank counts as hung. Stage and pack before: the others wait here.
    Raises TrainError where the device cannot be shared like this.
    """
    raise NotImplementedError  # follows


class Ranks:
    """The processes of one run as seen by one of them. rank: 0 to world - 1; first: whether it is rank 0."""

    rank: int
    world: int
    device: torch.device
    bytes = 0  # of gradients and sums that this rank gave to all-reduces so far
    own: Callable[[], dict[str, Tensor]]  # what of the state only this rank has: set by its TrainState

    @property
    def first(self) -> bool:
        return self.rank == 0

    # -- words

    def tell(self, what: Any = None) -> Any:
        """Rank 0's object on every rank, such as the plan before a TrainState is made. Every rank calls it."""

    def called(self, wanted: bool) -> bool:
        """Whether rank 0 wants something to be done before the next step: a number broadcast by it."""
        raise NotImplementedError

    def serve(self) -> None:
        """Ranks > 0: do as rank 0 says while it is outside of its loop. Raises Anew or Ended."""

    def collect(self) -> dict[str, Tensor]:
        """Rank 0, between steps: what only the others have of the state, by name on the CPU: their random states as
        `rng.1`, `cuda_rng.1`, …, and the optimizer's tensors of their shards under the names of an unsharded one."""
        raise NotImplementedError

    def spread(self, plan: dict[str, Any], facts: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Rank 0, before its loop: give all others this state."""

    def end(self, why: str = "") -> None:
        """Rank 0, after its last checkpoint: the others leave; each is alone from here."""

    def turns(self, records: Generator[T, Any, Any]) -> Generator[T, Any, Any]:
        """The loop's records; while rank 0's caller looks at one, a thread tells the others to wait. Raises RankLost,
        which names the ranks that do not answer."""
        raise NotImplementedError

    # -- shares and sums

    def share(self, batch: np.ndarray) -> np.ndarray:
        """This rank's part of a batch of ids; for a rank beyond `shares`, samples that count nothing."""
        raise NotImplementedError

    def gather(self, what: T) -> list[T]:
        """The objects of all ranks, in order, on all of them."""
        raise NotImplementedError


def shares(size: int, world: int) -> list[int]:
    """Where the shares of a batch of `size` samples begin and end: contiguous, as even as possible, and of at least two
    samples, which BatchNorm needs, so that a small batch has fewer than `world`."""
    count = max(min(world, size // 2), 1)
    return [size * i // count for i in range(count + 1)]
