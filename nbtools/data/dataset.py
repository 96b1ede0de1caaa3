"""nb.pack: what one has becomes the columns of a Pack; and items to predict, read like its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
from torch.utils.data import DataLoader

from nbtools.data.build import make_pack, of_task
from nbtools.data.forms import RESIZES, TARGET, forms_in, is_image, plain_values, resolve
from nbtools.data.items import Items, RawItems, named, parts_of
from nbtools.data.pack import SPLITS, Card, Pack, Sample, is_pack
from nbtools.data.progress import say
from nbtools.data.splits import require_shares
from nbtools.data.stage import stage
from nbtools.data.tables import Part, image_folders, is_table, read_table, roles_of, rows_of, split_word
from nbtools.errors import PackError

TASK = "dataset"


def pack(
    data: Any = None,
    *,
    inputs: Sequence[Any] | None = None,
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
    """Return the pack of one's own data, read once; opened where it is finished.

    data, or train: a Dataset, array or list of items (arrays, numbers, PIL images, or tuples or dicts of them), a
    DataFrame, a CSV file, or images by class, `class/*.png` or `train/class/*.png`, in anything that `stage` takes.
    target, inputs: keys or columns; by default y, label, labels or target, of (x, y) y, and all others. image: the
    column of file names in root, or beside the CSV. text: a function of a text, kept by its name. sep: divides a text
    into several labels; these, or lists of names, or columns of 0 and 1, become y (K,). classes: all, in order; by
    default those that occur; False: whole numbers are values. val, test: data, shares, or numbers of samples; test=1.0:
    all. groups: what stays in one split: a column, a value an item, or a function of its name. folds: return so many.
    size: (H, W) of PIL images, masks as targets (by nearest ids) and points. resize: crop (the default for classes),
    pad, squash. points: columns, "target" for y, of (…, 2) x, y or (…, 4) x1, y1, x2, y2 in pixels. mean, std: per
    channel of images in 0…1; by default those of the training split, with store=False of 64 items: then no copy is
    made, and each epoch reads the Dataset. into: a folder for the pack; by default in the cache, named by options and
    data, of other Datasets by 64 items.
    Items that cannot be used are rows of `pack.bad`. Raises PackError, DiskError or StageError.
    """
    if isinstance(data, str | Path) and not is_table(data) and is_pack(folder := stage(data, progress=progress)):
        return of_task(Pack.open(folder), TASK)
    given = {"target": target, "inputs": inputs, "image": image, "sep": sep, "classes": classes, "resize": resize}
    given |= {"mean": mean, "std": std, "points": points, "text": text, "store": store}
    options = SimpleNamespace(**given, size=size_of(size, resize), key=(target, inputs), columns=None, source="")
    shares, val, test = divided(data, train, val, test)
    parts, groups = opened(shares, options, root, groups, progress)
    items, draw = Items(parts, options, groups), (val, test, seed)
    made = {"key": items.key(draw), "source": options.source}
    if progress and items.resize and not resize:
        height, width, how = items.resize
        say(f"images become {height} × {width} by resize={how!r}; there are {', '.join(RESIZES)}")
    pack = make_pack(TASK, made, into, items.survey, lambda _, i: items[i], draw, progress)
    pack = dataclasses.replace(pack, raw=RawItems(items, pack))
    return pack.folds(folds, seed) if folds else pack


def size_of(size: Any, resize: str | None) -> list[int] | None:
    """Return [height, width]. Raises PackError for what is none, and for a resize without one."""
    pair = [size, size] if isinstance(size, int) else size
    if pair is not None and (not isinstance(pair, list | tuple) or len(pair) != 2 or min(pair) < 1):
        raise PackError(f"size must be one number of pixels or (height, width), got {size!r}")
    if resize is not None and (resize not in RESIZES or pair is None):
        raise PackError(f"resize must be one of {', '.join(RESIZES)}, with a size=, got {resize!r}, size={size}")
    return pair and [*pair]


def options_like(card: Card) -> dict[str, Any]:
    """Return options of `pack` with which another source has the classes and the preprocessing of a card."""
    roles = {name: value for name, value in card.options["roles"].items() if name != "key"}
    classes = {"values": False, "none": None}.get(card.options["kind"], card.classes)
    return {**roles, "classes": classes, "text": resolve(card.options["text"]) if card.options["text"] else None}


# -- what is given


def divided(data: Any, train: Any, val: Any, test: Any) -> tuple[dict[str | None, Any], float, float]:
    """Return split → its data, None: of data yet to be divided; and the shares of val and test that are drawn."""
    if (data is None) == (train is None):
        raise PackError(f"pack takes the data, or train=…, got {'neither' if data is None else 'both'}; pass one")
    data = train if data is None else data
    given = {name: part for name, part in (("val", val), ("test", test)) if not isinstance(part, int | float | None)}
    parts: dict[str | None, Any] = {"train" if given else None: data, **given}
    if isinstance(data, Mapping):
        words = {split_word(str(name)): part for name, part in data.items()}
        if given or None in words or len(words) < len(data) or not words:
            keys, fix = ", ".join(map(str, data)), "for arrays, pass torch.utils.data.TensorDataset(x, y)"
            raise PackError(f"a dict of Datasets has the keys train, val and test, got {keys}; {fix}")
        parts = {split: words[split] for split in SPLITS if split in words}
    val, test = (0 if name in parts else share for name, share in (("val", val), ("test", test)))
    require_shares(val, test)
    return parts, val, test


def opened(given: Mapping[str | None, Any], options: Any, root: Any, groups: Any, progress: bool) -> tuple[Any, Any]:
    """Return the parts, and the groups, of a column its values. Raises PackError for what has no items to ask for."""
    parts, values, roles = list[Part](), [], None
    for split, data in given.items():
        path, front = isinstance(data, str | Path), f"{split}/" * bool(split)
        if is_table(data):
            frame = read_table(data)
            roles = roles or roles_of(frame, options, groups)  # the first is that of training
            folder = stage(root) if root is not None else Path(data).parent if path else Path()
            rows = rows_of(frame, *roles, options, folder)
            parts.append((split, rows, [f"{front}row {i}" for i in range(len(rows))]))
            values += frame[groups].tolist() if isinstance(groups, str) and groups in frame else []
            options.key, options.columns = (TARGET if roles[0] else None, None), roles[1]
            if (
                options.classes is None
                and len(roles[0]) > 1
                and bool(frame[roles[0]].isin((0, 1, None)).to_numpy().all())
            ):
                options.classes = roles[0]
        elif path:
            parts += image_folders(stage(data, progress=progress), split, options.classes is not None, progress)
            options.key = (TARGET, None)
        else:
            data = map_style(data)
            parts.append((split, data, [f"{front}item {i}" for i in range(len(data))]))
        if options.sep is not None and not is_table(data):
            raise PackError(f"sep divides texts of a table, got {type(data).__name__}; return a list of labels instead")
        options.source = " + ".join(filter(None, [options.source, str(data) if path else type(data).__name__]))
    return parts, values if isinstance(groups, str) else groups


def map_style(data: Any) -> Any:
    """Return the data, if its items can be asked for by number. Raises PackError with the way out where they cannot."""
    fix = "pass list(dataset), or define __getitem__ and __len__"
    if isinstance(data, DataLoader):
        fix = "pass its dataset: loader.dataset"
    elif isinstance(data, tuple):
        fix = "pass torch.utils.data.TensorDataset(x, y), or a list"
    elif hasattr(data, "__getitem__"):
        with suppress(TypeError, NotImplementedError):
            len(data)
            return data
    raise PackError(f"data must be a Dataset with items by number and a length, got {type(data).__name__}; {fix}")


# -- items to predict


def items_of(given: Any, card: Card) -> Sequence[Any]:
    """Return what `run.predict` got, item by item: a file, a text, an item (a dict, a tuple, an image, a number, a
    sample's array), or several: a list, a Dataset, an array of them, or the rows of a DataFrame. Raises PackError."""
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
    forms, roles, text = forms_in(card.options), card.options["roles"], card.options["text"]
    parts = inputs_of(item, card.options["inputs"], roles["key"], roles["inputs"])
    for name, value in parts.items():
        if isinstance(value, str) and (forms[name].layout or not text):
            parts[name] = Path(value)
    values = plain_values(parts, card.options["resize"], text)
    return {name: np.asarray(forms[name].fit(name, value)) for name, value in values.items()}


def inputs_of(item: Any, columns: Sequence[str], target: Any, inputs: Sequence[Any] | None) -> dict[str, Any]:
    """Return input column → value of an item to predict: as the Dataset returns it, or without its target; else a dict
    by the columns, or values in their order. Raises PackError(value, rule, fix)."""
    parts = {key: value for key, value in parts_of(item).items() if key != target}
    values = named(parts, None, inputs if parts.keys() >= {*(inputs or ())} else None)
    if not values.keys() >= {*columns} and not isinstance(item, Mapping):
        values = dict(zip(columns, parts_of(item).values(), strict=False))
    if not values.keys() >= {*columns}:
        raise PackError(", ".join(values), f"an item must have {', '.join(columns)}", "add what is missing")
    return {name: values[name] for name in columns}
