"""Demo images: raw files as people have them, the same from the same seed."""

import pytest

from nbtools.errors import PackError
from nbtools.tasks import segment
from tests.segment.masks import checked, packed

SIZE = (64, 48)
pytestmark = pytest.mark.usefixtures("own_cache")


def contents(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}


def test_the_same_seed_gives_the_same_bytes_and_few_images_are_the_first_of_many(tmp_path):
    few, again, most, other = (
        contents(segment.demo(tmp_path / name, count, size=SIZE, seed=seed))
        for name, count, seed in (("a", 9, 0), ("b", 9, 0), ("c", 28, 0), ("d", 9, 1))
    )
    assert few == again
    images = [name for name in few if name.endswith((".jpg", ".png"))]
    assert len(images) == 18
    assert all(most[name] == few[name] != other[name] for name in images)


def test_the_validator_finds_nothing_and_splits_and_classes_are_the_folders(tmp_path):
    folder = segment.demo(tmp_path / "raw", 28, size=SIZE)
    made = packed(folder)
    assert (made.classes, made.splits) == (["background", "striped", "dotted"], {"train": 20, "val": 4, "test": 4})
    assert not checked(folder).rows


@pytest.mark.parametrize("options", [{"count": 0}, {"size": (96, 9)}, {"size": 96}, {"seed": -1}])
def test_impossible_arguments_are_refused_before_anything_is_written(tmp_path, options):
    with pytest.raises(PackError, match=f"{next(iter(options))} must be"):
        segment.demo(tmp_path / "new", **{"count": 1, **options})
    assert not (tmp_path / "new").exists()
