"""What a source holds: pages of CASIA-HWDB, or images of lines with their texts in a list, of any script.

    pages   …Train/001-P16.dgrl …, as folders or as the archives they are published in
    lines   {train,val,test}/NAME.png, {train,val,test}_img_id_gt.txt with `name,text`, and perhaps chars_list.txt

The source may be an archive or a folder with archives in it, which are read in place, so that 50,000 lines stay one
file on disk. The name of a sample may lead through one: `HWDB2.0Train.zip/001-P16.dgrl#3` is the third line of a page.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from pathlib import Path, PurePosixPath
from threading import Lock

import numpy as np

from nbtools.data import SPLITS, archive_index, bar, is_count, position, read_member, split_of, stage
from nbtools.errors import ArchiveError, PackError
from nbtools.table import plural
from nbtools.tasks.common import files
from nbtools.tasks.hwdb.charset import CHARS_LIST, characters_of
from nbtools.tasks.hwdb.formats import SUFFIXES, Bytes, FormatError, lines_of

LAYOUTS = ("auto", "pages", "lines")
WRITER = re.compile(r"(\d+)-P\d+")
LIST = re.compile(r"(.*)_img_id_gt\.txt", re.I)
LINE = re.compile(r"(.+\.dgrl?)#(\d+)", re.I)
ARCHIVE = re.compile(r"\.(tar|tar\.gz|tgz|tar\.xz|txz|tar\.bz2|tbz2?|zip)$", re.I)
FEW = 3  # writers: one for each split

Problem = tuple[str, str, str]
"""(value, rule, fix)."""


@dataclass(frozen=True)
class Labelled:
    """A line and its text. name: from the source on; group: its writer's, or its file, which no two splits share."""

    name: str
    text: str
    split: str | None
    group: str


@dataclass
class Contents:
    """All that a source holds; bad: (file, value, rule, fix) of what cannot be used; characters: those that its own
    list names."""

    layout: str
    lines: list[Labelled] = field(default_factory=list)
    bad: list[tuple[str, ...]] = field(default_factory=list)
    characters: list[str] | None = None

    def add(self, name: str, text: str, split: str | None, group: str) -> None:
        if text:
            self.lines.append(Labelled(name, text, split, group))
        else:
            self.refuse(name, "no characters", "a line has a text", "correct its text, or leave it out")

    def refuse(self, file: str, *problem: object) -> None:
        self.bad.append((file, *map(str, problem)))


def contents_of(folder: Path, layout: str = "auto", progress: bool = False) -> Contents:
    """What a folder or an archive holds; images are not read. Raises PackError where there is nothing to read."""
    names = sorted(names_in(folder, progress))
    pages = [name for name in names if name.lower().endswith(SUFFIXES)]
    lists = [name for name in names if LIST.fullmatch(PurePosixPath(name).name)]
    unopened = list(filter(ARCHIVE.search, names))
    chosen = chosen_layout(folder, layout, pages, lists, unopened)
    contents = of_pages(folder, pages, progress) if chosen == "pages" else of_lists(folder, lists, names)
    for name in unopened:
        rule = "an archive is read in place unless it lies within another one or next to a folder of its name"
        contents.refuse(name, "an archive", rule, "nothing, if that folder is complete; else unpack it")
    return contents


def chosen_layout(folder: Path, layout: str, pages: list[str], lists: list[str], unopened: list[str]) -> str:
    if layout == "auto" and pages and lists:
        raise PackError(
            f'{folder}: holds pages ({pages[0]}) and lists of lines ({lists[0]}); choose layout="pages" or "lines"'
        )
    chosen = layout if layout != "auto" else "pages" if pages else "lines"
    if not {"pages": pages, "lines": lists}[chosen]:
        missing = {
            "auto": "no page (.dgrl) and no list of lines (train_img_id_gt.txt)",
            "pages": "no page (.dgrl)",
            "lines": "no list of lines (train_img_id_gt.txt, val_… or test_…)",
        }[layout]
        if unopened:
            fix = f"; archives within an archive are not read: unpack the one around {unopened[0]}, and give the folder"
        else:
            fix = " or in its archives; give the folder that holds HWDB2.0Train"
        raise PackError(f"{folder}: {missing} is in it{fix}")
    return chosen


# The files


def names_in(folder: Path, progress: bool) -> Iterator[str]:
    """Every file's name relative to the folder, with those in archives in place of the archives; hidden ones are left
    out. folder: may also lead into an archive, where further archives stay closed."""
    if not folder.is_dir():
        yield from names_in_archive(*on_disk(folder))
        return
    names = files.walk(folder)
    folders = {above.as_posix() for name in names for above in PurePosixPath(name).parents}
    for name in names:
        if ARCHIVE.search(name) and ARCHIVE.sub("", name) not in folders:
            archive, _ = on_disk(folder / name, progress)
            yield from (f"{name}/{inner}" for inner in names_in_archive(archive, ""))
        else:
            yield name


def names_in_archive(archive: Path, top: str) -> list[str]:
    """The files below one of its folders, "" for all of them."""
    start = f"{top}/" if top else ""
    names = (name.removeprefix(start) for name in archive_index(archive).files if name.startswith(start))
    return [name for name in names if not files.is_hidden(name)]


def on_disk(path: Path, progress: bool = False) -> tuple[Path, str]:
    """(file or folder on disk, name within it): "" where the path is all there, else of a file in an archive."""
    for above in (path, *path.parents):
        if above.is_file() and (above != path or ARCHIVE.search(path.name)):
            seen = above.stat()
            inner = path.relative_to(above).as_posix()
            return readable(above, seen.st_size, seen.st_mtime_ns, progress), "" if inner == "." else inner
        if above.exists():
            break
    return path, ""


@lru_cache(maxsize=64)
def readable(archive: Path, size: int, mtime: int, progress: bool) -> Path:
    """An archive on local disk whose files can be read in place: a compressed tar is unpacked into one tar."""
    return stage(archive, extract=False, progress=progress)


def read_bytes(path: Path) -> bytes:
    """All bytes of a file, on disk or in an archive. Raises PackError(value, rule, fix)."""
    file = path
    try:
        file, name = on_disk(path)
        return read_member(file, name) if name else file.read_bytes()
    except OSError as error:
        value = error.strerror or str(error)
    except ArchiveError as error:
        value = str(error).replace(str(file), file.name)
    raise PackError(value, "the file can be read", "copy it again, or delete it")


# Pages


@contextlib.contextmanager
def open_page(path: Path) -> Iterator[Bytes]:
    """The bytes of a page: mapped from disk without reading them (a line is a tenth of it), or inflated once from an
    archive for all the threads that read its lines. Raises PackError(value, rule, fix)."""
    file, name = on_disk(path)
    if name:
        key = (path, file.stat().st_mtime_ns)
        with page_lock(*key):
            data = page_bytes(*key)
        yield data
        return
    try:
        with open(file, "rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        value = getattr(error, "strerror", None) or "no bytes"
        raise PackError(value, "the file can be read", "copy it again, or delete it") from None


@lru_cache(maxsize=8)
def page_bytes(path: Path, mtime: int) -> bytes:
    return read_bytes(path)  # about 3 MB


@lru_cache(maxsize=8)
def page_lock(path: Path, mtime: int) -> Lock:
    return Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=page_lock.cache_clear)  # a thread of the parent may hold one for ever


def read_line(path: Path, number: int) -> np.ndarray:
    """(H, W) uint8 grey of a page's line, counted from 1. Raises PackError(value, rule, fix)."""
    with open_page(path) as data:
        lines = list(islice(lines_of(data, path.name), number or None))
        if not 1 <= number <= len(lines):
            there = f"lines 1 to {len(lines)}" if lines else "no lines"
            raise PackError(f"line {number}", f"{path.name} has {there}", "name one that is there")
        return lines[-1].image(data)


def of_pages(folder: Path, names: list[str], progress: bool) -> Contents:
    contents, listed = Contents("pages"), set(names)
    for name in bar(names, "reading texts", unit=" pages", mininterval=0.5, disable=not progress, leave=False):
        if name.lower().endswith(".dgr") and f"{name}l" in listed:
            rule = "a page is read once, and its lines are in the .dgrl file next to it"
            contents.refuse(name, ".dgr", rule, "nothing: it is not needed")
            continue
        match = WRITER.match(PurePosixPath(name).name)
        split, group = files.split_of(name), f"writer {match[1]}" if match else name
        try:
            with open_page(folder / name) as data:
                for number, line in enumerate(lines_of(data, PurePosixPath(name).name), 1):
                    try:
                        contents.add(f"{name}#{number}", line.text, split, group)
                    except FormatError as error:
                        contents.refuse(f"{name}#{number}", *error.args)
        except PackError as error:
            contents.refuse(name, *error.args)
    return contents


# Lists of lines


def of_lists(folder: Path, lists: list[str], names: list[str]) -> Contents:
    contents, seen, candidates = Contents("lines"), {}, dict[str, None]()
    for name in lists:
        path = PurePosixPath(name)
        word = LIST.fullmatch(path.name)[1]  # pyright: ignore[reportOptionalSubscript]: it was chosen by this
        images = Images(name.removesuffix(path.name), word, names)
        candidates |= dict.fromkeys(images.names)
        for number, row in rows_of(read_bytes(folder / name)):
            where = f"{name}:{number}"
            image = images.find(row[0]) if len(row) == 2 else row
            if isinstance(image, tuple):
                contents.refuse(where, *image)
            elif image in seen:
                rule = f"an image stands once in the lists, and this one is in {seen[image]} already"
                contents.refuse(where, row[0], rule, "delete one of the rows")
            else:
                seen[image] = where
                contents.add(image, row[1], files.split_word(word), image)
    for name in candidates:
        if name not in seen:
            contents.refuse(name, "no text", "an image stands in a list", "add its row name,text, or delete it")
    if charsets := [name for name in names if PurePosixPath(name).name == CHARS_LIST]:
        nearest = min(charsets, key=lambda n: n.count("/"))
        contents.characters = characters_of(files.decode_text(read_bytes(folder / nearest), nearest), folder / nearest)
    return contents


def rows_of(data: bytes) -> Iterator[tuple[int, tuple[str, str] | Problem]]:
    """(number, (name, text) or why it is none) of each row of a list that is not empty. The first comma ends the name;
    all others belong to the text, which is taken as it is, blanks and quotes too."""
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        line = line.removesuffix(b"\r")
        try:
            name, comma, text = line.decode().partition(",")
        except UnicodeDecodeError as error:
            value = f"{line[error.start : error.start + 8]!r} at byte {error.start} of the row"
            yield number, (value, "a list is UTF-8", "save it as UTF-8")
            continue
        if comma and name.strip():
            yield number, (name.strip(), text)
        elif line:
            yield number, (f"{name}{comma}{text}", "a row is name,text", "correct the row")


class Images:
    """The images that a list may name, by their path below it, with or without their suffix.

    A list TRAIN_img_id_gt.txt means those in TRAIN/ (or an archive of that name) where there are any, else all below
    its folder. place: that folder, "" or ending in "/"; word: TRAIN; names: of all files in the source.
    """

    def __init__(self, place: str, word: str, names: Iterable[str]):
        self.place, self.own = place, re.compile(rf"{re.escape(place)}(?:{re.escape(word)}(?:\.[\w.]+)?/)+")
        images = [name for name in names if name.startswith(place) and name.lower().endswith(files.IMAGES)]
        self.names = list(filter(self.own.match, images)) or images
        self.whole = {self.key(name): name for name in self.names}
        self.stems = Counter(os.path.splitext(key)[0] for key in self.whole)
        self.by_stem = {os.path.splitext(key)[0]: name for key, name in self.whole.items()}

    def key(self, name: str) -> str:
        """The path below the folder of its own, or below the list's."""
        return self.own.sub("", name, count=1) if self.own.match(name) else name.removeprefix(self.place)

    def find(self, name: str) -> str | Problem:
        """The image of a row, named from the source on, or why there is none."""
        name = PurePosixPath(name).as_posix()
        for key in (name, self.key(self.place + name)):
            if key in self.whole:
                return self.whole[key]
            if self.stems[key] > 1:
                return name, "a name means one image, and there are two", "write its suffix too"
            if key in self.by_stem:
                return self.by_stem[key]
        return name, "the image of a row is there", "copy it too, or correct the row"


# Splits


def split_lines(lines: Sequence[Labelled], val: float, test: float) -> list[str]:
    """The split of each line: what its source says, and the rest by whole writers, so that no hand is in two splits, or
    by pages where there are fewer than three writers.

    Where the source names only train lines all three splits are drawn from them; where it names a test set, val is
    drawn from train. Raises PackError where nothing is left to train on.
    """
    named = {line.split for line in lines} - {None}
    if named <= {"train"}:
        splits = ["train"] * len(lines)
    else:
        splits, test = [line.split or "train" for line in lines], 0
    if "val" in named or "train" not in splits:
        return splits
    free = [line for line, split in zip(lines, splits, strict=True) if split == "train"]
    by_writer = len({line.group for line in free}) >= FEW
    groups = [line.group if by_writer else line.name.partition("#")[0] for line in lines]
    sizes = Counter(group for group, split in zip(groups, splits, strict=True) if split == "train")
    chosen = split_groups(sizes, val, test)
    return [chosen[group] if split == "train" else split for group, split in zip(groups, splits, strict=True)]


def split_groups(sizes: Mapping[str, int], val: float, test: float) -> dict[str, str]:
    """Group → split, of groups with so many lines each.

    Shares: by each group's own hash, so that it stays where it is when others come; a split that was asked for and got
    none takes one. Whole numbers: by hashes in order, until there are at least so many lines.
    """
    order, shares = sorted(sizes, key=position), {"test": test, "val": val}
    if any(map(is_count, shares.values())):
        rest, result = iter(order), dict.fromkeys(order, SPLITS[0])
        for split, share in shares.items():
            wanted = share if is_count(share) else round(share * sum(sizes.values()))
            while wanted > 0 and (group := next(rest, None)) is not None:
                result[group] = split
                wanted -= sizes[group]
    else:
        result = {group: split_of(group, val, test) for group in order} | {order[-1]: "train"}
    for split, share in shares.items():
        training = [group for group in order if result[group] == "train"]
        if share and split not in result.values() and len(training) > 1:
            result[training[0]] = split
    if "train" not in result.values():
        raise PackError(
            f"val={val} and test={test} leave none of {plural(sum(sizes.values()), 'line')} to train on; lower them"
        )
    return result
