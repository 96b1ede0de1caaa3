"""What holds for each of the four tasks: demo, options, augmentation, advice, its guide's settings, and evaluation."""

import json
import os
import re
import shutil
from time import perf_counter
from typing import Any

import numpy as np
import pytest
import torch
from acting import QUIET, refused
from packs import DEMOS, PACKED

import nbtools as nb
from nbtools.__main__ import main
from nbtools.data import Card, Column, Draws, Pack, cache, cores, gather, open_feed
from nbtools.errors import PackError, TrainError
from nbtools.figures import RIGHT, WRONG
from nbtools.measure import Machine, decide
from nbtools.tasks import captcha, hwdb, segment, sign

TASKS: dict[str, Any] = {"captcha": captcha, "lines": captcha, "hwdb": hwdb, "segment": segment, "sign": sign}


@pytest.fixture(scope="module")
def packs(tmp_path_factory, one_cache):
    made = {}
    for name, options in DEMOS.items():
        folder = TASKS[name].demo(tmp_path_factory.mktemp(name), 24, **options)
        made[name] = TASKS[name].pack(folder, progress=False, **PACKED.get(name, {}))
    return made


@pytest.mark.parametrize("name", DEMOS)
def test_the_same_seed_gives_the_same_bytes_and_few_samples_are_the_first_of_many(tmp_path, name):
    def files(folder, count, seed=0):
        made = TASKS[name].demo(tmp_path / folder, count, seed=seed, **DEMOS[name])
        paths = (path for path in made.rglob("*") if path.suffix in (".png", ".jpg", ".dgrl", ".npz"))
        return {path.relative_to(made).as_posix(): path.read_bytes() for path in paths}

    few, again, many, other = files("a", 12), files("b", 12), files("c", 18), files("b", 12, seed=1)
    assert few == again
    assert {file: many.get(file) for file in few} == few
    assert len(many) > len(few)
    assert not few.items() & other.items()


@pytest.mark.parametrize("name", DEMOS)
def test_workers_read_the_files_as_the_pack_holds_them_and_else_none_is_read_again(name, packs):
    pack, ids, plan = packs[name], np.arange(6), TASKS[name].Plan(feed="workers", workers=1, batch_size=6)
    [raw] = open_feed(pack, plan, torch.device("cpu"))([ids])
    away = pack.raw.source.rename(pack.raw.source.with_name("away"))
    packed = gather(Pack.open(pack.folder), ids)
    away.rename(pack.raw.source)
    assert all(torch.equal(raw[column], packed[column]) for column in pack.columns)


@pytest.mark.full
def test_ten_thousand_files_are_validated_on_four_fifths_of_the_cores(tmp_path):
    few, shares = [*captcha.demo(tmp_path / "few", 500).rglob("*.png")], []
    (many := tmp_path / "many").mkdir()
    for i in range(10_000):
        os.link(few[i % 500], many / f"{few[i % 500].stem.split('_')[0]}_{i}.png")
    for _ in range(3):  # others may take a core amid one
        begin, start = sum(os.times()[:4]), perf_counter()
        assert len(nb.validate(captcha, many).frame) == 0
        shares.append((sum(os.times()[:4]) - begin) / (perf_counter() - start) / cores())
    assert max(shares) >= 0.8


@pytest.mark.parametrize("name", DEMOS)
def test_validate_passes_a_demo_and_refuses_a_damaged_file_and_writes_nothing(name, packs, tmp_path, capsys):
    source, task = shutil.copytree(packs[name].raw.source, tmp_path / "raw"), TASKS[name].__name__.split(".")[-1]
    file = next(path for path in sorted(source.rglob("*")) if path.suffix in (".png", ".jpg", ".dgrl", ".npz"))
    before = {*cache().rglob("*"), *tmp_path.rglob("*")}
    assert main(["validate", task, str(source)]) == 0
    file.write_bytes(file.read_bytes()[:-60])
    assert main(["validate", task, str(source)]) == 1
    passed, refused = capsys.readouterr().out.split("0 errors and 0 warnings\n")
    assert (file.name in passed, file.name in refused, "1 error and" in refused) == (False, True, True)
    assert before == {*cache().rglob("*"), *tmp_path.rglob("*")}


IMPOSSIBLE: list[tuple[str, str, dict[str, Any]]] = [
    ("captcha", "demo", {"count": 0}),
    ("hwdb", "demo", {"characters": "aa"}),
    ("segment", "demo", {"size": (48, 8)}),
    ("sign", "demo", {"frames": (30, 20)}),
    ("captcha", "pack", {"layout": "grid"}),
    ("captcha", "pack", {"label": "("}),
    ("captcha", "pack", {"label": "(?:.+)-"}),
    ("captcha", "pack", {"height": "32"}),
    ("captcha", "pack", {"classes": ["a", "bc"]}),
    ("hwdb", "pack", {"classes": "一一"}),
    ("hwdb", "pack", {"classes": ""}),
    ("segment", "pack", {"channels": 1}),
    ("segment", "pack", {"classes": 2}),
    ("segment", "pack", {"classes": {"background": 0, "striped": 1}}),
    ("sign", "pack", {"glosses": 1}),
    ("segment", "Plan", {"scale_high": 0.5}),
    ("segment", "Plan", {"eval_scales": ()}),
]


@pytest.mark.parametrize(("name", "hook", "wrong"), IMPOSSIBLE)
def test_what_gets_an_impossible_option_names_it_and_no_demo_is_written(packs, tmp_path, name, hook, wrong):
    into = {"source": packs[name].raw.source, "into": tmp_path / "pack", "progress": False}
    given = {"demo": {"folder": tmp_path / "never", "count": 2}, "pack": into, "Plan": {}}
    with pytest.raises(nb.NbtoolsError, match=rf"{next(iter(wrong))[:5]}.* must .*, got "):
        getattr(TASKS[name], hook)(**{**given[hook], **wrong})
    assert not (tmp_path / "never").exists()


AUGMENTED: list[tuple[str, dict[str, Any]]] = [
    ("captcha", {"augment": 0.3}),
    ("lines", {"augment": 1.0}),
    ("hwdb", {"augment": 2.0}),
    ("segment", {"crop": 32, "scale_low": 0.25, "scale_high": 2.0, "flip": 0.5, "jitter": 0.4}),
    *(("sign", {name: 0.5}) for name in ("time_warp", "time_crop", "mirror")),
]


@pytest.mark.parametrize(("name", "settings"), AUGMENTED)
def test_augmentation_changes_a_training_sample_in_any_batch_alike_and_evaluation_never(packs, name, settings):
    task, pack, key = TASKS[name], packs[name], "x" if name == "sign" else "image"
    plan, raw, alone = task.Plan(**settings), gather(pack, np.arange(6)), gather(pack, np.array([3]))
    before = {column: tensor.clone() for column, tensor in raw.items()}
    plain = task.batch(raw, task.Plan(), None)
    assert torch.equal(task.batch(raw, plan, None)[key], plain[key])
    given = (raw, 2), (raw, 3), (alone, 2)
    one, other, single = (task.batch(each, plan, Draws(1, epoch, each["id"])) for each, epoch in given)

    def both(a, b):
        part = tuple(slice(min(m, n)) for m, n in zip(a.shape, b.shape, strict=True))
        return a[part], b[part]

    assert all((a - b).abs().mean() > 1e-3 for a, b in (both(one[key], plain[key]), both(one[key], other[key])))
    torch.testing.assert_close(*both(one[key][3:4], single[key]), rtol=0, atol=5e-3)
    if f"{key}_length" in raw:
        lengths = one[f"{key}_length"]
        assert lengths[3] == single[f"{key}_length"][0]
        assert name == "sign" or ((raw[f"{key}_length"] <= lengths) & (lengths <= one[key].shape[3])).all()
    assert all(torch.equal(tensor, before[column]) for column, tensor in raw.items()), "the raw batch is unchanged"


def card_of(task, options, train=100, classes=60, **columns):
    shaped = {column: Column("ragged", "|u1", (width,)) for column, width in columns.items()}
    return Card(task, [*map(chr, range(0x4E00, 0x4E00 + classes))], options, shaped, {"train": train, "val": 1})


CARDS = [  # with the network that is advised on a CPU and on CUDA
    (card_of("captcha", {"layout": "fixed", "size": [60, 160], "length": 4}, 3), "Small", "Guide"),
    (card_of("captcha", {"layout": "lines", "height": 32}), "Ctc", "Ctc"),
    (card_of("hwdb", {"height": 32}, 30_000), "Slim", "Slim"),
    (card_of("hwdb", {"height": 128}, 30_000), "Slim", "Hctr"),
    (card_of("sign", {"categories": ["a"]}, 3, x=156, mask=78), "Transformer", "Transformer"),
    (card_of("sign", {"categories": ["a"]}, 3, features=2048), "Gru", "Gru"),
    (card_of("segment", {"size": [1024, 2048], "channels": 4}, 2975, 3, image=4), "BiSeNetV2", "BiSeNetV2"),
    (card_of("segment", {"size": [40, 33], "channels": 4}, 500, 3, image=4), "BiSeNetV2", "BiSeNetV2"),
]


@pytest.mark.parametrize(("card", "small", "large"), CARDS)
def test_advice_fits_machine_and_data_and_gives_every_number_a_reason(card, small, large):
    machines = Machine("cpu", "x", cores=2), Machine("cuda", "x", 40, cores=2, capability=(8, 0))
    for machine, expected in zip(machines, (small, large), strict=True):
        advice = decide(TASKS[card.task], card, machine)
        assert all(advice.reasons.values())
        figures = [why for why in advice.reasons.values() if re.search(r"\d (%|of|as|than|times|×)", why)]
        assert all("rule of thumb" in why or "measured" in why for why in figures), "where each figure is from"
        plan: Any = TASKS[card.task].Plan(**advice.plan.to_dict())
        assert plan.batch_size <= card.splits["train"]
        assert plan.warmup_epochs < plan.epochs
        with torch.device("meta"):
            assert type(TASKS[card.task].model(card, plan)).__name__ == expected


@pytest.mark.parametrize("name", ["captcha", "lines", "hwdb", "sign"])
def test_samples_are_shown_with_their_truth_and_what_was_answered_wrong(packs, name):
    task, pack = TASKS[name], packs[name]
    truth = [task.text_of(pack, i) for i in range(3)]
    sheet = task.show(pack, [0, 1, 2], [truth[0], "??", truth[2]])
    captions = [(text.get_text().split(" · ")[0], text.get_color()) for text in sheet.axes[0].texts if text.get_text()]
    assert captions == [(truth[0], RIGHT), (f"{truth[1]} ≠ ??", WRONG), (truth[2], RIGHT)]
    image, *texts = task.preview(pack, 1, "??")
    assert texts[:2] == [truth[1], "??"]
    assert image.shape[2:] == (4,) or image.mean() > 128, "dark on light"
    refused(PackError, "for each id, got 1 for 2 ids", task.show, pack, [0, 1], ["a"])
    assert "No samples to show" in task.show(pack, []).axes[0].texts[0].get_text()


UNSEEN: dict[str, tuple[dict[str, Any], str]] = {  # new data, for captcha and hwdb of fewer characters; a metric
    "captcha": ({"alphabet": "12"}, "whole_accuracy"),
    "hwdb": ({"characters": "AB"}, "cer"),
    "sign": ({}, "cat_accuracy"),
    "segment": ({}, "miou"),
}


@pytest.mark.parametrize("name", ["captcha", "hwdb", "sign", pytest.param("segment", marks=pytest.mark.full)])
def test_one_call_evaluates_a_new_folder_and_training_on_it_is_refused_in_a_sentence(name, packs, tmp_path, capsys):
    task, pack, (options, metric) = TASKS[name], packs[name], UNSEEN[name]
    new = task.demo(tmp_path / "new", 9, seed=1, **{**DEMOS[name], **options})
    (new / "classes.txt").unlink(missing_ok=True)  # segment's: the run knows them
    plan = nb.advise(task, pack, measure=False).plan.replace(epochs=1, warmup_epochs=0.0)
    run = nb.fit(task, pack, plan, tmp_path / "run", **QUIET)
    capsys.readouterr()
    assert main(["evaluate", name, "--data", str(new), "--test", "1.0", "--run", str(run.folder)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    unseen = run.pack(new, test=1.0, progress=False)
    assert unseen.splits == {"train": 0, "val": 0, "test": 9}
    assert unseen.classes == run.card.classes
    assert found == nb.evaluate(run, unseen)
    if name == "hwdb":  # which reads nothing so far
        assert main(["predict", str(run.folder), file := str(new / unseen.names[0])]) == 0
        assert capsys.readouterr().out == f"{file}\t{run.predict(file)[0]}\n"
    assert metric in found
    refused(TrainError, "training needs at least 2 samples, the train split has 0 of 9", nb.advise, task, unseen)


ADVISED: dict[str, Any] = {  # options of a demo and its pack, the split held out, and what is at least 0.75 there
    "hwdb": ({"count": 900, "characters": 30}, {"height": 32}, "test", "ar"),
    "sign": ({"count": 600, "glosses": 12, "categories": 2}, {}, "val", "gloss_accuracy"),
}


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ADVISED)
def test_the_advised_plan_reads_three_quarters_of_people_held_out(name, tmp_path, monkeypatch, own_cache):
    monkeypatch.setattr("nbtools.figures.findSystemFonts", list)
    task, (options, packed, split, metric) = TASKS[name], ADVISED[name]
    pack = task.pack(task.demo(tmp_path / "raw", **options), progress=False, **packed)
    run = nb.fit(task, pack, nb.advise(task, pack, measure=False).plan, tmp_path / "run", **QUIET)
    assert nb.evaluate(run, pack, split)[metric] >= 0.75
