"""Images with labels become a pack of one size, with a class table and distances to the class boundary; and a row for
each file that cannot be used."""

import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from masks import (
    NAMES,
    H,
    W,
    checked,
    corpus,
    ids,
    labelled,
    only,
    packed,
    pair,
    photo,
    sample,
    saved,
    sole,
    xml,
)
from PIL import Image

from nbtools.data import open_feed
from nbtools.errors import PackError
from nbtools.tasks import segment
from nbtools.tasks.common.report import ERROR
from nbtools.train import Plan

pytestmark = pytest.mark.usefixtures("own_cache")
DATA = os.environ.get("NBTOOLS_REAL_DATA", "")


def exif(turn):
    found = Image.Exif()
    found[0x0112] = turn
    return found


# The pack


def test_images_and_labels_of_one_size_are_packed_unchanged(tmp_path):
    made = packed(corpus(tmp_path / "raw"))
    columns = {name: (column.dtype, column.shape) for name, column in made.columns.items()}
    assert columns == {"image": ("|u1", (H, W, 3)), "label": ("|u1", (H, W)), "distance": ("|u1", (H, W))}
    assert (made.splits, made.classes) == ({"train": 2, "val": 1, "test": 1}, ["class 0", "class 1", "class 2"])
    assert {name: made.options[name] for name in ("size", "ids", "ignored")} == {
        "size": [H, W],
        "ids": [0, 1, 2],
        "ignored": [255],
    }
    for k, split in enumerate(("train", "train", "val", "test")):
        found = sample(made, f"images/{split}/{k}.png")
        np.testing.assert_array_equal(found["image"], photo(k))
        np.testing.assert_array_equal(found["label"], ids(k))
    train = np.bincount(np.concatenate([ids(k).ravel() for k in (0, 1)]))
    assert made.card.counts == {"pixels": train.tolist()}


def test_the_source_files_give_the_packs_values_also_in_another_process(tmp_path):
    source = corpus(tmp_path / "raw")
    xml(source / "drawn", '<polygon label="shirt" points="4,4;30.5,7;20,31"/>', "ground shirt shoe")
    made = packed(source, size=(40, 40), classes=NAMES)
    assert len(made) == 5
    raw = pickle.loads(pickle.dumps(made.raw))
    [batch] = list(open_feed(made, Plan(feed="workers", workers=1, batch_size=5), torch.device("cpu"))([np.arange(5)]))
    for i in range(5):
        for column, value in made.sample(i).items():
            np.testing.assert_array_equal(raw[i][column], value)
            np.testing.assert_array_equal(batch[column][i].numpy(), value)


@pytest.mark.parametrize("more", [{}, {"size": 40}, {"size": 32, "channels": 4}])
def test_a_prediction_reads_an_image_as_the_pack_did(tmp_path, more):
    source, large = corpus(tmp_path / "raw"), 4 if more else 1
    saved(source / "images/val/9.jpg", photo(9, large * H, large * W), exif=exif(3))
    saved(source / "labels/val/9.png", ids(9, large * H, large * W))
    made = packed(source, classes=NAMES, **more)
    assert len(made) == 5
    for name in made.names:
        np.testing.assert_array_equal(segment.read(source / name, made.options)["image"], sample(made, name)["image"])


# Sizes


def test_images_of_many_sizes_are_scaled_to_fit_and_the_rest_is_ignored(tmp_path):
    for name, height, width in (("a", 60, 120), ("b", 120, 60)):
        saved(tmp_path / "raw/images" / f"{name}.png", np.full((height, width, 3), 200, np.uint8))
        halves = np.arange(height * width, dtype=np.uint8).reshape(height, width) % 2
        saved(tmp_path / "raw/labels" / f"{name}.png", halves)
    made = packed(tmp_path / "raw", val=0, test=0)
    assert made.options["size"] == [384, 384]
    made = packed(tmp_path / "raw", size=40, val=0, test=0)
    inside = np.zeros((40, 40), bool)
    inside[10:30] = True
    for name, mask in (("a", inside), ("b", inside.T)):
        found = sample(made, f"images/{name}.png")
        np.testing.assert_array_equal(found["image"], np.where(mask[..., None], 200, 0).repeat(3, 2))
        np.testing.assert_array_equal(found["label"] == 255, ~mask)


def test_images_are_reduced_by_area_and_labels_by_their_nearest_pixel(tmp_path):
    source = pair(tmp_path / "raw", photo(0, 64, 96), ids(0, 64, 96))
    found = sole(source, size=(32, 48))
    mean = photo(0, 64, 96).reshape(32, 2, 48, 2, 3).mean((1, 3))
    assert np.abs(found["image"] - mean).max() <= 1
    np.testing.assert_array_equal(found["label"], ids(0, 64, 96)[1::2, 1::2])
    smooth = Image.fromarray(photo(0, 12, 16)).resize((1600, 1200), Image.Resampling.BICUBIC)
    large = pair(tmp_path / "large", smooth, ids(0, 1200, 1600), "a.jpg", quality=95)  # decoded small
    exact = np.asarray(smooth.resize((100, 75), Image.Resampling.BOX))
    assert np.abs(sole(large, size=(75, 100))["image"].astype(int) - exact).mean() < 2


# Images


def test_an_image_is_turned_as_its_camera_says_and_its_label_is_of_the_turned_one(tmp_path):
    upright = photo(0, 6, 4).repeat(8, 0).repeat(8, 1)
    turned, best = Image.fromarray(np.rot90(upright)), {"exif": exif(6), "quality": 100, "subsampling": 0}
    source = pair(tmp_path / "raw", turned, ids(0, 48, 32), "a.jpg", **best)
    assert np.abs(sole(source)["image"].astype(int) - upright).mean() < 4
    assert checked(source).rows == ()
    source = pair(tmp_path / "tiff", turned, ids(0, 48, 32), "a.tif", exif=exif(6))
    np.testing.assert_array_equal(sole(source)["image"], upright)  # which Pillow has turned already


def test_four_channels_keep_transparency_and_three_lie_on_white(tmp_path):
    clear = photo(0, channels=4)
    clear[..., 3] = np.where(np.arange(W) < W // 2, 0, 255)
    source = pair(tmp_path / "raw", clear, ids())
    np.testing.assert_array_equal(sole(source, channels=4)["image"], clear)
    on_white = np.where(clear[..., 3:] == 0, 255, clear[..., :3])
    np.testing.assert_array_equal(sole(source, channels=3)["image"], on_white)
    grey = pair(tmp_path / "grey", photo()[..., 0], ids())
    np.testing.assert_array_equal(sole(grey)["image"], photo()[..., :1].repeat(3, 2))


AGAIN = "export it as PNG of one channel, whose values are the ids"


@pytest.mark.parametrize(
    ("name", "content", "rule", "value", "fix"),
    [
        ("labels/a.png", b"", "the file must be a whole image", "no image", "delete it"),
        ("images/a.png", None, "the file must be a whole image", "image file is truncated", "delete it"),
        ("images/a.png", np.zeros((H, W), np.uint16), "an image must have 8 bits", "mode I;16", "convert it"),
        (
            *("labels/a.png", ids(0, 40, 50), "a label must have the size of its image"),
            *("40 × 50 pixels (height × width), the image has 36 × 48 pixels", "export it again from the image"),
        ),
        ("labels/a.png", photo(), "a label must have one channel of ids", "mode RGB", AGAIN),
        (
            "labels/a.png",
            np.full((H, W), 255, np.uint8),
            "some pixel must have a class",
            "all are ignored",
            "annotate it",
        ),
    ],
)
def test_what_leaves_a_sample_out_is_one_row_with_what_to_do(tmp_path, name, content, rule, value, fix):
    source = labelled(tmp_path / "raw", ids())
    if content is None:
        content = saved(source / "other.jpg", photo()).read_bytes()[:-400]
        (source / "other.jpg").unlink()
    saved(source / name, content)
    row = only(checked(source, classes=NAMES))
    assert (row.severity, row.file, row.key) == (ERROR, name, name.split("s/")[0])
    for got, start in ((row.rule, rule), (row.value, value), (row.fix, fix)):
        assert got.startswith(start)
    made = packed(source, classes=NAMES)
    assert made.names == ["images/b.png"]
    bad = made.bad.iloc[0]
    assert (bad.file, bad.fix) == ("images/a.png", row.fix)
    assert bad.rule.endswith(row.rule)
    assert bad.value == (f"{row.file}: {row.value}" if row.key == "label" else row.value)


# Options


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"classes": ["a", "a", "b"]}, "each name must be used only once, got 'a'"),
        ({"classes": {0: "a", -1: "b"}}, "from 0 to 65535, got -1"),
        ({"classes": NAMES, "ignore": ["void"]}, "names of classes .*got 'void'"),
        ({"classes": "sky"}, r"classes must be two names or more, or a text file of them, got 'sky': no such file"),
        ({"classes": NAMES, "ignore": 70_000}, "from 0 to 65535, .* got 70000"),
        ({"ignore": 1.5}, "ignore must be raw ids, or names of classes, got 1.5"),
        ({"size": 16}, "size must be .* 32 to 4096"),
        ({"channels": 1}, "channels must be 3"),
    ],
)
def test_impossible_options_are_refused(tmp_path, more, message):
    source = corpus(tmp_path / "raw")
    for make in (packed, checked):
        with pytest.raises(PackError, match=message):
            make(source, **more)


@pytest.mark.real
@pytest.mark.skipif(not DATA, reason="NBTOOLS_REAL_DATA names no folder of real data")
def test_camvid_is_packed_whole():
    names = ["sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist"]
    made = packed(Path(DATA) / "camvid.tar", classes=names, ignore=[11], size=(90, 120))
    assert (made.splits, made.manifest["bad"]) == ({"train": 80, "val": 30, "test": 0}, 0)
    assert np.argsort(made.card.counts["pixels"])[-2:].tolist() == [1, 3]
