"""What a Task does by default with a pack that `nb.pack` wrote: batches, augmented by name; metrics by name, as sums
that add up over batches; answers, and pictures of samples.

B samples, C channels, H × W pixels, L steps of the longest sequence, F features, K classes, D values.
"""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from nbtools.data import TARGET, Card, Draws, Pack, constant, places
from nbtools.errors import TrainError
from nbtools.show import percent
from nbtools.train.plan import require_known

Batch = dict[str, Tensor]
Pair = tuple[Tensor | float, Tensor | float]
"""Numerator and denominator, which add up; (K,) each for a mean over K classes, as mIoU; (K, BINS) of `bin_logits`."""
BINS, WIDTH = 2048, 1 / 64  # logits from -16 to 16, between which average precision tells no finer than this
FEW = 8  # numbers of an answer that are shown
PREPARED = "as `batch` makes it; default: channels first, bytes as 0 to 1, minus options' mean over its std"
STRENGTHS = {"crop": 1 / 8, "flip": 0.5, "colour": 0.3}  # where none is given, in the order in which they are applied


def packed_dataset(card: Card | None) -> bool:
    """Return whether `nb.pack` wrote the pack, so that its card says what its columns are."""
    return card is not None and "roles" in card.options


def images_of(card: Card) -> list[str]:
    return [name for name in card.options["inputs"] if card.columns[name].layout]


def shape_of(card: Card, name: str) -> tuple[int, ...]:
    """Return the shape of a sample's column as the network takes it, without the length of a ragged one."""
    shape, layout = card.columns[name].shape, card.columns[name].layout
    return (shape[2], *shape[:2]) if layout == "hwc" else (1, *shape) if layout == "hw" else tuple(shape)


def prepare(raw: Batch, card: Card, draws: Draws | None, names: Any) -> Batch:
    """Return the inputs of a raw batch as a network takes them: images (B, C, H, W) float32, of bytes from 0 to 1;
    augmented by name given draws; normalised by the card's mean and std. The padding of sequences stays 0."""
    inputs = card.options["inputs"]
    batch = raw | {name: as_input(raw[name], card, name) for name in inputs}
    if draws is not None and names:
        batch = augment(batch, card, images_of(card), draws, names)
    for name in (name for name in inputs if name in card.options["mean"]):
        mean, std = scale_of(card, name, raw[name].device)
        batch[name] = (batch[name].float() - mean) / std
        if card.columns[name].kind == "ragged":
            batch[name] = batch[name] * inside(batch[name], raw[f"{name}_length"])
    return batch


def as_input(values: Tensor, card: Card, name: str) -> Tensor:
    """Return a column with its channels before its pixels, and its 255ths as float32 from 0 to 1."""
    column = card.columns[name]
    if column.layout == "hwc":
        values = values.permute(0, 3, 1, 2)
    elif column.layout == "hw":
        values = values.unsqueeze(1)
    if column.layout and column.dtype == "|u1" and not (name == TARGET and card.options.get("binary")):
        return values.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
    return values.contiguous()


def scale_of(card: Card, name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (mean, std) of a column over the training split: per channel (C, 1, 1), feature (F,), (F, 1), or all."""
    shape = (-1, 1, 1) if card.columns[name].layout else np.shape(card.options["mean"][name])
    mean, std = (constant(tuple(np.ravel(card.options[m][name]).tolist()), device).view(shape) for m in ("mean", "std"))
    return mean, std


def inside(values: Tensor, lengths: Tensor) -> Tensor:
    """Return which steps (B, L, 1, …) of padded sequences (B, L, …) are within their lengths."""
    steps = places(values.shape[1], values.device) < lengths[:, None]
    return steps.view(*steps.shape, *[1] * (values.dim() - 2))


def strengths(names: Collection[str] | Mapping[str, float]) -> dict[str, float]:
    """Return name → strength. Raises TrainError for an unknown name or a negative strength."""
    names = (names,) if isinstance(names, str) else names
    if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        rule = f"augment must be names of {', '.join(STRENGTHS)}, or name → strength, got {type(names).__name__}"
        raise TrainError(f"{rule}; transforms go into the Dataset, with nb.pack(…, store=False)")
    given = dict(names) if isinstance(names, Mapping) else {name: STRENGTHS.get(name, 0.0) for name in names}
    for name, strength in given.items():
        require_known("augment has no", name, STRENGTHS, TrainError)
        if not strength >= 0:
            raise TrainError(f"augment: the strength of {name} must be at least 0, got {strength!r}")
    return given


def require_augmentable(card: Card, names: Any) -> None:
    """Raise TrainError for what the inputs do not take, or what would leave a mask or boxes of an image as they are."""
    wanted, images = strengths(names).keys(), images_of(card)
    if wanted and not images:
        there = ", ".join(f"{name} {card.columns[name]}" for name in card.options["inputs"])
        raise TrainError(f"augment: {min(wanted)} needs images, but the inputs are {there}; leave it out")
    for name, column in card.columns.items():
        axes = len(column.shape) + (column.kind == "ragged" and name == TARGET)  # maps (H, W), and lists of boxes
        marked = name in card.options.get("points", {})  # which move with a flip
        left = wanted & ({"crop"} if marked else {"crop", "flip"})
        if left and (marked or axes >= 2) and name not in images:
            rule = f"augment: {min(left)} would leave {'the target' if name == TARGET else name} ({column}) as it is"
            raise TrainError(f"{rule}; augment both in your task's `batch`")


def augment(batch: Batch, card: Card, images: Collection[str], draws: Draws, names: Any) -> Batch:
    """Return the batch with its images (B, C, H, W) float32 augmented, those of a sample alike, and the points and
    boxes on them. What becomes of an image depends on seed, epoch and sample only, whatever the batch."""
    wanted, batch = strengths(names), batch | {name: batch[name].float() for name in images}
    if "crop" in wanted:
        bits = draws.bits((2,))
        batch |= {name: crop(batch[name], bits, wanted["crop"]) for name in images}
    if "flip" in wanted:
        flip(batch, card, images, draws.chance(wanted["flip"]))
    if "colour" in wanted:
        low, high = 1 - wanted["colour"], 1 + wanted["colour"]
        factors = draws.uniforms(*[(low, high)] * 3)[..., None, None, None]  # (B, 3, 1, 1, 1)
        batch |= {name: colour(batch[name], *factors.unbind(1)) for name in images}
    return batch


def crop(x: Tensor, bits: Tensor, most: float) -> Tensor:
    """Shift by whole pixels, up to this share of either side; the image is mirrored at its edges."""
    for axis in (2, 3):
        length = x.shape[axis]
        far = min(round(most * length), length - 1)
        at = (places(length, x.device) + (bits[:, axis - 2] % (2 * far + 1) - far)[:, None]).abs()
        at = at.minimum(2 * (length - 1) - at)  # (B, length), mirrored at both ends
        x = x.gather(axis, (at[:, None, :, None] if axis == 2 else at[:, None, None, :]).expand(x.shape))
    return x


def flip(batch: Batch, card: Card, images: Collection[str], chosen: Tensor) -> None:
    """Swap left and right of the chosen samples (B,): of their images, and of the points and boxes on them."""
    for name in images:
        batch[name] = torch.where(chosen[:, None, None, None], batch[name].flip(3), batch[name])
    for name, (image, kind) in card.options.get("points", {}).items():
        if name in batch:
            spots, width = batch[name], batch[image].shape[3]
            order = constant((2, 1, 0, 3) if kind == "boxes" else (0, 1), spots.device, torch.int64)
            moved = spots.index_select(-1, order)
            moved[..., ::2] = width - moved[..., ::2]
            swapped = chosen.view(-1, *[1] * (spots.dim() - 1))
            if card.columns[name].kind == "ragged":
                swapped = swapped & inside(spots, batch[f"{name}_length"])
            batch[name] = torch.where(swapped, moved, spots)


def colour(x: Tensor, light: Tensor, contrast: Tensor, saturation: Tensor) -> Tensor:
    """Multiply brightness, contrast around the image's mean and saturation (RGB) by these; not clipped."""
    mean = x.mean((1, 2, 3), keepdim=True)
    x = ((x - mean) * contrast + mean) * light
    grey = x.mean(1, keepdim=True)
    return grey + (x - grey) * saturation if x.shape[1] == 3 else x


def logits_of(outputs: Any) -> Tensor:
    """Return the tensor of outputs: themselves, their `.logits` (transformers), or their "out" (torchvision)."""
    for tensor in (outputs, getattr(outputs, "logits", None), outputs.get("out") if hasattr(outputs, "get") else None):
        if isinstance(tensor, Tensor):
            return tensor
    rule = f"the network returns a {type(outputs).__name__} without a tensor as .logits or ['out']"
    raise TrainError(f"{rule}; return the tensor, or write a Task with model, loss, metrics and decode")


def class_logits(outputs: Any, card: Card) -> Tensor:
    """Return logits (B, K). Raises TrainError if they are not of the pack's classes."""
    logits, count = logits_of(outputs), len(card.classes)
    if logits.dim() < 2 or logits.shape[1] != count:
        rule = f"the network must return one logit for each of {count} classes, (B, {count}), got {tuple(logits.shape)}"
        raise TrainError(f"{rule}; change its last layer, or pass a function: lambda classes: Net(classes)")
    return logits


def values_like(outputs: Any, shape: Sequence[int]) -> Tensor:
    """Return outputs in the targets' shape, from which they may differ by axes of length 1, or as flat rows (B, D):
    (B, 1) and (B,) would be broadcast to (B, B). Raises TrainError for other shapes."""
    values, shape = logits_of(outputs), tuple(shape)
    alike = [n for n in values.shape if n != 1] == [n for n in shape if n != 1]
    if not alike and values.shape != (shape[0], math.prod(shape[1:])):
        rule = f"the network must return one value for each element of the target, {shape}, got {tuple(values.shape)}"
        raise TrainError(f"{rule}; change its last layer")
    return values.float().reshape(shape)


def top(count: int, logits: Tensor, y: Tensor) -> Pair:
    return (logits.topk(min(count, logits.shape[1]), 1).indices == y[:, None]).any(1).sum(), y.numel()


def per_class(logits: Tensor, y: Tensor, f1: bool) -> Pair:
    """Return, of each class, recall TP / (TP + FN) or F1, 2 TP / (2 TP + FP + FN), as two tensors (K,). y: classes
    (B,), or labels (B, K), of which those above 0.5 are predicted."""
    count = logits.shape[1]
    predicted, true = (logits > 0, y) if y.dim() > 1 else (F.one_hot(logits.argmax(1), count), F.one_hot(y, count))
    hits = (predicted * true).sum(0)
    return (2 * hits, predicted.sum(0) + true.sum(0)) if f1 else (hits, true.sum(0))


def bin_logits(logits: Tensor, y: Tensor) -> Pair:
    """Return how many samples have each label, and how many there are, by the bin of their logit, (K, BINS) each."""
    bins = (logits.float() / WIDTH + BINS // 2).long().clamp(0, BINS - 1).t()  # (K, B)
    zeros, true = torch.zeros(len(bins), BINS, device=logits.device), y.t().float()
    return zeros.scatter_add(1, bins, true), zeros.scatter_add(1, bins, torch.ones_like(true))


def mean_average_precision(true: Tensor, all: Tensor) -> float:
    """Return Σ (recall_n - recall_(n-1)) · precision_n, averaged over the labels that some sample has, as sklearn."""
    hits, chosen = (each.cpu().double().flip(1).cumsum(1) for each in (true, all))  # from the highest logit down
    average = (true.cpu().flip(1) * hits / chosen.clamp(min=1)).sum(1) / hits[:, -1]
    return float(average.nanmean().nan_to_num())  # 0 / 0 of a label that no sample has


METRICS: dict[str, tuple[str, str, Callable[[Tensor, Tensor], Pair]]] = {  # kinds, "-" if lower is better, measure
    "accuracy": ("classes", "", partial(top, 1)),
    "top5_accuracy": ("classes", "", partial(top, 5)),
    "balanced_accuracy": ("classes", "", partial(per_class, f1=False)),
    "f1": ("classes or labels", "", partial(per_class, f1=True)),
    "map": ("labels", "", bin_logits),
    "mae": ("values", "-", lambda values, y: ((values - y).abs().sum(), y.numel())),
    "mse": ("values", "-", lambda values, y: ((values - y).square().sum(), y.numel())),
}


def as_tuple(metrics: Any) -> tuple[Any, ...]:
    """Return names and functions as a tuple. Raises TrainError for an unknown name, and for anything else."""
    if isinstance(metrics, Mapping) or not (callable(metrics) or isinstance(metrics, Iterable)):
        rule = "metrics must be names, and functions of (outputs, batch) that return (sum, count)"
        raise TrainError(f"{rule}, got {type(metrics).__name__}; a function is reported by its own name")
    each = (metrics,) if isinstance(metrics, str) or callable(metrics) else tuple(metrics)
    for name in each:
        if not callable(name):
            require_known("metrics has no", str(name), METRICS, TrainError)
    return each


def score(metrics: Any, outputs: Any, batch: Batch, card: Card | None) -> dict[str, Pair]:
    """Return metric → Pair, of names and of functions of (outputs, batch). Raises TrainError for anything else."""
    pairs: dict[str, Pair] = {}
    for metric in as_tuple(metrics):
        own = metric if isinstance(metric, str) else getattr(metric, "__name__", type(metric).__name__)
        try:
            made = metric(outputs, batch) if callable(metric) else by_name(metric, outputs, batch[TARGET], card)
        except (TypeError, AttributeError, KeyError, IndexError, ValueError) as error:
            rule = f"metrics: {own} must take (outputs, batch), where batch[{TARGET!r}] is the target"
            raise TrainError(f"{rule}, and return (sum, count): {type(error).__name__}: {error}") from error
        for name, pair in (made if isinstance(made, Mapping) else {own: made}).items():
            if name == "loss" or name in pairs:
                raise TrainError(f"metrics: the name {name!r} is taken; rename the function, or return {{name: pair}}")
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                came = f"a tensor of shape {tuple(pair.shape)}" if isinstance(pair, Tensor) else repr(pair)
                raise TrainError(f"metrics: {name} must be (sum, count), which add up over batches, got {came}")
            pairs[name] = (pair[0], pair[1])
    return pairs


def by_name(metric: str, outputs: Any, y: Tensor, card: Card | None) -> Pair:
    (kinds, _, measure), kind = METRICS[metric], "not of nb.pack" if card is None else card.options.get("kind", "none")
    if card is None or kind not in kinds:
        rule = f"metrics: {metric!r} is for {kinds} of nb.pack, but the targets of the pack are {kind}"
        raise TrainError(f"{rule}; choose another, or write metrics(outputs, batch)")
    return measure(values_like(outputs, y.shape) if kind == "values" else class_logits(outputs, card), y)


class Answer(NamedTuple):
    """A class and its probability."""

    name: str
    probability: float

    def __str__(self) -> str:
        return f"{self.name} ({percent(self.probability)})"


class Labels(tuple[Answer, ...]):
    """The labels of a sample, in the order of the classes."""

    def __str__(self) -> str:
        return ", ".join(map(str, self)) or "none"


def answers(outputs: Any, card: Card) -> list[Any]:
    """Return classes with their probability, or all labels above 0.5 with theirs; values as numbers, lists of D
    numbers, or arrays of the targets' shape; of other packs, and maps of classes, the outputs row by row."""
    kind, outputs = card.options["kind"], logits_of(outputs)
    if kind == "values":
        with suppress(TrainError):  # a Task's own outputs, such as a mean and a variance
            values = values_like(outputs, (len(outputs), *shape_of(card, TARGET)))
            values = values.permute(0, 2, 3, 1) if card.columns[TARGET].layout == "hwc" else values
            return values.tolist() if values.dim() < 3 else list(values.cpu().numpy())
    elif kind == "labels":
        rows = class_logits(outputs, card).float().sigmoid().tolist()
        return [Labels(Answer(*pair) for pair in zip(card.classes, row, strict=True) if pair[1] > 0.5) for row in rows]
    elif kind == "classes" and outputs.shape[1:] == (len(card.classes),):
        best = outputs.float().softmax(1).max(1)
        return [Answer(card.classes[i], p) for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    return list(outputs.cpu())


def preview(pack: Pack, i: int, answer: Any) -> tuple[np.ndarray, str, str, bool]:
    """Return `Task.preview` of a sample: its first image; values stand next to the true ones, not right or wrong."""
    card, sample, name = pack.card, pack.sample(i), images_of(pack.card)[0]
    image = sample[name].transpose(1, 2, 0) if card.columns[name].layout == "chw" else sample[name]
    if image.dtype != np.uint8:
        low, high = min(float(image.min()), 0.0), max(float(image.max()), 1.0)
        image = ((image - low) * (255 / (high - low))).round().astype(np.uint8)
    image = image if image.ndim == 2 else image[..., :3] if image.shape[2] >= 3 else image[..., 0]
    y, kind, truth, text = sample.get(TARGET, np.zeros(0)), card.options["kind"], "", as_text(answer)
    if kind in ("classes", "labels"):
        truth = ", ".join(card.classes[k] for k in (np.flatnonzero(y) if kind == "labels" else [int(y)])) or "none"
    elif kind == "values":
        text += f" (true: {as_text(y)})"
    return image, truth, text, True


def as_text(answer: Any) -> str:
    """Return an answer or a target as a short text: classes, or its first numbers."""
    if isinstance(answer, Labels):
        return ", ".join(label.name for label in answer) or "none"
    values = np.asarray(answer.name if isinstance(answer, Answer) else answer)
    if values.dtype.kind not in "biuf":
        return str(values)
    return ", ".join(f"{value:.4g}" for value in values.reshape(-1)[:FEW]) + " …" * (values.size > FEW)
