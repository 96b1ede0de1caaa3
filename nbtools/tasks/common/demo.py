"""Writing demo data: a folder that only a demo fills, and whose files only a demo replaces."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from nbtools import disk
from nbtools.data import bar
from nbtools.errors import PackError
from nbtools.tasks.common.files import in_threads, walk

LIST = ".nbtools-demo"  # names of the files that a demo wrote; hidden, so that packing does not look at it
SLOW = 2  # seconds before a progress bar appears

File = tuple[str, Callable[[], bytes]]
"""(name relative to the folder, what computes its content)."""


def write_demo(folder: str | Path, files: Iterable[File], suffixes: tuple[str, ...], total: int | None = None) -> Path:
    """Write files into a folder in place of those of an earlier demo; returns the folder.

    The contents are computed in threads, since encoders release the GIL, and not fsynced: a demo is made anew in
    seconds. suffixes: of the files that a reader of the folder would take for data. total: how many files there are,
    for the progress bar. Raises PackError where the folder has such a file that no demo wrote; DiskError.
    """
    folder = Path(folder)
    with disk.explained("writing demo data", folder):
        clear(folder, suffixes)
        with open(folder / LIST, "w", encoding="utf-8") as written:

            def content(file: File) -> tuple[str, bytes]:
                return file[0], file[1]()

            done = in_threads(content, files)
            for name, data in bar(done, "writing demo data", total, unit=" files", leave=False, delay=SLOW):
                written.write(f"{name}\n")
                written.flush()  # before the file, so that an interrupted demo knows its own
                disk.make_folder((folder / name).parent)
                disk.remove(folder / name)
                with disk.create(folder / name) as out:
                    disk.write(out, data)
    return folder


def clear(folder: Path, suffixes: tuple[str, ...]) -> None:
    """Make the folder, without the files of an earlier demo."""
    disk.make_folder(folder)
    listed = folder / LIST
    mine = set(listed.read_text("utf-8").splitlines()) if listed.exists() else set()
    there = walk(folder)
    for name in there:
        if name not in mine and name.lower().endswith(suffixes):
            raise PackError(
                f"{folder / name} was not written by this demo and would be mixed with it; choose another folder"
            )
    for name in mine.intersection(there):
        disk.remove(folder / name)


def require(rules: Mapping[str, tuple[bool, object]]) -> None:
    """rules: `count must be 1 or more` → (whether it is kept, what came). Raises PackError with the first broken."""
    for rule, (kept, value) in rules.items():
        if not kept:
            raise PackError(f"{rule}, got {value!r}")


def whole(value: object, least: int, most: float = math.inf) -> bool:
    """Whether a value of any type is a whole number in a range."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
