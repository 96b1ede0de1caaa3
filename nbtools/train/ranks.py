"""Several processes that train one model: DistributedDataParallel (DDP) under torchrun, and what it leaves to its user.

Every process, a rank, runs the same program on its share of each batch. What they must agree on is in this module:

- who trains on which samples of a batch (`shares`), and the sums over all of them (`total`, `gather`);
- gradients, which DDP adds up while backward runs, and `add_up` afterwards in a step where memory may run out;
- memory that runs out on one rank: all give up the step together, and none is left waiting (`agree_on_success`);
- what rank 0 decides between steps. It alone has the run folder, the history and what the user asks for; the others
  obey its messages: go on, here is another plan, wait, hand over your part of a checkpoint, take this state, end.

There are two process groups: the device's (nccl, or gloo on a CPU) for the tensors of a step, and one of gloo for
messages and flags, the control group, which never waits for a GPU. A single process has no `Ranks` at all.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from itertools import pairwise
from threading import Event, RLock, Thread
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
WAIT_EVERY = 5.0  # seconds between the messages with which rank 0, busy elsewhere, keeps the others from that timeout
PATIENCE = 5.0  # seconds for other survivors to report, and for torchrun to end this rank if another one died
SLOW = ("imed out", "imeout")  # in a RuntimeError of a process group
LOST = ("gloo", "Gloo", "NCCL", "onnection", *SLOW)
COMMUNICATING = ("torch.distributed", "torch.nn.parallel", "torch.autograd", "torch.futures")  # modules of torch

GO, CALL, OBJECT = range(3)  # rank 0 before each step: go on; something changed, come to `tell`; an object follows
TELL, WAIT, COLLECT, SPREAD, END = "tell", "wait", "collect", "spread", "end"  # what the object is about

T = TypeVar("T")


class RankLost(TrainError):
    """A rank does not answer any more. ranks: which; empty if all still live, and only the connection broke."""

    def __init__(self, message: str, ranks: Sequence[int]):
        super().__init__(message)
        self.ranks = ranks


class Shortage(Exception):
    """Memory ran out on a rank, and all gave up the step together."""


class Restarted(Exception):
    """Rank 0 begins its loop anew, with this state: plan (plain values), facts, tensors on the CPU."""

    def __init__(self, plan: dict[str, Any], facts: dict[str, Any], tensors: dict[str, Tensor]):
        super().__init__()
        self.plan, self.facts, self.tensors = plan, facts, tensors


class Ended(Exception):
    """Rank 0 ended the run."""


def join(timeout: float | None = None) -> Ranks | None:
    """Meet the other processes that torchrun started; None if this is the only one.

    timeout: seconds without an answer after which a rank counts as hung; None: NBTOOLS_TIMEOUT, else 600. Stage and
    pack before: who comes first waits here. Raises TrainError on a device that processes cannot share work on.
    """
    if devices.world() == 1:
        return None
    device = devices.pick()
    if device.type not in ("cuda", "cpu"):
        raise TrainError(
            f"several processes train on CUDA or the CPU, got {device.type}; start one, or set NBTOOLS_DEVICE=cpu"
        )
    limit = timedelta(seconds=timeout or float(os.environ.get("NBTOOLS_TIMEOUT", TIMEOUT)))
    store, rank, world = next(rendezvous("env://", timeout=limit))
    again = rank == 0 and store.add("nbtools/met", 1) > 1
    store = fresh(store, rank, world, limit)
    met: dict[str, Any] = {"store": store, "rank": rank, "world_size": world}
    if device.type == "cuda":  # nccl's watchdog ends a process without a word: the other group's timeout comes first
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=2 * limit, device_id=device, **met)
    else:
        dist.init_process_group("gloo", timeout=limit, **met)
    return Ranks(device, store, limit, again)


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
            raise RankLost(f"rank {which} of {world} did not start within {limit.total_seconds():g} s", missing)
        sleep(0.02)
    return PrefixStore(name, store)


class Ranks:
    """The processes of one run, as one of them sees them. rank: from 0 to world - 1. again: rank 0: whether processes
    of this torchrun have met before; its count of restarts leaves out those for a process lost on another node."""

    def __init__(self, device: torch.device, store: PrefixStore, timeout: timedelta, again: bool):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device, self.store, self.timeout, self.again = device, store, timeout, again
        self.control: Any = dist.new_group(backend="gloo", timeout=timeout)
        self.message = torch.zeros(1, dtype=torch.int64)
        self.own: Callable[[], dict[str, Tensor]] = dict  # what of the state only this rank has: its TrainState's
        self.bytes = 0  # of gradients that this rank has put into all-reduces so far
        self.ddp: WrappedNetwork | None = None
        self.unused = False  # whether some parameter got no gradient in some step
        self.overlap = False  # whether gradients are added up while backward runs, in this step
        self.turn, self.ended = RLock(), Event()
        self.dismissed = Event()  # torchrun asked this rank to end: it knows which one is lost
        if self.first:
            Thread(target=self.keep_waiting, name="nbtools-wait", daemon=True).start()

    @property
    def first(self) -> bool:
        return self.rank == 0

    # -- messages: rank 0 sends, the others receive

    def tell(self, what: Any = None) -> Any:
        """Rank 0's object on every rank, such as the plan before a TrainState is made. All ranks call it."""
        with self.naming():
            if self.first:
                self.broadcast(TELL, what)
                return what
            kind, told = self.receive()
            assert kind == TELL, f"rank {self.rank} received {kind!r} where rank 0 was to tell something"
            return told

    def called(self, wanted: bool) -> bool:
        """Whether rank 0 wants something done before the next step. All ranks call it; one broadcast number."""
        if self.first:
            self.send(CALL if wanted else GO)
            return wanted
        kind, _ = self.receive()
        assert kind in (GO, CALL), f"rank {self.rank} received {kind!r} where a step was to begin"
        return kind == CALL

    def serve(self) -> None:
        """Ranks > 0: do what rank 0 says while it is outside of its loop. Raises Restarted or Ended."""
        with self.naming():
            self.receive()

    def collect(self) -> dict[str, Tensor]:
        """Rank 0, between steps: what only the others have of the state, by name, on the CPU."""
        if self.ended.is_set():
            return {}
        with self.naming(), self.turn:
            self.broadcast(COLLECT)
            found: dict[str, Tensor] = {}
            for rank, listed in enumerate(self.gather([])):
                for name, shape, dtype in listed:
                    found[name] = torch.empty(shape, dtype=dtype)
                    dist.recv(as_bytes(found[name]), rank, group=self.control)
            return found

    def spread(self, plan: dict[str, Any], facts: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Rank 0, before its loop: give this state to all others."""
        with self.naming(), self.turn:
            self.broadcast(SPREAD, (plan, facts, [(name, t.shape, t.dtype) for name, t in tensors.items()]))
            for tensor in tensors.values():
                dist.broadcast(as_bytes(tensor.detach().cpu().contiguous()), 0, group=self.control)

    def end(self) -> None:
        """Rank 0, after its last checkpoint: the others leave, and each process is alone from here."""
        if not self.ended.is_set():
            with self.naming(), self.turn:
                self.ended.set()
                self.broadcast(END)
                self.leave()

    def leave(self) -> None:
        self.ddp = None
        with suppress(RuntimeError):  # each has received it; who is gone first is no fault of the others
            dist.barrier(group=self.control)
        dist.destroy_process_group()

    def send(self, kind: int) -> None:
        self.message[0] = kind
        dist.broadcast(self.message, 0, group=self.control)

    def broadcast(self, kind: str, what: Any = None) -> None:
        with self.turn:
            self.send(OBJECT)
            dist.broadcast_object_list([(kind, what)], 0, group=self.control)

    def receive(self) -> tuple[Any, Any]:
        """The next (kind, object) that is meant for the caller; all others are obeyed here."""
        while True:
            dist.broadcast(self.message, 0, group=self.control)
            if self.message[0] != OBJECT:
                return int(self.message[0]), None
            box: list[Any] = [None]
            dist.broadcast_object_list(box, 0, group=self.control)
            kind, what = box[0]
            if kind == TELL:
                return kind, what
            if kind == COLLECT:
                mine = {name: t.detach().cpu().contiguous() for name, t in self.own().items()}
                self.gather([(name, t.shape, t.dtype) for name, t in mine.items()])
                for tensor in mine.values():
                    dist.send(as_bytes(tensor), 0, group=self.control)
            elif kind == SPREAD:
                plan, facts, listed = what
                tensors = {name: torch.empty(shape, dtype=dtype) for name, shape, dtype in listed}
                for tensor in tensors.values():
                    dist.broadcast(as_bytes(tensor), 0, group=self.control)
                raise Restarted(plan, facts, tensors)
            elif kind == END:
                self.leave()
                raise Ended

    def turns(self, records: Generator[T, Any, Any]) -> Generator[T, Any, Any]:
        """The loop's records. While rank 0's caller looks at one, for as long as it likes, a thread has the others
        wait. Raises RankLost, which names the ranks that do not answer."""
        with closing(records):
            while True:
                with self.turn, self.naming():
                    try:
                        record = next(records)
                    except StopIteration:
                        return
                yield record

    def keep_waiting(self) -> None:
        """Rank 0's thread: between the turns of the loop the others may wait longer than the timeout."""
        with suppress(RuntimeError):  # a rank is gone: the next turn says which
            while not self.ended.wait(min(WAIT_EVERY, self.timeout.total_seconds() / 4)):
                with self.turn:
                    if not self.ended.is_set():
                        self.broadcast(WAIT)

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Inside, an error of a process group says which ranks do not answer: those alive leave a note in the store."""
        try:
            yield
        except RuntimeError as error:
            if not from_process_group(error):
                raise
            missing = self.missing()
            which = ", ".join(map(str, missing))
            if not missing:
                what = f"the connection between {self.world} processes broke ({str(error).splitlines()[0]})"
            elif any(word in str(error) for word in SLOW):
                what = f"no answer for {self.timeout.total_seconds():g} s from rank {which} of {self.world}: it hangs, "
                what += "or needs longer than NBTOOLS_TIMEOUT (seconds) allows"
            else:
                what = f"rank {which} of {self.world} ended; its own error says why"
            raise RankLost(f"{what}; start again to resume from the last checkpoint", missing) from error

    def missing(self) -> list[int]:
        """The ranks that do not report within PATIENCE seconds."""
        missing, end = [rank for rank in range(self.world) if rank != self.rank], monotonic() + PATIENCE
        with suppress(RuntimeError):  # the store is gone with the process that held it
            self.store.set(f"alive/{self.rank}", "")
            while missing and not self.dismissed.is_set() and monotonic() < end:  # its wait() blocks signal handlers
                sleep(0.05)
                missing = [rank for rank in missing if not self.store.check([f"alive/{rank}"])]
        return missing

    # -- shares and sums

    def counts(self, size: int) -> bool:
        """Whether this rank has samples of its own in a batch of so many."""
        return self.rank < len(shares(size, self.world)) - 1

    def everywhere(self, *flags: bool) -> list[bool]:
        """Whether each of them holds on all ranks, without waiting for a GPU."""
        found = torch.tensor(flags)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self.control)
        return found.tolist()

    def gather(self, what: T) -> list[T]:
        """The objects of all ranks, in their order, on all of them."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, what, group=self.control)
        return found

    def total(self, loss_sum: Tensor, count: Tensor | float) -> tuple[Tensor, Tensor]:
        """(loss sum, count) over all ranks, float64 on the device."""
        pair = torch.zeros(2, dtype=torch.float64, device=self.device)
        devices.put(pair, loss_sum, count)
        dist.all_reduce(pair)
        return pair[0], pair[1]

    def same(self, buffers: Iterable[Tensor]) -> None:
        """Give rank 0's buffers, such as BatchNorm's running averages, to all."""
        if buffers := list(buffers):
            together: Any = dist.group.WORLD
            dist._broadcast_coalesced(together, buffers, 2**28, 0)  # pyright: ignore[reportPrivateImportUsage]

    # -- gradients

    def wrap(self, network: nn.Module, compress: bool = False) -> None:
        """Wrap the network for steps in which gradients are added up while backward runs. compress: as bfloat16 there;
        `add_up` sends them as they are, in the first step under each plan and in each with a larger batch than before.
        Discards gradients: they would keep the former buckets, of which they are views, next to the new ones."""
        self.ddp = None  # its hooks on the parameters go with it
        for parameter in network.parameters():
            parameter.grad = None
        gc.collect()
        self.ddp = WrappedNetwork(network, gradient_as_bucket_view=True, find_unused_parameters=self.unused)
        self.ddp.broadcast_buffers = False  # an argument until torch 2.12
        self.ddp.register_comm_hook(None, self.hook)
        self.compress = compress

    def start(self, overlap: bool) -> None:
        """Before an attempt at a step. overlap: add up gradients while backward runs, where there was enough memory."""
        self.overlap, self.sent, self.complete, self.pending = overlap, 0, False, []
        if self.ddp is not None and overlap:
            if self.unused and not self.ddp.find_unused_parameters:
                self.wrap(self.ddp.module, self.compress)
            self.ddp.forwarded = False

    def hook(self, _, bucket):  # no annotations: DDP compares them with classes, and here they are text
        """DDP's communication hook: a sum and no mean, since losses are divided by the whole batch. Compressed as its
        own `bf16_compress_hook`, which is refused on a CPU by its name."""
        buffer = bucket.buffer()
        work = self.reduce(buffer.bfloat16() if self.compress else buffer)
        self.sent, self.complete = self.sent + 1, bucket.is_last()
        summed = work.get_future()
        self.pending.append(
            summed.then(lambda done: buffer.copy_(done.value()[0]) if self.compress else done.value()[0])
        )
        return self.pending[-1]

    def reduce(self, tensor: Tensor) -> Any:
        self.bytes += tensor.numel() * tensor.element_size()
        return dist.all_reduce(tensor, async_op=True)

    def add_up(self, parameters: Sequence[nn.Parameter]) -> None:
        """Add up gradients after backward; a parameter without one on any rank keeps none, as in one process."""
        without = [parameter.grad is None for parameter in parameters]
        none_without, *unused = self.everywhere(not any(without), *without)
        self.unused = self.unused or not none_without
        works = []
        for parameter in (p for p, out in zip(parameters, unused, strict=True) if not out):
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            works.append(self.reduce(parameter.grad))
        for work in works:
            work.wait()

    def agree_on_success(self, short: str | None) -> None:
        """After the gradients of an attempt, on all ranks. short: why memory ran out here. Raises Shortage."""
        incomplete = self.overlap and not self.complete
        sums = self.finish_buckets() if incomplete else {}
        enough, used = self.everywhere(short is None, short is not None or not incomplete)
        for summed in self.pending:
            summed.wait()
        self.pending = []
        self.unused = self.unused or not used
        if not enough:
            if self.overlap:
                assert self.ddp is not None
                self.wrap(self.ddp.module, self.compress)  # the reducer of an attempt that was given up is of no use
            reasons = [f"rank {rank}: {why}" for rank, why in enumerate(self.gather(short)) if why is not None]
            raise Shortage(reasons[0])
        if not used:
            self.keep_gradients(sums)

    def finish_buckets(self) -> dict[nn.Parameter, Tensor]:
        """Put the gradients that this rank has into the all-reduces that it still owes the others, since DDP waits for
        a bucket until each of its parameters got one; zeros where it gave up and has none, as DDP's own join hook does
        for a rank without data. Returns the sums for parameters without a gradient here."""
        assert self.ddp is not None
        reducer: Any = self.ddp.reducer
        if not self.ddp.forwarded:
            reducer._rebuild_buckets()  # in the second pass DDP agrees on new buckets
        sums: dict[nn.Parameter, Tensor] = {}
        for bucket in reducer._get_zeros_like_grad_buckets()[self.sent :]:
            for parameter, flat in zip(bucket.parameters(), bucket.gradients(), strict=True):
                summed = flat.as_strided(parameter.shape, parameter.stride())
                if parameter.grad is None:
                    sums[parameter] = summed
                else:
                    parameter.grad = summed.copy_(parameter.grad)
            reducer._run_comm_hook(bucket).wait()
        if self.ddp.find_unused_parameters:
            self.ddp._match_unused_params_allreduce()
        return sums

    def keep_gradients(self, sums: Mapping[nn.Parameter, Tensor]) -> None:
        """Give parameters the gradients that only other ranks had; one without any on all ranks keeps none, as in one
        process."""
        assert self.ddp is not None
        parameters = [p for p in self.ddp.module.parameters() if p.requires_grad]
        unused = self.everywhere(*(p.grad is None for p in parameters))
        for parameter, out in zip(parameters, unused, strict=True):
            if parameter.grad is None and not out:
                parameter.grad = sums[parameter]


class WrappedNetwork(DistributedDataParallel):
    """DDP with the attributes of its network, which a task's loss may read. forwarded: whether its forward returned."""

    forwarded = False

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        outputs = super().forward(*inputs, **named)
        self.forwarded = True
        return outputs


def from_process_group(error: RuntimeError) -> bool:
    """Whether communication failed: by the error's class, or, as gloo's has none, by its words where torch or this
    module raised it; a task may speak of connections of its own."""
    if isinstance(error, dist.DistError):
        return True
    *_, (frame, _) = walk_tb(error.__traceback__)
    inside = frame.f_globals.get("__name__", "").startswith((*COMMUNICATING, __name__))
    return inside and any(word in str(error) for word in LOST)


def shares(size: int, world: int) -> list[int]:
    """Where the shares of a batch of `size` samples begin and end: contiguous, as even as possible, and of at least two
    samples, which BatchNorm needs, so that a small batch has fewer than `world`."""
    count = max(min(world, size // 2), 1)
    return [size * i // count for i in range(count + 1)]


def share(batch: np.ndarray, rank: int, world: int) -> np.ndarray:
    """A rank's share of a batch of ids; where there is none, the first two as padding, whose loss does not count."""
    cuts = [*pairwise(shares(len(batch), world))]
    start, end = cuts[rank] if rank < len(cuts) else (0, 2)
    return batch[start:end]


def as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a contiguous tensor: gloo does not know all dtypes."""
    return tensor.reshape(-1).view(torch.uint8)
