"""Raw captchas → pack: images of one size as they are, lines of text reduced to their ink.

Fixed layout: image (H, W) uint8 grey, label (N,). Lines: image (W, H) uint8 ink on blank paper (0, as padding is), W
ragged, and a ragged label. Labels are places in `classes`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from nbtools.data import Entry, Pack, Sample, Survey, build_pack
from nbtools.errors import PackError
from nbtools.table import plural, sized
from nbtools.tasks.captcha.files import SUFFIXES, UNREADABLE, Found, layout_of, listed, pattern_of
from nbtools.tasks.captcha.ink import line_of
from nbtools.tasks.captcha.networks import STRIDE
from nbtools.tasks.common.ctc import needed_steps

CASES = {"keep": str, "lower": str.lower, "upper": str.upper}
LAYOUTS = ("auto", "fixed", "lines")


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
    layout: `fixed` (one size, one length), `lines` (any width and length, brought to `height` pixels), `auto` looks.
    case: `lower` and `upper` fold the labels. classes: the alphabet; other characters are then bad samples.
    val, test: shares, or whole numbers for exactly so many; train, val and test folders of the source come first.
    Raises PackError where nothing can be used.
    """
    options = asked(label, layout, height, case, classes)
    return build_pack(source, "captcha", options, survey, read, val=val, test=test, into=into, progress=progress)


def asked(label: str, layout: str, height: int, case: str, classes: Sequence[str] | None) -> dict[str, Any]:
    """The options that the caller chose. Raises PackError naming the one that breaks its rule."""
    if layout not in LAYOUTS:
        raise PackError(f"layout must be one of {', '.join(LAYOUTS)}, got {layout!r}")
    if case not in CASES:
        raise PackError(f"case must be one of {', '.join(CASES)}, got {case!r}")
    if height < 16:
        raise PackError(f"height must be ≥ 16, got {height}: the network halves it three times")
    if classes is not None and (len(set(classes)) != len(classes) or any(len(c) != 1 for c in classes)):
        raise PackError(f"classes must be single characters, each once, got {classes!r}")
    alphabet = None if classes is None else "".join(classes)
    return {"label": label, "layout": layout, "height": height, "case": case, "classes": alphabet}


def survey(folder: Path, options: Mapping[str, Any]) -> Survey:
    """The files whose names hold a text that can be learned, and the layout that most of them have."""
    found = list(listed(folder, pattern_of(options["label"]), CASES[options["case"]]))
    layout = layout_of(folder, found, options["layout"], options["height"])
    options = {name: options[name] for name in ("label", "case", "classes")} | layout
    problems = {one.name: refusal(one, options) for one in found}
    good = [one for one in found if problems[one.name] is None]
    classes = list(options["classes"] or sorted({character for one in good for character in one.text or ""}))
    places = {character: place for place, character in enumerate(classes)}
    lines = options["layout"] == "lines"

    def spelled(entry: Entry, sample: Sample) -> None:
        if lines and (problem := infeasible("".join(classes[i] for i in entry.label), len(sample["image"]))):
            raise PackError(*problem)

    return Survey(
        [
            Entry(one.name, split=one.split, label=np.array([places[c] for c in one.text or ""], np.int64))
            for one in good
        ],
        classes,
        options,
        ragged=("image", "label") if lines else (),
        bucket_by="image" if lines else None,
        bad=[(name, *problem) for name, problem in problems.items() if problem],
        check=spelled,
    )


def read(path: Path, options: Mapping[str, Any]) -> Sample:
    """One raw file → {"image": …} as the pack holds it. Raises PackError(value, rule, fix) on what cannot be used."""
    try:
        with Image.open(path) as file:
            image = on_white(file)
    except UNREADABLE as error:
        value = str(error).replace(str(path), path.name)
        raise PackError(value, "the file is a whole image", "delete it, or copy it again from its origin") from None
    if options["layout"] == "lines":
        return {"image": line_of(np.asarray(image), options["height"])}
    grey = np.asarray(image.convert("L"))
    if grey.shape != tuple(options["size"]):
        rule = f"images are {sized(*options['size'])}"
        raise PackError(sized(*grey.shape), rule, 'resize it, or pack with layout="lines"')
    return {"image": grey}


def on_white(image: Image.Image) -> Image.Image:
    """RGB; what is transparent becomes white paper, where a plain conversion would show hidden colours."""
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        paper = Image.new("RGBA", image.size, "white")
        paper.alpha_composite(image)
        image = paper
    return image.convert("RGB")


def refusal(one: Found, options: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """(value, rule, fix) where the file's name already says that it cannot be used."""
    if not one.is_image:
        return one.file.suffix or "no suffix", f"images end in {', '.join(SUFFIXES)}", "convert it, or move it away"
    if one.text is None:
        return one.file.stem, f"the name fits the label pattern {options['label']!r}", "rename it, or set label="
    if not one.text:
        return one.file.stem, "the label is not empty", "rename it"
    unknown = sorted(set(one.text) - set(options["classes"] or one.text))
    if unknown:
        return "".join(unknown), "characters are in classes", "correct the name, or add them to classes="
    if options["layout"] == "fixed" and len(one.text) != options["length"]:
        rule = f"labels have {plural(options['length'], 'character')}"
        return one.text, rule, 'correct the name, or pack with layout="lines"'
    return None


def infeasible(text: str, columns: int) -> tuple[str, str, str] | None:
    """(value, rule, fix) where CTC cannot spell the text in so few columns: its loss would be infinite."""
    steps = -(-columns // STRIDE)
    if steps >= needed_steps(text):
        return None
    rule = f"{plural(needed_steps(text), 'time step')} of {STRIDE} pixels for {text!r}"
    return plural(steps, "step"), rule, "pack with a larger height=, or correct the label"
