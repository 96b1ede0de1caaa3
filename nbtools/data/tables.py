"""Folders of images by class and tables, as lists of items: dicts by column, with the paths of images in place of them.

What a folder is follows from the images that it holds: hidden ones and those in __MACOSX do not count.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from nbtools import disk
from nbtools.data.forms import IMAGES, TARGET, composed, is_missing
from nbtools.data.progress import say
from nbtools.errors import PackError
from nbtools.show import plural

if TYPE_CHECKING:
    import pandas as pd

SPLIT = re.compile(r"(?<![a-z])(?:(train)(?:ing)?|(val)(?:id|idation)?|(test)(?:ing)?)(?![a-z])", re.I)
TARGETS = ("y", "label", "labels", "target")  # keys of an item, and columns, that are its target without being named
Part = tuple[str | None, Any, list[str]]  # split, items, their names


def split_word(name: str) -> str | None:
    """Return train, val or test where a name has it as a word, also as training_set, valid, seg_test."""
    match = SPLIT.search(name)
    return match[match.lastindex or 0].lower() if match else None


def image_folders(root: Path, split: str | None, one: bool, progress: bool) -> list[Part]:
    """Return the images by class of a folder of classes, or of its folders train, val and test; what is left out is
    said. one: there may be one class. Raises PackError where images do not lie in class folders."""
    files = [Path(entry.path).relative_to(root).as_posix() for entry in disk.walk(root)]
    files = sorted(name for name in files if not any(part[0] == "." or part == "__MACOSX" for part in name.split("/")))
    names = [name for name in files if name.lower().endswith(IMAGES)]
    place = descend(names, "")
    words = {folder: split_word(folder) for folder in inside(names, place)}
    deep = {folder: word for folder, word in words.items() if word and inside(names, f"{place}{folder}/")}
    places: list[tuple[str | None, str]] = [(split, place)]
    if split is None and "train" in deep.values():
        several = len({*deep.values()}) > 1
        places = [(word if several else None, descend(names, f"{place}{folder}/")) for folder, word in deep.items()]
    elif not words or (len(words) == 1 and split is None and not one):
        came = f"one folder, {min(words)!r}" if words else "no folder with images"
        raise PackError(f"{root} must hold a folder of images for each class, got {came}; name the folder above")
    parts, left_out = list[Part](), {*files}
    for word, at in places:
        there = [name for name in names if name.startswith(at) and "/" in name[len(at) :]]
        classes = [composed(name[len(at) :].split("/")[0]) for name in there]
        items = [{"image": root / name, TARGET: label} for name, label in zip(there, classes, strict=True)]
        parts.append((word, items, [f"{split}/{name}" if split else name for name in there]))
        left_out.difference_update(there)
    if progress and left_out:
        what = f"{plural(len(left_out), 'file')} left out, such as {min(left_out)}"
        say(f"{what}: no images in a folder for their class")
    return parts


def inside(names: Iterable[str], place: str) -> list[str]:
    """Return the folders directly below a place."""
    rest = (name[len(place) :] for name in names if name.startswith(place))
    return sorted({name.partition("/")[0] for name in rest if "/" in name})


def descend(names: list[str], place: str) -> str:
    """Return the place where the classes are: below folders that hold nothing but another one of folders."""
    while len(only := inside(names, place)) == 1:
        below = f"{place}{only[0]}/"
        if not all("/" in name[len(below) :] for name in names if name.startswith(below)):
            break
        place = below
    return place


def is_table(data: Any) -> bool:
    """Return whether data are a DataFrame, or the path of a CSV file."""
    pandas = sys.modules.get("pandas")
    path = isinstance(data, str | Path) and str(data).lower().endswith((".csv", ".tsv"))
    return path or (pandas is not None and isinstance(data, pandas.DataFrame))


def read_table(data: Any) -> pd.DataFrame:
    """Return a DataFrame, or that of a CSV file, whose separator is the most frequent one in its first line."""
    import pandas as pd

    if isinstance(data, pd.DataFrame):
        return data.rename(columns=str)
    try:
        with open(data, encoding="utf-8-sig") as file:
            header = file.readline()
        return pd.read_csv(data, sep=max(",;\t|", key=header.count), encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # pandas' own are ValueErrors
        raise PackError(f"{data} must be a table in UTF-8 with a line of column names: {error}") from None


def roles_of(frame: pd.DataFrame, options: Any, besides: Any) -> tuple[list[str], list[str]]:
    """Return the columns of the target, and of inputs: by default the image, without one all others. Raises PackError
    where there is no single reading."""
    names = [name for name in TARGETS if name in frame] if options.target is None else options.target
    goals = [str(name) for name in ([names] if isinstance(names, str | int) else names)]
    if options.target is None and len(goals) > 1:
        raise PackError(f"the table has the columns {', '.join(goals)}; name the target: target={goals[0]!r}")
    own = [] if options.image is None else [options.image]
    rest = [name for name in frame if name not in (*goals, besides) and not own]
    inputs = [*dict.fromkeys(map(str, [*own, *(rest if options.inputs is None else options.inputs)]))]
    if not inputs or {*inputs} & {*goals}:
        came = f"inputs {', '.join(inputs) or 'none'} and target {', '.join(goals) or 'none'}"
        raise PackError(f"inputs and target must be columns of their own, got {came}; choose with inputs=[…]")
    return goals, inputs


def rows_of(frame: pd.DataFrame, goals: Sequence[str], inputs: Sequence[str], options: Any, root: Path) -> list[Any]:
    """Return the rows as items: numbers are one array, `x`; the file in the column `image`, in root, is the image;
    texts are columns of their own; `sep` divides a target into labels. Raises PackError for other columns."""
    if absent := [name for name in (*goals, *inputs) if name not in frame]:
        raise PackError(f"the table has no column {absent[0]!r}; its columns are {', '.join(map(str, frame))}")
    numbers = frame[[*inputs]].select_dtypes(["number", "bool", "boolean"])
    texts = [name for name in inputs if name not in numbers and name != options.image]
    if texts and not options.text:
        fix = f"pass inputs={[*numbers]}, text= for a function, or pd.get_dummies(df)"
        if dates := [name for name in texts if is_date(next(iter(frame[name].dropna()), None))]:
            fix += f"; of a date make numbers, df[{dates[0]!r}] = pd.to_datetime(df[{dates[0]!r}]).dt.day_of_year"
        raise PackError(f"these columns are not numeric: {', '.join(texts)}; {fix}")
    columns: dict[str, Any] = {name: frame[name].tolist() for name in texts}
    if options.image in inputs:
        columns["image"] = [root / name if isinstance(name, str) else None for name in frame[options.image]]
    if len(numbers.columns):
        columns["x"] = numbers.to_numpy(np.float32, na_value=np.nan)
    if len(goals) == 1:
        sep, values = options.sep, frame[goals[0]].tolist()
        columns[TARGET] = [labels_in(text, sep) for text in values] if sep else values
    elif goals:
        columns[TARGET] = frame[[*goals]].to_numpy(np.float32, na_value=np.nan)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def is_date(value: Any) -> bool:
    """Return whether a value is a date, also as a text such as 2024-05-31 or 31.5.2024."""
    return bool(re.match(r"\d{4}-\d{1,2}-\d{1,2}|\d{1,2}[./]\d{1,2}[./]\d{2}", str(value)))


def labels_in(text: Any, sep: str) -> list[str]:
    """Return the labels of a cell; an empty one has none."""
    return [] if is_missing(text) else [name.strip() for name in str(text).split(sep) if name.strip()]
