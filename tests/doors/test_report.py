"""Where a run is right and wrong: scores by class against values by hand, the worst samples, answers to a folder."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import own
import pandas as pd
import pytest
import torch
import toy
from PIL import Image
from test_export import a_run
from torch import nn

import nbtools as nb
from nbtools.errors import PackError, TrainError
from nbtools.tasks import captcha, segment


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """(run, pack) of images of three classes."""
    folder = tmp_path_factory.mktemp("report")
    pack = own.packed("images", folder)
    return a_run(own.task, pack, own.PLAN, folder / "run"), pack


def test_a_report_on_classes_agrees_with_the_metrics_and_puts_the_least_probable_first(shapes):
    run, pack = shapes
    report = run.report(pack, "val")
    ids = pack.ids("val")
    truth = [pack.classes[int(pack.arrays["y"][i])] for i in ids]
    probable = run.predict([pack.raw[int(i)] for i in ids], all=True)
    answers = run.predict_pack(pack, ids)
    assert list(probable.idxmax(axis=1)) == [answer.name for answer in answers]
    np.testing.assert_allclose(probable.max(axis=1), [answer.probability for answer in answers], rtol=1e-5)
    accuracy = nb.evaluate(run, pack, "val")["accuracy"]
    assert (report.worst["truth"] == report.worst["answer"]).mean() == pytest.approx(accuracy)
    assert report.table.loc["weighted mean", "recall"] == pytest.approx(accuracy)
    for name in pack.classes:
        right = ((report.worst["truth"] == name) & (report.worst["answer"] == name)).sum()
        precision, recall = (right / max((report.worst[each] == name).sum(), 1) for each in ("answer", "truth"))
        f1 = 2 * precision * recall / max(precision + recall, 1e-9)
        scores = report.table.loc[name, ["precision", "recall", "F1", "support"]]
        assert list(scores) == pytest.approx([precision, recall, f1, truth.count(name)])
    own_class = pd.Series([row[name] for name, (_, row) in zip(truth, probable.iterrows(), strict=True)], ids)
    assert list(report.worst.index) == list(own_class.sort_values(kind="stable").index)
    assert report.worst["file"].iloc[0] == pack.names[report.worst.index[0]]


@pytest.mark.drawn
def test_a_report_shows_by_itself_with_what_is_confused_and_pictures_of_the_worst(shapes):
    run, pack = shapes
    report = run.report(pack, "train")
    for shown in (str(report), report._repr_html_()):
        for part in (f"{pack.splits['train']} samples of the train split: ", "macro mean", "slanted"):
            assert part in shown
    assert report._repr_html_().count("data:image/png") == 2
    drawn: Any = report.pictures
    assert str(report.worst["truth"].iloc[0]) in drawn.axes[0].texts[0].get_text()


def test_a_report_on_texts_counts_which_character_was_read_as_which(tmp_path):
    pack = captcha.pack(captcha.demo(tmp_path / "raw", 40, length=(2, 6)), layout="lines", progress=False)
    plan = captcha.PLAN.replace(network="ctc", amp="off")
    run = a_run(captcha, pack, plan, tmp_path / "run")
    values, report = nb.evaluate(run, pack, "train"), run.report(pack, "train")
    assert float(report.about.split("CER ")[1]) == pytest.approx(values["cer"], rel=0.01)
    assert report.worst["right"].is_monotonic_increasing
    counts: Any = report.counts
    assert Counter("".join(report.worst["truth"])) == Counter(dict(counts.drop("").sum(axis=1))) + Counter()
    assert list(report.table.columns) == ["truth", "answer", "count"]
    assert all(row["truth"] != row["answer"] for row in report.table.to_dict("records"))
    both = ({"label": "_", "case": "keep"}, {"label": "(.+?)_", "case": "upper"})  # of digits
    same, named = (nb.evaluate(run, run.pack(tmp_path / "raw", test=1.0, progress=False, **each)) for each in both)
    assert same == named


def test_a_report_on_segmentation_has_the_iou_of_each_class_and_image(tmp_path):
    pack = segment.pack(segment.demo(tmp_path / "raw", 20, size=(48, 64)), progress=False)
    run = a_run(segment, pack, segment.PLAN.replace(network="slim", amp="off"), tmp_path / "run")
    values, report, ids = nb.evaluate(run, pack, "train"), run.report(pack, "train"), pack.ids("train")
    truth, guess = pack.arrays["label"][ids], np.stack(run.predict_pack(pack, ids))
    assert report.table.loc["macro mean", "IoU"] == pytest.approx(values["miou"])
    for k, name in enumerate(pack.classes):
        both, either = ((truth == k) & (guess == k)).sum(), ((truth == k) | (guess == k)).sum()
        assert report.table.loc[name, "IoU"] == pytest.approx(both / either)
        assert report.table.loc[name, "recall"] == pytest.approx(both / (truth == k).sum())
    assert list(report.worst.right) == sorted((guess == truth).mean((1, 2)))


@pytest.mark.parametrize("none", [255, -1, -100])
def test_a_report_on_masks_of_ones_own_has_a_class_that_is_never_answered_and_leaves_out_what_is_none(tmp_path, none):
    masks = np.random.default_rng(0).choice(np.array([0, 1, 2, none], np.int32), (30, 12, 12))
    scenes = [(image, Image.fromarray(mask)) for (image, _), mask in zip(own.images(30), masks, strict=True)]
    pack = nb.pack(scenes, into=tmp_path / "pack", progress=False)
    maps = SimpleNamespace(model=lambda *_: nn.Conv2d(3, 2, 1), loss=None, decode=lambda out, _: [*out.argmax(1)])
    table = a_run(maps, pack, own.PLAN, tmp_path / "run").report(pack, "train").table
    assert [*table["support"]][:3] == [(masks[pack.ids("train")] == k).sum() for k in range(3)]
    assert [*table.index, table.loc["2", "recall"]] == ["0", "1", "2", "macro mean", "weighted mean", 0]


def test_a_task_of_ones_own_says_what_is_right_else_the_refusal_names_the_function_to_define(pack, tmp_path):
    run = a_run(toy, pack, toy.PLAN, tmp_path / "run")
    with pytest.raises(TrainError, match=r"toy answers with str: .* define text_of\(pack, i\)"):
        run.report(pack)
    known = toy.with_(text_of=lambda pack, i: pack.classes[int(pack.sample(i)["label"][0])])
    report = nb.Run.open(run.folder, known).report(pack)
    accuracy = nb.evaluate(run, pack)["accuracy"]
    assert report.table.loc["weighted mean", "recall"] == pytest.approx(accuracy)
    read, first = {"decode": lambda outputs, card: ["x\ufffd"] * len(outputs)}, pack.ids("test")[0]
    texts = toy.with_(text_of=lambda pack, i: "a" if i == first else "x\ufffd", **read)
    report, others = nb.Run.open(run.folder, texts).report(pack), pack.splits["test"] - 1
    assert float(report.about.split("CER ")[1]) == pytest.approx((2 + others) / (1 + 2 * others), rel=0.01)
    assert {*report.worst["right"]} == {0, 0.5}, "what is unknown is never read right"


def test_a_folder_is_answered_by_name_also_below_folders_and_what_is_no_sample_is_named(pack, tmp_path, capsys):
    def read(path, options):
        if path.suffix != ".npy":
            raise PackError("a text", "a sample must be .npy", "convert it")
        return toy.read(path, options)

    run = a_run(toy.with_(read=read), pack, toy.PLAN, tmp_path / "run")
    folder, files = tmp_path / "new", sorted(pack.raw.source.iterdir())[:3]
    for file, name in zip(files, ("b/2.npy", "a.npy", "b/1.npy"), strict=True):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(file.read_bytes())
    for name in ("labels.csv", ".hidden.npy"):
        (folder / name).write_text("1")
    answers = run.predict(folder, batch_size=2)
    one, two, three = run.predict(files)
    assert list(answers.items()) == [("a.npy", two), ("b/1.npy", three), ("b/2.npy", one)]
    assert "1 file of 4 left out, the first: " in capsys.readouterr().err
    table = run.predict(folder, all=True)
    assert (list(table.index), list(table.columns)) == (["a.npy", "b/1.npy", "b/2.npy"], list("abcd"))
    with torch.no_grad():
        x = torch.from_numpy(np.stack([np.load(folder / name) for name in table.index]))
        torch.testing.assert_close(torch.tensor(table.to_numpy()), run.model("cpu")({"x": x}).softmax(1).double())
