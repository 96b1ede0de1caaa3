"""The picture of a run, live and as the PNG that stays: what it says of any history, escaped, and of its samples."""

import io
import math
import re
import sys
import time
import xml.etree.ElementTree as ET
from html import escape
from typing import Any

import numpy as np
import pytest
import toy
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

import nbtools as nb
from nbtools import figures
from nbtools.live import Columns, draw, facts, samples, view
from nbtools.live.facts import About
from nbtools.live.plot import picture
from nbtools.live.samples import Preview
from nbtools.show import duration, number
from nbtools.train import History, Record

pytestmark = pytest.mark.drawn

EVIL = '</svg><img src=x onerror="alert(1)">&'
BUSY = {"gpu_memory_allocated": 1200.0, "gpu_memory_reserved": 2300.0, "gpu_memory_used": 2900, "gpu_power": 283.4}
ABOUT = About("captcha", epochs=8, epoch_samples=50 * 64, best="whole_accuracy")
CAPTCHA = np.zeros((60, 160), np.uint8)


def shown(found, about=ABOUT, x="step"):
    return picture(Columns().follow(found), about.best, x)


def page(found, about=ABOUT, status=""):
    return f"<div>{facts.html(Columns().follow(found), about, status)}{draw.page(shown(found, about), head='')}</div>"


def texts(page):
    """The text of a page, which is XML: unescaped text or an unclosed tag would not be."""
    return " ".join(" ".join(ET.fromstring(page).itertext()).split())


def history(steps=200, epochs=4, memory=None, metric="whole_accuracy", change=None):
    """A run that learns: a row every step, an evaluation at each epoch's end, 64 samples a step."""
    found, each = History(), steps // epochs
    rng = np.random.default_rng(0)
    for step in range(1, steps + 1):
        epoch, done = (step - 1) // each, step / steps
        lr = 1e-3 * (1 + math.cos(math.pi * done)) / 2
        row = {"lr": lr, "batch_size": 64, "samples_per_s": 640.0, "data_wait": 0.02, "wall": step * 0.6}
        row |= memory or {"memory": 700.0}
        loss = math.exp(-6 * done) + 0.02 + 0.01 * abs(rng.normal())
        found.append(Record("step", epoch, step, step * 64, {"loss": loss, **row}))
        if step == steps // 2 and change:
            found.append(Record("change", epoch, step, step * 64, {"what": change}))
        if step % each == 0:
            value = {"val_loss": loss + 0.05, f"val_{metric}": done, "epoch_time": 5.0, "eval_time": 1.0}
            found.append(Record("epoch", epoch, step, step * 64, {"train_loss": loss, **value, **row}))
    return found


COMMON = (
    *("captcha", "evaluating", "train", "validation", "whole accuracy", "learning rate", "epoch 4 of 8", "lr 1 → 2"),
    *("samples/s 640", "time left", "best whole accuracy 1.00"),
)
OWN = {
    "CPU": (None, ("memory 734 MB",)),
    "GPU": ({**BUSY, "data_wait": 0.06}, ("GPU memory 2.4 GB", "waiting for data 6 %")),
}


@pytest.mark.parametrize("machine", OWN)
def test_it_shows_losses_metric_rate_speed_waiting_memory_changes_and_the_facts(machine):
    memory, own = OWN[machine]
    said = texts(page(history(memory=memory, change="lr 1 → 2"), status="evaluating"))
    assert [part for part in (*COMMON, *own) if part not in said] == []
    assert ("GPU" in said) == ("waiting for data" in said) == (machine == "GPU")


def test_the_share_of_waiting_is_of_the_last_steps_at_the_end_of_all_and_the_x_axis_is_steps_samples_or_minutes():
    found = history()
    for x, last in (("step", "200"), ("samples", "12800"), ("minutes", "2")):
        assert f'data-x="{x}" data-first="0" data-last="{last}"' in draw.page(shown(found, x=x))
    for row in found.rows[-5:]:
        row["data_wait"] = 0.9
    assert re.search(r"waiting for data [12]\d %", texts(page(found, status="evaluating"))), "not of the newest alone"
    assert "waiting" not in texts(page(found, status="done"))
    for step in (75, 225):
        found.append(Record("evaluation", 4, step, step * 64, {"val_loss": 0.01, "val_whole_accuracy": 2.0}))
    assert "best whole accuracy 1.00" in texts(page(found)), "no evaluation amid an epoch"
    assert "best cer 0.250" in texts(page(history(metric="cer"), About(best="-cer"))), "the least"


def test_a_long_log_counts_as_a_cost_of_the_frames_that_send_it(pack, tmp_path, monkeypatch):
    monkeypatch.setattr(view, "in_notebook", lambda: True)
    made: Any = view.View(tmp_path, history(), toy.PLAN, pack.card, "accuracy", None, True)
    made.output.log += [["epoch", "loss", "lr"]] * 100_000
    made.draw()
    assert made.due - time.monotonic() > 20, "at such a length, and not after a second"


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [Record("event", 0, 0, 0, {"what": "out of memory"})],
        [Record("step", 0, 1, 64, {"loss": math.nan, "lr": 0.0, "memory": math.inf, "samples_per_s": 0.0})],
        [Record("step", 0, 1, 64, {"loss": 0.0}), Record("step", 0, 2, 128, {"loss": -1.0})],
        [Record("step", 0, 1, 64, {"loss": "'=cmd", "lr": 1e-3})],
        [Record("epoch", 0, 5, 64, {"train_loss": 0.5, "val_cer": 31.0, "val_ar": -30.0})],
    ],
)
def test_any_history_can_be_drawn(rows):
    found = History()
    for row in rows:
        found.append(row)
    about = About("odd", 3, 64, "-cer")
    assert "nan" not in texts(page(found, about))
    assert draw.png(shown(found, about)).startswith(b"\x89PNG")


def test_text_from_a_run_never_becomes_markup():
    found = history(metric=EVIL, change=EVIL, memory={**BUSY, "gpu_throttle": EVIL})
    made = page(found, About(EVIL, best=EVIL), EVIL)
    assert "<img" not in made
    assert texts(made).count(" ".join(EVIL.split())) >= 4
    shown_samples = samples.html([Preview(CAPTCHA, EVIL, "")])
    assert escape(EVIL) in shown_samples
    assert [item.get("onerror") for item in ET.fromstring(shown_samples).iter("img")] == [None]


def test_the_png_says_the_same_on_a_transparent_ground_and_leaves_pyplot_alone(monkeypatch):
    import matplotlib

    said, saved, before = list[str](), Figure.savefig, dict(matplotlib.rcParams)

    def kept(figure, *given, **options):
        said.extend(text.get_text().replace("\xa0", " ") for text in figure.findobj(Text))
        return saved(figure, *given, **options)

    monkeypatch.setattr(Figure, "savefig", kept)
    made = shown(history(metric="$cer", change="$lr", memory=BUSY), About("50 $ and $", best="-$cer"))
    long = [Preview(CAPTCHA, "手a", "手b"), Preview(CAPTCHA, "ab" * 40, "ab" * 40)]
    image = Image.open(io.BytesIO(draw.png(made, ["50 $ and $ done", "samples/s 640"], long)))
    for part in ("50 $ and $", "$cer", "learning rate", "validation", "samples/s 640"):
        assert part in "\n".join(said)
    assert any(re.fullmatch(r"truth     (ab)+a?…\npredicted (ab)+a?… ✓", text) for text in said), "cut"
    assert image.getchannel("A").getextrema() == (0, 255)
    assert "matplotlib.pyplot" not in sys.modules or not sys.modules["matplotlib.pyplot"].get_fignums()
    assert dict(matplotlib.rcParams) == before


@pytest.mark.parametrize("val", [0.2, 0.0])
def test_what_is_drawn_last_of_a_kept_run_is_true_of_the_whole(tmp_path, monkeypatch, val):
    """And promises nothing of a validation split that is not there; nor does who watches it from elsewhere."""
    said, pack = [], toy.pack(toy.demo(tmp_path / "raw"), into=tmp_path / "pack", val=val)
    monkeypatch.setattr("nbtools.live.draw.png", lambda *given: said.append(given) or b"\x89PNG")
    run = nb.fit(toy, pack, toy.PLAN.replace(epochs=2), tmp_path / "run", keep=tmp_path / "kept", receipt=False)
    last = nb.watch(run).history.of("epoch")[-1]
    drawn, _, cards = said[-2]
    usual, elsewhere = ([fact for fact in lines if "waiting" not in fact] for _, lines, _ in said[-2:])
    state, epoch, took, *best, speed, memory = usual
    assert (len(best), len(drawn.charts), len(elsewhere)) == (bool(val), 2 + bool(val), 5 + bool(val))
    assert ((run.folder / "plot.png").read_bytes(), len(cards)) == (b"\x89PNG", samples.SAMPLES)
    assert (state, epoch) == ("run done", "epoch 2 of 2")
    assert memory.startswith(("memory", "GPU memory")), "no word of what is kept"
    assert took == f"took {duration(last['wall'])}"
    assert last["wall"] == pytest.approx(60 * nb.runs(tmp_path).loc["run", "minutes"])
    assert speed == f"samples/s {number(last['samples'] / last['wall'])}", "not that of its last steps"


def test_texts_are_readable_on_white_and_those_of_dark_themes_on_dark_grey():
    dark, every = (re.findall(rf"{rule} {{ color: (#\w{{6}})", draw.STYLE) for rule in ("dark.*", ""))
    assert (len(dark), len(every)) == (2, 5)
    for colour in (*every, draw.GREY, draw.RIGHT, draw.WRONG, figures.GREY, figures.RIGHT, figures.WRONG):
        parts = np.array([to_rgb(colour), to_rgb("#1e1e1e" if colour in dark else "white")])
        linear = np.where(parts > 0.04045, ((parts + 0.055) / 1.055) ** 2.4, parts / 12.92)
        low, high = sorted(linear @ (0.2126, 0.7152, 0.0722))
        assert (high + 0.05) / (low + 0.05) >= 4.5, f"{colour}: contrast as WCAG defines it"


@pytest.mark.parametrize("said", ["abc, abc ✓", "[Q]m3p[Z], [O]m3p", "99[7]2, 99[2]2", "[1]2345, 2345"])
def test_what_was_not_read_and_what_was_misread_are_underlined_and_a_right_answer_has_a_tick(said):
    made = samples.html([Preview(CAPTCHA, *re.findall(r"\w+", re.sub(r"[][]", "", said)))])
    marked = texts(f"<div>{made.replace('<u>', '[').replace('</u>', ']')}</div>")
    truth, predicted = said.replace(" ", "").split(",")
    assert f"truth{truth}predicted{predicted}" in marked.replace(" ", "")
    assert "<u>number 1b</u>" in samples.html([Preview(CAPTCHA, "number 1a", "number 1b", whole=True)]), "a name"
