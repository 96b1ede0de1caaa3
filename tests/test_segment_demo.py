"""Demo images: raw files as people have them, the same from the same seed."""

import pytest
from masks import packed

from nbtools.errors import PackError
from nbtools.tasks import segment

SIZE = (64, 48)
NAMES = ["background", "striped", "dotted"]
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """28 images with labels."""
    return segment.demo(tmp_path_factory.mktemp("demo"), 28, size=SIZE)


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}


def test_the_same_seed_gives_the_same_bytes_and_few_images_are_the_first_of_many(folder, tmp_path):
    few, again, other = (
        contents(segment.demo(tmp_path / name, 9, size=SIZE, seed=seed))
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    )
    assert few == again
    images, most = [name for name in few if name.endswith((".jpg", ".png"))], contents(folder)
    assert len(images) == 18
    assert all(most[name] == few[name] != other[name] for name in images)


def test_the_validator_finds_nothing_and_splits_and_classes_are_the_folders(folder, tmp_path):
    made = packed(folder, into=tmp_path / "pack")
    assert (made.classes, made.splits) == (NAMES, {"train": 20, "val": 4, "test": 4})
    assert not segment.validate(folder, progress=False).rows


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 0}, "count must be 1 image or more, got 0"),
        ({"size": (96, 9)}, "size must be"),
        ({"size": 96}, "size must be"),
        ({"seed": -1}, "seed must be 0 or more"),
    ],
)
def test_impossible_arguments_are_refused_before_anything_is_written(tmp_path, options, message):
    with pytest.raises(PackError, match=message):
        segment.demo(tmp_path / "new", **{"count": 1, **options})
    assert not (tmp_path / "new").exists()
