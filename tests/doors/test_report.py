"""What a run gives: reports, against values by hand; answers to a folder; an ONNX file. And runs next to each other."""

import json
import re
import shutil
from collections import Counter
from html import unescape
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import browser
import numpy as np
import onnxruntime
import own
import pandas as pd
import pytest
import torch
import toy
from acting import QUIET, refused
from cases import CASES
from jupyters import until
from PIL import Image
from torch import nn

import nbtools as nb
from nbtools.__main__ import main
from nbtools.data import collate
from nbtools.errors import CheckpointError, PackError, TrainError
from nbtools.folder import begin, identity
from nbtools.run import Run
from nbtools.tasks import captcha, segment, sign
from nbtools.train import History, Record, checkpoint


def a_run(task: Any, pack: nb.Pack, plan: nb.Plan, folder: Path) -> Run:
    """A run that has not trained: with the weights that it starts with, but for batch norms, which have seen data."""
    state = nb.TrainState(task, pack, plan)
    raw = collate([pack.sample(int(i)) for i in pack.ids("train")[:8]], pack.columns)
    with torch.no_grad():
        state.model.train()(state.task.batch(raw, plan, None))
    begin(folder, pack, state, None, state.plan, None, identity(state.task, pack.card, state.model, plan))
    return Run.open(folder, task)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
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
    run = a_run(captcha, pack, captcha.PLAN.replace(network="ctc", amp="off"), tmp_path / "run")
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
    refused(TrainError, r"toy answers with str: .* define text_of\(pack, i\)", run.report, pack)
    known = toy.with_(text_of=lambda pack, i: pack.classes[int(pack.sample(i)["label"][0])])
    report = nb.Run.open(run.folder, known).report(pack)
    assert report.table.loc["weighted mean", "recall"] == pytest.approx(nb.evaluate(run, pack)["accuracy"])
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


class Named(own.Mean):
    def forward(self, x, x_length):
        return {"hidden": x, "out": super().forward(x, x_length)}


MADE: dict[str, Any] = {name: (case.task, case.plan) for name, case in CASES.items() if not case.large}
MADE["sign gru"] = sign, CASES["sign gru"].plan.replace(normalise="none")
MADE["sign transformer"] = sign, CASES["sign transformer"].plan.replace(normalise="none")
MADE["own"] = nb.classify(Named(3, 2)), own.PLAN
QUICK = "captcha small", "hwdb slim", "sign gru", "own"  # the others are exported the same way


@pytest.mark.parametrize("network", [pytest.param(n, marks=() if n in QUICK else pytest.mark.full) for n in MADE])
def test_a_file_gives_the_answers_of_the_run_for_any_batch_and_has_its_card_beside_it(network, tmp_path, capsys):
    """Of any length too, as its last samples have."""
    task, plan = MADE[network]
    pack = own.packed("sequences", tmp_path) if network == "own" else CASES[network].pack(tmp_path / "made", 24)
    run = a_run(task, pack, plan, tmp_path / "run")
    path = run.export(tmp_path / "model.onnx")
    session: Any = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert "on 8 samples its outputs in onnxruntime" in capsys.readouterr().err
    ids = run.readable(pack).ids("train")[-4:]  # none of those that were compared, nor as many
    bound = nb.TrainState(task, pack, plan).task
    batch = bound.batch(collate([pack.sample(i) for i in ids], pack.columns), run.plan, None)
    with torch.no_grad():
        expected = run.model("cpu")(batch)
    expected = [expected["out"]] if isinstance(expected, dict) else expected
    expected = expected if isinstance(expected, tuple | list) else [expected]
    theirs = session.run(None, {one.name: batch[one.name].numpy() for one in session.get_inputs()})
    for ours, given in zip([one for one in expected if isinstance(one, torch.Tensor)], theirs, strict=True):
        np.testing.assert_allclose(given, ours.numpy(), atol=1e-4)
    about = json.loads((tmp_path / "model.json").read_text())
    assert about["card"]["classes"] == pack.classes
    assert about["plan"]["lr"] == plan.lr
    named = {one.name for one in (*session.get_inputs(), *session.get_outputs())}
    assert named <= {**about["inputs"], **about["outputs"]}.keys()


class Restless(toy.Linear):
    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return super().forward(batch) + torch.rand(4)


def test_nothing_is_written_of_a_network_that_answers_differently(tmp_path):
    task = toy.with_(model=lambda card, plan: Restless(8, 4))
    run = a_run(task, toy.make_pack(tmp_path / "data", 60), toy.PLAN, tmp_path / "run")
    words = r"cannot export Restless as ONNX: on 8 samples its outputs differ from torch's by .*, above 0\.0001"
    refused(TrainError, words, run.export, tmp_path / "model.onnx")
    assert not list(tmp_path.glob("model*"))


def test_the_samples_are_the_runs_own_while_its_pack_is_there_else_those_of_a_pack_that_is_named(tmp_path, capsys):
    pack = toy.make_pack(tmp_path / "data", 60)
    run = a_run(toy, pack, toy.PLAN, tmp_path / "run")
    moved = pack.folder.rename(tmp_path / "moved")
    words = ["export", str(run.folder), str(tmp_path / "toy.onnx")]
    assert main(words) == 1
    assert re.search(rf"{pack.folder}: .*; then pass it: run\.export\(", capsys.readouterr().err)
    assert main([*words, "--pack", str(moved)]) == 0
    assert main(["export", str(run.folder), str(tmp_path / "toy")]) == 0  # safetensors, which need no sample
    assert capsys.readouterr().out.endswith("toy.safetensors\n")


EVIL = '<img src=x onerror="alert(1)">'


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    pack, plan = toy.make_pack(folder), toy.PLAN.replace(lr=1e-3)
    slow = nb.fit(toy, pack, plan, folder / "runs" / "slow", **QUIET)
    return slow, nb.fit(toy, pack, plan.replace(batch_size=32, epochs=2), folder / "runs" / EVIL, **QUIET)


@pytest.fixture
def displayed(monkeypatch):
    shown: list[dict[str, str]] = []
    monkeypatch.setattr("IPython.display.display", lambda data, **_: shown.append(data))
    monkeypatch.setattr("nbtools.run.in_notebook", lambda: True)
    return lambda compared: (shown.clear(), compared._ipython_display_(), shown)[-1]


def test_a_row_a_run_has_its_outcome_and_the_settings_that_differ_and_a_notebook_shows_it_escaped(runs, displayed):
    compared, slow = nb.compare(*runs), runs[0]
    frame, name = compared.frame, str(slow.folder)
    assert list(frame.index) == [str(run.folder) for run in runs]
    assert tuple(frame.loc[name, ["best_accuracy", "best_epoch"]]) == (slow.best["val_accuracy"], slow.best["epoch"])
    assert list(frame["epochs"]) == list(frame["plan.epochs"]) == [3, 2]
    assert (list(frame["plan.batch_size"]), "plan.lr" in frame.columns) == ([16, 32], False)  # the same in both
    assert frame.loc[name, "samples_per_s"] == pytest.approx(402 / slow.history.of("epoch")[-1]["wall"])  # 3 epochs
    words, charts = displayed(compared)[::2]
    page = unescape(charts["text/html"])
    assert "<img" not in words["text/html"] + page
    assert all("&lt;img src=x onerror=" in each for each in (words["text/html"], page))
    assert compared.conclusion in str(compared)
    assert not re.search(r"\d\.\d{7}", str(compared)), "three digits"
    for title in ("validation loss", "accuracy", "learning rate"):
        assert re.search(f"<b>{title}.*?<svg .*?data-name=", page), "as in the live view"


@pytest.mark.browser
def test_its_charts_answer_the_pointer_and_are_a_picture_where_scripts_do_not_run(runs, chromium, displayed):
    words, picture, charts = displayed(nb.compare(*runs))
    assert "<svg" not in words["text/html"]
    image = f'<div class="output_area"><img src="data:image/png;base64,{picture["image/png"]}"></div>'
    with browser.chromium(chromium) as window:
        page = window.new_page()
        page.set_content(image + charts["text/html"])
        until(lambda: not page.locator("img").is_visible(), "charts in the picture's place")
        page.locator(".nbt-plot").first.hover()
        under = page.locator(".nbt-at").first.inner_text()
    assert re.match(r"step \d+\n", under)
    assert all(re.search(rf"{re.escape(str(run.folder))} [\d.]+", under) for run in runs), under


def reached(folder, run, *values: tuple[float, float]) -> list[Any]:
    for k, (accuracy, loss) in enumerate(values):
        copy = shutil.copytree(run.folder, folder / f"run-{k}")
        checkpoint.mark(copy, id=copy.name, best="0001-00000010")  # a run of its own
        (copy / "history.csv").unlink()
        row = {"epoch_time": 14.0, "wall": 15.5, "val_accuracy": accuracy, "val_loss": loss}
        history = History(copy / "history.csv")
        history.append(Record("epoch", 0, 10, 100, row))
        history.append(Record("step", 1, 15, 150, {"loss": loss, "wall": 30.0}))
    return [folder / f"run-{k}" for k in range(len(values))]


def test_the_best_run_is_named_where_more_than_chance_sets_it_apart_on_the_same_data(runs, displayed, tmp_path):
    apart = nb.compare(*reached(tmp_path / "apart", runs[0], (0.03, 1.0), (0.9, 0.03)))
    assert "run-1 is the best: accuracy 0.900, 0.870 above " in apart.conclusion
    assert displayed(apart)[-1]["text/html"].count("data-log") == 1, "of the loss"
    close = nb.compare(*reached(tmp_path / "close", runs[0], (0.9, 1.0), (0.91, 0.2)))
    assert "run-0 0.900; on 48 validation samples, chance alone can explain such" in close.conclusion
    plan = toy.PLAN.replace(epochs=1)
    other = nb.fit(toy, toy.make_pack(tmp_path / "other", count=120), plan, tmp_path / "b", **QUIET)
    assert "have different tasks, or were validated on different data" in nb.compare(runs[0], other).conclusion
    checkpoint.mark(copy := shutil.copytree(runs[0].folder, tmp_path / "empty"), best=None)
    assert nb.compare(runs[0], copy).conclusion == "No best run: fewer than two have been evaluated."


def test_a_folder_is_a_table_of_runs_and_stands_for_all_of_them(runs, tmp_path, capsys):
    refused(TrainError, "at least one run, got none; give it", nb.compare, tmp_path)
    for act in (nb.compare, nb.runs, lambda folder: nb.watch(folder, wait=0.1)):
        refused(CheckpointError, "no such folder", act, tmp_path / "nowhere")
    every = reached(tmp_path / "runs", runs[0], *[(0.5, 1.0)] * 9)
    assert len(nb.compare(tmp_path / "runs").runs) == 9
    assert nb.compare(every[:2]).runs.keys() == nb.compare((*every[:2],)).runs.keys() == {*map(str, every[:2])}
    (every[0] / "card.json").unlink()
    (every[8] / "plan.json").write_text('{"lr": -1}')
    (every[1] / "plan.json").write_text('{"lr": 1, "gone": 2}')
    checkpoint.mark(every[2], task="own:Small")  # a network by now
    frame, said = nb.runs(tmp_path), capsys.readouterr().err
    assert sorted(frame.index) == [f"runs/run-{k}" for k in range(1, 8)]
    for words in (r"run-0/card\.json is missing; copy the whole run", r"run-8: .*lr must be greater than 0, got -1"):
        assert re.search(f"left out: .*{words}", said)
    assert "nowhere holds no run yet; waiting up to 0.1 s for one …" in said
    row = frame.loc["runs/run-1", ["best_accuracy", "epochs", "minutes", "samples_per_s"]]
    assert [*row] == [0.5, 1, 0.5, 5], "minutes also of an epoch that has not ended"
    assert not any(frame.changed.dt.microsecond)


def test_a_run_of_a_task_without_a_name_is_compared_and_asks_for_it_where_the_network_is_needed(tmp_path):
    pack = own.packed("images", tmp_path)
    for seed in range(2):
        nb.fit(nb.classify(own.Small), pack, own.PLAN.replace(seed=seed), tmp_path / "runs" / str(seed), **QUIET)
    assert list(nb.runs(tmp_path / "runs")["state"]) == ["done", "done"]
    compared = nb.compare(tmp_path / "runs")
    assert "accuracy" in compared.conclusion
    assert list(compared.frame["plan.seed"]) == [0, 1]
    opened = nb.Run.open(tmp_path / "runs" / "0")
    for need in (lambda: opened.predict([pack.raw[0]]), opened.model, lambda: nb.evaluate(opened, pack)):
        refused(CheckpointError, r"has no name to import it by; pass the same one as task=", need)
    with pytest.raises(CheckpointError, match=r"makes another network .*; open .*: nb\.Run\.open\(folder, task\)"):
        nb.Run.open(opened.folder, nb.classify(lambda: own.Small(4))).model()
    again = nb.Run.open(opened.folder, nb.classify(own.Small))
    assert nb.evaluate(again, pack, "val")["accuracy"] == pytest.approx(opened.best["val_accuracy"])


def test_samples_can_be_chosen_in_the_call_and_what_is_none_is_refused(pack, tmp_path, monkeypatch):
    plan, shown = toy.PLAN.replace(epochs=1), []
    monkeypatch.setattr("nbtools.live.draw.png", lambda _, facts, samples: shown.append(samples) or b"\x89PNG")
    nb.fit(toy, pack, plan, tmp_path / "run", receipt=False, samples=(7, 3))
    assert [each.truth for each in shown[-1]] == ["abcd"[int(pack.sample(i)["label"][0])] for i in (7, 3)]
    with pytest.raises(TrainError, match="samples must be a list of ids of the pack"):
        nb.fit(toy, pack, plan, tmp_path / "other", samples=[3, len(pack)], **QUIET)
    assert not (tmp_path / "other").exists(), "refused before anything is written"
