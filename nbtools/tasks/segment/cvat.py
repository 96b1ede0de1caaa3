"""CVAT for images 1.1: one XML file with the labels and, for each image, the polygons drawn on it; and these as a mask.

    <annotations><meta>… <labels><label><name>shirt</name></label></labels> …</meta>
    <image id="0" name="a.jpg" width="640" height="480" subset="Train">
      <polygon label="shirt" points="1.5,2.0;30,4;12.5,40" z_order="0"/>
    </image></annotations>

Other shapes that have an area are refused; lines, points, skeletons and tags are left out. The file of a single task
has its subset in <meta> alone.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
from PIL import Image, ImageDraw

from nbtools.tasks.common.rules import Refused

AREAS = ("polygon", "box", "ellipse", "mask")
FINE = 4  # shapes are drawn so many times as large, as Pillow fills a polygon with its outline, on whole pixels
FARTHEST = 1e6  # pixels: no image is larger

Size = tuple[int, int]
"""(height, width) in pixels."""


@dataclass
class Drawing:
    """The areas drawn on one image: name and attributes of their elements."""

    name: str
    subset: str
    size: Size | None
    shapes: list[tuple[str, dict[str, str]]]


def read(path: Path) -> tuple[list[str], list[Drawing]]:
    """Return the labels and the images of a file; none of other XML. Raises Refused if damaged, or without images."""
    fix = "export it again as CVAT for images 1.1, with the images"
    try:
        root = ElementTree.parse(path).getroot()
    except (ElementTree.ParseError, ValueError, LookupError) as error:  # also of an encoding
        raise Refused(error, "annotations must be whole XML", fix) from None
    if root.tag != "annotations":  # Pascal VOC's is <annotation>
        return [], []
    flat = (label for label in root.iterfind(".//label") if label.find("parent") is None)  # not a skeleton's points
    labels = [label.findtext("name", "").strip() for label in flat if label.findtext("type") != "skeleton"]
    drawings, own = [], root.findtext("meta/*/subset", "")
    for image in root.iterfind("image"):
        sides = image.get("height", ""), image.get("width", "")
        size = (int(sides[0]), int(sides[1])) if all(side.isdecimal() for side in sides) else None
        shapes = [(shape.tag, dict(shape.attrib)) for shape in image if shape.tag in AREAS]
        drawings.append(Drawing(image.get("name", ""), image.get("subset", own), size, shapes))
    if not drawings:
        raise Refused("no <image>", "annotations must name images", fix)
    return labels, drawings


def draw(drawing: Drawing, size: Size, inside: Size, indices: Mapping[str, int], background: int) -> Image.Image:
    """Return the class indices of an image of a size, FINE times as large as `inside`, the size to which it is packed.
    Shapes of a higher z_order, and later ones of the same, cover those below.

    indices: label → class. Raises Refused with the first shape that cannot be drawn.
    """
    canvas = Image.new("L", (inside[1] * FINE, inside[0] * FINE), background)
    scale = np.array(canvas.size) / (size[1], size[0])
    shapes = [(*outline(kind, shape, indices), indices[shape["label"]]) for kind, shape in drawing.shapes]
    for _, points, index in sorted(shapes, key=lambda each: each[0]):
        ImageDraw.Draw(canvas).polygon([tuple(point) for point in (points * scale).tolist()], fill=index)
    return canvas


def outline(kind: str, shape: Mapping[str, str], known: Mapping[str, int]) -> tuple[float, np.ndarray]:
    """Return z_order and corners (N, 2) float64 of a polygon: x, y in pixels from the upper left corner."""
    label, fix = shape.get("label", ""), "draw it again, or delete it"
    if kind != "polygon":
        raise Refused(f"{label}: {kind}", "a shape must be a polygon", fix)
    if label not in known:
        rule, fix = "a shape's label must be in the class table", "correct it, or add it to classes="
        raise Refused(label or "nothing", rule, fix)
    try:
        pairs = [pair.split(",") for pair in shape.get("points", "").split(";") if pair.strip()]
        points = np.array([(float(x), float(y)) for x, y in pairs], np.float64).reshape(-1, 2)
        z_order = float(shape.get("z_order", "0"))
        if len(points) < 3 or not (np.abs([*points.ravel(), z_order]) < FARTHEST).all():
            raise ValueError(f"{len(points)} points, up to {np.abs(points).max(initial=0):g}")
    except ValueError as error:
        rule = "a polygon must have at least 3 points, x and y of each in pixels"
        raise Refused(f"{label}: {error}"[:80], rule, fix) from None
    return z_order, points
