"""The learning-rate range test: it ends where a closed form says, steps as training does, and leaves no trace."""

import json
import math
import weakref
from typing import Any

import IPython.display
import numpy as np
import pytest
import torch
import toy
from torch import nn

from nbtools.errors import TrainError
from nbtools.measure import find_workers, lr_sweep, receipt
from nbtools.measure.sweep import Climb, Sweep, judge, smooth
from nbtools.train import TrainState

CPU = torch.device("cpu")
SGD = toy.PLAN.replace(optimizer="sgd", betas=(0.0, 0.9), clip_norm=None)


@pytest.fixture(scope="module")
def found(pack) -> Sweep:
    return lr_sweep(toy, pack, toy.PLAN, high=100.0)


class Bowl(nn.Module):
    """½ λ Σ (w - x)² over samples and dimensions: its mean has λ in each direction, so SGD is lost where lr > 2 / λ."""

    def __init__(self, curvature: float):
        super().__init__()
        self.curvature = curvature
        self.w = nn.Parameter(torch.full((8,), 3.0))

    def forward(self, batch):
        return 0.5 * self.curvature * (self.w - batch["x"]).square().sum(1)


def bowl(curvature: float) -> Any:
    def loss(model, batch, plan):
        each = model(batch)
        return each.sum(), len(each)

    return toy.with_(model=lambda card, plan: Bowl(curvature), loss=loss)


@pytest.mark.parametrize("curvature", [0.5, 20.0])
def test_a_bowl_is_lost_just_above_two_over_its_curvature_and_the_suggestion_lies_below(pack, curvature):
    found = lr_sweep(bowl(curvature), pack, SGD, low=1e-4 / curvature, high=1e2 / curvature)
    edge = 2 / curvature
    assert found.lost is not None
    assert edge < found.lost < 2 * edge
    assert found.suggestion is not None
    assert edge / 100 < found.suggestion < edge / 2
    assert all(math.isfinite(loss) for loss in found.losses)


def test_the_suggestion_trains_better_than_a_hundredth_and_a_hundredfold_of_it(pack, found):
    def trained(lr: float) -> float:
        climb = Climb(toy, pack, toy.PLAN.replace(epochs=5), CPU)
        return float(np.mean([climb.at(lr) for _ in range(40)][-10:]))

    assert found.suggestion is not None
    best = trained(found.suggestion)
    assert best < trained(found.suggestion / 100)
    assert best < trained(found.suggestion * 100)


def test_losses_are_those_of_training_with_the_same_lr(pack):
    """The slow way: SGD by hand on the same batches in the same order."""
    plan = SGD.replace(noise=0.0)
    found = lr_sweep(bowl(1.0), pack, plan, low=1e-3, high=1e-1, steps=30)
    climb = Climb(bowl(1.0), pack, plan, CPU)
    w, losses = torch.full((8,), 3.0), []
    for lr in [*[1e-3] * 4, *found.lrs, 0.0]:
        x = toy.batch(next(climb.batches), plan, None)["x"]
        losses.append(float(0.5 * (w - x).square().sum(1).mean()))
        w = w - lr * (w - x).mean(0)
    assert found.start == pytest.approx(losses[0])
    assert found.losses == pytest.approx(losses[5:], rel=1e-5)


@pytest.mark.usefixtures("fp16_on_cpu")
def test_steps_that_fp16_leaves_out_leave_the_lrs_and_the_number_of_losses_as_they_are(pack, monkeypatch):
    plan = toy.PLAN.replace(amp="fp16")
    smooth_way = lr_sweep(toy, pack, plan, steps=30)
    scaler = torch.amp.GradScaler  # one whose first gradients overflow, until it finds its scale
    monkeypatch.setattr(torch.amp, "GradScaler", lambda device: scaler(device, init_scale=2.0**24))
    found = lr_sweep(toy, pack, plan, steps=30)
    assert found.skipped > 0 == smooth_way.skipped
    assert found.lrs == smooth_way.lrs
    assert len(found.losses) == len(found.lrs)
    assert f"{found.skipped} that fp16 skipped" in str(found)


@pytest.mark.usefixtures("fp16_on_cpu")
def test_a_scale_that_is_never_found_ends_the_sweep(pack):
    def loss(model, batch, plan):
        total, count = toy.loss(model, batch, plan)
        total.register_hook(lambda gradient: gradient * math.inf)
        return total, count

    found = lr_sweep(toy.with_(loss=loss), pack, toy.PLAN.replace(amp="fp16"))
    assert (found.start, found.lost, found.losses, found.suggestion) == (None, None, (), None)
    assert "not a number before any update; check data and loss, or set amp=off" in str(found)
    json.dumps(found.to_dict(), allow_nan=False)


MEASURED = {
    "sweep": lambda task, pack: lr_sweep(task, pack, toy.PLAN.replace(deterministic=True), steps=25),
    "workers": lambda task, pack: find_workers(task, pack, toy.BASELINE.replace(deterministic=True), seconds=0.05),
    "receipt": lambda task, pack: receipt(task, pack, toy.PLAN.replace(deterministic=True), seconds=0.02),
}


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning", "ignore:This DataLoader will create:UserWarning")
@pytest.mark.parametrize("name", MEASURED)
def test_measuring_leaves_no_model_in_memory_and_all_else_as_it_was(pack, name, monkeypatch):
    monkeypatch.setattr("nbtools.measure.workers.cores", lambda: 1)
    made, state = [], TrainState(toy, pack, toy.PLAN)
    kept = {name: value.clone() for name, value in state.tensors().items()}

    def model(card, plan):
        found = toy.model(card, plan)
        made.append(weakref.ref(found))
        return found

    torch.manual_seed(7)
    before = torch.get_rng_state(), repr(np.random.get_state(legacy=False))
    assert MEASURED[name](toy.with_(model=model), pack)
    assert [ref() for ref in made] == [None] * len(made) != []
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert repr(np.random.get_state(legacy=False)) == before[1]
    assert all(torch.equal(value, kept[name]) for name, value in state.tensors().items())


def test_the_same_seed_gives_the_same_curve_and_slow_steps_are_fewer_steps(pack, found):
    again = lr_sweep(toy, pack, toy.PLAN, high=100.0)
    assert (again.lrs, again.losses, again.suggestion) == (found.lrs, found.losses, found.suggestion)
    assert len(lr_sweep(toy, pack, toy.PLAN, seconds=1e-3).lrs) == 25


LRS = np.geomspace(1e-6, 1.0, 100).tolist()
ENDS = (1e-6, 1.0)


def judged(losses: list[float], lost: float | None = None) -> tuple[float | None, str]:
    return judge(LRS[: len(losses)], losses, smooth(losses), lost, ENDS)


@pytest.mark.parametrize(
    ("losses", "lost", "said"),
    [
        ([2.0 + 0.1 * (-1) ** k for k in range(100)], None, "nothing was learned up to lr 1; take more steps"),
        ([2.0 + 0.01 * k for k in range(60)], 0.01, "nothing was learned before it diverged at lr 0.01"),
        ([2.0, 4.0], 2e-6, "diverged within the first steps, at lr 2e-6; sweep lower (low=1e-08)"),
        ([3.0 - 0.2 * min(k, 20 - k) for k in range(20)], 2e-5, "a tenth of that was not measured; sweep lower"),
    ],
)
def test_no_lr_is_suggested_where_none_is_sensible_and_the_reason_is_said(losses, lost, said):
    suggestion, reason = judged(losses, lost)
    assert suggestion is None
    assert said in reason


def test_where_the_loss_still_falls_at_the_end_of_the_range_that_is_said():
    suggestion, reason = judged([3.0 - 0.02 * k for k in range(100)])
    assert suggestion is not None
    assert "the end of the range; a sweep to high=10 tells more" in reason


def test_in_a_flat_valley_its_beginning_counts_and_not_where_noise_is_least():
    falling = [2.0] * 40 + [2.0 - 0.1 * k for k in range(15)]
    found = []
    for least in (60, 85):
        valley = [0.5 - 0.01 * (k == least) for k in range(55, 95)]
        found.append(judged([*falling, *valley], LRS[95])[0])
    assert found[0] == found[1]
    assert 1 <= found[0] / (LRS[55] / 10) < 2.5  # smoothing rounds the corner


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (1.0, 0.1), (-1.0, 1.0), (1e-3, math.inf)])
def test_a_range_that_is_none_and_too_few_steps_are_refused(pack, low, high):
    with pytest.raises(TrainError, match="lr_sweep needs 0 < low < high"):
        lr_sweep(toy, pack, toy.PLAN, low=low, high=high)
    with pytest.raises(TrainError, match="steps must be at least 25"):
        lr_sweep(toy, pack, toy.PLAN, steps=10)


def test_a_sweep_is_plain_json_and_shows_picture_and_table_in_a_notebook(found, monkeypatch):
    assert Sweep.from_dict(json.loads(json.dumps(found.to_dict(), allow_nan=False))) == found
    text = str(found)
    assert text.startswith(f"lr {found.suggestion:.2g}: ")
    assert "the smoothed loss, " in text
    assert f"torch {torch.__version__}" in text
    with pytest.raises(NotImplementedError):
        found._ipython_display_()
    outputs: list[Any] = []
    monkeypatch.setattr("nbtools.measure.sweep.in_notebook", lambda: True)
    monkeypatch.setattr(IPython.display, "display", outputs.append)
    found._ipython_display_()
    assert [type(output).__name__ for output in outputs] == ["Sheet", "HTML"]
    assert outputs[0].alt == found.caption()
    assert "<table" in outputs[1].data


def test_the_curve_is_drawn_over_decades_with_the_suggestion_marked(pack, found):
    axes = found.figure().axes[0]
    assert axes.get_xscale() == "log"
    raw, smoothed, mark = axes.lines
    assert tuple(raw.get_ydata()) == found.losses
    assert tuple(smoothed.get_ydata()) == found.smoothed
    assert list(mark.get_xdata()) == [found.suggestion] * 2
    lost = lr_sweep(toy, pack, SGD, low=1e10, high=1e30)
    assert "no suggestion" in str(lost)
    assert lost._repr_png_().startswith(b"\x89PNG")
