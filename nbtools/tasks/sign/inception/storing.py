"""Features beside what a clip's `.npz` holds already, and which backbone made them: features of two do not mix."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

import numpy as np

from nbtools import disk
from nbtools.data import Refused, Row
from nbtools.tasks.sign.clips.clip import MASK, TEXT, TIMES, Keys, has_features
from nbtools.tasks.sign.clips.npz import opened

MAKER = "{}_backbone"  # the array of text beside the features that names the backbone
FRAMEWISE = (Keys().x, MASK, TIMES)


def maker(path: Path, key: str) -> str | None:
    """The mark of the backbone that a clip's features are of; '' where nobody wrote it down, None without features."""
    if not path.is_file() or not has_features(path, key):
        return None
    try:
        with opened(path) as npz:
            name = MAKER.format(key)
            return str(npz.array(name, TEXT)) if name in npz.entries else ""
    except Refused:
        return ""


def others(path: Path, key: str) -> dict[str, np.ndarray]:
    """All that a clip holds but its features; nothing where there is no such file. Raises Refused."""
    if not path.is_file():
        return {}
    with opened(path) as npz:
        return {name: npz.array(name) for name in npz.keys if name not in (key, MAKER.format(key))}


def store(path: Path, key: str, features: np.ndarray, mark: str, rest: dict[str, np.ndarray]) -> None:
    """Write a clip anew, at once or not at all. Raises Refused where it had another number of frames, DiskError."""
    for name in FRAMEWISE:
        if name in rest and len(rest[name]) != len(features):
            fix = "take the frames that the keypoints were extracted from, or delete the .npz"
            raise Refused(
                Row(key, f"there are as many frames as in {name}, {len(rest[name])}", str(len(features)), fix)
            )
    with disk.explained("writing features", path):
        disk.write_atomic(path, zipped({**rest, key: features, MAKER.format(key): np.array(mark)}))


def zipped(arrays: dict[str, np.ndarray]) -> bytes:
    """Not compressed: features of a frame shrink by 13 %, and that takes 18 times as long (a real clip)."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        for key, array in arrays.items():
            with archive.open(f"{key}.npy", "w") as member:
                np.lib.format.write_array(member, array, allow_pickle=False)
    return content.getvalue()
