"""The picture of a run: what it shows, that it is quick, escaped and readable, and that the last frame stays."""

import base64
import io
import math
import re
import sys
import time
import types
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

from nbtools import letters
from nbtools.live import Columns, chart, plot, png, samples, svg
from nbtools.live.picture import About, picture
from nbtools.live.samples import Preview
from nbtools.measure import REASONS
from nbtools.table import columns
from nbtools.train import History, Record

EVIL = '</svg><img src=x onerror="alert(1)">&'
GPU = {"gpu_memory_allocated": 1200.0, "gpu_memory_reserved": 2300.0}
BUSY = {**GPU, "gpu_memory_used": 2900, "gpu_utilisation": 96, "gpu_power": 283.4, "gpu_energy": 12.345}


def history(steps=200, epochs=4, memory=None, metric="whole_accuracy", change=None):
    """A run that learns: a row every step, an evaluation at each epoch's end, 64 samples a step."""
    found, each = History(), steps // epochs
    rng = np.random.default_rng(0)
    for step in range(1, steps + 1):
        epoch, done = (step - 1) // each, step / steps
        row = {
            "lr": 1e-3 * (1 + math.cos(math.pi * done)) / 2,
            "batch_size": 64,
            "samples_per_s": 640.0,
            "data_wait": 0.02,
            **(memory or {"memory": 700.0}),
        }
        loss = math.exp(-6 * done) + 0.02 + 0.01 * abs(rng.normal())
        found.append(Record("step", epoch, step, step * 64, {"loss": loss, **row}))
        if step == steps // 2 and change:
            found.append(Record("change", epoch, step, step * 64, {"what": change}))
        if step % each == 0:
            value = {"val_loss": loss + 0.05, f"val_{metric}": done, "epoch_time": 5.0, "eval_time": 1.0}
            found.append(Record("epoch", epoch, step, step * 64, {"train_loss": loss, **value, **row}))
    return found


ABOUT = About("captcha", epochs=8, epoch_samples=50 * 64, best="whole_accuracy")


def shown(found, about=ABOUT, status=""):
    return picture(Columns(found), about, status)


def frame(found, about=ABOUT, status=""):
    return svg.frame(shown(found, about, status))


def parsed(page):
    """The frame as XML, which unescaped text or an unclosed tag would not be."""
    return ET.fromstring(page)


def texts(page):
    return " ".join(" ".join(parsed(page).itertext()).split())


def classed(tree, name):
    return [item for item in tree.iter() if item.get("class") == name]


def test_a_frame_shows_losses_metric_rate_speed_waiting_memory_and_the_facts():
    said = texts(frame(history(), status="evaluating"))
    for part in ("captcha", "train", "validation", "whole_accuracy", "learning rate", "speed", "memory MiB"):
        assert part in said
    for part in ("epoch 4 of 8", "step 200", "samples/s 640", "waiting for data 2 %", "memory 700 MiB"):
        assert part in said
    assert "best whole_accuracy 1.000 in epoch 4" in said
    assert "evaluating" in said


def test_gpu_memory_is_drawn_when_the_run_had_a_gpu():
    said = texts(frame(history(memory=GPU)))
    assert re.search(r"GPU memory GiB allocated 1\.2 reserved 2\.2\b", said)


def test_what_the_gpu_does_is_one_chart_with_power_at_an_axis_of_its_own():
    made = shown(history(memory=BUSY))
    [chart] = [chart for chart in made.charts if chart.title == "GPU"]
    assert [(line.name, line.value, line.right) for line in chart.lines] == [
        ("in use", "96 %", False),
        ("waiting for data", "2 %", False),
        ("power", "283 W", True),
    ]
    assert chart.right is not None
    assert len(chart.right.ticks()[0]) == len(chart.scale.ticks()[0])  # both stand at the same grid lines
    assert chart.right.high >= 283.4
    said = texts(svg.frame(made))
    for part in ("GPU use 96 %", "power 283 W", "energy 12.3 Wh", "device 2.8", "% of the time · W, right"):
        assert part in said


def test_without_gpu_readings_there_is_no_gpu_chart():
    assert "GPU" not in texts(frame(history()))
    assert [chart.title for chart in shown(history()).charts] == [
        *("loss", "validation metrics", "learning rate"),
        *("speed", "waiting for data", "memory"),
    ]


def test_what_holds_the_gpu_back_is_said_in_words_on_a_colour_and_idle_is_no_trouble():
    reasons = f"{REASONS[0x1]}, {REASONS[0x4]}, {REASONS[0x40]}, {REASONS[0x10]}"
    badges = shown(history(memory={**BUSY, "gpu_throttle": reasons}), status="paused").badges
    assert [(badge.text, badge.colour) for badge in badges] == [
        ("paused", ""),
        ("GPU held back: power limit", chart.ORANGE),
        ("GPU held back: too hot (hardware)", chart.VERMILLION),
        ("GPU held back: waiting for the slowest of a sync-boost group", ""),
    ]
    assert shown(history(memory={**BUSY, "gpu_throttle": REASONS[0x1]})).badges == ()


def test_an_evaluation_between_epochs_is_a_point_of_its_own_and_never_the_best_one():
    found = history()
    for step in (75, 225):
        found.append(Record("evaluation", 4, step, step * 64, {"val_loss": 0.01, "val_whole_accuracy": 2.0}))
    made = shown(found)
    [line] = made.charts[1].lines
    assert line.x.tolist() == [50, 75, 100, 150, 200, 225]
    assert line.ring == (200.0, 1.0)
    assert ("best whole_accuracy", "1.000 in epoch 4") in made.facts
    assert made.charts[0].lines[-1].y[-1] == 0.01


def test_time_left_counts_samples_at_the_recent_pace_and_evaluations():
    """4 of 8 epochs of 3,200 samples at 640 a second are 20 s, and 4 evaluations of 1 s."""
    assert ("time left", "24 s") in shown(history()).facts
    assert shown(history()).share == 0.5


def test_time_left_is_at_the_pace_since_a_knob_was_turned():
    """Twice as fast from step 200 of 400: 4 epochs take 10 s, after the first row that says so."""
    found = history(change="batch_size 64 → 512")
    found.append(Record("change", 4, 200, 200 * 64, {"what": "amp off → bf16"}))
    assert ("time left", "24 s") in shown(found).facts
    found.append(Record("step", 4, 201, 200 * 64, {"loss": 0.1, "samples_per_s": 1280.0}))
    assert ("time left", "14 s") in shown(found).facts


def test_a_finished_run_says_what_it_took_instead():
    facts = dict(shown(history(), About(epochs=4, epoch_samples=3200)).facts)
    assert facts["took"] == "24 s"
    assert "time left" not in facts


def turned(lrs, changes):
    """A run that logs these lrs, one a step, and the steps after which lr was changed."""
    found = History()
    for step, lr in enumerate(lrs, 1):
        found.append(Record("step", 0, step, step, {"loss": 1.0, "lr": lr}))
        if step in changes:
            found.append(Record("change", 0, step, step, {"what": f"lr {lr} → {lrs[step]}"}))
    return found


@pytest.mark.parametrize("set_to", [1000.0, 1e-9])
def test_the_chart_of_lr_shows_all_of_it_however_far_a_change_goes(set_to):
    lrs = [2e-3] * 300 + [set_to] * 3 + [2e-3] * 300
    [chart] = [each for each in shown(turned(lrs, (300, 303))).charts if each.title == "learning rate"]
    [line] = chart.lines
    assert (line.x[0], line.x[-1], {*line.y.tolist()}) == (1, 603, {2e-3, set_to})
    assert not line.dotted
    low, high = chart.scale.heights(np.array(sorted((2e-3, set_to))))
    assert 0 < low < 0.2 < 0.8 < high < 1


def test_a_schedule_that_ends_at_zero_takes_four_decades_of_the_chart_of_lr():
    steps = np.arange(1, 2001) / 2000
    [chart] = [
        each
        for each in shown(turned((1e-3 * np.cos(steps * np.pi / 2) ** 2).tolist(), ())).charts
        if each.title == "learning rate"
    ]
    assert 1e3 < chart.scale.high / chart.scale.low < 1e5


def test_the_lowest_is_best_for_an_error_rate_and_its_point_is_ringed():
    made = shown(history(metric="cer"), About(best="-cer"))
    [line] = made.charts[1].lines
    assert (line.name, line.ring) == ("cer", (50.0, 0.25))
    assert ("best cer", "0.250 in epoch 1") in made.facts


def test_text_from_a_run_never_becomes_markup():
    found = history(metric=EVIL, change=EVIL, memory={**BUSY, "gpu_throttle": EVIL})
    page = frame(found, About(EVIL, best=EVIL), EVIL)
    assert "<img" not in page
    assert texts(page).count(" ".join(EVIL.split())) >= 5


def test_a_change_of_settings_is_marked_in_every_chart_where_it_happened_and_named_in_the_first():
    page = frame(history(change="lr 0.001 → 0.0005"))
    drawn = [item for item in parsed(page).iter() if item.get("viewBox") == f"0 0 {svg.WIDTH} {svg.HEIGHT}"]
    assert len(drawn) == 6
    for each in drawn:
        [mark] = [path.get("d", "") for path in each.iter() if path.get("stroke-dasharray") == "3 3"]
        assert mark.startswith(f"M{svg.WIDTH // 2} ")
    [name] = classed(parsed(page), "nbt-name")
    assert name.text == "lr 0.001 → 0.0005"


def test_of_many_changes_the_last_are_lines_and_the_others_ticks_that_leave_the_curves_in_sight():
    found = history()
    for step in range(50, 100):
        found.append(Record("change", 1, step, step * 64, {"what": "lr 0.0022499999 → 0.00141421356"}))
    made = shown(found)
    assert [mark.short for mark in made.marks] == [True] * 44 + [False] * 6
    assert {mark.what for mark in made.marks} == {"lr 0.00225 → 0.00141"}
    drawn = [item for item in parsed(svg.frame(made)).iter() if item.get("viewBox") == f"0 0 {svg.WIDTH} {svg.HEIGHT}"]
    lines = [path.get("d", "") for path in drawn[1].iter() if path.get("stroke-dasharray") == "3 3"]
    assert [line.split()[1] for line in lines] == ["50V-0"] * 44 + ["1000V-0"] * 6
    assert not any(mark.short for mark in shown(history(change="lr 1 → 2")).marks)


@pytest.mark.parametrize("seed", range(8))
def test_names_of_marks_cross_neither_each_other_nor_another_marks_line(seed):
    rng = np.random.default_rng(seed)
    found = history()
    for step in sorted(rng.integers(1, 200, 12)):
        found.append(Record("change", 0, int(step), int(step), {"what": "x" * int(rng.integers(5, 60))}))
    made = shown(found)
    assert len(made.marks) == 12
    named = [mark for mark in made.marks if mark.name]
    assert named
    spans = {}
    for mark in named:
        at, long = mark.x / made.last, len(mark.name) / 40
        spans[mark] = (at, at + long) if mark.side > 0 else (at - long, at)
        assert 0 <= spans[mark][0] <= spans[mark][1] <= 1
    for mark in named:
        for other in named:
            if other is mark:
                continue
            low, high = spans[other]
            if other.row == mark.row:
                assert spans[mark][1] <= low or high <= spans[mark][0]
            if other.row <= mark.row:
                assert not low < mark.x / made.last < high


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [Record("event", 0, 0, 0, {"what": "out of memory"})],
        [Record("step", 0, 1, 64, {"loss": 0.7})],
        [Record("step", 0, 1, 64, {"loss": math.nan, "lr": 0.0, "memory": math.inf, "samples_per_s": 0.0})],
        [Record("step", 0, 1, 64, {"loss": 0.0}), Record("step", 0, 2, 128, {"loss": -1.0})],
        [Record("step", 0, i, i, {"loss": 0.7, "lr": 1e-3}) for i in range(30)],
        [Record("step", 0, 1, 64, {"loss": "'=cmd", "lr": 1e-3})],
        [Record("epoch", 0, 5, 64, {"train_loss": 0.5})],
        [Record("epoch", 0, 5, 64, {"train_loss": 0.5, "val_cer": 31.0, "val_ar": -30.0})],
        [Record("evaluation", 0, 5, 64, {"val_loss": 0.5, "val_cer": 31.0})],
        [Record("step", 0, 1, 64, {"loss": 0.7, "gpu_power": 0.0, "gpu_utilisation": "n/a", "gpu_throttle": 5})],
        [Record("change", 0, 0, 0, {"what": "lr"}), Record("change", 0, 0, 0, {"what": ""})],
    ],
)
def test_any_history_can_be_drawn(rows):
    found = History()
    for row in rows:
        found.append(row)
    made = shown(found, About("odd", 3, 64, "-cer"))
    page = svg.frame(made)
    assert "nan" not in page
    assert parsed(page) is not None
    assert png.draw(made).startswith(b"\x89PNG")


def test_drawn_points_stay_inside_their_chart():
    tree = parsed(frame(history(metric="cer", memory=BUSY)))
    lines = [line for line in tree.iter() if line.tag.endswith("polyline")]
    assert len(lines) >= 10
    for line in lines:
        points = np.array(line.get("points", "").split(","), int).reshape(-1, 2)
        assert points.min() >= 0
        assert points[:, 0].max() <= svg.WIDTH
        assert points[:, 1].max() <= svg.HEIGHT


def test_thinning_keeps_every_peak_the_ends_and_the_order():
    x, y = np.arange(10_001.0), np.random.default_rng(1).normal(size=10_001)
    y[[0, 1234, 7777, 10_000]] = (9, 99, -99, -9)
    thin_x, thin_y = chart.thinned(x, y)
    assert len(thin_x) <= 2 * chart.COLUMNS + 2
    assert (np.diff(thin_x) > 0).all()
    assert np.array_equal(y[thin_x.astype(int)], thin_y)
    assert {0.0, 1234.0, 7777.0, 10_000.0} <= set(thin_x)


def test_the_means_of_a_long_line_are_those_of_its_columns():
    x, y = np.arange(10_001.0), np.random.default_rng(4).normal(size=10_001)
    mean_x, mean_y = chart.averaged(x, y, columns=100)
    assert len(mean_x) == 100
    for i in (0, 50, 99):  # the last one is shorter
        column = slice(101 * i, 101 * (i + 1))
        assert (mean_x[i], mean_y[i]) == (x[column].mean(), pytest.approx(y[column].mean()))


def test_columns_that_grew_with_a_history_are_those_of_the_whole_also_after_it_was_cut():
    whole = history(change="lr 1 → 2", memory=BUSY)
    part, table = History(), Columns()
    for row in whole.rows[:150]:
        part.rows.append(row)
        table.follow(part)
    part.cut(40)  # a rollback: the rows come again, as new ones
    part.rows += [dict(row) for row in whole.rows[40:]]
    table.follow(part)
    assert svg.frame(picture(table, ABOUT)) == frame(whole)


@pytest.mark.parametrize("half", [0, 1, 3, 50])
def test_smoothing_is_the_mean_of_the_neighbours(half):
    values = np.random.default_rng(2).normal(size=40)
    slow = [values[max(i - half, 0) : i + half + 1].mean() for i in range(40)]
    assert np.allclose(chart.smoothed(values, half), slow)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]), (0, 2000, ["0", "0.5k", "1k", "1.5k", "2k"]), (3, 3, ["3"])],
)
def test_ticks_are_round_numbers_with_equal_decimals(low, high, expected):
    assert chart.tick_labels(chart.ticks(low, high)) == expected


def test_ticks_of_any_axis_are_few_and_inside():
    rng = np.random.default_rng(3)
    for low, span in zip(
        rng.normal(size=200) * 10.0 ** rng.integers(-6, 7, 200), 10 ** rng.uniform(-6, 7, 200), strict=True
    ):
        found = chart.ticks(low, low + span)
        assert 2 <= len(found) <= 6
        assert low - span * 1e-6 <= found[0]
        assert found[-1] <= low + span * (1 + 1e-6)
        assert len(set(chart.tick_labels(found))) == len(found) or abs(low) / span > 100


def test_a_logarithmic_axis_has_powers_of_ten_or_round_steps_between():
    assert chart.tick_labels(chart.log_ticks(1e-7, 2e-4), True) == ["1e-7", "1e-6", "1e-5", "1e-4"]
    assert chart.tick_labels(chart.log_ticks(0.025, 12), True) == ["0.03", "0.1", "0.3", "1", "3", "10"]
    assert chart.tick_labels(chart.log_ticks(0.015, 0.6), True) == ["0.02", "0.05", "0.1", "0.2", "0.5"]


@pytest.mark.parametrize(
    ("value", "text"), [(0.9731, "0.973"), (0.0258, "0.0258"), (31.24, "31.24"), (0, "0.0000"), (2e-7, "2.00e-7")]
)
def test_numbers_are_written_with_the_digits_that_one_can_read_at_once(value, text):
    assert chart.number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(45, "45 s"), (200, "3 min 20 s"), (7500, "2 h 05 min"), (409_000, "4 d 17 h"), (59.7, "1 min 00 s")],
)
def test_durations_are_read_without_arithmetic(seconds, text):
    assert chart.duration(seconds) == text


@pytest.mark.parametrize("steps", [2000, 10_000])
def test_a_frame_takes_about_two_milliseconds_however_long_the_run(steps):
    """About 1.5 ms on a free core for six charts; the bound is for a busy machine, the least of 30 for a fair one."""
    table = Columns(history(steps, 20, BUSY))
    times = []
    for _ in range(30):
        start = time.thread_time()
        page = svg.frame(picture(table, ABOUT))
        times.append(time.thread_time() - start)
    assert min(times) < 0.010
    assert len(page) < 40_000


def test_new_rows_are_read_once():
    found, table = history(10_000, 20, BUSY), Columns()
    table.follow(found)
    start = time.thread_time()
    for _ in range(1000):
        table.follow(found)
    assert time.thread_time() - start < 0.05  # 0.2 µs each; reading all rows again takes 40 ms


@pytest.fixture
def drawn(monkeypatch):
    """The texts of the figures that were drawn, in order, with their colours."""
    found = []

    def kept(figure, *given, **options):
        found.extend((text.get_text(), str(text.get_color())) for text in figure.findobj(Text))
        return saved(figure, *given, **options)

    saved = Figure.savefig
    monkeypatch.setattr(Figure, "savefig", kept)
    return found


def test_the_png_has_the_same_charts_on_a_transparent_ground(drawn):
    made = shown(history(metric="$cer", change="$lr", memory=BUSY), About("50 $ and $", best="-$cer"))
    image = Image.open(io.BytesIO(png.draw(made)))
    texts = "\n".join(text.replace("\xa0", " ") for text, _ in drawn)
    for item in made.charts:
        for part in (item.title, item.units, *(line.name for line in item.lines), *item.scale.ticks()[1]):
            assert part in texts
    for part in (*(text for fact in made.facts for text in fact), "50 $ and $", "$lr"):
        assert part in texts
    assert image.getchannel("A").getextrema() == (0, 255)
    assert len(image.convert("RGB").getcolors(1 << 20) or ()) > 100
    assert image.width == 2 * png.WIDE


def test_drawing_leaves_pyplot_and_its_settings_alone():
    import matplotlib

    before = dict(matplotlib.rcParams)
    png.draw(shown(history()))
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
    assert dict(matplotlib.rcParams) == before


CAPTCHA, LINE = np.zeros((60, 160), np.uint8), np.zeros((48, 800), np.uint8)
OVERLAY = np.random.default_rng(5).integers(0, 255, (360, 480, 3)).astype(np.uint8)


def test_samples_are_equally_wide_unless_one_is_a_long_line_of_text_then_they_are_equally_high():
    tall = np.zeros((900, 30), np.uint8)
    assert samples.sizes([CAPTCHA, OVERLAY, tall]) == [(200, 75), (200, 150), (5, 160)]
    assert samples.sizes([LINE, CAPTCHA, LINE[:24]]) == [(800, 48), (128, 48), (1600, 48)]


def test_of_long_lines_there_are_fewer_so_that_they_take_six_rows():
    captchas, lines = [Preview(CAPTCHA, "a", "a")] * 20, [Preview(LINE, "a", "a")] * 20
    assert [len(samples.chosen(each)) for each in (captchas, lines, lines[:2], [])] == [12, 6, 2, 0]
    assert len(samples.chosen([Preview(LINE[:, :400], "a", "a")] * 20)) == 12
    assert samples.html(lines).count("<img") == 6


@pytest.mark.parametrize(("image", "pixels"), [(CAPTCHA, (160, 60)), (LINE, (800, 48)), (OVERLAY, (400, 300))])
def test_a_thumbnail_has_no_more_pixels_than_the_screen_shows(image, pixels):
    page = samples.html([Preview(image, "a", "a")])
    data = re.findall(r'src="data:image/png;base64,([^"]*)"', page)
    with Image.open(io.BytesIO(base64.b64decode(data[0]))) as made:
        assert made.size == pixels
        assert made.mode == ("RGB" if image.ndim == 3 else "L")


def test_the_text_of_a_short_line_has_room_below_it():
    preview = Preview(np.zeros((48, 30), np.uint8), "手写中文", "手写")
    assert "width:120px" in samples.html([preview, Preview(LINE)])


def test_wrong_characters_are_underlined_and_a_right_answer_has_a_tick():
    wrong = parsed(samples.html([Preview(CAPTCHA, "Qm3pZ", "Om3p")]))
    assert [item.text for item in wrong.iter("u")] == ["Q", "Z", "O"]
    assert "✓" not in " ".join(wrong.itertext())
    right = parsed(samples.html([Preview(CAPTCHA, "Qm3pZ", "Qm3pZ")]))
    assert [item.tag for item in right.iter("u")] == []
    assert "TRU Qm3pZ PRE Qm3pZ ✓" in " ".join(" ".join(right.itertext()).split())


@pytest.mark.parametrize(
    ("truth", "predicted", "said"),
    [
        ("abc", "abc", ("abc", "abc")),
        ("abc", "", ("[abc]", "")),
        ("abc", "xabc", ("abc", "[x]abc")),
        ("手写中文", "手与中文", ("手[写]中文", "手[与]中文")),
    ],
)
def test_what_was_not_read_and_what_was_read_amiss_are_told_apart(truth, predicted, said):
    lines = [text for _, text in samples.underlined(Preview(CAPTCHA, truth, predicted))]
    assert tuple(line.replace("<u>", "[").replace("</u>", "]") for line in lines) == said


def test_text_of_a_sample_never_becomes_markup():
    page = samples.html([Preview(CAPTCHA, EVIL, "a"), Preview(CAPTCHA, "a", EVIL), Preview(CAPTCHA, "", EVIL)])
    tree = parsed(page)
    assert [item.get("onerror") for item in tree.iter("img")] == [None] * 3
    assert "".join(tree.itertext()).count(EVIL) == 3


def test_the_png_shows_the_samples_below_the_charts():
    previews = [Preview(OVERLAY, "手写", "手与"), Preview(LINE, "$a$" * 40, "$b$"), Preview(CAPTCHA)]
    with (
        Image.open(io.BytesIO(png.draw(shown(history())))) as bare,
        Image.open(io.BytesIO(png.draw(shown(history()), previews))) as image,
    ):
        assert image.height > bare.height + 300
        below = image.crop((0, bare.height, image.width, image.height)).convert("RGB")
    assert len(below.getcolors(1 << 20) or ()) > 1000  # the overlay's noise


def test_in_the_png_a_letter_without_a_font_is_its_code_point(monkeypatch, drawn):
    monkeypatch.setattr(letters, "system", list)
    png.draw(shown(history()), [Preview(CAPTCHA, "手a", "手b")])
    assert [text for text, colour in drawn if colour == chart.VERMILLION] == ["PRE U+624Bb", "          ^"]
    assert "TRU U+624Ba" in [text for text, _ in drawn]


def test_a_long_text_is_broken_below_its_image(drawn):
    png.draw(shown(history()), [Preview(CAPTCHA, "手写a" * 20, "手写b" * 20)])
    lines = [text for text, _ in drawn if text.startswith("TRU ")]
    assert len(lines) > 4
    assert "".join(line[4:] for line in lines).replace(" ", "").startswith("手写a" if "手" in lines[0] else "U+624B")
    assert max(map(columns, lines)) * png.LETTER * png.SMALL <= 200


def test_in_a_terminal_wrong_characters_are_marked_below_truth_and_prediction():
    said = samples.text([Preview(LINE, "手写中文ab", "手与文cab")], 80)
    assert said == ["TRU 手写中文 ab", "PRE 手与  文cab", "      ^^^^  ^"]
    assert samples.text([Preview(LINE, "手写", "手写")], 80) == ["TRU 手写", "PRE 手写 ✓"]
    assert samples.text([Preview(LINE), Preview(LINE, "", "手")], 80) == ["PRE 手"]
    assert samples.text([Preview(LINE, "a", "")], 80) == ["TRU a", "PRE", "    ^"]


def test_a_name_is_wrong_as_a_whole_however_many_letters_it_shares():
    taken = Preview(LINE, "number 1a", "number 1b", whole=True)
    assert samples.text([taken], 80) == ["TRU number 1a", "PRE number 1b", "    ^^^^^^^^^"]
    assert [text for _, text in samples.underlined(taken)] == ["<u>number 1a</u>", "<u>number 1b</u>"]
    assert samples.text([Preview(LINE, "number 1a", "number 1a", whole=True)], 80)[1] == "PRE number 1a ✓"


def test_in_a_terminal_short_samples_stand_beside_each_other_and_long_ones_are_broken():
    short, long = Preview(CAPTCHA, "ab", "ax"), Preview(LINE, "手写" * 30, "手写" * 30)
    lines = ("TRU ab", "PRE ax", "     ^")
    assert samples.text([short] * 5, 25) == ["   ".join([line] * count) for count in (3, 2) for line in lines]
    said = samples.text([long], 60)
    assert max(map(columns, said)) <= 60
    assert "".join(line[4:] for line in said if line.startswith("TRU")) == "手写" * 30
    assert len(samples.text([Preview(LINE, "a" * 40, "b" * 40)] * 8, 60)) == 3 * samples.TERMINAL_ROWS


def test_what_a_model_reads_cannot_command_a_terminal():
    [_, read, _] = samples.text([Preview(LINE, "a", "\x1b[2Ja")], 60)
    assert read == r"PRE \x1b[2Ja"


@pytest.fixture
def notebook(monkeypatch):
    """As in a kernel, with real ipywidgets."""
    kernel = types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    assert plot.in_notebook()
    monkeypatch.delitem(sys.modules, "IPython")
    monkeypatch.setattr(plot, "in_notebook", lambda: True)


def test_in_a_notebook_the_frame_is_renewed_in_a_widget(notebook):
    live = plot.LivePlot("captcha", 8, 3200, "whole_accuracy")
    live.update(history(40))
    live.due = 0.0
    live.update(history(80), "paused")
    assert live.charts.value == frame(history(80), live.about, "paused")
    assert live.charts in live.widget.children


def test_a_frame_without_news_is_not_drawn_again_but_when_asked(notebook, monkeypatch):
    drawn, now = [], [100.0]
    monkeypatch.setattr(plot.svg, "frame", lambda made: drawn.append(made.badges) or "")
    monkeypatch.setattr(plot.time, "monotonic", lambda: now[0])
    live, found = plot.LivePlot(), history(40)

    def later(status=""):
        now[0] += 100
        live.update(found, status)
        return len(drawn)

    assert [later(), later(), later("paused"), later("paused")] == [1, 1, 2, 2]
    found.append(Record("step", 4, 41, 41 * 64, {"loss": 0.1}))
    assert later("paused") == 3
    live.about = About("captcha", 9)
    assert later("paused") == 4
    live.due = 0.0
    assert later("paused") == 5


def test_it_draws_at_most_four_times_a_second_and_for_its_share_of_the_time(notebook, monkeypatch):
    now, spent, drawn, cost = [100.0], [0.0], [], 0.0
    monkeypatch.setattr(plot.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(plot.time, "thread_time", lambda: spent[0])

    def draw(made):
        drawn.append(now[0])
        spent[0] += cost
        return ""

    monkeypatch.setattr(plot.svg, "frame", draw)
    for seconds, expected in ((0.0015, 4), (0.03, 0.2)):
        cost = seconds
        now[0] += 100
        live, found, begin = plot.LivePlot(), history(40), now[0]
        drawn.clear()
        while now[0] < begin + 60:
            live.update(found, str(now[0]))
            now[0] += 0.001
        assert len(drawn) <= 60 * expected + 1
        assert len(drawn) >= 60 * expected * 0.95


def test_samples_have_a_widget_of_their_own_so_that_frames_send_no_images(notebook):
    live = plot.LivePlot("captcha")
    live.show([Preview(CAPTCHA, "abc", "abd")])
    live.update(history(40))
    assert "data:image/png" in live.cards.value
    assert live.cards in live.widget.children
    assert "data:image" not in live.charts.value
    live.show([])
    assert live.cards.value == ""


def test_at_the_end_the_picture_is_returned_as_png_and_written_to_the_run_folder(notebook, tmp_path):
    live = plot.LivePlot("captcha", 8, 3200)
    live.update(history(40))
    live.show([Preview(CAPTCHA, "abc", "abd")])
    image = live.finish(history(80), tmp_path / "plot.png")
    assert image == (tmp_path / "plot.png").read_bytes()
    with Image.open(io.BytesIO(image)) as made:
        assert made.height > Image.open(io.BytesIO(plot.LivePlot("captcha").finish(history(80)))).height
    assert live.charts.comm is not None  # closing is for whoever displayed it


def test_without_a_notebook_nothing_is_drawn_but_the_picture_that_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(plot.svg, "frame", lambda made: pytest.fail("nothing to draw on"))
    assert not plot.in_notebook()
    live = plot.LivePlot("captcha")
    assert live.widget is None
    live.show([Preview(CAPTCHA)])
    live.update(history(40))
    live.finish(history(40), tmp_path / "new" / "plot.png")
    assert (tmp_path / "new" / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_goes_on_without_its_picture_where_ipywidgets_is_missing(monkeypatch, notebook):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    live = plot.LivePlot("captcha")
    live.update(history(40))
    assert live.widget is None
