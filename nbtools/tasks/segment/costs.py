"""What better answers cost: several ways to look at the same images, their mIoU and their time, side by side."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import nn

from nbtools import table
from nbtools.data import Pack, collate
from nbtools.errors import PlanError
from nbtools.tasks.segment import task
from nbtools.tasks.segment.inference import eval_cost
from nbtools.tasks.segment.plans import ALL_SCALES, Plan
from nbtools.train import Sums, autocast

WARM = 3  # answers before the clock counts: the first ones load libraries and choose kernels

Ids = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class Cost:
    """One way to look. gain: of mIoU over the first way; seconds: an image, the median of all batches; times: what the
    first way takes, the median of what was found within batches; passes: pixels looked at for each of an image's."""

    name: str
    miou: float
    gain: float
    seconds: float
    times: float
    passes: float

    def row(self) -> tuple[str, ...]:
        figures = (f"{1e3 * self.seconds:.1f} ms", f"{self.times:.2f}×", f"{self.passes:.2f}×")
        return (self.name, f"{self.miou:.4f}", f"{self.gain:+.4f}", *figures)


@dataclass(frozen=True)
class Costs:
    """All ways on the same images. Shows as a table; `pd.DataFrame(costs.rows)` is one for drawing."""

    device: str
    images: int
    rows: tuple[Cost, ...]

    def __str__(self) -> str:
        return f"{self.caption}\n{table.text(HEADERS, [row.row() for row in self.rows])}"

    def _repr_html_(self) -> str:
        return table.html(HEADERS, [row.row() for row in self.rows], self.caption)

    @property
    def caption(self) -> str:
        return f"{table.plural(self.images, 'image')} on {self.device}"


HEADERS = ("evaluation", "mIoU", "gain", "an image", "time", "pixels")


def usual(size: tuple[int, int]) -> dict[str, dict[str, Any]]:
    """The ways to compare for images (H, W): name → knobs of the plan. Windows have half the longer side."""
    window = max(32, round(max(size) / 64) * 32)
    scales = f"{len(ALL_SCALES)} scales, {min(ALL_SCALES):g} to {max(ALL_SCALES):g}"
    return {
        "one look": {},
        "flip": {"eval_flip": True},
        scales: {"eval_scales": ALL_SCALES},
        f"{scales}, flip": {"eval_scales": ALL_SCALES, "eval_flip": True},
        f"windows of {window} px": {"eval_window": window},
    }


def costs(
    model: nn.Module,
    pack: Pack,
    plan: Plan,
    split: str = "val",
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    ids: Ids | None = None,
    batch_size: int = 8,
) -> Costs:
    """mIoU and time of each way to look at a split, or at some ids of a pack. A machine's speed wanders, so every batch
    goes through all of them in turn.

    settings: name → knobs, on top of one look at the whole image; the first is what the others are compared with.
    Raises PlanError for knobs that there are not, or without images.
    """
    ids, device = required(pack.ids(split) if ids is None else ids), next(model.parameters()).device
    size = pack.columns["image"].shape[:2]
    single = plan.replace(eval_scales=(1.0,), eval_flip=False, eval_window=None)
    ways = {name: single.replace(**knobs) for name, knobs in (settings or usual((size[0], size[1]))).items()}
    sums, seconds = {name: Sums(device) for name in ways}, {name: [] for name in ways}
    with answering(model):
        for start in range(0, len(ids), batch_size):
            batch = task.batch(raw_batch(pack, ids[start : start + batch_size], device), single, None)
            for name, way in ways.items():
                if not start:
                    timed(model, batch, way)  # loads libraries and chooses kernels
                taken, outputs = timed(model, batch, way)
                seconds[name].append(taken / len(batch["id"]))
                sums[name].add(task.metrics(outputs, batch))
    return compared(str(device), len(ids), ways, {name: s.read()["miou"] for name, s in sums.items()}, seconds, size)


def compared(
    device: str,
    images: int,
    ways: Mapping[str, Plan],
    miou: Mapping[str, float],
    seconds: Mapping[str, Sequence[float]],
    size: Sequence[int],
) -> Costs:
    """Each way beside the first. seconds: of each batch, an image."""
    first = next(iter(ways))
    rows = [
        Cost(
            name,
            miou[name],
            miou[name] - miou[first],
            statistics.median(seconds[name]),
            statistics.median(a / b for a, b in zip(seconds[name], seconds[first], strict=True)),
            eval_cost(way, (size[0], size[1])),
        )
        for name, way in ways.items()
    ]
    return Costs(device, images, tuple(rows))


@dataclass(frozen=True)
class Latency:
    """Seconds of n answers, each to one image alone. Shows as a table."""

    device: str
    size: str
    n: int
    median: float
    least: float
    most: float

    def row(self) -> tuple[str, ...]:
        times = (f"{1e3 * seconds:.2f} ms" for seconds in (self.median, self.least, self.most))
        return (self.device, self.size, f"{self.n}", *times)

    def __str__(self) -> str:
        return table.text(LATENCY_HEADERS, [self.row()])

    def _repr_html_(self) -> str:
        return table.html(LATENCY_HEADERS, [self.row()])


LATENCY_HEADERS = ("device", "height × width", "answers", "median", "least", "most")


def latency(model: nn.Module, pack: Pack, plan: Plan, ids: Ids) -> Latency:
    """How long a model takes from one packed image to its class map, as the plan looks at it; each id is answered once,
    after a few to warm up. Raises PlanError without ids."""
    device, seconds = next(model.parameters()).device, []
    with answering(model):
        for i in [*required(ids)[:WARM], *ids]:
            began = perf_counter()
            batch = task.batch(raw_batch(pack, [i], device, ("image",)), plan, None)
            _, outputs = timed(model, batch, plan)
            task.decode(outputs, pack)
            seconds.append(perf_counter() - began)
    seconds = seconds[-len(ids) :]
    height, width, _ = pack.columns["image"].shape
    times = statistics.median(seconds), min(seconds), max(seconds)
    return Latency(str(device), f"{height} × {width}", len(seconds), *times)


@contextmanager
def answering(model: nn.Module) -> Iterator[None]:
    """Eval mode without gradients; the model is left as it was."""
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        model.train(training)


def timed(model: nn.Module, batch: task.Batch, plan: Plan) -> tuple[float, task.Outputs]:
    """(seconds until the device is done, outputs)."""
    device = batch["image"].device
    wait(device)
    began = perf_counter()
    with autocast(plan, device, model):
        outputs = task.infer(model, batch, plan)
    wait(device)
    return perf_counter() - began, outputs


def wait(device: torch.device) -> None:
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def raw_batch(
    pack: Pack, ids: Ids, device: torch.device, columns: Sequence[str] = ("image", "label", "distance")
) -> task.Batch:
    samples = [{**{name: pack.arrays[name][i] for name in columns}, "id": np.asarray(i, np.int64)} for i in ids]
    return {name: tensor.to(device) for name, tensor in collate(samples, pack.columns).items()}


def required(ids: Ids) -> Ids:
    if not len(ids):
        raise PlanError("costs and latency need at least one image, got none; take some of pack.ids('val')")
    return ids
