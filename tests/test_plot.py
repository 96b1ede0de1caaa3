"""The picture of a run: what it shows, that it is quick, escaped and readable, and that the last frame stays."""

import io
import math
import re
import sys
import time
import types
import xml.etree.ElementTree as ET
from typing import Any

import numpy as np
import pytest
from PIL import Image

from nbtools import axis, chart, plot
from nbtools.chart import About
from nbtools.history import History, Record

EVIL = '</svg><img src=x onerror="alert(1)">&'
GPU = {"gpu_memory_allocated": 1200.0, "gpu_memory_reserved": 2300.0}


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
        }
        loss = math.exp(-6 * done) + 0.02 + 0.01 * abs(rng.normal())
        found.append(Record("step", epoch, step, step * 64, {"loss": loss, **row, **(memory or {"memory": 700.0})}))
        if step == steps // 2 and change:
            found.append(Record("change", epoch, step, step * 64, {"what": change}))
        if step % each == 0:
            value = {"val_loss": loss + 0.05, f"val_{metric}": done, "epoch_time": 5.0, "eval_time": 1.0}
            found.append(Record("epoch", epoch, step, step * 64, {"train_loss": loss, **value, **row}))
    return found


ABOUT = About("captcha", epochs=8, epoch_samples=50 * 64, best="whole_accuracy")


def parsed(page):
    """The frame as XML, which unescaped text or an unclosed tag would not be."""
    return ET.fromstring(page)


def texts(page):
    return " ".join(parsed(page).itertext())


def test_a_frame_shows_losses_metric_rate_memory_and_the_line_of_facts():
    shown = texts(plot.svg(history(), ABOUT, "evaluating"))
    for part in ("captcha", "train", "validation", "whole_accuracy", "learning rate", "memory of the process (MiB)"):
        assert part in shown
    for part in ("epoch 4 of 8", "step 200", "samples/s 640", "waiting for data 2 %", "memory 700 MiB"):
        assert part in " ".join(shown.split())
    assert "best whole_accuracy 1.000 in epoch 4" in " ".join(shown.split())
    assert "evaluating" in shown


def test_gpu_memory_is_drawn_when_the_run_had_a_gpu():
    shown = " ".join(texts(plot.svg(history(memory=GPU), ABOUT)).split())
    assert "GPU memory (GiB)" in shown
    assert re.search(r"allocated\s*1\.2\b.*reserved\s*2\.2\b", shown)


def test_time_left_counts_samples_at_the_recent_pace_and_evaluations():
    """4 of 8 epochs of 3,200 samples at 640 a second are 20 s, and 4 evaluations of 1 s."""
    assert ("left", "24 s") in chart.picture(history(), ABOUT).facts
    assert chart.picture(history(), ABOUT).share == 0.5


def test_a_finished_run_says_what_it_took_instead():
    facts = dict(chart.picture(history(), About(epochs=4, epoch_samples=3200)).facts)
    assert facts["took"] == "24 s"
    assert "left" not in facts


def test_the_lowest_is_best_for_an_error_rate_and_its_point_is_ringed():
    found = history(metric="cer")
    made = chart.picture(found, About(best="-cer"))
    [line] = made.charts[1].lines
    assert (line.name, line.ring) == ("cer", 0)
    assert ("best cer", "0.250 in epoch 1") in made.facts


def test_text_from_a_run_never_becomes_markup():
    page = plot.svg(history(metric=EVIL, change=EVIL), About(EVIL, best=EVIL), EVIL)
    assert "<img" not in page
    assert texts(page).count(EVIL) >= 4


def test_a_change_of_settings_is_marked_in_every_chart_where_it_happened():
    tree = parsed(plot.svg(history(change="lr 0.001 → 0.0005"), ABOUT))
    charts = tree.findall(".//{*}svg")
    assert len(charts) == 4
    middle = plot.LEFT + (plot.WIDTH - plot.LEFT - plot.RIGHT) / 2
    for drawn in charts:
        [mark] = [path.get("d", "") for path in drawn.iter() if path.get("stroke-dasharray")]
        assert mark.startswith(f"M{middle:.1f} ")
    assert "lr 0.001 → 0.0005" in texts(plot.svg(history(change="lr 0.001 → 0.0005")))


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
    ],
)
def test_any_history_can_be_drawn(rows):
    found = History()
    for row in rows:
        found.append(row)
    about = About("odd", 3, 64, "-cer")
    page = plot.svg(found, about)
    assert "nan" not in page
    assert parsed(page) is not None
    assert plot.png(plot.figure(found, about)).startswith(b"\x89PNG")


def test_drawn_points_stay_inside_their_chart():
    tree = parsed(plot.svg(history(metric="cer", memory=GPU), ABOUT))
    for line in tree.iter():
        if line.tag.endswith("polyline"):
            points = np.array(line.get("points", "").split(","), int).reshape(-1, 2) / 10
            assert points[:, 0].min() >= plot.LEFT
            assert points[:, 0].max() <= plot.WIDTH - plot.RIGHT
            assert points[:, 1].min() >= plot.TOP
            assert points[:, 1].max() <= plot.HEIGHT - plot.BOTTOM


def test_thinning_keeps_every_peak_the_ends_and_the_order():
    x, y = np.arange(10_001.0), np.random.default_rng(1).normal(size=10_001)
    y[[0, 1234, 7777, 10_000]] = (9, 99, -99, -9)
    thin_x, thin_y = chart.thinned(x, y)
    assert len(thin_x) <= 2 * chart.COLUMNS + 2
    assert (np.diff(thin_x) > 0).all()
    assert np.array_equal(y[thin_x.astype(int)], thin_y)
    assert {0.0, 1234.0, 7777.0, 10_000.0} <= set(thin_x)


@pytest.mark.parametrize("half", [1, 3, 50])
def test_smoothing_is_the_mean_of_the_neighbours(half):
    values = np.random.default_rng(2).normal(size=40)
    slow = [values[max(i - half, 0) : i + half + 1].mean() for i in range(40)]
    assert np.allclose(chart.smoothed(values, half), slow)


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]), (0, 2000, ["0", "0.5k", "1k", "1.5k", "2k"]), (3, 3, ["3"])],
)
def test_ticks_are_round_numbers_with_equal_decimals(low, high, expected):
    assert axis.tick_labels(axis.ticks(low, high)) == expected


def test_ticks_of_any_axis_are_few_and_inside():
    rng = np.random.default_rng(3)
    for low, span in zip(
        rng.normal(size=200) * 10.0 ** rng.integers(-6, 7, 200), 10 ** rng.uniform(-6, 7, 200), strict=True
    ):
        found = axis.ticks(low, low + span)
        assert 2 <= len(found) <= 6
        assert low - span * 1e-6 <= found[0]
        assert found[-1] <= low + span * (1 + 1e-6)
        assert len(set(axis.tick_labels(found))) == len(found) or abs(low) / span > 100


def test_a_logarithmic_axis_has_powers_of_ten_or_their_halves_and_fifths():
    assert axis.tick_labels(axis.log_ticks(1e-7, 2e-4), True) == ["1e-7", "1e-6", "1e-5", "1e-4"]
    assert axis.tick_labels(axis.log_ticks(0.015, 0.6), True) == ["0.02", "0.05", "0.1", "0.2", "0.5"]


@pytest.mark.parametrize(
    ("value", "text"), [(0.9731, "0.973"), (0.0258, "0.0258"), (31.24, "31.24"), (0, "0.0000"), (2e-7, "2.00e-7")]
)
def test_numbers_are_written_with_the_digits_that_one_can_read_at_once(value, text):
    assert axis.number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(45, "45 s"), (200, "3 min 20 s"), (7500, "2 h 05 min"), (59.7, "1 min 00 s")]
)
def test_durations_are_read_without_arithmetic(seconds, text):
    assert axis.duration(seconds) == text


def test_a_frame_of_2000_points_takes_about_a_millisecond_or_two():
    """≤ 2 ms on a free core; the bound here is for a busy machine, the least of 30 for a fair one."""
    found = history(2000, 20, GPU)
    times = []
    for _ in range(30):
        start = time.process_time()
        page = plot.svg(found, ABOUT)
        times.append(time.process_time() - start)
    assert min(times) < 0.010
    assert len(page) < 40_000


def test_the_figure_has_the_same_charts_in_greys_on_a_transparent_ground():
    made = plot.figure(history(metric="$cer", change="$lr"), About("50 $ and $", best="-$cer"))
    assert [axes.get_title(loc="left") for axes in made.axes] == [
        c.title for c in chart.picture(history(metric="$cer")).charts
    ]
    image = Image.open(io.BytesIO(plot.png(made)))
    assert image.getchannel("A").getextrema()[0] == 0
    assert image.width == 1440


def test_drawing_leaves_pyplot_and_its_settings_alone():
    import matplotlib

    before = dict(matplotlib.rcParams)
    plot.figure(history(), ABOUT)
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
    assert dict(matplotlib.rcParams) == before


@pytest.fixture
def notebook(monkeypatch):
    """As in a kernel: a real ipywidgets HTML, and a list of what was displayed (with its value at that moment)."""
    shown = []
    kernel = types.SimpleNamespace(get_ipython=lambda: types.SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", kernel)
    assert plot.in_notebook()
    monkeypatch.delitem(sys.modules, "IPython")
    monkeypatch.setattr(plot, "in_notebook", lambda: True)
    monkeypatch.setattr(plot, "display", lambda item: shown.append((item, getattr(item, "value", None))))
    return shown


def test_in_a_notebook_the_live_frame_is_shown_once_and_then_only_renewed(notebook):
    live = plot.LivePlot("captcha", 8, 3200, "whole_accuracy")
    live.update(history(40))
    live.due = 0.0
    live.update(history(80))
    [(widget, value)] = notebook
    assert value == ""  # what a saved notebook keeps as the widget's text
    assert widget.value == plot.svg(history(80), live.about)


def test_it_draws_at_most_four_times_a_second_and_for_one_percent_of_the_time(notebook, monkeypatch):
    now, drawn, cost = [100.0], [], 0.0
    monkeypatch.setattr(plot.time, "monotonic", lambda: now[0])

    def draw(*_):
        drawn.append(now[0])
        now[0] += cost
        return ""

    monkeypatch.setattr(plot, "svg", draw)
    for seconds, expected in ((0.001, 4), (0.02, 0.5)):
        cost = seconds
        now[0] += 100
        live, begin = plot.LivePlot(), now[0]
        drawn.clear()
        while now[0] < begin + 60:
            live.update(History())
            now[0] += 0.001
        assert len(drawn) <= 60 * expected + 1
        assert len(drawn) >= 60 * expected * 0.95


def test_at_the_end_the_picture_is_a_png_in_the_output_and_in_the_run_folder(notebook, tmp_path):
    live = plot.LivePlot("captcha", 8, 3200)
    live.update(history(40))
    widget: Any = live.widget
    live.finish(history(80), tmp_path / "plot.png")
    image = notebook[-1][0]
    assert image.data == (tmp_path / "plot.png").read_bytes()
    with Image.open(io.BytesIO(image.data)) as picture:
        assert picture.width == 1440
    assert (widget.value, widget.comm) == ("", None)  # closed: the live frame is gone
    live.update(history(80))
    assert len(notebook) == 2


def test_without_a_notebook_nothing_is_shown_but_the_picture_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(plot, "display", lambda item: pytest.fail("nothing to display on"))
    assert not plot.in_notebook()
    live = plot.LivePlot("captcha")
    live.update(history(40))
    live.finish(history(40), tmp_path / "new" / "plot.png")
    assert (tmp_path / "new" / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_goes_on_without_its_picture_where_ipywidgets_is_missing(monkeypatch, notebook):
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    plot.LivePlot("captcha").update(history(40))
    assert notebook == []
