"""Images and labels become a pack, and one table says what is wrong with a folder of them before that."""

import os
import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from nbtools import writer
from nbtools.errors import MissingExtra, PackError
from nbtools.feed import open_feed
from nbtools.pack import Column, Pack
from nbtools.plan import Plan
from nbtools.report import ERROR, WARNING, Row
from nbtools.tasks.segment.masks.classes import Class, colours, given, palette, table_of
from nbtools.tasks.segment.masks.data import pack
from nbtools.tasks.segment.masks.distance import PER_PIXEL, distance_map
from nbtools.tasks.segment.masks.pairs import read
from nbtools.tasks.segment.masks.validate import Report, validate
from nbtools.writer import Writer

H, W = 36, 48
NAMES = ["ground", "shirt", "shoe"]
DATA = os.environ.get("NBTOOLS_REAL_DATA", "")


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("NBTOOLS_CACHE", str(tmp_path / "cache"))


def ids(seed: int = 0, height: int = H, width: int = W) -> np.ndarray:
    """A label of three classes, in blocks with corners."""
    label = np.zeros((height, width), np.uint8)
    draw = np.random.default_rng(seed)
    for value in (1, 2):
        top, left = draw.integers(0, height // 2), draw.integers(0, width // 2)
        label[top : top + height // 3, left : left + width // 3] = value
    return label


def photo(seed: int = 0, height: int = H, width: int = W, channels: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), np.uint8)


def saved(path: Path, array: np.ndarray | Image.Image, **more) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = array if isinstance(array, Image.Image) else Image.fromarray(array)
    image.save(path, **more)
    return path


def corpus(folder: Path, count: int = 4) -> Path:
    """images/ and labels/: the first half trains, the last image tests."""
    for k in range(count):
        split = "train" if k < count // 2 else "test" if k == count - 1 else "val"
        saved(folder / "images" / split / f"{k}.png", photo(k))
        saved(folder / "labels" / split / f"{k}.png", ids(k))
    return folder


def xml(folder: Path, shapes: str, labels: str = "shirt shoe", size: tuple[int, int] = (H, W), head: str = "") -> Path:
    """CVAT's file with one image, beside it."""
    saved(folder / "a.png", photo())
    found = "".join(
        f"<label><name>{name}</name><color>#0000{k:02x}</color></label>" for k, name in enumerate(labels.split(), 1)
    )
    (folder / "annotations.xml").write_text(
        f'<?xml version="1.0" encoding="utf-8"?>{head}<annotations><version>1.1</version><meta><task><labels>{found}'
        f'</labels></task></meta><image id="0" name="a.png" width="{size[1]}" height="{size[0]}">{shapes}</image>'
        "</annotations>"
    )
    return folder


def packed(source: Path, **more) -> Pack:
    return pack(source, progress=False, **more)


def checked(source: Path, **more) -> Report:
    return validate(source, progress=False, **more)


def only(report: Report) -> Row:
    """The one row of a report, shown too."""
    [row] = report.rows
    assert row.rule in str(report)
    return row


def faults(report: Report) -> list[Row]:
    return [row for row in report.rows if row.severity == ERROR]


def sample(made: Pack, name: str) -> dict[str, np.ndarray]:
    return made.sample(made.names.index(name))


# -- the pack


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


def test_a_prediction_reads_an_image_as_the_pack_did(tmp_path):
    source = corpus(tmp_path / "raw")
    made = packed(source, size=(32, 40))
    np.testing.assert_array_equal(
        read(source / "images/val/2.png", made.options)["image"], sample(made, "images/val/2.png")["image"]
    )


@pytest.mark.parametrize(
    ("image", "label"),
    [
        ("images/train/a.jpg", "labels/train/a.png"),
        ("train/images/a.jpg", "train/masks/a.png"),
        ("x/images/sub/a.bmp", "x/masks/sub/a.png"),
        ("train/a.png", "trainannot/a.png"),
        ("a.jpg", "labels/a_mask.png"),
        ("JPEGImages/a.jpg", "SegmentationClass/a.png"),
        ("train_images/a.jpg", "train_masks/a.gif"),
    ],
)
def test_layouts_pair_images_with_labels(tmp_path, image, label):
    saved(tmp_path / "raw" / image, photo())
    saved(tmp_path / "raw" / label, ids())
    made = packed(tmp_path / "raw", val=0, test=0)
    assert (made.names, made.splits["train"]) == ([image], 1)
    np.testing.assert_array_equal(made.sample(0)["label"], ids())


@pytest.mark.parametrize(
    "lines",
    [
        "p/a.png,q/a.png\n",
        "\ufeffimage,label\r\np/a.png , q/a.png\r\n",
        "p/a.png q/a.png\n",
        "/SegNet/CamVid/p/a.png /SegNet/CamVid/q/a.png\n",
    ],
)
def test_lists_of_images_and_labels_are_read(tmp_path, lines):
    folder = tmp_path / "raw"
    saved(folder / "p" / "a.png", photo())
    saved(folder / "q" / "a.png", ids())
    (folder / "val.txt").write_text(lines, encoding="utf-8", newline="")
    made = packed(folder)
    assert (made.names, made.splits["val"]) == (["p/a.png"], 1)
    assert checked(folder).rows == ()


def test_lists_of_stems_give_the_splits_of_images_whose_labels_have_their_names(tmp_path):
    folder = tmp_path / "raw"
    for name in "abc":
        saved(folder / "JPEGImages" / f"{name}.jpg", photo())
        saved(folder / "SegmentationClass" / f"{name}.png", ids())
    for split, lines in (("train", "a\nb.jpg\n"), ("val", "c\n"), ("trainval", "nothing\n")):
        path = folder / "ImageSets" / "Segmentation" / f"{split}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(lines)
    assert packed(folder).splits == {"train": 2, "val": 1, "test": 0}
    assert checked(folder).rows == ()
    path.with_name("val.txt").write_text("c\nd\na\n")
    found = {row.file.rpartition("/")[2]: row.value for row in faults(checked(folder))}
    assert found == {"val.txt:2": "d", "val.txt:3": "JPEGImages/a.jpg: val, before: train"}


def test_a_way_out_of_the_source_is_not_followed(tmp_path):
    saved(tmp_path / "secret.png", ids())
    saved(tmp_path / "raw" / "a.png", photo())
    (tmp_path / "raw" / "train.txt").write_text("a.png,../secret.png\n")
    with pytest.raises(PackError, match=r"the label of a line is there, got \.\./secret\.png"):
        packed(tmp_path / "raw")


def test_without_splits_of_its_own_a_source_is_split_by_names(tmp_path):
    for k in range(20):
        saved(tmp_path / "raw" / "images" / f"{k}.png", photo(k, 32, 32))
        saved(tmp_path / "raw" / "labels" / f"{k}.png", ids(k, 32, 32))
    assert packed(tmp_path / "raw", val=4, test=2).splits == {"train": 14, "val": 4, "test": 2}


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


# -- distances


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


# -- class tables


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


def test_a_line_of_another_form_is_named(tmp_path):
    source = corpus(tmp_path / "raw")
    (source / "classes.txt").write_text("0,ground\nshirt\n")
    with pytest.raises(PackError, match=r"classes\.txt:2: .* got 'shirt'"):
        packed(source)


def test_a_mask_of_0_and_255_is_told_how_to_be_read(tmp_path):
    saved(tmp_path / "raw/images/a.png", photo())
    saved(tmp_path / "raw/labels/a.png", np.where(ids() > 0, 255, 0).astype(np.uint8))
    with pytest.raises(PackError, match=r"nothing to tell apart.*255: 'object'"):
        packed(tmp_path / "raw")
    row = only(checked(tmp_path / "raw", classes=["background", "object"]))
    assert (row.severity, row.value, "255: 'object'" in row.fix) == (WARNING, "1 object: none", True)
    made = packed(tmp_path / "raw", classes={0: "background", 255: "object"}, val=0, test=0)
    np.testing.assert_array_equal(made.sample(0)["label"], (ids() > 0).astype(np.uint8))


def test_labels_that_are_pictures_make_no_class_table(tmp_path):
    saved(tmp_path / "raw/images/a.png", photo(0, 64, 64))
    saved(tmp_path / "raw/labels/a.png", np.arange(64 * 64, dtype=np.uint16).reshape(64, 64))
    with pytest.raises(PackError, match=r"4095 different ids.*pictures"):
        packed(tmp_path / "raw")


# -- forms of label images


def labelled(folder: Path, label: np.ndarray | Image.Image, name: str = "a.png", **more) -> Path:
    """A folder of one image with such a label, and a good one beside it."""
    for k in ("a", "b"):
        saved(folder / "images" / f"{k}.png", photo())
    saved(folder / "labels" / "b.png", ids())
    saved(folder / "labels" / name, label, **more)
    return folder


def palette_image(label: np.ndarray) -> Image.Image:
    image = Image.frombytes("P", label.shape[::-1], label.tobytes())
    image.putpalette([9, 9, 9, 200, 0, 0, 9, 9, 9])  # two ids of one colour: the index counts
    return image


@pytest.mark.parametrize(
    "label",
    [
        palette_image(ids()),
        Image.fromarray(ids().astype(np.uint16)),
        Image.fromarray(ids().astype(np.int32)),
        Image.fromarray(ids()).convert("L"),
    ],
    ids=["palette", "16 bits", "32 bits", "8 bits"],
)
def test_a_labels_value_is_its_id(tmp_path, label):
    name = "a.tif" if label.mode == "I" else "a.png"
    source = labelled(tmp_path / "raw", label, name)
    assert checked(source).rows == ()
    np.testing.assert_array_equal(sample(packed(source), "images/a.png")["label"], ids())


@pytest.mark.parametrize("bits", [8, 16])
def test_unknown_ids_are_named_with_their_pixels_and_left_out(tmp_path, bits):
    label = ids().astype(np.uint8 if bits == 8 else np.uint16)
    label[0, :3], label[1, 0] = 7, 9 if bits == 8 else 1000
    source = labelled(tmp_path / "raw", label)
    row = only(checked(source, classes=NAMES))
    assert (row.severity, row.file, row.key) == (ERROR, "labels/a.png", "label")
    assert row.value == f"7 (3 pixels), {9 if bits == 8 else 1000} (1 pixel)"
    assert "classes=" in row.fix
    assert "ignore=" in row.fix
    made = packed(source, classes=NAMES)
    assert (made.names, made.bad.loc[0, "file"]) == (["images/b.png"], "images/a.png")
    assert made.bad.loc[0, "value"] == f"labels/a.png: {row.value}"
    assert packed(source, classes=NAMES, ignore=[7, 9, 1000]).manifest["bad"] == 0


def test_a_stray_16_bit_label_does_not_choose_the_classes(tmp_path):
    depth = np.arange(H * W, dtype=np.uint16).reshape(H, W)
    report = checked(labelled(tmp_path / "raw", depth))
    assert list(report.balance) == ["class 0", "class 1", "class 2"]
    assert "and 1718 more" in only(report).value


def test_coloured_labels_are_read_where_the_class_table_has_their_colours(tmp_path):
    table = np.array([(0, 0, 0), (250, 50, 83), (9, 200, 9)], np.uint8)
    folder = tmp_path / "raw"
    saved(folder / "images/a.png", photo())
    saved(folder / "labels/a.png", table[ids()])
    with pytest.raises(PackError, match="0 different ids"):
        packed(folder)
    [row] = faults(checked(folder, classes=NAMES))
    assert (row.rule, row.value) == ("colours are in the class table", "RGB, and the table has no colours")
    (folder / "labelmap.txt").write_text("ground:0,0,0::\nshirt:250,50,83::\nshoe:9,200,9::\n")
    made = packed(folder, val=0, test=0)
    np.testing.assert_array_equal(made.sample(0)["label"], ids())
    smooth = table[ids()]
    smooth[0, 0] = 8, 190, 9
    saved(folder / "labels/a.png", smooth)
    assert faults(checked(folder))[0].value == "(8, 190, 9) (1 pixel)"


def test_a_label_of_three_equal_channels_is_read_as_one(tmp_path):
    source = labelled(tmp_path / "raw", ids()[..., None].repeat(3, 2))
    assert only(checked(source)).severity == WARNING
    np.testing.assert_array_equal(sample(packed(source), "images/a.png")["label"], ids())


@pytest.mark.parametrize("alpha", [255, 100])
def test_an_alpha_channel_of_a_label_gets_a_row_and_a_transparent_one_is_left_out(tmp_path, alpha):
    image = Image.merge("LA", [Image.fromarray(ids()), Image.new("L", (W, H), alpha)])
    row = only(checked(labelled(tmp_path / "raw", image)))
    assert (row.severity, row.file, "LA" in row.value) == (WARNING if alpha == 255 else ERROR, "labels/a.png", True)


def test_a_jpeg_is_no_label(tmp_path):
    row = only(checked(labelled(tmp_path / "raw", ids(), "a.jpg")))
    assert (row.severity, row.value) == (ERROR, "JPEG")


# -- what is wrong with files


def test_a_label_of_another_size_is_told_with_both(tmp_path):
    row = only(checked(labelled(tmp_path / "raw", ids(0, 40, 50))))
    assert (row.file, row.value) == ("labels/a.png", "50 × 40 pixels, the image has 48 × 36 pixels")


def test_a_label_without_a_class_anywhere_is_left_out(tmp_path):
    row = only(checked(labelled(tmp_path / "raw", np.full((H, W), 255, np.uint8))))
    assert (row.severity, row.rule) == (ERROR, "some pixel has a class")


def test_an_empty_label_file_is_told(tmp_path):
    source = labelled(tmp_path / "raw", ids())
    (source / "labels/a.png").write_bytes(b"")
    row = only(checked(source))
    assert (row.severity, row.file, row.value) == (ERROR, "labels/a.png", "an empty file")


def test_a_truncated_jpeg_is_told_and_the_others_are_packed(tmp_path):
    source = corpus(tmp_path / "raw")
    whole = saved(source / "images/train/9.jpg", photo())
    saved(source / "labels/train/9.png", ids())
    whole.write_bytes(whole.read_bytes()[:-400])
    row = only(checked(source))
    assert (row.severity, row.file, row.key) == (ERROR, "images/train/9.jpg", "image")
    assert "truncated" in row.value
    made = packed(source)
    assert (len(made), made.bad.file.tolist()) == (4, ["images/train/9.jpg"])


def test_an_image_of_16_bits_is_told(tmp_path):
    source = labelled(tmp_path / "raw", ids())
    saved(source / "images/a.png", np.zeros((H, W), np.uint16))
    assert only(checked(source)).rule == "an image has 8 bits a channel"


def test_images_without_labels_labels_without_images_and_double_names_are_told(tmp_path):
    source = corpus(tmp_path / "raw")
    saved(source / "images/train/alone.png", photo())
    saved(source / "labels/train/lone.png", ids())
    saved(source / "images/train/0.jpg", photo())
    report = checked(source)
    assert {(row.severity, row.file, row.key) for row in report.rows} == {
        (ERROR, "images/train/alone.png", "label"),
        (ERROR, "labels/train/lone.png", "image"),
        (ERROR, "images/train/0.png", "image"),  # beside 0.jpg
    }
    assert (report.ok, report.errors) == (False, 3)
    assert packed(source).manifest["bad"] == 3


def test_lines_of_a_list_that_cannot_be_used_are_told_with_their_numbers(tmp_path):
    folder = tmp_path / "raw"
    for name in ("a", "b"):
        saved(folder / "p" / f"{name}.png", photo())
        saved(folder / "q" / f"{name}.png", ids())
    (folder / "train.txt").write_text(
        "p/a.png,q/a.png\np/b.png\np/b.png,q/none.png\np/a.png,q/b.png\np/a.png,q/a.png\n"
    )
    found = {row.file: (row.severity, row.rule) for row in checked(folder).rows}
    assert found == {
        "train.txt:2": (ERROR, "a line is image,label, or names an image whose label has its name"),
        "train.txt:3": (ERROR, "the label of a line is there"),
        "train.txt:4": (ERROR, "an image has one label and one split"),
        "train.txt:5": (WARNING, "an image is named once"),
        "p/b.png": (ERROR, "an image has a label"),
        "q/b.png": (ERROR, "an image has a label"),
    }


def test_a_folder_without_images_or_without_labels_is_refused(tmp_path):
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "a.doc").write_text("x")
    with pytest.raises(PackError, match=r"no images .*a\.doc"):
        packed(tmp_path / "none")
    saved(tmp_path / "raw" / "a.png", photo())
    with pytest.raises(PackError, match=r"1 images and no label: .*train\.txt"):
        packed(tmp_path / "raw")


def test_the_summary_says_the_balance_and_the_ids(tmp_path):
    report = checked(corpus(tmp_path / "raw"))
    every = np.concatenate([ids(k).ravel() for k in range(4)])
    assert report.ids == {k: int((every == k).sum()) for k in range(3)}
    assert report.balance["class 1"] == pytest.approx((every == 1).mean())
    assert f"class 1 {(every == 1).mean():.1%}" in report.summary
    assert (report.ok, report.images, report.labelled) == (True, 4, 4)


# -- CVAT


def label_of(source: Path, **more) -> np.ndarray:
    return packed(source, val=0, test=0, **more).sample(0)["label"]


def polygon(points: str, label: str = "shirt", z: int = 0) -> str:
    return f'<polygon label="{label}" points="{points}" z_order="{z}"></polygon>'


def test_polygons_are_filled_where_the_centre_of_a_pixel_is_inside(tmp_path):
    from matplotlib.path import Path as Outline

    corners = [(5.3, 3.1), (40.2, 8.7), (30.9, 30.4), (12.0, 20.5)]
    source = xml(tmp_path / "raw", polygon(";".join(f"{x},{y}" for x, y in corners)))
    label = label_of(source)
    y, x = np.mgrid[:H, :W] + 0.5
    centres = np.stack([x.ravel(), y.ravel()], 1)
    inside = {
        r: Outline([*corners, corners[0]], closed=True).contains_points(centres, radius=r) for r in (0.0, 0.3, -0.3)
    }
    sure = (inside[0.3] == inside[-0.3]).reshape(H, W)
    assert sure.mean() > 0.95
    np.testing.assert_array_equal((label == 1)[sure], inside[0.0].reshape(H, W)[sure])
    assert packed(source, val=0, test=0).classes == ["background", "shirt", "shoe"]


def test_a_box_covers_its_pixels_and_no_more(tmp_path):
    source = xml(tmp_path / "raw", '<box label="shoe" xtl="10" ytl="4" xbr="20" ybr="9" z_order="0"></box>')
    expected = np.zeros((H, W), np.uint8)
    expected[4:9, 10:20] = 2
    np.testing.assert_array_equal(label_of(source), expected)
    half = label_of(source, size=(72, 96))
    np.testing.assert_array_equal(half, expected.repeat(2, 0).repeat(2, 1))


def test_what_has_a_higher_z_order_covers_and_so_holes_are_drawn(tmp_path):
    hole = polygon("10,10;20,10;20,20;10,20", "background", 2)
    over = polygon("0,0;48,0;48,36;0,36", "shirt", 1)
    label = label_of(xml(tmp_path / "raw", hole + over, "background shirt shoe"))
    expected = np.ones((H, W), np.uint8)
    expected[10:20, 10:20] = 0
    np.testing.assert_array_equal(label, expected)


def test_ellipses_and_turned_boxes_have_their_areas(tmp_path):
    ellipse = '<ellipse label="shirt" cx="24" cy="18" rx="16" ry="8" rotation="90" z_order="0"></ellipse>'
    label = label_of(xml(tmp_path / "a", ellipse))
    assert (label == 1).sum() == pytest.approx(np.pi * 16 * 8, rel=0.03)
    assert (label[:, 24].sum(), label[18].sum()) == (32, 16)
    box = '<box label="shirt" xtl="14" ytl="8" xbr="34" ybr="28" rotation="45" z_order="0"></box>'
    label = label_of(xml(tmp_path / "b", box))
    assert (label == 1).sum() == pytest.approx(400, rel=0.05)
    assert (label[18, 11:37].all(), label[9, 15]) == (True, 0)


def test_a_mask_is_read_as_cvats_documentation_gives_it(tmp_path):
    rle = "3,5,7,7,5,9,3,11,2,11,2,12,1,12,1,26,1,12,1,12,2,11,3,9,5,7,7,5,3".replace(",", ", ")
    shape = f'<mask label="shoe" rle="{rle}" left="7" top="8" width="13" height="15" z_order="0"></mask>'
    label = label_of(xml(tmp_path / "raw", shape))
    expected = np.zeros((H, W), np.uint8)
    for y, line in enumerate(label[8:23]):
        expected[8 + y, 7:20] = line[7:20]
    np.testing.assert_array_equal(label, expected)
    lengths = [int(n) for n in rle.split(",")]
    assert (label == 2).sum() == sum(lengths[1::2])
    assert label[8, 7:20].tolist() == [0] * 3 + [2] * 5 + [0] * 5
    assert label[9, 7:20].tolist() == [0] * 2 + [2] * 7 + [0] * 4


def test_names_and_colours_are_those_of_the_file(tmp_path):
    made = packed(xml(tmp_path / "raw", polygon("1,1;30,1;30,30")), val=0, test=0)
    assert (made.classes, made.options["colours"]) == (
        ["background", "shirt", "shoe"],
        [[0, 0, 0], [0, 0, 1], [0, 0, 2]],
    )


def test_images_of_a_project_are_found_in_their_subset_which_is_their_split(tmp_path):
    source = xml(tmp_path / "raw", polygon("1,1;30,1;30,30"))
    text = (source / "annotations.xml").read_text().replace('name="a.png"', 'name="a.png" subset="Validation"')
    (source / "annotations.xml").write_text(text)
    (source / "images" / "Validation").mkdir(parents=True)
    (source / "a.png").rename(source / "images" / "Validation" / "a.png")
    made = packed(source)
    assert (made.names, made.splits["val"]) == (["images/Validation/a.png"], 1)


def test_label_images_come_before_shapes_unless_these_are_asked_for(tmp_path):
    source = xml(tmp_path / "raw", '<box label="shirt" xtl="0" ytl="0" xbr="48" ybr="36"></box>', "background shirt")
    saved(source / "labels" / "a.png", ids())
    np.testing.assert_array_equal(label_of(source, classes=NAMES), ids())
    assert 'labels="cvat"' in only(checked(source, classes=NAMES)).fix
    assert (label_of(source, labels="cvat") == 1).all()


@pytest.mark.parametrize(
    ("shapes", "key", "rule", "value"),
    [
        (polygon("50,1;60,1;60,9"), "polygon", "a shape lies inside of the image", "x 50 to 60"),
        (polygon("1,-9;20,-9;20,-1"), "polygon", "a shape lies inside of the image", "y -9 to -1 in 48 × 36"),
        (polygon("1,1;20,20"), "polygon", "3 points at least", "shirt: 2"),
        (polygon("1,1;20,x;3,3"), "polygon", "finite numbers", "could not convert"),
        (polygon("1,1;20,nan;3,3"), "polygon", "finite numbers", "not finite"),
        (polygon("1,1;20,20;3,3", "hat"), "label", "in the class table", "hat"),
        ('<box label="shirt" xtl="1" ytl="1" xbr="9"></box>', "box", "finite numbers", "shirt"),
        ('<mask label="shirt" rle="3,4" left="0" top="0" width="9" height="9"></mask>', "mask", "finite", "7 pixels"),
        ('<mask label="shirt" rle="81" left="0" top="0" width="1e99" height="9"></mask>', "mask", "finite", "width"),
        (
            '<mask label="shirt" rle="810000000000" left="0" top="0" width="900000" height="900000"></mask>',
            *("mask", "finite", "810000000000 pixels"),
        ),
    ],
)
def test_a_shape_that_cannot_be_drawn_leaves_its_image_out(tmp_path, shapes, key, rule, value):
    source = xml(tmp_path / "raw", shapes)
    [row] = faults(checked(source))
    assert (row.file, row.key) == ("a.png", key)
    assert rule in row.rule
    assert value in row.value
    with pytest.raises(PackError, match="none of 1 files can be used"):
        packed(source)


def test_what_is_partly_outside_is_cut_off_with_a_warning(tmp_path):
    source = xml(tmp_path / "raw", polygon("-10,-10;24,-10;24,18;-10,18"))
    rows = [row for row in checked(source).rows if row.key == "polygon"]
    assert [(row.severity, row.fix) for row in rows] == [(WARNING, "nothing: what is outside is cut off")]
    expected = np.zeros((H, W), np.uint8)
    expected[:18, :24] = 1
    np.testing.assert_array_equal(label_of(source), expected)


def test_an_image_without_shapes_is_background_with_a_warning(tmp_path):
    source = xml(tmp_path / "raw", "")
    assert [row.severity for row in checked(source).rows if row.key == "shapes"] == [WARNING]
    assert (label_of(source) == 0).all()


def test_what_has_no_area_is_told_and_not_drawn(tmp_path):
    source = xml(tmp_path / "raw", '<polyline label="shirt" points="1,1;9,9"></polyline>' + polygon("1,1;30,1;30,30"))
    assert [row.severity for row in checked(source).rows if row.key == "polyline"] == [WARNING]


def test_without_a_background_among_given_classes_what_is_not_drawn_is_ignored(tmp_path):
    source = xml(tmp_path / "raw", polygon("0,0;24,0;24,36;0,36") + polygon("24,0;40,0;40,36;24,36", "shoe"))
    label = label_of(source, classes=["shirt", "shoe"])
    assert (label[:, :24] == 0).all()
    assert (label[:, 40:] == 255).all()
    assert only(checked(source, classes=["shirt", "shoe"])).value == "it is ignored"


def test_an_annotated_size_that_is_not_the_images_is_told(tmp_path):
    [row] = faults(checked(xml(tmp_path / "raw", polygon("1,1;9,1;9,9"), size=(100, 200))))
    assert row.value == "200 × 100 pixels, the image has 48 × 36 pixels"


BOMB = '<!DOCTYPE a [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;">]>'


@pytest.mark.parametrize(
    ("head", "cut", "said"),
    [(BOMB, 0, "no document type.*<!DOCTYPE a>?"), ("", 40, "whole XML"), ("<a>", 0, "whole XML")],
)
def test_xml_with_entities_or_cut_off_is_refused(tmp_path, head, cut, said):
    source = xml(tmp_path / "raw", polygon("1,1;30,1;30,30"), head=head)
    path = source / "annotations.xml"
    path.write_text(path.read_text()[: len(path.read_text()) - cut])
    with pytest.raises(PackError, match=f"annotations.xml: annotations (have|are) {said}"):
        packed(source)


def test_an_annotated_image_that_is_not_there_is_told(tmp_path):
    source = xml(tmp_path / "raw", polygon("1,1;30,1;30,30"))
    (source / "a.png").rename(source / "b.png")
    with pytest.raises(PackError, match=r"annotations\.xml: an annotated image is there, got a\.png"):
        packed(source)


@pytest.mark.real
@pytest.mark.skipif(not DATA, reason="NBTOOLS_REAL_DATA names no folder of real data")
def test_camvid_is_packed_whole():
    names = ["sky", "building", "pole", "road", "pavement", "tree", "sign", "fence", "car", "pedestrian", "bicyclist"]
    made = packed(Path(DATA) / "camvid.tar", classes=names, ignore=[11], size=(90, 120))
    assert (made.splits, made.manifest["bad"]) == ({"train": 80, "val": 30, "test": 0}, 0)
    assert np.argsort(made.card.counts["pixels"])[-2:].tolist() == [1, 3]
