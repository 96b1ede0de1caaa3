"""What is read wrong in lines of handwriting: tables that add up, pictures with the wrong characters coloured."""

import random
import sys
from collections import Counter

import numpy as np
import pytest
from fonts import made_font
from matplotlib.colors import same_color, to_rgba
from matplotlib.patches import Rectangle

from nbtools.errors import MissingExtra, PackError
from nbtools.figures import RIGHT, WRONG
from nbtools.tasks import hwdb
from nbtools.tasks.common import metrics
from nbtools.tasks.hwdb.formats import UNKNOWN
from tests.packs import pack_of

LETTERS = "手写中文行ab"
TEXTS = {"train": ["手写中文", "文文行a", "中"], "val": ["手写b", "写文"], "test": ["行行中", "手写中文行ab"]}


def answers(count=60, letters=LETTERS):
    """(truth, predicted): random texts of 0 to 6 characters, and what may have been read in them."""
    rng = random.Random(0)
    truth = ["".join(rng.choices(letters, k=rng.randint(0, 6))) for _ in range(count)]
    changes = ["", *letters, "手手"]
    return truth, ["".join(rng.choice(changes) if rng.random() < 0.4 else c for c in text) for text in truth]


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    """Seven lines, 32 px high, 20 px a character: black left of its middle, then white."""
    classes, samples = [*sorted(LETTERS), UNKNOWN], []
    lines = [(split, text) for split, texts in TEXTS.items() for text in texts]
    for _, text in lines:
        ink = np.repeat(np.array([255, 0] * len(text), np.uint8), 10)[:, None].repeat(32, 1)
        samples.append({"image": ink, "label": np.array([classes.index(c) for c in text])})
    splits = [split for split, _ in lines]
    shape = {"ragged": ("image", "label"), "bucket_by": "image", "classes": classes, "options": {"height": 32}}
    return pack_of(samples, tmp_path_factory.mktemp("lines"), task="hwdb", split=splits, **shape)


def written(sheet):
    """Text → colours of the texts on a sheet."""
    found = {}
    for text in sheet.axes[0].texts:
        found.setdefault(text.get_text(), []).append(text.get_color())
    return found


def test_all_tables_add_up_to_the_cer_of_the_metrics():
    truth, predicted = answers(200)
    wrong, _ = metrics.text_metrics(predicted, truth)["cer"]
    count = sum(map(len, truth))
    assert hwdb.scores(truth, predicted)["cer"] == wrong / count
    worst, seen = hwdb.worst(truth, predicted, range(200)), hwdb.by_frequency(truth, predicted, {"手": 12})
    widths = hwdb.by_width(truth, predicted, [20 * len(text) + n % 7 for n, text in enumerate(truth)])
    for table in (worst, seen, widths):
        assert (table.wrong.sum(), table.characters.sum()) == (wrong, count)
    confusions = hwdb.confusions(truth, predicted)
    assert confusions.wrong.sum() == wrong
    assert confusions.wrong.is_monotonic_decreasing
    assert (widths.lines.sum(), len(worst)) == (200, 200)
    for table in (hwdb.confusions([], []), hwdb.worst([], [], []), hwdb.by_width([], [], [])):
        assert len(table) == 0


def test_the_worst_lines_come_first_with_their_ids():
    truth, predicted = ["手写", "中文", "手", "写中文行", ""], ["手写", "中", "", "写", ""]
    table = hwdb.worst(truth, predicted, [7, 8, 9, 10, 11])
    assert table.id.tolist() == [9, 10, 8, 7, 11]
    assert table.cer.tolist() == [1.0, 0.75, 0.5, 0.0, 0.0]
    assert table.wrong.tolist() == [1, 3, 1, 0, 0]
    assert table.truth.tolist() == ["手", "写中文行", "中文", "手写", ""]


def test_frequencies_are_counts_of_the_texts_of_a_split(pack):
    counts = Counter("".join(TEXTS["train"]))
    assert hwdb.frequencies(pack) == {character: counts[character] for character in pack.classes}
    assert hwdb.frequencies(pack, "test")["行"] == 3


def test_lists_that_do_not_belong_together_are_refused(pack):
    with pytest.raises(PackError, match="got 1 for 2 lines"):
        hwdb.confusions(["手", "写"], ["手"])
    with pytest.raises(PackError, match="got 1 for 2 ids"):
        hwdb.show(pack, [0, 1], ["手"])
    with pytest.raises(PackError, match="got 0 for 1 line"):
        hwdb.scores(["手"], [])


def test_without_rapidfuzz_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rapidfuzz.distance", None)
    with pytest.raises(MissingExtra, match="pip install rapidfuzz"):
        hwdb.confusions(["手"], ["写"])


def test_scores_of_other_answers_are_those_of_an_evaluation():
    found = hwdb.scores(["手写中文", "手\ufffd", "文"], ["手中文a", "手\ufffd", "文"])
    assert found == {"cer": 3 / 7, "ar": 4 / 7, "cr": 5 / 7, "whole_accuracy": 1 / 3}


# Pictures


@pytest.fixture(params=["with a font", "without"])
def fonts(request, monkeypatch, tmp_path):
    """A machine with a Chinese font, and one without."""
    found = [made_font(tmp_path / "simhei.ttf", LETTERS[:5])] if request.param == "with a font" else []
    monkeypatch.setattr("nbtools.figures.findSystemFonts", lambda: found)
    return found


def test_wrong_characters_are_coloured_and_an_empty_box_stands_where_there_is_none(pack, fonts):
    ids = [*pack.ids("val"), pack.ids("test")[0]]
    sheet = hwdb.show(pack, ids, ["手中b", "写手文", "行中"])  # one substituted, one inserted, one missing
    found = {text: {c for c in colours if c in (RIGHT, WRONG)} for text, colours in written(sheet).items()}
    assert (found["中"], found["写"]) == ({WRONG}, {RIGHT})
    assert (found["手"], found["行"], found["b"]) == ({WRONG}, {RIGHT}, set())
    patches = [patch for patch in sheet.axes[0].patches if isinstance(patch, Rectangle)]
    above, below = [patch for patch in patches if to_rgba(patch.get_facecolor())[3] == 0]
    assert same_color(above.get_edgecolor(), RIGHT)
    assert same_color(below.get_edgecolor(), WRONG)
    assert any("install fonts-noto-cjk" in text for text in found) == (not fonts)
    sheet._repr_png_()  # a missing glyph would warn


def test_lines_are_shown_as_they_are_read_dark_on_light(pack):
    i = pack.ids("test")[0]
    image, truth, read = hwdb.preview(pack, i, "行")
    assert (truth, read) == ("行行中", "行")
    assert (image.shape, image.dtype) == ((32, 60), np.uint8)
    assert (image[:, 2].max(), image[:, 15].min()) == (0, 255)
    drawn = hwdb.show(pack, [i]).axes[0].images[0]
    assert (np.asarray(drawn.get_array()) == image).all()
    left, right, bottom, top = drawn.get_extent()
    assert (right - left) / (bottom - top) == pytest.approx(60 / 32, rel=0.02)
