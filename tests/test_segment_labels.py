"""Class tables in all their forms, and label images that become indices into them."""

import numpy as np
import pytest
from masks import NAMES, H, W, checked, corpus, ids, labelled, only, packed, pair, photo, sample, saved, sole
from PIL import Image

from nbtools.errors import PackError
from nbtools.tasks.common.report import ERROR, WARNING

pytestmark = pytest.mark.usefixtures("own_cache")


def palette_image(label):
    """Two ids have one colour: the index counts."""
    image = Image.frombytes("P", label.shape[::-1], label.tobytes())
    image.putpalette((9, 9, 9, 200, 0, 0, 9, 9, 9))
    return image


def label_of_a(source, **more):
    return sample(packed(source, **more), "images/a.png")["label"]


# Label images


@pytest.mark.parametrize(
    "label",
    [palette_image(ids()), *(Image.fromarray(ids().astype(kind)) for kind in (np.uint8, np.uint16, np.int32))],
    ids=["palette", "8 bits", "16 bits", "32 bits"],
)
def test_a_labels_value_is_its_id(tmp_path, label):
    source = labelled(tmp_path / "raw", label, "a.tif" if label.mode == "I" else "a.png")
    assert checked(source).rows == ()
    np.testing.assert_array_equal(label_of_a(source), ids())


@pytest.mark.parametrize(("kind", "other"), [(np.uint8, 9), (np.uint16, 1000)])
def test_unknown_ids_are_named_with_their_pixels_unless_they_are_ignored(tmp_path, kind, other):
    label = ids().astype(kind)
    label[0, :3], label[1, 0] = 7, other
    source = labelled(tmp_path / "raw", label)
    assert only(checked(source, classes=NAMES)).value == f"7 (3 pixels), {other} (1 pixel)"
    assert packed(source, classes=NAMES, ignore=[7, other]).manifest["bad"] == 0


@pytest.mark.parametrize(
    ("label", "name", "value"),
    [
        (np.dstack([ids(), ids(), ids() + 1]), "a.png", "mode RGB"),
        (np.dstack([ids(), np.full((H, W), 100, np.uint8)]), "a.png", "mode LA"),
        (ids(), "a.jpg", "JPEG"),
        (ids().astype(np.float32), "a.tif", "mode F"),
    ],
    ids=["colours", "transparent", "JPEG", "floats"],
)
def test_a_label_without_ids_is_left_out_with_a_row(tmp_path, label, name, value):
    source = labelled(tmp_path / "raw", label, name)
    row = only(checked(source, classes=NAMES))
    assert (row.severity, row.file, row.value) == (ERROR, f"labels/{name}", value)
    assert packed(source, classes=NAMES).names == ["images/b.png"]


def test_a_mask_of_0_and_255_says_how_to_be_read(tmp_path):
    source = pair(tmp_path / "raw", photo(), np.where(ids() > 0, 255, 0).astype(np.uint8))
    with pytest.raises(PackError, match=r"1 different ids besides 255.* a mask of 0 and 255 .*255: 'object'"):
        packed(source)
    row = only(checked(source, classes=["background", "object"]))
    assert (row.severity, row.value) == (WARNING, "1 object: none")
    pictures = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64)
    with pytest.raises(PackError, match=r"4095 different ids.*2 to 254"):
        packed(pair(tmp_path / "pictures", photo(0, 64, 64), pictures))
    for classes in ({0: "background", 255: "object"}, saved(tmp_path / "two.txt", "0,background\n255,object\n")):
        np.testing.assert_array_equal(sole(source, classes=classes)["label"], (ids() > 0).astype(np.uint8))


# Class tables


@pytest.mark.parametrize(
    ("text", "table"),
    [
        ("ground\nshirt\n\n", [[0, "ground", None], [1, "shirt", None]]),
        ("id,name\n3,ground\n7, a shirt\n", [[3, "ground", None], [7, "a shirt", None]]),
        ("0,ground,0,0,0\n1,shirt,255,0,9", [[0, "ground", [0, 0, 0]], [1, "shirt", [255, 0, 9]]]),
        ("id;name\n3;ground\n7;shirt, red\n", [[3, "ground", None], [7, "shirt, red", None]]),
        ("0\tground\n1\ta shirt\n", [[0, "ground", None], [1, "a shirt", None]]),
        ('0 ground\n1 "a shirt"\n', [[0, "ground", None], [1, "a shirt", None]]),
        ("# comment\nbg\nshirt, red\n", [[0, "bg", None], [1, "shirt, red", None]]),
        ("# comment\nbg\nshirt\n", [[0, "bg", None], [1, "shirt", None]]),
    ],
)
def test_files_of_classes_are_read(tmp_path, text, table):
    path, label = saved(tmp_path / "names.txt", f"\ufeff{text}"), ids() % 2
    label = np.array([one[0] for one in table], np.uint8)[label]
    made = packed(pair(tmp_path / "raw", photo(), label), classes=path, val=0, test=0)
    assert made.options["table"] == [*table, [255, "", None]]
    np.testing.assert_array_equal(made.sample(0)["label"], ids() % 2)


def test_ignored_classes_leave_no_gap_and_are_named_by_id_or_name(tmp_path):
    source = corpus(tmp_path / "raw")
    for ignore in (1, "shirt", (1, "shirt"), [np.int64(1)]):
        made = packed(source, classes=tuple(NAMES), ignore=ignore)
        assert (made.classes, made.options["ids"], made.options["ignored"]) == (["ground", "shoe"], [0, 2], [1, 255])
        expected = np.array([0, 255, 1], np.uint8)[ids()]
        np.testing.assert_array_equal(sample(made, "images/train/0.png")["label"], expected)
    assert packed(source, classes={np.uint8(k): name for k, name in enumerate(NAMES)}).classes == NAMES


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("0,ground\n0,shirt\n1,shoe\n", "each id must be used only once, got 0 twice"),
        ("0,ground\n1,ground\n2,shoe\n", "each name must be used only once, got 'ground' twice"),
        ("0,ground,0,0,0\n1,shirt,0,256,0\n", r"classes\.txt:2: a colour .* from 0 to 255, got 0, 256, 0"),
        ("0,ground\nshirt\n", r"classes\.txt:2: .* got 'shirt'"),
    ],
)
def test_class_tables_that_are_ambiguous_are_refused(tmp_path, lines, message):
    source = corpus(tmp_path / "raw")
    saved(source / "classes.txt", lines)
    with pytest.raises(PackError, match=message):
        packed(source)
