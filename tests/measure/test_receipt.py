"""The receipt, on a job whose parts take known times: two ways to train in turns, and what each setting brings."""

import json
import math
import shutil
from typing import Any

import pytest
import toy
from simulated import Job

import nbtools as nb
from nbtools.measure import Receipt, receipt
from nbtools.show import duration

FASTER = toy.PLAN.replace(batch_size=64, lr=2e-2, amp="bf16", channels_last=True, clip_norm=None, hidden=24)


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return toy.make_pack(tmp_path_factory.mktemp("toy"), count=184)  # 128 to train on: whole batches of 16 and 64


def measured(job: Job, pack, plan: Any = toy.PLAN, seconds: float = 6.0) -> Receipt:
    with job.times():
        return receipt(job, job.pack(pack), plan, seconds)


@pytest.fixture(scope="module")
def found(pack) -> Receipt:
    return measured(Job(reading=0.05, fixed=0.05, a_sample=0.001, amp={"bf16": 0.5}), pack, FASTER)


def test_the_rungs_are_the_groups_of_settings_in_which_the_plans_differ_and_each_brings_what_it_does(found, pack):
    small, large = 0.05 + 16 * 0.001, 0.05 + 64 * 0.001
    expected = {
        "baseline": 1.0,
        "+ packed feed": (16 * 0.05 + small) / small,
        "+ batch and lr": 4 * small / large,
        "+ mixed precision": 2.0,
        "+ compile, layout, threads": 1.0,
    }
    within = 0.01 if pack.splits["train"] % 64 == 0 else 0.2
    assert {rung.name: rung.factor or 1.0 for rung in found.rungs} == pytest.approx(expected, rel=within)
    assert math.prod(rung.factor or 1.0 for rung in found.rungs) == pytest.approx(found.ratio)
    assert found.before.waited == pytest.approx(0.8 / (0.8 + small))
    assert found.after.waited == 0
    assert {rung.timing.plan["hidden"] for rung in found.rungs} == {24}, "a smaller network is no speed-up"
    assert [list(rung.changes) for rung in found.rungs] == [[], ["feed"], ["batch_size"], ["amp"], ["channels_last"]]
    assert found.rungs[-1].timing == found.after
    assert found.after.plan == FASTER.to_dict()


def test_the_table_has_a_row_a_rung_with_speed_spread_and_both_factors_and_the_time_of_all_epochs(found, pack):
    headers, rows = found.table()
    assert headers[1:4] == ("samples/s", "vs previous row", "vs baseline")
    assert [row[0] for row in rows] == [rung.name for rung in found.rungs]
    assert (rows[1][2], rows[2][5]) == (f"{found.rungs[1].factor:.2f}×", "batch_size 16 → 64")
    assert f"Samples/s relative to the baseline on this machine: {found.rungs[-1].trial.spread}" in str(found)
    assert "No GPU: the gain from mixed precision, larger batches and data kept on a GPU was not" in str(found)
    assert found.samples == FASTER.epochs * pack.splits["train"]
    took, before = (duration(found.samples / rate.samples_per_s) for rate in (found.after, found.before))
    assert found.caption().endswith(f"; all epochs' steps take {took}, or {before} with the baseline's settings")


def test_where_a_step_is_slow_only_the_ends_are_measured_and_it_is_said(pack):
    found = measured(Job(fixed=9.0), pack, FASTER)
    assert [rung.name for rung in found.rungs] == ["baseline", "this run"]
    assert found.rungs[-1].timing == found.after
    assert "Not measured, as that would take longer than 36 s: + " in str(found)


LARGE = toy.BASELINE.replace(batch_size=64, amp="fp16")


def test_the_guides_settings_are_measured_next_to_its_before_in_passes_that_fit_memory(pack):
    job: Any = Job(reading=0.001, fixed=0.1, a_sample=0.001)
    job.PRESETS = {"guide": LARGE, "guide-large": toy.PLAN}
    found: Any = measured(job, pack, toy.PLAN.replace(hidden=24))
    small, large = (0.1 / batch + 0.001 + 0.001 for batch in (16, 64))
    assert found.guide.trial.ratio == pytest.approx(small / large, rel=0.1)  # 128 to train on, or nearly
    assert found.guide.timing.plan["hidden"] == 24, "the run's own network"
    assert found.rungs[-1].trial.ratio == found.ratio, "the guide's settings are no rung"
    _, rows = found.table()
    assert [row[0] for row in rows] == ["baseline", "guide's optimised", "+ packed feed", "+ other settings"]
    assert rows[1][2:4] == (None, found.guide.trial.spread)
    assert "batch_size 16 → 64" in rows[1][5]
    saved = json.dumps(found.to_dict())
    assert json.dumps(Receipt.from_dict(json.loads(saved)).to_dict()) == saved
    job.most = 32
    notes = " ".join(measured(job, pack).notes)
    assert "Memory ran out with guide's optimised: measured in passes of 32 samples" in notes


def test_without_the_source_files_the_receipt_says_that_data_was_not_measured(tmp_path):
    pack = toy.make_pack(tmp_path, count=60)
    shutil.rmtree(tmp_path / "raw")
    gone = nb.Pack.open(pack.folder)
    assert gone.raw is None
    found = receipt(toy, gone, toy.PLAN, seconds=0.02)
    assert "the data pipeline was not measured" in str(found)
    assert "+ packed feed" not in [rung.name for rung in found.rungs]
