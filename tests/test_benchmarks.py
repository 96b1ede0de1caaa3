"""Claims about the benchmarks: their arithmetic, and that each runs and ends in the line that it promises."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.paired import RESULTS, Figure, Receipt, above, in_turns, times
from nbtools.train import clear_gradients
from nbtools.train.step import clip_gradients

LONELY = find_spec("lightning") is None
ROOT = Path(__file__).parent.parent
LAST = re.compile(r"(\w+): -?[\d.,]+(?:e[+-]\d+)? (\S+) \(n=(\d+), spread -?\S+–-?\S+\)")


def test_a_figure_is_the_median_with_its_spread():
    figure = Figure.of("speed", "×", [5.0, 1.0, 3.0, 100.0])
    assert (figure.value, figure.n, figure.least, figure.most) == (4.0, 4, 1.0, 100.0)
    assert str(figure) == "speed: 4 × (n=4, spread 1–100)"


def test_contestants_are_paired_within_a_round():
    drift = {"bare": [100.0, 200.0, 400.0], "loop": [110.0, 220.0, 440.0]}
    assert above(drift, "loop", "bare") == [10.0, 20.0, 40.0]
    assert times(drift, "loop", "bare") == pytest.approx([1.1, 1.1, 1.1])


def test_pairing_refuses_rounds_that_have_no_partner():
    with pytest.raises(ValueError, match="longer"):
        above({"bare": [1.0, 2.0], "loop": [1.0]}, "loop", "bare")


def test_every_contestant_runs_in_every_slice_and_each_begins_in_turn():
    calls = []

    def contestant(name):
        return lambda: calls.append(name) or 1.0

    found = in_turns({name: contestant(name) for name in "abc"}, rounds=2, slices=3)
    assert found == {name: [3.0, 3.0] for name in "abc"}
    assert "".join(calls) == "abc" + "bca" + "cab" + "abc" + "bca" + "cab"


def test_a_receipt_holds_what_it_prints_and_no_place(tmp_path):
    receipt = Receipt(Figure.of("speed", "×", [2.0]), (Figure.of("other", "s", [1.0]),), {"batch": 64})
    written = json.loads(receipt.write(tmp_path).read_text())
    assert written["headline"]["value"] == 2.0
    assert [f["name"] for f in written["figures"]] == ["other"]
    assert {"device", "cores", "torch", "python"} <= written["machine"].keys()
    assert str(receipt).splitlines()[-1] == "speed: 2 × (n=1, spread 2–2)"


@pytest.mark.parametrize(
    ("name", "headline", "unit"),
    [
        ("overhead", "loop_overhead", "µs/step"),
        ("feed", "feed_ratio", "×"),
        ("surface", "surface_cost", "%"),
        ("padding", "hwdb_padding", "%"),
        ("sign_feed", "sign_feed_ratio", "×"),
        ("segment_feed", "segment_feed_ratio", "×"),
        pytest.param("knobs", "knobs_gain", "×", marks=pytest.mark.full),
        pytest.param(
            "finder", "finder_ratio", "×", marks=pytest.mark.skipif(LONELY, reason="make bench installs Lightning")
        ),
    ],
)
def test_a_benchmark_runs_and_ends_in_its_promised_line(name, headline, unit):
    command = [sys.executable, "-W", "error", "-m", f"benchmarks.{name}", "--quick"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240)
    assert ran.returncode == 0, ran.stderr
    match = LAST.fullmatch(ran.stdout.splitlines()[-1])
    assert match, ran.stdout
    assert match[1] == headline
    assert match[2].endswith(unit)


KEPT = {
    "loop_overhead": lambda x: x <= 20,
    "feed_ratio": lambda x: x >= 100,
    "surface_cost": lambda x: x <= 1,
    "hwdb_padding": lambda x: x <= 10,
    "sign_feed_ratio": lambda x: x >= 10,
    "segment_feed_ratio": lambda x: x >= 20,
    "finder_ratio": lambda x: x >= 0.95,  # of the speed of Lightning's choice
}


@pytest.mark.parametrize("name", KEPT)
def test_the_kept_receipts_keep_the_promises(name):
    receipt = json.loads((RESULTS / f"{name}.json").read_text())
    assert receipt["headline"]["n"] >= 9
    assert KEPT[name](receipt["headline"]["value"])


@pytest.mark.parametrize("task", ["captcha", "hwdb", "sign", "segment"])
def test_no_single_change_of_a_knob_makes_the_advised_plan_much_faster_and_it_learns_the_same(task):
    receipt = json.loads((RESULTS / f"knobs_{task}.json").read_text())
    assert receipt["headline"]["n"] >= 7
    assert receipt["headline"]["value"] <= 1.1
    found = {figure["name"].removeprefix(f"{task}: "): figure for figure in receipt["figures"]}
    assert {"amp", "channels_last", "feed", "batch"} <= {name.split("=")[0].split(" ")[0] for name in found}
    assert receipt["conditions"]["refused"].keys() <= {"amp=fp16"}
    if receipt["conditions"]["advised"]["amp"] != "off":
        assert found["difference of mean losses"]["value"] <= 1


def test_one_update_of_the_plot_takes_no_more_than_promised():
    receipt = json.loads((RESULTS / "surface_cost.json").read_text())
    (update,) = [figure for figure in receipt["figures"] if figure["name"] == "plot_update"]
    assert update["value"] <= 2.0


def test_augmenting_whole_batches_was_never_slower_than_picture_by_picture():
    receipt = json.loads((RESULTS / "segment_feed_ratio.json").read_text())
    (ratio,) = [figure for figure in receipt["figures"] if figure["name"] == "augmented_packed_ratio"]
    assert ratio["n"] >= 9
    assert ratio["least"] >= 1


def test_the_recorded_run_on_street_scenes_is_clearly_above_the_place_alone():
    receipt = json.loads((RESULTS / "segment_camvid.json").read_text())
    found = {figure["name"]: figure["value"] for figure in receipt["figures"]}
    assert found["slim, single scale: miou"] > 2 * found["place alone: miou"]
    assert found["last epoch"] > 2 * found["place alone: miou"]
    assert found["cpu"] <= 60
    assert (RESULTS / "segment_camvid.png").stat().st_size > 10_000


@pytest.mark.parametrize(("scale", "acts"), [(1e-3, False), (1.0, True), (1e3, True)])
def test_gradients_are_clipped_to_the_bits_of_torch(scale, acts):
    torch.manual_seed(0)
    given = [scale * torch.randn(5, 7), scale * torch.randn(3)]
    sets = [[nn.Parameter(torch.zeros_like(g)) for g in given] for _ in range(2)]
    for parameter, gradient in zip([*sets[0], *sets[1]], given * 2, strict=True):
        parameter.grad = gradient.clone()
    unused = nn.Parameter(torch.zeros(2))  # of a layer that the forward left out: it has no gradient
    nn.utils.clip_grad_norm_([*sets[0], unused], 1.0)
    clip_gradients([*sets[1], unused], 1.0)
    by_torch, ours = ([p.grad for p in parameters if p.grad is not None] for parameters in sets)
    assert all(map(torch.equal, by_torch, ours))
    assert torch.equal(ours[0], given[0]) != acts
    assert unused.grad is None


def test_cleared_gradients_are_gone_not_zero():
    parameter = nn.Parameter(torch.ones(2))
    parameter.sum().backward()
    clear_gradients([parameter])
    assert parameter.grad is None
