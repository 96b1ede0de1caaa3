"""Images and labels become a pack, with a class table and distances to the class boundary."""

import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from masks import NAMES, H, W, checked, corpus, faults, ids, only, packed, photo, sample, saved, xml
from PIL import Image, ImageOps

from nbtools.data import WARNING, open_feed, writer
from nbtools.data.pack import Column
from nbtools.data.writer import Writer
from nbtools.errors import MissingExtra, PackError
from nbtools.tasks.segment.masks.choices import size_for
from nbtools.tasks.segment.masks.classes import Class, colours, palette, table_of
from nbtools.tasks.segment.masks.distance import PER_PIXEL, distance_map
from nbtools.tasks.segment.masks.naming import given
from nbtools.tasks.segment.masks.pairs import read
from nbtools.train import Plan

DATA = os.environ.get("NBTOOLS_REAL_DATA", "")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NBTOOLS_CACHE", str(tmp_path / "cache"))


def slow_distances(label: np.ndarray) -> np.ndarray:
    """Every pixel against every boundary pixel."""
    height, width = label.shape
    on = []
    for y in range(height):
        for x in range(width):
            for v, u in ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)):
                if (
                    0 <= v < height
                    and 0 <= u < width
                    and 255 not in (label[y, x], label[v, u])
                    and label[y, x] != label[v, u]
                ):
                    on.append((y, x))
    if not on:
        return np.full(label.shape, 255)
    far = [[min(np.hypot(y - v, x - u) for v, u in on) for x in range(width)] for y in range(height)]
    return np.minimum(np.rint(np.array(far) * PER_PIXEL), 255)


def test_images_and_labels_of_one_size_are_packed_as_they_are(tmp_path):
    made = packed(corpus(tmp_path / "raw"))
    assert made.columns == {
        "image": Column("fixed", "|u1", (H, W, 3)),
        "label": Column("fixed", "|u1", (H, W)),
        "distance": Column("fixed", "|u1", (H, W)),
    }
    assert (made.splits, made.classes) == ({"train": 2, "val": 1, "test": 1}, ["class 0", "class 1", "class 2"])
    assert made.options["size"] == [H, W]
    assert (made.options["fit"], made.options["ids"], made.options["ignored"]) == ("same", [0, 1, 2], [255])
    for k, split in enumerate(("train", "train", "val", "test")):
        found = sample(made, f"images/{split}/{k}.png")
        np.testing.assert_array_equal(found["image"], photo(k))
        np.testing.assert_array_equal(found["label"], ids(k))
    train = np.bincount(np.concatenate([ids(k).ravel() for k in (0, 1)]))
    assert made.card.counts == {"pixels": train.tolist()}


def test_the_source_files_give_the_very_values_of_the_pack_also_in_another_process(tmp_path):
    source = corpus(tmp_path / "raw")
    xml(source / "drawn", '<polygon label="shirt" points="4,4;30.5,7;20,31"/>', "ground shirt shoe")
    made = packed(source, size=(40, 40), classes=NAMES)
    assert len(made) == 5
    raw = pickle.loads(pickle.dumps(made.raw))
    plan = Plan(feed="workers", workers=1, batch_size=5)
    [batch] = list(open_feed(made, plan, torch.device("cpu"))([np.arange(5)]))
    for i in range(5):
        for column, value in made.sample(i).items():
            np.testing.assert_array_equal(raw[i][column], value)
            np.testing.assert_array_equal(batch[column][i].numpy(), value)


def test_a_pack_that_was_killed_goes_on_where_it_was(tmp_path, monkeypatch):
    source = corpus(tmp_path / "raw", 6)
    whole = packed(source, into=tmp_path / "whole")
    read_by, add = [], Writer.add

    def killed(self, name, *args, **arrays):
        if len(read_by) == 4:
            raise KeyboardInterrupt
        read_by.append(name)
        add(self, name, *args, **arrays)

    monkeypatch.setattr(writer, "CHUNK", 2)
    monkeypatch.setattr(Writer, "add", killed)
    with pytest.raises(KeyboardInterrupt):
        packed(source, into=tmp_path / "part")
    monkeypatch.setattr(Writer, "add", lambda *args, **arrays: (read_by.append(args[1]), add(*args, **arrays))[1])
    again = packed(source, into=tmp_path / "part")
    assert read_by == whole.names
    assert again.card.digest == whole.card.digest
    assert again.card.counts == whole.card.counts


@pytest.mark.parametrize("more", [{}, {"classes": NAMES}, {"size": 40, "ignore": 2, "fit": "stretch", "channels": 4}])
def test_a_finished_pack_is_opened_without_a_look_into_any_image(tmp_path, monkeypatch, more):
    source = corpus(tmp_path / "raw")
    made = packed(source, **more)
    monkeypatch.setattr(Image, "open", None)
    assert packed(source, **more).folder == made.folder


def test_other_choices_and_other_files_are_another_pack(tmp_path):
    source = corpus(tmp_path / "raw")
    (tmp_path / "names.txt").write_text("a\nb\nc\n")
    choices = [{}, {"size": 40}, {"size": 40, "fit": "stretch"}, {"channels": 4}, {"classes": NAMES}, {"ignore": 1}]
    choices += [{"classes": tmp_path / "names.txt"}, {"labels": "images"}]
    found = [packed(source, **more).folder for more in choices]
    (tmp_path / "names.txt").write_text("a\nb\nd\n")
    found.append(packed(source, classes=tmp_path / "names.txt").folder)
    (source / "classes.txt").write_text("e\nf\ng\n")
    found.append(packed(source).folder)
    assert len(set(found)) == len(found)
    assert packed(source, classes=["a", "b", "d"], ignore=[]).classes == ["a", "b", "d"]


def test_what_a_terminal_gives_is_one_id_or_several_names(tmp_path):
    source = corpus(tmp_path / "raw")
    one = packed(source, classes=("ground", "shirt", "shoe"), ignore=2)
    assert (one.classes, one.options["ignored"]) == (["ground", "shirt"], [2, 255])
    assert packed(source, classes=NAMES, ignore=(2, "shoe")).classes == one.classes
    assert packed(source, classes={np.uint8(k): name for k, name in enumerate(NAMES)}).classes == NAMES


@pytest.mark.parametrize("more", [{}, {"size": (32, 40)}, {"size": 40, "fit": "stretch"}, {"size": 32, "channels": 4}])
def test_a_prediction_reads_an_image_as_the_pack_did(tmp_path, more):
    source = corpus(tmp_path / "raw")
    exif = Image.Exif()
    exif[0x0112] = 3
    saved(source / "images/val/9.jpg", photo(9, 4 * H, 4 * W) if more else photo(9), exif=exif)
    saved(source / "labels/val/9.png", ids(9, 4 * H, 4 * W) if more else ids(9))
    made = packed(source, classes=NAMES, **more)
    for name in made.names:
        np.testing.assert_array_equal(read(source / name, made.options)["image"], sample(made, name)["image"])
    assert len(made) == 5


def test_images_of_many_sizes_are_scaled_to_fit_and_what_is_left_is_ignored(tmp_path):
    for name, height, width in (("a", 60, 120), ("b", 120, 60)):
        saved(tmp_path / "raw" / "images" / f"{name}.png", np.full((height, width, 3), 200, np.uint8))
        saved(
            tmp_path / "raw" / "labels" / f"{name}.png",
            np.arange(height * width, dtype=np.uint8).reshape(height, width) % 2,
        )
    made = packed(tmp_path / "raw", val=0, test=0)
    assert (made.options["size"], made.options["fit"]) == ([384, 384], "pad")
    made = packed(tmp_path / "raw", size=40, val=0, test=0)
    wide, high = sample(made, "images/a.png"), sample(made, "images/b.png")
    inside = np.zeros((40, 40), bool)
    inside[10:30] = True
    for found, mask in ((wide, inside), (high, inside.T)):
        assert (found["image"][mask] == 200).all()
        assert (found["image"][~mask] == 0).all()
        np.testing.assert_array_equal(found["label"] == 255, ~mask)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({(360, 480): 9}, (360, 480)),
        ({(360, 480): 9, (480, 360): 1}, (384, 384)),
        ({(1024, 2048): 9}, (1024, 2048)),
        ({(2048, 2048): 9}, (384, 384)),
        ({(31, 480): 9}, (384, 384)),
        ({}, (384, 384)),
    ],
)
def test_images_keep_their_size_where_all_have_one_that_a_network_can_use(sizes, expected):
    assert size_for(sizes) == expected


def test_stretched_images_fill_the_size(tmp_path):
    saved(tmp_path / "raw/images/a.png", photo(0, 40, 80))
    saved(tmp_path / "raw/labels/a.png", ids(0, 40, 80))
    made = packed(tmp_path / "raw", size=(32, 32), fit="stretch", val=0, test=0)
    assert (made.sample(0)["label"] != 255).all()


def test_images_are_reduced_by_area_and_labels_by_their_nearest_pixel(tmp_path):
    saved(tmp_path / "raw/images/a.png", photo(0, 64, 96))
    saved(tmp_path / "raw/labels/a.png", ids(0, 64, 96))
    found = packed(tmp_path / "raw", size=(32, 48), val=0, test=0).sample(0)
    mean = photo(0, 64, 96).reshape(32, 2, 48, 2, 3).mean((1, 3))
    assert np.abs(found["image"] - mean).max() <= 1
    np.testing.assert_array_equal(found["label"], ids(0, 64, 96)[1::2, 1::2])


def test_a_large_jpeg_is_decoded_small_and_looks_the_same(tmp_path):
    smooth = Image.fromarray(photo(0, 12, 16)).resize((1600, 1200), Image.Resampling.BICUBIC)
    saved(tmp_path / "raw/images/a.jpg", smooth, quality=95)
    saved(tmp_path / "raw/labels/a.png", ids(0, 1200, 1600))
    found = packed(tmp_path / "raw", size=(75, 100), val=0, test=0).sample(0)["image"]
    exact = np.asarray(smooth.resize((100, 75), Image.Resampling.BOX))
    assert np.abs(found.astype(int) - exact).mean() < 2


@pytest.mark.parametrize("turn", range(1, 9))
def test_every_orientation_is_what_pillow_makes_of_it(tmp_path, turn):
    exif = Image.Exif()
    exif[0x0112] = turn
    path = saved(tmp_path / "raw/images/a.png", photo(0, 36, 48), exif=exif)
    with Image.open(path) as image:
        upright = np.asarray(ImageOps.exif_transpose(image))
    saved(tmp_path / "raw/labels/a.png", ids(0, *upright.shape[:2]))
    np.testing.assert_array_equal(packed(tmp_path / "raw", val=0, test=0).sample(0)["image"], upright)


def test_a_picture_is_turned_as_its_camera_says_and_its_label_is_of_the_turned_one(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    upright = photo(0, 6, 4).repeat(8, 0).repeat(8, 1)
    saved(tmp_path / "raw/images/a.jpg", Image.fromarray(np.rot90(upright)), exif=exif, quality=100, subsampling=0)
    saved(tmp_path / "raw/labels/a.png", ids(0, 48, 32))
    made = packed(tmp_path / "raw", val=0, test=0)
    assert made.options["size"] == [48, 32]
    assert np.abs(made.sample(0)["image"].astype(int) - upright).mean() < 4
    row = only(checked(tmp_path / "raw"))
    assert (row.severity, row.value) == (WARNING, "orientation 6")
    saved(tmp_path / "raw/labels/a.png", ids(0, 32, 48))
    assert "EXIF" in faults(checked(tmp_path / "raw", size=32, classes=NAMES))[0].fix


def test_four_channels_keep_transparency_and_three_lie_on_white(tmp_path):
    clear = photo(0, channels=4)
    clear[:, : W // 2, 3] = 0
    clear[:, W // 2 :, 3] = 255
    saved(tmp_path / "raw/images/a.png", clear)
    saved(tmp_path / "raw/labels/a.png", ids())
    four, three = (packed(tmp_path / "raw", channels=c, val=0, test=0).sample(0)["image"] for c in (4, 3))
    np.testing.assert_array_equal(four, clear)
    assert (three[:, : W // 2] == 255).all()
    np.testing.assert_array_equal(three[:, W // 2 :], clear[:, W // 2 :, :3])
    row = only(checked(tmp_path / "raw"))
    assert (row.severity, row.key, "channels=4" in row.fix) == (WARNING, "image", True)
    assert checked(tmp_path / "raw", channels=4).rows == ()


def test_grey_images_become_three_equal_channels(tmp_path):
    saved(tmp_path / "raw/images/a.png", photo()[..., 0])
    saved(tmp_path / "raw/labels/a.png", ids())
    found = packed(tmp_path / "raw", val=0, test=0).sample(0)["image"]
    np.testing.assert_array_equal(found, photo()[..., :1].repeat(3, 2))


@pytest.mark.parametrize("seed", range(4))
def test_distance_maps_are_those_of_a_slow_obvious_version(seed):
    label = ids(seed, 12, 50)
    label[np.random.default_rng(seed).random(label.shape) < 0.1 * seed] = 255
    np.testing.assert_array_equal(distance_map(label), slow_distances(label))


def test_what_is_ignored_makes_no_boundary():
    label = np.zeros((5, 9), np.uint8)
    label[:, 4] = 255
    assert (distance_map(label) == 255).all()
    label[:, 5:] = 1
    assert (distance_map(label) == 255).all()
    assert distance_map(np.array([[0, 0, 1, 1]], np.uint8)).tolist() == [[8, 0, 0, 8]]


def test_without_scipy_packing_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.ndimage", None)
    with pytest.raises(MissingExtra, match=r"nbtools\[segment\]"):
        packed(corpus(tmp_path / "raw"))


def test_camvids_void_is_ignored_and_places_are_without_gaps():
    table = table_of(given(["sky", "void", "road"]), [1])
    assert (table.names, table.options["ids"], table.options["ignored"]) == (["sky", "road"], [0, 2], [1, 255])
    assert table.lookup[[0, 1, 2, 255, 3]].tolist() == [0, 255, 1, 255, 254]
    assert table_of(given(["sky", "void", "road"]), ["void"]) == table


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ground\nshirt\n\n", [(0, "ground", None), (1, "shirt", None)]),
        ("id,name\n3,ground\n7, a shirt\n", [(3, "ground", None), (7, "a shirt", None)]),
        ("0,ground,0,0,0\n1,shirt,255,0,9", [(0, "ground", (0, 0, 0)), (1, "shirt", (255, 0, 9))]),
        ("name, r, g, b\nground,0,0,0\na shirt,255,0,9", [(0, "ground", (0, 0, 0)), (1, "a shirt", (255, 0, 9))]),
        (
            "# label:color_rgb:parts:actions\nbackground:0,0,0::\nshirt:250,50,83::\n",
            [(0, "background", (0, 0, 0)), (1, "shirt", (250, 50, 83))],
        ),
    ],
)
def test_files_of_classes_are_read(tmp_path, text, expected):
    path = tmp_path / "classes.txt"
    path.write_text(text, encoding="utf-8-sig")
    assert given(path) == [Class(*one) for one in expected]


def test_a_sources_own_file_of_classes_is_used_unless_another_is_given(tmp_path):
    source = corpus(tmp_path / "raw")
    (source / "classes.txt").write_text("ground\nshirt\nshoe\n")
    assert packed(source).classes == NAMES
    assert packed(source, classes={0: "a", 1: "b", 2: "c"}).classes == ["a", "b", "c"]


def test_colours_are_those_given_and_else_told_apart():
    first = next(palette())
    found = colours([Class(0, "background"), Class(1, "shirt"), Class(2, "shoe", first)])
    assert found[::2] == [(0, 0, 0), first]
    many = np.array(colours([Class(i, str(i)) for i in range(254)]))
    assert len({tuple(colour) for colour in many.tolist()}) == 254
    apart = np.linalg.norm(many[:16, None] - many[None, :16].astype(float), axis=-1)
    assert apart[~np.eye(16, dtype=bool)].min() > 35


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"classes": ["one"]}, "2 to 254 classes, got 1"),
        ({"classes": [str(i) for i in range(255)]}, "2 to 254 classes, got 255"),
        ({"classes": ["a", "a", "b"]}, "each name stands once, got 'a'"),
        ({"classes": {0: "a", -1: "b"}}, "from 0 to 65535, got -1"),
        ({"classes": NAMES, "ignore": ["void"]}, "names of classes .*got 'void'"),
        ({"classes": "nowhere.txt"}, "nowhere.txt cannot be read"),
        ({"classes": "sky"}, r"sky cannot be read \(No such file.*\); give two names or more, or a text file"),
        ({"classes": 3}, "classes must be names, a mapping .* got 3"),
        ({"classes": []}, r"2 to 254 classes, got 0 beside those ignored \(none\); give classes="),
        ({"classes": NAMES, "ignore": 70_000}, "from 0 to 65535, .* got 70000"),
        ({"ignore": 1.5}, "ignore must be raw ids, or names of classes, got 1.5"),
        ({"ignore": [1, None]}, r"ignore must be raw ids, .* got \[1, None\]"),
        ({"ignore": True}, "ignore must be raw ids, .* got True"),
        ({"size": 16}, "size must be .* 32 to 4096"),
        ({"size": (64, 0)}, "size must be"),
        ({"channels": 1}, "channels must be 3"),
        ({"fit": "crop"}, "fit must be one of auto, same, pad, stretch"),
        ({"labels": "xml"}, "labels must be one of"),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path, more, said):
    source = corpus(tmp_path / "raw")
    for make in (packed, checked):
        with pytest.raises(PackError, match=said):
            make(source, **more)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("0,ground\n0,shirt\n1,shoe\n", "each id stands once, got 0 twice"),
        ("0,ground\n1,ground\n2,shoe\n", "each name stands once, got 'ground' twice"),
        ("0,ground,0,0,0\n1,shirt,0,0,0\n2,shoe,1,1,1\n", r"each colour stands once, got \(0, 0, 0\) twice"),
        ("0,ground,0,0,0\n1,shirt,0,256,0\n", r"classes\.txt:2: a colour .* from 0 to 255, got 0, 256, 0"),
    ],
)
def test_classes_that_cannot_be_told_apart_are_refused(tmp_path, lines, said):
    source = corpus(tmp_path / "raw")
    (source / "classes.txt").write_text(lines)
    with pytest.raises(PackError, match=said):
        packed(source)


def test_a_line_of_another_form_is_named(tmp_path):
    source = corpus(tmp_path / "raw")
    (source / "classes.txt").write_text("0,ground\nshirt\n")
    with pytest.raises(PackError, match=r"classes\.txt:2: .* got 'shirt'"):
        packed(source)


def test_a_mask_of_0_and_255_is_told_how_to_be_read(tmp_path):
    saved(tmp_path / "raw/images/a.png", photo())
    saved(tmp_path / "raw/labels/a.png", np.where(ids() > 0, 255, 0).astype(np.uint8))
    with pytest.raises(PackError, match=r"nothing to tell apart.*255: 'object'.* lines 0,background and 255,object"):
        packed(tmp_path / "raw")
    row = only(checked(tmp_path / "raw", classes=["background", "object"]))
    assert (row.severity, row.value, "255: 'object'" in row.fix) == (WARNING, "1 object: none", True)
    (tmp_path / "two.txt").write_text("0,background\n255,object\n")
    for classes in ({0: "background", 255: "object"}, tmp_path / "two.txt"):
        made = packed(tmp_path / "raw", classes=classes, val=0, test=0)
        np.testing.assert_array_equal(made.sample(0)["label"], (ids() > 0).astype(np.uint8))


def test_labels_that_are_pictures_make_no_class_table(tmp_path):
    saved(tmp_path / "raw/images/a.png", photo(0, 64, 64))
    saved(tmp_path / "raw/labels/a.png", np.arange(64 * 64, dtype=np.uint16).reshape(64, 64))
    with pytest.raises(PackError, match=r"4095 different ids.*pictures"):
        packed(tmp_path / "raw")


@pytest.mark.real
@pytest.mark.skipif(not DATA, reason="NBTOOLS_REAL_DATA names no folder of real data")
def test_camvid_is_packed_whole():
    names = ["sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist"]
    made = packed(Path(DATA) / "camvid.tar", classes=names, ignore=[11], size=(90, 120))
    assert (made.splits, made.manifest["bad"]) == ({"train": 80, "val": 30, "test": 0}, 0)
    assert np.argsort(made.card.counts["pixels"])[-2:].tolist() == [1, 3]
