"""The items of the data, read as a pack keeps them: when packing, and by workers in training."""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from nbtools import disk
from nbtools.data.build import Entry, Problem, Survey, why
from nbtools.data.folders import Images
from nbtools.data.forms import Form, blocks_of, common_form, forms_in, images_in, moments_of, points_of
from nbtools.data.images import RESIZES, is_image, moved
from nbtools.data.items import (
    TARGET,
    bare,
    class_text,
    composed,
    decoded,
    function_name,
    is_missing,
    named,
    numeric,
    parts_of,
    resolve,
    target_of,
)
from nbtools.data.pack import FORMAT, Card, Pack, Sample
from nbtools.data.parallel import SHORT, by_workers, cores
from nbtools.data.table import Table
from nbtools.errors import NbtoolsError, PackError

VERSION = 4  # of what a card keeps of them; packs of another are made anew
SEEN = 64  # items looked at
CHEAP = 2e-4  # seconds: an item that costs less is read faster here than it travels between processes
OWN = (Images, Table)  # Datasets whose items are columns, and which have the targets of all
KINDS = {"class": "classes", "labels": "labels"}  # of the target's form → of the pack, else values


@dataclass(frozen=True)
class Options:
    """The options of `nb.pack` that say how an item is read. size: (H, W)."""

    target: Any
    inputs: Any
    image: str | None
    sep: str | None
    classes: Any
    size: Any
    resize: str | None
    mean: Any
    std: Any
    points: Any
    text: Any
    store: bool

    def __post_init__(self) -> None:
        size = [self.size, self.size] if isinstance(self.size, int) else self.size
        if size is not None and (not isinstance(size, list | tuple) or len(size) != 2 or min(size) < 1):
            raise PackError(f"size must be one number of pixels or (height, width), got {size!r}")
        if self.resize is not None and (self.resize not in RESIZES or size is None):
            raise PackError(
                f"resize must be one of {', '.join(RESIZES)}, with a size=, got {self.resize!r}, size={size}"
            )
        object.__setattr__(self, "size", size)

    def alike(self, card: Card) -> Self:
        """Return the options of a pack like that of a card."""
        own = (self.classes, self.size, self.resize, self.mean, self.std, self.text)
        if any(value is not None for value in own) or not self.store:
            raise PackError("a pack like another takes its classes, size, mean, std and text; leave these out")
        given = {name: value for name, value in card.options["roles"].items() if getattr(self, name, 0) is None}
        text = card.options["text"]
        return dataclasses.replace(self, **given, text=resolve(text) if text else None)


class Items(Dataset):
    """The items of all parts, (split, Dataset) each, one after another: `self[i]` is a sample, or its row of the table
    of bad samples. 64 of them, spread over the data, show what all have in common.

    target: the key of that part of an item; text: the function of texts by name; forms: of columns; points: column →
    [its image's, "points" or "boxes"]; groups: of each item.
    """

    def __init__(self, parts: list[tuple[str | None, Any]], options: Options, like: Card | None, groups: Any):
        self.parts, self.options, self.own = parts, options, all(isinstance(part, OWN) for _, part in parts)
        self.ends = ConcatDataset.cumsum([part for _, part in parts])
        self.source = " + ".join(dict.fromkeys(str(getattr(part, "root", type(part).__name__)) for _, part in parts))
        if not len(self):
            raise PackError(f"{self.source} has no items; a pack needs at least one")
        self.names = [name for split, part in parts for name in names_of(split, part)]
        self.groups = groups_of(groups, parts, self.names)
        self.looked = sorted({i * len(self) // SEEN for i in range(SEEN)})
        self.text = function_name(options.text) if options.text else ""
        self.target = TARGET if self.own else target_of(self.first(), options.target, options.inputs)
        self.classes = [classes_of(part, self.target) for _, part in parts]
        self.marks, seen = self.look()
        if like is None:
            self.forms, self.points = self.common(seen)
        else:
            self.forms, self.points = forms_in(like.options, like.classes), like.options["points"]
        self.kind = KINDS.get(self.forms[TARGET].kind, "values") if TARGET in self.forms else "none"

    def __len__(self) -> int:
        return self.ends[-1]

    # -- one item

    def place(self, i: int) -> tuple[int, Any, int]:
        """Return which part an item is in, the part, and its place there."""
        k = bisect.bisect_right(self.ends, i)
        return k, self.parts[k][1], i - (self.ends[k - 1] if k else 0)

    def values(self, i: int) -> dict[str, Any]:
        """Return column → value of an item, whatever it is. Raises PackError(value, rule, fix) where there is none."""
        k, part, place = self.place(i)
        try:
            item = part[place]
            values = item if self.own else named(parts_of(item), self.target, self.options.inputs)
            values = {name: decoded(value, self.text * (name != TARGET)) for name, value in values.items()}
        except NbtoolsError:
            raise
        except Exception as error:  # whatever a Dataset, Pillow or the function of texts may raise
            if disk.is_away(error):
                raise
            came = f"{type(error).__name__}: {error}"
            raise PackError(came, "the Dataset must return each item", "correct it, or leave it out") from error
        return values | ({TARGET: self.class_of(k, values[TARGET])} if TARGET in values else {})

    def class_of(self, k: int, value: Any) -> Any:
        """Return a number of a part that has names for them as its name."""
        names = self.classes[k] if self.options.classes is not False else []
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
                sample[name] = moved(sample[name], (picture.height, picture.width), form.size, form.resize)
        return sample

    def target_at(self, i: int) -> dict[str, Any]:
        """Return the target alone, where it is there without its image."""
        k, part, place = self.place(i)
        given = self.own and TARGET in self.forms
        return {TARGET: self.forms[TARGET].fit(TARGET, self.class_of(k, part.targets[place]))} if given else {}

    def __getitem__(self, i: int) -> dict[str, Any] | Problem:
        try:
            return self.sample(i) if self.options.store else self.target_at(i)
        except PackError as error:
            if len(error.args) != 3:  # of all items
                raise PackError(f"{self.names[i]}: {error}") from None
            return self.names[i], *why(error)

    # -- what all have in common

    def first(self) -> dict[Any, Any]:
        """Return the parts of the first item that can be read; `look` says it where there is none."""
        for _, part, place in map(self.place, self.looked):
            with suppress(Exception):
                return parts_of(part[place])
        return {}

    def look(self) -> tuple[list[bytes], dict[str, list[Form]]]:
        """Return what identifies each of some items, and the forms in each column."""
        marks: list[bytes] = []
        seen: dict[str, list[Form]] = {}
        for i in self.looked:
            values = {}
            try:
                values = self.values(i)
                forms = {name: Form.of_value(name, value) for name, value in values.items() if not is_missing(value)}
                for name, form in forms.items():
                    seen.setdefault(name, []).append(form)
            except PackError as error:
                if len(error.args) != 3 or (i == self.looked[-1] and not seen):
                    raise PackError(f"{self.names[i]}: {sentence(error)}") from None
            marks.append(mark(values))
        return marks, seen

    def common(self, seen: dict[str, list[Form]]) -> tuple[dict[str, Form], dict[str, list[str]]]:
        """Return the forms of columns and the points, by the options. Raises PackError where these do not fit."""
        options, kinds = self.options, {form.kind for form in seen.get(TARGET, ())}
        classes = options.classes
        if classes is None:
            classes = [*dict.fromkeys(name for names in self.classes for name in names)]
        if "names" in kinds and not classes:
            raise PackError("items have several labels each; name all that there are: classes=[…]")
        whole = classes is not False and kinds and kinds <= {"text", "whole", "names"} and not options.points
        resize = options.resize or ("crop" if whole else "squash")
        pictured = any(name != TARGET and forms[0].kind == "image" for name, forms in seen.items())
        size = options.size if pictured else None
        forms = {name: common_form(name, each, classes, size, resize) for name, each in seen.items()}
        if options.size and not size:
            raise PackError("size resizes PIL images, and the items hold none; resize in the Dataset instead")
        for name in images_in(forms) if options.mean or options.std else ():
            count, column = forms[name].channels, forms[name].column
            if {len(options.mean or ()), len(options.std or ())} != {count}:
                raise PackError(f"mean and std must have {count} numbers, one per channel of {name} {column}")
        points = points_of(forms, options.points)
        return forms | {name: dataclasses.replace(forms[name], dtype="<f4") for name in points}, points

    # -- the pack of them

    def card_options(self) -> dict[str, Any]:
        """Return what the card keeps, as JSON does."""
        given = {name: getattr(self.options, name) for name in ("target", "inputs", "image", "sep", "points")}
        options = {
            "inputs": [name for name in self.forms if name != TARGET],
            "kind": self.kind,
            "roles": {"key": self.target, **given},
            "forms": {name: form.to_dict() for name, form in self.forms.items()},
            "points": self.points,
            "text": self.text,
            "encoding": next((part.encoding for _, part in self.parts if isinstance(part, Table)), {}),
            **({} if self.options.store else {"stored": False}),
        }
        return json.loads(json.dumps(options, default=str))

    def key(self, more: Any) -> str:
        """Return the identity of the data and of what is made of them."""
        made = [FORMAT, VERSION, self.card_options(), vars(self.options), self.groups, more]
        digest = hashlib.blake2b(json.dumps(made, default=str).encode(), digest_size=8)
        for split, part in self.parts:
            digest.update(repr((split, type(part).__qualname__, len(part))).encode() + content(part))
        if self.options.store or not self.varying():
            digest.update(b"".join(self.marks))
        return digest.hexdigest()

    def varying(self) -> list[str]:
        """Return the names of items looked at that differ when they are read again."""
        pairs = zip(self.looked, self.marks, strict=True)
        return [self.names[i] for i, before in pairs if before != mark({}) != mark(self.values(i)) != before]

    def survey(self) -> Survey:
        """Return what `make_pack` needs. Raises PackError where stored items would differ at each reading."""
        store, forms = self.options.store, self.forms
        if store and (varying := self.varying()):
            rule = "differs each time it is read: the Dataset augments at random, and a pack keeps one reading"
            fix = "Augment on the device instead, nb.classify(net, augment=(…)), or pass store=False"
            raise PackError(f"{varying[0]} {rule}. {fix}: each epoch then reads the Dataset itself")
        here = [name for name in forms if store or (self.own and name == TARGET)]
        classes = [*forms[TARGET].names] if self.kind in ("classes", "labels") else []
        if self.kind == "classes" and not classes and TARGET not in here:
            raise PackError("store=False reads no item before training; name the classes: classes=[…]")
        splits = [split for split, part in self.parts for _ in range(len(part))]
        groups = self.groups or [None] * len(self)
        ragged = [name for name, form in forms.items() if form.ragged]
        return Survey(
            [Entry(name, split, None, group) for name, split, group in zip(self.names, splits, groups, strict=True)],
            classes,
            self.card_options(),
            ragged=[name for name in ragged if name in here],
            bucket_by=next(iter(ragged), None),
            by_content=store,
            stratified=self.kind == "classes",
            named=TARGET if self.kind == "classes" and here else None,
            learn=self.learn,
            elsewhere={name: form.column for name, form in forms.items() if name not in here},
        )

    def read(self, _: Any, done: int) -> Generator[dict[str, Any] | Problem, None, None]:
        """Yield samples and rows of the table of bad samples, in order; by forked processes where that pays."""
        start, rest = time.perf_counter(), range(done + SEEN, len(self))
        yield from map(self.__getitem__, range(done, min(done + SEEN, len(self))))
        cost = (time.perf_counter() - start) / SEEN
        if cost > CHEAP and cost * len(rest) > SHORT and cores() > 1 and sys.platform == "linux":
            yield from by_workers(self.__getitem__, rest, 8)
        else:
            yield from map(self.__getitem__, rest)

    def learn(self, arrays: Mapping[str, np.ndarray], train: np.ndarray) -> dict[str, Any]:
        """Return mean and std of targets, float32 columns and images: as given, else those of the training split, or
        without a copy of the items looked at."""
        chosen, learned = np.isin(np.arange(len(arrays["split"])), train), {"mean": {}, "std": {}}
        for name, form in self.forms.items():
            if form.kind in KINDS or not (name == TARGET or form.dtype == "<f4" or form.layout):
                continue
            blocks = self.column(name)
            if name in arrays:
                rows = np.repeat(chosen, np.diff(arrays[f"{name}.offsets"])) if form.ragged else chosen
                blocks = blocks_of(arrays[name], rows)
            given = form.layout and name != TARGET and self.options.mean
            moments = (self.options.mean, self.options.std) if given else moments_of(form, blocks)
            learned["mean"][name], learned["std"][name] = ([*map(float, each)] for each in moments)
        return learned

    def column(self, name: str) -> Iterator[np.ndarray]:
        """Yield a column of the items looked at, one at a time."""
        for i in self.looked:
            with suppress(PackError):
                array = self.sample(i)[name]
                yield array if self.forms[name].ragged else array[None]


class RawItems(Dataset):
    """The Dataset that a pack was made of, read at each access. Item i has the arrays of the pack's sample i."""

    def __init__(self, items: Items, pack: Pack):
        self.items, self.classes = items, {name: i for i, name in enumerate(pack.classes)}
        index = {name: i for i, name in enumerate(items.names)}
        self.places = [index[name] for name in pack.names]

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, i: int) -> Sample:
        try:
            sample = self.items.sample(self.places[i])
        except PackError as error:  # where nothing is stored, an item is read here for the first time
            raise PackError(f"{self.items.names[self.places[i]]}: {sentence(error)}") from None
        if self.items.kind == "classes":
            sample[TARGET] = np.asarray(self.classes[sample[TARGET]])
        return {**sample, "id": np.asarray(i, np.int64)}


def sentence(error: PackError) -> str:
    """Return a reason for a row of the table of bad samples as a sentence."""
    if len(error.args) != 3:
        return str(error)
    value, rule, fix = error.args
    return f"{rule}, got {value}; {fix}"


# -- what is known of a part without reading its items


def names_of(split: str | None, part: Any) -> list[str]:
    kind = f"{split}/" * bool(split) + ("row" if isinstance(part, Table) else "item")
    return part.names if isinstance(part, Images) else [f"{kind} {i}" for i in range(len(part))]


def groups_of(groups: Any, parts: list[tuple[str | None, Any]], names: list[str]) -> list[str] | None:
    """Return the group of each item: of a column, of a function of its name, or as given."""
    if isinstance(groups, str):
        if not all(isinstance(part, Table) and groups in part.frame for _, part in parts):
            raise PackError(f"groups must be a column of the table, a value a sample or a function, got {groups!r}")
        groups = [value for _, part in parts for value in part.frame[groups]]
    groups = [*map(groups, names)] if callable(groups) else groups
    if groups is not None and len(groups) != len(names):
        raise PackError(f"groups must have a value for each of {len(names):,} items, got {len(groups):,}")
    return None if groups is None else [*map(str, groups)]


def classes_of(data: Any, target: Any) -> list[str]:
    """Return the names that a Dataset has for classes given as numbers: a ClassLabel's, or `.classes` as in
    torchvision, also below a Subset, which leaves labels as they are."""
    while isinstance(data, Subset):
        data = data.dataset
    features = getattr(data, "features", None)
    names = getattr(features.get(target), "names", None) if isinstance(features, Mapping) else None
    names = names or getattr(data, "classes", None)
    return [*map(composed, names)] if isinstance(names, list | tuple) and {*map(type, names)} == {str} else []


def content(part: Any) -> bytes:
    """Return what identifies all that a part holds, of files their size and time; b"" where that is not known."""
    if isinstance(part, OWN):
        return part.content()
    known = isinstance(part, list | np.ndarray | torch.Tensor | TensorDataset)
    return b"".join(mark({} if part[i] is None else parts_of(part[i])) for i in range(len(part))) if known else b""


def mark(values: Mapping[Any, Any]) -> bytes:
    """Return a hash of what an item holds."""
    digest = hashlib.blake2b(digest_size=16)
    for name, value in values.items():
        try:
            array = np.asarray(value) if is_image(value) else numeric("", value)
            digest.update(repr((name, array.dtype, array.shape)).encode() + array.tobytes())
        except PackError:
            shown = value if isinstance(value := bare(value), str | bytes | int | list) else type(value).__name__
            digest.update(repr((name, shown)).encode())
    return digest.digest()
