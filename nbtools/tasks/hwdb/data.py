"""Raw lines → pack, both columns ragged: image (W, height) uint8, a line's ink on its side (0 paper, as padding is, 255
the darkest); label (N,) int64, places in the classes.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from nbtools.data import Entry, Pack, Sample, Survey, build_pack, require_shares
from nbtools.errors import PackError
from nbtools.table import sized
from nbtools.tasks.common.files import on_white, open_image
from nbtools.tasks.hwdb.charset import Charset, charset_of, given_charset, normalised
from nbtools.tasks.hwdb.formats import SUFFIXES
from nbtools.tasks.hwdb.sources import LAYOUTS, LINE, contents_of, read_bytes, read_line, split_lines

HEIGHTS = 16, 512  # pixels: the networks halve it several times; no line is scanned with more
FOREIGN = 0.05  # of all characters in no class: with HWDB's own list there are none
WIDEST = 100  # times as wide as high; lines of HWDB reach 20


def pack(
    source: str | Path,
    *,
    height: int = 128,
    layout: str = "auto",
    classes: str | Path | Sequence[str] | None = None,
    normalise: bool = False,
    val: float = 0.1,
    test: float = 0.1,
    into: str | Path | None = None,
    progress: bool = True,
) -> Pack:
    """The pack of pages (.dgrl) or of images of lines, from a folder, archive or link; a second call opens it, and
    interrupted packing resumes. Archives stay one file each and are read in place.

    height: pixels that every line is scaled to. layout: `pages`, `lines`, or `auto`, which looks.
    classes: the characters to know, as a string, a list, or a file with one a line; what they leave out is UNKNOWN. By
    default the source's chars_list.txt, else every character of all its texts: one that occurs only in a test line is
    then read wrong, as it must be, while as UNKNOWN it could be called right.
    normalise: full-width letters, digits, marks and blanks of texts and classes become ASCII.
    val, test: shares of the writers, or whole numbers: as many writers as have at least so many lines; folders called
    Train, Val or Test and the names of lists come first.
    Raises PackError where nothing can be used.
    """
    if layout not in LAYOUTS:
        raise PackError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if type(height) is not int or not HEIGHTS[0] <= height <= HEIGHTS[1]:
        raise PackError(
            f"height must be a whole number of pixels from {HEIGHTS[0]} to {HEIGHTS[1]}, got {height!r}; "
            "128 is the reference's, 32 is for CPUs"
        )
    if not isinstance(normalise, bool):
        raise PackError(f"normalise must be true or false, got {normalise!r}")
    require_shares(val, test)
    charset = None if classes is None else given_charset(classes, normalise)
    options = {"height": height, "normalise": normalise, "layout": layout}
    options["classes"] = charset and "".join(charset.classes)
    found = partial(survey, progress=progress)
    return build_pack(
        source, "hwdb", options, found, read, val=val, test=test, into=into, progress=progress, in_place=True
    )


def survey(folder: Path, options: Mapping[str, Any], progress: bool = False) -> Survey:
    """Every usable line of a source with its label and split; the others are bad, with the rule that they break."""
    contents = contents_of(folder, options["layout"], progress)
    clean = normalised if options["normalise"] else str
    texts = [clean(line.text) for line in contents.lines]
    if options["classes"] is not None:
        charset = Charset(tuple(options["classes"]))
    elif contents.characters is not None:
        charset = given_charset(contents.characters, options["normalise"])
    else:
        charset = charset_of(texts)
    outside, characters = charset.outside(texts), sum(map(len, texts))
    if progress and outside.total() > FOREIGN * characters:
        tqdm.write(foreign(outside, characters))
    splits = split_lines(contents.lines, options["val"], options["test"])
    return Survey(
        [
            Entry(line.name, split=split, label=charset.encode(text))
            for line, split, text in zip(contents.lines, splits, texts, strict=True)
        ],
        charset.classes,
        {name: options[name] for name in ("height", "normalise")},
        ragged=("image", "label"),
        bucket_by="image",
        bad=contents.bad,
        facts={"layout": contents.layout, "outside": dict(outside.most_common())},
        drawn=True,
    )


def foreign(outside: Counter[str], characters: int) -> str:
    """A warning about a class list that belongs to another data set."""
    common = "".join(character for character, _ in outside.most_common(10))
    return (
        f"{outside.total():,} of {characters:,} characters are in no class, {common!r} above all, and no network will "
        "read them: is it the right chars_list.txt, or classes=?"
    )


def read(path: Path, options: Mapping[str, Any]) -> Sample:
    """One line → {"image": …} as the pack holds it: an image file, or `page.dgrl#3`, a page's third line; either may
    lie in an archive, `HWDB2.0Train.zip/001-P16.dgrl#3`.

    Raises PackError(value, rule, fix) on what cannot be used.
    """
    if match := LINE.fullmatch(path.name):
        grey = read_line(path.with_name(match[1]), int(match[2]))
    elif path.suffix.lower() in SUFFIXES:
        raise PackError(path.suffix, "a line is read, and not a whole page", f"name a line of it: {path.name}#1")
    else:
        with open_image(io.BytesIO(read_bytes(path)), path.name) as image:
            grey = np.asarray(on_white(image, "L"))
    return {"image": ink_of(grey, options["height"])}


def ink_of(grey: np.ndarray, height: int) -> np.ndarray:
    """Grey (H, W) uint8 → ink (w, height) uint8, scaled by area (where it is enlarged, linearly); margins stay."""
    rows, columns = grey.shape
    width = max(1, round(columns * height / rows))
    if width > WIDEST * height:
        raise PackError(
            sized(rows, columns), f"a line is at most {WIDEST} times as wide as high", "cut it into shorter lines"
        )
    filter_ = Image.Resampling.BOX if rows > height else Image.Resampling.BILINEAR
    scaled = Image.fromarray(grey).resize((width, height), filter_)
    return np.ascontiguousarray(~np.asarray(scaled).T)
