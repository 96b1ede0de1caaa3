"""Demo pictures of garments: raw files as people have them, polygons that give the labels, and nothing that a colour,
a place or a texture's statistics tell."""

import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from PIL import Image
from scipy.ndimage import uniform_filter

from nbtools.errors import PackError
from nbtools.tasks.segment.garments import outlines, shapes
from nbtools.tasks.segment.garments.demo import CLASSES, demo, label_of, photographs
from nbtools.tasks.segment.masks.data import pack as pack_segments

SIZE = (96, 72)
SEEN = 140
SPLITS = ("train", "val", "test")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """28 pictures of the four kinds, as labels and as polygons."""
    return demo(tmp_path_factory.mktemp("garments"), 28, size=(128, 96), classes="kinds", form="both")


@pytest.fixture(scope="module")
def pictures():
    """210 pictures and their labels: SEEN to learn from, then others."""
    names = list(CLASSES["garment"])
    made = [(shot.image, label_of(shot.annotations, names, *SIZE)) for shot in photographs(210, SIZE, 3)]
    return np.stack([image for image, _ in made]), np.stack([label for _, label in made])


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}


def covered(points, height, width):
    """(H, W) whether a pixel's centre is inside of a polygon, by the crossings of a ray to its right."""
    y, x = np.mgrid[:height, :width] + 0.5
    inside = np.zeros((height, width), bool)
    for (x0, y0), (x1, y1) in zip(points, np.roll(points, -1, 0), strict=True):
        if y0 != y1:
            inside ^= ((y0 <= y) != (y1 <= y)) & (x < x0 + (y - y0) * (x1 - x0) / (y1 - y0))
    return inside


def miou(answer, truth):
    return np.mean([((answer == k) & (truth == k)).sum() / ((answer == k) | (truth == k)).sum() for k in (0, 1)])


# The files


def test_the_same_seed_gives_the_same_bytes_and_few_pictures_are_the_first_of_many(tmp_path):
    few, again, many, other = (
        contents(demo(tmp_path / name, count, size=SIZE, form="both", seed=seed))
        for name, count, seed in (("a", 9, 0), ("b", 9, 0), ("c", 15, 0), ("d", 9, 1))
    )
    assert few == again
    pictures = [name for name in few if name.endswith((".jpg", ".png"))]
    assert len(pictures) == 18
    assert all(many[name] == few[name] for name in pictures)
    assert all(other[name] != few[name] for name in pictures)


def test_each_image_has_a_label_of_its_size_with_ids_of_the_class_table(folder):
    table = [line.split(",") for line in (folder / "classes.txt").read_text().splitlines()]
    assert {name: tuple(map(int, rgb)) for _, name, *rgb in table} == CLASSES["kinds"]
    assert [int(row[0]) for row in table] == list(range(5))
    found = np.zeros(256, int)
    for split, count in zip(SPLITS, (20, 4, 4), strict=True):
        images = sorted((folder / "images" / split).iterdir())
        assert len(images) == count
        for path in images:
            with Image.open(path) as image, Image.open(folder / "labels" / split / f"{path.stem}.png") as label:
                assert (image.mode, image.format, label.mode) == ("RGB", "JPEG", "L")
                assert image.size == label.size == (96, 128)
                found += np.bincount(np.asarray(label).ravel(), minlength=256)
    assert (found[:5] > 0).all()
    assert not found[5:].any()


def test_the_polygons_of_the_xml_are_the_labels(folder):
    document = ElementTree.parse(folder / "annotations.xml").getroot()
    labels = [(one.findtext("name"), one.findtext("color")) for one in document.iterfind("meta/task/labels/label")]
    assert labels == [(name, "#{:02x}{:02x}{:02x}".format(*rgb)) for name, rgb in CLASSES["kinds"].items()]
    names, wrong, hidden = [name for name, _ in labels], 0, 0
    for image in document.iterfind("image"):
        name, height, width = image.attrib["name"], int(image.attrib["height"]), int(image.attrib["width"])
        drawn = np.zeros((height, width), np.uint8)
        for polygon in sorted(image.iterfind("polygon"), key=lambda one: int(one.attrib["z_order"])):
            points = np.array([pair.split(",") for pair in polygon.attrib["points"].split(";")], float)
            assert (points >= 0).all()
            assert (points <= (width, height)).all(), "as CVAT keeps shapes inside of the frame"
            hidden += polygon.attrib["label"] == "background" and drawn[covered(points, height, width)].any()
            drawn[covered(points, height, width)] = names.index(polygon.attrib["label"])
        label = np.asarray(Image.open((folder / "labels" / name).with_suffix(".png")))
        wrong += (drawn != label).sum()
    assert wrong / (28 * 128 * 96) < 5e-3, "Pillow also fills what a polygon touches, to an eighth of a pixel"
    assert hidden > 5, "arms, bags and hangers lie on garments"


def test_packing_the_polygons_gives_what_packing_the_labels_gives(folder, tmp_path):
    images, cvat = (
        pack_segments(folder, labels=labels, into=tmp_path / labels, progress=False) for labels in ("images", "cvat")
    )
    assert images.classes == cvat.classes == list(CLASSES["kinds"])
    for split, count in zip(SPLITS, (20, 4, 4), strict=True):
        assert len(images.ids(split)) == len(cvat.ids(split)) == count
    one, other = (np.argsort(pack.names) for pack in (images, cvat))
    assert np.array_equal(images.arrays["image"][one], cvat.arrays["image"][other])
    assert np.array_equal(images.arrays["label"][one], cvat.arrays["label"][other])


def test_kinds_of_garments_are_other_labels_of_the_same_pictures(folder, tmp_path):
    demo(tmp_path, 28, size=(128, 96))
    kinds, plain = contents(folder), contents(tmp_path)
    assert "annotations.xml" not in plain
    for name in plain:
        if name.endswith(".jpg"):
            assert plain[name] == kinds[name]
        elif name.endswith(".png"):
            one, other = (np.asarray(Image.open(root / name)) for root in (folder, tmp_path))
            assert np.array_equal(one > 0, other == 1)


def test_a_new_demo_replaces_an_old_one_and_nobody_elses_files(tmp_path):
    demo(tmp_path, 9, size=SIZE, form="both")
    demo(tmp_path, 3, size=SIZE)
    assert len(contents(tmp_path)) == 7
    mine = {"labels/val/mine.png": b"drawn by hand", "annotations.xml": b"<annotations/>", "classes.txt": b"0,a\n1,b\n"}
    for name, data in mine.items():
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(PackError, match=f"{path.name} was not written by this demo"):
            demo(tmp_path, 3, size=SIZE)
        assert path.read_bytes() == data
        path.unlink()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"count": 0}, "count must be 1 picture or more, got 0"),
        ({"size": (96, 9)}, "size must be"),
        ({"size": 96}, "size must be"),
        ({"classes": "shoes"}, "classes must be one of garment, kinds, got 'shoes'"),
        ({"form": "coco"}, "form must be one of labels, cvat, both, got 'coco'"),
        ({"seed": -1}, "seed must be 0 or more"),
        ({"count": "many"}, "count must be 1 picture or more, got 'many'"),
        ({"size": (96.5, 96)}, "size must be"),
        ({"seed": None}, "seed must be 0 or more, got None"),
    ],
)
def test_an_impossible_request_is_refused_before_anything_is_written(tmp_path, options, said):
    with pytest.raises(PackError, match=said):
        demo(tmp_path / "new", **{"count": 1, **options})
    assert not (tmp_path / "new").exists()


# What no single pixel tells


def test_neither_colour_nor_place_nor_both_tell_a_garment(pictures):
    """A histogram classifier of the seen pixels, at the threshold that is best for their mIoU."""
    images, labels = pictures
    seen, share = slice(0, SEEN), labels[:SEEN].mean()
    colour = (images // 16) @ np.array([256, 16, 1], np.uint16)
    counts, hits = (np.bincount(colour[seen].ravel(), w, 4096) for w in (None, labels[seen].ravel()))
    by_colour = ((hits + 2 * share) / (counts + 2))[colour]
    by_place = np.broadcast_to(uniform_filter(labels[seen].mean(0), 9), labels.shape)
    odds = [p / (1 - p) for p in (by_colour, np.clip(by_place, 1e-3, 0.999))]
    for name, score in (("colour", odds[0]), ("place", odds[1]), ("both", odds[0] * odds[1])):
        assert unseen(score, labels) < 0.55, name


@pytest.mark.parametrize("around", [3, 9])
def test_neither_brightness_nor_smoothness_tell_a_garment(pictures, around):
    images, labels = pictures
    grey = images.mean(-1, dtype=np.float32)
    mean = uniform_filter(grey, around, axes=(1, 2))
    spread = np.sqrt(np.maximum(uniform_filter(grey**2, around, axes=(1, 2)) - mean**2, 0))
    key = 24 * ranked(mean) + ranked(spread)
    counts, hits = (np.bincount(key[:SEEN].ravel(), w, 24 * 24) for w in (None, labels[:SEEN].ravel()))
    assert unseen(((hits + 1) / (counts + 3))[key], labels) < 0.55


def ranked(values):
    return np.searchsorted(np.quantile(values[::5], np.linspace(0, 1, 25)[1:-1]), values)


def unseen(score, labels):
    """mIoU of a score on the unseen pictures, above the threshold that is best for the others."""
    best = max(
        np.quantile(score[:SEEN:4], np.linspace(0.3, 0.9, 13)), key=lambda at: miou(score[:SEEN] > at, labels[:SEEN])
    )
    return miou(score[SEEN:] > best, labels[SEEN:])


def test_pictures_have_garments_anywhere_and_of_any_size(pictures):
    labels = pictures[1]
    shares = labels.mean((1, 2))
    assert shares.min() < 0.15
    assert shares.max() > 0.5
    assert 0.2 < labels.mean() < 0.45
    assert 0 < labels.mean(0).min() < labels.mean(0).max() < 0.8


# Outlines


@pytest.mark.parametrize("kind", shapes.KINDS)
def test_what_a_frame_shows_of_an_outline_are_whole_outlines_of_its_parts(kind):
    rng, several = np.random.default_rng(0), 0
    for _ in range(25):
        pose = shapes.pose(rng, 60, rng.uniform(0, 1, 2) * (60, 40))
        outline = pose(shapes.KINDS[kind](rng).outline)
        parts = outlines.within(outline, 40, 60)
        several += len(parts) > 1
        shown = np.zeros((40, 60), int)
        for part in parts:
            assert (part >= -1e-9).all()
            assert (part <= np.array([60, 40]) + 1e-9).all()
            shown += covered(part, 40, 60)
        assert np.array_equal(shown, covered(outline, 40, 60))
    assert several or kind == "skirt", "sleeves and legs are cut apart"


def test_no_two_garments_of_a_kind_have_one_cut():
    rng = np.random.default_rng(0)
    for kind, draw in shapes.KINDS.items():
        heights = {round(np.ptp(draw(rng).outline, 0)[1] / np.ptp(draw(rng).outline, 0)[0], 6) for _ in range(20)}
        assert len(heights) == 20, kind
