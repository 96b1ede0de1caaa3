"""The shapes of one image → its label, drawn straight at the packed size.

Pillow fills a polygon up to and with its outline, on whole pixels. So shapes are drawn FINE times as large, and each
pixel takes what covers its centre: right to a quarter of a packed pixel.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from PIL import Image, ImageDraw

from nbtools.data import WARNING, Refused, Row
from nbtools.table import sized
from nbtools.tasks.segment.masks.classes import IGNORE
from nbtools.tasks.segment.masks.cvat import FARTHEST, Drawing, Shape
from nbtools.tasks.segment.masks.images import Recipe, Size
from nbtools.tasks.segment.masks.labels import Mask, require_size, require_some

FINE = 4
ARCS = 128  # corners of an ellipse
MOST = 1 << 27  # pixels of a mask: runs of a few bytes could stand for any number
FARTHEST_DRAWN = 1 << 30  # pixels of a canvas: Pillow reckons in 32-bit integers
SLACK = 1.0  # pixels that a shape may reach out of the image without a word: rounding does that

Points = np.ndarray
"""(N, 2) float64: x, y in pixels of the image, (0, 0) its upper left corner."""


def drawn(drawing: Drawing, recipe: Recipe, size: Size) -> Mask:
    """The label of an image of a size; later shapes, and those of a higher z_order, cover what lies below.

    Raises Refused with the first shape that cannot be drawn.
    """
    if drawing.size is not None:
        require_size(drawing.size, size)
    known, lookup = recipe.table.by_name, recipe.table.lookup
    rows = list(remarks(drawing))
    areas = [(shape, outline(shape, known)) for shape in drawing.shapes]
    rows += [row for shape, points in areas for row in outside(shape, points, size)]
    place = recipe.place(size)
    canvas = Image.new("L", (place.width * FINE, place.height * FINE), recipe.table.background)
    scale = np.array(canvas.size) / (size[1], size[0])
    for shape, points in sorted(areas, key=lambda area: height_of(area[0])):
        fill(canvas, shape, points, scale, int(lookup[known[shape.label]]))
    label = np.full(recipe.size, IGNORE, np.uint8)
    label[place.rows, place.columns] = np.asarray(canvas.resize((place.width, place.height), Image.Resampling.NEAREST))
    require_some(label)
    return Mask(label, {}, tuple(rows))


def remarks(drawing: Drawing) -> Iterator[Row]:
    if not drawing.shapes:
        fix = "nothing, if nothing is to be seen on it; else draw it, or delete the image"
        yield Row("shapes", "an image has shapes", "none: all of it is background", fix, WARNING)
    for kind in sorted(set(drawing.others)):
        yield Row(kind, "a shape has an area", kind, "nothing: it is not drawn; or draw a polygon", WARNING)


def outline(shape: Shape, known: dict[str, int]) -> Points:
    """The corners of a shape. Raises Refused where it has none, or a label that is in no table."""
    if shape.label not in known:
        fix = f"correct it to one of {', '.join(list(known)[:8])}; or add it to classes="
        raise Refused(Row("label", "a shape's label is in the class table", shape.label or "nothing", fix))
    try:
        height_of(shape)
        points = CORNERS[shape.kind](shape)
    except (ValueError, OverflowError) as error:
        rule = "shapes are given in finite numbers"
        raise Refused(Row(shape.kind, rule, f"{shape.label}: {error}"[:80], "draw it again, or delete it")) from None
    if len(points) < 3:
        rule, fix = "a polygon has 3 points at least", "draw it again, or delete it"
        raise Refused(Row(shape.kind, rule, f"{shape.label}: {len(points)}", fix))
    return points


def outside(shape: Shape, points: Points, size: Size) -> Iterator[Row]:
    """A warning for what is cut off. Raises Refused where nothing is left."""
    low, high, edge = points.min(0), points.max(0), np.array([size[1], size[0]])
    value = f"{shape.label}: x {low[0]:g} to {high[0]:g}, y {low[1]:g} to {high[1]:g} in {sized(*size)}"
    if (high <= 0).any() or (low >= edge).any():
        fix = "draw it again, or delete it; were the images scaled after they were annotated?"
        raise Refused(Row(shape.kind, "a shape lies inside of the image", value, fix))
    if (low < -SLACK).any() or (high > edge + SLACK).any():
        rule, fix = "a shape lies inside of the image", "nothing: what is outside is cut off"
        yield Row(shape.kind, rule, value, fix, WARNING)


def height_of(shape: Shape) -> float:
    return shape.number("z_order", "0")


def polygon(shape: Shape) -> Points:
    pairs = [pair.split(",") for pair in shape.attributes.get("points", "").split(";") if pair.strip()]
    points = np.array([(float(x), float(y)) for x, y in pairs], np.float64).reshape(-1, 2)
    if not (np.abs(points) < FARTHEST).all():
        raise ValueError(f"points beyond {FARTHEST:g}, or not finite")
    return points


def box(shape: Shape) -> Points:
    left, top, right, bottom = (shape.number(name) for name in ("xtl", "ytl", "xbr", "ybr"))
    corners = np.array([(left, top), (right, top), (right, bottom), (left, bottom)])
    return turned(corners, corners.mean(0), shape.number("rotation", "0"))


def ellipse(shape: Shape) -> Points:
    centre = np.array([shape.number("cx"), shape.number("cy")])
    angles = np.linspace(0, 2 * math.pi, ARCS, endpoint=False)
    arc = np.stack([np.cos(angles) * shape.number("rx"), np.sin(angles) * shape.number("ry")], 1)
    return turned(centre + arc, centre, shape.number("rotation", "0"))


def turned(points: Points, centre: np.ndarray, degrees: float) -> Points:
    """Clockwise, as the picture is seen: y points down."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return (points - centre) @ np.array([[cos, sin], [-sin, cos]]) + centre


def frame(shape: Shape) -> Points:
    """The corners of the rectangle that a mask fills. Raises ValueError unless its runs fill it."""
    left, top, width, height = (shape.number(name) for name in ("left", "top", "width", "height"))
    runs(shape)
    return np.array([(left, top), (left + width, top), (left + width, top + height), (left, top + height)])


def runs(shape: Shape) -> np.ndarray:
    """(height, width) bool of a mask: lengths of runs row by row, the first of them outside."""
    height, width = int(shape.number("height")), int(shape.number("width"))
    lengths = [int(text) for text in shape.attributes.get("rle", "").split(",") if text.strip()]
    if min(lengths, default=-1) < 0 or sum(lengths) != height * width or sum(lengths) > MOST:
        raise ValueError(f"runs of {sum(lengths)} pixels for {sized(height, width)}")
    return np.repeat(np.arange(len(lengths)) % 2 == 1, lengths).reshape(height, width)


CORNERS = {"polygon": polygon, "box": box, "ellipse": ellipse, "mask": frame}


def fill(canvas: Image.Image, shape: Shape, points: Points, scale: np.ndarray, value: int) -> None:
    """Draw a shape of these corners; scale: pixels of the canvas to one of the image, in x and y."""
    if shape.kind == "mask":
        stamp(canvas, runs(shape), points[0], scale, value)
    else:
        corners = np.clip(points * scale, -FARTHEST_DRAWN, FARTHEST_DRAWN)
        ImageDraw.Draw(canvas).polygon([tuple(point) for point in corners.tolist()], fill=value)


def stamp(canvas: Image.Image, inside: np.ndarray, corner: np.ndarray, scale: np.ndarray, value: int) -> None:
    """Fill what lies inside of a mask (h, w) bool, whose upper left corner is this. Costs no more than the canvas,
    however large the mask is."""
    at = []
    for axis, side in enumerate(canvas.size):
        place = np.floor(np.arange(side) / scale[axis] - corner[axis]).astype(int)
        at.append(np.flatnonzero((place >= 0) & (place < inside.shape[1 - axis])))
        at.append(place[at[-1]])
    columns, x, rows, y = at
    if len(columns) and len(rows):
        shape = Image.fromarray(inside[np.ix_(y, x)].astype(np.uint8) * 255)
        canvas.paste(value, (int(columns[0]), int(rows[0])), shape)
