"""CVAT for images 1.1: one XML file with the labels and, for each image, the shapes drawn on it; and these as a mask.

    <annotations><meta>… <labels><label><name>shirt</name><color>#ff0000</color></label></labels> …</meta>
    <image id="0" name="a.jpg" width="640" height="480" subset="Train">
      <polygon label="shirt" points="1.5,2.0;30,4;12.5,40" z_order="0"/>
      <box xtl ytl xbr ybr rotation/>  <ellipse cx cy rx ry rotation/>  <mask rle left top width height/>
    </image></annotations>

Parsed with expat, image by image, and without a document type: entities can make a small file fill the memory.

Pillow fills a polygon including its outline, on whole pixels. So shapes are drawn FINE times as large as the packed
size, and each pixel takes what covers its centre: exact to a quarter of a packed pixel.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from xml.parsers import expat

import numpy as np
from PIL import Image, ImageDraw

from nbtools import disk
from nbtools.errors import PackError
from nbtools.table import plural, sized
from nbtools.tasks.common.report import WARNING, Refused, Row
from nbtools.tasks.segment.classes import BACKGROUND, Class, Colour
from nbtools.tasks.segment.images import Recipe, Size, require_size

AREAS = ("polygon", "box", "ellipse", "mask")
OTHERS = ("polyline", "points", "tag", "cuboid", "skeleton")  # these have no area
ROOT = re.compile(rb"<annotations[\s>]")  # another root, as Pascal VOC's <annotation>, is another format
HEX = re.compile(r"#([0-9a-fA-F]{2})([0-9a-fA-F]{2})([0-9a-fA-F]{2})")
FARTHEST = 1e6  # pixels: no image is larger
FINE = 4
ARCS = 128  # corners of an ellipse
MOST = 1 << 27  # pixels of a mask: a few bytes of runs could stand for any number
DRAWABLE = 1 << 30  # pixels of a canvas: Pillow computes in 32-bit integers


@dataclass(frozen=True)
class Shape:
    """One drawn area: the element's name and attributes as in the file."""

    kind: str
    attributes: Mapping[str, str]

    def number(self, name: str, default: str | None = None) -> float:
        """Raises ValueError for an attribute that is missing, or no number that can be a coordinate."""
        value = float(self.attributes.get(name, default) or "nothing")
        if not abs(value) < FARTHEST:
            raise ValueError(f"{name}={value}")
        return value

    def numbers(self, *names: str) -> list[float]:
        return [self.number(name) for name in names]


@dataclass
class Drawing:
    """All that was drawn on one image. others: elements without area."""

    name: str
    subset: str
    size: Size | None
    shapes: list[Shape] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


@dataclass
class Document:
    """labels: name and colour, in the order of the file. tracks: of CVAT for video, which names no images."""

    labels: list[tuple[str, Colour | None]] = field(default_factory=list)
    drawings: list[Drawing] = field(default_factory=list)
    tracks: int = 0

    @property
    def classes(self) -> list[Class]:
        """The background first, for what no shape covers; then the labels, in their order."""
        own = next((label for label in self.labels if label[0].casefold() in BACKGROUND), None)
        rest = [label for label in self.labels if label is not own]
        used = [colour for _, colour in rest]  # CVAT lets two labels have the same
        others = [Class(i, name, c if used.count(c) < 2 else None) for i, (name, c) in enumerate(rest, 1)]
        return [Class(0, *(own or (BACKGROUND[0], None))), *others]


# The file


def is_cvat(name: str, head: bytes) -> bool:
    """By its root; or by CVAT's own name, if it is empty or damaged. Windows tools write UTF-16."""
    own = PurePosixPath(name).name.lower() == "annotations.xml"
    return own or ROOT.search(head.replace(b"\0", b"")) is not None


def parse(path: Path, name: str) -> Document:
    """Raises Refused, with the file's name in its row, unless it is XML without document type that names images."""
    parser = Parser()
    try:
        with open(path, "rb") as file:
            parser.expat.ParseFile(file)
    except expat.ExpatError as error:
        reasons = "annotations must be whole XML", str(error), "export it again: CVAT for images 1.1"
    except OSError as error:
        if disk.is_away(error):
            raise
        fix = "copy the file again, or change its permissions"
        reasons = "annotations must be readable", error.strerror or str(error), fix
    except PackError as error:
        reasons = error.args
    else:
        if parser.document.drawings:
            return parser.document
        tracks = parser.document.tracks
        value = f"none, but {plural(tracks, 'track')} of a video" if tracks else "no <image>"
        reasons = "annotations must name images", value, "export it as CVAT for images 1.1, with the images"
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
        elif tag == "track" and len(self.path) == 2:
            self.document.tracks += 1
        elif self.path[1:2] == ["image"] and tag in AREAS:
            drawings[-1].shapes.append(Shape(tag, attributes))
        elif self.path[1:2] == ["image"] and tag in OTHERS and len(self.path) == 3:
            drawings[-1].others.append(tag)

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


def draw(drawing: Drawing, recipe: Recipe, size: Size, rows: list[Row]) -> np.ndarray:
    """(H, W) uint8: the label of an image of a size. Shapes of a higher z_order, and later ones of the same, cover
    those below. Remarks are added to `rows`; raises Refused with the first shape that cannot be drawn."""
    if drawing.size is not None:
        require_size(drawing.size, size)
    if not drawing.shapes:
        fix = "nothing, if there is nothing on it; else draw it, or delete the image"
        rows.append(Row("shapes", "an image should have shapes", "none: all of it is background", fix, WARNING))
    fix = "nothing: it is not drawn; or draw a polygon"
    rows += [Row(kind, "a shape should have an area", kind, fix, WARNING) for kind in sorted(set(drawing.others))]
    known, lookup, area = recipe.table.by_name, recipe.table.lookup, recipe.area(size)
    height, width = (part.stop - part.start for part in area)
    canvas = Image.new("L", (width * FINE, height * FINE), recipe.table.background)
    scale = np.array(canvas.size) / (size[1], size[0])
    shapes = [(*outline(shape, known, size), shape) for shape in drawing.shapes]
    for _, points, shape in sorted(shapes, key=lambda each: each[0]):
        value = int(lookup[known[shape.attributes["label"]]])
        if shape.kind == "mask":
            paste_mask(canvas, decode_runs(shape), points[0], scale, value)
        else:
            corners = np.clip(points * scale, -DRAWABLE, DRAWABLE)
            ImageDraw.Draw(canvas).polygon([tuple(point) for point in corners.tolist()], fill=value)
    return recipe.label(canvas, area)


def outline(shape: Shape, known: Mapping[str, int], size: Size) -> tuple[float, np.ndarray]:
    """(z_order, corners (N, 2) float64: x, y in pixels, (0, 0) the upper left corner of the image) of a shape.

    Raises Refused if it has none, its label is not in the class table, or it lies outside the image.
    """
    label = shape.attributes.get("label", "")
    if label not in known:
        fix = f"correct it to one of {', '.join(list(known)[:8])}; or add it to classes="
        raise Refused(Row("label", "a shape's label must be in the class table", label or "nothing", fix))
    fix = "draw it again, or delete it"
    try:
        z_order, points = shape.number("z_order", "0"), CORNERS[shape.kind](shape)
    except (ValueError, OverflowError) as error:
        rule = "coordinates must be finite"
        raise Refused(Row(shape.kind, rule, f"{label}: {error}"[:80], fix)) from None
    if len(points) < 3:
        raise Refused(Row(shape.kind, "a polygon must have at least 3 points", f"{label}: {len(points)}", fix))
    low, high = points.min(0), points.max(0)
    if (high <= 0).any() or (low >= (size[1], size[0])).any():
        fix += "; were the images scaled after they were annotated?"
        value = f"{label}: x {low[0]:g} to {high[0]:g}, y {low[1]:g} to {high[1]:g} in {sized(*size)}"
        raise Refused(Row(shape.kind, "a shape must lie inside the image", value, fix))
    return z_order, points


def polygon(shape: Shape) -> np.ndarray:
    pairs = [pair.split(",") for pair in shape.attributes.get("points", "").split(";") if pair.strip()]
    points = np.array([(float(x), float(y)) for x, y in pairs], np.float64).reshape(-1, 2)
    if not (np.abs(points) < FARTHEST).all():
        raise ValueError(f"points beyond {FARTHEST:g}, or not finite")
    return points


def box(shape: Shape) -> np.ndarray:
    left, top, right, bottom = shape.numbers("xtl", "ytl", "xbr", "ybr")
    corners = np.array([(left, top), (right, top), (right, bottom), (left, bottom)])
    return rotated(corners, corners.mean(0), shape.number("rotation", "0"))


def ellipse(shape: Shape) -> np.ndarray:
    angles = np.linspace(0, 2 * math.pi, ARCS, endpoint=False)
    arc = np.stack([np.cos(angles), np.sin(angles)], 1) * shape.numbers("rx", "ry")
    centre = np.array(shape.numbers("cx", "cy"))
    return rotated(centre + arc, centre, shape.number("rotation", "0"))


def rotated(points: np.ndarray, centre: np.ndarray, degrees: float) -> np.ndarray:
    """Clockwise as seen: y points down."""
    cos, sin = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    return (points - centre) @ np.array([[cos, sin], [-sin, cos]]) + centre


def frame(shape: Shape) -> np.ndarray:
    """The corners of the rectangle that a mask fills. Raises ValueError unless its runs fill it."""
    left, top, width, height = shape.numbers("left", "top", "width", "height")
    decode_runs(shape)
    return np.array([(left, top), (left + width, top), (left + width, top + height), (left, top + height)])


CORNERS = {"polygon": polygon, "box": box, "ellipse": ellipse, "mask": frame}


def decode_runs(shape: Shape) -> np.ndarray:
    """(height, width) bool of a mask: lengths of runs row by row, the first of them outside."""
    height, width = map(int, shape.numbers("height", "width"))
    lengths = [int(text) for text in shape.attributes.get("rle", "").split(",") if text.strip()]
    if min(lengths, default=-1) < 0 or sum(lengths) != height * width or sum(lengths) > MOST:
        raise ValueError(f"runs of {sum(lengths)} pixels for {sized(height, width)}")
    return np.repeat(np.arange(len(lengths)) % 2 == 1, lengths).reshape(height, width)


def paste_mask(canvas: Image.Image, inside: np.ndarray, corner: np.ndarray, scale: np.ndarray, value: int) -> None:
    """Fill what lies inside a mask (h, w) bool with this upper left corner; scale: pixels of the canvas to one of the
    image, in x and y. Costs no more than the canvas, however large the mask is."""
    at = []
    for axis, side in enumerate(canvas.size):
        source = np.floor(np.arange(side) / scale[axis] - corner[axis]).astype(int)
        there = np.flatnonzero((source >= 0) & (source < inside.shape[1 - axis]))
        at.append((there, source[there]))
    (columns, x), (rows, y) = at
    if len(columns) and len(rows):
        part = Image.fromarray(inside[np.ix_(y, x)].astype(np.uint8) * 255)
        canvas.paste(value, (int(columns[0]), int(rows[0])), part)
