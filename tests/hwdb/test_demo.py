"""Demo pages: deterministic, in hands that differ, from a font or none; and pictures of packed lines."""

import numpy as np
import pytest
from fonts import made_font

import nbtools as nb
from nbtools import figures
from nbtools.errors import PackError
from nbtools.figures import GREY, RIGHT, WRONG
from nbtools.tasks import hwdb
from nbtools.tasks.hwdb.data import image_of, lines_of, text_of_codes
from nbtools.tasks.hwdb.demo import pool


@pytest.fixture(autouse=True)
def fontless(monkeypatch):
    monkeypatch.setattr(figures, "findSystemFonts", list)


def lines_in(folder, part=""):
    """Page → (text, image) of each of its lines."""
    pages = sorted(folder.rglob(f"*{part}*/*.dgrl"))
    each = {path.relative_to(folder).as_posix(): lines_of(path.read_bytes(), path.name) for path in pages}
    return {name: [(text_of_codes(line.codes)[0], image_of(line)) for line in lines] for name, lines in each.items()}


def bytes_in(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.dgrl")}


def test_the_demo_is_real_pages_in_train_and_test_folders_that_share_no_writer(tmp_path):
    pages = lines_in(hwdb.demo(tmp_path, 100, height=24))
    assert sum(map(len, pages.values())) == 100
    assert next(iter(pages)) == "HWDB2.0Test/002-P16.dgrl"
    hands = {part: {name.split("/")[1][:3] for name in pages if part in name} for part in ("Train", "Test")}
    assert hands["Train"]
    assert not hands["Test"] & hands["Train"]
    lines = [line for each in pages.values() for line in each]
    assert all(4 <= len(text) <= 12 and image.min() < 150 and np.mean(image == 255) > 0.4 for text, image in lines)
    slope = np.polyfit([len(text) for text, _ in lines], [image.shape[1] for _, image in lines], 1)[0]
    assert 0.4 * 24 < slope < 1.2 * 24  # longer texts are wider, by about a character each
    texts = "".join(text for each in lines_in(tmp_path, "Train").values() for text, _ in each)
    assert set(texts) == set(pool()[:60])  # every character, as soon as there are as many train lines


def test_the_same_seed_gives_the_same_bytes_and_fewer_lines_are_the_first_of_more(tmp_path, capsys):
    more, fewer = (
        bytes_in(hwdb.demo(tmp_path / "a", 100, height=24)),
        bytes_in(hwdb.demo(tmp_path / "b", 40, height=24)),
    )
    assert "drawn with shapes" in capsys.readouterr().err
    assert len(fewer) == 7
    assert [name for name in fewer if fewer[name] != more[name]] == ["HWDB2.0Train/004-P16.dgrl"]  # 4 of its 6 lines
    other = bytes_in(hwdb.demo(tmp_path / "b", 40, height=24, seed=1))  # in place of the first
    assert all(other[name] != fewer[name] for name in fewer)


def test_a_font_draws_the_characters_where_there_is_one(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(figures, "findSystemFonts", lambda: [made_font(tmp_path / "simhei.ttf", "手写")])
    [(_, image), *_] = lines_in(hwdb.demo(tmp_path / "pages", 6, characters="手写", height=24))[
        "HWDB2.0Train/001-P16.dgrl"
    ]
    assert np.mean(image < 255) > 0.3  # squares
    assert "drawn with simhei" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"count": 0}, "count must be a whole number of lines, 1 or more, got 0"),
        *(({"characters": n}, f"characters must be 2 to 6,763, or .*, got {n}") for n in (1, 9999, 12345, 6.5)),
        ({"characters": "aa"}, "different ones of two bytes in GB18030, got 'aa'"),
        ({"characters": "a😀"}, "different ones of two bytes in GB18030, got 'a😀'"),
        ({"length": (5, 4)}, "length must be"),
        ({"height": 8}, "height must be a whole number of pixels from 16 to 512, got 8"),
    ],
)
def test_the_demo_refuses_an_impossible_request(tmp_path, wrong, message):
    with pytest.raises(PackError, match=message):
        hwdb.demo(tmp_path / "never", **{"count": 2, **wrong})
    assert not (tmp_path / "never").exists()


@pytest.mark.usefixtures("own_cache")
def test_lines_are_shown_as_they_are_read_dark_on_light_under_their_texts(tmp_path):
    pack = hwdb.pack(hwdb.demo(tmp_path / "pages", 12, characters="ABC", height=32), height=32, progress=False)
    image, truth, read = hwdb.preview(pack, 0, "A")
    assert (truth, read) == (hwdb.text_of(pack, 0), "A")
    assert image.shape == (32, len(pack.sample(0)["image"]))
    assert np.mean(image > 200) > 0.4
    sheet = hwdb.show(pack, [0, 1], [truth, "wrong"])
    assert [text.get_color() for text in sheet.axes[0].texts] == [RIGHT, WRONG]
    assert sheet.axes[0].texts[1].get_text() == f"{hwdb.text_of(pack, 1)} ≠ wrong"
    assert np.array_equal(np.asarray(sheet.axes[0].images[0].get_array()), image)
    assert [text.get_color() for text in hwdb.show(pack, [0]).axes[0].texts] == [GREY]
    with pytest.raises(PackError, match="got 1 for 2 ids"):
        hwdb.show(pack, [0, 1], ["A"])


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.usefixtures("own_cache")
def test_new_writers_are_read_by_the_advised_plan(tmp_path):
    """The demo's promise: CER ≤ 0.25 on writers held out."""
    pages = hwdb.demo(tmp_path / "pages", 900, characters=30)
    pack = hwdb.pack(pages, height=32, into=tmp_path / "pack", progress=False)
    run = nb.fit(hwdb, pack, nb.advise(hwdb, pack, measure=False).plan, run=tmp_path / "run", receipt=False)
    assert nb.evaluate(run, pack, "test")["cer"] <= 0.25
