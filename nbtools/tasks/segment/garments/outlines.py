"""Closed outlines (N, 2) as x, y in pixels, y downwards: smooth ones, transformed ones, and what of them is in a frame.

A pixel (column, row) covers column to column + 1 and row to row + 1, as in CVAT.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Points = Sequence[Sequence[float] | np.ndarray] | np.ndarray


def curve(points: Points, steps: int = 5) -> np.ndarray:
    """A Catmull–Rom spline through all the points, from the first to the last: ((n − 1)·steps + 1, 2)."""
    known = np.asarray(points, float)
    padded = np.concatenate([[2 * known[0] - known[1]], known, [2 * known[-1] - known[-2]]])
    a, b, c, d = (padded[i : len(padded) - 3 + i, None] for i in range(4))  # (n − 1, 1, 2)
    t = (np.arange(steps) / steps)[:, None]
    ways = 0.5 * (2 * b + (c - a) * t + (2 * a - 5 * b + 4 * c - d) * t**2 + (3 * b - a - 3 * c + d) * t**3)
    return np.concatenate([ways.reshape(-1, 2), known[-1:]])


def closed(strokes: Sequence[Points]) -> np.ndarray:
    """One outline of strokes, each of which begins where the one before it ends: corners there, curves between."""
    return np.concatenate([curve(stroke)[:-1] for stroke in strokes])


def ring(points: Points, steps: int = 4) -> np.ndarray:
    """A closed smooth outline without corners through all the points."""
    known = np.asarray(points, float)
    return curve(np.concatenate([known[-1:], known, known[:2]]), steps)[steps : steps * (len(known) + 1)]


def mirrored(strokes: Sequence[Points]) -> list[np.ndarray]:
    """The strokes of the other side, in the order in which they close the outline."""
    return [np.asarray(stroke, float)[::-1] * (-1, 1) for stroke in reversed(strokes)]


def turned(points: np.ndarray, angle: float) -> np.ndarray:
    """Rotated about the origin, in radians, clockwise as it is seen."""
    c, s = np.cos(angle), np.sin(angle)
    return points @ np.array([[c, s], [-s, c]])


def within(points: np.ndarray, height: int, width: int) -> list[np.ndarray]:
    """The parts of an outline that a frame shows, each a closed outline without edges that run back on themselves."""
    parts = [points]
    for axis, sign, limit in ((0, 1, 0), (0, -1, -width), (1, 1, 0), (1, -1, -height)):
        parts = [piece for part in parts for piece in half(part, axis, sign, limit)]
    return parts


def half(points: np.ndarray, axis: int, sign: int, limit: float) -> list[np.ndarray]:
    """The parts of an outline where sign·coordinate ≥ limit: its runs inside, joined along the border in pairs of
    neighbouring crossings, between which the border is inside the outline."""
    depth = sign * points[:, axis] - limit
    inside = depth >= 0
    if inside.all() or not inside.any():
        return [points] if inside.all() else []
    start = int(np.argmax(inside & ~np.roll(inside, 1)))
    points, depth, inside = (np.roll(array, -start, 0) for array in (points, depth, inside))
    runs = [crossed(points, depth, run) for run in np.split(np.arange(len(points)), bends(inside)) if inside[run[0]]]
    ends = np.array([run[end, 1 - axis] for run in runs for end in (0, -1)])
    rank = np.argsort(ends, kind="stable")
    mate = {int(rank[i ^ 1]): int(rank[i]) for i in range(len(rank))}
    return joined(runs, mate)


def bends(inside: np.ndarray) -> np.ndarray:
    return np.flatnonzero(inside[1:] != inside[:-1]) + 1


def crossed(points: np.ndarray, depth: np.ndarray, run: np.ndarray) -> np.ndarray:
    """A run of inner points with the border's crossings before and after it."""
    ways = []
    for inner, outer in ((run[0], run[0] - 1), (run[-1], (run[-1] + 1) % len(points))):
        share = depth[inner] / (depth[inner] - depth[outer])
        ways.append(points[inner] + share * (points[outer] - points[inner]))
    return np.concatenate([ways[:1], points[run], ways[1:]])


def joined(runs: list[np.ndarray], mate: dict[int, int]) -> list[np.ndarray]:
    """Closed outlines of runs. End 2·i of run i is its beginning, 2·i + 1 its end; `mate` tells which two meet, in an
    outline that crosses itself also two beginnings."""
    parts, left = [], set(range(len(runs)))
    while left:
        end, part = 2 * min(left), []
        while end // 2 in left:
            left.remove(end // 2)
            part.append(runs[end // 2][:: -1 if end % 2 else 1])
            end = mate[end ^ 1]
        parts.append(np.concatenate(part))
    return parts
