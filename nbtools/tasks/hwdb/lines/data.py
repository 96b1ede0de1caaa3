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

from nbtools.data import Entry, Pack, Sample, Writer, build, require_shares
from nbtools.errors import PackError
from nbtools.table import sized
from nbtools.tasks.hwdb.lines.charset import Charset, from_texts, given, normalised
from nbtools.tasks.hwdb.lines.holdout import drawn
from nbtools.tasks.hwdb.lines.pages import LINE, SUFFIXES, image_at
from nbtools.tasks.hwdb.lines.sources import LAYOUTS, survey
from nbtools.tasks.hwdb.lines.ways import sample_bytes

UNREADABLE = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)  # all that Pillow raises on a bad file
HEIGHTS = 16, 512  # pixels: the networks halve it several times; no line is scanned with more
FOREIGN = 0.05  # of all characters in no class: of HWDB's own list's it is none
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
    """The pack of pages (.dgrl) or of images of lines, from a folder, archive or link; a second call opens it. A call
    that was killed is gone on with by the next one. Archives stay one file each and are read in place.

    height: pixels that every line is scaled to. layout: `pages`, `lines`, or `auto`, which looks.
    classes: the characters to know, as a string, a list, or a file with one a line; what they leave out is UNKNOWN. By
    default the source's chars_list.txt, else every character of all its texts: one that only a test line has is then
    read wrong, as it must be, while as UNKNOWN it could be called right.
    normalise: full-width letters, digits, marks and blanks of texts and classes become ASCII.
    val, test: shares of the writers, or whole numbers: as many writers as have at least so many lines; folders called
    Train, Val or Test and the names of lists come first.
    Raises PackError where nothing can be used.
    """
    require_options(height, layout, normalise)
    require_shares(val, test)
    charset = None if classes is None else given(classes, normalise)
    chosen = {"layout": layout, "classes": charset and "".join(charset.classes), "val": val, "test": test}
    options = {"height": height, "normalise": normalise}
    return build(
        source,
        "hwdb",
        options,
        partial(fill, options=options, charset=charset, layout=layout, val=val, test=test),
        read=read,
        ragged=("image", "label"),
        bucket_by="image",
        val=0,
        test=0,
        into=into,
        progress=progress,
        chosen=chosen,
        resume=True,
        in_place=True,
    )


def require_options(height: int, layout: str, normalise: bool) -> None:
    if layout not in LAYOUTS:
        raise PackError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if type(height) is not int or not HEIGHTS[0] <= height <= HEIGHTS[1]:
        raise PackError(
            f"height must be a whole number of pixels from {HEIGHTS[0]} to {HEIGHTS[1]}, got {height!r}; "
            "128 is the reference's, 32 is for CPUs"
        )
    if not isinstance(normalise, bool):
        raise PackError(f"normalise must be true or false, got {normalise!r}")


def fill(
    writer: Writer,
    folder: Path,
    options: Mapping[str, Any],
    charset: Charset | None,
    layout: str,
    val: float,
    test: float,
) -> None:
    """Write every usable line; the others go to the table of bad ones with the rule that they break."""
    findings = survey(folder, layout, writer.progress)
    for row in findings.bad:
        writer.reject(*row)
    clean = normalised if options["normalise"] else str
    texts = [clean(one.text) for one in findings.lines]
    if charset is None:
        listed = findings.characters
        charset = from_texts(texts) if listed is None else given(listed, options["normalise"])
    writer.classes = list(charset.classes)
    outside = charset.outside(texts)
    writer.facts = {"layout": findings.layout, "outside": dict(outside.most_common())}
    if writer.progress and outside.total() > FOREIGN * sum(map(len, texts)):
        tqdm.write(foreign(outside, sum(map(len, texts))))
    splits = drawn(findings.lines, val, test)
    entries = [
        Entry(one.name, folder / one.name, split, text)
        for one, split, text in zip(findings.lines, splits, texts, strict=True)
    ]
    for entry, arrays in writer.decode(entries, read, options):
        writer.add(entry.name, entry.split, **arrays, label=charset.encode(entry.label))


def foreign(outside: Counter[str], characters: int) -> str:
    """A warning of a class list that is another data set's."""
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
        grey = image_at(path.with_name(match[1]), int(match[2]))
    elif path.suffix.lower() in SUFFIXES:
        raise PackError(path.suffix, "a line is read, and not a whole page", f"name a line of it: {path.name}#1")
    else:
        grey = grey_of(path)
    return {"image": ink_of(grey, options["height"])}


def grey_of(path: Path) -> np.ndarray:
    """(H, W) uint8 of an image file; what is transparent is white paper, where a plain conversion shows hidden ink."""
    file = io.BytesIO(sample_bytes(path))
    try:
        with Image.open(file) as image:
            if image.mode.startswith(("I", "F")):
                raise PackError(f"mode {image.mode}", "an image has 8 bits a channel", "convert it to 8-bit grey")
            if "A" in image.mode or "transparency" in image.info:
                paper = Image.new("RGBA", image.size, "white")
                paper.alpha_composite(image.convert("RGBA"))
                return np.asarray(paper.convert("L"))
            return np.asarray(image.convert("L"))
    except UNREADABLE as error:
        value = str(error).replace(repr(file), repr(path.name))
        raise PackError(value, "the file is a whole image", "delete it, or copy it again from its origin") from None


def ink_of(grey: np.ndarray, height: int) -> np.ndarray:
    """Grey (H, W) uint8 → ink (w, height) uint8, scaled by area (what is enlarged, linearly); margins stay."""
    rows, columns = grey.shape
    width = max(1, round(columns * height / rows))
    if width > WIDEST * height:
        raise PackError(
            sized(rows, columns), f"a line is at most {WIDEST} times as wide as high", "cut it into shorter lines"
        )
    way = Image.Resampling.BOX if rows > height else Image.Resampling.BILINEAR
    scaled = Image.fromarray(grey).resize((width, height), way)
    return np.ascontiguousarray(~np.asarray(scaled).T)
