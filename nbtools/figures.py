"""Captioned pictures that a notebook shows by itself. Places are px from the top left, at 100 px an inch."""

import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findSystemFonts, fontManager

RIGHT, WRONG, GREY = "#0072b2", "#c65300", "#6b6b6b"  # of text: blue and a darker vermilion of Okabe & Ito's palette
WIDE, MARGIN, TITLE, TALL = 1200, 8, 22, 340  # px: a canvas; around pictures; the text above one; a picture at most
SIZE = 9  # points of a caption
CHINESE = ("notosanscjk-regular", "notosanssc-regular", "wqy-zenhei", "wqy-microhei", "pingfang", "msyh", "simhei")
"""Fonts with Chinese characters, which matplotlib's own has not: Noto (fonts-noto-cjk), WenQuanYi, macOS, Windows."""

Picture = tuple[np.ndarray, str, str]
"""An image (H, W) grey, (H, W, 3) or (H, W, 4), uint8; the caption above it, and its colour."""


class Sheet(Figure):
    """A Figure without pyplot, whose state leaks from cell to cell: IPython by itself cannot show one."""

    def savefig(self, *args: Any, **options: Any) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Glyph .* missing")  # without a Chinese font there are boxes
            super().savefig(*args, **options)

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


def gallery(pictures: Sequence[Picture], columns: int = 4, below: float = 0) -> Sheet:
    """Draw pictures in rows, each scaled to the width of its column or to TALL. below: px left free under the last row,
    for a legend. If there are no pictures, as of wrong answers where none is wrong, a sentence says so."""
    cell = (WIDE - (columns + 1) * MARGIN) // columns
    sizes = [scale(image, cell) for image, *_ in pictures]
    rows = [max(height for _, height in sizes[i : i + columns]) + TITLE for i in range(0, len(sizes), columns)]
    high = sum(rows) + MARGIN + below if pictures else TITLE
    sheet = Sheet(figsize=(WIDE / 100, high / 100), dpi=100)
    axes = sheet.add_axes((0, 0, 1, 1), xlim=(0, WIDE), ylim=(high, 0), autoscale_on=False)
    axes.set_axis_off()
    if not pictures:
        axes.text(MARGIN, TITLE - 6, "No samples to show: the list of ids is empty.", color=GREY, size=SIZE)
    for n, ((image, caption, colour), (width, height)) in enumerate(zip(pictures, sizes, strict=True)):
        left, top = MARGIN + n % columns * (cell + MARGIN), sum(rows[: n // columns]) + TITLE
        axes.imshow(image, cmap="gray", vmin=0, vmax=255, extent=(left, left + width, top + height, top), aspect="auto")
        axes.text(left, top - 6, shorten(caption, SIZE, cell), color=colour, **look(SIZE))
    return sheet


def scale(image: np.ndarray, width: float, height: float = TALL) -> tuple[int, int]:
    """Return the (width, height) in px of an image that fills one of two limits and exceeds neither."""
    scale = min(width / image.shape[1], height / image.shape[0])
    return max(1, round(scale * image.shape[1])), max(1, round(scale * image.shape[0]))


def judge(truth: str, predicted: str | None) -> tuple[str, str]:
    """Return (caption, colour) of a sample: its truth, with what was predicted where that is wrong."""
    if predicted is None:
        return truth, GREY
    return (truth, RIGHT) if predicted == truth else (f"{truth} ≠ {predicted}", WRONG)


def chinese() -> Path | None:
    """Return the file of the first of the fonts of CHINESE that is installed."""
    there = {path.stem.lower(): path for path in map(Path, findSystemFonts())}
    return next((there[name] for name in CHINESE if name in there), None)


def look(size: float, mono: bool = False) -> dict[str, Any]:
    """Return the arguments of matplotlib's texts, size in points: a $ is no formula."""
    families = ["DejaVu Sans Mono" if mono else "DejaVu Sans"]
    if (font := chinese()) is not None:
        if all(entry.fname != str(font) for entry in fontManager.ttflist):
            fontManager.addfont(font)
        families.append(FontProperties(fname=font).get_name())
    return {"family": families, "size": size, "parse_math": False}


def shorten(text: str, size: float, room: float) -> str:
    """Return a text as drawn in about `room` px: a longer one loses its middle, since its ends identify it."""
    half = int(room / (0.7 * size * 100 / 72)) // 2  # a Latin letter is at most about 0.7 em wide
    return text if len(text) <= 2 * half else f"{text[:half]}…{text[-half:]}"
