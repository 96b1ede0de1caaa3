"""Folders and lists of segmentation: which label is which image's, the splits, a row for what cannot be used; classes
in all their forms, and masks that become indices into them."""

import numpy as np
import pytest
from acting import refused
from masks import NAMES, checked, corpus, ids, labelled, only, packed, pair, photo, sample, saved, sole, tree
from PIL import Image

from nbtools.errors import PackError
from nbtools.tasks.common.rules import ERROR, WARNING

pytestmark = pytest.mark.usefixtures("own_cache")
MISSING = "image and label of a line must exist"
PALETTE = Image.fromarray(ids())
PALETTE.putpalette((9, 9, 9, 200, 0, 0, 9, 9, 9))  # two ids have one colour: the index counts


@pytest.mark.parametrize(
    ("image", "label", "split"),
    [
        ("images/train/a.jpg", "labels/train/a.png", "train"),
        ("x/train/images/sub/\u00e9.bmp", "x/train/masks/sub/e\u0301.png", "train"),  # é, and a Mac's
        ("train/a.png", "trainannot/a.png", "train"),
        ("train_images/a.jpg", "train_masks/a.gif", "train"),
        ("shirts_train/images/a.jpg", "shirts_train/masks/a.png", "train"),
        ("images/validation/x/a.png", "annotations/validation/x/a.png", "val"),
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
    saved(source / "masks/train/1.png", ids())
    report = checked(source)
    assert {row.file: row.rule for row in report.rows} == {
        "images/train/alone.png": "an image must have a label",
        "labels/train/lone.png": "a label must have an image of its own",
        "images/train/0.png": "an image must have a label",  # next to 0.jpg
        "masks/train/1.png": "a label must have an image of its own",
    }
    assert "one with labels/train/1.png" in [row.value for row in report.rows]
    assert (report.ok, report.errors, packed(source).manifest["bad"]) == (False, 4, 4)


def test_a_folder_without_images_or_without_labels_is_refused(tmp_path):
    bare = "an image must have a label, got none of that name; name masks/ as images/ are, .* lines image,label"
    for said, files in {"no samples found": {"a.doc": "x"}, bare: {"a.png": photo()}}.items():
        refused(PackError, said, packed, tree(tmp_path / said[:5], files))


@pytest.mark.parametrize("label", [PALETTE, *map(Image.fromarray, (ids() > 0, *map(ids().astype, ("u1", "u2", "i4"))))])
def test_a_masks_value_is_its_id(tmp_path, label):
    source = labelled(tmp_path / "raw", label, "a.tif" if label.mode == "I" else "a.png")
    made = packed(source)
    assert (checked(source).rows, made.classes) == ([], ["class 0", "class 1", "class 2"])
    np.testing.assert_array_equal(sample(made, "images/a.png")["label"], np.asarray(label))


def test_unknown_ids_are_named_unless_they_are_ignored(tmp_path):
    label = ids().astype(np.uint16)
    label[0, :3], label[1, 0] = 7, 1000
    source = labelled(tmp_path / "raw", label)
    assert only(checked(source, classes=NAMES)).value == "labels/a.png: 7, 1000"
    assert packed(source, classes=NAMES, ignore=[7, 1000]).manifest["bad"] == 0
    with pytest.raises(PackError, match=r"each name must be used only once, got .* twice"):
        packed(source, classes=["ground", "shirt", "shirt"])


def test_a_mask_of_0_and_255_says_how_to_be_read_and_so_does_a_table_of_no_class(tmp_path):
    source = pair(tmp_path / "raw", photo(), np.where(ids() > 0, 255, 0).astype(np.uint8))
    refused(PackError, r"got 1 besides those ignored.* a mask of 0 and 255 .*255: 'object'", packed, source)
    row = only(checked(source, classes=["background", "object"]))
    assert (row.severity, row.file) == (WARNING, "class object")
    said = "only background has pixels, besides 255, which is ignored; give classes={0: 'background', 255: 'object'}"
    refused(PackError, said, packed, source, classes=["background", "object"])
    packed(source, classes=["background", "object"], ignore=255)
    for classes in ({0: "background", 255: "object"}, ["0:background", "255:object"], ("{0: 'b'", "255: 'o'}")):
        np.testing.assert_array_equal(sole(source, classes=classes)["label"], (ids() > 0).astype(np.uint8))
    grey = pair(tmp_path / "grey", photo(), np.array([0, 128, 255], np.uint8)[ids()])
    refused(PackError, "masks have 0, 128 and 255: are these shades .*; name the ids, classes={id: ", packed, grey)
    for classes in (saved(source / "classes.txt", ""), None):  # which is of the source too
        refused(PackError, "got 0 besides those ignored; give classes=", packed, source, classes=classes)


@pytest.mark.parametrize("ignore", [1, "shirt", [np.int64(1)]])
def test_ignored_classes_leave_no_gap_and_are_named_by_id_or_name(tmp_path, ignore):
    made = packed(corpus(tmp_path / "raw"), classes=tuple(NAMES), ignore=ignore)
    assert (made.classes, made.options["ids"]) == (["ground", "shoe"], [0, 2])
    np.testing.assert_array_equal(sample(made, "images/train/0.png")["label"], np.array([0, 255, 1], np.uint8)[ids()])
    assert "without a train pixel (hat): not learnable" in packed(tmp_path / "raw", classes=[*NAMES, "hat"]).remarks[0]


@pytest.mark.parametrize(
    ("text", "table"),
    [
        ("ground\nshirt\n\n", {0: "ground", 1: "shirt"}),
        ("id,name\n3,ground\n7, a shirt\n", {3: "ground", 7: "a shirt"}),
        ("3;ground\n7;shirt, red\n", {3: "ground", 7: "shirt, red"}),
        ("id name\n 3  ground\n12 long sleeve, red\n", {3: "ground", 12: "long sleeve, red"}),
    ],
)
def test_files_of_classes_are_read(tmp_path, text, table):
    path = saved(tmp_path / "names.txt", f"\ufeff{text}")
    source = pair(tmp_path / "raw", photo(), np.array([*table], np.uint8)[ids() % 2])
    made = packed(source, classes=path, val=0, test=0)
    assert dict(zip(made.options["ids"], made.classes, strict=True)) == table
    np.testing.assert_array_equal(made.sample(0)["label"], ids() % 2)
    saved(source / "classes.txt", path.read_text())
    assert packed(source, val=0, test=0).classes == made.classes, "of the source too"
