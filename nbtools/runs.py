"""runs: the runs of a folder in one table, newest first, and any of them next to each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from time import time
from typing import TYPE_CHECKING, Any, overload

from nbtools import table
from nbtools.compare import Comparison, compare, outcome
from nbtools.data import in_notebook
from nbtools.errors import CheckpointError
from nbtools.run import Run, opened
from nbtools.train import TaskLike, meanings_of

if TYPE_CHECKING:
    from nbtools.frame import Frame


def runs(folder: str | Path = "runs", task: TaskLike | None = None) -> Runs:
    """The runs in a folder and its subfolders, newest first; task: only for those that cannot be imported by name.

    Raises CheckpointError for a folder that is not there.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: there is no such folder; name the one in which the run folders are")
    return Runs(*opened(folder, task))


class Runs(Sequence[Run]):
    """Runs by number or name: `found[0]`, `found["captcha"]`, `found[:3]`, `found["a", "b"].compare()`. Shows as a
    table; in a notebook boxes to tick, and a button that compares, stand under it.

    left_out: name → why it cannot be opened.
    """

    def __init__(self, found: dict[str, Run], left_out: dict[str, str] | None = None):
        self.found, self.left_out = found, left_out or {}

    @property
    def names(self) -> list[str]:
        return list(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def __iter__(self) -> Iterator[Run]:
        return iter(self.found.values())

    @overload
    def __getitem__(self, which: int | str) -> Run: ...
    @overload
    def __getitem__(self, which: slice | Sequence[int | str]) -> Runs: ...
    def __getitem__(self, which: Any) -> Any:
        """A run, or of a slice or several names or numbers those runs. Raises CheckpointError for an unknown name."""
        if isinstance(which, (int, str)):
            return self.found[self.name(which)]
        names = self.names[which] if isinstance(which, slice) else [self.name(each) for each in which]
        return Runs({name: self.found[name] for name in names})

    def name(self, which: int | str) -> str:
        if isinstance(which, int):
            return self.names[which]
        if which not in self.found:
            raise CheckpointError(f"there is no run {which!r} here; there are {', '.join(self.names) or 'none'}")
        return which

    def compare(self, x: str = "step") -> Comparison:
        """These runs next to each other: `nb.compare`."""
        return compare(*self, x=x)

    @cached_property
    def frame(self) -> Frame:
        """One row per run: state, best metrics, what was done, seconds of training, samples/s, how far its last
        checkpoint is kept, tags and notes."""
        import pandas as pd

        from nbtools.frame import Frame

        frame = Frame(pd.DataFrame(list(map(facts, self)), index=pd.Index(self.names, name="run")))
        frame.attrs["meanings"] = {name: what for run in self for name, what in meanings_of(run.task).items()}
        return frame

    def table(self) -> tuple[list[str], list[list[Any]]]:
        """(headers, rows) to show: as the frame, but for one column of what was reached, whatever the metric."""
        from nbtools.frame import header, written

        own = ("time", "samples_per_s", "age", "kept", "tags", "notes")
        rows = []
        for (name, run), row in zip(self.found.items(), self.frame.to_dict("records"), strict=True):
            epochs = f"{row['epochs']:,} of {row['planned_epochs']:,}"
            best = run.reached.replace(" in ", ", ")  # 900 px have no room for more
            rows.append([name, row["state"], best, epochs, *(written(column, row[column]) for column in own)])
        return table.filled(["run", "state", "best", "epochs", *map(header, own)], rows)

    @property
    def caption(self) -> str:
        missing = [f"{name}: {why}" for name, why in self.left_out.items()]
        return "; ".join([table.plural(len(self), "run"), *missing])

    def __repr__(self) -> str:
        return f"{table.text(*self.table())}\n{self.caption}" if self.found else self.caption

    def _repr_html_(self) -> str:
        return table.html(*self.table(), self.caption)

    def _ipython_display_(self) -> None:
        if not in_notebook():
            raise NotImplementedError  # IPython then prints the repr
        from IPython.display import HTML, display

        display(HTML(self._repr_html_()))


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
