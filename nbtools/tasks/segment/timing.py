"""What better predictions cost: mIoU and time of several ways to evaluate, compared; and the latency of one image."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from torch import nn

from nbtools import table
from nbtools.data import Pack, collate
from nbtools.errors import PlanError
from nbtools.tasks.segment import task
from nbtools.tasks.segment.inference import eval_cost
from nbtools.tasks.segment.plans import ALL_SCALES, Plan
from nbtools.train import Batch, Sums, forward

WARM = 3  # predictions before the clock counts: the first ones load libraries and choose kernels

Ids = Sequence[int] | np.ndarray


@dataclass(frozen=True)
class Cost:
    """One way to evaluate. gain: in mIoU over the first way; seconds: an image, the median of all batches; times:
    relative to the first way, the median of the batches' ratios; passes: pixels evaluated for each of an image's."""

    name: str
    miou: float
    gain: float
    seconds: float
    times: float
    passes: float


@dataclass(frozen=True)
class Costs:
    """All ways on the same images. Shows as a table; `pd.DataFrame(costs.rows)` is one for drawing."""

    device: str
    images: int
    rows: tuple[Cost, ...]

    def __str__(self) -> str:
        return f"{self.caption}\n{table.text(HEADERS, self.cells)}"

    def _repr_html_(self) -> str:
        return table.html(HEADERS, self.cells, self.caption)

    @property
    def caption(self) -> str:
        return f"{table.plural(self.images, 'image')} on {self.device}"

    @property
    def cells(self) -> list[tuple[str, ...]]:
        return [
            (
                c.name,
                f"{c.miou:.4f}",
                f"{c.gain:+.4f}",
                f"{1e3 * c.seconds:.1f} ms",
                f"{c.times:.2f}×",
                f"{c.passes:.2f}×",
            )
            for c in self.rows
        ]


HEADERS = ("evaluation", "mIoU", "gain", "an image", "time", "pixels")


def usual(size: tuple[int, int]) -> dict[str, dict[str, Any]]:
    """The ways to compare for images (H, W): name → settings of the plan. Windows have half the longer side."""
    window = max(32, round(max(size) / 64) * 32)
    scales = f"{len(ALL_SCALES)} scales, {min(ALL_SCALES):g} to {max(ALL_SCALES):g}"
    return {
        "single pass": {},
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
    """mIoU and time of each way to evaluate a split, or some ids of a pack. A machine's speed varies, so every batch is
    evaluated in all ways in turn.

    settings: name → settings of the plan, on top of a single pass over the whole image; the first is what the others
    are compared with. Raises PlanError for unknown settings, or without images.
    """
    ids, device = require_some(pack.ids(split) if ids is None else ids), next(model.parameters()).device
    height, width, _ = pack.columns["image"].shape
    single = plan.replace(eval_scales=(1.0,), eval_flip=False, eval_window=None)
    ways = {name: single.replace(**changes) for name, changes in (settings or usual((height, width))).items()}
    sums, seconds = {name: Sums(device) for name in ways}, {name: [] for name in ways}
    for start in range(0, len(ids), batch_size):
        samples = [pack.sample(int(i)) for i in ids[start : start + batch_size]]
        raw = collate(samples, pack.columns)
        for name, way in ways.items():
            if not start:
                timed(model, raw, way, pack)  # loads libraries and chooses kernels
            taken, batch, outputs = timed(model, raw, way, pack)
            seconds[name].append(taken / len(samples))
            sums[name].add(task.metrics(outputs, batch))
    miou = {name: found.read()["miou"] for name, found in sums.items()}
    return Costs(str(device), len(ids), compare(ways, miou, seconds, (height, width)))


def compare(
    ways: Mapping[str, Plan], miou: Mapping[str, float], seconds: Mapping[str, Sequence[float]], size: tuple[int, int]
) -> tuple[Cost, ...]:
    """Each way relative to the first. seconds: an image, of each batch."""
    first = next(iter(ways))

    def cost(name: str) -> Cost:
        times = statistics.median(a / b for a, b in zip(seconds[name], seconds[first], strict=True))
        gain = miou[name] - miou[first]
        return Cost(name, miou[name], gain, statistics.median(seconds[name]), times, eval_cost(ways[name], size))

    return tuple(map(cost, ways))


@dataclass(frozen=True)
class Latency:
    """Seconds of n predictions, each of one image alone. Shows as a table."""

    device: str
    size: str
    n: int
    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return table.text(LATENCY_HEADERS, [self.cells])

    def _repr_html_(self) -> str:
        return table.html(LATENCY_HEADERS, [self.cells])

    @property
    def cells(self) -> tuple[str, ...]:
        times = (f"{1e3 * seconds:.2f} ms" for seconds in (self.median, self.least, self.most))
        return (self.device, self.size, f"{self.n}", *times)


LATENCY_HEADERS = ("device", "height × width", "predictions", "median", "least", "most")


def latency(model: nn.Module, pack: Pack, plan: Plan, ids: Ids) -> Latency:
    """The time from one packed image to its class map, evaluated as the plan says; each id once, after a few to warm
    up. Raises PlanError without ids."""
    device, seconds = next(model.parameters()).device, []
    for i in [*require_some(ids)[:WARM], *ids]:
        raw = collate([{"image": np.asarray(pack.arrays["image"][i])}], pack.columns)
        seconds.append(timed(model, raw, plan, pack)[0])
    seconds = seconds[-len(ids) :]
    height, width, _ = pack.columns["image"].shape
    times = statistics.median(seconds), min(seconds), max(seconds)
    return Latency(str(device), f"{height} × {width}", len(seconds), *times)


def timed(model: nn.Module, raw: Batch, plan: Plan, pack: Pack) -> tuple[float, Batch, Any]:
    """(seconds until the class maps are on the host, batch, outputs). Copying to the host waits for the device."""
    first = next(model.parameters()).detach()
    first.flatten()[:1].cpu()  # what is still queued, such as the metrics of the batch before, does not count
    began = perf_counter()
    raw = {name: tensor.to(first.device) for name, tensor in raw.items()}
    batch, outputs = forward(task, model, raw, plan, first.device)
    task.decode(outputs, pack)
    return perf_counter() - began, batch, outputs


def require_some(ids: Ids) -> Ids:
    if not len(ids):
        raise PlanError("costs and latency need at least one image, got none; take some of pack.ids('val')")
    return ids
