"""Labels and predictions over images in class colours, with a line between classes and grey ignored pixels; charts.

A class map is (H, W) uint8, as `decode` and `run.predict_pack` give it. H × W pixels, C = 3 or 4 channels, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter
from PIL import Image

from nbtools.data import SPLITS, Draws, Pack, collate
from nbtools.figures import (
    GREY,
    MARGIN,
    TALL,
    WIDE,
    WRITTEN,
    WRONG,
    Picture,
    Sheet,
    blank,
    confusion_figure,
    finish,
    gallery,
    look,
    scaled,
    shortened,
)
from nbtools.show import percent
from nbtools.tasks.common.files import on_white
from nbtools.tasks.segment.augment import MEAN, SPREAD, batch
from nbtools.tasks.segment.classes import BACKGROUND, IGNORE
from nbtools.tasks.segment.plans import Plan
from nbtools.tasks.segment.scores import Ids, image_metrics, maps

if TYPE_CHECKING:
    import pandas as pd

ALPHA, FAINT = 0.6, 0.15  # opacity of a class's colour over the image; of a background's
PALE = 0.35  # opacity of the image where only errors have colour
INK = np.array([int(WRONG[i : i + 2], 16) for i in (1, 3, 5)])
COLUMNS, NAMES = 4, 5  # pictures in a row; names in a row of the legend
CELL = (WIDE - (COLUMNS + 1) * MARGIN) // COLUMNS  # px: the width of an image
ROW, SIZE = 20, 8.5  # px of a row of the legend; points of its text
LIVE, PAPER = (400, 320), 6  # px of the live picture at most: what a screen of twice the pixels shows; its middle
SHADES = "#4d4d4d", "#999999", "#cccccc"  # of train, val, test: colours are those of classes

Panel = tuple[Picture, np.ndarray | None]
"""A picture, and the classes (h, w) on it, which are named in the legend."""


def show(pack: Pack, ids: Ids, predicted: Sequence[np.ndarray] | None = None) -> Sheet:
    """Images, each next to its classes; with predictions also these and where they are wrong, one image per row.
    Classes are named below; pixels without a label are grey.

    predicted: one class map per id. Raises PackError for anything else.
    """
    panels: list[Panel] = []
    for i, guess in maps(pack, ids, predicted) if predicted is not None else ((int(i), None) for i in ids):
        caption = "" if predicted is None else "truth"
        panels += labelled(pack, pack.arrays["image"][i], pack.arrays["label"][i], f"{i} · {pack.names[i]}", caption)
        if guess is not None:
            panels += judged(pack, i, guess)
    return figure(pack, panels)


def training_views(pack: Pack, ids: Ids, plan: Plan, epoch: int = 0) -> Sheet:
    """What training sees of these images in an epoch (the first is 0): each crop, augmented as the plan says, next to
    its classes. These are exactly training's own, since augmentation depends on seed, epoch and id alone."""
    ids, panels = [int(i) for i in ids], []
    if ids:
        raw = {**collate([pack.sample(i) for i in ids], pack.columns), "id": torch.tensor(ids)}
        seen = batch(raw, plan, Draws(plan.seed, epoch, raw["id"]))
        images = (seen["image"] * SPREAD + MEAN).round().clamp(0, 255).permute(0, 2, 3, 1).byte().contiguous().numpy()
        for i, image, label in zip(ids, images, seen["label"].byte().numpy(), strict=True):
            panels += labelled(pack, image, label, f"{i} · {pack.names[i]}", f"epoch {epoch}")
    return figure(pack, panels)


def preview(pack: Pack, i: int, guess: np.ndarray) -> tuple[np.ndarray, str, str]:
    """(image (h, w, 3) uint8, "", text) for the live picture: the present prediction, the truth on its right, and the
    image's mIoU as text. There is no text to compare, so nothing is marked wrong."""
    image, label = pack.arrays["image"][i], pack.arrays["label"][i]
    size = scaled(label, (LIVE[0] - PAPER) / 2, LIVE[1])
    predicted, truth = (overlay(pack, resized(image, size), resized(each, size)) for each in (guess, label))
    paper = np.full((size[1], PAPER, 3), 255, np.uint8)
    return np.concatenate([predicted, paper, truth], 1), "", f"{miou_text(image_metrics(pack, i, guess))} | truth"


def labelled(pack: Pack, image: np.ndarray, label: np.ndarray, title: str, about: str) -> list[Panel]:
    """An image, and its classes over it."""
    size = scaled(image, CELL, TALL)  # in the size at which they are shown, lines are one pixel wide
    image, label = resized(image, size), resized(label, size)
    return [((image, title, GREY), None), ((overlay(pack, image, label), about, GREY), label)]


def judged(pack: Pack, i: int, guess: np.ndarray) -> list[Panel]:
    """A prediction over its image, and what of it is wrong on the pale grey image; ignored pixels are never wrong."""
    found, size = image_metrics(pack, i, guess), scaled(guess, CELL, TALL)
    image, label = (resized(pack.arrays[name][i], size) for name in ("image", "label"))
    predicted = resized(guess, size)
    drawn = 255 - PALE * (255 - luma(image).repeat(3, 2))
    drawn = np.where((predicted != label)[..., None], 0.15 * image + 0.85 * INK, drawn)
    drawn = np.where((label == IGNORE)[..., None], pale(image), drawn).round().astype(np.uint8)
    wrong = 0.0 if math.isnan(found["miou"]) else 1 - found["pixel_accuracy"]
    return [
        ((overlay(pack, image, predicted), f"predicted · {miou_text(found)}", GREY), predicted),
        ((drawn, f"wrong · {percent(wrong, 1)} of pixels", WRONG), None),
    ]


def miou_text(found: Mapping[str, float]) -> str:
    return "no labels" if math.isnan(found["miou"]) else f"mIoU {found['miou']:.2f}"


def figure(pack: Pack, panels: Sequence[Panel]) -> Sheet:
    """Pictures in rows, and the legend of their classes below."""
    if not panels:
        return blank()
    seen = sorted({int(k) for _, label in panels if label is not None for k in np.unique(label)})
    names = ["ignored" if k == IGNORE else f"{k} {pack.classes[k]}" for k in seen]
    sheet = gallery([one for one, _ in panels], COLUMNS, below=MARGIN + ROW * math.ceil(len(seen) / NAMES))
    colours = colours_of(pack) / 255
    patches = [Patch(facecolor="#c8c8c8" if k == IGNORE else colours[k], edgecolor=GREY) for k in seen]
    texts = [shortened(name, SIZE, WIDE / NAMES - 50) for name in names]
    legend = sheet.axes[0].legend(
        patches, texts, ncols=NAMES, loc="lower left", frameon=False, borderpad=0, labelcolor=GREY
    )
    for text in legend.get_texts():
        text.set(**look(SIZE))
    return sheet


def overlay(pack: Pack, image: np.ndarray, label: np.ndarray) -> np.ndarray:
    """image (H, W, 3) and label (H, W) uint8 → (H, W, 3) uint8: classes in colour, a background's faintly; a white line
    between two; ignored pixels grey. The image below is desaturated as much as it is covered: red on yellow
    would be the orange of another class."""
    alphas = np.array([FAINT if name.casefold() in BACKGROUND else ALPHA for name in pack.classes])
    index = np.where(label == IGNORE, 0, label)
    alpha = alphas[index][..., None]
    drawn = (1 - alpha) * ((1 - alpha) * image + alpha * luma(image)) + alpha * colours_of(pack)[index]
    drawn = np.where((label == IGNORE)[..., None], pale(image), drawn)
    drawn[:, :-1][label[:, 1:] != label[:, :-1]] = 255
    drawn[:-1][label[1:] != label[:-1]] = 255
    return drawn.round().astype(np.uint8)


def pale(image: np.ndarray) -> np.ndarray:
    """An image (H, W, 3) in pale grey."""
    return np.broadcast_to(112 + 0.5 * luma(image), image.shape)


def luma(image: np.ndarray) -> np.ndarray:
    """(H, W, 3) → (H, W, 1), ITU-R BT.601."""
    return image @ np.array([[0.299], [0.587], [0.114]])


def resized(array: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """A label (H, W), or an image (H, W, C) on white → (h, w, 3), at a (width, height): the nearest pixels of a label,
    since classes have no averages."""
    if array.ndim == 2:
        return np.asarray(Image.fromarray(array).resize(size, Image.Resampling.NEAREST))
    return np.asarray(on_white(Image.fromarray(np.asarray(array))).resize(size, Image.Resampling.LANCZOS))


def colours_of(pack: Pack) -> np.ndarray:
    """(K, 3) uint8: the colour of each class, the same in every picture of a data set."""
    return np.array(pack.options["colours"], np.uint8).reshape(-1, 3)


# Charts


def balance(pack: Pack) -> Sheet:
    """The share of each class in the labelled pixels of each split, the most frequent in training first. Reads every
    label once: 0.5 s for 1,000 of 360 × 480 pixels."""
    counts, splits = np.zeros((len(SPLITS), 256)), [split for split in SPLITS if pack.splits[split]]
    for row, split in enumerate(splits):
        for i in pack.ids(split):
            counts[row] += np.bincount(pack.arrays["label"][i].ravel(), minlength=256)
    classes, tall = len(pack.classes), 0.8 / len(splits)
    shares = counts[:, :classes] / counts[:, :classes].sum(1, keepdims=True).clip(1)
    ranked = np.argsort(-shares[0], kind="stable")
    sheet = Sheet(figsize=(7, 1.2 + classes * (0.34 if classes <= WRITTEN else 0.22)), layout="constrained")
    axes = sheet.add_subplot(xlabel="share of labelled pixels", ylim=(classes - 0.4, -0.6))
    for row, split in enumerate(splits):
        at = np.arange(classes) + (row - (len(splits) - 1) / 2) * tall
        drawn = axes.barh(at, shares[row, ranked], 0.9 * tall, color=SHADES[SPLITS.index(split)], label=split)
        if classes <= WRITTEN:
            axes.bar_label(drawn, [f"{percent(x, 1)}" for x in shares[row, ranked]], fontsize=7, color=GREY, padding=2)
    names = [shortened(pack.classes[k], 8, 260) for k in ranked]
    axes.set_yticks(range(classes), names, **look(8))
    axes.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.margins(x=0.1)
    finish(axes)
    ignored = counts[:, IGNORE].sum() / counts.sum()
    axes.set_title(f"{percent(ignored, 1)} of all pixels are ignored", fontsize=8, color=GREY, loc="right")
    return sheet


def confused(table: pd.DataFrame) -> Sheet:
    """A table of `confusion`: each class's pixels by what they were predicted as; the numbers are per cent of the
    row."""
    return confusion_figure(table, "per cent of each true class's pixels")
