"""Samples with the model's answers: HTML that a page needs once a show, and the same on the PNG that stays."""

from __future__ import annotations

import base64
import difflib
import io
from collections.abc import Sequence
from html import escape

import numpy as np
from PIL import Image

from nbtools import table
from nbtools.plot.chart import GREEN, VERMILLION, Preview
from nbtools.plot.page import GREY, MONO, Page, flowed, rows

MOST = 12  # samples beside each other
WIDTH, LOW, HIGH = 200, 40, 160  # px of a sample: as wide; a long line at least so high; a tall image at most so high
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


def size(image: np.ndarray) -> tuple[int, int]:
    """(width, height) in px at which an image is shown: equally wide, but for lines of text and tall ones."""
    height, width = image.shape[:2]
    scale = min(max(WIDTH / width, LOW / height), HIGH / height)
    return max(1, round(width * scale)), max(1, round(height * scale))


def thumbnail(image: np.ndarray) -> bytes:
    """A PNG with no more pixels than a screen shows; a small image keeps its own, the screen enlarges it."""
    width, height = (SHARP * side for side in size(image))
    made = Image.fromarray(image)
    if made.width > width or made.height > height:
        made = made.resize((min(width, made.width), min(height, made.height)), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    made.save(stream, "png")
    return stream.getvalue()


def marked(truth: str, predicted: str) -> tuple[list[Part], list[Part]]:
    """(truth, predicted) in parts: wrong in the one is what was not read, in the other what was read amiss."""
    lines: tuple[list[Part], list[Part]] = ([], [])
    for tag, a, b, c, d in difflib.SequenceMatcher(None, truth, predicted, autojunk=False).get_opcodes():
        for line, part in zip(lines, (truth[a:b], predicted[c:d]), strict=True):
            if part:
                line.append((part, tag != "equal"))
    return lines


def said(preview: Preview) -> list[tuple[str, list[Part]]]:
    """(label, parts) of the lines below an image; without a truth, nothing is wrong."""
    if not preview.truth:
        return [("PRE", [(preview.predicted, False)])] if preview.predicted else []
    return list(zip(("TRU", "PRE"), marked(preview.truth, preview.predicted), strict=True))


def right(preview: Preview) -> bool:
    return bool(preview.truth) and preview.truth == preview.predicted


def html(previews: Sequence[Preview]) -> str:
    """The samples beside each other; beside STYLE they look right. All text is escaped."""
    return f'<div class="nbt-cards">{"".join(map(card, previews[:MOST]))}</div>' if previews else ""


def card(preview: Preview) -> str:
    width, height = size(preview.image)
    data = base64.b64encode(thumbnail(preview.image)).decode()
    lines = "".join(line(label, parts, right(preview) and label == "PRE") for label, parts in said(preview))
    return (
        f'<figure style="width:{width}px"><img src="data:image/png;base64,{data}" alt="" width="{width}" '
        f'height="{height}"/>{lines}</figure>'
    )


def line(label: str, parts: Sequence[Part], right: bool) -> str:
    text = "".join(f"<u>{escape(part)}</u>" if wrong else escape(part) for part, wrong in parts)
    return f"<div><span>{label}</span>{text or '–'}{' <b>✓</b>' if right else ''}</div>"


class Gallery:
    """The same on a page; tall: px that it takes there."""

    def __init__(self, previews: Sequence[Preview], room: float):
        self.previews = previews[:MOST]
        sizes = [size(preview.image) for preview in self.previews]
        self.sizes = [(min(width, room), height * min(1.0, room / width)) for width, height in sizes]
        self.texts = [texts(p, width) for p, (width, _) in zip(self.previews, self.sizes, strict=True)]
        self.places = flowed([width + GAP for width, _ in self.sizes], room + GAP)
        high = [0.0] * rows(self.places)
        for (_, row), (_, height), lines in zip(self.places, self.sizes, self.texts, strict=True):
            high[row] = max(high[row], height + 22 + LINE * len(lines))
        self.tops = [sum(high[:row]) for row in range(len(high))]
        self.tall = sum(high)

    def draw(self, page: Page, left: float, top: float) -> None:
        for preview, (width, height), lines, (x, row) in zip(
            self.previews, self.sizes, self.texts, self.places, strict=True
        ):
            axes = page.axes(left + x, top + self.tops[row], width, height)
            axes.imshow(preview.image, cmap="gray", vmin=0, vmax=255, aspect="auto")
            axes.set_axis_off()
            for i, (label, parts) in enumerate(lines):
                base = top + self.tops[row] + height + 15 + LINE * i
                page.write(left + x, base, label, 11)
                for place, text, wrong in parts:
                    spot = left + x + LABEL + MONO * TEXT * place
                    colour = VERMILLION if wrong else GREEN if text == "✓" else GREY
                    page.write(spot, base, text, TEXT, mono=True, color=colour, weight="bold" if wrong else "normal")
                    if wrong:
                        page.rule(spot, base + 3, MONO * TEXT * table.columns(text), VERMILLION, linewidth=1.6)


def texts(preview: Preview, width: float) -> list[tuple[str, list[tuple[int, str, bool]]]]:
    """(label, [(column, text, wrong)]) of each line below an image: broken where the width ends."""
    room, found = max(6, int((width - LABEL) / (MONO * TEXT))), []
    after = [(" ", False), ("✓", False)] if right(preview) else []
    for label, parts in said(preview):
        found.append((label, []))
        column = 0
        for text, wrong in [*parts, *(after if label == "PRE" else [])]:
            for letter in text:
                wide = table.columns(letter)
                if column + wide > room:
                    found.append(("", []))
                    column = 0
                found[-1][1].append((column, letter, wrong))
                column += wide
    return found
