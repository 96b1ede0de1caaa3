"""Training steps as CUDA graphs: the hundreds of kernels of a step, from the raw batch to its sums, are recorded once
and then launched as one (https://pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).

A graph repeats its kernels on the same memory, and nothing of what the host did. So the raw batch, the epoch and lr lie
in tensors that are written before each replay, and a step that reads a value on the host is not recorded.
"""

from __future__ import annotations

import gc
import pickle
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from nbtools.train.device import synchronizing
from nbtools.train.plan import Plan
from nbtools.train.task import Batch

T = TypeVar("T")
Sums = tuple[Tensor, Tensor | float]
Act = Callable[[Batch, int | Tensor], Sums]
WARM_UP = 3  # steps of a shape before it is recorded: kernels are loaded and chosen, what stays on the device is made
MOST_GRAPHS = 8  # shapes that are recorded: each keeps a batch, and what its step has alive at a time


class Recorder:
    """Records functions of tensors on a GPU, all in one pool of memory, on a stream of its own: there the steps before
    run too, since autograd goes back to the stream on which it first met a parameter."""

    def __init__(self, device: torch.device):
        self.stream, self.pool = torch.cuda.Stream(device), torch.cuda.graph_pool_handle()

    def run(self, act: Callable[[], T]) -> T:
        """What act returns, for the current stream."""
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        try:
            with torch.cuda.stream(self.stream):
                return act()
        finally:  # also where memory runs out: what follows restores tensors that act may still write
            current.wait_stream(self.stream)

    def rehearse(self, act: Callable[[], T]) -> tuple[T, str]:
        """`run`; and why it cannot be captured, or "". A capture is not to find that out: one that fails leaves the
        allocator of torch ≤ 2.11 in capture mode, which can end the process (pytorch#180395)."""
        found, lines = synchronizing(lambda: self.run(act))
        return found, f"the host waits for the device at {lines[0]}" if lines else ""

    def capture(self, act: Callable[[], T]) -> tuple[Callable[[], Any], T]:
        """(what repeats act, what that leaves its results in), without any effect yet. Raises RuntimeError; where it is
        not that memory ran out, CUDA may be of no more use to this process."""
        graph, current = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self.stream.device)
        gc.collect()  # graphs of other runs that end amid a capture would end it too
        try:  # thread_local: a feed's thread allocates and copies meanwhile
            with (
                torch.cuda.stream(current),  # else a failed capture leaves its own as the current one
                torch.cuda.graph(graph, self.pool, self.stream, capture_error_mode="thread_local"),
            ):
                found = act()
        except RuntimeError:
            numbers = torch.cuda.default_generators[self.stream.device_index]
            numbers.graphsafe_set_state(numbers.clone_state())  # else it waits for the end of the capture
            raise
        return graph.replay, found


def unrecordable(plan: Plan) -> str:
    """Why steps under a plan cannot be recorded; "" where they can."""
    if plan.amp == "fp16":
        return "fp16 decides on the host whether a step counts"
    if plan.checkpoint_activations:
        return "recomputing activations reads the state of random numbers on the host"
    return ""


class Recorded(NamedTuple):
    inputs: Batch
    replay: Callable[[], Any]
    sums: Sums


class Graphs:
    """The recorded steps of a run under its plan, one for each shape of a whole batch. events: where to say that there
    are none. off: why, or "". replayed: how many steps were."""

    def __init__(self, device: torch.device, events: list[str]):
        self.recorder, self.events, self.off, self.replayed = Recorder(device), events, "", 0
        self.epoch = torch.zeros((), dtype=torch.int64, device=device)
        self.plan: Plan | None = None
        self.steps: dict[tuple[torch.Size, ...], int | Recorded] = {}  # by shapes; a number: of steps so far

    def step(self, plan: Plan, raw: Batch, epoch: int, act: Act, owners: Sequence[Any] = ()) -> Sums:
        """act(raw, epoch), a step under this plan: replayed where such a step is recorded; its result is overwritten by
        the next one then. act reads what else may change, such as lr, in tensors. owners: modules and other objects
        whose plain values it must not change."""
        if plan is not self.plan:
            self.clear()
            self.plan = plan
        shapes = tuple(tensor.shape for tensor in raw.values())
        known = self.steps.get(shapes, 0 if len(self.steps) < MOST_GRAPHS else None)
        if self.off or known is None or len(raw["id"]) != plan.batch_size:
            return self.recorder.run(partial(act, raw, epoch))
        if not isinstance(known, Recorded):
            if known < WARM_UP:
                self.steps[shapes] = known + 1
                return self.warm_up(partial(act, raw, epoch), owners, last=known + 1 == WARM_UP)
            known = self.record(raw, act)
            if known is None:
                return self.recorder.run(partial(act, raw, epoch))
            self.steps[shapes] = known
        torch._foreach_copy_([*known.inputs.values()], [*raw.values()])  # pyright: ignore[reportPrivateImportUsage]
        self.epoch.fill_(epoch)
        known.replay()
        self.replayed += 1
        return known.sums

    def warm_up(self, act: Callable[[], Sums], owners: Sequence[Any], last: bool) -> Sums:
        if not last:
            return self.recorder.run(act)
        before = of_the_host(self.epoch.device, owners)
        found, why = self.recorder.rehearse(act)
        after = of_the_host(self.epoch.device, owners)
        changed = [does for (key, does), value in after.items() if value != before.get((key, does))]
        if why or changed:
            self.give_up(why or f"the step {changed[0]} on the host")
        return found

    def record(self, raw: Batch, act: Act) -> Recorded | None:
        """None where that fails: the run goes on without graphs."""
        try:
            inputs = {name: tensor.clone() for name, tensor in raw.items()}
            return Recorded(inputs, *self.recorder.capture(partial(act, inputs, self.epoch)))
        except RuntimeError as error:  # all of CUDA's, and that memory ran out
            why = str(error).split("\n")[0]
        self.give_up(why)
        return None

    def give_up(self, why: str) -> None:
        self.off = why
        self.clear()
        self.events.append(f"graph off: {why}; each kernel is launched by the host")

    def clear(self) -> None:
        """Forget all recorded steps, where their memory is needed, or other tensors take the place of some."""
        self.steps.clear()


def of_the_host(device: torch.device, owners: Sequence[Any]) -> dict[tuple[int, str], Any]:
    """What no graph repeats, by what a step does to change it: the random numbers and plain values of the host."""
    own = None if device.type == "cpu" else torch.get_rng_state().numpy()
    found: dict[tuple[int, str], Any] = {}
    for owner in owners:
        for name, value in getattr(owner, "__dict__", {}).items():
            if isinstance(value, bool | int | float | str) and name != "training":  # an evaluation may have come before
                found[id(owner), f"changes {type(owner).__name__}.{name}"] = value
    return {(0, "draws random numbers"): pickle.dumps((random.getstate(), np.random.get_state(), own)), **found}
