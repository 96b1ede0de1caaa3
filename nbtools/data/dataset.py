"""nb.pack: what one has becomes the columns of a Pack; and items to predict, read like its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

import numpy as np
from torch.utils.data import DataLoader

from nbtools.data.build import make_pack, of_task
from nbtools.data.folders import image_folders, split_word
from nbtools.data.forms import forms_in
from nbtools.data.images import RESIZES, is_image, open_image
from nbtools.data.items import decoded, inputs_of
from nbtools.data.pack import SPLITS, Card, Pack, Sample, is_pack
from nbtools.data.progress import say
from nbtools.data.reading import Items, Options, RawItems, sentence
from nbtools.data.sources import cache
from nbtools.data.splits import require_shares
from nbtools.data.stage import stage
from nbtools.data.table import Table, encoding_of, is_table, read_table, roles_of
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
    like: Card | None = None,
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
    made, and each epoch reads the Dataset. like: the card of a pack whose preprocessing this one gets. into: a folder
    for the pack; by default in the cache, named by options and data, of other Datasets by 64 items.
    Items that cannot be used are rows of `pack.bad`. Raises PackError, DiskError or StageError.
    """
    if isinstance(data, str | Path) and not is_table(data) and is_pack(folder := stage(data, progress=progress)):
        return of_task(Pack.open(folder), TASK)
    options = Options(target, inputs, image, sep, classes, size, resize, mean, std, points, text, store)
    options = options if like is None else options.alike(like)
    parts, val, test = divided(data, train, val, test)
    items = Items(opened(parts, options, root, groups, like, progress), options, like, groups)
    pack = pack_of(items, like, into, progress, val=val, test=test, seed=seed)
    return pack.folds(folds, seed) if folds else pack


def pack_of(items: Items, like: Card | None, into: Any, progress: bool, **draw: Any) -> Pack:
    """Return the pack of items, finished or made; draw: val, test and seed."""
    made = {"key": items.key([draw, like and like.to_dict()]), "source": items.source}
    into = Path(into if into is not None else cache() / "packs" / f"{TASK}-{made['key']}")
    if progress and items.options.size and not items.options.resize:
        (height, width), how = items.options.size, max(form.resize for form in items.forms.values())
        say(f"images become {height} × {width} by resize={how!r}; there are {', '.join(RESIZES)}")
    pack = make_pack(TASK, made, into, items.survey, items.read, **draw, progress=progress)
    return dataclasses.replace(pack, raw=RawItems(items, pack))


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


def opened(
    given: Mapping[str | None, Any], options: Options, root: Any, groups: Any, like: Card | None, progress: bool
) -> list[tuple[str | None, Any]]:
    """Return (split, Dataset) of each part. Raises PackError for what has no items to ask for."""
    parts: list[tuple[str | None, Any]] = []
    goals, encoding = [], like.options["encoding"] if like else {}
    for split, data in given.items():
        path = isinstance(data, str | Path)
        if is_table(data):
            frame = read_table(data)
            if not parts:  # the first is that of training; the others are encoded alike
                goals, chosen = roles_of(frame, options.target, options.inputs, options.image, groups)
                encoding = encoding or encoding_of(frame, chosen, options.image, options.text is not None)
            folder = stage(root) if root is not None else Path(data).parent if path else Path()
            parts.append((split, Table(frame, encoding, goals, folder, options.sep)))
        elif path:
            parts += image_folders(stage(data, progress=progress), split, like is not None, progress)
        else:
            parts.append((split, map_style(data)))
        if options.sep is not None and not is_table(data):
            raise PackError(f"sep divides texts of a table, got {type(data).__name__}; return a list of labels instead")
    return parts


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
        return rows_of(given, card)
    first = card.columns[card.options["inputs"][0]]
    rank = len(first.shape) + (first.kind == "ragged")
    if isinstance(given, (str, Path, dict, tuple)) or is_image(given) or getattr(given, "ndim", None) in (0, rank):
        return [given]
    return given if hasattr(given, "__getitem__") else list(given) if isinstance(given, Iterable) else [given]


def rows_of(frame: Any, card: Card) -> list[Any]:
    """Return the items of the rows of a DataFrame, or of one, encoded as in training."""
    if not card.options["encoding"]:
        raise PackError("this run was not trained on a DataFrame; pass items as its Dataset returns them")
    frame = frame.to_frame().T.infer_objects() if frame.ndim == 1 else frame
    table, rows = Table(frame.rename(columns=str), card.options["encoding"], (), Path(), None), []
    for i in range(len(table)):
        try:
            rows.append(table[i])
        except PackError as error:
            raise PackError(f"row {i}: {sentence(error)}") from None
    return rows


def sample_of(item: Any, card: Card) -> Sample:
    """Return an item, or an image file, as packing would have stored its inputs. Raises PackError(value, rule, fix)."""
    forms, text, roles = forms_in(card.options), card.options["text"], card.options["roles"]
    values = inputs_of(item, card.options["inputs"], roles["key"], roles["inputs"])
    for name, value in values.items():
        file = isinstance(value, str | Path) and (forms[name].kind == "image" or not text)
        values[name] = open_image(value) if file else decoded(value, text)
    return {name: np.asarray(forms[name].fit(name, value)) for name, value in values.items()}
