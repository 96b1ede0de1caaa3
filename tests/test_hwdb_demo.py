"""Demo pages: deterministic, in hands that differ, from a font or none; and lines composed for the benchmarks."""

import math
import os
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import nn

import nbtools as nb
from benchmarks.compose import compose, held_back
from nbtools import fonts
from nbtools.errors import PackError
from nbtools.tasks import hwdb
from nbtools.tasks.hwdb.demo import Language, Writer, atlas, pool
from nbtools.tasks.hwdb.formats import lines_of

DATA = os.environ.get("NBTOOLS_REAL_DATA", "")
LATIN = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"


@pytest.fixture(autouse=True)
def no_cjk(monkeypatch):
    """A machine that has matplotlib's own font only."""
    monkeypatch.setattr(fonts, "findSystemFonts", lambda: [str(LATIN)])


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """100 lines drawn with shapes, 84 of them for training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fonts, "findSystemFonts", list)
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


def seen(ink: Any):
    """A character's ink in 16 × 16 parts of its own box, of length 1."""
    rows, columns = np.flatnonzero(ink.max(1) > 60), np.flatnonzero(ink.max(0) > 60)
    part = Image.fromarray(ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1])
    small = np.asarray(part.resize((16, 16), Image.Resampling.BOX), np.float64)
    return small / np.linalg.norm(small)


def test_an_installed_font_that_has_the_characters_draws_them_and_is_named(tmp_path, capsys):
    folder = hwdb.demo(tmp_path, 6, characters="AKOSXez37", height=48)
    assert "drawn with the font DejaVu Sans" in capsys.readouterr().err
    assert all(b"DejaVu Sans" in data[:100] for data in bytes_in(folder).values())
    face, prints, ink = ImageFont.truetype(LATIN, 34), {}, torch.from_numpy(atlas("37AKOSXez", 48, 0)[0])
    for one in "37AKOSXez":
        image = Image.new("L", (96, 96))
        ImageDraw.Draw(image).text((48, 48), one, 255, face, anchor="mm")
        prints[one] = seen(np.asarray(image))
    for place, one in enumerate("37AKOSXez"):  # without variation, as printed
        grey = Writer(0, 0, 9, 0.0).line(ink, np.array([place]), np.random.default_rng(0))
        assert max(prints, key=lambda name, grey=grey: (prints[name] * seen(255 - grey)).sum()) == one


def test_shapes_differ_by_character_and_seed_and_a_writer_varies_less_than_writers_differ():
    cells, _ = atlas(pool()[:30], 32, 0)
    assert (cells.shape, cells.dtype) == ((30, 32, 32), np.uint8)
    assert len({drawn.tobytes() for drawn in [*cells, *atlas(pool()[:30], 32, 1)[0]]}) == 60
    ink, written = torch.from_numpy(cells), []
    for number in range(6):
        rng, writer = np.random.default_rng(number), Writer(0, number, 30)
        written.append([writer.characters(ink, np.arange(30), rng).astype(float) for _ in range(2)])
    within = [np.abs(first - second).mean() for first, second in written]
    between = [np.abs(a[0] - b[0]).mean() for a, b in pairwise(written)]
    assert 2 < min(within) <= max(within) < min(between)


def test_what_came_before_tells_much_of_what_comes():
    spoken, rng = Language(60, 0), np.random.default_rng(0)
    text = [spoken.line(rng, (4, 12)).tolist() for _ in range(10_000)]
    single = Counter(one for line in text for one in line)
    pairs = Counter(pair for line in text for pair in pairwise(line))
    assert len(single) == 60
    after = math.exp(entropy(pairs) - entropy(Counter(pair[0] for pair in pairs.elements())))
    assert after < 0.45 * math.exp(entropy(single))  # the perplexity of a table of pairs, and of single characters


def entropy(counts):
    shares = np.array(list(counts.values())) / sum(counts.values())
    return -(shares * np.log(shares)).sum()


class Linear(nn.Module):
    """Each time step sees 40 columns of a line, 32 high: more than a character."""

    def __init__(self, card, plan):
        super().__init__()
        self.conv = nn.Conv2d(1, 1 + len(card.classes), (32, 40), (1, 4), (0, 20))

    def forward(self, batch):
        steps = (batch["image_length"] + 3) // 4
        return self.conv(batch["image"]).squeeze(2).permute(2, 0, 1), steps


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_new_writers_are_read_by_the_advised_plan_and_not_by_a_linear_model(tmp_path, monkeypatch):
    """The demo's promise: CER ≤ 0.25 on writers held out, where a linear model reads less than half."""
    monkeypatch.setenv("NBTOOLS_CACHE", str(tmp_path / "cache"))
    pages = hwdb.demo(tmp_path / "pages", 900, characters=30)
    pack = hwdb.pack(pages, height=32, into=tmp_path / "pack", progress=False)
    plan = nb.advise(hwdb, pack, measure=False).plan
    linear: Any = SimpleNamespace(**{name: getattr(hwdb, name) for name in hwdb.__all__} | {"model": Linear})
    cers = []
    tasks: dict[str, Any] = {"network": hwdb, "linear": linear}
    for name, task in tasks.items():
        run = nb.fit(task, pack, plan, run=tmp_path / name, receipt=False)
        cers.append(nb.evaluate(run, pack, "test")["cer"])
    assert cers[0] <= 0.25
    assert 1 - cers[1] < 0.5


@pytest.mark.parametrize("name", ["compose", "demo_text", "bars", "beam"])
def test_names_that_went_say_what_to_do_instead(name):
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; "):
        getattr(hwdb, name)
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        _ = hwdb.nothing


# Lines composed of images of characters


DRAWERS, SHAPES = 6, 5


def figure(shape, drawer):
    image = Image.new("1", (105, 105), 1)
    pen, size = ImageDraw.Draw(image), 30 + 3 * drawer
    corners = [(50 + size * np.cos(a), 50 + size * np.sin(a)) for a in np.arange(shape + 2) * 2 * np.pi / (shape + 2)]
    pen.line([*corners, corners[0]], 0, 4)
    return image


@pytest.fixture
def characters(tmp_path):
    """Omniglot's layout: two alphabets of five shapes by six people, whose images differ."""
    for alphabet in ("Latin", "Runes"):
        for shape in range(SHAPES):
            folder = tmp_path / "images" / alphabet / f"character{shape + 1:02}"
            folder.mkdir(parents=True)
            for drawer in range(1, DRAWERS + 1):
                figure(shape, drawer).save(folder / f"0{shape}_{drawer:02}.png")
    return tmp_path / "images"


@pytest.mark.parametrize("spoiled", ["Test", "Val"])
def test_no_pixel_of_a_held_back_drawer_is_in_another_split(characters, tmp_path, spoiled):
    folder = compose(characters, tmp_path / "before", 84, height=32)
    before, writers, held = bytes_in(folder), writers_in(folder), held_back(set(range(1, DRAWERS + 1)))
    assert {part: len(numbers) for part, numbers in writers.items()} == {"Train": 4, "Val": 1, "Test": 1}
    assert len(texts_in(folder)) == 84
    assert len(set("".join(texts_in(folder, "Train")))) == 2 * SHAPES
    for part, numbers in writers.items():
        assert {int(number) for number in numbers} == {one for one in held if held[one] == part}
    for path in characters.rglob("*.png"):
        if held[int(path.stem.split("_")[1])] == spoiled:
            Image.fromarray(np.random.default_rng(0).integers(0, 256, (105, 105), np.uint8)).save(path)
    after = bytes_in(compose(characters, tmp_path / "after", 84, height=32))
    for name in before:
        assert (before[name] != after[name]) == name.startswith(spoiled), name


@pytest.mark.real
@pytest.mark.skipif(not DATA, reason="NBTOOLS_REAL_DATA names no folder of real data")
def test_omniglots_characters_become_lines_of_real_hands(tmp_path, monkeypatch):
    monkeypatch.setenv("NBTOOLS_CACHE", str(tmp_path / "cache"))
    folder = compose(Path(DATA) / "omniglot.zip", tmp_path / "pages", 600)
    assert {part: len(numbers) for part, numbers in writers_in(folder).items()} == {"Train": 14, "Val": 2, "Test": 4}
    assert len(texts_in(folder)) == 600
