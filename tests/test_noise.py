"""Claims about the gradient noise scale, where it is known in closed form, and about the effective batch's ladder."""

import dataclasses
import json

import numpy as np
import pytest
import torch
from torch import nn

from nbtools.data import build, open_feed
from nbtools.errors import PlanError
from nbtools.measure.ladder import Ladder, Reference, changed, kept, ladder, rounded, split
from nbtools.measure.noise import Noise, noise_scale, ratio, scales_of
from nbtools.train import Plan, TrainState, step

FEATURES = 12


def unread(path, options):
    raise AssertionError("this pack is written from arrays, no file is read")


class Linear:
    """A task: y = x · w + ε of standard deviation `sigma`, fitted by least squares from w = 0."""

    PLAN = BASELINE = Plan(epochs=1, batch_size=16, lr=1e-3, optimizer="sgd")

    def pack(self, folder, w, sigma, count=20_000):
        rng = np.random.default_rng(0)
        x = rng.normal(size=(count, FEATURES)).astype(np.float32)
        y = (x @ w + sigma * rng.normal(size=count)).astype(np.float32)
        (folder / "raw").mkdir()
        (folder / "raw" / "x").write_text("")

        def fill(writer, _folder):
            for i in range(count):
                writer.add(f"{i}", "train", x=x[i], y=y[i : i + 1])

        return build(folder / "raw", "linear", {}, fill, read=unread, val=0, into=folder / "pack", progress=False)

    def model(self, card, plan):
        model = nn.Linear(FEATURES, 1, bias=False)
        nn.init.zeros_(model.weight)
        return model

    def batch(self, raw, plan, draws):
        return {"x": raw["x"], "y": raw["y"]}

    def loss(self, model, batch, plan):
        return (model(batch["x"]) - batch["y"]).square().sum() / 2, len(batch["x"])

    def metrics(self, outputs, batch):
        return {}


def sure(*values: float | None) -> list[float]:
    """None of them is None."""
    known = [value for value in values if value is not None]
    assert len(known) == len(values)
    return known


def in_closed_form(w, sigma):
    """B at w = 0 for standard normal x: g = -x (x · w + ε), E|g|² = (d + 2)|w|² + d σ², E g = -w."""
    square = float(w @ w)
    return ((FEATURES + 1) * square + FEATURES * sigma**2) / square


@pytest.mark.parametrize(("size", "sigma"), [(1.0, 0.0), (0.5, 1.0), (0.3, 2.0)])
def test_the_noise_scale_is_within_its_spread_of_the_closed_form(tmp_path, size, sigma):
    task, w = Linear(), np.full(FEATURES, size / FEATURES**0.5)
    known = in_closed_form(w, sigma)
    pack = task.pack(tmp_path, w, sigma)
    found = noise_scale(task, pack, task.PLAN, "cpu", seconds=4)
    value, low, high = sure(found.value, found.low, found.high)
    spread = (high - low) / 2  # on a busy machine with n = 8, one in ten lies outside the interval
    assert low - spread <= known <= high + spread, f"{known:.1f}: {found}"
    assert abs(value / known - 1) < 0.35
    assert found.n >= 8
    assert str(round(value)) in str(found).replace(",", "")


def test_nine_of_ten_intervals_hold_the_true_value():
    """Pairs drawn from the paper's own model, gradients G + N(0, Σ/b): the interval keeps its word."""
    rng, d, true, held = np.random.default_rng(1), 200, 60.0, 0
    mean = np.full(d, 1 / d**0.5)  # |G|² = 1, so tr(Σ) = B
    for _ in range(200):
        small = mean + rng.normal(size=(24, 8, d)) * (true / d / 16) ** 0.5
        pairs = list(zip((small**2).sum(2).mean(1).tolist(), (small.mean(1) ** 2).sum(1).tolist(), strict=True))
        _, low, high = sure(*scales_of(pairs, 16, 8))
        held += low <= true <= high
    assert 0.82 <= held / 200 <= 0.97


def test_a_mean_gradient_lost_in_noise_is_said_and_not_made_up():
    assert ratio(np.array([[1.0, 1 / 8]]), 16, 8)[0] == np.inf  # |G|² = 0
    value, low, high = scales_of([(1.0, 0.124), (1.0, 0.12), (1.0, 0.11)], 16, 8)
    assert (value, high) == (None, None)
    noise = Noise(value, low, high, 3, 16, 128, 0, 1.0)
    assert "too large to tell from 3 pairs" in str(noise)
    assert json.loads(json.dumps(noise.to_dict(), allow_nan=False)) == noise.to_dict()
    assert Noise.from_dict(noise.to_dict()) == noise


def test_the_noise_scale_is_that_of_the_given_weights_and_leaves_them(tmp_path):
    """Near the optimum the mean gradient is gone and noise is left: B is far larger than at the start."""
    task, w = Linear(), np.full(FEATURES, 0.2)
    pack = task.pack(tmp_path, w, 1.0, count=4000)
    state = TrainState(task, pack, task.PLAN, "cpu")
    start = noise_scale(task, pack, task.PLAN, "cpu", seconds=0.5)
    [weight] = state.parameters
    with torch.no_grad():
        weight.copy_(torch.from_numpy(0.9 * w)[None])
    state.step = 77
    before, rng = weight.clone(), torch.get_rng_state()
    later = noise_scale(task, pack, task.PLAN, seconds=0.5, state=state)
    high, low = sure(start.high, later.low)
    assert low > high
    assert "after step 77" in str(later)
    assert "first weights" in str(start)
    assert torch.equal(before, weight)
    assert weight.grad is None
    assert torch.equal(rng, torch.get_rng_state())


HWDB = Reference(batch_size=8, lr=1e-3, rule="sqrt", digits=1.5)
CAPTCHA = Reference(batch_size=3 * 1024, lr=6e-4, rule="sqrt")


def test_the_line_guides_ladder_comes_out_of_the_square_root_rule():
    """64 → 48 → 32 with lr .003, .0025, .002, from the reference's batch 8 and lr .001."""
    found = ladder(HWDB, (64, 48, 32))
    assert [(rung.effective, rung.lr) for rung in found.rungs] == [(64, 0.003), (48, 0.0025), (32, 0.002)]
    assert "0.001 at batch 8, times 2.83 by the sqrt rule, rule of thumb (arXiv 2205.10287)" in found._repr_html_()


def test_the_captcha_guides_ladder_896_and_two_times_512():
    """1024 a GPU on three; 896, another effective batch; 2 × 512, the same one with the same lr."""
    first, second, third = ladder(CAPTCHA, (1024, 896), processes=3, fits=512).rungs
    assert (first.micro, first.accumulation, first.effective, first.lr) == (1024, 1, 3072, 6e-4)
    assert (second.micro, second.accumulation, second.effective) == (896, 1, 2688)
    assert second.lr == pytest.approx(6e-4 * (896 / 1024) ** 0.5, rel=1e-3)
    assert (third.micro, third.accumulation, third.effective, third.lr) == (512, 2, 3072, 6e-4)
    assert third.note.endswith("lr stays")


def test_the_guides_linear_rule_is_there_too():
    linear = dataclasses.replace(CAPTCHA, rule="linear")
    assert changed(linear, 896, processes=3).lr == pytest.approx(6e-4 * 896 / 1024)


@pytest.mark.parametrize("share", [1, 2, 7, 64, 97, 120, 1000])
@pytest.mark.parametrize("fits", [1, 2, 3, 8, 50, 99, 5000])
def test_micro_times_accumulation_times_processes_is_the_effective_batch(share, fits):
    for processes in (1, 3):
        micro, accumulation = split(share * processes, fits, processes)
        assert accumulation == -(-share // fits)  # the fewest
        passes = [share * (i + 1) // accumulation - share * i // accumulation for i in range(accumulation)]
        assert sum(passes) == share
        assert max(passes) == micro <= fits
        assert min(passes) >= micro - 1
        if share % accumulation == 0:
            assert micro * accumulation * processes == share * processes


def test_a_step_cuts_its_batch_into_the_passes_of_the_ladder(tmp_path):
    task, passes = Linear(), []
    pack = task.pack(tmp_path, np.full(FEATURES, 0.2), 1.0, count=100)
    micro, accumulation = split(98, 40)
    state = TrainState(task, pack, task.PLAN.replace(batch_size=98, micro_batch_size=micro), "cpu")
    state.model.register_forward_pre_hook(lambda _, args: passes.append(len(args[0])))
    step(task, state, next(iter(open_feed(pack, state.plan, state.device)([pack.ids("train")[:98]]))), 100)
    assert len(passes) == accumulation == 3
    assert sorted(passes) == [32, 33, 33]
    assert micro == 33


def test_a_batch_that_processes_cannot_share_is_refused_by_name():
    with pytest.raises(PlanError, match=r"Plan.batch_size 100 must be a multiple of 3 processes; take 99"):
        split(100, 10, 3)
    with pytest.raises(PlanError, match="≥ 1"):
        split(8, 0)


def test_a_rung_makes_the_plan_that_steps_so():
    plan = Plan(batch_size=64, lr=1e-3, min_lr=9e-4)
    same = kept(64, plan.lr, fits=20).plan(plan)
    assert (same.batch_size, same.micro_batch_size, same.lr) == (64, 16, 1e-3)
    smaller = changed(Reference(64, 1e-3), 16).plan(plan)
    assert (smaller.batch_size, smaller.micro_batch_size, smaller.lr, smaller.min_lr) == (16, None, 5e-4, 5e-4)


def test_a_ladder_is_plain_values_and_a_table():
    found = ladder(CAPTCHA, (1024, 896), processes=3, fits=512)
    assert Ladder.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert [row[:5] for row in found.rows()] == [
        (1024, 1, 3, 3072, "0.0006"),
        (896, 1, 3, 2688, "0.000561"),
        (512, 2, 3, 3072, "0.0006"),
    ]
    assert "896" in str(found)
    assert "<table" in found._repr_html_()


@pytest.mark.parametrize(
    ("value", "digits", "expected"),
    [(0.00283, 1.5, 0.003), (0.00245, 1.5, 0.0025), (0.00212, 1.5, 0.002), (0.000561249, 3, 0.000561), (7e-5, 1, 7e-5)],
)
def test_lr_is_said_in_so_many_digits(value, digits, expected):
    assert rounded(value, digits) == expected
