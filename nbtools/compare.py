"""Several runs: those of a folder in a table, and side by side, with the best where chance does not explain it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtools import disk, live
from nbtools.data import patient, say
from nbtools.errors import CheckpointError, TrainError
from nbtools.run import Run
from nbtools.show import header, note, number, plural
from nbtools.train import checkpoint

if TYPE_CHECKING:
    import pandas as pd

MOST = 8  # runs of a folder that are compared


def runs(folder: str | Path = "runs") -> pd.DataFrame:
    """Return a row for each run in a folder and its subfolders, the newest first, named by where it is in there: state,
    best metric, epochs, minutes, samples/s, when it last went on. A message names those that cannot be opened. Raises
    CheckpointError for a folder that is not there."""
    import pandas as pd

    folder = Path(folder)
    opened = {run.folder.relative_to(folder).as_posix(): run for run in open_runs(folder)}
    rows = [{**outcome(run), "changed": datetime.fromtimestamp(last_change(run))} for run in opened.values()]
    return pd.DataFrame(rows, pd.Index(opened, name="run"))


def open_runs(folder: Path) -> list[Run]:
    """Open the runs in a folder and its subfolders, the newest first. Raises CheckpointError."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder; name the one in which the run folders are")
    opened: list[Run] = []
    with disk.explained("looking for runs", folder):
        for path in patient(lambda: list(folder.glob(f"**/{checkpoint.INDEX}")), folder):
            try:
                opened.append(Run.open(path.parent))
            except CheckpointError as error:
                say(f"left out: {error}")
    return sorted(opened, key=last_change, reverse=True)


def last_change(run: Run) -> float:
    return (run.folder / checkpoint.INDEX).stat().st_mtime


def outcome(run: Run) -> dict[str, Any]:
    """Return a run's results; None for what is unknown."""
    epochs, best, metric = run.history.of("epoch"), run.best, run.metric[0]
    last = epochs[-1] if epochs else {}
    score = {f"best_{metric}": best.get(f"val_{metric}"), "best_epoch": best.get("epoch")}
    speed = {"minutes": last.get("wall", 0) / 60, "samples_per_s": last.get("samples_per_s")}
    return {"state": run.state, **score, "epochs": len(epochs), **speed}


def compare(*runs: Run | str | Path) -> Comparison:
    """Compare runs, run folders, or the newest eight runs in a folder of them (`nb.compare("runs")`). Raises TrainError
    if there is none, CheckpointError for a folder that cannot be opened."""
    every: list[Run] = []
    for run in runs:
        if isinstance(run, Run):
            every.append(run)
        elif Path(run).is_dir() and not (Path(run) / checkpoint.INDEX).exists():
            every += open_runs(Path(run))[:MOST][::-1]
        else:
            every.append(Run.open(run))
    if not every:
        raise TrainError("compare needs at least one run, got none; give it runs, run folders or a folder of runs")
    named = {str(run.folder): run for run in every}
    return Comparison(named, judge(named))


@dataclass(frozen=True, eq=False)
class Comparison:
    """Runs by their names; shows as a sentence about the best, charts as those of the live view, and a table.

    conclusion: which is the best and by how much, or why none is.
    """

    runs: Mapping[str, Run]
    conclusion: str

    @cached_property
    def frame(self) -> pd.DataFrame:
        """A row a run: what came out, and each setting of the plan in which the runs differ."""
        import pandas as pd

        frame = pd.DataFrame(map(outcome, self.runs.values()), pd.Index(self.runs, name="run"))
        plans = [run.plan.to_dict() for run in self.runs.values()]
        for name in dict.fromkeys(chain.from_iterable(plans)):
            values = [plan.get(name) for plan in plans]
            if len(set(map(repr, values))) > 1:
                frame[f"plan.{name}"] = values
        return frame.dropna(axis="columns", how="all")

    def __repr__(self) -> str:
        return f"{self.conclusion}\n\n{self.frame.T.to_string()}".strip()

    def _repr_html_(self) -> str:
        metric = next(iter(self.runs.values())).metric[0]
        charts = live.compared({name: live.Columns().follow(run.history) for name, run in self.runs.items()}, metric)
        return note(self.conclusion) + live.page(charts) + self.frame.T.to_html()


def judge(runs: Mapping[str, Run]) -> str:
    """Return which run is the best and by how much; or that none is, also where chance may explain it, see `alike`."""
    values = {name: run.best[f"val_{run.metric[0]}"] for name, run in runs.items() if run.best}
    if len({(run.metric, run.card.digest) for run in runs.values()}) > 1:
        return "No best run: they are of different tasks, or validated on different data."
    if len(values) < 2:
        return "No best run: fewer than two have been evaluated."
    metric, sign = next(iter(runs.values())).metric
    best, *others = sorted(values, key=lambda name: -sign * values[name])
    count = min(min(run.plan.eval_samples or math.inf, run.card.splits["val"]) for run in runs.values())
    share = metric != "loss" and all(0 <= value <= 1 for value in values.values())
    by = "validation loss" if metric == "loss" else header(metric)
    if level := [name for name in others if alike(values[best], values[name], count, share)]:
        list_of = ", ".join(f"{name} {number(values[name])}" for name in (best, *level))
        why = f"on {plural(int(count), 'validation sample')}, chance alone can make such a difference"
        return f"No clear winner by {by}: {list_of}; {why}."
    apart = f"{number(abs(values[best] - values[others[0]]))} {'above' if sign > 0 else 'below'} {others[0]}"
    return f"{best} is the best: {by} {number(values[best])}, {apart}."


def alike(best: float, other: float, count: float, share: bool) -> bool:
    """Return whether chance can make such a difference, by a rule of thumb: for a share two standard errors of the
    difference of two, else 1 / √count of the value, as of a loss that varies by as much as its mean, at least 2 %."""
    middle, count = (best + other) / 2, max(count, 1)
    limit = 2 * math.sqrt(2 * middle * (1 - middle) / count) if share else max(0.02, count**-0.5) * abs(best)
    return abs(best - other) <= limit
