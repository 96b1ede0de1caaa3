"""Several runs: those of a folder in a table, and side by side, with which is the best where chance does not explain
it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nbtools import disk, show
from nbtools.data import in_notebook, patient, say
from nbtools.errors import CheckpointError, DiskError, StageError, TrainError
from nbtools.live import Columns, along
from nbtools.run import Run, places
from nbtools.show import header, number, plural, shown
from nbtools.train import TaskLike, best_metric, checkpoint

if TYPE_CHECKING:
    import pandas as pd

    from nbtools.figures import Sheet

MOST = 8  # runs of a folder that are compared: the curves of more hide one another
ERRORS = 2  # standard errors: accuracies that differ by less may do so by chance
CLOSE, FLOOR = 0.02, 1e-4  # of a loss; at least so much, whatever the loss


def runs(folder: str | Path = "runs", task: TaskLike | None = None) -> pd.DataFrame:
    """Return a row for each run in a folder and its subfolders, the newest first, named by where it is in there: state,
    best metric, epochs, minutes, samples/s, when it last went on, how far it is kept, tags and notes.

    A message names those that cannot be opened. task: only for runs whose own cannot be imported by name. Raises
    CheckpointError for a folder that is not there.
    """
    import pandas as pd

    opened, rows = open_runs(Path(folder), task), []
    if not opened:
        say(f"{folder} has no runs in it")
    for run in opened.values():
        best = {name: value for name, value in outcome(run).items() if name not in ("train_loss", "steps", "memory")}
        when = datetime.fromtimestamp(int(changed(run)))
        more = {"changed": when, "kept": run.kept, "tags": run.tags, "notes": run.notes}
        rows.append({"state": run.state, **best, **more})
    return pd.DataFrame(rows, pd.Index(opened, name="run"))


def open_runs(folder: Path, task: TaskLike | None = None) -> dict[str, Run]:
    """Open the runs in a folder and its subfolders, the newest first; a message names those that cannot be. What
    `keep=` copied of a run that is there too is left out. Raises CheckpointError."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder; name the one in which the run folders are")
    runs: dict[str, Run] = {}
    with disk.explained("looking for runs", folder):
        for place in sorted(patient(lambda: places(folder, "**"), folder)):
            try:
                runs[place.relative_to(folder).as_posix()] = Run.open(place, task)
            except (CheckpointError, DiskError, StageError) as error:
                say(f"left out: {error}")
        ids = {name: checkpoint.read_index(run.folder).get("id") for name, run in runs.items()}
        here = {
            ids[name] for name, run in runs.items() if run.folder == folder / name
        }  # and not fetched from its keep=
        runs = {name: run for name, run in runs.items() if run.folder == folder / name or ids[name] not in here}
        return dict(sorted(runs.items(), key=lambda each: changed(each[1]), reverse=True))


def changed(run: Run) -> float:
    """Return when a run last went on, in seconds since 1970."""
    return (run.folder / checkpoint.INDEX).stat().st_mtime


def outcome(run: Run) -> dict[str, Any]:
    """Return a run's results; None for what is unknown."""
    epochs, best, metric = run.summary(), run.best, best_metric(run.task)[0]
    last = {name: values.dropna().iloc[-1] for name, values in epochs.items() if values.notna().any()}
    wall, steps = run.history.series("wall")[1], [row["step"] for row in run.history.rows]
    return {
        f"best_{metric}": best.get(f"val_{metric}"),
        "best_epoch": best.get("epoch"),
        **{name: last.get(name) for name in ("train_loss", "val_loss")},
        "epochs": len(epochs),
        "steps": max(steps, default=0),
        "minutes": wall[-1] / 60 if wall else 0.0,
        "samples_per_s": epochs["samples_per_s"].median() if "samples_per_s" in last else None,
        "memory": max((values.max() for name, values in epochs.items() if "memory" in str(name)), default=None),
    }


def compare(*runs: Run | str | Path) -> Comparison:
    """Compare runs, run folders, or the newest eight runs in a folder of them (`nb.compare("runs")`). Raises TrainError
    if there is no run, CheckpointError for a folder without a run."""
    every = {run.folder.resolve(): run for run in chain.from_iterable(map(meant, runs))}
    if not every:
        raise TrainError("compare needs at least one run, got none; give it runs, run folders or a folder of runs")
    short = len({folder.name for folder in every}) == len(every)
    named = {folder.name if short else str(run.folder): run for folder, run in every.items()}
    return Comparison(named, *judge(named))


def meant(run: Run | str | Path) -> Sequence[Run]:
    """Return a run, the one in a folder, or the newest of those below it, the newest last."""
    if isinstance(run, Run):
        return [run]
    folder = Path(run)
    if (folder / checkpoint.INDEX).exists() or not folder.is_dir() or not (inside := open_runs(folder)):
        return [Run.open(folder)]  # or the error that says why it is none
    return list(inside.values())[:MOST][::-1]


@dataclass(frozen=True, eq=False)
class Comparison:
    """Runs by their names; shows as a sentence about the best and a table, in a notebook with a picture of curves.

    best: by the metric that chooses checkpoints, None where chance may explain the difference. conclusion: which it is,
    by how much and with which settings, or why none is.
    """

    runs: Mapping[str, Run]
    best: Run | None
    conclusion: str

    @cached_property
    def frame(self) -> pd.DataFrame:
        """A row a run: best metric, losses, what was done, memory in MiB, each setting of the plan in which the runs
        differ (`planned_epochs`: of the plan), and what was changed while it trained."""
        import pandas as pd

        runs = self.runs.values()
        frame, plans = (
            pd.DataFrame(map(outcome, runs), pd.Index(self.runs, name="run")),
            [r.plan.to_dict() for r in runs],
        )
        for name in dict.fromkeys(chain.from_iterable(plans)):
            values = [plan.get(name) for plan in plans]
            if len(set(map(repr, values))) > 1:
                frame[f"planned_{name}" if name in frame else name] = values  # what was planned is not what was done
        changes = [[f"{row['what']} at step {row['step']}" for row in run.history.of("change")] for run in runs]
        frame["changed"] = ["; ".join(each) or None for each in changes]
        return frame.dropna(axis="columns", how="all")

    def figure(self) -> Sheet:
        """Draw the curves of all runs over their samples: losses, the metrics that choose checkpoints, lr, speed."""
        from nbtools.figures import curves

        every = [Columns(run.history) for run in self.runs.values()]
        metrics = dict.fromkeys(f"val_{best_metric(run.task)[0]}" for run in self.runs.values())
        charts = {}
        for name in ("train_loss", "val_loss", *metrics, "lr", "samples_per_s"):
            lines = [(columns, *columns.series(name, "epoch", "evaluation")) for columns in every]
            charts[show.header(name)] = [(along(columns, "samples")(steps), y) for columns, steps, y in lines]
        return curves(charts, list(self.runs), "samples")

    def cells(self) -> tuple[list[str], list[list[Any]]]:
        """Return (headers, rows) of the frame as it is shown: a column a run, values with their units."""
        names = [f"{name} (best)" if run is self.best else name for name, run in self.runs.items()]
        columns = ((str(name), values) for name, values in self.frame.items())
        return ["", *names], [[show.header(n), *(show.written(n, v) for v in values)] for n, values in columns]

    def __repr__(self) -> str:
        return "\n\n".join(filter(None, [self.conclusion, show.text(*self.cells())]))

    def _ipython_display_(self) -> None:
        """Show two outputs: in a saved notebook GitHub shows a picture only if it is an output by itself."""
        if not in_notebook():
            raise NotImplementedError  # IPython then prints the repr
        from IPython.display import HTML, display

        display(HTML(show.html(*self.cells(), self.conclusion)))
        display(self.figure())


def judge(runs: Mapping[str, Run]) -> tuple[Run | None, str]:
    """Return (the best run, the conclusion); None where none is better by more than chance, see `alike`."""
    metrics = {best_metric(run.task) for run in runs.values()}
    values = {name: run.best[f"val_{best_metric(run.task)[0]}"] for name, run in runs.items() if run.best}
    if len(runs) < 2:
        return None, ""
    if len(metrics) > 1 or len({run.card.digest for run in runs.values()}) > 1 or len(values) < 2:
        what = "fewer than two have been evaluated" if len(values) < 2 else "they are validated on different data"
        return None, f"No best run: {'they are of different tasks' if len(metrics) > 1 else what}."
    [(metric, sign)] = metrics
    best, *others = sorted(values, key=lambda name: -sign * values[name])
    count = min(min(run.plan.eval_samples or math.inf, run.card.splits["val"]) for run in runs.values())
    share = metric != "loss" and all(0 <= value <= 1 for value in values.values())
    by = "validation loss" if metric == "loss" else header(metric)
    if close := [name for name in others if alike(values[best], values[name], count, share)]:
        level = ", ".join(f"{name} {number(values[name])}" for name in (best, *close))
        why = f"on {plural(int(count), 'validation sample')}, chance alone can make such a difference"
        return None, f"No clear winner by {by}: {level}; {why}."
    apart = f"{number(abs(values[best] - values[others[0]]))} {'above' if sign > 0 else 'below'} {others[0]}"
    ours, theirs = (runs[name].plan.to_dict() for name in (best, others[0]))
    differing = [f"{n} {shown(ours[n])} instead of {shown(theirs.get(n))}" for n in ours if ours[n] != theirs.get(n)]
    how = f"It was trained with {', '.join(differing)}." if differing else "Both were trained with the same settings."
    return runs[best], f"{best} is the best: {by} {number(values[best])}, {apart}. {how}"


def alike(best: float, other: float, count: float, share: bool) -> bool:
    """Return whether two values over so many samples are no further apart than chance can make them.

    share: of an accuracy or another metric from 0 to 1, ERRORS standard errors of the difference of two shares, which
    no mean of such numbers exceeds. Else of a loss, or of a metric in units of its own: if a sample's varies as much as
    its mean, a standard error is about 1 / √count of it; at least CLOSE of it, and FLOOR. A rule of thumb.
    """
    if not share:
        return abs(best - other) <= max(max(CLOSE, max(count, 1) ** -0.5) * abs(best), FLOOR)
    middle = (best + other) / 2
    return abs(best - other) <= ERRORS * math.sqrt(2 * middle * (1 - middle) / max(count, 1))
