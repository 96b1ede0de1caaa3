"""Pages of handwritten lines as CASIA-HWDB 2.x publishes them (`.dgrl`): bytes ↔ values, the same bytes both ways.

Little-endian, in this order (nlpr.ia.ac.cn/databases/handwriting/Offline_database.html):

    header  int32 its size, 36 + len(illustration); char[8] "DGRL"; illustration; char[20] code type;
            int16 bytes of a code (2); int16 bits a pixel (1 or 8)
    page    int32 height, width, lines
    line    int32 characters; their codes; int32 top, left, height, width; bitmap, its rows of whole bytes

Real lines may reach a little past their page, so where a line lies is kept and not judged; its size is.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nbtools.errors import PackError
from nbtools.tasks.hwdb.scan import (
    CODE,
    INT,
    LONGEST,
    UNKNOWN,
    Bytes,
    Cursor,
    FormatError,
    Header,
    bitmap,
    bitmap_bytes,
    character,
    codes_of,
    read_header,
    row_bytes,
    write_header,
)

__all__ = ["UNKNOWN", "FormatError", "Line", "Page", "Place", "line_at", "lines_of", "read_page", "write_page"]

PAGE = struct.Struct("<3i")
BOX = struct.Struct("<4i")
SMALLEST = INT.size + BOX.size + 1  # bytes of a line: no character, one pixel


@dataclass(frozen=True, eq=False)
class Line:
    """A line of a page: image (H, W) uint8 grey, 255 paper. Characters that nobody could read are UNKNOWN.

    codes and spare are what text and image do not say of the file's bytes (which kind of unknown, bits past the right
    edge); a line that is made anew leaves them empty.
    """

    text: str
    top: int
    left: int
    height: int
    width: int
    image: np.ndarray
    codes: bytes = b""
    spare: bytes = b""


@dataclass(frozen=True, eq=False)
class Page:
    """Sizes in pixels. illustration and code_type hold the file's bytes as latin-1."""

    height: int
    width: int
    lines: tuple[Line, ...]
    illustration: str = ""
    code_type: str = "GB"
    bits: int = 8
    kind: str = "DGRL"


@dataclass(frozen=True)
class Place:
    """Where a line lies in its file: found without reading a pixel, and holding nothing of the file's memory."""

    name: str
    index: int
    offset: int
    codes: bytes
    top: int
    left: int
    height: int
    width: int
    start: int
    bits: int

    @property
    def text(self) -> str:
        """Raises FormatError at the first code that is none; the other lines of the page are not touched by that."""
        found = [character(self.codes[i : i + CODE]) for i in range(0, len(self.codes), CODE)]
        if None in found:
            n = found.index(None)
            code = self.codes[n * CODE : (n + 1) * CODE].hex()
            raise FormatError(
                f"0x{code} at byte {self.offset + INT.size + n * CODE:,} of {self.name}",
                "a code is two bytes of GB18030, ASCII and a zero, or 0xFF for unknown",
                f"leave line {self.index} out, or correct the code",
            )
        return "".join(one for one in found if one)

    def read(self, data: Bytes) -> Line:
        """The line, from the bytes it was found in."""
        image, spare = bitmap(data, self.start, self.height, self.width, self.bits)
        return Line(self.text, self.top, self.left, self.height, self.width, image, self.codes, spare)


def lines_of(data: Bytes, name: str = "page.dgrl") -> Iterator[Place]:
    """Each line's place, in order, by reading the numbers between the bitmaps only.

    Raises FormatError where the file stops making sense, after the lines up to there; bytes after the last line too.
    """
    cursor = Cursor(data, name)
    header = read_header(cursor, "DGRL")
    _, _, count = read_size(cursor)
    return places(cursor, count, header.bits)


def read_size(cursor: Cursor) -> tuple[int, int, int]:
    """(height, width, lines) of the page."""
    at = cursor.at
    height, width, count = cursor.ints(PAGE, "the page's size")
    if not (1 <= height <= LONGEST and 1 <= width <= LONGEST):
        cursor.refuse(f"a page's sides have 1 to {LONGEST:,} pixels", f"{height:,} × {width:,}", at)
    if not 0 <= count <= cursor.rest // SMALLEST:
        cursor.refuse(f"at most {cursor.rest // SMALLEST:,} lines fit in the file", f"{count:,}", at + 8)
    return height, width, count


def places(cursor: Cursor, count: int, bits: int) -> Iterator[Place]:
    for index in range(count):
        yield located(cursor, index, bits)
    if cursor.rest:
        cursor.refuse(f"the file ends after line {count - 1}", f"{cursor.rest:,} bytes more")


def located(cursor: Cursor, index: int, bits: int) -> Place:
    """The place of the line at the cursor, which goes past it."""
    offset = cursor.at
    (characters,) = cursor.ints(INT, f"line {index}")
    if characters < 0:
        cursor.refuse(f"line {index} has no fewer than 0 characters", f"{characters:,}", offset)
    codes = cursor.take(characters * CODE, f"line {index}'s text")
    at = cursor.at
    top, left, height, width = cursor.ints(BOX, f"line {index}'s size")
    if not (1 <= height <= LONGEST and 1 <= width <= LONGEST):
        cursor.refuse(f"line {index}'s sides have 1 to {LONGEST:,} pixels", f"{height:,} × {width:,}", at + 8)
    start = cursor.skip(height * row_bytes(width, bits), f"line {index}'s bitmap of {height:,} × {width:,} pixels")
    return Place(cursor.name, index, offset, codes, top, left, height, width, start, bits)


def line_at(data: Bytes, index: int, name: str = "page.dgrl") -> Line:
    """One line of a page; of those before it only the numbers are read. Raises FormatError where there is none."""
    cursor = Cursor(data, name)
    header = read_header(cursor, "DGRL")
    _, _, count = read_size(cursor)
    if not 0 <= index < count:
        raise FormatError(f"line {index}", f"{name} has lines 0 to {count - 1}", "name one of these")
    for n in range(index):
        located(cursor, n, header.bits)
    return located(cursor, index, header.bits).read(data)


def read_page(data: Bytes, name: str = "page.dgrl") -> Page:
    """The whole page. Raises FormatError (a PackError) naming file, byte, rule, what came, and what to do."""
    cursor = Cursor(data, name)
    header = read_header(cursor, "DGRL")
    height, width, count = read_size(cursor)
    lines = tuple(place.read(data) for place in list(places(cursor, count, header.bits)))
    return Page(height, width, lines, header.illustration, header.code_type, header.bits, header.kind)


def write_page(page: Page) -> bytes:
    """The file of a page; what `read_page` gave, byte for byte. Raises PackError naming the line that cannot be."""
    header = write_header(Header(page.kind, page.illustration, page.code_type, page.bits))
    size = packed(PAGE, "Page.height, width and number of lines", page.height, page.width, len(page.lines))
    return b"".join([header, size, *(line_bytes(line, n, page.bits) for n, line in enumerate(page.lines))])


def line_bytes(line: Line, n: int, bits: int) -> bytes:
    image = line.image
    if image.dtype != np.uint8 or image.shape != (line.height, line.width) or not image.size:
        raise PackError(
            f"Page.lines[{n}].image must be uint8 ({line.height}, {line.width}), as the line's height and width say, "
            f"got {image.dtype} {image.shape}"
        )
    codes = line.codes if same_text(line) else codes_of(line.text)
    box = packed(BOX, f"Page.lines[{n}]'s top, left, height, width", line.top, line.left, line.height, line.width)
    return INT.pack(len(codes) // CODE) + codes + box + bitmap_bytes(image, line.spare, bits)


def same_text(line: Line) -> bool:
    """Whether the codes still say what the text does; a changed text is written from its characters."""
    pairs = (line.codes[i : i + CODE] for i in range(0, len(line.codes), CODE))
    return len(line.codes) == CODE * len(line.text) and list(map(character, pairs)) == list(line.text)


def packed(layout: struct.Struct, what: str, *values: int) -> bytes:
    try:
        return layout.pack(*values)
    except struct.error:
        raise PackError(f"{what} must fit in {layout.size // len(values) * 8} bits, got {values}") from None
