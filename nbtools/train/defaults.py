"""What a Task does by default with a pack that `nb.pack` wrote: the batch, answers, and the pictures of samples.

B samples, C channels, H × W pixels, L steps of the longest sequence, F features, K classes, D values.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from nbtools.data import TARGET, Card, Draws, Form, Pack, Sample, constant, inputs_of, is_image, tables
from nbtools.errors import PackError, TrainError
from nbtools.show import percent
from nbtools.train.augment import MIXUP, augment, strengths
from nbtools.train.call import logits_of
from nbtools.train.metrics import METRICS, Batch, listed, reshaped

DATASET = "dataset"  # the task in such a pack's card
FEW = 8  # numbers of an answer that are shown


def packed_dataset(card: Card | None) -> bool:
    """Whether `nb.pack` wrote the pack, so that its card says what its columns are."""
    return card is not None and card.task == DATASET and "forms" in card.options


# -- batches


def prepare(raw: Batch, card: Card, draws: Draws | None, names: Sequence[str] | Mapping[str, float]) -> Batch:
    """The inputs of a raw batch as a network takes them: images (B, C, H, W) float32, uint8 ones from 0 to 1 first;
    augmented by name given draws; then normalised by the card's mean and std, where it has them. The padding of
    sequences stays 0."""
    options, batch = card.options, dict(raw)
    for name in options["inputs"]:
        batch[name] = as_input(raw[name], card, name)
    if draws is not None and names:
        batch = augment(batch, images_of(card), options["inputs"], len(card.classes), draws, names)
    for name in options["inputs"]:
        if name in options["mean"]:
            batch[name] = normalise(batch[name], card, name, raw.get(f"{name}_length"))
    return batch


def as_input(values: Tensor, card: Card, name: str) -> Tensor:
    """A column with its channels before its pixels, and its 255ths as float32 from 0 to 1."""
    layout = layout_of(card, name)
    if layout == "hwc":
        values = values.permute(0, 3, 1, 2)
    elif layout == "hw":
        values = values.unsqueeze(1)
    if in_bytes(card, name):
        return values.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
    return values.contiguous()


def normalise(values: Tensor, card: Card, name: str, lengths: Tensor | None = None) -> Tensor:
    mean, std = scale_of(card, name, values.device)
    found = (values.float() - mean) / std
    if lengths is None:
        return found
    inside = torch.arange(values.shape[1], device=values.device) < lengths[:, None]  # (B, L)
    return found * inside.view(*inside.shape, *[1] * (found.dim() - 2))


def scale_of(card: Card, name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """(mean, std) of a column over the training split, each per channel (C, 1, 1), per feature (F,), or one for all;
    where nothing varies, std is 1."""
    shape = (-1, 1, 1) if layout_of(card, name) else (-1,)
    mean, std = (constant(tuple(card.options[moment][name]), device).view(shape) for moment in ("mean", "std"))
    return mean, std


def layout_of(card: Card, name: str) -> str:
    """`hwc`, `chw` or `hw` of a column of images, "" of others."""
    return card.options["forms"][name]["layout"]


def in_bytes(card: Card, name: str) -> bool:
    """Whether a column holds numbers from 0 to 1 as 255ths: images, and floats kept so."""
    form = card.options["forms"][name]
    return form["dtype"] == "|u1" and bool(form["layout"] or form["scaled"])


def images_of(card: Card) -> list[str]:
    """The inputs that are images."""
    return [name for name in card.options["inputs"] if layout_of(card, name)]


def shape_of(card: Card, name: str) -> tuple[int, ...]:
    """The shape of a sample's column as the network takes it, without the length of a ragged one."""
    shape, layout = card.columns[name].shape, layout_of(card, name)
    return (shape[2], *shape[:2]) if layout == "hwc" else (1, *shape) if layout == "hw" else tuple(shape)


def width_of(card: Card) -> int:
    """The channels of the first input, or its features."""
    name = card.options["inputs"][0]
    shape = shape_of(card, name) or (1,)
    return shape[0] if layout_of(card, name) else shape[-1]


def is_whole(card: Card, name: str) -> bool:
    """Whether an input reaches the network as whole numbers."""
    return name not in card.options["mean"] and card.columns[name].dtype[1] in "iu"


def blank(card: Card, steps: int) -> Batch:
    """A raw batch of two samples of zeros, their sequences of so many steps."""
    batch = {"id": torch.arange(2)}
    for name, column in card.columns.items():
        ragged = column.kind == "ragged"
        batch[name] = torch.from_numpy(np.zeros((2, *(steps,) * ragged, *column.shape), column.dtype))
        if ragged:
            batch[f"{name}_length"] = torch.full((2,), steps)
    return batch


def expression(card: Card, name: str) -> str:
    """What `prepare` makes of a column in evaluation, as NumPy; `options` are the card's."""
    layout, ragged = layout_of(card, name), card.columns[name].kind == "ragged"
    found = (
        name + {"hwc": ".transpose(0, 3, 1, 2)", "hw": "[:, None]"}.get(layout, "") + " / 255" * in_bytes(card, name)
    )
    if name in card.options["mean"]:
        mean, std = moments_as_text(card, name)
        found = f"({found} - {mean}) / {std}"
        if ragged:
            inside = f"(np.arange({name}.shape[1]) < {name}_length[:, None])"
            found += f" * {inside}[:, :{', None' * len(card.columns[name].shape)}]"
    return found


def expressions(card: Card) -> dict[str, tuple[tuple[()], str]]:
    """For `Task.tensors`: every input, and the lengths of ragged ones."""
    ragged = [name for name in card.options["inputs"] if card.columns[name].kind == "ragged"]
    found = {name: expression(card, name) for name in card.options["inputs"]}
    return {
        name: ((), text) for name, text in (found | {f"{name}_length": f"{name}_length" for name in ragged}).items()
    }


def moments_as_text(card: Card, name: str) -> tuple[str, str]:
    axes = "[:, None, None]" * bool(layout_of(card, name))
    return f"np.array(options['mean']['{name}']){axes}", f"np.array(options['std']['{name}']){axes}"


# -- what a task asks for


def require_fitting(card: Card, metrics: Any, names: Any) -> None:
    """Raise TrainError for metrics that are not of the pack's targets, and for augmentations that are not of its
    inputs."""
    kind = card.options["kind"]
    for metric in () if callable(metrics) else listed(metrics):
        if not callable(metric) and METRICS[metric][0] != kind:
            fits = [name for name, (of, _, _) in METRICS.items() if of == kind]
            rule = f"metrics: {metric!r} is for {METRICS[metric][0]}, but the targets of the pack are {kind}"
            raise TrainError(f"{rule}; choose {', '.join(fits)}" if fits else f"{rule}; leave it out")
    wanted, inputs = strengths(names), {name: card.columns[name] for name in card.options["inputs"]}
    there = ", ".join(f"{name} {column}" for name, column in inputs.items())
    if (pictured := wanted.keys() - {MIXUP}) and not images_of(card):
        raise TrainError(f"augment: {min(pictured)} needs images, but the inputs are {there}; leave it out")
    for name, column in card.columns.items():
        axes = len(column.shape) + (column.kind == "ragged" and name == TARGET)  # maps (H, W), and lists of boxes
        if name in images_of(card) or axes < 2:
            continue
        if moved := pictured - (set() if layout_of(card, name) else {"colour"}):
            still = "the target" if name == TARGET else name
            rule = f"augment: {min(moved)} would leave {still} ({column}) as it is"
            raise TrainError(f"{rule}; augment both in a `batch` of your task")
    if MIXUP in wanted and any(c.kind == "ragged" or c.dtype[1] not in "uf" for c in inputs.values()):
        raise TrainError(
            f"augment: mixup needs images or numbers of one shape, but the inputs are {there}; leave it out"
        )


# -- answers and pictures


class Answer(NamedTuple):
    """A class and its probability."""

    name: str
    probability: float

    def __str__(self) -> str:
        return f"{self.name} ({percent(self.probability)})"


def answers(outputs: Any, card: Card) -> list[Any]:
    """Classes with their probability; values as numbers, lists of D numbers, or arrays of the targets' shape; anything
    else row by row."""
    kind, outputs = card.options["kind"], logits_of(outputs)
    if kind == "classes" and outputs.dim() == 2 and outputs.shape[1] == len(card.classes):
        best = outputs.float().softmax(1).max(1)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [Answer(card.classes[i], probability) for i, probability in pairs]
    if kind == "values" and (values := reshaped(outputs, (len(outputs), *shape_of(card, TARGET)))) is not None:
        layout = layout_of(card, TARGET)
        values = values.permute(0, 2, 3, 1) if layout == "hwc" else values.squeeze(1) if layout == "hw" else values
        return values.tolist() if values.dim() < 3 else list(values.cpu().numpy())
    return list(outputs)


def picture(sample: Sample, card: Card) -> np.ndarray:
    """(H, W) or (H, W, 3) uint8: the first image of a sample; floats beyond 0 to 1 from their least to their most."""
    name = images_of(card)[0]
    image, layout = sample[name], layout_of(card, name)
    if layout == "chw":
        image = image.transpose(1, 2, 0)
    if image.dtype != np.uint8:
        low, high = min(float(image.min()), 0.0), max(float(image.max()), 1.0)
        image = ((image - low) * (255 / (high - low))).round().astype(np.uint8)
    return image if image.ndim == 2 else image[..., :3] if image.shape[2] >= 3 else image[..., 0]


def truth(sample: Sample, card: Card) -> str:
    """The target as text; "" where there is none."""
    if card.options["kind"] == "classes":
        return card.classes[int(sample[TARGET])]
    return written(sample[TARGET].tolist()) if card.options["kind"] == "values" else ""


def written(answer: Any) -> str:
    """An answer as a short text: a class, a few numbers, or the shape of many."""
    if isinstance(answer, Answer):
        return answer.name
    values = np.asarray(answer.tolist() if isinstance(answer, Tensor) else answer)
    if values.dtype.kind not in "biuf":
        return str(answer)
    if values.size > FEW:
        return f"{' × '.join(map(str, values.shape))} values"
    return ", ".join(f"{value:.4g}" for value in values.reshape(-1))


def preview(pack: Pack, i: int, answer: Any) -> tuple[np.ndarray, str, str, bool]:
    """A sample of the live picture: `Task.preview`. Values are shown next to the true ones, as neither right nor
    wrong."""
    sample, card = pack.sample(i), pack.card
    right = truth(sample, card)
    if card.options["kind"] == "classes":
        return picture(sample, card), right, written(answer), True
    return picture(sample, card), "", f"{written(answer)} (true: {right})" if right else written(answer), True


def show(pack: Pack, ids: Sequence[int] | np.ndarray, predicted: Sequence[Any] | None = None) -> Any:
    """A grid of samples, each under its target; of wrong predictions both, marked by colour and ≠."""
    from nbtools.figures import Picture, blank, gallery, judged  # only where something is drawn

    if not images_of(pack.card):
        raise TrainError(f"{pack.folder} has no images to show: its inputs are {', '.join(pack.options['inputs'])}")
    given = [None] * len(ids) if predicted is None else [written(answer) for answer in predicted]
    samples = [(pack.sample(int(i)), answer) for i, answer in zip(ids, given, strict=True)]
    found = [Picture(picture(one, pack.card), *judged(truth(one, pack.card), answer)) for one, answer in samples]
    return gallery(found)[0] if found else blank()


# -- items to predict


def items_of(given: Any, card: Card) -> Sequence[Any]:
    """What `run.predict` got, item by item: a file, an item (a dict, a tuple, an image, a number, a sample's array), or
    several: a list, a Dataset, an array of them, or the rows of a DataFrame. Raises PackError."""
    if hasattr(given, "iloc"):
        if not card.options.get("encoding"):
            raise PackError("this run was not trained on a DataFrame; pass items as its Dataset returns them")
        frame = given.to_frame().T.infer_objects() if given.ndim == 1 else given
        table = next(tables([frame], (), None, card.options["encoding"]))
        for row, (value, rule, fix) in table.odd.items():
            raise PackError(f"row {row}: {rule}, got {value}; {fix}")
        return [*table]
    first = card.columns[card.options["inputs"][0]]
    rank = len(first.shape) + (first.kind == "ragged")
    if isinstance(given, (str, Path, dict, tuple)) or is_image(given) or getattr(given, "ndim", None) in (0, rank):
        return [given]
    return given if hasattr(given, "__getitem__") else list(given) if isinstance(given, Iterable) else [given]


def sample_of(item: Any, card: Card) -> Sample:
    """An item, or an image file, as packing would have stored its inputs. Raises PackError(value, rule, fix)."""
    inputs = card.options["inputs"]
    if isinstance(item, (str, Path)):
        from PIL import Image

        with Image.open(item) as image:
            image.load()
            return sample_of(image, card)
    asked = card.options["roles"]
    values = inputs_of(item, inputs, asked["target"], asked["inputs"])
    return {name: np.asarray(Form.of(card.options["forms"][name]).fit(name, values[name])) for name in inputs}
