"""Clips as skeletons: strips of frames, animations, the live picture; charts of a pack; tables of confusions.

A frame is drawn with Pillow alone, three times as large and then reduced: no frame costs a figure of matplotlib's. A
frame without keypoints is drawn as its features, a square of grey each.
T frames, P = 78 points, D = 2048 features, S px of a square picture.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image, ImageDraw

from nbtools import disk
from nbtools.data import SPLITS, Card, Pack, Sample
from nbtools.errors import PackError
from nbtools.figures import GREY, RIGHT, Sheet, finish, gallery, judged
from nbtools.show import plural
from nbtools.tasks.common.metrics import confusion as confusion_table
from nbtools.tasks.common.metrics import counts_of, most_confused, paired
from nbtools.tasks.sign.keypoints import FACE, FACE_MESH, LEFT, POINTS
from nbtools.tasks.sign.keypoints import RIGHT as RIGHT_HAND

if TYPE_CHECKING:
    import pandas as pd

BODY_INK, FACE_INK = "#7d7d7d", "#999999"  # seen on white and on black: a skeleton has no ground of its own
LEFT_INK, RIGHT_INK = "#009e73", "#cc79a7"  # Okabe and Ito's, but not blue and vermilion, which mean right and wrong
SPLIT_INKS = dict(zip(SPLITS, (RIGHT, "#e69f00", "#009e73"), strict=True))
FINE = 3  # pixels drawn for a pixel shown
MARGIN = 0.06  # around the person, as a share of their size
MOMENTS, CELL = 9, 240  # frames of a strip; px of each
BINS = 30
ROWS = 32  # of a picture of features, twice as wide as high

FINGERS = [bone for f in range(0, 20, 4) for bone in pairwise((0, *range(f + 1, f + 5)))] + [*pairwise((5, 9, 13, 17))]
MESH = {number: FACE.start + i for i, number in enumerate(FACE_MESH)}
OUTLINE = ((33, 133), (263, 362), (61, 291), (1, 4), (33, 105), (263, 334), (61, 199), (199, 291))
LIMBS: tuple[tuple[str, float, Sequence[tuple[int, int]]], ...] = (
    (FACE_INK, 0.006, [*pairwise((8, 6, 5, 4, 0, 1, 2, 3, 7)), (9, 10)]),
    (FACE_INK, 0.006, [(MESH[a], MESH[b]) for a, b in OUTLINE]),
    (BODY_INK, 0.014, [(11, 12), (11, 23), (12, 24), (23, 24), (11, 13), (13, 15), (12, 14), (14, 16)]),
    (LEFT_INK, 0.010, [(LEFT.start + a, LEFT.start + b) for a, b in FINGERS]),
    (RIGHT_INK, 0.010, [(RIGHT_HAND.start + a, RIGHT_HAND.start + b) for a, b in FINGERS]),
)
"""(colour, width as a share of the picture, pairs of points), from back to front."""


def frame(points: np.ndarray, seen: np.ndarray, size: int) -> Image.Image:
    """One frame, points (P, 2) in [0, 1] of the picture, seen (P,), as an RGBA picture (S, S)."""
    large = FINE * size
    image = Image.new("RGBA", (large, large))
    pen, places = ImageDraw.Draw(image), points * large
    for ink, width, pairs in LIMBS:
        thick = max(FINE, round(width * large))
        for a, b in pairs:
            if seen[a] and seen[b]:
                pen.line([*places[a], *places[b]], fill=ink, width=thick)
                for x, y in places[[a, b]]:
                    pen.ellipse((x - thick / 2, y - thick / 2, x + thick / 2, y + thick / 2), fill=ink)
    return image.convert("RGBa").reduce(FINE).convert("RGBA")  # by opacity: what is transparent has no colour


def keypoints(sample: Sample) -> tuple[np.ndarray, np.ndarray]:
    """(points (T, P, 2) in [0, 1] of the square around all that is seen in a clip, seen (T, P) bool)."""
    points, seen = sample["x"].reshape(-1, POINTS, 2), sample["mask"].astype(bool)
    shown = points[seen] if seen.any() else np.array([(0, 0), (1, 1)])
    low, high = shown.min(0), shown.max(0)
    side = max((high - low).max(), 0.05) * (1 + 2 * MARGIN)
    return (points - (low + high - side) / 2) / side, seen


def features(values: np.ndarray, most: float, size: int) -> Image.Image:
    """One frame's features (D,) as an RGBA picture (S, S), row by row; most: the value that is drawn in full."""
    ink = (255 * (np.abs(values) / (most or 1)).clip(0, 1)).astype(np.uint8)
    drawn = Image.fromarray(ink.reshape(ROWS, -1)).resize((size, size // 2), Image.Resampling.NEAREST)
    alpha = Image.new("L", (size, size))
    alpha.paste(drawn, (0, size // 4))
    whole = Image.new("RGBA", (size, size), BODY_INK)
    whole.putalpha(alpha)
    return whole


def drawing(pack: Pack, i: int) -> tuple[int, Callable[[int, int], Image.Image]]:
    """(the frames of a clip; what draws one, given its number and S): its keypoints, or its features where it has
    none."""
    sample = pack.sample(i)
    if not len(sample.get("x", ())):
        values = sample["features"]
        most = float(np.quantile(np.abs(values), 0.99))
        return len(values), lambda t, size: features(values[t], most, size)
    points, seen = keypoints(sample)
    return len(points), lambda t, size: frame(points[t], seen[t], size)


def strip(draw: Callable[[int, int], Image.Image], first: int, last: int, moments: int = MOMENTS) -> np.ndarray:
    """(S, moments · S, 4) uint8: frames of a clip evenly from the first to the last, with lines between."""
    cells = [np.array(draw(int(t), CELL)) for t in np.linspace(first, last, moments).round()]
    for cell in cells:
        cell[:, :1] = (125, 125, 125, 64)
    return np.concatenate(cells, 1)


def text_of(pack: Pack, i: int) -> str:
    """The gloss of a clip."""
    return pack.classes[int(pack.arrays["label"][i][0])]


def show(pack: Pack, ids: Sequence[int] | np.ndarray, predicted: Sequence[str] | None = None) -> Sheet:
    """Clips one below the other, each as a strip of frames with its gloss, category and length; wrong predictions are
    marked by colour and ≠. Raises PackError unless there is one prediction an id."""
    ids = [int(i) for i in ids]
    pictures = []
    for i, guess in paired(ids, [None] * len(ids) if predicted is None else predicted, "gloss"):
        count, draw = drawing(pack, i)
        category = pack.options["categories"][int(pack.arrays["label"][i][1])]
        caption, colour = judged(text_of(pack, i), guess)
        caption += f" · {category} · {plural(count, 'frame')}"
        pictures.append((strip(draw, 0, count - 1), caption, colour))
    return gallery(pictures, columns=1)


def preview(pack: Pack, i: int, answer: str) -> tuple[np.ndarray, str, str, bool]:
    """(image (S, 3 S, 4) uint8 of three moments, truth, answer, True: these are names) of one clip for the live
    picture."""
    count, draw = drawing(pack, i)
    quarter = count // 4  # hands mostly hang at both ends
    return strip(draw, quarter, count - 1 - quarter, moments=3), text_of(pack, i), answer, True


@dataclass(frozen=True, eq=False)
class Animation:
    """A clip that a notebook plays, as an animated PNG: an ordinary picture to Jupyter, Colab, VS Code and GitHub, so
    it needs no JavaScript and stays in the saved notebook; GIF cannot play 30 frames a second. Viewers that cannot
    animate show the first frame. pause: ms a frame. alt: what it shows, in words."""

    frames: tuple[Image.Image, ...]
    pause: float
    alt: str = ""

    def encoded(self, form: str) -> bytes:
        content, (first, *others) = io.BytesIO(), self.frames
        cleared = {"disposal": 1, "blend": 0} if form == "png" else {"disposal": 2}  # else frames would pile up
        first.save(content, form, save_all=True, append_images=others, loop=0, duration=self.pause, **cleared)
        return content.getvalue()

    def _repr_png_(self) -> bytes:
        return self.encoded("png")

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> tuple[dict[str, Any], dict[str, Any]]:
        return {"image/png": self._repr_png_(), "text/plain": self.alt}, {"image/png": {"alt": self.alt}}

    def save(self, path: str | Path) -> Path:
        """Write it as .png or .gif, whichever the name ends with. Raises PackError for others, DiskError."""
        form = Path(path).suffix.lower().removeprefix(".")
        if form not in ("png", "gif"):
            raise PackError(f"an animation is saved as .png or .gif, got {Path(path).name!r}")
        with disk.explained("writing an animation", Path(path)):
            return disk.write_atomic(Path(path), self.encoded(form))


def animate(pack: Pack, i: int, *, size: int = 240, fps: float = 30.0) -> Animation:
    """A clip of the pack as an Animation of size × size px, which shows by itself and has `.save(path)`."""
    count, draw = drawing(pack, i)
    about = f"{text_of(pack, i)}, {plural(count, 'frame')}"
    return Animation(tuple(draw(t, size) for t in range(count)), 1000 / fps, about)


def lengths(pack: Pack) -> Sheet:
    """How many frames the clips of each split have."""
    frames = np.max([np.diff(pack.offsets[name]) for name in ("x", "features") if name in pack.offsets], axis=0)
    parts = {name: frames[pack.ids(name)] for name in SPLITS if pack.splits[name]}
    every = np.concatenate(list(parts.values()))
    edges = np.unique(np.linspace(every.min(), every.max() + 1, BINS + 1).astype(int)) - 0.5
    sheet = Sheet(figsize=(8, 3), layout="constrained")
    axes = sheet.add_subplot(xlabel="frames of a clip", ylabel="clips")
    inks = [ink for name, ink in SPLIT_INKS.items() if name in parts]
    axes.hist(list(parts.values()), list(edges), stacked=True, color=inks, label=list(parts))
    axes.set_title(f"median {np.median(every):g}, {every.min()} to {every.max()}", fontsize=9, color=GREY, loc="right")
    finish(axes)
    return sheet


def classes(pack: Pack) -> Sheet:
    """How many clips each gloss has in each split, glosses next to those of their category."""
    of = np.array(pack.options["category_of"])
    ranked = np.argsort(of, kind="stable")
    sheet = Sheet(figsize=(min(max(6, 0.24 * len(of)), 24), 3.6), layout="constrained")
    axes = sheet.add_subplot(ylabel="clips")
    base, places = np.zeros(len(of), int), np.arange(len(of))
    for name, ink in SPLIT_INKS.items():
        if pack.splits[name]:
            count = np.bincount(pack.arrays["label"][pack.ids(name), 0], minlength=len(of))[ranked]
            axes.bar(places, count, bottom=base, color=ink, label=name)
            base += count
    axes.set_xticks(places, [pack.classes[gloss] for gloss in ranked], rotation=90, fontsize=7, parse_math=False)
    axes.margins(x=0.01)
    finish(axes)
    return sheet


def categories_of(card: Card | Pack) -> dict[str, str]:
    """gloss → category, glosses in the order of their categories, so that its keys are an order for `confusion`."""
    names, of = card.options["categories"], card.options["category_of"]
    ranked = sorted(range(len(of)), key=lambda gloss: of[gloss])
    return {card.classes[gloss]: names[of[gloss]] if of[gloss] >= 0 else "" for gloss in ranked}


def grouped(glosses: Iterable[str], categories: Mapping[str, str]) -> list[str]:
    """The categories of glosses."""
    return [categories[gloss] for gloss in glosses]


def confusion(truth: Sequence[str], predicted: Sequence[str], classes: Iterable[str] | None = None) -> pd.DataFrame:
    """How many clips of each class (rows) were taken for each (columns), in the order of `classes`, by default the
    alphabet's. Raises PackError for names that are not among them."""
    names = sorted({*truth, *predicted}) if classes is None else list(classes)
    return confusion_table(counts_of(truth, predicted, names), names)


def by_class(
    truth: Sequence[str], predicted: Sequence[str], categories: Mapping[str, str] | None = None
) -> pd.DataFrame:
    """A row for each gloss that clips have, the worst first: gloss, category, clips, right, accuracy, confused (what it
    was taken for most often, "" where never) and times. clips and right add up to those of all.

    categories: gloss → category; without it, as for lists of categories, the first column is `class` alone.
    """
    import pandas as pd

    names = sorted({*truth, *predicted})
    counts = counts_of(truth, predicted, names)
    clips, right = counts.sum(1), counts.diagonal()
    confused, times = most_confused(counts, names)
    table = pd.DataFrame({"class": names, "clips": clips, "right": right, "accuracy": right / clips.clip(1)})
    table = table.assign(confused=confused, times=times).loc[clips > 0]
    table = table.sort_values(["accuracy", "clips", "class"], ascending=[True, False, True], ignore_index=True)
    if categories is not None:
        table.insert(1, "category", [categories.get(name, "") for name in table["class"]])
        table = table.rename(columns={"class": "gloss"})
    return table
