"""What `.dgrl` and `.dgr` files have in common: a cursor over their bytes, the header, codes of characters, bitmaps.

A code is two bytes of GB18030, an ASCII character and a zero byte, or 0xFF for a character nobody could read.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from mmap import mmap
from typing import NoReturn

import numpy as np

from nbtools.errors import PackError

Bytes = bytes | bytearray | memoryview | mmap

UNKNOWN = "\ufffd"
INT = struct.Struct("<i")
SHORTS = struct.Struct("<2h")
CODE = 2  # bytes of a character
LONGEST = 100_000  # pixels of a side; pages scanned at 300 dots an inch have 2,000 to 4,000
HEADER = 36  # its bytes without the illustration
DAMAGED = "copy the file again from its origin, or delete it"


class FormatError(PackError):
    """What a file says breaks its format. Its args are (value, rule, fix), a row in a pack's table of bad samples."""

    def __str__(self) -> str:
        value, rule, fix = self.args
        return f"{rule}, got {value}; {fix}"


class Cursor:
    """A place in a file's bytes. What would not fit in the rest of the file is refused before it is read."""

    def __init__(self, data: Bytes, name: str):
        self.data, self.name, self.at = data, name, 0

    @property
    def rest(self) -> int:
        return len(self.data) - self.at

    def skip(self, size: int, what: str) -> int:
        """Go past so many bytes; where they begin."""
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

    def end(self, lines: int) -> None:
        if self.rest:
            self.refuse(f"the file ends after line {lines:,}", f"{self.rest:,} bytes more")

    def refuse(self, rule: str, came: str, at: int | None = None, fix: str = DAMAGED) -> NoReturn:
        raise FormatError(f"{came} at byte {self.at if at is None else at:,} of {self.name}", rule, fix)


@dataclass(frozen=True)
class Header:
    """The first bytes of a file as latin-1, which keeps every byte; zeros at the end of the fixed fields left out."""

    kind: str
    illustration: str
    code_type: str
    bits: int


def read_header(cursor: Cursor, kind: str) -> Header:
    (size,) = cursor.ints(INT, "the header")
    magic = cursor.take(8, "the header")
    if magic.split(b"\0")[0] != kind.encode():
        cursor.refuse(f"a .{kind.lower()} file says {kind}", repr(magic), 4, "leave it out: it is another format")
    if not HEADER <= size <= len(cursor.data):
        cursor.refuse(f"the header has {HEADER} to {len(cursor.data):,} bytes", f"{size:,}", 0)
    illustration = cursor.take(size - HEADER, "the illustration")
    code_type = cursor.take(20, "the header")
    at = cursor.at
    length, bits = cursor.ints(SHORTS, "the header")
    if length != CODE:
        cursor.refuse(f"a character's code has {CODE} bytes", str(length), at)
    if bits not in (1, 8):
        cursor.refuse("a pixel has 1 or 8 bits", str(bits), at + 2)
    return Header(fixed(magic), illustration.decode("latin-1"), fixed(code_type), bits)


def fixed(field: bytes) -> str:
    return field.rstrip(b"\0").decode("latin-1")


def write_header(header: Header, kind: str) -> bytes:
    """Raises PackError on what `read_header` would refuse."""
    try:
        illustration = header.illustration.encode("latin-1")
        magic, code_type = (text.encode("latin-1") for text in (header.kind, header.code_type))
    except UnicodeEncodeError as error:
        raise PackError(f"illustration, code_type and kind of a page are latin-1, got {error.object!r}") from None
    if magic.split(b"\0")[0] != kind.encode() or len(magic) > 8 or len(code_type) > 20 or header.bits not in (1, 8):
        raise PackError(
            f"a page's kind is {kind}, its code_type has at most 20 bytes, its bits are 1 or 8, got {header}"
        )
    start = INT.pack(HEADER + len(illustration)) + magic.ljust(8, b"\0") + illustration
    return start + code_type.ljust(20, b"\0") + SHORTS.pack(CODE, header.bits)


@lru_cache(maxsize=1)
def characters() -> np.ndarray:
    """(65536,) one-character strings by code, its first byte the high one; empty where there is no such code."""
    table = np.zeros(1 << 16, "U1")
    ascii = np.arange(0x20, 0x7F)
    table[ascii << 8] = [chr(one) for one in ascii]
    first, second = np.meshgrid(np.arange(0x81, 0xFF), [*range(0x40, 0x7F), *range(0x80, 0xFF)], indexing="ij")
    codes = (first << 8 | second).ravel()
    table[codes] = list(codes.astype(">u2").tobytes().decode("gb18030"))  # every one of these pairs is a character
    table[0xFF00:] = UNKNOWN
    return table


def spelled(codes: bytes) -> np.ndarray:
    """(N,) the character of each code, empty for what is none."""
    return characters()[np.frombuffer(codes, ">u2")]


def codes_of(text: str) -> bytes:
    """Text → codes. Raises PackError naming a character that has no code of two bytes."""
    return b"".join(map(code_of, text))


def code_of(one: str) -> bytes:
    code = b"\xff\xff" if one == UNKNOWN else one.encode("gb18030", "replace").ljust(CODE, b"\0")
    if len(code) != CODE or spelled(code)[0] != one:
        raise PackError(f"a text's characters have two bytes in GB18030, got {one!r}; leave it out or replace it")
    return code


def row_bytes(width: int, bits: int) -> int:
    return width if bits == 8 else -(-width // 8)


def bitmap(data: Bytes, start: int, height: int, width: int, bits: int) -> tuple[np.ndarray, bytes]:
    """(image (H, W) uint8 with 255 paper, what lies in the bits past its right edge: a byte a row, or none where zero).

    A set bit is ink, the highest is leftmost. One allocation, of the image: eight times the bytes of a bitmap of bits.
    """
    stride = row_bytes(width, bits)
    rows = np.frombuffer(data, np.uint8, height * stride, start).reshape(height, stride)
    if bits == 8:
        return rows.copy(), b""
    image = np.unpackbits(rows, axis=1, count=width)
    np.subtract(image, 1, out=image)  # 1 → 0, 0 → 255
    spare = rows[:, -1] & (0xFF >> (width - 1) % 8 + 1)
    return image, spare.tobytes() if spare.any() else b""


def bitmap_bytes(image: np.ndarray, spare: bytes, bits: int) -> bytes:
    """The inverse; pixels darker than 128 are ink where there is one bit for them."""
    if bits == 8:
        return image.tobytes()
    rows = np.packbits(image < 128, axis=1)
    if len(spare) == len(rows):
        rows[:, -1] |= np.frombuffer(spare, np.uint8) & (0xFF >> (image.shape[1] - 1) % 8 + 1)
    return rows.tobytes()


def sides(height: int, width: int) -> bool:
    """Whether a page, a line or a word can be so large."""
    return 1 <= height <= LONGEST and 1 <= width <= LONGEST


def packed(layout: struct.Struct, what: str, *values: int) -> bytes:
    try:
        return layout.pack(*values)
    except struct.error:
        raise PackError(f"{what} must fit in {layout.size // len(values) * 8} bits each, got {values}") from None
