"""What a clip must be, as pure rules on its arrays; each broken one is a row of the validator's table, and of a pack's
table of bad samples.

    X              (T, 156)   float32   x, y of pose 25, left hand 21, right hand 21, face 11 points, in [0, 1]
    X2048          (T, 2048)  float32   features of each frame
    mask           (T, 78)    bool      which points were seen; others are 0, or were filled in between
    timestamps_ms  (T,)       int64     increasing
    meta           ()         text      JSON

An error is a clip that a pack leaves out. A warning leaves it in: something that is not read is absent or odd, or what
is read had to be converted. Coordinates up to SLACK outside of the picture are a warning, as trackers guess where a
point is that has left it; beyond it they are no shares of a picture at all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np

from nbtools.data import ERROR, WARNING, Row
from nbtools.tasks.sign.landmarks import POINTS
from nbtools.tasks.sign.networks.transformer import POSITIONS

WIDTH = 2 * POINTS
FEATURES = 2048
ORDER = "pose25,left_hand21,right_hand21,face11"
SLACK = 0.5  # hips of a person shown to the waist lie about so far below the picture

Shape = tuple[int, ...]


def form(key: str, shape: Shape, dtype: np.dtype, width: int, kinds: str) -> Iterator[Row]:
    """Whether an array is (T, width), or (T,) for width 0, of such a kind of numbers."""
    wanted = f"(T, {width})" if width else "(T,)"
    if dtype.kind not in kinds:
        came, name = str(dtype), {"f": "float32", "b": "bool", "i": "int64"}[kinds[0]]
        yield Row(key, f"{key} is {name}", came, f"convert it: {key}.astype(np.{name})")
    elif len(shape) != 1 + bool(width) or shape[1:] != ((width,) if width else ()):
        fix = f"extract the clip again as {wanted}"
        if width == WIDTH and shape == (*shape[:1], POINTS, 2):
            fix = f"save {key}.reshape(len({key}), -1)"
        elif width == WIDTH and shape == (*shape[:1], FEATURES):
            fix = f"these are features: read them by feature_key={key}, with kp_key=None or that of the keypoints"
        yield Row(key, f"{key} is {wanted}", str(shape), fix)


def floats(key: str, values: np.ndarray) -> Iterator[Row]:
    """(T, D) of any float type."""
    wrong = ~np.isfinite(single(values))
    if wrong.any():
        value = f"frame {first(wrong)} has {values[wrong][0]}"
        yield Row(key, "numbers are finite", value, "write 0, where a point was not seen, or extract the clip again")
    if values.dtype != np.float32:
        fix = f"nothing, or save {key}.astype(np.float32)"
        yield Row(key, f"{key} is float32; others are converted", str(values.dtype), fix, WARNING)


def points(key: str, x: np.ndarray) -> Iterator[Row]:
    """(T, 156): inside of the picture, something to be seen, and no longer than the Transformer reads."""
    yield from floats(key, x)
    outside = (x < 0) | (x > 1)
    if outside.any():
        far = (x < -SLACK) | (x > 1 + SLACK)
        which = far if far.any() else outside
        value = f"frame {first(which)} has {x[which][0]:g}; all are from {x.min():g} to {x.max():g}"
        if far.any():
            yield Row(key, "coordinates are in [0, 1]", value, "divide x by the width and y by the height of a frame")
        else:
            fix = "nothing: the point has left the picture; or np.clip(X, 0, 1)"
            yield Row(key, "coordinates are in [0, 1]", value, fix, WARNING)
    if len(x) > POSITIONS:
        fix = 'train the Transformer with long_clips="windows", or cut or thin out the clip'
        yield Row(key, f"a clip has at most {POSITIONS} frames, the Transformer's positions", str(len(x)), fix, WARNING)
    if len(x) and not x.any():
        yield Row(key, "some point is seen", "all are 0", "extract the clip again, or delete it", WARNING)


def mask(key: str, seen: np.ndarray) -> Iterator[Row]:
    """(T, 78) bool, or integers that stand for it."""
    if seen.dtype == bool:
        return
    if ((seen == 0) | (seen == 1)).all():
        rule, fix = "mask is bool; 0 and 1 are converted", "nothing, or save mask.astype(bool)"
        yield Row(key, rule, str(seen.dtype), fix, WARNING)
    else:
        other = seen[(seen != 0) & (seen != 1)][0]
        yield Row(key, "mask is true or false", str(other), "save mask > 0.5, or whatever means that it was seen")


def times(key: str, ms: np.ndarray) -> Iterator[Row]:
    """(T,) milliseconds; two frames at the same one are a warning, as rounding can do that."""
    if ms.dtype.kind == "f":
        yield Row(key, f"{key} is int64", str(ms.dtype), "save milliseconds.round().astype(np.int64)", WARNING)
    late = ~(ms[1:] >= ms[:-1])
    same = ms[1:] == ms[:-1]
    for broken, severity in ((late, ERROR), (same, WARNING)):
        if broken.any():
            i = first(broken)
            fix = "put the frames in order, or extract the clip again"
            yield Row(key, "times increase", f"frame {i} has {ms[i]}, the next {ms[i + 1]}", fix, severity)
            return


def meta(key: str, text: np.ndarray) -> Iterator[Row]:
    """One text of JSON; nothing that is read depends on it, so all is a warning."""
    fix, said = "save it as json.dumps(meta)", str(text.dtype)
    try:
        value = text.item()
        said = repr(value)[:40]
        found = json.loads(value if isinstance(value, (str, bytes)) else "")
    except (ValueError, RecursionError):
        yield Row(key, "meta is JSON", said, fix, WARNING)
        return
    if not isinstance(found, dict):
        yield Row(key, "meta is a JSON object", str(found)[:40], fix, WARNING)
    elif found.get("order", ORDER) != ORDER:
        fix = "put them in that order: the networks know a point by its place"
        yield Row(key, f"points are in the order {ORDER}", str(found["order"])[:80], fix, WARNING)


def single(values: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(values, np.float32)


def first(which: np.ndarray) -> int:
    """The first frame where something is true."""
    return int(np.argmax(which.reshape(len(which), -1).any(1)))
