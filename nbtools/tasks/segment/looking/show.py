"""Images with their labels drawn over them, what a network took them for, and what training makes of them; the live
picture.

A class map is (H, W) uint8, as `decode` and `run.predict_pack` give it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from nbtools.data import Draws, Pack, collate
from nbtools.tasks.common.figures import Sheet
from nbtools.tasks.segment import task
from nbtools.tasks.segment.looking.analysis import Ids, image_metrics, matched
from nbtools.tasks.segment.looking.overlay import alphas_of, colours_of, errors, fitted, nearest, overlay, wrong_ink
from nbtools.tasks.segment.looking.panels import Panel, in_cell, laid
from nbtools.tasks.segment.plans import Plan

LIVE = 400, 320  # px of the live picture, at most: what a screen of twice the pixels shows
PAPER = 6  # px between its halves


def show(pack: Pack, ids: Ids, predicted: Sequence[np.ndarray] | None = None) -> Sheet:
    """Images, each beside its classes; with predictions also these and where they are wrong, one image a row. Classes
    are numbered, and named below; pixels without a label have stripes.

    predicted: a class map an id. Raises PackError for other than these.
    """
    if predicted is None:
        return laid(pack, [panel for i in ids for panel in labelled(pack, int(i))])
    return laid(pack, [panel for i, answer in matched(pack, ids, predicted) for panel in judged(pack, i, answer)])


def labelled(pack: Pack, i: int) -> list[Panel]:
    """An image and its truth."""
    image, label = in_cell(*image_and_label(pack, i))
    return [Panel(image, titled(pack, i)), Panel(drawn(pack, image, label), "", label=label)]


def judged(pack: Pack, i: int, answer: np.ndarray) -> list[Panel]:
    """An image, its truth, what was predicted, and what of that is wrong, in a colour that no class has."""
    image, label, predicted = in_cell(*image_and_label(pack, i), answer)
    found = image_metrics(pack, i, answer)
    wrong = 0.0 if math.isnan(found["miou"]) else 1 - found["pixel_accuracy"]
    ink = wrong_ink(pack)
    return [
        Panel(image, titled(pack, i)),
        Panel(drawn(pack, image, label), "truth", label=label),
        Panel(drawn(pack, image, predicted), f"predicted · {said(found)}", label=predicted),
        Panel(
            errors(image, label, predicted, ink), f"wrong · {wrong:.1%} of pixels", "#{:02x}{:02x}{:02x}".format(*ink)
        ),
    ]


def training_views(pack: Pack, ids: Ids, plan: Plan, epoch: int = 0) -> Sheet:
    """What training sees of these images in an epoch (the first is 0): each crop, augmented as the plan says, beside
    its classes. The very same ones, since augmentation depends on seed, epoch and id alone."""
    ids = [int(i) for i in ids]
    if not ids:
        return laid(pack, [])
    raw = {**collate([pack.sample(i) for i in ids], pack.columns), "id": torch.tensor(ids)}
    batch = task.batch(raw, plan, Draws(plan.seed, epoch, raw["id"]))
    pixels = (batch["image"] * task.SPREAD + task.MEAN).round().clamp(0, 255).to(torch.uint8)
    panels = []
    for i, image, label in zip(ids, pixels.permute(0, 2, 3, 1).numpy(), batch["label"].numpy(), strict=True):
        image, label = in_cell(np.ascontiguousarray(image), label.astype(np.uint8))
        panels += [Panel(image, titled(pack, i)), Panel(drawn(pack, image, label), f"epoch {epoch}", label=label)]
    return laid(pack, panels)


def preview(pack: Pack, i: int, answer: np.ndarray) -> tuple[np.ndarray, str, str]:
    """(image (h, w, 3) uint8, "", text) for the live picture: what is predicted now, on its right the truth, and below
    them the image's mIoU and what is on the right. There is no text to compare, so nothing is marked wrong."""
    image, label = image_and_label(pack, i)
    height, width = label.shape
    scale = min((LIVE[0] - PAPER) / (2 * width), LIVE[1] / height)
    size = max(1, round(scale * width)), max(1, round(scale * height))
    small = fitted(image, *size)
    predicted, truth = (drawn(pack, small, nearest(each, *size)) for each in (answer, label))
    paper = np.full((size[1], PAPER, 3), 255, np.uint8)
    return np.concatenate([predicted, paper, truth], 1), "", f"{said(image_metrics(pack, i, answer))} | truth"


def said(found: Mapping[str, float]) -> str:
    """The mIoU among the metrics of an image, or that it has none."""
    return "no labels" if math.isnan(found["miou"]) else f"mIoU {found['miou']:.2f}"


def text_of(pack: Pack, i: int) -> str:
    """The classes that an image holds, the largest first; empty where every pixel is ignored."""
    counts = np.bincount(pack.arrays["label"][i].ravel(), minlength=256)[: len(pack.classes)]
    ranked = np.argsort(-counts, kind="stable")
    return ", ".join(pack.classes[place] for place in ranked if counts[place])


def titled(pack: Pack, i: int) -> str:
    return f"{i} · {pack.names[i]}"


def drawn(pack: Pack, image: np.ndarray, label: np.ndarray) -> np.ndarray:
    """The overlay in the pack's colours."""
    return overlay(image, label, colours_of(pack), alphas_of(pack))


def image_and_label(pack: Pack, i: int) -> tuple[np.ndarray, np.ndarray]:
    return np.asarray(pack.arrays["image"][i]), np.asarray(pack.arrays["label"][i])
