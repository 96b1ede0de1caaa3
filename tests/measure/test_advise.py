"""Advice: a table of machines and data sets, a reason for everything that differs from the task's own plan; and what
was measured, kept next to the pack and never measured by surprise."""

import importlib
import json
import math
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from time import perf_counter, process_time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toy
from simulated import Job
from torch import nn

import nbtools as nb
from nbtools.data import Card, Column
from nbtools.live import send
from nbtools.measure import Machine, decide
from nbtools.measure.timing import Stepper
from nbtools.show import duration
from nbtools.train import Plan

CAPTCHA: Any = SimpleNamespace(
    PLAN=Plan(epochs=150, batch_size=512, lr=6e-4, warmup_epochs=5, min_lr=1e-6, clip_norm=1.0),
    BASELINE=Plan(epochs=150, batch_size=64, lr=2e-4, optimizer="adam", min_lr=1e-6, feed="workers"),
)
GIB = 2**30 / 1e9
GUIDED = {  # as torch sees machines: total_memory, capability → batch, lr, warmup, amp
    "T4": (Machine("cuda", "Tesla T4", 14.56 * GIB, 2, (7, 5)), 128, 2.83e-4, 3, "fp16"),
    "L4": (Machine("cuda", "NVIDIA L4", 22.03 * GIB, 12, (8, 9)), 256, 4e-4, 5, "bf16"),
    "A100-40": (Machine("cuda", "NVIDIA A100-SXM4-40GB", 39.39 * GIB, 12, (8, 0)), 512, 5.66e-4, 10, "bf16"),
    "8 × A100-80": (Machine("cuda", "NVIDIA A100", 79.15 * GIB, 128, (8, 0)), 512, 5.66e-4, 10, "bf16"),
    "GTX 1080 Ti": (Machine("cuda", "GTX 1080 Ti", 10.91 * GIB, 8, (6, 1)), 64, 2e-4, 0, "off"),
    "MPS": (Machine("mps", "Apple GPU", cores=10), 64, 2e-4, 0, "off"),
    "CPU": (Machine("cpu", "CPU", cores=2), 64, 2e-4, 0, "off"),
}
MACHINES = {name: row[0] for name, row in GUIDED.items()}
A100 = MACHINES["8 × A100-80"]


def card(train: int) -> Card:
    splits = {"train": train, "val": train // 10, "test": train // 10}
    return Card("captcha", list("ab"), {}, {"image": Column("fixed", "|u1", (60, 160))}, splits)


def with_plan(**changes) -> Any:
    return SimpleNamespace(PLAN=CAPTCHA.PLAN.replace(**changes), BASELINE=CAPTCHA.BASELINE)


def suggesting(**suggested) -> Any:
    return SimpleNamespace(**vars(CAPTCHA), suggest=lambda card, kind: {k: (v, kind) for k, v in suggested.items()})


@pytest.mark.parametrize("name", GUIDED)
def test_machines_get_the_guides_tiers_and_tables(name):
    plan = decide(CAPTCHA, card(50_030), MACHINES[name]).plan
    assert (plan.batch_size, plan.lr, plan.warmup_epochs, plan.amp, plan.workers) == (*GUIDED[name][1:], 0)


@pytest.mark.parametrize(
    ("train", "batch"),
    [(50_030, 512), (10_240, 512), (10_239, 256), (1000, 32), (9, 8), (5, 5), (0, 1)],
)
def test_a_small_data_set_caps_the_batch(train, batch):
    advice = decide(CAPTCHA, card(train), A100)
    assert advice.plan.batch_size == batch
    assert ("capped" in advice.reasons["batch_size"]) == (batch < 512)


@pytest.mark.parametrize(
    ("optimizer", "batch", "lr"),
    [("adamw", 256, 4e-4), ("sgd", 256, 8e-4), ("adam", 4096, 8e-4), ("sgd", 4096, 3.2e-3), ("adamw", 16, 1e-4)],
)
def test_lr_follows_the_optimizers_rule_up_to_sixteen_times_the_batch(optimizer, batch, lr):
    task = suggesting(optimizer=optimizer, batch_size=batch)
    advice = decide(task, card(100_000), A100)
    assert advice.plan.lr == pytest.approx(lr)
    assert ("linear rule" if optimizer == "sgd" else "sqrt rule") in advice.reasons["lr"]
    assert ("no increase beyond 16" in advice.reasons["lr"]) == (batch == 4096)


def test_what_the_task_suggests_stands_and_the_rest_follows_from_it():
    task = suggesting(batch_size=256, epochs=10, optimizer="sgd", clip_norm=5.0)
    advice = decide(task, card(50_030), A100)
    assert (advice.plan.batch_size, advice.plan.epochs, advice.plan.clip_norm) == (256, 10, 5.0)
    assert advice.plan.lr == pytest.approx(8e-4)
    assert advice.plan.warmup_epochs == 2  # a fifth of the suggested epochs
    assert advice.reasons["epochs"] == "cuda"


def test_settings_that_cannot_stand_change_with_a_reason():
    advice = decide(with_plan(min_lr=5e-4), card(50_030), MACHINES["CPU"])
    assert (advice.plan.min_lr, advice.plan.lr) == (2e-4, 2e-4)
    assert "above the advised lr" in advice.reasons["min_lr"]


@pytest.mark.parametrize("name", ["T4", "A100-40", "CPU"])
def test_every_changed_field_has_a_reason_and_every_figure_its_origin(name):
    task, machine = with_plan(micro_batch_size=256, min_lr=3e-4), MACHINES[name]
    advice = decide(task, card(4803), machine)
    before = task.PLAN.to_dict()
    changed = {key for key, value in advice.plan.to_dict().items() if value != before[key]}
    assert changed | {"batch_size", "lr", "warmup_epochs", "amp"} <= advice.reasons.keys()
    for key, reason in advice.reasons.items():
        assert reason.strip()
        if key in ("lr", "warmup_epochs") or "tier" in reason or "capped" in reason:
            assert re.search(r"rule of thumb \((captcha guide|guide to large batches|arXiv \d|ours)", reason), key


SECONDS = 6.0  # on a job's own clock


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return toy.make_pack(tmp_path_factory.mktemp("toy"), count=600)


def measured(job: Job, pack, seconds: float | None = SECONDS) -> Any:
    """Advice that was measured on the job's own clock."""
    with job.times():
        return nb.advise(job, pack, seconds=seconds)


@pytest.fixture(scope="module")
def job():
    return Job(fixed=0.1, a_sample=0.01, amp={"bf16": 2.0})


@pytest.fixture(scope="module")
def advice(pack, job):
    return measured(job, pack)


def test_each_measured_number_has_its_evidence_and_the_rest_its_rule(advice):
    assert re.search(
        r"measured here: \d+ is (the fastest|nearly as fast as the fastest \()", advice.reasons["batch_size"]
    )
    assert "rule of thumb" in advice.reasons["lr"]
    assert advice.verdict.sentence in str(advice)
    seconds = advice.plan.epochs * advice.samples / advice.verdict.timing.samples_per_s
    assert f" of warmup · these take about {duration(seconds)} at the measured speed, " in str(advice)


def test_what_was_found_is_kept_next_to_the_pack_and_comes_back_the_same_for_that_pack_only(
    advice, pack, job, tmp_path
):
    assert not any("advice" in path.name for path in pack.folder.iterdir())
    before = job.now
    for again in (nb.advise(job, pack), nb.advise(job, pack, measure=False)):
        assert json.dumps(again.to_dict()) == json.dumps(advice.to_dict())
        assert again.plan == advice.plan
    assert job.now == before, "it measured"
    assert nb.advise(job, toy.make_pack(tmp_path, count=60), measure=False).verdict is None


def test_rules_alone_when_nothing_was_measured_before(tmp_path):
    advice = nb.advise(toy, toy.make_pack(tmp_path, count=60), measure=False)
    assert isinstance(advice.plan, toy.Plan)
    assert (advice.baseline, advice.verdict) == (toy.BASELINE, None)
    for text in (
        "nothing here has been measured",
        f"{advice.samples} samples · ",
        "of warmup · time not measured yet.",
    ):
        assert text in str(advice)
        assert text in advice._repr_html_()


def test_the_tasks_own_batch_size_is_not_overruled_by_speed(pack):
    class Own(Job):
        def suggest(self, card, accelerator):
            return {"batch_size": (12, "learns best so")}

    advice = measured(Own(fixed=0.1, a_sample=0.0001), pack)
    assert (advice.plan.batch_size, advice.reasons["batch_size"]) == (12, "learns best so")


@pytest.mark.parametrize(
    ("parts", "amp", "why"),
    [
        ({"amp": {"bf16": 0.4}}, "bf16", "bf16 2.50×"),
        ({"amp": {"bf16": 0.4}, "loss_in_bf16": 1.5}, "off", "bf16 is faster, but its loss differs by 50.0 %"),
        ({"amp": {"bf16": 0.4}, "loss_in_bf16": math.nan}, "off", "bf16 fails (the loss became nan)"),
    ],
)
def test_the_precision_that_was_measured_faster_and_learns_the_same_is_advised(tmp_path, parts, amp, why):
    """And the batch is searched in it."""
    pack, job = toy.make_pack(tmp_path, count=400), Job(**parts)
    advice = measured(job, pack)
    assert advice.plan.amp == amp
    assert why in advice.reasons["amp"]
    searched = Counter(name for name, size in job.passes if size == advice.plan.batch_size)
    assert searched.most_common(1)[0][0] == amp


def test_a_model_that_cannot_be_trained_in_bf16_is_advised_in_float32_and_says_why(tmp_path):
    class WithoutBf16(Job):
        def loss(self, model, batch, plan):
            if plan.amp == "bf16":
                raise RuntimeError("no kernel for 'BFloat16'")
            return super().loss(model, batch, plan)

    advice = measured(WithoutBf16(), toy.make_pack(tmp_path, count=200))
    assert advice.plan.amp == "off"
    assert "fails (no kernel for 'BFloat16')" in advice.reasons["amp"]


def test_a_run_asked_what_limits_it_answers_and_goes_on_bit_equal(pack, tmp_path, monkeypatch, at_once):
    folder, steps = tmp_path / "run", []

    def batch(raw, plan, draws):
        steps.append(1) if draws is not None else None
        if len(steps) == 5:
            send(folder, ["profile"])
        return toy.batch(raw, plan, draws)

    monkeypatch.setattr("nbtools.measure.profile.SECONDS", 0.1)
    plan = toy.PLAN.replace(epochs=2)
    undisturbed = nb.fit(toy, pack, plan, tmp_path / "undisturbed", receipt=False, progress=False)
    run = nb.fit(toy.with_(batch=batch), pack, plan, folder, receipt=False, progress=False)
    assert run.verdict is not None
    assert run.verdict.sentence in run.events
    assert [row["loss"] for row in run.history.of("step")] == [row["loss"] for row in undisturbed.history.of("step")]


# -- settings for speed, each tried on a job whose parts take known times


@dataclass
class Turned(Job):
    """A job at a batch of its own, with a layer that convolves, for which layouts are tried."""

    threads: set[tuple[int | None, int]] = field(default_factory=set)

    def suggest(self, card, accelerator):
        return {"batch_size": (16, "as it is")}

    def model(self, card, plan):
        network = toy.model(card, plan)
        network.add_module("unused", nn.Conv2d(1, 1, 1))
        return network

    def loss(self, model, batch, plan):
        self.threads.add((plan.threads, torch.get_num_threads()))
        return super().loss(model, batch, plan)


H200 = {("off", False): 18.6, ("bf16", False): 20.1, ("off", True): 13.8, ("bf16", True): 9.0}
"""(amp, channels_last) → ms that the H200 works for a step of 256 captchas: 13.7, 12.7, 18.5 and 28.4 thousand/s."""


def test_precisions_are_compared_on_one_batch_where_lengths_differ(tmp_path, monkeypatch):
    """Else the narrowest comes once, and a look at it is all there is."""
    step, batches = Stepper.step, list[tuple[int, ...]]()

    def stepped(self: Stepper, raw: Any) -> Any:
        batches.append(tuple(raw["id"].tolist()))
        return step(self, raw)

    def enough(*_: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(Stepper, "step", stepped)
    monkeypatch.setattr("nbtools.measure.advisor.find_batch", enough)
    monkeypatch.setattr("nbtools.measure.advisor.objection", enough)
    with pytest.raises(KeyboardInterrupt):
        nb.advise(toy, toy.make_pack(tmp_path, 600, ragged=True), seconds=3.0)
    assert len({*batches[2:]}) == 1 < len(batches[2:]), "after the two steps that say how long one takes"


def test_precision_and_layout_are_chosen_together_where_either_alone_gains_nothing(tmp_path, monkeypatch):
    """And by what the device works, where launching a step takes longer than any of them."""
    job = Turned(fixed=0.03)
    monkeypatch.setattr(
        "nbtools.measure.advisor.Stepper.device_s",
        lambda self: H200[self.plan.amp, self.plan.channels_last] / 1e3 * self.plan.batch_size / 256,
    )
    advice = measured(job, toy.make_pack(tmp_path, count=600), seconds=12.0)
    assert (advice.plan.amp, advice.plan.channels_last) == ("bf16", True)
    assert "bf16, channels_last 2.07×" in advice.reasons["amp"]
    assert "bf16 0.93×" in advice.reasons["amp"]


def test_a_plan_that_is_slower_than_the_rules_is_never_returned(tmp_path, monkeypatch):
    """A measurement that deceives: half the device's time in bf16, and twice the wall's."""
    job = Turned(fixed=0.05, amp={"bf16": 2.0})
    monkeypatch.setattr("nbtools.measure.advisor.Stepper.device_s", lambda self: 1.0 - 0.5 * (self.plan.amp == "bf16"))
    advice = measured(job, toy.make_pack(tmp_path, count=600), seconds=12.0)
    assert advice.plan.amp == "off"
    assert "the rules' value was 2.00× as fast in " in advice.reasons["amp"]


@pytest.mark.parametrize(("step_s", "epochs", "most"), [(0.1, 10, 16), (0.5, 10, 20)], ids=["half a minute", "two"])
def test_measuring_takes_the_time_that_suits_the_run(tmp_path, step_s, epochs, most):
    """A run of minutes 12 s; long steps leave out what there is no time for."""
    job = Turned(fixed=0.05, a_sample=(step_s - 0.05) / 16)
    job.PLAN = toy.PLAN.replace(epochs=epochs)
    advice = measured(job, toy.make_pack(tmp_path, count=600), None)
    assert advice.lr_trial
    assert advice.lr_trial.seconds <= 1.1 * 15
    assert 6 <= job.now - advice.lr_trial.seconds <= most


def test_a_busy_machine_makes_the_same_plan_in_time(tmp_path, monkeypatch):
    """Other programs take three quarters of the processor, and turns by the wall would deceive."""
    job = Turned(fixed=0.1, amp={"bf16": 0.4})
    plans = [measured(job, toy.make_pack(tmp_path / "idle", count=600), None).plan]
    monkeypatch.setattr("nbtools.measure.timing.process_time", job.clock)
    monkeypatch.setattr("nbtools.measure.timing.perf_counter", lambda: 4 * job.now)
    start, pack = job.now, toy.make_pack(tmp_path / "busy", count=600)
    advice = nb.advise(job, pack)
    assert advice.lr_trial
    assert 4 * (job.now - start) - advice.lr_trial.seconds <= 66
    plans.append(advice.plan)
    speed = [{name: getattr(plan, name) for name in ("amp", "channels_last", "batch_size", "graph")} for plan in plans]
    assert speed[0] == speed[1]
    assert speed[0]["amp"] == "bf16"


@pytest.mark.parametrize("slow_from", [20, 60, 200])
def test_a_machine_that_becomes_slow_amid_anything_ends_the_search_in_time(tmp_path, slow_from):
    """From some pass on each takes ten seconds: the part that is under way ends there, and what was decided stands."""

    class Slowing(Turned):
        def loss(self, model, batch, plan):
            self.now += 10.0 if len(self.passes) > slow_from else 0.0
            return super().loss(model, batch, plan)

    job = Slowing(fixed=0.02, a_sample=0.001, amp={"bf16": 0.4})
    advice = measured(job, toy.make_pack(tmp_path, count=600), None)
    assert advice.lr_trial
    assert advice.lr_trial.seconds <= 25
    assert job.now - advice.lr_trial.seconds <= 1.2 * 12 + 2 * 11, "at most one more step, and one of what is checked"
    assert advice.plan.amp == ("off" if slow_from == 20 else "bf16")


class Spinning(Job):
    """Whose passes take this process so many seconds of a core, half in bf16."""

    def loss(self, model, batch, plan):
        end = process_time() + 0.002 * len(batch["x"]) * (0.5 if plan.amp == "bf16" else 1.0)
        while process_time() < end:
            pass
        return super().loss(model, batch, plan)


def settings_beside(task: Any, pack: Any, code: str) -> tuple[dict[str, Any], float]:
    """Return (the settings for speed, seconds without the trial of lr) of advice beside a process."""
    other, start = subprocess.Popen([sys.executable, "-c", code]), perf_counter()
    try:
        advice = nb.advise(task, pack)
    finally:
        other.kill()
    assert advice.lr_trial
    for path in pack.folder.parent.glob("*advice*"):
        path.unlink()
    speed = ("amp", "channels_last", "batch_size", "threads", "graph")
    return {name: getattr(advice.plan, name) for name in speed}, perf_counter() - start - advice.lr_trial.seconds


HOG = "while True: pass"


@pytest.mark.alone
def test_advice_beside_a_process_that_keeps_a_core_busy_is_the_same_and_ends_in_time(tmp_path, monkeypatch):
    pack = toy.make_pack(tmp_path, count=200)
    monkeypatch.setattr("nbtools.measure.advisor.LEAST", 3.0)
    (alone, _), (beside, took) = (settings_beside(Spinning(), pack, code) for code in ("pass", HOG))
    assert alone == beside
    assert beside["amp"] == "bf16"
    assert took <= 65


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["captcha", "hwdb", "sign", "segment"])
def test_advice_for_each_task_is_the_same_beside_a_busy_process_and_ends_in_time(name, tmp_path):
    task: Any = importlib.import_module(f"nbtools.tasks.{name}")
    pack = task.pack(task.demo(tmp_path / "raw", 160), into=tmp_path / "pack", progress=False)
    (alone, _), (beside, took) = (settings_beside(task, pack, code) for code in ("pass", HOG))
    assert alone == beside
    assert took <= 65


def test_advice_says_how_long_training_takes_and_how_long_with_the_baseline(tmp_path):
    job = Turned(reading=0.02, fixed=0.1)
    pack = job.pack(toy.make_pack(tmp_path, count=300))
    advice = measured(job, pack)
    found = re.search(r"about (.+) at the measured speed, (.+) with the baseline's settings", str(advice))
    assert found
    assert seconds(found[2]) - seconds(found[1]) == pytest.approx(3 * advice.samples * 0.02, rel=0.2)


def seconds(text: str) -> float:
    parts = re.findall(r"([\d.]+) (min|s)\b", text)
    return sum(float(number) * {"min": 60, "s": 1}[unit] for number, unit in parts)


def test_a_run_computes_with_the_threads_of_its_plan_and_the_next_with_the_users_own(pack, tmp_path):
    job, before = Turned(), torch.get_num_threads()
    for k, threads in enumerate((before + 1, None)):
        plan = toy.PLAN.replace(epochs=1, threads=threads)
        nb.fit(job, pack, plan, tmp_path / str(k), receipt=False, progress=False)
    assert {(before + 1, before + 1), (None, before)} <= job.threads
