"""Cloth: colours, patterns as functions of a point on the cloth, and the shading of its folds.

A pattern is a field of tones looked up in a table of colours, so that it costs one gather a pixel. Everything that a
scene shows is made of this one distribution, garments, walls and things alike: no colour or pattern tells them apart.
"""

from __future__ import annotations

import colorsys
import functools
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Rng = np.random.Generator
Field = np.ndarray  # (h, w) float32

TONES = 256
PLATE, GRAIN = 1024, 32  # pixels of the side of the noise from which all noise is cut, and of its features
DARKEST, FAIREST = (92, 60, 45), (246, 214, 190)  # skin
PATTERNS = {"plain": 6, "melange": 4, "stripes": 3, "checks": 3, "dots": 2, "zigzag": 1, "print": 2, "waves": 1}


@dataclass(frozen=True)
class Cloth:
    """A pattern of its own: colours (TONES, 3) float32 from 0 to 255, repeated every `pitch` pixels at `angle`."""

    pattern: str
    colours: np.ndarray
    pitch: float
    angle: float
    ratio: float
    weave: float
    cut: tuple[float, float]

    def at(self, x: Field, y: Field) -> np.ndarray:
        """(h, w, 3) float32 colours at points of the cloth, in pixels."""
        c, s = np.float32(np.cos(self.angle)), np.float32(np.sin(self.angle))
        u, v = c * x + s * y, c * y - s * x
        if self.pattern == "checks":
            return 0.5 * (self.toned(u / self.pitch) + self.toned(v / (self.pitch * self.ratio)))
        return self.toned(self.tone(u / self.pitch, v / self.pitch))

    def toned(self, tone: Field) -> np.ndarray:
        """A tone of whole number n has the colour of tone 0: patterns repeat."""
        return self.colours.take((tone * TONES).astype(np.int32) & (TONES - 1), axis=0)

    def tone(self, u: Field, v: Field) -> Field:
        if self.pattern == "stripes":
            return u
        if self.pattern == "zigzag":
            return u + self.ratio * np.abs(v - np.floor(v) - 0.5)
        if self.pattern == "waves":
            return u + 0.2 * self.ratio * np.sin(6.3 * v)
        if self.pattern == "dots":
            row = np.floor(v)
            p, q = u + 0.5 * row, v - row - 0.5
            p = p - np.floor(p) - 0.5
            return np.minimum(1.2 * (p * p + q * q), 0.99)
        scale = {"plain": 0.3, "melange": 3.0, "print": 1.0}[self.pattern]
        return 0.5 + 0.18 * sampled(scale * u, scale * v, self.cut)


def cloth(rng: Rng, size: float) -> Cloth:
    """A new cloth; size: the pixels over which a thing of it extends, which bounds the pattern's repetition."""
    names, weights = list(PATTERNS), np.array(list(PATTERNS.values()), float)
    pattern = str(rng.choice(names, p=weights / weights.sum()))
    pitch = float(np.clip(size * np.exp(rng.uniform(-3.6, -1.3)), 5, 60))
    angle = float(rng.choice([0, np.pi / 2, rng.uniform(0, np.pi)], p=[0.4, 0.3, 0.3]))
    cut = (float(rng.uniform(0, PLATE)), float(rng.uniform(0, PLATE)))
    weave = float(rng.choice([0, rng.uniform(2, 8)]))
    return Cloth(pattern, table(rng, pattern), pitch, angle, float(rng.uniform(0.6, 1.8)), weave, cut)


def table(rng: Rng, pattern: str) -> np.ndarray:
    """The colours of the tones: bands with narrow transitions, or a smooth passage where a pattern has no bands."""
    if pattern in ("plain", "melange"):
        first = colour(rng)
        second = first + rng.normal(0, 6 if pattern == "plain" else 30, 3)
        return passage(np.array([first, second, first]), np.array([0, 0, 0.5]), 0.5)
    count = {"dots": 2, "stripes": int(rng.integers(2, 6))}.get(pattern, int(rng.integers(2, 5)))
    edges = np.sort(rng.uniform(0.1, 1, count - 1)) if pattern == "dots" else np.sort(rng.uniform(0, 1, count))
    bands = palette(rng, count)
    if pattern == "dots":
        edges = np.array([0, rng.uniform(0.06, 0.2)])
    return passage(np.concatenate([bands[-1:], bands]), np.concatenate([[0], edges]), 0.03)


def passage(colours: np.ndarray, starts: np.ndarray, width: float) -> np.ndarray:
    """(TONES, 3): colours[i] from starts[i] on, each beginning over `width` of the tones."""
    t = np.arange(TONES)[:, None] / TONES
    found = np.tile(colours[0], (TONES, 1))
    for start, before, after in zip(starts[1:], colours[:-1], colours[1:], strict=True):
        found += (after - before) * np.clip((t - start) / width, 0, 1)
    return np.clip(found, 0, 255).astype(np.float32)


def palette(rng: Rng, count: int) -> np.ndarray:
    """Colours that go together: (count, 3)."""
    base, spread = rng.random(), rng.choice([0.05, 0.15, 0.5])
    apart = np.array([colour(rng, base + spread * rng.normal()) for _ in range(count)])
    return apart[0] + rng.uniform(0.12, 0.7) * (apart - apart[0])


def colour(rng: Rng, hue: float | None = None) -> np.ndarray:
    """(3,) from 0 to 255: one in three is nearly grey, one in seven has the hue of skin."""
    hue = rng.random() if hue is None else hue
    if rng.random() < 0.15:
        hue = rng.uniform(0.02, 0.09)
    saturation = rng.uniform(0, 0.15) if rng.random() < 0.33 else 0.15 + 0.65 * rng.random() ** 1.6
    return 255 * np.array(colorsys.hsv_to_rgb(hue % 1, saturation, 0.96 - 0.78 * rng.random() ** 1.4))


def skin(rng: Rng) -> Cloth:
    """Skin is a cloth, too, and its colours are some cloths' colours."""
    tone = np.array(DARKEST) + rng.random() * (np.array(FAIREST) - DARKEST)
    ends = np.array([tone - 6, tone + rng.normal(0, 5, 3), tone - 6])
    colours = passage(ends, np.array([0, 0, 0.5]), 0.5)
    return Cloth("plain", colours, 25.0, 0.0, 1.0, 0.0, (float(rng.uniform(0, PLATE)), float(rng.uniform(0, PLATE))))


@functools.lru_cache(maxsize=1)
def plate() -> np.ndarray:
    """(PLATE, PLATE) float32 smooth noise that repeats, mean 0, deviation 1, features of about GRAIN pixels; 60 ms."""
    noise = np.random.default_rng(7).standard_normal((PLATE, PLATE), np.float32)
    f = np.hypot(np.fft.fftfreq(PLATE)[:, None], np.fft.rfftfreq(PLATE)) * GRAIN
    smooth = np.fft.irfft2(np.fft.rfft2(noise) * np.exp(-(f**2)), s=noise.shape)
    return (smooth / smooth.std()).astype(np.float32)


def sampled(u: Field, v: Field, cut: tuple[float, float]) -> Field:
    """Noise at (u, v) in units of its features."""
    column = (u * GRAIN + cut[0]).astype(np.int32) & (PLATE - 1)
    row = (v * GRAIN + cut[1]).astype(np.int32) & (PLATE - 1)
    return plate().take(row * PLATE + column)


def folds(rng: Rng, origins: np.ndarray, size: float, along: float) -> Callable[[Field, Field], Field]:
    """A function of points in pixels: the slopes of cloth's folds across the light, about −1 to 1.

    Broad waves along the cloth's own direction, and creases that go out from `origins`, where it is pulled."""
    turn, pitch = along + rng.normal(0, 0.15), size * rng.uniform(0.12, 0.22)
    long, depth, cut = pitch * rng.uniform(2.5, 5), rng.uniform(0.35, 0.6), tuple(rng.uniform(0, PLATE, 2))
    creases = [crease(rng, origin, size, along) for origin in origins if rng.random() < 0.85]
    c, s = np.float32(np.cos(turn)), np.float32(np.sin(turn))

    def slopes(x: Field, y: Field) -> Field:
        slope = np.float32(depth) * sampled((c * x + s * y) / pitch, (c * y - s * x) / long, cut)
        for one in creases:
            slope += one(x, y)
        return slope

    return slopes


def crease(rng: Rng, origin: np.ndarray, size: float, along: float) -> Callable[[Field, Field], Field]:
    """One fold: light on one of its sides, dark on the other, fading along its length."""
    angle = along + rng.uniform(0.1, 1.2) * rng.choice([-1, 1])
    c, s = np.float32(np.cos(angle)), np.float32(np.sin(angle))
    length, width = size * rng.uniform(0.15, 0.5), size * rng.uniform(0.012, 0.035)
    depth, bow = np.float32(rng.uniform(0.5, 1.1)), np.float32(rng.normal(0, 2))

    def slope(x: Field, y: Field) -> Field:
        x, y = x - np.float32(origin[0]), y - np.float32(origin[1])
        t = (c * y - s * x) / np.float32(length)
        d = (c * x + s * y) / (np.float32(width) * (0.6 + np.abs(t))) + bow * t * t
        return depth * d * np.exp(0.5 - 0.5 * d * d - 1.5 * (t - 0.4) ** 2 - 3 * np.maximum(-t, 0))

    return slope
