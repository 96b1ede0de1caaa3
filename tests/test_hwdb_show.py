"""What is read wrong in lines of handwriting: tables that add up, pictures with the wrong characters coloured."""

import random
import sys
from collections import Counter
from functools import cache

import numpy as np
import pytest
import torch
from fonts import made_font
from IPython.core.formatters import DisplayFormatter
from matplotlib.colors import same_color, to_rgba
from matplotlib.patches import Rectangle
from PIL import Image

from nbtools import letters
from nbtools.errors import MissingExtra, PackError
from nbtools.tasks import hwdb
from nbtools.tasks.common import metrics
from nbtools.tasks.common.figures import RIGHT, WRONG
from nbtools.tasks.hwdb import analysis, visualize
from nbtools.tasks.hwdb.formats import UNKNOWN

LETTERS = "手写中文行ab"
TEXTS = {"train": ["手写中文", "文文行a", "中"], "val": ["手写b", "写文"], "test": ["行行中", "手写中文行ab"]}


@cache
def distance(truth, predicted):
    """Levenshtein's by its definition."""
    if not truth or not predicted:
        return len(truth) + len(predicted)
    if truth[0] == predicted[0] != UNKNOWN:
        return distance(truth[1:], predicted[1:])
    ways = (truth[1:], predicted[1:]), (truth[1:], predicted), (truth, predicted[1:])
    return 1 + min(distance(*way) for way in ways)


def answers(count=60, seed=0, letters=LETTERS):
    """(truth, predicted): random texts of 0 to 6 characters, and what may have been read in them."""
    rng = random.Random(seed)
    truth = ["".join(rng.choices(letters, k=rng.randint(0, 6))) for _ in range(count)]
    changes = ["", *letters, "手手"]
    return truth, ["".join(rng.choice(changes) if rng.random() < 0.4 else c for c in text) for text in truth]


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    """Seven lines in the prepared layout, 32 px high, 20 px a character: black left of its middle, then white."""
    folder = tmp_path_factory.mktemp("lines")
    for split, texts in TEXTS.items():
        (folder / split).mkdir()
        for n, text in enumerate(texts):
            grey = np.tile(np.repeat(np.array([0, 255], np.uint8), 10), (32, len(text)))
            Image.fromarray(grey).save(folder / split / f"{n}.png")
        rows = "".join(f"{n}.png,{text}\n" for n, text in enumerate(texts))
        (folder / f"{split}_img_id_gt.txt").write_text(rows, "utf-8")
    return hwdb.pack(folder, height=32, into=folder.parent / "pack", progress=False)


def written(sheet):
    """Text → colours of the texts on a sheet."""
    found = {}
    for text in sheet.axes[0].texts:
        found.setdefault(text.get_text(), []).append(text.get_color())
    return found


def boxes(sheet):
    """Edge colours of the empty boxes on a sheet."""
    patches = [patch for patch in sheet.axes[0].patches if isinstance(patch, Rectangle)]
    return [patch.get_edgecolor() for patch in patches if to_rgba(patch.get_facecolor())[3] == 0]


def test_an_alignment_spells_both_texts_with_as_few_wrong_pairs_as_there_can_be_of_the_kinds_that_the_metrics_count():
    for truth, predicted in zip(*answers(150, letters=LETTERS[:4] + UNKNOWN), strict=True):
        pairs = analysis.aligned(truth, predicted)
        assert ["".join(side) for side in zip(*pairs, strict=True)] in ([truth, predicted], [])
        kinds = [analysis.kind(*pair) for pair in pairs if not analysis.right(*pair)]
        assert len(kinds) == distance(truth, predicted)
        if UNKNOWN not in truth:
            assert tuple(map(kinds.count, analysis.KINDS)) == metrics.edits(predicted, truth)


def test_confusions_are_what_counting_pair_by_pair_finds():
    truth, predicted = answers(200)
    pairs = [
        (pair, n) for n, texts in enumerate(zip(truth, predicted, strict=True)) for pair in analysis.aligned(*texts)
    ]
    table = hwdb.confusions(truth, predicted, examples=2)
    for row in table.to_dict("records"):
        where = [n for pair, n in pairs if pair == (row["truth"], row["read"])]
        assert row["wrong"] == len(where)
        assert row["lines"] == sorted(set(where))[:2]
        assert row["kind"] == analysis.kind(row["truth"], row["read"])
    assert table.wrong.is_monotonic_decreasing
    assert not table.duplicated(["truth", "read"]).any()


def test_all_tables_add_up_to_the_cer_of_the_metrics():
    truth, predicted = answers(200)
    wrong, count = metrics.text_metrics(predicted, truth)["cer"]
    assert wrong > 50
    widths = [20 * len(text) + n % 7 for n, text in enumerate(truth)]
    tables = [hwdb.worst(truth, predicted), hwdb.by_width(truth, predicted, widths)]
    tables += [
        hwdb.by_width(truth, predicted, widths, [50, 10_000]),
        hwdb.by_frequency(truth, predicted, {"手": 12}),
    ]
    for table in tables:
        assert (table.wrong.sum(), table.characters.sum()) == (wrong, count)
    assert hwdb.confusions(truth, predicted).wrong.sum() == wrong
    for table in (tables[0], tables[3]):
        assert table[list(analysis.KINDS)].sum().sum() == wrong
    assert tables[1].lines.sum() == tables[2].lines.sum() == 200


def test_the_worst_lines_come_first_with_their_ids():
    truth, predicted = ["手写", "中文", "手", "写中文行"], ["手写", "中", "", "写"]
    table = hwdb.worst(truth, predicted, [7, 8, 9, 10])
    assert table.id.tolist() == [9, 10, 8, 7]
    assert table.cer.tolist() == [1.0, 0.75, 0.5, 0.0]
    assert table.missing.tolist() == [1, 3, 1, 0]
    assert hwdb.worst(truth, predicted, count=1).truth.tolist() == ["手"]


def test_bins_by_width_hold_about_as_many_lines_each_or_begin_where_they_are_told_to():
    truth = ["手"] * 80
    assert hwdb.by_width(truth, truth, range(80), bins=4).lines.tolist() == [20] * 4
    table = hwdb.by_width(truth, truth, range(80), bins=[10, 60, 500])
    assert table[["width", "lines"]].to_numpy().tolist() == [["0–9", 10], ["10–59", 50], ["60–79", 20]]


def test_characters_are_grouped_by_how_often_training_shows_them():
    table = hwdb.by_frequency(["手写写中", "文"], ["手中", "行文"], {"手": 1, "写": 9, "中": 10, "行": 99})
    assert table.drop(columns="cer").to_numpy().tolist() == [
        ["never", 1, 1, 0, 0, 0, 0],
        ["1–9", 2, 3, 0, 2, 0, 2],
        ["10–99", 1, 1, 0, 0, 0, 0],
        ["inserted", 0, 0, 0, 0, 1, 1],
    ]
    assert table.cer.tolist()[:3] == [0, 2 / 3, 0]
    assert np.isnan(table.cer[3])


def test_frequencies_are_counts_of_the_texts_of_a_split(pack):
    counts = Counter("".join(TEXTS["train"]))
    assert hwdb.frequencies(pack) == {character: counts[character] for character in pack.classes}
    assert hwdb.frequencies(pack, "test")["行"] == 3


def test_tables_add_up_to_the_cer_of_the_task_where_characters_are_unknown():
    classes = [*LETTERS, UNKNOWN]
    truth, predicted = answers(40, letters="".join(classes))
    longest, blank = max(map(len, predicted)), 0
    logits = torch.zeros(2 * longest, len(predicted), 1 + len(classes))  # each character, and a blank behind it
    labels = torch.zeros(len(truth), max(map(len, truth)), dtype=torch.int64)
    logits[:, :, blank] = 1
    for n, (stood, read) in enumerate(zip(truth, predicted, strict=True)):
        logits[range(0, 2 * len(read), 2), n, [1 + classes.index(c) for c in read]] = 2
        labels[n, : len(stood)] = torch.tensor([classes.index(c) for c in stood])
    lengths = torch.tensor([len(text) for text in truth])
    outputs = (logits, torch.full((len(truth),), 2 * longest))
    wrong, count = hwdb.metrics(outputs, {"label": labels, "label_length": lengths})["cer"]
    table = hwdb.worst(truth, predicted)
    assert (table.wrong.sum(), table.characters.sum()) == (wrong, count)
    assert UNKNOWN in "".join(predicted)


def test_without_lines_tables_are_empty_and_add_up_to_nothing():
    for table in (hwdb.confusions([], []), hwdb.worst([], []), hwdb.by_width([], [], [])):
        assert len(table) == 0
    assert hwdb.by_frequency([], [], {}).wrong.sum() == 0


def test_lists_that_do_not_belong_together_are_refused(pack):
    for refused in (hwdb.confusions, hwdb.worst):
        with pytest.raises(PackError, match="got 2 truths, 1 prediction"):
            refused(["手", "写"], ["手"])
        with pytest.raises(PackError, match="1 truth, 1 prediction and 2 ids"):
            refused(["手"], ["手"], [1, 2])
    with pytest.raises(PackError, match="got 3 for 1 line"):
        hwdb.by_width(["手"], ["手"], [1, 2, 3])
    with pytest.raises(PackError, match="got 1 for 2 ids"):
        hwdb.show(pack, [0, 1], ["手"])


def test_without_rapidfuzz_it_is_said_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "rapidfuzz.distance", None)
    with pytest.raises(MissingExtra, match="pip install rapidfuzz"):
        analysis.aligned("手", "写")


@pytest.fixture(params=["with a font", "without"])
def fonts(request, monkeypatch, tmp_path):
    """On a machine with a Chinese font, and on one without: how it writes a character."""
    found = [made_font(tmp_path / "squares.ttf", LETTERS[:5])] if request.param == "with a font" else []
    monkeypatch.setattr(letters, "system", lambda: found)
    return str if found else lambda letter: f"{ord(letter):04X}"[:2] + "\n" + f"{ord(letter):04X}"[2:]


def test_wrong_characters_are_coloured_and_an_empty_box_stands_where_there_is_none(pack, fonts):
    ids = [*pack.ids("val"), pack.ids("test")[0]]
    sheet = hwdb.show(pack, ids, ["手中b", "写手文", "行中"])  # one substituted, one inserted, one missing
    found, rest = written(sheet), "".join(TEXTS["val"]) + "行行中"
    coloured = {text: {c for c in colours if c in (RIGHT, WRONG)} for text, colours in found.items()}
    assert coloured[fonts("中")] == {WRONG}
    assert coloured[fonts("写")] == {RIGHT}
    assert coloured[fonts("手")] == {WRONG}
    assert coloured[fonts("行")] == {RIGHT}
    assert coloured["b"] == set()
    assert found["1 wrong"] == [WRONG] * 3
    assert {fonts(letter) if ord(letter) > 127 else letter for letter in rest} <= set(found)
    above, below = boxes(sheet)
    assert same_color(above, RIGHT)
    assert same_color(below, WRONG)
    sheet._repr_png_()  # a missing glyph would warn


def test_where_no_font_has_a_character_its_code_point_is_drawn_and_said(pack, fonts):
    found = written(hwdb.show(pack, pack.ids("val")))
    said = any("code points are drawn (U+624B as 62 over 4B)" in text for text in found)
    assert said == (fonts("手") == "62\n4B")
    assert fonts("手") in found


def test_a_right_answer_has_a_tick_and_no_colour(pack, fonts):
    found = written(hwdb.show(pack, pack.ids("train"), TEXTS["train"]))
    assert len(found["✓"]) == 3
    assert WRONG not in {colour for colours in found.values() for colour in colours}


def test_a_long_text_is_broken_within_the_sheet(pack, fonts):
    sheet = hwdb.show(pack, pack.ids("val")[:1], ["手写中" * 100])
    places = [text.get_position() for text in sheet.axes[0].texts]
    assert max(left for left, _ in places) < visualize.WIDE - visualize.MARGIN
    height = sheet.get_size_inches()[1] * 100
    assert max(base for _, base in places) < height
    assert [text.get_text() for text in sheet.axes[0].texts].count("PRE") > 3


def test_lines_are_shown_as_they_are_read_dark_on_light(pack):
    i = pack.ids("test")[0]
    image, truth, read = hwdb.preview(pack, i, "行")
    assert (truth, read) == ("行行中", "行")
    assert image.shape == (32, 60)
    assert image.dtype == np.uint8
    assert (image[:, 2].max(), image[:, 15].min()) == (0, 255)
    drawn = hwdb.show(pack, [i]).axes[0].images[0]
    assert (np.asarray(drawn.get_array()) == image).all()
    left, right, bottom, top = drawn.get_extent()
    assert (right - left) / (bottom - top) == pytest.approx(60 / 32, rel=0.02)


def test_where_nothing_is_wrong_a_notebook_shows_a_sentence_and_no_empty_strip(pack):
    said = {
        hwdb.show(pack, []): "No samples to show: the list of ids is empty.",
        hwdb.show(pack, [], []): "No samples to show: the list of ids is empty.",
        hwdb.confused(hwdb.confusions(["手"], ["手"])): ("Nothing was read wrong: the table of confusions is empty."),
    }
    for sheet, sentence in said.items():
        assert DisplayFormatter().format(sheet)[0] == {"text/plain": sentence}


def test_confusions_and_bars_are_drawn_as_the_tables_say(fonts):
    table = hwdb.confusions(["手写中文"] * 3 + ["写"], ["手中文"] * 3 + ["写a"])
    sheet = hwdb.confused(table)
    assert {"3 missing", "1 inserted", fonts("写"), "a", "→"} <= set(written(sheet))
    sheet._repr_png_()
    table = hwdb.by_frequency(["手写", "文"], ["手", "a文"], {"写": 5})
    drawn = hwdb.bars(table).axes[0]
    assert [bar.get_height() for bar in drawn.patches if isinstance(bar, Rectangle)] == pytest.approx([0, 100])
    assert [label.get_text() for label in drawn.get_xticklabels()] == ["never", "1–9"]
    hwdb.bars(hwdb.by_width(["手写"], ["手"], [40]))._repr_png_()


def test_scores_of_other_answers_are_those_of_an_evaluation():
    found = hwdb.scores(["手写中文", "手\ufffd", "文"], ["手中文a", "手\ufffd", "文"])
    assert found == {"cer": 3 / 7, "ar": 4 / 7, "cr": 5 / 7, "whole_accuracy": 1 / 3}
    with pytest.raises(PackError, match="belong together line by line"):
        hwdb.scores(["手"], [])
