"""The pack of a source: the finished one, or a new one that appears under its name only once it is complete.

A task says what its samples are (`survey`) and how to read one (`read`). Processes read blocks of them into files
`<pack>.part/<key>/<number>.npz`, which the next call finds again if it is interrupted; meanwhile this one joins them
into the arrays. What cannot be used is listed in one table, never dropped silently.
"""

import contextlib
import csv
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset

from nbtools import disk
from nbtools.data import splits
from nbtools.data.fetch import cache, files_in
from nbtools.data.forms import DAMAGED
from nbtools.data.pack import FORMAT, MANIFEST, Card, Column, Pack, Sample, class_names, is_pack
from nbtools.data.progress import bar, say, side_by_side
from nbtools.data.stage import digest, lock, stage, unfinished
from nbtools.errors import PackError
from nbtools.show import plural, restore

Options = Mapping[str, Any]
Reader = Callable[[Path, Options], Sample]
Sampler = Callable[[int], Sample]  # of an entry; it refuses one by PackError(value, rule, fix)
Arrays = Mapping[str, np.ndarray]
Look = Callable[[], tuple["Survey", Sampler]]
Draw = tuple[float, float, int]  # val, test, seed
Made = Mapping[str, Any]  # what the manifest records: key, source

BLOCK = 32  # samples in a file, where a survey does not say how large they are
APART = "split.npy", "names.json", "bad.csv"  # files that do not say what the samples hold
FEW = 16  # samples that are read one by one where they cannot be read together


class Entry(NamedTuple):
    """One sample to read."""

    name: str  # its file, relative to the source
    split: str | None = None  # the source's own
    label: Any = None  # a number or an array of numbers, which becomes the column `label`; None where `read` gives it
    group: str | None = None  # samples of one group stay in one split


@dataclass(frozen=True)
class Survey:
    """List what a task finds in a source without decoding it. Entries without a split get theirs by a hash of their
    group or name, copies by the first's; exact: of their group or arrays, by exact shares, of each class alike."""

    entries: Sequence[Entry]  # in the pack's order
    classes: Sequence[str] = ()
    options: Options = field(default_factory=dict)  # what `read` and `run.predict` need
    ragged: Collection[str] = ()  # columns whose samples differ in their first dimension
    bucket_by: str | None = None  # the ragged column whose length groups batches
    bad: Sequence[tuple[str, ...]] = ()  # (file, value, rule, fix) of each file that cannot be used
    exact: bool = False
    check: Callable[[Entry, Sample], None] | None = None  # raises PackError(value, rule, fix)
    named: str | None = None  # a column that `read` gives as the name of a class; None of `classes`: those that occur
    learn: Callable[[Pack, np.ndarray], tuple[Options, list[str]]] | None = None  # (…, training ids) → more, remarks
    columns: Mapping[str, Column] = field(default_factory=dict)  # with their layouts, also those that are not stored
    block: int | None = None  # samples in a file
    together: Callable[[Sequence[int]], dict[str, Any] | None] | None = None  # arrays of several samples, if it can
    varying: bool = False  # items differ each time they are read


def build_pack(
    source: str | Path,
    task: str,
    options: Options,
    survey: Callable[[Path, Options], Survey],
    read: Reader,
    *,
    reader: Callable[[Path], Reader] | None = None,
    val: float = 0.1,
    test: float = 0.1,
    seed: int = 0,
    into: str | Path | None = None,
    progress: bool = True,
) -> Pack:
    """Return the pack of a source, opened where it is finished.

    source: anything `stage` takes, or a pack. options: what was requested, as plain JSON values; with val, test, seed
    and the source's files it identifies the pack. survey: `survey(folder, {**options, "val": val, "test": test})`.
    read: `read(path, options)` → the arrays of one sample, called by forked processes, and later for the raw files. It
    refuses a file by PackError(value, rule, fix); what decoders raise on damage counts as that too. reader: where that
    takes the rest of the source, `reader(folder)` returns what to call in place of `read`. val, test: shares of the
    samples without a split of their own, or whole numbers for exactly that many; test=1.0 makes all of them test.
    into: a folder for the pack alone; by default one under the cache. Raises PackError, StageError or DiskError.
    """
    splits.require_shares(val, test)
    folder = stage(source, progress=progress)
    if is_pack(folder):
        return open_pack(folder, task, test)
    given = {**options, "val": val, "test": test, **({"seed": seed} if seed else {})}
    with disk.explained(f"looking at {folder}", folder):  # what is packed, by name, size and time of change
        files = [(name, file.size, file.version) for name, file in files_in(folder).items()]
    key = digest(json.dumps([FORMAT, task, str(folder.resolve()), given, files], sort_keys=True))
    read = reader(folder) if reader else read

    def look() -> tuple[Survey, Sampler]:
        inventory = survey(folder, given)
        return inventory, partial(read_entry, read, folder, inventory)

    pack = make_pack(task, {"key": key, "source": str(folder)}, into, look, (val, test, seed), progress)
    return replace(pack, raw=RawFiles(pack, folder, read))


def make_pack(task: str, made: Made, into: str | Path | None, look: Look, draw: Draw, progress: bool) -> Pack:
    """Return the pack of what its key says, files and options: the finished one, or a new one, without its source."""
    target = (Path(into).expanduser() if into is not None else cache() / "packs" / f"{task}-{made['key']}").absolute()
    with disk.explained(f"packing {made['source']}", target), lock(target):
        if is_pack(target) and (pack := open_pack(target, task)).manifest.get("key") == made["key"]:
            return pack
        if target.exists() and any(target.iterdir()):
            raise PackError(f"{target} holds other files, or a pack of other data or options; choose a new folder")
        with unfinished(target, digest(f"{disk.VERSION} 2 {made['key']}")) as begun:
            inventory, sample = look()
            disk.remove(begun / "new")
            (begun / "new").mkdir()
            finish(begun / "new", read_all(inventory, sample, begun, progress), inventory, task, made, draw)
        pack = Pack.open(target)
        for line in pack.remarks if progress else ():
            say(line)
        return pack


def open_pack(folder: Path, task: str, test: float = 0, **asked: Any) -> Pack:
    """Open a pack that is given as a source. Raises PackError for another task's, and where it is asked for others."""
    pack = Pack.open(folder)
    if pack.card.task != task:
        reason = f"{folder} is a pack of the task {pack.card.task!r}, not of {task!r}"
        raise PackError(f"{reason}; use that task, or other data", entry="Wrong script or mode")
    own = {**pack.options.get("roles", {}), "classes": [*pack.classes] or False}
    plain = json.loads(json.dumps(asked, default=str)).items()
    fixed = "/".join(name for name, value in plain if value not in (None, own.get(name, value)))
    if fixed or (splits.is_all(test) and pack.splits["test"] < len(pack)):
        raise PackError(f"{folder} is a pack, whose {fixed or 'splits'} cannot change; pass the raw source")
    return pack


def read_entry(read: Reader, folder: Path, survey: Survey, i: int) -> Sample:
    """Return a sample with its label. Raises PackError(value, rule, fix) for a file that cannot be used."""
    entry = survey.entries[i]
    try:
        sample = read(folder / entry.name, survey.options)
    except DAMAGED as error:
        if isinstance(error, OSError) and disk.is_away(error):  # a moment's trouble must not leave it out for ever
            raise OSError(error.errno, error.strerror, str(folder / entry.name)) from None
        came = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        raise PackError(came, "the file must be readable", "copy it again, or delete it") from None
    if entry.label is not None:
        sample = {**sample, "label": np.asarray(entry.label)}
    if survey.check is not None:
        survey.check(entry, sample)
    return sample


@dataclass(eq=False)
class RawFiles(Dataset):
    """Read what a pack was made of at each access, as a DataLoader does: item i has the values of sample i."""

    pack: Pack
    source: Path
    read: Reader = field(repr=False)

    def __len__(self) -> int:
        return len(self.pack)

    def __getitem__(self, i: int) -> Sample:
        i = range(len(self))[i]
        decoded = self.read(self.source / self.pack.names[i], self.pack.options)
        return {**(self.pack.sample(i) if self.pack.is_stored else {}), **decoded, "id": np.asarray(i, np.int64)}


def read_all(survey: Survey, sample: Sampler, folder: Path, progress: bool) -> dict[str, Any]:
    """Read all entries into files of a folder, but for those that an interrupted call left and those in memory, and
    meanwhile write their arrays, one after another, as .npy files in `new`. Return `kept`: the entries that became
    samples, `classes`: of each, `bad`: the rows of the others, and `columns`. Raises PackError for unlike ones."""
    every, columns, files, rows = list[dict[str, Any]](), None, dict[str, IO[bytes]](), Counter[str]()
    ids, size = range(len(survey.entries)), survey.block or BLOCK
    blocks = {folder / f"{start}.npz": ids[start : start + size] for start in ids[::size]}
    todo = {path: block for path, block in blocks.items() if not (survey.together or is_whole(path))}
    shown = bar(desc="packing", total=len(ids), unit=" samples", disable=not progress, leave=False)
    written = side_by_side(partial(write_block, survey, sample), todo.items())
    with shown, contextlib.closing(written), contextlib.ExitStack() as stack:
        for path, block in blocks.items():
            if path in todo:
                next(written)
            facts, arrays = read_block(survey, sample, block) if survey.together else load_block(path)
            shown.update(len(block))
            every.append(facts)
            if facts["kept"]:
                columns = require_alike(survey.entries[facts["kept"][0]].name, facts["columns"], columns)
                for name, column in columns.items():
                    if name not in files:
                        files[name] = stack.enter_context(open(folder / "new" / f"{name}.npy", "xb", 1 << 20))
                    rows[name] += len(arrays[name])
                    header = {"descr": column.dtype, "fortran_order": False, "shape": (rows[name], *column.shape)}
                    files[name].seek(0)  # the header has the same size for any number of rows
                    np.lib.format.write_array_header_1_0(files[name], header)
                    files[name].seek(0, 2)
                    files[name].write(arrays[name].data)
        columns = columns or {}
        ragged = [name for name, column in columns.items() if column.kind == "ragged"]
        reserved = {"split", "id", *(f"{name}{end}" for name in ragged for end in (".offsets", "_length"))}
        if taken := sorted(reserved & columns.keys()):
            fix = "rename it in the source, or choose others with inputs=[…]"
            raise PackError(f"column {taken[0]!r}: nbtools reserves {', '.join(sorted(reserved))}; {fix}")
        for name in ragged:
            lengths = [length for facts in every for length in facts["lengths"].get(name, ())]
            np.save(folder / "new" / f"{name}.offsets.npy", np.cumsum([0, *lengths], dtype=np.int64))
    return {"columns": columns} | {key: [x for one in every for x in one[key]] for key in ("kept", "classes", "bad")}


def read_block(survey: Survey, sample: Sampler, block: range) -> tuple[dict[str, Any], Arrays]:
    """Return what became of a block of entries, and the arrays of its samples, joined."""
    facts: dict[str, Any] = {"kept": [], "bad": [], "classes": [], "columns": None, "lengths": {}}
    rows = dict[str, list[np.ndarray]]()
    ahead = [block]
    while ahead:
        ids = ahead.pop()
        name, own, several = survey.entries[ids[0]].name, dict[str, Column](), len(ids) > 1
        try:
            made = {**sample(ids[0])} if not several else survey.together(ids) if survey.together else None
        except PackError as error:
            if len(error.args) != 3:  # of all samples
                raise PackError(f"{name}: {error}") from None
            facts["bad"].append((name, *map(str, error.args)))
            continue
        if made is None:  # parts of which one is refused are halved, and few read one by one
            step = len(ids) // 2 if survey.together and len(ids) > FEW else 1
            ahead += reversed([ids[at : at + step] for at in range(0, len(ids), step)])
            continue
        facts["kept"] += ids
        if survey.named:
            classes = made.pop(survey.named)
            facts["classes"] += classes if several else [str(classes)]
        for column, value in made.items():
            array, ragged = np.asarray(value, order="C"), column in survey.ragged
            array = array if ragged or several else array[None]
            rows.setdefault(column, []).append(array)
            dtype = array.dtype.newbyteorder("=").str  # as they are joined
            own[column] = Column("ragged" if ragged else "fixed", dtype, array.shape[1:])
        facts["columns"] = require_alike(name, own, facts["columns"])
    facts["lengths"] = {name: [*map(len, arrays)] for name, arrays in rows.items() if name in survey.ragged}
    return facts, {name: np.concatenate(arrays) for name, arrays in rows.items()}


def write_block(survey: Survey, sample: Sampler, todo: tuple[Path, range]) -> None:
    path, block = todo
    facts, arrays = read_block(survey, sample, block)
    joined: Any = {f"{name}.array": array for name, array in arrays.items()}
    part = path.with_suffix(".part")
    with open(part, "wb") as file:  # not synced: its checksums tell whether all of it reached the disk
        np.savez(file, facts=np.array(json.dumps(facts, default=vars)), **joined)
    part.replace(path)


def load_block(path: Path) -> tuple[dict[str, Any], Arrays]:
    """Return what `read_block` returned of a block that is written. Raises DAMAGED where it is not whole."""
    with np.load(path) as file:
        facts = json.loads(str(file["facts"]))
        facts["columns"] = restore(dict[str, Column], facts["columns"] or {})
        return facts, {name.removesuffix(".array"): file[name] for name in file.files if name != "facts"}


def is_whole(path: Path) -> bool:
    with contextlib.suppress(*DAMAGED):
        return bool(load_block(path))
    return False


def require_alike(name: str, own: dict[str, Column], first: dict[str, Column] | None) -> dict[str, Column]:
    """Return the first sample's columns; raise PackError unless another has the same, in any order, of plain dtypes."""
    for column, dtype in ((column, np.dtype(one.dtype)) for column, one in own.items()):
        if dtype.kind not in "biuf":
            raise PackError(f"{column}: a pack can hold numbers and booleans only, got {dtype}; store class indices")
    if first is not None and own != first:
        came, before = (", ".join(f"{name} {c}" for name, c in each.items()) for each in (own, first))
        raise PackError(f"{name}: its columns are {came}; the first sample's are {before}")
    return own if first is None else first


def finish(folder: Path, joined: dict[str, Any], survey: Survey, task: str, made: Made, draw: Draw) -> None:
    """Write classes, names, splits and the manifest beside the arrays: the folder is then a whole pack."""
    columns, bad = joined["columns"], [*survey.bad, *joined["bad"]]
    entries = [survey.entries[i] for i in joined["kept"]]
    if not entries:
        reason = "no samples found; is this the right folder?"
        if bad:
            reason = f"0 of {plural(len(bad), 'file')} can be used. The first: {bad[0][0]}: {PackError(*bad[0][1:])}"
        raise PackError(f"{made['source']}: {reason}", entry="Keys, columns and paths")
    numbers = all(name.removeprefix("-").isdecimal() for name in joined["classes"])  # of which 10 follows 9
    classes = [*survey.classes] or sorted({*joined["classes"]}, key=lambda name: (int(name) if numbers else 0, name))
    if survey.named is not None:
        index = {name: i for i, name in enumerate(classes)}
        np.save(folder / f"{survey.named}.npy", np.array([index[name] for name in joined["classes"]], np.int64))
        columns[survey.named] = Column("fixed", "<i8", ())
    (folder / "names.json").write_text(json.dumps([entry.name for entry in entries]))
    if any(entry.group for entry in entries):
        (folder / "groups.json").write_text(json.dumps([entry.group for entry in entries]))
    with open(folder / "bad.csv", "w", encoding="utf-8-sig", errors="backslashreplace", newline="") as file:
        csv.writer(file).writerows([("file", "value", "rule", "fix"), *bad])
    card = Card(task, classes, {**survey.options}, {**columns, **survey.columns}, {}, survey.bucket_by, [*draw])
    pack = Pack(folder, card, {}, np.zeros(len(entries), np.uint8))
    label = survey.named or ("label" if classes and str(columns.get("label")) in ("int64 ()", "int64 (1)") else None)
    labels = None if label is None else class_names(pack.arrays[label], classes)
    split, remarks = divide(entries, survey, pack, labels, draw)
    pack = pack.with_split(np.array([*map(splits.SPLITS.index, split)]))
    np.save(folder / "split.npy", pack.split)
    learned, learned_remarks = survey.learn(pack, pack.ids("train")) if survey.learn else ({}, [])
    files = {path.name: {"size": path.stat().st_size, "sha256": disk.sha256(path)} for path in sorted(folder.iterdir())}
    given = map(survey.options.get("roles", {}).get, ("mean", "std"))
    besides = [*given, made["key"] * (survey.columns.keys() > columns.keys())]  # what no file says: what is not stored
    held = "".join([*(file["sha256"] for name, file in files.items() if name not in APART), f"{besides}"])
    content, whole = (hashlib.sha256(f"{held}{more}".encode()).hexdigest() for more in ("", files["split.npy"]))
    card = replace(pack.card, options={**card.options, **learned}, digest=whole, content=content)
    more = {"bad": len(bad), "label": label, "remarks": [*remarks, *learned_remarks]}
    manifest = {**made, **more, "version": FORMAT, "nbtools": disk.VERSION, "card": card.to_dict(), "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1))


def divide(entries: Sequence[Entry], survey: Survey, pack: Pack, labels: Any, draw: Draw) -> tuple[list[str], ...]:
    """Return the split of each sample, by its group or name, exact: by its arrays without the class; and remarks."""
    given, groups = [entry.split for entry in entries], [entry.group for entry in entries]
    needed = None in given or "val" not in given  # else the source's splits stand
    first = dict[bytes, str]()  # by what it holds, but for the label and distances to it: copies are a group
    for i, entry in enumerate(entries if needed and not survey.exact else ()):
        held = b"".join(array.tobytes() for name, array in pack.sample(i).items() if name not in ("label", "distance"))
        groups[i] = entry.group or first.setdefault(hashlib.sha256(held).digest(), entry.name)
    places, units = pack.places(groups, survey.named, labels, draw[2], survey.exact and needed)
    split = splits.assign(given, places, units, labels if survey.exact else None, draw[:2], survey.exact)
    wanted = Counter(entry.split for entry in survey.entries)
    wanted[None] += len(survey.bad) * (None in wanted)  # files that the survey refused
    lines = []
    for one, lost in (wanted - Counter(given)).items():
        of = f" of the {one} split" if one else ""
        lines.append(f"{lost:,} of {plural(wanted[one], 'sample')}{of} cannot be used, see pack.bad")
    shares = {"train": 1, "val": draw[0], "test": 0 if {*given} - {None} else draw[1]}
    drawn = [one for one, share in shares.items() if share and not splits.is_all(draw[1])]
    if survey.varying and drawn[1:]:
        lines.append(f"the Dataset augments {' and '.join(drawn[1:])} too: pass val=… one without random transforms")
    parts = Counter(group for group, _ in {*zip(groups, split, strict=True)} if group and survey.exact)
    if shared := sorted(group for group, count in parts.items() if count > 1):
        lines.append(f"{plural(len(shared), 'group')} in several of the splits given ({splits.some(shared)})")
    return split, lines + splits.remarks(split, labels, drawn)
