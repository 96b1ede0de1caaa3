"""Pack: a data set decoded once into flat arrays on disk, memory-mapped; opening it again is instant.

    pack.json               the manifest: task, classes, preprocessing options, columns, file sizes and hashes
    <column>.npy            fixed: (n, *shape); ragged: (sum of lengths, *shape)
    <column>.offsets.npy    ragged only: (n + 1,) int64; sample i is rows offsets[i]:offsets[i + 1]
    split.npy               (n,) uint8: 0 train, 1 val, 2 test
    names.json              the samples' files, relative to the source; groups.json: their groups, if they have some
    bad.csv                 what was left out, and why

A line of text is ragged along its width, so it is stored (W, H) or (W, H, C).
"""

import contextlib
import errno
import hashlib
import json
import os
import tarfile
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from nbtools import disk, show
from nbtools.data import splits
from nbtools.data.fetch import cache, place_to_keep, retry
from nbtools.data.splits import SPLITS
from nbtools.errors import PackError

if TYPE_CHECKING:
    import pandas as pd

FORMAT = 4  # of the folder; the manifest also names the nbtools that wrote it
MANIFEST = "pack.json"  # data sets have a manifest.json of their own
ANEW = "delete the folder and pack again"
Sample = dict[str, np.ndarray]


@dataclass(frozen=True)
class Column:
    """One array of a pack. kind `fixed`: a sample is an array of `shape`; `ragged`: (any length, *shape). layout:
    `hwc`, `chw` or `hw` of an image of `nb.pack`, "" of all else."""

    kind: str
    dtype: str
    shape: tuple[int, ...]
    layout: str = ""

    def __str__(self) -> str:
        shape = ("·", *self.shape) if self.kind == "ragged" else self.shape
        return f"{np.dtype(self.dtype)} ({', '.join(map(str, shape))})"


@dataclass(frozen=True)
class Card(show.Report):
    """Describe a data set: enough to build a model for it, feed it and read its answers. A run keeps it."""

    task: str
    classes: list[str]
    options: dict[str, Any]  # the preprocessing
    columns: dict[str, Column]
    splits: dict[str, int]  # samples per split
    bucket_by: str | None = None  # the ragged column whose length groups batches
    shares: list[float] = field(default_factory=list)  # of val and test, that were drawn; by which seed
    digest: str = ""  # of all that the pack holds, so that a run resumes only on the very same data
    content: str = ""  # the same, but of how it is divided

    def caption(self) -> str:
        return repr(self)


@dataclass(frozen=True, repr=False)
class Pack(show.Table):
    """An open pack. Shows as a table."""

    folder: Path
    card: Card
    manifest: dict[str, Any]
    split: np.ndarray = field(compare=False)  # (n,) uint8, as in `split.npy`; 3: in no split
    raw: Any = None  # the Dataset over what it was made of; None if that is gone

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """Open a finished pack, without its sources. Raises PackError unless it is there, in this format, and whole."""
        folder = Path(folder).expanduser()
        if not is_pack(folder):
            raise PackError(f"{folder}: no {MANIFEST}, so this is not a pack; make one with task.pack(source)")
        with disk.explained("opening a pack", folder):
            manifest = json.loads((folder / MANIFEST).read_bytes())
            if (version := manifest["version"]) != FORMAT:
                made = f"nbtools {manifest.get('nbtools', '0.1')} made this pack in format {version}"
                raise PackError(f"{folder}: {made}, but this version reads format {FORMAT}; {ANEW}")
            for name, entry in manifest["files"].items():
                size = path.stat().st_size if (path := folder / name).exists() else "no"
                if size != entry["size"]:
                    raise PackError(f"{path}: has {size} bytes, but had {entry['size']} when packed; {ANEW}")
            touch(folder.absolute())
            return cls(folder, Card.from_dict(manifest["card"]), manifest, np.load(folder / "split.npy"))

    def verify(self) -> Self:
        """Compare every file's SHA-256 with the manifest; raises PackError naming the first that differs."""
        for name, entry in self.manifest["files"].items():
            with disk.explained("verifying a pack", self.folder / name):
                if disk.sha256(self.folder / name) != entry["sha256"]:
                    raise PackError(f"{self.folder / name}: its SHA-256 differs from the manifest's; {ANEW}")
        return self

    @property
    def classes(self) -> list[str]:
        return self.card.classes

    @property
    def options(self) -> dict[str, Any]:
        return self.card.options

    @property
    def columns(self) -> dict[str, Column]:
        return self.card.columns

    @property
    def splits(self) -> dict[str, int]:
        return self.card.splits

    @property
    def remarks(self) -> list[str]:
        """Return warnings for whoever trains on it, one sentence each."""
        return self.manifest["remarks"]

    @property
    def bytes(self) -> int:
        """Return the size of the arrays."""
        return sum(array.nbytes for arrays in (self.arrays, self.offsets) for array in arrays.values())

    @property
    def is_stored(self) -> bool:
        """Return whether it has the arrays of its samples: not after `nb.pack(store=False)`."""
        return self.arrays.keys() == self.columns.keys()

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """Return the memory map of each column's values, private to this process: writes do not reach the file."""
        files = {name: path for name in self.columns if (path := self.folder / f"{name}.npy").exists()}
        with disk.explained("reading a pack", self.folder):
            try:
                return {name: np.load(path, mmap_mode="c") for name, path in files.items()}
            except OSError as error:
                if error.errno != errno.ENOMEM:  # Linux lets no process write to maps larger than its memory
                    raise
                return {name: np.load(path, mmap_mode="r") for name, path in files.items()}

    @cached_property
    def offsets(self) -> dict[str, np.ndarray]:
        """Return where the samples of each ragged column begin, (n + 1,) int64."""
        ragged = (name for name in self.arrays if self.columns[name].kind == "ragged")
        return {name: np.load(self.folder / f"{name}.offsets.npy") for name in ragged}

    @cached_property
    def names(self) -> list[str]:
        return json.loads((self.folder / "names.json").read_bytes())

    @cached_property
    def bad(self) -> "pd.DataFrame":
        """Return the samples that were left out: file, value, rule, fix."""
        import pandas as pd

        whole = type("Bad", (pd.DataFrame,), {"__repr__": lambda rows: rows.to_string(max_rows=60)})  # with all columns
        return whole(pd.read_csv(self.folder / "bad.csv", encoding="utf-8-sig", dtype=str, keep_default_na=False))

    def __len__(self) -> int:
        return len(self.split)

    def __getstate__(self) -> dict[str, Any]:  # a process that gets it maps the arrays itself
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def ids(self, split: str) -> np.ndarray:
        """Return (n,) int64 sample ids of a split, ascending."""
        if split not in SPLITS:
            raise PackError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        return np.flatnonzero(self.split == SPLITS.index(split))

    def lengths(self, column: str, ids: np.ndarray) -> np.ndarray:
        offsets = self.offsets[column]
        return offsets[ids + 1] - offsets[ids]

    def sample(self, i: int) -> Sample:
        """Return column → array of one sample; from `raw` if the pack does not store it."""
        i = range(len(self))[i]  # -1 is the last
        if not self.is_stored:
            if self.raw is None:
                raise PackError(f"{self.folder} stores no samples; pack its Dataset again to read them")
            return {name: np.asarray(array) for name, array in self.raw[i].items() if name in self.columns}
        rows = {name: slice(*self.offsets[name][i : i + 2]) if name in self.offsets else i for name in self.columns}
        return {name: np.asarray(self.arrays[name][row]) for name, row in rows.items()}

    def reading(self, columns: Collection[str]) -> Self:
        """Return the pack with these columns only. Samples that lack one of them are in no split; ids stay the same."""
        kept = {name: column for name, column in self.columns.items() if name in columns}
        ragged, by = [name for name in columns if name in self.offsets], self.card.bucket_by
        full = np.all([np.ones(len(self), bool), *(np.diff(self.offsets[name]) > 0 for name in ragged)], axis=0)
        by = by if by in (None, *ragged) else next(iter(ragged), None)
        return self.with_split(np.where(full, self.split, len(SPLITS)), columns=kept, bucket_by=by)

    def places(self, groups: Sequence[Any], label: Any, labels: Any, seed: int, exact: bool) -> tuple[list[Any], ...]:
        """Return the place in [0, 1) of each sample: of its group or name, exact: of its arrays without the label; and
        what stays in one split: its group, or copies of one image."""
        places, held_in = [], sorted(self.columns.keys() - {label}) if exact and self.is_stored else []
        pictures = any(self.columns[name].layout for name in held_in)
        columns = [(np.asarray(self.arrays[name]), self.offsets.get(name)) for name in held_in]
        for i, name in enumerate(self.names):
            held = b"".join(a[i if at is None else slice(*at[i : i + 2])].tobytes() for a, at in columns)
            places.append(splits.position(groups[i] or held or name, seed))
        if exact and not pictures and len({*places}) < min(100, len(places) / 2):  # no split should lack a kind of rows
            seen = Counter[Any]()
            for i, kind in enumerate(zip(places, labels or places, strict=True)):
                places[i] = splits.position(f"{kind} {seen[kind]}", seed) if seen[kind] else places[i]
                seen[kind] += 1
        return places, [group or (place if pictures else None) for group, place in zip(groups, places, strict=True)]

    def folds(self, k: int, seed: int = 0) -> list[Self]:
        """Return k packs for cross-validation: the n-th validates on the n-th part of what is not test, and trains on
        the rest; classes are divided evenly, groups stay whole. They share this pack's folder, and its means."""
        path, label, labels = self.folder / "groups.json", self.manifest["label"], None
        groups = json.loads(path.read_bytes()) if path.exists() else [None] * len(self)
        if label is not None:
            labels = class_names(np.load(self.folder / f"{label}.npy"), self.classes)
        places, groups = self.places(groups, label, labels, seed, "roles" in self.options)
        units = splits.units_of(np.flatnonzero(self.split < 2).tolist(), places, groups, labels)
        if not isinstance(k, int) or not 2 <= k <= len(units):
            raise PackError(f"folds must be 2 to {len(units):,}, the number of samples or groups, got {k!r}")
        fold, made = {i: n * k // len(units) for n, unit in enumerate(units) for i in unit}, []
        for n in range(k):
            split = [int(fold[i] == n) if i in fold else own for i, own in enumerate(self.split)]
            digest = hashlib.sha256(f"{self.card.digest} {n} {k} {seed}".encode()).hexdigest()
            remarks = splits.remarks([SPLITS[i] for i in split], labels, ["train", "val"])
            one = self.with_split(np.array(split), digest=digest)
            made.append(replace(one, manifest={**self.manifest, "remarks": remarks}))
        return made

    def with_split(self, split: np.ndarray, **card: Any) -> Self:
        """Return the pack with its samples in other splits, and a card that differs in these."""
        card["splits"] = {name: int((split == k).sum()) for k, name in enumerate(SPLITS)}
        return replace(self, split=split.astype(np.uint8), card=replace(self.card, **card))

    def keep(self, where: str | Path) -> Path | None:
        """Write the pack as one tar, to `drive:…` or a path; `task.pack` of that file opens it in the next session.
        Another pack of that name is replaced, all at once; the very same one is not written again if it reads back
        whole. Mount errors are retried. Prints a sentence and returns None if access to Drive was declined."""
        if self.card.digest != self.manifest["card"]["digest"]:
            raise PackError("a fold shares the files of the pack it was divided from; keep that one")
        if (target := place_to_keep(where)) is not None:
            target = target if target.suffix == ".tar" else target.with_name(f"{target.name}.tar")
            with disk.explained(f"keeping {self.folder}", target):
                retry(lambda: self.is_kept(target) or self.write_tar(target), target)
        return target

    def is_kept(self, path: Path) -> bool:
        hashes = {name: entry["sha256"] for name, entry in self.manifest["files"].items()}
        hashes[MANIFEST] = disk.sha256(self.folder / MANIFEST)
        try:
            with tarfile.open(path, "r:") as tar:
                files: dict[str, Any] = {name: tar.extractfile(name) for name in hashes}
                return hashes == {name: hashlib.file_digest(file, "sha256").hexdigest() for name, file in files.items()}
        except (OSError, KeyError, ValueError, tarfile.TarError):
            return False

    def write_tar(self, path: Path) -> None:
        part = path.with_name(f"{path.name}.part")
        try:
            with tarfile.open(part, "w") as tar:
                for name in (*self.manifest["files"], MANIFEST):
                    tar.add(self.folder / name, name)
            if not self.is_kept(part):
                raise OSError(errno.EIO, "reads back differently from what was written", str(part))
            disk.sync_path(part)
            disk.rename(part, path)
        finally:  # also where the user interrupts: a full Drive has no room for it
            with contextlib.suppress(OSError):  # the disk that failed may refuse this too: the first error counts
                disk.remove(part)

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, str]]]:
        names, bad = ", ".join(self.classes[:40]) + ", …" * (len(self.classes) > 40), self.manifest["bad"]
        return ("pack", ""), [
            ("task", self.card.task),
            ("samples", ", ".join(f"{self.splits[split]:,} {split}" for split in SPLITS)),
            ("columns", ", ".join(f"{name} {column}" for name, column in self.columns.items())),
            ("classes", f"{len(self.classes)}: {names}" if names else "none"),
            ("bad samples", f"{bad} left out, see pack.bad" if bad else "none"),
            *(("remark", line) for line in self.remarks),
            ("size", show.size(self.bytes)),
            ("folder", str(self.folder)),
        ]


def class_names(ids: np.ndarray, classes: Sequence[str]) -> list[str]:
    names = dict(enumerate(classes))
    return [names.get(i, str(i)) for i in ids.ravel().tolist()]


def is_pack(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def touch(path: Path) -> None:
    """Note that the entry of the cache that a path is in, if it is in one, is used now."""
    with contextlib.suppress(OSError, ValueError):  # it is not there yet or elsewhere, or may only be read
        parts = path.relative_to(cache()).parts
        os.utime(cache().joinpath(*parts[: 2 if parts[:1] == ("packs",) else 1]))
