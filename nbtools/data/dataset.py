"""nb.pack: any Dataset, DataFrame, or folder of images by class → a Pack.

64 items, spread over the data and read twice, show what the items have in common, whether they are the same at each
reading, and what one costs; with type and length they identify the pack. Then every item is read once, in worker
processes where that pays.
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import itertools
import json
import math
import multiprocessing
import pickle
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from nbtools import disk
from nbtools.data.build import Entry, Problem, Survey, make_pack, of_task, why
from nbtools.data.folders import WORDS, Images, image_folders
from nbtools.data.frames import Table, features_of, is_frame, tables
from nbtools.data.identity import mark, whole
from nbtools.data.items import TARGET, Form, Sign, bare, forms_in, forms_of, is_image, named, plain
from nbtools.data.moments import moments
from nbtools.data.names import class_names, leaves, named_class
from nbtools.data.pack import FORMAT, MANIFEST, SPLITS, Card, Pack, Sample, is_pack
from nbtools.data.parallel import SHORT, by_workers, cores
from nbtools.data.progress import say
from nbtools.data.sources import cache
from nbtools.data.splits import require_shares
from nbtools.data.stage import stage
from nbtools.errors import PackError, TrainError
from nbtools.show import plural

TASK = "dataset"
VERSION = 2  # of what a card keeps of them; packs of another are made anew
SEEN = 64  # items looked at
CHEAP = 2e-4  # seconds: an item that costs less is read faster here than it travels between processes
LOAD = 4e6  # bytes that travel at once


def pack(
    data: Any = None,
    *,
    target: Any = None,
    inputs: Sequence[Any] | None = None,
    classes: Sequence[str] | Literal[False] | None = None,
    train: Any = None,
    val: float | Any = 0.1,
    test: float | Any = 0.1,
    size: Sequence[int] | None = None,
    random: bool = False,
    as_bytes: bool = False,
    like: Card | None = None,
    into: str | Path | None = None,
    progress: bool = True,
) -> Pack:
    """The pack of data of any kind, read once; opened where it is finished.

    data, or train: a map-style Dataset, a list of items, a Hugging Face Dataset or DatasetDict, a DataFrame, or images
    by class, `class/*.png` or `train/class/*.png`, in anything that `stage` takes. An item is an array, tensor, number
    or PIL image, or a tuple or dict of them.
    target: the item's key, or the DataFrame's column, that becomes the column `y`; by default y, label, labels or
    target, of a tuple the last. inputs: likewise; by default all others. A DataFrame's inputs are `x` (F,) float32.
    classes: those allowed, in order; by default those that occur. Whole numbers are places in the names that the
    Dataset has, `.classes` as in torchvision or a ClassLabel; where several have different names, each its own, and
    the classes are those of the first, then what others add. False: whole numbers are values, for nb.regress.
    val, test: data of their own, or shares, or whole numbers of samples; test=1.0: all.
    size: (H, W) to which PIL images are resized. as_bytes: floats that are exactly n/255 are kept as uint8.
    random: the items differ at each reading (augmentation in the Dataset); the pack keeps one reading, and
    `feed="workers"` trains on the Dataset itself.
    like: the card of another pack, whose roles, classes, columns and preprocessing this one gets: what `run.pack` asks
    for.
    into: a folder for the pack alone; by default one under the cache, named by what identifies the data: types,
    lengths, options, DataFrames, lists and tensors as a whole, files by size and time; of other Datasets 64 items,
    their code, and what they hold, if it can be pickled, such as paths and labels. A change elsewhere, as in a file,
    needs another `into`.

    y is int64 () for texts, booleans and whole numbers, its names are `classes`; else numbers of any shape. Items
    that cannot be used are rows of `pack.bad`. Raises PackError, DiskError or StageError where nothing can be packed.
    """
    if isinstance(data, str | Path) and is_pack(folder := stage(data, progress=progress)):
        return of_task(Pack.open(folder), TASK)
    given = splits_of(data, train, val, test)
    val, test = (0 if name in given else share for name, share in (("val", val), ("test", test)))
    require_shares(val, test)
    require_size(size)
    if like is not None:
        if (classes, size, as_bytes) != (None, None, False):
            raise PackError(
                "a pack like another takes its classes, size and bytes; leave out classes, size and as_bytes"
            )
        roles = like.options["roles"]
        target, inputs = roles["target"] if target is None else target, roles["inputs"] if inputs is None else inputs
    items = Items(opened(given, target, inputs, like, progress), target, inputs)
    if not len(items):
        raise PackError(f"{items.source} has no items; a pack needs at least one")
    look = Look.at(items)
    own = look.names()
    names = classes is not False and (classes or [*dict.fromkeys(itertools.chain.from_iterable(own))])
    asked = {"target": target, "inputs": inputs, "classes": classes, "names": own, "size": size, "random": random}
    asked |= {"as_bytes": as_bytes, "val": val, "test": test, "like": like and like.to_dict()}
    items.forms = forms_in(like.options, like.classes) if like else look.forms(names, as_bytes, size)
    items.named = bool(own) and items.forms.get(TARGET, Form("")).kind == "class"
    if size is not None and not any(form.kind == "image" for form in items.forms.values()):
        raise PackError("size resizes PIL images, and the items hold none; resize in the Dataset, and leave size out")
    made = {"key": look.key(asked), "source": items.source}
    into = into if into is not None else cache() / "packs" / f"{TASK}-{made['key']}"

    def survey() -> Survey:
        if not random:
            look.require_same()
        disk.require_space(Path(into), round(look.bytes_each() * len(items)))
        return items.survey(random)

    def samples(found: Survey, done: int) -> Generator[Sample | Problem, None, None]:
        return read_all(items, range(done, len(items)), look)

    there = is_pack(Path(into))
    found = make_pack(TASK, made, into, survey, samples, {}, val=val, test=test, progress=progress)
    if there and progress:
        say(opened_again(found.folder, look, len(items)))
    return dataclasses.replace(found, raw=RawItems(found.folder, items))


def require_size(size: Any) -> None:
    if size is not None and (not isinstance(size, list | tuple) or len(size) != 2 or min(size) < 1):
        raise PackError(f"size must be (height, width) in pixels, got {size!r}; pass two whole numbers ≥ 1")


def opened_again(folder: Path, look: Look, count: int) -> str:
    """When a pack that was there already was made, and by what it was recognised among `count` items."""
    packed = time.strftime("%Y-%m-%d %H:%M", time.localtime((folder / MANIFEST).stat().st_mtime))
    more = ", and all that the Dataset holds" if look.all else ""
    return f"opened {folder}, packed {packed}; compared: {len(look.places)} of {count:,} items{more}"


def splits_of(data: Any, train: Any, val: Any, test: Any) -> dict[str | None, Any]:
    """Split → its data; None: of data that is yet to be divided."""
    if (data is None) == (train is None):
        raise PackError(f"pack takes the data, or train=…, got {'neither' if data is None else 'both'}; pass one")
    data = train if data is None else data
    given = {name: part for name, part in (("val", val), ("test", test)) if not isinstance(part, int | float | None)}
    if isinstance(data, Mapping):
        found = {WORDS.get(str(name).lower(), str(name)): part for name, part in data.items()}
        if given or not found or found.keys() - set(SPLITS):
            keys = ", ".join(map(str, data))
            raise PackError(
                f"a dict of Datasets has the keys train, val and test, got {keys}; pass train=…, val=…, test=…, or "
                "arrays as torch.utils.data.TensorDataset(x, y)"
            )
        return {split: found[split] for split in SPLITS if split in found}
    return {"train" if given else None: data, **given}


def opened(
    given: Mapping[str | None, Any], target: Any, inputs: Any, like: Card | None, progress: bool
) -> list[tuple[str | None, Any]]:
    """(split, Dataset) of each part. Raises PackError for what has no items to ask for."""
    parts: list[tuple[str | None, Any]] = []
    encoding = like.options["encoding"] if like else {}
    frames = tables([data for data in given.values() if is_frame(data)], target, inputs, encoding)
    for split, data in given.items():
        if isinstance(data, str | Path):
            parts += image_folders(stage(data, progress=progress), split)
        else:
            parts.append((split, next(frames) if is_frame(data) else map_style(data)))
    return parts


def map_style(data: Any) -> Any:
    """The data, if its items can be asked for by number. Raises PackError with the way out where they cannot."""
    kind = type(data).__name__
    if isinstance(data, DataLoader):
        raise PackError("data must be a Dataset, got a DataLoader; pass its dataset: loader.dataset")
    if isinstance(data, tuple):
        raise PackError("data must be a Dataset, got a tuple; pass torch.utils.data.TensorDataset(x, y), or a list")
    if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
        raise PackError(
            f"data must be a map-style Dataset, with items by number and a length, got {kind}; pass list(dataset) "
            "where it fits into memory, or define __getitem__ and __len__"
        )
    try:
        len(data)
    except (TypeError, NotImplementedError):
        raise PackError(f"data must have a length, and {kind} has none; define __len__, or pass a list") from None
    return data


@dataclass(eq=False)
class Items(Dataset):
    """The items of all parts, one after another; `self[i]` is a sample, or its row of the table of bad samples.

    named: classes are whole numbers, for which the Datasets have names.
    """

    parts: list[tuple[str | None, Any]]
    target: Any
    inputs: Sequence[Any] | None
    named: bool = False
    forms: dict[str, Form] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.ends = [*itertools.accumulate(len(part) for _, part in self.parts)]

    @property
    def source(self) -> str:
        kinds = [str(part.root) if isinstance(part, Images) else type(part).__name__ for _, part in self.parts]
        return " + ".join(dict.fromkeys(kinds))

    @cached_property
    def names(self) -> list[str]:
        found = []
        for split, part in self.parts:
            front = f"{split}/" if split else ""
            kind = "row" if isinstance(part, Table) else "item"
            own = part.names if isinstance(part, Images) else (f"{kind} {i}" for i in range(len(part)))
            found += [f"{front}{name}" for name in own]
        return found

    def __len__(self) -> int:
        return self.ends[-1]

    def place(self, i: int) -> tuple[Any, int]:
        """The part that an item is in, and its place there."""
        k = bisect.bisect_right(self.ends, i)
        return self.parts[k][1], i - (self.ends[k - 1] if k else 0)

    def values(self, i: int) -> dict[str, Any]:
        """Column → value of an item, whatever it is. Raises PackError(value, rule, fix) where there is none."""
        part, place = self.place(i)
        try:
            item = part[place]
            own = isinstance(part, Images | Table)
            values = named(item) if own else named(item, self.target, self.inputs)
            for value in values.values():
                if is_image(value):
                    value.load()  # Pillow decodes no earlier
        except PackError:
            raise
        except Exception as error:  # whatever a Dataset may raise
            if disk.is_away(error):
                raise
            came = f"{type(error).__name__}: {error}"
            raise PackError(came, "the Dataset must return each item", "correct it, or leave it out") from error
        return values

    def sample(self, i: int) -> dict[str, Any]:
        """The arrays of an item; its class as a text."""
        values = self.values(i)
        if values.keys() != self.forms.keys():
            rule = f"an item must have {', '.join(self.forms)}, like the others"
            raise PackError(", ".join(values), rule, "make it match, or leave it out")
        if self.named:
            values[TARGET] = named_class(*self.place(i), self.target, bare(values[TARGET]))
        return {name: form.fit(name, values[name]) for name, form in self.forms.items()}

    def __getitem__(self, i: int) -> dict[str, Any] | Problem:
        try:
            return self.sample(i)
        except PackError as error:
            return self.names[i], *why(error)

    def survey(self, random: bool) -> Survey:
        forms, target = self.forms, self.forms.get(TARGET)
        inputs = [name for name in forms if name != TARGET and (target or not name.startswith(f"{TARGET}_"))]
        ragged = [name for name, form in forms.items() if form.ragged]
        tables = [part for _, part in self.parts if isinstance(part, Table)]
        options = {
            "inputs": inputs,
            "kind": "none" if target is None else "classes" if target.kind == "class" else "values",
            "roles": {"target": plain(self.target), "inputs": plain(self.inputs)},
            "forms": {name: form.to_dict() for name, form in forms.items()},
            "random": random,
            "features": features_of(tables[0].encoding) if tables else [],
            "encoding": tables[0].encoding if tables else {},
        }
        splits = [split for split, part in self.parts for _ in range(len(part))]
        bad = [
            (f"{split}/{name}" if split else name, *row)
            for split, part in self.parts
            for name, *row in (part.bad if isinstance(part, Images) else ())
        ]
        return Survey(
            [Entry(name, split) for name, split in zip(self.names, splits, strict=True)],
            list(target.names) if target else [],
            options,
            ragged=ragged,
            bucket_by=next(iter(ragged), None),
            bad=bad,
            named=TARGET if options["kind"] == "classes" else None,
            learn=partial(moments, forms),
        )


@dataclass(eq=False)
class Look:
    """What items spread over the data showed. marks: a hash of each; signs: of those that could be read; cost: seconds
    of one; error: of the first that could not be read; moves: whether another process can read them; all: whether the
    key depends on all that the data hold."""

    items: Items
    places: list[int]
    marks: list[bytes] = field(default_factory=list)
    signs: list[dict[str, Sign]] = field(default_factory=list)
    cost: float = 0.0
    error: PackError | None = None
    moves: bool = True
    all: bool = True

    @classmethod
    def at(cls, items: Items) -> Self:
        look = cls(items, sorted({i * len(items) // SEEN for i in range(SEEN)}))
        times = []
        for i in look.places:
            start = time.perf_counter()
            try:
                values = items.values(i)
            except PackError as error:
                look.error = look.error or error
                look.marks.append(b"")
                continue
            times.append(time.perf_counter() - start)
            look.marks.append(mark(values.items()))
            look.signs.append({name: Sign.of(name, value) for name, value in values.items()})
            look.moves &= not any(
                isinstance(value, torch.Tensor) and value.device.type != "cpu" for value in values.values()
            )
        look.cost = float(np.median(times or [0.0]))
        return look

    def forms(self, names: Sequence[str] | Literal[False], as_bytes: bool, size: Any) -> dict[str, Form]:
        if self.error and not self.signs:
            value, rule, fix = why(self.error)
            count = plural(len(self.places), "item")
            raise PackError(f"{self.items.source}: none of the {count} read can be used: {rule}, got {value}; {fix}")
        return forms_of(self.signs, names, as_bytes, size)

    def names(self) -> list[list[str]]:
        """The names for classes of each Dataset, where the classes are whole numbers and the first of them has some."""
        if not all(signs.get(TARGET, Sign("")).kind in ("whole", "missing") for signs in self.signs):
            return []
        target = self.items.target
        found = [[*class_names(one, target)] for _, part in self.items.parts for one in leaves(part, target)]
        return found if found[0] else []

    def key(self, asked: Mapping[str, Any]) -> str:
        """Of the data and what is made of them; random items count with their form only."""
        digest = hashlib.blake2b(json.dumps([FORMAT, TASK, VERSION, asked], default=str).encode(), digest_size=8)
        for split, part in self.items.parts:
            known = b"" if asked["random"] else whole(part)
            self.all &= bool(known)
            digest.update(repr((split, type(part).__qualname__, len(part))).encode() + known)
        digest.update(repr(self.signs).encode() if asked["random"] else b"".join(self.marks))
        return digest.hexdigest()

    def require_same(self) -> None:
        """Raise PackError where an item differs at its second reading."""
        for i, before in zip(self.places, self.marks, strict=True):
            try:
                now = mark(self.items.values(i).items())
            except PackError:
                now = b""
            if now != before:
                raise PackError(
                    f"{self.items.names[i]} differs each time it is read: the Dataset augments at random, and a pack "
                    "keeps one reading. Augment on the device instead, nb.classify(net, augment=(…)), or pass "
                    'random=True: feed="workers" then trains on the Dataset itself'
                )

    def bytes_each(self) -> float:
        """Of a packed sample, roughly."""
        forms = self.items.forms
        sizes = [
            np.dtype(form.dtype).itemsize * math.prod(signs[name].shape if form.ragged else filter(None, form.shape))
            for signs in self.signs
            for name, form in forms.items()
            if form.kind != "class" and name in signs
        ]
        return sum(sizes) / max(len(self.signs), 1)


def read_all(items: Items, places: Sequence[int], look: Look) -> Generator[dict[str, Any] | Problem, None, None]:
    """Samples and rows of the table of bad samples, in order; read by worker processes where that pays, which are
    forked on Linux, and elsewhere started if the Dataset can be sent to them."""
    method = "fork" if sys.platform == "linux" else multiprocessing.get_all_start_methods()[0]
    few = cores() == 1 or look.cost < CHEAP or look.cost * len(places) < SHORT
    if few or not look.moves or method != "fork":
        yield from map(items.__getitem__, places)
        return
    size = max(1, min(64, int(LOAD / max(look.bytes_each(), 1))))
    yield from by_workers(items.__getitem__, places, size)


def refusal(items: Items) -> str:
    """Why a process that is not forked cannot read the items, "" if it can."""
    try:
        data = pickle.dumps(items)
    except Exception as error:  # whatever a Dataset's own pickling may raise
        return f"{type(error).__name__}: {error}"
    notebook = not hasattr(sys.modules["__main__"], "__file__")
    return "it is defined in the notebook" if notebook and b"__main__" in data else ""


@dataclass(eq=False)
class RawItems(Dataset):
    """The Dataset that a pack was made of, read at each access. Item i has the arrays of the pack's sample i."""

    folder: Path
    items: Items = field(repr=False)

    @cached_property
    def pack(self) -> Pack:
        return Pack.open(self.folder)

    @cached_property
    def places(self) -> Sequence[int]:
        """Of the samples among the items."""
        if len(self.pack) == len(self.items):
            return range(len(self.items))
        index = {name: i for i, name in enumerate(self.items.names)}
        return [index[name] for name in self.pack.names]

    def __len__(self) -> int:
        return len(self.pack)

    def __getitem__(self, i: int) -> Sample:
        sample = self.items.sample(self.places[i])
        if self.items.forms.get(TARGET, Form("")).kind == "class":
            sample[TARGET] = self.pack.arrays[TARGET][i]
        return {**sample, "id": np.asarray(i, np.int64)}

    def __reduce__(self) -> Any:
        if reason := refusal(self.items):
            kinds = ", ".join(type(part).__name__ for _, part in self.items.parts)
            raise TrainError(
                f"{kinds} cannot be sent to another process ({reason}); write its class, and what it uses, into a file "
                "next to the notebook, my_data.py, and import it: from my_data import …"
            )
        return RawItems, (self.folder, self.items)
