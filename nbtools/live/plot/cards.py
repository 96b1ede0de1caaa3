"""Samples with the model's answers: HTML that a page needs once a show, and the same on the PNG that stays."""

from __future__ import annotations

import base64
import difflib
import io
from collections.abc import Callable, Sequence
from html import escape
from itertools import groupby, zip_longest

import numpy as np
from PIL import Image

from nbtools.live.plot.chart import GREEN, VERMILLION, Preview
from nbtools.live.plot.page import GREY, MONO, Page, flowed, rows

MOST, ROWS = 12, 6  # samples at most, and rows of a page
WIDTH, HIGH = 200, 160  # px of a sample: as wide; a tall image at most so high
LONG, LINE_HIGH = 5, 48  # a line of text: so many times as wide as high at least; px high
LEAST = 120  # px of a card, so that a short line's text has room
ROOM = 880  # px of a page
SHARP = 2  # pixels a px
GAP, TEXT, LINE, LABEL = 16, 13, 18, 28  # px: between cards; size and height of a line of text; width of its label

Part = tuple[str, bool]
"""A piece of text, and whether it is wrong."""

STYLE = f"""
.nbt-cards{{display:flex;flex-wrap:wrap;gap:12px {GAP}px;padding:2px 2px 8px}}
.nbt-cards figure{{margin:0;max-width:100%}}
.nbt-cards img{{display:block;max-width:100%;height:auto;border-radius:2px;margin:0 0 3px}}
.nbt-cards div{{font:{TEXT}px/{LINE}px ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;overflow-wrap:anywhere;
 padding-left:{LABEL}px;text-indent:-{LABEL}px}}
.nbt-cards div>span{{display:inline-block;width:{LABEL}px;text-indent:0;opacity:.6;font-size:11px}}
.nbt-cards u{{color:{VERMILLION};font-weight:700;text-decoration:underline 2px;text-underline-offset:2px}}
.nbt-cards b{{color:{GREEN};margin-left:6px}}
"""


def chosen(previews: Sequence[Preview], room: float = ROOM) -> list[tuple[Preview, tuple[int, int]]]:
    """As many samples as fill the rows of a page, of lines fewer, each with the (width, height) in px it has there."""
    previews = previews[:MOST]
    found = sizes([preview.image for preview in previews])
    places = flowed([min(max(width, LEAST), room) + GAP for width, _ in found], room + GAP)
    return [(preview, size) for preview, size, (_, row) in zip(previews, found, places, strict=True) if row < ROWS]


def sizes(images: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """(width, height) in px at which images are shown: equally wide, or where one is a long line of text, equally high,
    since the short ones among them are lines too."""
    lines = any(image.shape[1] > LONG * image.shape[0] for image in images)
    found = []
    for height, width in (image.shape[:2] for image in images):
        scale = LINE_HIGH / height if lines else min(WIDTH / width, HIGH / height)
        found.append((max(1, round(width * scale)), max(1, round(height * scale))))
    return found


def thumbnail(image: np.ndarray, size: tuple[int, int]) -> bytes:
    """A PNG with no more pixels than a screen shows; a small image keeps its own, the screen enlarges it."""
    width, height = (SHARP * side for side in size)
    made = Image.fromarray(image)
    if made.width > width or made.height > height:
        made = made.resize((min(width, made.width), min(height, made.height)), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    made.save(stream, "png", compress_level=3)  # half the time of 6 for a tenth more bytes, on six lines 1,238 wide
    return stream.getvalue()


def aligned(truth: str, predicted: str, whole: bool = False) -> list[tuple[str, str]]:
    """(character, what was read for it): "" where nothing was read, or nothing stood there. whole: one pair of all."""
    if whole:
        return [(truth, predicted)]
    found = []
    for _, a, b, c, d in difflib.SequenceMatcher(None, truth, predicted, autojunk=False).get_opcodes():
        found += zip_longest(truth[a:b], predicted[c:d], fillvalue="")
    return found


def marked(truth: str, predicted: str, whole: bool = False) -> tuple[list[Part], list[Part]]:
    """(truth, predicted) in parts: wrong in the one is what was not read, in the other what was read amiss."""
    lines: tuple[list[Part], list[Part]] = ([], [])
    for wrong, pairs in groupby(aligned(truth, predicted, whole), lambda pair: pair[0] != pair[1]):
        for line, part in zip(lines, map("".join, zip(*pairs, strict=True)), strict=True):
            if part:
                line.append((part, wrong))
    return lines


def said(preview: Preview) -> list[tuple[str, list[Part]]]:
    """(label, parts) of the lines below an image; without a truth, nothing is wrong."""
    if not preview.truth:
        return [("PRE", [(preview.predicted, False)])] if preview.predicted else []
    return list(zip(("TRU", "PRE"), marked(preview.truth, preview.predicted, preview.whole), strict=True))


def right(preview: Preview) -> bool:
    return bool(preview.truth) and preview.truth == preview.predicted


def html(previews: Sequence[Preview]) -> str:
    """The samples beside each other; beside STYLE they look right. All text is escaped."""
    return f'<div class="nbt-cards">{"".join(card(*each) for each in chosen(previews))}</div>' if previews else ""


def card(preview: Preview, size: tuple[int, int]) -> str:
    data = base64.b64encode(thumbnail(preview.image, size)).decode()
    lines = "".join(line(label, parts, right(preview) and label == "PRE") for label, parts in said(preview))
    return (
        f'<figure style="width:{max(size[0], LEAST)}px"><img src="data:image/png;base64,{data}" alt="" '
        f'width="{size[0]}" height="{size[1]}"/>{lines}</figure>'
    )


def line(label: str, parts: Sequence[Part], right: bool) -> str:
    text = "".join(f"<u>{escape(part)}</u>" if wrong else escape(part) for part, wrong in parts)
    return f"<div><span>{label}</span>{text or '–'}{' <b>✓</b>' if right else ''}</div>"


class Gallery:
    """The same on a page; tall: px that it takes there."""

    def __init__(self, previews: Sequence[Preview], room: float):
        from nbtools.letters import Letters  # with matplotlib, which a run needs at its end only

        self.previews = chosen(previews, room)
        self.sizes = [(min(w, room), h * min(1.0, room / w)) for _, (w, h) in self.previews]
        widths = [max(width, LEAST) for width, _ in self.sizes]
        self.letters = Letters.of("✓ " + "".join(p.truth + p.predicted for p, _ in self.previews), mono=True)
        self.texts = [
            texts(preview, width, self.letters.columns)
            for (preview, _), width in zip(self.previews, widths, strict=True)
        ]
        self.places = flowed([width + GAP for width in widths], room + GAP)
        high = [0.0] * rows(self.places)
        for (_, row), (_, height), lines in zip(self.places, self.sizes, self.texts, strict=True):
            high[row] = max(high[row], height + 22 + LINE * len(lines))
        self.tops = [sum(high[:row]) for row in range(len(high))]
        self.tall = sum(high)

    def draw(self, page: Page, left: float, top: float) -> None:
        for (preview, _), (width, height), lines, (x, row) in zip(
            self.previews, self.sizes, self.texts, self.places, strict=True
        ):
            axes = page.axes(left + x, top + self.tops[row], width, height)
            axes.imshow(preview.image, cmap="gray", vmin=0, vmax=255, aspect="auto")
            axes.set_axis_off()
            for i, (label, parts) in enumerate(lines):
                base = top + self.tops[row] + height + 15 + LINE * i
                page.write(left + x, base, label, 11)
                for column, letter, wrong in parts:
                    self.spell(page, left + x + LABEL + MONO * TEXT * column, base, letter, wrong)

    def spell(self, page: Page, left: float, base: float, letter: str, wrong: bool) -> None:
        colour = VERMILLION if wrong else GREEN if letter == "✓" else GREY
        text, scale = self.letters.cell(letter)
        page.write(left, base, text, scale * TEXT, family=self.letters.families, color=colour, linespacing=1)
        if wrong:
            page.rule(left, base + 3, MONO * TEXT * self.letters.columns(letter), VERMILLION, linewidth=1.6)


def texts(
    preview: Preview, width: float, columns: Callable[[str], int]
) -> list[tuple[str, list[tuple[int, str, bool]]]]:
    """(label, [(column, letter, wrong)]) of each line below an image: broken where the width ends."""
    room, found = max(6, int((width - LABEL) / (MONO * TEXT))), []
    after = [(" ", False), ("✓", False)] if right(preview) else []
    for label, parts in said(preview):
        found.append((label, []))
        column = 0
        for text, wrong in [*parts, *(after if label == "PRE" else [])]:
            for letter in text:
                wide = columns(letter)
                if column + wide > room:
                    found.append(("", []))
                    column = 0
                found[-1][1].append((column, letter, wrong))
                column += wide
    return found
