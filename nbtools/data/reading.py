"""The items of the data, read as a pack keeps them: when packing, by workers in training, and when predicting."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import math
import sys
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from nbtools import disk
from nbtools.data.build import Entry, Problem, Survey, fingerprint, why
from nbtools.data.folders import Images
from nbtools.data.forms import Sign, forms_in, forms_of, moments, points_of
from nbtools.data.images import is_image, moved, place_of, upright
from nbtools.data.items import (
    TARGET,
    bare,
    class_text,
    composed,
    flattened,
    function_name,
    is_missing,
    named,
    numeric,
    parts_of,
    resolve,
    target_of,
)
from nbtools.data.pack import FORMAT, Card, Sample
from nbtools.data.parallel import SHORT, by_workers, cores
from nbtools.data.table import Table, features
from nbtools.errors import NbtoolsError, PackError

VERSION = 3  # of what a card keeps of them; packs of another are made anew
SEEN = 64  # items looked at
CHEAP = 2e-4  # seconds: an item that costs less is read faster here than it travels between processes
TOGETHER, LOAD = 16, 4e6  # items and bytes that travel at once
OWN = (Images, Table)  # whose items are columns


class Items(Dataset):
    """The items of all parts, (split, Dataset) each, one after another: `self[i]` is a sample, or its row of the table
    of bad samples. 64 of them, spread over the data, show what all have in common.

    asked: the options of `pack`; text: its functions; like: the card of another pack. target: the key of that part of
    an item; forms: of columns; texts: column → its function; points: column → [its image's, "points" or "boxes"].
    """

    def __init__(self, parts: list[tuple[str | None, Any]], asked: Mapping[str, Any], text: Any, like: Card | None):
        self.parts, self.asked = parts, asked
        self.ends = [*itertools.accumulate(len(part) for _, part in parts)]
        kinds = [str(part.root) if isinstance(part, Images) else type(part).__name__ for _, part in parts]
        self.source, self.target, self.texts = " + ".join(dict.fromkeys(kinds)), TARGET, {}
        self.groups: list[str] | None = None
        if not len(self):
            raise PackError(f"{self.source} has no items; a pack needs at least one")
        self.looked = sorted({i * len(self) // SEEN for i in range(SEEN)})
        self.assign_roles(text)
        self.class_names = [names_of(part, self.target) for _, part in parts]
        self.look()
        if like is not None:
            self.forms, self.points = forms_in(like.options, like.classes), like.options["points"]
        else:
            self.assign_forms()

    def __len__(self) -> int:
        return self.ends[-1]

    @cached_property
    def names(self) -> list[str]:
        names: list[str] = []
        for split, part in self.parts:
            kind = f"{split}/" * bool(split) + ("row" if isinstance(part, Table) else "item")
            names += part.names if isinstance(part, Images) else [f"{kind} {i}" for i in range(len(part))]
        return names

    # -- one item

    def place(self, i: int) -> tuple[Any, int]:
        """Return the part that an item is in, and its place there."""
        k = bisect.bisect_right(self.ends, i)
        return self.parts[k][1], i - (self.ends[k - 1] if k else 0)

    def values(self, i: int) -> dict[str, Any]:
        """Return column → value of an item, whatever it is. Raises PackError(value, rule, fix) where there is none."""
        part, place = self.place(i)
        try:
            item = part[place]
            values = item if isinstance(part, OWN) else named(parts_of(item), self.target, self.asked["inputs"])
            values = {name: decoded(value, self.texts.get(name)) for name, value in values.items()}
        except NbtoolsError:
            raise
        except Exception as error:  # whatever a Dataset, Pillow or the function of texts may raise
            if disk.is_away(error):
                raise
            came = f"{type(error).__name__}: {error}"
            raise PackError(came, "the Dataset must return each item", "correct it, or leave it out") from error
        return values | ({TARGET: self.class_of(i, values[TARGET])} if TARGET in values else {})

    def class_of(self, i: int, value: Any) -> Any:
        """Return several classes as a list, and a number of a Dataset that has names for them as its name."""
        if self.asked["sep"] and isinstance(value, str):
            return [one.strip() for one in value.split(self.asked["sep"]) if one.strip()]
        names = self.class_names[bisect.bisect_right(self.ends, i)] if self.asked["classes"] is not False else []
        return class_text(value, names) if names and isinstance(bare(value), int) else value

    def sample(self, i: int) -> dict[str, Any]:
        """Return the arrays of an item; its class as a text. Raises PackError(value, rule, fix)."""
        values = self.values(i)
        if values.keys() != self.forms.keys():
            rule = f"an item must have {', '.join(self.forms)}, like the others"
            raise PackError(", ".join(values), rule, "make it match, or leave it out")
        sample = {name: form.fit(name, values[name]) for name, form in self.forms.items()}
        for name, (image, _) in self.points.items():
            form, picture = self.forms[image], values[image]
            if form.resize and is_image(picture):
                sample[name] = moved(sample[name], place_of((picture.height, picture.width), form.size, form.resize))
        return sample

    def label(self, i: int) -> dict[str, Any]:
        """Return the target alone, of a folder or a table without its image; nothing of other Datasets."""
        part, place = self.place(i)
        return {TARGET: self.forms[TARGET].fit(TARGET, self.class_of(i, part.label(place)))} if self.labelled else {}

    def __getitem__(self, i: int) -> dict[str, Any] | Problem:
        try:
            return self.sample(i) if self.asked["store"] else self.label(i)
        except PackError as error:
            if len(error.args) != 3:  # of all items
                raise PackError(f"{self.names[i]}: {error}") from None
            return self.names[i], *why(error)

    # -- what all have in common

    def assign_roles(self, text: Any) -> None:
        """Decide by the first item that can be read which of its parts are what."""
        first, own = {}, isinstance(self.parts[0][1], OWN)
        for i in self.looked:
            with suppress(Exception):  # `look` says it where none can be read
                part, place = self.place(i)
                first = part[place] if own else parts_of(part[place])
                break
        if not own:
            self.target = target_of(first, self.asked["target"], self.asked["inputs"])
            with suppress(PackError):
                first = named(first, self.target, self.asked["inputs"])
        if text is not None and not isinstance(text, Mapping):
            text = {name: text for name, value in first.items() if isinstance(value, str) and name != TARGET}
        self.texts = {name: function_name(function) for name, function in (text or {}).items()}

    def look(self) -> None:
        """Note of some items what identifies them, their forms, and what one costs in seconds."""
        self.marks, self.signs, times = [], [], []
        for i in self.looked:
            start, values = time.perf_counter(), {}
            try:
                values = self.values(i)
                times.append(time.perf_counter() - start)
                there = {name: value for name, value in values.items() if name != TARGET or not is_missing(bare(value))}
                self.signs.append({name: Sign.of(name, value) for name, value in there.items()})
            except PackError as error:
                if len(error.args) != 3 or (i == self.looked[-1] and not self.signs):
                    all_of_them = "" if self.signs else f"none of the {len(self.looked)} items read can be used, as "
                    raise PackError(f"{all_of_them}{self.names[i]}: {spoken(error)}") from None
            self.marks.append(mark(values.items()))
        self.cost = float(np.median(times))

    def assign_forms(self) -> None:
        asked, kinds = self.asked, {signs[TARGET].kind for signs in self.signs if TARGET in signs}
        classes = asked["classes"]
        if classes is None and "names" in kinds:
            classes = self.label_names()
        elif classes is None:
            classes = [*dict.fromkeys(itertools.chain.from_iterable(self.class_names))]
        whole = classes is not False and kinds and kinds <= {"text", "whole", "names"} and not asked["points"]
        forms = forms_of(self.signs, classes, asked["size"], asked["resize"] or ("crop" if whole else "squash"))
        self.forms, self.points = points_of(forms, asked["points"])
        if asked["size"] and not any(form.resize for form in forms.values()):
            raise PackError("size resizes PIL images, and the items hold none; resize in the Dataset instead")
        for name, form in self.forms.items():
            counts = {len(asked["mean"]), len(asked["std"])} if asked["mean"] else {form.channels}
            if form.layout and name != TARGET and counts != {form.channels}:
                raise PackError(
                    f"mean and std must have {form.channels} numbers, one per channel of {name} {form.column}"
                )

    def label_names(self) -> list[str]:
        """Return the names of several labels: of a table its columns, or those that occur, sorted."""
        tables = [part for _, part in self.parts if isinstance(part, Table)]
        if not tables:
            raise PackError("items have several labels each; name all that there are: classes=[…]")
        if len(tables[0].goals) > 1:
            return [*tables[0].goals]
        values = (self.class_of(0, value) for part in tables for value in part.y or () if not is_missing(value))
        return sorted({composed(name) for value in values for name in value})

    @property
    def kind(self) -> str:
        """Return what the targets are."""
        form = self.forms.get(TARGET)
        return "none" if form is None else {"class": "classes", "labels": "labels"}.get(form.kind, "values")

    @property
    def labelled(self) -> bool:
        return TARGET in self.forms and all(isinstance(part, OWN) for _, part in self.parts)

    @property
    def options(self) -> dict[str, Any]:
        """Return what the card keeps, as JSON does."""
        given = {name: self.asked[name] for name in ("target", "inputs", "image", "sep", "points")}
        encoding = next((part.encoding for _, part in self.parts if isinstance(part, Table)), {})
        parts = () if TARGET in self.forms or self.target is None else f"{TARGET}_"  # a target of several values
        inputs = [name for name in self.forms if name != TARGET and not name.startswith(parts)]
        options = {
            "inputs": inputs,
            "kind": self.kind,
            "roles": {"target": self.target, "inputs": self.asked["inputs"], "given": given},
            "forms": {name: form.to_dict() for name, form in self.forms.items()},
            "points": self.points,
            "text": self.texts,
            "random": self.asked["random"],
            "features": [*itertools.chain.from_iterable(features(name, how) for name, how in encoding.items())],
            "encoding": encoding,
            **({} if self.asked["store"] else {"stored": False}),
        }
        return json.loads(json.dumps(options, default=str))

    def key(self, more: Mapping[str, Any]) -> str:
        """Return the identity of the data and of what is made of them; random items count with their form only."""
        text = json.dumps([FORMAT, VERSION, self.options, self.asked, self.groups, more], default=str)
        digest = hashlib.blake2b(text.encode(), digest_size=8)
        for split, part in self.parts:
            digest.update(repr((split, type(part).__qualname__, len(part))).encode())
            digest.update(b"" if self.asked["random"] else content(part))
        digest.update(repr(self.signs).encode() if self.asked["random"] else b"".join(self.marks))
        return digest.hexdigest()

    def survey(self) -> Survey:
        """Return what `make_pack` needs. Raises PackError where items differ at each reading, unless that was said."""
        for i, before in zip(self.looked, self.marks, strict=True):
            if not self.asked["random"] and before != mark(()) != mark(self.values(i).items()) != before:
                rule = "differs each time it is read: the Dataset augments at random, and a pack keeps one reading"
                fix = "Augment on the device instead, nb.classify(net, augment=(…)), or pass random=True"
                raise PackError(f'{self.names[i]} {rule}. {fix}: feed="workers" then trains on the Dataset itself')
        store, forms, kind = self.asked["store"], self.forms, self.kind
        here = forms if store else {TARGET: forms[TARGET]} if self.labelled else {}
        classes = [*forms[TARGET].names] if kind in ("classes", "labels") else []
        if kind == "classes" and not classes and not here:
            raise PackError("store=False reads no item before training; name the classes: classes=[…]")
        splits = [split for split, part in self.parts for _ in range(len(part))]
        groups = self.groups or [None] * len(self)
        ragged = [name for name, form in forms.items() if form.ragged]
        return Survey(
            [Entry(name, split, None, group) for name, split, group in zip(self.names, splits, groups, strict=True)],
            classes,
            self.options,
            ragged=[name for name in ragged if name in here],
            bucket_by=next(iter(ragged), None),
            bad=[row for _, part in self.parts if isinstance(part, Images) for row in part.bad],
            by_content=store,
            stratified=kind == "classes",
            named=TARGET if kind == "classes" and here else None,
            learn=self.learn,
            elsewhere={name: form.column for name, form in forms.items() if name not in here},
        )

    def learn(self, arrays: Mapping[str, np.ndarray], train: np.ndarray) -> dict[str, Any]:
        """Return mean and std of columns: of images as given, else those of the training split."""
        learned = moments(self.forms, arrays, train)
        for moment, unknown in (("mean", 0.0), ("std", 1.0)):
            if self.kind == "values":
                learned[moment].setdefault(TARGET, [unknown])
            images = [name for name, form in self.forms.items() if form.layout and name != TARGET]
            learned[moment] |= {name: [*map(float, self.asked[moment])] for name in images if self.asked[moment]}
        return learned


def spoken(error: PackError) -> str:
    """Return a reason for a row of the table of bad samples as a sentence."""
    if len(error.args) != 3:
        return str(error)
    value, rule, fix = error.args
    return f"{rule}, got {value}; {fix}"


def names_of(data: Any, target: Any) -> list[str]:
    """Return the names that a Dataset has for classes given as numbers: a ClassLabel's, or `.classes` as in
    torchvision, also below a Subset, which leaves labels as they are."""
    while isinstance(data, Subset):
        data = data.dataset
    features = getattr(data, "features", None)
    names = getattr(features.get(target), "names", None) if isinstance(features, Mapping) else None
    names = names or getattr(data, "classes", None)
    return [*map(composed, names)] if isinstance(names, list | tuple) and {*map(type, names)} == {str} else []


def decoded(value: Any, function: str | None) -> Any:
    """Return an image upright, and of a text what a function makes of it."""
    if is_image(value):
        value.load()  # Pillow decodes no earlier
        return upright(value)
    return resolve(function)(value) if function and isinstance(value, str) else value


def content(part: Any) -> bytes:
    """Return what identifies all that a part holds, of files their size and time; b"" where that is not known."""
    if isinstance(part, Images | Table):
        return (part.content() if isinstance(part, Table) else fingerprint("images", part.root, {})).encode()
    if isinstance(part, TensorDataset):
        return mark(enumerate(part.tensors))
    if isinstance(part, list | np.ndarray | torch.Tensor):
        return b"".join(mark(flattened(() if item is None else parts_of(item), "")) for item in part)
    return str(getattr(part, "_fingerprint", "")).encode()  # of a Hugging Face Dataset


def mark(values: Iterable[tuple[Any, Any]]) -> bytes:
    """Return a hash of what an item holds."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in values:
        try:
            array = np.asarray(value) if is_image(value) else numeric("", value)
            digest.update(repr((name, array.dtype, array.shape)).encode())
            digest.update(np.ascontiguousarray(array).data)
        except PackError:
            shown = value if isinstance(value := bare(value), str | bytes | int | list) else type(value).__name__
            digest.update(repr((name, shown)).encode())
    return digest.digest()


def read_all(items: Items, places: Sequence[int]) -> Generator[dict[str, Any] | Problem, None, None]:
    """Yield samples and rows of the table of bad samples, in order; read by forked processes where that pays."""
    costly = items.asked["store"] and items.cost > CHEAP and items.cost * len(places) > SHORT
    if costly and cores() > 1 and sys.platform == "linux":
        columns = [form.column for form in items.forms.values()]
        size = sum(np.dtype(column.dtype).itemsize * math.prod(column.shape) for column in columns)
        yield from by_workers(items.__getitem__, places, max(1, min(TOGETHER, int(LOAD / size))))
    else:
        yield from map(items.__getitem__, places)


class RawItems(Dataset):
    """The Dataset that a pack was made of, read at each access. Item i has the arrays of the pack's sample i."""

    def __init__(self, items: Items, names: Sequence[str], classes: Sequence[str]):
        self.items, self.classes = items, {name: i for i, name in enumerate(classes)}
        index = {name: i for i, name in enumerate(items.names)}
        self.places = range(len(items)) if len(names) == len(items) else [index[name] for name in names]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: int) -> Sample:
        try:
            sample = self.items.sample(self.places[i])
        except PackError as error:  # where nothing is stored, an item is read here for the first time
            raise PackError(f"{self.items.names[self.places[i]]}: {spoken(error)}") from None
        if self.items.kind == "classes":
            sample[TARGET] = np.asarray(self.classes[sample[TARGET]])
        return {**sample, "id": np.asarray(i, np.int64)}
