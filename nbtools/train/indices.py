"""Labels, tokens and other indices out of range. On a GPU an operation that gets one ends the process's use of the GPU
("device-side assert triggered"), without a word about which. So the samples of a pack that have the lowest and highest
ones go through network, loss and metrics before training, and each operation's indices are looked at before it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nbtools.data import Pack, gather
from nbtools.errors import TrainError
from nbtools.train.evaluation import Sums, score
from nbtools.train.state import TrainState

DEVICES = ("cuda",)  # elsewhere torch raises an error that names the index, and nothing is lost but the step
LARGE, CHUNK = 2**31, 2**20  # bytes that are read of a column, at 0.1 to 0.8 s a GiB; and at once
Ranges = Iterator[tuple[str, Tensor, int, int]]  # what the indices are; they; the least, and the end of those allowed


class OutOfRange(TrainError):
    """An operation has no place for an index."""


def require_indices(state: TrainState, pack: Pack) -> None:
    """Raise TrainError if a sample has an index that is out of range."""
    if state.device.type not in DEVICES:
        return
    plan = state.applied.while_training()
    for i in extremes(pack):
        raw = {name: tensor.to(state.device) for name, tensor in gather(pack, np.array([i, i])).items()}
        try:
            with Checked():
                score(state.task, state.model, raw, plan, Sums(state.device))
        except OutOfRange as error:
            fix = "correct the sample, leave it out, or give the network more classes, tokens or positions"
            rule = f"{pack.folder}: sample {i} ({pack.names[i]}): {error}"
            raise TrainError(f"{rule}; {fix}", entry="Device-side assert") from None
        except Exception:
            continue  # evaluations will raise it, where it is explained


def extremes(pack: Pack) -> list[int]:
    """The samples of train and val with the two lowest and the two highest numbers of each column of whole numbers,
    floats too, since the last one may be ignored; and with the longest of each ragged one, whose positions may be
    indices too."""
    found: list[Any] = []
    used = np.zeros(len(pack), bool)
    used[[*pack.ids("train"), *pack.ids("val")]] = True
    for name in pack.read:
        values, ends = pack.arrays[name], pack.offsets.get(name)
        rows = used if ends is None else np.repeat(used, np.diff(ends))
        places = outermost(values, rows) if values.dtype.kind in "iuf" else []
        if ends is not None:
            longest = np.where(used, np.diff(ends), -1).argmax()
            places = [longest, *(np.searchsorted(ends, place, "right") - 1 for place in places)]
        found += places
    return list(dict.fromkeys(map(int, found)))


def outermost(values: np.ndarray, used: np.ndarray) -> list[int]:
    """A row of each of the two lowest and the two highest numbers, among those that are used; of a column beyond LARGE
    among evenly spaced chunks. None for numbers that are not whole."""
    rows: dict[int, int] = {}
    numbers: list[int] = []
    step = max(CHUNK * len(values) // max(values.nbytes, 1), 1)
    for start in range(0, len(values) if values.size else 0, step * max(-(-values.nbytes // LARGE), 1)):
        here = np.flatnonzero(used[start : start + step])
        if not len(here):
            continue
        part = values[start : start + step] if len(here) == step else values[start + here]
        low, high = part.min(), part.max()
        if values.dtype.kind == "f" and not (np.isfinite((low, high)).all() and (part == np.floor(part)).all()):
            return []
        near = len(numbers) > 1 and numbers[1] - numbers[0] == numbers[-1] - numbers[-2] == 1
        if near and numbers[0] <= low and high <= numbers[-1]:
            continue  # as for most chunks of a picture or a text, which is four times as fast
        second = part.min(where=part > low, initial=high), part.max(where=part < high, initial=low)
        for value in {int(each) for each in (low, high, *second)} - rows.keys():
            rows[value] = start + int(here[np.unravel_index((part == value).argmax(), part.shape)[0]])
        numbers = sorted(rows)
    return [rows[value] for value in dict.fromkeys(numbers[:2] + numbers[-2:])]


class Checked(TorchDispatchMode):
    """Inside, operations read their indices before they run. Raises OutOfRange."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for what, indices, least, end in RANGES.get(func.overloadpacket, none)(*args):
            for index in map(int, indices.aminmax() if indices.numel() else ()):
                if not least <= index < end:
                    raise OutOfRange(f"{what} is {index}, where {least} to {end - 1} are allowed")
        return func(*args, **kwargs or {})


def none(*_: Any) -> Ranges:
    yield from ()


def embedding(weight: Tensor, indices: Tensor, *_: Any) -> Ranges:
    yield "an index into an embedding", indices, 0, len(weight)


def nll_loss(logits: Tensor, target: Tensor, weight: Any, reduction: int, ignored: int) -> Ranges:
    yield "a class in the loss", target[target != ignored], 0, logits.shape[min(logits.dim() - 1, 1)]


def ctc_loss(logits: Tensor, targets: Tensor, steps: Any, lengths: Any, *_: Any) -> Ranges:
    if targets.dim() == 2:  # padded
        ends = torch.as_tensor(lengths, device=targets.device)[:, None]
        targets = targets[torch.arange(targets.shape[1], device=targets.device) < ends]
    yield "a class in the CTC loss", targets, 0, logits.shape[-1]


def gather_or_scatter(values: Tensor, dim: int, index: Tensor, *_: Any) -> Ranges:
    yield "an index to gather, scatter or select", index, 0, values.shape[dim] if values.dim() else 1


def subscript(values: Tensor, indices: Sequence[Tensor | None], *_: Any) -> Ranges:
    dim = 0
    for index in indices:
        mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        if index is not None and not mask:
            yield "an index", index, -values.shape[dim], values.shape[dim]
        dim += index.dim() if index is not None and mask else 1


aten: Any = torch.ops.aten
RANGES: dict[Any, Callable[..., Ranges]] = {
    **dict.fromkeys((aten.embedding, aten._embedding_bag, aten._embedding_bag_forward_only), embedding),
    **dict.fromkeys((aten.nll_loss_forward, aten.nll_loss2d_forward), nll_loss),
    **dict.fromkeys((aten._ctc_loss, aten._cudnn_ctc_loss), ctc_loss),
    **dict.fromkeys((aten.gather, aten.scatter, aten.scatter_, aten.index_select), gather_or_scatter),
    **dict.fromkeys((aten.scatter_add, aten.scatter_add_, aten.index_add, aten.index_add_), gather_or_scatter),
    **dict.fromkeys((aten.index, aten.index_put, aten.index_put_), subscript),
}
