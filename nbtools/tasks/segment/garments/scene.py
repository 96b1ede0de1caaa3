"""A picture of garments among other things, and the outlines that an annotator would have drawn in it.

Garments, walls and things have cloth of one distribution; things are round and throw shadows too, light falls unevenly,
and some walls are hung with cloth in folds. What tells a garment is its cut, its seams and how it is draped.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageFilter

from nbtools.tasks.segment.garments import shapes, things
from nbtools.tasks.segment.garments.canvas import RIMS, Canvas, Slopes, extent
from nbtools.tasks.segment.garments.cloth import Cloth, Rng, cloth, folds, skin
from nbtools.tasks.segment.garments.outlines import within

SLIVER = 4  # square pixels below which an annotator draws nothing
HIDING = "background"  # the label of what lies on a garment
COUNTS = (0.8, 0.2)  # shares of the pictures with one and two garments


@dataclass(frozen=True)
class Annotation:
    """One polygon: points (N, 2) of x, y in hundredths of a pixel, as CVAT writes them; a higher z_order hides."""

    label: str
    z_order: int
    points: np.ndarray


def scene(rng: Rng, height: int, width: int) -> tuple[np.ndarray, tuple[Annotation, ...]]:
    """(H, W, 3) uint8, and the polygons in it, labelled by the garments' kinds or as what hides them."""
    angle = rng.uniform(0, 2 * np.pi)
    light = rng.uniform(0.7, 1.2) * np.array([np.cos(angle), np.sin(angle)])
    canvas = Canvas(np.zeros((height, width, 3), np.float32), light)
    ground(rng, canvas)
    litter(rng, canvas, int(rng.integers(2, 7)))
    drawn: list[tuple[str, np.ndarray]] = []
    count = 1 + int(rng.choice(len(COUNTS), p=COUNTS))
    for _ in range(count):
        drawn += garment(rng, canvas, count)
    drawn += hiding(rng, canvas, drawn)
    parts = [(label, part) for label, outline in drawn for part in within(outline, height, width)]
    large = [(label, part) for label, part in parts if shapes.area(part) >= SLIVER]
    annotations = [Annotation(label, z, np.round(part, 2)) for z, (label, part) in enumerate(large)]
    return photographed(rng, canvas.pixels), tuple(annotations)


def ground(rng: Rng, canvas: Canvas) -> None:
    """A wall, hung with cloth in folds in some pictures, and a floor or table below it in most."""
    height, width = canvas.pixels.shape[:2]
    frame = np.array([(-9, -9), (width + 9, -9), (width + 9, height + 9), (-9, height + 9)], float)
    hung = folds(rng, np.zeros((0, 2)), extent(frame), rng.uniform(0, np.pi)) if rng.random() < 0.04 else None
    canvas.lay(frame, cloth(rng, width), hung, "flat")
    if rng.random() < 0.55:
        left, right = rng.uniform(0.2, 0.9) * height + rng.normal(0, 0.1 * height, 2)
        floor = np.array([(-9, left), (width + 9, right), (width + 9, height + 9), (-9, height + 9)])
        canvas.shadow(floor, 4, rng.uniform(0, 0.6))
        canvas.lay(floor, cloth(rng, width), None, "flat")


def litter(rng: Rng, canvas: Canvas, count: int) -> None:
    """Things of cloth that lie about, flat or round."""
    height, width = canvas.pixels.shape[:2]
    for _ in range(count):
        size = np.sqrt(height * width) * np.exp(rng.uniform(-2, -0.8))
        outline = things.thing(rng, size, rng.uniform(0, 1, 2) * (width, height))
        put(rng, canvas, outline, cloth(rng, size))


def put(
    rng: Rng, canvas: Canvas, outline: np.ndarray, fabric: Cloth, rim: str | None = None, slopes: Slopes | None = None
) -> None:
    """Lay a thing down on its shadow; rim: any where none is given."""
    canvas.shadow(outline, rng.uniform(2, 7), rng.uniform(0.15, 0.6))
    canvas.lay(outline, fabric, slopes, rim or str(rng.choice(list(RIMS))))


def garment(rng: Rng, canvas: Canvas, count: int) -> list[tuple[str, np.ndarray]]:
    """One garment, larger where it is alone, anywhere in the picture; with the hanger that holds it, if any."""
    height, width = canvas.pixels.shape[:2]
    kind = str(rng.choice(list(shapes.KINDS)))
    flat = shapes.KINDS[kind](rng)
    share = rng.uniform(0.2, 0.6) / count**0.6
    at = rng.uniform(0.2, 0.8, 2) * (width, height)
    pose = shapes.pose(rng, np.sqrt(share * height * width / shapes.area(flat.outline)), at)
    worn = flat.placed(pose)
    size = float(np.sqrt(share * height * width))
    slopes = folds(rng, worn.origins, extent(worn.outline), pose.angle)
    put(rng, canvas, worn.outline, cloth(rng, size), "edged", slopes)
    tone = float(rng.choice([rng.uniform(0.6, 0.85), rng.uniform(1.1, 1.2)]))
    for seam in worn.seams:
        canvas.sew(seam, max(0.008 * size, 1.0), tone)
    metal = cloth(rng, 0.2 * size)
    for part in worn.hooks:
        put(rng, canvas, part, metal, "edged")
    return [(kind, worn.outline), *((HIDING, part) for part in worn.hooks)]


def hiding(rng: Rng, canvas: Canvas, drawn: list[tuple[str, np.ndarray]]) -> list[tuple[str, np.ndarray]]:
    """Arms, bags and things that lie on garments, at their rims or amid them."""
    height, width = canvas.pixels.shape[:2]
    found = []
    for _ in range(int(rng.choice(3, p=(0.45, 0.4, 0.15)))):
        outline = drawn[int(rng.integers(len(drawn)))][1]
        on = outline[int(rng.integers(len(outline)))]
        at = np.clip(on + rng.uniform(0, 0.7) * (outline.mean(0) - on), 0, (width, height))
        size, what = np.sqrt(height * width), rng.random()
        if what < 0.45:
            frm = outside(rng, at, height, width)
            put(rng, canvas, limb := things.arm(rng, size * rng.uniform(0.05, 0.09), frm, at), skin(rng), "round")
            found.append((HIDING, limb))
            continue
        large = size * np.exp(rng.uniform(-1.9, -0.9))
        parts = things.bag(rng, large, at) if what < 0.7 else [things.thing(rng, large, at)]
        fabric = cloth(rng, large)
        for part in parts:
            put(rng, canvas, part, fabric)
            found.append((HIDING, part))
    return found


def outside(rng: Rng, at: np.ndarray, height: int, width: int) -> np.ndarray:
    """A point beyond one of the two borders that are nearest to a point."""
    ends = np.array([(-0.1 * width, at[1]), (1.1 * width, at[1]), (at[0], -0.1 * height), (at[0], 1.1 * height)])
    near = np.argsort(np.linalg.norm(ends - at, axis=1))[int(rng.integers(2))]
    return ends[near] + rng.normal(0, 0.15, 2) * (width, height) * ((0, 1) if near < 2 else (1, 0))


def photographed(rng: Rng, pixels: np.ndarray) -> np.ndarray:
    """(H, W, 3) uint8 under uneven light, a little out of focus, with a sensor's noise."""
    height, width = pixels.shape[:2]
    y, x = np.linspace(-1, 1, height, dtype=np.float32)[:, None], np.linspace(-1, 1, width, dtype=np.float32)
    slope = rng.normal(0, 0.15, 2)
    light = 1 + np.float32(slope[0]) * x + np.float32(slope[1]) * y - np.float32(rng.uniform(0, 0.12)) * (x * x + y * y)
    if rng.random() < 0.3:
        across, down, at = (np.float32(8 * z) for z in rng.normal(0, (1, 1, 0.4)))
        light *= 1 + np.float32(rng.uniform(0.1, 0.3)) * np.tanh(across * x + down * y + at)
    tint = rng.uniform(0.92, 1.08, 3).astype(np.float32)
    grain = rng.uniform(1, 6) * rng.standard_normal((height, width), np.float32)
    seen = pixels * light[..., None] * tint + grain[..., None]
    image = Image.fromarray(np.clip(seen, 0, 255).astype(np.uint8))
    return np.asarray(image.filter(ImageFilter.GaussianBlur(rng.uniform(0.2, 0.8))))
