"""Packs of arrays that no file holds, for tests of what comes after packing."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from archives import put

import nbtools as nb
from nbtools.data import Entry, Pack, Sample, Survey, build_pack, gather

DEMOS: dict[str, dict[str, Any]] = {
    "captcha": {"size": (24, 64)},
    "lines": {"size": (32, 90), "length": (4, 8)},
    "hwdb": {"height": 24, "characters": "ABC"},
    "segment": {"size": (40, 48)},
    "sign": {"glosses": 4, "categories": 2, "frames": (10, 16)},
}
PACKED = {"hwdb": {"height": 32}, "segment": {"size": 48}}
"""Small demos of the tasks, and how they are packed."""


def pack_of(
    samples: Sequence[Sample] | Mapping[str, Sample],
    folder: Path,
    *,
    task: str = "plain",
    split: str | Sequence[str | None] | None = "train",
    groups: Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
    val: Any = 0,
    test: Any = 0,
    seed: int = 0,
    progress: bool = False,
    **survey: Any,
) -> Pack:
    """The samples as the pack `folder/pack`; a mapping names them. split: of each, of all, or None: by val and test."""
    named = dict(samples) if isinstance(samples, Mapping) else {str(i): sample for i, sample in enumerate(samples)}
    splits = [split] * len(named) if split is None or isinstance(split, str) else split
    raw = put(folder / "raw" / "made", b"from arrays").parent
    entries = [*map(Entry, named, splits, [None] * len(named), groups or [None] * len(named))]
    found = Survey(entries, **{"options": options or {}, **survey})
    more = {"val": val, "test": test, "seed": seed, "into": folder / "pack", "progress": progress}
    more["read"] = lambda path, _: named[path.relative_to(raw).as_posix()]
    return build_pack(raw, task, options or {}, lambda *_: found, **more)


def raw_batch(pack: Pack, ids) -> dict[str, Any]:
    """These samples as a feed gives them to a task's `batch`."""
    return gather(pack, np.array([*ids]))


def validated(task: Any, pack: Pack, **options: Any) -> bool:
    """Whether validating a pack's source finds what packing left out: file, value, rule and fix, all of them errors."""
    rows = nb.validate(task, pack.raw.source, progress=False, **options).rows
    return sorted(rows) == sorted((*bad, "error") for bad in pack.bad.to_numpy())
