"""Clips of signs become a pack, and one table says what is wrong with a folder of them before that."""

import io
import json
import os
import pickle
import struct
import tarfile
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import nbtools as nb
from nbtools.data import Card, Pack, collate, in_order, open_feed
from nbtools.data.pack import Column
from nbtools.errors import PackError
from nbtools.tasks import sign
from nbtools.tasks.common.report import ERROR, WARNING
from nbtools.train import Plan

T = 5
DATA = os.environ.get("NBTOOLS_REAL_DATA", "")
real = [pytest.mark.real, pytest.mark.skipif(not DATA, reason="NBTOOLS_REAL_DATA names no folder of real data")]
META = {
    "video": "10.MOV",
    "target_fps": 30,
    "dims_per_frame": 156,
    "keypoints_total": 78,
    "order": "pose25,left_hand21,right_hand21,face11",
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NBTOOLS_CACHE", str(tmp_path / "cache"))


def arrays(seed: int = 0, frames: int = T) -> dict[str, Any]:
    """A clip as the origin writes it: what was not seen is 0 or filled in, the mask tells which."""
    draw = np.random.default_rng(seed)
    seen = draw.random((frames, 78)) < 0.6
    x = draw.random((frames, 78, 2), np.float32) * seen[..., None]
    return {
        "X": x.reshape(frames, 156),
        "X2048": draw.random((frames, 2048), np.float32),
        "mask": seen,
        "timestamps_ms": np.arange(frames) * 1000 // 30,
        "meta": np.array(json.dumps(META)),
    }


def clip(path: Path, seed: int = 0, frames: int = T, without: tuple[str, ...] = (), **changed: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    found = {**arrays(seed, frames), **changed}
    np.savez_compressed(path, **{key: value for key, value in found.items() if key not in without})
    return path


def listed(path: Path, *rows: str, head: str = "file,gloss,cat", encoding: str = "utf-8") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([head, *rows]) + "\n", encoding=encoding, newline="")
    return path


def corpus(folder: Path, **more) -> Path:
    """Two glosses of two categories, a clip each in train and in val."""
    for k, name in enumerate(("train/a", "train/b", "val/c", "val/d")):
        clip(folder / f"{name}.npz", seed=k, frames=T + k, **more)
    listed(folder / "train" / "labels.csv", "a,0,0", "b,1,1")
    listed(folder / "val" / "labels.csv", "c,0,0", "d,1,1")
    return folder


def packed(source: Path, **more) -> Pack:
    return sign.pack(source, progress=False, **more)


def checked(source: Path, **more):
    return nb.validate(sign, source, progress=False, **more)


def names(made: Pack) -> dict[str, int]:
    return {name: i for i, name in enumerate(made.names)}


# -- the pack


def test_a_clip_in_the_exact_format_passes_and_is_packed_as_it_is(tmp_path):
    source = corpus(tmp_path / "raw")
    report = checked(source, require_x2048=True)
    assert (report.clips, report.labelled, report.rows, report.ok) == (4, 4, (), True)
    made = packed(source)
    assert made.columns == {
        "x": Column("ragged", "<f4", (156,)),
        "mask": Column("ragged", "|b1", (78,)),
        "features": Column("ragged", "<f4", (2048,)),
        "label": Column("fixed", "<i8", (2,)),
    }
    assert (made.splits, made.card.bucket_by) == ({"train": 2, "val": 2, "test": 0}, "x")
    for k, name in enumerate(("train/a", "train/b", "val/c", "val/d")):
        sample, raw = made.sample(names(made)[f"{name}.npz"]), arrays(k, T + k)
        for column, key in (("x", "X"), ("mask", "mask"), ("features", "X2048")):
            np.testing.assert_array_equal(sample[column], raw[key])
        assert sample["label"].tolist() == [k % 2, k % 2]


def test_ids_are_the_classes_until_a_reference_names_them_and_their_training_clips_are_counted(tmp_path):
    source = corpus(tmp_path / "raw")
    made = packed(source)
    assert (made.classes, made.options["categories"], made.options["category_of"]) == (["0", "1"], ["0", "1"], [0, 1])
    rows = ("0,HELLO,0,GREETING", "1,RED,1,COLOR", "2,BLUE,1,COLOR")
    listed(source / "labels_reference.csv", *rows, head="gloss_id,label,cat_id,category")
    named = packed(source)
    assert named.classes == ["HELLO", "RED", "BLUE"]
    assert named.card.counts == {"gloss": [1, 1, 0], "category": [1, 1]}, "clips to train on, for the classes' weights"
    assert (named.options["categories"], named.options["category_of"]) == (["GREETING", "COLOR"], [0, 1, 1])


def test_a_second_call_opens_the_finished_pack_and_so_does_its_folder(tmp_path):
    source = corpus(tmp_path / "raw")
    made = packed(source)
    assert packed(source).folder == made.folder
    assert packed(made.folder).card == made.card
    assert packed(source, feature_key=None).folder != made.folder


def test_an_archive_is_packed_as_its_folder_is(tmp_path):
    source = corpus(tmp_path / "raw")
    with tarfile.open(tmp_path / "signs.tar", "w") as file:
        file.add(source, "signs")
    made, other = packed(tmp_path / "signs.tar"), packed(source)
    assert made.card == other.card
    assert checked(tmp_path / "signs.tar").ok


def test_raw_files_and_every_feed_give_what_the_pack_holds(tmp_path):
    made = packed(corpus(tmp_path / "raw"))
    assert made.raw is not None
    batches = in_order(np.arange(4), None, 3)
    feeds = [open_feed(made, Plan(feed=feed), torch.device("cpu")) for feed in ("resident", "streamed", "workers")]
    for first, *others in zip(*(feed(batches) for feed in feeds), strict=True):
        for other in others:
            assert all(torch.equal(first[name], other[name]) for name in first)
    reopened = pickle.loads(pickle.dumps(made.raw))
    np.testing.assert_array_equal(reopened[2]["x"], made.sample(2)["x"])


def test_without_a_mask_a_point_is_seen_where_it_is_not_zero(tmp_path):
    made = packed(corpus(tmp_path / "raw", without=("mask", "timestamps_ms", "meta", "X2048")))
    for k in range(4):
        sample = made.sample(k)
        np.testing.assert_array_equal(sample["mask"], (sample["x"].reshape(-1, 78, 2) != 0).any(2))
        assert 0 < sample["mask"].mean() < 1


def test_a_filled_in_point_keeps_its_coordinates_and_stays_unseen(tmp_path):
    x, seen = np.full((T, 156), 0.5, np.float32), np.zeros((T, 78), bool)
    seen[:, 3] = True
    made = packed(corpus(tmp_path / "raw", X=x, mask=seen, without=("X2048", "timestamps_ms")))
    assert made.sample(0)["x"].min() == 0.5
    np.testing.assert_array_equal(made.sample(0)["mask"], seen)


def test_features_are_packed_where_every_clip_has_them(tmp_path):
    source = corpus(tmp_path / "raw")
    assert packed(source).options["feature_key"] == "X2048"
    assert "features" not in packed(source, feature_key=None).columns
    clip(source / "train" / "a.npz", without=("X2048",))
    made = packed(source)
    assert (len(made), made.options["feature_key"], "features" in made.columns) == (4, None, False)
    with_features = packed(source, require_x2048=True)
    assert (len(with_features), "features" in with_features.columns) == (3, True)
    assert with_features.bad["file"].tolist() == ["train/a.npz"]


def test_the_keys_are_chosen(tmp_path):
    source, found = tmp_path / "raw", arrays()
    for name in "ab":
        path = clip(source / f"{name}.npz", X=found["X2048"], kp=found["X"], without=("X2048",))
    listed(source / "labels.csv", "a,0,0", "b,0,0")
    both = packed(source, kp_key="kp", feature_key="X")
    np.testing.assert_array_equal(both.sample(0)["x"], found["X"])
    np.testing.assert_array_equal(both.sample(0)["features"], found["X2048"])
    alone = packed(source, kp_key=None, feature_key="X")
    assert (set(alone.columns), alone.card.bucket_by) == ({"features", "label"}, "features")
    assert set(sign.read(path, alone.options)) == {"features"}
    assert checked(source, kp_key=None, feature_key="X").errors == 0
    assert checked(source).errors == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kp_key": "X", "feature_key": "X"}, "must differ"),
        ({"kp_key": None, "feature_key": None}, "nothing would be read"),
        ({"feature_key": None, "require_x2048": True}, "require_x2048 needs feature_key"),
        ({"kp_key": 5}, "kp_key must be the name of an array of numbers, got 5"),
        ({"kp_key": "mask"}, "kp_key must be the name of an array of numbers, got 'mask'"),
        ({"feature_key": ""}, "feature_key must be the name"),
    ],
)
def test_keys_that_cannot_be_are_refused_before_anything_is_read(tmp_path, options, said):
    for act in (packed, checked):
        with pytest.raises(PackError, match=said):
            act(tmp_path / "absent", **options)


def test_one_folder_is_split_by_a_hash_of_the_names(tmp_path):
    source = tmp_path / "raw"
    for k in range(40):
        clip(source / f"clip_{k}.npz", seed=k, frames=1, without=("X2048",))
    listed(source / "labels.csv", *(f"clip_{k},{k % 4},{k % 2}" for k in range(40)))
    made = packed(source, val=8, test=4)
    assert made.splits == {"train": 28, "val": 8, "test": 4}
    again = packed(source, val=8, test=0)
    assert set(np.flatnonzero(made.split == 2)) <= set(np.flatnonzero(again.split != 2))
    assert again.splits == {"train": 32, "val": 8, "test": 0}


def test_a_pack_without_labels_says_what_can_be_done(tmp_path):
    clip(tmp_path / "raw" / "a.npz")
    with pytest.raises(PackError, match=r"1 clip and no labels\.csv.*write one with the columns file,gloss,cat"):
        packed(tmp_path / "raw")


def test_clips_without_labels_are_validated_and_read(tmp_path):
    path = clip(tmp_path / "raw" / "a.npz")
    report = checked(path.parent)
    assert (report.ok, report.labelled, [row.file for row in report.rows]) == (True, 0, ["labels.csv"])
    options = packed(corpus(tmp_path / "other")).options
    np.testing.assert_array_equal(sign.read(path, options)["x"], arrays()["X"])


def test_a_folder_without_clips_is_refused_by_both(tmp_path):
    listed(tmp_path / "raw" / "labels.csv", "a,0,0")
    for act in (packed, checked):
        with pytest.raises(PackError, match=r"no clips \(\.npz\); it has labels\.csv"):
            act(tmp_path / "raw")


# -- lists of labels


@pytest.mark.parametrize(
    "rows",
    [
        ("a,0,0", "b,1,1"),
        ("a.npz,0,0", "b.NPZ,1,1"),
        ("train/a,0,0", r"train\b.npz,1,1"),
        ("./a,0,0", ' "b" , 1 ,1 '.replace(' "', '"').replace('" ', '"')),
        ("", "a,0,0", "  ", "b,1,1"),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_row_names_its_clip_in_the_ways_people_write(tmp_path, rows, encoding):
    source = corpus(tmp_path / "raw")
    listed(source / "train" / "labels.csv", *rows, encoding=encoding)
    assert checked(source).rows == ()


def test_other_columns_any_order_and_windows_line_ends_do_not_matter(tmp_path):
    source = corpus(tmp_path / "raw")
    head, rows = " Signer,CAT,file,gloss,occluded", (f"S{k},{k},{name},{k},0" for k, name in enumerate("ab"))
    (source / "train" / "labels.csv").write_bytes("\r\n".join([head, *rows]).encode("utf-8-sig"))
    assert checked(source).rows == ()
    assert packed(source).sample(1)["label"].tolist() == [1, 1]


@pytest.mark.parametrize("layout", ["beside", "above", "ids by name alone"])
def test_lists_lie_beside_or_above_their_folders_too(tmp_path, layout):
    source = corpus(tmp_path / "raw")
    expected = packed(source)
    for split in ("train", "val"):
        (source / split / "labels.csv").unlink()
        (source / split).rename(source / f"FSL105_{split}")
    if layout == "beside":
        listed(source / "FSL105_train.csv", "a,0,0", "b,1,1")
        listed(source / "FSL105_val.csv", "c,0,0", "d,1,1")
    else:
        way = "FSL105_{}/" if layout == "above" else ""
        rows = [f"{way.format('train')}{n},{k},{k}" for k, n in enumerate("ab")]
        listed(source / "labels.csv", *rows, *(f"{way.format('val')}{n},{k},{k}" for k, n in enumerate("cd")))
    listed(source / "history.csv", "1,0.5,0.3", head="epoch,train_loss,val_loss")
    assert checked(source).rows == ()
    made = packed(source)
    assert made.splits == expected.splits
    assert [made.sample(i)["label"].tolist() for i in range(4)] == [[0, 0], [1, 1], [0, 0], [1, 1]]


# -- every rule: a damage gives its row and no other, and the pack leaves out just what is an error


def changed(**arrays_: Any):
    return lambda path: clip(path, **arrays_)


def shifted(key: str, frames: int):
    return changed(**{key: arrays(frames=frames)[key]})


def replaced(data: bytes):
    return lambda path: path.write_bytes(data)


def cut(share: float):
    return lambda path: path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])


def flipped(path: Path) -> None:
    """A byte in the middle of the compressed X."""
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as file:
        info = file.getinfo("X.npy")
    data[info.header_offset + 200 + info.compress_size // 2] ^= 0xFF
    path.write_bytes(data)


def in_directory(offset: int, layout: str, value: int):
    """A field of X's entry in the zip's directory changed."""

    def act(path: Path) -> None:
        data = bytearray(path.read_bytes())
        place = data.index(b"PK\1\2")
        assert data[place + 46 : place + 51] == b"X.npy"
        struct.pack_into(layout, data, place + offset, value)
        path.write_bytes(data)

    return act


def rewritten(entries: dict[str, bytes]):
    """The clip's zip with some entries of other bytes."""

    def act(path: Path) -> None:
        with zipfile.ZipFile(clip(path)) as file:
            kept = {name: file.read(name) for name in file.namelist()}
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
            for name, data in {**kept, **entries}.items():
                file.writestr(name, data)

    return act


def twice(path: Path) -> None:
    with zipfile.ZipFile(path, "a") as file, pytest.warns(UserWarning, match="Duplicate"):
        file.writestr("X.npy", header((T, 156)) + bytes(4 * 156 * T))


def header(shape: tuple[int, ...], dtype: str = "<f4") -> bytes:
    text = io.BytesIO()
    np.lib.format.write_array_header_1_0(text, {"descr": dtype, "fortran_order": False, "shape": shape})
    return text.getvalue()


def with_value(key: str, value: float, frame: int = 2):
    def act(path: Path) -> None:
        values = arrays()[key]
        values[frame, 7] = value
        changed(**{key: values})(path)

    return act


def plain_npy(path: Path) -> None:
    with open(path, "wb") as file:
        np.save(file, arrays()["X"])


X, MASK, TIMES = (arrays()[key] for key in ("X", "mask", "timestamps_ms"))
NEEDED = {"require_x2048": True}
CLIPS = {
    "X is missing": (changed(without=("X",)), ERROR, "X", "a clip has X", "X2048, mask, t"),
    "X2048 is missing": (changed(without=("X2048",)), WARNING, "X2048", "a clip has X2048", "X, mask, t"),
    "X2048 is missing and needed": (changed(without=("X2048",)), ERROR, "X2048", "a clip has X2048", "X, mask", NEEDED),
    "mask is missing": (changed(without=("mask",)), WARNING, "mask", "a clip has mask", "X, X2048, t"),
    "meta is missing": (changed(without=("meta",)), WARNING, "meta", "a clip has meta", "X, X2048, m"),
    "X has other points": (changed(X=np.zeros((T, 178), "f4")), ERROR, "X", "X is (T, 156)", "(5, 178)"),
    "X is longer than the Transformer reads": (
        lambda path: clip(path, frames=301),
        WARNING,
        "X",
        "at most 300 frames",
        "301",
    ),
    "X is not flat": (changed(X=X.reshape(T, 78, 2)), ERROR, "X", "X is (T, 156)", "(5, 78, 2)"),
    "X2048 is narrow": (changed(X2048=np.ones((T, 1024), "f4")), WARNING, "X2048", "(T, 2048)", "(5, 1024)"),
    "X is of integers": (changed(X=(X > 0).astype(int)), ERROR, "X", "X is float32", "int64"),
    "X is float64": (changed(X=X.astype("f8")), WARNING, "X", "float32", "float64"),
    "X is big-endian": (changed(X=X.astype(">f4")), WARNING, "X", "float32", ">f4"),
    "X has nan": (with_value("X", np.nan), ERROR, "X", "numbers are finite", "frame 2 has nan"),
    "X has inf": (with_value("X", -np.inf), ERROR, "X", "numbers are finite", "frame 2 has -inf"),
    "a point left the picture": (with_value("X", 1.25), WARNING, "X", "coordinates are in [0, 1]", "frame 2 has 1.25"),
    "a point is far outside": (with_value("X", -0.75), ERROR, "X", "coordinates are in [0, 1]", "frame 2 has -0.75"),
    "X is in pixels": (changed(X=640 * X), ERROR, "X", "coordinates are in [0, 1]", "frame 0 has"),
    "X shows nothing": (changed(X=0 * X), WARNING, "X", "some point is seen", "all are 0"),
    "T is 0": (lambda path: clip(path, frames=0), ERROR, "X", "a clip has frames", "none"),
    "mask has other frames": (shifted("mask", T - 1), ERROR, "mask", "as many frames as X, 5", "4"),
    "times have other frames": (shifted("timestamps_ms", T + 1), ERROR, "timestamps_ms", "frames as X, 5", "6"),
    "mask is of floats": (changed(mask=MASK.astype("f4")), ERROR, "mask", "mask is bool", "float32"),
    "mask is of 0 and 1": (changed(mask=MASK.astype("u1")), WARNING, "mask", "mask is bool", "uint8"),
    "mask is of confidences": (changed(mask=MASK * 7), ERROR, "mask", "mask is true or false", "7"),
    "times go back": (
        changed(timestamps_ms=TIMES[::-1]),
        ERROR,
        "timestamps_ms",
        "times increase",
        "frame 0 has 133, the next 100",
    ),
    "a time comes twice": (
        changed(timestamps_ms=TIMES // 50),
        WARNING,
        "timestamps_ms",
        "times increase",
        "frame 0 has 0, the next 0",
    ),
    "times are floats": (changed(timestamps_ms=TIMES + 0.5), WARNING, "timestamps_ms", "is int64", "float64"),
    "meta is no JSON": (changed(meta=np.array("{video:")), WARNING, "meta", "meta is JSON", "'{video:'"),
    "meta is a number": (changed(meta=np.arange(3)), WARNING, "meta", "meta is JSON", "int64"),
    "meta is a list": (changed(meta=np.array("[1, 2]")), WARNING, "meta", "meta is a JSON object", "[1, 2]"),
    "meta nests too deep": (changed(meta=np.array("[" * 50_000)), WARNING, "meta", "meta is JSON", "[[["),
    "points are in another order": (
        changed(meta=np.array('{"order": "face11,pose25"}')),
        WARNING,
        "meta",
        "points are in the order pose25",
        "face11,pose25",
    ),
    "meta is pickled": (changed(meta=np.array(META, object)), WARNING, "meta", "never pickled", "object"),
    "X is pickled": (changed(X=X.astype(object)), ERROR, "X", "never pickled objects", "object"),
    "the file is empty": (replaced(b""), ERROR, "", "a clip is a .npz archive", "an empty file"),
    "the file is a web page": (
        replaced(b"<!DOCTYPE html>"),
        ERROR,
        "",
        "a clip is a .npz archive",
        "begins with b'<!DOC",
    ),
    "the file is a .npy": (plain_npy, ERROR, "", "a clip is a .npz archive", "NUMPY"),
    "the file is cut": (cut(0.7), ERROR, "", "the archive can be read", "not a zip file"),
    "a byte is wrong": (flipped, ERROR, "X", "the array can be read", ""),
    "an array has no header": (
        rewritten({"X.npy": b"hello world"}),
        ERROR,
        "X",
        "the array can be read",
        "magic string",
    ),
    "an array is cut": (rewritten({"X.npy": header((T, 156)) + bytes(99)}), ERROR, "X", "takes 3,120 bytes", "99"),
    "an array says it is huge": (rewritten({"X.npy": header((10**9, 156))}), ERROR, "X", "at most 160 MB", "624 GB"),
    "an array's size is negative": (rewritten({"X.npy": header((-1, 156))}), ERROR, "X", "takes -624 bytes", "0"),
    "meta is huge": (changed(meta=np.array(" " * 300_000)), WARNING, "meta", "at most 1.0 MB", "1.2 MB"),
    "a key comes twice": (twice, ERROR, "X", "a key is in the file once", "twice"),
    "the file is encrypted": (in_directory(8, "<H", 1), ERROR, "X", "the array can be read", "encrypted"),
    "the compression is unknown": (in_directory(10, "<H", 77), ERROR, "X", "the array can be read", "compression"),
    "nothing is in the file": (
        lambda path: zipfile.ZipFile(path, "w").close(),
        ERROR,
        "",
        "a clip holds arrays",
        "an empty archive",
    ),
}


@pytest.mark.parametrize("kind", CLIPS)
def test_a_damaged_clip_gives_its_row_and_no_other(tmp_path, kind):
    damage, severity, key, rule, value, *options = CLIPS[kind]
    source = corpus(tmp_path / "raw")
    damage(source / "train" / "a.npz")
    more = options[0] if options else {}
    report = checked(source, **more)
    assert len(report.rows) == 1, report
    (row,) = report.rows
    assert (row.severity, row.file, row.key) == (severity, "train/a.npz", key)
    assert rule in row.rule
    assert value in row.value
    assert row.fix
    assert report.ok == (severity == WARNING)
    made = packed(source, **more)
    expected = [(row.file, *row.reasons)] if severity == ERROR else []
    assert list(made.bad[["file", "value", "rule", "fix"]].itertuples(index=False, name=None)) == expected
    assert len(made) == 4 - len(expected)


TRAIN = "train/labels.csv"
LISTS = {
    "a column is missing": (("a,0", "b,1"), "file,gloss", ERROR, TRAIN, "cat", "the columns file", "file,gloss"),
    "semicolons part the cells": (("a;0;0",), "file;gloss;cat", ERROR, TRAIN, "file, gloss, cat", "columns", "file;"),
    "the list has rows and no head": (("b,1,1",), "a,0,0", ERROR, TRAIN, "file, gloss, cat", "columns", "a,0,0"),
    "the list is empty": ((), "", ERROR, TRAIN, "file, gloss, cat", "columns", "an empty file"),
    "a cell has no end": (("b,1,1", '"a,0,0' + 140_000 * " "), None, ERROR, TRAIN, "", "CSV", "field larger"),
    "an id is negative": (("a,-1,0", "b,1,1"), None, ERROR, f"{TRAIN}:2", "gloss", "whole number from 0", "-1"),
    "an id is a name": (("b,1,1", "a,0,red"), None, ERROR, f"{TRAIN}:3", "cat", "whole number from 0", "red"),
    "an id has a fraction": (("a,0.0,0", "b,1,1"), None, ERROR, f"{TRAIN}:2", "gloss", "whole number", "0.0"),
    "an id is in other digits": (("a,٣,0", "b,1,1"), None, ERROR, f"{TRAIN}:2", "gloss", "whole number", "٣"),
    "an id is enormous": (("a,0,0", "b,10000,1"), None, ERROR, f"{TRAIN}:3", "gloss", "to 9999", "10000"),
    "an id is empty": (("a,0,", "b,1,1"), None, ERROR, f"{TRAIN}:2", "cat", "whole number", "nothing"),
    "a cell is missing": (("a,0", "b,1,1"), None, ERROR, f"{TRAIN}:2", "", "as many cells", "2 of 3"),
    "a cell is too many": (("a,0,0", "b,1,1,x"), None, ERROR, f"{TRAIN}:3", "", "as many cells", "4 of 3"),
    "a row names nothing": (
        ("a,0,0", "b,1,1", ",0,0"),
        None,
        ERROR,
        f"{TRAIN}:4",
        "file",
        "a row names its clip",
        "noth",
    ),
    "a row's clip is not there": (("a,0,0", "b,1,1", "z,1,1"), None, ERROR, f"{TRAIN}:4", "file", "clip of a row", "z"),
    "a row's clip is outside": (
        ("a,0,0", "b,1,1", "../val/c,0,0"),
        None,
        ERROR,
        f"{TRAIN}:4",
        "file",
        "is there",
        "..",
    ),
    "a clip has no row": (("b,1,1",), None, ERROR, "train/a.npz", "", "a clip has a label", "no row"),
    "a row comes twice": (
        ("a,0,0", "b,1,1", "a.npz,0,0"),
        None,
        WARNING,
        f"{TRAIN}:4",
        "file",
        "is in a list",
        "a",
    ),
    "two rows contradict": (("a,0,0", "b,1,1", "a,1,1"), None, ERROR, f"{TRAIN}:4", "gloss, cat", "one label", "1, 1"),
    "a gloss is of two categories": (("a,0,1", "b,1,1"), None, ERROR, f"{TRAIN}:2", "cat", "one category: 0 has", "1"),
}


@pytest.mark.parametrize("kind", LISTS)
def test_a_damaged_list_gives_its_row_and_no_other(tmp_path, kind):
    rows, head, severity, file, key, rule, value = LISTS[kind]
    source = corpus(tmp_path / "raw")
    clip(source / "val" / "e.npz", seed=9)
    listed(source / "val" / "labels.csv", "c,0,0", "d,1,1", "e,0,0")
    listed(source / TRAIN, *rows, head="file,gloss,cat" if head is None else head)
    report = checked(source)
    found = [row for row in report.rows if "also in train" not in row.rule]  # its clip was the gloss's only one
    assert len(found) == 1, report
    (row,) = found
    assert (row.severity, row.file, row.key) == (severity, file, key)
    assert rule in row.rule
    assert value in row.value
    assert row.fix
    bad = packed(source).bad
    assert bad["file"].tolist() == ([file] if severity == ERROR else [])
    assert bad["rule"].tolist() == ([row.reasons[1]] if severity == ERROR else [])


def test_a_list_in_another_encoding_is_named(tmp_path):
    source = corpus(tmp_path / "raw")
    (source / TRAIN).write_bytes("file,gloss,cat\nsí,0,0\n".encode("latin-1"))
    (row,) = checked(source).rows
    assert (row.severity, row.file, row.rule) == (ERROR, TRAIN, "the file is text in UTF-8")


def test_a_name_in_another_case_is_told_apart_and_the_right_one_named(tmp_path):
    source = corpus(tmp_path / "raw")
    listed(source / TRAIN, "A,0,0", "b,1,1")
    lonely, wrong, untrained = checked(source).rows
    assert (lonely.file, wrong.file, untrained.key) == ("train/a.npz", f"{TRAIN}:2", "gloss")
    assert wrong.fix == "write a, as the file is called"


def test_a_name_that_two_clips_have_is_no_name(tmp_path):
    source = corpus(tmp_path / "raw")
    for path in source.glob("*/labels.csv"):
        path.unlink()
    clip(source / "val" / "a.npz", seed=7)
    listed(source / "labels.csv", "a,0,0", "train/a,0,0", "val/a,0,0", "b,1,1", "c,0,0", "d,1,1")
    (row,) = checked(source).rows
    assert (row.file, row.rule) == ("labels.csv:2", "a name means one clip")
    assert row.value == "a: train/a.npz, val/a.npz"


def test_two_lists_may_say_the_same_and_not_the_contrary(tmp_path):
    source = corpus(tmp_path / "raw")
    listed(source / "labels.csv", "train/a,0,0", "b,1,1", "c,0,0", "d,1,1")
    assert checked(source).rows == ()
    listed(source / "labels.csv", "train/a,1,1", "b,1,1", "c,0,0", "d,1,1")
    conflict, *_ = checked(source).rows
    assert (conflict.severity, conflict.file, conflict.value) == (ERROR, f"{TRAIN}:2", "0, 0")
    assert "train/a.npz" not in packed(source).names


def test_ids_with_gaps_and_glosses_that_are_never_trained_are_warned_of(tmp_path):
    source = corpus(tmp_path / "raw")
    listed(source / "val" / "labels.csv", "c,0,0", "d,4,1")
    gap, untrained = checked(source).rows
    assert (gap.severity, gap.key, gap.value) == (WARNING, "gloss", "2, 3 missing")
    assert (untrained.severity, untrained.file, untrained.value) == (WARNING, "val/labels.csv:3", "4")
    made = packed(source)
    assert (made.classes, made.options["category_of"]) == (list("01234"), [0, 1, -1, -1, 1])


def test_a_clip_that_is_there_twice_is_found_whatever_it_is_called(tmp_path):
    source = corpus(tmp_path / "raw")
    (source / "val" / "c.npz").write_bytes((source / "train" / "a.npz").read_bytes())
    (row,) = checked(source).rows
    assert (row.severity, row.file, row.value) == (WARNING, "val/c.npz", "the same as train/a.npz")
    assert "both are trained and judged on" in row.rule


def test_clips_that_cannot_be_read_are_not_taken_for_the_same(tmp_path):
    source = corpus(tmp_path / "raw")
    for name in ("train/a", "val/c"):
        clip(source / f"{name}.npz", X=np.full((T, 156), np.nan, "f4"))
    assert {row.rule for row in checked(source).rows} == {"numbers are finite"}


def test_clips_whose_names_differ_by_case_only_are_warned_of(tmp_path):
    source = corpus(tmp_path / "raw")
    clip(source / "train" / "A.npz", seed=8)
    listed(source / TRAIN, "a,0,0", "A,0,0", "b,1,1")
    (row,) = checked(source).rows
    assert (row.severity, row.file, row.value) == (WARNING, "train/a.npz", "next to train/A.npz")
    assert packed(source).splits["train"] == 3


@pytest.mark.parametrize(
    "data", [b"gloss_id,label\n0,HELLO\n", b"gloss_id,label,cat_id,category\nx,HELLO,0,G\n", b"\xff"]
)
def test_a_broken_reference_is_a_warning_and_ids_are_shown(tmp_path, data):
    source = corpus(tmp_path / "raw")
    (source / "labels_reference.csv").write_bytes(data)
    (row,) = checked(source).rows
    assert (row.severity, row.file) == (WARNING, "labels_reference.csv")
    assert packed(source).classes == ["0", "1"]


def test_a_clip_that_cannot_be_opened_is_a_row(tmp_path):
    source = corpus(tmp_path / "raw")
    (source / "train" / "a.npz").unlink()
    (source / "train" / "a.npz").symlink_to(tmp_path / "nowhere")
    (row,) = checked(source).rows
    assert (row.severity, row.file, row.value) == (ERROR, "train/a.npz", "No such file or directory")
    assert packed(source).bad["file"].tolist() == ["train/a.npz"]


OPTIONS = {"kp_key": "X", "feature_key": None}


def test_a_directory_that_lies_does_not_make_a_small_file_fill_the_memory(tmp_path):
    path = tmp_path / "bomb.npz"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as file:
        file.writestr("X.npy", header((T, 156)) + bytes(50_000_000))
    in_directory(24, "<I", len(header((T, 156))) + 4 * 156 * T)(path)
    tracemalloc.start()
    try:
        with pytest.raises(PackError, match="the array can be read"):
            sign.read(path, OPTIONS)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
    finally:
        tracemalloc.stop()


@pytest.fixture(scope="module")
def wholes(tmp_path_factory):
    """A clip compressed, and one stored, whose header of X lies in the first 192 bytes, before any checksum."""
    path = tmp_path_factory.mktemp("whole") / "a.npz"
    compressed = clip(path, frames=2, without=("X2048",)).read_bytes()
    np.savez(path, **{key: value for key, value in arrays(frames=8).items() if key != "X2048"})
    return (compressed, len(compressed), 2), (path.read_bytes(), 192, 8)


@pytest.mark.filterwarnings("default")  # of NumPy, for headers that it takes for those of older versions
@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.data())
def test_a_damaged_clip_is_refused_or_has_the_right_form(tmp_path, wholes, data):
    """A checksum guards the numbers, but not the names around them."""
    whole, within, frames = data.draw(st.sampled_from(wholes))
    damaged = bytearray(whole)
    for place, value in data.draw(st.lists(st.tuples(st.integers(0, within - 1), st.integers(0, 127)), max_size=5)):
        damaged[place] = value
    cut = data.draw(st.none() | st.integers(0, len(damaged)))
    path = tmp_path / "a.npz"
    path.write_bytes(damaged[:cut])
    try:
        shape = sign.read(path, OPTIONS)["x"].shape
    except PackError as error:
        reasons = error.args
    else:
        reasons = shape == (frames, 156) and ("", "", "")
    assert reasons
    assert len(reasons) == 3, "value, rule and fix"


PIECES = [
    b"file,gloss,cat\n",
    b"a,0,0\n",
    b"b",
    b",",
    b'"',
    b"\0",
    b"\n",
    b"\xff",
    b"9",
    b"train/",
    b"\r",
    b"\xef\xbb\xbf",
]


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(pieces=st.lists(st.sampled_from(PIECES), max_size=12))
def test_a_list_of_any_bytes_is_rows_and_never_another_error(tmp_path, pieces):
    source = tmp_path / "raw"
    if not source.exists():
        clip(source / "train" / "a.npz", without=("X2048",))
        clip(source / "train" / "b.npz", seed=1, without=("X2048",))
    (source / TRAIN).write_bytes(b"".join(pieces))
    assert checked(source).rows


# -- the report


def test_a_report_shows_as_a_table_with_errors_first_and_many_of_a_kind_as_one(tmp_path):
    source = corpus(tmp_path / "raw", without=("meta",))
    with_value("X", 700)(source / "val" / "d.npz")
    report = checked(source)
    assert (report.errors, report.warnings) == (1, 3)
    clip(source / "train" / "e.npz", seed=5, without=("meta",))
    listed(source / TRAIN, "a,0,0", "b,1,1", "e,0,0")
    report = checked(source)
    assert (report.errors, report.warnings, len(report.table)) == (1, 4, 5)
    assert list(report.table.columns) == ["severity", "file", "key", "rule", "value", "fix"]
    text = str(report).splitlines()
    assert text[2].startswith("error     val/d.npz")
    assert text[3].startswith("warning   train/a.npz and 3 more")
    assert text[-1] == "5 clips, 5 with a label: 1 error and 4 warnings"
    html = report._repr_html_()
    assert "train/a.npz and 3 more" in html
    assert "1 error and 4 warnings" in html
    assert str(checked(corpus(tmp_path / "good"))) == "4 clips, 4 with a label: 0 errors and 0 warnings"


# -- real clips


@pytest.mark.real
@pytest.mark.skipif(not DATA, reason="NBTOOLS_REAL_DATA names no folder of real data")
@pytest.mark.parametrize("network", ["transformer", "gru"])
def test_the_six_original_clips_go_through_both_models_alone_and_together(network):
    folder = nb.stage(Path(DATA) / "fsl-clips.tar", progress=False)
    options = {"kp_key": "X", "feature_key": "X2048"}
    clips = [sign.read(path, options) for path in sorted(folder.glob("*.npz"))]
    columns = {name: Column("ragged", values.dtype.str, values.shape[1:]) for name, values in clips[0].items()}
    card = Card("sign", ["hello", "thanks"], {"categories": ["greeting"]}, columns, {})
    torch.manual_seed(0)
    plan = sign.Plan(network=network)
    model = sign.model(card, plan).eval()
    with torch.no_grad():
        together = model(sign.batch(collate(clips, columns), plan, None))
        for i, one in enumerate(clips):
            alone = model(sign.batch(collate([one], columns), plan, None))
            for logits, single in zip(together, alone, strict=True):
                assert torch.isfinite(logits).all()
                torch.testing.assert_close(logits[i], single[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize("needed", [False, True])
class TestReal:
    pytestmark = real

    def test_the_six_original_clips_pass_and_are_read(self, needed):
        folder = nb.stage(Path(DATA) / "fsl-clips.tar", progress=False)
        report = checked(folder, require_x2048=needed)
        assert (report.clips, report.errors) == (6, 0)
        assert [(row.severity, row.file, row.value) for row in report.rows] == [
            (WARNING, "labels.csv", "no labels.csv")
        ]
        options = {"kp_key": "X", "feature_key": "X2048"}
        for path in folder.glob("*.npz"):
            with np.load(path, allow_pickle=False) as raw:
                found = sign.read(path, options)
                for column, key in (("x", "X"), ("mask", "mask"), ("features", "X2048")):
                    np.testing.assert_array_equal(found[column], raw[key])

    def test_two_hundred_real_signs_are_packed(self, needed):
        source = nb.stage(Path(DATA) / "isl-keypoints.tar", progress=False)
        report = checked(source, require_x2048=needed)
        assert (report.clips, report.labelled, report.errors) == (200, 200, 200 * needed)
        if needed:
            with pytest.raises(PackError, match="0 of 200 files can be used"):
                packed(source, require_x2048=True)
        else:
            made = packed(source)
            assert (made.splits, len(made.bad)) == ({"train": 160, "val": 40, "test": 0}, 0)
            assert (len(made.classes), len(made.options["categories"])) == (10, 3)
            faces = made.arrays["mask"][:, 67:]
            assert not faces.any()
