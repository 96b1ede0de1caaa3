"""How far a packing is: lines of JSON in its .part folder, one a chunk of samples, each written once the bytes of which
it speaks are on disk. A process that is killed, whenever it may be, leaves whole lines and perhaps a torn last one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from io import FileIO
from pathlib import Path
from typing import Any

from nbtools import disk

JOURNAL = "journal.jsonl"


class Journal:
    """The journal of one folder. key: what is packed, and how; notes on anything else are worth nothing."""

    def __init__(self, folder: Path, key: str):
        self.folder, self.key = folder, key
        self.file: FileIO | None = None

    @property
    def path(self) -> Path:
        return self.folder / JOURNAL

    def begin(self, entries: Sequence[Any]) -> list[dict[str, Any]]:
        """The notes of an earlier process on the very same entries, [] where there are none; other files are deleted.

        A note has `done`, entries so far, and `sizes`, column → bytes of its file at that time.
        """
        said = repr([self.key, entries]).encode()  # an object without a repr of its own is never the same: packed anew
        head = {"entries": hashlib.blake2b(said, digest_size=16).hexdigest()}
        lines, size = whole_lines(self.path)
        notes = lines[1:] if lines[:1] == [head] and self.holds(lines[-1].get("sizes", {})) else []
        kept = {JOURNAL, *(f"{column}.npy" for column in notes[-1]["sizes"])} if notes else set()
        for path in self.folder.iterdir():
            if path.name not in kept:
                disk.remove(path)
        self.file = disk.append(self.path)
        if notes:
            self.file.truncate(size)
        else:
            self.add(**head)
        return notes

    def holds(self, sizes: dict[str, int]) -> bool:
        """Whether the columns' files have at least so many bytes: after a power cut they may have fewer."""
        files = {self.folder / f"{column}.npy": size for column, size in sizes.items()}
        return all(path.is_file() and path.stat().st_size >= size for path, size in files.items())

    def add(self, **note: Any) -> None:
        assert self.file is not None, "begin comes first"
        disk.write(self.file, json.dumps(note).encode() + b"\n")

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


def whole_lines(path: Path) -> tuple[list[dict[str, Any]], int]:
    """(the lines up to the first that was not written to its end, their bytes)."""
    lines, size = [], 0
    for line in path.read_bytes().split(b"\n")[:-1] if path.exists() else []:
        try:
            lines.append(json.loads(line))
        except ValueError:
            break
        size += len(line) + 1
    return lines, size
