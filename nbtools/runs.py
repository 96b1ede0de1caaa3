"""runs: the runs of a folder in one table, newest first, and any of them next to each other."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any

from nbtools.compare import Comparison, compare, outcome
from nbtools.errors import CheckpointError
from nbtools.run import Run, opened
from nbtools.show import Table, header, plural, written
from nbtools.train import TaskLike

if TYPE_CHECKING:
    import pandas as pd

SHOWN = ("time", "samples_per_s", "age", "kept", "tags", "notes")


def runs(folder: str | Path = "runs", task: TaskLike | None = None) -> Runs:
    """Find the runs in a folder and its subfolders, newest first; task: only for those that cannot be imported by name.

    Raises CheckpointError for a folder that is not there.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder; name the one in which the run folders are")
    return Runs(*opened(folder, task))


class Runs(Table, Sequence[Run]):
    """Runs by number or name: `found[0]`, `found["captcha"]`, `found[:3]`, `found["a", "b"].compare()`. Shows as a
    table.

    left_out: name → why it cannot be opened.
    """

    def __init__(self, found: dict[str, Run], left_out: dict[str, str] | None = None):
        self.found, self.left_out = found, left_out or {}

    @property
    def names(self) -> list[str]:
        return list(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def __getitem__(self, which: Any) -> Any:
        """Return a run, or of a slice or several names or numbers those runs. Raises CheckpointError for an unknown
        name."""
        if isinstance(which, (int, str)):
            return self.found[self.name(which)]
        names = self.names[which] if isinstance(which, slice) else map(self.name, which)
        return Runs({name: self.found[name] for name in names})

    def name(self, which: int | str) -> str:
        if isinstance(which, int):
            return self.names[which]
        if which not in self.found:
            raise CheckpointError(f"there is no run {which!r} here; there are {', '.join(self.names) or 'none'}")
        return which

    def compare(self, x: str = "step") -> Comparison:
        """Put these runs next to each other: `nb.compare`."""
        return compare(*self, x=x)

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row per run: state, best metrics, what was done, seconds of training, samples/s, how far its last
        checkpoint is kept, tags and notes."""
        import pandas as pd

        return pd.DataFrame(list(map(facts, self)), index=pd.Index(self.names, name="run"))

    def table(self) -> tuple[list[str], list[list[Any]]]:
        """As the frame, but for one column of what was reached, whatever the metric."""
        rows = []
        for (name, run), row in zip(self.found.items(), map(facts, self), strict=True):
            epochs = f"{row['epochs']:,} of {row['planned_epochs']:,}"
            rows.append([name, row["state"], run.reached, epochs, *(written(column, row[column]) for column in SHOWN)])
        return ["run", "state", "best", "epochs", *map(header, SHOWN)], rows

    def footer(self) -> str:
        return "; ".join([plural(len(self), "run"), *(f"{name}: {why}" for name, why in self.left_out.items())])

    def __repr__(self) -> str:
        return str(self)


def facts(run: Run) -> dict[str, Any]:
    """The row of a run."""
    result = outcome(run)
    best = {name: value for name, value in result.items() if name.startswith("best_")}
    return {
        "state": run.state,
        **best,
        "epochs": result["epochs"],
        "planned_epochs": run.plan.epochs,
        "time": result["minutes"] * 60,
        "samples_per_s": result["samples_per_s"],
        "age": time() - run.changed,
        "kept": run.kept or None,
        "tags": ", ".join(run.tags) or None,
        "notes": run.notes or None,
    }
