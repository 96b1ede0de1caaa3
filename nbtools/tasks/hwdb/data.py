"""Sources of handwritten lines → pack: pages of CASIA-HWDB 2.x, or images of lines with lists of their texts.

    pages   …Train/001-P16.dgrl …, cut into lines, or the older .dgr, cut into characters (which it calls words)
    lines   {train,val,test}/NAME.png, {train,val,test}_img_id_gt.txt with `name,text`, and perhaps chars_list.txt

A pack has two ragged columns: image (W, height) uint8, a line's ink on its side (0 paper, as padding is), and label
(N,) int64, places in the classes. The last class is always UNKNOWN: illegible characters, and those that a given list
of classes omits. A page is little-endian (nlpr.ia.ac.cn/databases/handwriting/Offline_database.html):

    header  int32 its size, 36 + len(illustration); char[8] "DGRL" or "DGR"; illustration; char[20] code type;
            int16 bytes of a code (2); int16 bits a pixel (1 or 8)
    page    int32 height, width, lines
    line    .dgrl: int32 characters; their codes; int32 top, left, height, width; bitmap, its rows of whole bytes
            .dgr: int32 words, and for each its code; int16 top, left, height, width; bitmap

A code is two bytes of GB18030, an ASCII character and a zero byte, or 0xFF for an illegible character. With one bit a
pixel a set bit is ink, the highest is leftmost. Real lines may reach past their page, so only their size is checked.
"""

import re
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from mmap import ACCESS_READ, mmap
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from nbtools.data import IMAGES, Card, Entry, Pack, Sample, Survey, bar, build_pack, compose, side_by_side, split_word
from nbtools.errors import PackError
from nbtools.show import size_text
from nbtools.tasks.common import files
from nbtools.tasks.common.rules import Refused, Report, Row, check_source
from nbtools.train import device

UNKNOWN = "\ufffd"
SUFFIXES = (".dgrl", ".dgr")
LIST, CHARS_LIST = re.compile(r"(?:(.*)_)?img(?:_id)?_gt\.txt", re.I), "chars_list.txt"
HEADER, CODE, LINE_BOX, WORD_BOX = 36, 2, "<4i", "<4h"  # bytes: without the illustration; of a character
HEIGHTS = 16, 512  # pixels: the networks halve it several times; no line is scanned with more
HCTR_HEIGHT = 96  # from which the plan's "auto" takes the reference's network: lower lines give it a step a character
TIERS = ((40, 128), (24, 96), (1, 64), (0, 32))
"""GB of GPU memory → height of the lines in pixels. Calculated from activations: not tested on a GPU."""
WIDEST = 100  # times as wide as high; lines of HWDB reach 20
FEW = 3  # writers: one for each split
WRITER = re.compile(r"(?:.*/)?(\d+)-P\d+")  # in the name of a page's line, or of its image
Names = str | Path | Sequence[str] | None  # of classes, or of the file that lists them


def pack(
    source: str | Path,
    *,
    height: int | str = "auto",
    classes: Names = None,
    val: float = 0.1,
    test: float = 0.1,
    into: str | Path | None = None,
    progress: bool = True,
) -> Pack:
    """Return the pack of pages (.dgrl) or of images of lines, from a folder, archive or link; a second call opens it,
    and interrupted packing resumes.

    height: pixels that every line is scaled to; `auto`: 128 for a GPU of 40 GB, 96 of 24, 64 of less, 32 without one.
    classes: the characters to know, as a string, a list, or a file with one per line; all others are UNKNOWN. By
    default the source's chars_list.txt, else every character of all its texts: one that occurs only in a test line is
    then read wrong, as it must be, while as UNKNOWN it could be called right.
    val, test: shares of the writers, or whole numbers: as many writers as have at least that many lines; folders called
    Train, Val or Test and the names of lists come first. test=1.0 makes all of them test, for a source that a run is
    evaluated on.
    Raises PackError if nothing can be used. `validate` reports what is wrong with single lines.
    """
    options, look = options_of(height, classes), partial(survey, progress=progress)
    return build_pack(source, "hwdb", options, look, read, val=val, test=test, into=into, progress=progress)


def validate(source: str | Path, *, height: int | str = "auto", classes: Names = None, progress: bool = True) -> Report:
    """Check every line of a folder, archive or link: an error is what a pack with the same options leaves out. Raises
    PackError if there are no pages and no lists of lines."""
    return check_source(source, options_of(height, classes), partial(survey, progress=progress), read, progress)


def options_of(height: int | str, classes: Names) -> dict[str, Any]:
    """Return the options of `pack` and `validate` as plain values. Raises PackError for one that cannot be."""
    height = device.tier(device.gigabytes(device.pick()), TIERS)[1] if height == "auto" else height
    if type(height) is not int or not HEIGHTS[0] <= height <= HEIGHTS[1]:
        rule = f"height must be a whole number of pixels from {HEIGHTS[0]} to {HEIGHTS[1]}, or auto"
        raise PackError(f"{rule}, got {height!r}; 128 is the reference's, 32 is for CPUs")
    return {"height": height, "classes": None if classes is None else "".join(charset_of(classes))}


def pack_options(card: Card) -> dict[str, Any]:
    """Return options of `pack` with which another source has the classes and the preprocessing of a card."""
    return {**card.options, "classes": [character for character in card.classes if character != UNKNOWN]}


def survey(folder: Path, options: Mapping[str, Any], progress: bool = False) -> Survey:
    """Return every usable line of a source with its label and split; the others are bad, each with its rule."""
    names = files.walk(folder)
    items = items_of(folder, names, progress)
    lines = [item for item in items if isinstance(item, Entry)]
    charsets = sorted((name for name in names if PurePosixPath(name).name == CHARS_LIST), key=lambda n: n.count("/"))
    if options["classes"] is not None:
        classes = tuple(options["classes"])
    elif charsets:
        classes = charset_of(folder / charsets[0])
    else:
        classes = (*sorted(set().union(*(line.label for line in lines)) - {UNKNOWN}), UNKNOWN)
    places = {character: place for place, character in enumerate(classes)}  # `in` a list reads half of 7,375
    unknown, drawn = places[UNKNOWN], {line.split for line in lines} <= {None, "train"}
    labels = (np.array([places.get(c, unknown) for c in line.label], np.int64) for line in lines)
    splits = [None if drawn else line.split or "train" for line in lines]
    pages, writers = [line.name.partition("#")[0] for line in lines], [WRITER.match(line.name) for line in lines]
    hands = [f"writer {match[1]}" if match else page for match, page in zip(writers, pages, strict=True)]
    divided = {hand for hand, split in zip(hands, splits, strict=True) if split in (None, "train")}
    groups = pages if len(divided) < FEW else hands  # no hand is in two splits, where it is told
    groups = [None if group == line.name else group for group, line in zip(groups, lines, strict=True)]
    return Survey(
        [*map(Entry, (line.name for line in lines), splits, labels, groups)],
        classes,
        {"height": options["height"]},
        ragged=("image", "label"),
        bucket_by="image",
        bad=[item[:4] for item in items if isinstance(item, Row)],
    )


def items_of(folder: Path, names: Sequence[str], progress: bool) -> list[Entry | Row]:
    """Return the lines in the files of a folder, their texts as labels, and what cannot be used; no image is read."""
    pages = [name for name in names if name.lower().endswith(SUFFIXES)]
    lists = [name for name in names if LIST.fullmatch(PurePosixPath(name).name)]
    lists.sort(key=lambda name: split_of_list(name) is None)  # those of a split first, since they win
    if pages and lists:
        raise PackError(f"{folder}: holds pages ({pages[0]}) and lists of lines ({lists[0]}); choose one of them")
    if not pages and not lists:
        looked = "no page (.dgrl) and no list of lines (train_img_id_gt.txt, val_… or test_…)"
        raise PackError(f"{folder}: contains {looked}; give the folder that holds HWDB2.0Train, unpacked")
    if not pages:
        images, used = [name for name in names if name.lower().endswith(IMAGES)], dict[str, str]()
        items = [item for name in lists for item in lines_of_list(folder, name, images, used)]
        rule, fix = "an image must be in a list", "add its row name,text, or delete it"
        return items + [Row(image, "no text", rule, fix) for image in images if image not in used]
    read = bar(side_by_side(partial(lines_in, folder), pages), "reading texts", len(pages), disable=not progress)
    return [item for page in read for item in page]


def read(path: Path, options: Mapping[str, Any]) -> Sample:
    """Return one line as the pack holds it, {"image": …}, from an image, or from `page.dgrl#3`, a page's third line.
    Raises Refused on what cannot be used."""
    page, _, wanted = path.name.partition("#")
    if page.lower().endswith(SUFFIXES):
        lines = enumerate(lines_of(page_bytes(path.with_name(page)), page), 1)
        line = next((line for number, line in lines if str(number) == wanted), None)
        if line is None:
            raise Refused(path.name, "the page must have a line of that number", f"name one: {page}#1 is the first")
        grey = image_of(line)
    else:
        grey = np.asarray(files.decode_image(path, "L"))
    return {"image": ink_of(grey, options["height"])}


def ink_of(grey: np.ndarray, height: int) -> np.ndarray:
    """Return ink (w, height) uint8 of grey (H, W), scaled by area (where it is enlarged, linearly); margins stay."""
    rows, columns = grey.shape
    width = max(1, round(columns * height / rows))
    if width > WIDEST * height:
        rule = f"a line must be at most {WIDEST} times as wide as high"
        raise Refused(size_text(rows, columns), rule, "cut it into shorter lines")
    scaling = Image.Resampling.BOX if rows > height else Image.Resampling.BILINEAR
    return np.ascontiguousarray(~np.asarray(Image.fromarray(grey).resize((width, height), scaling)).T)


def charset_of(classes: str | Path | Iterable[str]) -> tuple[str, ...]:
    """Return the classes that a caller passes, UNKNOWN the last: a string or a list of characters, or a file with one
    on each line, where a blank is the space. Raises PackError for what is not a character, or comes twice."""
    option = "classes"
    if isinstance(classes, Path) or (isinstance(classes, str) and classes.endswith(".txt")):
        option, fix = f"{classes}: its lines", "name a file with one character per line"
        text = files.read_text(Path(classes), fix)
        classes = [line for line in text.replace("\r\n", "\n").split("\n") if line]
    return (*(character for character in files.characters(classes, option) if character != UNKNOWN), UNKNOWN)


def entry_of(name: str, text: str, split: str | None) -> Entry | Row:
    if text:
        return Entry(name, split, text)
    return Row(name, "no characters", "a line must have a text", "correct its text, or leave it out")


def split_of_list(name: str) -> str | None:
    return split_word(LIST.sub(r"\1", PurePosixPath(name).name))


def lines_of_list(folder: Path, name: str, images: Sequence[str], used: dict[str, str]) -> Iterator[Entry | Row]:
    """Yield the lines of a list, whose rows name images beside it or in the folder of its name; used: image → row. A
    list whose name tells no split may repeat rows of those whose does, also of images that were moved: they win."""
    own, text, split = LIST.sub(r"\1", name), files.decode_text((folder / name).read_bytes(), name), split_of_list(name)
    divided = {image for image, row in used.items() if not split and split_of_list(row.rpartition(":")[0])}
    known = {compose(PurePosixPath(image).name): image for image in divided}
    for above in (own[: own.rfind("/") + 1], f"{own}/"):  # with and without suffix
        inside = [(compose(image.removeprefix(above)), image) for image in images if image.startswith(above)]
        known |= {cell.rpartition(".")[0]: image for cell, image in inside} | dict(inside)
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        cuts = (line.split(separator, 1) for separator in files.SEPARATORS)  # the text may have more of it
        cells = next((cells for cells in cuts if files.with_slashes(cells[0]) in known), [line])
        where, image = f"{name}:{number}", known.get(files.with_slashes(cells[0]))
        headed = number == 1 and not image and line.casefold().startswith(files.HEADS)
        if headed or not line.strip() or image in divided:
            continue
        if image is None:
            rule, fix = "a row must be name,text of an image that exists", "copy the image too, or correct the row"
            yield Row(where, line, rule, fix)
        elif image in used:
            rule = f"an image must be listed only once, and this one is in {used[image]} already"
            yield Row(where, image, rule, "delete one of the rows")
        else:
            used[image] = where
            yield entry_of(image, compose("".join(cells[1:]).replace("\0", "")), split or files.split_of(name))


class Line(NamedTuple):
    """A line of a page: codes; bits a pixel; its bitmap or its words': top, left, width, rows of bytes, yet unread."""

    codes: bytes
    bits: int
    bitmaps: list[tuple[int, int, int, np.ndarray]]


def lines_in(folder: Path, name: str) -> list[Entry | Row]:
    """Return the lines of a page and what cannot be used: a bad code spoils its line, damage what follows."""
    items: list[Entry | Row] = []
    try:
        for number, line in enumerate(lines_of(page_bytes(folder / name), name), 1):
            text, bad = text_of_codes(line.codes)
            rule, fix = "a code must be GB18030, ASCII and a zero byte, or 0xFF for unknown", "leave the line out"
            where = f"{name}#{number}"
            items.append(Row(where, bad, rule, fix) if bad else entry_of(where, text, files.split_of(name)))
    except Refused as error:
        items.append(error.row(name))
    return items


def page_bytes(path: Path) -> memoryview:
    """Return the bytes of a page, mapped without reading them: a line is a tenth of it."""
    with open(path, "rb") as opened:  # an empty file cannot be mapped
        return memoryview(mmap(opened.fileno(), 0, access=ACCESS_READ) if path.stat().st_size else b"")


def lines_of(data: bytes | memoryview, name: str) -> Iterator[Line]:
    """Yield the lines of a page, of whose format its name tells. Raises Refused where the file stops making sense."""
    kind, page = "DGR" if name.lower().endswith(".dgr") else "DGRL", Reader(data)
    size, magic = page.numbers("<i8s", "the header")
    page.require(magic.split(b"\0")[0] == kind.encode(), f"a .{kind.lower()} file must say {kind}", repr(magic))
    page.take(size - HEADER + 20, "the header")
    length, bits = page.numbers("<2h", "the header")
    page.require(length == CODE and bits in (1, 8), "a code must have 2 bytes, a pixel 1 or 8 bits", (length, bits))
    *_, count = page.numbers("<3i", "the page's size")
    for number in range(1, count + 1):
        what = f"line {number}"
        (length,) = page.numbers("<i", what)
        if kind == "DGRL":
            yield Line(bytes(page.take(CODE * length, what)), bits, [page.bitmap(LINE_BOX, what, bits)])
        else:
            words = [(page.take(CODE, what), page.bitmap(WORD_BOX, what, bits)) for _ in range(length)]
            yield Line(b"".join(code for code, _ in words), bits, [bitmap for _, bitmap in words])
    rest = len(data) - page.at
    page.require(not rest, f"the file must end after line {count:,}", f"{rest:,} bytes more")


class Reader:
    """The bytes of a page in order; what would not fit in the rest of the file is refused before it is read."""

    def __init__(self, data: bytes | memoryview):
        self.data, self.at = memoryview(data), 0

    def require(self, kept: bool, rule: str, value: object) -> None:
        if not kept:
            raise Refused(f"{value} at byte {self.at:,}", rule, "copy the file again, or delete it")

    def take(self, size: int, what: str) -> memoryview:
        rest = len(self.data) - self.at
        self.require(0 <= size <= rest, f"{what} needs {size:,} bytes", f"{rest:,} up to the end")
        self.at += size
        return self.data[self.at - size : self.at]

    def numbers(self, layout: str, what: str) -> Any:
        return struct.unpack(layout, self.take(struct.calcsize(layout), what))

    def bitmap(self, layout: str, what: str, bits: int) -> tuple[int, int, int, np.ndarray]:
        top, left, height, width = self.numbers(layout, what)
        self.require(height > 0 and width > 0, f"{what} must have pixels", size_text(height, width))
        rows = np.frombuffer(self.take(height * -(-width * bits // 8), what), np.uint8)
        return top, left, width, rows.reshape(height, -1)


def image_of(line: Line) -> np.ndarray:
    """Return (H, W) uint8 grey, 255 paper; where words overlap, the darker pixel."""
    above, before = min(top for top, *_ in line.bitmaps), min(left for _, left, *_ in line.bitmaps)
    height = max(top + len(rows) for top, *_, rows in line.bitmaps) - above
    image = np.full((height, max(left + width for _, left, width, _ in line.bitmaps) - before), 255, np.uint8)
    for top, left, width, rows in line.bitmaps:
        pixels = rows if line.bits == 8 else np.unpackbits(rows, axis=1, count=width) - np.uint8(1)  # 1 → 0, 0 → 255
        part = image[top - above :, left - before :][: len(rows), :width]
        np.minimum(part, pixels, out=part)
    return image


def text_of_codes(codes: bytes) -> tuple[str, str]:
    parts = [codes[n : n + CODE] for n in range(0, len(codes), CODE)]
    text = [character(code) for code in parts]
    return "".join(text), "" if all(text) else f"0x{parts[text.index('')].hex()}"


@lru_cache(1 << 16)
def character(code: bytes) -> str:
    if code[0] == 0xFF:
        return UNKNOWN
    try:
        text = (code[:1] if code[1] == 0 else code).decode("gb18030")
    except UnicodeDecodeError:
        return ""
    return text if len(text) == 1 and (text.isprintable() or ord(text) > 127) else ""
