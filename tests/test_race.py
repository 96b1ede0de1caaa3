"""Time to accuracy: who arrives, when, and what is said of those who do not."""

import json
import math
import time
import types
from typing import Any

import pytest
import torch
import toy

from nbtools.errors import TrainError
from nbtools.measure.race import Finish, Race, time_to
from nbtools.train import TrainState, train

PLAN = toy.PLAN.replace(epochs=20)
SLOW = toy.BASELINE.replace(epochs=20, lr=3e-3)


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return toy.make_pack(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def race(pack) -> Race:
    return time_to(toy, pack, PLAN, target=0.65, baseline=SLOW, seeds=(0, 1))


def test_each_stops_after_the_first_epoch_that_reaches_the_target(race, pack):
    """Compared with training the same plan from the same seed by hand."""
    for finish in (*race.before, *race.after):
        assert finish.reached
        *missed, last = [value for _, value in finish.curve]
        assert last >= 0.65
        assert all(value < 0.65 for value in missed)
    state = TrainState(toy, pack, PLAN.replace(seed=1, eval_every=1))
    rows = [record.values["val_accuracy"] for record in train(toy, state, pack) if record.kind == "epoch"]
    curve = [value for _, value in race.after[1].curve]
    assert curve == rows[: len(curve)]


def test_seconds_are_those_of_training_and_evaluations_stand_apart(pack):
    def metrics(outputs, batch):
        time.sleep(0.05)
        return toy.metrics(outputs, batch)

    task: Any = types.SimpleNamespace(**{**vars(toy), "metrics": metrics})
    start = time.perf_counter()
    found = time_to(task, pack, PLAN.replace(epochs=2), target=2.0, baseline=PLAN.replace(epochs=1))
    whole = time.perf_counter() - start
    batches = 3  # of the validation split
    assert found.before[0].eval_seconds > batches * 0.05
    assert found.after[0].eval_seconds > 2 * batches * 0.05
    assert sum(each.seconds + each.eval_seconds for each in (*found.before, *found.after)) < whole


def test_the_headline_is_the_ratio_of_seconds_over_seeds(race):
    ratios = [b.seconds / a.seconds for b, a in zip(race.before, race.after, strict=True)]
    assert race.ratios == pytest.approx(ratios)
    assert race.caption().startswith("accuracy ≥ 0.65: ")
    assert f"({min(ratios):.2f}–{max(ratios):.2f}, n = 2)" in race.caption()
    assert len(race.rows()) == 4
    assert f"torch {torch.__version__}" in str(race)


def test_one_that_does_not_arrive_is_named_and_gives_no_factor(pack):
    found = time_to(toy, pack, PLAN, target=0.7, baseline=SLOW.replace(lr=1e-9, epochs=2))
    assert not found.before[0].reached
    assert found.before[0].ended == "out of epochs"
    assert len(found.before[0].curve) == 2
    assert found.ratios == []
    assert found.caption() == "accuracy ≥ 0.7: the baseline did not reach it with 1 of 1 seed"
    assert "out of epochs" in str(found)


def finish(ended: str, seconds: float) -> Finish:
    return Finish(PLAN.to_dict(), 0, ended, seconds, 1.0, 10, ((seconds, 0.5),))


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("reached", "reached", "4.00× as fast as the baseline (4.00–4.00, n = 1)"),
        (
            "out of time",
            "reached",
            "more than 4.00× as fast as the baseline; the baseline did not reach it with 1 of 1",
        ),
        ("out of epochs", "reached", "the baseline did not reach it with 1 of 1 seed"),
        ("reached", "out of time", "this run did not reach it with 1 of 1 seed"),
        (
            "lost the loss",
            "lost the loss",
            "the baseline did not reach it with 1 of 1 seed; this run did not reach it",
        ),
    ],
)
def test_a_factor_is_claimed_only_where_seconds_prove_it(before, after, said):
    race = Race("accuracy", 0.7, False, (finish(before, 40.0),), (finish(after, 10.0),), (), {})
    assert race.caption().startswith(f"accuracy ≥ 0.7: {said}")


def test_a_budget_ends_an_endless_race_within_an_epoch(pack):
    found = time_to(toy, pack, PLAN.replace(epochs=10**6), target=2.0, baseline=SLOW.replace(epochs=10**6), seconds=0.3)
    for finish in (*found.before, *found.after):
        assert finish.ended == "out of time"
        assert 0.3 <= finish.seconds < 5


def test_a_lost_loss_is_an_end_too(pack):
    lost = PLAN.replace(optimizer="sgd", lr=1e30, clip_norm=None)
    found = time_to(toy, pack, lost, target=0.7, baseline=SLOW.replace(epochs=1), seconds=30)
    assert found.after[0].ended == "lost the loss"
    assert "this run did not reach it with 1 of 1 seed" in found.caption()


def test_a_metric_that_shall_fall_is_reached_from_above(pack):
    found = time_to(toy, pack, PLAN, target=0.9, metric="-loss", baseline=SLOW.replace(lr=1e-2))
    assert found.lower
    assert found.after[0].reached
    assert found.after[0].curve[-1][1] <= 0.9 < found.after[0].curve[0][1]
    assert found.caption().startswith("loss ≤ 0.9: ")


def test_both_train_the_same_network_from_the_same_seeds(pack):
    found = time_to(toy, pack, toy.PLAN.replace(hidden=24, epochs=1), target=0.1, seeds=(3,))
    assert found.before[0].plan["hidden"] == found.after[0].plan["hidden"] == 24
    assert found.before[0].plan["feed"] == "workers"
    assert found.before[0].seed == found.after[0].seed == 3
    assert "Both train the same network" in str(found)


def test_what_cannot_be_raced_for_is_refused(pack):
    with pytest.raises(TrainError, match="no metric 'beauty' to reach; it has loss, accuracy"):
        time_to(toy, pack, PLAN, target=0.5, metric="beauty")
    with pytest.raises(TrainError, match="at least one seed"):
        time_to(toy, pack, PLAN, target=0.5, seeds=())


def test_a_race_is_json_and_back_and_leaves_the_random_state(race, pack):
    again = Race.from_dict(json.loads(json.dumps(race.to_dict(), allow_nan=False)))
    assert str(again) == str(race)
    assert isinstance(again.before[0], Finish)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    time_to(toy, pack, toy.PLAN.replace(epochs=1), target=0.0)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(math.isfinite(seconds) for seconds, _ in race.after[0].curve)
