"""Demo images: raw files as people have them, polygons that give the labels, and classes that neither a pixel's colour
nor its position tells."""

import numpy as np
import pytest
from masks import packed

from nbtools.errors import PackError
from nbtools.tasks import segment

SIZE = (64, 48)
NAMES = ["background", "striped", "dotted"]
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """28 images, with labels and with polygons."""
    return segment.demo(tmp_path_factory.mktemp("demo"), 28, size=SIZE, form="both")


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}


def test_the_same_seed_gives_the_same_bytes_and_few_images_are_the_first_of_many(folder, tmp_path):
    few, again, other = (
        contents(segment.demo(tmp_path / name, 9, size=SIZE, form="both", seed=seed))
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert few == again
    images, most = [name for name in few if name.endswith((".jpg", ".png"))], contents(folder)
    assert len(images) == 18
    assert all(most[name] == few[name] != other[name] for name in images)


def test_packing_the_polygons_gives_what_packing_the_labels_gives(folder, tmp_path):
    images, cvat = (packed(folder, labels=labels, into=tmp_path / labels) for labels in ("images", "cvat"))
    assert images.classes == cvat.classes == NAMES
    assert images.splits == cvat.splits == {"train": 20, "val": 4, "test": 4}
    order = [np.argsort(pack.names) for pack in (images, cvat)]
    for column in ("image", "label"):
        assert np.array_equal(images.arrays[column][order[0]], cvat.arrays[column][order[1]])
    assert "z_order" in (folder / "annotations.xml").read_text()
    assert not segment.validate(folder, labels="cvat", progress=False).rows


def test_neither_colour_nor_position_nor_both_tell_a_class(tmp_path):
    """Naive Bayes by histograms of the training pixels, with the class prior that is best on the test split."""
    many = packed(segment.demo(tmp_path / "many", 210, size=SIZE, seed=3))
    label, classes = np.asarray(many.arrays["label"]), len(NAMES)
    assert (np.bincount(label.ravel(), minlength=3) / label.size > 0.08).all()
    assert (label > 0).mean(0).min() > 0.02, "in the corners too"
    colour = (np.asarray(many.arrays["image"]) // 32) @ np.array([64, 8, 1], np.uint16)
    train, test = many.ids("train"), many.ids("test")
    by_colour, by_place = np.ones((512, classes)), np.ones((*SIZE, classes))
    for k in range(classes):
        by_colour[:, k] += np.bincount(colour[train][label[train] == k], minlength=512)
        by_place[..., k] += (label[train] == k).sum(0)
    share = np.bincount(label[train].ravel(), minlength=classes) / label[train].size
    odds = (
        by_colour[colour[test]] / by_colour.sum(1)[colour[test], None] / share,
        by_place / by_place.sum(-1)[..., None] / share,
    )
    for name, score in (("colour", odds[0]), ("position", odds[1] + 0 * odds[0]), ("both", odds[0] * odds[1])):
        best = max(miou((score * share**power).argmax(-1), label[test]) for power in (0, 0.25, 0.5, 0.75, 1))
        assert best < 0.35, name  # the network passes 0.75
    assert segment.position_prior(many, "test")["miou"] < 0.35


def miou(predicted, truth):
    both = [((predicted == k) & (truth == k)).sum() for k in range(len(NAMES))]
    either = [((predicted == k) | (truth == k)).sum() for k in range(len(NAMES))]
    return np.mean([b / e for b, e in zip(both, either, strict=True)])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 0}, "count must be 1 image or more, got 0"),
        ({"size": (96, 9)}, "size must be"),
        ({"size": 96}, "size must be"),
        ({"form": "coco"}, "form must be one of labels, cvat, both, got 'coco'"),
        ({"seed": -1}, "seed must be 0 or more"),
    ],
)
def test_impossible_arguments_are_refused_before_anything_is_written(tmp_path, options, message):
    with pytest.raises(PackError, match=message):
        segment.demo(tmp_path / "new", **{"count": 1, **options})
    assert not (tmp_path / "new").exists()
