"""The learning rate: closed forms, torch's own, and a warmup that ends (it moves every step, whatever its length)."""

import math
import warnings

import pytest
import torch

from nbtools.train import Plan
from nbtools.train.plan import lr_at

STEPS = 50  # an epoch


def plan(**knobs) -> Plan:
    return Plan(**{"epochs": 10, "lr": 1e-2, **knobs})


def test_warmup_rises_linearly_step_by_step_and_ends():
    """One guide steps a scheduler of 1,000 warmup steps once an epoch, so that its warmup never ends."""
    made = plan(warmup_epochs=2, schedule="constant")
    rising = [lr_at(made, step / STEPS) for step in range(1, 2 * STEPS + 1)]
    assert rising == pytest.approx([1e-2 * k / (2 * STEPS) for k in range(1, 2 * STEPS + 1)])
    assert rising[0] > 0
    assert rising[-1] == 1e-2
    assert [lr_at(made, 2 + k / STEPS) for k in range(8 * STEPS)] == [1e-2] * 8 * STEPS


def test_a_warmup_of_part_of_an_epoch_is_possible():
    made = plan(warmup_epochs=0.5)
    assert lr_at(made, 0.25) == pytest.approx(5e-3)
    assert lr_at(made, 0.5) == 1e-2


def test_without_warmup_the_first_step_has_nearly_the_whole_lr():
    assert lr_at(plan(), 1 / (10 * STEPS)) == pytest.approx(1e-2, rel=1e-3)


@pytest.mark.parametrize("schedule", ["constant", "cosine", "poly", "plateau"])
@pytest.mark.parametrize("warmup", [0.3, 1, 5, 10])
def test_the_schedule_is_continuous_where_the_warmup_ends(schedule, warmup):
    made = plan(schedule=schedule, warmup_epochs=warmup, min_lr=1e-5)
    assert lr_at(made, warmup - 1e-9) == pytest.approx(1e-2)
    assert lr_at(made, warmup) == pytest.approx(1e-2)
    if warmup < 10:
        assert lr_at(made, warmup + 1e-6) == pytest.approx(1e-2, rel=1e-5)


@pytest.mark.parametrize("min_lr", [0.0, 1e-4])
def test_cosine_is_torchs_cosine(min_lr):
    parameter = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=1e-2)
    total = 10 * STEPS
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total, eta_min=min_lr)
    made = plan(min_lr=min_lr)
    for step in range(total + 1):
        assert lr_at(made, step / STEPS) == pytest.approx(scheduler.get_last_lr()[0], rel=1e-9, abs=1e-15)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer.step()
            scheduler.step()


@pytest.mark.parametrize(("t", "fall"), [(0, 1), (0.25, 0.5 + math.sqrt(0.5) / 2), (0.5, 0.5), (1, 0), (1.5, 0)])
def test_cosine_after_warmup_at_known_points(t, fall):
    made = plan(warmup_epochs=2, min_lr=1e-3)
    assert lr_at(made, 2 + 8 * t) == pytest.approx(1e-3 + 9e-3 * fall)


@pytest.mark.parametrize("t", [0.1, 0.5, 0.9, 1.0])
def test_poly_has_power_nine_tenths(t):
    assert lr_at(plan(schedule="poly"), 10 * t) == pytest.approx(1e-2 * (1 - t) ** 0.9)


@pytest.mark.parametrize(("drops", "lr"), [(0, 1e-2), (1, 1e-3), (2, 2e-4), (9, 2e-4)])
def test_plateau_drops_by_ten_and_not_below_its_least(drops, lr):
    made = plan(schedule="plateau", min_lr=2e-4)
    assert lr_at(made, 5, drops) == pytest.approx(lr)
    assert lr_at(made, 9.9, drops) == lr_at(made, 1, drops)


@pytest.mark.parametrize("schedule", ["cosine", "poly"])
def test_lr_never_rises_after_the_warmup(schedule):
    made = plan(schedule=schedule, warmup_epochs=1, min_lr=1e-5)
    values = [lr_at(made, 1 + step / STEPS) for step in range(9 * STEPS + 1)]
    assert values == sorted(values, reverse=True)
    assert values[-1] == pytest.approx(1e-5)


def test_lr_depends_on_progress_alone_and_not_on_what_was_asked_before():
    made = plan(warmup_epochs=1, schedule="cosine")
    forward = [lr_at(made, k / STEPS) for k in range(10 * STEPS)]
    backward = [lr_at(made, k / STEPS) for k in reversed(range(10 * STEPS))]
    assert forward == backward[::-1]
    assert lr_at(made.with_batch_size(128), 3.0) == lr_at(made, 3.0)


def test_a_warmup_as_long_as_the_run_reaches_lr_at_its_end():
    assert lr_at(plan(warmup_epochs=10), 10) == 1e-2
