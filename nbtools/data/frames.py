"""DataFrames as Datasets: columns of numbers, dates, and categories become one row of numbers."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Dataset

from nbtools.data.items import TARGET, TARGETS, require_distinct
from nbtools.errors import PackError

if TYPE_CHECKING:
    import pandas as pd

FEW = 32  # different texts of a column that is one-hot without being asked for


def is_frame(data: Any) -> bool:
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(data, pandas.DataFrame)


class Table(Dataset):
    """Rows of a DataFrame: x (F,) float32 by an encoding, and y of the goals: of several (D,) float32."""

    def __init__(self, frame: pd.DataFrame, encoding: Mapping[str, Any], goals: Sequence[str]):
        self.encoding, self.x, self.y = encoding, encoded(frame, encoding), None
        self.odd = odd_rows(frame, encoding, self.x)
        if goals:
            self.y = frame[goals[0]].tolist() if len(goals) == 1 else frame[goals].to_numpy(np.float32, na_value=np.nan)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Any]:
        if i in self.odd:
            raise PackError(*self.odd[i])
        return {"x": self.x[i]} | ({} if self.y is None else {TARGET: self.y[i]})


def tables(
    frames: Sequence[pd.DataFrame], target: Any, inputs: Sequence[Any] | None, encoding: Mapping[str, Any]
) -> Iterator[Table]:
    """The DataFrames, encoded alike: as given, else as the first, which is that of training. Raises PackError for
    columns that are missing, or cannot be numbers."""
    if not frames:
        return iter(())
    frames = [frame.rename(columns=str) for frame in frames]
    first = frames[0]
    target = next((name for name in TARGETS if name in first), None) if target is None else target
    goals = [str(name) for name in (target if isinstance(target, list | tuple) else [target]) if name is not None]
    chosen = [name for name in first if name not in goals] if inputs is None else [str(name) for name in inputs]
    chosen = [*encoding] or chosen
    for frame in frames:
        if strange := [name for name in [*goals, *chosen] if name not in frame]:
            raise PackError(f"the DataFrame has no column {strange[0]!r}; its columns are {', '.join(frame)}")
    if any(frame.columns.has_duplicates for frame in frames) or not chosen:
        came = "several with one name" if chosen else f"only the target {goals}"
        raise PackError(
            f"the DataFrame must have a column for each input, got {came}; rename, or choose with inputs=[…]"
        )
    if both := [name for name in chosen if name in goals]:
        raise PackError(f"inputs must not name the target, got {both[0]!r}; leave it out of inputs=[…]")
    known, encoding = bool(encoding), encoding or {name: how(first[name]) for name in chosen}
    if refused := {name: error for name, error in encoding.items() if isinstance(error, PackError)}:
        listed = ", ".join(f"{name!r} ({error})" for name, error in refused.items())
        rest = [name for name in chosen if name not in refused]
        raise PackError(f"these columns are not numeric: {listed}; pass inputs={rest}, or df.astype({{…: 'category'}})")
    if not known:
        require_distinct_columns(first, encoding, goals)
    return (Table(frame, encoding, goals) for frame in frames)


def require_distinct_columns(frame: pd.DataFrame, encoding: Mapping[str, Any], goals: Sequence[str]) -> None:
    """Raise PackError for a column whose numbers float32 cannot tell apart; one goal alone is seen with the items."""
    for name in encoding if len(goals) < 2 else [*encoding, *goals]:
        kind = encoding.get(name, "number")
        if kind == "days":
            fix = f"take the seconds since the first: (df[{name!r}] - df[{name!r}].min()).dt.total_seconds()"
            require_distinct(f"{name} in days", numbers(frame[name], kind), fix)
        elif kind == "number":
            require_distinct(name, numbers(frame[name], kind))


def how(column: Any) -> Any:
    """How a column becomes numbers: `number`, `days` (since 1970), or its categories, one-hot; else a PackError."""
    import pandas as pd

    kind = pd.api.types.infer_dtype(column, skipna=True)
    if kind == "categorical":
        return [str(name) for name in column.cat.categories]
    if kind in ("integer", "floating", "mixed-integer-float", "decimal", "boolean"):
        return "number"
    if kind in ("datetime64", "datetime", "date"):
        return "days"
    names = sorted(column.dropna().unique()) if kind == "string" else []
    if 0 < len(names) <= FEW:
        return names
    return PackError(f"{len(names):,} different texts" if names else f"{kind} values")


def features_of(encoding: Mapping[str, Any]) -> list[str]:
    """The names of x's columns."""
    named = {"number": "{}", "days": "{} in days"}
    parts = (
        [f"{name}={one}" for one in how] if isinstance(how, list) else [named[how].format(name)]
        for name, how in encoding.items()
    )
    return list(itertools.chain.from_iterable(parts))


def odd_rows(frame: pd.DataFrame, encoding: Mapping[str, Any], x: np.ndarray) -> dict[int, tuple[str, str, str]]:
    """Row → (value, rule, fix) where a value is missing, or is not what the encoding knows."""
    names = [name for name, how in encoding.items() for _ in (how if isinstance(how, list) else [how])]
    known, found = {"number": "a number", "days": "a date"}, {}
    for row in np.flatnonzero(np.isnan(x).any(1)).tolist():
        name = names[np.isnan(x[row]).argmax()]
        value, how = frame[name].iloc[row], encoding[name]
        if frame[name].iloc[[row]].isna().all():
            fix = "fill it with df.fillna(…), or leave the column out with inputs=[…]"
            found[row] = "nothing", f"{name} must have a value", fix
        else:
            some = ", ".join(how[:5]) + (" …" if len(how) > 5 else "")
            rule = known[how] if isinstance(how, str) else f"one of {some}, as in the training data"
            found[row] = str(value), f"{name} must be {rule}", "correct it, or leave the row out"
    return found


def numbers(column: Any, how: str) -> np.ndarray:
    """A column of numbers, or of dates in days since 1970, as float64; NaN where a value is missing, or is none."""
    import pandas as pd

    if how == "days":
        since = pd.to_datetime(column, utc=True, errors="coerce") - pd.Timestamp(0, tz="UTC")
        return (since / pd.Timedelta(days=1)).to_numpy(np.float64)
    if not pd.api.types.is_numeric_dtype(column):
        column = pd.to_numeric(column.astype(object), errors="coerce")
    return column.to_numpy(np.float64, na_value=np.nan)


def encoded(frame: pd.DataFrame, encoding: Mapping[str, Any]) -> np.ndarray:
    """x (rows, F) float32 of a DataFrame; NaN where a value is missing, or not among the categories."""
    parts = []
    for name, how in encoding.items():
        column: Any = frame[name]
        if isinstance(how, str):
            parts.append(numbers(column, how).astype(np.float32)[:, None])
        else:
            index = {text: i for i, text in enumerate(how)}
            codes = np.array([index.get(str(value), -1) for value in column], int)
            codes[column.isna().to_numpy()] = -1
            part = np.eye(len(how), dtype=np.float32)[codes]
            part[codes < 0] = np.nan
            parts.append(part)
    return np.concatenate(parts, 1).astype(np.float32, copy=False)
