"""What a CUDA graph does with a function of tensors, on a CPU: its operations are recorded once, without any effect,
and then repeated on the same memory, with no Python in between. What a capture refuses, this refuses too."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")
READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal")  # and an index of booleans
REFUSED = "operation not permitted when stream is capturing"


def tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Recording(TorchDispatchMode):
    """The operations of a call. found: what came before it and they use, as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[tuple[Any, Any, Any, Any]] = []
        self.found: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.made: set[int] = set()
        self.waits: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        picks = name in ("index", "index_put_") and any(i is not None and i.dtype == torch.bool for i in args[1])
        if name in READS or picks or name == "lift_fresh":  # a tensor of the host's own values
            self.waits.append(name)
        for tensor in tensors((args, kwargs)):
            if place(tensor) not in self.made | self.found.keys():
                self.found[place(tensor)] = tensor.untyped_storage(), tensor.untyped_storage().clone()
        out = func(*args, **kwargs)
        if name in ("_to_copy", "copy_") and args[name == "copy_"].device != out.device:
            self.waits.append(name)
        self.made |= {place(tensor) for tensor in tensors(out)} - self.found.keys()
        self.operations.append((func, args, kwargs, out))
        return out

    def undo(self) -> None:
        for storage, before in self.found.values():
            storage.copy_(before)

    @torch.no_grad()
    def replay(self) -> None:
        for func, args, kwargs, out in self.operations:
            if func.is_view:
                continue
            for there, now in zip(tensors(out), tensors(func(*args, **kwargs)), strict=True):
                if place(there) != place(now):
                    assert there.shape == now.shape, f"{func} gave another shape: {there.shape}, then {now.shape}"
                    there.copy_(now)


class Tape:
    """A `Recorder` for the CPU."""

    def __init__(self, device: torch.device):
        self.captured = 0

    def run(self, act: Callable[[], T]) -> T:
        return act()

    def capture(self, act: Callable[[], T]) -> tuple[Callable[[], Any], T]:
        numbers = torch.get_rng_state()
        with Recording() as recording:
            found = act()
        torch.set_rng_state(numbers)
        recording.undo()
        if recording.waits:
            raise RuntimeError(f"CUDA error: {REFUSED}")
        self.captured += 1
        return recording.replay, found


def synchronizing(act: Callable[[], T]) -> tuple[T, list[str]]:
    """As that of `nbtools.train` on a GPU: a result, and what the host waited for."""
    with Recording() as recording:
        result = act()
    return result, recording.waits


@torch.library.custom_op("tests::ctc", mutates_args=())
def cudnn_ctc(
    logits: Tensor, texts: Tensor, steps: Tensor, lengths: Tensor, blank: int, deterministic: bool, zero: bool
) -> tuple[Tensor, Tensor]:
    """In place of cuDNN's operator: a single operation, whose reads of lengths are no concern of the host."""
    log_probs, rest = logits.log_softmax(2), (texts[: int(lengths.sum())].long(), steps.tolist(), lengths.tolist())
    each, alpha = torch.ops.aten._ctc_loss.default(log_probs, *rest, blank)
    gradient = torch.ops.aten._ctc_loss_backward(torch.ones_like(each), log_probs, *rest, each, alpha, blank)
    return each, gradient - log_probs.exp() * gradient.sum(2, keepdim=True)
