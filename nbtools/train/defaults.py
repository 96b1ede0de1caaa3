"""What a Task does by default with a pack that `nb.pack` wrote: the batch, answers, and the pictures of samples.

B samples, C channels, H × W pixels, L steps of the longest sequence, F features, K classes, D values.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nbtools.data import TARGET, Card, Draws, Form, Pack, Sample, constant
from nbtools.errors import TrainError
from nbtools.show import percent
from nbtools.train.augment import MIXUP, augment, inside, strengths
from nbtools.train.metrics import Batch, class_logits, logits_of, values_like

DATASET = "dataset"  # the task in such a pack's card
FEW = 8  # numbers of an answer that are shown
PREPARED = "as `batch` makes it; default: channels first, bytes as 0 to 1, minus options' mean over its std"
SURE = 0.5  # probability above which a label is answered


def packed_dataset(card: Card | None) -> bool:
    """Return whether `nb.pack` wrote the pack, so that its card says what its columns are."""
    return card is not None and "forms" in card.options


def form_of(card: Card, name: str) -> Form:
    """Return how a column was packed; its layout is `hwc`, `chw` or `hw` of images, "" of others."""
    return Form.of(card.options["forms"][name])


def images_of(card: Card) -> list[str]:
    """Return the inputs that are images."""
    return [name for name in card.options["inputs"] if form_of(card, name).layout]


def shape_of(card: Card, name: str) -> tuple[int, ...]:
    """Return the shape of a sample's column as the network takes it, without the length of a ragged one."""
    shape, layout = card.columns[name].shape, form_of(card, name).layout
    return (shape[2], *shape[:2]) if layout == "hwc" else (1, *shape) if layout == "hw" else tuple(shape)


# -- batches


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


def require_augmentable(card: Card, names: Any) -> None:
    """Raise TrainError for augmentations that the inputs do not take, or that would leave what belongs to an image,
    such as a mask, as it is."""
    wanted, inputs = strengths(names).keys(), card.options["inputs"]
    moved, there = wanted & {"crop", "flip"}, ", ".join(f"{name} {card.columns[name]}" for name in inputs)
    if wanted - {MIXUP} and not images_of(card):
        raise TrainError(f"augment: {min(wanted - {MIXUP})} needs images, but the inputs are {there}; leave it out")
    for name, column in card.columns.items():
        axes = len(column.shape) + (column.kind == "ragged" and name == TARGET)  # maps (H, W), and lists of boxes
        left = moved - ({"flip"} if name in card.options.get("points", {}) else set())
        if left and axes >= 2 and name not in images_of(card):
            rule = f"augment: {min(left)} would leave {'the target' if name == TARGET else name} ({column}) as it is"
            raise TrainError(f"{rule}; augment both in a `batch` of your task")
        if MIXUP in wanted and name in inputs and (column.kind == "ragged" or column.dtype[1] not in "uf"):
            rule = "augment: mixup needs images or numbers of one shape"
            raise TrainError(f"{rule}, but the inputs are {there}; leave it out")


def as_input(values: Tensor, card: Card, name: str) -> Tensor:
    """Return a column with its channels before its pixels, and its 255ths as float32 from 0 to 1."""
    form = form_of(card, name)
    if form.layout == "hwc":
        values = values.permute(0, 3, 1, 2)
    elif form.layout == "hw":
        values = values.unsqueeze(1)
    if form.unit == 255:
        return values.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
    return values.contiguous()


def scale_of(card: Card, name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (mean, std) of a column over the training split, each per channel (C, 1, 1), feature (F,), or of all."""
    shape = (-1, 1, 1) if form_of(card, name).layout else (-1,)
    mean, std = (constant(tuple(card.options[moment][name]), device).view(shape) for moment in ("mean", "std"))
    return mean, std


# -- answers


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
    """Return classes with their probability, or all labels above SURE with theirs; values as numbers, lists of D
    numbers, or arrays of the targets' shape; of other packs, and maps of classes, the outputs row by row."""
    kind, outputs = card.options["kind"], logits_of(outputs)
    if kind == "values":
        with suppress(TrainError):  # a Task's own outputs, such as a mean and a variance
            values, layout = values_like(outputs, (len(outputs), *shape_of(card, TARGET))), form_of(card, TARGET).layout
            values = values.permute(0, 2, 3, 1) if layout == "hwc" else values.squeeze(1) if layout == "hw" else values
            return values.tolist() if values.dim() < 3 else list(values.cpu().numpy())
    elif kind == "labels":
        shares = class_logits(outputs, card).float().sigmoid().tolist()
        pairs = [map(Answer, card.classes, row) for row in shares]
        return [Labels(answer for answer in row if answer.probability > SURE) for row in pairs]
    elif kind == "classes" and outputs.shape[1:] == (len(card.classes),):
        best = outputs.float().softmax(1).max(1)
        return [Answer(card.classes[i], p) for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)]
    return list(outputs)


def as_text(answer: Any) -> str:
    """Return an answer or a target as a short text: classes, a few numbers, or the shape of many."""
    if isinstance(answer, Labels):
        return ", ".join(label.name for label in answer) or "none"
    values = np.asarray(answer.name if isinstance(answer, Answer) else answer)
    if values.dtype.kind not in "biuf":
        return str(values)
    if values.size > FEW:
        return f"{' × '.join(map(str, values.shape))} values"
    return ", ".join(f"{value:.4g}" for value in values.reshape(-1))


def few_values(card: Card) -> bool:
    """Return whether a sample's target can be told in a line of text, as a map of the pixels cannot."""
    return math.prod(card.columns[TARGET].shape) <= max(FEW, len(card.classes)) if TARGET in card.columns else True


def preview(pack: Pack, i: int, answer: Any) -> tuple[np.ndarray, str, str, bool]:
    """Return `Task.preview` of a sample; values stand next to the true ones, neither right nor wrong."""
    sample, kind, truth, text = pack.sample(i), pack.options["kind"], "", as_text(answer)
    if kind == "classes":
        truth = pack.classes[int(sample[TARGET])]
    elif kind == "labels":
        truth = ", ".join(pack.classes[k] for k in np.flatnonzero(sample[TARGET])) or "none"
    elif kind == "values":
        text += f" (true: {as_text(sample[TARGET])})"
    return picture(sample, pack.card), truth, text, True


def picture(sample: Sample, card: Card) -> np.ndarray:
    """Return the first image of a sample, (H, W) or (H, W, 3) uint8; floats beyond 0 to 1 from least to most."""
    name = images_of(card)[0]
    image = sample[name].transpose(1, 2, 0) if form_of(card, name).layout == "chw" else sample[name]
    if image.dtype != np.uint8:
        low, high = min(float(image.min()), 0.0), max(float(image.max()), 1.0)
        image = ((image - low) * (255 / (high - low))).round().astype(np.uint8)
    return image if image.ndim == 2 else image[..., :3] if image.shape[2] >= 3 else image[..., 0]
