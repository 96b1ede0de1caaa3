"""The items of the data, read as a pack keeps them: when packing, and by workers in training. An item is an array,
tensor, number, text or PIL image, or several by place or name: some are inputs, one is the target."""

import hashlib
import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from nbtools import disk
from nbtools.data import forms
from nbtools.data.build import Entry, Sampler, Survey
from nbtools.data.forms import FIX, TARGET, TARGETS, is_image, is_names
from nbtools.data.pack import FORMAT, Column, Pack, Sample
from nbtools.errors import NbtoolsError, PackError

VERSION = 12  # of what a card keeps of them; packs of another are made anew
SEEN, LEAST = 64, 8  # items looked at; of large ones fewer, but so many
LOOKED, BLOCK, MOST = 2**28, 2**22, 256  # bytes that they may take together, and those of a block; its most items
MOST_ROWS = 2**14  # of columns in memory
Part = tuple[str | None, Any, list[str]]  # split, items, their names
HELD = "indices", "targets", "labels", "_fingerprint"  # attributes of all items
FLAT = str, list, np.ndarray, np.memmap, torch.Tensor
POINTS = {2: "points", 4: "boxes"}  # by the length of a column's last axis
ROLES = ("target", "inputs", "image", "sep", "size", "resize", "points", "mean", "std")


class Table(Sequence[Any]):
    """Hold columns, arrays and lists by key, as items: dicts where the keys are names, else tuples."""

    def __init__(self, columns: dict[Any, Any], named: bool = True):
        self.columns, self.named = columns, named

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def __getitem__(self, i: int) -> Any:
        row = {key: column[i] for key, column in self.columns.items()}
        return row if self.named else tuple(row.values())


def take(data: Any, places: Sequence[int]) -> dict[Any, Any]:
    """Return key → the values of several items at once. Raises ValueError for what does not hold them as columns."""
    if type(data) is Subset:
        return take(data.dataset, [int(data.indices[i]) for i in places])
    if type(data) not in (TensorDataset, Table):
        raise ValueError(type(data).__name__)
    columns = enumerate(data.tensors) if isinstance(data, TensorDataset) else data.columns.items()
    return {key: [x[i] for i in places] if isinstance(x, list) else x[places] for key, x in columns}


def is_plain(column: Any) -> bool:
    """Return whether a column is an array of numbers or texts, none of them masked, or a list of one type of them."""
    if isinstance(column, list):
        return {*map(type, column)} in ({str}, {int}, {float}, {bool})  # 1 and True are one key
    return isinstance(column, torch.Tensor) or (type(column) in FLAT[2:] and column.dtype.kind in "biufUS")


def parts_of(item: Any) -> dict[Any, Any]:
    """Return the parts of an item by key, or by place in a tuple; a list is an array."""
    if item is None:
        raise PackError("None", "an item must hold arrays", "return them from the Dataset, or leave the item out")
    if isinstance(item, Mapping):
        return dict(item)
    return dict(enumerate(item)) if isinstance(item, tuple) else {0: item}


def target_of(parts: Mapping[Any, Any], target: Any, inputs: Sequence[Any] | None) -> Any:
    """Return the key of the target, None without one. Raises PackError where there are several readings."""
    if target is not None:
        return target
    names = [key for key in TARGETS if key in parts]
    rest = [key for key in parts if key not in (inputs or ())]
    if len(names) == 1 or [*parts] == [0, 1]:
        return next((key for key in names or [1] if key in rest), None)
    if names or (rest and len(parts) > 2 and 0 in parts):
        came = ", ".join(f"{key!r}: {type(value).__name__}" for key, value in parts.items())
        raise PackError(f"which part of an item is its target? It holds {came}; name one: target={(names or [1])[0]!r}")
    return None


def name_columns(parts: Mapping[Any, Any], target: Any, inputs: Sequence[Any] | None) -> dict[str, Any]:
    """Return column → value: the target as `y`; inputs, None: all others, by key, those of a tuple as `x`, or `x1` …"""
    chosen = [key for key in parts if key != target] if inputs is None else [*inputs]
    places = [key for key in chosen if isinstance(key, int)]
    names = {key: f"x{i}" for i, key in enumerate(places, 1)} if len(places) > 1 else dict.fromkeys(places, "x")
    columns = [names.get(key) or column_name(key) for key in chosen]
    if target is not None:
        chosen, columns = [*chosen, target], [*columns, TARGET]
    if lacking := [key for key in chosen if key not in parts]:
        raise PackError(", ".join(map(str, parts)), f"an item must have {lacking[0]!r}", "name a part that it has")
    if len({*columns}) < len(chosen) or len({*chosen}) < len(chosen):
        rule, fix = "inputs and target must have different names", "rename one, or choose with inputs=[…]"
        raise PackError(", ".join(columns), rule, fix)
    return {column: parts[key] for column, key in zip(columns, chosen, strict=True)}


def column_name(key: Any) -> str:
    return re.sub(r"[^\w-]+", "_", str(key))


class Items:
    """The items of all parts, one after another. 64 of them, spread over the data, show what all have in common.

    options: of `nb.pack`, with `key`: target and inputs of an item; target: that part's key; kind, allowed: what it
    is, its classes; listed: items are in memory, images perhaps as paths; pictures: columns of PIL images, images: also
    of arrays; resize: (height, width, how); text: a function by name; marked: columns of points; marks: item hashes.
    """

    def __init__(self, parts: list[Part], groups: Any, options: Any):
        self.parts, self.options = parts, options
        self.places = [(k, i) for k, (_, part, _) in enumerate(parts) for i in range(len(part))]
        self.names = [name for _, _, names in parts for name in names]
        count = len(self.names)
        if empty := [split or options.source for split, part, _ in parts if not len(part)]:
            raise PackError(f"{empty[0]} has no items; pass at least one")
        groups = [*map(groups, self.names)] if callable(groups) else [None] * count if groups is None else groups
        self.groups = [None if forms.is_missing(group) else str(group) for group in groups]
        if len(self.groups) != count:
            raise PackError(f"groups must be a column of a table or {count:,} values, got {len(self.groups)}")
        self.looked = sorted({i * count // SEEN for i in range(SEEN)})
        self.listed = all(isinstance(part, list | Table) for _, part, _ in parts)
        self.text = ""
        if options.text:  # predictions find it by name
            self.text = f"{getattr(options.text, '__module__', '')}:{getattr(options.text, '__qualname__', '<none>')}"
            if "<" in self.text or "." in self.text.partition(":")[2]:
                raise PackError(f"text must be a module-level function, kept by its name, got {options.text!r}")
        first: dict[Any, Any] = {}  # where none can be read, `look` says it
        for k, place in (self.places[i] for i in self.looked):
            with suppress(Exception):
                if not first or any(map(forms.is_missing, first.values())):
                    first = parts_of(parts[k][1][place])
        size = sum(getattr(value, "nbytes", 0) for value in first.values())
        self.looked = self.looked[:: 1 + min(size * len(self.looked) // LOOKED, SEEN // LEAST - 1)]
        self.target = target_of(first, *options.key)
        points: Any = [options.points] if isinstance(options.points, str | int) else options.points or ()
        self.marked = [TARGET if name in ("target", options.target, self.target) else name for name in points]
        self.classes = [classes_of(part, self.target) for _, part, _ in parts]
        with suppress(PackError):
            first = name_columns(first, self.target, options.key[1])
        self.pictures = {name for name, value in first.items() if is_image(value) or isinstance(value, Path | bytes)}
        label = forms.bare(first.get(TARGET))
        whole = options.classes is not False and (isinstance(label, str | int) or is_names(label))
        self.resize = [*options.size, options.resize or ("crop" if whole else "squash")] if options.size else None
        self.marks: list[bytes] = []
        self.columns = self.look()
        self.stored = [name for name in self.columns if options.store or (self.listed and name == TARGET)]

    @cached_property
    def index(self) -> dict[str, int]:
        return {str(Path(name)): i for i, name in enumerate(self.names)}  # as RawFiles asks

    def values(self, i: int, columns: Collection[str] | None = None) -> dict[str, Any]:
        """Return column → plain value of an item, or of these alone; the name of a class where its part has names."""
        k, place = self.places[i]
        try:
            parts = name_columns(parts_of(self.parts[k][1][place]), self.target, self.options.key[1])
            parts = {name: part for name, part in parts.items() if columns is None or name in columns}
            values = forms.plain_values(parts, self.resize, self.text, self.marked)
        except Exception as error:  # whatever a Dataset, Pillow or the function of texts may raise
            cuda = isinstance(error, RuntimeError) and "CUDA" in str(error)  # torch's, which is not of this item alone
            if isinstance(error, NbtoolsError) or disk.is_away(error) or cuda:
                raise
            raise PackError(f"{type(error).__name__}: {error}", "the Dataset must return each item", FIX) from error
        if isinstance(label := values.get(TARGET), int) and self.classes[k] and self.options.classes is not False:
            values[TARGET] = forms.class_text(label, self.classes[k])
        return values

    def sample(self, i: int, columns: Collection[str]) -> dict[str, Any]:
        """Return the arrays of an item; its class as a text. Raises PackError(value, rule, fix)."""
        values = self.values(i, None if {*columns} == self.columns.keys() else columns) if columns else {}
        if values.keys() != {*columns}:
            raise PackError(", ".join(values), f"an item must have {', '.join(columns)}, like the others", FIX)
        kinds = dict.fromkeys(columns, "values") | {TARGET: self.kind}
        return {n: forms.fit(n, values[n], self.columns[n], kinds[n], self.allowed) for n in columns}

    def together(self, ids: Sequence[int], columns: Collection[str]) -> dict[str, Any] | None:
        """Return the arrays of several items, and their classes as texts, as `sample` does of each; None where they are
        not held as columns, are of several parts, or one of them is refused: one by one they tell why."""
        (k, *others), places = zip(*(self.places[i] for i in ids), strict=True)
        try:
            if {*others} - {k}:
                return None
            parts = name_columns(take(self.parts[k][1], [*places]), self.target, self.options.key[1])
            if len(columns) == len(self.columns) < len(parts) or not all(is_plain(parts[name]) for name in columns):
                return None
            return {name: self.fit_all(name, parts[name], ids) for name in columns}
        except Exception:
            return None

    def fit_all(self, name: str, values: Any, ids: Sequence[int]) -> Any:
        """Return the array of a column's values of several items, or the texts of their classes. Raises PackError."""
        column, kind = self.columns[name], self.kind if name == TARGET else "values"
        if name == TARGET and hasattr(values, "shape") and math.prod(values.shape) == len(ids):
            values = values.reshape(len(ids))
        if kind == "classes":
            labels = values if isinstance(values, list) else values.tolist()
            first = dict(zip(reversed(labels), reversed(ids), strict=True))
            texts = {label: self.sample(i, [TARGET])[TARGET] for label, i in first.items()}
            return [texts[label] for label in labels]
        array = forms.numeric(name, values)
        return forms.fit(name, array, replace(column, shape=(len(ids), *column.shape)), kind)

    def read_again(self, classes: Sequence[str], path: Path, _: Any) -> Sample:
        """Return the arrays of the item of a name, as a pack with these classes has them."""
        try:
            sample = self.sample(self.index[str(path)], self.columns)
        except PackError as error:  # where nothing is stored, an item is read here for the first time
            raise PackError(f"{path}: {error}") from None
        return sample | ({TARGET: np.asarray(classes.index(sample[TARGET]))} if self.kind == "classes" else {})

    def look(self) -> dict[str, Column]:
        """Return the columns of some items; note their hashes, the target's kind and its classes. Raises PackError."""
        seen, options = dict[str, list[Any]](), self.options
        for i in self.looked:
            values = {}
            try:
                values = self.values(i)
                for name, value in values.items():
                    seen.setdefault(name, []).extend([] if forms.is_missing(value) else [value])
            except PackError as error:
                if len(error.args) != 3 or (i == self.looked[-1] and not seen):
                    raise PackError(f"{self.names[i]}: {error}") from None
            self.marks.append(mark(values))
        classes = [*dict.fromkeys(chain(*self.classes))] if options.classes is None else options.classes
        if not classes and any(isinstance(value, list) for value in seen.get(TARGET, ())):
            raise PackError("items have several labels each; list all of them: classes=[…]")
        lists = [x for x in seen.get(TARGET, ()) if isinstance(x, np.ndarray) and x.ndim == 1 and x.dtype.kind in "iu"]
        if options.classes and any(len(numbers) != len(classes) for numbers in lists):
            raise PackError("labels must not be lists of numbers; return names, or arrays of 0 and 1, one per class")
        if options.size and not self.pictures - {TARGET}:
            raise PackError("size resizes PIL images, and the items hold none; resize in the Dataset instead")
        if lost := [name for name, values in seen.items() if not values and name not in options.like]:
            raise PackError(f"{lost[0]} is missing in all {len(self.looked)} items looked at; leave it out or fill it")
        like = {name: column for name, column in options.like.items() if seen.pop(name, None)}
        made = {n: forms.common_column(n, v, classes, n in self.pictures) for n, v in seen.items() if v}
        common = like | {name: column for name, (_, column) in made.items()}
        self.kind = made[TARGET][0] if TARGET in made else "values" if TARGET in like else "none"
        self.allowed = [*(classes or ())]
        images = self.images = [name for name, column in common.items() if column.layout and name != TARGET]
        there = ", ".join(f"{name} {column}" for name, column in common.items())
        if (options.mean or options.std) and not images:
            raise PackError(f"mean and std are for images of 1, 3 or 4 channels, and the inputs hold none: {there}")
        for name in images if options.mean or options.std else ():
            if common[name].layout == "hw" and len(options.mean or ()) == 3:  # greys, for a pretrained network
                common[name] = Column("fixed", "|u1", (*common[name].shape, 3), "hwc")
            count = {"hwc": common[name].shape[-1], "chw": common[name].shape[0]}.get(common[name].layout, 1)
            above = common[name].dtype == "|u1" and max([*(options.mean or ()), *(options.std or ())]) > 1
            odd = not all(0 < std < math.inf for std in options.std or ())
            if above or odd or {len(options.mean or ()), len(options.std or ())} != {count}:
                rule = f"mean and std must have {count} numbers, one per channel of {name}, std > 0, of bytes in 0…1"
                raise PackError(f"{rule}, got {options.mean} and {options.std}; columns: {there}")
        for name in self.marked:
            if len(images) != 1 or name not in common or (0, *common[name].shape)[-1] not in POINTS:
                rule = "points must name columns (…, 2) of x, y or (…, 4) of x1, y1, x2, y2 beside one image"
                raise PackError(f"{rule}, got {name!r} of {there}")
        return common

    def card_options(self) -> dict[str, Any]:
        options = {
            "inputs": [name for name in self.columns if name != TARGET],
            "kind": self.kind,
            "roles": {"key": self.target, **{name: getattr(self.options, name) for name in ROLES}},
            "resize": self.resize,
            "points": {name: [*self.images, POINTS[self.columns[name].shape[-1]]] for name in self.marked},
            "text": self.text,
            "columns": self.options.columns,
            **({} if self.options.store else {"stored": False}),
        }
        return json.loads(json.dumps(options, default=str))

    def key(self, draw: Any) -> str:
        made = [FORMAT, VERSION, self.card_options(), vars(self.options) | {"text": None}, self.groups, draw]
        digest, seen = hashlib.blake2b(json.dumps(made, default=str).encode(), digest_size=8), set[int]()
        for split, part, _ in self.parts:
            digest.update(repr((split, type(part).__qualname__, len(part), self.columns)).encode())
            inside = [part]
            while inside:  # what Datasets say of all their items, also those below Subsets; of data in memory all
                if (one := inside.pop()) is None or id(one) in seen:
                    continue
                seen.add(id(one))
                held = {name: getattr(one, name, "") for name in HELD[: 4 if self.options.store else 3]}
                held = {n: x for n, x in held.items() if isinstance(x, FLAT) and np.ndim(x[:1]) < 2}
                whole = dict(enumerate(one.tensors if isinstance(one, TensorDataset) else [one]))
                whole = one.columns if isinstance(one, Table) else whole
                digest.update(mark(held | {n: x for n, x in whole.items() if isinstance(x, FLAT[1:])}))
                inside += [getattr(one, "dataset", None), *(one.datasets if isinstance(one, ConcatDataset) else ())]
        digest.update(b"" if self.varying else b"".join(self.marks))
        return digest.hexdigest()

    @cached_property
    def varying(self) -> str:
        """Return the name of the first item looked at that differs when it is read again; a flip does half the time."""
        read = [] if self.listed else [(i, m) for i, m in zip(self.looked, self.marks, strict=True) if m != mark({})]
        return next((self.names[i] for i, before in read if mark(self.values(i)) != before), "")

    def survey(self) -> tuple[Survey, Sampler]:
        """Return what `make_pack` needs. Raises PackError where stored items would differ at each reading."""
        store, columns = self.options.store, self.columns
        if store and self.varying:
            rule = "differs each time it is read: the Dataset augments at random, and a pack keeps one reading"
            fix = "Augment on the device instead, nb.classify(net, augment=(…)), or pass store=False"
            fix += ": each epoch then reads the Dataset itself, and val= must be one without random transforms"
            raise PackError(f"{self.varying} {rule}. {fix}")
        classes = self.allowed if self.kind in ("classes", "labels") else []
        if self.kind == "classes" and not classes and TARGET not in self.stored:
            raise PackError("store=False does not read the items before training; name the classes: classes=[…]")
        splits = [self.parts[k][0] for k, _ in self.places]
        ragged = [name for name, column in columns.items() if column.kind == "ragged"]
        ready = [self.together([i], self.stored) is not None for i in self.looked]
        whole = not {*ragged} & {*self.stored} and sum(ready) > 0.9 * len(ready)  # else by all cores, one by one
        size = sum(np.dtype(each.dtype).itemsize * math.prod(each.shape) for each in columns.values())
        return Survey(
            [*map(Entry, self.names, splits, [None] * len(self.names), self.groups)],
            classes,
            self.card_options(),
            ragged=[name for name in ragged if name in self.stored],
            bucket_by=next(iter(ragged), None),
            exact=True,
            named=TARGET if self.kind == "classes" and self.stored else None,
            learn=self.learn,
            columns=columns,
            block=min(max(BLOCK // max(size, 1), 1), MOST_ROWS if whole else MOST),
            together=partial(self.together, columns=self.stored) if whole else None,
            varying=bool(self.varying),
        ), partial(self.sample, columns=self.stored)

    def learn(self, pack: Pack, train: np.ndarray) -> tuple[dict[str, Any], list[str]]:
        """Return mean and std of what is normalised: as given, of the training split, or of the items looked at."""
        learned, read = dict[str, Any](mean={}, std={}), list[dict[str, Any]]()
        for i in () if self.options.store else self.looked:
            with suppress(PackError):
                read.append(self.sample(i, self.columns))
        for name, column in self.columns.items():
            if not (self.kind == "values" if name == TARGET else column.dtype == "<f4" or column.layout):
                continue
            if name in pack.arrays:
                array, rows = pack.arrays[name], np.isin(np.arange(len(pack)), train)
                rows = np.repeat(rows, np.diff(pack.offsets[name])) if name in pack.offsets else rows
            else:
                array = (np.concatenate if column.kind == "ragged" else np.stack)([sample[name] for sample in read])
                rows = np.ones(len(array), bool)
            given = (self.options.mean, self.options.std) if name in self.images and self.options.mean else None
            moments = given or forms.moments_of(column, array, rows, name == TARGET)
            learned["mean"][name], learned["std"][name] = (np.array(each, float).tolist() for each in moments)
            if name == TARGET and column.layout:
                learned["binary"] = bool(array.max() < 2)  # bytes of a mask, which no 255 divides
        return learned, []


def classes_of(data: Any, target: Any) -> list[str]:
    """Return the names that a Dataset has for classes given as numbers: a ClassLabel's, or `.classes` as in
    torchvision, without a target_transform, also below a Subset; of several labels in a list all that occur."""
    if isinstance(data, list | Table):
        labels: Any = data.columns.get(target, ()) if isinstance(data, Table) else ()
        if isinstance(data, list):
            labels = [parts_of(item).get(target) for item in data if item is not None]
        several = [[label] if isinstance(label, str) else label for label in labels] * any(map(is_names, labels))
        every = sorted({forms.compose(name) for names in several if is_names(names) for name in names})
        return sorted(every, key=int if all(map(str.isdecimal, every)) else str)  # as of one label
    while isinstance(data, Subset):
        data = data.dataset
    if isinstance(data, ConcatDataset):
        every = [classes_of(one, target) for one in data.datasets]
        if every.count(every[0]) < len(every):
            raise PackError(f"Datasets joined must have the same classes, got {every!s:.99}; return names as labels")
        return every[0]
    features = getattr(data, "features", None)
    names = getattr(features.get(target), "names", None) if isinstance(features, Mapping) else None
    names = names or (getattr(data, "classes", None) if getattr(data, "target_transform", None) is None else None)
    return [*map(forms.compose, names)] if isinstance(names, list | tuple) and is_names(names) else []


def mark(values: Mapping[Any, Any]) -> bytes:
    """Return a hash of what an item holds, of a file its size and time."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in values.items():
        kind = getattr(getattr(value, "dtype", None), "kind", "")  # of NumPy's and pandas'
        value = value.tolist() if kind in ("O", "T") else value
        if isinstance(value, Path):
            stat = value.stat() if value.exists() else None
            value = str(value), stat and (stat.st_size, stat.st_mtime_ns)
        elif hasattr(value, "shape") or is_image(value):
            array = np.asarray(forms.on_host(value))
            value, array = (array.dtype, array.shape), np.atleast_1d(array)
            for part in np.array_split(array, 1 + min(array.nbytes // BLOCK, len(array))) if array.size else ():
                digest.update(np.ascontiguousarray(part).reshape(-1).view("u1").data)  # a copy of that part at most
        elif isinstance(value, list) and not all(isinstance(each, str | int | float | None) for each in value):
            value = [each if each is None else mark(parts_of(each)) for each in value]
        elif not isinstance(value, str | bytes | int | float | list | tuple | None):
            value = sorted(value) if isinstance(value, set) else type(value).__name__
        digest.update(re.sub(" at 0x[0-9a-f]+", "", repr((name, value))).encode())  # which differs each time
    return digest.digest()
