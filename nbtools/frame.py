"""Frame: a DataFrame of epochs or runs that shows as every table of nbtools does, and how each column is written.

Imports pandas: import this module where a frame is made, not at the top of a module.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd

from nbtools import table
from nbtools.table import digits, duration, number, percent, shown, size, spelled, timing

FIRST, LAST = 10, 30  # rows of a longer frame that are shown


def ago(seconds: float) -> str:
    """`22 min ago`"""
    return f"{' '.join(duration(seconds).split()[:2])} ago"


WRITTEN: dict[str, Callable[[Any], str]] = {
    **dict.fromkeys(("epoch", "epochs", "best_epoch", "step", "steps", "samples", "batch_size"), "{:,.0f}".format),
    "lr": digits,
    "data_wait": percent,
    **dict.fromkeys(("epoch_time", "eval_time"), timing),
    "time": duration,
    "age": ago,
    "samples_per_s": number,
    "minutes": lambda minutes: duration(60 * minutes),
    **dict.fromkeys(("energy", "gpu_energy"), "{:.3g} Wh".format),
    "gpu_power": "{:.0f} W".format,
    "gpu_utilisation": "{:.0f} %".format,
}
"""Column → how a value is written; memory is in MiB, a loss or metric is a `number`, and all else as one types it."""
HEADERS = {
    "data_wait": "waiting for data",
    "epoch_time": "time",
    "minutes": "time",
    "samples_per_s": "samples/s",
    "age": "changed",
}
MEANINGS = {
    "train_loss": "mean over the samples of the epoch, each when it was trained on",
    "val_loss": "loss on the validation split",
    "data_wait": "share of the time that training waited for its next batch",
    "epoch_time": "of training; evaluations are not in it",
    "lr": "learning rate of the last step",
}


class Frame(pd.DataFrame):
    """What is computed from it is a plain DataFrame. attrs: meanings, metric → what it says, for the headers; whole,
    where the columns are that a terminal has no room for."""

    def shown(self) -> tuple[list[str], list[list[Any]]]:
        """(headers, rows) of the columns that hold something; of a long frame its first and last rows."""
        frame = pd.DataFrame(self).dropna(axis="columns", how="all")
        names = [str(frame.index.name), *map(str, frame.columns)]
        rows = [[written(*pair) for pair in zip(names, row, strict=True)] for row in frame.itertuples(name=None)]
        if len(rows) > FIRST + LAST:
            rows[FIRST:-LAST] = [["…", *[""] * (len(names) - 1)]]
        return [header(name) for name in names], rows

    def meanings(self) -> dict[str, str]:
        """Header → what its column says, where that is known."""
        known = {**MEANINGS, **self.attrs.get("meanings", {})}
        found = {name: known.get(name) or known.get(bare(name)) for name in map(str, self.columns)}
        return {header(name): what for name, what in found.items() if what}

    def __repr__(self) -> str:
        """As many columns as the terminal has room for, and the names of the others."""
        headers, rows = self.shown()
        count = table.fitting(headers, rows)
        drawn = table.text(headers[:count], [row[:count] for row in rows])
        rest = f"\n{', '.join(headers[count:])}: {self.attrs.get('whole', 'too wide to show here')}"
        return drawn + rest if headers[count:] else drawn

    def _repr_html_(self) -> str:
        return table.html(*self.shown(), tips=self.meanings())


def header(name: str) -> str:
    return HEADERS.get(name, spelled(name))


def bare(name: str) -> str:
    """The metric of a column."""
    return name.removeprefix("val_").removeprefix("best_")


def written(name: str, value: Any) -> Any:
    """A cell: None for what is not known."""
    value = value.item() if isinstance(value, np.generic) else value
    if value is None or value != value:  # a NaN
        return None
    if name in WRITTEN:
        return WRITTEN[name](value)
    if "memory" in name:
        return size(value * 2**20)
    measured = name.startswith(("train_", "val_", "best_"))
    return number(value) if measured and isinstance(value, float) else shown(value)
