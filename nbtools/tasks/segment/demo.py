"""Demo data in the raw format: images of patterned shapes, and label images of class ids.

A pixel's class is the pattern around it. Every shape, and the ground, takes its two colours from the same distribution
and lies anywhere, so neither a pixel's colour nor its position reveals the class.
"""

import io
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter

from nbtools.data import IMAGES
from nbtools.tasks.common.files import File, require, whole, write_demo

CLASSES = "background", "striped", "dotted"  # in the order of the ids
SPLITS = ("train", "train", "train", "train", "train", "val", "test")  # of seven images in turn
STREAM = 5  # of random numbers
FINE = 4  # outlines are drawn this many times as large: Pillow fills a polygon including its outline

Rng = np.random.Generator
Shape = tuple[str, np.ndarray]
"""A class, and the corners (N, 2) of a polygon as x, y in pixels, (0, 0) the upper left corner of the image."""


def demo(folder: str | Path, count: int = 1400, *, size: tuple[int, int] = (384, 288), seed: int = 0) -> Path:
    """Write `count` images of striped and dotted shapes on a blotched ground; returns the folder.

    images/ and labels/ with train/, val/ and test/ (five, one and one of seven), and `classes.txt` of the lines
    id,name. size: (height, width) in pixels. The same seed gives the same files. No two share a shape or its colours.
    Raises PackError for impossible arguments.
    """
    sides = tuple(size) if isinstance(size, tuple | list) else ()
    kept = len(sides) == 2 and all(whole(side, 32, 4096) for side in sides)
    require(whole(count, 1), "count must be 1 image or more", count)
    require(kept, "size must be (height, width), from 32 to 4,096 pixels", size)
    require(whole(seed, 0), "seed must be 0 or more", seed)
    return write_demo(folder, files(count, *sides, seed=seed), (*IMAGES, ".txt", ".xml"))


def files(count: int, height: int, width: int, seed: int) -> Iterator[File]:
    for n in range(count):
        name, rng = f"{SPLITS[n % len(SPLITS)]}/{n:05}", np.random.default_rng([seed, STREAM, n])
        shapes = [shape(rng, height, width) for _ in range(rng.integers(3, 7))]
        yield f"images/{name}.jpg", partial(photograph, rng, shapes, height, width)
        yield f"labels/{name}.png", partial(mask, shapes, height, width)
    yield "classes.txt", "".join(f"{i},{name}\n" for i, name in enumerate(CLASSES)).encode


def shape(rng: Rng, height: int, width: int) -> Shape:
    """Return a star-shaped polygon of any class, background too, anywhere in the image."""
    count = int(rng.integers(5, 10))
    angles = (np.arange(count) + rng.uniform(-0.3, 0.3, count)) * 2 * np.pi / count
    radii = np.sqrt(height * width) * rng.uniform(0.22, 0.38) * rng.uniform(0.6, 1, count)
    points = np.stack([np.cos(angles), np.sin(angles)], 1) * radii[:, None] + rng.uniform(0, 1, 2) * (width, height)
    return str(rng.choice(CLASSES)), np.round(points.clip(0, (width, height)), 2)


def photograph(rng: Rng, shapes: Sequence[Shape], height: int, width: int) -> bytes:
    """Return a JPEG of the shapes, later ones on top, under uneven light, slightly out of focus and with noise."""
    pixels = pattern(rng, "background", height, width)
    for name, points in shapes:
        inside = polygon_mask(points, height, width)
        pixels[inside] = pattern(rng, name, height, width)[inside]
    y, x = np.linspace(-1, 1, height)[:, None], np.linspace(-1, 1, width)
    light = 1 + rng.normal(0, 0.15) * x + rng.normal(0, 0.15) * y
    seen = pixels * light[..., None] + rng.normal(0, rng.uniform(2, 8), (height, width, 1))
    image = Image.fromarray(seen.clip(0, 255).astype(np.uint8)).filter(ImageFilter.GaussianBlur(rng.uniform(0.3, 0.8)))
    content = io.BytesIO()
    image.save(content, "JPEG", quality=int(rng.integers(72, 93)))
    return content.getvalue()


def pattern(rng: Rng, name: str, height: int, width: int) -> np.ndarray:
    """Return (H, W, 3) floats: blotches, stripes or dots of one colour on another, at any angle and of any width."""
    pitch, angle = np.sqrt(height * width) * rng.uniform(0.06, 0.12), rng.uniform(0, np.pi)
    y, x = np.mgrid[:height, :width] / pitch
    u, v = x * np.cos(angle) + y * np.sin(angle) + rng.random(), y * np.cos(angle) - x * np.sin(angle) + rng.random()
    if name == "striped":
        marked = u % 1 < 0.5
    elif name == "dotted":
        marked = np.hypot(u % 1 - 0.5, v % 1 - 0.5) < 0.4
    else:
        noise = rng.random((int(2 * height / pitch) + 2, int(2 * width / pitch) + 2), np.float32)
        marked = np.asarray(Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)) > 0.5
    first = rng.uniform(0, 256, 3)
    second = (first + rng.uniform(50, 206, 3)) % 256
    return np.where(marked[..., None], first, second)


def mask(shapes: Sequence[Shape], height: int, width: int) -> bytes:
    """Return a PNG of class ids: of the uppermost shape that covers a pixel's centre, else the background's."""
    ids = np.zeros((height, width), np.uint8)
    for name, points in shapes:
        ids[polygon_mask(points, height, width)] = CLASSES.index(name)
    content = io.BytesIO()
    Image.fromarray(ids).save(content, "PNG", compress_level=3)
    return content.getvalue()


def polygon_mask(points: np.ndarray, height: int, width: int) -> np.ndarray:
    canvas = Image.new("1", (width * FINE, height * FINE))
    ImageDraw.Draw(canvas).polygon((FINE * points).ravel().tolist(), fill=1)
    return np.asarray(canvas)[FINE // 2 :: FINE, FINE // 2 :: FINE]
