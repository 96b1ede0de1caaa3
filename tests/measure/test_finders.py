"""The learning rate and the epochs that nobody chose learn as well as the best of a grid; and the batch finder."""

import dataclasses
import gc
import math
from itertools import count
from time import process_time
from typing import Any

import numpy as np
import problems
import pytest
import torch
import toy
from hypothesis import given, settings
from hypothesis import strategies as st
from problems import PROBLEMS
from simulated import Job
from torch import nn
from torch.optim import SGD

import nbtools as nb
from nbtools.errors import TrainError
from nbtools.measure import Machine, Stepper, decide, find_batch, finders
from nbtools.measure.turns import Deadline

GOOD = 0.97  # of the accuracy of the best lr of the grid
SEEDS = (10, 11, 12)  # fixed before any of them was tried


def advised(task: Any, pack: nb.Pack) -> nb.Advice:
    """By CPU time, as other programs on the machine would leave values out, on a clock that is five times too fast."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nbtools.measure.timing.perf_counter", lambda: 5 * process_time())
        return nb.advise(task, pack, seconds=2.0)


FULL = (pytest.mark.full, pytest.mark.timeout(1800))
LEARNED = [pytest.param(name, SEEDS, marks=FULL) for name in PROBLEMS]


@pytest.mark.parametrize(("name", "seeds"), [pytest.param("bags", SEEDS[:1], marks=pytest.mark.alone), *LEARNED])
def test_the_advised_plan_and_fit_without_a_plan_learn_as_well_as_the_best_of_the_grid(name, seeds, tmp_path):
    """The mean over the seeds, at the advised batch and epochs. `nb.fit` measures, and trains by what it advises."""
    grids, ours = [], []
    for seed in seeds:
        pack = problems.packed(name, tmp_path / f"{seed}", seed=5)
        task = nb.classify(PROBLEMS[name][1], plan=nb.Plan(seed=seed))
        run = nb.fit(task, pack, run=tmp_path / f"{seed}-run", receipt=False, progress=False)
        plan = nb.advise(task, pack, measure=False).plan
        assert (run.plan.to_dict(), run.lr_trial is not None) == (plan.to_dict(), True)
        grids.append(list(problems.spread(name, pack, plan).values()))
        ours.append(run.history.of("epoch")[-1]["val_accuracy"])
    mean = np.mean(grids, axis=0)
    print("ours", ours, "grid", dict(zip(problems.WIDE, mean.round(3).tolist(), strict=True)))
    assert mean.max() - mean.min() >= 0.15
    assert np.mean(ours) >= GOOD * mean.max()


@pytest.fixture
def spirals(tmp_path) -> nb.Pack:
    return problems.packed("spirals", tmp_path)


def test_the_sweep_tries_what_it_is_given_or_values_around_the_plans_and_says_which_is_best(spirals):
    """As a list or an array; but nothing where an optimizer has an lr of its own, which all values would be."""
    sgd = nb.classify(problems.points, optimizer=lambda groups, plan: SGD([{**group, "lr": 0.1} for group in groups]))
    task = nb.classify(problems.points, plan=nb.Plan(batch_size=32, lr=1e-3, epochs=2))
    given = nb.lr_sweep(task, spirals, nb.Panel(task.PLAN), lrs=np.array([1e-6, 3e-3, 1e3, 3e-3]), seconds=30.0)
    assert [each.lr for each in given.candidates] == [1e-6, 3e-3, 1e3]
    assert given.lr == 3e-3
    around, own = (nb.lr_sweep(each, spirals, task.PLAN, seconds=30.0) for each in (task, sgd))
    assert len(around.candidates) >= 5
    assert (own.lr, own.reason) == (None, "no trial of other learning rates: the optimizer has an lr of its own")
    with pytest.raises(nb.NbtoolsError, match="lr_sweep: every lr must be greater than 0"):
        nb.lr_sweep(task, spirals, task.PLAN, lrs=[0.0])


def test_fresh_weights_start_at_0_002_pretrained_ones_at_0_0001_and_a_recipe_at_its_own_lr_at_batch_64(spirals):
    frozen: Any = problems.points(3, 2)
    frozen[0].requires_grad_(False)
    fresh, pretrained = nb.classify(problems.points), nb.classify(problems.points, pretrained=True)
    recipe = nb.classify(problems.points, plan=nb.Plan(batch_size=64, lr=8e-3, epochs=12))
    for task, lr in ((fresh, 2e-3), (pretrained, 1e-4), (nb.classify(frozen), 1e-4), (recipe, 8e-3)):
        plan = nb.advise(task, spirals, measure=False).plan
        assert plan.lr == pytest.approx(lr * math.sqrt(plan.batch_size / 64), rel=0.01)
        assert plan.epochs == 12 or task is not recipe


@pytest.mark.parametrize(("samples", "epochs"), [(600, 40), (9_999, 10), (10_000, 10)])
def test_a_small_data_set_gets_about_1500_steps(samples, epochs, spirals):
    """At the batch of a CPU, 64, capped for the smallest."""
    card = dataclasses.replace(spirals.card, splits={"train": samples, "val": 0, "test": 0})
    plan = decide(nb.classify(problems.points), card, Machine("cpu", "CPU", cores=2)).plan
    per_epoch = -(-samples // plan.batch_size)
    assert plan.epochs == (max(10, -(-1500 // per_epoch)) if samples < 10_000 else 10)


class Bowl(nn.Linear):
    """100 Σ (w - x)², in which gradient descent is lost above an lr of 0.01."""

    def forward(self, batch):
        return 100 * (self.weight - batch["x"]).square().sum(1)


def bowl(lr: float) -> Any:
    plan = toy.PLAN.replace(optimizer="sgd", betas=(0.0, 0.9), clip_norm=None, lr=lr, schedule="constant", noise=0.0)
    own = {"model": lambda *_: Bowl(8, 1, bias=False), "metrics": lambda *_: {}, "BEST": "-loss"}
    return toy.with_(PLAN=plan, loss=lambda net, batch, _: ((each := net(batch)).sum(), len(each)), **own)


def test_a_value_that_diverges_is_left_out_and_a_winner_at_the_edge_adds_the_next(tmp_path):
    """From 1e-5 all five values are too small: two more are tried; from 0.3 all are lost: smaller ones are added."""
    pack = toy.make_pack(tmp_path)
    low, high = (nb.lr_sweep(task, pack, task.PLAN) for task in map(bowl, (1e-5, 0.3)))
    assert [round(each.lr / low.rule, 2) for each in low.candidates] == [0.11, 0.33, 1, 3, 9, 27, 81]
    lost = [each.lr for each in high.candidates if each.loss is None]
    assert len(lost) == 5
    assert min(lost) > 0.01
    assert len(high.candidates) == 7
    assert (high.lr or 1.0) < 0.01


def test_of_values_that_are_alike_the_recipe_wins_or_the_first_and_of_losses_within_noise_the_smallest(tmp_path):
    flat = {"loss": lambda net, batch, _: ((net(batch) * 0).sum() + batch["x"].square().sum(), len(batch["x"]))}
    plain = {name: getattr(toy, name).replace(lr=nb.Plan().lr) for name in ("PLAN", "BASELINE")}
    for k, (own, factor) in enumerate((({}, 1), (plain, 1), ({**plain, "BEST": "-loss"}, 1 / 9))):
        trial: Any = advised(toy.with_(**flat, **own), toy.make_pack(tmp_path / str(k))).lr_trial
        assert trial.lr == pytest.approx(trial.rule * factor, rel=0.01)


def test_values_train_on_the_same_batches_from_the_same_weights_under_the_whole_schedule(tmp_path, monkeypatch):
    """Each lr rises in the warmup, and falls to the schedule's end, though each epoch has a leftover batch."""
    values = dict[Any, tuple[dict[str, Any], list[Any], list[float]]]()
    step = Stepper.step

    def watched(self: Stepper, raw: Any) -> Any:
        if not isinstance(self.clock, Deadline):  # what is timed before
            return step(self, raw)
        weights = {name: value.clone() for name, value in self.state.model.state_dict().items()}
        _, batches, lrs = values.setdefault(self.state, (weights, [], []))
        result = step(self, raw)
        batches.append(raw["id"].clone())
        lrs.append(self.state.lr / self.plan.lr)
        return result

    monkeypatch.setattr(Stepper, "step", watched)
    nb.lr_sweep(toy, toy.make_pack(tmp_path), toy.PLAN.replace(warmup_epochs=0.3))
    assert len(values) >= 5
    first, *_ = values.values()
    for weights, batches, lrs in values.values():
        assert all(torch.equal(first[0][name], value) for name, value in weights.items())
        assert all(map(torch.equal, first[1], batches))
        peak = int(np.argmax(lrs))
        assert peak == pytest.approx(0.1 * len(lrs), abs=1.5)
        assert lrs == [*sorted(lrs[:peak]), *sorted(lrs[peak:], reverse=True)]
        assert lrs[-1] < 0.001


class Slowed(Job):
    """A hundred times as slow as its steps were when they were timed."""

    def loss(self, model, batch, plan):
        self.fixed = 0.01 if plan.lr < 1e-9 else 1.0
        return super().loss(model, batch, plan)


JOBS = {  # what is said → the job
    "": Job(fixed=0.01),
    "5 values of 100 steps need": Job(fixed=0.5),
    "as steps took longer than before": Slowed(),
}


@pytest.mark.parametrize("said", JOBS)
def test_a_trial_takes_its_share_of_the_time_and_chooses_nothing_where_it_would_not_suffice(tmp_path, said):
    """15 s for a run of seconds, also where the machine becomes slow amid it."""
    with JOBS[said].times():
        trial: Any = nb.advise(JOBS[said], toy.make_pack(tmp_path, count=600), seconds=1.0).lr_trial
    assert trial.seconds <= 16
    assert said in trial.reason
    assert (trial.lr is None) == bool(said)
    assert trial.steps >= 100 or said


def test_the_trial_is_part_of_the_advice_shown_as_a_table_and_changes_nothing_outside(spirals):
    net = problems.points(3, 2)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    torch.manual_seed(3)
    random = torch.get_rng_state()
    advice = advised(nb.classify(net), spirals)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    trial: Any = advice.lr_trial
    assert advice.plan.lr == trial.lr
    assert trial.metric == "accuracy"
    assert all(f"{each.score:.3g}" in advice.reasons["lr"] for each in trial.candidates[-2:] if each.score)
    assert "chosen" in str(trial)


def found(pack, job: Job, seconds: float = 60.0, **more):
    """A search on the job's own clock; a step takes about as long as a turn, so that few are made."""
    with job.times():
        return find_batch(job, pack, toy.PLAN, seconds, **more)


@settings(max_examples=4, deadline=None, derandomize=True)
@given(
    knee=st.floats(1.0, 100.0),
    slower=st.sampled_from([None, 16, 32]),
    best=st.sampled_from([6, 12, 24, 48, 96]),
    gain=st.floats(0.9, 1.0),
)
def test_the_choice_is_within_5_percent_of_the_best_by_exhaustive_search(pack, knee, slower, best, gain):
    """Of all sizes that it tried, whatever the knee, however a cache makes larger ones slower; and the smallest."""

    def cost(n: int) -> float:
        return 0.02 * (knee + n) * (gain if n == best else 1.0) * (1.5 if slower and n > slower else 1.0)

    report = found(pack, Job(cost=cost), seconds=600.0)
    rates = {row.batch_size: row.batch_size / cost(row.batch_size) for row in report.rows}
    most = max(rates.values())
    close = [size for size, rate in rates.items() if rate >= 0.95 * most]
    assert report.batch_size == min(close)
    powers = {size: size / cost(size) for size in (2, 4, 8, 16, 32, 64, 128)}
    assert rates[report.batch_size] >= 0.95 * max(powers.values())


def test_a_search_ends_in_time_and_says_what_ended_it(pack, monkeypatch):
    job = Job(fixed=0.1, a_sample=0.01)
    short = found(pack, job, seconds=1.0)
    assert job.now < 3.0
    assert "time ran out" in str(short)
    monkeypatch.setattr(Deadline, "left", lambda self: 4.0 - job.now)
    cut = found(pack, job := Job(fixed=0.1, a_sample=0.01), clock=Deadline(4.0, clock=lambda: job.now))
    assert cut.ended == "time ran out"
    assert 1 <= len(cut.rows) < len(found(pack, Job(fixed=0.1, a_sample=0.01)).rows)
    assert "throughput no longer rises" in str(found(pack, Job(fixed=0.001, a_sample=0.1)))
    capped = found(pack, Job(fixed=100.0), seconds=1e6, most=6)
    assert max(row.batch_size for row in capped.rows) == 6
    assert "no larger one was timed: 6 samples were the largest size to try" in str(capped)


@pytest.mark.parametrize(("most", "largest"), [(1, 1), (5, 4), (63, 32)])
def test_what_does_not_fit_is_never_chosen(pack, most, largest):
    job: Any = Job(fixed=0.1, most=most)
    job.model = toy.linear  # BatchNorm takes no single sample
    report = found(pack, job)
    assert report.batch_size == largest
    assert all((not row.reason) == (row.batch_size <= most) for row in report.rows)
    assert "does not fit" in str(report)


@pytest.mark.parametrize(("free", "largest"), [(1130, 16), (1150, 32)])
def test_the_second_step_of_a_size_counts_a_tenth_stays_free_and_nothing_is_left(pack, free, largest, monkeypatch):
    """n samples need n² bytes, and the first step of a size 500 more."""
    calls = count()  # the first is of no sample
    monkeypatch.setattr(finders.Finder, "peak", lambda self, ids: 100 + len(ids) ** 2 + 500 * (next(calls) % 2))
    monkeypatch.setattr(finders, "room", lambda device: free)
    monkeypatch.setitem(finders.HEADROOM, "cpu", finders.HEADROOM["cuda"])
    *fitting, last = found(pack, Job(fixed=0.1)).rows
    assert {row.batch_size: row.memory for row in fitting} == {n: n * n for n in (8, 16, 32) if n <= largest}
    assert "of 1.1 kB free memory, 10 % is kept free" in last.reason
    assert not any(isinstance(each, Stepper) for each in gc.get_objects())


def test_where_not_even_one_sample_fits_it_is_a_clear_error(pack):
    with pytest.raises(TrainError, match=r"not even one sample fits.*smaller network") as caught:
        found(pack, Job(most=0))
    assert caught.value.__context__ is None, "it would keep the tensors of the failed step"
