"""Classes in all their forms, and masks that become indices into them."""

import numpy as np
import pytest
from masks import NAMES, checked, corpus, ids, labelled, only, packed, pair, photo, sample, saved, sole
from PIL import Image

from nbtools.errors import PackError
from nbtools.tasks.common.rules import WARNING

pytestmark = pytest.mark.usefixtures("own_cache")
PALETTE = Image.fromarray(ids(), "P")
PALETTE.putpalette((9, 9, 9, 200, 0, 0, 9, 9, 9))  # two ids have one colour: the index counts


@pytest.mark.parametrize("label", [PALETTE, *(Image.fromarray(ids().astype(kind)) for kind in ("u1", "u2", "i4"))])
def test_a_masks_value_is_its_id(tmp_path, label):
    source = labelled(tmp_path / "raw", label, "a.tif" if label.mode == "I" else "a.png")
    assert checked(source).rows == []
    np.testing.assert_array_equal(sample(packed(source), "images/a.png")["label"], ids())


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
    with pytest.raises(PackError, match=r"got 1 besides those ignored.* a mask of 0 and 255 .*255: 'object'"):
        packed(source)
    row = only(checked(source, classes=["background", "object"]))
    assert (row.severity, row.file) == (WARNING, "class object")
    label = sole(source, classes={0: "background", 255: "object"})["label"]
    np.testing.assert_array_equal(label, (ids() > 0).astype(np.uint8))
    with pytest.raises(PackError, match="got 0 besides those ignored; give classes="):
        packed(source, classes=saved(source / "classes.txt", ""))
    with pytest.raises(PackError, match="got 0 besides those ignored; give classes="):
        packed(source)


@pytest.mark.parametrize("ignore", [1, "shirt", [np.int64(1)]])
def test_ignored_classes_leave_no_gap_and_are_named_by_id_or_name(tmp_path, ignore):
    made = packed(corpus(tmp_path / "raw"), classes=tuple(NAMES), ignore=ignore)
    assert (made.classes, made.options["ids"]) == (["ground", "shoe"], [0, 2])
    expected = np.array([0, 255, 1], np.uint8)[ids()]
    np.testing.assert_array_equal(sample(made, "images/train/0.png")["label"], expected)


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
