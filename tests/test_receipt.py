"""The receipt: the same network trained two ways in turns on this machine, and what each group of knobs brings."""

import dataclasses
import json
import math
import re
import shutil
import time
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import toy

import nbtools as nb
from nbtools import measure
from nbtools.data import Resident
from nbtools.data.pack import RawFiles
from nbtools.measure import Receipt, receipts, rungs
from nbtools.measure.pace import Pace, Rate
from nbtools.measure.receipts import Course, receipt
from nbtools.measure.rungs import Rung, ladder

CPU = torch.device("cpu")
FASTER = toy.PLAN.replace(batch_size=64, lr=2e-2, amp="bf16", channels_last=True, clip_norm=None)


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return toy.make_pack(tmp_path_factory.mktemp("toy"))


class Slow(RawFiles):
    """Decoding that takes 2 ms and no CPU."""

    def __getitem__(self, i):
        time.sleep(0.002)
        return super().__getitem__(i)


@pytest.fixture(scope="module")
def slow(pack):
    return dataclasses.replace(pack, raw=Slow(pack.raw.folder, pack.raw.source, pack.raw.read))


@pytest.fixture(scope="module")
def found(slow) -> Receipt:
    return receipt(toy, slow, FASTER.replace(hidden=24), seconds=0.6)


def test_the_machine_of_one_thread_has_1_thread():
    before = torch.get_num_threads()
    try:
        said = []
        for count in (1, 2):
            torch.set_num_threads(count)
            said.append(measure.machine()["cores"].split(", ")[1])
    finally:
        torch.set_num_threads(before)
    assert said == ["1 thread", "2 threads"]


def test_the_receipt_compares_with_the_baseline_on_the_same_network_and_data(found):
    """Reading that sleeps makes the baseline data-bound by a known amount."""
    assert found.before.plan["hidden"] == found.after.plan["hidden"] == 24
    assert found.before.plan["feed"] == "workers"
    assert found.before.samples_per_s < 500
    assert found.before.data_wait > 0.7 > 0.5 > found.after.data_wait
    assert found.ratio > 3
    assert found.ratio_least <= found.ratio <= found.ratio_most
    assert "× the baseline's samples/s on this machine" in str(found)
    if not torch.cuda.is_available():
        assert "+ mixed precision" in str(found)
        assert "No GPU: what mixed precision, larger batches and resident data bring on one was not" in str(found)


def test_the_rungs_are_the_groups_of_knobs_in_which_the_plans_differ_and_each_is_a_plan_that_trained(found):
    assert [rung.name for rung in found.rungs] == [
        *("baseline", "+ packed feed", "+ batch and lr", "+ mixed precision"),
        "+ compile, graph, layout",
    ]
    feeds = [rung.rate.plan["feed"] for rung in found.rungs]
    sizes = [rung.rate.plan["batch_size"] for rung in found.rungs]
    amps = [rung.rate.plan["amp"] for rung in found.rungs]
    assert feeds == ["workers", "auto", "auto", "auto", "auto"]
    assert sizes == [16, 16, 64, 64, 64]
    assert amps == ["off", "off", "off", "bf16", "bf16"]
    assert [list(rung.changes) for rung in found.rungs] == [
        *([], ["feed"], ["batch_size"], ["amp"]),
        ["channels_last"],
    ]
    assert found.rungs[-1].rate == found.after
    assert found.rungs[-1].rate.plan == FASTER.replace(hidden=24).to_dict()


def test_the_factors_of_the_rungs_multiply_to_the_total(found):
    assert math.prod(rung.factor for rung in found.rungs) == pytest.approx(found.ratio)
    assert found.rungs[-1].total == found.ratio
    assert found.rungs[0].factor == found.rungs[0].total == 1
    assert all(rung.total_least <= rung.total <= rung.total_most for rung in found.rungs)
    assert all(rung.factor_least <= rung.factor <= rung.factor_most for rung in found.rungs)


def test_total_and_factors_of_known_rounds():
    """Three rounds on a machine that slows down: the ratios are taken within rounds."""
    rounds = [[100.0, 50.0, 25.0], [200.0, 100.0, 50.0], [300.0, 150.0, 100.0]]
    steps = rungs.measured(["a", "b", "c"], [rate(toy.PLAN, speeds[1]) for speeds in rounds], rounds)
    assert [(step.factor, step.total) for step in steps] == [(1.0, 1.0), (2.0, 2.0), (1.5, 3.0)]
    assert [(step.total_least, step.total_most) for step in steps[1:]] == [(2.0, 2.0), (3.0, 4.0)]
    assert (steps[2].factor_least, steps[2].factor_most) == (1.5, 2.0)


def test_the_packed_feed_is_what_helps_where_decoding_is_what_takes_the_time(found):
    factors = {rung.name: rung.factor for rung in found.rungs[1:]}
    assert factors["+ packed feed"] > 3
    assert factors["+ packed feed"] == max(factors.values())


def test_the_table_has_a_row_a_rung_with_speed_spread_and_both_factors(found):
    headers, rows = found.table()
    assert headers[1:4] == ("samples/s", "over the rung before", "over the baseline")
    assert len(rows) == 5
    assert rows[1][0] == "+ packed feed"
    assert rows[1][2].startswith(f"{found.rungs[1].factor:.2f}× (")
    assert rows[2][5] == "batch_size 16 → 64"
    assert f"{found.rungs[4].total:.2f}× (" in str(found)
    assert found._repr_html_().count("<tr") == 1 + 5 + 2


def test_a_receipt_is_json_and_back(found):
    again = Receipt.from_dict(json.loads(found.to_json()))
    assert again.to_json() == found.to_json()
    assert isinstance(again.rungs[1], Rung)


def rate(plan: nb.Plan, speed: float) -> Rate:
    return Rate(plan.to_dict(), speed, speed, speed, 0.25, 3)


def test_a_receipt_of_an_older_version_is_read_and_shown():
    old = {
        "before": dataclasses.asdict(rate(toy.BASELINE, 100.0)),
        "after": dataclasses.asdict(rate(FASTER, 400.0)),
        "ratio": 4.0,
        "ratio_least": 3.5,
        "ratio_most": 4.5,
        "peak_memory": {"before": 100.0, "after": 250.0},
        "machine": {"device": "some GPU"},
        "notes": ["Both train the same network"],
    }
    found = Receipt.from_dict(json.loads(json.dumps(old)))
    assert found.rungs == ()
    text = str(found)
    assert "4.00× the baseline's samples/s on this machine (3.50–4.50, n = 3)" in text
    assert "batch_size" in text
    assert "this run" in text
    assert "Peak GPU memory: baseline 100 MiB, this run 250 MiB" in text
    assert "<table" in found._repr_html_()


def names(plan: Any, pack) -> list[str]:
    baseline, _ = receipts.comparable(toy.BASELINE, plan, pack)
    return [name for name, _ in ladder(baseline, plan, pack, CPU)]


def test_only_rungs_in_which_something_differs_that_costs_time_appear(pack):
    same = toy.BASELINE.replace(feed="workers")
    assert names(same, pack) == ["baseline", "this run"]
    assert names(same.replace(lr=1e-4, warmup_epochs=1.0, epochs=9, seed=3), pack) == ["baseline", "this run"]
    assert names(same.replace(feed="resident"), pack) == ["baseline", "+ packed feed"]
    assert names(same.replace(workers=2), pack) == ["baseline", "+ packed feed"]
    assert names(same.replace(micro_batch_size=4), pack) == ["baseline", "+ batch and lr"]
    assert names(same.replace(clip_norm=1.0, ema=0.9), pack) == ["baseline", "+ the rest"]
    assert names(same.replace(hidden=32), pack) == ["baseline", "this run"]  # the baseline has it too
    gone = dataclasses.replace(pack, raw=None)
    assert names(toy.PLAN.replace(workers=8, clip_norm=None), gone) == ["baseline", "this run"]  # workers have no part


def test_a_rung_is_the_run_with_what_is_above_it_as_in_the_baseline(pack):
    plan = FASTER.replace(micro_batch_size=32, warmup_epochs=2.0, min_lr=1e-3, clip_norm=0.5)
    baseline, _ = receipts.comparable(toy.BASELINE, plan, pack)
    steps = ladder(baseline, plan, pack, CPU)
    assert steps[0][1] == baseline
    assert steps[-1] == ("+ the rest", plan)
    for (_, before), (name, after) in pairwise(steps[1:]):
        knobs = rungs.GROUPS.get(name) or rungs.rest(plan)
        assert set(after.changes_from(before)) <= set(knobs)


def test_all_rungs_that_keep_the_pack_in_memory_share_one(pack, monkeypatch):
    opened, made = [], []
    real, pace = Resident.__init__, Pace.__init__
    monkeypatch.setattr(Resident, "__init__", lambda self, *a: (opened.append(1), real(self, *a))[1])
    monkeypatch.setattr(Pace, "__init__", lambda self, *a: (made.append(a[4]), pace(self, *a))[1])
    receipt(toy, pack, FASTER, seconds=0.3)
    assert opened == [1]
    assert len(made) == 5
    assert sum(feed is None for feed in made) == 1  # the baseline's, with workers


def test_where_a_step_is_slow_only_the_ends_are_measured_and_it_is_said(pack, monkeypatch):
    refusal = Course.refusal
    monkeypatch.setattr(Course, "refusal", lambda self, n, s: (setattr(self, "step", 9.0), refusal(self, n, s))[1])
    found = receipt(toy, pack, FASTER, seconds=0.05)
    assert [rung.name for rung in found.rungs] == ["baseline", "this run"]
    assert found.rungs[-1].rate == found.after
    assert list(found.rungs[1].changes) == ["batch_size", "amp", "channels_last", "feed"]
    assert "A step takes 9.0 s: of the rungs only the ends were measured" in str(found)


def test_more_rungs_have_shorter_turns_so_that_the_whole_takes_as_long(pack, monkeypatch):
    turns = []
    turn = Course.turn
    monkeypatch.setattr(Course, "turn", lambda self, name, s: (turns.append(s), turn(self, name, s))[1])
    receipt(toy, pack, FASTER, seconds=0.3)
    assert len(turns) == 5 * receipts.ROUNDS
    assert sum(turns) == pytest.approx(2 * 0.3 * receipts.ROUNDS)


def test_the_receipt_does_not_depend_on_an_lr_that_needs_its_warmup(pack):
    assert receipt(toy, pack, toy.PLAN.replace(optimizer="sgd", lr=1e30, warmup_epochs=3.0), seconds=0.05)


def test_without_the_source_files_the_receipt_says_that_data_was_not_measured(tmp_path):
    pack = toy.make_pack(tmp_path, count=60)
    assert pack.raw is not None
    shutil.rmtree(pack.raw.source)
    gone = nb.Pack.open(pack.folder)
    assert gone.raw is None
    found = receipt(toy, gone, toy.PLAN, seconds=0.1)
    assert "the data part was not measured" in str(found)
    assert "+ packed feed" not in [rung.name for rung in found.rungs]


def test_of_ragged_data_the_receipt_tells_what_is_padding_and_what_blind_batches_would_pad(tmp_path):
    ragged = toy.make_pack(tmp_path, count=400, ragged=True)
    found = receipt(toy, ragged, toy.PLAN, seconds=0.05)
    (note,) = [note for note in found.notes if note.startswith("Padding")]
    ours, blind = (float(share) / 100 for share in re.findall(r"([\d.]+)%", note))
    lengths = ragged.lengths("x", np.random.default_rng(1).permutation(ragged.ids("train")))
    padded = sum(64 * max(lengths[i : i + 64]) - sum(lengths[i : i + 64]) for i in range(0, len(lengths) - 63, 64))
    assert blind == pytest.approx(padded / (padded + sum(lengths)), abs=0.05)
    assert ours < blind / 3


def test_random_state_is_as_it_was(pack):
    torch.manual_seed(3)
    before, numbers = torch.get_rng_state(), repr(np.random.get_state(legacy=False))
    receipt(toy, pack, toy.PLAN.replace(deterministic=True), seconds=0.02)
    assert torch.equal(torch.get_rng_state(), before)
    assert repr(np.random.get_state(legacy=False)) == numbers
    assert not torch.are_deterministic_algorithms_enabled()
