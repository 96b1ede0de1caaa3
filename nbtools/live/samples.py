"""Samples with the model's answers: HTML for the live view, text for a terminal and the picture that stays."""

from __future__ import annotations

import base64
import difflib
import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby, zip_longest

import numpy as np
from PIL import Image

from nbtools.live.chart import GREEN, VERMILLION
from nbtools.table import columns, padded, plain

MOST, ROWS = 12, 6  # samples at most, and rows of a page
WIDTH, HIGH = 200, 160  # px of a sample: as wide; a tall image at most so high
LONG, LINE_HIGH = 5, 48  # a line of text: so many times as wide as high at least; px high
LEAST, ROOM, GAP = 120, 880, 16  # px: of a card, so that a short line's text has room; of a page; between cards
SHARP = 2  # pixels a px
TERMINAL_ROWS, TERMINAL_GAP = 3, 3  # rows of samples in a terminal; columns between two of them

STYLE = f"""
.nbt-cards{{display:flex;flex-wrap:wrap;gap:12px {GAP}px;padding:2px 2px 8px}}
.nbt-cards figure{{margin:0;max-width:100%}}
.nbt-cards img{{display:block;max-width:100%;height:auto;border-radius:2px;margin:0 0 3px}}
.nbt-cards div{{font:13px/18px ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;overflow-wrap:anywhere;
 padding-left:28px;text-indent:-28px}}
.nbt-cards div>span{{display:inline-block;width:28px;text-indent:0;opacity:.6;font-size:11px}}
.nbt-cards u{{color:{VERMILLION};font-weight:700;text-decoration:underline 2px;text-underline-offset:2px}}
.nbt-cards b{{color:{GREEN};margin-left:6px}}
"""


@dataclass(frozen=True)
class Preview:
    """One sample with its right answer and the model's. image: (H, W) or (H, W, 3) uint8 of any size. whole: answers
    are names, right or wrong as a whole and not letter by letter."""

    image: np.ndarray
    truth: str = ""
    predicted: str = ""
    whole: bool = False

    @property
    def right(self) -> bool:
        return bool(self.truth) and self.truth == self.predicted

    def pairs(self) -> list[tuple[str, str]]:
        """(character, what was read for it): "" where nothing was read, or where nothing stood."""
        if self.whole:
            return [(self.truth, self.predicted)]
        found = []
        matcher = difflib.SequenceMatcher(None, self.truth, self.predicted, autojunk=False)
        for _, a, b, c, d in matcher.get_opcodes():
            found += zip_longest(self.truth[a:b], self.predicted[c:d], fillvalue="")
        return found


def chosen(previews: Sequence[Preview], room: float = ROOM) -> list[tuple[Preview, tuple[int, int], tuple[float, int]]]:
    """(sample, (width, height) in px, (left in px, row)) of as many samples as fill the rows of a page."""
    previews = previews[:MOST]
    found = sizes([preview.image for preview in previews])
    places = flowed([min(max(width, LEAST), room) + GAP for width, _ in found], room + GAP)
    return [each for each in zip(previews, found, places, strict=True) if each[2][1] < ROWS]


def sizes(images: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """(width, height) in px at which images are shown: equally wide, or where one is a long line of text, equally high,
    since the short ones among them are lines too."""
    lines = any(image.shape[1] > LONG * image.shape[0] for image in images)
    found = []
    for height, width in (image.shape[:2] for image in images):
        scale = LINE_HIGH / height if lines else min(WIDTH / width, HIGH / height)
        found.append((max(1, round(width * scale)), max(1, round(height * scale))))
    return found


def flowed(widths: Sequence[float], room: float) -> list[tuple[float, int]]:
    """(left, row) of things in a row that wraps where the room ends."""
    places, left, row = [], 0.0, 0
    for width in widths:
        if left and left + width > room:
            left, row = 0.0, row + 1
        places.append((left, row))
        left += width
    return places


def thumbnail(image: np.ndarray, size: tuple[int, int]) -> bytes:
    """A PNG with no more pixels than a screen shows; a small image keeps its own, the screen enlarges it."""
    width, height = (SHARP * side for side in size)
    made = Image.fromarray(image)
    if made.width > width or made.height > height:
        made = made.resize((min(width, made.width), min(height, made.height)), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    made.save(stream, "png", compress_level=3)  # half the time of 6 for a tenth more bytes, on six lines 1,238 wide
    return stream.getvalue()


def html(previews: Sequence[Preview]) -> str:
    """The samples as cards, wrong characters underlined; a page needs STYLE once. All text is escaped."""
    cards = "".join(card(preview, size) for preview, size, _ in chosen(previews))
    return f'<div class="nbt-cards">{cards}</div>' if previews else ""


def card(preview: Preview, size: tuple[int, int]) -> str:
    data = base64.b64encode(thumbnail(preview.image, size)).decode()
    tick = " <b>✓</b>" if preview.right else ""
    lines = "".join(
        f"<div><span>{label}</span>{marked or '–'}{tick if label == 'PRE' else ''}</div>"
        for label, marked in underlined(preview)
    )
    return (
        f'<figure style="width:{max(size[0], LEAST)}px"><img src="data:image/png;base64,{data}" alt="" '
        f'width="{size[0]}" height="{size[1]}"/>{lines}</figure>'
    )


def underlined(preview: Preview) -> Iterator[tuple[str, str]]:
    """(label, HTML) of the truth, where what was not read is underlined, and of the prediction, where what was misread
    is; without a truth, nothing is wrong."""
    if not preview.truth:
        if preview.predicted:
            yield "PRE", escape(preview.predicted)
        return
    groups = [(wrong, list(pairs)) for wrong, pairs in groupby(preview.pairs(), lambda pair: pair[0] != pair[1])]
    for side, label in enumerate(("TRU", "PRE")):
        parts = [(escape("".join(pair[side] for pair in pairs)), wrong) for wrong, pairs in groups]
        yield label, "".join(f"<u>{part}</u>" if wrong and part else part for part, wrong in parts)


def text(previews: Sequence[Preview], room: int) -> list[str]:
    """Lines of at most so many columns: short samples in a row, a long one broken. Control characters are escaped.
    Nothing of samples without a text."""
    blocks = [block(preview, room) for preview in previews if preview.truth or preview.predicted]
    places = flowed([max(map(columns, lines)) + TERMINAL_GAP for lines in blocks], room + TERMINAL_GAP)
    found = []
    for row, group in groupby(zip(places, blocks, strict=True), lambda placed: placed[0][1]):
        if row < TERMINAL_ROWS:
            found += in_a_row([lines for _, lines in group])
    return found


def in_a_row(blocks: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(columns, lines)) + TERMINAL_GAP for lines in blocks]
    rows = zip_longest(*blocks, fillvalue="")
    return [
        "".join(padded(line, width, False) for line, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def block(preview: Preview, room: int, write: Callable[[str], str] = plain) -> list[str]:
    """The lines of one sample: truth, prediction and marks below the wrong characters, repeated where they are longer
    than the room. write: how a character is written."""
    if not preview.truth:
        return ["PRE " + "".join(map(write, preview.predicted))]
    found, rows, used = [], [[]], 0
    for a, b in preview.pairs():
        pair = ("".join(map(write, a)), "".join(map(write, b)))
        wide = max(map(columns, pair))
        if rows[-1] and used + wide > room - 6:
            rows.append([])
            used = 0
        rows[-1].append((pair, wide))
        used += wide
    for row in rows:
        lines = ["TRU ", "PRE ", "    "]
        for pair, wide in row:
            for i, part in enumerate((*pair, "^" * wide if pair[0] != pair[1] else "")):
                lines[i] += padded(part, wide, False)
        found += [line.rstrip() for line in lines if line.strip()]
    return [*found[:-1], found[-1] + (" ✓" if preview.right else "")]
