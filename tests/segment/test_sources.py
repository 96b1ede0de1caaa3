"""Folders and lists of segmentation: which label is which image's, the splits, and a row for what cannot be used."""

import numpy as np
import pytest
from masks import checked, corpus, ids, packed, photo, saved, tree

from nbtools.errors import PackError
from nbtools.tasks.common.rules import ERROR

pytestmark = pytest.mark.usefixtures("own_cache")
MISSING = "image and label of a line must exist"


@pytest.mark.parametrize(
    ("image", "label", "split"),
    [
        ("images/train/a.jpg", "labels/train/a.png", "train"),
        ("x/train/images/sub/\u00e9.bmp", "x/train/masks/sub/e\u0301.png", "train"),  # é, and a Mac's
        ("train/a.png", "trainannot/a.png", "train"),
        ("train_images/a.jpg", "train_masks/a.gif", "train"),
        ("shirts_train/images/a.jpg", "shirts_train/masks/a.png", "train"),
        ("images/validation/x/a.png", "annotations/validation/x/a.png", "val"),
        ("images/validation/x/a.png", "masks/validation/x/a.png", "val"),
        ("images_test/a.png", "masks_test/a.png", "test"),
    ],
)
def test_layouts_pair_images_with_labels_and_give_the_split(tmp_path, image, label, split):
    made = packed(tree(tmp_path / "raw", {image: photo(), label: ids()}))
    assert (made.names, made.splits[split]) == ([image], 1)
    np.testing.assert_array_equal(made.sample(0)["label"], ids())


@pytest.mark.parametrize("lines", ["p/É.png,q/É.png\n", "image;label;split\np\\E\u0301.png;./q\\E\u0301.png;val\n"])
def test_lists_of_images_and_labels_are_read_however_they_write_an_accent(tmp_path, lines):
    folder = tree(tmp_path / "raw", {"p/E\u0301.png": photo(), "q/É.png": ids(), "val.txt": lines})
    made = packed(folder)
    assert (made.names, made.splits["val"]) == (["p/E\u0301.png"], 1)
    assert checked(folder).rows == []


def test_paths_of_a_list_may_start_at_any_folder_above_it_or_elsewhere_and_never_leave_the_source(tmp_path):
    listed = {"x/p/a.jpg": photo(), "x/q/a.png": ids()}
    for line in ("p/a.jpg,q/a.png", "/home/me/set/p/a.jpg,C:\\set\\x\\q\\a.png"):
        made = packed(tree(tmp_path / "deep", {**listed, "x/lists/of/val.txt": line}))
        assert (made.names, made.splits["val"]) == (["x/p/a.jpg"], 1)
    saved(tmp_path / "secret.png", ids())
    with pytest.raises(PackError, match=rf"{MISSING}, got a\.png,\.\./secret\.png"):
        packed(tree(tmp_path / "raw", {"a.png": photo(), "train.txt": "a.png,../secret.png\n"}))


def test_lines_that_cannot_be_used_are_rows_with_their_numbers(tmp_path):
    files = {f"{folder}/{name}.png": make() for name in "ab" for folder, make in (("p", photo), ("q", ids))}
    lines = "p/b.png\np/a.png,q/a.png\np/b.png,q/none.png\np/a.png,q/b.png\np/a.png,q/a.png\n"
    folder = tree(tmp_path / "raw", {**files, "train.txt": lines})
    assert {row.file: (row.severity, row.rule) for row in checked(folder).rows} == {
        "train.txt:1": (ERROR, MISSING),
        "train.txt:3": (ERROR, MISSING),
        "train.txt:4": (ERROR, "an image must have one label and one split"),
        "p/b.png": (ERROR, "an image must have a label"),
        "q/b.png": (ERROR, "an image must have a label"),
    }
    assert len(packed(folder).bad) == 5


def test_lists_of_images_alone_give_the_splits_of_these_and_leave_out_the_others(tmp_path):
    both, given = (("images", photo), ("masks", ids)), (*range(5), "test/5")
    files = {f"{folder}/{i}.png": make() for i in given for folder, make in both}
    lists = {"test.txt": "0\n", "lists/val.txt": "/home/me/images/1.png\n7\n", "train.txt": "images\\2.png\n3\n0\n"}
    others = {"train/log.csv": "4\n", "train_val.txt": "0\n1\n2\n", "train_log.txt": "4\nwas bad\nagain\n"}
    made = packed(folder := tree(tmp_path / "raw", {**files, **lists, **others}))
    assert ["".join(made.names[i][-5] for i in made.ids(split)) for split in made.splits] == ["23", "1", "05"]
    bad = ["images/4.png", "lists/val.txt:2", "masks/4.png", "train.txt:3"]
    assert sorted(row.file for row in checked(folder).rows) == bad


def test_images_without_labels_labels_without_images_and_two_of_one_name_are_rows(tmp_path):
    source = corpus(tmp_path / "raw")
    tree(source, {"images/train/alone.png": photo(), "labels/train/lone.png": ids(), "images/train/0.jpg": photo()})
    report = checked(source)
    assert {row.file: row.rule for row in report.rows} == {
        "images/train/alone.png": "an image must have a label",
        "labels/train/lone.png": "a label must have an image",
        "images/train/0.png": "an image must have a label",  # next to 0.jpg
    }
    assert (report.ok, report.errors, packed(source).manifest["bad"]) == (False, 3, 3)


def test_a_folder_without_images_or_without_labels_is_refused(tmp_path):
    for said, files in {"no samples found": {"a.doc": "x"}, "an image must have a label": {"a.png": photo()}}.items():
        with pytest.raises(PackError, match=said):
            packed(tree(tmp_path / said, files))
