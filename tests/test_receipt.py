"""The receipt: the same network trained two ways in turns on this machine, and what each group of settings brings; on a
job whose parts take known times."""

import dataclasses
import json
import math
import re
import shutil
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import toy
from simulated import Job

import nbtools as nb
from nbtools.data import Resident
from nbtools.measure import Receipt, Stepper, comparable, receipt
from nbtools.measure.receipt import GROUPS, Rung, ladder, rungs_of
from nbtools.measure.stepper import Turn, epoch_batches
from nbtools.table import duration

CPU = torch.device("cpu")
FASTER = toy.PLAN.replace(batch_size=64, lr=2e-2, amp="bf16", channels_last=True, clip_norm=None, hidden=24)


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return toy.make_pack(tmp_path_factory.mktemp("toy"), count=184)  # 128 to train on: whole batches of 16 and 64


def slow() -> Job:
    """Whose source files take 50 ms a sample, a pass 50 ms and 1 ms a sample, half in bf16."""
    return Job(reading=0.05, fixed=0.05, a_sample=0.001, amp={"bf16": 0.5})


def measured(job: Job, pack, plan: Any = toy.PLAN, seconds: float = 1.0) -> Receipt:
    return receipt(job, job.pack(pack), plan, CPU, seconds, job.clock)


@pytest.fixture(scope="module")
def found(pack) -> Receipt:
    return measured(slow(), pack, FASTER)


def test_the_rungs_are_the_groups_of_settings_in_which_the_plans_differ_and_each_brings_what_it_does(found, pack):
    small, large = 0.05 + 16 * 0.001, 0.05 + 64 * 0.001
    expected = {
        "baseline": 1.0,
        "+ packed feed": (16 * 0.05 + small) / small,
        "+ batch and lr": 4 * small / large,
        "+ mixed precision": 2.0,
        "+ compile, layout, threads": 1.0,
    }
    counts = pack.splits["train"] % 64 == 0
    assert {rung.name: rung.factor for rung in found.rungs} == pytest.approx(expected, rel=0.01 if counts else 0.2)
    assert math.prod(expected.values()) == pytest.approx(found.ratio, rel=0.01 if counts else 0.2)
    assert math.prod(rung.factor for rung in found.rungs) == pytest.approx(found.ratio)
    assert found.rungs[-1].total == found.ratio
    assert found.before.data_wait == pytest.approx(0.8 / (0.8 + small))
    assert found.after.data_wait == 0
    plans = [rung.rate.plan for rung in found.rungs]
    assert [plan["feed"] for plan in plans] == ["workers", "auto", "auto", "auto", "auto"]
    assert [plan["batch_size"] for plan in plans] == [16, 16, 64, 64, 64]
    assert [plan["amp"] for plan in plans] == ["off", "off", "off", "bf16", "bf16"]
    assert [plan["hidden"] for plan in plans] == [24] * 5, "a smaller network is no speed-up"
    assert [list(rung.changes) for rung in found.rungs] == [[], ["feed"], ["batch_size"], ["amp"], ["channels_last"]]
    assert found.rungs[-1].rate == found.after
    assert found.after.plan == FASTER.to_dict()


def test_the_receipt_says_how_long_all_epochs_take_either_way(found, pack):
    assert found.samples == FASTER.epochs * pack.splits["train"]
    took, before = (duration(found.samples / rate.samples_per_s) for rate in (found.after, found.before))
    assert found.caption().endswith(f"; all epochs' steps take {took}, with the baseline's settings {before}")
    old = Receipt.from_dict({k: v for k, v in found.to_dict().items() if k != "samples"})
    assert "epochs" not in old.caption()


def test_factors_are_taken_within_rounds_and_multiply_to_the_total(pack):
    """Three rounds on a machine that slows down."""
    rounds = {"a": [100.0, 50.0, 25.0], "b": [200.0, 100.0, 50.0], "c": [300.0, 150.0, 100.0]}
    steppers: dict[str, Any] = {}
    for name, speeds in rounds.items():
        steppers[name] = Stepper(toy, pack, toy.PLAN, CPU)
        steppers[name].turns = [Turn(int(speed), 1.0, 0.0, 1, 1.0) for speed in speeds]
    steps = rungs_of(steppers)
    assert [(step.factor, step.total) for step in steps] == [(1.0, 1.0), (2.0, 2.0), (1.5, 3.0)]
    assert [(step.total_least, step.total_most) for step in steps[1:]] == [(2.0, 2.0), (3.0, 4.0)]
    assert (steps[2].factor_least, steps[2].factor_most) == (1.5, 2.0)


def test_what_a_feed_prepared_during_other_turns_is_drawn_and_not_trained_on(pack):
    job, plan = Job(), toy.PLAN.replace(feed="streamed", prefetch=3)
    stepper = Stepper(job, pack, plan, CPU, clock=job.clock)
    stepper.turn(0.0)
    assert len(job.passes) == 2, "one untimed, one timed"
    assert [turn.steps for turn in stepper.turns] == [1]
    assert next(stepper.batches)["id"].tolist() == epoch_batches(pack, plan)[5].tolist()
    stepper.close()


def test_the_table_has_a_row_a_rung_with_speed_spread_and_both_factors(found):
    headers, rows = found.table()
    assert headers[1:4] == ("samples/s", "vs previous row", "vs baseline")
    assert [row[0] for row in rows] == [rung.name for rung in found.rungs]
    assert rows[1][2].startswith(f"{found.rungs[1].factor:.2f}× (")
    assert rows[2][5] == "batch_size 16 → 64"
    assert f"{found.ratio:.2f}× the baseline's samples/s on this machine ({found.ratio_least:.2f}–" in str(found)
    assert "No GPU: what mixed precision, larger batches and data kept on a GPU would gain was not" in str(found)


def test_a_receipt_is_json_and_back_and_one_of_an_older_version_is_read_and_shown(found):
    again = Receipt.from_dict(json.loads(found.to_json()))
    assert again.to_json() == found.to_json()
    assert isinstance(again.rungs[1], Rung)
    old = json.loads(found.to_json())
    del old["rungs"]
    older = Receipt.from_dict({**old, "peak_memory": {"before": 100.0, "after": 250.0}})
    assert older.rungs == ()
    text = str(older)
    assert f"{found.ratio:.2f}× the baseline's samples/s on this machine" in text
    assert "this run" in text
    assert "Peak GPU memory: baseline 105 MB, this run 262 MB" in text
    assert "<table" in older._repr_html_()


def names(plan: Any, pack) -> list[str]:
    baseline, _ = comparable(toy.BASELINE, plan, pack, CPU)
    return [name for name, _ in ladder(baseline, plan, pack, CPU)]


def test_only_rungs_in_which_something_differs_that_costs_time_appear(pack):
    same = toy.BASELINE.replace(feed="workers")
    assert names(same, pack) == ["baseline", "this run"]
    assert names(same.replace(lr=1e-4, warmup_epochs=1.0, epochs=9, seed=3), pack) == ["baseline", "this run"]
    assert names(same.replace(feed="resident"), pack) == ["baseline", "+ packed feed"]
    assert names(same.replace(workers=2), pack) == ["baseline", "+ packed feed"]
    assert names(same.replace(micro_batch_size=4), pack) == ["baseline", "+ batch and lr"]
    assert names(same.replace(clip_norm=1.0, ema=0.9), pack) == ["baseline", "+ clipping, moving average"]
    assert names(same.replace(optimizer="sgd", clip_norm=1.0), pack) == ["baseline", "+ optimizer, clipping"]
    assert names(same.replace(hidden=32), pack) == ["baseline", "this run"]  # the baseline has it too
    gone = dataclasses.replace(pack, raw=None)
    assert names(toy.PLAN.replace(workers=8, clip_norm=None), gone) == ["baseline", "this run"]  # workers have no part


def test_a_rung_is_the_run_with_what_is_above_it_as_in_the_baseline(pack):
    plan = FASTER.replace(micro_batch_size=32, warmup_epochs=2.0, min_lr=1e-3, clip_norm=0.5)
    baseline, _ = comparable(toy.BASELINE, plan, pack, CPU)
    steps = ladder(baseline, plan, pack, CPU)
    assert steps[0][1] == baseline
    assert steps[-1] == ("+ clipping", plan)
    for (_, before), (name, after) in pairwise(steps[1:-1]):
        assert set(after.changes_from(before)) <= set(GROUPS[name])


def test_all_rungs_that_keep_the_pack_in_memory_share_one(pack, monkeypatch):
    opened, made = [], []
    real, begin = Resident.__init__, Stepper.__init__
    monkeypatch.setattr(Resident, "__init__", lambda self, *a: (opened.append(1), real(self, *a))[1])
    monkeypatch.setattr(Stepper, "__init__", lambda self, *a: (made.append(a[4]), begin(self, *a))[1])
    measured(slow(), pack, FASTER)
    assert opened == [1]
    assert len(made) == 5
    assert sum(feed is None for feed in made) == 1  # the baseline's, with workers


def test_where_a_step_is_slow_only_the_ends_are_measured_and_it_is_said(pack):
    found = measured(Job(fixed=9.0), pack, FASTER)
    assert [rung.name for rung in found.rungs] == ["baseline", "this run"]
    assert found.rungs[-1].rate == found.after
    assert list(found.rungs[1].changes) == ["batch_size", "amp", "channels_last", "feed"]
    assert "A step takes 9.0 s: only the first and last rows were measured" in str(found)


def test_more_rungs_have_shorter_turns_so_that_the_whole_takes_as_long(pack):
    """And the plan's lr, which needs its warmup, is not trained with."""
    short = Job(fixed=0.1)
    measured(short, pack, toy.PLAN.replace(optimizer="sgd", lr=1e30, warmup_epochs=3.0), seconds=3.0)
    several = Job(fixed=0.1)
    measured(several, pack, FASTER, seconds=3.0)
    assert several.now == pytest.approx(short.now, rel=0.15)


def test_without_the_source_files_the_receipt_says_that_data_was_not_measured(tmp_path):
    pack = toy.make_pack(tmp_path, count=60)
    assert pack.raw is not None
    shutil.rmtree(pack.raw.source)
    gone = nb.Pack.open(pack.folder)
    assert gone.raw is None
    found = receipt(toy, gone, toy.PLAN, seconds=0.02)
    assert "the data pipeline was not measured" in str(found)
    assert "+ packed feed" not in [rung.name for rung in found.rungs]


def test_of_ragged_data_the_receipt_tells_what_is_padding_and_what_blind_batches_would_pad(tmp_path):
    ragged = toy.make_pack(tmp_path, count=400, ragged=True)
    found = measured(Job(), ragged)
    (note,) = [note for note in found.notes if note.startswith("Padding")]
    ours, blind = (float(share) / 100 for share in re.findall(r"([\d.]+) %", note))
    lengths = ragged.lengths("x", np.random.default_rng(1).permutation(ragged.ids("train")))
    padded = sum(64 * max(lengths[i : i + 64]) - sum(lengths[i : i + 64]) for i in range(0, len(lengths) - 63, 64))
    assert blind == pytest.approx(padded / (padded + sum(lengths)), abs=0.05)
    assert ours < blind / 3
