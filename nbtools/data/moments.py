"""The mean and standard deviation of a pack's columns, by which a task normalises its inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from nbtools.data.items import TARGET, Form

BLOCK = 2**17  # numbers whose mean is computed at once, in the processor's cache
WIDE = 4096  # places on an axis: above, one mean for all of them


def moments(forms: Mapping[str, Form], arrays: Mapping[str, np.ndarray], train: np.ndarray) -> dict[str, Any]:
    """Mean and standard deviation, 1 of what never varies, of targets, float32 columns and images in 0…1 over the
    training split: per channel of images; per value of vectors and of each step of ragged columns; else one of all, as
    nothing says which axis holds what."""
    wanted = np.zeros(len(arrays["split"]), bool)
    wanted[train] = True
    found: dict[str, Any] = {"mean": {}, "std": {}}
    for name, form in forms.items():
        if form.kind == "class" or not (name == TARGET or form.dtype == "<f4" or form.layout or form.scaled):
            continue
        rows = np.repeat(wanted, np.diff(arrays[f"{name}.offsets"])) if form.ragged else wanted
        vectors = len(form.shape) <= 2 if form.ragged else len(form.shape) == 1
        axis = {"chw": 1, "hwc": -1}.get(form.layout, -1 if vectors else 0)
        mean, std = moments_of(arrays[name], rows, axis, form.unit)
        found["mean"][name], found["std"][name] = mean.tolist(), std.tolist()
    return found


def moments_of(array: np.ndarray, rows: np.ndarray, axis: int, unit: float) -> tuple[np.ndarray, np.ndarray]:
    """(mean, deviation) of an array's chosen rows for each place on an axis; one for all on axis 0; in units."""
    shape = array.shape[1:]
    count, sums, squares, origin = 0, np.zeros(shape), np.zeros(shape), np.zeros(shape)
    step = max(1, BLOCK // max(1, math.prod(shape)))
    for start in range(0, len(array), step):
        block = array[start : start + step][rows[start : start + step]].astype(np.float64)
        if len(block):
            origin = origin if count else block[0].copy()  # far from 0 a difference of squares says nothing
            block -= origin
            sums += block.sum(0)  # whole samples: adding up three channels at a time takes ten times as long
            squares += np.square(block, out=block).sum(0)
            count += len(block)
    means, count = sums / max(count, 1), max(count, 1)
    spread = squares / count - np.square(means)
    means += origin
    single = not axis or not shape or array.shape[axis] > WIDE
    others = (
        tuple(range(len(shape)))
        if single
        else tuple(i for i in range(len(shape)) if i != (axis - 1 if axis > 0 else len(shape) - 1))
    )
    mean = means.mean(others, keepdims=True)
    std = np.sqrt(np.maximum((spread + np.square(means - mean)).mean(others), 0))
    return mean.reshape(-1) / unit, np.where(std > 0, std / unit, 1).reshape(-1)
