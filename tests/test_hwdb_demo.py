"""Demo pages: deterministic, in hands that differ, from a font or none; and lines composed for the benchmarks."""

from itertools import pairwise

import numpy as np
import pytest

import nbtools as nb
from nbtools import figures
from nbtools.errors import PackError
from nbtools.tasks import hwdb
from nbtools.tasks.hwdb.demo import pool
from nbtools.tasks.hwdb.formats import lines_of


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """100 lines drawn with shapes, 84 of them for training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figures, "findSystemFonts", list)
        return hwdb.demo(tmp_path_factory.mktemp("pages"), 100, height=24)


def lines_in(folder, part=""):
    """Page → (line, image) of each of its lines, as the reader reads them."""
    found = {}
    for path in sorted(folder.rglob(f"*{part}*/*.dgrl")):
        data = path.read_bytes()
        found[path.relative_to(folder).as_posix()] = [(one, one.image(data)) for one in lines_of(data, path.name)]
    return found


def bytes_in(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.dgrl")}


def texts_in(folder, part=""):
    return [line.text for lines in lines_in(folder, part).values() for line, _ in lines]


def writers_in(folder):
    """Folder → the writers' numbers in its pages' names."""
    found: dict[str, set[str]] = {}
    for path in folder.rglob("*.dgrl"):
        found.setdefault(path.parent.name, set()).add(path.name.split("-")[0])
    return found


def test_the_demo_is_real_pages_in_train_and_test_folders_that_share_no_writer(pages):
    found, writers = lines_in(pages), writers_in(pages)
    assert sum(map(len, found.values())) == 100
    assert next(iter(found)) == "HWDB2.0Test/002-P16.dgrl"
    assert sorted(writers) == ["HWDB2.0Test", "HWDB2.0Train"]
    assert not writers["HWDB2.0Test"] & writers["HWDB2.0Train"]
    shapes = []
    for lines in found.values():
        boxes = [line.boxes[0] for line, _ in lines]
        assert all(above.top + above.height < below.top for above, below in pairwise(boxes))
        for line, image in lines:
            assert 4 <= len(line.text) <= 12
            assert image.min() < 150
            assert np.mean(image == 255) > 0.4
            shapes.append((len(line.text), image.shape[1]))
    lengths, widths = zip(*shapes, strict=True)
    assert 0.4 * 24 < np.polyfit(lengths, widths, 1)[0] < 1.2 * 24  # longer texts are wider, by about a character each


def test_every_character_occurs_in_train_as_soon_as_there_are_as_many_lines(pages):
    assert set("".join(texts_in(pages, "Train"))) == set(pool()[:60])
    assert len(texts_in(pages, "Train")) >= 60


def test_the_same_seed_gives_the_same_bytes_and_fewer_lines_are_the_first_of_more(pages, tmp_path, capsys):
    more, fewer = bytes_in(pages), bytes_in(hwdb.demo(tmp_path / "a", 40, height=24))
    said = capsys.readouterr().err  # no font here has the characters
    assert "drawn with shapes from the seed" in said
    assert "apt-get install fonts-lxgw-wenkai" in said
    assert len(fewer) == 7
    short = [name for name in fewer if fewer[name] != more[name]]
    assert short == ["HWDB2.0Train/004-P16.dgrl"]  # 4 of its 6 lines
    mine, theirs = lines_in(tmp_path / "a")[short[0]], lines_in(pages)[short[0]][:4]
    for (line, image), (other, picture) in zip(mine, theirs, strict=True):
        assert line.text == other.text
        assert np.array_equal(image, picture)
    other = bytes_in(hwdb.demo(tmp_path / "a", 40, height=24, seed=1))  # in place of the first
    assert all(other[name] != fewer[name] for name in fewer)
    real = tmp_path / "foreign" / "HWDB2.0Train" / "009-P16.dgrl"
    real.parent.mkdir(parents=True)
    real.write_bytes(b"\x24\0\0\0DGRL\0\0\0\0")
    with pytest.raises(PackError, match=r"009-P16.dgrl was not written by this demo"):
        hwdb.demo(tmp_path / "foreign", 12, height=24)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"count": 0}, "count must be a whole number of lines, 1 or more, got 0"),
        ({"count": "5"}, "count must be a whole number of lines, 1 or more, got '5'"),
        ({"characters": 6.5}, "characters must be .*, got 6.5"),
        ({"characters": 1}, "characters must be 2 to"),
        ({"characters": 9999}, "characters must be 2 to"),
        ({"characters": "aa"}, "at least 2 different characters"),
        ({"characters": "a😀"}, "two bytes in GB18030, got '😀'"),
        ({"length": (5, 4)}, "length must be"),
        ({"height": 8}, "height must be a whole number of pixels from 16 to 512, got 8"),
        ({"seed": -1}, "seed must be a whole number, 0 or more, got -1"),
    ],
)
def test_the_demo_refuses_an_impossible_request(tmp_path, wrong, message):
    with pytest.raises(PackError, match=message):
        hwdb.demo(tmp_path / "never", **{"count": 2, **wrong})
    assert not (tmp_path / "never").exists()


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_new_writers_are_read_by_the_advised_plan(tmp_path, monkeypatch):
    """The demo's promise: CER ≤ 0.25 on writers held out."""
    monkeypatch.setenv("NBTOOLS_CACHE", str(tmp_path / "cache"))
    pages = hwdb.demo(tmp_path / "pages", 900, characters=30)
    pack = hwdb.pack(pages, height=32, into=tmp_path / "pack", progress=False)
    run = nb.fit(hwdb, pack, nb.advise(hwdb, pack, measure=False).plan, run=tmp_path / "run", receipt=False)
    assert nb.evaluate(run, pack, "test")["cer"] <= 0.25
