"""A user at the live surface: what they do to a run under way, and when the run shows the effect."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from browser import Notebook
from serving import until

from nbtools.train import checkpoint

Holds = Callable[[dict[str, Any]], bool]


class Log:
    """The batches of the run so far, read as they come."""

    def __init__(self, path: Path):
        self.path, self.place, self.rows = path, 0, list[dict[str, Any]]()

    def read(self) -> list[dict[str, Any]]:
        if self.path.exists():
            with self.path.open() as file:
                file.seek(self.place)
                lines = [line for line in file if line.endswith("\n")]
            self.place += sum(map(len, lines))
            self.rows += map(json.loads, lines)
        return self.rows

    def steps(self) -> list[dict[str, Any]]:
        return [row for row in self.read() if row["training"]]

    def first(self, holds: Holds, since: float) -> float:
        """When the first batch after a time came of which something holds; 0 where none came yet."""
        return next((row["time"] for row in self.read() if row["time"] > since and holds(row)), 0.0)

    def step(self) -> float:
        """Seconds of a step."""
        return statistics.median(b["time"] - a["time"] for a, b in pairwise(self.steps()))


class Person:
    """Interactions with a run under way, each followed until its effect is there.

    cell: the one that trains. run: the run's folder. waits: (seconds from a click to its effect, what) of each;
    silences: seconds without a step in each pause.
    """

    def __init__(self, notebook: Notebook, cell: int, run: Path, log: Log):
        self.notebook, self.cell, self.run, self.log = notebook, cell, run, log
        self.waits: list[tuple[float, str]] = []
        self.silences: list[float] = []

    def noted(self, what: str, clicked: float, came: float) -> None:
        self.waits.append((came - clicked, what))

    def turned(self, what: str, act: Callable[[], float], holds: Holds) -> None:
        """Act, and wait for the batch that shows it."""
        clicked = act()
        self.noted(what, clicked, until(lambda: self.log.first(holds, clicked), what))

    def now(self, knob: str) -> Any:
        return self.log.steps()[-1][knob]

    def typed(self, knob: str, words: str, value: Any) -> None:
        self.turned(f"{knob} = {words}", lambda: self.notebook.type(knob, words), lambda row: row[knob] == value)

    def chosen(self, knob: str, option: str) -> None:
        self.turned(f"{knob} = {option}", lambda: self.notebook.choose(knob, option), lambda row: row[knob] == option)

    def paused(self) -> None:
        """Pause and Resume."""
        clicked = self.notebook.click("Pause")
        until(self.notebook.button("Resume").is_visible, "Resume")
        until(lambda: time.time() - self.log.steps()[-1]["time"] > 0.5, "a pause without steps")
        last = self.log.steps()[-1]["time"]
        self.noted("Pause", clicked, last)
        resumed = self.notebook.click("Resume")
        came = until(lambda: self.log.first(lambda row: row["training"], last), "steps after Resume")
        self.silences.append(came - last)
        self.noted("Resume", resumed, came)

    def evaluated(self) -> None:
        """Evaluate now, and wait for its end."""
        self.turned("Evaluate now", lambda: self.notebook.click("Evaluate now"), lambda row: not row["training"])
        done = self.log.read()[-1]["time"]
        until(lambda: self.log.first(lambda row: row["training"], done), "steps after an evaluation")

    def saved(self) -> None:
        """Save now: the checkpoint of the step that the run names."""
        before = self.notebook.line()
        clicked = self.notebook.click("Save now")
        said = until(lambda: (line := self.notebook.line()) != before and "saved at step" in line and line, "an answer")
        step = int(said.split("saved at step")[-1].split()[0])
        names = until(lambda: [n for n in checkpoint.names(self.run) if checkpoint.place(n)[1] == step], "its file")
        self.noted("Save now", clicked, (self.run / f"{names[0]}.safetensors").stat().st_mtime)

    def stopped(self) -> None:
        clicked = self.notebook.click("Stop")
        self.notebook.wait_for_prompt(self.cell, r"\d+")
        self.noted("Stop", clicked, self.log.steps()[-1]["time"])

    def act(self, rounds: int) -> None:
        """Rounds of seven."""
        typed = (("weight_decay", "0.001", 0.001), ("clip_norm", "0.5", 0.5))
        for turn in range(rounds):
            self.typed("lr", f"{turn + 1}e-4", float(f"{turn + 1}e-4"))  # what the rules offer stays below 10× advised
            self.typed(*typed[turn])
            self.paused()
            self.typed("batch_size", str(20 + 4 * turn), 20 + 4 * turn)
            self.saved() if turn else self.evaluated()
            self.chosen("amp", ("bf16", "off")[turn])
