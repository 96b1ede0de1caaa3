"""The lines of a page file, one at a time: `001-P16.dgrl#3` is its third line. Of the older `.dgr`, words are put
together to lines."""

from __future__ import annotations

import contextlib
import mmap
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from nbtools.errors import PackError
from nbtools.tasks.hwdb.formats import dgr
from nbtools.tasks.hwdb.formats.dgrl import Line, Place, lines_of
from nbtools.tasks.hwdb.formats.scan import Bytes
from nbtools.tasks.hwdb.lines.ways import PAGES, sample_bytes, way

SUFFIXES = (".dgrl", ".dgr")
LINE = re.compile(r"(.+\.dgrl?)#(\d+)", re.I)


@contextlib.contextmanager
def page_at(path: Path) -> Iterator[Bytes]:
    """The bytes of a page's file, or of one in an archive. Raises PackError(value, rule, fix)."""
    file, name = way(path)
    if name:
        yield PAGES.get((file, name, file.stat().st_mtime_ns), lambda: sample_bytes(path))
    else:
        with mapped(file) as data:
            yield data


def mapped(path: Path) -> mmap.mmap:
    """A file's bytes without reading them: a line of a page is a tenth of it. Raises PackError(value, rule, fix)."""
    try:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:  # ValueError: an empty file cannot be mapped
        value = getattr(error, "strerror", None) or "no bytes"
        raise PackError(value, "the file can be read", "copy it again, or delete it") from None


def lines_in(data: Bytes, name: str) -> Iterator[Place | Line]:
    """The lines of a page in order, without their pixels where the format allows it. Raises FormatError."""
    return iter(dgr.read_page(data, name).lines) if name.lower().endswith(".dgr") else lines_of(data, name)


def image_at(path: Path, number: int) -> np.ndarray:
    """(H, W) uint8 grey of a page's line, counted from 1. Raises PackError(value, rule, fix)."""
    with page_at(path) as data:
        lines = list(islice(lines_in(data, path.name), number or None))
        if not 1 <= number <= len(lines):
            there = f"lines 1 to {len(lines)}" if lines else "no lines"
            raise PackError(f"line {number}", f"{path.name} has {there}", "name one that is there")
        line = lines[-1]
        return line.read(data).image if isinstance(line, Place) else line.image
