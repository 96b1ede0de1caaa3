"""Pages of CASIA-HWDB 2.x: `.dgrl`, cut into lines, and the older `.dgr`, cut into characters (which it calls words).

Little-endian, in this order (nlpr.ia.ac.cn/databases/handwriting/Offline_database.html):

    header  int32 its size, 36 + len(illustration); char[8] "DGRL" or "DGR"; illustration; char[20] code type;
            int16 bytes of a code (2); int16 bits a pixel (1 or 8)
    page    int32 height, width, lines
    line    .dgrl: int32 characters; their codes; int32 top, left, height, width; bitmap, its rows of whole bytes
            .dgr: int32 words, and for each its code; int16 top, left, height, width; bitmap

A code is two bytes of GB18030, an ASCII character and a zero byte, or 0xFF for a character that nobody could read. With
one bit a pixel a set bit is ink, the highest is leftmost. Real lines may reach a little past their page, so where a
line lies is kept and not judged; its size is.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from mmap import mmap
from typing import NoReturn

import numpy as np

from nbtools.errors import PackError
from nbtools.table import sized

Bytes = bytes | bytearray | memoryview | mmap

SUFFIXES = (".dgrl", ".dgr")
UNKNOWN = "\ufffd"
INT, SHORTS, PAGE = struct.Struct("<i"), struct.Struct("<2h"), struct.Struct("<3i")
BOX, WORD_BOX = struct.Struct("<4i"), struct.Struct("<4h")
CODE = 2  # bytes of a character
HEADER = 36  # bytes without the illustration
LONGEST = 100_000  # pixels of a side; pages scanned at 300 dots an inch have 2,000 to 4,000
SPREAD = 16  # times the pixels of its words that a line may span: a few bytes must not ask for gigabytes of paper
DAMAGED = "copy the file again from its origin, or delete it"


class FormatError(PackError):
    """A file breaks its format. Its args are (value, rule, fix), a row of a pack's table of bad samples."""

    def __str__(self) -> str:
        value, rule, fix = self.args
        return f"{rule}, got {value}; {fix}"


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a page, or a word of a `.dgr`, found without reading a pixel; it holds none of the file's memory.

    number: from 1. offset: the byte where its codes begin; start: where its bitmap does; bits: of a pixel.
    """

    name: str
    number: int
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
        found = [character(self.codes[n : n + CODE]) for n in range(0, len(self.codes), CODE)]
        if "" in found:
            n = CODE * found.index("")
            raise FormatError(
                f"0x{self.codes[n : n + CODE].hex()} at byte {self.offset + n:,} of {self.name}",
                "a code is two bytes of GB18030, ASCII and a zero byte, or 0xFF for unknown",
                f"leave line {self.number} out, or correct the code",
            )
        return "".join(found)

    def image(self, data: Bytes) -> np.ndarray:
        """(H, W) uint8 grey, 255 paper, from the file's bytes."""
        stride = row_bytes(self.width, self.bits)
        rows = np.frombuffer(data, np.uint8, self.height * stride, self.start).reshape(self.height, stride)
        if self.bits == 8:
            return rows.copy()
        image = np.unpackbits(rows, axis=1, count=self.width)
        return np.subtract(image, 1, out=image)  # 1 → 0, 0 → 255


@dataclass(frozen=True, slots=True)
class Words:
    """A line of a `.dgr`: at least one word."""

    words: tuple[Line, ...]

    @property
    def text(self) -> str:
        """Raises FormatError at the first code that is none."""
        return "".join(word.text for word in self.words)

    def image(self, data: Bytes) -> np.ndarray:
        """(H, W) uint8 grey: the words on blank paper, the darker pixel where two overlap. Raises FormatError where
        they lie too far apart."""
        top, left = min(word.top for word in self.words), min(word.left for word in self.words)
        height = max(word.top + word.height for word in self.words) - top
        width = max(word.left + word.width for word in self.words) - left
        pixels = sum(word.height * word.width for word in self.words)
        if height * width > SPREAD * pixels:
            rule = f"line {self.words[0].number} spans at most {SPREAD} times its words' {pixels:,} pixels"
            raise FormatError(sized(height, width), rule, "leave the line out, or correct where its words lie")
        image = np.full((height, width), 255, np.uint8)
        for word in self.words:
            y, x = word.top - top, word.left - left
            under = image[y : y + word.height, x : x + word.width]
            np.minimum(under, word.image(data), out=under)
        return image


def lines_of(data: Bytes, name: str) -> Iterator[Line | Words]:
    """The lines of a page in order, by reading only the numbers between the bitmaps; name: the file's, which says the
    format. Lines of a `.dgr` without words are left out.

    Raises FormatError where the file stops making sense, after the lines up to there, and on bytes after the last line.
    """
    old = name.lower().endswith(".dgr")
    cursor = Cursor(data, name)
    bits = read_header(cursor, "DGR" if old else "DGRL")
    at = cursor.at
    height, width, count = cursor.ints(PAGE, "the page's size")
    cursor.require_sides("the page", height, width, at)
    cursor.require_count("lines", count, INT.size if old else INT.size + BOX.size + 1, at + 8)
    for number in range(1, count + 1):
        if not old:
            yield read_line(cursor, number, bits)
        elif words := read_words(cursor, number, bits):
            yield Words(words)
    if cursor.rest:
        cursor.refuse(f"the file ends after line {count:,}", f"{cursor.rest:,} bytes more")


def write_page(
    lines: Sequence[tuple[str, int, int, np.ndarray]], height: int, width: int, illustration: str = "", bits: int = 8
) -> bytes:
    """A `.dgrl` file of lines (text, top, left, image (H, W) uint8 grey) on a page of height × width pixels. With one
    bit a pixel, ink is what is darker than 128. illustration: a note in latin-1.

    Raises PackError naming a character that has no code of two bytes.
    """
    note = illustration.encode("latin-1", "replace")
    parts = [INT.pack(HEADER + len(note)), b"DGRL".ljust(8, b"\0"), note, b"GB".ljust(20, b"\0")]
    parts += [SHORTS.pack(CODE, bits), PAGE.pack(height, width, len(lines))]
    for text, top, left, image in lines:
        parts += [INT.pack(len(text)), *map(code_of, text), BOX.pack(top, left, *image.shape)]
        parts.append(image.tobytes() if bits == 8 else np.packbits(image < 128, axis=1).tobytes())
    return b"".join(parts)


@lru_cache(1 << 16)
def character(code: bytes) -> str:
    """The character of a code, "" where it is none."""
    if code[0] == 0xFF:
        return UNKNOWN
    try:
        text = (code[:1] if code[1] == 0 else code).decode("gb18030")
    except UnicodeDecodeError:
        return ""
    return text if len(text) == 1 and (text.isprintable() or ord(text) > 127) else ""


def code_of(text: str) -> bytes:
    """The code of a character. Raises PackError where it has none."""
    code = b"\xff\xff" if text == UNKNOWN else text.encode("gb18030", "replace").ljust(CODE, b"\0")
    if len(code) != CODE or character(code) != text:
        raise PackError(f"a text's characters have two bytes in GB18030, got {text!r}; leave it out or replace it")
    return code


class Cursor:
    """A place in a file's bytes. What would not fit in the rest of the file is refused before it is read."""

    def __init__(self, data: Bytes, name: str):
        self.data, self.name, self.at = data, name, 0

    @property
    def rest(self) -> int:
        return len(self.data) - self.at

    def skip(self, size: int, what: str) -> int:
        """Move past so many bytes; returns where they begin."""
        if size > self.rest:
            self.refuse(f"{what} takes {size:,} bytes", f"{self.rest:,} up to the end")
        self.at += size
        return self.at - size

    def take(self, size: int, what: str) -> bytes:
        start = self.skip(size, what)
        return bytes(self.data[start : start + size])

    def ints(self, layout: struct.Struct, what: str) -> tuple[int, ...]:
        start = self.skip(layout.size, what)
        return layout.unpack_from(self.data, start)

    def require_sides(self, what: str, height: int, width: int, at: int) -> None:
        if not (1 <= height <= LONGEST and 1 <= width <= LONGEST):
            self.refuse(f"height and width of {what} are 1 to {LONGEST:,} pixels", f"{height:,} × {width:,}", at)

    def require_count(self, what: str, count: int, smallest: int, at: int) -> None:
        """smallest: bytes of the smallest one there can be."""
        most = self.rest // smallest
        if not 0 <= count <= most:
            self.refuse(f"0 to {most:,} {what} fit in the rest of the file", f"{count:,}", at)

    def refuse(self, rule: str, value: str, at: int | None = None, fix: str = DAMAGED) -> NoReturn:
        raise FormatError(f"{value} at byte {self.at if at is None else at:,} of {self.name}", rule, fix)


def read_header(cursor: Cursor, kind: str) -> int:
    """The bits of a pixel; kind: DGRL or DGR."""
    (size,) = cursor.ints(INT, "the header")
    magic = cursor.take(8, "the header")
    if magic.split(b"\0")[0] != kind.encode():
        cursor.refuse(f"a .{kind.lower()} file says {kind}", repr(magic), 4, "leave it out: it is another format")
    if not HEADER <= size <= len(cursor.data):
        cursor.refuse(f"the header has {HEADER} to {len(cursor.data):,} bytes", f"{size:,}", 0)
    cursor.skip(size - HEADER, "the illustration")
    cursor.skip(20, "the header")
    at = cursor.at
    length, bits = cursor.ints(SHORTS, "the header")
    if length != CODE:
        cursor.refuse(f"a character's code has {CODE} bytes", str(length), at)
    if bits not in (1, 8):
        cursor.refuse("a pixel has 1 or 8 bits", str(bits), at + 2)
    return bits


def read_line(cursor: Cursor, number: int, bits: int) -> Line:
    at, what = cursor.at, f"line {number}"
    (count,) = cursor.ints(INT, what)
    cursor.require_count(f"characters of {what}", count, CODE, at)
    codes = cursor.take(count * CODE, f"the text of {what}")
    return read_box(cursor, what, BOX, number, codes, bits)


def read_words(cursor: Cursor, number: int, bits: int) -> tuple[Line, ...]:
    at, found = cursor.at, []
    (count,) = cursor.ints(INT, f"line {number}")
    cursor.require_count(f"words of line {number}", count, CODE + WORD_BOX.size + 1, at)
    for n in range(1, count + 1):
        what = f"word {n} of line {number}"
        found.append(read_box(cursor, what, WORD_BOX, number, cursor.take(CODE, f"the code of {what}"), bits))
    return tuple(found)


def read_box(cursor: Cursor, what: str, layout: struct.Struct, number: int, codes: bytes, bits: int) -> Line:
    """The line, or word, whose codes end at the cursor and whose box and bitmap begin there."""
    at = cursor.at
    top, left, height, width = cursor.ints(layout, f"the box of {what}")
    cursor.require_sides(what, height, width, at + layout.size // 2)
    start = cursor.skip(height * row_bytes(width, bits), f"{what} of {sized(height, width)}")
    return Line(cursor.name, number, at - len(codes), codes, top, left, height, width, start, bits)


def row_bytes(width: int, bits: int) -> int:
    return width if bits == 8 else -(-width // 8)
