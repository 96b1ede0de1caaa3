"""Training steps as CUDA graphs: the hundreds of kernels of a step, from the raw batch to its sums, are recorded once
and then launched as one.

A graph repeats its kernels on the same memory, and nothing of what the host did. So the raw batch, the keys of random
numbers and lr lie in tensors that are written before each replay, and the first replay has to give what the step gave
when the host launched each kernel.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nbtools.train.capture import Recorder, uncapturable
from nbtools.train.device import within_memory
from nbtools.train.plan import Plan
from nbtools.train.task import Batch

Sums = tuple[Tensor, Tensor | float]
Act = Callable[[Batch], Sums]
WARM_UP = 2  # steps of a shape before the one that is recorded
MOST_GRAPHS = 8  # shapes that are recorded: each keeps a batch, and what its step has alive at a time
NEAR = 1e-3  # difference of two equal losses: a GPU may add in another order
NEAR_STEP = 0.1  # and of two equal updates: of a gradient that is only rounding Adam makes a whole step


def unrecordable(plan: Plan) -> str:
    """Return why steps under a plan cannot be recorded; "" where they can."""
    if plan.amp == "fp16":
        return "fp16 decides on the host whether a step counts"
    if plan.checkpoint_activations:
        return "recomputing activations reads the state of random numbers on the host"
    return "a compiled step is not recorded" if plan.compile else ""


class Recorded(NamedTuple):
    inputs: Batch
    replay: Callable[[], Any]
    sums: Sums
    kept: Any  # the tensors that the graph may read, none of which may be freed


class Graphs:
    """The recorded steps of a run under its present plan, one for each shape of a whole batch. events: where to say
    that there are none. off: why, or "". replayed: how many steps were."""

    def __init__(self, device: torch.device, events: list[str]):
        self.recorder, self.events, self.off, self.replayed = Recorder(device), events, "", 0
        gpu = torch.empty(0, device=device).device.index  # also of a device without its number
        self.numbers = torch.default_generator if gpu is None else torch.cuda.default_generators[gpu]
        self.plan: Plan | None = None
        self.steps: dict[tuple[torch.Size, ...], int | Recorded] = {}  # by shapes: how many came, or what was recorded
        if why := uncapturable(device):
            self.give_up(why)

    def follow(self, plan: Plan) -> bool:
        """Return whether steps under this plan, the present one from now on, are recorded; say why not."""
        why = unrecordable(plan)
        if plan is not self.plan:
            self.plan = plan
            self.clear()
            self.events += [f"graph off: {why}; each kernel is launched by the host"] if why else []
        return not why

    def step(self, raw: Batch, act: Act, written: Callable[[], list[Tensor]]) -> Sums:
        """Return act(raw), a step: replayed where such a step is recorded; its result is overwritten by the next one
        then. act reads what else may change, such as lr, in tensors. written: the tensors that it changes."""
        shapes, eager = tuple(tensor.shape for tensor in raw.values()), partial(act, raw)
        known = self.steps.get(shapes, 0 if len(self.steps) < MOST_GRAPHS else None)
        if known is None or self.off or self.plan is None or len(raw["id"]) != self.plan.batch_size:
            return self.recorder.run(eager)
        if isinstance(known, Recorded):
            torch._foreach_copy_([*known.inputs.values()], [*raw.values()])  # pyright: ignore[reportPrivateImportUsage]
            known.replay()
            self.replayed += 1
            return known.sums
        self.steps[shapes] = known + 1
        return self.recorder.run(eager) if known < WARM_UP else self.first(raw, act, written(), shapes)

    def first(self, raw: Batch, act: Act, written: list[Tensor], shapes: tuple[torch.Size, ...]) -> Sums:
        """Return a step that the host launches, then recorded and replayed from where it began. Where the two differ,
        or the second fails, the first one counts, and the run goes on without graphs."""
        before, why = within_memory(lambda: self.copy(written))
        if before is None:
            self.give_up(why)
            return self.recorder.run(partial(act, raw))
        eager, why = self.recorder.rehearse(partial(act, raw))
        try:
            made = None if why else self.record(raw, act, written, before)
            after = self.copy(written)
            if made is not None:
                self.restore(written, before)
                made.replay()
                if same(made.sums[0], eager[0], written, after, before):
                    self.steps[shapes], self.replayed = made, self.replayed + 1
                    return made.sums
                self.restore(written, after)
                why = "replayed, a step gives something else: it depends on what the host does in it"
        except RuntimeError as error:  # all of CUDA's, and that memory ran out
            why = str(error).split("\n")[0]
        self.give_up(why)
        return eager

    def record(self, raw: Batch, act: Act, written: list[Tensor], before: list[Tensor]) -> Recorded:
        """Return the step, without any effect yet. The graph may read whatever tensor is there by now."""
        for tensor in written:
            tensor.grad = None
        inputs, copied = {name: tensor.clone() for name, tensor in raw.items()}, {id(tensor) for tensor in before}
        alive = [each for each in gc.get_objects() if issubclass(type(each), Tensor) and id(each) not in copied]
        return Recorded(inputs, *self.recorder.capture(partial(act, inputs)), alive)

    def copy(self, written: list[Tensor]) -> list[Tensor]:
        """Return copies of tensors, and of the state of random numbers."""
        return [*(tensor.detach().clone() for tensor in written), self.numbers.get_state()]

    @torch.no_grad()
    def restore(self, written: list[Tensor], copies: list[Tensor]) -> None:
        torch._foreach_copy_(written, copies[:-1])  # pyright: ignore[reportPrivateImportUsage]
        self.numbers.set_state(copies[-1])

    def give_up(self, why: str) -> None:
        self.off = why
        self.clear()
        self.events.append(f"graph off: {why}; each kernel is launched by the host")

    def clear(self) -> None:
        """Forget all recorded steps, where their memory is needed, or other tensors take the place of some."""
        self.steps.clear()


@torch.no_grad()
def same(loss: Tensor, expected: Tensor, now: list[Tensor], after: list[Tensor], before: list[Tensor]) -> bool:
    """Return whether two steps from the same state give the same loss, and weights that differ by little of a step."""

    def apart(these: list[Tensor], those: list[Tensor]) -> float:
        pairs = ((a, b) for a, b, tensor in zip(these, those, now, strict=False) if tensor.requires_grad)
        return sum(float((a - b).float().square().sum()) for a, b in pairs) ** 0.5

    near = torch.allclose(loss, expected, NEAR, NEAR, equal_nan=True)
    return near and apart(now, after) <= NEAR_STEP * apart(after, before)
