"""Outlines of what is no garment: things that lie about, and arms, bags and hangers that hide a part of one."""

from __future__ import annotations

import numpy as np

from nbtools.tasks.segment.garments.outlines import Points, closed, curve, ring, turned

Rng = np.random.Generator

HAND = (
    (0, 0.5), (0.9, 0.66), (1.75, 0.68), (1.9, 0.5), (1.25, 0.34), (2.1, 0.33), (2.15, 0.1), (1.3, 0.02),
    (2.2, 0.0), (2.15, -0.24), (1.25, -0.3), (1.95, -0.34), (1.85, -0.56), (0.95, -0.62), (0.85, -0.8),
    (1.2, -1.15), (1.0, -1.32), (0.35, -0.85), (0, -0.5),
)  # fmt: skip
"""Along and across an arm, in widths of the wrist: four fingers and a thumb."""


def thing(rng: Rng, size: float, at: np.ndarray) -> np.ndarray:
    """A box, a plate or cushion, a stone, a strap, a leaf, or a garment's caricature; size: its extent in pixels."""
    shape = str(rng.choice(["box", "oval", "stone", "strap", "leaf", "patch"]))
    half, slim = size / 2, rng.uniform(0.35, 1)
    if shape == "box":
        corners = np.array([(-1, -slim), (1, -slim), (1, slim), (-1, slim)]) * half
        outline = corners * rng.uniform(0.9, 1.1, (4, 2))
    elif shape == "oval":
        turns = np.linspace(0, 2 * np.pi, 40, endpoint=False)
        outline = half * np.stack([np.cos(turns), slim * np.sin(turns)], 1)
    elif shape == "stone":
        outline = ring(half * spikes(rng, int(rng.integers(5, 10)), 0.55) * (1, 0.5 + slim / 2), 6)
    elif shape == "strap":
        way = curve([(-half, rng.normal(0, 0.2 * size)), (0, rng.normal(0, 0.2 * size)), (half, 0)], 10)
        outline = thick(way, size * rng.uniform(0.05, 0.16))
    elif shape == "leaf":
        rim = half * slim * rng.uniform(0.4, 0.8)
        outline = closed([[(-half, 0), (0, -rim), (half, 0)], [(half, 0), (0, rim), (-half, 0)]])
    else:
        outline = half * spikes(rng, int(rng.integers(5, 9)), 0.5)
    return turned(outline, rng.uniform(0, 2 * np.pi)) + at


def spikes(rng: Rng, count: int, least: float) -> np.ndarray:
    """Points around the origin, at distances from `least` to 1."""
    turns = (np.arange(count) + rng.uniform(-0.3, 0.3, count)) * 2 * np.pi / count
    return np.stack([np.cos(turns), np.sin(turns)], 1) * rng.uniform(least, 1, (count, 1))


def thick(way: Points, width: float | np.ndarray) -> np.ndarray:
    """The outline of a line as wide as said, at each of its points or everywhere."""
    way = np.asarray(way, float)
    along = np.gradient(way, axis=0)
    across = along[:, ::-1] * (-1, 1) / np.maximum(np.linalg.norm(along, axis=1, keepdims=True), 1e-9)
    half = across * np.broadcast_to(width, len(way))[:, None] / 2
    return np.concatenate([way + half, (way - half)[::-1]])


def arm(rng: Rng, width: float, frm: np.ndarray, to: np.ndarray) -> np.ndarray:
    """A bare arm that reaches from outside of the picture to a point; width: of its wrist in pixels."""
    elbow = (frm + to) / 2 + rng.normal(0, 0.12 * np.linalg.norm(to - frm), 2)
    way = curve([frm, elbow, to], 8)
    widths = width * np.linspace(rng.uniform(1.5, 2), 1, len(way))
    limb = thick(way, widths)
    along = way[-1] - way[-2]
    angle = float(np.arctan2(along[1], along[0]))
    hand = np.array(HAND) * (1, rng.choice([-1, 1]))
    if hand[0, 1] < 0:
        hand = hand[::-1]
    fingers = turned(width * curve(hand, 3), angle) + to
    return np.concatenate([limb[: len(way)], fingers, limb[len(way) :]])


def bag(rng: Rng, size: float, at: np.ndarray) -> list[np.ndarray]:
    """A bag's handle and body."""
    half, high, top = size / 2, size * rng.uniform(0.35, 0.55), rng.uniform(0.65, 1)
    body = [(-top * half, -high), (top * half, -high)], [(top * half, -high), (half, 0), (0.95 * half, high)]
    rest = [(0.95 * half, high), (0, 1.06 * high), (-0.95 * half, high)], [(-0.95 * half, high), (-half, 0)]
    sides = [*body, *rest, [(-half, 0), (-top * half, -high)]]
    arch = [(-0.45 * half, -0.9 * high), (-0.35 * half, -1.9 * high), (0.35 * half, -1.9 * high)]
    handle = thick(curve([*arch, (0.45 * half, -0.9 * high)], 8), 0.07 * size)
    angle = rng.normal(0, 0.3)
    return [turned(part, angle) + at for part in (handle, closed(sides))]


def hanger(rng: Rng, shoulder: float) -> list[np.ndarray]:
    """A hanger's hook and bar in a garment's own measures, its neck at (0, 0)."""
    reach, low = shoulder - 0.03, rng.uniform(0.05, 0.09)
    bar = thick(curve([(-reach, low), (-0.4 * reach, 0.03), (0, 0), (0.4 * reach, 0.03), (reach, low)], 6), 0.03)
    turns = np.linspace(1.2, -np.pi, 12)
    bow = np.stack([0.05 * np.cos(turns), -0.17 - 0.05 * np.sin(-turns)], 1)
    return [thick(np.concatenate([[(0, 0), (0, -0.06)], bow]), 0.014), bar]
