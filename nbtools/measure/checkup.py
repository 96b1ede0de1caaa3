"""What a check-up of the machine found: a row for each trial, kept in a file that `nb.advise` reads."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nbtools import disk, table
from nbtools.data import cache
from nbtools.measure.machine import machine
from nbtools.measure.report import Report
from nbtools.train import device as devices
from nbtools.version import VERSION

WORKS, DIFFERS, FAILS, MISSING, NOT_HERE = "works", "differs", "fails", "missing", "not here"
ENDED = "the process ended while it was tried; nb.checkup(again=True) tries it anew"


@dataclass(frozen=True)
class Row:
    """What a trial found. result: works, differs, fails, missing (a package), or not here; text: what was measured, or
    why not."""

    part: str
    what: str
    result: str
    text: str
    seconds: float
    task: str = ""
    lever: dict[str, Any] = field(default_factory=dict)
    figures: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Checkup(Report):
    """What works on this machine, and what was measured there. Shows as a table; `to_dict` is ready for JSON."""

    machine: dict[str, str]
    device: str
    rows: tuple[Row, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether nothing fails or differs."""
        return not self.bad

    @property
    def bad(self) -> list[Row]:
        return [row for row in self.rows if row.result in (FAILS, DIFFERS)]

    def caption(self) -> str:
        counts = {result: sum(row.result == result for row in self.rows) for result in (WORKS, DIFFERS, FAILS, MISSING)}
        levers = sorted({f"{name}={value}" for row in self.bad for name, value in row.lever.items()})
        left = f" nb.advise leaves out {', '.join(levers)}." if levers else ""
        took = table.duration(sum(row.seconds for row in self.rows))
        return f"{', '.join(f'{n} {result}' for result, n in counts.items() if n)}, in {took}.{left}"

    def table(self) -> tuple[Sequence[str], Sequence[Sequence[Any]]]:
        rows = [(row.part, row.what, row.result, row.text) for row in self.rows]
        return ("part", "tried", "result", "measured"), rows

    def colours(self) -> Mapping[tuple[int, int], str]:
        kinds = {WORKS: "green", FAILS: "red", DIFFERS: "red", MISSING: "yellow"}
        return {(i, 2): kinds[row.result] for i, row in enumerate(self.rows) if row.result in kinds}

    def footer(self) -> str:
        return f"On {self.device}: {', '.join(self.machine.values())}"


def save(path: Path, found: Checkup) -> None:
    with disk.explained("saving the check-up", path):
        disk.make_folder(path.parent)
        disk.write_atomic(path, json.dumps(found.to_dict(), indent=1))


def home() -> Path:
    """Where it is kept."""
    return cache() / "checkup.json"


def of_here() -> Checkup:
    """The check-up of this machine and these versions that is kept, or one without rows."""
    empty = Checkup({**machine(), "nbtools": f"nbtools {VERSION}"}, str(devices.pick()))
    try:
        found = Checkup.from_dict(json.loads(home().read_text()))
    except (OSError, ValueError, TypeError):  # none yet, or of another version
        return empty
    return found if (found.machine, found.device) == (empty.machine, empty.device) else empty


def ruled_out(task: str) -> dict[tuple[str, Any], str]:
    """(setting, value) → what the check-up of this machine found against it: for a task of this name, else in all.
    CUDA graphs are also ruled out where none was found to work: a recording that fails may end the process."""
    rows = [row for row in of_here().rows if row.lever and row.result != NOT_HERE]
    own, found = [row for row in rows if row.task == task], {}
    if not any(row.lever.get("graph") and row.result == WORKS for row in own or rows):
        found["graph", True] = "nb.checkup has to find first that it works here"
    for row in own or rows:
        same = [row] if own else [other for other in rows if other.lever == row.lever]
        if all(other.result in (FAILS, DIFFERS) for other in same):
            found |= dict.fromkeys(row.lever.items(), f"nb.checkup found that it {row.result} here: {row.text}")
    return found
