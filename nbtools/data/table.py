"""Tables as Datasets: columns of numbers and categories become one row of numbers, `x`; a column of file names the
images `image`; a column of texts one of its own."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from torch.utils.data import Dataset

from nbtools.data.images import open_image
from nbtools.data.items import TARGET, TARGETS, is_missing
from nbtools.errors import PackError

if TYPE_CHECKING:
    import pandas as pd

FEW = 32  # different texts of a column that becomes one number for each of them
NUMERIC = ("integer", "floating", "mixed-integer-float", "decimal", "boolean")  # kinds of columns, as pandas calls them
APART = ("image", "text")  # columns that are no part of x


def is_table(data: Any) -> bool:
    """Return whether data are a DataFrame, or the path of a CSV file."""
    pandas = sys.modules.get("pandas")
    path = isinstance(data, str | Path) and str(data).lower().endswith((".csv", ".tsv"))
    return path or (pandas is not None and isinstance(data, pandas.DataFrame))


def read_table(data: Any) -> pd.DataFrame:
    """Return a DataFrame, or that of a CSV file, whose separator is the most frequent one in its first line."""
    import pandas as pd

    if not isinstance(data, str | Path):
        return data.rename(columns=str)
    try:
        with open(data, encoding="utf-8-sig") as file:
            header = file.readline()
        return pd.read_csv(data, sep=max(",;\t|", key=header.count), encoding="utf-8-sig").rename(columns=str)
    except (OSError, ValueError) as error:  # pandas' own are ValueErrors
        raise PackError(f"{data} must be a table in UTF-8 with a line of column names: {error}") from None


class Table(Dataset):
    """Rows of a DataFrame by an encoding; goals: the columns of the target, several of 0 and 1 are the names of those
    that are 1. root: where the files of its images are."""

    def __init__(self, frame: pd.DataFrame, encoding: Mapping[str, Any], goals: Sequence[str], root: Path = Path()):
        require_columns(frame, [*encoding, *goals])
        self.frame, self.encoding, self.goals, self.root = frame, encoding, goals, root
        self.x = encoded(frame, encoding)
        self.apart = {name: frame[name].tolist() for name, how in encoding.items() if how in APART}
        self.y: Any = frame[goals[0]].tolist() if len(goals) == 1 else None
        if len(goals) > 1:
            values = frame[list(goals)].to_numpy(np.float32, na_value=np.nan)
            self.y = values.tolist()
            if np.isin(values[~np.isnan(values).any(1)], (0, 1)).all():
                self.y = [None if np.isnan(row).any() else [*itertools.compress(goals, row)] for row in values]

    def __len__(self) -> int:
        return len(self.frame)

    def label(self, i: int) -> Any:
        return self.y[i]

    def __getitem__(self, i: int) -> dict[str, Any]:
        item: dict[str, Any] = {}
        for name, values in self.apart.items():
            if is_missing(values[i]):
                raise self.refusal(i, name)
            image = self.encoding[name] == "image"
            item["image" if image else name] = open_image(self.root / str(values[i])) if image else values[i]
        if self.x is not None:
            if np.isnan(self.x[i]).any():
                names = [name for name, how in self.encoding.items() for _ in features(name, how)]
                raise self.refusal(i, names[int(np.isnan(self.x[i]).argmax())])
            item["x"] = self.x[i]
        return item if self.y is None else {**item, TARGET: self.y[i]}

    def refusal(self, i: int, name: str) -> PackError:
        """Return why a row cannot be used: a value is missing, or not what the encoding allows."""
        how, value = self.encoding[name], cast(Any, self.frame[name].iloc[i])
        if is_missing(value):
            fix = "fill it with df.fillna(…), or leave the column out with inputs=[…]"
            return PackError("nothing", f"{name} must have a value", fix)
        rule = "a number" if how == "number" else f"one of {', '.join(how[:5])}"
        return PackError(str(value), f"{name} must be {rule}, as in the training data", "correct it, or leave it out")

    def content(self) -> str:
        """Return all that it holds, of its images their size and time."""
        images = (name for column, how in self.encoding.items() if how == "image" for name in self.apart[column])
        files = [file.stat() for name in images if (file := self.root / str(name)).exists()]
        x = b"" if self.x is None else self.x.tobytes()
        return repr([x, self.apart, self.y, self.root, [(file.st_size, file.st_mtime_ns) for file in files]])


def require_columns(frame: pd.DataFrame, names: Sequence[str]) -> None:
    if absent := [name for name in names if name not in frame]:
        raise PackError(f"the table has no column {absent[0]!r}; its columns are {', '.join(frame)}")


def tables(
    frames: Sequence[pd.DataFrame],
    folders: Sequence[Path],
    *,
    target: Any,
    inputs: Sequence[Any] | None,
    image: str | None,
    texts: Sequence[str],
    besides: str | None,
    encoding: Mapping[str, Any],
) -> list[Table]:
    """Return Datasets of DataFrames, encoded alike: as given, else as the first, which is that of training.

    inputs: by default image and texts, without these all columns but the target and `besides`. Raises PackError for
    columns that are missing, or cannot be numbers.
    """
    first = frames[0]
    if target is None:
        target = [name for name in TARGETS if name in first]
        if len(target) > 1:
            raise PackError(f"the table has the columns {', '.join(target)}; name the target: target={target[0]!r}")
    goals = [str(name) for name in ([target] if isinstance(target, str | int) else target)]
    if not encoding:
        own = [name for name in (image, *texts) if name is not None]
        rest = [name for name in first if name not in (*goals, besides) and not own] if inputs is None else inputs
        chosen = [*dict.fromkeys(map(str, (*own, *rest)))]
        if not chosen or {*chosen} & {*goals} or first.columns.has_duplicates:
            came = f"inputs {', '.join(chosen) or 'none'} and target {', '.join(goals) or 'none'}"
            raise PackError(f"inputs and target must be columns of their own, got {came}; choose with inputs=[…]")
        require_columns(first, [*chosen, *goals])
        encoding = encoding_of(first, chosen, image, texts)
    return [Table(frame, encoding, goals, folder) for frame, folder in zip(frames, folders, strict=True)]


def encoding_of(frame: pd.DataFrame, chosen: Sequence[str], image: Any, texts: Sequence[str]) -> dict[str, Any]:
    """Return how each column becomes an input: `image`, `text`, `number`, or its categories, one number each. Raises
    PackError for a column that cannot, and where float32 makes most of its values equal."""
    import pandas as pd

    encoding, refused = {}, {}
    for name in chosen:
        column = frame[name]
        kind = pd.api.types.infer_dtype(column, skipna=True)
        if name == image or name in texts:
            encoding[name] = "image" if name == image else "text"
        elif kind in NUMERIC:
            encoding[name], values = "number", np.unique(numbers(column))
            if len(np.unique(values.astype(np.float32))) < len(values) / 2:
                raise PackError(f"{name}: most of its values are equal in float32; subtract the smallest one")
        elif kind == "categorical" or (kind == "string" and len(column.unique()) <= FEW):
            names = column.cat.categories if kind == "categorical" else sorted(column.dropna().unique())
            encoding[name] = [str(each) for each in names]
        else:
            refused[name] = f"{column.nunique():,} different texts" if kind == "string" else f"{kind} values"
    if refused:
        listed = ", ".join(f"{name!r} ({came})" for name, came in refused.items())
        ways = f"inputs={[*encoding]}, image= for file names, text= for a function, or df.astype({{…: 'category'}})"
        raise PackError(f"these columns are not numeric: {listed}; pass {ways}")
    return encoding


def features(name: str, how: Any) -> list[str]:
    """Return the names of what a column becomes in x."""
    return [f"{name}={each}" for each in how] if isinstance(how, list) else [] if how in APART else [name]


def numbers(column: Any) -> np.ndarray:
    """Return a column of numbers as float64; NaN where a value is missing or none."""
    import pandas as pd

    if not pd.api.types.is_numeric_dtype(column):
        column = pd.to_numeric(column.astype(object), errors="coerce")
    return column.to_numpy(np.float64, na_value=np.nan)


def encoded(frame: pd.DataFrame, encoding: Mapping[str, Any]) -> np.ndarray | None:
    """Return x (rows, F) float32; NaN where a value is missing, or not among the categories. None without columns."""
    parts = []
    for name, how in encoding.items():
        if isinstance(how, list):
            places = {text: i for i, text in enumerate(how)}
            codes = np.array([-1 if is_missing(value) else places.get(str(value), -1) for value in frame[name]], int)
            part = np.eye(len(how), dtype=np.float32)[codes]
            part[codes < 0] = np.nan
            parts.append(part)
        elif how not in APART:
            parts.append(numbers(frame[name]).astype(np.float32)[:, None])
    return np.concatenate(parts, 1) if parts else None
