"""Advice: a table of machines and data sets, a reason for all that differs from the task's own plan, measurements."""

import dataclasses
import importlib
import itertools
import json
import math
import re
import subprocess
import sys
from functools import partial
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toy
from simulated import Job
from torch import nn

import nbtools as nb
from nbtools.data import Card, Column, cores, open_feed
from nbtools.measure import Machine, Stepper, advisor, decide, profile
from nbtools.measure.turns import Deadline, Trial, objection
from nbtools.show import timing
from nbtools.train import Plan
from nbtools.train import device as devices

CAPTCHA: Any = SimpleNamespace(
    PLAN=Plan(epochs=150, batch_size=512, lr=6e-4, warmup_epochs=5, min_lr=1e-6, clip_norm=1.0),
    BASELINE=Plan(epochs=150, batch_size=64, lr=2e-4, optimizer="adam", min_lr=1e-6, feed="workers"),
)
GIB = 2**30 / 1e9
GUIDED = {  # as torch sees machines: total_memory, capability → batch, lr, warmup, amp
    "T4": (Machine("cuda", "Tesla T4", 14.56 * GIB, 2, (7, 5)), 128, 2.83e-4, 3, "fp16"),
    "L4": (Machine("cuda", "NVIDIA L4", 22.03 * GIB, 12, (8, 9)), 256, 4e-4, 5, "bf16"),
    "8 × A100-80": (Machine("cuda", "NVIDIA A100", 79.15 * GIB, 128, (8, 0)), 512, 5.66e-4, 10, "bf16"),
    "GTX 1080 Ti": (Machine("cuda", "GTX 1080 Ti", 10.91 * GIB, 8, (6, 1)), 64, 2e-4, 0, "off"),
    "MPS": (Machine("mps", "Apple GPU", cores=10), 64, 2e-4, 0, "off"),
    "CPU": (Machine("cpu", "CPU", cores=2), 64, 2e-4, 0, "off"),
}
A100 = GUIDED["8 × A100-80"][0]


def card(train: int) -> Card:
    splits = {"train": train, "val": train // 10, "test": train // 10}
    return Card("captcha", list("ab"), {}, {"image": Column("fixed", "|u1", (60, 160))}, splits)


def with_plan(**changes) -> Any:
    return SimpleNamespace(PLAN=CAPTCHA.PLAN.replace(**changes), BASELINE=CAPTCHA.BASELINE)


@pytest.mark.parametrize("name", GUIDED)
def test_machines_get_the_guides_tiers_and_every_figure_of_a_rule_names_its_origin(name):
    advice = decide(CAPTCHA, card(50_030), GUIDED[name][0])
    plan, before = advice.plan, CAPTCHA.PLAN.to_dict()
    assert (plan.batch_size, plan.lr, plan.warmup_epochs, plan.amp, plan.workers) == (*GUIDED[name][1:], 0)
    changed = {key for key, value in plan.to_dict().items() if value != before[key]}
    assert changed | {"batch_size", "lr", "warmup_epochs", "amp"} <= advice.reasons.keys()
    assert all("rule of thumb" in advice.reasons[key] for key in ("batch_size", "lr", "warmup_epochs", "amp"))
    for key in ("batch_size", "lr", "warmup_epochs") if plan.batch_size > 64 else ():
        assert re.search(r"rule of thumb \((captcha guide|guide to large batches|arXiv \d|ours)", advice.reasons[key])
    reading = decide(with_plan(feed="workers"), card(50_030), GUIDED[name][0])
    assert reading.plan.workers == min(GUIDED[name][0].cores, 8)


@pytest.mark.parametrize(
    ("suggested", "train", "batch", "lr"),
    [
        ({}, 50_030, 512, 5.66e-4),
        ({}, 10_239, 256, 4e-4),  # capped
        ({}, 5, 5, 5.59e-5),
        ({"optimizer": "adamw", "batch_size": 256}, 100_000, 256, 4e-4),  # by the root of the batch
        ({"optimizer": "sgd", "batch_size": 256}, 100_000, 256, 8e-4),  # linear
        ({"optimizer": "adam", "batch_size": 4096}, 100_000, 4096, 8e-4),  # up to sixteen times
        ({"epochs": 10, "clip_norm": 5.0}, 50_030, 512, 5.66e-4),
    ],
)
def test_few_samples_cap_the_batch_and_lr_and_warmup_follow_it_and_what_the_task_suggests(suggested, train, batch, lr):
    task = SimpleNamespace(**vars(CAPTCHA), suggest=lambda _, kind: {k: (v, kind) for k, v in suggested.items()})
    advice = decide(task, card(train), A100)
    assert (advice.plan.batch_size, advice.plan.lr) == (batch, pytest.approx(lr, rel=0.01))
    assert ("capped" in advice.reasons["batch_size"]) == (batch < 512 and not suggested)
    assert suggested == {name: getattr(advice.plan, name) for name in suggested}
    assert {advice.reasons[name] for name in suggested} <= {"cuda"}
    assert advice.plan.warmup_epochs <= advice.plan.epochs / 5


@pytest.mark.parametrize(("val", "epochs", "every"), [(5_000, 30, 1), (50_000, 30, 4), (50_000, 6, 2), (0, 30, 1)])
def test_evaluations_take_at_most_a_tenth_of_the_time(val, epochs, every):
    data = dataclasses.replace(card(50_000), splits={"train": 50_000, "val": val})
    advice = decide(with_plan(epochs=epochs, eval_every=1), data, A100)
    assert advice.plan.eval_every == every
    assert "a third of training's, rule of thumb (ours)" in advice.reasons.get("eval_every", "") or every == 1
    assert decide(with_plan(epochs=epochs, eval_every=1, eval_samples=5_000), data, A100).plan.eval_every == 1


SECONDS = 6.0  # on a job's own clock
PACK = partial(toy.make_pack, count=600)


def measured(job: Job, pack, seconds: float | None = SECONDS) -> Any:
    with job.times():
        return nb.advise(job, pack, seconds=seconds)


# seconds per batch of 16; per epoch 0.4, 16, 2
@pytest.mark.parametrize(("scoring", "samples", "every"), [(0.05, None, 1), (2.0, None, 8), (2.0, 16, 1)])
def test_evaluations_are_as_rare_as_the_measured_time_of_one_says(tmp_path, scoring, samples, every):
    job = Job(a_sample=0.05, scoring=scoring)
    vars(job)["PLAN"] = job.PLAN.replace(epochs=30, eval_samples=samples)
    advice = measured(job, toy.make_pack(tmp_path, count=600), seconds=60.0)
    assert advice.plan.eval_every == every
    assert advice.reasons["eval_every"].endswith(" % of an epoch's time: measured here")


def test_what_was_measured_has_its_evidence_is_kept_next_to_the_pack_and_comes_back_for_that_pack_only(pack, tmp_path):
    job = Job(fixed=0.1, a_sample=0.01, amp={"bf16": 2.0})
    advice = measured(job, pack)
    assert "measured here: " in advice.reasons["batch_size"]
    assert "rule of thumb" in advice.reasons["lr"]
    assert advice.verdict.sentence in repr(advice)
    seconds = advice.plan.epochs * advice.samples / advice.verdict.timing.samples_per_s
    assert f" of warmup · about {timing(seconds)} at the measured speed, " in str(advice)
    assert not any("advice" in path.name for path in pack.folder.iterdir())
    before = job.now
    for again in (nb.advise(job, pack), nb.advise(job, pack, measure=False)):
        assert json.dumps(again.to_dict()) == json.dumps(advice.to_dict())
        assert again.plan == advice.plan
    assert job.now == before, "it measured"
    measured(job, pack, SECONDS + 1)
    assert job.now > before, "with more time than before"
    assert nb.advise(job, toy.make_pack(tmp_path, count=60), measure=False).verdict is None


def test_rules_alone_when_nothing_was_measured_before(tmp_path):
    advice = nb.advise(toy, toy.make_pack(tmp_path, count=60), measure=False)
    assert (advice.baseline, advice.verdict) == (toy.BASELINE, None)
    for text in ("not measured on this machine yet", f"{advice.samples} samples · ", "time not measured yet."):
        assert text in repr(advice)
        assert text in advice._repr_html_()
    assert {advice.reasons[name] for name in ("channels_last", "compile", "graph")} == {"the task's own"}
    before, folded = advice._repr_html_().split("<details>")
    assert all(f">{name}<" in before for name in ("batch_size", "lr", "amp"))
    assert all(f">{name}<" in folded for name in set(advice.reasons) - {"epochs", "batch_size", "lr", "amp"})


NOISE = itertools.cycle([1.0, 1.1, 1.2, 1.05, 1.15])
LOSSES = {  # factor or function of the loss in one precision; bf16 is faster → what is advised, and why
    ("bf16", 1.0): ("bf16", "bf16 2.50×"),
    ("bf16", 1.5): ("off", "bf16 is faster, but its loss differs by 50.0 %"),
    ("bf16", math.nan): ("off", "bf16 fails (the loss became nan)"),
    ("off", math.nan): ("bf16", "per step: float32 fails (the loss became nan); used from"),
    ("bf16", None): ("off", "bf16 fails ("),  # where the rules take it, as on a GPU, which has no such operation
    ("bf16", lambda total: 2 * total.detach() - total): ("off", "its gradient's cosine to the plan's is -"),
    ("off", lambda total: total * next(NOISE)): ("bf16", "bf16 2.50×"),  # a float32 that is as far from itself
}


@pytest.mark.parametrize("factor", LOSSES)
def test_the_precision_that_was_measured_faster_and_learns_the_same_is_advised(tmp_path, factor, monkeypatch):
    monkeypatch.setattr(torch.Tensor, "double", None)  # which Apple's GPU does not have
    if factor[1] is None:
        monkeypatch.setattr("nbtools.measure.advice.precision", lambda machine: ("bf16", "as on a GPU"))
    advice = measured(Job(amp={"bf16": 0.4}, losses=dict([factor])), toy.make_pack(tmp_path, count=400))
    assert advice.plan.amp == LOSSES[factor][0]
    assert LOSSES[factor][1] in advice.reasons["amp"]


SPEED = ("amp", "channels_last", "batch_size", "graph")


class Turned(Job):
    """A job at a batch of its own, with a layer that convolves, for which layouts are tried."""

    own = True

    def suggest(self, card, accelerator):
        return {"batch_size": (16, "as it is")} if self.own else {}

    def model(self, card, plan):
        network = toy.model(card, plan)
        network.add_module("unused", nn.Conv2d(1, 1, 1))
        return network


H200 = {("off", False): 18.6, ("bf16", False): 20.1, ("off", True): 13.8, ("bf16", True): 9.0}
"""(amp, channels_last) → ms that the H200 works for a step of 256 captchas: 13.7, 12.7, 18.5 and 28.4 thousand/s."""


@pytest.mark.parametrize("own", [True, False])
def test_precision_and_layout_are_chosen_together_and_never_a_batch_over_the_tasks_own(tmp_path, monkeypatch, own):
    """Where either alone gains nothing, and launching a step takes longer than the device works for it in any."""
    job = Turned(fixed=0.03)
    job.own = own
    monkeypatch.setattr(
        "nbtools.measure.advisor.Stepper.device_s",
        lambda self: H200[self.plan.amp, self.plan.channels_last] / 1e3 * self.plan.batch_size / 256,
    )
    advice = measured(job, toy.make_pack(tmp_path, count=600), seconds=12.0)
    assert (advice.plan.amp, advice.plan.channels_last) == ("bf16", True)
    size, why = advice.plan.batch_size, advice.reasons["batch_size"]
    assert (size, why) == (16, "as it is") if own else (size > 16 and "measured here" in why), "of equally long steps"
    assert "bf16, channels_last 2.07×" in advice.reasons["amp"]
    assert advice.reasons["channels_last"] == "measured here, with amp", "the long text stands once"
    assert "bf16 0.93×" in advice.reasons["amp"]


@pytest.mark.parametrize(("reduced", "amps"), [("bf16", ("off", "bf16", "fp16")), ("fp16", ("off", "fp16"))])
def test_a_gpu_tries_each_of_its_precisions_in_both_layouts(reduced, amps, monkeypatch):
    monkeypatch.setattr(devices, "reduced_precision", lambda device: reduced)
    plan = toy.PLAN.replace(amp=reduced)
    search: Any = SimpleNamespace(plan=plan, device=torch.device("cuda"), fixed={}, convolves=True)
    plans = [plan.replace(**change) for change in advisor.Search.combinations(search).values()]
    assert sorted((p.amp, p.channels_last) for p in plans) == sorted(itertools.product(amps, (False, True)))


LEVERS = [  # host's seconds of a step, the GPU's 1; samples, times as fast, precision, the GPU's → what changes
    (1.3, 2e4, 1.06, "bf16", "bf16", {"graph": True}),
    (1.1, 2e4, 5.0, "bf16", "bf16", {}),
    (1.3, 2e4, 1.04, "fp16", "bf16", {"graph": False}),
    (1.3, 2e4, 5.0, "fp16", "bf16", {"graph": True, "amp": "bf16"}),  # since no graph replays fp16
    (1.3, 2e4, 5.0, "fp16", "fp16", {"graph": True, "amp": "off"}),  # on a T4
    (0.5, 4e4, 1.3, "fp16", "bf16", {"compile": True}),
    (0.5, 2e4, 1.3, "bf16", "bf16", {}),  # 21 minutes
    (0.5, 4e4, 1.3, "bf16", "ragged", {"compile": True}),  # of 16 lengths, which this task cannot pad
    (0.5, 4e4, 1.3, "bf16", "padded", {"compile": True, "bucket": 3}),  # 7 of up to 19
]


@pytest.mark.parametrize("row", LEVERS)
def test_launching_asks_for_graphs_and_computing_for_the_compiler_if_training_is_long(row, pack, tmp_path, monkeypatch):
    host, samples, ratio, amp, reduced, used = row
    plan, device, ragged = toy.PLAN.replace(amp=amp), torch.device("cuda"), reduced in ("padded", "ragged")
    if ragged:
        padded = importlib.import_module("nbtools.tasks.hwdb").Plan(amp=amp)
        plan = (padded if reduced == "padded" else plan).replace(batch_size=4)
        pack = toy.make_pack(tmp_path, ragged=True)
    taken, trial = dict[str, Any](), (ratio,) * 4
    run = SimpleNamespace(pack=pack, plan=plan, device=device, device_s=lambda: 1.0)
    run.advance = lambda steps: SimpleNamespace(host_s=host)
    search: Any = SimpleNamespace(plan=plan, device=device, samples=samples, compiles=True, take=taken.update)
    search.part_of = lambda plan, step_s: plan
    vars(search).update(task=toy, pack=pack, seconds=10.0, start=[0.0])
    monkeypatch.setattr(devices, "reduced_precision", lambda device: reduced)
    monkeypatch.setattr(advisor, "Stepper", lambda *of: SimpleNamespace(warm_up=lambda: run))
    monkeypatch.setattr(advisor, "beside", lambda run, other, seconds: Trial(other.changes_from(plan), trial))
    for search.fixed, expected in (({}, used), (used, {})):
        taken.clear()
        advisor.Search.choose_graph_or_compiler(search)
        assert {name: value for name, (value, _) in taken.items()} == expected
        assert all(f"{name} = " in why for name in expected for _, why in taken.values())


class Noisy(nn.Linear):
    def forward(self, batch):
        return super().forward(nn.functional.dropout(batch["x"], 0.5, self.training))


def test_other_arithmetic_is_compared_under_the_same_random_numbers(pack):
    """Those of a function too, which has no layer that could be switched off."""
    task = toy.with_(model=lambda card, plan: Noisy(8, toy.CLASSES))
    assert objection(task, pack, toy.PLAN, {"deterministic": True}, Deadline(60.0), 1e-3) == ""


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
    assert advice.lr_trial.seconds <= 1.1 * 15
    assert 6 <= job.now - advice.lr_trial.seconds <= most


def test_a_busy_machine_makes_the_same_plan_in_time(tmp_path, monkeypatch):
    """Other programs take three quarters of the processor, and turns by the wall would deceive."""
    job, threads, used = Turned(fixed=0.1, amp={"bf16": 0.4}), [2], list[int]()
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    monkeypatch.setattr(advisor, "verdict_of", lambda *of: used.append(threads[-1]) or profile.verdict_of(*of))
    advices = [measured(job, toy.make_pack(tmp_path / "idle", count=600), None)]
    monkeypatch.setattr("os.getloadavg", lambda: 3 * (99.0,))
    monkeypatch.setattr("nbtools.measure.advisor.process_time", job.clock)
    monkeypatch.setattr("nbtools.measure.timing.perf_counter", lambda: 4 * job.now)
    start = job.now
    advices.append(nb.advise(job, toy.make_pack(tmp_path / "busy", count=600)))
    assert 4 * (job.now - start) - advices[1].lr_trial.seconds <= 66
    assert [[getattr(each.plan, name) for name in SPEED] for each in advices] == 2 * [["bf16", False, 16, False]]
    assert ["was busy with other work" in each.note for each in advices] == [False, True]
    assert (used, threads[-1]) == ([2, 1], 2)


CONTENDED = f"""import os, torch
from nbtools.measure import advisor
os.getloadavg = lambda: (0.0,) * 3
torch.set_num_threads({max(cores(), 2)})  # in this process: what uses threads cannot be forked
assert advisor.contended(torch.device("cpu"))"""


def test_a_process_for_every_two_threads_is_noticed_of_which_the_load_average_tells_nothing(monkeypatch):
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(max(cores() // 2, 1))]
    try:
        subprocess.run([sys.executable, "-c", CONTENDED], check=True)
    finally:
        any(hog.kill() for hog in hogs)
    monkeypatch.setattr("os.getloadavg", lambda: 3 * (0.0,))
    monkeypatch.setattr(advisor, "process_time", perf_counter)
    assert not advisor.contended(torch.device("cpu"))


def test_a_part_of_the_search_ends_by_the_wall_where_the_processors_clock_stands_still(monkeypatch):
    wall = itertools.count()
    monkeypatch.setattr("nbtools.measure.turns.wall", lambda: next(wall))
    with Deadline(1.0, 5.0, lambda: 0.0) as clock:
        any(clock() for _ in range(99))
    assert next(wall) == 7, "one reading begins it, and a sixth second is too late"


@pytest.mark.parametrize("slow_from", [20, 200])
def test_a_machine_that_becomes_slow_amid_anything_ends_the_search_in_time(tmp_path, slow_from):
    """From some pass on each takes ten seconds: the part that is under way ends there, and what was decided stands."""

    class Slowing(Turned):
        def loss(self, model, batch, plan):
            self.now += 10.0 if len(self.passes) > slow_from else 0.0
            return super().loss(model, batch, plan)

    job = Slowing(fixed=0.02, a_sample=0.001, amp={"bf16": 0.4})
    advice = measured(job, toy.make_pack(tmp_path, count=600), None)
    assert advice.lr_trial.seconds <= 25
    assert job.now - advice.lr_trial.seconds <= 1.2 * 12 + 2 * 11, "at most one more step, and one of what is checked"
    assert advice.plan.amp == ("off" if slow_from == 20 else "bf16")


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["captcha", "hwdb", "sign", "segment"])
def test_advice_for_each_task_is_the_same_beside_a_busy_process_and_ends_in_time(name, tmp_path):
    task: Any = importlib.import_module(f"nbtools.tasks.{name}")
    speed = []
    for code in ("pass", "while True: pass"):
        pack = task.pack(task.demo(tmp_path / "raw", 160), into=tmp_path / f"pack {len(speed)}", progress=False)
        other, start = subprocess.Popen([sys.executable, "-c", code]), perf_counter()
        try:
            advice: Any = nb.advise(task, pack)
        finally:
            other.kill()
        assert perf_counter() - start - advice.lr_trial.seconds <= 65
        speed.append([getattr(advice.plan, name) for name in SPEED])
    assert speed[0] == speed[1]


def test_precisions_are_compared_on_one_batch_where_lengths_differ(tmp_path, monkeypatch):
    """Else the narrowest comes once, and a look at it is all there is. A GPU holds the pack once for all of them."""
    step, batches, opened = Stepper.step, list[tuple[int, ...]](), list[Any]()
    monkeypatch.setattr(Stepper, "step", lambda it, raw: batches.append((*raw["id"].tolist(),)) or step(it, raw))
    monkeypatch.setattr("nbtools.measure.timing.open_feed", lambda *of: opened.append(of) or open_feed(*of))
    monkeypatch.setattr("nbtools.measure.advisor.find_batch", None)  # what comes next
    monkeypatch.setattr("nbtools.measure.advisor.objection", None)
    with pytest.raises(TypeError):
        nb.advise(toy, toy.make_pack(tmp_path, 600, ragged=True), seconds=3.0)
    assert len({*batches[2:]}) == 1 < len(batches[2:]), "after the two steps that say how long one takes"
    assert len(opened) == 2, "one for these two"
