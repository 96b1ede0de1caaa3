"""Tables as Datasets: columns of numbers and categories become one row of numbers, `x`; a column of file names the
images `image`; a column of texts one of its own."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import Dataset

from nbtools.data.images import open_image
from nbtools.data.items import TARGET, TARGETS, composed, is_missing, is_names
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
    """Rows of a DataFrame. encoding: column → `image`, `text`, `number`, or its categories; goals: the columns of the
    target, several of 0 and 1 are labels; sep: divides a text into labels; root: where the files of its images are."""

    def __init__(self, frame: pd.DataFrame, encoding: Mapping[str, Any], goals: Sequence[str], root: Any, sep: Any):
        require_columns(frame, [*encoding, *goals])
        self.frame, self.encoding, self.root = frame, encoding, root
        self.apart = {name: frame[name].tolist() for name, how in encoding.items() if how in APART}
        encoded = {name: encode(frame[name], how) for name, how in encoding.items() if how not in APART}
        self.x = np.concatenate([*encoded.values()], 1) if encoded else None
        self.columns = [name for name, values in encoded.items() for _ in range(values.shape[1])]  # of x
        self.targets: Any = None
        self.classes: list[str] = []  # of several labels
        if len(goals) == 1:
            values = frame[goals[0]].tolist()
            self.targets = [split(value, sep) if sep and isinstance(value, str) else value for value in values]
            self.classes = sorted({composed(name) for value in self.targets if is_names(value) for name in value})
        elif goals:
            self.targets = frame[[*goals]].to_numpy(np.float32, na_value=np.nan)
            self.classes = [*goals] if np.isin(self.targets[~np.isnan(self.targets)], (0, 1)).all() else []

    def __len__(self) -> int:
        return len(self.frame)

    def __getitem__(self, i: int) -> dict[str, Any]:
        lacking = [name for name, values in self.apart.items() if is_missing(values[i])]
        if self.x is not None and np.isnan(self.x[i]).any():
            lacking.append(self.columns[np.isnan(self.x[i]).argmax()])
        if lacking:
            how, value = self.encoding[lacking[0]], self.frame[lacking[0]].iloc[i]
            kind = f"one of {', '.join(how[:5])}" if isinstance(how, list) else f"a {how}"
            rule = f"{lacking[0]} must be {kind}{', as in the training data' * isinstance(how, list)}"
            fix = "fill it in, or leave the column out with inputs=[…]"
            raise PackError("nothing" if is_missing(value) else value, rule, fix)
        item = {} if self.x is None else {"x": self.x[i]}
        for name, values in self.apart.items():
            image = self.encoding[name] == "image"
            item |= {"image": open_image(self.root / str(values[i]))} if image else {name: values[i]}
        return item if self.targets is None else {**item, TARGET: self.targets[i]}

    def content(self) -> bytes:
        """Return all that it holds, of its images their size and time."""
        images = (name for column, how in self.encoding.items() if how == "image" for name in self.apart[column])
        stats = [file.stat() for name in images if (file := self.root / str(name)).exists()]
        files = [(self.root, stat.st_size, stat.st_mtime_ns) for stat in stats]
        targets = self.targets.tolist() if isinstance(self.targets, np.ndarray) else self.targets
        return repr([self.apart, targets, files]).encode() + (b"" if self.x is None else self.x.tobytes())


def split(text: str, sep: str) -> list[str]:
    return [name.strip() for name in text.split(sep) if name.strip()]


def require_columns(frame: pd.DataFrame, names: Sequence[str]) -> None:
    if absent := [name for name in names if name not in frame]:
        raise PackError(f"the table has no column {absent[0]!r}; its columns are {', '.join(frame)}")


def encode(column: Any, how: Any) -> np.ndarray:
    """Return (rows, F) float32 of numbers, or of a 1 for each category; NaN where a value is missing or neither."""
    import pandas as pd

    if isinstance(how, list):
        places = {text: i for i, text in enumerate(how)}
        codes = np.array([-1 if is_missing(value) else places.get(str(value), -1) for value in column], int)
        return np.where(codes[:, None] < 0, np.float32(np.nan), np.eye(len(how), dtype=np.float32)[codes])
    if not pd.api.types.is_numeric_dtype(column):
        column = pd.to_numeric(column.astype(object), errors="coerce")
    return column.to_numpy(np.float64, na_value=np.nan).astype(np.float32)[:, None]


def roles_of(
    frame: pd.DataFrame, target: Any, inputs: Sequence[Any] | None, image: str | None, besides: Any
) -> tuple[list[str], list[str]]:
    """Return the columns of the target, and of inputs: by default the image, without one all others. Raises PackError
    where there is no single reading."""
    own = [] if image is None else [image]
    names = [name for name in TARGETS if name in frame] if target is None else target
    goals = [str(name) for name in ([names] if isinstance(names, str | int) else names)]
    if target is None and len(goals) > 1:
        raise PackError(f"the table has the columns {', '.join(goals)}; name the target: target={goals[0]!r}")
    rest = [name for name in frame if name not in (*goals, besides) and not own] if inputs is None else inputs
    chosen = [*dict.fromkeys(map(str, (*own, *rest)))]
    require_columns(frame, [*goals, *chosen])
    if not chosen or {*chosen} & {*goals}:
        came = f"inputs {', '.join(chosen) or 'none'} and target {', '.join(goals) or 'none'}"
        raise PackError(f"inputs and target must be columns of their own, got {came}; choose with inputs=[…]")
    return goals, chosen


def encoding_of(frame: pd.DataFrame, chosen: Sequence[str], image: Any, text: bool) -> dict[str, Any]:
    """Return how each column becomes an input; text: strings are texts. Raises PackError for one that cannot."""
    import pandas as pd

    encoding, refused = dict[str, Any](), []
    for name in chosen:
        column: Any = frame[name]
        kind = pd.api.types.infer_dtype(column, skipna=True)
        if name == image or (text and kind == "string"):
            encoding[name] = "image" if name == image else "text"
        elif kind in NUMERIC:
            encoding[name] = "number"
        elif kind == "categorical" or (kind == "string" and column.nunique() <= FEW):
            names = column.cat.categories if kind == "categorical" else sorted(column.dropna().unique())
            encoding[name] = [*map(str, names)]
        else:
            refused.append(f"{name!r} ({f'{column.nunique():,} different texts' if kind == 'string' else kind})")
    if refused:
        ways = f"inputs={[*encoding]}, image= for file names, text= for a function, or df.astype({{…: 'category'}})"
        raise PackError(f"these columns are not numeric: {', '.join(refused)}; pass {ways}")
    return encoding
