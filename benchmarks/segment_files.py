"""Images and labels read from their files one by one, as the Datasets that people write do it: what packs are compared
with."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance
from torch.utils.data import Dataset

from nbtools.tasks.segment import PLAN

SIDE = 384  # pixels that photographs are scaled to, the guide's
VARIED = PLAN.replace(crop=256)
Item = dict[str, Any]


def item(image: Image.Image, label: Image.Image, i: int) -> Item:
    return {"image": np.asarray(image), "label": np.asarray(label), "id": np.int64(i)}


@dataclass(frozen=True)
class Pngs(Dataset):
    """The leanest reader: an image and its label."""

    source: Path
    names: Sequence[str]

    def opened(self, i: int) -> tuple[Image.Image, Image.Image]:
        name = self.names[i]
        label = self.source / name.replace("images", "labels", 1)
        return Image.open(self.source / name).convert("RGB"), Image.open(label)

    def __getitem__(self, i: int) -> Item:
        return item(*self.opened(i), i)


class Varied(Pngs):
    """And augmented as the guides do it: zoomed, cut out, mirrored, recoloured."""

    def __getitem__(self, i: int) -> Item:
        both, crop = self.opened(i), VARIED.crop
        assert crop is not None
        scale = random.uniform(VARIED.scale_low, VARIED.scale_high)
        width, height = (round(side * scale) for side in both[0].size)
        left, top = (random.randint(*sorted((0, side - crop))) for side in (width, height))
        mirrored, found = random.random() < VARIED.flip, []
        for one, way, around in zip(
            both, (Image.Resampling.BILINEAR, Image.Resampling.NEAREST), (128, 255), strict=True
        ):
            cut = Image.new(one.mode, (crop, crop), (around,) * len(one.getbands()))
            cut.paste(one.resize((width, height), way), (-left, -top))
            found.append(cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT) if mirrored else cut)
        for change in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
            found[0] = change(found[0]).enhance(random.uniform(1 - VARIED.jitter, 1 + VARIED.jitter))
        return item(found[0], found[1], i)


class Photos(Dataset):
    """JPEGs and the polygons of a CVAT file, drawn in full size and then scaled down."""

    def __init__(self, source: Path, names: Sequence[str], classes: Sequence[str]):
        self.files, found = [source / name for name in names], {}
        for image in ET.parse(source / "annotations.xml").getroot().iter("image"):
            shapes = sorted(image.iter("polygon"), key=lambda shape: int(shape.attrib["z_order"]))
            corners = [[float(x) for x in shape.attrib["points"].replace(";", ",").split(",")] for shape in shapes]
            places = [classes.index(shape.attrib["label"]) for shape in shapes]
            found[f"images/{image.attrib['name']}"] = list(zip(corners, places, strict=True))
        self.shapes = [found[name] for name in names]

    def __getitem__(self, i: int) -> Item:
        image = Image.open(self.files[i]).convert("RGB")
        label = Image.new("L", image.size)
        for corners, place in self.shapes[i]:
            ImageDraw.Draw(label).polygon(corners, fill=place)
        size = SIDE, SIDE
        return item(image.resize(size, Image.Resampling.BILINEAR), label.resize(size, Image.Resampling.NEAREST), i)


def as_pngs(source: Path) -> Path:
    for path in sorted(source.glob("images/*/*.jpg")):
        Image.open(path).save(path.with_suffix(".png"))
        path.unlink()
    return source
