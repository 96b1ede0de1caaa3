"""Presets: the guides' optimised settings as they are on this machine, in panel, terminal and receipt."""

import dataclasses
from typing import Any

import toy

import nbtools as nb
from nbtools.data import Card, Column, cores
from nbtools.measure import preset
from nbtools.tasks import captcha, hwdb, segment, sign

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


COLUMNS = {"x": Column("ragged", "<f4", (156,)), "features": Column("ragged", "<f4", (2048,))}
CLIPS = Card("sign", list("ab"), {}, COLUMNS, {"train": 9})


def test_the_presets_are_the_guides_optimised_settings_read_as_the_guides_do():
    for name, settings in GUIDES.items():
        task, _, named = name.partition(" ")
        made = TASKS[task].PRESETS[named]
        plan: Any = made(CLIPS) if callable(made) else made
        assert isinstance(plan, type(TASKS[task].PLAN))
        expected = dict(pair.split("=") for pair in settings.split())
        assert {n: getattr(plan, n) for n in expected} == {n: plan.parse(n, text) for n, text in expected.items()}
        assert plan.feed == "workers"
    assert {f"{name} {each}" for name, task in TASKS.items() for each in task.PRESETS} == GUIDES.keys()


LARGE = {"batch_size": 10_000, "micro_batch_size": 5000, "lr": 0.1, "amp": "fp16", "workers": 100}
PRESETS = {"guide": toy.BASELINE.replace(**LARGE), "guide-as-it-is": toy.BASELINE.replace(epochs=2)}


def test_a_preset_leaves_to_machine_and_data_what_it_must_and_says_so(tmp_path):
    pack, guided = toy.make_pack(tmp_path, count=184), toy.with_(PRESETS=PRESETS)
    (plan, why), train = preset(guided, pack, "guide"), pack.splits["train"]
    assert plan
    assert (plan.batch_size, plan.micro_batch_size, plan.amp, plan.workers) == (train, train, "off", cores())
    assert (plan.lr, plan.feed) == (0.1, "workers")
    assert f"batch_size 10000 → {train} (the whole train split)" in why
    assert "amp fp16 → off (fp16 needs a GPU)" in why
    assert f"workers 100 → {cores()} (this machine has {cores()} core" in why
    assert preset(guided, pack, "guide-as-it-is") == (PRESETS["guide-as-it-is"], "")
    gone, why = preset(guided, dataclasses.replace(pack, raw=None), "guide-as-it-is")
    assert (gone and gone.feed, why) == ("auto", "feed workers → auto (the source files are gone)")
    panel = nb.Panel(nb.advise(guided, pack, measure=False))
    assert [*panel.presets][1:] == ["the guide's before", "the guide's optimised", "the guide's as it is"]
