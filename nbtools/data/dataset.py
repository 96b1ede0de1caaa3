"""nb.pack: your data becomes the columns of a Pack; and items to predict on are read the same way.

Folders of images by class and tables are lists of items: dicts by column, with the paths of images in place of them.
What a folder is follows from the images that it holds: hidden ones and those in __MACOSX do not count.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from nbtools import disk
from nbtools.data.build import RawFiles, make_pack, of_task
from nbtools.data.forms import IMAGES, RESIZES, TARGET, Form, compose, is_image, is_missing, plain_values
from nbtools.data.items import Items, Part, column_name, parts_of, target_of
from nbtools.data.pack import Card, Pack, Sample, is_pack
from nbtools.data.progress import say
from nbtools.data.splits import require_shares
from nbtools.data.stage import stage
from nbtools.errors import PackError
from nbtools.show import plural

if TYPE_CHECKING:
    import pandas as pd

TASK = "dataset"
SPLIT = re.compile(r"(?<![a-z])(?:(train)(?:ing)?|(val)(?:id|idation)?|(test)(?:ing)?)(?![a-z])", re.I)


def pack(
    data: Any = None,
    *,
    inputs: Any = None,
    target: Any = None,
    image: str | None = None,
    root: str | Path | None = None,
    sep: str | None = None,
    classes: Sequence[str] | Literal[False] | None = None,
    train: Any = None,
    val: float | Any = 0.1,
    test: float | Any = 0.1,
    groups: Any = None,
    seed: int = 0,
    folds: int | None = None,
    size: int | tuple[int, int] | None = None,
    resize: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    points: Any = None,
    text: Any = None,
    store: bool = True,
    into: str | Path | None = None,
    progress: bool = True,
) -> Any:
    """Return the pack of your own data: read once, and only opened on later calls.

    data, or train: arrays (x, y), or a dict of them; a Dataset, array or list of items (arrays, numbers, PIL images,
    tuples or dicts), a DataFrame, a CSV file, or images by class, `class/*.png` or `train/class/*.png`, as for `stage`.
    target, inputs: keys or columns; by default y, label, labels or target, of (x, y) y, and all others. image: the
    column of file names in root, or beside the CSV. text: a function of a text, kept by its name. sep: splits a text
    into several labels, an empty one into none; these, or lists of names, become y (K,) of 0 and 1. classes: all, in
    order, and arrays of 0 and 1 are then labels; by default those that occur; False: whole numbers are values. val,
    test: data, shares, or numbers of samples; test=1.0: all. groups: what stays in one split: a column, one value per
    item, or a function of its name. folds: return this many packs.
    size: (H, W) for PIL images, target masks (nearest ids) and points. resize: crop (the default for classes),
    pad, squash. points: columns, also the target's, of (…, 2) x, y or (…, 4) x1, y1, x2, y2 in pixels. mean, std: per
    channel of images in 0…1; by default those of the training split, with store=False of 64 items: then no copy is
    made, and each epoch reads the Dataset. into: a folder for the pack; by default in the cache, named by options and
    data, of other Datasets by 64 items.
    Items that cannot be used are listed in `pack.bad`. Raises PackError, DiskError or StageError.
    """
    if isinstance(data, str | Path) and not is_table(data) and is_pack(folder := stage(data, progress=progress)):
        return of_task(Pack.open(folder), TASK)
    inputs = [inputs] if isinstance(inputs, str | int) else inputs
    given = {"target": target, "inputs": inputs, "image": image, "sep": sep, "classes": classes, "resize": resize}
    given |= {"mean": mean, "std": std, "points": points, "text": text, "store": store}
    options = SimpleNamespace(**given, size=size_of(size, resize), key=(target, inputs), columns=None)
    shares, val, test = divide(data, train, val, test)
    parts, groups = open_parts(shares, options, root, groups, progress)
    items, draw = Items(parts, options, groups), (val, test, seed)
    made = {"key": items.key(draw), "source": options.source}
    if progress and items.resize and not resize:
        height, width, how = items.resize
        say(f"images are resized to {height} × {width} by resize={how!r}; the choices are {', '.join(RESIZES)}")
    pack = make_pack(
        TASK, made, into, lambda: (items.survey(), partial(items.sample, columns=items.stored)), draw, progress
    )
    pack = dataclasses.replace(pack, raw=RawFiles(pack, Path(), partial(items.read_again, pack.classes)))
    return pack.folds(folds, seed) if folds else pack


def size_of(size: Any, resize: str | None) -> list[int] | None:
    """Return [height, width]. Raises PackError for an invalid size, and for a resize without one."""
    pair = [size, size] if isinstance(size, int) else size
    if pair is not None and (not isinstance(pair, list | tuple) or len(pair) != 2 or min(pair) < 1):
        raise PackError(f"size must be one number of pixels or (height, width), got {size!r}")
    if resize is not None and (resize not in RESIZES or pair is None):
        raise PackError(f"resize must be one of {', '.join(RESIZES)}, with a size=, got {resize!r}, size={size}")
    return pair and [*pair]


# -- what is given


def divide(data: Any, train: Any, val: Any, test: Any) -> tuple[dict[str | None, Any], float, float]:
    """Return split → its data, None: of data yet to be divided; and the shares of val and test that are drawn."""
    if (data is None) == (train is None):
        raise PackError(f"pack takes the data, or train=…, got {'neither' if data is None else 'both'}; pass one")
    given = {name: part for name, part in (("val", val), ("test", test)) if not isinstance(part, int | float | None)}
    val, test = (0 if name in given else share for name, share in (("val", val), ("test", test)))
    require_shares(val, test)
    return {"train" if given else None: train if data is None else data, **given}, val, test


def open_parts(given: Mapping[str | None, Any], options: Any, root: Any, groups: Any, progress: bool) -> Any:
    """Return the parts, and the groups, of a column its values. Raises PackError for what has no items to ask for."""
    parts, values, roles = list[Part](), [], None
    options.source = " + ".join(f"{x}" if isinstance(x, str | Path) else type(x).__name__ for x in given.values())
    for split, data in given.items():
        path, name = isinstance(data, str | Path), f"{split}/{{}} {{}}" if split else "{} {}"
        if is_table(data):
            frame = read_table(data)
            roles = roles or roles_of(frame, options, groups)  # the first is that of training
            folder = stage(root) if root is not None else Path(data).parent if path else Path()
            rows = rows_of(frame, *roles, options, folder)
            files = [f": {file}" for file in frame[options.image]] if options.image else [""] * len(rows)
            parts.append((split, rows, [name.format("row", f"{i}{file}") for i, file in enumerate(files)]))
            values += frame[groups].tolist() if isinstance(groups, str) and groups in frame else []
            options.key, options.columns = (TARGET if roles[0] else None, None), roles[1]
        elif options.sep is not None:
            raise PackError(f"sep splits texts of a table, got {type(data).__name__}; return a list of labels instead")
        elif path:
            parts += image_folders(stage(data, progress=progress), split, options.classes is not None, progress)
            options.key = (TARGET, None)
        else:
            require_items(data := zip_columns(data))
            parts.append((split, data, [name.format("item", i) for i in range(len(data))]))
    return parts, values if isinstance(groups, str) else groups


def zip_columns(data: Any) -> Any:
    """Return the items of columns of equal length, (x, y) or by name; other data as it is."""
    columns = [*data.values()] if isinstance(data, Mapping) else data
    if not isinstance(data, tuple | Mapping) or not all(isinstance(c, list) or getattr(c, "ndim", 0) for c in columns):
        return data
    columns = [column.to_numpy() if hasattr(column, "to_numpy") else column for column in columns]  # pandas
    if data.keys() & {"train", "val", "test"} if isinstance(data, Mapping) else len(data) < 2:
        return data
    if len(counts := {len(column) for column in columns}) > 1:
        raise PackError(f"columns must have as many items as each other, got {', '.join(map(str, sorted(counts)))}")
    rows = zip(*columns, strict=True)
    return [dict(zip(data, row, strict=True)) for row in rows] if isinstance(data, Mapping) else [*rows]


def require_items(data: Any) -> None:
    """Raise PackError, with the way out, unless items can be asked for by number."""
    numbered = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    if hasattr(data, "dataset") and not numbered:
        fix = "pass its dataset: loader.dataset"
    elif isinstance(data, tuple | Mapping):
        fix = "pass arrays (x, y), a list of items, or splits as train=…, val=… and test=…"
    elif numbered:
        return
    else:
        fix = "pass list(dataset), or define __getitem__ and __len__"
    raise PackError(f"data must be a Dataset with __getitem__ and __len__, got {type(data).__name__}; {fix}")


# -- folders


def split_word(name: str) -> str | None:
    """Return train, val or test if a name has it as a word, also as training_set, valid, testing, seg_test."""
    match = SPLIT.search(name)
    return match[match.lastindex or 0].lower() if match else None


def image_folders(root: Path, split: str | None, one: bool, progress: bool) -> list[Part]:
    """Return the images by class of a folder of classes, or of its folders train, val and test; what is left out is
    said. one: there may be one class. Raises PackError where images do not lie in class folders."""
    files = [Path(entry.path).relative_to(root).as_posix() for entry in disk.walk(root)]
    files = sorted(name for name in files if not any(part[0] == "." or part == "__MACOSX" for part in name.split("/")))
    names = [name for name in files if name.lower().endswith(IMAGES)]
    place = descend(names, "")
    folders = inside(names, place)
    deep = {f: word for f in folders if (word := split_word(f)) and inside(names, f"{place}{f}/")}
    places: list[tuple[str | None, str]] = [(split, place)]
    if split is None and "train" in deep.values():
        several = len({*deep.values()}) > 1
        places = [(word if several else None, descend(names, f"{place}{folder}/")) for folder, word in deep.items()]
    elif not folders or (len(folders) == 1 and split is None and not one):
        came = f"one folder, {folders[0]!r}" if folders else "no folder with images"
        raise PackError(f"{root} must hold a folder of images for each class, got {came}; name the folder above")
    parts, left_out = list[Part](), {*files}
    for word, at in places:
        there = [name for name in names if name.startswith(at) and "/" in name[len(at) :]]
        items = [{"image": root / name, TARGET: compose(name[len(at) :].split("/")[0])} for name in there]
        parts.append((word, items, [f"{split}/{name}" if split else name for name in there]))
        left_out.difference_update(there)
    if progress and left_out:
        what = f"{plural(len(left_out), 'file')} left out, such as {min(left_out)}"
        say(f"{what}: not images in class folders")
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


# -- tables


def is_table(data: Any) -> bool:
    """Return whether data are a DataFrame, or the path of a CSV file."""
    path = isinstance(data, str | Path) and str(data).lower().endswith((".csv", ".tsv"))
    return path or hasattr(data, "select_dtypes")


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
        raise PackError(f"{data} must be a table in UTF-8 with a header line: {error}") from None


def roles_of(frame: pd.DataFrame, options: Any, besides: Any) -> tuple[list[str], list[str]]:
    """Return the columns of the target, and of inputs: by default the image, without one all others. Raises PackError
    where there is no single reading."""
    target = target_of(dict(frame), *options.key)
    goals = [str(name) for name in (target if isinstance(target, list | tuple) else [target]) if name is not None]
    own = [] if options.image is None else [options.image]
    rest = own or [name for name in frame if name not in (*goals, besides)]
    inputs = [*dict.fromkeys(map(str, rest if options.inputs is None else [*own, *options.inputs]))]
    if not inputs or {*inputs} & {*goals}:
        came = f"inputs {', '.join(inputs) or 'none'} and target {', '.join(goals) or 'none'}"
        raise PackError(f"inputs and target must be separate columns, got {came}; choose with inputs=[…]")
    return goals, inputs


def rows_of(frame: pd.DataFrame, goals: Sequence[str], inputs: Sequence[str], options: Any, root: Path) -> list[Any]:
    """Return the rows as items: numbers are one array, `x`; the file in the column `image`, in root, is the image;
    texts are columns of their own; `sep` divides a target into labels. Raises PackError for other columns."""
    if absent := [name for name in (*goals, *inputs) if name not in frame]:
        raise PackError(f"the table has no column {absent[0]!r}; its columns are {', '.join(map(str, frame))}")
    numbers = frame[[*inputs]].select_dtypes(["number", "bool", "boolean"])
    texts = [name for name in inputs if name not in numbers and name != options.image]
    if texts and not options.text:
        fix = f"pass inputs={[*numbers]}, text= for a function, or pd.get_dummies(df), and turn dates into numbers"
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


def labels_in(text: Any, sep: str) -> list[str]:
    """Return the labels of a cell; an empty one has none."""
    return [] if is_missing(text) else [name.strip() for name in str(text).split(sep) if name.strip()]


# -- items to predict


def options_like(card: Card) -> dict[str, Any]:
    """Return options of `pack` with which another source has the classes and the preprocessing of a card."""
    roles = {name: value for name, value in card.options["roles"].items() if name != "key"}
    classes = {"values": False, "none": None}.get(card.options["kind"], card.classes)
    return {**roles, "classes": classes, "text": resolve_name(card.options["text"]) if card.options["text"] else None}


def items_of(given: Any, card: Card) -> Sequence[Any]:
    """Return what `run.predict` got, item by item: a file, a text, an item (a dict, a tuple, an image, a number, a
    sample's array), or several: a list, a Dataset, an array of them, or the rows of a DataFrame. Raises PackError."""
    given = read_table(given) if card.options["columns"] and is_table(given) else given
    if hasattr(given, "iloc"):
        if card.options["columns"] is None:
            raise PackError("this run was not trained on a DataFrame; pass items as its Dataset returns them")
        frame = given.to_frame().T.infer_objects() if given.ndim == 1 else given
        options = SimpleNamespace(**card.options["roles"], text=card.options["text"])
        return rows_of(frame, (), card.options["columns"], options, Path())
    first = card.columns[card.options["inputs"][0]]
    rank = len(first.shape) + (first.kind == "ragged")
    if isinstance(given, (str, Path, dict, tuple)) or is_image(given) or getattr(given, "ndim", None) in (0, rank):
        return [given]
    return given if hasattr(given, "__getitem__") else list(given) if isinstance(given, Iterable) else [given]


def sample_of(item: Any, card: Card) -> Sample:
    """Return an item, or an image file, as packing would have stored its inputs. Raises PackError(value, rule, fix)."""
    options = card.options
    forms = {name: Form.of(options["forms"][name]) for name in options["inputs"]}
    parts = inputs_of(item, options["inputs"], options["roles"]["key"], options["roles"]["inputs"])
    for name, value in parts.items():
        if isinstance(value, str | Path) and not (forms[name].layout or options["text"]):
            raise PackError(value, f"{name} is no image, which alone is read from a file", "pass arrays or rows")
        parts[name] = Path(value) if isinstance(value, str) and forms[name].layout else value
    values = plain_values(parts, options["resize"], options["text"])
    return {name: np.asarray(forms[name].fit(name, value)) for name, value in values.items()}


def inputs_of(item: Any, columns: Sequence[str], target: Any, inputs: Sequence[Any] | None) -> dict[str, Any]:
    """Return input column → value of an item to predict: as the Dataset returns it, or without its target; else a dict
    by the columns, or values in their order. Raises PackError(value, rule, fix)."""
    parts = parts_of(item)
    values = {column_name(key): value for key, value in parts.items()}
    if not isinstance(item, Mapping):
        chosen = [parts[key] for key in (inputs or parts) if key != target and key in parts]
        values = dict(zip(columns, chosen if len(chosen) == len(columns) else parts.values(), strict=False))
    if not values.keys() >= {*columns}:
        raise PackError(", ".join(values), f"an item must have {', '.join(columns)}", "add what is missing")
    return {name: values[name] for name in columns}
