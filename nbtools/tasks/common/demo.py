"""Writing demo data: a folder that only a demo fills, and whose files only a demo replaces."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from nbtools import disk
from nbtools.data import SLOW, bar, side_by_side
from nbtools.errors import PackError
from nbtools.tasks.common.files import walk

LIST = ".nbtools-demo"  # names of the files that a demo wrote; hidden, so that packing skips it

File = tuple[str, Callable[[], bytes]]
"""(name relative to the folder, what computes its content)."""


def write_demo(folder: str | Path, files: Iterable[File], suffixes: tuple[str, ...]) -> Path:
    """Write files into a folder in place of those of an earlier demo; returns the folder.

    suffixes: of what a reader of the folder would take for data. Raises PackError if the folder has such files and no
    demo wrote it, or a foreign file has a name that is needed; DiskError.
    """
    folder, files = Path(folder), [*files]
    with disk.explained("writing demo data", folder):
        clear(folder, suffixes)
        with open(folder / LIST, "w", encoding="utf-8") as written:
            contents = side_by_side(lambda k: (files[k][0], files[k][1]()), range(len(files)))
            for name, data in bar(contents, "writing demo data", len(files), unit=" files", leave=False, delay=SLOW):
                refuse([folder / name] if (folder / name).exists() else [])
                written.write(f"{name}\n")
                written.flush()  # before the file, so that the next demo removes what an interrupted one wrote
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                with open(folder / name, "xb", buffering=0) as file:
                    disk.write(file, data)
    return folder


def clear(folder: Path, suffixes: tuple[str, ...]) -> None:
    """Make the folder, and remove the files of an earlier demo from it."""
    folder.mkdir(parents=True, exist_ok=True)
    there, listed = walk(folder), folder / LIST
    if not listed.exists():
        refuse([folder / name for name in there if name.lower().endswith(suffixes)])
        return
    for name in set(listed.read_text("utf-8").splitlines()).intersection(there):
        disk.remove(folder / name)


def refuse(strangers: list[Path]) -> None:
    for path in strangers[:1]:
        raise PackError(
            f"{path} was not written by this demo, and would be mixed with it or lost: choose another folder, or empty "
            "this one"
        )


def require(rules: Mapping[str, tuple[bool, object]]) -> None:
    """Raise PackError with the first broken of rules: `count must be 1 or more` → (whether it is kept, what came)."""
    for rule, (kept, value) in rules.items():
        if not kept:
            raise PackError(f"{rule}, got {value!r}")


def whole(value: object, least: int, most: float = math.inf) -> bool:
    """Return whether a value of any type is a whole number in a range."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
