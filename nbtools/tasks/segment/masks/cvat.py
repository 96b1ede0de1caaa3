"""CVAT for images 1.1: one XML file with the labels, and for each image the shapes that were drawn on it.

    <annotations><meta>… <labels><label><name>shirt</name><color>#ff0000</color></label></labels> …</meta>
    <image id="0" name="a.jpg" width="640" height="480" subset="Train">
      <polygon label="shirt" points="1.5,2.0;30,4;12.5,40" z_order="0"/>
      <box xtl ytl xbr ybr rotation/>  <ellipse cx cy rx ry rotation/>  <mask rle left top width height/>
    </image></annotations>

Read by expat itself, image by image, and without a document type: entities can make a small file fill the memory.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from xml.parsers import expat

from nbtools.data import Refused, Row
from nbtools.errors import PackError
from nbtools.table import plural
from nbtools.tasks.segment.masks.classes import BACKGROUND, Class, Colour

AREAS = ("polygon", "box", "ellipse", "mask")
OTHERS = ("polyline", "points", "tag", "cuboid", "skeleton")  # these have no area
HEAD = 4096  # bytes that tell whether an XML file is CVAT's: another root, as Pascal VOC's <annotation>, is not
NAME = "annotations.xml"
ROOT = re.compile(rb"<annotations[\s>]")
FARTHEST = 1e6  # pixels: no image is larger
HEX = re.compile(r"#([0-9a-fA-F]{2})([0-9a-fA-F]{2})([0-9a-fA-F]{2})")


@dataclass(frozen=True)
class Shape:
    """One drawn area: its element's name and attributes as the file has them."""

    kind: str
    attributes: Mapping[str, str]

    @property
    def label(self) -> str:
        return self.attributes.get("label", "")

    def number(self, name: str, default: str | None = None) -> float:
        """Raises ValueError for an attribute that is absent, or no number that can be a coordinate."""
        value = float(self.attributes.get(name, default) or "nothing")
        if not abs(value) < FARTHEST:
            raise ValueError(f"{name}={value}")
        return value


@dataclass
class Drawing:
    """All that was drawn on one image. others: elements that have no area."""

    name: str
    subset: str
    size: tuple[int, int] | None
    shapes: list[Shape] = field(default_factory=list)
    others: list[str] = field(default_factory=list)


@dataclass
class Document:
    """labels: name and colour, as the file lists them. tracks: of CVAT for video, which names no images."""

    labels: list[tuple[str, Colour | None]] = field(default_factory=list)
    drawings: list[Drawing] = field(default_factory=list)
    tracks: int = 0

    @property
    def classes(self) -> list[Class]:
        """The background first, for what no shape covers; then the labels, in their order."""
        names = [name.casefold() for name, _ in self.labels]
        own = next((i for i, name in enumerate(names) if name in BACKGROUND), None)
        rest = [label for i, label in enumerate(self.labels) if i != own]
        first = (BACKGROUND[0], None) if own is None else self.labels[own]
        used = [colour for _, colour in rest]
        colours = [c if used.count(c) < 2 else None for c in used]  # CVAT lets two labels have one
        return [Class(0, *first), *(Class(i, rest[i - 1][0], colours[i - 1]) for i in range(1, len(rest) + 1))]


def is_cvat(name: str, head: bytes) -> bool:
    """By its root; or by CVAT's own name, where it is empty or damaged. Windows tools write UTF-16."""
    return PurePosixPath(name).name.lower() == NAME or ROOT.search(head.replace(b"\0", b"")) is not None


def parsed(path: Path, name: str) -> Document:
    """Raises Refused where it is no XML, or has a document type; the row's file is `name`."""
    reader = Reader()
    try:
        with open(path, "rb") as file:
            reader.parser.ParseFile(file)
    except expat.ExpatError as error:
        fix = "export it again: CVAT for images 1.1"
        raise Refused(Row("", "annotations are whole XML", str(error), fix, file=name)) from None
    except OSError as error:
        rule, fix = "annotations can be read", "copy the file again, or change its permissions"
        raise Refused(Row("", rule, error.strerror or str(error), fix, file=name)) from None
    except PackError as error:
        raise Refused(Row("", *error.args, file=name)) from None
    if not reader.document.drawings:
        value = (
            f"none, but {plural(reader.document.tracks, 'track')} of a video"
            if reader.document.tracks
            else "no <image>"
        )
        fix = "export it as CVAT for images 1.1, with the images"
        raise Refused(Row("", "annotations name images", value, fix, file=name))
    return reader.document


class Reader:
    """Takes expat's events; keeps the labels, and the images with their shapes."""

    def __init__(self) -> None:
        self.document, self.way, self.text = Document(), [], []
        self.parser: Any = expat.ParserCreate()
        self.parser.buffer_text = True
        self.parser.StartElementHandler, self.parser.EndElementHandler = self.start, self.end
        self.parser.CharacterDataHandler = self.characters
        self.parser.StartDoctypeDeclHandler = self.refuse

    def refuse(self, name: str, *_) -> None:
        rule = "annotations have no document type: its entities can fill the memory"
        raise PackError(rule, f"<!DOCTYPE {name}", "delete it, if you trust the file; CVAT writes none")

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        self.way.append(tag)
        self.text = []
        drawings = self.document.drawings
        if tag == "image" and len(self.way) == 2:
            size = (attributes.get("height", ""), attributes.get("width", ""))
            whole = (int(size[0]), int(size[1])) if all(side.isdecimal() and len(side) < 7 for side in size) else None
            drawings.append(Drawing(attributes.get("name", ""), attributes.get("subset", ""), whole))
        elif tag == "track" and len(self.way) == 2:
            self.document.tracks += 1
        elif self.way[1:2] == ["image"] and tag in AREAS:
            drawings[-1].shapes.append(Shape(tag, attributes))
        elif self.way[1:2] == ["image"] and tag in OTHERS and len(self.way) == 3:
            drawings[-1].others.append(tag)

    def characters(self, text: str) -> None:
        self.text.append(text)

    def end(self, tag: str) -> None:
        text, self.text = "".join(self.text).strip(), []
        labels = self.document.labels
        if self.way[-3:] == ["labels", "label", "name"] and text not in (name for name, _ in labels):
            labels.append((text, None))
        elif self.way[-3:] == ["labels", "label", "color"] and labels and (match := HEX.fullmatch(text)):
            red, green, blue = (int(part, 16) for part in match.groups())
            labels[-1] = labels[-1][0], (red, green, blue)
        self.way.pop()
