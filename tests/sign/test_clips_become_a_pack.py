"""Clips of signs, a demo's too, become a pack; a table says what is wrong with them, and a skeleton shows them."""

import json
import re
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from acting import refused

import nbtools as nb
from nbtools.data.pack import Column
from nbtools.errors import PackError
from nbtools.tasks import sign
from nbtools.tasks.common.rules import ERROR, WARNING
from nbtools.tasks.sign.visualize import skeleton
from tests.archives import put

T = 5
META = {"video": "10.MOV", "order": "pose25,left_hand21,right_hand21,face11"}
KEYPOINTS = {"kp_key": "X", "feature_key": None}
FIRST = "file,gloss,cat"
NAMES = ("train/a", "train/b", "val/c", "val/d")
packed = partial(sign.pack, progress=False)
checked = partial(nb.validate, sign, progress=False)
pytestmark = pytest.mark.usefixtures("own_cache")


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
    found = {**arrays(seed, frames), **changed}
    np.savez_compressed(put(path), **{key: value for key, value in found.items() if key not in without})
    return path


def listed(path: Path, *rows: str, head: str = FIRST) -> None:
    put(path, "\n".join([head, *rows, ""]).encode())


def corpus(folder: Path, **more) -> Path:
    for k, name in enumerate(NAMES):
        clip(folder / f"{name}.npz", seed=k, frames=T + k, **more)
    listed(folder / "train" / "labels.csv", "a,0,0", "b,1,1")
    listed(folder / "val" / "labels.csv", "c,0,0", "d,1,1")
    return folder


def test_clips_in_the_exact_format_pass_and_are_packed_as_they_are(tmp_path):
    source = corpus(tmp_path / "raw")
    report = checked(source, require_x2048=True)
    assert (report.about, report.rows, report.ok) == ("4 clips, 4 with a label", [], True)
    made = packed(source)
    assert made.columns == {
        "x": Column("ragged", "<f4", (156,)),
        "mask": Column("ragged", "|b1", (78,)),
        "features": Column("ragged", "<f4", (2048,)),
        "label": Column("fixed", "<i8", (2,)),
    }
    assert (made.splits, made.card.bucket_by) == ({"train": 2, "val": 2, "test": 0}, "x")
    for k, name in enumerate(NAMES):
        sample, raw = made.sample(made.names.index(f"{name}.npz")), arrays(k, T + k)
        for column, key in (("x", "X"), ("mask", "mask"), ("features", "X2048")):
            np.testing.assert_array_equal(sample[column], raw[key])
        assert sample["label"].tolist() == [k % 2, k % 2]


def test_ids_are_the_classes_until_a_reference_names_them(tmp_path):
    source = corpus(tmp_path / "raw", without=("X2048",))
    made = packed(source)
    assert (made.classes, made.options["categories"]) == (["0", "1"], ["0", "1"])
    rows = ("0,HELLO,0,GREETING", "1,RED,1,COLOR", "2,BLUE,1,COLOR")
    listed(source / "labels_reference.csv", *rows, head="gloss_id,label,cat_id,category")
    named = packed(source)
    assert (named.classes, named.options["categories"]) == (["HELLO", "RED", "BLUE"], ["GREETING", "COLOR"])
    listed(source / "val" / "labels.csv", "c,0,0", "d,4,1")
    assert packed(source).classes == ["HELLO", "RED", "BLUE", "3", "4"]
    assert len((wide := packed(source, glosses=105, categories=10)).classes) == 105
    assert "103 classes without a train sample (BLUE, 3, 4, 5, 6 …): not learnable" in wide.remarks
    refused(PackError, "glosses must be above the largest id, 4", packed, source, glosses=3)
    refused(PackError, "id 0 must be 'a', and the source calls it 'HELLO'", packed, source, glosses=list("abcde"))


def test_a_point_is_seen_as_the_mask_says_and_without_one_where_it_is_not_zero(tmp_path):
    bare = packed(corpus(tmp_path / "bare", without=("mask", "timestamps_ms", "meta", "X2048")))
    for k in range(4):
        sample = bare.sample(k)
        np.testing.assert_array_equal(sample["mask"], (sample["x"].reshape(-1, 78, 2) != 0).any(2))
        assert 0 < sample["mask"].mean() < 1
    seen, x = np.arange(78) == np.full((T, 1), 3), np.full((T, 156), 0.5, np.float32)
    x[1, 8:12] = np.nan, np.inf, -1, 1.7  # of points 4 and 5
    path = clip(tmp_path / "filled" / "a.npz", X=x, mask=seen)
    filled = sign.read(path, KEYPOINTS)
    np.testing.assert_array_equal(filled["x"], np.where(x == 0.5, 0.5, 0), "a filled-in point keeps its coordinates")
    np.testing.assert_array_equal(filled["mask"], seen)
    assert [row.file for row in checked(path.parent).rows] == ["labels.csv"]


def test_a_clip_may_lack_keypoints_or_features_and_those_are_packed_that_some_clip_has(tmp_path):
    source = corpus(tmp_path / "raw")
    assert "features" not in packed(source, feature_key=None).columns
    clip(source / "train" / "a.npz", without=("X2048",))
    clip(source / "val" / "d.npz", without=("X", "mask"))
    made = packed(source)
    assert (len(made), len(made.bad), made.options["kp_key"], made.options["feature_key"]) == (4, 0, "X", "X2048")
    lengths = [[len(made.sample(i)[column]) for i in range(4)] for column in ("x", "mask", "features")]
    assert lengths == [[T, 6, 7, 0], [T, 6, 7, 0], [0, 6, 7, T]]
    assert checked(source).rows == []
    clip(source / "val" / "d.npz")
    assert [row.file for row in checked(source, require_x2048=True).rows] == ["train/a.npz"]


def test_the_keys_are_chosen(tmp_path):
    source, made = tmp_path / "raw", arrays()
    for name in "ab":
        clip(source / f"{name}.npz", X=made["X2048"], kp=made["X"], without=("X2048",))
    listed(source / "labels.csv", "a,0,0", "b,0,0")
    both = packed(source, kp_key="kp", feature_key="X")
    np.testing.assert_array_equal(both.sample(0)["x"], made["X"])
    np.testing.assert_array_equal(both.sample(0)["features"], made["X2048"])
    assert checked(source, kp_key=None, feature_key="X").errors == 0
    [row, _] = checked(source).rows
    assert (row.rule, row.value) == ("X must be (T, 156)", "(5, 2048)")
    with pytest.raises(PackError, match=r"no clip has kp_key 'points'; they have X, kp, mask, meta, timestamps_ms"):
        packed(source, kp_key="points", feature_key="X")


def test_clips_without_labels_are_validated_and_read_and_a_pack_says_what_can_be_done(tmp_path):
    path = clip(tmp_path / "raw" / "a.npz")
    report = checked(path.parent)
    assert (report.ok, [row.file for row in report.rows]) == (True, ["labels.csv"])
    np.testing.assert_array_equal(sign.read(path, KEYPOINTS)["x"], arrays()["X"])
    with pytest.raises(PackError, match=r"1 clip and no label.*write labels\.csv with the columns file,gloss,cat"):
        packed(tmp_path / "raw")
    path.rename(tmp_path / "raw" / "a.txt")
    refused(PackError, r"no clips \(\.npz\); it has a\.txt", packed, tmp_path / "raw")


def test_the_columns_of_a_list_stand_in_any_order_among_others(tmp_path):
    source = corpus(tmp_path / "raw", without=("X2048",))
    (source / "train" / "b.npz").rename(source / "train" / "e\u0301.npz")  # é, as a Mac writes it
    lines = (" Signer,CAT,file,gloss,occluded", "S0,0.0,./a.npz,0,1", "", 'S1,1.0,"é", 1.0 ,0', "S0,0,a,0,1")
    (source / "train" / "labels.csv").write_text("\n".join(lines), "utf-8-sig")
    assert checked(source).rows == []
    assert packed(source).sample(1)["label"].tolist() == [1, 1]
    listed(source / "labels.csv", "C0/a.npz,0,0")  # the guide's list of all clips, where these have theirs beside them
    [row] = checked(source).rows
    assert (row.severity, row.file, row.value) == (WARNING, "labels.csv:2", "C0/a.npz, of 0 clips")


def test_clips_of_one_signer_stay_in_one_split(tmp_path):
    paths = [clip(tmp_path / "raw" / f"{i:02}.npz", i, without=("X2048",)) for i in range(24)]
    rows = [f"{path.stem},0,0,S{i % 6}" for i, path in enumerate(paths)]
    listed(tmp_path / "raw" / "labels.csv", *rows, head=f"{FIRST},Signer")
    made = packed(tmp_path / "raw", val=0.3, test=0.3)
    signers = [{int(made.names[i][:2]) % 6 for i in made.ids(split)} for split in made.splits]
    assert (all(signers), sorted(chain(*signers))) == (True, [*range(6)])


@pytest.mark.parametrize("folder", ["FSL105_{}/", ""])
def test_one_list_above_the_folders_names_clips_by_an_end_of_their_path(tmp_path, folder):
    source = corpus(tmp_path / "raw", without=("X2048",))
    for split in ("train", "val"):
        (source / split / "labels.csv").unlink()
        (source / split).rename(source / f"FSL105_{split}")
    train, val = folder.format("train"), folder.format("val")
    listed(source / "labels.csv", f"{train}a,0,0", f"{train}b,1,1", f"{val}c,0,0", f"{val}d,1,1")
    listed(source / "history.csv", "1,0.5,0.3", head="epoch,train_loss,val_loss")
    assert checked(source).rows == []
    made = packed(source)
    assert made.splits == {"train": 2, "val": 2, "test": 0}
    assert [made.sample(i)["label"].tolist() for i in range(4)] == [[0, 0], [1, 1], [0, 0], [1, 1]]
    (source / "labels.csv").rename(source / "val_labels.csv")
    assert packed(source).splits["val"] == 4, "the name of a list comes first"
    (source / "val_labels.csv").rename(source / "labels.csv")
    clip(source / "FSL105_val" / "a.npz", seed=9)
    errors = {row.file: row.value for row in checked(source).rows}
    assert ("labels.csv:2" in errors) == (folder == ""), "a name that stands for two clips is refused"


LISTS = {  # (lines, file of the row, part of its rule, of its value)
    "a column is missing": (("file,gloss", "a,0", "b,1"), "labels.csv", "the columns file, gloss, cat", "file,gloss"),
    "an id is a name": ((FIRST, "b,1,1", "a,0,red"), "labels.csv:3", "cat must be a whole number from 0", "red"),
    "its clip is not there": ((FIRST, "a,0,0", "b,1,1", "A,1,1"), "labels.csv:4", "must name one clip", "A"),
    "a clip has no row": ((FIRST, "b,1,1"), "a.npz", "a clip must have a label", "no usable row"),
    "two rows contradict": ((FIRST, "a,0,0", "b,1,1", "a,1,1"), "labels.csv:4", "labels.csv:2 says 0, 0", "1, 1"),
}


def test_a_damaged_list_gives_its_row_and_each_clip_without_a_label_has_one(tmp_path):
    source, causes = tmp_path / "raw", {}
    for i, (kind, (lines, file, *parts)) in enumerate(LISTS.items()):
        for k, name in enumerate("ab"):
            clip(source / f"{i:02}" / f"{name}.npz", seed=2 * i + k, frames=1, without=("X2048",))
        (source / f"{i:02}" / "labels.csv").write_bytes("\n".join(lines).encode())
        causes[f"{i:02}/{file}"] = (kind, *parts)
    report = checked(source)
    for file, (kind, rule, value) in causes.items():
        [row] = [row for row in report.rows if row.file == file]
        assert (row.severity, rule in row.rule, value in row.value, bool(row.fix)) == (ERROR, True, True, True), kind
    assert {row.rule for row in report.rows if row.file not in causes} == {"a clip must have a label"}
    made = packed(source)
    assert sorted(made.bad["file"]) == sorted(row.file for row in report.rows)
    assert sorted(made.names) == ["01/b.npz", "02/a.npz", "02/b.npz", "03/b.npz", "04/b.npz"]


def changed(**arrays_: Any):
    return lambda path: clip(path, **arrays_)


def with_value(value: float):
    x = arrays()["X"]
    x[2, 7] = value
    return changed(X=x)


X, MASK, TIMES = (arrays()[key] for key in ("X", "mask", "timestamps_ms"))
WARNED = {  # rule → (damage, what came)
    "a clip should have mask": (changed(without=("mask",)), "X, "),
    "a clip should have meta": (changed(without=("meta",)), "X, "),
    "the Transformer reads at most 3000 frames": (lambda path: clip(path, frames=3001, without=("X2048",)), "3001"),
    "X should be float32": (changed(X=X.astype("f8")), "float64"),
    "coordinates must be in [0, 1]": (with_value(1.25), "frame 2 has 1.25"),
    "mask should be bool": (changed(mask=MASK.astype("u1")), "uint8"),
}
REFUSED = {
    "a clip must have X": (changed(without=("X",)), "mask, t"),
    "X must be (T, 156)": (changed(X=np.zeros((T, 178), "f4")), "(5, 178)"),
    "X must be float32": (changed(X=(X > 0).astype(int)), "int64"),
    "X must be finite numbers": (with_value(-np.inf), "frame 2 has -inf"),
    "coordinates must be in [0, 1]": (with_value(-0.75), "frame 2 has -0.75"),
    "X must have frames": (lambda path: clip(path, frames=0), "none"),
    "mask must be (5, 78)": (changed(mask=MASK[1:]), "(4, 78)"),
    "a clip must show a point": (changed(mask=MASK & False), "none"),
    "timestamps_ms must be (5)": (changed(timestamps_ms=TIMES[1:]), "(4,)"),
    "times must increase": (changed(timestamps_ms=TIMES[::-1]), "frame 0 has 133"),
    "a clip must be a whole .npz archive": (changed(X=X.astype(object)), "Object arrays"),
    "a clip must be a whole": (lambda path: path.write_bytes(b"<!DOCTYPE>"), "not a zip file"),
}


@pytest.mark.parametrize(("severity", "kinds"), [(WARNING, WARNED), (ERROR, REFUSED)])
def test_a_damaged_clip_gives_its_row_and_no_other(tmp_path, severity, kinds):
    source = tmp_path / "raw"
    for i, (damage, _) in enumerate(kinds.values()):
        damage(clip(source / f"{i:02}.npz", without=("X2048",)))
    clip(source / "99.npz", seed=1, frames=7)
    listed(source / "labels.csv", *(f"{path.stem},0,0" for path in sorted(source.iterdir())))
    rows = checked(source, feature_key=None).rows
    assert [row.file for row in rows] == [f"{i:02}.npz" for i in range(len(kinds))]
    for row, (rule, (_, value)) in zip(rows, kinds.items(), strict=True):
        assert (row.severity, rule in row.rule, value in row.value, bool(row.fix)) == (severity, True, True, True), row
    made = packed(source, feature_key=None)
    wrong = [row[:4] for row in rows if severity == ERROR]
    assert list(made.bad.itertuples(index=False, name=None)) == wrong
    assert len(made) == len(kinds) + 1 - len(wrong)


def test_demo_clips_are_valid_val_signers_never_train_and_every_gloss_comes_equally_often(tmp_path):
    clips = sign.demo(tmp_path, 60, glosses=4, categories=2, frames=(10, 20), features=True)
    report, made = checked(clips, require_x2048=True), packed(clips)
    assert (report.about, report.rows) == ("60 clips, 60 with a label", [])
    signers: dict[str, list[str]] = {"train": [], "val": []}
    for path in clips.glob("*/*.npz"):
        with np.load(path) as file:
            signers[path.parent.name] += re.findall(r"signer (\d+)", json.loads(file["meta"].item())["video"])
    assert set(signers["train"]).isdisjoint(signers["val"])
    assert {split: len(names) for split, names in signers.items()} == {"train": 50, "val": 10}
    assert made.splits == {"train": 50, "val": 10, "test": 0}
    assert {*np.bincount(made.arrays["label"][made.ids("train"), 0])} == {12, 13}
    assert made.options["categories"] == ["greeting", "survival"]


def test_what_is_not_seen_is_not_drawn_and_no_limb_leads_there():
    """An elbow at the zero of a missing point would draw a line to the corner of the picture."""
    seen, points = np.ones(78, bool), np.random.default_rng(0).uniform(0.3, 0.7, (78, 2))
    assert not np.asarray(skeleton(points, ~seen, 60)).any()
    points[13] = 0
    assert np.asarray(skeleton(points, seen, 200))[:30, :30].any()
    seen[13] = False
    assert not np.asarray(skeleton(points, seen, 200))[:30, :30].any()
