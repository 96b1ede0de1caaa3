"""What lies in a source: pages of CASIA-HWDB, or images of lines with their texts in a list, of any script.

    pages   …Train/001-P16.dgrl …, as folders or as the archives they come in
    lines   {train,val,test}/NAME.png, {train,val,test}_img_id_gt.txt with `name,text`, and perhaps chars_list.txt

The source may be an archive or have archives in it, which are read in place; a sample's name may lead through one:
`HWDB2.0Train.zip/001-P16.dgrl#3` is the third line of a page in it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from nbtools.data import bar
from nbtools.errors import PackError
from nbtools.tasks.hwdb.formats.dgrl import Line, Place
from nbtools.tasks.hwdb.formats.scan import FormatError
from nbtools.tasks.hwdb.lines.charset import CHARS_LIST, characters_of
from nbtools.tasks.hwdb.lines.lists import Images, rows_of
from nbtools.tasks.hwdb.lines.pages import SUFFIXES, lines_in, page_at
from nbtools.tasks.hwdb.lines.ways import ARCHIVE, DEEPEST, content, hidden, walked

__all__ = ["LAYOUTS", "Findings", "Found", "group_of", "hidden", "survey"]

LAYOUTS = ("auto", "pages", "lines")
SPLIT = re.compile(r"(?<![a-z])(?:(train)(?:ing)?|(val)(?:id|idation)?|(test)(?:ing)?)(?![a-z])", re.I)
WRITER = re.compile(r"(\d+)-P\d+")
LIST = re.compile(r"(.*)_img_id_gt\.txt", re.I)


@dataclass(frozen=True)
class Found:
    """A line and its text. name: from the source on; group: what must not be parted by the splits, a writer's lines."""

    name: str
    text: str
    split: str | None
    group: str


@dataclass
class Findings:
    """All that a source holds; bad: file, value, rule and fix of what cannot be used."""

    layout: str
    lines: list[Found] = field(default_factory=list)
    bad: list[tuple[str, ...]] = field(default_factory=list)
    characters: list[str] | None = None  # those that the source's own list names

    def add(self, found: Found) -> None:
        if found.text:
            self.lines.append(found)
        else:
            self.refuse(found.name, "no characters", "a line has a text", "correct its text, or leave it out")

    def refuse(self, file: str, *problem: object) -> None:
        self.bad.append((file, *map(str, problem)))


def survey(folder: Path, layout: str = "auto", progress: bool = False) -> Findings:
    """What a folder holds, or an archive, texts read and pictures not. Raises PackError where there is nothing to
    read."""
    names = sorted(walked(folder, progress))
    pages = [name for name in names if name.lower().endswith(SUFFIXES)]
    lists = [name for name in names if LIST.fullmatch(PurePosixPath(name).name)]
    chosen = chosen_layout(folder, layout, pages, lists)
    findings = of_pages(folder, pages, progress) if chosen == "pages" else of_lists(folder, lists, names)
    for name in filter(ARCHIVE.search, names):
        rule = f"archives are opened where no folder of that name is beside them, and {DEEPEST} deep"
        findings.refuse(name, "an archive", rule, "nothing, if its folder is complete; else delete the folder")
    return findings


def chosen_layout(folder: Path, layout: str, pages: list[str], lists: list[str]) -> str:
    found = {"pages": pages, "lines": lists}
    if layout == "auto" and pages and lists:
        raise PackError(
            f'{folder}: holds pages ({pages[0]}) and lists of lines ({lists[0]}); choose layout="pages" or "lines"'
        )
    chosen = layout if layout != "auto" else "pages" if pages else "lines"
    if not found[chosen]:
        looked = {
            "auto": "no page (.dgrl) and no list of lines (train_img_id_gt.txt)",
            "pages": "no page (.dgrl)",
            "lines": "no list of lines (train_img_id_gt.txt, val_… or test_…)",
        }[layout]
        raise PackError(f"{folder}: {looked} is in it or in its archives; give the folder that holds HWDB2.0Train")
    return chosen


def split_of_way(name: str) -> str | None:
    """What the nearest folder or archive on a file's way says: HWDB2.0Train, test, valid …"""
    for part in reversed(PurePosixPath(name).parts[:-1]):
        if match := SPLIT.search(part):
            return split_word(match)
    return None


def split_word(match: re.Match[str]) -> str:
    return next(word.lower() for word in match.groups() if word)


def group_of(name: str) -> str:
    """The writer of 001-P16.dgrl; else the file itself."""
    match = WRITER.match(PurePosixPath(name).name)
    return f"writer {match[1]}" if match else name


def of_pages(folder: Path, names: list[str], progress: bool) -> Findings:
    findings, listed = Findings("pages"), set(names)
    for name in bar(names, "reading texts", unit=" pages", mininterval=0.5, disable=not progress, leave=False):
        if name.lower().endswith(".dgr") and f"{name}l" in listed:
            rule = "a page is read once, and its lines are in the .dgrl file beside it"
            findings.refuse(name, ".dgr", rule, "nothing: it is not needed")
            continue
        try:
            with page_at(folder / name) as data:
                for number, line in enumerate(lines_in(data, PurePosixPath(name).name), 1):
                    line_of_page(findings, name, number, line)
        except PackError as error:
            findings.refuse(name, *error.args)
    return findings


def line_of_page(findings: Findings, name: str, number: int, line: Place | Line) -> None:
    try:
        findings.add(Found(f"{name}#{number}", line.text, split_of_way(name), group_of(name)))
    except FormatError as error:
        findings.refuse(f"{name}#{number}", *error.args)


def of_lists(folder: Path, lists: list[str], names: list[str]) -> Findings:
    findings, seen, candidates = Findings("lines"), {}, dict[str, None]()
    for name in lists:
        way = PurePosixPath(name)
        word = LIST.fullmatch(way.name)[1]  # pyright: ignore[reportOptionalSubscript]: it was chosen by this
        split = match and split_word(match) if (match := SPLIT.search(word)) else None
        images = Images(name.removesuffix(way.name), word, names)
        candidates |= dict.fromkeys(images.names)
        for row in rows_of(content(folder / name)):
            where = f"{name}:{row.number}"
            image = row.problem or images.find(row.name)
            if isinstance(image, tuple):
                findings.refuse(where, *image)
            elif image in seen:
                rule = f"an image stands once in the lists, and this one is in {seen[image]} already"
                findings.refuse(where, row.name, rule, "delete one of the rows")
            else:
                seen[image] = where
                findings.add(Found(image, row.text, split, group_of(image)))
    for name in candidates:
        if name not in seen:
            findings.refuse(name, "no text", "an image stands in a list", "add its row name,text, or delete it")
    short = [name for name in names if PurePosixPath(name).name == CHARS_LIST]
    if short:
        nearest = min(short, key=lambda n: n.count("/"))
        findings.characters = characters_of(content(folder / nearest), folder / nearest)
    return findings
