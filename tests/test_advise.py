"""Advice: a table of machines and data sets, and a reason for everything that differs from the task's own plan."""

import dataclasses
import math
import re
from types import SimpleNamespace

import pytest
import torch
import toy

import nbtools as nb
from nbtools.data import Card
from nbtools.data.pack import Column
from nbtools.measure import advise
from nbtools.measure.advice import LEAST_STEPS, MOST_K, Machine, batch_size, decide, inspect, learning_rate, warmup
from nbtools.train import Plan, device

CAPTCHA = SimpleNamespace(
    PLAN=Plan(epochs=150, batch_size=512, lr=6e-4, warmup_epochs=5, min_lr=1e-6, clip_norm=1.0),
    BASELINE=Plan(epochs=150, batch_size=64, lr=2e-4, optimizer="adam", min_lr=1e-6, feed="workers"),
)
GIB = 2**30 / 1e9
MACHINES = {  # as torch sees them: total_memory, capability
    "T4": Machine("cuda", "Tesla T4", 14.56 * GIB, 1, 2, (7, 5)),
    "L4": Machine("cuda", "NVIDIA L4", 22.03 * GIB, 1, 12, (8, 9)),
    "A100-40": Machine("cuda", "NVIDIA A100-SXM4-40GB", 39.39 * GIB, 1, 12, (8, 0)),
    "3 × A100-40": Machine("cuda", "NVIDIA A100-SXM4-40GB", 39.39 * GIB, 3, 64, (8, 0)),
    "A100-80": Machine("cuda", "NVIDIA A100-SXM4-80GB", 79.15 * GIB, 8, 128, (8, 0)),
    "RTX 3060": Machine("cuda", "NVIDIA GeForce RTX 3060", 11.63 * GIB, 1, 8, (8, 6)),
    "GTX 1080 Ti": Machine("cuda", "NVIDIA GeForce GTX 1080 Ti", 10.91 * GIB, 1, 8, (6, 1)),
    "RTX 3090": Machine("cuda", "NVIDIA GeForce RTX 3090", 23.55 * GIB, 1, 16, (8, 6)),
    "RTX 4060": Machine("cuda", "NVIDIA GeForce RTX 4060", 7.63 * GIB, 1, 6, (8, 9)),
    "MPS": Machine("mps", "Apple GPU", cores=10),
    "CPU": Machine("cpu", "CPU", cores=2),
}


def card(train: int) -> Card:
    splits = {"train": train, "val": train // 10, "test": train // 10}
    return Card("captcha", list("ab"), {}, {"image": Column("fixed", "|u1", (60, 160))}, splits)


@pytest.mark.parametrize(
    ("name", "batch", "lr", "warmup", "amp", "workers"),
    [
        ("T4", 128, 2.83e-4, 3, "fp16", 2),
        ("L4", 256, 4e-4, 5, "bf16", 4),
        ("A100-40", 512, 5.66e-4, 10, "bf16", 4),
        ("3 × A100-40", 512, 5.66e-4, 10, "bf16", 12),
        ("A100-80", 512, 5.66e-4, 10, "bf16", 16),
        ("RTX 3060", 128, 2.83e-4, 3, "bf16", 4),
        ("GTX 1080 Ti", 64, 2e-4, 0, "off", 4),
        ("RTX 3090", 256, 4e-4, 5, "bf16", 4),
        ("RTX 4060", 64, 2e-4, 0, "bf16", 4),
        ("MPS", 64, 2e-4, 0, "off", 4),
        ("CPU", 64, 2e-4, 0, "off", 2),
    ],
)
def test_machines_get_the_guides_tiers_and_tables(name, batch, lr, warmup, amp, workers):
    plan = decide(CAPTCHA, card(50_030), MACHINES[name]).plan
    found = (plan.batch_size, plan.lr, plan.warmup_epochs, plan.amp, plan.workers)
    assert found == (batch, lr, warmup, amp, workers)


@pytest.mark.parametrize(
    ("train", "batch"),
    [(50_030, 512), (10_240, 512), (10_239, 256), (1000, 32), (100, 8), (9, 8), (5, 5), (1, 1), (0, 1)],
)
def test_a_small_data_set_caps_the_batch(train, batch):
    advice = decide(CAPTCHA, card(train), MACHINES["A100-80"])
    assert advice.plan.batch_size == batch
    assert ("capped" in advice.reasons["batch_size"]) == (batch < 512)


@pytest.mark.parametrize(
    ("optimizer", "batch", "lr"),
    [("adamw", 256, 4e-4), ("sgd", 256, 8e-4), ("adam", 4096, 8e-4), ("sgd", 4096, 3.2e-3), ("adamw", 16, 1e-4)],
)
def test_lr_follows_the_optimizers_rule_up_to_sixteen_times_the_batch(optimizer, batch, lr):
    found, reason = learning_rate(CAPTCHA.BASELINE, optimizer, batch)
    assert found == pytest.approx(lr)
    assert ("linear rule" if optimizer == "sgd" else "sqrt rule") in reason
    assert ("no more beyond 16" in reason) == (batch == 4096)


@pytest.mark.parametrize(("k", "epochs"), [(0.5, 0), (1, 0), (2, 3), (3, 5), (4, 5), (8, 10), (16, 20), (64, 20)])
def test_warmup_is_the_guides_table(k, epochs):
    assert warmup(k, 150)[0] == epochs


def test_warmup_takes_at_most_a_fifth_of_the_run_and_says_so():
    assert warmup(8, 10) == (2.0, warmup(8, 150)[1] + "; capped to a fifth of 10 epochs")


def suggesting(**suggested):
    return SimpleNamespace(
        **vars(CAPTCHA), suggest=lambda card, accelerator: {k: (v, accelerator) for k, v in suggested.items()}
    )


def test_what_the_task_suggests_stands_and_the_rest_follows_from_it():
    task = suggesting(batch_size=256, epochs=10, optimizer="sgd", clip_norm=5.0)
    advice = decide(task, card(50_030), MACHINES["A100-80"])
    assert (advice.plan.batch_size, advice.plan.epochs, advice.plan.clip_norm) == (256, 10, 5.0)
    assert advice.plan.lr == pytest.approx(8e-4)
    assert advice.plan.warmup_epochs == 2  # a fifth of the suggested epochs
    assert advice.reasons["epochs"] == "cuda"
    assert decide(suggesting(lr=3e-3), card(50_030), MACHINES["CPU"]).plan.lr == 3e-3


def test_a_least_lr_above_the_advised_lr_comes_down_with_a_reason():
    task = SimpleNamespace(PLAN=CAPTCHA.PLAN.replace(min_lr=5e-4), BASELINE=CAPTCHA.BASELINE)
    advice = decide(task, card(50_030), MACHINES["CPU"])
    assert advice.plan.min_lr == advice.plan.lr == 2e-4
    assert "above the advised lr" in advice.reasons["min_lr"]


@pytest.mark.parametrize("train", [50_030, 1000, 9])
@pytest.mark.parametrize("name", MACHINES)
def test_every_changed_field_has_a_reason_and_every_figure_its_origin(name, train):
    task = SimpleNamespace(PLAN=CAPTCHA.PLAN.replace(micro_batch_size=256, min_lr=3e-4), BASELINE=CAPTCHA.BASELINE)
    machine = MACHINES[name]
    advice = decide(task, card(train), machine)
    before = task.PLAN.to_dict()
    changed = {field for field, value in advice.plan.to_dict().items() if value != before[field]}
    assert changed <= advice.reasons.keys()
    assert {"batch_size", "lr", "warmup_epochs", "amp", "workers"} <= advice.reasons.keys()
    for field, reason in advice.reasons.items():
        assert reason.strip()
        if field in ("lr", "warmup_epochs", "workers") or "tier" in reason or "capped" in reason:
            assert re.search(r"rule of thumb \((guide \d|arXiv \d|ours)", reason), (field, reason)
    if machine.accelerator == "cuda":
        assert f"{machine.gigabytes:.0f} GB of GPU memory" in advice.reasons["batch_size"]
        assert ".".join(map(str, machine.capability or ())) in advice.reasons["amp"]


def test_advice_depends_on_nothing_but_card_and_machine():
    assert decide(CAPTCHA, card(1000), MACHINES["T4"]) == decide(CAPTCHA, card(1000), MACHINES["T4"])


def test_advice_for_a_pack_on_this_machine_shows_as_a_table(tmp_path, monkeypatch):
    monkeypatch.setenv("NBTOOLS_CACHE", str(tmp_path / "cache"))
    advice = advise(toy, toy.make_pack(tmp_path, 60), measure=False)
    assert isinstance(advice.plan, toy.Plan)
    assert advice.baseline == toy.BASELINE
    assert {"batch_size", "lr", "feed"} <= advice.reasons.keys()
    assert [row[0] for row in advice.table()[1]][: len(advice.reasons)] == list(advice.reasons)
    for shown in (str(advice), advice._repr_html_()):
        assert "batch_size" in shown
        assert "what to start from" in shown


def test_the_machine_is_read_from_the_device_that_torch_uses(monkeypatch):
    properties = SimpleNamespace(name="NVIDIA A100-SXM4-40GB", total_memory=42_298_834_944, major=8, minor=0)
    monkeypatch.setattr(device, "pick", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = inspect()
    assert found == dataclasses.replace(MACHINES["A100-40"], gigabytes=42.298834944, cores=found.cores)
    assert batch_size(card(50_030), found, 64)[0] == 512


@pytest.mark.parametrize("machine", [Machine("cpu", "CPU"), Machine("mps", "Apple GPU")])
def test_a_plan_for_cuda_graphs_is_one_that_can_run_elsewhere(machine):
    task = SimpleNamespace(PLAN=toy.PLAN.replace(graph=True), BASELINE=toy.BASELINE)
    advice = decide(task, card(1000), machine)
    assert advice.plan.graph is False
    assert "need CUDA" in advice.reasons["graph"]


@pytest.mark.parametrize(
    ("name", "train", "batch", "micro", "lr", "warmup"),
    [
        ("T4", 50_030, 1024, 128, 8e-4, 20),
        ("A100-80", 50_030, 1024, 512, 8e-4, 20),
        ("A100-80", 12_000, None, None, None, None),  # 600 is below 1024, and 512 is advised already
        ("RTX 4060", 4803, 128, 64, 2.83e-4, 3),
        ("CPU", 50_030, 1024, None, 8e-4, 20),
        ("CPU", 4803, 128, None, 2.83e-4, 3),
        ("CPU", 5, None, None, None, None),
    ],
)
def test_the_largest_batch_is_what_data_and_lr_rules_allow_in_passes_of_the_memory_tier(
    name, train, batch, micro, lr, warmup
):
    largest = decide(CAPTCHA, card(train), MACHINES[name]).largest
    if batch is None:
        assert largest is None
    else:
        assert largest is not None
        found = (largest.batch_size, largest.micro_batch_size, largest.warmup_epochs)
        assert found == (batch, micro, warmup)
        assert largest.lr == pytest.approx(lr, rel=2e-3)


@pytest.mark.parametrize("train", [50_030, 4803, 1000, 100, 9, 2, 1])
@pytest.mark.parametrize("name", MACHINES)
def test_the_largest_batch_starves_no_data_set_and_says_whose_rule_it_is(name, train):
    advice = decide(CAPTCHA, card(train), MACHINES[name])
    assert "rule of thumb" in advice.largest_reason
    if advice.largest is None:
        assert f"the advised {advice.plan.batch_size} is as large as it goes" in advice.largest_reason
    else:
        batch = advice.largest.batch_size
        assert advice.plan.batch_size < batch <= min(MOST_K * CAPTCHA.BASELINE.batch_size, train // LEAST_STEPS)
        assert batch.bit_count() == 1
        assert "nobody has measured" in advice.largest_reason
        assert re.search(r"\((guide \d|ours)", advice.largest_reason)


def test_the_largest_batch_goes_on_from_the_lr_that_the_task_measured():
    advice = decide(suggesting(batch_size=32, lr=2e-3, warmup_epochs=1.0, epochs=25), card(4803), MACHINES["CPU"])
    assert advice.largest is not None
    assert (advice.largest.batch_size, advice.largest.lr) == (128, 4e-3)
    assert advice.largest.warmup_epochs == 3
    assert "0.002 at batch 32, times 2 by the sqrt rule" in advice.largest_reason


def test_lr_is_rounded_where_it_is_read_and_exact_where_it_is_used(tmp_path):
    """lr by the square root rule has seventeen digits; nobody reads more than three of them."""
    pack = toy.make_pack(tmp_path)
    advice = nb.advise(toy, pack, measure=False)
    plan = advice.plan.replace(lr=0.002, lr_rule="sqrt", min_lr=0.0).with_batch_size(2 * advice.plan.batch_size)
    assert plan.lr == 0.002 * math.sqrt(2)
    shown = dataclasses.replace(advice, plan=plan, reasons={**advice.reasons, "lr": "as it was"})
    panel = nb.Panel(shown)
    panel.fields["epochs"].value = "7"
    assert (panel.plan.lr, panel.plan.epochs) == (plan.lr, 7)
    for text in (str(shown), shown._repr_html_(), str(panel), panel.fields["lr"].value):
        assert "0.00283" in text
        assert "0.002828" not in text


def test_a_machine_of_one_core_has_1_core(tmp_path):
    pack = toy.make_pack(tmp_path)
    shown = str(decide(toy, pack.card, Machine("cpu", "CPU", cores=1)))
    assert "CPU (1 core)" in shown
    assert "1 cores" not in shown
