"""Writers: each has slant, size, pressure, spacing and a way of its own with every character, and never writes one
twice the same.

A page's characters are bent in one batch: a few cosines a character make the bend and the pressure (an elastic
deformation without a field of random numbers per pixel), and a threshold on the atlas's soft strokes their thickness.
N characters of the atlas, G of a page, S pixels a cell, K cosines a side.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

COSINES = 4
SHARE = 0.7  # of a bend that is the writer's habit; the rest is new at every writing
BEND = 0.05  # of a cell, for each cosine before its fall-off
FAINTEST = 40  # ink below it does not count as a character's edge


@dataclass(frozen=True, eq=False)
class Hand:
    """One writer. matrix (2, 2): from where a pixel's ink comes; habits (N, 3, K, K): bend across, down, pressure."""

    matrix: np.ndarray
    habits: np.ndarray
    level: float  # of the soft stroke from which on there is ink: low is a thick pen
    dark: float
    gap: float  # between characters, in cells
    slope: float
    wander: float  # of the line about its slope, in cells
    variation: float


def hand(rng: np.random.Generator, count: int, variation: float) -> Hand:
    """A writer of `count` characters; variation 0 writes as the atlas is printed, 1 as people do."""
    wide, tall = np.exp(variation * rng.uniform(-0.14, 0.10, 2))
    slant, turn = variation * rng.normal(0, (0.14, 0.03))
    return Hand(
        matrix=np.array([[1 / wide, slant], [turn, 1 / tall]]),
        habits=cosines(rng, count, SHARE * variation),
        level=0.42 + variation * rng.uniform(-0.12, 0.12),
        dark=1 - variation * rng.uniform(0, 0.45),
        gap=0.08 + variation * rng.uniform(-0.07, 0.12),
        slope=variation * rng.normal(0, 0.02),
        wander=variation * rng.uniform(0.01, 0.05),
        variation=variation,
    )


def cosines(rng: np.random.Generator, count: int, scale: float) -> np.ndarray:
    """(count, 3, K, K) float32 weights that fall with the frequency: slow bends are large, quick ones small."""
    order = np.add.outer(np.arange(COSINES), np.arange(COSINES))
    fall = scale * BEND / np.maximum(order, 1) * ((order > 0) & (order < COSINES))
    return (rng.standard_normal((count, 3, COSINES, COSINES), np.float32) * fall).astype(np.float32)


def lines(ink: Tensor, texts: Sequence[np.ndarray], writer: Hand, rng: np.random.Generator) -> list[np.ndarray]:
    """One picture (H, W) uint8 grey, 255 paper, of every text, given as places in the atlas ink (N, S, S) uint8."""
    drawn = characters(ink, np.concatenate(texts), writer, rng)
    ends = np.cumsum([len(text) for text in texts])[:-1]
    return [finished(laid(part, writer, rng), writer, rng) for part in np.split(drawn, ends)]


def characters(ink: Tensor, places: np.ndarray, writer: Hand, rng: np.random.Generator) -> np.ndarray:
    """(G, S, S) uint8 ink: the characters as the writer makes them this time."""
    count, size, variation = len(places), ink.shape[-1], writer.variation
    weights = writer.habits[places] + cosines(rng, count, (1 - SHARE) * variation)
    steps = math.pi * (torch.arange(size)[:, None] + 0.5) / size
    basis = torch.cos(steps * torch.arange(COSINES))  # (S, K)
    field = basis @ torch.from_numpy(weights) @ basis.T  # (G, 3, S, S)
    matrices = writer.matrix @ (np.eye(2) + variation * rng.normal(0, 0.04, (count, 2, 2)))
    theta = torch.zeros(count, 2, 3)
    theta[:, :, :2] = torch.from_numpy(matrices)
    grid = F.affine_grid(theta, [count, 1, size, size], align_corners=False)
    grid += 2 * field[:, :2].permute(0, 2, 3, 1)  # the grid's cell goes from -1 to 1
    stroke = F.grid_sample(ink[torch.from_numpy(places)][:, None].float() / 255, grid, align_corners=False)[:, 0]
    level = (writer.level + field[:, 2]).clamp_(0.25, 0.65)
    return ((stroke - level) * (0.12 * size) + 0.5).clamp_(0, 1).mul_(255).byte().numpy()


def laid(cells: np.ndarray, writer: Hand, rng: np.random.Generator) -> np.ndarray:
    """Characters (n, S, S) side by side along a line that climbs and wanders: (H, W) uint8 ink, blank edges cut."""
    count, size, _ = cells.shape
    inked = cells.max(1) > FAINTEST  # (n, S)
    left = inked.argmax(1)  # 0 where nothing is inked
    right = size - inked[:, ::-1].argmax(1)
    gaps = size * (writer.gap + writer.variation * rng.normal(0, 0.04, count))
    steps = np.maximum(np.maximum(right - left, 0.45 * size) + gaps, 1)
    starts = np.round(np.cumsum(steps) - steps).astype(int) + size
    phase, waves = rng.uniform(0, 2 * math.pi), rng.uniform(0.5, 2.0)
    drift = writer.slope * starts + size * writer.wander * np.sin(phase + waves * np.arange(count) / 3)
    drift += size * writer.variation * rng.normal(0, 0.02, count)
    tops = np.round(drift - drift.min()).astype(int)
    canvas = np.zeros((tops.max() + size, starts[-1] + 2 * size), np.uint8)
    for cell, top, start, first, last in zip(cells, tops, starts, left, right, strict=True):
        part = canvas[top : top + size, start : start + last - first]
        np.maximum(part, cell[:, first:last], out=part)
    return cut(canvas)


def cut(canvas: np.ndarray) -> np.ndarray:
    rows, columns = np.flatnonzero(canvas.max(1) > FAINTEST), np.flatnonzero(canvas.max(0) > FAINTEST)
    if not len(rows):
        return canvas
    return canvas[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]


def finished(ink: np.ndarray, writer: Hand, rng: np.random.Generator) -> np.ndarray:
    """Grey on white paper: the pen's darkness with a grain, and some specks of dirt."""
    grain = rng.integers(round(256 * (1 - 0.25 * writer.variation)), 257, ink.shape, np.uint16)
    grey = 255 - (ink * grain * np.float32(writer.dark / 256)).astype(np.uint8)
    for _ in range(rng.poisson(writer.variation * ink.size / 12_000)):
        y, x = rng.integers(0, ink.shape)
        grey[y : y + 2, x : x + 2] = np.minimum(grey[y : y + 2, x : x + 2], rng.integers(60, 200))
    return grey
