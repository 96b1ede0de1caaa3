"""Eight processes stage the same archive at the same moment, round after round: one copies it, all find the same files,
and nothing else is left."""

from __future__ import annotations

import os
from collections import Counter
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path

from archives import put, tar_bytes, tree
from faults.forks import DONE, Child

import nbtools as nb
from nbtools.data import cache, sources

STAGERS = 8
CASES = (f"{STAGERS} at once",)


def files(number: int) -> dict[str, bytes]:
    return {"a": number.to_bytes(2, "big") * 50_000, "b": b"b"}


def stager(root: Path, numbers: range, barrier: Barrier) -> None:
    real = sources.copy

    def copy(source: Path, *rest):
        put(root / "copies" / f"{source.stem}-{os.getpid()}")
        return real(source, *rest)

    sources.copy = copy
    for number in numbers:
        barrier.wait()
        found = tree(nb.stage(f"drive:{number}.tar", progress=False))
        put(root / "found" / f"{number}-{os.getpid()}", repr(sorted(found.items())).encode())


def swept(start: int, rounds: int, root: Path) -> tuple[Counter[str], list[str]]:
    """(rounds by what came of them, what went wrong)."""
    os.environ.update(NBTOOLS_CACHE=str(root / "cache"), NBTOOLS_DRIVE=str(root / "drive"))
    numbers, totals, wrong = range(start, start + rounds), Counter(), []
    for number in numbers:
        put(root / "drive" / f"{number}.tar", tar_bytes(files(number)))
    barrier = get_context("fork").Barrier(STAGERS, timeout=30)
    for child in [Child(lambda: stager(root, numbers, barrier)) for _ in range(STAGERS)]:
        code, text = child.end()
        wrong += [] if code == DONE else [f"rounds {start} to {start + rounds - 1}: {text}"]
    for number in numbers:
        copies, found = ([*(root / name).glob(f"{number}-*")] for name in ("copies", "found"))
        same = [path.read_bytes() for path in found] == STAGERS * [repr(sorted(files(number).items())).encode()]
        totals[f"{len(copies)} copy, {'the same' if same else 'other'} files {len(found)} times"] += 1
        wrong += [] if len(copies) == 1 and same else [f"round {number}: {len(copies)} copies, files of {len(found)}"]
    left = sorted(path.name for path in cache().iterdir() if path.name != "locks")
    if len(left) != rounds or any(name.endswith(".part") for name in left):
        wrong.append(f"rounds {start} to {start + rounds - 1}: the cache holds {left}")
    return totals, wrong
