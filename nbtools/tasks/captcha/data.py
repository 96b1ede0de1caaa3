"""Raw captchas → pack: images of one size as they are, lines of text reduced to their ink.

A raw file is an image whose name begins with its text. Fixed layout: image (H, W) uint8 grey, label (N,). Lines: image
(W, H) uint8 ink on its side, 0 paper as padding is, W ragged; a ragged label. Labels are places in `classes`.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from nbtools.data import IMAGES, Card, Entry, Pack, Sample, Survey, build_pack, compose, is_all
from nbtools.errors import PackError
from nbtools.show import size_text
from nbtools.tasks.captcha.networks import STRIDE
from nbtools.tasks.common.ctc import needed_steps
from nbtools.tasks.common.files import characters, decode_image, require, split_of, walk, whole
from nbtools.tasks.common.rules import Refused, Report, Row, check_source

CASES = {"keep": str, "lower": str.lower, "upper": str.upper}
SURVEYED = 300  # files that are looked at to choose the layout
ALIKE = 0.9  # share of them with one size and one length of label that makes a fixed layout
FAINT = 20  # a pixel this near to the paper's colour, in its most different channel, is paper
BLACK = 8  # a pixel with all channels at most this bright may belong to a noise line
COLOURED = 0.1  # share of the ink that has a colour, from which black hairlines are noise
NEAR = 12  # columns to each side whose strongest ink counts as full
FLOOR = 26  # ink weaker than this is not raised to full: it may be the paper's own grain
MARGIN = 3  # pixels kept around the ink
GAP = 6  # blank columns kept between two glyphs, after scaling
LARGEST_SCALE = 1.5  # small text is enlarged up to this


def pack(
    source: str | Path,
    *,
    label: str = "_",
    layout: str = "auto",
    height: int = 32,
    case: str = "keep",
    classes: Sequence[str] | None = None,
    val: float = 0.1,
    test: float = 0.1,
    into: str | Path | None = None,
    progress: bool = True,
) -> Pack:
    """Return the pack of a folder, archive or link of captcha images; a second call opens the finished one.

    label: what ends the text in a file name; "": the name is the text; or a regular expression with a group around the
    text, such as "-(.+?)-". case: `lower` and `upper` fold it.
    layout: `fixed` (one size, one length), `lines` (any width and length, scaled to `height` pixels), or `auto`.
    classes: the alphabet; other characters are then bad samples.
    val, test: shares, or whole numbers for exactly that many; train, val and test folders of the source come first.
    test=1.0 makes all of them test, for a source that a run is evaluated on.
    Raises PackError if nothing can be used. `validate` reports what is wrong with single files.
    """
    options = options_of(label, layout, height, case, classes)
    return build_pack(source, "captcha", options, survey, read, val=val, test=test, into=into, progress=progress)


def validate(
    source: str | Path,
    *,
    label: str = "_",
    layout: str = "auto",
    height: int = 32,
    case: str = "keep",
    classes: Sequence[str] | None = None,
    progress: bool = True,
) -> Report:
    """Check every file of a folder, archive or link: an error is what a pack with the same options leaves out. Raises
    PackError if no image has a text, or all have one."""
    return check_source(source, options_of(label, layout, height, case, classes), survey, read, progress)


def options_of(label: str, layout: str, height: int, case: str, classes: Sequence[str] | None) -> dict[str, Any]:
    """Return the options of `pack` and `validate` as plain values. Raises PackError for one that cannot be."""
    require(layout in ("auto", "fixed", "lines"), "layout must be auto, fixed or lines", layout)
    require(case in CASES, "case must be keep, lower or upper", case)
    require(whole(height, 16), "height must be a whole number of pixels, 16 or more", height)  # three times halved
    alphabet = None if classes is None else "".join(characters(classes))
    return {"label": label, "layout": layout, "height": height, "case": case, "classes": alphabet}


def pack_options(card: Card) -> dict[str, Any]:
    """Return the options of `pack` with which another source has the classes and the preprocessing of a card."""
    own = {name: card.options[name] for name in ("label", "case", "layout", "height") if name in card.options}
    return {**own, "classes": card.classes}


def survey(folder: Path, options: Mapping[str, Any]) -> Survey:
    """Return the files whose names hold a text that can be learned, and the layout that most of them have."""
    pattern, fold = pattern_of(options["label"]), CASES[options["case"]]
    matches = {name: pattern.search(compose(PurePosixPath(name).stem)) for name in walk(folder)}
    texts = {name: fold(match[1] or "") if match else "" for name, match in matches.items()}
    layout, tested = layout_of(folder, texts, options["layout"], options["height"]), is_all(options.get("test", 0))
    options = {name: options[name] for name in ("label", "case", "classes")} | layout
    bad = {name: row for name, text in texts.items() if (row := problem(name, text, options))}
    good = {name: text for name, text in texts.items() if name not in bad}
    if len(good) > 1 and len(alike := {*good.values()}) == 1 and not tested:
        fix = f'name the files by their texts, or set label=, such as "{min(alike)}_(.+?)(_|$)"'
        raise PackError(f"{folder}: every name begins with {min(alike)!r}, but texts must differ; {fix}")
    classes = list(options["classes"] or sorted(set().union(*good.values())))
    places = {character: place for place, character in enumerate(classes)}
    lines = options["layout"] == "lines"

    def fits(entry: Entry, sample: Sample) -> None:  # else CTC's loss would be infinite
        steps, needed = -(-len(sample["image"]) // STRIDE), needed_steps(np.asarray(entry.label).tolist())
        if steps < needed:
            rule = f"the text needs {needed} time steps of {STRIDE} pixels"
            raise Refused(f"{steps} steps", rule, "pack with a larger height=, or correct the name")

    return Survey(
        [Entry(name, split_of(name), np.array([places[c] for c in text], np.int64)) for name, text in good.items()],
        classes,
        options,
        ragged=("image", "label") if lines else (),
        bucket_by="image" if lines else None,
        bad=[row[:4] for row in bad.values()],
        check=fits if lines else None,
    )


def pattern_of(label: str) -> re.Pattern[str]:
    try:
        if (pattern := re.compile(label if "(" in label else f"^(.*?){re.escape(label) or '$'}")).groups:
            return pattern
        why = "it has no group"
    except re.error as error:
        why = str(error)
    raise PackError(f"label must be text, or a regular expression with a group, got {label!r}: {why}")


def layout_of(folder: Path, texts: Mapping[str, str], layout: str, height: int) -> dict[str, Any]:
    """Return the options of the layout that most of a sample of files have. Raises PackError if none can be used."""
    usable = [name for name, text in texts.items() if text and name.lower().endswith(IMAGES)]
    some = usable[:: max(1, len(usable) // SURVEYED)]
    sizes, lengths = Counter[tuple[int, ...]](), Counter(len(texts[name]) for name in some)
    for name in some:
        with contextlib.suppress(PackError):  # which packing reports
            sizes[decode_image(folder / name).size[::-1]] += 1
    if not sizes:
        rule = f"none of {len(texts):,} files is an image whose name begins with its text"
        raise PackError(f'{folder}: {rule}; name the files LABEL_1.png, or set label= to what ends it, "" if nothing')
    [(size, same_size)], [(length, same_length)] = sizes.most_common(1), lengths.most_common(1)
    if layout == "fixed" or (layout == "auto" and min(same_length, same_size) >= ALIKE * len(some)):
        return {"layout": "fixed", "size": list(size), "length": length}
    return {"layout": "lines", "height": height}


def problem(name: str, text: str, options: Mapping[str, Any]) -> Row | None:
    path, length, label = PurePosixPath(name), options.get("length"), options["label"]
    unknown = "".join(sorted(set(text) - set(options["classes"] or text)))
    fix = "name images by their texts: lists are not read" if path.suffix in (".csv", ".txt") else "convert it"
    rules = (
        (path.suffix.lower() not in IMAGES, path.suffix, f"images must end in {', '.join(IMAGES)}", fix),
        (not text, path.stem, f"the name must be the text, as label={label!r} says", "rename it, or set label="),
        (unknown, unknown, "characters must be in classes", "correct the name, or add them to classes="),
        (length and len(text) != length, text, f"labels must have {length} characters", 'rename it, or layout="lines"'),
    )
    return next((Row(name, *row) for broken, *row in rules if broken), None)


def read(path: Path, options: Mapping[str, Any]) -> Sample:
    """Return {"image": …} of a raw file as the pack holds it. Raises Refused for what cannot be used."""
    if options["layout"] == "lines":
        return {"image": line_of(np.asarray(decode_image(path, "RGB")), options["height"])}
    image = np.asarray(decode_image(path, "L"))
    if image.shape != (*options["size"],):
        rule, fix = f"images must be {size_text(*options['size'])}", 'resize it, or pack with layout="lines"'
        raise Refused(size_text(*image.shape), rule, fix)
    return {"image": image}


def line_of(image: np.ndarray, height: int) -> np.ndarray:
    """Return RGB (H, W, 3) uint8 as ink (w, height) uint8, on its side: 0 paper, 255 the strongest stroke nearby."""
    ink = without_lines(image)  # without blank margins and wide gaps too, as below, half of the errors go
    strongest = np.lib.stride_tricks.sliding_window_view(np.pad(ink.max(0), NEAR), 2 * NEAR + 1).max(1)
    ink = np.rint(ink * (255.0 / np.maximum(strongest, FLOOR))).clip(0, 255).astype(np.uint8)  # whatever its colour
    cut = Image.fromarray(ink[box(ink >= FAINT)])
    scale = min(height / cut.height, LARGEST_SCALE)
    size = max(1, round(cut.width * scale)), min(height, max(1, round(cut.height * scale)))
    scaled = np.asarray(cut.resize(size, Image.Resampling.BOX if scale < 1 else Image.Resampling.BILINEAR))
    line = np.zeros((height, size[0]), np.uint8)
    above = (height - size[1]) // 2
    line[above : above + size[1]] = scaled
    column = np.arange(size[0])
    last = np.maximum.accumulate(np.where((line >= FAINT).any(0), column, -1))
    return np.ascontiguousarray(line[:, column - last <= GAP].T)


def without_lines(image: np.ndarray) -> np.ndarray:
    """Return (H, W) uint8, the distance from the paper's colour; black hairlines across coloured text are filled from
    both of their sides. Solid black strokes stay, and so does all of a black-and-white image."""
    planes = np.ascontiguousarray(image.transpose(2, 0, 1))  # extremes over channels are 20 times as fast along axis 0
    brightest, darkest = planes.max(0), planes.min(0)
    paper = np.median(planes[:, ::2, ::2], axis=(1, 2)).astype(np.int16)
    ink = np.abs(planes - paper[:, None, None]).max(0).astype(np.uint8)
    if (brightest - darkest >= FAINT).sum() < COLOURED * (ink >= FAINT).sum():
        return ink
    black = brightest <= BLACK
    hair = black & ~block(block(black, np.logical_and), np.logical_or)  # in no solid 3 × 3; two lines cross in 2 × 2
    rest = np.pad(np.where(hair, 0, ink), 2)
    across = np.minimum(rest[:-4, 2:-2], rest[4:, 2:-2])
    along = np.minimum(rest[2:-2, :-4], rest[2:-2, 4:])
    return np.where(hair, np.maximum(across, along), ink)


def block(mask: np.ndarray, join: np.ufunc) -> np.ndarray:
    """Return (H, W) bool: all, or any, of the 3 × 3 pixels around each."""
    page = np.pad(mask, 1)
    rows = join(join(page[:-2], page[1:-1]), page[2:])
    return join(join(rows[:, :-2], rows[:, 1:-1]), rows[:, 2:])


def box(ink: np.ndarray) -> tuple[slice, slice]:
    """Return the rows and columns that have two pixels of ink, and a margin; all where there are none."""
    columns = np.flatnonzero(ink.sum(0) >= 2)
    rows = np.flatnonzero(ink[:, columns[0] : columns[-1] + 1].sum(1) >= 2) if len(columns) else columns
    if not len(rows):
        return slice(None), slice(None)
    one, two = (slice(max(0, some[0] - MARGIN), some[-1] + 1 + MARGIN) for some in (rows, columns))
    return one, two
