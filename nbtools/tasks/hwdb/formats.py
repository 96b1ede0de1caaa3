"""Pages of CASIA-HWDB 2.x: `.dgrl`, cut into lines, and the older `.dgr`, cut into characters (which it calls words).

Little-endian, in this order (nlpr.ia.ac.cn/databases/handwriting/Offline_database.html):

    header  int32 its size, 36 + len(illustration); char[8] "DGRL" or "DGR"; illustration; char[20] code type;
            int16 bytes of a code (2); int16 bits a pixel (1 or 8)
    page    int32 height, width, lines
    line    .dgrl: int32 characters; their codes; int32 top, left, height, width; bitmap, its rows of whole bytes
            .dgr: int32 words, and for each its code; int16 top, left, height, width; bitmap

A code is two bytes of GB18030, an ASCII character and a zero byte, or 0xFF for an illegible character. With
one bit a pixel a set bit is ink, the highest is leftmost. Real lines may reach a little past their page, so the place
of a line is not checked; its size is.
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
from nbtools.show import sized
from nbtools.tasks.common.report import Refused, Row

Bytes = bytes | bytearray | memoryview | mmap

SUFFIXES = (".dgrl", ".dgr")
UNKNOWN = "\ufffd"
LINE_BOX, WORD_BOX = "<4i", "<4h"
CODE = 2  # bytes of a character
HEADER = 36  # bytes without the illustration
LONGEST = 100_000  # pixels of a side; pages scanned at 300 dots an inch have 2,000 to 4,000
SPREAD = 16  # times the pixels of its words that a line may span: a few bytes must not ask for gigabytes of paper


def refused(value: object, rule: str, fix: str) -> Refused:
    return Refused(Row("", rule, str(value), fix))


@dataclass(frozen=True, slots=True)
class Box:
    """A line's bitmap, or a word's; start: the place of its first byte in the file."""

    top: int
    left: int
    height: int
    width: int
    start: int


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a page, found without reading a pixel. number: from 1; bits: of a pixel; codes: (place in the file,
    code) of each character; boxes: one, or one for each word of a `.dgr`."""

    name: str
    number: int
    bits: int
    codes: Sequence[tuple[int, bytes]]
    boxes: Sequence[Box]

    @property
    def text(self) -> str:
        """Raises Refused at the first code that is none; the page's other lines can be read all the same."""
        for at, code in self.codes:
            if not character(code):
                raise refused(
                    f"0x{code.hex()} at byte {at:,} of {self.name}",
                    "a code must be two bytes of GB18030, ASCII and a zero byte, or 0xFF for unknown",
                    f"leave line {self.number} out, or correct the code",
                )
        return "".join(character(code) for _, code in self.codes)

    def image(self, data: Bytes) -> np.ndarray:
        """(H, W) uint8 grey, 255 paper, from the file's bytes; where words overlap, the darker pixel. Raises Refused
        if words lie too far apart."""
        top, left = min(box.top for box in self.boxes), min(box.left for box in self.boxes)
        height = max(box.top + box.height for box in self.boxes) - top
        width = max(box.left + box.width for box in self.boxes) - left
        pixels = sum(box.height * box.width for box in self.boxes)
        if height * width > SPREAD * pixels:
            rule = f"line {self.number} must span at most {SPREAD} times its words' {pixels:,} pixels"
            raise refused(sized(height, width), rule, "leave the line out, or correct the boxes of its words")
        image = np.full((height, width), 255, np.uint8)
        for box in self.boxes:
            y, x = box.top - top, box.left - left
            part = image[y : y + box.height, x : x + box.width]
            np.minimum(part, pixels_of(box, data, self.bits), out=part)
        return image


def pixels_of(box: Box, data: Bytes, bits: int) -> np.ndarray:
    """(H, W) uint8 grey, 255 paper."""
    stride = row_bytes(box.width, bits)
    rows = np.frombuffer(data, np.uint8, box.height * stride, box.start).reshape(box.height, stride)
    return rows if bits == 8 else np.unpackbits(rows, axis=1, count=box.width) - np.uint8(1)  # 1 → 0, 0 → 255


def row_bytes(width: int, bits: int) -> int:
    return -(-width * bits // 8)


def lines_of(data: Bytes, name: str) -> Iterator[Line]:
    """The lines of a page in order, by reading only the numbers between the bitmaps; name: the file's, which says the
    format. Lines of a `.dgr` without words are left out.

    Raises Refused if the file stops making sense, after the lines up to there, and on bytes after the last line.
    """
    old = name.lower().endswith(".dgr")
    file = Reader(data, name)
    bits = file.header("DGR" if old else "DGRL")
    at = file.at
    height, width = file.numbers("<2i", "the page's size")
    file.require_sides("the page", height, width, at)
    count = file.count("lines", 4 if old else 4 + 16 + 1)
    for number in range(1, count + 1):
        what, codes, boxes = f"line {number}", [], []
        if old:
            for n in range(1, 1 + file.count(f"words of {what}", CODE + 8 + 1)):
                codes.append((file.at, file.take(CODE, f"the code of word {n} of {what}")))
                boxes.append(file.box(WORD_BOX, f"word {n} of {what}", bits))
        else:
            length = CODE * file.count(f"characters of {what}", CODE)
            start, text = file.at, file.take(length, f"the text of {what}")
            codes = [(start + n, text[n : n + CODE]) for n in range(0, length, CODE)]
            boxes = [file.box(LINE_BOX, what, bits)]
        if boxes:
            yield Line(name, number, bits, codes, boxes)
    if file.rest:
        file.refuse(f"the file must end after line {count:,}", f"{file.rest:,} bytes more")


@lru_cache(1 << 16)
def character(code: bytes) -> str:
    """The character of a code, "" if it is none."""
    if code[0] == 0xFF:
        return UNKNOWN
    try:
        text = (code[:1] if code[1] == 0 else code).decode("gb18030")
    except UnicodeDecodeError:
        return ""
    return text if len(text) == 1 and (text.isprintable() or ord(text) > 127) else ""


def code_of(text: str) -> bytes:
    """The code of a character. Raises PackError if it has none."""
    code = b"\xff\xff" if text == UNKNOWN else text.encode("gb18030", "replace").ljust(CODE, b"\0")
    if len(code) != CODE or character(code) != text:
        raise PackError(f"a text's characters must have two bytes in GB18030, got {text!r}; leave it out or replace it")
    return code


class Reader:
    """A file's bytes in order. What would not fit in the rest of the file is refused before it is read."""

    def __init__(self, data: Bytes, name: str):
        self.data, self.name, self.at = data, name, 0

    @property
    def rest(self) -> int:
        return len(self.data) - self.at

    def refuse(
        self,
        rule: str,
        value: str,
        at: int | None = None,
        fix: str = "copy the file again from its origin, or delete it",
    ) -> NoReturn:
        raise refused(f"{value} at byte {self.at if at is None else at:,} of {self.name}", rule, fix)

    def skip(self, size: int, what: str) -> int:
        """Skip this many bytes; returns their start."""
        if size > self.rest:
            self.refuse(f"{what} needs {size:,} bytes", f"{self.rest:,} up to the end")
        self.at += size
        return self.at - size

    def take(self, size: int, what: str) -> bytes:
        start = self.skip(size, what)
        return bytes(self.data[start : start + size])

    def numbers(self, layout: str, what: str) -> tuple[int, ...]:
        return struct.unpack(layout, self.take(struct.calcsize(layout), what))

    def count(self, what: str, smallest: int) -> int:
        """How many of something follow; smallest: bytes that one of them takes at least."""
        at, (count,) = self.at, self.numbers("<i", f"the number of {what}")
        most = self.rest // smallest
        if not 0 <= count <= most:
            self.refuse(f"only 0 to {most:,} {what} fit in the rest of the file", f"{count:,}", at)
        return count

    def header(self, kind: str) -> int:
        """The bits of a pixel; kind: DGRL or DGR."""
        (size,) = self.numbers("<i", "the header")
        magic = self.take(8, "the header")
        if magic.split(b"\0")[0] != kind.encode():
            self.refuse(f"a .{kind.lower()} file must say {kind}", repr(magic), 4, "leave it out: it is another format")
        if not HEADER <= size <= len(self.data):
            self.refuse(f"the header must have {HEADER} to {len(self.data):,} bytes", f"{size:,}", 0)
        self.skip(size - HEADER + 20, "the header")
        at, (length, bits) = self.at, self.numbers("<2h", "the header")
        if length != CODE:
            self.refuse(f"a character's code must have {CODE} bytes", str(length), at)
        if bits not in (1, 8):
            self.refuse("a pixel must have 1 or 8 bits", str(bits), at + 2)
        return bits

    def require_sides(self, what: str, height: int, width: int, at: int) -> None:
        if not (1 <= height <= LONGEST and 1 <= width <= LONGEST):
            self.refuse(f"height and width of {what} must be 1 to {LONGEST:,} pixels", f"{height:,} × {width:,}", at)

    def box(self, layout: str, what: str, bits: int) -> Box:
        at = self.at
        top, left, height, width = self.numbers(layout, f"the box of {what}")
        self.require_sides(what, height, width, at + struct.calcsize(layout) // 2)
        start = self.skip(height * row_bytes(width, bits), f"{what} of {sized(height, width)}")
        return Box(top, left, height, width, start)
