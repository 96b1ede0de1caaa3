"""The picture of a run: what it shows, that it is quick, escaped and readable, and that the last frame stays."""

import base64
import io
import math
import re
import sys
import time
import types
import xml.etree.ElementTree as ET
from html import escape
from typing import Any

import numpy as np
import pytest
from browser import chromium as opened
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.formatters import DisplayFormatter
from ipywidgets import HTML
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image
from playwright.sync_api import ViewportSize

from nbtools import fonts
from nbtools.live import Columns, chart, facts, png, samples, svg, view
from nbtools.live.bell import Bell
from nbtools.live.controls import SMOOTHING, Looks, changes
from nbtools.live.facts import About
from nbtools.live.picture import Look, picture
from nbtools.live.samples import Preview
from nbtools.table import columns, duration, number
from nbtools.train import History, Plan, Record

pytestmark = pytest.mark.drawn

PLACES = "all => all.map(each => each.getBoundingClientRect()).map(at => [at.left, at.top, at.width, at.height])"
EVIL = '</svg><img src=x onerror="alert(1)">&'
GPU = {"gpu_memory_allocated": 1200.0, "gpu_memory_reserved": 2300.0}
BUSY = {**GPU, "gpu_memory_used": 2900, "gpu_utilisation": 96, "gpu_power": 283.4, "gpu_energy": 12.345}
ABOUT = About("captcha", epochs=8, epoch_samples=50 * 64, best="whole_accuracy")


def history(steps=200, epochs=4, memory=None, metric="whole_accuracy", change=None):
    """A run that learns: a row every step, an evaluation at each epoch's end, 64 samples a step."""
    found, each = History(), steps // epochs
    rng = np.random.default_rng(0)
    for step in range(1, steps + 1):
        epoch, done = (step - 1) // each, step / steps
        lr = 1e-3 * (1 + math.cos(math.pi * done)) / 2
        row = {"lr": lr, "batch_size": 64, "samples_per_s": 640.0, "data_wait": 0.02, **(memory or {"memory": 700.0})}
        loss = math.exp(-6 * done) + 0.02 + 0.01 * abs(rng.normal())
        found.append(Record("step", epoch, step, step * 64, {"loss": loss, **row}))
        if step == steps // 2 and change:
            found.append(changed(step, change, epoch))
        if step % each == 0:
            value = {"val_loss": loss + 0.05, f"val_{metric}": done, "epoch_time": 5.0, "eval_time": 1.0}
            found.append(Record("epoch", epoch, step, step * 64, {"train_loss": loss, **value, **row}))
    return found


def changed(step, what, epoch=0):
    return Record("change", epoch, step, step * 64, {"what": what})


def shown(found, about=ABOUT, status="", look=None):
    return picture(Columns(found), about, status, look=look or Look())


def chart_of(found, title, look=None):
    [one] = [each for each in shown(found, look=look).charts if each.title == title]
    return one


def frame(found, about=ABOUT, status=""):
    return svg.frame(shown(found, about, status))


def page(found, about=ABOUT, status=""):
    """All that is shown of a run: the facts and the charts."""
    made = shown(found, about, status)
    return f"<div>{facts.html(made)}{svg.frame(made)}</div>"


def texts(page):
    """The text of a page, which is XML: unescaped text or an unclosed tag would not be."""
    return " ".join(" ".join(ET.fromstring(page).itertext()).split())


def test_a_frame_shows_losses_metric_rate_speed_waiting_memory_and_the_facts():
    said = texts(page(history(), status="evaluating"))
    for part in ("captcha", "evaluating", "train", "validation", "whole accuracy", "learning rate", "memory MB"):
        assert part in said
    for part in ("epoch 4 of 8", "step 200 of 400", "samples/s 640", "waiting for data 2 %", "memory 734 MB"):
        assert part in said
    assert "best whole accuracy 1.00 in epoch 4" in said
    assert "GPU" not in said


def test_of_a_gpu_its_use_and_memory_are_charts_and_its_power_and_energy_are_facts():
    found = history(memory=BUSY)
    assert [(line.name, line.value) for line in chart_of(found, "GPU").lines] == [
        ("in use", "96 %"),
        ("waiting for data", "2 %"),
    ]
    said = texts(page(found))
    for part in ("GPU use 96 %", "power 283 W", "energy 12.3 Wh", "allocated 1.3 reserved 2.4 device 3.0"):
        assert part in said


def test_an_evaluation_between_epochs_is_a_point_of_its_own_and_never_the_best_one():
    found = history()
    for step in (75, 225):
        found.append(Record("evaluation", 4, step, step * 64, {"val_loss": 0.01, "val_whole_accuracy": 2.0}))
    [line] = chart_of(found, "validation metrics").lines
    assert line.x.tolist() == [50, 75, 100, 150, 200, 225]
    assert ("best whole accuracy", "1.00 in epoch 4") in shown(found).facts
    assert ("best cer", "0.250 in epoch 1") in shown(history(metric="cer"), About(best="-cer")).facts


@pytest.mark.parametrize("set_to", [1000.0, 1e-9])
def test_the_chart_of_lr_shows_all_of_it_however_far_a_change_goes(set_to):
    found = History()
    for step, lr in enumerate([2e-3] * 300 + [set_to] * 3 + [2e-3] * 300, 1):
        found.append(Record("step", 0, step, step, {"loss": 1.0, "lr": lr}))
        if step in (300, 303):
            found.append(changed(step, "lr from here to there"))
    assert chart_of(found, "learning rate").scale.high >= max(set_to, 2e-3)
    one = chart_of(found, "learning rate", Look("log"))
    assert {*one.lines[0].y.tolist()} == {2e-3, max(set_to, 2e-7)}
    low, high = one.scale.heights(np.array(sorted((2e-3, set_to))))
    assert 0 <= low < 0.2 < 0.8 < high < 1


def test_a_schedule_that_ends_at_zero_takes_about_four_decades_of_the_chart_of_lr():
    scale = chart_of(history(2000), "learning rate", Look("log")).scale
    assert 1e3 < scale.high / scale.low < 1e5


def test_lr_is_linear_unless_the_control_says_otherwise_and_a_logarithmic_axis_says_that_it_is():
    rate, loss = (chart_of(history(), title) for title in ("learning rate", "loss"))
    assert (rate.scale.log, rate.scale.low, rate.about) == (False, 0.0, "")
    assert (loss.scale.log, loss.about) == (True, "log scale"), "it falls to a thirtieth"
    assert texts(frame(history())).count("log scale") == 1
    assert not chart_of(history(), "loss", Look("linear")).scale.log
    assert chart_of(history(), "learning rate", Look("log")).about == "log scale"
    assert chart_of(history(), "learning rate").scale.ticks()[1] == ["0", "2.5e-4", "5e-4", "7.5e-4", "1e-3"]


def test_an_early_spike_of_the_loss_leaves_the_axis_and_is_named_a_late_one_stays():
    for place, cut in ((3, "80.0"), (180, "")):
        found = history()
        found.of("step")[place]["loss"] = 80.0
        chart = chart_of(found, "loss")
        assert chart.cut == cut
        assert (chart.scale.high < 2) == bool(cut)
        assert (f"peak {cut} cut off" in chart.about) == bool(cut)
    found.of("step")[3]["loss"] = 80.0
    assert chart_of(found, "loss", Look(last=0.2)).scale.high > 80, "a look at the start shows it"


def test_metrics_fill_their_chart():
    found = History()
    for epoch, value in enumerate((0.962, 0.971, 0.978)):
        found.append(Record("epoch", epoch, epoch + 1, 0, {"val_whole_accuracy": value}))
    scale = chart_of(found, "validation metrics").scale
    assert 0.95 < scale.low < 0.962
    assert 0.978 < scale.high < 0.99
    found.append(Record("epoch", 3, 4, 0, {"val_whole_accuracy": 1.0}))
    assert chart_of(found, "validation metrics").scale.high == 1.0


def test_an_error_in_the_targets_unit_has_a_chart_of_its_own_and_an_error_rate_before_training_takes_no_room():
    found = History()
    for epoch in range(9):
        values = {"val_mae": 30.8 / (epoch + 1), "val_r2": 1 - 1 / (epoch + 2), "val_cer": 31.0 if epoch == 0 else 0.1}
        found.append(Record("epoch", epoch, epoch + 1, 0, values))
    mae, shares = chart_of(found, "mae"), chart_of(found, "validation metrics")
    assert (mae.scale.low < 30.8 / 9, mae.scale.high > 30.8) == (True, True)
    assert [line.name for line in shares.lines] == ["r2", "cer"]
    assert shares.scale.high < 2.3


def test_a_part_of_the_run_is_shown_in_more_detail_with_its_own_axes_and_marks():
    found = history(2000, 20, change="lr 1 → 2")
    whole, part = shown(found), shown(found, look=Look(first=0.75))
    assert (part.first, part.last, part.zoomed, part.marks) == (1500, 2000, True, ())
    assert part.ticks()[1] == ["1.5k", "1.6k", "1.7k", "1.8k", "1.9k", "2k"]
    assert [chart.title for chart in part.charts] == [chart.title for chart in whole.charts]
    for before, after in zip(whole.charts, part.charts, strict=True):
        for old, new in zip(before.lines, after.lines, strict=True):
            assert new.value == (number(new.y[-1]) if new.name == "train" else old.value), "where the curve ends"
            assert (new.x[0] <= 1500) == (old.look in ("faint", "points") or new.name == "lr")
            assert np.count_nonzero(new.x > 1500) >= np.count_nonzero(old.x > 1500)
    assert part.charts[0].scale.high < whole.charts[0].scale.high / 5
    for line in ET.fromstring(svg.frame(part)).iter("polyline"):
        assert re.fullmatch(r"[-\d, ]+", line.get("points", ""))


@pytest.mark.parametrize(("first", "last"), [(0.0, 0.01), (0.99, 1.0), (0.5, 0.51)])
@pytest.mark.parametrize("scale", ["auto", "linear", "log"])
def test_every_look_at_a_run_that_has_begun_can_be_drawn(first, last, scale):
    for rows in (1, 7, 60):
        found = History()
        for row in history(60, 3, BUSY, change="lr 1 → 2").rows[:rows]:
            found.append(Record(row["kind"], row["epoch"], row["step"], row["samples"], {"loss": 0.0, **row}))
        page = svg.frame(shown(found, look=Look(scale, 4.0, first, last)))
        assert "nan" not in texts(page)


def test_smoothing_is_chosen_and_none_shows_every_value_as_logged():
    noise = {name: np.abs(np.diff(train_line(2000, share).y)).mean() for name, share in SMOOTHING.items()}
    assert noise["none"] > noise["light"] > noise["medium"] > noise["strong"]
    assert [line.look for line in chart_of(history(90), "loss", Look(smoothing=0)).lines] == ["line", "points"]
    assert train_line(90, 0).y.tolist() == [row["loss"] for row in history(90).of("step")]


def train_line(steps, smoothing):
    lines = chart_of(history(steps), "loss", Look(smoothing=smoothing)).lines
    return next(line for line in lines if line.name == "train")


def test_the_controls_say_how_curves_are_drawn_and_that_they_changed():
    heard = []
    made = Looks(lambda: heard.append(made.look))
    assert made.look == Look()
    made.scale.value, made.smoothing.value, made.part.value = "log", "none", (75, 100)
    assert heard == [Look("log"), Look("log", 0.0), Look("log", 0.0, 0.75, 1.0)]
    for both, shown in ((100, (0.99, 1.0)), (0, (0.0, 0.01)), (50, (0.5, 0.51))):
        made.part.value = (both, both)
        assert (made.look.first, made.look.last) == shown


def test_changes_are_a_list_to_unfold_the_newest_first():
    found = history(change=f"lr 0.0022499999 → {EVIL}")
    found.append(changed(200, "batch_size 64 → 128"))
    said = texts(changes(Columns(found)))
    assert said.startswith("Changes (2) step 200: batch_size 64 → 128 step 100: lr 0.00225 → </svg>")
    assert changes(Columns(history())) == ""


def test_the_first_mark_moves_nothing_below_it():
    before, after = (re.findall(r"margin-top:\d+px", frame(history(change=change))) for change in (None, "lr 1 → 2"))
    assert before == after


def test_charts_and_the_picture_of_them_are_described_in_words():
    made = shown(history())
    assert (
        made.charts[0].alt == f"loss: train {made.charts[0].lines[1].value}, validation {made.charts[0].lines[2].value}"
    )
    labels = [
        item.get("aria-label") for item in ET.fromstring(svg.frame(made)).iter("svg") if item.get("role") == "img"
    ]
    assert labels == [chart.alt for chart in made.charts]
    assert made.alt == f"captcha; {'; '.join(chart.alt for chart in made.charts)}"


@pytest.mark.browser
def test_charts_keep_their_places_from_the_first_frame_to_the_last_in_two_rows_of_440_px(chromium):
    """At 960 px, where a legend has the least room for three charts in a row; four metrics take two lines of it. What
    lies below must not move, and marks lie below one another."""
    long, first = History(), History()
    for row in history(memory=BUSY, change="lr 1 → 2", metric="a_metric_with_a_long_name").rows:
        values = (
            {**row, "val_char_accuracy": 0.471, "val_miou": 0.3, "val_top_five": 0.5}
            if row["kind"] == "epoch"
            else dict(row)
        )
        kind, epoch, step, count = (values.pop(name) for name in ("kind", "epoch", "step", "samples"))
        record = Record(kind, epoch, step, count, values)
        long.append(record)
        first.append(record) if record.step < 50 else None
    found, places = [], []
    with opened(chromium) as window:
        tab = window.new_page(viewport=ViewportSize(width=960, height=800))
        for rows in (first, long):
            rows.of("step")[0]["loss"] = 80.0
            tab.set_content(f"<body style='margin:0'><style>{svg.STYLE}.nbt {{ padding: 0 }}</style>{frame(rows)}")
            found.append((tab.locator(".nbt-grid").bounding_box() or {})["height"])
            places.append(tab.locator(".nbt-plot").evaluate_all(PLACES))
        legend = tab.locator(".nbt-many").bounding_box() or {"y": 0.0, "height": 0.0}
    assert len(set(found)) == 1
    assert found[0] <= 440
    assert places[0] == places[1]
    assert len({left for left, *_ in places[0]}) == 3
    assert len({(round(width), height) for _, _, width, height in places[0]}) == 1
    assert legend["height"] == 36, "two lines"
    assert legend["y"] + legend["height"] <= places[1][1][1], "above its plot"


@pytest.mark.browser
def test_values_under_the_pointer_are_those_of_all_curves_at_its_step_also_when_a_new_frame_comes(chromium):
    found = history(memory=BUSY, metric="<b>")
    page = svg.frame(shown(found))
    with opened(chromium) as window:
        tab = window.new_page()
        errors = []
        tab.on("pageerror", lambda error: errors.append(error))
        tab.set_content("<p>above</p><div></div>")
        put = "page => { document.querySelector('div').innerHTML = page }"
        tab.evaluate("head => { document.querySelector('p').innerHTML = head }", svg.head())
        tab.evaluate(put, page)
        plot = tab.locator(".nbt-plot").nth(1).bounding_box() or {}
        tab.mouse.move(plot["x"] + plot["width"] / 2, plot["y"] + 50)
        said = tab.locator(".nbt-at").all_inner_texts()
        tab.evaluate(put, page)
        tab.wait_for_function("document.querySelectorAll('.nbt-at').length == 6")
        again = tab.locator(".nbt-at").all_inner_texts()
        tab.mouse.move(0, 0)
        assert tab.locator(".nbt-at").count() == 0
    row = found.of("epoch")[1]
    assert said == again
    assert f"validation {number(row['val_loss'])}" in said[0]
    assert said[1] == "step 100\n0.500"
    assert said[2] == "5.00e-4"
    assert said[4] == "in use 96.0\nwaiting for data 2.00"
    assert errors == []


@pytest.mark.browser
@pytest.mark.parametrize("sandbox", [None, "allow-scripts", ""], ids=["page", "frame", "frame without scripts"])
def test_what_stays_of_a_run_needs_neither_jupyter_nor_another_origin_nor_the_network(chromium, monkeypatch, sandbox):
    """As in VS Code and Colab, whose outputs are frames of an origin of their own, and in a policy that allows inline
    scripts and data alone."""
    displayed: list[Any] = []
    monkeypatch.setattr("IPython.display.display", lambda *given, **_: displayed.extend(given))
    made, output = shown(history(memory=BUSY)), view.Output(lambda: None)
    output.live(HTML(), "")
    output.stay(png.Still(png.draw(made), made.alt), svg.head(facts.STYLE) + facts.html(made) + svg.frame(made))
    _, still, kept = displayed
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
    page = f'<meta http-equiv="Content-Security-Policy" content="{policy}">{still.html()}<div>{kept.data}</div>'
    framed = f'<iframe sandbox="{sandbox}" srcdoc="{escape(page)}" width="900" height="700"></iframe>'
    errors, requests = [], []
    with opened(chromium) as window:
        tab = window.new_page()
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        tab.on("request", lambda request: requests.append(request.url))
        tab.set_content(page if sandbox is None else framed)
        inside: Any = tab if sandbox is None else tab.frame_locator("iframe")
        picture, plots = inside.locator("img"), inside.locator(".nbtools-kept .nbt-plot")
        if sandbox == "":
            picture.wait_for()
            assert plots.count() == 0
            errors.clear()  # that a script was blocked
        else:
            picture.wait_for(state="hidden")
            assert plots.count() == len(made.charts)
            plots.nth(1).hover()
            assert inside.locator(".nbt-at").count() == len(made.charts)
    assert errors == []
    assert [url for url in requests if not url.startswith(("data:", "about:"))] == []


def test_text_from_a_run_never_becomes_markup():
    found = history(metric=EVIL, change=EVIL, memory={**BUSY, "gpu_throttle": EVIL})
    made = page(found, About(EVIL, best=EVIL), EVIL)
    assert "<img" not in made
    assert texts(made).count(" ".join(EVIL.split())) >= 5


def test_the_newest_changes_are_lines_in_every_chart_named_above_the_first_and_older_ones_ticks():
    found = history()
    for step in range(50, 100):
        found.append(changed(step, f"lr 0.0022499999 → {step}"))
    tree = ET.fromstring(frame(found))
    drawn = [item for item in tree.iter() if item.get("viewBox") == f"0 0 {svg.WIDTH} {svg.HEIGHT}"]
    assert len(drawn) == 6
    for each in drawn:
        marks = [path.get("d", "") for path in each.iter() if path.get("stroke-dasharray") == "3 3"]
        assert [mark.split()[0] for mark in marks] == [f"M{10 * step}" for step in range(50, 100)]
        assert [mark.split()[1][:2] for mark in marks] == ["50"] * 48 + ["10"] * 2
    named = [item.text for item in tree.iter() if item.get("class") == "nbt-name"]
    assert named == ["lr 0.00225 → 98", "lr 0.00225 → 99"]


def test_a_name_is_whole_in_a_chart_that_has_room_for_it_and_cut_by_its_width_elsewhere():
    found, what = history(), "diverged, back to step 124"
    found.append(Record("event", 2, 130, 130 * 64, {"what": "Training diverged", "mark": what}))
    named = [item for item in ET.fromstring(frame(found)).iter() if item.get("class") == "nbt-name"]
    assert [item.text for item in named] == [what]
    assert "max-width:65.0%" in named[0].get("style", "")
    assert "text-overflow:ellipsis" in svg.STYLE.partition(".nbt-name{")[2].partition("}")[0]


@given(st.lists(st.tuples(st.integers(1, 200), st.text("x", min_size=1, max_size=60)), min_size=1, max_size=6))
def test_names_of_marks_cross_neither_each_other_nor_another_marks_line(changes):
    found = history(2, 1)
    for step, what in sorted(changes):
        found.append(changed(step, what))
    found.append(Record("step", 0, 200, 200, {"loss": 0.1}))
    made = shown(found)
    named = [mark for mark in made.marks if mark.name]
    assert named or len(changes[0][1]) > 5
    for mark in named:
        low, high = (mark.x / made.last, 1) if mark.side > 0 else (0, mark.x / made.last)
        share, room = re.findall(r"[\d.]+(?=%)", svg.name(mark, made))
        assert float(share) + float(room) == pytest.approx(100), "up to the chart's edge, and no further"
        for other in made.marks:
            if other is not mark and mark.row is not None and other.row is not None:
                assert other.row != mark.row
                assert other.row < mark.row or not low < other.x / made.last < high


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
        [changed(0, "lr"), changed(0, "")],
    ],
)
def test_any_history_can_be_drawn(rows):
    found = History()
    for row in rows:
        found.append(row)
    made = shown(found, About("odd", 3, 64, "-cer"))
    assert "nan" not in texts(svg.frame(made))
    assert png.draw(made).startswith(b"\x89PNG")


def test_drawn_points_stay_inside_their_chart():
    lines = [line for line in ET.fromstring(frame(history(memory=BUSY))).iter() if line.tag.endswith("polyline")]
    assert len(lines) >= 10
    for line in lines:
        points = np.array(line.get("points", "").split(","), int).reshape(-1, 2)
        assert (points >= 0).all()
        assert (points <= (svg.WIDTH, svg.HEIGHT)).all()


def test_thinning_keeps_every_peak_the_ends_and_the_order():
    x, y = np.arange(10_001.0), np.random.default_rng(1).normal(size=10_001)
    y[[0, 1234, 7777, 10_000]] = (9, 99, -99, -9)
    thin_x, thin_y = chart.thinned(x, y)
    assert len(thin_x) <= 2 * chart.COLUMNS + 2
    assert (np.diff(thin_x) > 0).all()
    assert np.array_equal(y[thin_x.astype(int)], thin_y)
    assert {0.0, 1234.0, 7777.0, 10_000.0} <= set(thin_x)


@pytest.mark.parametrize("count", [40, 100, 10_001])
def test_a_calm_line_is_the_means_of_its_columns_and_then_of_their_neighbours(count):
    x, y = np.arange(float(count)), np.random.default_rng(4).normal(size=count)
    size = math.ceil(count / chart.COLUMNS)
    slow = np.array([[part[i : i + size].mean() for i in range(0, count, size)] for part in (x, y)])
    half = int(len(slow[1]) * 0.1 / 2)
    slow[1] = [slow[1][max(i - half, 0) : i + half + 1].mean() for i in range(len(slow[1]))]
    np.testing.assert_allclose(chart.calmed(x, y, 0.1), slow)


def test_columns_that_grew_with_a_history_are_those_of_the_whole_also_after_it_was_cut():
    whole = history(change="lr 1 → 2", memory=BUSY)
    part, grown = History(), Columns()
    for row in whole.rows[:150]:
        part.rows.append(row)
        grown.follow(part)
    part.cut(40)  # a rollback: the rows come again, as new ones
    part.rows += [dict(row) for row in whole.rows[40:]]
    assert svg.frame(picture(grown.follow(part), ABOUT)) == frame(whole)


@pytest.mark.parametrize(
    ("scale", "labels"),
    [
        (chart.Scale(0, 1), ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        (chart.Scale(0, 2000), ["0", "0.5k", "1k", "1.5k", "2k"]),
        (chart.Scale(3, 3), ["3"]),
        (chart.Scale(1e-7, 2e-4, log=True), ["1e-7", "1e-6", "1e-5", "1e-4"]),
        (chart.Scale(0.025, 12, log=True), ["0.03", "0.1", "0.3", "1", "3", "10"]),
        (chart.Scale(0.015, 0.6, log=True), ["0.02", "0.05", "0.1", "0.2", "0.5"]),
    ],
)
def test_ticks_are_round_numbers_with_equal_decimals(scale, labels):
    assert scale.ticks()[1] == labels


@given(st.floats(-1e6, 1e6), st.floats(-6, 7))
def test_ticks_of_any_axis_are_few_inside_and_told_apart(low, power):
    span = 10**power
    places, labels = chart.Scale(low, low + span).ticks()
    assert 2 <= len(places) <= 6
    assert low - span * 1e-6 <= places[0] <= places[-1] <= low + span * (1 + 1e-6)
    assert len(set(labels)) == len(labels) or abs(low) / span > 100


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((duration(45), "45 s"), (duration(59.7), "1 min 00 s"), (duration(200), "3 min 20 s")),
        *((duration(7500), "2 h 05 min"), (duration(409_000), "4 d 17 h")),
    ],
)
def test_durations_are_read_at_once(text, expected):
    assert text == expected


@pytest.mark.parametrize("steps", [2000, 10_000])
def test_a_frame_takes_about_two_milliseconds_however_long_the_run(steps):
    """About 1.5 ms on a free core for six charts; the bound is for a busy machine, the least of 20 for a fair one."""
    grown = Columns(history(steps, 20, BUSY))
    times = []
    for _ in range(20):
        start = time.thread_time()
        page = svg.frame(picture(grown, ABOUT))
        times.append(time.thread_time() - start)
    assert min(times) < 0.010
    assert len(page) < 40_000


@pytest.fixture
def drawn(monkeypatch):
    """The texts of the figures that were drawn, in order, with their colours."""
    found, saved = [], Figure.savefig

    def kept(figure, *given, **options):
        found.extend((text.get_text().replace("\xa0", " "), str(text.get_color())) for text in figure.findobj(Text))
        return saved(figure, *given, **options)

    monkeypatch.setattr(Figure, "savefig", kept)
    return found


def test_the_png_has_the_same_charts_on_a_transparent_ground_and_leaves_pyplot_alone(drawn):
    import matplotlib

    before = dict(matplotlib.rcParams)
    made = shown(history(metric="$cer", change="$lr", memory=BUSY), About("50 $ and $", best="-$cer"))
    image = Image.open(io.BytesIO(png.draw(made)))
    said = "\n".join(text for text, _ in drawn)
    for item in made.charts:
        for part in (item.title, item.unit, *(line.name for line in item.lines), *item.scale.ticks()[1]):
            assert part in said
    for part in (*(text for fact in made.facts for text in fact), "50 $ and $", "$lr"):
        assert part in said
    assert image.getchannel("A").getextrema() == (0, 255)
    assert len(image.convert("RGB").getcolors(1 << 20) or ()) > 100
    assert image.width == 2 * png.WIDE
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
    assert dict(matplotlib.rcParams) == before


def test_a_notebook_shows_the_png_at_half_its_pixels_with_what_it_shows_in_words():
    made = shown(history())
    data, about = DisplayFormatter().format(png.Still(png.draw(made), made.alt))
    with Image.open(io.BytesIO(base64.b64decode(data["image/png"]))) as image:
        assert about["image/png"] == {"width": image.width // 2, "height": image.height // 2, "alt": made.alt}
    assert data["text/plain"] == made.alt


def test_in_a_window_of_900_px_no_text_of_the_png_is_smaller_than_a_pages_notes(monkeypatch):
    """780 px is JupyterLab's output there. An image too wide for it shrinks with all its words."""
    sizes, saved = [], Figure.savefig

    def kept(figure, *given, **options):
        sizes.extend(text.get_size() for text in figure.findobj(Text) if text.get_text())
        return saved(figure, *given, **options)

    monkeypatch.setattr(Figure, "savefig", kept)
    made = shown(history(memory=BUSY, change="lr 1 → 2"))
    data = png.draw(made, [Preview(CAPTCHA, "abc", "abd")])
    with Image.open(io.BytesIO(data)) as image:
        scale = min(1, 780 / (image.width / 2))
    assert min(sizes) * scale >= 11.5
    assert len(sizes) > 60


CAPTCHA, LINE = np.zeros((60, 160), np.uint8), np.zeros((48, 800), np.uint8)
OVERLAY = np.random.default_rng(5).integers(0, 255, (360, 480, 3)).astype(np.uint8)


def test_the_png_shows_the_samples_below_the_charts():
    previews = [Preview(OVERLAY, "手写", "手与"), Preview(LINE, "$a$" * 40, "$b$"), Preview(CAPTCHA)]
    sizes = {}
    for name, each in (("bare", ()), ("with", previews)):
        with Image.open(io.BytesIO(png.draw(shown(history()), each))) as image:
            sizes[name], colours = image.height, len(image.convert("RGB").getcolors(1 << 20) or ())
    assert sizes["with"] > sizes["bare"] + 300
    assert colours > 10_000, "the overlay's noise"


def test_in_the_png_a_letter_without_a_font_is_its_code_point_and_a_long_text_is_broken(monkeypatch, drawn):
    monkeypatch.setattr(fonts, "system", list)
    png.draw(shown(history()), [Preview(CAPTCHA, "手a", "手b"), Preview(CAPTCHA, "ab" * 40, "ab" * 40)])
    short, long = [(text.split("\n"), colour) for text, colour in drawn if text.startswith("truth")]
    assert short == (["truth     U+624Ba", "predicted U+624Bb", "                ^"], chart.VERMILLION)
    assert long[1] == chart.GREEN
    assert "".join(line[10:] for line in long[0] if line.startswith("truth")) == "ab" * 40
    assert max(map(len, long[0])) * png.LETTER * png.SMALL <= png.WIDE / png.SAMPLES


def test_samples_are_equally_wide_unless_one_is_a_long_line_of_text_then_they_are_equally_high():
    tall = np.zeros((900, 30), np.uint8)
    assert samples.sizes([CAPTCHA, OVERLAY, tall]) == [(200, 75), (200, 150), (5, 160)]
    assert samples.sizes([LINE, CAPTCHA, LINE[:24]]) == [(800, 48), (128, 48), (1600, 48)]


@pytest.mark.parametrize(("image", "pixels"), [(CAPTCHA, (160, 60)), (LINE, (800, 48)), (OVERLAY, (400, 300))])
def test_a_thumbnail_has_no_more_pixels_than_the_screen_shows(image, pixels):
    [data] = re.findall(r'src="data:image/png;base64,([^"]*)"', samples.html([Preview(image, "a", "a")]))
    with Image.open(io.BytesIO(base64.b64decode(data))) as made:
        assert (made.size, made.mode) == (pixels, "RGB" if image.ndim == 3 else "L")


@pytest.mark.parametrize(
    ("truth", "predicted", "said"),
    [
        ("abc", "abc", "truth abc predicted abc ✓"),
        ("abc", "", "truth [abc] predicted –"),
        ("abc", "xabc", "truth abc predicted [x]abc"),
        ("Qm3pZ", "Om3p", "truth [Q]m3p[Z] predicted [O]m3p"),
        ("手写中文", "手与中文", "truth 手[写]中文 predicted 手[与]中文"),
        ("", "abc", "predicted abc"),
        (EVIL, "", f"truth [{EVIL}] predicted –"),
    ],
)
def test_what_was_not_read_and_what_was_misread_are_underlined_and_a_right_answer_has_a_tick(truth, predicted, said):
    page = samples.html([Preview(CAPTCHA, truth, predicted)])
    tree = ET.fromstring(page)
    for wrong in tree.iter("u"):
        wrong.text = f"[{wrong.text}]"
    assert " ".join("".join(part.itertext()) for part in tree.iter("div") if part.find("span") is not None) == (
        said.replace("truth ", "truth").replace("predicted ", "predicted")
    )
    assert [item.get("onerror") for item in tree.iter("img")] == [None]


def test_in_a_terminal_wrong_characters_are_marked_below_truth_and_prediction():
    said = samples.text([Preview(LINE, "手写中文ab", "手与文cab")], 80)
    assert said == ["truth     手写中文 ab", "predicted 手与  文cab", "            ^^^^  ^"]
    assert samples.text([Preview(LINE, "手写", "手写")], 80) == ["truth     手写", "predicted 手写 ✓"]
    assert samples.text([Preview(LINE), Preview(LINE, "", "手")], 80) == ["predicted 手"]
    assert samples.text([Preview(LINE, "a", "\x1b[2Ja")], 60)[1] == r"predicted \x1b[2Ja", "no command to the terminal"
    long = samples.text([Preview(LINE, "手写" * 30, "手写" * 30)], 60)
    assert max(map(columns, long)) <= 60
    assert "".join(line[10:] for line in long if line.startswith("truth")) == "手写" * 30
    assert len(samples.text([Preview(CAPTCHA, "ab", "ax")] * 20, 60)) == 3 * samples.SHOWN


def test_a_name_is_wrong_as_a_whole_however_many_letters_it_shares():
    taken = Preview(LINE, "number 1a", "number 1b", whole=True)
    assert samples.text([taken], 80) == ["truth     number 1a", "predicted number 1b", "          ^^^^^^^^^"]
    assert "<u>number 1a</u>" in samples.html([taken])
    assert samples.text([Preview(LINE, "number 1a", "number 1a", whole=True)], 80)[1] == "predicted number 1a ✓"


def test_what_a_run_starts_with_breaks_at_words_below_what_it_says():
    output, says = (
        view.Output(lambda: None),
        "1,160 samples · 19 steps per epoch · 1,140 steps in 60 epochs · 19 steps of",
    )
    output.opening = [f"length     {says} warmup"]
    assert output.text(5).splitlines() == [f"length     {says}", "           warmup"]


def test_the_bell_asks_and_rings_but_not_on_colab_where_outputs_are_in_a_sandbox(monkeypatch):
    for colab in (False, True):
        monkeypatch.setattr("nbtools.live.bell.on_colab", lambda colab=colab: colab)
        bell = Bell()
        assert ("Notify me when it ends" in bell.box.value) != colab
        bell.ring("done: captcha", "best 0.9")
        assert ("done: captcha" in bell.box.value) != colab
        assert (bell.box.value == "") == colab


@pytest.fixture
def watching(monkeypatch, tmp_path):
    """A view of a run in a notebook, with real ipywidgets and a clock that the test moves: now, and what the thread
    spent."""
    kernel = types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace(kernel=object()))
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "IPython", kernel)
        assert view.in_notebook()
    monkeypatch.setattr(view, "in_notebook", lambda: True)
    made: Any = view.View(tmp_path / "captcha", History(), Plan(epochs=8), 3200, "whole_accuracy", Plan(), show=True)
    made.clock = types.SimpleNamespace(now=100.0, spent=0.0)
    monkeypatch.setattr(view.time, "monotonic", lambda: made.clock.now)
    monkeypatch.setattr(view.time, "thread_time", lambda: made.clock.spent)
    return made


def test_in_a_notebook_frame_and_samples_are_renewed_in_widgets_of_their_own(watching):
    watching.show_samples([Preview(CAPTCHA, "abc", "abd")])
    for steps in (40, 80):
        watching.history, watching.due = history(steps), 0.0
        watching.draw("paused")
    assert watching.output.frame.value == frame(history(80), watching.about, "paused")
    assert "data:image/png" in watching.output.samples.value
    assert "data:image" not in watching.output.frame.value, "frames send no images"
    watching.show_samples([])
    assert watching.output.samples.value == ""


def test_settings_that_going_back_brought_with_it_do_not_hide_where_the_run_is_back(watching):
    def told(kind, step, what, **asked):
        watching.advance(Record(kind, 1, step, 64 * step, {"what": what, **asked}))
        return watching.panel.form.told

    watching.output.lives = True
    back = "back at step 19, the best checkpoint: cer 0.1 after epoch 1"
    assert told("event", 19, back, asked="best") == back
    assert told("change", 19, "lr 0.002 → 0.001") == f"{back}; lr 0.002 → 0.001"
    assert told("change", 25, "lr 0.001 → 0.003") == "lr 0.001 → 0.003"


def test_a_frame_without_news_is_not_drawn_again_but_when_asked(watching, monkeypatch):
    drawn = []
    monkeypatch.setattr(svg, "frame", lambda made: drawn.append(made.state) or "")
    watching.history = history(40)

    def later(status=""):
        watching.clock.now += 100
        watching.draw(status)
        return len(drawn)

    assert [later(), later(), later("paused"), later("paused")] == [1, 1, 2, 2]
    watching.history.append(Record("step", 4, 41, 41 * 64, {"loss": 0.1}))
    assert later("paused") == 3
    watching.changed(Plan(epochs=9))
    assert later("paused") == 4
    watching.due = 0.0
    assert later("paused") == 5


@pytest.mark.parametrize(("cost", "a_second"), [(0.0015, 4), (0.03, 0.2)])
def test_it_draws_at_most_four_times_a_second_and_for_its_share_of_the_time(watching, monkeypatch, cost, a_second):
    drawn, clock = [], watching.clock

    def draw(made):
        drawn.append(clock.now)
        clock.spent += cost
        return ""

    monkeypatch.setattr(svg, "frame", draw)
    watching.history = history(4)
    while clock.now < 160:
        watching.draw(str(clock.now))
        clock.now += 0.01
    assert 60 * a_second * 0.9 <= len(drawn) <= 60 * a_second + 1


def test_at_the_end_the_picture_is_a_png_and_all_that_is_drawn_outside_notebooks(tmp_path, monkeypatch):
    monkeypatch.setattr(svg, "frame", lambda made: pytest.fail("nothing to draw on"))
    (tmp_path / "run").mkdir()
    made = view.View(tmp_path / "run", history(40), Plan(epochs=8), 3200, "whole_accuracy", Plan(), show=False)
    made.start()
    made.draw()
    made.finish([Preview(CAPTCHA, "abc", "abd")], "done", tmp_path / "run" / "plot.png")
    assert (tmp_path / "run" / "plot.png").read_bytes().startswith(b"\x89PNG")
