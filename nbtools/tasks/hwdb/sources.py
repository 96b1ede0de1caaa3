"""The contents of a source: pages of CASIA-HWDB, or images of lines with their texts in a list, of any script.

    pages   …Train/001-P16.dgrl …, as folders or as the archives they are published in
    lines   {train,val,test}/NAME.png, {train,val,test}_img_id_gt.txt with `name,text`, and perhaps chars_list.txt

A folder may have archives in it, which are staged. The name of a sample may lead through one:
`HWDB2.0Train.zip/HWDB2.0Train/001-P16.dgrl#3` is the third line of a page.
"""

from __future__ import annotations

import mmap
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path, PurePosixPath

import numpy as np

from nbtools import disk
from nbtools.data import IMAGES, Entry, bar, stage
from nbtools.errors import PackError
from nbtools.tasks.common import files
from nbtools.tasks.common.lists import decode_text, read_rows, slashed
from nbtools.tasks.common.report import Refused
from nbtools.tasks.hwdb.formats import SUFFIXES, Bytes, lines_of, refused

CHARS_LIST = "chars_list.txt"
LIST = re.compile(r"(.*)_img_id_gt\.txt", re.I)
ARCHIVE = re.compile(r"\.(tar|tar\.gz|tgz|tar\.xz|txz|zip)$", re.I)


@dataclass
class Contents:
    """All that a source holds. lines: each with its text as label; bad: (file, value, rule, fix) of what cannot be
    used; characters: the source's own chars_list.txt, (its path, its text)."""

    lines: list[Entry] = field(default_factory=list)
    bad: list[tuple[str, ...]] = field(default_factory=list)
    characters: tuple[Path, str] | None = None

    def add(self, name: str, text: str, split: str | None) -> None:
        if text:
            self.lines.append(Entry(name, split, text))
        else:
            self.refuse(name, "no characters", "a line must have a text", "correct its text, or leave it out")

    def refuse(self, file: str, *problem: object) -> None:
        """problem: value, rule, fix."""
        self.bad.append((file, *map(str, problem)))


def contents_of(folder: Path, progress: bool = False) -> Contents:
    """The contents of a folder; images are not read. Raises PackError if there is nothing to read."""
    names = sorted(names_in(folder, progress))
    pages = [name for name in names if name.lower().endswith(SUFFIXES)]
    lists = [name for name in names if LIST.fullmatch(PurePosixPath(name).name)]
    closed = [name for name in names if ARCHIVE.search(name)]
    if pages and lists:
        raise PackError(f"{folder}: holds pages ({pages[0]}) and lists of lines ({lists[0]}); give the folder of one")
    if not pages and not lists:
        looked = "no page (.dgrl) and no list of lines (train_img_id_gt.txt, val_… or test_…)"
        fix = f"unpack the archive around {closed[0]}" if closed else "give the folder that holds HWDB2.0Train"
        raise PackError(f"{folder}: {looked} is in it or its archives; {fix}")
    contents = of_pages(folder, pages, progress) if pages else of_lists(folder, lists, names)
    for name in closed:
        rule = "an archive is not read within another one or next to a folder of its name"
        contents.refuse(name, "an archive", rule, "nothing, if that folder is complete; else unpack it")
    return contents


# The files


def names_in(folder: Path, progress: bool) -> Iterator[str]:
    """Yield every file's name relative to the folder, with those in archives in place of the archives; hidden ones are
    left out."""
    names = files.walk(folder)
    folders = {above.as_posix() for name in names for above in PurePosixPath(name).parents}
    for name in names:
        if ARCHIVE.search(name) and ARCHIVE.sub("", name) not in folders:
            yield from (
                f"{name}/{inner}"
                for inner in files.walk(unpacked(folder / name, (folder / name).stat().st_mtime_ns, progress))
            )
        else:
            yield name


@lru_cache(maxsize=64)
def unpacked(archive: Path, mtime: int, progress: bool = False) -> Path:
    """Return the folder whose one folder holds the files of an archive."""
    return stage(archive, progress=progress).parent


def on_disk(path: Path) -> Path:
    """Return where a file is, whose path may lead through an archive."""
    for above in path.parents:
        if above.is_file():
            return unpacked(above, above.stat().st_mtime_ns) / path.relative_to(above)
        if above.exists():
            break
    return path


def read_bytes(path: Path) -> bytes:
    """Return all bytes of a file. Raises Refused."""
    try:
        return on_disk(path).read_bytes()
    except OSError as error:
        if disk.is_away(error):
            raise
        raise unreadable(error.strerror or str(error)) from None


def unreadable(value: str) -> Refused:
    return refused(value, "the file must be readable", "copy it again, or delete it")


# Pages


def page_bytes(path: Path) -> Bytes:
    """Return the bytes of a page, mapped without reading them: a line is a tenth of it. Raises Refused."""
    try:
        with open(on_disk(path), "rb") as opened:
            return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        if disk.is_away(error):
            raise
        raise unreadable(getattr(error, "strerror", None) or "no bytes") from None


def read_line(path: Path, number: int) -> np.ndarray:
    """(H, W) uint8 grey of a page's line, counted from 1. Raises Refused."""
    data = page_bytes(path)
    lines = list(islice(lines_of(data, path.name), number or None))
    if not 1 <= number <= len(lines):
        there = f"lines 1 to {len(lines)}" if lines else "no lines"
        raise refused(f"line {number}", f"{path.name} has {there}", "name one of these")
    return lines[-1].image(data)


def of_pages(folder: Path, names: list[str], progress: bool) -> Contents:
    contents = Contents()
    for name in bar(names, "reading texts", unit=" pages", mininterval=0.5, disable=not progress, leave=False):
        try:
            for line in lines_of(page_bytes(folder / name), PurePosixPath(name).name):
                where = f"{name}#{line.number}"
                try:
                    contents.add(where, line.text, files.split_of(name))
                except Refused as error:
                    contents.refuse(where, *error.args)
        except Refused as error:
            contents.refuse(name, *error.args)
    return contents


# Lists of lines


def of_lists(folder: Path, lists: list[str], names: list[str]) -> Contents:
    contents, seen, candidates = Contents(), {}, dict[str, None]()
    for name in lists:
        path = PurePosixPath(name)
        word = LIST.fullmatch(path.name)[1]  # pyright: ignore[reportOptionalSubscript]: it was chosen by this
        images, named = images_of(name.removesuffix(path.name), word, names)
        candidates |= dict.fromkeys(images)
        try:
            text = decode_text(read_bytes(folder / name), name)
            rows = read_rows(text, name, partial(is_row, named), whole=True)
        except Refused as error:
            contents.refuse(name, *error.args)
            continue
        for number, cells in rows:
            where = f"{name}:{number}"
            try:
                image, text = row_of(cells, named)
                if image in seen:
                    rule = f"an image must be listed only once, and this one is in {seen[image]} already"
                    raise refused(image, rule, "delete one of the rows")
                seen[image] = where
                contents.add(image, text, files.split_word(word))
            except Refused as error:
                contents.refuse(where, *error.args)
    for name in candidates:
        if name not in seen:
            contents.refuse(name, "no text", "an image must be in a list", "add its row name,text, or delete it")
    if charsets := [name for name in names if PurePosixPath(name).name == CHARS_LIST]:
        nearest = min(charsets, key=lambda n: n.count("/"))
        contents.characters = folder / nearest, decode_text(read_bytes(folder / nearest), nearest)
    return contents


def is_row(named: Mapping[str, set[str]], cells: list[str]) -> bool:
    return len(cells) > 1 and slashed(cells[0]) in named


def row_of(cells: list[str], named: Mapping[str, set[str]]) -> tuple[str, str]:
    """(image, text) of a row. The first separator ends the name; all others belong to the text, which is taken
    verbatim, blanks and quotes too. named: as of `images_of`. Raises Refused."""
    name, *texts = cells
    if not texts or not name:
        raise refused(",".join(cells), "a row must be name,text", "correct the row")
    images = sorted(named.get(slashed(name), ()))
    if not images:
        raise refused(name, "the image of a row must exist", "copy it too, or correct the row")
    if len(images) > 1:
        raise refused(name, "a name must stand for one image, and there are two", "add its suffix")
    return images[0], ",".join(texts)


def images_of(place: str, word: str, names: list[str]) -> tuple[list[str], dict[str, set[str]]]:
    """(the images that a list may name, its word for one → the images that it can mean): by their path below the list
    or below their folder, with or without their suffix.

    A list train_img_id_gt.txt means those in train/ (or an archive of that name) where there are any, else all below
    its folder. place: that folder, "" or ending in "/"; word: train; names: of all files in the source.
    """
    own = re.compile(rf"{re.escape(place)}(?:{re.escape(word)}(?:\.[\w.]+)?/)+")
    images = [name for name in names if name.startswith(place) and name.lower().endswith(IMAGES)]
    images = list(filter(own.match, images)) or images
    named = defaultdict(set)
    for image in images:
        for key in (image.removeprefix(place), own.sub("", image, count=1)):
            named[key].add(image)
            named[key.rpartition(".")[0]].add(image)
    return images, named
