"""Demo pages and composed lines: deterministic, in hands that differ, from any font or none; held-back writers."""

import json
import math
import os
import shutil
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from fontTools.fontBuilder import FontBuilder
from fontTools.pens.ttGlyphPen import TTGlyphPen
from fontTools.ttLib import TTFont
from matplotlib import font_manager
from PIL import Image, ImageDraw

from nbtools.errors import NbtoolsError, PackError
from nbtools.tasks.hwdb.formats.dgrl import read_page
from nbtools.tasks.hwdb.writing import glyphs, hands
from nbtools.tasks.hwdb.writing.compose import compose, held_back
from nbtools.tasks.hwdb.writing.demo import demo
from nbtools.tasks.hwdb.writing.language import demo_text, language

DATA = os.environ.get("NBTOOLS_REAL_DATA", "")
FONTS = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
LATIN = FONTS / "DejaVuSans.ttf"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def no_cjk(monkeypatch):
    """A machine that has matplotlib's own fonts only; one of them claims to have every character there is."""
    names = [str(path) for path in sorted(FONTS.glob("*.ttf"))]
    assert any("LastResort" in name for name in names)
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: names)
    monkeypatch.setitem(sys.modules, "mplfonts", None)
    return names


@pytest.fixture(scope="module")
def invented(tmp_path_factory):
    """100 lines of invented characters, 84 of them for training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(glyphs, "installed", lambda: iter(()))
        return demo(tmp_path_factory.mktemp("invented"), 100, height=24)


def bars(path, characters, family="Test Kai"):
    """A real font of these characters, each with bars of its own: the bits of its place in the list."""
    names = [f"u{ord(one):04X}" for one in characters]
    drawn = {".notdef": box(100, 100, 900, 800)} | {
        name: box(*((100, 80 * bit, 100 + 700 * (1 + (place >> bit & 1)) // 2, 80 * bit + 50) for bit in range(10)))
        for place, name in enumerate(names)
    }
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder([".notdef", *names])
    builder.setupCharacterMap({ord(one): name for one, name in zip(characters, names, strict=True)})
    builder.setupGlyf(drawn)
    builder.setupHorizontalMetrics(dict.fromkeys(drawn, (1000, 0)))
    builder.setupHorizontalHeader(ascent=900, descent=-100)
    builder.setupNameTable({"familyName": family, "styleName": "Regular"})
    builder.setupOS2()
    builder.setupPost()
    builder.save(path)
    return path


def box(*corners):
    pen = TTGlyphPen(None)
    for left, low, right, high in corners if isinstance(corners[0], tuple) else [corners]:
        pen.moveTo((left, low))
        for point in ((left, high), (right, high), (right, low)):
            pen.lineTo(point)
        pen.closePath()
    return pen.glyph()


def pages_in(folder):
    """Name → page of every page below a folder, as the reader reads it."""
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.dgrl"))
    return {name: read_page((folder / name).read_bytes(), name) for name in names}


def bytes_in(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.dgrl")}


def texts_in(folder, part=""):
    return [line.text for name, page in pages_in(folder).items() if part in name for line in page.lines]


def writers_in(folder):
    """Folder → the writers' numbers in its pages' names."""
    found: dict[str, set[str]] = {}
    for path in folder.rglob("*.dgrl"):
        found.setdefault(path.parent.name, set()).add(path.name.split("-")[0])
    return found


# -- pages


def test_the_demo_is_real_pages_in_train_and_test_folders_that_share_no_writer(invented):
    pages = pages_in(invented)
    assert sum(len(page.lines) for page in pages.values()) == 100
    assert next(iter(pages)) == "HWDB2.0Test/002-P16.dgrl"
    writers = writers_in(invented)
    assert sorted(writers) == ["HWDB2.0Test", "HWDB2.0Train"]
    assert not writers["HWDB2.0Test"] & writers["HWDB2.0Train"]
    for page in pages.values():
        assert 1 <= len(page.lines) <= 12
        for line in page.lines:
            assert 4 <= len(line.text) <= 12
            assert line.image.shape == (line.height, line.width)
            assert line.top + line.height <= page.height
            assert line.left + line.width <= page.width
            assert line.image.min() < 150
            assert np.mean(line.image == 255) > 0.4


def test_lines_of_a_page_lie_one_below_the_other(invented):
    for page in pages_in(invented).values():
        assert all(above.top + above.height < below.top for above, below in pairwise(page.lines))


def test_longer_texts_are_wider_by_about_a_character_each(invented):
    lines = [line for page in pages_in(invented).values() for line in page.lines]
    lengths, widths = [len(line.text) for line in lines], [line.width for line in lines]
    assert 0.4 * 24 < np.polyfit(lengths, widths, 1)[0] < 1.2 * 24


def test_every_character_occurs_in_train_as_soon_as_there_are_as_many_lines(invented):
    assert set("".join(texts_in(invented, "Train"))) == set(glyphs.pool()[:60])
    assert len(texts_in(invented, "Train")) >= 60


def test_the_same_seed_gives_the_same_bytes_and_fewer_lines_are_the_first_of_more(invented, no_cjk, tmp_path):
    more = bytes_in(invented)
    fewer = bytes_in(demo(tmp_path / "a", 40, height=24))
    assert len(fewer) == 7
    short = [name for name in fewer if fewer[name] != more[name]]
    assert short == ["HWDB2.0Train/004-P16.dgrl"]  # 4 of its 6 lines
    for mine, theirs in zip(read_page(fewer[short[0]]).lines, read_page(more[short[0]]).lines[:4], strict=True):
        assert mine.text == theirs.text
        assert np.array_equal(mine.image, theirs.image)
    other = bytes_in(demo(tmp_path / "b", 40, height=24, seed=1))
    assert all(other[name] != fewer[name] for name in fewer)


def test_pages_of_one_bit_hold_the_same_lines(no_cjk, tmp_path):
    grey = pages_in(demo(tmp_path / "grey", 12, height=24))
    black = pages_in(demo(tmp_path / "black", 12, height=24, bits=1))
    for name, page in black.items():
        assert page.bits == 1
        for line, other in zip(page.lines, grey[name].lines, strict=True):
            assert line.text == other.text
            assert np.array_equal(line.image == 0, other.image < 200)


def test_a_demo_replaces_a_demo_but_no_page_of_another_origin(no_cjk, tmp_path):
    demo(tmp_path, 30, height=24)
    assert len(texts_in(demo(tmp_path, 12, height=24, seed=1))) == 12
    real = tmp_path / "HWDB2.0Train" / "009-P16.dgrl"
    real.write_bytes(b"\x24\0\0\0DGRL\0\0\0\0")
    with pytest.raises(PackError, match=r"009-P16.dgrl was not written by this demo"):
        demo(tmp_path, 12, height=24)
    assert real.exists()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"count": 0}, "count must be a whole number of lines, 1 or more, got 0"),
        ({"count": "5"}, "count must be a whole number of lines, 1 or more, got '5'"),
        ({"characters": 6.5}, "characters must be .*, got 6.5"),
        ({"characters": 1}, "characters must be 2 to"),
        ({"characters": 9999}, "characters must be 2 to"),
        ({"characters": "aa"}, "each once"),
        ({"characters": "a😀"}, "two bytes in GB18030, got '😀'"),
        ({"length": (5, 4)}, "length must be"),
        ({"length": 8}, "length must be"),
        ({"length": ("a", "b")}, "length must be"),
        ({"height": 8}, "height must be a whole number of pixels from 16 to 512, got 8"),
        ({"height": 32.5}, "got 32.5"),
        ({"variation": 3}, "variation must be a number from 0 to 2, got 3"),
        ({"variation": "x"}, "variation must be a number from 0 to 2, got 'x'"),
        ({"bits": 4}, "bits must be 1 or 8"),
        ({"seed": -1}, "seed must be a whole number, 0 or more, got -1"),
        ({"seed": 0.5}, "seed must be a whole number, 0 or more, got 0.5"),
    ],
)
def test_the_demo_refuses_an_impossible_request(tmp_path, wrong, said):
    with pytest.raises(PackError, match=said):
        demo(tmp_path / "never", **{"count": 2, **wrong})
    assert not (tmp_path / "never").exists()


# -- fonts


def test_a_persons_font_draws_the_lines(tmp_path, capsys):
    letters = "AKOSXez37Ω"
    folder = demo(tmp_path, 40, characters=letters, font=LATIN, length=(1, 1), variation=0, height=48)
    assert "drawn with the font DejaVu Sans" in capsys.readouterr().out
    prints = {one: seen(plain(one)) for one in letters}
    for page in pages_in(folder).values():
        assert "DejaVu Sans" in page.illustration
        for line in page.lines:
            picture = seen(255 - line.image)
            assert max(prints, key=lambda one: (prints[one] * picture).sum()) == line.text


def plain(character):
    """Ink of a character as Pillow alone draws it."""
    image = Image.new("L", (96, 96))
    letters = glyphs.opened(LATIN, 96)
    ImageDraw.Draw(image).text((48, 48), character, 255, letters, anchor="mm")
    return np.asarray(image)


def seen(ink):
    """A character's ink in 16 × 16 parts of its own box, of length 1."""
    rows, columns = np.flatnonzero(ink.max(1) > 60), np.flatnonzero(ink.max(0) > 60)
    part = Image.fromarray(ink[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1])
    small = np.asarray(part.resize((16, 16), Image.Resampling.BOX), np.float64)
    return small / np.linalg.norm(small)


@pytest.mark.parametrize("form", ["woff", "otc"])
def test_web_fonts_and_others_that_freetype_knows_need_no_conversion(tmp_path, form):
    plain, converted = bars(tmp_path / "plain.ttf", glyphs.pool()[:9]), tmp_path / f"font.{form}"
    font = TTFont(plain)
    font.flavor = "woff" if form == "woff" else None
    font.save(converted)
    assert np.array_equal(glyphs.atlas(9, converted, 32, 0).ink, glyphs.atlas(9, plain, 32, 0).ink)


def test_of_a_font_with_few_characters_those_it_has_are_taken(tmp_path):
    pool = glyphs.pool()
    font = bars(tmp_path / "every third.ttf", pool[:300:3])
    assert glyphs.atlas(60, font, 32, 0).characters == pool[:180:3]
    with pytest.raises(PackError, match="lacks all but 100 of the Chinese characters of GB 2312"):
        demo(tmp_path / "never", 10, characters=101, font=font)
    with pytest.raises(PackError, match="lacks 2 of the 3 in characters, from '一是' on"):
        demo(tmp_path / "never", 10, characters=pool[:3], font=font)


def test_a_font_that_has_one_box_for_all_it_lacks_is_seen_through():
    [path] = FONTS.glob("LastResort*.ttf")
    with pytest.raises(PackError, match="lacks 4 of the 5 in characters"):
        glyphs.atlas("的一是不了", path, 32, 0)


@pytest.mark.parametrize(("name", "said"), [("no.ttf", "is no file"), ("text.ttf", "is no font")])
def test_what_is_no_font_is_said_so(tmp_path, name, said):
    (tmp_path / "text.ttf").write_text("not a font")
    with pytest.raises(PackError, match=said):
        demo(tmp_path / "never", 10, font=tmp_path / name)


def test_an_installed_font_is_found_and_one_that_sounds_written_comes_first(no_cjk, tmp_path, monkeypatch, capsys):
    pool = glyphs.pool()[:60]
    fonts = [
        bars(tmp_path / "Aaa.ttf", pool, "Plain"),
        bars(tmp_path / "SomeKai-Bold.ttf", pool, "Kai Bold"),
        bars(tmp_path / "SomeKai-Regular.ttf", pool, "Kai"),
        bars(tmp_path / "Kai-few.ttf", pool[:50], "Few"),
    ]
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: [*no_cjk, *map(str, fonts)])
    demo(tmp_path / "pages", 6, height=24)
    assert "drawn with the font Kai Regular." in capsys.readouterr().out


def test_the_font_of_the_package_mplfonts_is_found(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "mplfonts", raising=False)
    package = tmp_path / "mplfonts"
    (package / "fonts").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('it need not be imported')")
    bars(package / "fonts" / "NotoSansCJKsc-Regular.otf", glyphs.pool()[:20], "Noto")
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: [str(LATIN)])
    monkeypatch.syspath_prepend(tmp_path)
    assert glyphs.atlas(20, None, 24, 0).drawn == "the font Noto Regular"


# -- invented characters


def test_without_a_font_characters_are_invented_and_it_says_so(no_cjk, tmp_path, capsys):
    folder = demo(tmp_path, 6, height=24)
    said = capsys.readouterr().out
    assert "strokes invented from the seed stand for them, each code point its own" in said
    assert "apt-get install fonts-lxgw-wenkai" in said
    assert all("strokes invented from the seed" in page.illustration for page in pages_in(folder).values())


def test_each_invented_character_is_its_own_and_no_two_are_alike():
    ink = glyphs.soft([glyphs.invented(one, 32, 0) for one in glyphs.pool()[:300]]).reshape(300, -1) / 255
    lengths = (ink**2).sum(1)
    apart = (lengths[:, None] + lengths - 2 * ink @ ink.T) / (lengths[:, None] + lengths)
    assert apart[~np.eye(300, dtype=bool)].min() > 0.15  # 0 for the same picture, 1 for strokes that nowhere meet
    other = glyphs.soft([glyphs.invented(one, 32, 1) for one in glyphs.pool()[:300]]).reshape(300, -1) / 255
    assert (((ink - other) ** 2).sum(1) / (lengths + (other**2).sum(1))).min() > 0.15


def test_an_invented_character_does_not_depend_on_the_others_asked_for():
    one = np.asarray(glyphs.invented("的", 32, 5))
    glyphs.invented("一", 32, 5)
    assert np.array_equal(one, np.asarray(glyphs.invented("的", 32, 5)))


# -- hands


def test_a_writer_varies_less_than_writers_differ():
    ink = torch.from_numpy(glyphs.soft([glyphs.invented(one, 32, 0) for one in glyphs.pool()[:30]]))
    everything = np.arange(30)
    written = []
    for seed in range(6):
        rng = np.random.default_rng(seed)
        writer = hands.hand(rng, 30, 1.0)
        written.append([hands.characters(ink, everything, writer, rng).astype(float) for _ in range(2)])
    within = [np.abs(first - second).mean() for first, second in written]
    between = [np.abs(a[0] - b[0]).mean() for a, b in pairwise(written)]
    assert min(within) > 2
    assert max(within) < min(between)


def test_variation_zero_writes_as_printed_whoever_writes():
    ink = torch.from_numpy(glyphs.soft([glyphs.invented(one, 32, 0) for one in "的一"]))
    lines = []
    for seed in range(2):
        rng = np.random.default_rng(seed)
        lines += hands.lines(ink, [np.array([0, 1])], hands.hand(rng, 2, 0), rng)
    assert np.array_equal(lines[0], lines[1])


# -- language


def test_the_language_is_of_the_set_of_characters_in_whatever_order():
    assert demo_text(20, "甲乙丙丁", seed=3) == demo_text(20, "丁丙甲乙", seed=3)
    assert demo_text(20, "甲乙丙丁", seed=3) != demo_text(20, "甲乙丙丁", seed=4)
    assert demo_text(20, 60) == demo_text(20, glyphs.pool()[:60])


def test_what_came_before_tells_much_of_what_comes():
    text = demo_text(20_000)
    single, pairs = Counter("".join(text)), Counter(pair for line in text for pair in pairwise(line))
    assert set(single) == set(glyphs.pool()[:60])
    alone = math.exp(entropy(single))
    after = math.exp(entropy(pairs) - entropy(Counter(pair[0] for pair in pairs.elements())))
    assert after < 0.45 * alone  # the perplexity that a table of pairs, or of single characters, gives


def entropy(counts):
    shares = np.array(list(counts.values())) / sum(counts.values())
    return -(shares * np.log(shares)).sum()


def test_the_demos_lines_are_in_that_language_and_not_the_training_texts_own(invented):
    spoken, lines = language(glyphs.pool()[:60], 0), texts_in(invented)
    place = {character: n for n, character in enumerate(spoken.characters)}
    follows = [place[b] in spoken.followers[place[a]] for line in lines for a, b in pairwise(line)]
    assert 0.65 < np.mean(follows) < 0.85
    assert len(set(lines) & set(demo_text(2000))) < 10


# -- composed lines

DRAWERS, SHAPES = 6, 5


@pytest.fixture(scope="module")
def characters(tmp_path_factory):
    """Omniglot's layout: two alphabets of five shapes by six people, whose images differ."""
    root = tmp_path_factory.mktemp("characters")
    for alphabet in ("Latin", "Runes"):
        for shape in range(SHAPES):
            folder = root / "images" / alphabet / f"character{shape + 1:02}"
            folder.mkdir(parents=True)
            for drawer in range(1, DRAWERS + 1):
                figure(shape, drawer).save(folder / f"0{shape}_{drawer:02}.png")
    return root


def figure(shape, drawer):
    image = Image.new("1", (105, 105), 1)
    pen, size = ImageDraw.Draw(image), 30 + 3 * drawer
    corners = [(50 + size * np.cos(a), 50 + size * np.sin(a)) for a in np.arange(shape + 2) * 2 * np.pi / (shape + 2)]
    pen.line([*corners, corners[0]], 0, 4)
    return image


def test_composed_lines_are_pages_of_held_back_drawers_and_say_which(characters, tmp_path, capsys):
    folder = compose(characters, tmp_path, 84, height=32)
    pages, writers = pages_in(folder), writers_in(folder)
    assert sum(len(page.lines) for page in pages.values()) == 84
    assert {part: len(numbers) for part, numbers in writers.items()} == {"Train": 4, "Val": 1, "Test": 1}
    assert len(set.union(*writers.values())) == DRAWERS
    held = held_back(set(range(1, DRAWERS + 1)), 0.1, 0.2)
    for part, numbers in writers.items():
        assert {int(number) for number in numbers} == {one for one in held if held[one] == part.lower()}
    said = capsys.readouterr().out
    assert "by 6 drawers" in said
    assert f"{int(min(writers['Val']))} for val and {int(min(writers['Test']))} for test" in said


@pytest.mark.parametrize(("spoiled", "same"), [("test", ("Train", "Val")), ("val", ("Train", "Test"))])
def test_no_pixel_of_a_held_back_drawer_is_in_another_split(characters, tmp_path, spoiled, same):
    before = bytes_in(compose(characters, tmp_path / "before", 84, height=32))
    changed = shutil.copytree(characters, tmp_path / "changed")
    held = [number for number, split in held_back(set(range(1, DRAWERS + 1)), 0.1, 0.2).items() if split == spoiled]
    for path in changed.rglob("*.png"):
        if int(path.stem.split("_")[1]) in held:
            Image.fromarray(np.random.default_rng(0).integers(0, 256, (105, 105), np.uint8)).save(path)
    after = bytes_in(compose(changed, tmp_path / "after", 84, height=32))
    for name in before:
        assert (before[name] == after[name]) == name.startswith(same), name


def test_composing_more_or_anew_holds_the_same_drawers_back(characters, tmp_path):
    some = compose(characters, tmp_path / "some", 72, height=32)
    more = compose(characters, tmp_path / "more", 144, height=32, seed=9)
    assert writers_in(some) == writers_in(more)
    assert bytes_in(some) != {name: data for name, data in bytes_in(more).items() if name in bytes_in(some)}
    again = bytes_in(compose(characters, tmp_path / "again", 144, height=32))
    assert all(again[name] == data for name, data in bytes_in(some).items())


def test_a_line_is_of_one_alphabet_and_every_character_is_trained_on(characters, tmp_path):
    folder = compose(characters, tmp_path, 120, height=32)
    names = json.loads((folder / "names.json").read_text(encoding="utf-8"))
    assert sorted(names.values()) == sorted(
        f"images/{a}/character{n + 1:02}" for a in ("Latin", "Runes") for n in range(SHAPES)
    )
    for text in texts_in(folder):
        assert len({names[one].split("/")[1] for one in text}) == 1
    assert set("".join(texts_in(folder, "Train"))) == set(names)


def test_alphabets_are_selected_by_name(characters, tmp_path):
    folder = compose(characters, tmp_path / "runes", 24, alphabets="Runes", height=32)
    assert all("/Runes/" in place for place in json.loads((folder / "names.json").read_text("utf-8")).values())
    with pytest.raises(PackError, match="alphabets must be some of Latin, Runes, got Klingon"):
        compose(characters, tmp_path / "never", 24, alphabets=["Klingon"])


def test_a_folder_named_by_a_character_is_that_and_without_drawers_images_are_held_back(tmp_path, capsys):
    for place, name in enumerate("的ab"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for n in range(8):
            picture = figure(place, n).convert("L")
            Image.fromarray(255 - np.asarray(picture)).save(tmp_path / "images" / name / f"{n}.png")  # white on black
    folder = compose(tmp_path / "images", tmp_path / "pages", 60, height=32)
    assert set("".join(texts_in(folder))) == set("的ab")
    assert all(np.mean(line.image == 255) > 0.4 for page in pages_in(folder).values() for line in page.lines)
    assert "The names tell no drawers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda folder: (folder / "loose.png").write_bytes(b""), "no image in a folder of its character"),
        (
            lambda folder: (folder / "A" / "a_01.png").write_bytes(b"not a picture"),
            "a_01.png: the file is a whole image",
        ),
        (lambda folder: figure(0, 1).save(folder / "A" / "a_01.png"), "leave none of 1 drawer to train on"),
    ],
)
def test_what_cannot_be_composed_is_said_so(tmp_path, make, said):
    (tmp_path / "images" / "A").mkdir(parents=True)
    make(tmp_path / "images")
    share = 0 if "whole image" in said else 0.1
    with pytest.raises(NbtoolsError, match=said):
        compose(tmp_path / "images", tmp_path / "pages", 12, val=share, test=share)


@pytest.mark.real
@pytest.mark.skipif(not DATA, reason="NBTOOLS_REAL_DATA names no folder of real data")
def test_omniglots_characters_become_lines_of_real_hands(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NBTOOLS_CACHE", str(tmp_path / "cache"))
    folder = compose(Path(DATA) / "omniglot.zip", tmp_path / "pages", 600, progress=False)
    writers, names = writers_in(folder), json.loads((folder / "names.json").read_text("utf-8"))
    assert {part: len(numbers) for part, numbers in writers.items()} == {"Train": 14, "Val": 2, "Test": 4}
    assert len(names) == 136
    assert names["α"].endswith("Greek/character01")
    assert names["z"].endswith("Latin/character26")
    assert "600 lines of 136 characters" in capsys.readouterr().out
    assert len(texts_in(folder)) == 600
