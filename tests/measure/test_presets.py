"""Presets: the guides' optimised settings as they are on this machine, in panel, terminal and receipt."""

import dataclasses
import json
from typing import Any

import pytest
import toy
from simulated import Job

import nbtools as nb
from nbtools.data import Card, Column, cores
from nbtools.errors import PlanError
from nbtools.measure import Receipt, preset, receipt
from nbtools.tasks import captcha, hwdb, segment, sign
from nbtools.train import Plan

TASKS: dict[str, Any] = {"captcha": captcha, "hwdb": hwdb, "segment": segment, "sign": sign}
GUIDES = {  # as the guides write them
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


def clips(*columns: str) -> Card:
    shapes = {"x": Column("ragged", "<f4", (156,)), "features": Column("ragged", "<f4", (2048,))}
    return Card("sign", list("ab"), {}, {name: shapes[name] for name in columns}, {"train": 9})


def test_the_presets_are_the_guides_optimised_settings_read_as_the_guides_do():
    for name, settings in GUIDES.items():
        task, _, named = name.partition(" ")
        made = TASKS[task].PRESETS[named]
        plan: Any = made(clips("x", "features")) if callable(made) else made
        assert isinstance(plan, type(TASKS[task].PLAN))
        expected = dict(pair.split("=") for pair in settings.split())
        assert {n: getattr(plan, n) for n in expected} == {n: plan.parse(n, text) for n, text in expected.items()}
        assert plan.feed == "workers"


def test_every_preset_is_in_the_table_and_the_first_is_the_guides_main_one():
    assert {f"{name} {each}" for name, task in TASKS.items() for each in task.PRESETS} == GUIDES.keys()
    assert {next(iter(task.PRESETS)) for task in TASKS.values()} == {"guide"}


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return toy.make_pack(tmp_path_factory.mktemp("toy"), count=184)


def no_features(card: Card) -> Plan:
    raise PlanError("the network reads features, and this data has none")


GUIDE = toy.BASELINE.replace(
    batch_size=10_000, micro_batch_size=5000, lr=0.1, amp="fp16", workers=100, dropout=0.0, noise=0.0
)
PRESETS = {"guide": GUIDE, "guide-as-it-is": toy.BASELINE.replace(epochs=2), "guide-features": no_features}


def guided(**presets: Any) -> Any:
    return toy.with_(PRESETS=presets or PRESETS)


def test_a_preset_leaves_to_machine_and_data_what_it_must_and_says_so(pack):
    plan, why = preset(guided(), pack, "guide")
    train = pack.splits["train"]
    assert plan is not None
    assert (plan.batch_size, plan.micro_batch_size, plan.amp, plan.workers) == (train, train, "off", cores())
    assert (plan.lr, plan.feed) == (0.1, "workers")
    assert f"batch_size 10000 → {train} (the whole train split)" in why
    assert "amp fp16 → off (fp16 needs a GPU)" in why
    assert f"workers 100 → {cores()} (this machine has {cores()} core" in why
    assert preset(guided(), pack, "guide-as-it-is") == (PRESETS["guide-as-it-is"], "")
    gone, why = preset(guided(), dataclasses.replace(pack, raw=None), "guide-as-it-is")
    assert gone is not None
    assert (gone.feed, why) == ("auto", "feed workers → auto (the source files are gone)")


def test_a_preset_that_cannot_train_here_says_why(pack):
    assert preset(guided(), pack, "guide-features") == (None, "the network reads features, and this data has none")
    assert preset(sign, dataclasses.replace(pack, card=clips("x")), "guide-low-memory")[0] is None


# -- the panel


def test_the_panel_offers_the_presets_between_before_and_advice(pack):
    panel = nb.Panel(nb.advise(guided(), pack, measure=False))
    assert list(panel.presets)[:4] == [
        "as advised",
        "the guide's before",
        "the guide's optimised",
        "the guide's as it is",
    ]
    here, _ = preset(guided(), pack, "guide")
    panel.form.menu.value = "the guide's optimised"
    assert panel.plan == here
    assert "the guide's features" not in panel.presets, "the network reads features, and this data has none"


# -- the receipt


def measured(job: Job, pack: nb.Pack, *presets: Any, seconds: float = 1.0) -> Receipt:
    if presets:
        job.PRESETS = dict(zip(("guide", "guide-large"), presets, strict=False))  # pyright: ignore
    with job.times():
        return receipt(job, job.pack(pack), toy.PLAN.replace(hidden=24), seconds)


def job(**more: Any) -> Job:
    return Job(**{"reading": 0.001, "fixed": 0.1, "a_sample": 0.001, **more})


LARGE = toy.BASELINE.replace(batch_size=64, amp="fp16")


def test_a_receipt_measures_the_guides_settings_next_to_its_before(pack):
    found = measured(job(), pack, LARGE, toy.PLAN)
    small, large = (0.1 / batch + 0.001 + 0.001 for batch in (16, 64))
    assert found.guide is not None
    assert found.guide.total == pytest.approx(small / large, rel=0.1)  # 128 to train on, or nearly
    assert found.guide.timing.turns == found.after.turns
    assert found.guide.timing.plan["hidden"] == 24, "the run's own network"
    assert [rung.name for rung in found.rungs] == ["baseline", "+ packed feed", "+ other settings"]
    assert found.rungs[-1].total == found.ratio, "the guide's settings are no rung"
    _, rows = found.table()
    assert [row[0] for row in rows] == ["baseline", "guide's optimised", "+ packed feed", "+ other settings"]
    assert rows[1][2:4] == (None, found.guide.over_baseline)
    assert "batch_size 16 → 64" in rows[1][5]
    again = Receipt.from_dict(json.loads(found.to_json()))
    assert again.to_json() == found.to_json()


@pytest.mark.parametrize(
    ("settings", "more", "note"),
    [
        (LARGE, {"fixed": 10.0}, "were not measured: their turns would take about "),
        (LARGE, {"most": 32}, "Memory ran out with the guide's optimised settings: measured in passes of 32 samples"),
    ],
)
def test_a_note_tells_where_the_guides_settings_could_not_be_measured_as_they_are(pack, settings, more, note):
    found = measured(job(**more), pack, settings)
    assert note in " ".join(found.notes)
    assert (found.guide is None) == ("passes" not in note)
    assert found.rungs[-1].total == found.ratio
