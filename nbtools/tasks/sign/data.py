"""Clips and lists of labels → pack: x (T, 156) float32 and mask (T, 78) bool, features (T, 2048) float32, all ragged,
and label (2,) int64 = (gloss, category). `classes` are the glosses. A column that no clip has is left out; in one that
only some have, the others have 0 frames.

    train/CLIP.npz  train/labels.csv  val/…  test/…      a list in each folder, or one above them
    CLIP.npz  labels.csv                                 one folder; the splits are drawn by a hash of the names
    transformer_only/…  iv3_gru_only/…  test_15fps/…     the guide's: the first two train, the third validates
    labels_reference.csv                                 anywhere: names of the ids: gloss_id, label, cat_id, category

A clip, CLIP.npz, has X, X2048 or both; without a mask every point that is not 0 counts as seen:

    X              (T, 156)   float32   x, y of pose 25, left hand 21, right hand 21, face 11 points, in [0, 1]
    X2048          (T, 2048)  float32   features of each frame
    mask           (T, 78)    bool      which points were seen; the others are 0, or were interpolated
    timestamps_ms  (T,)       int64     increasing
    meta           ()         text      JSON

A list is a CSV with any separator and the columns file, gloss and cat, ids from 0, perhaps signer: splits are drawn by
it. A row names a clip below the list's folder by an end of its path that no other has, `.npz` may be left out.
"""

import contextlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from nbtools import data, disk
from nbtools.data import Card, Entry, Pack, Sample, Survey, build_pack, compose, side_by_side, split_word, stage
from nbtools.errors import PackError
from nbtools.show import plural
from nbtools.tasks.common.files import decode_text, read_rows, walk, with_slashes
from nbtools.tasks.common.rules import ERROR, WARNING, Refused, Report, Row, check_each
from nbtools.tasks.sign.keypoints import POINTS
from nbtools.tasks.sign.networks import POSITIONS

SUFFIX, LABELS, REFERENCE = ".npz", "labels.csv", "labels_reference.csv"
GUIDE = {"transformer_only": "train", "iv3_gru_only": "train", "test_15fps": "val"}  # it has no test split
ID = re.compile(r"([0-9]{1,4})(\.0)?")  # pandas writes 3.0; a mistyped id must not make a billion outputs

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

Ids = tuple[int, int]  # (gloss, category)
Places = Mapping[str, tuple[str | None, str | None]]  # clip → (split, signer)


def pack(
    source: str | Path,
    *,
    val: float = 0.1,
    test: float = 0.1,
    kp_key: str | None = "X",
    feature_key: str | None = "X2048",
    glosses: int | Sequence[str] | None = None,
    categories: int | Sequence[str] | None = None,
    into: str | Path | None = None,
    progress: bool = True,
) -> Pack:
    """Return the pack of labelled clips of a folder, archive or link; opened if it is finished.

    val, test: shares, or whole numbers for exactly that many; train, val and test folders of the source come first.
    kp_key: the array of keypoints; None reads none. feature_key: that of features; None makes a pack for the
    Transformer alone 13 times as small. A clip may lack one of the two: each network skips clips without its input.
    glosses, categories: how many classes there are, or their names; None: up to the largest id.
    Raises PackError if nothing can be used. `validate` reports what is wrong with single clips and labels.
    """
    options = {"kp_key": kp_key, "feature_key": feature_key, "glosses": glosses, "categories": categories}
    return build_pack(source, "sign", options, survey, read, val=val, test=test, into=into, progress=progress)


def pack_options(card: Card) -> dict[str, Any]:
    """Return options of `pack` with which another source is read by the same arrays and has the same classes."""
    return {**{name: card.options[name] for name in (*KEYS, "categories")}, "glosses": card.classes}


def survey(folder: Path, options: Mapping[str, Any]) -> Survey:
    """Return the clips with a label that can be used, and what is wrong with the others."""
    clips, labels, places, rows = labels_of(folder)
    errors = [row for row in rows if row.severity == ERROR]
    if not labels:
        first = f" The first error: {Refused(*errors[0][1:4], errors[0].file)}" if errors else ""
        fix = f"write {LABELS} with the columns file,gloss,cat; run.predict(files) reads clips without labels"
        raise PackError(f"{folder}: {plural(len(clips), 'clip')} and no label; {fix}.{first}")
    entries = []
    for clip in (clip for clip in clips if clip in labels):
        folders = (GUIDE.get(part) or split_word(part) for part in reversed(PurePosixPath(clip).parts[:-1]))
        split = places[clip][0] or next(filter(None, folders), None)  # of its list, else of the nearest folder
        entries.append(Entry(clip, split, np.array(labels[clip], np.int64), places[clip][1]))
    keys, known = keys_of(options, folder, clips), read_reference(folder)
    glosses, categories = (
        names_of(option, options[option], max(label[k] for label in labels.values()), known[k])
        for k, option in enumerate(("glosses", "categories"))
    )
    by, made = "features" if keys["kp_key"] is None else "x", {**keys, "categories": categories}
    bad = [row[:4] for row in errors]
    return Survey(entries, glosses, made, ragged=("x", "mask", "features"), bucket_by=by, bad=bad, learn=learn)


def learn(pack: Pack, train: np.ndarray) -> tuple[dict[str, Any], list[str]]:
    """Return no more options, and a remark on glosses without a training clip."""
    return {}, data.lacking(pack.classes, {pack.classes[i] for i in pack.arrays["label"][train, 0]}, "train sample")


def keys_of(options: Mapping[str, Any], folder: Path, clips: Sequence[str]) -> dict[str, Any]:
    """Return the options that name arrays, None for one that no clip has. Raises PackError where the user named it."""
    have = list(side_by_side(lambda clip: arrays_in(folder / clip), clips))
    keys, every = {name: options[name] for name in KEYS}, set().union(*have)
    for name, key in keys.items():
        if every and key not in (None, KEYS[name], *every):
            raise PackError(f"no clip has {name} {key!r}; they have {', '.join(sorted(every))}")
    kept = every.intersection(filter(None, keys.values())) or {*keys.values()}  # else each clip is an error
    return {name: key if key in kept else None for name, key in keys.items()}


def read(path: Path, options: Mapping[str, Any]) -> Sample:
    """Return one clip as the pack holds it: x, mask and features, of 0 frames what this one lacks and others have.
    Raises Refused with the first error that `validate` reports."""
    clip = read_clip(Path(path), options)[0]
    keys = {"x": options["kp_key"], "mask": options["kp_key"], "features": options["feature_key"]}
    empty = {column: np.zeros((0, *FORMS[column][0]), FORMS[column][1]) for column, key in keys.items() if key}
    return {column: clip.get(column, none) for column, none in empty.items()}


def validate(
    source: str | Path,
    *,
    kp_key: str | None = "X",
    feature_key: str | None = "X2048",
    require_x2048: bool = False,
    progress: bool = True,
) -> Report:
    """Check every clip and every label of a folder, archive or link. An error is what a pack with the same keys leaves
    out; require_x2048: so is a clip without features. Raises PackError without clips, and for a key that none has."""
    folder = stage(source, progress=progress)
    clips, labels, _, rows = labels_of(folder)
    keys = keys_of({"kp_key": kp_key, "feature_key": feature_key}, folder, clips)
    if require_x2048:
        keys |= {"feature_key": feature_key, "require_x2048": True}

    def warnings(clip: str) -> Iterator[Row]:
        return (row._replace(file=clip) for row in read_clip(folder / clip, keys)[1])

    rows += check_each(warnings, clips, progress)
    return Report(rows, f"{plural(len(clips), 'clip')}, {len(labels):,} with a label")


@contextlib.contextmanager
def open_clip(path: Path) -> Iterator[Any]:
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
    with contextlib.suppress(Refused), open_clip(path) as npz:
        return npz.files
    return []


def read_clip(path: Path, options: Mapping[str, Any]) -> tuple[Sample, list[Row]]:
    """Return a clip's columns, of x, mask and features those that it has, and warnings.

    options: kp_key, feature_key, require_x2048. Raises Refused with the first error.
    """
    sample, warnings, frames = {}, [], "T"
    with open_clip(path) as npz:
        for column, key in places_in(npz.files, options).items():
            values = npz[key]
            if column == "x" and MASK in npz.files:
                values = without_unseen(values, npz[MASK])
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
    if "x" in sample and "features" not in sample and not sample[MASK].any():
        raise Refused("none", "a clip must show a point in some frame", AGAIN)
    return sample, warnings


def without_unseen(x: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return points (T, 156), 0 in place of what is not in [0, 1] where the mask (T, 78) says that a point is not seen;
    arrays of other shapes as they are: `rules_of` refuses them."""
    if x.dtype.kind != "f" or x.shape[1:] != (WIDTH,) or mask.shape != (len(x), POINTS):
        return x
    return np.where((mask == 0).repeat(2, axis=1) & ~((x >= 0) & (x <= 1)), x.dtype.type(0), x)


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
        rule, fix = "coordinates must be in [0, 1]", "set mask to 0 there; or divide pixels by the width and height"
        yield *first((values < -SLACK) | (values > 1 + SLACK), values), rule, fix, ERROR
        yield *first((values < 0) | (values > 1), values), rule, "nothing: the point has left the frame", WARNING
        rule, fix = f"the Transformer reads at most {POSITIONS} frames", "cut or thin out the clip; or train the GRU"
        yield len(values) > POSITIONS, len(values), rule, fix, WARNING
    yield values.dtype != dtype, values.dtype, f"{key} should be {dtype}; it is converted", "nothing", WARNING


def first(broken: np.ndarray, values: np.ndarray) -> tuple[bool, str]:
    """Return whether any of the values is, and the first frame and value that are."""
    if not broken.any():
        return False, ""
    frame = int(np.argmax(broken.reshape(len(broken), -1).any(1)))
    return True, f"frame {frame} has {values[broken][0]:g}"


def labels_of(folder: Path) -> tuple[list[str], dict[str, Ids], Places, list[Row]]:
    """Return the clips of a folder, relative to it, their labels and places by lists, and what is wrong with these.
    Raises PackError if there is no clip, DiskError for a list that cannot be opened."""
    names = walk(folder)
    clips = [name for name in names if name.lower().endswith(SUFFIX)]
    if not clips:
        there = f"it has {', '.join(names[:3])}" if names else "it is empty"
        raise PackError(f"{folder}: no clips ({SUFFIX}); {there}. Give the folder that holds train/ and val/")
    labels, places, rows = read_lists(folder, clips)
    if not labels and not rows:
        return clips, {}, {}, [Row(LABELS, f"no {LABELS}", "clips should have labels", "to predict, nothing", WARNING)]
    bare, fix = (clip for clip in clips if clip not in labels), f"write its row into {LABELS}"
    rows += [Row(clip, "no usable row", "a clip must have a label", fix) for clip in bare]
    return clips, labels, places, rows


def names_of(option: str, wanted: int | Sequence[str] | None, most: int, known: Mapping[int, str]) -> list[str]:
    """Return the classes: as requested, else those up to the largest id. Raises PackError if they are too few, or not
    those that the source itself names."""
    count = max(most, *known, -1) + 1 if wanted is None else wanted if isinstance(wanted, int) else len(wanted)
    if count <= most:
        rule = f"{option} must be above the largest id, {most}, since ids start at 0, got {count}"
        raise PackError(f"{rule}; give {most + 1} or more, or correct the labels")
    if wanted is None or isinstance(wanted, int):
        return [known.get(i, str(i)) for i in range(count)]
    for i, title in enumerate(wanted):
        if title not in (str(i), known.get(i, title)):
            fix = f"correct its ids, or the name in {REFERENCE}"
            raise PackError(f"{option}: id {i} must be {title!r}, and the source calls it {known[i]!r}; {fix}")
    return [*wanted]


def read_lists(folder: Path, clips: Sequence[str]) -> tuple[dict[str, Ids], Places, list[Row]]:
    """Return (clip → its label, clip → the split in its list's name and its signer, what is wrong with the lists). A
    clip with contradictory labels has none."""
    given: dict[str, dict[Ids, str]] = defaultdict(dict)  # clip → label → the first row that says so
    rows, places = list[Row](), dict[str, tuple[str | None, str | None]]()
    for name in (name for name in walk(folder) if name.lower().endswith(".csv")):
        try:
            table = read_table(folder, name, ("file", "gloss", "cat"), "signer")
        except Refused as refusal:  # perhaps the reference, or the log of a training
            rows += [refusal.row(name)] if Path(name).name.lower() == LABELS else []
            continue
        ends = ends_of(clips, name[: name.rfind("/") + 1])
        for where, (file, *ids, signer) in table:
            try:
                label = id_in("gloss", ids[0]), id_in("cat", ids[1])
                given[clip := clip_of(file, ends)].setdefault(label, where)
                split, other = places.get(clip, (None, None))
                places[clip] = split or split_word(PurePosixPath(name).stem), other or signer or None
            except Refused as refusal:
                rows.append(refusal.row(where))
    for (first, where), *others in (labels.items() for labels in given.values()):
        rule, fix = f"a clip must have one label, and {where} says {first[0]}, {first[1]}", "delete a wrong row"
        rows += [Row(other, f"{ids[0]}, {ids[1]}", rule, fix) for ids, other in others]
    if given.keys() == {*clips}:  # then a list that gave no clip its label is no error: it may be of clips elsewhere
        needed = {where.rpartition(":")[0] for labels in given.values() for where in labels.values()}
        rows = [row if row.file.rpartition(":")[0] in needed else row._replace(severity=WARNING) for row in rows]
    return {clip: next(iter(labels)) for clip, labels in given.items() if len(labels) == 1}, places, rows


def ends_of(clips: Sequence[str], above: str) -> dict[str, list[str]]:
    ends = defaultdict(list)
    for clip in clips:
        parts = compose(clip[: -len(SUFFIX)]).split("/")
        for first in range(len(parts) if clip.startswith(above) else 0):
            ends["/".join(parts[first:])].append(clip)
    return ends


def clip_of(file: str, ends: Mapping[str, list[str]]) -> str:
    some = ends.get(re.sub(rf"\{SUFFIX}$", "", with_slashes(file), flags=re.I), [])
    if len(some) != 1:
        fix = "correct the name, add its folder as in train/CLIP, or delete the row"
        raise Refused(f"{file or 'nothing'}, of {len(some)} clips", "a row must name one clip", fix)
    return some[0]


def id_in(column: str, cell: str) -> int:
    if not (match := ID.fullmatch(cell)):
        fix = f"write its id; names belong in {REFERENCE}"
        raise Refused(cell or "nothing", f"{column} must be a whole number from 0 to 9999", fix)
    return int(match[1])


def read_table(folder: Path, name: str, columns: Sequence[str], *others: str) -> list[tuple[str, list[str]]]:
    """Return (`train/labels.csv:14`, the cells of columns and others) of each row. Raises Refused if columns lack."""

    def is_head(cells: list[str]) -> bool:
        return set(columns) <= {cell.casefold() for cell in cells}

    rows = read_rows(decode_text((folder / name).read_bytes(), name), name, is_head, heads=())
    if not rows or not is_head(rows[0][1]):
        value, fix = ",".join(rows[0][1])[:60] if rows else "an empty file", f"write {','.join(columns)} as line 1"
        raise Refused(value, f"the first line must have the columns {', '.join(columns)}", fix, name)
    head = [cell.casefold() for cell in rows[0][1]]
    places = [head.index(column) if column in head else 10**6 for column in (*columns, *others)]
    return [(f"{name}:{line}", [cells[p] if p < len(cells) else "" for p in places]) for line, cells in rows[1:]]


def read_reference(folder: Path) -> tuple[dict[int, str], dict[int, str]]:
    """Return the names of glosses and of categories by id. Raises Refused for a reference that cannot be read."""
    glosses, categories = {}, {}
    for name in (name for name in walk(folder) if Path(name).name.lower() == REFERENCE):
        for _, (gloss, label, cat, title) in read_table(folder, name, ("gloss_id", "label", "cat_id", "category")):
            glosses[id_in("gloss_id", gloss)], categories[id_in("cat_id", cat)] = label, title
    return glosses, categories
