"""Training steps as CUDA graphs: the hundreds of kernels of a step, from the raw batch to its sums, are recorded once
and then launched as one (https://pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).

A graph repeats its kernels on the same memory, and nothing of what the host did. So the raw batch, the keys of random
numbers and lr lie in tensors that are written before each replay. A step is not recorded where it reads a value on the
host, or is not the one before on other samples: with another number, or with a tensor in place of an earlier one.
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from nbtools.train.device import synchronizing
from nbtools.train.plan import Plan
from nbtools.train.task import Batch

T = TypeVar("T")
Sums = tuple[Tensor, Tensor | float]
Act = Callable[[Batch], Sums]
WARM_UP = 4  # steps of a shape: what stays is made in the first, the next two are compared, the last shows what waits
MOST_GRAPHS = 8  # shapes that are recorded: each keeps a batch, and what its step has alive at a time
FULL = f"graph: only {MOST_GRAPHS} shapes of batches are recorded; of others each kernel is launched by the host"


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
    if plan.compile:
        return "of a compiled step it cannot be seen which tensors it reads, and whether the next one reads the same"
    return ""


class Trace(TorchDispatchMode):
    """A step's operations: of each its name, its plain arguments, and where the tensors lie that the step did not make
    and that are none of its inputs. kept: these tensors, by place, which no other one can take then."""

    def __init__(self, inputs: Batch):
        super().__init__()
        self.kept: dict[int, Tensor] = {}
        self.own = {place(tensor) for tensor in inputs.values()}
        self.operations: list[tuple[str, list[str]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(
            (func._schema.name.removeprefix("aten::"), [*map(self.seen, tree_leaves((args, kwargs)))])
        )
        found = func(*args, **(kwargs or {}))
        made = {place(leaf) for leaf in tree_leaves(found) if isinstance(leaf, Tensor)}
        self.own |= made - self.kept.keys()
        return found

    def seen(self, leaf: Any) -> str:
        if isinstance(leaf, bool | int | float | str):
            return repr(leaf)
        if not isinstance(leaf, Tensor) or place(leaf) in self.own:
            return ""
        self.kept[place(leaf)] = leaf
        return f"a tensor at {place(leaf)}"

    def differs(self, other: Trace) -> str:
        """Where another step is not this one, or ""."""
        for (name, these), (now, those) in zip(self.operations, other.operations, strict=False):
            if name != now:
                return f"a step calls {now} where the one before called {name}"
            for this, that in zip(these, those, strict=False):
                if this != that:
                    replaced = this.startswith("a tensor") and that.startswith("a tensor")
                    return f"{name} gets {'another tensor in each step' if replaced else f'{this}, then {that}'}"
        return "" if len(self.operations) == len(other.operations) else "a step has more operations than another"


def place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else 0


class Recorded(NamedTuple):
    """kept: the tensors that the graph reads or writes, none of which may be freed."""

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
        self.steps: dict[tuple[torch.Size, ...], list[Trace] | Recorded] = {}  # by shapes
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

    def step(self, raw: Batch, act: Act, owners: Sequence[Any] = ()) -> Sums:
        """act(raw), a step: replayed where such a step is recorded; its result is overwritten by the next one then. act
        reads what else may change, such as lr, in tensors. owners: modules and other objects whose plain values it must
        not change."""
        shapes = tuple(tensor.shape for tensor in raw.values())
        if self.off or len(raw["id"]) != self.plan.batch_size:
            return self.recorder.run(partial(act, raw))
        if shapes not in self.steps and len(self.steps) == MOST_GRAPHS:
            if not self.full:
                self.events.append(FULL)
            self.full = True
            return self.recorder.run(partial(act, raw))
        known = self.steps.setdefault(shapes, [])
        if not isinstance(known, Recorded):
            found, made = self.warm_up(known, raw, act, owners)
            if made is not None:
                self.steps[shapes] = made
            return found
        torch._foreach_copy_([*known.inputs.values()], [*raw.values()])  # pyright: ignore[reportPrivateImportUsage]
        known.replay()
        self.replayed += 1
        return known.sums

    def warm_up(self, traces: list[Trace], raw: Batch, act: Act, owners: Sequence[Any]) -> tuple[Sums, Recorded | None]:
        """A step of a shape before its graph, which is recorded after the last."""
        if len(traces) < WARM_UP - 1:
            traces.append(Trace(raw))
            with traces[-1]:
                return self.recorder.run(partial(act, raw)), None
        before = of_the_host(self.device, owners)
        found, why = self.recorder.rehearse(partial(act, raw))
        after = of_the_host(self.device, owners)
        changed = [does for (key, does), value in after.items() if value != before.get((key, does))]
        why = why or (f"the step {changed[0]} on the host" if changed else traces[-2].differs(traces[-1]))
        if why:
            self.give_up(why)
        return found, None if why else self.record(raw, act, traces[-1].kept)

    def record(self, raw: Batch, act: Act, kept: Any) -> Recorded | None:
        """None where that fails: the run goes on without graphs."""
        try:
            inputs = {name: tensor.clone() for name, tensor in raw.items()}
            return Recorded(inputs, *self.recorder.capture(partial(act, inputs)), kept)
        except RuntimeError as error:  # all of CUDA's, and that memory ran out
            why = str(error).split("\n")[0]
        self.give_up(why)
        return None

    def give_up(self, why: str) -> None:
        self.off = why
        self.clear()
        self.tell(why)

    def clear(self) -> None:
        """Forget all recorded steps, where their memory is needed, or other tensors take the place of some."""
        self.steps.clear()

    def tell(self, why: str) -> None:
        self.events.append(f"graph off: {why}; each kernel is launched by the host")


def of_the_host(device: torch.device, owners: Sequence[Any]) -> dict[tuple[int, str], Any]:
    """What no graph repeats, by what a step does to change it: the random numbers and plain values of the host."""
    own = None if device.type == "cpu" else torch.get_rng_state().numpy()
    found: dict[tuple[int, str], Any] = {}
    for owner in owners:
        for name, value in getattr(owner, "__dict__", {}).items():
            if name != "training":  # an evaluation may have come before
                found[id(owner), f"changes {type(owner).__name__}.{name}"] = plain(value)
    return {(0, "draws random numbers"): pickle.dumps((random.getstate(), np.random.get_state(), own)), **found}


def plain(value: Any, depth: int = 3) -> Any:
    """The numbers and texts in a value, also within so many lists, tuples, dicts or sets."""
    if isinstance(value, dict):
        value = [*value.items()]
    if depth and isinstance(value, list | tuple | set):
        return [plain(each, depth - 1) for each in value]
    return value if isinstance(value, bool | int | float | str) else None
