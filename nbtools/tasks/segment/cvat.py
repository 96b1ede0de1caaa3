"""CVAT for images 1.1: one XML file with the labels and, for each image, the polygons drawn on it; and these as a mask.

    <annotations><meta>… <labels><label><name>shirt</name><color>#ff0000</color></label></labels> …</meta>
    <image id="0" name="a.jpg" width="640" height="480" subset="Train">
      <polygon label="shirt" points="1.5,2.0;30,4;12.5,40" z_order="0"/>
    </image></annotations>

Other shapes that have an area are refused; lines, points and tags are left out. Parsed with expat, image by image, and
without a document type: entities can make a small file fill the memory.

Pillow fills a polygon including its outline, on whole pixels. So shapes are drawn FINE times as large as the packed
size, and each pixel takes what covers its centre: exact to a quarter of a packed pixel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from xml.parsers import expat

import numpy as np
from PIL import Image, ImageDraw

from nbtools.errors import PackError
from nbtools.show import sized
from nbtools.tasks.common.report import Refused, Row
from nbtools.tasks.segment.classes import BACKGROUND, Class, Colour
from nbtools.tasks.segment.images import Recipe, Size, require_size

AREAS = ("polygon", "box", "ellipse", "mask")
ROOT = re.compile(rb"<annotations[\s>]")  # another root, as Pascal VOC's <annotation>, is another format
HEX = re.compile(r"#([0-9a-fA-F]{2})([0-9a-fA-F]{2})([0-9a-fA-F]{2})")
FARTHEST = 1e6  # pixels: no image is larger
FINE = 4
DRAWABLE = 1 << 30  # pixels of a canvas: Pillow computes in 32-bit integers


@dataclass(frozen=True)
class Shape:
    """One drawn area: the element's name and attributes as in the file."""

    kind: str
    attributes: Mapping[str, str]


@dataclass
class Drawing:
    """The areas drawn on one image."""

    name: str
    subset: str
    size: Size | None
    shapes: list[Shape] = field(default_factory=list)


@dataclass
class Document:
    """labels: name and colour, in the order of the file."""

    labels: list[tuple[str, Colour | None]] = field(default_factory=list)
    drawings: list[Drawing] = field(default_factory=list)

    @property
    def classes(self) -> list[Class]:
        """The background first, for what no shape covers; then the labels, in their order."""
        own = next((label for label in self.labels if label[0].casefold() in BACKGROUND), None)
        rest = [label for label in self.labels if label is not own]
        return [Class(0, *(own or (BACKGROUND[0], None))), *(Class(i, *label) for i, label in enumerate(rest, 1))]


# The file


def is_cvat(name: str, head: bytes) -> bool:
    """By its root; or by CVAT's own name, if it is empty or damaged."""
    return PurePosixPath(name).name.lower() == "annotations.xml" or ROOT.search(head) is not None


def parse(path: Path, name: str) -> Document:
    """Raises Refused, with the file's name in its row, unless it is XML without document type that names images."""
    parser = Parser()
    try:
        with open(path, "rb") as file:
            parser.expat.ParseFile(file)
    except expat.ExpatError as error:
        reasons = "annotations must be whole XML", str(error), "export it again: CVAT for images 1.1"
    except PackError as error:
        reasons = error.args
    else:
        if parser.document.drawings:
            return parser.document
        fix = "export it as CVAT for images 1.1, with the images"
        reasons = "annotations must name images", "no <image>", fix
    raise Refused(Row("", *reasons, file=name))


class Parser:
    """Handles expat's events; keeps the labels, and the images with their shapes."""

    def __init__(self) -> None:
        self.document, self.path, self.text = Document(), [], ""
        self.expat = expat.ParserCreate()
        self.expat.buffer_text = True
        self.expat.StartElementHandler, self.expat.EndElementHandler = self.start, self.end
        self.expat.CharacterDataHandler = self.data
        self.expat.StartDoctypeDeclHandler = self.refuse_doctype

    def refuse_doctype(self, name: str, *_) -> None:
        rule = "annotations must have no document type: its entities can fill the memory"
        raise PackError(rule, f"<!DOCTYPE {name}", "delete it, if you trust the file; CVAT writes none")

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self.path.append(tag)
        self.text, drawings = "", self.document.drawings
        if tag == "image" and len(self.path) == 2:
            size = (attributes.get("height", ""), attributes.get("width", ""))
            whole = (int(size[0]), int(size[1])) if all(side.isdecimal() and len(side) < 7 for side in size) else None
            drawings.append(Drawing(attributes.get("name", ""), attributes.get("subset", ""), whole))
        elif self.path[1:2] == ["image"] and tag in AREAS:
            drawings[-1].shapes.append(Shape(tag, attributes))

    def data(self, text: str) -> None:
        self.text += text

    def end(self, tag: str) -> None:
        text, labels = self.text.strip(), self.document.labels
        if self.path[-3:] == ["labels", "label", "name"] and text not in (name for name, _ in labels):
            labels.append((text, None))
        elif self.path[-3:] == ["labels", "label", "color"] and labels and (match := HEX.fullmatch(text)):
            red, green, blue = (int(part, 16) for part in match.groups())
            labels[-1] = labels[-1][0], (red, green, blue)
        self.path.pop()


# The mask


def draw(drawing: Drawing, recipe: Recipe, size: Size) -> np.ndarray:
    """(H, W) uint8: the label of an image of a size. Shapes of a higher z_order, and later ones of the same, cover
    those below. Raises Refused with the first shape that cannot be drawn."""
    if drawing.size is not None:
        require_size(drawing.size, size)
    known, lookup, area = recipe.table.by_name, recipe.table.lookup, recipe.area(size)
    height, width = (part.stop - part.start for part in area)
    canvas = Image.new("L", (width * FINE, height * FINE), recipe.table.background)
    scale = np.array(canvas.size) / (size[1], size[0])
    shapes = [(*outline(shape, known, size), shape.attributes["label"]) for shape in drawing.shapes]
    for _, points, label in sorted(shapes, key=lambda each: each[0]):
        corners = np.clip(points * scale, -DRAWABLE, DRAWABLE)
        ImageDraw.Draw(canvas).polygon([tuple(point) for point in corners.tolist()], fill=int(lookup[known[label]]))
    return recipe.label(canvas, area)


def outline(shape: Shape, known: Mapping[str, int], size: Size) -> tuple[float, np.ndarray]:
    """(z_order, corners (N, 2) float64: x, y in pixels, (0, 0) the upper left corner of the image) of a polygon.

    Raises Refused if it has none, its label is not in the class table, or it lies outside the image.
    """
    label, fix = shape.attributes.get("label", ""), "draw it again, or delete it"
    if shape.kind != "polygon":
        raise Refused(Row(shape.kind, "a shape must be a polygon", f"{label}: {shape.kind}", fix))
    if label not in known:
        fix = "correct it, or add it to classes="
        raise Refused(Row("label", "a shape's label must be in the class table", label or "nothing", fix))
    try:
        pairs = [pair.split(",") for pair in shape.attributes.get("points", "").split(";") if pair.strip()]
        points = np.array([(float(x), float(y)) for x, y in pairs], np.float64).reshape(-1, 2)
        z_order = float(shape.attributes.get("z_order", "0"))
        if not (np.abs([*points.ravel(), z_order]) < FARTHEST).all():
            raise ValueError(f"beyond {FARTHEST:g}, or not finite")
    except ValueError as error:
        raise Refused(Row(shape.kind, "coordinates must be finite", f"{label}: {error}"[:80], fix)) from None
    if len(points) < 3:
        raise Refused(Row(shape.kind, "a polygon must have at least 3 points", f"{label}: {len(points)}", fix))
    low, high = points.min(0), points.max(0)
    if (high <= 0).any() or (low >= (size[1], size[0])).any():
        value = f"{label}: x {low[0]:g} to {high[0]:g}, y {low[1]:g} to {high[1]:g} in {sized(*size)}"
        raise Refused(Row(shape.kind, "a shape must lie inside the image", value, fix))
    return z_order, points
