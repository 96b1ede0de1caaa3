"""Movements of the demo's glosses: signs that nobody signs, drawn from a seed, with the ambiguity of real ones.

Glosses of a category come in families of six that show the same postures in other orders: a movement that begins with
its first, second or third part and goes on to the other two, and each of these backwards. So what forgets the order of
frames, as their mean and spread do, has little to tell the six apart by.

The unit is the width of the shoulders, the origin between them; x to the right of the picture, y down, z to the camera.
A sign is described as of a right hand, which is in the left of the picture. T moments.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from nbtools.errors import PackError

PLACES = {
    "greeting": (-0.40, -0.75, 0.45),
    "survival": (-0.05, 0.40, 0.50),
    "number": (-0.85, -0.10, 0.45),
    "calendar": (-0.30, 0.90, 0.55),
    "days": (0.35, 0.05, 0.50),
    "family": (-0.10, -0.35, 0.45),
    "relationships": (-0.45, 0.30, 0.60),
    "colour": (0.10, -0.65, 0.45),
    "food": (-0.85, 0.60, 0.45),
    "drink": (-0.95, -0.70, 0.40),
}
"""The categories of the guide, and about where in front of the body a wrist is in their glosses."""

SHAPES = {
    "flat": (0.1, 0.0, 0.0, 0.0, 0.05),
    "fist": (0.8, 1.0, 1.0, 1.0, 1.0),
    "point": (0.8, 0.0, 1.0, 1.0, 1.0),
    "two": (0.8, 0.0, 0.0, 1.0, 1.0),
    "claw": (0.3, 0.5, 0.5, 0.5, 0.5),
    "horns": (0.2, 0.0, 1.0, 1.0, 0.0),
}
"""How far fingers are bent, from the thumb on: 0 straight, 1 closed."""

RELAXED = (0.25, 0.3, 0.35, 0.4, 0.45)

CHANGES = (
    ("flat", "flat", 0.0),
    ("flat", "fist", 0.0),
    ("point", "point", 0.0),
    ("fist", "two", 0.0),
    ("two", "two", 0.9),
    ("claw", "flat", 0.9),
    ("point", "horns", 0.0),
)
"""(shape at the start, shape at the end, radians that the wrist turns meanwhile)."""

HANDS = ("one", "both", "base")
"""One hand; both in mirror image of each other; one over the other, which is held still."""

PARTS = 3  # of a movement; so many times two are the glosses of a family
JUMP = 0.12  # of the time: from a movement's end to its beginning, where it begins with a later part
SEED = 1  # the stream of random numbers of glosses; signers and clips have others

Way = tuple[str, str, tuple[str, str, float]]
"""(path, hands, change)."""


def turned(radius: np.ndarray | float, turns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return radius * np.sin(2 * math.pi * turns), radius * np.cos(2 * math.pi * turns)


PATHS: dict[str, Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]] = {
    "across": lambda u: (2 * u - 1, 0 * u),
    "up": lambda u: (0 * u, 1 - 2 * u),
    "slant": lambda u: (0.8 * (2 * u - 1), 0.8 * (2 * u - 1)),
    "arc": lambda u: (-np.cos(math.pi * u), -np.sin(math.pi * u) + 2 / math.pi),
    "hook": lambda u: (np.clip(2 * u - 1, 0, 1) * 1.4 - 0.35, np.clip(2 * u, 0, 1) * 1.4 - 1.05),
    "circle": lambda u: turned(0.8, u),
    "spiral": lambda u: turned(0.2 + 0.9 * u, 2 * u),
    "zigzag": lambda u: (2 * u - 1, 0.6 * np.interp(u, (0, 1 / 3, 2 / 3, 1), (1, -1, 1, -1))),
}
"""Where the wrist is about its place, 0 ≤ u ≤ 1 of the way: 0 in the mean, and none is its own reverse."""


class Held(NamedTuple):
    """One hand over time: wrist about the place (T, 2), bend of the five fingers (T, 5), turn (T, 1) in radians."""

    offset: np.ndarray
    bend: np.ndarray
    turn: np.ndarray

    def then(self, other: Held, part: np.ndarray) -> Held:
        """This at part (T,) 0, the other at 1."""
        return Held(*(a + part[:, None] * (b - a) for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Gloss:
    """What the hands do. size: of the path; aim: where fingers point, radians from upwards to the body's middle;
    begin: with what of the movement, which goes on from its end to its beginning."""

    name: str
    category: int
    place: tuple[float, float, float]
    path: str
    hands: str
    shapes: tuple[str, str]
    turn: float
    aim: float
    roll: float
    size: float
    backwards: bool
    begin: float

    def at(self, u: np.ndarray) -> Held:
        """The signing hand when u (T,) of the movement is done, 0 to 1."""
        u = 1 - u if self.backwards else u
        if not self.begin:
            return self.whole(u)
        end = (1 - self.begin) * (1 - JUMP)  # when the movement's end is reached
        later = self.whole(self.begin + np.minimum(u, end) / (1 - JUMP))
        earlier = self.whole(np.maximum(u - end - JUMP, 0) / (1 - JUMP))
        return later.then(earlier, np.clip((u - end) / JUMP, 0, 1))

    def whole(self, u: np.ndarray) -> Held:
        """The movement before the family makes six of it."""
        first, last = (np.array(SHAPES[shape]) for shape in self.shapes)
        offset = self.size * np.stack(PATHS[self.path](u), 1)
        return Held(offset, first + (last - first) * u[:, None], self.turn * (u[:, None] - 0.5))


def lexicon(glosses: int, categories: int, seed: int) -> list[Gloss]:
    """So many glosses, dealt to the categories in turn; the same first ones for any number.

    Raises PackError where there are no so many.
    """
    ways = list(itertools.product(PATHS, HANDS, CHANGES))
    if not 1 <= categories <= len(PLACES):
        raise PackError(f"categories must be 1 to {len(PLACES)}, got {categories}")
    most = categories * 2 * PARTS * len(ways)
    if not categories <= glosses <= most:
        raise PackError(f"glosses must be {categories} to {most:,}, of {categories} categories, got {glosses}")
    return [made(number % categories, number // categories, seed, ways) for number in range(glosses)]


def made(category: int, number: int, seed: int, ways: Sequence[Way]) -> Gloss:
    """A gloss by its number within its category, which takes the ways to move in an order of its own."""
    family, variant = divmod(number, 2 * PARTS)
    order = np.random.default_rng([seed, SEED, category]).permutation(len(ways))
    path, hands, (first, last, turn) = ways[order[family]]
    rng = np.random.default_rng([seed, SEED, category, family])
    name, place = list(PLACES.items())[category]
    return Gloss(
        name=f"{name} {family + 1}{'abcdef'[variant]}",
        category=category,
        place=place,
        path=path,
        hands=hands,
        shapes=(first, last),
        turn=turn,
        aim=rng.uniform(-0.3, 0.7),
        roll=(0.0, 0.8, 2.4)[rng.integers(3)],
        size=rng.uniform(0.40, 0.50),
        backwards=variant % 2 == 1,
        begin=variant // 2 / PARTS,
    )
