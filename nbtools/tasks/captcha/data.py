"""Raw captchas → pack: images of one size as they are, lines of text reduced to their ink.

A raw file is an image whose name holds its text. Fixed layout: image (H, W) uint8 grey, label (N,). Lines: image (W, H)
uint8 ink on blank paper (0, as padding is), W ragged, and a ragged label. Labels are places in `classes`.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nbtools.data import IMAGES, Card, Entry, Pack, Sample, Survey, build_pack
from nbtools.errors import PackError
from nbtools.show import plural, sized
from nbtools.tasks.captcha.ink import line_of
from nbtools.tasks.captcha.networks import STRIDE
from nbtools.tasks.common.ctc import needed_steps
from nbtools.tasks.common.files import decode_image, split_of, walk
from nbtools.tasks.common.lists import characters, spell
from nbtools.tasks.common.report import Refused, Row

CASES = {"keep": str, "lower": str.lower, "upper": str.upper}
LAYOUTS = ("auto", "fixed", "lines")
SURVEYED = 300  # files that are looked at to choose the layout
ALIKE = 0.9  # share of them with one size and one length of label that makes a fixed layout

Problem = tuple[str, str, str]
"""(value, rule, fix): why a file is a row of the table of bad samples."""


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
    """The pack of a folder, archive or link of captcha images; a second call opens the finished one.

    label: the character that ends the text in a file name (`_`, `-`), or a regular expression whose group is the text.
    layout: `fixed` (one size, one length), `lines` (any width and length, scaled to `height` pixels), or `auto`.
    case: `lower` and `upper` fold the labels. classes: the alphabet; other characters are then bad samples.
    val, test: shares, or whole numbers for exactly that many; train, val and test folders of the source come first.
    test=1.0 makes all of them test, for a source that a run is evaluated on.
    Raises PackError if nothing can be used.
    """
    if layout not in LAYOUTS:
        raise PackError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if case not in CASES:
        raise PackError(f"case must be one of {', '.join(CASES)}, got {case!r}")
    if height < 16:
        raise PackError(f"height must be at least 16, got {height}: the network halves it three times")
    alphabet = None if classes is None else "".join(characters(classes))
    options = {"label": label, "layout": layout, "height": height, "case": case, "classes": alphabet}
    return build_pack(source, "captcha", options, survey, read, val=val, test=test, into=into, progress=progress)


def pack_options(card: Card) -> dict[str, Any]:
    """Options of `pack` with which another source has the classes and the preprocessing of a card."""
    own = {name: card.options[name] for name in ("label", "case", "layout", "height") if name in card.options}
    return {**own, "classes": card.classes}


def survey(folder: Path, options: Mapping[str, Any]) -> Survey:
    """The files whose names hold a text that can be learned, and the layout that most of them have."""
    pattern, fold = pattern_of(options["label"]), CASES[options["case"]]
    matches = {name: pattern.match(stem(name)) for name in walk(folder)}
    texts = {name: fold(match[1] or "") if match else None for name, match in matches.items()}
    layout = layout_of(folder, texts, options["layout"], options["height"])
    options = {name: options[name] for name in ("label", "case", "classes")} | layout
    problems = {name: refusal(name, text, options) for name, text in texts.items()}
    good = {name: text or "" for name, text in texts.items() if problems[name] is None}
    classes = list(options["classes"] or sorted(set().union(*good.values())))
    places = {character: place for place, character in enumerate(classes)}
    lines = options["layout"] == "lines"

    def fits(entry: Entry, sample: Sample) -> None:
        """A line has the time steps in which CTC can spell its text: else its loss would be infinite."""
        text, steps = spell(classes, entry.label), -(-len(sample["image"]) // STRIDE)
        if lines and steps < needed_steps(text):
            rule = f"{text!r} needs {plural(needed_steps(text), 'time step')} of {STRIDE} pixels"
            fix = "pack with a larger height=, or correct the label"
            raise Refused(Row("", rule, plural(steps, "step"), fix))

    return Survey(
        [
            Entry(name, split=split_of(name), label=np.array([places[character] for character in text], np.int64))
            for name, text in good.items()
        ],
        classes,
        options,
        ragged=("image", "label") if lines else (),
        bucket_by="image" if lines else None,
        bad=[(name, *problem) for name, problem in problems.items() if problem],
        check=fits,
    )


def read(path: Path, options: Mapping[str, Any]) -> Sample:
    """One raw file → {"image": …} as the pack holds it. Raises Refused for what cannot be used."""
    lines = options["layout"] == "lines"
    image = np.asarray(decode_image(path, "RGB" if lines else "L"))
    if lines:
        return {"image": line_of(image, options["height"])}
    if image.shape != tuple(options["size"]):
        rule, fix = f"images must be {sized(*options['size'])}", 'resize it, or pack with layout="lines"'
        raise Refused(Row("", rule, sized(*image.shape), fix))
    return {"image": image}


def pattern_of(label: str) -> re.Pattern[str]:
    """The text of a file name without its suffix is the first group; `_` means all before the first underscore."""
    if len(label) == 1:
        return re.compile(f"([^{re.escape(label)}]*){re.escape(label)}")
    try:
        pattern = re.compile(label)
    except re.error as error:
        raise PackError(f"label is not a regular expression ({error}): {label!r}") from None
    if not pattern.groups:
        raise PackError(f"label must be one character, or have a group around the text like '^(.+?)_', got {label!r}")
    return pattern


def layout_of(folder: Path, texts: Mapping[str, str | None], layout: str, height: int) -> dict[str, Any]:
    """The layout's options, from the headers of some files. Raises PackError if no file can be used."""
    usable = [name for name, text in texts.items() if text and name.lower().endswith(IMAGES)]
    if not usable:
        example = f"; the first of {plural(len(texts), 'file')} is {next(iter(texts))}" if texts else "; it is empty"
        raise PackError(
            f"{folder}: no image ({', '.join(IMAGES)}) whose name holds its text{example}. "
            "Name the files LABEL_1.png, or give label= the separator or a regular expression"
        )
    some = usable[:: max(1, len(usable) // SURVEYED)]
    length, same_length = Counter(len(texts[name] or "") for name in some).most_common(1)[0]
    sizes = Counter(filter(None, (size_of(folder / name) for name in some))).most_common(1)
    if not sizes:
        raise PackError(
            f"{folder}: none of {plural(len(some), 'file')} is a readable image, from {some[0]} on; copy them again"
        )
    size, same_size = sizes[0]
    if layout == "fixed" or (layout == "auto" and min(same_length, same_size) >= ALIKE * len(some)):
        return {"layout": "fixed", "size": list(size), "length": length}
    return {"layout": "lines", "height": height}


def size_of(file: Path) -> tuple[int, int] | None:
    """(height, width); None if it cannot be read, which packing explains."""
    try:
        image = decode_image(file)
        return image.height, image.width
    except PackError:
        return None


def stem(name: str) -> str:
    """As of a PurePosixPath, in a fifth of the time."""
    return os.path.splitext(name)[0].rpartition("/")[2]


def refusal(name: str, text: str | None, options: Mapping[str, Any]) -> Problem | None:
    """Why a file cannot be used, if its name already shows it."""
    if not name.lower().endswith(IMAGES):
        suffix = os.path.splitext(name)[1]
        return suffix or "no suffix", f"images must end in {', '.join(IMAGES)}", "convert it, or move it away"
    if text is None:
        return stem(name), f"the name must match the label pattern {options['label']!r}", "rename it, or set label="
    if not text:
        return stem(name), "the label must not be empty", "rename it"
    unknown = sorted(set(text) - set(options["classes"] or text))
    if unknown:
        return "".join(unknown), "characters must be in classes", "correct the name, or add them to classes="
    if options["layout"] == "fixed" and len(text) != options["length"]:
        rule = f"labels must have {plural(options['length'], 'character')}"
        return text, rule, 'correct the name, or pack with layout="lines"'
    return None
