"""Raw captchas → pack: labels from file names, images of one size as they are, lines of text cut to their ink.

Fixed layout: image (H, W) uint8 grey, label (N,). Lines: image (W, H) uint8 ink on blank paper (0, as padding is), W
ragged, and a ragged label. Labels are places in `classes`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from nbtools.errors import PackError
from nbtools.pack import MANIFEST, Pack, Sample
from nbtools.packing import Entry, Writer, build
from nbtools.stage import stage
from nbtools.tasks.captcha.ink import line_of
from nbtools.tasks.captcha.networks import STRIDE

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")
FOLDERS = {"train": "train", "val": "val", "valid": "val", "validation": "val", "test": "test"}
SURVEYED = 300  # files whose header is read to tell the layout
CASES: dict[str, Callable[[str], str]] = {"keep": str, "lower": str.lower, "upper": str.upper}
LABEL = np.int64


@dataclass(frozen=True)
class Found:
    """One image file and the text that its name gives; text None: the name does not fit the pattern."""

    name: str
    file: Path
    split: str | None
    text: str | None


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

    label: what ends the text in a file name (`_`, `-`), or a regular expression whose group is the text.
    layout: `fixed` (one size, one length), `lines` (any width and length, scaled to `height`), `auto` looks.
    case: `lower` and `upper` fold the labels. classes: the alphabet; other characters are then bad samples.
    val, test: shares, or whole numbers for exactly so many; train, val and test folders of the source come first.
    Raises PackError where nothing can be used.
    """
    rules = {"label": label, "case": case, "classes": "".join(classes) if classes is not None else None}
    checked(layout, height, case, rules["classes"])
    text_of = partial(folded, pattern=pattern_of(label), fold=CASES[case])
    folder = stage(source, progress=progress)
    if (folder / MANIFEST).is_file():
        return build(folder, "captcha", {}, fill=lambda *_: None, read=read)
    found = list(listed(folder, text_of))
    options = {**rules, **survey(folder, found, layout, height)}
    lines = options["layout"] == "lines"
    return build(
        folder,
        "captcha",
        options,
        partial(fill, found=found, options=options),
        read=read,
        ragged=("image", "label") if lines else (),
        bucket_by="image" if lines else None,
        val=val,
        test=test,
        into=into,
        progress=progress,
    )


def read(path: Path, options: Mapping[str, Any]) -> Sample:
    """One raw file → {"image": …} as the pack holds it. Raises PackError(value, rule, fix) on what cannot be used."""
    try:
        with Image.open(path) as file:
            image = on_white(file)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        fix = "delete it, or copy it again from its origin"
        raise PackError(str(error).replace(str(path), path.name), "the file is a whole image", fix) from None
    if options["layout"] == "lines":
        return {"image": line_of(np.asarray(image), options["height"])}
    grey = np.asarray(image.convert("L"))
    if grey.shape != tuple(options["size"]):
        size = "{}×{} pixels".format(*options["size"])
        raise PackError("{}×{} pixels".format(*grey.shape), f"images are {size}", 'resize it, or pack layout="lines"')
    return {"image": grey}


def on_white(image: Image.Image) -> Image.Image:
    """RGB; what is transparent becomes white paper, where a plain conversion would show hidden colours."""
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        paper = Image.new("RGBA", image.size, "white")
        paper.alpha_composite(image)
        image = paper
    return image.convert("RGB")


def checked(layout: str, height: int, case: str, classes: str | None) -> None:
    if layout not in ("auto", "fixed", "lines"):
        raise PackError(f"layout must be one of auto, fixed, lines, got {layout!r}")
    if case not in CASES:
        raise PackError(f"case must be one of {', '.join(CASES)}, got {case!r}")
    if height < 16 or height % 8:
        raise PackError(f"height must be a multiple of 8 and at least 16, got {height}: the network halves it three times")
    if classes is not None and len(set(classes)) != len(classes):
        raise PackError(f"classes must differ from each other, got {classes!r}")


def pattern_of(label: str) -> re.Pattern[str]:
    """The text of a name's stem as the first group: `_` means everything before the first underscore."""
    if len(label) == 1:
        return re.compile(f"([^{re.escape(label)}]*){re.escape(label)}")
    try:
        pattern = re.compile(label)
    except re.error as error:
        raise PackError(f"label is no regular expression ({error}): {label!r}") from None
    if not pattern.groups:
        raise PackError(f"label needs a group around the text, like '^(.+?)_', got {label!r}")
    return pattern


def folded(stem: str, pattern: re.Pattern[str], fold: Callable[[str], str]) -> str | None:
    match = pattern.match(stem)
    return fold(match[1] or "") if match else None


def listed(folder: Path, text_of: Callable[[str], str | None]) -> Iterator[Found]:
    """Every file but hidden ones, by name; the folder called train, val or test on its way is its split."""
    for file in sorted(folder.rglob("*")):
        place = file.relative_to(folder)
        if any(part.startswith(".") or part == "__MACOSX" for part in place.parts) or not file.is_file():
            continue
        split = next((FOLDERS[part.lower()] for part in place.parts[:-1] if part.lower() in FOLDERS), None)
        yield Found(place.as_posix(), file, split, text_of(file.stem))


def survey(folder: Path, found: Sequence[Found], layout: str, height: int) -> dict[str, Any]:
    """The layout's options by a look at some files: fixed where nine in ten share one size and one length of label.

    Raises PackError where there is nothing to look at.
    """
    usable = [one for one in found if one.text and one.file.suffix.lower() in SUFFIXES]
    if not usable:
        example = f"; the first of {len(found)} files is {found[0].name}" if found else "; it is empty"
        raise PackError(
            f"{folder}: no image ({', '.join(SUFFIXES)}) whose name holds its text{example}. Name the files LABEL_1.png, "
            "or give label= the separator or a regular expression"
        )
    some = usable[:: max(1, len(usable) // SURVEYED)]
    sizes = Counter(filter(None, map(size_of, some)))
    lengths = Counter(len(one.text or "") for one in some)
    (length, same_length), (size, same_size) = lengths.most_common(1)[0], (sizes.most_common(1) or [(None, 0)])[0]
    alike = min(same_length, same_size) >= 0.9 * len(some)
    if layout == "lines" or (layout == "auto" and not alike):
        return {"layout": "lines", "height": height}
    if size is None:
        raise PackError(f"{folder}: none of {len(some)} images could be opened; are they images? The first: {some[0].name}")
    return {"layout": "fixed", "size": list(size), "length": length}


def size_of(one: Found) -> tuple[int, int] | None:
    """(height, width) from the header; None where that cannot be read: packing will say why."""
    try:
        with Image.open(one.file) as image:
            return image.height, image.width
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None


def fill(writer: Writer, folder: Path, found: Sequence[Found], options: Mapping[str, Any]) -> None:
    """Write every usable sample; the others go to the table of bad ones with the rule that they break."""
    good = []
    for one in found:
        problem = refusal(one, options)
        if problem:
            writer.reject(one.name, *problem)
        else:
            good.append(one)
    writer.classes = list(options["classes"] or sorted({c for one in good for c in one.text or ""}))
    places = {character: place for place, character in enumerate(writer.classes)}
    entries = [Entry(one.name, one.file, one.split, one.text) for one in good]
    for entry, arrays in writer.decode(entries, read, options):
        target = np.array([places[c] for c in entry.label], LABEL)
        steps = -(-len(arrays["image"]) // STRIDE)
        if options["layout"] == "lines" and steps < needed_steps(entry.label):
            rule = f"CTC needs a time step ({STRIDE} pixels) a character, and one between equal neighbours"
            value = f"{steps} steps for {entry.label!r}"
            writer.reject(entry.name, value, rule, "pack with a larger height, or correct the label")
        else:
            writer.add(entry.name, entry.split, **arrays, label=target)


def refusal(one: Found, options: Mapping[str, Any]) -> tuple[str, str, str] | None:
    """(value, rule, fix) where the file's name already says that it cannot be used."""
    suffix = one.file.suffix.lower()
    if suffix not in SUFFIXES:
        return suffix or "no suffix", f"images end in {', '.join(SUFFIXES)}", "convert it, or ignore this row"
    if one.text is None:
        return one.file.stem, f"the name fits the label pattern {options['label']!r}", "rename it, or set label="
    if not one.text:
        return one.file.stem, "the label is not empty", "rename it"
    unknown = sorted(set(one.text) - set(options["classes"] or one.text))
    if unknown:
        return "".join(unknown), "characters are in classes", "correct the name, or add them to classes="
    if options["layout"] == "fixed" and len(one.text) != options["length"]:
        return one.text, f"labels have {options['length']} characters", 'correct the name, or pack layout="lines"'
    return None


def needed_steps(text: str) -> int:
    """The fewest time steps in which CTC can spell a text: a blank must part equal neighbours."""
    return len(text) + sum(a == b for a, b in zip(text, text[1:], strict=False))
