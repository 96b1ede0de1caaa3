"""Labels and predictions over images, in class colours with crisp boundaries and hatched ignored pixels; and charts.

A class map is (H, W) uint8, as `decode` and `run.predict_pack` give it. H × W pixels, C = 3 or 4 channels, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import PercentFormatter
from PIL import Image

from nbtools.data import SPLITS, Card, Draws, Pack, collate
from nbtools.letters import Letters
from nbtools.tasks.common.figures import (
    GREY,
    MARGIN,
    TALL,
    WIDE,
    WRITTEN,
    WRONG,
    Box,
    Picture,
    Sheet,
    blank,
    canvas,
    confusion_figure,
    finish,
    gallery,
    scaled,
)
from nbtools.tasks.segment import task
from nbtools.tasks.segment.analysis import Ids, image_metrics, maps
from nbtools.tasks.segment.classes import BACKGROUND, IGNORE
from nbtools.tasks.segment.plans import Plan

if TYPE_CHECKING:
    import pandas as pd

ALPHA, FAINT = 0.6, 0.15  # opacity of a class's colour over the image; of a background's
LIGHT, DARK = np.array((255, 255, 255)), np.array((20, 20, 20))  # the two sides of a boundary, visible on any image
STRIPES, PALE, STRIPE = 8, 0.5, 0.35  # px from stripe to stripe; opacity of the image in an ignored pixel, in a stripe
DIMMED = 0.35  # opacity of the image where only errors have colour
INKS = np.array([[int(WRONG[i : i + 2], 16) for i in (1, 3, 5)], (110, 0, 190), (0, 0, 0)], np.uint8)
"""Colours for what is wrong, the preferred one first: vermilion as elsewhere, violet, black; dark on a pale image."""
APART = 30.0  # in CIELAB; next to each other 2 is just visible, and these are in different images
VISIONS = np.array(
    [
        np.eye(3),
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    ]
)  # of linear RGB: unchanged, and as protanopes and deuteranopes see it (Machado et al. 2009)

COLUMNS = 4
CELL = (WIDE - (COLUMNS + 1) * MARGIN) // COLUMNS  # px: the width of an image
ROOM = 7, 5  # px left and right of a number's middle, above and below it
NUMBER: dict[str, Any] = {"ha": "center", "va": "center", "color": "white", "size": 7}
SWATCH, ROW, GAP, LONGEST, SIZE = 14, 22, 18, 300, 8.5  # px of the legend; points of its text
LIVE, PAPER = (400, 320), 6  # px of the live picture at most: what a screen of twice the pixels shows; its middle
SHADES = "#4d4d4d", "#999999", "#cccccc"  # of train, val, test: colours are those of classes


# Figures


def show(pack: Pack, ids: Ids, predicted: Sequence[np.ndarray] | None = None) -> Sheet:
    """Images, each next to its classes; with predictions also these and where they are wrong, one image a row. Classes
    are numbered, and named below; pixels without a label are hatched.

    predicted: a class map an id. Raises PackError for anything else.
    """
    if predicted is None:
        return figure(pack, [panel for i in ids for panel in labelled(pack, int(i))])
    return figure(pack, [panel for i, guess in maps(pack, ids, predicted) for panel in judged(pack, i, guess)])


Panel = tuple[Picture, np.ndarray | None]
"""A picture, and the classes (h, w) numbered on it and named in the legend."""


def labelled(pack: Pack, i: int) -> list[Panel]:
    """An image and its truth."""
    image, label = in_cell(*image_and_label(pack, i))
    return [(Picture(image, title(pack, i)), None), (Picture(colour(pack, image, label)), label)]


def judged(pack: Pack, i: int, guess: np.ndarray) -> list[Panel]:
    """An image, its truth, the prediction, and what of that is wrong, in a colour that no class has."""
    image, label, predicted = in_cell(*image_and_label(pack, i), guess)
    found = image_metrics(pack, i, guess)
    wrong = 0.0 if math.isnan(found["miou"]) else 1 - found["pixel_accuracy"]
    ink = wrong_ink(pack)
    missed = Picture(
        errors(image, label, predicted, ink), f"wrong · {wrong:.1%} of pixels", "#{:02x}{:02x}{:02x}".format(*ink)
    )
    return [
        (Picture(image, title(pack, i)), None),
        (Picture(colour(pack, image, label), "truth"), label),
        (Picture(colour(pack, image, predicted), f"predicted · {miou_text(found)}"), predicted),
        (missed, None),
    ]


def training_views(pack: Pack, ids: Ids, plan: Plan, epoch: int = 0) -> Sheet:
    """What training sees of these images in an epoch (the first is 0): each crop, augmented as the plan says, next to
    its classes. These are exactly training's own, since augmentation depends on seed, epoch and id alone."""
    ids, panels = [int(i) for i in ids], []
    if ids:
        raw = {**collate([pack.sample(i) for i in ids], pack.columns), "id": torch.tensor(ids)}
        batch = task.batch(raw, plan, Draws(plan.seed, epoch, raw["id"]))
        pixels = (batch["image"] * task.SPREAD + task.MEAN).round().clamp(0, 255).to(torch.uint8)
        for i, image, label in zip(ids, pixels.permute(0, 2, 3, 1).numpy(), batch["label"].numpy(), strict=True):
            image, label = in_cell(np.ascontiguousarray(image), label.astype(np.uint8))
            panels += [(Picture(image, title(pack, i)), None)]
            panels += [(Picture(colour(pack, image, label), f"epoch {epoch}"), label)]
    return figure(pack, panels)


def preview(pack: Pack, i: int, guess: np.ndarray) -> tuple[np.ndarray, str, str]:
    """(image (h, w, 3) uint8, "", text) for the live picture: the present prediction, the truth on its right, and the
    image's mIoU as text. There is no text to compare, so nothing is marked wrong."""
    image, label = image_and_label(pack, i)
    width, height = scaled(label, (LIVE[0] - PAPER) / 2, LIVE[1])
    small = resize_image(image, width, height)
    predicted, truth = (colour(pack, small, resize_label(each, width, height)) for each in (guess, label))
    paper = np.full((height, PAPER, 3), 255, np.uint8)
    return np.concatenate([predicted, paper, truth], 1), "", f"{miou_text(image_metrics(pack, i, guess))} | truth"


def text_of(pack: Pack, i: int) -> str:
    """The classes in an image, the largest first; empty if every pixel is ignored."""
    counts = np.bincount(pack.arrays["label"][i].ravel(), minlength=256)[: len(pack.classes)]
    return ", ".join(pack.classes[k] for k in np.argsort(-counts, kind="stable") if counts[k])


def classes_legend(pack: Card | Pack, classes: Iterable[int] | None = None) -> Sheet:
    """The classes with their colours and indices, all or those given; IGNORE stands for pixels without a class."""
    legend = Legend(pack, range(len(pack.classes)) if classes is None else sorted(classes))
    sheet, axes = canvas(WIDE, legend.height + MARGIN)
    legend.draw(axes, MARGIN)
    return sheet


def figure(pack: Pack, panels: Sequence[Panel]) -> Sheet:
    """Pictures in rows, with numbers on their classes and the legend below."""
    if not panels:
        return blank()
    legend = Legend(pack, sorted({int(k) for _, label in panels if label is not None for k in np.unique(label)}))
    sheet, axes, boxes = gallery([picture for picture, _ in panels], COLUMNS, below=legend.height)
    for (_, label), box in zip(panels, boxes, strict=True):
        if label is not None:
            number(axes, label, box)
    legend.draw(axes, axes.get_ylim()[0] - legend.height)
    return sheet


def number(axes: Axes, label: np.ndarray, box: Box) -> None:
    """The index of each class, where the class has room for it, so that classes differ not by colour alone."""
    for k, x, y in label_spots(label):
        stroke = [withStroke(linewidth=2, foreground="black")]
        axes.text(box.left + x, box.top + y, str(k), path_effects=stroke, **NUMBER)


def label_spots(label: np.ndarray) -> list[tuple[int, int, int]]:
    """label (H, W) uint8 → (class, x, y) for each class that has room for a number: where it has most."""
    found = []
    for k in np.unique(label):
        free = np.zeros((0, 2), int)
        mask, factor = label == k, 1
        while len(more := surrounded(mask, ROOM[0] * factor, ROOM[1] * factor)):
            free, factor = more, 2 * factor
        if len(free) and k != IGNORE:
            y, x = free[np.abs(free - free.mean(0)).sum(1).argmin()]
            found.append((int(k), int(x), int(y)))
    return found


def surrounded(mask: np.ndarray, across: int, up: int) -> np.ndarray:
    """mask (H, W) bool → (n, 2) rows and columns of the pixels around which all is marked, this far to each side."""
    tall, wide = 2 * up + 1, 2 * across + 1
    if mask.shape[0] < tall or mask.shape[1] < wide:
        return np.zeros((0, 2), int)
    sums = np.pad(mask.cumsum(0).cumsum(1), ((1, 0), (1, 0)))
    marked = sums[tall:, wide:] - sums[:-tall, wide:] - sums[tall:, :-wide] + sums[:-tall, :-wide]
    return np.argwhere(marked == tall * wide) + np.array((up, across))


class Legend:
    """Classes with their colours, one after the other in as many rows as they need."""

    def __init__(self, pack: Card | Pack, classes: Iterable[int]):
        names = {k: "ignored" if k == IGNORE else f"{k} {pack.classes[k]}" for k in classes}
        self.colours, self.letters = colours_of(pack), Letters.of("".join(names.values()))
        self.items: list[tuple[int, str, float, int]] = []  # class, text, px from the left, row
        left, row = float(MARGIN), 0
        for k, name in names.items():
            text = self.letters.shortened(name, SIZE, LONGEST)
            wide = SWATCH + 6 + self.letters.width(text, SIZE)
            if left > MARGIN and left + wide > WIDE - MARGIN:
                left, row = float(MARGIN), row + 1
            self.items.append((k, text, left, row))
            left += wide + GAP
        self.height = (1 + row) * ROW + MARGIN

    def draw(self, axes: Axes, top: float) -> None:
        for k, text, left, row in self.items:
            high = top + ROW * row + (ROW - SWATCH) / 2
            box = hatch(np.full((SWATCH, SWATCH, 3), 200.0)) / 255 if k == IGNORE else self.colours[[[k]]]
            axes.imshow(box, extent=(left, left + SWATCH, high + SWATCH, high), aspect="auto", interpolation="none")
            edge = Rectangle((left, high), SWATCH, SWATCH, fill=False, edgecolor=GREY, linewidth=0.5)
            axes.add_patch(edge)  # a colour may be the paper's
            axes.text(left + SWATCH + 6, high + SWATCH - 3, text, color="black", **self.letters.look(SIZE))


def in_cell(image: np.ndarray, *labels: np.ndarray) -> list[np.ndarray]:
    """image (H, W, C) and labels (H, W) at the size at which they are shown, so that lines are one pixel wide."""
    size = scaled(image, CELL, TALL)
    return [resize_image(image, *size), *(resize_label(label, *size) for label in labels)]


def image_and_label(pack: Pack, i: int) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(pack.arrays["image"][i]), np.asarray(pack.arrays["label"][i])


def title(pack: Pack, i: int) -> str:
    return f"{i} · {pack.names[i]}"


def miou_text(found: Mapping[str, float]) -> str:
    return "no labels" if math.isnan(found["miou"]) else f"mIoU {found['miou']:.2f}"


# Overlays


def colour(pack: Pack, image: np.ndarray, label: np.ndarray) -> np.ndarray:
    """The overlay in the pack's colours."""
    return overlay(image, label, colours_of(pack), alphas_of(pack))


def overlay(
    image: np.ndarray, label: np.ndarray, colours: np.ndarray, alpha: float | Sequence[float] | np.ndarray = ALPHA
) -> np.ndarray:
    """image (H, W, C) and label (H, W) uint8, colours (K, 3) → (H, W, 3) uint8: classes in colour, a line between two,
    ignored pixels grey and hatched.

    alpha: of all colours, or of each class (K,). The image below is desaturated as much: red on yellow would be the
    orange of another class. Values from K on are drawn as ignored.
    """
    known = label < len(colours)
    index = np.where(known, label, 0)
    strength = np.broadcast_to(np.asarray(alpha, float), len(colours))[index][..., None]
    seen = opaque(image).astype(float)
    drawn = (1 - strength) * ((1 - strength) * seen + strength * luma(seen)) + strength * colours[index]
    drawn = np.where(known[..., None], drawn, hatch(seen))
    light, dark = boundary_sides(label)
    drawn = np.where(dark[..., None], 0.5 * drawn + 0.5 * DARK, drawn)
    return np.where(light[..., None], 0.15 * drawn + 0.85 * LIGHT, drawn).round().astype(np.uint8)


def errors(image: np.ndarray, label: np.ndarray, predicted: np.ndarray, ink: np.ndarray = INKS[0]) -> np.ndarray:
    """image (H, W, C), label and predicted (H, W) → (H, W, 3) uint8: what is wrong in `ink` on the pale grey image;
    ignored pixels are hatched, and never wrong."""
    seen = opaque(image).astype(float)
    drawn = 255 - DIMMED * (255 - luma(seen))
    drawn = np.where((predicted != label)[..., None], 0.15 * seen + 0.85 * ink, drawn)
    return np.where((label == IGNORE)[..., None], hatch(seen), drawn).round().astype(np.uint8)


def boundary_sides(label: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(before, behind) (H, W) bool: pixels whose right or lower neighbour has another label, and those neighbours that
    are not `before` themselves."""
    before, behind = np.zeros(label.shape, bool), np.zeros(label.shape, bool)
    across, down = label[:, 1:] != label[:, :-1], label[1:] != label[:-1]
    before[:, :-1] |= across
    before[:-1] |= down
    behind[:, 1:] |= across
    behind[1:] |= down
    return before, behind & ~before


def hatch(seen: np.ndarray) -> np.ndarray:
    """An image (H, W, 3) in pale grey with dark stripes from the lower left to the upper right."""
    rows, columns = np.indices(seen.shape[:2])
    share = np.where((rows + columns) % STRIPES < 2, STRIPE, PALE)[..., None]
    ground = np.where(share == STRIPE, 60.0, 225.0)
    return np.broadcast_to(share * luma(seen) + (1 - share) * ground, seen.shape)


def luma(seen: np.ndarray) -> np.ndarray:
    """(H, W, 3) → (H, W, 1), ITU-R BT.601."""
    return seen @ np.array([[0.299], [0.587], [0.114]])


def opaque(image: np.ndarray) -> np.ndarray:
    """(H, W, 3) uint8: an image with alpha on white."""
    if image.shape[2] == 3:
        return image
    share = image[..., 3:] / 255
    return (share * image[..., :3] + (1 - share) * 255).round().astype(np.uint8)


def resize_image(image: np.ndarray, width: int, height: int) -> np.ndarray:
    """An image (H, W, 3 or 4) at another size, averaged."""
    return np.asarray(Image.fromarray(opaque(image)).resize((width, height), Image.Resampling.LANCZOS))


def resize_label(label: np.ndarray, width: int, height: int) -> np.ndarray:
    """A label (H, W) at another size, nearest pixels: classes have no averages."""
    return np.asarray(Image.fromarray(label).resize((width, height), Image.Resampling.NEAREST))


def colours_of(card: Card | Pack) -> np.ndarray:
    """(K, 3) uint8: the colour of each class, the same in every picture of a data set."""
    return np.array(card.options["colours"], np.uint8).reshape(-1, 3)


def alphas_of(card: Card | Pack) -> np.ndarray:
    """(K,): how opaque each class's colour is; a background's barely."""
    return np.array([FAINT if name.casefold() in BACKGROUND else ALPHA for name in card.classes])


def wrong_ink(card: Card | Pack) -> np.ndarray:
    """(3,) uint8: the colour of what is wrong. It differs from the classes', for any colour vision; if none does, it is
    the farthest from them."""
    classes = colours_of(card)[alphas_of(card) > FAINT]
    apart = np.linalg.norm(cielab(INKS)[:, :, None] - cielab(classes)[:, None], axis=-1).min((0, 2), initial=np.inf)
    return INKS[int((apart >= APART).argmax() if (apart >= APART).any() else apart.argmax())]


def cielab(colours: np.ndarray) -> np.ndarray:
    """(n, 3) uint8 sRGB → (3, n, 3) CIELAB (D65) in each of VISIONS."""
    share = colours / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.einsum("vij,nj->vni", VISIONS, linear), 0, 1)
    xyz = linear @ np.array([[0.4339, 0.2126, 0.0178], [0.3762, 0.7152, 0.1095], [0.1899, 0.0722, 0.8727]])
    root = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    x, y, z = np.moveaxis(root, -1, 0)
    return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)], -1)


# Charts


def balance(pack: Pack) -> Sheet:
    """The share of each class in the labelled pixels of each split, and in how many images it is; the most frequent in
    training first. Reads every label once: 0.5 s for 1,000 of 360 × 480 pixels."""
    tallies = {split: tally(pack, pack.ids(split)) for split in SPLITS if pack.splits[split]}
    classes = len(pack.classes)
    ranked = np.argsort(-next(iter(tallies.values()))[0][:classes], kind="stable")
    letters = Letters.of("".join(pack.classes))
    sheet = Sheet(figsize=(10, 1.2 + classes * (0.34 if classes <= WRITTEN else 0.22)), layout="constrained")
    left, right = sheet.subplots(1, 2, sharey=True)
    pixels = {split: part[ranked] / max(part[:classes].sum(), 1) for split, (part, _) in tallies.items()}
    images = {split: part[ranked] / pack.splits[split] for split, (_, part) in tallies.items()}
    bars(right, images, "share of images that hold it")
    bars(left, pixels, "share of labelled pixels")
    finish(left)
    names = [letters.shortened(pack.classes[k], 8, 260) for k in ranked]
    left.set_yticks(range(classes), names, **letters.look(8))
    left.tick_params(axis="y", length=0, pad=16)
    swatches = {"clip_on": False, "zorder": 3, "edgecolors": GREY, "linewidths": 0.5}
    at = np.full(classes, -0.025), np.arange(classes)
    shades = colours_of(pack)[ranked] / 255
    left.scatter(*at, s=60, c=shades, marker="s", transform=left.get_yaxis_transform(), **swatches)
    ignored = sum(part[IGNORE] for part, _ in tallies.values()) / sum(part.sum() for part, _ in tallies.values())
    right.set_title(f"{100 * ignored:.1f} % of all pixels are ignored", fontsize=8, color=GREY, loc="right")
    return sheet


def tally(pack: Pack, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(pixels (256,), images (256,)): how many pixels have each value of the labels, and how many images any such."""
    pixels, images = np.zeros(256, np.int64), np.zeros(256, np.int64)
    for i in ids:
        counts = np.bincount(pack.arrays["label"][i].ravel(), minlength=256)
        pixels += counts
        images += counts > 0
    return pixels, images


def bars(axes: Axes, parts: Mapping[str, np.ndarray], label: str) -> None:
    """A bar for each class and split, with its value if there is room."""
    tall, count = 0.8 / len(parts), len(next(iter(parts.values())))
    for n, (split, shares) in enumerate(parts.items()):
        at = np.arange(count) + (n - (len(parts) - 1) / 2) * tall
        drawn = axes.barh(at, shares, 0.9 * tall, color=SHADES[SPLITS.index(split)], label=split)
        if count <= WRITTEN:
            axes.bar_label(drawn, [percent(share) for share in shares], fontsize=7, color=GREY, padding=2)
    axes.set_xlabel(label, fontsize=9)
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.tick_params(axis="x", labelsize=8)
    axes.set_ylim(count - 0.4, -0.6)
    axes.margins(x=0.1)
    axes.spines[["top", "right"]].set_visible(False)


def percent(share: float) -> str:
    """Two significant digits."""
    return f"{100 * share:.{0 if share >= 0.1 else 1 if share >= 0.01 else 2}f} %" if share else "none"


def confused(table: pd.DataFrame) -> Sheet:
    """A table of `confusion`: each class's pixels by what they were predicted as, blue on the diagonal, where that is
    right; the numbers are per cent of the row."""
    return confusion_figure(table, "per cent of each true class's pixels", percent=True)
