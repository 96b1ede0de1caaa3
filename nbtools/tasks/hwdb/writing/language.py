"""What the demo's lines say: an invented language with frequent and rare characters and with habits, so that a
language model trained on its text helps to read it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nbtools.errors import PackError
from nbtools.tasks.hwdb.writing.glyphs import pool

HEAD = 8  # added to a rank of Zipf's law: the rarest of 60 characters still comes once in 500
FOLLOWERS = 5  # characters that mostly come after a given one
FAITHFUL = 0.7  # how often it is one of them
GRAMMAR, TEXT = 1, 2  # streams of random numbers, apart from those of writers


@dataclass(frozen=True, eq=False)
class Language:
    """N characters in code point order; shares (N,) cumulative frequencies; followers (N, FOLLOWERS) places."""

    characters: str
    shares: np.ndarray
    followers: np.ndarray

    def line(self, rng: np.random.Generator, length: tuple[int, int], first: int | None = None) -> str:
        """A line of `length` (fewest, most) characters; `first` is the place of the one that it begins with."""
        count = rng.integers(*length, endpoint=True)
        anything = np.minimum(np.searchsorted(self.shares, rng.random(count)), len(self.characters) - 1)
        kept, which = rng.random(count) < FAITHFUL, rng.integers(0, FOLLOWERS, count)
        places = [int(anything[0]) if first is None else first]
        for n in range(1, count):
            places.append(int(self.followers[places[-1], which[n]] if kept[n] else anything[n]))
        return "".join(self.characters[place] for place in places)


def language(characters: Sequence[str], seed: int) -> Language:
    """The language of a set of characters: by the seed and the set, in whatever order it is given."""
    letters = sorted(set(characters))
    rng = np.random.default_rng([seed, GRAMMAR])
    weights = rng.permutation(1 / (np.arange(len(letters)) + HEAD))
    weights /= weights.sum()
    followers = rng.choice(len(letters), (len(letters), FOLLOWERS), p=weights)
    return Language("".join(letters), weights.cumsum(), followers)


def demo_text(
    count: int, characters: int | Sequence[str] = 60, *, length: tuple[int, int] = (4, 12), seed: int = 0
) -> list[str]:
    """Lines of the language that a demo with the same characters, length and seed is written in, to train a language
    model on: other lines than the demo's. Raises PackError on an impossible request.

    Of 60 characters, 50,000 such lines let an n-gram of order 3 guess new ones with a perplexity of 18.6, ends of lines
    counted too, where the frequencies of the characters alone give 43.
    """
    chosen = some(characters)
    require_length(length)
    spoken, rng = language(chosen, seed), np.random.default_rng([seed, TEXT])
    return [spoken.line(rng, length) for _ in range(count)]


def some(characters: int | Sequence[str]) -> str:
    """The characters themselves, where only how many was said: the first of the pool."""
    if isinstance(characters, int):
        if not 2 <= characters <= len(pool()):
            raise PackError(f"characters must be 2 to {len(pool()):,}, or a string of them, got {characters}")
        return pool()[:characters]
    if (
        not isinstance(characters, Sequence)
        or len(characters) < 2
        or len(set(characters)) != len(characters)
        or any(len(one) != 1 for one in characters)
    ):
        raise PackError(f"characters must be 2 or more single characters, each once, got {characters!r}")
    return "".join(characters)


def require_length(length: tuple[int, int]) -> None:
    pair = isinstance(length, (tuple, list)) and len(length) == 2
    if not (pair and whole(length[0], 1) and whole(length[1], length[0])):
        raise PackError(f"length must be (fewest, most) characters of a line, both whole and ≥ 1, got {length!r}")


def whole(value: object, least: int, most: float = math.inf) -> bool:
    """Whether a value, of whatever type a caller gave, is a whole number in a range."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
