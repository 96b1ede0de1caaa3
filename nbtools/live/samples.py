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

WIDTH, HEIGHT = 200, 160  # px that a sample is wide, and high at most
LONG, LINE_HEIGHT = 5, 48  # a line of text: wider than this many times its height; px that it is high
LEAST = 120  # px of a card, so that a short line's text has room
SHARP = 2  # pixels a px
SHOWN = 4  # samples in a terminal

STYLE = f"""
.nbt-cards{{display:flex;flex-wrap:wrap;gap:12px 16px;padding:2px 2px 8px}}
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
    """One sample with its right answer and the model's. image: (H, W) or (H, W, 3 or 4) uint8 of any size. whole:
    answers are names, right or wrong as a whole and not letter by letter."""

    image: np.ndarray
    truth: str = ""
    predicted: str = ""
    whole: bool = False

    @property
    def right(self) -> bool:
        return bool(self.truth) and self.truth == self.predicted

    def pairs(self) -> list[tuple[str, str]]:
        """(character, what was read for it): "" if nothing was read, or nothing was to be read."""
        if self.whole:
            return [(self.truth, self.predicted)]
        found = []
        matcher = difflib.SequenceMatcher(None, self.truth, self.predicted, autojunk=False)
        for _, a, b, c, d in matcher.get_opcodes():
            found += zip_longest(self.truth[a:b], self.predicted[c:d], fillvalue="")
        return found


def sizes(images: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """(width, height) in px at which images are shown: equally wide, or equally high where they are lines of text."""
    found = []
    for height, width in (image.shape[:2] for image in images):
        scale = LINE_HEIGHT / height if lines(images) else min(WIDTH / width, HEIGHT / height)
        found.append((max(1, round(width * scale)), max(1, round(height * scale))))
    return found


def lines(images: Sequence[np.ndarray]) -> bool:
    """Whether one is a long line of text: the short ones among them are lines too."""
    return any(image.shape[1] > LONG * image.shape[0] for image in images)


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
    cards = "".join(map(card, previews, sizes([preview.image for preview in previews])))
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
    """The first samples in lines of at most so many columns, control characters escaped; nothing of samples without a
    text."""
    return [line for preview in previews[:SHOWN] for line in block(preview, room)]


def block(preview: Preview, room: int, write: Callable[[str], str] = plain) -> list[str]:
    """The lines of one sample: truth, prediction and marks below the wrong characters, repeated where they are longer
    than the room. write: how a character is written."""
    if not preview.truth:
        return ["PRE " + "".join(map(write, preview.predicted))] if preview.predicted else []
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
