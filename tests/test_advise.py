"""Advice: a table of machines and data sets, a reason for everything that differs from the task's own plan; and what
was measured, with its evidence, kept next to the pack and never measured by surprise."""

import dataclasses
import importlib
import itertools
import json
import math
import re
import xml.etree.ElementTree as ET
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import toy
from simulated import Job

import nbtools as nb
from nbtools.data import Card
from nbtools.data.pack import Column
from nbtools.live import send, surface
from nbtools.measure import Machine, decide, trials
from nbtools.measure import advisor as act
from nbtools.measure.advice import LEAST_STEPS, LINE, MOST_K, inspect, learning_rate, warmup
from nbtools.measure.batch import Row
from nbtools.table import duration
from nbtools.train import LARGER, OPTIMIZERS, Plan, as_task, device

CAPTCHA: Any = SimpleNamespace(
    PLAN=Plan(epochs=150, batch_size=512, lr=6e-4, warmup_epochs=5, min_lr=1e-6, clip_norm=1.0),
    BASELINE=Plan(epochs=150, batch_size=64, lr=2e-4, optimizer="adam", min_lr=1e-6, feed="workers"),
)
GIB = 2**30 / 1e9
GUIDED = {  # as torch sees machines: total_memory, capability → batch, lr, warmup, amp, workers
    "T4": (Machine("cuda", "Tesla T4", 14.56 * GIB, 1, 2, (7, 5)), 128, 2.83e-4, 3, "fp16", 2),
    "L4": (Machine("cuda", "NVIDIA L4", 22.03 * GIB, 1, 12, (8, 9)), 256, 4e-4, 5, "bf16", 4),
    "A100-40": (Machine("cuda", "NVIDIA A100-SXM4-40GB", 39.39 * GIB, 1, 12, (8, 0)), 512, 5.66e-4, 10, "bf16", 4),
    "3 × A100-40": (Machine("cuda", "NVIDIA A100", 39.39 * GIB, 3, 64, (8, 0)), 512, 5.66e-4, 10, "bf16", 12),
    "A100-80": (Machine("cuda", "NVIDIA A100", 79.15 * GIB, 8, 128, (8, 0)), 512, 5.66e-4, 10, "bf16", 16),
    "RTX 3060": (Machine("cuda", "RTX 3060", 11.63 * GIB, 1, 8, (8, 6)), 128, 2.83e-4, 3, "bf16", 4),
    "GTX 1080 Ti": (Machine("cuda", "GTX 1080 Ti", 10.91 * GIB, 1, 8, (6, 1)), 64, 2e-4, 0, "off", 4),
    "RTX 3090": (Machine("cuda", "RTX 3090", 23.55 * GIB, 1, 16, (8, 6)), 256, 4e-4, 5, "bf16", 4),
    "MPS": (Machine("mps", "Apple GPU", cores=10), 64, 2e-4, 0, "off", 4),
    "CPU": (Machine("cpu", "CPU", cores=2), 64, 2e-4, 0, "off", 2),
}
MACHINES = {name: row[0] for name, row in GUIDED.items()}
CARDS = {  # of data sets such as the tasks were written for, as far as plans depend on them
    "captcha": Card("captcha", [], {"layout": "fixed"}, {}, {}),
    "hwdb": Card("hwdb", [], {"height": 128}, {}, {}),
    "sign": Card("sign", [str(gloss) for gloss in range(105)], {}, {"x": Column("ragged", "float32", (156,))}, {}),
    "segment": Card("segment", [], {"size": (384, 384)}, {}, {}),
}


def card(train: int) -> Card:
    splits = {"train": train, "val": train // 10, "test": train // 10}
    return Card("captcha", list("ab"), {}, {"image": Column("fixed", "|u1", (60, 160))}, splits)


def with_plan(**changes) -> Any:
    return SimpleNamespace(PLAN=CAPTCHA.PLAN.replace(**changes), BASELINE=CAPTCHA.BASELINE)


@pytest.mark.parametrize("name", GUIDED)
def test_machines_get_the_guides_tiers_and_tables(name):
    plan = decide(CAPTCHA, card(50_030), MACHINES[name]).plan
    assert (plan.batch_size, plan.lr, plan.warmup_epochs, plan.amp, plan.workers) == GUIDED[name][1:]


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
    assert ("no increase beyond 16" in reason) == (batch == 4096)


def test_the_row_of_an_optimizer_says_how_lr_follows_the_batch(monkeypatch):
    new = dataclasses.replace(OPTIMIZERS["sgd"], lr_rule=("none", "ours"))
    monkeypatch.setitem(OPTIMIZERS, "new", new)
    assert learning_rate(CAPTCHA.BASELINE, "new", 256)[0] == CAPTCHA.BASELINE.lr


@pytest.mark.parametrize(("k", "epochs"), [(0.5, 0), (1, 0), (2, 3), (3, 5), (4, 5), (8, 10), (16, 20), (64, 20)])
def test_warmup_is_the_guides_table_and_at_most_a_fifth_of_the_run(k, epochs):
    assert warmup(k, 150)[0] == epochs
    assert warmup(k, 10)[0] == min(epochs, 2.0)
    assert ("capped to a fifth of 10 epochs" in warmup(k, 10)[1]) == (epochs > 2)


def test_adamws_rule_lies_within_the_guides_table_but_for_a_doubled_batch():
    base = Plan(batch_size=64, lr=1e-3)
    for k, (low, high), _ in LARGER:
        factor = learning_rate(base, "adamw", 64 * k)[0] / base.lr
        assert low <= round(factor, 2) <= high or (k, round(factor, 2)) == (2, 1.41)


def suggesting(**suggested) -> Any:
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
    largest = decide(suggesting(batch_size=32, lr=2e-3, epochs=25), card(4803), MACHINES["CPU"]).largest
    assert largest is not None
    assert (largest.batch_size, largest.lr, largest.warmup_epochs) == (128, 4e-3, 3)


def test_settings_that_cannot_stand_change_with_a_reason():
    advice = decide(with_plan(min_lr=5e-4, graph=True), card(50_030), MACHINES["CPU"])
    assert (advice.plan.min_lr, advice.plan.lr, advice.plan.graph) == (2e-4, 2e-4, False)
    assert "above the advised lr" in advice.reasons["min_lr"]
    assert "need CUDA" in advice.reasons["graph"]
    advice = decide(with_plan(graph=True, amp="fp16"), card(50_030), MACHINES["T4"])
    assert (advice.plan.amp, advice.plan.graph) == ("fp16", False)
    assert "fp16" in advice.reasons["graph"]


@pytest.mark.parametrize("train", [50_030, 4803, 100, 9, 1])
@pytest.mark.parametrize("name", MACHINES)
def test_every_changed_field_has_a_reason_and_every_figure_its_origin(name, train):
    task, machine = with_plan(micro_batch_size=256, min_lr=3e-4), MACHINES[name]
    advice = decide(task, card(train), machine)
    before = task.PLAN.to_dict()
    changed = {field for field, value in advice.plan.to_dict().items() if value != before[field]}
    assert changed | {"batch_size", "lr", "warmup_epochs", "amp", "workers"} <= advice.reasons.keys()
    for field, reason in advice.reasons.items():
        assert reason.strip()
        if field in ("lr", "warmup_epochs", "workers") or "tier" in reason or "capped" in reason:
            assert re.search(r"rule of thumb \((captcha guide|guide to large batches|arXiv \d|ours)", reason), (
                field,
                reason,
            )
    if machine.accelerator == "cuda":
        assert f"{machine.gigabytes:.0f} GB of GPU memory" in advice.reasons["batch_size"]
        assert ".".join(map(str, machine.capability or ())) in advice.reasons["amp"]
    assert "rule of thumb" in advice.largest_reason
    if advice.largest is None:
        assert f"the advised {advice.plan.batch_size} is the largest allowed" in advice.largest_reason
    else:
        batch = advice.largest.batch_size
        assert advice.plan.batch_size < batch <= min(MOST_K * CAPTCHA.BASELINE.batch_size, train // LEAST_STEPS)
        assert "has not been measured yet" in advice.largest_reason


@pytest.mark.parametrize("name", CARDS)
def test_no_reason_of_the_rules_is_cut_in_the_table(name):
    """`clause` would cut what has no room in the middle of a sentence."""
    task: Any = importlib.import_module(f"nbtools.tasks.{name}")
    for machine, train in itertools.product(MACHINES.values(), (300, 30_000)):
        shown = decide(task, dataclasses.replace(CARDS[name], splits={"train": train}), machine).table()[1]
        assert [cell.text for *_, cell in shown if cell.text.endswith("…")] == []


@pytest.mark.parametrize(
    ("name", "train", "expected"),
    [
        ("T4", 50_030, (1024, 128, 8e-4, 20)),
        ("A100-80", 50_030, (1024, 512, 8e-4, 20)),
        ("A100-80", 12_000, None),  # 600 is below 1024, and 512 is advised already
        ("GTX 1080 Ti", 4803, (128, 64, 2.83e-4, 3)),
        ("CPU", 4803, (128, None, 2.83e-4, 3)),
    ],
)
def test_the_largest_batch_is_what_data_and_lr_rules_allow_in_passes_of_the_memory_tier(name, train, expected):
    largest = decide(CAPTCHA, card(train), MACHINES[name]).largest
    found = largest and (largest.batch_size, largest.micro_batch_size, largest.lr, largest.warmup_epochs)
    assert found == expected


def test_the_machine_is_read_from_the_device_that_torch_uses(monkeypatch):
    properties = SimpleNamespace(name="NVIDIA A100-SXM4-40GB", total_memory=42_298_834_944, major=8, minor=0)
    monkeypatch.setattr(device, "pick", lambda: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: properties)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    found = inspect()
    assert found == dataclasses.replace(MACHINES["A100-40"], gigabytes=42.298834944, cores=found.cores)


def test_lr_is_rounded_where_it_is_read_and_exact_where_it_is_used(tmp_path):
    """lr by the square root rule has seventeen digits; nobody reads more than three of them."""
    advice = nb.advise(toy, toy.make_pack(tmp_path), measure=False)
    plan = advice.plan.replace(lr=0.002 * math.sqrt(2), min_lr=0.0)
    shown = dataclasses.replace(advice, plan=plan, reasons={**advice.reasons, "lr": "as it was"})
    panel = nb.Panel(shown)
    panel.fields["epochs"].value = "7"
    assert (panel.plan.lr, panel.plan.epochs) == (plan.lr, 7)
    for text in (str(shown), shown._repr_html_(), str(panel), panel.fields["lr"].value):
        assert "0.00283" in text
        assert "0.002828" not in text


SECONDS = 6.0  # on a job's own clock


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return toy.make_pack(tmp_path_factory.mktemp("toy"), count=600)


def measured(job: Job, pack, **more) -> nb.Advice:
    """Advice that was measured on the job's own clock."""
    return nb.advise(job, pack, seconds=SECONDS, clock=job.clock, **more)


@pytest.fixture(scope="module")
def job():
    return Job(fixed=0.1, a_sample=0.01, amp={"bf16": 2.0})


@pytest.fixture(scope="module")
def advice(pack, job):
    return measured(job, pack)


def own(**changes) -> Any:
    """A task like toy, but for some of its names."""
    names = {name: value for name, value in vars(toy).items() if not name.startswith("__")}
    return type("Own", (), {**names, **changes})


@pytest.fixture
def no_measuring(monkeypatch):
    def surprise(*_args, **_more):
        raise AssertionError("it measured")

    for name in ("find_batch", "Levers", "find_workers"):
        monkeypatch.setattr(act, name, surprise)


def test_each_measured_number_has_its_evidence_and_the_rest_its_rule(advice):
    assert re.match(r"\d+ is (the fastest|nearly as fast as the fastest \()", advice.evidence["batch_size"])
    assert "rule of thumb" in advice.reasons["lr"]
    assert advice.verdict.sentence in str(advice)
    seconds = advice.plan.epochs * advice.profile.epoch_s
    assert f" of warmup · about {duration(seconds)} at the measured speed, " in str(advice)
    headers, rows = advice.in_full()
    assert headers == ("setting", "value", "reason", "measured here")
    for name, value, reason, measured_here in rows[: len(advice.reasons)]:
        assert (value, reason) == (getattr(advice.plan, name), advice.reasons[name])
        assert measured_here == advice.evidence.get(name, "")
        assert measured_here in advice.text(whole=True).replace("\n", " ") or len(measured_here) > 40, "not wrapped"


def test_in_a_notebook_a_setting_is_one_line_and_a_click_shows_its_reason_and_evidence_in_full(advice):
    long = f"{'as was measured ' * 9}; <b>"
    shown = dataclasses.replace(advice, reasons={**advice.reasons, "clip_norm": long, "epochs": "a rule"})
    tree = ET.fromstring(f"<div>{shown._repr_html_()}</div>")
    settings = tree.find("table/tbody")
    assert settings is not None
    rows = {row[0].text: row[2] for row in settings}
    assert list(rows) == list(shown.reasons)
    assert rows["epochs"].text == "a rule", "nothing to unfold"
    summary, rest = rows["clip_norm"][0]
    assert summary.text is not None
    assert summary.text.endswith(" …")
    assert len(summary.text) <= LINE
    assert rest.text == long
    assert f"Measured here: {advice.evidence['batch_size']}" in "".join(rows["batch_size"].itertext())
    assert [th.text for th in tree.findall("table/thead/tr/th")] == ["setting", "value", "why"]


def test_what_was_found_is_kept_next_to_the_pack_and_comes_back_the_same(advice, pack, job, no_measuring):
    assert act.shelf(pack).parent == pack.folder.parent
    assert not any("advice" in path.name for path in pack.folder.iterdir())
    for again in (nb.advise(job, pack), nb.advise(job, pack, measure=False)):
        assert json.dumps(again.to_dict()) == json.dumps(advice.to_dict())
        assert again.plan == advice.plan


def test_another_machine_pack_or_task_is_measured_anew(pack, monkeypatch):
    thumb = nb.advise(toy, pack, measure=False)
    another = dataclasses.replace(pack, card=dataclasses.replace(pack.card, digest="x"))
    labels = [act.label(as_task(task), on, thumb, False) for task, on in ((toy, pack), (own(), pack), (toy, another))]
    monkeypatch.setattr(act, "machine", lambda: {"device": "another"})
    assert len({*labels, act.label(as_task(toy), pack, thumb, False)}) == 4


def test_rules_alone_when_nothing_was_measured_before(tmp_path, no_measuring):
    advice = nb.advise(toy, toy.make_pack(tmp_path, count=60), measure=False)
    assert isinstance(advice.plan, toy.Plan)
    assert (advice.baseline, advice.evidence) == (toy.BASELINE, {})
    headers, rows = advice.table()
    assert headers == ("setting", "value", "why")
    assert [row[0] for row in rows] == list(advice.reasons)
    assert advice.in_full()[0] == ("setting", "value", "reason"), "no column of nothing"
    for shown in (str(advice), advice._repr_html_()):
        assert "nothing here has been measured" in shown
        assert f"{advice.samples} samples · " in shown
        assert "of warmup · time not measured yet." in shown


@pytest.fixture
def at_once(monkeypatch):
    """Measuring that takes no time."""
    monkeypatch.setattr(act, "measured", lambda task, pack, thumb, *_: dataclasses.replace(thumb, evidence={"lr": "x"}))


def test_training_without_a_plan_measures_it_and_a_resumed_run_does_not(tmp_path, monkeypatch):
    pack, task, calls = toy.make_pack(tmp_path, count=60), own(PLAN=toy.PLAN.replace(epochs=1)), []

    def measured(task, pack, thumb, *_):
        calls.append(thumb)
        return dataclasses.replace(thumb, plan=thumb.plan.replace(lr=0.0123))

    monkeypatch.setattr(act, "measured", measured)
    for _ in range(2):
        run = nb.fit(task, pack, run=tmp_path / "run", receipt=False, progress=False)
        assert run.plan.lr == 0.0123
        (tmp_path / "pack.advice.json").unlink()
        (tmp_path / "pack.advice.json").touch()
    assert len(run.history.of("epoch")) == 1
    assert len(calls) == 1


@pytest.mark.usefixtures("at_once")
def test_advice_of_an_older_version_is_measured_again(tmp_path, monkeypatch):
    pack = toy.make_pack(tmp_path, count=60)
    act.shelf(pack).write_text("{")
    nb.advise(toy, pack)
    assert nb.advise(toy, pack, measure=False).evidence
    monkeypatch.setattr(act, "VERSION", act.VERSION + 1)
    assert nb.advise(toy, pack, measure=False).evidence == {}


@pytest.mark.usefixtures("at_once")
def test_where_nothing_can_be_kept_the_advice_says_so(tmp_path):
    pack = toy.make_pack(tmp_path, count=60)
    act.shelf(pack).mkdir()
    assert "Not saved for the next time" in nb.advise(toy, pack).note


def test_the_tasks_own_batch_size_is_not_overruled_by_speed(pack):
    class Own(Job):
        def suggest(self, card, accelerator):
            return {"batch_size": (12, "learns best so")}

    advice = measured(Own(fixed=0.1, a_sample=0.0001), pack)
    assert (advice.plan.batch_size, advice.reasons["batch_size"]) == (12, "learns best so")
    assert advice.batches is None, "on a CPU, whose memory is large, there is nothing to search"


@pytest.mark.parametrize(
    ("parts", "amp", "why"),
    [
        ({"amp": {"bf16": 0.4}}, "bf16", "bf16 2.50× as fast as float32"),
        ({"amp": {"bf16": 0.98}}, "off", "it is used only where reliably 5 % faster"),
        ({"amp": {"bf16": 0.4}, "loss_in_bf16": 1.5}, "off", "its loss differs by 50 %"),
        ({"amp": {"bf16": 0.4}, "loss_in_bf16": math.nan}, "off", "bf16, it fails (the loss became nan"),
    ],
)
def test_the_precision_that_was_measured_faster_and_learns_the_same_is_advised(tmp_path, parts, amp, why):
    """And the batch is searched in it: of passes of 2 samples, with which a search begins, none is in the other."""
    pack, job = toy.make_pack(tmp_path, count=400), Job(**parts)
    advice = measured(job, pack)
    assert advice.plan.amp == amp
    assert why in advice.evidence["amp"]
    assert {name for name, size in job.passes if size == 2} == {amp}


def test_a_model_that_cannot_be_trained_in_bf16_is_advised_in_float32_and_says_why(tmp_path):
    class WithoutBf16(Job):
        def loss(self, model, batch, plan):
            if plan.amp == "bf16":
                raise RuntimeError("\"ctc_loss\" not implemented for 'BFloat16'")
            return super().loss(model, batch, plan)

    advice = measured(WithoutBf16(), toy.make_pack(tmp_path, count=200))
    assert advice.plan.amp == "off"
    assert "fails (\"ctc_loss\" not implemented for 'BFloat16')" in advice.evidence["amp"]


def test_a_search_that_a_busy_machine_cut_short_does_not_shrink_the_batch(advice):
    plan = toy.PLAN.replace(batch_size=64)

    def conclusive(*rows: Row, complete: bool = False) -> bool:
        return act.conclusive(dataclasses.replace(advice.batches, complete=complete, rows=rows), plan)

    small = Row(2, rates=[10.0])
    assert not conclusive(small, Row(64))  # not timed
    assert conclusive(small, Row(64, rates=[90.0]))
    assert conclusive(small, complete=True)


def test_a_run_asked_what_limits_it_answers_and_goes_on_bit_equal(pack, tmp_path, monkeypatch):
    folder, steps = tmp_path / "run", []

    def batch(raw, plan, draws):
        steps.append(1) if draws is not None else None
        if len(steps) == 5:
            send(folder, ["profile"])
        return toy.batch(raw, plan, draws)

    monkeypatch.setattr(surface, "LOOK_EVERY", 0.0)
    monkeypatch.setattr(trials, "SECONDS", 0.1)
    plan = toy.PLAN.replace(epochs=2)
    undisturbed = nb.fit(toy, pack, plan, tmp_path / "undisturbed", receipt=False, progress=False)
    run = nb.fit(own(batch=batch), pack, plan, folder, receipt=False, progress=False)
    assert run.verdict is not None
    assert run.profile is not None
    assert run.verdict.sentence in run.events
    assert [row["loss"] for row in run.history.of("step")] == [row["loss"] for row in undisturbed.history.of("step")]


def other_batches(advice, *rows: tuple[int, bool]):
    """Those of an advised batch of 16 and a largest of 64, where (batch size, whether it fits) was measured."""
    plan = advice.plan.replace(batch_size=16, lr=1e-3, micro_batch_size=None, optimizer="adamw")
    tried = tuple(Row(size, rates=[100.0] if fits else [], reason="" if fits else "too large") for size, fits in rows)
    batches = dataclasses.replace(advice.batches, batch_size=16, rows=tried)
    return dataclasses.replace(advice, plan=plan, largest=plan.replace(batch_size=64, lr=2e-3), batches=batches)


@pytest.mark.parametrize(
    ("rows", "micro", "why"),
    [
        (((16, True), (32, True), (64, True)), None, "by the sqrt rule, rule of thumb (arXiv 2205.10287)"),
        (((16, True), (32, True), (64, False)), 32, "; in 2 passes: 64 does not fit at once"),
        (((16, True), (32, True)), 32, "; in 2 passes: more than 32 at once was not tried"),
    ],
    ids=["timed", "too large", "not tried"],
)
def test_the_advice_shows_other_batches_with_their_lr_and_passes_from_the_largest_down(advice, rows, micro, why):
    shown = other_batches(advice, *rows)
    plans, reasons = zip(*shown.other_batches(), strict=True)
    assert [plan.batch_size for plan in plans] == [64, 12, 8, 4]
    assert [plan.micro_batch_size for plan in plans] == [micro, None, None, None]
    assert plans[0].lr == pytest.approx(2e-3)
    assert plans[2].lr == pytest.approx(1e-3 / 2**0.5, rel=1e-3)
    assert reasons[0].endswith(why)
    assert "or batch 64" in shown.text(whole=True)
    assert "Other batch sizes: 64, 12, 8, 4" in str(shown)
    assert "0.000707<" in shown._repr_html_()


def test_what_is_gone_names_what_to_use_instead(advice, pack):
    with pytest.raises(nb.NbtoolsError, match=r"no longer takes noise.*turn\(batch_size"):
        nb.advise(toy, pack, noise=True)
    with pytest.raises(AttributeError, match="other_batches"):
        assert advice.ladder
