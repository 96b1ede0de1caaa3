"""What a keypoint detector makes of the demo's people: times that jitter, points that shake, hands that it loses.

T frames, P = 78 points.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from nbtools.tasks.sign.acting.motions import Gloss
from nbtools.tasks.sign.acting.signers import Signer, signed
from nbtools.tasks.sign.landmarks import FACE, HANDS, POINTS

FPS = 30
FEATURES = 2048
BACKBONE = 2048  # the seed of the projection that stands for a pretrained network: of no demo's, so of all demos alike
GRAIN = 2**13  # steps of a coordinate, 32 to a pixel of 256: noise below would show nothing, and take half of a file
SHAKE = 0.01  # shoulder widths

IDLE = 0.4  # of the clips of one hand: the other is never found
GAPS = ((HANDS[0], 1.0, 4), (HANDS[1], 1.0, 4), (FACE, 0.15, 8), (slice(0, POINTS), 0.3, 2))
"""(points, how often they are lost in a clip, for how many frames in the mean)."""


@dataclass(frozen=True, eq=False)
class Clip:
    """x (T, 156) float32 in [0, 1], 0 where not seen; mask (T, P) bool; times (T,) int64 ms; features (T, 2048)
    float32, or None."""

    x: np.ndarray
    mask: np.ndarray
    times: np.ndarray
    features: np.ndarray | None


def filmed(
    person: Signer, gloss: Gloss, frames: tuple[int, int], rng: np.random.Generator, features: bool = False
) -> Clip:
    """A clip of so many frames, from fewest to most, as the person is quick or slow."""
    fewest, most = frames
    slow = 0.7 * person.tempo + 0.3 * rng.random()
    count = round(fewest + (most - fewest) * slow)
    raised, done = paced(count, rng)
    points = signed(person, gloss, raised, done, rng)
    shaken = points + person.width * SHAKE * rng.standard_normal(points.shape)
    x = np.round(shaken * GRAIN).astype(np.float32) / GRAIN
    mask = seen(x, gloss.hands == "one", person.left_handed, rng)
    x[~mask] = 0
    times = np.round(np.arange(count) * 1000 / FPS + rng.uniform(-3, 3, count)).astype(np.int64)
    return Clip(x.reshape(count, -1), mask, times - times[0], projected(points, rng) if features else None)


def paced(count: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(raised (T,), done (T,)): hands rest, rise, sign and fall, quicker here and slower there; on the whole as often
    one way as the other in time, lest rests tell a sign from its reverse."""
    time = np.linspace(0, 1, count)
    rest, rise, fall, end = rng.uniform((0.03, 0.10, 0.10, 0.03), (0.18, 0.17, 0.17, 0.18))
    raised = eased((time - rest) / rise) * eased((1 - end - time) / fall)
    way = np.clip((time - rest - rise) / (1 - rest - rise - fall - end), 0, 1)
    way = way - rng.uniform(0.2, 0.8) * np.sin(2 * np.pi * way) / (2 * np.pi)
    return raised, way + rng.uniform(-0.3, 0.3) * way * (1 - way)


def eased(part: np.ndarray) -> np.ndarray:
    part = np.clip(part, 0, 1)
    return part * part * (3 - 2 * part)


def seen(x: np.ndarray, one_hand: bool, left_handed: bool, rng: np.random.Generator) -> np.ndarray:
    """(T, P): what is found of points (T, P, 2): nothing outside of the picture, and a hand whole or not at all."""
    inside = np.logical_and(x > 0, x < 1)
    mask = inside[..., 0] & inside[..., 1]
    for points, often, long in GAPS:
        for _ in range(rng.poisson(often)):
            start = rng.integers(len(x))
            mask[start : start + rng.geometric(1 / long), points] = False
    if one_hand and rng.random() < IDLE:
        mask[:, HANDS[int(left_handed)]] = False
    for hand in HANDS:
        mask[:, hand] &= mask[:, hand].all(1, keepdims=True)
    return mask


def projected(points: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """(T, 2048) float32: what a network might say of the picture, 0 and more as after a ReLU; it sees hands that a
    detector loses. Rounded to 8 bits behind the point, for which files are half as large."""
    weights, bias = backbone()
    flat = (points.reshape(len(points), -1) - 0.5).astype(np.float32)
    found = flat @ weights + bias + 0.05 * rng.standard_normal((len(points), FEATURES), np.float32)
    return np.round(np.maximum(found, 0) * 256) / 256


@functools.cache
def backbone() -> tuple[np.ndarray, np.ndarray]:
    """(weights (2 P, 2048), bias (2048,)) float32, scaled so that features spread as those of InceptionV3 do on real
    clips: about 0.35 in the mean, seldom above 3."""
    rng = np.random.default_rng(BACKBONE)
    weights = rng.standard_normal((2 * POINTS, FEATURES), np.float32)
    return weights * np.float32(0.3), rng.uniform(-0.4, 0.6, FEATURES).astype(np.float32)
