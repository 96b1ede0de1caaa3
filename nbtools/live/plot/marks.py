"""Where the names of turned knobs stand above a chart: they cross neither each other nor another mark's line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nbtools.live.plot.chart import Mark

CHARACTER = 1 / 40  # of a chart's width, where it is as narrow as it gets
LINES = 12  # marks at most that are whole lines: behind more, the curves would be lost
DIGITS = re.compile(r"\d+\.\d{4,}")  # of a lr by rule
SHORTEST, ROWS, NAMES = 14, 3, 6  # of the names of marks: characters of one, rows, and how many


def marks(changes: Sequence[Mapping[str, Any]], last: float) -> tuple[Mark, ...]:
    """A mark a turned knob; the last ones with names as stairs that rise to the right or to the left, whichever says
    more, so that no mark's line crosses another one's name."""
    turned = [(float(row["step"]), DIGITS.sub(rounded, str(row.get("what", "")))) for row in changes]
    rising, falling = arranged(turned[-NAMES:], last, -1), arranged(turned[: -NAMES - 1 : -1], last, 1)[::-1]
    places = max(rising, falling, key=lambda stairs: sum(len(place.name) for place in stairs))
    found = [Mark(x, what, short=len(turned) > LINES) for x, what in turned[:-NAMES]]
    for (x, what), place in zip(turned[-NAMES:], places, strict=True):
        found.append(Mark(x, what, place.name, place.side, place.row))
    return tuple(found)


def rounded(digits: re.Match[str]) -> str:
    return f"{float(digits[0]):.3g}"


def arranged(turned: Sequence[tuple[float, str]], last: float, side: int) -> list[Place]:
    """Places one after another, the names on one side where they fit there."""
    places: list[Place] = []
    for x, what in turned:
        places.append(placed(x / last, what, [place for place in places if place.name], side))
    return places


@dataclass(frozen=True)
class Place:
    """Of a mark's name: at and what it covers, low … high, in shares of the width."""

    at: float
    low: float
    high: float
    row: int = 0
    side: int = 1
    name: str = ""


def placed(at: float, what: str, taken: Sequence[Place], first: int) -> Place:
    """The lowest row and the side where a name fits whole between what is taken, else where most of it does."""
    found = Place(at, at, at)
    for row in range(ROWS):
        if any(other.row <= row and other.low <= at <= other.high for other in taken):
            break  # its line would cross that name
        walls = [0.0, 1.0, *(other.at for other in taken if other.row >= row)]
        walls += [edge for other in taken if other.row == row for edge in (other.low, other.high)]
        for side in (first, -first):
            room = min(abs(wall - at) for wall in walls if (wall - at) * side >= 0)
            most = int(room / CHARACTER) - 1
            if most >= min(len(what), SHORTEST) and most > len(found.name):
                name = what if len(what) <= most else what[: most - 1] + "…"
                end = at + side * (len(name) + 1) * CHARACTER
                found = Place(at, min(at, end), max(at, end), row, side, name)
            if found.name == what:
                return found
    return found
