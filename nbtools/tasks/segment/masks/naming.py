"""What people say of classes: names, a mapping, or a file.

classes.txt     one name a line, ids from 0; or `id,name`, `id,name,r,g,b` or `name,r,g,b` on each; also class_dict.csv
labelmap.txt    as CVAT writes it: name:r,g,b:parts:actions
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from nbtools.errors import PackError
from nbtools.tasks.segment.masks.classes import Class, Colour

FILES = ("classes.txt", "labelmap.txt", "class_dict.csv")
Given = str | Path | Mapping[int, str] | Sequence[str]

NUMBERED = re.compile(r"\s*(\d+)\s*,\s*([^,]+?)\s*(?:,\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*)?")
COLOURED = re.compile(r"\s*([^,]+?)\s*,\s*(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*")
MAPPED = re.compile(r"\s*([^:]+?)\s*:\s*(?:(\d+)\s*,\s*(\d+)\s*,\s*(\d+)\s*)?:[^:]*:[^:]*")


FORMS = (  # a line's form, and (id, name, colour) of the kth such line
    (MAPPED, lambda k, match: (k, match[1], match.groups()[1:])),
    (NUMBERED, lambda k, match: (int(match[1]), match[2], match.groups()[2:])),
    (COLOURED, lambda k, match: (k, match[1], match.groups()[1:])),
)
HEADS = ("id,name", "name,r,g,b")


def given(classes: Given) -> list[Class]:
    """The classes of a list of names, a mapping id → name, or a file. Raises PackError where it is none of them."""
    if isinstance(classes, str | Path):
        path = Path(classes).expanduser()
        try:
            return list(parsed(path.read_text("utf-8-sig"), path.name))
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise PackError(
                f"classes: {path} cannot be read ({why}); give two names or more, or a text file of them in UTF-8"
            ) from None
    if isinstance(classes, Mapping):
        return [Class(int(i) if isinstance(i, np.integer) else i, name) for i, name in classes.items()]
    if not isinstance(classes, Iterable):
        raise PackError(f"classes must be names, a mapping id → name, or a file of them, got {classes!r}")
    return [Class(i, name) for i, name in enumerate(classes)]


def parsed(text: str, name: str) -> Iterator[Class]:
    """The classes of a file. Raises PackError, with the line, where it has two forms."""
    lines = [(i, line) for i, line in enumerate(text.splitlines(), 1) if line.strip() and not line.startswith("#")]
    if lines and lines[0][1].replace(" ", "").casefold().startswith(HEADS):
        lines = lines[1:]
    for form, parts in FORMS:
        if lines and form.fullmatch(lines[0][1]):
            for k, (i, line) in enumerate(lines):
                if (match := form.fullmatch(line)) is None:
                    raise PackError(f"{name}:{i}: a line is like the first, {lines[0][1]!r}, got {line!r}")
                raw, called, colour = parts(k, match)
                yield Class(raw, called, None if colour[0] is None else triple(colour, f"{name}:{i}"))
            return
    yield from (Class(k, line.strip()) for k, (_, line) in enumerate(lines))


def triple(parts: Sequence[str], where: str) -> Colour:
    red, green, blue = map(int, parts)
    if max(red, green, blue) > 255:
        raise PackError(f"{where}: a colour is three numbers from 0 to 255, got {red}, {green}, {blue}")
    return red, green, blue
