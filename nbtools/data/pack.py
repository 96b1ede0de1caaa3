"""Pack: a data set decoded once into flat arrays on disk, memory-mapped; opening it again is instant.

    pack.json               the manifest: task, classes, preprocessing options, columns, file sizes and hashes
    <column>.npy            fixed: (n, *shape); ragged: (sum of lengths, *shape)
    <column>.offsets.npy    ragged only: (n + 1,) int64; sample i is rows offsets[i]:offsets[i + 1]
    split.npy               (n,) uint8: 0 train, 1 val, 2 test
    names.json              the samples' files, relative to the source
    bad.csv                 what was left out, and why

A line of text is ragged along its width, so it is stored (W, H) or (W, H, C).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
import torch
from torch.utils.data import Dataset

from nbtools import disk, show
from nbtools.data import archive
from nbtools.data.cached import touch
from nbtools.data.drive import place_to_keep
from nbtools.data.transfer import patient
from nbtools.errors import ArchiveError, PackError

if TYPE_CHECKING:
    import pandas as pd

FORMAT = 3  # of the folder; the manifest also names the nbtools that wrote it
MANIFEST = "pack.json"  # data sets have a manifest.json of their own
READING = "reading a pack"
SPLITS = ("train", "val", "test")
BAD = ("file", "value", "rule", "fix")  # the columns of the table of bad samples

Sample = dict[str, np.ndarray]
Reader = Callable[[Path, Mapping[str, Any]], Sample]


@dataclass(frozen=True)
class Column:
    """One array of a pack. kind `fixed`: a sample is an array of `shape`; `ragged`: (any length, *shape)."""

    kind: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        shape = ("·", *self.shape) if self.kind == "ragged" else self.shape
        return f"{np.dtype(self.dtype)} ({', '.join(map(str, shape))})"


@dataclass(frozen=True)
class Card:
    """What a model needs to know of a data set: enough to build it, feed it and read its answers. A run keeps it.

    options: the preprocessing; splits: samples per split; bucket_by: the ragged column whose length groups batches;
    digest: of all that the pack holds, so that a run resumes on the very same data only. counts: training samples per
    class, by what they are classes of, where the task counted them.
    """

    task: str
    classes: list[str]
    options: dict[str, Any]
    columns: dict[str, Column]
    splits: dict[str, int]
    bucket_by: str | None = None
    digest: str = ""
    counts: dict[str, list[int]] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        known = {f.name: values[f.name] for f in dataclasses.fields(cls) if f.name in values}
        return cls(**{**known, "columns": columns_of(values["columns"])})


@dataclass(frozen=True)
class Pack(show.Table):
    """An open pack. `raw` is the Dataset over what it was made of, None if that is gone. Shows as a table.

    wanted: (n,) bool, the samples that are in a split; None: all. unread: columns that batches leave out. See `part`.
    """

    folder: Path
    card: Card
    manifest: dict[str, Any] = field(repr=False)
    raw: Any = field(default=None, repr=False)
    wanted: np.ndarray | None = field(default=None, repr=False, compare=False)
    unread: frozenset[str] = frozenset()

    @classmethod
    def open(cls, folder: str | Path) -> Self:
        """Open a finished pack, without the source files. Raises PackError if it is missing, has another version, or a
        file has another size."""
        folder = Path(folder)
        try:
            manifest = disk.from_json((folder / MANIFEST).read_bytes())
            if (version := manifest["version"]) != FORMAT:
                maker = manifest.get("nbtools", "0.1")
                raise PackError(
                    f"{folder}: this pack was made by nbtools {maker} (format {version}, and format {FORMAT} is read "
                    "here); delete the folder and pack again"
                )
            # The hash is not used here, but must be there.
            files = {name: (entry["size"], entry["sha256"]) for name, entry in manifest["files"].items()}
            card = Card.from_dict(manifest["card"])
        except FileNotFoundError:
            raise PackError(
                f"{folder}: no {MANIFEST}, so this is not a pack; make one with task.pack(source)"
            ) from None
        except (ValueError, OSError, LookupError, TypeError, AttributeError) as error:
            if disk.is_away(error):
                with disk.explained("opening a pack", folder):
                    raise
            raise PackError(f"{folder / MANIFEST}: unreadable ({error}); delete the folder and pack again") from None
        for name, (wanted, _) in files.items():
            path = folder / name
            size = path.stat().st_size if path.exists() else None
            if size != wanted:
                came = "is missing" if size is None else f"has {size} bytes"
                raise PackError(f"{path}: {came}, the manifest says {wanted} bytes; delete the folder and pack again")
        touch(folder.absolute())
        return cls(folder, card, manifest)

    def verify(self) -> Self:
        """Compare every file's SHA-256 with the manifest; raises PackError naming the first that differs."""
        for name, entry in self.manifest["files"].items():
            with disk.explained("verifying a pack", self.folder):
                came = disk.sha256(self.folder / name)
            if came != entry["sha256"]:
                raise PackError(
                    f"{self.folder / name}: SHA-256 {came[:12]}…, the manifest says {entry['sha256'][:12]}…"
                )
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
    def read(self) -> dict[str, Column]:
        """The columns of batches."""
        return {name: column for name, column in self.columns.items() if name not in self.unread}

    @property
    def ragged(self) -> dict[str, np.ndarray]:
        """The offsets of the ragged ones among them."""
        return {name: offsets for name, offsets in self.offsets.items() if name not in self.unread}

    @property
    def bytes(self) -> int:
        """On disk, without columns that batches leave out."""
        left = {f"{name}{end}" for name in self.unread for end in (".npy", ".offsets.npy")}
        return sum(entry["size"] for name, entry in self.manifest["files"].items() if name not in left)

    @cached_property
    def arrays(self) -> dict[str, np.ndarray]:
        """Column → memory map of its values, private to this process: writes do not reach the file."""
        files = self.manifest["files"]
        return {name: mapped(self.folder / f"{name}.npy") for name in self.columns if f"{name}.npy" in files}

    @cached_property
    def offsets(self) -> dict[str, np.ndarray]:
        """Ragged column → (n + 1,) int64."""
        return {n: loaded(self.folder / f"{n}.offsets.npy") for n, c in self.columns.items() if c.kind == "ragged"}

    @cached_property
    def names(self) -> list[str]:
        with disk.explained(READING, path := self.folder / "names.json"):
            return json.loads(path.read_bytes())

    @cached_property
    def split(self) -> np.ndarray:
        return loaded(self.folder / "split.npy")

    @cached_property
    def bad(self) -> pd.DataFrame:
        """The samples that were left out: file, value, rule, fix."""
        import pandas as pd

        with disk.explained(READING, path := self.folder / "bad.csv"):
            return pd.read_csv(path, encoding="utf-8-sig", dtype=str, keep_default_na=False)

    def ids(self, split: str) -> np.ndarray:
        """(n,) int64 sample ids of a split, ascending."""
        if split not in SPLITS:
            raise PackError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        chosen = self.split == SPLITS.index(split)
        return np.flatnonzero(chosen if self.wanted is None else chosen & self.wanted)

    def part(self, columns: Collection[str], unread: Collection[str] = ()) -> Self:
        """The pack without the samples that have nothing in one of these columns: they are in no split, and ids stay.
        Batches are grouped by one of them if the pack's own column is empty in some, and leave out the unread columns.
        The pack itself where nothing changes."""
        ragged = [name for name in columns if name in self.offsets]
        wanted = np.all([np.ones(len(self), bool), *(np.diff(self.offsets[name]) > 0 for name in ragged)], axis=0)
        splits, by = {split: int(wanted[self.ids(split)].sum()) for split in SPLITS}, self.card.bucket_by
        if ragged and by not in (None, *ragged) and not np.diff(self.offsets[by])[wanted].all():
            by = ragged[0]
        card = dataclasses.replace(self.card, splits=splits, bucket_by=by)
        if card == self.card and self.unread == set(unread):
            return self
        if wanted.all() or self.wanted is not None:
            wanted = None if self.wanted is None else wanted & self.wanted
        return dataclasses.replace(self, card=card, wanted=wanted, unread=frozenset(unread))

    def lengths(self, column: str, ids: np.ndarray) -> np.ndarray:
        offsets = self.offsets[column]
        return offsets[ids + 1] - offsets[ids]

    def sample(self, i: int) -> Sample:
        """Column → array of one sample."""
        arrays = {}
        for name, column in self.columns.items():
            rows = slice(*self.offsets[name][i : i + 2]) if column.kind == "ragged" else i
            arrays[name] = np.asarray(self.arrays[name][rows])
        return arrays

    def keep(self, where: str | Path) -> Path | None:
        """Write the pack as one tar, to `drive:…` or a path, read it back, and put its SHA-256 next to it, which is
        compared when it is staged; `task.pack` of that file opens it in the next session. Errors of a mount are tried
        again. Prints a sentence and returns None if access to Drive was declined in Colab's dialog.

        The name is the caller's, so another pack that has it is replaced, all at once; until the new SHA-256 is there,
        whoever stages the tar compares the hashes within the pack. Nothing is written if this very pack is there and
        reads back whole.
        """
        target = patient(lambda: place_to_keep(where), Path(where))
        if target is None:
            return None
        target = target if target.suffix == ".tar" else target.with_name(target.name + ".tar")
        files = {name: self.folder / name for name in (*self.manifest["files"], MANIFEST)}
        promise = target.with_name(f"{target.name}.sha256")
        with disk.explained(f"keeping {self.folder}", target):
            if not self.is_kept(target, promise):  # a new tar with an old hash would be refused
                digest = patient(lambda: archive.write(files, target, lambda: disk.remove(promise)), target)
                patient(lambda: disk.write_atomic(promise, f"{digest}  {target.name}\n"), target)
        return target

    def is_kept(self, target: Path, promise: Path) -> bool:
        """Whether a tar is this very pack, whole. One that cannot be read is not: it is written anew."""
        try:
            same = archive.read_member(target, MANIFEST) == (self.folder / MANIFEST).read_bytes()
            return same and promise.read_bytes() == f"{disk.sha256(target)}  {target.name}\n".encode()
        except (OSError, ArchiveError):
            return False

    def __len__(self) -> int:
        return len(self.split)

    def only(self, column: str) -> str:
        """How many samples have something in a column, where others do not."""
        having = np.count_nonzero(np.diff(self.offsets[column])) if column in self.offsets else len(self)
        return f" of {having:,} samples" if having < len(self) else ""

    def table(self) -> tuple[tuple[str, ...], list[tuple[str, str]]]:
        named, more = self.classes[:40], " …" if len(self.classes) > 40 else ""
        names = (", " if any(" " in name for name in named) else " ").join(named)
        return ("pack", ""), [
            ("task", self.card.task),
            ("samples", ", ".join(f"{self.splits[s]:,} {s}" for s in SPLITS)),
            ("columns", ", ".join(f"{name} {column}{self.only(name)}" for name, column in self.columns.items())),
            ("classes", f"{len(self.classes)}: {names}{more}" if self.classes else "none"),
            ("bad samples", f"{self.manifest['bad']} left out, see pack.bad" if self.manifest["bad"] else "none"),
            ("size", show.size(self.bytes)),
            ("folder", str(self.folder)),
        ]


@dataclass(eq=False)
class RawFiles(Dataset):
    """The source files of a pack, decoded at each access, as a DataLoader reads them: for comparison. Item i has the
    same values as the pack's sample i. Picklable for workers of any start method: each opens the arrays itself.
    """

    folder: Path
    source: Path
    read: Reader = field(repr=False)

    @cached_property
    def pack(self) -> Pack:
        return Pack.open(self.folder)

    def __len__(self) -> int:
        return len(self.pack)

    def __getitem__(self, i: int) -> Sample:
        decoded = self.read(self.source / self.pack.names[i], self.pack.options)
        labels = self.pack.sample(i)  # memory maps: what is replaced is not read
        return {**labels, **decoded, "id": np.asarray(i, np.int64)}

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "source": self.source, "read": self.read}


def collate(
    samples: Sequence[Sample], columns: Mapping[str, Column], unread: Collection[str] = ()
) -> dict[str, torch.Tensor]:
    """Samples → raw batch: fixed (B, *shape); ragged zero-padded (B, longest, *shape) and `<column>_length` (B,);
    without the unread columns."""
    batch = {}
    for name in (name for name in samples[0] if name not in unread):
        arrays = [sample[name] for sample in samples]
        if name in columns and columns[name].kind == "ragged":
            lengths = np.array([len(a) for a in arrays])
            padded = np.zeros((len(arrays), lengths.max(initial=0), *arrays[0].shape[1:]), arrays[0].dtype)
            for row, array in zip(padded, arrays, strict=True):
                row[: len(array)] = array
            batch[name], batch[f"{name}_length"] = torch.from_numpy(padded), torch.from_numpy(lengths)
        else:
            batch[name] = torch.from_numpy(np.stack(arrays))
    return batch


def columns_of(values: Mapping[str, Mapping[str, Any]]) -> dict[str, Column]:
    """Columns as JSON keeps them."""
    return {name: Column(c["kind"], c["dtype"], tuple(c["shape"])) for name, c in values.items()}


def is_pack(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def mapped(path: Path) -> np.ndarray:
    """A copy-on-write map, which torch accepts without a warning; an empty array where there is nothing to map."""
    try:
        return loaded(path, "c")
    except ValueError:
        return loaded(path)


def loaded(path: Path, mode: Literal["c"] | None = None) -> np.ndarray:
    """One of a pack's arrays. Raises DiskError where the disk does not give it."""
    with disk.explained(READING, path):
        return np.load(path, mmap_mode=mode)


def split_of(name: str, val: float = 0.1, test: float = 0.1) -> str:
    """The split of a sample by a hash of its name: the same on every machine, whatever the other samples, so that it
    does not move when others are added."""
    place = position(name)
    return "test" if place < test else "val" if place < test + val else "train"


def position(name: str) -> float:
    """A name's place in [0, 1)."""
    data = name.encode(errors="surrogateescape")  # file names need not be UTF-8
    return int.from_bytes(hashlib.blake2b(data, digest_size=7).digest(), "big") / 2**56


def assigned(names: Sequence[str], splits: Sequence[str | None], val: float, test: float) -> list[str]:
    """The split of every sample: its own, else by the hash of its name; whole numbers take exactly that many,
    the smallest hashes first. A source with a test folder but no val folder gives its val share from train. test=1.0:
    all are test, whatever split they have."""
    if is_all(test):
        return ["test"] * len(names)
    given = set(splits) - {None}
    divided = "train" if "train" in given and "val" not in given else None
    drawn = [i for i, split in enumerate(splits) if split == divided]
    test = 0 if given else test
    result = [split or "train" for split in splits]
    if not is_count(val) and not is_count(test):
        for i in drawn:
            result[i] = split_of(names[i], val, test)
        return result
    tests, vals = (int(share) if is_count(share) else round(share * len(drawn)) for share in (test, val))
    if drawn and tests + vals >= len(drawn):
        raise PackError(
            f"val={val} and test={test} leave none of {show.plural(len(drawn), 'sample')} to train on; lower them"
        )
    for rank, i in enumerate(sorted(drawn, key=lambda i: position(names[i]))[: tests + vals]):
        result[i] = "test" if rank < tests else "val"
    return result


def require_shares(val: float, test: float) -> None:
    """Raise PackError unless these can be the validation's and the test's part of a source."""
    shares = [x for x in (val, test) if not is_count(x)]
    numbers = all(isinstance(x, (int, float)) for x in (val, test))
    if not numbers or not min(val, test) >= 0 or not (sum(shares) < 1 or is_all(test)):
        raise PackError(
            f"val and test must be whole numbers of samples, or shares ≥ 0 and below 1, got {val}, {test}; "
            "their sum leaves samples to train on, but for test=1.0, which makes all of them test"
        )


def is_count(share: float) -> bool:
    return isinstance(share, int) and share >= 1


def is_all(share: float) -> bool:
    """Whether it is the share of a split that takes every sample; the whole number 1 is one sample."""
    return isinstance(share, float) and share == 1
