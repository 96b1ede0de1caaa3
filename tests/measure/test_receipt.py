"""The receipt, on a job whose parts take known times: plans in turns, the rungs between them, the guides' presets."""

import dataclasses
import json
import math
from functools import partial
from time import monotonic
from typing import Any

import pytest
import torch
import toy
from simulated import Job

import nbtools as nb
from nbtools.data import Card, Column, cores
from nbtools.errors import TrainError
from nbtools.measure import Receipt, preset, receipt
from nbtools.show import timing
from nbtools.tasks import captcha, hwdb, segment, sign

FASTER = toy.PLAN.replace(batch_size=64, lr=0.1, amp="bf16", channels_last=True, workers=2, clip_norm=None)
FASTER = FASTER.replace(hidden=24, eval_samples=9)
PACK = partial(toy.make_pack, count=184)  # 128 to train on: whole batches of 16 and 64


def measured(job: Job, pack, plan: Any = toy.PLAN, run_s: float = 0.0) -> Receipt:
    with job.times():
        return receipt(job, job.pack(pack), plan, 6.0, run_s)


@pytest.fixture(scope="module")
def found(pack) -> Receipt:
    return measured(Job(reading=0.05, fixed=0.05, a_sample=0.001, amp={"bf16": 0.5}), pack, FASTER)


def test_a_rung_is_a_group_of_settings_in_which_plans_differ_each_brings_what_it_does_and_is_a_row(found, pack):
    small, large = 0.05 + 16 * 0.001, 0.05 + 64 * 0.001
    expected = {
        "baseline": 1.0,
        "+ packed feed": (16 * 0.05 + small) / small,
        "+ batch and lr": 4 * small / large,
        "+ mixed precision": 2.0,
        "+ compile, layout": 1.0,
    }
    within = 0.01 if pack.splits["train"] % 64 == 0 else 0.2
    assert {rung.name: rung.factor or 1.0 for rung in found.rungs} == pytest.approx(expected, rel=within)
    assert math.prod(rung.factor or 1.0 for rung in found.rungs) == pytest.approx(found.ratio)
    first, *_, last = (rung.timing for rung in found.rungs)
    assert (first.waited, last.waited) == (pytest.approx(0.8 / (0.8 + small)), 0)
    assert {rung.timing.plan["hidden"] for rung in found.rungs} == {24}, "a smaller network is no speed-up"
    assert [list(rung.changes) for rung in found.rungs] == [[], ["feed"], ["batch_size"], ["amp"], ["channels_last"]]
    assert last.plan == FASTER.to_dict()
    headers, rows = found.table()
    assert headers[1:4] == ("samples/s", "vs previous row", "vs baseline")
    assert [row[0] for row in rows] == [rung.name for rung in found.rungs]
    assert (rows[1][2], rows[2][5]) == (f"{found.rungs[1].factor:.2f}×", "batch_size 16 → 64")
    assert (rows[0][4], rows[1][4]) == ("92 %", None)
    assert "From the call of nb.fit to the tenth step: 3.00 s." in str(dataclasses.replace(found, cold_start=3.0))
    assert f"Samples/s relative to the baseline on this machine: {found.rungs[-1].trial.spread}" in str(found)
    assert "No GPU: the gain from mixed precision, larger batches and data kept on a GPU was not" in str(found)
    assert found.samples == FASTER.epochs * pack.splits["train"]
    took = found.samples / found.rungs[-1].timing.samples_per_s
    assert f"steps take {timing(took)}, or {timing(took * found.ratio)} with the baseline's" in found.caption()


def test_cold_start_is_known_of_a_new_run_of_ten_steps_alone_and_within_its_time(found, pack, tmp_path, monkeypatch):
    monkeypatch.setattr("nbtools.measure.receipt", lambda *of, **more: found)
    start, runs = monotonic(), [(toy.PLAN.replace(epochs=n), tmp_path / to) for n, to in ((1, "a"), (2, "a"), (2, "b"))]
    cold: Any = [nb.fit(toy, pack, plan, run, progress=False).receipt.cold_start for plan, run in runs]
    assert (cold[:2], 0 < cold[2] < monotonic() - start) == ([None, None], True), "an epoch has eight steps"


def test_before_and_after_are_deterministic_each_as_its_plan_says_and_without_source_files_both_read_the_pack(pack):
    seen, enabled = set[tuple[bool, bool]](), torch.are_deterministic_algorithms_enabled
    task = toy.with_(loss=lambda *of: seen.add((of[2].deterministic, enabled())) or toy.loss(*of))
    found = receipt(task, dataclasses.replace(pack, raw=None), toy.PLAN.replace(deterministic=True), seconds=0.02)
    assert "the data pipeline was not measured" in str(found)
    assert "+ packed feed" not in [rung.name for rung in found.rungs]
    assert seen == {(False, False), (True, True)}


def test_where_a_step_is_slow_only_the_ends_are_measured_and_it_is_said(pack):
    found = measured(Job(fixed=9.0), pack, FASTER)
    assert [rung.name for rung in found.rungs] == ["baseline", "this run"]
    assert "1.78 (" in str(found), "samples/s"
    assert "Not measured, as that would take longer than 36 s: + " in str(found)
    assert len(measured(Job(fixed=9.0), pack, FASTER, 36_000.0).rungs) == 5, "a tenth of a long run suffices"
    with pytest.raises(TrainError, match="would take about 54 s, longer than a tenth of the run"):
        measured(Job(fixed=9.0), pack, FASTER, 10.0)
    assert measured(Job(), pack, toy.BASELINE).ratio == pytest.approx(1.0), "of a plan that is the baseline"


def test_the_guides_settings_are_measured_next_to_its_before_in_passes_that_fit_memory(pack):
    job: Any = Job(reading=0.001, fixed=0.1, a_sample=0.001)
    job.PRESETS = {"guide": toy.BASELINE.replace(batch_size=64, amp="fp16"), "guide-large": toy.PLAN}
    found: Any = measured(job, pack, toy.PLAN.replace(hidden=24))
    small, large = (0.1 / batch + 0.001 + 0.001 for batch in (16, 64))
    assert found.guide.trial.ratio == pytest.approx(small / large, rel=0.1)  # 128 to train on, or nearly
    assert found.guide.timing.plan["hidden"] == 24, "the run's own network"
    assert found.rungs[-1].trial.ratio == found.ratio, "the guide's settings are no rung"
    _, rows = found.table()
    assert [row[0] for row in rows] == ["baseline", "guide's optimised", "+ packed feed", "+ other settings"]
    assert rows[1][2:4] == (None, found.guide.trial.spread)
    assert f"; the guide's optimised settings: {found.guide.trial.spread}; " in found.caption()
    assert "batch_size 16 → 64" in rows[1][5]
    saved = json.dumps(found.to_dict())
    assert json.dumps(Receipt.from_dict(json.loads(saved)).to_dict()) == saved
    job.most = 32
    notes = " ".join(measured(job, pack).notes)
    assert "Memory ran out with guide's optimised: measured in passes of 32 samples" in notes
    assert "Memory ran out" not in str(measured(Job(), pack, toy.PLAN.replace(micro_batch_size=8)))


TASKS: dict[str, Any] = {"captcha": captcha, "hwdb": hwdb, "segment": segment, "sign": sign}
GUIDES = {  # as the guides write them
    "captcha before": "batch_size=64 lr=2e-4 optimizer=adam amp=off epochs=150 min_lr=1e-6 eval_every=5 "
    "schedule=cosine workers=0",
    "hwdb before": "batch_size=8 lr=1e-3 optimizer=sgd weight_decay=1e-4 schedule=step epochs=90 amp=off augment=0 "
    "network=auto workers=0",
    "sign before": "batch_size=32 lr=1e-4 optimizer=adam epochs=20 amp=off normalise=none mirror=0 workers=0",
    "segment before": "batch_size=32 optimizer=sgd schedule=poly lr=5e-3 amp=off crop=384 scale_low=0.25 "
    "scale_high=2.0 jitter=0.4 head_lr=10.0 eval_scales=0.5,0.75,1.0,1.25,1.5,1.75 eval_full=true workers=0",
    "hwdb guide": "epochs=10 batch_size=64 lr=3e-3 amp=fp16 workers=8",
    "hwdb guide-batch-48": "batch_size=48 lr=2.5e-3",
    "hwdb guide-batch-32": "batch_size=32 lr=2e-3",
    "hwdb guide-lr-0.002": "batch_size=64 lr=2e-3 clip_norm=5",
    "hwdb guide-lr-0.0015": "batch_size=64 lr=1.5e-3 clip_norm=5",
    "captcha guide": "epochs=150 batch_size=512 lr=2e-4 min_lr=1e-6 workers=12 prefetch=2",
    "captcha guide-large": "batch_size=1024 optimizer=adamw lr=6e-4 weight_decay=1e-4 warmup_epochs=5 schedule=cosine "
    "min_lr=1e-6 clip_norm=1",
    "captcha guide-gpus": "epochs=150 batch_size=1536 micro_batch_size=512 lr=2e-4 min_lr=1e-6",
    "captcha guide-large-gpus": "epochs=150 batch_size=3072 micro_batch_size=1024 optimizer=adamw betas=0.9,0.999 "
    "lr=6e-4 weight_decay=1e-4 warmup_epochs=5 schedule=cosine min_lr=1e-6 clip_norm=1 workers=16",
    "sign guide": "epochs=50 batch_size=64 micro_batch_size=32 lr=3e-4 weight_decay=1e-4 clip_norm=1 schedule=cosine "
    "early_stop=10",
    "sign guide-gpus": "epochs=100 batch_size=128 micro_batch_size=64 lr=5e-5 weight_decay=1e-4 clip_norm=1 "
    "schedule=plateau early_stop=15",
    "sign guide-low-memory": "network=gru epochs=40 batch_size=64 micro_batch_size=16 schedule=plateau patience=3 "
    "early_stop=8",
    "sign guide-cpu": "epochs=30 batch_size=8 schedule=plateau amp=off",
    "sign guide-quick": "epochs=10 batch_size=16 amp=off",
    "segment guide": "batch_size=64 micro_batch_size=none amp=fp16 workers=8 prefetch=2",
    "segment guide-low-memory": "batch_size=64 micro_batch_size=32",
    "segment guide-extreme": "batch_size=128 workers=16 prefetch=4",
}
COLUMNS = {"x": Column("ragged", "<f4", (156,)), "features": Column("ragged", "<f4", (2048,))}
CLIPS = Card("sign", list("ab"), {}, COLUMNS, {"train": 9})


def test_baseline_and_presets_are_the_guides_settings_before_and_optimised_read_as_the_guides_do():
    for name, settings in GUIDES.items():
        task, _, named = name.partition(" ")
        made = {"before": TASKS[task].BASELINE, **TASKS[task].PRESETS}[named]
        plan: Any = made(CLIPS) if callable(made) else made
        assert isinstance(plan, type(TASKS[task].PLAN))
        expected = dict(pair.split("=") for pair in settings.split())
        assert {n: getattr(plan, n) for n in expected} == {n: plan.parse(n, text) for n, text in expected.items()}
        assert plan.feed == "workers"
    assert {f"{name} {each}" for name, task in TASKS.items() for each in ("before", *task.PRESETS)} == GUIDES.keys()


SETTINGS = {"batch_size": 10_000, "micro_batch_size": 5000, "lr": 0.1, "amp": "fp16", "workers": 100}
PRESETS = {"guide": toy.BASELINE.replace(**SETTINGS), "guide-as-it-is": toy.BASELINE.replace(epochs=2)}


def test_a_preset_leaves_to_machine_and_data_what_it_must_and_says_so(tmp_path):
    pack, guided = PACK(tmp_path), toy.with_(PRESETS=PRESETS)
    (plan, why), train = preset(guided, pack, "guide"), pack.splits["train"]
    assert plan
    assert (plan.batch_size, plan.micro_batch_size, plan.amp, plan.workers) == (train, train, "off", cores())
    assert (plan.lr, plan.feed) == (0.1, "workers")
    assert f"batch_size 10000 → {train} (the whole train split)" in why
    assert "amp fp16 → off (fp16 needs a GPU)" in why
    assert f"workers 100 → {cores()} (this machine has {cores()} core" in why
    assert preset(guided, pack, "guide-as-it-is") == (PRESETS["guide-as-it-is"], "")
    assert preset(toy.with_(PRESETS={"guide": toy.PLAN.replace(graph=True)}), pack, "guide")[0] is None
    gone, why = preset(guided, dataclasses.replace(pack, raw=None), "guide-as-it-is")
    assert (gone and gone.feed, why) == ("auto", "feed workers → auto (the source files are gone)")
    panel = nb.Panel(nb.advise(guided, pack, measure=False))
    assert [*panel.presets][1:] == ["the guide's before", "the guide's optimised", "the guide's as it is"]
