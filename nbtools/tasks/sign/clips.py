"""A clip's file: the arrays that are read, their rules, and the columns that a pack takes from them.

    X              (T, 156)   float32   x, y of pose 25, left hand 21, right hand 21, face 11 points, in [0, 1]
    X2048          (T, 2048)  float32   features of each frame
    mask           (T, 78)    bool      which points were seen; the others are 0, or were interpolated
    timestamps_ms  (T,)       int64     increasing
    meta           ()         text      JSON

A clip has X, X2048 or both; X of (T, 2048) is read as features. `transformer_only+iv3_gru_only/CLIP.npz` is a sample of
two files, the clips of this name in both folders. A clip with an error is left out of the pack; one with a warning
stays in: what nothing reads is missing or odd, or what is read had to be converted. Without a mask every point that is
not 0 counts as seen.

No file can do harm: nothing is unpickled, nor decompressed beyond a limit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import lzma
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from nbtools import disk, show
from nbtools.data import Sample
from nbtools.errors import PackError
from nbtools.tasks.common.report import ERROR, WARNING, Refused, Row
from nbtools.tasks.sign.keypoints import ORDER, POINTS
from nbtools.tasks.sign.networks import POSITIONS

WIDTH, FEATURES = 2 * POINTS, 2048
MASK, TIMES, META = "mask", "timestamps_ms", "meta"
META_BYTES = 1_000_000  # at most
SLACK = 0.5  # how far outside the picture a point may be: trackers guess points outside, as hips below
LARGEST = 160_000_000  # bytes of an array: ten minutes of features at 30 frames/s; each reading thread may take as much
DAMAGED = "copy the file again from its origin, or delete it"
AGAIN = "extract the clip again, or delete it"
STRAY = (  # what zipfile, its decompressors and NumPy's header parser raise on damaged input; found by mutation
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, OSError, ValueError, RuntimeError),
    *(LookupError, TypeError, SyntaxError, tokenize.TokenError, ArithmeticError, MemoryError),
)


@dataclass(frozen=True)
class Keys:
    """The arrays of a clip that are keypoints (x) and features; None: not read. needed: every clip must have features.

    Raises PackError for impossible names.
    """

    x: str | None = "X"
    features: str | None = "X2048"
    needed: bool = False

    def __post_init__(self) -> None:
        if self.x is None and self.features is None:
            raise PackError("kp_key and feature_key are both None, so nothing would be read; name one of them")
        if self.needed and self.features is None:
            raise PackError("require_x2048 needs feature_key, got None; name it, such as X2048")
        for name, key in (("kp_key", self.x), ("feature_key", self.features)):
            if key in (MASK, TIMES, META, "") or not isinstance(key, str | None):
                raise PackError(f"{name} must be the name of an array of numbers, such as X or X2048, got {key!r}")
        if self.x == self.features:
            raise PackError(
                f"kp_key and feature_key must differ, got {self.x!r} twice; kp_key=None reads the features alone"
            )


class Array(NamedTuple):
    """The form of an array, (T, width), or (T,) for width 0. kinds: NumPy's that are converted to its dtype; check: its
    other rules."""

    key: str
    width: int
    dtype: str
    kinds: str
    check: Callable[[str, np.ndarray], Iterable[Row]]


def arrays_of(places: Mapping[str, str]) -> dict[str, Array]:
    """Column → the array that it is made of; and the times, which are only checked. places: as of `located`."""
    found = {}
    if "x" in places:
        found["x"] = Array(places["x"], WIDTH, "float32", "f", check_points)
        found[MASK] = Array(MASK, POINTS, "bool", "biu", check_mask)
    if "features" in places:
        found["features"] = Array(places["features"], FEATURES, "float32", "f", check_finite)
    return {**found, TIMES: Array(TIMES, 0, "int64", "iuf", check_times)}


def located(npz: zipfile.ZipFile, keys: Keys) -> dict[str, str]:
    """x and features → the array of a file that holds it, for those that are asked for and there."""
    names, places = keys_in(npz), {}
    x = keys.x or Keys.x
    holds_features = keys.features is not None and keys.features not in names and frame_of(npz, x) == (FEATURES,)
    if keys.x in names and not holds_features:
        places["x"] = x
    if holds_features:
        places["features"] = x
    elif keys.features in names:
        places["features"] = keys.features
    return places


def frame_of(npz: zipfile.ZipFile, key: str | None) -> tuple[int, ...]:
    """The shape of a frame of an array by its header; () where there is none to read."""
    with contextlib.suppress(Refused), damage_refused(""), npz.open(f"{key}.npy") as member:
        version = np.lib.format.read_magic(member)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        return read(member)[0][1:]
    return ()


def files_of(path: Path) -> list[Path]:
    """The files of a sample: its own, or the clips of this name in the folders that `a+b/CLIP.npz` joins."""
    if "+" not in path.parent.name or path.is_file():
        return [path]
    return [path.parent.with_name(folder) / path.name for folder in path.parent.name.split("+")]


def columns_in(path: Path, keys: Keys) -> set[str] | None:
    """Which of x and features a sample has; None if a file of it cannot be opened."""
    found = set()
    try:
        for file in files_of(path):
            with open_npz(file) as npz:
                found |= located(npz, keys).keys()
    except (Refused, OSError) as error:
        if disk.is_away(error):
            raise
        return None
    return found


def arrays_in(path: Path) -> list[str]:
    """The names of a sample's arrays. Raises Refused or OSError if a file of it cannot be opened."""
    names: dict[str, None] = {}
    for file in files_of(path):
        with open_npz(file) as npz:
            names |= dict.fromkeys(keys_in(npz))
    return [*names]


def examine(path: Path, keys: Keys, whole: bool = True) -> tuple[Sample, list[Row]]:
    """(a clip's columns, of x, mask and features those that it has; remarks). whole: also check meta.

    Raises Refused with the first error, OSError if a file cannot be opened.
    """
    columns: dict[str, Any] = {}
    odd = []
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(open_npz(file)) for file in files_of(path)]
        places = [located(npz, keys) for npz in opened]
        there = set().union(*places)
        if not there or (keys.needed and "features" not in there):
            either = [keys.features] if keys.needed else [keys.x, keys.features]
            raise Refused(absent(opened[0], " or ".join(filter(None, either)), needed=True))
        for npz, own in zip(opened, places, strict=True):
            new = {column: key for column, key in own.items() if column not in columns}
            for row in broken_rules(npz, new, columns):
                if row.severity == ERROR:
                    raise Refused(row)
                odd.append(row)
            if whole:
                odd += check_meta(npz)
    columns.pop(TIMES, None)
    if "x" in columns and MASK not in columns:
        columns[MASK] = columns["x"].reshape(-1, POINTS, 2).any(2)
    return columns, odd


def broken_rules(npz: zipfile.ZipFile, places: Mapping[str, str], columns: dict[str, np.ndarray]) -> Iterator[Row]:
    """Reads a file's arrays into columns, each in its dtype; a caller that stops at an error reads no further."""
    frames = "T"
    for column, one in arrays_of(places).items():
        key, rest = one.key, (one.width,) if one.width else ()
        if key not in keys_in(npz):
            yield absent(npz, key)
            continue
        values = read_array(npz, key)
        if values.dtype.kind not in one.kinds:
            yield Row(key, f"{key} must be {one.dtype}", str(values.dtype), f"save {key}.astype('{one.dtype}')")
        if not values.shape or values.shape[1:] != rest or frames not in ("T", len(values)):
            wanted = f"({', '.join(map(str, (frames, *rest)))})"
            yield Row(key, f"{key} must be {wanted}", str(values.shape), f"reshape it, or {AGAIN}")
        if not len(values):
            yield Row(key, "a clip must have frames", "none", AGAIN)
        yield from one.check(key, values)
        if values.dtype != one.dtype:
            rule, fix = f"{key} should be {one.dtype}; it is converted", f"nothing, or save {key}.astype('{one.dtype}')"
            yield Row(key, rule, str(values.dtype), fix, WARNING)
        frames, columns[column] = len(values), np.ascontiguousarray(values, one.dtype)


def absent(npz: zipfile.ZipFile, key: str, needed: bool = False) -> Row:
    fix = "name it by kp_key= or feature_key= if it is one of these, or extract it"
    came = ", ".join(keys_in(npz)[:8]) or "no arrays"
    if needed:
        return Row(key, f"a clip must have {key}", came, fix)
    return Row(key, f"a clip should have {key}", came, "nothing: no network needs it", WARNING)


def check_finite(key: str, values: np.ndarray) -> Iterator[Row]:
    wrong = ~(np.abs(values) <= np.finfo(np.float32).max)
    if wrong.any():
        value = f"frame {first_frame(wrong)} has {values[wrong][0]}"
        yield Row(key, "numbers must be finite", value, "write 0 where a point was not seen, or extract the clip again")


def check_points(key: str, x: np.ndarray) -> Iterator[Row]:
    """(T, 156): within the picture, something is seen, and no more frames than the Transformer reads."""
    yield from check_finite(key, x)
    far = (x < -SLACK) | (x > 1 + SLACK)
    which = far if far.any() else (x < 0) | (x > 1)
    if which.any():
        value = f"frame {first_frame(which)} has {x[which][0]:g}; all are from {x.min():g} to {x.max():g}"
        fix, severity = "divide x by the width and y by the height of a frame", ERROR
        if not far.any():
            fix, severity = "nothing: the point has left the picture; or np.clip(X, 0, 1)", WARNING
        yield Row(key, "coordinates must be in [0, 1]", value, fix, severity)
    if len(x) > POSITIONS:
        fix = 'train the Transformer with long_clips="windows", or cut or thin out the clip'
        yield Row(
            key,
            f"a clip should have at most {POSITIONS} frames, the Transformer's positions",
            str(len(x)),
            fix,
            WARNING,
        )
    if not x.any():
        yield Row(key, "some point should be seen", "all are 0", AGAIN, WARNING)


def check_mask(key: str, seen: np.ndarray) -> Iterator[Row]:
    """(T, 78) bool, or integers 0 and 1."""
    other = seen[(seen != 0) & (seen != 1)]
    if other.size:
        yield Row(key, "mask must be true or false", str(other[0]), "save mask > 0.5, or whatever marks a seen point")


def check_times(key: str, ms: np.ndarray) -> Iterator[Row]:
    """(T,) milliseconds; equal ones come from rounding."""
    back = ~(ms[1:] >= ms[:-1])
    if back.any():
        i = first_frame(back)
        fix = "put the frames in order, or extract the clip again"
        yield Row(key, "times must increase", f"frame {i} has {ms[i]}, the next {ms[i + 1]}", fix)


def check_meta(npz: zipfile.ZipFile) -> Iterator[Row]:
    """Nothing depends on meta, so all its faults are warnings."""
    if META not in keys_in(npz):
        yield absent(npz, META)
        return
    came, fix = "", "save it as json.dumps(meta), or nothing: no network reads it"
    try:
        text = read_array(npz, META, META_BYTES)
        came = str(text)[:40]
        order = json.loads(text.item()).get("order", ORDER)
        if order != ORDER:
            fix = "put them in that order: the networks know a point by its position"
            yield Row(META, f"points should be in the order {ORDER}", str(order)[:80], fix, WARNING)
    except Refused as refusal:
        yield dataclasses.replace(refusal.row, fix=fix, severity=WARNING)
    except (ValueError, TypeError, AttributeError, RecursionError):
        yield Row(META, "meta should be a JSON object", came, fix, WARNING)


def first_frame(which: np.ndarray) -> int:
    """The first frame where something is true."""
    return int(np.argmax(which.reshape(len(which), -1).any(1)))


def has_array(path: Path, key: str) -> bool | None:
    """Whether a clip has an array of this name; None if it cannot be opened."""
    try:
        with open_npz(path) as npz:
            return key in keys_in(npz)
    except (Refused, OSError) as error:
        if disk.is_away(error):
            raise
        return None


def keys_in(npz: zipfile.ZipFile) -> list[str]:
    return [name.removesuffix(".npy") for name in npz.namelist() if name.endswith(".npy")]


def read_array(npz: zipfile.ZipFile, key: str, largest: int = LARGEST) -> np.ndarray:
    """One array. Raises Refused if it is damaged, pickled, not of the size it says, or larger than `largest`
    bytes."""
    size = npz.getinfo(f"{key}.npy").file_size
    if size > largest:
        rule, fix = f"an array must have at most {show.size(largest)}", "cut the clip into shorter ones, or delete it"
        raise Refused(Row(key, rule, show.size(size), fix))
    with damage_refused(key), npz.open(f"{key}.npy") as member:
        values = np.lib.format.read_array(member, allow_pickle=False)
        if member.read(1):  # at its end zipfile compares the checksum
            raise ValueError("there is more than its header says")
        return values


@contextlib.contextmanager
def open_npz(path: Path) -> Iterator[zipfile.ZipFile]:
    """The archive of a clip. Raises Refused if it is not an archive, OSError if it cannot be opened."""
    with open(path, "rb") as file:
        with damage_refused(""):
            npz = zipfile.ZipFile(file)
        with npz:
            yield npz


@contextlib.contextmanager
def damage_refused(key: str) -> Iterator[None]:
    try:
        yield
    except STRAY as error:
        if disk.is_away(error):
            raise
        value = getattr(error, "strerror", None) or str(error) or type(error).__name__
        rule = "the array must be readable" if key else "a clip must be a .npz archive"
        raise Refused(Row(key, rule, value, DAMAGED)) from None


def npz_bytes(arrays: Mapping[str, np.ndarray], level: int) -> bytes:
    """The file of these arrays, at a level of compression: 0 for none. np.savez_compressed has level 6, which takes
    three times as long as 1 for a tenth fewer bytes."""
    content, method = io.BytesIO(), zipfile.ZIP_DEFLATED if level else zipfile.ZIP_STORED
    with zipfile.ZipFile(content, "w", method, compresslevel=level) as file:
        for key, array in arrays.items():
            with file.open(f"{key}.npy", "w") as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
    return content.getvalue()
