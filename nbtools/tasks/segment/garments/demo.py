"""Demo data in the raw format: photographs of garments, label images of class ids, and the same as CVAT polygons."""

from __future__ import annotations

import contextlib
import functools
import io
import operator
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from xml.sax.saxutils import quoteattr

import numpy as np
from PIL import Image, ImageDraw, PngImagePlugin, UnidentifiedImageError

from nbtools import disk
from nbtools.errors import PackError
from nbtools.tasks.segment.garments.scene import HIDING, Annotation, scene

CLASSES = {
    "garment": {HIDING: (0, 0, 0), "garment": (86, 180, 233)},
    "kinds": {
        HIDING: (0, 0, 0),
        "shirt": (204, 121, 167),
        "trousers": (86, 180, 233),
        "dress": (240, 228, 66),
        "skirt": (0, 158, 115),
    },
}
"""name → colour, in the order of the ids, of each choice of classes; the colours are Okabe and Ito's,
without the blue and vermilion that mean right and wrong in pictures."""
FORMS = ("labels", "cvat", "both")
IMAGES, LABELS, XML, NAMED = "images", "labels", "annotations.xml", "classes.txt"
SPLITS = ("train", "train", "train", "train", "train", "val", "test")  # of seven pictures in turn
PICTURE = 5  # the stream of random numbers of a picture
FINE = 4
CHUNK = 64  # pictures encoded at once in threads: bounds memory
SIGNED = "nbtools demo"  # the comment of each file: by it another demo may replace it


@dataclass(frozen=True)
class Shot:
    """Picture n of the demo: image (H, W, 3) uint8 and its polygons; the JPEG's quality differs as cameras do."""

    number: int
    image: np.ndarray
    annotations: tuple[Annotation, ...]
    quality: int

    @property
    def name(self) -> str:
        return f"{SPLITS[self.number % len(SPLITS)]}/{self.number:05}"


def demo(
    folder: str | Path,
    count: int = 1400,
    *,
    size: tuple[int, int] = (384, 288),
    classes: str = "garment",
    form: str = "labels",
    seed: int = 0,
) -> Path:
    """Write `count` pictures of garments among other things of cloth; returns the folder.

    images/ with train/, val/ and test/ (five, one and one of seven), labels/ with the same, and `classes.txt` with the
    lines id,name,r,g,b; or `annotations.xml` (CVAT for images 1.1) with the polygons of which those labels are made.
    size: (height, width) in pixels. classes: "garment" beside the background, or "kinds" of them (shirt, trousers,
    dress, skirt); the pictures are the same. form: "labels", "cvat" or "both", of which packing
    then takes one by its own `labels`.
    The same seed gives the same files, byte for byte, and 100 pictures are the first of 1,000. No two show the same
    garment or cloth, so those of val and test are unseen.
    mIoU on 456 unseen pictures after 1,144 seen ones, at 128 × 96 pixels: a histogram of colours 0.38, with the place
    0.48, the slim network 0.80 after 90 s of one core and 0.86 after 210 s (one seed).
    Cost: 30 ms of CPU time a picture and 20 kB.
    Raises PackError on an impossible request, DiskError.
    """
    require(count, size, classes, form, seed)
    folder, colours = Path(folder), CLASSES[classes]
    with disk.explained("writing demo pictures", folder), ThreadPoolExecutor() as pool:
        clear(folder, form)
        entries, shots = [], photographs(count, size, seed)
        while chunk := list(islice(shots, CHUNK)):
            list(pool.map(functools.partial(write_shot, folder, list(colours), form), chunk))
            entries += [entry(shot, colours) for shot in chunk]
        if form != "labels":
            write(folder / XML, document(entries, colours))
        write(folder / NAMED, named(colours))
    return folder


def require(count: int, size: tuple[int, int], classes: str, form: str, seed: int) -> None:
    rules = {
        "count must be 1 picture or more": (type(count) is int and count >= 1, count),
        "size must be (height, width), from 32 to 4,096 pixels": (
            isinstance(size, (tuple, list))
            and len(size) == 2
            and all(type(s) is int and 32 <= s <= 4096 for s in size),
            size,
        ),
        f"classes must be one of {', '.join(CLASSES)}": (classes in CLASSES, classes),
        f"form must be one of {', '.join(FORMS)}": (form in FORMS, form),
        "seed must be 0 or more": (type(seed) is int and seed >= 0, seed),
    }
    for rule, (kept, value) in rules.items():
        if not kept:
            raise PackError(f"{rule}, got {value!r}")


def photographs(count: int, size: tuple[int, int], seed: int) -> Iterator[Shot]:
    """Each a pure function of its number and the seed."""
    for number in range(count):
        rng = np.random.default_rng([seed, PICTURE, number])
        image, annotations = scene(rng, *size)
        yield Shot(number, image, annotations, int(rng.integers(72, 93)))


def label_of(annotations: tuple[Annotation, ...], names: list[str], height: int, width: int) -> np.ndarray:
    """(H, W) uint8 places in `names`: each pixel has the highest polygon that covers its centre, else background.

    Drawn FINE times as large, since Pillow fills a polygon up to and with its outline, on whole pixels."""
    mask = Image.new("L", (width * FINE, height * FINE))
    pen = ImageDraw.Draw(mask)
    for one in sorted(annotations, key=operator.attrgetter("z_order")):
        pen.polygon((FINE * one.points).ravel().tolist(), fill=names.index(called(one, names)))
    return np.asarray(mask)[FINE // 2 :: FINE, FINE // 2 :: FINE]


def called(annotation: Annotation, names) -> str:
    """A kind's label is that of all garments where kinds are no classes."""
    return annotation.label if annotation.label in names else "garment"


def write_shot(folder: Path, names: list[str], form: str, shot: Shot) -> None:
    """One JPEG and its label; encoding releases the GIL."""
    content = io.BytesIO()
    Image.fromarray(shot.image).save(content, "JPEG", quality=shot.quality, comment=SIGNED)
    write(folder / IMAGES / f"{shot.name}.jpg", content.getvalue())
    if form != "cvat":
        comment, content = PngImagePlugin.PngInfo(), io.BytesIO()
        comment.add_text("Comment", SIGNED)
        label = label_of(shot.annotations, names, *shot.image.shape[:2])
        Image.fromarray(label).save(content, "PNG", compress_level=3, pnginfo=comment)
        write(folder / LABELS / f"{shot.name}.png", content.getvalue())


def entry(shot: Shot, names) -> str:
    """A picture's element of the XML."""
    height, width = shot.image.shape[:2]
    lines = [f'  <image id="{shot.number}" name="{shot.name}.jpg" width="{width}" height="{height}">\n']
    for one in shot.annotations:
        points = ";".join(f"{x:.2f},{y:.2f}" for x, y in one.points)
        label = f'label={quoteattr(called(one, names))} source="manual" occluded="0"'
        lines.append(f'    <polygon {label} points="{points}" z_order="{one.z_order}">\n    </polygon>\n')
    return "".join([*lines, "  </image>\n"])


def document(entries: list[str], colours) -> bytes:
    """CVAT for images 1.1, https://docs.cvat.ai/docs/dataset_management/formats/format-cvat/"""
    labels = "".join(
        f"        <label>\n          <name>{name}</name>\n          <color>#{r:02x}{g:02x}{b:02x}</color>\n"
        "          <type>polygon</type>\n          <attributes>\n          </attributes>\n        </label>\n"
        for name, (r, g, b) in colours.items()
    )
    head = (
        '<?xml version="1.0" encoding="utf-8"?>\n<annotations>\n  <version>1.1</version>\n  <meta>\n    <task>\n'
        f"      <name>{SIGNED}</name>\n      <size>{len(entries)}</size>\n      <mode>annotation</mode>\n"
        f"      <labels>\n{labels}      </labels>\n    </task>\n  </meta>\n"
    )
    return "".join([head, *entries, "</annotations>\n"]).encode()


def named(colours) -> bytes:
    """The class table: id,name,r,g,b."""
    return "".join(f"{i},{name},{r},{g},{b}\n" for i, (name, (r, g, b)) in enumerate(colours.items())).encode()


def write(path: Path, data: bytes) -> None:
    """Not fsynced: demo data is made anew in seconds."""
    disk.remove(path)
    with disk.create(path) as file:
        disk.write(file, data)


def clear(folder: Path, form: str) -> None:
    """Make the folders, without files of an earlier demo. Raises PackError at the first file that is not a demo's."""
    below = [folder / top / split for top in (IMAGES, LABELS) for split in dict.fromkeys(SPLITS)]
    old = [path for name in below for path in sorted(name.glob("*")) if path.is_file()]
    for path in [*old, *filter(Path.exists, [folder / XML, folder / NAMED])]:
        if not is_demo(path):
            raise PackError(f"{path} was not written by this demo, and would be lost: choose another folder")
    for path in [*old, folder / XML]:
        disk.remove(path)
    for name in below:
        if form != "cvat" or IMAGES in name.parts:
            disk.make_folder(name)


def is_demo(path: Path) -> bool:
    if path.name == NAMED:
        return path.read_bytes() in map(named, CLASSES.values())
    if path.name == XML:
        with open(path, "rb") as file:
            return f"<name>{SIGNED}</name>".encode() in disk.read(file, 300)
    with contextlib.suppress(UnidentifiedImageError), Image.open(path) as image:
        comment = image.info.get("comment", image.info.get("Comment", b""))
        return comment in (SIGNED, SIGNED.encode())
    return False
