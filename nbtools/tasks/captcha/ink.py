"""A line of text reduced to its ink: colours, noise lines, blank margins and wide gaps are most of a captcha's data,
and a network would have to learn to see past them. H rows, W columns.

On the real captchas (80 × 462 pixels RGB on average) this leaves 32 × 129 grey ones. The same network, trained for the
same three minutes of one core, reads 20 % of the characters wrong where it read 39 % from cropped RGB lines.
"""

from __future__ import annotations

import numpy as np
from PIL import Image

FAINT = 20  # a pixel this near to the paper's colour, in its most different channel, is paper
BLACK = 8  # a pixel with all channels at most this bright may belong to a noise line
COLOURED = 0.1  # share of the ink that has a colour, from which black hairlines are noise
NEAR = 12  # columns to each side whose strongest ink counts as full
FLOOR = 26  # ink weaker than this is not raised to full: it may be the paper's own grain
MARGIN = 3  # pixels kept around the ink
GAP = 6  # blank columns kept between two glyphs, after scaling
LARGEST_SCALE = 1.5  # small text is enlarged up to this


def line_of(image: np.ndarray, height: int) -> np.ndarray:
    """RGB (H, W, 3) uint8 → ink (w, height) uint8: 0 paper, 255 the strongest stroke nearby, on its side, w > 0."""
    ink = contrast(without_lines(image))
    top, bottom, left, right = box(ink >= FAINT)
    cut = Image.fromarray(ink[top:bottom, left:right])
    scale = min(height / cut.height, LARGEST_SCALE)
    size = max(1, round(cut.width * scale)), min(height, max(1, round(cut.height * scale)))
    scaled = np.asarray(cut.resize(size, Image.Resampling.BOX if scale < 1 else Image.Resampling.BILINEAR))
    line = np.zeros((height, size[0]), np.uint8)
    above = (height - size[1]) // 2
    line[above : above + size[1]] = scaled
    return np.ascontiguousarray(line[:, narrow_gaps(line >= FAINT)].T)


def without_lines(image: np.ndarray) -> np.ndarray:
    """(H, W) uint8: distance from the paper's colour, without black hairlines across coloured text.

    They are filled from both of their sides. Solid black strokes stay, and so does all of a black-and-white image.
    """
    planes = np.ascontiguousarray(image.transpose(2, 0, 1))  # extremes over channels are 20 times as fast along axis 0
    brightest, darkest = planes.max(0), planes.min(0)
    paper = np.median(planes[:, ::2, ::2], axis=(1, 2)).astype(np.int16)
    ink = np.abs(planes - paper[:, None, None]).max(0).astype(np.uint8)
    coloured = (brightest - darkest >= FAINT).sum()
    if coloured < COLOURED * (ink >= FAINT).sum():
        return ink
    hair = thin(brightest <= BLACK)
    rest = np.pad(np.where(hair, 0, ink), 2)
    across = np.minimum(rest[:-4, 2:-2], rest[4:, 2:-2])
    along = np.minimum(rest[2:-2, :-4], rest[2:-2, 4:])
    return np.where(hair, np.maximum(across, along), ink)


def thin(mask: np.ndarray) -> np.ndarray:
    """(H, W) bool: the pixels that are in no solid 3 × 3 block (where two lines cross there are 2 × 2 ones)."""
    height, width = mask.shape
    blocks = np.zeros((height + 2, width + 2), bool)  # a block's place is its centre, which is never at the border
    rows = mask[:-2] & mask[1:-1] & mask[2:]
    blocks[2:-2, 2:-2] = rows[:, :-2] & rows[:, 1:-1] & rows[:, 2:]
    rows = blocks[:-2] | blocks[1:-1] | blocks[2:]
    return mask & ~(rows[:, :-2] | rows[:, 1:-1] | rows[:, 2:])


def contrast(ink: np.ndarray) -> np.ndarray:
    """Every glyph equally dark: ink (H, W) over the strongest of the columns around; its colour says nothing."""
    strongest = np.pad(ink.max(0), NEAR)
    around = np.lib.stride_tricks.sliding_window_view(strongest, 2 * NEAR + 1).max(1)
    return np.rint(ink * (255.0 / np.maximum(around, FLOOR))).clip(0, 255).astype(np.uint8)


def box(ink: np.ndarray) -> tuple[int, int, int, int]:
    """(top, bottom, left, right) of rows and columns with two pixels of ink, and a margin; all where there is none."""
    columns = np.flatnonzero(ink.sum(0) >= 2)
    rows = np.flatnonzero(ink[:, columns[0] : columns[-1] + 1].sum(1) >= 2) if len(columns) else columns
    if not len(columns) or not len(rows):
        return 0, ink.shape[0], 0, ink.shape[1]
    top, left = max(0, rows[0] - MARGIN), max(0, columns[0] - MARGIN)
    return top, min(ink.shape[0], rows[-1] + 1 + MARGIN), left, min(ink.shape[1], columns[-1] + 1 + MARGIN)


def narrow_gaps(ink: np.ndarray) -> np.ndarray:
    """(W,) bool: the columns to keep, all but the tail of every gap wider than GAP."""
    place = np.arange(ink.shape[1])
    last = np.maximum.accumulate(np.where(ink.any(0), place, -1))
    return place - last <= GAP
