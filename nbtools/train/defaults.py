"""What a Task does by default with a pack that `nb.pack` wrote: the batch, the network's arguments, metrics by name,
answers, and the pictures of samples.

B samples, C channels, H × W pixels, L steps of the longest sequence, F features, K classes, D values.
"""

from __future__ import annotations

import difflib
import inspect
import math
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from nbtools.data import Card, Draws, Pack, Sample, encoded, named, pixels
from nbtools.errors import PackError, TrainError
from nbtools.train.augment import MIXUP, augment, strengths

Batch = dict[str, Tensor]
Pair = tuple[Tensor | float, Tensor | float]
"""A metric's numerator and denominator, which add up; or two tensors (K,) of a mean over K classes, as mIoU is."""

DATASET, TARGET = "dataset", "y"  # the task in such a pack's card; its column of targets
MODES = {1: "L", 3: "RGB"}  # of images with so many channels
LENGTHS = ("lengths", "length")  # what a forward may call the lengths of a single ragged input


def packed_dataset(card: Card | None) -> bool:
    """Whether `nb.pack` wrote the pack, so that its card says what its columns are."""
    return card is not None and card.task == DATASET and "inputs" in card.options


# -- batches


def prepare(raw: Batch, card: Card, draws: Draws | None, names: Sequence[str] | Mapping[str, float]) -> Batch:
    """The inputs of a raw batch as a network takes them: images (B, C, H, W) float32, uint8 ones from 0 to 1 first;
    augmented by name given draws; then normalised by the card's mean and std, where it has them. The padding of
    sequences stays 0."""
    options, batch = card.options, dict(raw)
    for name in options["inputs"]:
        batch[name] = as_input(raw[name], options["layout"].get(name, ""), name in options["mean"])
    if draws is not None and names:
        batch = augment(batch, images_of(card), options["inputs"], len(card.classes), draws, names)
    for name in options["inputs"]:
        if name in options["mean"]:
            batch[name] = normalise(batch[name], card, name, raw.get(f"{name}_length"))
    return batch


def as_input(values: Tensor, layout: str, scaled: bool) -> Tensor:
    """A column with its channels before its pixels; scaled: uint8 as float32 from 0 to 1."""
    if layout == "hwc":
        values = values.permute(0, 3, 1, 2)
    elif layout == "hw":
        values = values.unsqueeze(1)
    if scaled and values.dtype == torch.uint8:
        return values.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
    return values.contiguous()


def normalise(values: Tensor, card: Card, name: str, lengths: Tensor | None = None) -> Tensor:
    mean, std = scale_of(card, name, values.device)
    if card.options["layout"].get(name):
        mean, std = mean.view(-1, 1, 1), std.view(-1, 1, 1)
    found = (values.float() - mean) / std
    if lengths is None:
        return found
    inside = torch.arange(values.shape[1], device=values.device) < lengths[:, None]  # (B, L)
    return found * inside.view(*inside.shape, *[1] * (found.dim() - 2))


def scale_of(card: Card, name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """(mean, std) of a column over the training split, each per channel or feature; where nothing varies, std is 1."""
    mean, std = card.options["mean"][name], card.options["std"][name]
    return constant(tuple(mean), device), constant(tuple(value or 1.0 for value in std), device)


@lru_cache(maxsize=256)
def constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Kept on the device: to copy it there in each step would make the host wait."""
    return torch.tensor(values, device=device)


def images_of(card: Card) -> list[str]:
    """The inputs that are images."""
    return [name for name in card.options["inputs"] if card.options["layout"].get(name)]


def shape_of(card: Card, name: str) -> tuple[int, ...]:
    """The shape of a sample's column as the network takes it, without the length of a ragged one."""
    shape, layout = card.columns[name].shape, card.options["layout"].get(name, "")
    return (shape[2], *shape[:2]) if layout == "hwc" else (1, *shape) if layout == "hw" else tuple(shape)


def width_of(card: Card) -> int:
    """The channels of the first input, or its features."""
    name = card.options["inputs"][0]
    shape = shape_of(card, name) or (1,)
    return shape[0] if card.options["layout"].get(name) else shape[-1]


def blank(card: Card) -> Batch:
    """A raw batch of two samples of zeros, their sequences of 8 steps."""
    batch = {"id": torch.arange(2)}
    for name, column in card.columns.items():
        ragged = column.kind == "ragged"
        batch[name] = torch.from_numpy(np.zeros((2, *(8,) * ragged, *column.shape), column.dtype))
        if ragged:
            batch[f"{name}_length"] = torch.full((2,), 8)
    return batch


# -- the call of a network


@dataclass(frozen=True)
class Arguments:
    """The columns of a batch that a network's forward takes, by position and by name; `whole`: the batch as a dict.

    As a forward pre-hook it replaces a batch, and nothing else, by these: the names of weights, DDP and calls with
    tensors stay as they are.
    """

    called: str
    positions: tuple[str, ...] = ()
    names: tuple[tuple[str, str], ...] = ()
    whole: bool = False

    def __call__(self, module: nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if self.whole or named or len(given) != 1 or not isinstance(given[0], dict):
            return None
        batch = given[0]
        if lost := [name for name in (*self.positions, *dict(self.names).values()) if name not in batch]:
            raise TrainError(f"{self.called} takes {lost[0]!r}, but the batch has {', '.join(batch)}; return it too")
        return tuple(batch[name] for name in self.positions), {name: batch[each] for name, each in self.names}


def find_arguments(model: nn.Module, card: Card) -> Arguments:
    """From the signature of forward: the batch as a dict where its first parameter is called `batch`, or annotated as a
    mapping; parameters with names of columns get these, but never the target by its name; `lengths` get those of a
    single ragged input; the other required ones get the remaining inputs in order, a single one the first of them.
    Raises TrainError if that leaves one without."""
    inputs, called = list(card.options["inputs"]), type(model).__name__
    ragged = [name for name in inputs if card.columns[name].kind == "ragged"]
    offered = {name: name for name in (*inputs, *(f"{name}_length" for name in ragged))}
    if len(ragged) == 1:
        offered |= dict.fromkeys(LENGTHS, f"{ragged[0]}_length")
    plain = [p for p in parameters_of(model) if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if takes_dict(model):
        return Arguments(f"{called}.forward({plain[0].name if plain else ''})", whole=True)
    required = [p.name for p in plain if p.default is p.empty]
    others = {*card.columns, "id"} - {TARGET}
    known = {**{name: name for name in required if name in others}, **offered}
    found = {p.name: known[p.name] for p in plain if p.name in known}
    rest = [name for name in required if name not in found]
    free = [name for name in inputs if name not in found.values()]
    if (rest and len(rest) not in (1, len(free))) or len(rest) > len(free):
        raise TrainError(
            f"{called}.forward({', '.join(required)}): which columns are {', '.join(rest)}? The inputs are "
            f"{', '.join(inputs)}; name the parameters as the columns, or take the whole dict: forward(self, batch)"
        )
    found |= dict(zip(rest, free, strict=False))
    if not found:
        return Arguments(f"{called}.forward({inputs[0]})", (inputs[0],))
    given = ", ".join(name if name == column else f"{name}={column}" for name, column in found.items())
    first = next((k for k, p in enumerate(plain) if p.name not in found or p.kind is p.KEYWORD_ONLY), len(plain))
    named = tuple((p.name, found[p.name]) for p in plain[first:] if p.name in found)
    return Arguments(f"{called}.forward({given})", tuple(found[p.name] for p in plain[:first]), named)


def parameters_of(model: nn.Module) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(model.forward).parameters.values())
    except (TypeError, ValueError):  # compiled code has none
        return []


def takes_dict(model: nn.Module) -> bool:
    """Whether its forward, or that of the first part of a Sequential, takes a batch as a dict."""
    while isinstance(model, nn.Sequential) and len(model):
        model = model[0]
    first = next(iter(parameters_of(model)), None)
    if first is None:
        return False
    kind = first.annotation.partition("[")[0] if isinstance(first.annotation, str) else first.annotation
    kind = typing.get_origin(kind) or kind
    mapping = isinstance(kind, type) and issubclass(kind, Mapping)
    return first.name == "batch" or mapping or kind in ("dict", "Mapping", "Batch")


def connect(model: nn.Module, card: Card) -> nn.Module:
    """The network, which takes a batch from now on, besides whatever its forward takes. A run calls it so."""
    found = find_arguments(model, card)
    if found not in model._forward_pre_hooks.values():
        model.register_forward_pre_hook(found, with_kwargs=True)
    return model


def call_of(model: nn.Module) -> str:
    """How a connected network is called, and how many of its parameters are trained; "" for one that is not."""
    found = next((hook for hook in model._forward_pre_hooks.values() if isinstance(hook, Arguments)), None)
    if found is None:
        return ""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    whole, trained = sum(size for size, _ in sizes), sum(size for size, needed in sizes if needed)
    return f"{found.called}, {whole:,} parameters, {'all' if trained == whole else f'{trained:,}'} trained"


def logits_of(outputs: Any) -> Tensor:
    """The tensor of outputs: themselves, their `.logits` (transformers), or what they have as "out" (torchvision)."""
    for found in (outputs, getattr(outputs, "logits", None), outputs.get("out") if hasattr(outputs, "get") else None):
        if isinstance(found, Tensor):
            return found
    raise TrainError(
        f"the network returns a {type(outputs).__name__} without a tensor as .logits or ['out']; return the tensor "
        "from forward, or write a Task with model, loss, metrics and decode"
    )


# -- metrics by name


def class_logits(outputs: Any, card: Card) -> Tensor:
    """(B, K) logits. Raises TrainError if they are not of the pack's classes."""
    logits, count = logits_of(outputs), len(card.classes)
    if logits.dim() < 2 or logits.shape[1] != count:
        raise TrainError(
            f"the network must return one logit for each of {count} classes, (B, {count}), got "
            f"{tuple(logits.shape)}; change its last layer, or pass a function: lambda classes: Net(classes)"
        )
    return logits


def values_like(outputs: Any, target: Tensor) -> Tensor:
    """The outputs in the target's shape: (B, 1) and (B,) would be broadcast to (B, B). Raises TrainError."""
    values = logits_of(outputs)
    if values.numel() != target.numel():
        raise TrainError(
            f"the network must return one value for each of the target, {tuple(target.shape)}, got "
            f"{tuple(values.shape)}; change its last layer"
        )
    return values.float().view(target.shape)


def top(logits: Tensor, y: Tensor, count: int) -> Pair:
    best = logits.topk(min(count, logits.shape[1]), 1).indices
    return (best == y[:, None]).any(1).sum(), y.numel()


def per_class(logits: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(K,) each: how often a class is predicted rightly, is predicted, and is the truth."""
    predicted, classes = logits.argmax(1), torch.arange(logits.shape[1], device=y.device)
    guess, truth = predicted.view(-1, 1) == classes, y.view(-1, 1) == classes
    return (guess & truth).sum(0), guess.sum(0), truth.sum(0)


def recall(logits: Tensor, y: Tensor) -> Pair:
    right, _, truth = per_class(logits, y)
    return right, truth


def f1(logits: Tensor, y: Tensor) -> Pair:
    right, guess, truth = per_class(logits, y)
    return 2 * right, guess + truth


METRICS: dict[str, tuple[str, str, Callable[[Tensor, Tensor], Pair]]] = {
    "accuracy": ("classes", "", lambda logits, y: top(logits, y, 1)),
    "top5_accuracy": ("classes", "", lambda logits, y: top(logits, y, 5)),
    "balanced_accuracy": ("classes", "", recall),
    "f1": ("classes", "", f1),
    "mae": ("values", "-", lambda values, y: ((values - y).abs().sum(), y.numel())),
    "mse": ("values", "-", lambda values, y: ((values - y).square().sum(), y.numel())),
}
"""Name → what it is of, "-" where lower is better, (outputs, targets) → Pair. balanced_accuracy and f1: the mean over
classes of recall, and of 2 TP / (2 TP + FP + FN)."""


def listed(metrics: Any) -> tuple[Any, ...]:
    """Names and functions as a tuple. Raises TrainError for an unknown name."""
    found = (metrics,) if isinstance(metrics, str) or callable(metrics) else tuple(metrics)
    for name in found:
        if not callable(name) and name not in METRICS:
            close = difflib.get_close_matches(str(name), METRICS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(METRICS)}, or pass a function"
            raise TrainError(f"metrics has no {name!r}; {hint}")
    return found


def best_of(metrics: Any) -> str:
    """What `Task.BEST` is, if the task says nothing else: the first metric that has a name, else -loss."""
    names = () if callable(metrics) else [name for name in listed(metrics) if not callable(name)]
    return f"{METRICS[names[0]][1]}{names[0]}" if names else "-loss"


def score(metrics: Any, outputs: Any, batch: Batch, card: Card | None) -> dict[str, Pair]:
    """Metric → Pair, of names and of functions of (outputs, batch), which return a Pair or a mapping of them."""
    found: dict[str, Pair] = {}
    for metric in listed(metrics):
        if callable(metric):
            one: Any = metric(outputs, batch)
            found |= one if isinstance(one, Mapping) else {getattr(metric, "__name__", "metric"): one}
            continue
        if card is None:
            raise TrainError(f"metrics: {metric!r} by name needs a pack of nb.pack; write metrics(outputs, batch)")
        y, (kind, _, measure) = batch[TARGET], METRICS[metric]
        found[metric] = measure(class_logits(outputs, card) if kind == "classes" else values_like(outputs, y), y)
    return found


def require_fitting(card: Card, metrics: Any, names: Any) -> None:
    """Raise TrainError for metrics that are not of the pack's targets, and for augmentations that are not of its
    inputs."""
    kind = card.options["kind"]
    for metric in () if callable(metrics) else listed(metrics):
        if not callable(metric) and METRICS[metric][0] != kind:
            fits = [name for name, (of, _, _) in METRICS.items() if of == kind]
            rule = f"metrics: {metric!r} is of {METRICS[metric][0]}, but the targets of the pack are {kind}"
            raise TrainError(f"{rule}; choose {', '.join(fits)}" if fits else f"{rule}; leave it out")
    wanted, inputs = strengths(names), {name: card.columns[name] for name in card.options["inputs"]}
    there = ", ".join(f"{name} {column}" for name, column in inputs.items())
    if (pictured := wanted.keys() - {MIXUP}) and not images_of(card):
        raise TrainError(f"augment: {min(pictured)} needs images, but the inputs are {there}; leave it out")
    if pictured and TARGET in card.columns and len(card.columns[TARGET].shape) > 1:
        rule = f"augment: {min(pictured)} would leave the target as it is, {card.columns[TARGET]}"
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
        return f"{self.name} ({self.probability:.0%})"


def answers(outputs: Any, card: Card) -> list[Any]:
    """Classes with their probability; values as numbers, or lists of D numbers; anything else row by row."""
    kind, outputs = card.options["kind"], logits_of(outputs)
    if kind == "classes" and outputs.dim() == 2 and outputs.shape[1] == len(card.classes):
        best = outputs.float().softmax(1).max(1)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [Answer(card.classes[i], probability) for i, probability in pairs]
    shape = (len(outputs), *card.columns[TARGET].shape) if kind == "values" else ()
    if shape and outputs.numel() == math.prod(shape):
        return outputs.float().view(shape).tolist()
    return list(outputs)


def picture(sample: Sample, card: Card) -> np.ndarray:
    """(H, W) or (H, W, 3) uint8: the first image of a sample; floats beyond 0 to 1 from their least to their most."""
    name = images_of(card)[0]
    image, layout = sample[name], card.options["layout"][name]
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
    """An answer as a short text."""
    if isinstance(answer, Answer):
        return answer.name
    return ", ".join(f"{value:.4g}" for value in (answer if isinstance(answer, list) else [answer]))


def preview(pack: Pack, i: int, answer: Any) -> tuple[np.ndarray, str, str, bool]:
    """A sample of the live picture: `Task.preview`. Values are shown beside the true ones, as neither right nor
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
    """What `run.predict` got, item by item: a file, an item (a dict, a tuple, an image, an array of a sample's shape),
    or several: a list, a Dataset, an array of them, or the rows of a DataFrame. Raises PackError."""
    if hasattr(given, "iloc"):
        if not card.options.get("encoding"):
            raise PackError("this run was not trained on a DataFrame; pass items as its Dataset returns them")
        frame = given.to_frame().T.infer_objects() if given.ndim == 1 else given
        x = encoded(frame, card.options["encoding"])
        if np.isnan(x).any():
            row, column = np.argwhere(np.isnan(x))[0]
            rule = f"row {row}: {card.options['features'][column]} has no value that training has seen"
            raise PackError(f"{rule}; fill it, or leave the row out")
        return [{"x": row} for row in x]
    first = card.options["inputs"][0]
    sample = card.columns[first].shape if card.columns[first].kind == "fixed" else None
    if isinstance(given, (str, Path, dict, tuple, Image.Image)) or getattr(given, "shape", ()) == (sample or None):
        return [given]
    return given if hasattr(given, "__getitem__") else list(given)


def sample_of(item: Any, card: Card) -> Sample:
    """An item, or an image file, as packing would have stored its inputs. Raises PackError(value, rule, fix)."""
    inputs = card.options["inputs"]
    if isinstance(item, (str, Path)):
        with Image.open(item) as image:
            image.load()
            return sample_of(image, card)
    values = named(item)
    if not values.keys() >= set(inputs) and not isinstance(item, dict):
        values = dict(zip(inputs, item if isinstance(item, tuple) else [item], strict=False))
    if not values.keys() >= set(inputs):
        raise PackError(", ".join(values), f"an item has {', '.join(inputs)}", "add what is missing")
    return {name: stored(values[name], card, name) for name in inputs}


def stored(value: Any, card: Card, name: str) -> np.ndarray:
    """A value as its column keeps it. Raises PackError(value, rule, fix)."""
    column, layout = card.columns[name], card.options["layout"].get(name, "")
    if isinstance(value, Image.Image):
        mode = card.options.get("mode", {}).get(name) or (
            layout and column.dtype == "|u1" and MODES.get(shape_of(card, name)[0])
        )
        if not mode:
            rule = f"{name} is {column}, which the Dataset made of its files"
            raise PackError("an image", rule, "pass what the Dataset returns for it")
        array = pixels(value, mode, card.options.get("size"))
        array = array.transpose(2, 0, 1) if layout == "chw" and array.ndim == 3 else array
    else:
        array = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value)
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise PackError("nan or inf", f"all numbers of {name} are finite", "replace it, or leave the item out")
        if column.dtype == "|u1" and array.dtype.kind == "f":
            array = np.rint(array * 255)  # kept as 255ths
        if column.dtype == "|u1" and array.size and not 0 <= array.min() <= array.max() <= 255:
            came = "numbers beyond 0…1" if array.dtype.kind == "f" else f"{array.min()} … {array.max()}"
            raise PackError(came, f"{name} is kept in bytes: whole numbers 0…255, or numbers 0…1", "scale it")
    ragged = column.kind == "ragged"
    if array.ndim != len(column.shape) + ragged or array.shape[ragged:] != column.shape:
        raise PackError(f"shape {array.shape}", f"{name} is {column}", "make it alike")
    return array.astype(column.dtype, copy=False)
