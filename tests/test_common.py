"""What the tasks share: text metrics against slow obvious versions, CTC, source files, demo folders, figures."""

import math
import sys
from io import BytesIO

import numpy as np
import pytest
import torch
from fonts import made_font
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.formatters import DisplayFormatter
from matplotlib.figure import Figure
from PIL import Image
from torch.nn import functional as F

from nbtools import figures, fonts
from nbtools.data import threaded
from nbtools.errors import MissingExtra, PackError
from nbtools.tasks.common import ctc, files, labels, mistakes
from nbtools.tasks.common.demo import write_demo
from nbtools.tasks.common.metrics import accuracy, edits, text_metrics, whole_accuracy
from nbtools.tasks.common.report import Refused

# Metrics


def slow_distance(a: str, b: str) -> int:
    """Levenshtein's recurrence, row by row."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row = row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(previous[j] + 1, row[-1] + 1, previous[j - 1] + (x != y)))
    return row[-1]


@given(st.text("abc", max_size=8), st.text("abc", max_size=8))
def test_edits_are_as_few_as_the_recurrence_says_and_fit_the_lengths(guess, truth):
    substitutions, deletions, insertions = edits(guess, truth)
    assert substitutions + deletions + insertions == slow_distance(truth, guess)
    assert deletions - insertions == len(truth) - len(guess)


def test_cer_ar_and_cr_by_their_definitions_over_all_characters():
    guesses, truths = ["abd", "ab", "xabc", "abc"], ["abc", "abc", "abc", "abc"]  # S, D, I, right: 12 characters
    found = text_metrics(guesses, truths)
    assert found == {"cer": (3, 12), "ar": (9, 12), "cr": (10, 12), "whole_accuracy": (1, 4)}
    negative = text_metrics(["aaaaaa"], ["b"])
    assert (negative["cer"], negative["ar"], negative["cr"]) == ((6, 1), (-5, 1), (0, 1))
    assert text_metrics([[1, 2]], [(1, 2)])["whole_accuracy"] == (1, 1)


def test_a_missing_rapidfuzz_is_named_with_the_command_that_installs_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "rapidfuzz.distance", None)
    with pytest.raises(MissingExtra, match=r"pip install rapidfuzz, or nbtools\[text\]"):
        edits("a", "b")


def test_accuracies_count_positions_and_rows():
    predicted, target = torch.tensor([[1, 2, 0], [1, 1, 1], [0, 2, 2]]), torch.tensor([[1, 2, 0], [1, 0, 1], [2, 2, 0]])
    assert accuracy(predicted, target) == (6, 9)
    assert whole_accuracy(predicted, target) == (1, 3)


# CTC


def test_ctc_counts_each_samples_own_steps_and_not_the_padding():
    torch.manual_seed(0)
    logits, steps = torch.randn(12, 3, 6), torch.tensor([12, 7, 9])
    labels, lengths = torch.tensor([[0, 1, 2, 3], [4, 4, 0, 0], [2, 0, 0, 0]]), torch.tensor([4, 2, 1])
    together = ctc.loss((logits, steps), labels, lengths)
    alone = [
        F.ctc_loss(logits[:t, b].log_softmax(1), labels[b, :n] + 1, torch.tensor(t), torch.tensor(n), reduction="sum")
        for b, (t, n) in enumerate(zip(steps.tolist(), lengths.tolist(), strict=True))
    ]
    assert torch.isclose(together, torch.stack(alone).sum())
    with torch.autocast("cpu", torch.bfloat16):  # where torch has no CTC
        assert ctc.loss((logits.bfloat16(), steps), labels, lengths).dtype == torch.float32


@given(st.lists(st.integers(0, 2), max_size=6), st.integers(1, 9))
def test_a_text_fits_exactly_where_its_ctc_loss_is_finite(text, steps):
    labels = torch.tensor([text + [text[-1] if text else 0] * 2])  # padding that looks like a repeat
    length = torch.tensor([len(text)])
    fits = ctc.feasible(torch.tensor([steps]), labels, length)
    loss = ctc.loss((torch.zeros(steps, 1, 4), torch.tensor([steps])), labels, length)
    assert bool(fits) == bool(torch.isfinite(loss)) == (steps >= ctc.needed_steps(text))


def test_greedy_decoding_merges_repeats_drops_blanks_and_ends_with_the_sample():
    path = torch.tensor([[1, 1, 0, 1, 2, 2, 0, 3], [0, 0, 3, 3, 0, 2, 2, 2]])
    read = ctc.greedy((F.one_hot(path.t(), 4).float(), torch.tensor([8, 5])))
    assert read == ctc.texts(torch.tensor([[0, 0, 1, 2], [2, 9, 9, 9]]), torch.tensor([4, 1]))


# Source files


@pytest.mark.parametrize(
    ("split", "names"),
    [
        ("train", ["train/a.png", "test/train/a.png"]),
        ("val", ["Validation/x/a.png", "FSL105_val/clip.npz"]),
        ("test", ["HWDB2.0Test.zip/001-P16.dgrl#3", "testing-1/a.png"]),
        (None, ["contest/a.png", "trainers/a.png", "train.png"]),
    ],
)
def test_the_nearest_folder_that_names_a_split_gives_it(split, names):
    assert {files.split_of(name) for name in names} == {split}


def test_all_files_are_listed_but_those_that_systems_leave_behind(tmp_path):
    for name in ("b.png", "a/c.txt", "a/.DS_Store", "__MACOSX/a/b.png", ".git/x", "a/._b.png", "a-1/d"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
    assert files.walk(tmp_path) == ["a-1/d", "a/c.txt", "b.png"]


def test_hidden_colours_of_transparent_pixels_do_not_show(tmp_path):
    for mode, colour in (("RGBA", (0, 0, 0, 0)), ("LA", (0, 0)), ("P", 0)):
        image = Image.new(mode, (4, 4), colour)
        image.info = {"transparency": 0} if mode == "P" else {}
        image.save(tmp_path / "clear.png")
        for wanted in ("RGB", "L"):
            with files.open_image(tmp_path / "clear.png") as image:
                assert np.asarray(files.on_white(image, wanted)).min() == 255


@pytest.mark.parametrize(
    ("content", "value", "rule"),
    [
        (b"", "an empty file", "the label must be a whole image"),
        (b"text", "cannot identify image file 'bad.png'", "the label must be a whole image"),
        ("cut", "image file is truncated", "the label must be a whole image"),
        ("deep", "mode I", "an image must have 8 bits per channel"),
        ("huge", "more", "the label must have at most 200 pixels"),
    ],
)
def test_an_image_that_cannot_be_used_is_refused_with_the_rule(tmp_path, monkeypatch, content, value, rule):
    path = tmp_path / "bad.png"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        (Image.new("I;16", (30, 30)) if content == "deep" else Image.effect_noise((64, 64), 90)).save(path)
    if content == "cut":
        path.write_bytes(path.read_bytes()[:-900])
    if content == "huge":
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    for file in (path, BytesIO(path.read_bytes())) if content else (path,):
        with pytest.raises(Refused) as refused, files.open_image(file, "bad.png", key="label") as image:
            files.on_white(image)
        assert refused.value.args[0].startswith(value)
        assert refused.value.args[1] == rule


def test_work_in_threads_comes_in_order_and_little_of_it_waits():
    taken = []
    results = threaded(lambda n: n * n, (taken.append(n) or n for n in range(100)), chunk=8)
    assert [next(results) for _ in range(3)] == [0, 1, 4]
    assert len(taken) == 16
    assert list(results) == [n * n for n in range(3, 100)]


# Labels


CELLS = st.text(st.characters(blacklist_categories=("Cs", "Cc")))


@given(st.lists(st.lists(CELLS, min_size=2, max_size=4), max_size=5))
def test_a_table_of_labels_is_read_as_it_was_written_with_or_without_a_byte_order_mark(table):
    kept = [row for row in [["file", "label"], *table] if any(cell.strip() for cell in row)]
    for mark in (b"", b"\xef\xbb\xbf"):
        data = mark + labels.csv_bytes(["file", "label"], table)
        assert [row for _, row in labels.csv_rows(data, "labels.csv")] == kept


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"file,label\na\xff,1\n", r"labels\.csv: .*UTF-8 text, got byte 0xff at offset 12; save it as UTF-8"),
        (b'a,"' + b"x" * 200_000 + b'"\n', r"labels\.csv: .*the file must be CSV, got field larger"),
    ],
)
def test_a_table_that_is_no_csv_in_utf_8_names_the_file_and_the_place(data, message):
    with pytest.raises(PackError, match=message):
        list(labels.csv_rows(data, "labels.csv"))


@pytest.mark.parametrize(("wrong", "came"), [("aab", "'a'"), (["a", "bc"], "'bc'"), ([1], "1"), ("", "none"), (5, "5")])
def test_classes_of_text_are_single_characters_each_once(wrong, came):
    assert labels.characters("ab") == ("a", "b")
    with pytest.raises(PackError, match=f"alphabet must be single characters, each once, got {came}; give"):
        labels.characters(wrong, "alphabet")


# Demo folders


def content(name):
    return name, lambda: name.encode()


def names_in(folder):
    return list(files.walk(folder))


def test_a_demo_replaces_a_demo_and_neither_mixes_with_other_data_nor_removes_it(tmp_path):
    folder = write_demo(tmp_path / "new", map(content, ["train/a.png", "val/b.png", "labels.csv"]), (".png",))
    assert (folder / "val/b.png").read_bytes() == b"val/b.png"
    (folder / "train/planted.png").write_text("mine")
    write_demo(folder, map(content, ["train/c.png"]), (".png",))
    assert names_in(folder) == ["train/c.png", "train/planted.png"]
    with pytest.raises(PackError, match=r"planted\.png was not written by this demo"):
        write_demo(folder, map(content, ["train/planted.png"]), (".png",))
    assert (folder / "train/planted.png").read_text() == "mine"
    (tmp_path / "real").mkdir()
    (tmp_path / "real/1.PNG").write_text("real")
    with pytest.raises(PackError, match=r"1\.PNG was not written by this demo, .* choose another folder"):
        write_demo(tmp_path / "real", map(content, ["a.png"]), (".png",))
    assert names_in(tmp_path / "real") == ["1.PNG"]


def test_an_interrupted_demo_is_replaced_by_the_next(tmp_path):
    def broken():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_demo(tmp_path, [*map(content, [f"{n}.png" for n in range(140)]), ("z.png", broken)], (".png",), 0)
    assert len(names_in(tmp_path)) >= 64  # what was computed together
    write_demo(tmp_path, map(content, ["z.png"]), (".png",))
    assert names_in(tmp_path) == ["z.png"]


# Mistakes


def test_the_confusion_counts_what_was_there_and_what_was_predicted():
    truth, predicted, classes = list("aaabbc"), list("aabbaa"), list("abcd")
    counts = mistakes.counts_of(truth, predicted, classes)
    assert counts.tolist() == [[2, 1, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    names, times = mistakes.most_confused(counts, classes)
    assert (names, times.tolist()) == (["b", "a", "a", ""], [1, 1, 1, 0])
    table = mistakes.confusion(counts, classes)
    assert (table.loc["c", "a"], table.index.name, table.columns.name) == (1, "truth", "predicted")
    assert mistakes.counts_of([], [], []).shape == (0, 0)
    with pytest.raises(PackError, match="'c' is missing"):
        mistakes.counts_of(truth, predicted, "ab")
    with pytest.raises(PackError, match="predicted must be one gloss for each clip, got 1 for 2 clips; take both"):
        mistakes.paired(truth[:2], predicted[:1], "gloss", "clip")


def test_the_confusion_figure_writes_counts_or_shares_in_the_rows_of_the_truth():
    table = mistakes.confusion(np.array([[3, 1, 0], [0, 5, 0], [0, 0, 0]]), ["a", "b" * 90, "手"])
    for percent, numbers in ((False, ["1", "3", "5"]), (True, ["100", "25", "75"])):
        sheet = figures.confusion_figure(table, "of 9", percent)
        [axes] = sheet.axes
        drawn = np.asarray(axes.images[0].get_array())
        assert drawn[[0, 1], [1, 1]].tolist() == [0.5, 1], "the root of the share"
        assert sorted(text.get_text() for text in axes.texts) == numbers
        assert "…" in axes.get_yticklabels()[1].get_text()
        assert sheet._repr_png_()


# Figures and fonts


def test_pictures_fill_their_column_or_the_height_and_have_captions():
    wide, tall, grey = np.zeros((10, 100, 3), np.uint8), np.zeros((400, 100, 3), np.uint8), np.zeros((50, 50), np.uint8)
    pictures = [figures.Picture(wide, "a" * 200), figures.Picture(tall, remark="tall"), figures.Picture(grey, "$x$")]
    sheet, axes, places = figures.gallery(pictures, columns=2, below=30)
    extents = [image.get_extent() for image in axes.images]
    assert [(right - left, bottom - top) for left, right, bottom, top in extents] == [(588, 59), (85, 340), (340, 340)]
    assert [(left, top) for left, _, _, top in extents] == places
    assert extents[-1][2] <= sheet.get_size_inches()[1] * 100 - 30
    texts = [text.get_text() for text in axes.texts]
    assert "…" in texts[0]
    assert {"tall", "$x$"} <= set(texts)
    assert sheet._repr_png_()  # a formula or a missing glyph would raise
    shown, _ = DisplayFormatter().format(figures.blank())
    assert shown == {"text/plain": "No samples to show: the list of ids is empty."}
    assert figures.judged("abc", "abd") == ("abc ≠ abd", figures.WRONG)


def test_the_font_with_most_of_the_missing_characters_is_the_fallback_and_broken_ones_are_passed_over(tmp_path):
    (tmp_path / "broken.ttf").write_bytes(b"no font")
    boxes = made_font(tmp_path / "boxes.ttf", ["手", fonts.NEVER])  # draws one box for all it does not know
    some, every = made_font(tmp_path / "some.ttf", "手"), made_font(tmp_path / "every.ttf", "手写")
    files = [tmp_path / "broken.ttf", tmp_path / "none.ttf", boxes, some, every]
    found = fonts.Fonts.of("a手写\n", files, mono=True)
    assert found.families == (fonts.MONO, "every")
    assert (found.plain("手a\n"), found.columns("a"), found.columns("手")) == ("手aU+000A", 1, 2)
    assert fonts.Fonts.of("手写", files[:4]).families == (fonts.SANS, "some")
    assert fonts.Fonts.of("手写", files[:4]).missing == {"写"}
    figure = Figure()
    figure.text(0, 0, "a手写", **found.look(9))
    figure.savefig(BytesIO())  # a missing glyph would warn


def test_characters_that_no_font_has_are_written_as_code_points():
    found = fonts.Fonts.of("手a", [])
    assert (found.plain("手a"), found.families) == ("U+624Ba", (fonts.SANS,))
    assert (found.cell("手"), found.cell("a")) == (("62\n4B", fonts.CODE), ("a", 1.0))
    assert "No font here has 1 of these characters" in found.note


def test_a_text_that_is_too_long_loses_its_middle_and_as_little_as_must_be():
    text = "train/a folder/0016E5_07959.png"
    found = fonts.Fonts.of(text)
    whole = found.width(text, 9)
    assert found.shortened(text, 9, math.ceil(whole)) == text
    start, end = found.shortened(text, 9, whole - 1).split("…")
    assert (text.startswith(start), text.endswith(end), len(start + end) >= len(text) - 5) == (True, True, True)
    for room in (20, 60, 120):
        assert found.width(found.shortened(text, 9, room), 9) <= room
