"""Folders and lists of segmentation: which label is which image's, the splits, and a row for what cannot be used."""

import numpy as np
import pytest
from masks import checked, corpus, ids, only, packed, photo, saved, tree

from nbtools.errors import PackError
from nbtools.tasks.common.report import ERROR

pytestmark = pytest.mark.usefixtures("own_cache")
ONE_LABEL = "an image must have one label and one split"


@pytest.mark.parametrize(
    ("image", "label", "split"),
    [
        ("images/train/a.jpg", "labels/train/a.png", "train"),
        ("train/images/a.jpg", "train/masks/a.png", "train"),
        ("x/images/sub/a.bmp", "x/masks/sub/a.png", "train"),
        ("train/a.png", "trainannot/a.png", "train"),
        ("train_images/a.jpg", "train_masks/a.gif", "train"),
        ("images/val/a.png", "masks/val/a.png", "val"),
        ("images/validation/x/a.png", "masks/validation/x/a.png", "val"),
        ("val_images/a.png", "val_masks/a.png", "val"),
        ("images_test/a.png", "masks_test/a.png", "test"),
    ],
)
def test_layouts_pair_images_with_labels_and_give_the_split(tmp_path, image, label, split):
    made = packed(tree(tmp_path / "raw", {image: photo(), label: ids()}), val=0, test=0)
    assert (made.names, made.splits[split]) == ([image], 1)
    np.testing.assert_array_equal(made.sample(0)["label"], ids())


@pytest.mark.parametrize(
    "lines",
    [
        "p/a.png,q/a.png\n",
        "\ufeffimage,label\r\np/a.png , q/a.png\r\n",
        '"p/a.png", "q/a.png"\n',
        "image;label;split\np\\a.png;q\\a.png;val\n",
        "./p/a.png\tq/a.png\n",
        "p/a.png q/a.png\n",
    ],
)
def test_lists_of_images_and_labels_are_read(tmp_path, lines):
    folder = tree(tmp_path / "raw", {"p/a.png": photo(), "q/a.png": ids(), "val.txt": lines})
    made = packed(folder)
    assert (made.names, made.splits["val"]) == (["p/a.png"], 1)
    assert checked(folder).rows == ()


def test_paths_of_a_list_may_start_at_any_folder_above_it_and_never_leave_the_source(tmp_path):
    source = tree(
        tmp_path / "deep", {"x/p/a.jpg": photo(), "x/q/a.png": ids(), "x/lists/of/val.txt": "p/a.jpg,q/a.png"}
    )
    made = packed(source)
    assert (made.names, made.splits["val"]) == (["x/p/a.jpg"], 1)
    saved(tmp_path / "secret.png", ids())
    with pytest.raises(PackError, match=r"the label of a line must exist, got \.\./secret\.png"):
        packed(tree(tmp_path / "raw", {"a.png": photo(), "train.txt": "a.png,../secret.png\n"}))


def test_lines_that_cannot_be_used_are_rows_with_their_numbers(tmp_path):
    files = {f"{folder}/{name}.png": make() for name in "ab" for folder, make in (("p", photo), ("q", ids))}
    lines = "p/a.png,q/a.png\np/b.png\np/b.png,q/none.png\np/a.png,q/b.png\np/a.png,q/a.png\n"
    folder = tree(tmp_path / "raw", {**files, "train.txt": lines})
    found = {row.file: (row.severity, row.rule) for row in checked(folder).rows}
    assert found == {
        "train.txt:2": (ERROR, "the label of a line must exist"),
        "train.txt:3": (ERROR, "the label of a line must exist"),
        "train.txt:4": (ERROR, ONE_LABEL),
        "p/b.png": (ERROR, "an image must have a label"),
        "q/b.png": (ERROR, "an image must have a label"),
    }
    assert set(packed(folder).bad.file) == set(found)
    saved(folder / "train.txt", "p/a.png,q/a.png\n")
    saved(folder / "pairs.txt", "p/a.png,q/a.png\n")
    assert packed(folder).splits["train"] == 1, "named twice, alike: nothing is wrong"
    tree(folder, {"p/val/c.png": photo(), "pairs.txt": "p/val/c.png,q/a.png\n"})
    assert packed(folder).splits["val"] == 1, "where a list gives no split, the folder's"
    saved(folder / "train.txt", b"p/a.png,q/a.png\n\xb2,\n")
    row = next(row for row in checked(corpus(folder)).rows if row.file == "train.txt")
    assert (row.severity, row.rule) == (ERROR, "the file must be UTF-8 text")


def test_images_without_labels_labels_without_images_and_two_of_one_name_are_rows(tmp_path):
    source = corpus(tmp_path / "raw")
    tree(source, {"images/train/alone.png": photo(), "labels/train/lone.png": ids(), "images/train/0.jpg": photo()})
    report = checked(source)
    assert {(row.severity, row.file, row.key) for row in report.rows} == {
        (ERROR, "images/train/alone.png", "label"),
        (ERROR, "labels/train/lone.png", "image"),
        (ERROR, "images/train/0.png", "image"),  # next to 0.jpg
    }
    assert (report.ok, report.errors, packed(source).manifest["bad"]) == (False, 3, 3)
    with pytest.raises(PackError, match=r"a\.png: images must differ .*got a\.jpg next to it; rename"):
        packed(tree(tmp_path / "both", {"a.jpg": photo(), "a.png": ids()}))


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.doc": "x"}, r"no images .*Give the folder above images/"),
        ({"a.png": photo()}, r"1 image and no label: .*train\.txt"),
    ],
)
def test_a_folder_without_images_or_without_labels_is_refused(tmp_path, files, message):
    with pytest.raises(PackError, match=message):
        packed(tree(tmp_path / "raw", files))


def test_folders_are_read_through_links_and_hidden_ones_are_not(tmp_path):
    corpus(tmp_path / "real")
    source = tree(tmp_path / "raw", {"__MACOSX/images/train/._0.png": ids(), ".thumbs/images/0.png": photo()})
    for name in ("images", "labels"):
        (source / name).symlink_to(tmp_path / "real" / name)
    (tmp_path / "real" / "images" / "round").symlink_to(source)
    assert len(packed(source)) == 4
    (tmp_path / "real" / "images" / "train" / "gone.png").symlink_to(tmp_path / "nowhere")
    row = only(checked(source))
    assert (row.file, row.value) == ("images/train/gone.png", "none")
