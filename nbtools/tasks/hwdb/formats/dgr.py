"""Pages cut into words (`.dgr`), the format before `.dgrl`: bytes ↔ values, and words put together to lines.

Little-endian: header and page as in `.dgrl`, but for "DGR"; then for each line int32 words, and for each word its code
of one character, int16 top, left, height, width, and its bitmap. A word may begin before its page does (left < 0).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from nbtools.errors import PackError
from nbtools.table import sized
from nbtools.tasks.hwdb.formats.dgrl import (
    Line,
    Page,
    Place,
    box_bytes,
    boxed,
    line_codes,
    read_size,
    require_count,
    size_bytes,
)
from nbtools.tasks.hwdb.formats.scan import (
    CODE,
    INT,
    Bytes,
    Cursor,
    FormatError,
    Header,
    packed,
    read_header,
    write_header,
)

BOX = struct.Struct("<4h")
SMALLEST = CODE + BOX.size + 1  # bytes of a word of one pixel
SPREAD = 16  # times the pixels of its words that a line may span: a few bytes must not ask for gigabytes of paper


@dataclass(frozen=True, eq=False)
class WordPage:
    """A page whose lines are words, each a `Line` of one character."""

    height: int
    width: int
    lines: tuple[tuple[Line, ...], ...]
    illustration: str = ""
    code_type: str = "GB"
    bits: int = 8
    kind: str = "DGR"


def read_words(data: Bytes, name: str = "page.dgr") -> WordPage:
    """The page as the file has it. Raises FormatError (a PackError) naming file, byte, rule, what came, what to do."""
    cursor = Cursor(data, name)
    header = read_header(cursor, "DGR")
    height, width, count = read_size(cursor, INT.size)
    lines = tuple(tuple(place.read(data) for place in words(cursor, n, header.bits)) for n in range(count))
    cursor.end(count)
    return WordPage(height, width, lines, header.illustration, header.code_type, header.bits, header.kind)


def words(cursor: Cursor, line: int, bits: int) -> Iterator[Place]:
    at = cursor.at
    (count,) = cursor.ints(INT, f"line {line + 1}")
    require_count(cursor, f"words of line {line + 1}", count, SMALLEST, at)
    for n in range(count):
        what = f"word {n + 1} of line {line + 1}"
        yield boxed(cursor, what, BOX, line, cursor.take(CODE, f"the code of {what}"), bits)


def write_words(page: WordPage) -> bytes:
    """The file of a page; of one that was read, the same bytes. Raises PackError naming the word that breaks a rule."""
    header = Header(page.kind, page.illustration, page.code_type, page.bits)
    parts = [write_header(header, "DGR"), size_bytes(page.height, page.width, len(page.lines))]
    for n, line in enumerate(page.lines, 1):
        parts.append(packed(INT, f"the words of line {n}", len(line)))
        for k, word in enumerate(line, 1):
            parts += [one_code(word, what := f"word {k} of line {n}"), box_bytes(word, what, BOX, page.bits)]
    return b"".join(parts)


def one_code(word: Line, what: str) -> bytes:
    codes = line_codes(word)
    if len(codes) != CODE:
        raise PackError(f"{what} must be one character, got {word.text!r}; split it")
    return codes


def read_page(data: Bytes, name: str = "page.dgr") -> Page:
    """The page with its words put together to lines, as a `.dgrl` would have it. Raises FormatError.

    A line without words has nothing to show and is left out.
    """
    page = read_words(data, name)
    lines = tuple(joined(line, f"line {n} of {name}") for n, line in enumerate(page.lines, 1) if line)
    return Page(page.height, page.width, lines, page.illustration, page.code_type, page.bits)


def joined(line: Sequence[Line], what: str) -> Line:
    """One line of words on blank paper, the darker pixel where two lie on one another."""
    top, left = min(word.top for word in line), min(word.left for word in line)
    height = max(word.top + word.height for word in line) - top
    width = max(word.left + word.width for word in line) - left
    pixels = sum(word.image.size for word in line)
    if height * width > SPREAD * pixels:
        rule = f"{what} spans at most {SPREAD} times its words' {pixels:,} pixels"
        raise FormatError(sized(height, width), rule, "leave the file out, or correct where its words lie")
    image = np.full((height, width), 255, np.uint8)
    for word in line:
        y, x = word.top - top, word.left - left
        under = image[y : y + word.height, x : x + word.width]
        np.minimum(under, word.image, out=under)
    return Line("".join(word.text for word in line), top, left, height, width, image)
