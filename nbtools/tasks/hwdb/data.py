"""Raw lines → pack, both columns ragged: image (W, height) uint8, a line's ink on its side (0 paper, as padding is, 255
the darkest); label (N,) int64, places in the classes.

The last class is always UNKNOWN: characters that were illegible on the page, and those that a given list of classes
omits.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from nbtools.data import Card, Entry, Pack, Sample, Survey, build_pack, say
from nbtools.errors import PackError
from nbtools.show import sized
from nbtools.tasks.common.files import decode_image
from nbtools.tasks.common.lists import characters, read_text
from nbtools.tasks.common.plans import THUMB
from nbtools.tasks.hwdb.formats import SUFFIXES, UNKNOWN, refused
from nbtools.tasks.hwdb.sources import contents_of, read_bytes, read_line
from nbtools.train import device

HEIGHTS = 16, 512  # pixels: the networks halve it several times; no line is scanned with more
HCTR_HEIGHT = 96  # from which the plan's "auto" takes the reference's network: lower lines give it a step a character
TIERS = ((40, 128), (24, 96), (1, 64), (0, 32))
"""GB of GPU memory → height of the lines in pixels. Calculated: in hctr and bf16 a line 128 pixels high and 2,000 long
saves 0.88 GiB of activations, and they grow with the square of the height. Not tested on a GPU."""
WIDEST = 100  # times as wide as high; lines of HWDB reach 20
FEW = 3  # writers: one for each split
WRITER = re.compile(r"(\d+)-P\d+")


def pack(
    source: str | Path,
    *,
    height: int | str = "auto",
    classes: str | Path | Sequence[str] | None = None,
    val: float = 0.1,
    test: float = 0.1,
    into: str | Path | None = None,
    progress: bool = True,
) -> Pack:
    """The pack of pages (.dgrl) or of images of lines, from a folder, archive or link; a second call opens it, and
    interrupted packing resumes. Archives in a folder are staged.

    height: pixels that every line is scaled to; `auto`: by `height_for`, 128 for a GPU of 40 GB, 32 without one.
    classes: the characters to know, as a string, a list, or a file with one per line; all others are UNKNOWN. By
    default the source's chars_list.txt, else every character of all its texts: one that occurs only in a test line is
    then read wrong, as it must be, while as UNKNOWN it could be called right.
    val, test: shares of the writers, or whole numbers: as many writers as have at least that many lines; folders called
    Train, Val or Test and the names of lists come first. test=1.0 makes all of them test, for a source that a run is
    evaluated on.
    Raises PackError if nothing can be used.
    """
    height, why = height_for(device.gigabytes(device.pick())) if height == "auto" else (height, "")
    if type(height) is not int or not HEIGHTS[0] <= height <= HEIGHTS[1]:
        raise PackError(
            f"height must be a whole number of pixels from {HEIGHTS[0]} to {HEIGHTS[1]}, got {height!r}; "
            "128 is the reference's, 32 is for CPUs, auto chooses by the GPU"
        )
    options = {"height": height, "classes": None if classes is None else "".join(charset_of(classes))}
    found = partial(survey, progress=progress, why=why)
    return build_pack(source, "hwdb", options, found, read, val=val, test=test, into=into, progress=progress)


def height_for(gigabytes: float) -> tuple[int, str]:
    """(pixels, why): the height of lines for a GPU of this memory, 10⁹ bytes; 0: no CUDA GPU."""
    least, height = device.tier(gigabytes, TIERS)
    size = f"{gigabytes:.0f} GB of GPU memory, {THUMB}, not tested on a GPU" if least else f"no CUDA GPU, {THUMB}"
    return height, f"{height} pixels, for {'hctr' if height >= HCTR_HEIGHT else 'slim'}: {size}"


def pack_options(card: Card) -> dict[str, Any]:
    """Options of `pack` with which another source has the classes and the preprocessing of a card."""
    return {**card.options, "classes": [character for character in card.classes if character != UNKNOWN]}


def survey(folder: Path, options: Mapping[str, Any], progress: bool = False, why: str = "") -> Survey:
    """Every usable line of a source with its label and split; the others are bad, with the rule that they break.
    why: the reason for the height, which is shown."""
    if progress and why:
        say(f"lines are scaled to {why}; height= sets another")
    contents = contents_of(folder, progress)
    if options["classes"] is not None:
        classes = tuple(options["classes"])
    elif contents.characters is not None:
        path, listed = contents.characters
        classes = charset_of(characters_of(listed, path))
    else:
        classes = (*sorted(set().union(*(line.label for line in contents.lines)) - {UNKNOWN}), UNKNOWN)
    places = {character: place for place, character in enumerate(classes)}  # `in` a list reads half of 7,375
    return Survey(
        [
            replace(line, label=np.array([places.get(c, places[UNKNOWN]) for c in line.label], np.int64))
            for line in parted(contents.lines)
        ],
        classes,
        {"height": options["height"]},
        ragged=("image", "label"),
        bucket_by="image",
        bad=contents.bad,
    )


def read(path: Path, options: Mapping[str, Any]) -> Sample:
    """One line → {"image": …} as the pack holds it: an image file, or `page.dgrl#3`, a page's third line; either may
    lie in an archive, `HWDB2.0Train.zip/HWDB2.0Train/001-P16.dgrl#3`. Raises Refused on what cannot be used."""
    page, _, number = path.name.rpartition("#")
    if page.lower().endswith(SUFFIXES) and number.isdecimal():
        grey = read_line(path.with_name(page), int(number))
    elif path.suffix.lower() in SUFFIXES:
        raise refused(path.suffix, "only single lines are read, not whole pages", f"name a line of it: {path.name}#1")
    else:
        grey = np.asarray(decode_image(read_bytes(path), "L"))
    return {"image": ink_of(grey, options["height"])}


def ink_of(grey: np.ndarray, height: int) -> np.ndarray:
    """Grey (H, W) uint8 → ink (w, height) uint8, scaled by area (where it is enlarged, linearly); margins stay."""
    rows, columns = grey.shape
    width = max(1, round(columns * height / rows))
    if width > WIDEST * height:
        rule = f"a line must be at most {WIDEST} times as wide as high"
        raise refused(sized(rows, columns), rule, "cut it into shorter lines")
    scaling = Image.Resampling.BOX if rows > height else Image.Resampling.BILINEAR
    return np.ascontiguousarray(~np.asarray(Image.fromarray(grey).resize((width, height), scaling)).T)


# Characters


def charset_of(classes: str | Path | Iterable[str]) -> tuple[str, ...]:
    """The classes that a caller passes: a file with one character per line, a string or a list of characters. Raises
    PackError for what is not a character, or comes twice."""
    if isinstance(classes, Path) or (isinstance(classes, str) and classes.endswith(".txt")):
        classes = characters_of(read_text(Path(classes), "name a file with one character per line"), Path(classes))
    return (*(character for character in characters(classes) if character != UNKNOWN), UNKNOWN)


def characters_of(text: str, path: Path) -> list[str]:
    """The characters of a `chars_list.txt`, one per line. A line may be a blank: it is the space. Raises PackError."""
    found: dict[str, None] = {}
    for number, line in enumerate((line.removesuffix("\r") for line in text.split("\n")), 1):
        if len(line) > 1 or line in found:
            rule = "a line must hold one character, which no other line has"
            raise PackError(f"{path}:{number}: {rule}, got {line!r}; correct or delete it")
        if line:
            found[line] = None
    if not found:
        raise PackError(f"{path}: it must have a character on each line, got none; fill it, or delete it")
    return list(found)


# Writers


def parted(lines: Sequence[Entry]) -> list[Entry]:
    """The lines with their groups: by whole writers, so that no hand is in two splits, or by pages where there are
    fewer than three of them to divide. Where the source names only train lines, all three splits come from these."""
    named = {line.split for line in lines} - {None}
    own = [None if named <= {"train"} else line.split or "train" for line in lines]
    writers = [writer_of(line.name) for line in lines]
    few = len({writer for writer, split in zip(writers, own, strict=True) if split in (None, "train")}) < FEW
    groups = [line.name.partition("#")[0] if few else writer for line, writer in zip(lines, writers, strict=True)]
    return [replace(line, split=s, group=g) for line, s, g in zip(lines, own, groups, strict=True)]


def writer_of(name: str) -> str:
    """The writer of a line; the page, or the image, if its name does not tell."""
    page, _, line = name.partition("#")
    match = WRITER.match(PurePosixPath(page).name) if line else None
    return f"writer {match[1]}" if match else page
