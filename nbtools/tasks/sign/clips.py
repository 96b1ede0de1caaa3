"""A clip's file, its rules, and the columns that a pack takes from it.

    X              (T, 156)   float32   x, y of pose 25, left hand 21, right hand 21, face 11 points, in [0, 1]
    X2048          (T, 2048)  float32   features of each frame
    mask           (T, 78)    bool      which points were seen; the others are 0, or were interpolated
    timestamps_ms  (T,)       int64     increasing
    meta           ()         text      JSON

A clip has X, X2048 or both. Without a mask every point that is not 0 counts as seen.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nbtools import disk
from nbtools.data import Sample
from nbtools.tasks.common.report import ERROR, WARNING, Refused, Row
from nbtools.tasks.sign.keypoints import POINTS
from nbtools.tasks.sign.networks import POSITIONS

WIDTH, FEATURES = 2 * POINTS, 2048
MASK, TIMES, META = "mask", "timestamps_ms", "meta"
KEYS = {"kp_key": "X", "feature_key": "X2048"}
FORMS = {  # column → shape after T, dtype, and NumPy's kinds that are converted to it
    "x": ((WIDTH,), "float32", "f"),
    MASK: ((POINTS,), "bool", "biu"),
    "features": ((FEATURES,), "float32", "f"),
    TIMES: ((), "int64", "iuf"),
}
SLACK = 0.5  # how far outside the picture a point may be: trackers guess points outside, as hips below
AGAIN = "extract the clip again, or delete it"


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """Open a clip; nothing is unpickled. Raises Refused for what cannot be opened, and for damage."""
    try:
        with open(path, "rb") as file, np.lib.npyio.NpzFile(file) as npz:
            yield npz
    except Refused:
        raise
    except Exception as error:  # zipfile, its decompressors and NumPy's parser of headers raise whatever they encounter
        if disk.is_away(error):
            raise
        value = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise Refused(Row("", "a clip must be a whole .npz archive", value, AGAIN)) from None


def arrays_in(path: Path) -> list[str]:
    """Return the names of a clip's arrays; none if it cannot be read."""
    with contextlib.suppress(Refused), opened(path) as npz:
        return npz.files
    return []


def read_clip(path: Path, options: Mapping[str, Any]) -> tuple[Sample, list[Row]]:
    """Return a clip's columns, of x, mask and features those that it has, and warnings.

    options: kp_key, feature_key, require_x2048. Raises Refused with the first error.
    """
    sample, warnings, frames = {}, [], "T"
    with opened(path) as npz:
        for column, key in places_in(npz.files, options).items():
            values = npz[key]
            for row in broken_rules(column, key, values, frames):
                if row.severity == ERROR:
                    raise Refused(row)
                warnings.append(row)
            frames, sample[column] = str(len(values)), np.ascontiguousarray(values, FORMS[column][1])
        extras = (MASK, TIMES, META) if "x" in sample else (TIMES, META)
        warnings += [absent(key, npz.files, WARNING) for key in extras if key not in npz.files]
    sample.pop(TIMES, None)
    if "x" in sample and MASK not in sample:
        sample[MASK] = sample["x"].reshape(-1, POINTS, 2).any(2)
    return sample, warnings


def places_in(names: Collection[str], options: Mapping[str, Any]) -> dict[str, str]:
    """Return column → the array that it is read from, of those in a file; also the times, which are only checked.
    Raises Refused if what a clip must have is missing."""
    x, features = options["kp_key"], options["feature_key"]
    if options.get("require_x2048") and features not in names:
        raise Refused(absent(features, names))
    if x not in names and features not in names:
        raise Refused(absent(x or features, names))
    places = {"x": x, MASK: MASK if x in names else None, "features": features, TIMES: TIMES}
    return {column: key for column, key in places.items() if key in names}


def absent(key: str, names: Collection[str], severity: str = ERROR) -> Row:
    fix = "extract it, or name another one by kp_key= or feature_key=" if severity == ERROR else "nothing"
    return Row(key, f"a clip must have {key}", ", ".join(names) or "no arrays", fix, severity)


def broken_rules(column: str, key: str, values: np.ndarray, frames: str) -> Iterator[Row]:
    """Yield the broken rules of an array; frames: how many the arrays before it have."""
    rest, dtype, kinds = FORMS[column]
    if values.dtype.kind not in kinds:
        yield Row(key, f"{key} must be {dtype}", str(values.dtype), f"save {key}.astype('{dtype}')")
    if not values.shape or values.shape[1:] != rest or frames not in ("T", str(len(values))):
        fix = f"name the right array by kp_key= or feature_key=, or {AGAIN}"
        yield Row(key, f"{key} must be ({', '.join(map(str, (frames, *rest)))})", str(values.shape), fix)
    if not len(values):
        yield Row(key, "a clip must have frames", "none", AGAIN)
    if column == MASK:
        yield from broken("mask must be true or false", (values != 0) & (values != 1), key, values, "save mask > 0.5")
    elif column == TIMES:  # equal ones come from rounding
        back = np.append(~(values[1:] >= values[:-1]), False)
        yield from broken("times must increase", back, key, values, f"put the frames in order, or {AGAIN}")
    else:
        endless = ~(np.abs(values) <= np.finfo(np.float32).max)
        yield from broken("numbers must be finite", endless, key, values, f"write 0 for a point not seen, or {AGAIN}")
    if column == "x":
        yield from check_points(key, values)
    if values.dtype != dtype:
        yield Row(key, f"{key} should be {dtype}; it is converted", str(values.dtype), "nothing", WARNING)


def broken(rule: str, wrong: np.ndarray, key: str, values: np.ndarray, fix: str, kind: str = ERROR) -> Iterator[Row]:
    """Yield the first frame where a rule is broken; wrong: of the shape of values."""
    if wrong.any():
        frame = int(np.argmax(wrong.reshape(len(wrong), -1).any(1)))
        yield Row(key, rule, f"frame {frame} has {values[wrong][0]:g}", fix, kind)


def check_points(key: str, x: np.ndarray) -> Iterator[Row]:
    rule, fix = "coordinates must be in [0, 1]", "divide x by the width and y by the height of a frame"
    yield from broken(rule, (x < -SLACK) | (x > 1 + SLACK), key, x, fix)
    yield from broken(rule, (x < 0) | (x > 1), key, x, "nothing: the point has left the picture", WARNING)
    if len(x) > POSITIONS:
        rule, fix = f"the Transformer reads at most {POSITIONS} frames", "cut or thin out the clip; or train the GRU"
        yield Row(key, rule, str(len(x)), fix, WARNING)
