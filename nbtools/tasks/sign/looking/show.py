"""Clips drawn: strips of frames with their gloss, and what a network read in them; animations; the live picture."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from nbtools import disk
from nbtools.data import Pack
from nbtools.errors import PackError
from nbtools.table import plural
from nbtools.tasks.common.figures import RIGHT, WRONG, Sheet, blank
from nbtools.tasks.sign.landmarks import LEFT, POINTS
from nbtools.tasks.sign.landmarks import RIGHT as RIGHT_HAND
from nbtools.tasks.sign.looking.drawing import LEFT_INK, RIGHT_INK, dot, frame, view_of

MOMENTS = 9  # frames of a strip
CELL, TITLE, MARGIN = 120, 26, 8  # px: a frame; a line of text; at the sides
GREY, RULE = "#6b6b6b", 238  # RULE: grey of the lines between frames
LIVE = 160  # px of the live picture
FPS = 30.0


@dataclass(frozen=True, eq=False)
class Animation:
    """A clip that a notebook plays, as an animated PNG: an ordinary picture to Jupyter, Colab, VS Code and GitHub, so
    it needs no JavaScript and is still there in the saved notebook; GIF has no 30 frames a second. What cannot animate
    shows the first frame. pause: ms a frame."""

    frames: tuple[Image.Image, ...]
    pause: float

    def _repr_png_(self) -> bytes:
        return self.encoded("png")

    def encoded(self, form: str) -> bytes:
        """The file: `png`, or `gif` for what takes no other; a GIF's pauses are whole hundredths of a second."""
        pauses: dict[str, Any] = {"duration": self.pause if form == "png" else max(20, 10 * round(self.pause / 10))}
        content = io.BytesIO()
        first, *others = self.frames
        first.save(content, form, save_all=True, append_images=others, loop=0, **pauses)
        return content.getvalue()

    def save(self, path: str | Path) -> Path:
        """Write it as .png or .gif, whatever the name ends with. Raises PackError for others, DiskError."""
        path = Path(path)
        form = path.suffix.lower().removeprefix(".")
        if form not in ("png", "gif"):
            raise PackError(f"an animation is saved as .png or .gif, got {path.name!r}")
        with disk.explained("writing an animation", path):
            return disk.write_atomic(path, self.encoded(form))


def show(pack: Pack, ids: Sequence[int] | np.ndarray, predicted: Sequence[str] | None = None) -> Sheet:
    """Clips one below the other, each in a few frames under its gloss and category; predictions beside it, wrong ones
    marked by colour and ≠. Raises PackError for a pack without keypoints, and unless there is one prediction an id.
    """
    ids = [int(i) for i in ids]
    if predicted is not None and len(predicted) != len(ids):
        raise PackError(f"predicted must be one gloss an id, got {len(predicted)} for {plural(len(ids), 'id')}")
    if not ids:
        return blank()
    width, height = MOMENTS * CELL + 2 * MARGIN, len(ids) * (CELL + TITLE) + MARGIN
    sheet = Sheet(figsize=(width / 100, height / 100), dpi=100, facecolor="white")
    axes = sheet.add_axes((0, 0, 1, 1), xlim=(0, width), ylim=(height, 0), autoscale_on=False)
    axes.set_axis_off()
    for place, i in enumerate(ids):
        top = place * (CELL + TITLE) + TITLE
        image = strip(*keypoints(pack, i))
        axes.imshow(image, extent=(MARGIN, width - MARGIN, top + CELL, top), aspect="auto")
        truth, look = text_of(pack, i), {"size": 9, "parse_math": False}
        said, colour = truth, "black"
        if predicted is not None:
            right = predicted[place] == truth
            said, colour = (truth, RIGHT) if right else (f"{truth} ≠ {predicted[place]}", WRONG)
        axes.text(MARGIN, top - 7, said, color=colour, weight="bold", **look)
        about = f"{category_of(pack, i)} · {plural(pack.lengths('x', np.array([i]))[0], 'frame')}"
        axes.text(width - MARGIN, top - 7, about, color=GREY, ha="right", **look)
    return sheet


def animate(pack: Pack, i: int, *, size: int = 240, fps: float = FPS) -> Animation:
    """A clip of the pack as an Animation of so many pixels, which shows by itself and has `.save(path)`."""
    points, seen = keypoints(pack, i)
    view = view_of(points, seen)
    drawn = tuple(frame(p, s, view, size) for p, s in zip(points, seen, strict=True))
    return Animation(drawn, 1000 / fps)


def preview(pack: Pack, i: int, answer: str) -> tuple[np.ndarray, str, str, bool]:
    """(image (H, W, 3) uint8, truth, answer, and that these are names) of one clip for the live picture."""
    return picture(pack, i), text_of(pack, i), answer, True


def text_of(pack: Pack, i: int) -> str:
    """The gloss of a clip."""
    return pack.classes[label_of(pack, i)[0]]


def category_of(pack: Pack, i: int) -> str:
    return pack.options["categories"][label_of(pack, i)[1]]


def label_of(pack: Pack, i: int) -> tuple[int, int]:
    gloss, category = pack.arrays["label"][i]
    return int(gloss), int(category)


def keypoints(pack: Pack, i: int) -> tuple[np.ndarray, np.ndarray]:
    """(points (T, P, 2), seen (T, P) bool). Raises PackError for a pack of features alone."""
    if "x" not in pack.columns:
        raise PackError(f"{pack.folder}: a pack of features has no keypoints to draw; pack again with kp_key")
    sample = pack.sample(i)
    return sample["x"].reshape(-1, POINTS, 2), sample["mask"].astype(bool)


def strip(points: np.ndarray, seen: np.ndarray, size: int = 2 * CELL, count: int = MOMENTS) -> np.ndarray:
    """(size, count · size, 3) uint8: a clip in so many frames, evenly from first to last, lines between."""
    view = view_of(points, seen)
    chosen = np.linspace(0, len(points) - 1, count).round().astype(int)
    cells = np.stack([np.asarray(frame(points[t], seen[t], view, size)) for t in chosen]).copy()
    cells[:, :, :1] = RULE
    return np.concatenate(list(cells), 1)


def picture(pack: Pack, i: int) -> np.ndarray:
    """(H, H, 3) uint8: the middle frame, and the ways of both hands as dots that grow towards the end."""
    points, seen = keypoints(pack, i)
    view = view_of(points, seen)
    middle = int(np.argsort(seen.sum(1), kind="stable")[-1]) if not seen[len(seen) // 2].any() else len(seen) // 2
    image = frame(points[middle], seen[middle], view, 2 * LIVE)
    pen = ImageDraw.Draw(image)
    for hand, ink in ((LEFT, LEFT_INK), (RIGHT_HAND, RIGHT_INK)):
        for t in np.flatnonzero(seen[:, hand].all(1)):
            centre = view.placed(points[t, hand].mean(0), 2 * LIVE)
            dot(pen, centre, 1 + 3 * t / len(points), ink)
    return np.asarray(image)
