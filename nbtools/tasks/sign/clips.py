"""A clip's file: the arrays that are read, the rules they keep, and the columns that a pack takes from them.

    X              (T, 156)   float32   x, y of pose 25, left hand 21, right hand 21, face 11 points, in [0, 1]
    X2048          (T, 2048)  float32   features of each frame
    mask           (T, 78)    bool      which points were seen; the others are 0, or were interpolated
    timestamps_ms  (T,)       int64     increasing
    meta           ()         text      JSON

A clip with an error is left out of the pack. With a warning it stays in: an array that nothing reads is missing or odd,
or one that is read had to be converted. A pack's columns: x (T, 156) float32, mask (T, 78) bool, features (T, 2048)
float32. Without a mask every point that is not 0 counts as seen (a hand or a face that was not found is all 0).

No file can do harm: nothing is unpickled, and nothing is decompressed before the array's own header and the archive's
directory agree on an allowed size.
"""

from __future__ import annotations

import contextlib
import io
import json
import lzma
import math
import struct
import tokenize
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, NoReturn

import numpy as np

from nbtools import disk
from nbtools.errors import PackError
from nbtools.tasks.common.report import ERROR, WARNING, Refused, Row
from nbtools.tasks.sign.keypoints import ORDER, POINTS
from nbtools.tasks.sign.networks import POSITIONS

WIDTH, FEATURES = 2 * POINTS, 2048
MASK, TIMES, META = "mask", "timestamps_ms", "meta"
META_BYTES = 1_000_000  # at most
SLACK = 0.5  # how far outside the picture a point may be: trackers guess where one is that has left it, as hips below
LARGEST = 160_000_000  # bytes of an array: ten minutes of features at 30 frames/s; each reading thread may take as much
DAMAGED = "copy the file again from its origin, or delete it"
STRAY = (  # what zipfile, its decompressors and NumPy's header parser raise on damaged input; found by mutation
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, OSError, ValueError, RuntimeError),
    *(LookupError, TypeError, SyntaxError, tokenize.TokenError, ArithmeticError, MemoryError),
)


@dataclass(frozen=True)
class Keys:
    """Which arrays of a clip are keypoints (x) and features; None: not read. needed: whether every clip must have the
    features, or all of these clips do; otherwise what is wrong with them is only a warning.

    Raises PackError for impossible names.
    """

    x: str | None = "X"
    features: str | None = "X2048"
    needed: bool = False

    def __post_init__(self) -> None:
        if self.x is None and self.features is None:
            raise PackError("kp_key and feature_key are both None, so nothing would be read; name one of them")
        if self.needed and self.features is None:
            raise PackError("require_x2048 needs feature_key, got None; name it, as X2048")
        for name, key in (("kp_key", self.x), ("feature_key", self.features)):
            if key in (MASK, TIMES, META, "") or not isinstance(key, str | None):
                raise PackError(f"{name} must be the name of an array of numbers, got {key!r}; as X or X2048")
        if self.x == self.features:
            raise PackError(
                f"kp_key and feature_key must differ, got {self.x!r} twice; kp_key=None reads the features alone"
            )
        if self.x is None:
            object.__setattr__(self, "needed", True)


@dataclass(frozen=True)
class Expected:
    """One array of a clip: its width (0 for (T,)), NumPy kinds and rules. severity: of a broken rule; absent: where
    there is no such array."""

    key: str
    width: int
    kinds: str
    check: Callable[[str, np.ndarray], Iterable[Row]]
    severity: str = ERROR
    absent: str = WARNING


@dataclass(frozen=True)
class Examined:
    """arrays: column → values, without those that break a rule."""

    arrays: dict[str, np.ndarray]
    rows: tuple[Row, ...]

    def sample(self, keys: Keys) -> dict[str, np.ndarray]:
        """The columns as a pack holds them. Raises Refused with the first error."""
        for row in self.rows:
            if row.severity == ERROR:
                raise Refused(row)
        columns = {}
        if keys.x is not None:
            x, seen = float32(self.arrays["x"]), self.arrays.get(MASK)
            columns["x"] = x
            columns[MASK] = x.reshape(-1, POINTS, 2).any(2) if seen is None else seen.astype(bool)
        if keys.needed:
            columns["features"] = float32(self.arrays["features"])
        return columns


def examine(path: Path, keys: Keys, whole: bool = True) -> Examined:
    """A clip's arrays and the rules that it breaks; whole=False looks only at what a pack reads.

    Raises OSError where the file cannot be opened.
    """
    arrays, rows, expected = {}, [], expected_of(keys, whole)
    try:
        with open_npz(path) as npz:
            for column, one in expected.items():
                values, broken = examine_array(npz, one)
                rows += broken
                if values is not None:
                    arrays[column] = values
            if whole:
                rows += examine_meta(npz)
    except Refused as refusal:
        rows.append(refusal.row)
    return Examined(arrays, (*rows, *unequal(arrays, expected)))


def expected_of(keys: Keys, whole: bool) -> dict[str, Expected]:
    """Column → array: what is read, and timestamps; with `whole` features that nothing reads, too."""
    expected = {}
    if keys.x is not None:
        expected["x"] = Expected(keys.x, WIDTH, "f", check_points, absent=ERROR)
        expected[MASK] = Expected(MASK, POINTS, "biu", check_mask)
    if keys.features is not None and (keys.needed or whole):
        severity = ERROR if keys.needed else WARNING
        expected["features"] = Expected(keys.features, FEATURES, "f", check_floats, severity, severity)
    expected[TIMES] = Expected(TIMES, 0, "iuf", check_times)
    return expected


def examine_array(npz: Npz, one: Expected) -> tuple[np.ndarray | None, list[Row]]:
    """(values, None where an error makes them useless; the broken rules up to the first error)."""
    if one.key not in npz.entries:
        fix = "nothing, unless a model is to read it: then extract it"
        if one.absent == ERROR:
            fix = (
                f"name it by {'kp_key' if one.width == WIDTH else 'feature_key'}= if it is one of these, or extract it"
            )
        elif one.key in (MASK, TIMES):
            fix = "nothing: points that are not 0 count as seen" if one.key == MASK else "nothing: no model reads it"
        return None, [absent(npz, one.key, fix, one.absent)]
    rows, values = [], None
    try:
        values = npz.array(one.key)
        for row in (*check_form(one, values.shape, values.dtype),) or one.check(one.key, values):
            rows.append(row)
            if row.severity == ERROR:
                values = None
                break
    except Refused as refusal:
        rows = [refusal.row]
    return values, rows if one.severity == ERROR else [row.warned() for row in rows]


def absent(npz: Npz, key: str, fix: str, severity: str = WARNING) -> Row:
    return Row(key, f"a clip has {key}", ", ".join([*npz.entries][:8]), fix, severity)


def examine_meta(npz: Npz) -> list[Row]:
    """Nothing depends on meta, so that all that is wrong with it is a warning."""
    if META not in npz.entries:
        return [absent(npz, META, "nothing: no model reads it")]
    try:
        return list(check_meta(npz.array(META, META_BYTES)))
    except Refused as refusal:
        return [refusal.row.warned()]


def unequal(arrays: dict[str, np.ndarray], expected: dict[str, Expected]) -> Iterator[Row]:
    """Every array has as many frames as the first, and there are some."""
    first, *others = arrays or [""]
    count = len(arrays[first]) if first else 0
    if first and not count:
        fix = "extract the clip again, or delete it"
        yield Row(expected[first].key, "a clip has frames", "none", fix, expected[first].severity)
    for column in others if count else ():
        one, came = expected[column], len(arrays[column])
        if came != count:
            rule = f"all arrays have as many frames as {expected[first].key}, {count}"
            yield Row(one.key, rule, str(came), "extract the clip again", one.severity)


def has_features(path: Path, key: str) -> bool | None:
    """Whether a clip has features of the right form, by their header alone; None where it cannot be opened."""
    try:
        with open_npz(path) as npz:
            if key not in npz.entries:
                return False
            return not list(check_form(Expected(key, FEATURES, "f", check_floats), *npz.header(key)))
    except Refused as refusal:
        return None if refusal.row.key == "" else False
    except OSError:
        return None


def check_form(one: Expected, shape: tuple[int, ...], dtype: np.dtype) -> Iterator[Row]:
    """The dtype's kind, and the shape (T, width), or (T,) for width 0."""
    key, wanted = one.key, f"(T, {one.width})" if one.width else "(T,)"
    if dtype.kind not in one.kinds:
        name = {"f": "float32", "b": "bool", "i": "int64"}[one.kinds[0]]
        yield Row(key, f"{key} is {name}", str(dtype), f"convert it: {key}.astype(np.{name})")
    elif len(shape) != 1 + bool(one.width) or shape[1:] != ((one.width,) if one.width else ()):
        fix = f"extract the clip again as {wanted}"
        if one.width == WIDTH and shape[1:] == (POINTS, 2):
            fix = f"save {key}.reshape(len({key}), -1)"
        elif one.width == WIDTH and shape[1:] == (FEATURES,):
            fix = f"these are features: read them by feature_key={key}, with kp_key=None or that of the keypoints"
        yield Row(key, f"{key} is {wanted}", str(shape), fix)


def check_floats(key: str, values: np.ndarray) -> Iterator[Row]:
    wrong = ~np.isfinite(float32(values))
    if wrong.any():
        value = f"frame {first_frame(wrong)} has {values[wrong][0]}"
        yield Row(key, "numbers are finite", value, "write 0, where a point was not seen, or extract the clip again")
    if values.dtype != np.float32:
        fix = f"nothing, or save {key}.astype(np.float32)"
        yield Row(key, f"{key} is float32; others are converted", str(values.dtype), fix, WARNING)


def check_points(key: str, x: np.ndarray) -> Iterator[Row]:
    """(T, 156): within the picture, something is seen, and no more frames than the Transformer reads."""
    yield from check_floats(key, x)
    outside, far = (x < 0) | (x > 1), (x < -SLACK) | (x > 1 + SLACK)
    if outside.any():
        which = far if far.any() else outside
        value = f"frame {first_frame(which)} has {x[which][0]:g}; all are from {x.min():g} to {x.max():g}"
        fix, severity = "nothing: the point has left the picture; or np.clip(X, 0, 1)", WARNING
        if far.any():
            fix, severity = "divide x by the width and y by the height of a frame", ERROR
        yield Row(key, "coordinates are in [0, 1]", value, fix, severity)
    if len(x) > POSITIONS:
        fix = 'train the Transformer with long_clips="windows", or cut or thin out the clip'
        yield Row(key, f"a clip has at most {POSITIONS} frames, the Transformer's positions", str(len(x)), fix, WARNING)
    if len(x) and not x.any():
        yield Row(key, "some point is seen", "all are 0", "extract the clip again, or delete it", WARNING)


def check_mask(key: str, seen: np.ndarray) -> Iterator[Row]:
    """(T, 78) bool, or integers 0 and 1."""
    other = seen[(seen != 0) & (seen != 1)]
    if other.size:
        yield Row(key, "mask is true or false", str(other[0]), "save mask > 0.5, or whatever means that it was seen")
    elif seen.dtype != bool:
        rule, fix = "mask is bool; 0 and 1 are converted", "nothing, or save mask.astype(bool)"
        yield Row(key, rule, str(seen.dtype), fix, WARNING)


def check_times(key: str, ms: np.ndarray) -> Iterator[Row]:
    """(T,) milliseconds; two equal times are a warning, since rounding can do that."""
    if ms.dtype.kind == "f":
        yield Row(key, f"{key} is int64", str(ms.dtype), "save milliseconds.round().astype(np.int64)", WARNING)
    for broken, severity in ((~(ms[1:] >= ms[:-1]), ERROR), (ms[1:] == ms[:-1], WARNING)):
        if broken.any():
            i = first_frame(broken)
            fix = "put the frames in order, or extract the clip again"
            yield Row(key, "times increase", f"frame {i} has {ms[i]}, the next {ms[i + 1]}", fix, severity)
            return


def check_meta(text: np.ndarray) -> Iterator[Row]:
    fix, came = "save it as json.dumps(meta)", str(text.dtype)
    try:
        value = text.item()
        came = repr(value)[:40]
        meta = json.loads(value if isinstance(value, (str, bytes)) else "")
    except (ValueError, RecursionError):
        yield Row(META, "meta is JSON", came, fix, WARNING)
        return
    if not isinstance(meta, dict):
        yield Row(META, "meta is a JSON object", str(meta)[:40], fix, WARNING)
    elif meta.get("order", ORDER) != ORDER:
        fix = "put them in that order: the networks know a point by its place"
        yield Row(META, f"points are in the order {ORDER}", str(meta["order"])[:80], fix, WARNING)


def float32(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values, np.float32)


def first_frame(which: np.ndarray) -> int:
    """The first frame where something is true."""
    return int(np.argmax(which.reshape(len(which), -1).any(1)))


class Npz:
    """An open file. entries: the archive's entry of each array, by key."""

    def __init__(self, file: IO[bytes]):
        self.zip = zipfile.ZipFile(file)
        keys = [info.filename.removesuffix(".npy") for info in self.zip.infolist()]
        self.entries = dict(zip(keys, self.zip.infolist(), strict=True))
        self.repeated = {key for key, count in Counter(keys).items() if count > 1}

    def header(self, key: str) -> tuple[tuple[int, ...], np.dtype]:
        """(shape, dtype) of an array, which is not decompressed. Raises Refused as `array` does."""
        with damage_refused(key), self.zip.open(self.entries[key]) as member:
            return self.checked_header(key, member, LARGEST)[:2]

    def array(self, key: str, largest: int = LARGEST) -> np.ndarray:
        """One array. Raises Refused where it is damaged, pickled, not of the size it says, or larger than `largest`
        bytes."""
        with damage_refused(key), self.zip.open(self.entries[key]) as member:
            shape, dtype, fortran = self.checked_header(key, member, largest)
            size = math.prod(shape) * dtype.itemsize
            data = member.read(size)  # read() would decompress all there is, and the directory can lie about that
            if len(data) != size:
                refuse(key, f"{shape} {dtype} takes {size:,} bytes", f"{len(data):,}", DAMAGED)
            return np.frombuffer(data, dtype).reshape(shape, order="F" if fortran else "C")

    def checked_header(self, key: str, member: IO[bytes], largest: int) -> tuple[tuple[int, ...], np.dtype, bool]:
        """(shape, dtype, whether it is stored by columns), once these are known to be harmless and true."""
        if key in self.repeated:
            refuse(key, "a key is in the file once", "twice", "save the file again")
        readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        version = np.lib.format.read_magic(member)
        if version not in readers:
            raise ValueError(f"version {version} of the .npy format")
        shape, fortran, dtype = readers[version](member)
        if dtype.hasobject:
            fix = "save it as plain numbers, or text, with np.savez_compressed"
            refuse(key, "arrays are never pickled objects", f"dtype {dtype}", fix)
        size, rest = math.prod(shape) * dtype.itemsize, self.entries[key].file_size - member.tell()
        if max(size, rest) > largest:
            fix = "cut the clip into shorter ones, or delete it"
            refuse(key, f"an array has at most {disk.human(largest)}", disk.human(max(size, rest)), fix)
        if size != rest:
            refuse(key, f"{shape} {dtype} takes {size:,} bytes", f"{rest:,}", DAMAGED)
        return shape, dtype, fortran


@contextlib.contextmanager
def open_npz(path: Path) -> Iterator[Npz]:
    """The arrays of a file. Raises Refused where it is no archive of arrays, OSError where it cannot be opened."""
    with open(path, "rb") as file:
        with damage_refused(""):
            head = disk.read(file, 6)
            if not head.startswith(b"PK"):
                came = f"a file that begins with {head!r}" if head else "an empty file"
                fix = "save it with np.savez_compressed" if head == np.lib.format.MAGIC_PREFIX else DAMAGED
                refuse("", "a clip is a .npz archive", came, fix)
            npz = Npz(file)
            if not npz.entries:
                refuse("", "a clip holds arrays", "an empty archive", DAMAGED)
        with npz.zip:
            yield npz


@contextlib.contextmanager
def damage_refused(key: str) -> Iterator[None]:
    try:
        yield
    except STRAY as error:
        value = getattr(error, "strerror", None) or str(error) or type(error).__name__
        refuse(key, "the array can be read" if key else "the archive can be read", value, DAMAGED)


def refuse(key: str, rule: str, value: str, fix: str) -> NoReturn:
    raise Refused(Row(key, rule, value, fix))


def npz_bytes(arrays: Mapping[str, np.ndarray], level: int) -> bytes:
    """The file of these arrays, at a level of compression: 0 for none. np.savez_compressed has level 6, which takes
    three times as long as 1 for a tenth fewer bytes."""
    content = io.BytesIO()
    with zipfile.ZipFile(
        content, "w", zipfile.ZIP_DEFLATED if level else zipfile.ZIP_STORED, compresslevel=level
    ) as file:
        for key, array in arrays.items():
            with file.open(f"{key}.npy", "w") as member:
                np.lib.format.write_array(member, np.asanyarray(array), allow_pickle=False)
    return content.getvalue()
