"""A clip's file, its rules, and the columns that a pack takes from it.

    X              (T, 156)   float32   x, y of pose 25, left hand 21, right hand 21, face 11 points, in [0, 1]
    X2048          (T, 2048)  float32   features of each frame
    mask           (T, 78)    bool      which points were seen; the others are 0, or were interpolated
    timestamps_ms  (T,)       int64     increasing
    meta           ()         text      JSON

A clip has X, X2048 or both. Without a mask every point that is not 0 counts as seen.
"""

import contextlib
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from nbtools import disk
from nbtools.data import Sample
from nbtools.tasks.common.files import ERROR, WARNING, Refused, Row
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
        raise Refused(value, "a clip must be a whole .npz archive", AGAIN) from None


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
            for broken, came, rule, fix, severity in rules_of(column, key, values, frames):
                if broken and severity == ERROR:
                    raise Refused(came, rule, fix)
                warnings += [Row("", str(came), rule, fix, WARNING)] if broken else []
            frames, sample[column] = str(len(values)), np.ascontiguousarray(values, FORMS[column][1])
        extras = [key for key in (MASK, TIMES, META) if key not in npz.files and ("x" in sample or key != MASK)]
        warnings += [Row("", ", ".join(npz.files), f"a clip should have {key}", "nothing", WARNING) for key in extras]
    sample.pop(TIMES, None)
    if "x" in sample and MASK not in sample:
        sample[MASK] = sample["x"].reshape(-1, POINTS, 2).any(2)
    return sample, warnings


def places_in(names: Collection[str], options: Mapping[str, Any]) -> dict[str, str]:
    """Return column → the array that it is read from, of those in a file; also the times, which are only checked.
    Raises Refused if what a clip must have is missing."""
    x, features = options["kp_key"], options["feature_key"]
    missing = features if options.get("require_x2048") else x or features
    if missing not in names and (options.get("require_x2048") or features not in names):
        fix = "extract it, or name another one by kp_key= or feature_key="
        raise Refused(", ".join(names) or "no arrays", f"a clip must have {missing}", fix)
    places = {"x": x, MASK: MASK if x in names else None, "features": features, TIMES: TIMES}
    return {column: key for column, key in places.items() if key in names}


def rules_of(column: str, key: str, values: np.ndarray, frames: str) -> Iterator[tuple[Any, Any, str, str, str]]:
    """Yield the rules of an array in turn, each judged once those before it are kept: (whether it is broken, what came,
    the rule, what to do, how bad). frames: how many the arrays before it have."""
    rest, dtype, kinds = FORMS[column]
    yield values.dtype.kind not in kinds, values.dtype, f"{key} must be {dtype}", f"save {key}.astype('{dtype}')", ERROR
    other = not values.shape or values.shape[1:] != rest or frames not in ("T", str(len(values)))
    rule = f"{key} must be ({', '.join(map(str, (frames, *rest)))})"
    yield other, values.shape, rule, f"name the right array by kp_key= or feature_key=, or {AGAIN}", ERROR
    yield not len(values), "none", f"{key} must have frames", AGAIN, ERROR
    if column == MASK:
        yield *first((values != 0) & (values != 1), values), "mask must be true or false", "save mask > 0.5", ERROR
    elif column == TIMES:  # equal ones come from rounding
        back = np.append(~(values[1:] >= values[:-1]), False)
        yield *first(back, values), "times must increase", f"put the frames in order, or {AGAIN}", ERROR
    else:
        endless = ~(np.abs(values) <= np.finfo(np.float32).max)
        fix = f"write 0 for a point not seen, or {AGAIN}"
        yield *first(endless, values), f"{key} must be finite numbers", fix, ERROR
    if column == "x":
        rule, fix = "coordinates must be in [0, 1]", "divide x by the width and y by the height of a frame"
        yield *first((values < -SLACK) | (values > 1 + SLACK), values), rule, fix, ERROR
        yield *first((values < 0) | (values > 1), values), rule, "nothing: the point has left the picture", WARNING
        rule, fix = f"the Transformer reads at most {POSITIONS} frames", "cut or thin out the clip; or train the GRU"
        yield len(values) > POSITIONS, len(values), rule, fix, WARNING
    yield values.dtype != dtype, values.dtype, f"{key} should be {dtype}; it is converted", "nothing", WARNING


def first(broken: np.ndarray, values: np.ndarray) -> tuple[bool, str]:
    """Return whether any of the values is, and the first frame and value that are."""
    if not broken.any():
        return False, ""
    frame = int(np.argmax(broken.reshape(len(broken), -1).any(1)))
    return True, f"frame {frame} has {values[broken][0]:g}"
