"""nb.pack: any Dataset, table, or folder of images by class → a Pack; and items to predict, read like its own."""

from __future__ import annotations

import dataclasses
import time
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
from nbtools.data.items import inputs_of, resolve
from nbtools.data.pack import MANIFEST, SPLITS, Card, Pack, Sample, is_pack
from nbtools.data.progress import say
from nbtools.data.reading import Items, RawItems, decoded, read_all, spoken
from nbtools.data.sources import cache
from nbtools.data.splits import require_shares
from nbtools.data.stage import stage
from nbtools.data.table import Table, is_table, read_table, tables
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
    random: bool = False,
    like: Card | None = None,
    into: str | Path | None = None,
    progress: bool = True,
) -> Any:
    """Return the pack of data of any kind, read once; opened where it is finished.

    data, or train: a map-style Dataset, a list of items, a Hugging Face Dataset or DatasetDict, a DataFrame or the path
    of a CSV file, or images by class, `class/*.png` or `train/class/*.png`, in anything that `stage` takes. An item is
    an array, tensor, number or PIL image, or a tuple or dict of them.
    target: the item's key, or the table's column or columns, that becomes the column `y`; by default y, label, labels
    or target, and of (x, y) y. inputs: likewise; by default all others. A table's numbers and categories are
    `x` (F,) float32. image: its column of file names, in the folder of the CSV file or in root.
    classes: those allowed, in order; by default those that occur. Whole numbers are places in the names that the
    Dataset has, `.classes` as in torchvision or a ClassLabel. False: whole numbers are values, for nb.regress. A list
    of names, a text that sep divides, or several columns of 0 and 1 are several labels: y (K,) uint8.
    val, test: data of their own, or shares, or whole numbers of samples; test=1.0: all. Classes are divided evenly, by
    what samples hold and by seed. groups: what stays in one split: a column of the table, a value a sample, or a
    function of its name. folds: return so many packs for cross validation, which share their arrays.
    size: (H, W), or one number, to which PIL images are resized, with masks that are targets (to the nearest id) and
    points. resize: crop to the middle (the default for classes), pad, or squash (the default for all others). mean,
    std: of a pretrained network, a number per channel of images from 0 to 1; by default those of the training split.
    points: the columns, "target" for y, that are points (…, 2) x, y or boxes (…, 4) x1, y1, x2, y2 in pixels.
    text: a function of a text that returns numbers, or {column: function}; kept by its name, for predictions too.
    store=False: no copy is made; each epoch reads the Dataset. Without mean= and std= inputs are not normalised then.
    random: the items differ at each reading (augmentation in the Dataset); the pack keeps one reading, and
    `feed="workers"` trains on the Dataset itself.
    like: the card of another pack, whose roles, classes, columns and preprocessing this one gets.
    into: a folder for the pack alone; by default one under the cache, named by what identifies the data: types,
    lengths, options, lists, arrays and tables by content, files by size and time, other Datasets by 64 items: a change
    elsewhere in these needs another `into`.

    y is int64 () for texts, booleans and whole numbers, its names are `classes`; else numbers of any shape. Items
    that cannot be used are rows of `pack.bad`. Raises PackError, DiskError or StageError where nothing can be packed.
    """
    if isinstance(data, str | Path) and not is_table(data) and is_pack(folder := stage(data, progress=progress)):
        return of_task(Pack.open(folder), TASK)
    parts = splits_of(data, train, val, test)
    val, test = (0 if name in parts else share for name, share in (("val", val), ("test", test)))
    require_shares(val, test)
    asked = {"target": target, "inputs": inputs, "image": image, "sep": sep, "points": points}
    asked |= {"classes": classes, "size": size_of(size, resize), "resize": resize, "mean": mean, "std": std}
    asked |= {"store": store, "random": random}
    if (mean is None) != (std is None):
        raise PackError("mean and std belong together, got one of them; pass both")
    if like is not None:
        asked, text = alike(asked, text, like)
    column = groups if isinstance(groups, str) else None
    items = Items(opened(parts, asked, text, column, root, like, progress), asked, text, like)
    items.groups = groups_of(items, groups)
    more = {"val": val, "test": test, "seed": seed, "like": like and like.to_dict()}
    made = {"key": items.key(more), "source": items.source}
    into = Path(into if into is not None else cache() / "packs" / f"{TASK}-{made['key']}")
    if progress:
        announce(into, items)

    def samples(_: Any, done: int) -> Any:
        return read_all(items, range(done, len(items)))

    ends: Any = {"val": val, "test": test, "seed": seed, "progress": progress}
    pack: Any = make_pack(TASK, made, into, items.survey, samples, **ends)
    pack = dataclasses.replace(pack, raw=RawItems(items, pack.names, pack.classes))
    return pack.folds(folds, seed) if folds else pack


def announce(into: Path, items: Items) -> None:
    """Say that a pack is there already, or how its images are resized unless that was asked for."""
    if is_pack(into):
        packed = time.strftime("%Y-%m-%d %H:%M", time.localtime((into / MANIFEST).stat().st_mtime))
        say(f"opened {into}, packed {packed}")
    elif items.asked["size"] and not items.asked["resize"]:
        resize = max(form.resize for form in items.forms.values())
        height, width = items.asked["size"]
        say(f"images become {height} × {width} by resize={resize!r}; there are {', '.join(RESIZES)}")


# -- what is given


def size_of(size: Any, resize: str | None) -> list[int] | None:
    size = [size, size] if isinstance(size, int) else size
    if size is not None and (not isinstance(size, list | tuple) or len(size) != 2 or min(size) < 1):
        raise PackError(f"size must be one number of pixels or (height, width), got {size!r}")
    if resize is not None and (resize not in RESIZES or size is None):
        raise PackError(f"resize must be one of {', '.join(RESIZES)}, with a size=, got {resize!r}, size={size}")
    return size and list(size)


def alike(asked: dict[str, Any], text: Any, like: Card) -> tuple[dict[str, Any], Any]:
    """Return what is asked for, and the functions of texts, of a pack like another one."""
    own = ("classes", "size", "resize", "mean", "std")
    if any(asked[name] is not None for name in own) or text is not None or not asked["store"]:
        raise PackError("a pack like another takes its classes, size, mean, std and text; leave these out")
    given = {name: value for name, value in like.options["roles"]["given"].items() if asked[name] is None}
    return asked | given, {name: resolve(function) for name, function in like.options["text"].items()}


def splits_of(data: Any, train: Any, val: Any, test: Any) -> dict[str | None, Any]:
    """Return split → its data; None: of data that is yet to be divided."""
    if (data is None) == (train is None):
        raise PackError(f"pack takes the data, or train=…, got {'neither' if data is None else 'both'}; pass one")
    data = train if data is None else data
    given = {name: part for name, part in (("val", val), ("test", test)) if not isinstance(part, int | float | None)}
    if not isinstance(data, Mapping):
        return {"train" if given else None: data, **given}
    parts = {split_word(str(name)): part for name, part in data.items()}
    if given or None in parts or len(parts) < len(data) or not parts:
        keys = ", ".join(map(str, data))
        fix = "pass train=…, val=…, test=…, or arrays as torch.utils.data.TensorDataset(x, y)"
        raise PackError(f"a dict of Datasets has the keys train, val and test, got {keys}; {fix}")
    return {split: parts[split] for split in SPLITS if split in parts}


def opened(
    given: Mapping[str | None, Any],
    asked: Mapping[str, Any],
    text: Any,
    besides: str | None,
    root: Any,
    like: Card | None,
    progress: bool,
) -> list[tuple[str | None, Any]]:
    """Return (split, Dataset) of each part. Raises PackError for what has no items to ask for."""
    frames = {split: read_table(data) for split, data in given.items() if is_table(data)}
    folders = [Path(given[split]).parent if isinstance(given[split], str | Path) else Path() for split in frames]
    folders = folders if root is None else [stage(root, progress=progress)] * len(frames)
    texts = [*text] if isinstance(text, Mapping) else [*(asked["inputs"] or ())] if text else []
    columns: Any = {name: asked[name] for name in ("target", "inputs", "image")} | {"texts": texts, "besides": besides}
    columns["encoding"] = like.options["encoding"] if like else {}
    made = iter(tables([*frames.values()], folders, **columns) if frames else ())
    parts: list[tuple[str | None, Any]] = []
    for split, data in given.items():
        if split in frames:
            parts.append((split, next(made)))
        elif isinstance(data, str | Path):
            parts += image_folders(stage(data, progress=progress), split, one=like is not None)
        else:
            parts.append((split, map_style(data)))
    return parts


def map_style(data: Any) -> Any:
    """Return the data, if its items can be asked for by number. Raises PackError with the way out where they cannot."""
    ways = {
        DataLoader: "pass its dataset: loader.dataset",
        tuple: "pass torch.utils.data.TensorDataset(x, y), or a list",
    }
    fix = next((way for kind, way in ways.items() if isinstance(data, kind)), "")
    if not fix and hasattr(data, "__getitem__"):
        with suppress(TypeError, NotImplementedError):
            len(data)
            return data
    fix = fix or "pass list(dataset), or define __getitem__ and __len__"
    raise PackError(f"data must be a Dataset with items by number and a length, got {type(data).__name__}; {fix}")


def groups_of(items: Items, groups: Any) -> list[str] | None:
    """Return the group of each item: of a column, of a function of its name, or as given."""
    if isinstance(groups, str):
        if not all(isinstance(part, Table) and groups in part.frame for _, part in items.parts):
            raise PackError(f"groups must be a column of the table, a value a sample or a function, got {groups!r}")
        groups = [value for _, part in items.parts for value in part.frame[groups]]
    elif callable(groups):
        groups = [groups(name) for name in items.names]
    if groups is not None and len(groups) != len(items):
        raise PackError(f"groups must have a value for each of {len(items):,} items, got {len(groups):,}")
    return None if groups is None else [str(group) for group in groups]


# -- items to predict


def items_of(given: Any, card: Card) -> Sequence[Any]:
    """Return what `run.predict` got, item by item: a file, a text, an item (a dict, a tuple, an image, a number, a
    sample's array), or several: a list, a Dataset, an array of them, or the rows of a DataFrame. Raises PackError."""
    if hasattr(given, "iloc"):
        if not card.options["encoding"]:
            raise PackError("this run was not trained on a DataFrame; pass items as its Dataset returns them")
        frame = given.to_frame().T.infer_objects() if given.ndim == 1 else given
        table = Table(frame.rename(columns=str), card.options["encoding"], ())
        rows = []
        for i in range(len(table)):
            try:
                rows.append(table[i])
            except PackError as error:
                raise PackError(f"row {i}: {spoken(error)}") from None
        return rows
    first = card.columns[card.options["inputs"][0]]
    rank = len(first.shape) + (first.kind == "ragged")
    if isinstance(given, (str, Path, dict, tuple)) or is_image(given) or getattr(given, "ndim", None) in (0, rank):
        return [given]
    return given if hasattr(given, "__getitem__") else list(given) if isinstance(given, Iterable) else [given]


def sample_of(item: Any, card: Card) -> Sample:
    """Return an item, or an image file, as packing would have stored its inputs. Raises PackError(value, rule, fix)."""
    forms, texts = forms_in(card.options), card.options["text"]
    roles = card.options["roles"]
    values = inputs_of(item, card.options["inputs"], roles["target"], roles["inputs"])
    for name, value in values.items():
        file = isinstance(value, str | Path) and name not in texts
        values[name] = open_image(value) if file else decoded(value, texts.get(name))
    return {name: np.asarray(forms[name].fit(name, value)) for name, value in values.items()}
