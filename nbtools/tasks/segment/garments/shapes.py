"""Garments as they lie flat: outlines, seams, and where folds begin; y downwards, about one unit high, centred.

Each function draws one garment of its kind: no two have the same cut, and their left and right sleeves or legs lie
differently.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nbtools.tasks.segment.garments.outlines import closed, curve, mirrored, turned
from nbtools.tasks.segment.garments.things import hanger

Rng = np.random.Generator


@dataclass(frozen=True)
class Garment:
    """outline: (N, 2). seams: lines (M, 2) that are sewn on it. origins: (A, 2) from which folds go out. hooks: the
    outlines of the hanger that holds it, if any."""

    outline: np.ndarray
    seams: tuple[np.ndarray, ...]
    origins: np.ndarray
    hooks: tuple[np.ndarray, ...] = ()

    def placed(self, pose: Callable[[np.ndarray], np.ndarray]) -> Garment:
        seams, hooks = (tuple(map(pose, lines)) for lines in (self.seams, self.hooks))
        return Garment(pose(self.outline), seams, pose(self.origins), hooks)


@dataclass(frozen=True)
class Top:
    """The measures of an upper part, of which one side is drawn at a time. sleeve: length; 0 has none."""

    neck: float
    depth: float
    shoulder: float
    chest: float
    waist: float
    sleeve: float
    cuff: float

    def side(self, angle: float, bend: float) -> list[np.ndarray]:
        """Strokes of the right half from the neckline's middle to below the arm; angle and bend of the sleeve."""
        neck, shoulder, armpit = (self.neck, 0), (self.shoulder, 0.06), (self.chest, 0.27)
        strokes = [[(0, self.depth), (0.75 * self.neck, 0.6 * self.depth), neck], [neck, shoulder]]
        if not self.sleeve:
            return [np.array(s) for s in [*strokes, [shoulder, (self.chest - 0.05, 0.16), armpit]]]
        along = np.array([np.cos(angle), np.sin(angle)])
        across = np.array([-along[1], along[0]])
        elbow = np.array(shoulder) + 0.5 * self.sleeve * along - bend * across
        wrist = np.array(shoulder) + self.sleeve * along
        inner = wrist + self.cuff * across
        under = elbow + (0.5 * self.cuff + 0.1) * across
        return [*map(np.array, [*strokes, [shoulder, elbow, wrist], [wrist, inner], [inner, under, armpit]])]


def shirt(rng: Rng) -> Garment:
    sleeve = float(rng.choice([0, rng.uniform(0.22, 0.4), rng.uniform(0.65, 0.9)], p=[0.12, 0.44, 0.44]))
    top = upper(rng, sleeve)
    hem, sag = rng.uniform(0.9, 1.15), rng.uniform(-0.05, 0.08)
    corner = (top.waist + rng.uniform(0, 0.06), hem)
    down = [[(top.chest, 0.27), (top.waist, 0.62), corner], [corner, (0.5 * corner[0], hem + sag), (0, hem + sag)]]
    outline = both(rng, top, down)
    seams = [curve([(-corner[0], hem - 0.03), (0, hem + sag - 0.03), (corner[0], hem - 0.03)])]
    if rng.random() < 0.5:
        seams.append(np.array([(0, top.depth), (0, hem + sag)]))
    else:
        band = [(-top.neck - 0.02, 0.01), (0, top.depth + 0.045), (top.neck + 0.02, 0.01)]
        seams.append(curve(band, 8))
    origins = [(-top.chest, 0.27), (top.chest, 0.27), (0, 0.35), (0.1, hem)]
    return centred(outline, [*seams, *armholes(top)], origins, hung(rng, top))


def dress(rng: Rng) -> Garment:
    top = upper(rng, float(rng.choice([0, rng.uniform(0.15, 0.35), rng.uniform(0.5, 0.7)], p=[0.5, 0.35, 0.15])))
    belt, hem = rng.uniform(0.42, 0.62), rng.uniform(1.2, 1.7)
    flare, waist = rng.uniform(0.32, 0.62), 0.85 * top.waist
    down = [[(top.chest, 0.27), (waist, belt)], [(waist, belt), (0.5 * (waist + flare), 0.6 * hem), (flare, hem)]]
    down.append(wavy(rng, flare, hem))
    belted = curve([(-waist, belt), (0, belt + 0.025), (waist, belt)])
    seams = [belted, belted + np.array([0, 0.045])] if rng.random() < 0.6 else [belted]
    origins = [(-waist, belt), (waist, belt), (-0.4 * waist, belt), (0.4 * waist, belt), (0, belt)]
    return centred(both(rng, top, down), [*seams, *armholes(top)], origins, hung(rng, top))


def trousers(rng: Rng) -> Garment:
    waist, hip = rng.uniform(0.19, 0.25), rng.uniform(0.25, 0.31)
    length = float(rng.choice([rng.uniform(0.55, 0.75), rng.uniform(1.15, 1.5)], p=[0.3, 0.7]))
    crotch, ankle = rng.uniform(0.34, 0.42), rng.uniform(0.1, 0.2) + 0.1 * (length < 1)
    sides = []
    for _ in range(2):
        foot = rng.uniform(0.04, 0.3) * length
        hem, inner = (foot + ankle, length), (foot, length + rng.uniform(-0.02, 0.03))
        knee = (0.5 * (hip + hem[0]) + rng.uniform(-0.03, 0.03), 0.55 * length)
        inside = (0.5 * foot + 0.01, 0.5 * (crotch + length))
        sides.append([[(0, 0.02), (waist, 0)], [(waist, 0), (hip, 0.25), knee, hem], [hem, inner], [inner, inside]])
        sides[-1].append([inside, (0, crotch)])
    outline = closed([*sides[0], *mirrored(sides[1])])
    seams = [np.array([(-waist, 0.055), (0, 0.075), (waist, 0.055)]), np.array([(0, 0.07), (0, crotch)])]
    for side in (-1, 1):
        seams.append(curve([(side * 0.55 * waist, 0.07), (side * 0.8 * waist, 0.16), (side * (hip - 0.01), 0.2)]))
    return centred(outline, seams, [(0, crotch), (-0.05, crotch), (0.05, crotch), (-hip, 0.3), (hip, 0.3)])


def skirt(rng: Rng) -> Garment:
    waist, length, flare = rng.uniform(0.18, 0.28), rng.uniform(0.55, 1.0), rng.uniform(0.3, 0.6)
    side = [[(0, 0.02), (waist, 0)], [(waist, 0), (0.5 * (waist + flare) + 0.02, 0.45 * length), (flare, length)]]
    side.append(wavy(rng, flare, length))
    band = curve([(-waist - 0.01, 0.06), (0, 0.085), (waist + 0.01, 0.06)])
    return centred(closed([*side, *mirrored(side)]), [band], [(x * waist, 0.06) for x in (-0.9, -0.4, 0, 0.4, 0.9)])


KINDS: dict[str, Callable[[Rng], Garment]] = {"shirt": shirt, "trousers": trousers, "dress": dress, "skirt": skirt}


def upper(rng: Rng, sleeve: float) -> Top:
    chest = rng.uniform(0.25, 0.33)
    depth = float(rng.choice([rng.uniform(0.05, 0.1), rng.uniform(0.15, 0.3)]))
    cuff = rng.uniform(0.15, 0.22) if sleeve < 0.45 else rng.uniform(0.09, 0.14)
    shoulder = chest - 0.01 if sleeve else chest - 0.09
    return Top(rng.uniform(0.08, 0.14), depth, shoulder, chest, chest - rng.uniform(-0.03, 0.05), sleeve, cuff)


def both(rng: Rng, top: Top, down: list) -> np.ndarray:
    """The outline of an upper part and what hangs from it; each sleeve lies at its own angle."""
    steepest = 0.85 if top.sleeve < 0.45 else 1.15
    angle, bend = rng.uniform(-0.2, steepest), 0.2 * top.sleeve
    sides = []
    for _ in range(2):
        own = float(np.clip(angle + rng.normal(0, 0.2), -0.4, steepest))
        sides.append([*top.side(own, rng.uniform(-0.4, 1) * bend), *down])
    return closed([*sides[0], *mirrored(sides[1])])


def armholes(top: Top) -> list[np.ndarray]:
    if not top.sleeve:
        return []
    ways = [(top.shoulder, 0.06), (top.chest - 0.045, 0.15), (top.chest, 0.27)]
    return [curve([(side * x, y) for x, y in ways]) for side in (-1, 1)]


def hung(rng: Rng, top: Top) -> list[np.ndarray]:
    return hanger(rng, top.shoulder) if rng.random() < 0.35 else []


def wavy(rng: Rng, half: float, y: float) -> list[tuple[float, float]]:
    """A hem's right half, from its corner to the middle, in waves as cloth that has folds hangs."""
    waves, height = int(rng.integers(2, 5)), rng.uniform(0.005, 0.025)
    x = np.linspace(1, 0, 2 * waves + 1)
    down = y + 0.07 * (1 - x**2) + height * (np.arange(2 * waves + 1) % 2)
    down[0] = y
    return list(zip(half * x, down, strict=True))


def centred(outline: np.ndarray, seams: list, origins: list, hooks: list[np.ndarray] | None = None) -> Garment:
    middle = (outline.min(0) + outline.max(0)) / 2
    return Garment(outline, tuple(seams), np.array(origins, float), tuple(hooks or ())).placed(lambda p: p - middle)


def area(outline: np.ndarray) -> float:
    x, y = outline.T
    return float(abs(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2)


@dataclass(frozen=True)
class Pose:
    """A garment's way into the picture: bent a little by waves (2, 2), turned, scaled to pixels, and moved."""

    angle: float
    scale: float
    at: np.ndarray
    waves: np.ndarray
    phases: np.ndarray
    depth: float

    def __call__(self, points: np.ndarray) -> np.ndarray:
        bent = points + self.depth * np.sin(points @ self.waves + self.phases)
        return self.scale * turned(bent, self.angle) + self.at


def pose(rng: Rng, scale: float, at: np.ndarray) -> Pose:
    angle = float(rng.choice([rng.normal(0, 0.25), rng.uniform(-np.pi, np.pi)], p=[0.75, 0.25]))
    phases, depth = rng.uniform(0, 2 * np.pi, 2), float(rng.uniform(0.01, 0.05))
    return Pose(angle, scale, at, rng.normal(0, 3.5, (2, 2)), phases, depth)
