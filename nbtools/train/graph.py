"""Training steps as CUDA graphs: the hundreds of kernels of a step, from the raw batch to its sums, are recorded once
and then launched as one (https://pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).

A graph repeats its kernels on the same memory, and nothing of what the host did. So the raw batch, the keys of random
numbers and lr lie in tensors that are written before each replay. Whether a step can be repeated, its first replay
shows: it has to give what the host gives that launches each kernel.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from nbtools.train.device import synchronizing, within_memory
from nbtools.train.plan import Plan
from nbtools.train.task import Batch

T = TypeVar("T")
Sums = tuple[Tensor, Tensor | float]
Act = Callable[[Batch], Sums]
WARM_UP = 2  # steps of a shape before the one that is recorded
MOST_GRAPHS = 8  # shapes that are recorded: each keeps a batch, and what its step has alive at a time
FULL = f"graph: only {MOST_GRAPHS} shapes of batches are recorded; of others each kernel is launched by the host"
NEAR = 1e-3  # difference of two equal losses: a GPU may add in another order
NEAR_STEP = 0.1  # and of two equal updates: of a gradient that is only rounding Adam makes a whole step


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
        found, lines = synchronizing(partial(self.run, act))
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
    return "a compiled step is not recorded" if plan.compile else ""


class Recorded(NamedTuple):
    """kept: the tensors that the graph may read, none of which may be freed."""

    inputs: Batch
    replay: Callable[[], Any]
    sums: Sums
    kept: Any


class Graphs:
    """The recorded steps of a run under its present plan, one for each shape of a whole batch. events: where to say
    that there are none. off: why, or "". replayed: how many steps were."""

    def __init__(self, device: torch.device, events: list[str], plan: Plan):
        self.device, self.recorder, self.events = device, Recorder(device), events
        self.off, self.full, self.replayed = "", False, 0
        self.steps: dict[tuple[torch.Size, ...], int | Recorded] = {}  # by shapes: how many came, or what was recorded
        self.begin(plan)

    def begin(self, plan: Plan) -> None:
        """Steps under this plan from now on; says so where they cannot be recorded."""
        self.plan = plan
        self.clear()
        if why := unrecordable(plan):
            self.tell(why)

    def follow(self, plan: Plan) -> bool:
        """Whether steps under this plan, the present one from now on, are recorded."""
        if plan is not self.plan:
            self.begin(plan)
        return not unrecordable(plan)

    def step(self, raw: Batch, act: Act, written: Callable[[], list[Tensor]]) -> Sums:
        """act(raw), a step: replayed where such a step is recorded; its result is overwritten by the next one then. act
        reads what else may change, such as lr, in tensors. written: the tensors that it changes."""
        shapes, eager = tuple(tensor.shape for tensor in raw.values()), partial(act, raw)
        if self.off or len(raw["id"]) != self.plan.batch_size:
            return self.recorder.run(eager)
        if shapes not in self.steps and len(self.steps) == MOST_GRAPHS:
            if not self.full:
                self.events.append(FULL)
            self.full = True
            return self.recorder.run(eager)
        known = self.steps.get(shapes, 0)
        if not isinstance(known, Recorded):
            self.steps[shapes] = known + 1
            return self.recorder.run(eager) if known < WARM_UP else self.first(raw, act, written(), shapes)
        torch._foreach_copy_([*known.inputs.values()], [*raw.values()])  # pyright: ignore[reportPrivateImportUsage]
        known.replay()
        self.replayed += 1
        return known.sums

    def first(self, raw: Batch, act: Act, written: list[Tensor], shapes: tuple[torch.Size, ...]) -> Sums:
        """A step that the host launches, then recorded and replayed from where it began. Where the two differ, or the
        second fails, the first one counts, and the run goes on without graphs."""
        before, why = within_memory(lambda: self.copy(written))
        if before is None:
            self.give_up(why)
            return self.recorder.run(partial(act, raw))
        found, why = self.recorder.rehearse(partial(act, raw))
        try:
            made = None if why else self.record(raw, act, written, before)
            after = self.copy(written)
            if made is not None:
                self.restore(written, before)
                made.replay()
                if same(made.sums[0], found[0], *(each[: len(written)] for each in (written, after, before))):
                    self.steps[shapes], self.replayed = made, self.replayed + 1
                    return made.sums
                self.restore(written, after)
                why = "replayed, a step gives something else: it depends on what the host does in it"
        except RuntimeError as error:  # all of CUDA's, and that memory ran out
            why = str(error).split("\n")[0]
        self.give_up(why)
        return found

    def record(self, raw: Batch, act: Act, written: list[Tensor], before: list[Tensor]) -> Recorded:
        """The step, without any effect yet. The graph may read whatever tensor is there by now."""
        for tensor in written:
            tensor.grad = None
        inputs, copied = {name: tensor.clone() for name, tensor in raw.items()}, {id(tensor) for tensor in before}
        alive = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and id(each) not in copied]
        return Recorded(inputs, *self.recorder.capture(partial(act, inputs)), alive)

    def copy(self, written: list[Tensor]) -> list[Tensor]:
        """Copies of tensors, and of the state of random numbers."""
        numbers = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else torch.get_rng_state()
        return [*(tensor.detach().clone() for tensor in written), numbers]

    def restore(self, written: list[Tensor], copies: list[Tensor]) -> None:
        with torch.no_grad():
            torch._foreach_copy_(written, copies[:-1])  # pyright: ignore[reportPrivateImportUsage]
        put = (
            partial(torch.cuda.set_rng_state, device=self.device) if self.device.type == "cuda" else torch.set_rng_state
        )
        put(copies[-1])

    def give_up(self, why: str) -> None:
        self.off = why
        self.clear()
        self.tell(why)

    def clear(self) -> None:
        """Forget all recorded steps, where their memory is needed, or other tensors take the place of some."""
        self.steps.clear()

    def tell(self, why: str) -> None:
        self.events.append(f"graph off: {why}; each kernel is launched by the host")


@torch.no_grad()
def same(loss: Tensor, expected: Tensor, now: list[Tensor], after: list[Tensor], before: list[Tensor]) -> bool:
    """Whether two steps from the same state give the same loss, and the same weights by the length of the step."""
    learned = [i for i, tensor in enumerate(now) if tensor.requires_grad]

    def apart(these: list[Tensor], those: list[Tensor]) -> float:
        return sum(float((these[i] - those[i]).float().square().sum()) for i in learned) ** 0.5

    return torch.allclose(loss, expected, NEAR, NEAR, equal_nan=True) and apart(now, after) <= NEAR_STEP * apart(
        after, before
    )
