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
from nbtools.table import sized
from nbtools.tasks.hwdb.formats.scan import (
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
    codes_of,
    packed,
    read_header,
    row_bytes,
    sides,
    spelled,
    write_header,
)

__all__ = ["UNKNOWN", "FormatError", "Line", "Page", "Place", "lines_of", "read_page", "write_page"]

PAGE = struct.Struct("<3i")
BOX = struct.Struct("<4i")
SMALLEST = INT.size + BOX.size + 1  # bytes of a line: no character, one pixel


@dataclass(frozen=True, eq=False, slots=True)
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
    """Sizes in pixels. illustration, code_type and kind hold the header's bytes as latin-1."""

    height: int
    width: int
    lines: tuple[Line, ...]
    illustration: str = ""
    code_type: str = "GB"
    bits: int = 8
    kind: str = "DGRL"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a line lies in its file: found without reading a pixel, and holding none of the file's memory.

    index: from 0, where messages count from 1. offset: the byte where its codes begin; start: where its bitmap does.
    """

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
        """Raises FormatError at the first code that is none; the page's other lines can be read all the same."""
        found = spelled(self.codes)
        if not found.all():
            n = CODE * int(np.flatnonzero(found == "")[0])
            raise FormatError(
                f"0x{self.codes[n : n + CODE].hex()} at byte {self.offset + n:,} of {self.name}",
                "a code is two bytes of GB18030, ASCII and a zero byte, or 0xFF for unknown",
                f"leave line {self.index + 1} out, or correct the code",
            )
        return "".join(found)

    def read(self, data: Bytes) -> Line:
        """The line, from the bytes it was found in."""
        text = self.text
        image, spare = bitmap(data, self.start, self.height, self.width, self.bits)
        return Line(text, self.top, self.left, self.height, self.width, image, self.codes, spare)


def lines_of(data: Bytes, name: str = "page.dgrl") -> Iterator[Place]:
    """Each line's place, in order, by reading the numbers between the bitmaps only.

    Raises FormatError where the file stops making sense, after the lines up to there; bytes after the last line too.
    """
    cursor = Cursor(data, name)
    header = read_header(cursor, "DGRL")
    _, _, count = read_size(cursor, SMALLEST)
    yield from places(cursor, count, header.bits)


def read_page(data: Bytes, name: str = "page.dgrl") -> Page:
    """The whole page. Raises FormatError (a PackError) naming file, byte, rule, what came, and what to do."""
    cursor = Cursor(data, name)
    header = read_header(cursor, "DGRL")
    height, width, count = read_size(cursor, SMALLEST)
    lines = tuple(place.read(data) for place in places(cursor, count, header.bits))
    return Page(height, width, lines, header.illustration, header.code_type, header.bits, header.kind)


def write_page(page: Page) -> bytes:
    """The file of a page; of one that was read, the same bytes. Raises PackError naming the line that breaks a rule.

    With one bit a pixel, what is darker than 128 is ink.
    """
    header = Header(page.kind, page.illustration, page.code_type, page.bits)
    start = write_header(header, "DGRL") + size_bytes(page.height, page.width, len(page.lines))
    return b"".join([start, *(line_bytes(line, n, page.bits) for n, line in enumerate(page.lines))])


def read_size(cursor: Cursor, smallest: int) -> tuple[int, int, int]:
    """(height, width, lines) of the page; smallest: the bytes of the least line there can be."""
    at = cursor.at
    height, width, count = cursor.ints(PAGE, "the page's size")
    require_sides(cursor, "the page", height, width, at)
    require_count(cursor, "lines", count, smallest, at + 8)
    return height, width, count


def require_sides(cursor: Cursor, what: str, height: int, width: int, at: int) -> None:
    if not sides(height, width):
        cursor.refuse(f"height and width of {what} are 1 to {LONGEST:,} pixels", f"{height:,} × {width:,}", at)


def require_count(cursor: Cursor, what: str, count: int, smallest: int, at: int) -> None:
    most = cursor.rest // smallest
    if not 0 <= count <= most:
        cursor.refuse(f"0 to {most:,} {what} fit in the rest of the file", f"{count:,}", at)


def places(cursor: Cursor, count: int, bits: int) -> Iterator[Place]:
    for index in range(count):
        yield line_place(cursor, index, bits)
    cursor.end(count)


def line_place(cursor: Cursor, index: int, bits: int) -> Place:
    """The place of the line at the cursor, which goes past it."""
    at, what = cursor.at, f"line {index + 1}"
    (count,) = cursor.ints(INT, what)
    require_count(cursor, f"characters of {what}", count, CODE, at)
    codes = cursor.take(count * CODE, f"the text of {what}")
    return boxed(cursor, what, BOX, index, codes, bits)


def boxed(cursor: Cursor, what: str, layout: struct.Struct, index: int, codes: bytes, bits: int) -> Place:
    """The place of what has its codes just before the cursor, and its box and bitmap after it."""
    at = cursor.at
    top, left, height, width = cursor.ints(layout, f"the box of {what}")
    require_sides(cursor, what, height, width, at + layout.size // 2)
    start = cursor.skip(height * row_bytes(width, bits), f"{what} of {sized(height, width)}")
    return Place(cursor.name, index, at - len(codes), codes, top, left, height, width, start, bits)


def size_bytes(height: int, width: int, count: int) -> bytes:
    if not sides(height, width):
        raise PackError(f"height and width of a page are 1 to {LONGEST:,} pixels, got {height:,} × {width:,}")
    return packed(PAGE, "the size of a page", height, width, count)


def line_bytes(line: Line, n: int, bits: int) -> bytes:
    codes, rest = line_codes(line), box_bytes(line, f"line {n + 1}", BOX, bits)
    return INT.pack(len(codes) // CODE) + codes + rest


def line_codes(line: Line) -> bytes:
    """The codes that were read where they still say the text, else those of the text."""
    kept = len(line.codes) == CODE * len(line.text) and "".join(spelled(line.codes)) == line.text
    return line.codes if kept else codes_of(line.text)


def box_bytes(line: Line, what: str, layout: struct.Struct, bits: int) -> bytes:
    """Its box and its bitmap. Raises PackError where the image is not what the box says."""
    image = line.image
    if image.dtype != np.uint8 or image.shape != (line.height, line.width) or not sides(*image.shape):
        raise PackError(
            f"the image of {what} must be uint8 ({line.height}, {line.width}), as its height and width say, and its "
            f"sides 1 to {LONGEST:,} pixels, got {image.dtype} {image.shape}"
        )
    box = packed(layout, f"top, left, height and width of {what}", line.top, line.left, line.height, line.width)
    return box + bitmap_bytes(image, line.spare, bits)
