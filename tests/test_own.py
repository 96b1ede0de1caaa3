"""A task of one's own in a cell: nb.classify, nb.regress and a class with two methods, on data that no demo writes."""

import copy
import json
import re
import subprocess
import sys
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import own
import pandas as pd
import pytest
import torch
from acting import QUIET
from PIL import Image
from test_resume import log, same, trained
from torch import nn
from torch.nn import functional as F

import nbtools as nb
from nbtools.__main__ import main
from nbtools.errors import CheckpointError, PackError, PlanError, TrainError
from nbtools.live.samples import Previews
from nbtools.measure import receipt
from nbtools.measure.advisor import label
from nbtools.train import Answer, build, call_of, import_task
from nbtools.train.defaults import sample_of
from nbtools.train.metrics import METRICS, score

pytestmark = pytest.mark.usefixtures("one_cache")

classify: Any = nb.classify


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packs")
    return {name: own.packed(name, folder) for name in own.DATA}


def fitted(task, pack, folder, **plan):
    return nb.fit(task, pack, (task.PLAN if nb.Plan() != task.PLAN else own.PLAN).replace(**plan), folder, **QUIET)


# -- learning


def test_images_by_class_are_learned_by_a_module_that_stays_as_it_was(tmp_path, packs):
    net = own.Small(3)
    before = copy.deepcopy(net.state_dict())
    task = nb.classify(net, metrics=["accuracy", "balanced_accuracy"], augment=["crop"])
    run = fitted(task, packs["images"], tmp_path / "run", epochs=6)
    assert nb.evaluate(run, packs["images"], "val")["accuracy"] > 0.9
    assert run.best["val_accuracy"] == max(run.summary()["val_accuracy"])
    assert list(run.summary())[1:4] == ["val_loss", "val_accuracy", "val_balanced_accuracy"]
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert net.training
    assert not net._forward_pre_hooks
    assert run.model().state_dict().keys() == before.keys()


def test_values_are_learned_standardised_and_measured_and_predicted_in_their_own_unit(tmp_path, packs):
    pack = packs["rows"]
    run = fitted(own.price, pack, tmp_path / "run", epochs=12, batch_size=8)
    targets = np.array([float(pack.sample(i)["y"]) for i in pack.ids("val")])
    found = np.array(run.predict_pack(pack, pack.ids("val")))
    assert nb.evaluate(run, pack, "val")["mae"] == pytest.approx(np.abs(found - targets).mean(), rel=1e-4)
    assert np.abs(found - targets).mean() < 0.3 * targets.std()
    spread = np.std([float(pack.sample(i)["y"]) for i in pack.ids("train")])
    squared = np.square((found - targets) / spread).mean()
    assert nb.evaluate(run, pack, "val")["loss"] == pytest.approx(squared, rel=1e-3)
    assert run.best["val_mae"] == min(run.summary()["val_mae"])


def test_sequences_are_learned_by_a_module_that_asks_for_their_lengths(tmp_path, packs):
    run = fitted(own.order, packs["sequences"], tmp_path / "run", epochs=10)
    assert nb.evaluate(run, packs["sequences"], "val")["accuracy"] > 0.8
    alone = [run.predict_pack(packs["sequences"], [i])[0] for i in range(5)]
    together = run.predict_pack(packs["sequences"], range(5))
    assert [a.name for a in alone] == [a.name for a in together], "padding changes no answer"
    assert [a.probability for a in alone] == pytest.approx([a.probability for a in together], abs=1e-5)


def test_two_methods_are_a_task_with_metrics_by_name_answers_samples_and_a_name(tmp_path, packs):
    pack = packs["images"]
    run = fitted(own.Mine(), pack, tmp_path / "run", epochs=4)
    assert {"val_loss", "val_accuracy", "val_f1"} <= set(run.summary())
    assert own.Mine.BEST == "accuracy" == own.Mine().BEST
    again = nb.Run.open(tmp_path / "run")
    answers = again.predict_pack(pack, pack.ids("test"))
    truths = [pack.classes[int(pack.sample(i)["y"])] for i in pack.ids("test")]
    assert nb.evaluate(again, pack)["accuracy"] == np.mean([a.name == t for a, t in zip(answers, truths, strict=True)])
    assert all(1 / 3 <= answer.probability <= 1 for answer in answers)
    assert str(Answer("down", 0.934)) == "down (93 %)"

    class Numbered(own.Mine):
        def batch(self, raw, plan, draws):
            return {**super().batch(raw, plan, draws), "half": raw["id"] / 2}

    shown = Previews(nb.TrainState(Numbered, pack, own.PLAN), pack).now()
    assert {preview.truth for preview in shown} <= set(own.STRIPES)
    assert all(preview.image.shape == (12, 12, 3) and preview.whole for preview in shown)
    assert own.Mine().show(pack, [0, 1], answers[:2])._repr_png_()


def test_a_mean_loss_and_a_sum_with_its_count_train_alike_whatever_the_micro_batch(packs):
    class Summing(own.Mine):
        def loss(self, model, batch, plan):
            return F.cross_entropy(model(batch), batch["y"], reduction="sum"), len(batch["y"])

    states, cases = [], ((own.Mine, None), (Summing, None), (own.Mine, 5), (Summing, 5))
    for kind, micro in cases:
        task: Any = kind()
        task.model = lambda card, plan: nn.Sequential(nn.Flatten(), nn.Linear(432, 3))
        state = nb.TrainState(task, packs["images"], own.PLAN.replace(epochs=1, micro_batch_size=micro))
        states.append(state)
        for _ in nb.train(task, state, packs["images"]):
            continue
    first = states[0].model.state_dict()
    for state in states[1:]:
        for name, value in state.model.state_dict().items():
            torch.testing.assert_close(value, first[name], atol=2e-5, rtol=1e-4)


# -- what every task's runs do


@pytest.fixture(scope="module")
def uninterrupted(packs):
    found: dict[str, Any] = {}

    def train(name):
        task, data = own.TASKS[name]
        if name not in found:
            found[name] = trained(packs[data], task, own.PLAN, {2: 5, 5: 30})
        return found[name]

    return train


@pytest.mark.parametrize("name", own.TASKS)
@pytest.mark.parametrize("stops", [{1, 3, 4, 8}, {7}], ids=str)
def test_interrupted_after_any_records_equals_uninterrupted_also_across_changes_of_batch_size(
    packs, uninterrupted, name, stops
):
    task, data = own.TASKS[name]
    state, history = trained(packs[data], task, own.PLAN, {2: 5, 5: 30}, stops)
    expected, rows = uninterrupted(name)
    assert log(history) == log(rows)
    same(state, expected)


@pytest.mark.parametrize("name", own.TASKS)
def test_a_run_is_opened_by_the_name_of_its_task_and_exported(tmp_path, packs, name):
    task, data = own.TASKS[name]
    run = nb.fit(task, packs[data], own.PLAN.replace(epochs=1), tmp_path / "run", **QUIET)
    named = "Mine" if name == "two methods" else next(n for n, value in vars(own).items() if value is task)
    assert json.loads((tmp_path / "run" / "run.json").read_text())["task"] == f"own:{named}"
    again = nb.Run.open(tmp_path / "run")
    ids = packs[data].ids("test")
    assert again.predict_pack(packs[data], ids) == run.predict_pack(packs[data], ids)
    card = json.loads(run.export(tmp_path / "net").with_suffix(".json").read_text())
    assert card["card"]["options"]["inputs"] == packs[data].options["inputs"]


def test_a_task_without_a_name_says_how_to_open_its_run(tmp_path, packs):
    run = fitted(nb.classify(own.Small(3)), packs["images"], tmp_path / "run", epochs=1)
    with pytest.raises(CheckpointError, match=r"pass task=nb\.classify\(…\) or nb\.regress\(…\) with the same network"):
        nb.Run.open(run.folder)
    assert nb.Run.open(run.folder, nb.classify(own.Small)).best == run.best
    with pytest.raises(
        CheckpointError, match=r"cannot be imported .*: run its cell first, or import it from the script"
    ):
        import_task("__main__:task", run.folder)


def test_another_network_loss_or_augmentation_in_the_folder_of_a_run_is_refused(tmp_path, packs):
    pack, folder = packs["images"], tmp_path / "run"
    fitted(nb.classify(own.Small), pack, folder, epochs=1)
    with pytest.raises(CheckpointError, match=r"holds another run \(network: Small → Sequential.*name another run="):
        fitted(nb.classify(nn.Sequential(nn.Flatten(), nn.LazyLinear(3))), pack, folder, epochs=1)
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    with pytest.raises(CheckpointError, match=r"augment: none → flip 0\.5; loss: default → CrossEntropyLoss"):
        fitted(nb.classify(own.Small, loss=loss, augment=["flip"]), pack, folder, epochs=1)


def test_a_receipt_measures_a_dataloader_on_the_same_data(packs):
    found = receipt(own.task, packs["images"], own.PLAN, torch.device("cpu"), seconds=0.05)
    assert (found.before.plan["feed"], found.before.plan["workers"]) == ("workers", 0)
    assert "The source files are gone" not in str(found)
    assert [rung.name for rung in found.rungs] == ["baseline", "+ packed feed"]


@pytest.mark.usefixtures("at_once")
def test_a_batch_size_is_changed_while_it_trains(tmp_path, packs):
    from nbtools.live import send

    folder, seen = tmp_path / "run", []

    class Changing(own.Mine):
        def loss(self, model, batch, plan):
            seen.append(1)
            if len(seen) == 2:
                send(folder, [], {"batch_size": 7})
            return super().loss(model, batch, plan)

    run = nb.fit(Changing(), packs["images"], own.PLAN.replace(epochs=1), folder, **QUIET)
    assert [row["what"] for row in run.history.of("change")] == ["batch_size 16 → 7"]


# -- the call of a network


def module(**forward: Any) -> nn.Module:
    kind = type("Net", (nn.Module,), forward)
    return kind()


CALLS: dict[str, tuple[Any, str, str]] = {  # forward, data, what is given
    "its only parameter": (lambda self, picture: picture, "images", "picture=x"),
    "of the column's name": (lambda self, x: x, "images", "x"),
    "the dict": (lambda self, batch: batch["x"], "images", "batch"),
    "no names": (lambda self, *args: args[0], "images", "x"),
    "all in order": (lambda self, *inputs: inputs[0], "two", "image, age"),
    "all by name": (lambda self, **inputs: inputs["image"], "two", "image=image, age=age"),
    "an option": (lambda self, x, scale=2.0: x, "images", "x"),
    "lengths": (lambda self, lengths, x: x, "sequences", "lengths, x"),
    "optional lengths": (lambda self, x, mask=None, length=None: x, "sequences", "x, length=x_length"),
    "two in order": (lambda self, a, b: a, "two", "a=image, b=age"),
    "two by name": (lambda self, age, *, image: image, "two", "age, image"),
    "never the target": (lambda self, image, y: image, "two", "image, y=age"),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two inputs: an image and a number."""
    samples = [{"image": image, "age": np.float32(i), "y": i % 2} for i, (image, _) in enumerate(own.images(20))]
    return nb.pack(samples, into=tmp_path_factory.mktemp("two") / "pack", progress=False)


@pytest.mark.parametrize("name", CALLS)
def test_a_forward_gets_what_its_signature_names(packs, two, name):
    forward, data, given = CALLS[name]
    pack, seen = two if data == "two" else packs[data], []

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(2, 3), requires_grad=True)
            self.still = nn.Parameter(torch.zeros(7), requires_grad=False)

    Net.forward = lambda self, *args, **named: seen.append((args, named)) or forward(self, *args, **named)
    Net.forward.__signature__ = __import__("inspect").signature(forward)
    task: Any = SimpleNamespace(model=lambda card, plan: Net(), loss=None)
    state = nb.TrainState(task, pack, own.PLAN)
    seen.clear()
    batch = state.task.batch(
        {n: torch.from_numpy(a)[None] for n, a in pack.sample(0).items()}
        | {"x_length": torch.tensor([len(pack.sample(0).get("x", [0]))]), "id": torch.tensor([0])},
        own.PLAN,
        None,
    )
    state.model(batch)
    [(args, named)] = seen
    if given == "batch":
        assert args == (batch,)
    else:
        names = [part.strip().partition("=") for part in given.split(",")]
        columns = {p: c or {"lengths": "x_length", "length": "x_length", "picture": "x"}.get(p, p) for p, _, c in names}
        got = [*args, *named.values()]
        assert len(got) == len(columns)
        assert all(any(one is batch[column] for one in got) for column in columns.values())
        assert all(named[p] is batch[columns[p]] for p in named)
        assert name != "all in order" or [*map(id, args)] == [id(batch["image"]), id(batch["age"])]
    assert call_of(state.model).startswith("Net.forward(")
    assert call_of(state.model).endswith("13 parameters, 6 trained")


def test_the_first_line_of_a_run_says_what_the_network_takes(tmp_path, packs, capsys):
    plan = own.PLAN.replace(epochs=1)
    nb.fit(own.order, packs["sequences"], plan, tmp_path / "run", receipt=False)
    size = sum(p.numel() for p in own.Recurrent().parameters())
    first = next(text for text in capsys.readouterr().err.splitlines() if text.startswith("network"))
    assert first.split(maxsplit=1) == [
        "network",
        f"Recurrent.forward(x, lengths=x_length), {size:,} parameters, all trained",
    ]


def test_calls_with_tensors_names_of_weights_and_copies_stay_as_they_are(packs):
    pack = packs["images"]
    model = build(nb.TrainState(own.task, pack, own.PLAN).task, pack.card, own.PLAN).eval()
    x = torch.rand(2, 3, 12, 12)
    for one in (model, copy.deepcopy(model)):
        assert torch.equal(one(x), one({"x": x, "y": None}))
        assert one.state_dict().keys() == own.Small(3).state_dict().keys()


def test_lazy_layers_learn_their_sizes_before_the_optimizer_is_made(packs):
    net = nn.Sequential(nn.Flatten(), nn.LazyLinear(3), nn.LazyBatchNorm1d(affine=False))
    state = nb.TrainState(nb.classify(net), packs["images"], own.PLAN)
    assert [tuple(p.shape) for p in state.model.parameters()] == [(3, 432), (3,)]
    assert [tuple(b.shape) for b in state.model.buffers()] == [(3,), (3,), ()]
    assert state.model.training


class Steps(nn.Module):
    """x (B, L, 3) of at least so many steps → logits (B, 2)."""

    def __init__(self, least: int):
        super().__init__()
        self.steps = nn.LazyConv1d(2, least)

    def forward(self, x):
        return self.steps(x.transpose(1, 2)).mean(2)


def test_lazy_layers_that_need_long_sequences_learn_their_sizes_or_say_of_what_they_cannot(tmp_path):
    long = [(np.random.default_rng(i).normal(size=(50 + i, 3)).astype(np.float32), i % 2) for i in range(20)]
    pack = nb.pack(long, into=tmp_path / "pack", progress=False)
    model: Any = nb.TrainState(nb.classify(Steps(40)), pack, own.PLAN).model
    assert model.steps.weight.shape == (2, 3, 40)
    with pytest.raises(TrainError, match=r"Steps: .*from two samples of zeros, x float32 \(·, 3\); write layers"):
        nb.TrainState(nb.classify(Steps(3000)), pack, own.PLAN)


shared = own.Small(3)


class Sharing(own.Mine):
    def model(self, card, plan):
        return nn.Sequential(shared)


@pytest.mark.parametrize("task", [nb.classify(shared), nb.classify(lambda: shared), Sharing], ids=str)
def test_two_runs_of_one_network_begin_alike_and_leave_it_as_it_was(packs, task):
    pack, before, models = packs["images"], copy.deepcopy(shared.state_dict()), []
    for _ in range(2):
        state = nb.TrainState(task, pack, own.PLAN.replace(epochs=1))
        assert all(torch.equal(a, b) for a, b in zip(state.model.state_dict().values(), before.values(), strict=True))
        for _ in nb.train(task, state, pack):
            continue
        models.append(state.model)
    assert all(torch.equal(value, before[name]) for name, value in shared.state_dict().items())
    assert not {*models[0].parameters()} & {*models[1].parameters()}


class Hooked(own.Small):
    """With a hook that keeps what its features are, in itself."""

    def __init__(self, classes: int):
        super().__init__(classes)
        self.found: Any = None
        self.features.register_forward_hook(lambda module, given, found: setattr(self, "found", found))

    def forward(self, x):
        self.features(x)
        return self.head(self.found.flatten(1))


def test_a_network_that_a_function_makes_is_itself_trained_with_its_hooks(packs):
    state = nb.TrainState(nb.classify(Hooked), packs["images"], own.PLAN.replace(epochs=1))
    before = copy.deepcopy(state.model.state_dict())
    for _ in nb.train(state.task, state, packs["images"]):
        continue
    assert all(not torch.equal(value, before[name]) for name, value in state.model.named_parameters())


class Wrapped(nn.Module):
    """Outputs as transformers and torchvision return them."""

    def __init__(self, kind: str, classes: int):
        super().__init__()
        self.kind, self.net = kind, own.Small(classes)

    def forward(self, x):
        logits = self.net(x)
        outputs = {"logits": SimpleNamespace(logits=logits, loss=None), "out": {"out": logits, "aux": x}}
        return {**outputs, "list": [logits]}[self.kind]


def test_outputs_with_logits_or_out_count_as_that_and_others_are_refused(tmp_path, packs):
    plain = fitted(nb.classify(own.Small), packs["images"], tmp_path / "plain", epochs=1)
    for kind in ("logits", "out"):
        task = nb.classify(lambda classes, kind=kind: Wrapped(kind, classes))
        run = fitted(task, packs["images"], tmp_path / kind, epochs=1)
        assert nb.evaluate(run, packs["images"]) == nb.evaluate(plain, packs["images"])
        assert run.predict_pack(packs["images"], [0, 1]) == plain.predict_pack(packs["images"], [0, 1])
    with pytest.raises(TrainError, match=r"returns a list without a tensor as \.logits or \['out'\]"):
        fitted(nb.classify(lambda classes: Wrapped("list", classes)), packs["images"], tmp_path / "list")


def test_frozen_parts_stay_with_their_statistics_and_groups_are_a_hook_as_in_any_task(packs):
    net = own.Small(3)
    net.features.requires_grad_(False)
    task: Any = nb.classify(net)
    task.groups = lambda model, plan: [{"params": model.head.parameters(), "lr_scale": 10.0}]
    state = nb.TrainState(task, packs["images"], own.PLAN.replace(epochs=2))
    for _ in nb.train(task, state, packs["images"]):
        continue
    before, after = net.state_dict(), state.model.state_dict()
    moved = [name for name, value in before.items() if not torch.equal(value, after[name])]
    assert moved == ["head.weight", "head.bias"], "not the running mean of features.1, a BatchNorm2d"
    assert [group["lr_scale"] for group in state.optimizer.param_groups] == [10.0]


class Pair(nn.Module):
    """Of two vectors, under names of which one is the target's."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 2)

    def forward(self, x, y):
        return self.head(torch.cat([x, y], 1))


def test_a_network_never_gets_the_target_for_an_input_of_its_name(tmp_path):
    drawn = np.random.default_rng(0).random((40, 2)).astype(np.float32)
    items = [((pair[:1], pair[1:]), "less" if pair[0] < pair[1] else "more") for pair in drawn]
    pack = nb.pack(items, into=tmp_path / "pack", progress=False)
    assert list(pack.options["inputs"]) == ["x1", "x2"]
    state = nb.TrainState(nb.classify(Pair), pack, nb.Plan())
    assert call_of(state.model).startswith("Pair.forward(x=x1, y=x2)")
    assert state.model({name: torch.from_numpy(pack.arrays[name][:3]) for name in pack.columns}).shape == (3, 2)


def test_an_image_that_is_a_target_is_not_left_as_it_is_while_its_input_turns(tmp_path):
    images = [(np.full((8, 8, 3), i, np.uint8), np.full((8, 8), i, np.float32)) for i in range(20)]
    pack = nb.pack(images, into=tmp_path / "pack", progress=False)
    with pytest.raises(TrainError, match=r"flip would leave the target .* as it is"):
        nb.TrainState(nb.regress(nn.Identity(), augment=["flip"]), pack, nb.Plan())


MAPS: dict[str, Any] = {
    "a map beside the image": ({"image": (3, 8, 8), "depth": (8, 8)}, ["flip", "colour"], r"flip would leave depth \("),
    "boxes": ({"image": (3, 8, 8), "y": (2, 4)}, ["rotate"], r"rotate would leave the target \("),
    "colour, which moves nothing": ({"image": (3, 8, 8), "depth": (8, 8)}, ["colour"], ""),
    "numbers beside the image": ({"image": (3, 8, 8), "more": (5,)}, ["flip"], ""),
}


@pytest.mark.parametrize("name", MAPS)
def test_what_has_places_of_its_own_is_not_left_as_it_is_while_the_image_turns(tmp_path, name):
    shapes, augment, said = MAPS[name]
    items = []
    for i in range(20):
        item = {key: np.full(shape, i / 20, np.float32) for key, shape in shapes.items()}
        items.append({**item, "y": item["y"][: 1 + i % 2]} if "y" in item else {**item, "y": i % 2})
    pack = nb.pack(items, into=tmp_path / "pack", progress=False)

    class Turned(own.Mine):
        metrics: Any = ()

        def model(self, card, plan):
            return module(forward=lambda self, image: image)

    Turned.augment = augment
    with pytest.raises(TrainError, match=said or "Net has no parameter"):
        nb.TrainState(Turned, pack, nb.Plan())


@pytest.mark.parametrize("value", [200.0, 300, -1, float("nan")])
def test_an_item_to_predict_beyond_the_range_of_its_column_is_refused(packs, value):
    card = packs["images"].card
    assert card.columns["x"].dtype == "|u1"
    with pytest.raises(PackError) as refused:
        sample_of(np.full(card.columns["x"].shape, value), card)
    assert refused.value.args[1].startswith(("x must be kept in bytes", "all numbers of x"))


def test_whole_numbers_are_values_where_they_are_packed_as_such(tmp_path):
    frame = houses(60).round().astype({"price": int})
    pack = nb.pack(frame, target="price", into=tmp_path / "classes", progress=False)
    with pytest.raises(TrainError, match=r"unless they are packed with nb\.pack\(…, classes=False\)"):
        nb.TrainState(nb.regress(own.line), pack, own.PLAN)
    pack = nb.pack(frame, target="price", classes=False, into=tmp_path / "values", progress=False)
    assert (pack.classes, pack.arrays["y"].dtype) == ([], np.int64)
    nothing = nn.Linear(3, 1)
    for parameter in nothing.parameters():
        nn.init.zeros_(parameter)
    state = nb.TrainState(nb.regress(nothing), pack, own.PLAN)
    prices = np.asarray(pack.arrays["y"], float)
    error = np.abs(prices[pack.ids("val")] - prices[pack.ids("train")].mean()).mean()
    assert nb.evaluate(state, pack, "val")["mae"] == pytest.approx(error, rel=1e-4)
    with pytest.raises(PackError, match="y must be numbers, or images, in all items, got text"):
        nb.pack([(0.5, "yes"), (0.7, "no")], classes=False, into=tmp_path / "texts", progress=False)


class Same(nn.Module):
    """Its input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x + 0 * self.weight


TARGETS = {
    "whole numbers": (np.int64, (2,)),
    "bytes that are no image": (np.uint8, (5,)),
    "a sequence": (np.float32, (5, 2)),
    "an image": (np.uint8, (8, 6, 3)),
    "a grey image": (np.uint8, (8, 6)),
    "a map of floats": (np.float32, (3, 8, 6)),
}


@pytest.mark.parametrize("name", TARGETS)
def test_values_of_any_shape_are_targets_in_their_own_unit(tmp_path, name):
    kind, shape = TARGETS[name]
    arrays = [np.random.default_rng(i).integers(0, 200, shape).astype(kind) for i in range(20)]
    picture = kind == np.uint8 and len(shape) > 1
    data = [(array if picture else array.astype(np.float32), array) for array in arrays]
    pack = nb.pack(data, into=tmp_path / "pack", progress=False)
    run = fitted(nb.regress(Same), pack, tmp_path / "run", epochs=1)
    unit = 255 if picture else 1
    assert nb.evaluate(run, pack) == pytest.approx({"loss": 0, "mae": 0}, abs=1e-4)
    for answer, array in zip(run.predict([x for x, _ in data[:3]]), arrays, strict=False):
        np.testing.assert_allclose(answer, array / unit, rtol=1e-4, atol=1e-4)
    for preview in Previews(nb.TrainState(run.task, pack, run.plan), pack).now():
        assert preview.predicted.startswith(f"{' × '.join(map(str, shape))} values (true: ")


# -- metrics


def test_metrics_by_name_are_what_counting_one_by_one_gives(packs):
    card, rng = packs["images"].card, np.random.default_rng(0)
    y, logits = rng.integers(3, size=50), rng.normal(size=(50, 3)).astype(np.float32)
    pairs = score(
        ["accuracy", "top5_accuracy", "balanced_accuracy", "f1"],
        torch.from_numpy(logits),
        {"y": torch.from_numpy(y)},
        card,
    )
    guess = logits.argmax(1)
    recalls = [np.mean(guess[y == k] == k) for k in range(3)]
    f1 = []
    for k in range(3):
        precision = np.mean(y[guess == k] == k)
        f1.append(2 * precision * recalls[k] / (precision + recalls[k]))
    expected = {
        "accuracy": np.mean(guess == y),
        "top5_accuracy": 1.0,
        "balanced_accuracy": np.mean(recalls),
        "f1": np.mean(f1),
    }
    values = {name: np.mean(np.asarray(n) / np.asarray(d)) for name, (n, d) in pairs.items()}
    assert values == pytest.approx(expected)
    card, y, guess = (
        packs["rows"].card,
        rng.normal(size=9).astype(np.float32),
        rng.normal(size=(9, 1)).astype(np.float32),
    )
    pairs = score(["mae", "mse"], torch.from_numpy(guess), {"y": torch.from_numpy(y)}, card)
    assert {name: float(n) / d for name, (n, d) in pairs.items()} == pytest.approx(
        {"mae": np.abs(guess[:, 0] - y).mean(), "mse": np.square(guess[:, 0] - y).mean()}
    )
    assert METRICS.keys() == expected.keys() | {"mae", "mse"}


def test_a_function_is_a_metric_in_the_unit_of_the_targets(tmp_path, packs):
    def within_500(outputs, batch):
        return ((outputs.view(-1) - batch["y"]).abs() < 500).sum(), len(batch["y"])

    task = nb.regress(own.line, metrics=["mae", within_500, lambda outputs, batch: {"least": (outputs.min(), 1)}])
    run = fitted(task, packs["rows"], tmp_path / "run", epochs=2, batch_size=16)
    found, ids = nb.evaluate(run, packs["rows"], "val"), packs["rows"].ids("val")
    answers = np.array(run.predict_pack(packs["rows"], ids))
    targets = np.array([float(packs["rows"].sample(i)["y"]) for i in ids])
    assert found["within_500"] == pytest.approx(np.mean(np.abs(answers - targets) < 500))
    assert found["mae"] == pytest.approx(np.abs(answers - targets).mean(), rel=1e-4)
    assert found["least"] > 500
    assert task.BEST == "-mae"


def hit(outputs, batch):
    return (outputs.argmax(1) == batch["y"]).sum(), len(outputs)


def test_a_function_in_a_class_body_is_a_metric(packs):
    class Hitting(own.Mine):
        metrics: Any = hit

    states = [nb.TrainState(task, packs["images"], own.PLAN) for task in (Hitting, own.Mine)]
    found, plain = (nb.evaluate(state, packs["images"], "val") for state in states)
    assert found["hit"] == plain["accuracy"]


def test_a_weighted_loss_is_the_mean_over_the_weights_whatever_the_batch(packs):
    weight, pack = torch.tensor([1.0, 10.0, 0.1]), packs["images"]
    for loss in (nn.CrossEntropyLoss(weight, label_smoothing=0.1), nn.CrossEntropyLoss(weight, ignore_index=2)):
        state = nb.TrainState(nb.classify(own.Small, loss=loss), pack, own.PLAN)
        raw = {name: torch.from_numpy(pack.arrays[name][pack.ids("val")]) for name in ("x", "y")}
        with torch.no_grad():
            expected = float(loss(state.model.eval()(state.task.batch(raw, own.PLAN, None)), raw["y"]))
        for size in (5, 90):
            assert nb.evaluate(state, pack, "val", batch_size=size)["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_loss_of_ones_own_takes_the_place_of_the_default(packs):
    losses = [None, F.cross_entropy, nn.CrossEntropyLoss(reduction="none"), counted]
    values = []
    for loss in losses:
        state = nb.TrainState(nb.classify(own.Small, loss=loss), packs["images"], own.PLAN)
        values.append(nb.evaluate(state, packs["images"], "val")["loss"])
    assert values == pytest.approx([values[0]] * 4, rel=1e-5)


def counted(outputs, y):
    return F.cross_entropy(outputs, y, reduction="sum"), len(y)


def test_a_loss_that_was_changed_is_that_of_the_next_run(packs):
    loss: Any = nn.CrossEntropyLoss(weight=torch.ones(3))
    task, values = nb.classify(own.Small, loss=loss), []
    for smoothing, weight in ((0.0, 1.0), (0.0, 0.1), (0.5, 0.1)):
        loss.label_smoothing, loss.weight[0] = smoothing, weight
        state = nb.TrainState(task, packs["images"], own.PLAN)
        values.append(nb.evaluate(state, packs["images"], "val")["loss"])
        loss.weight[0] = 100
        assert nb.evaluate(state, packs["images"], "val")["loss"] == values[-1], "a run keeps its own"
    assert len(set(values)) == 3


class Scaled(own.Mine):
    """With a batch of its own."""

    def batch(self, raw, plan, draws):
        return raw | {"x": raw["x"].permute(0, 3, 1, 2) / 255}


class Deep(own.Mine):
    def __init__(self, width, depth, slope=0.1):
        self.width, self.depth, self.slope = width, depth, slope


class Reading(own.Small):
    """With a lock."""

    def __init__(self):
        super().__init__(3)
        self.lock = threading.Lock()


def test_a_task_without_a_name_is_called_what_made_it(packs):
    unnamed = nb.regress(own.line)
    with pytest.raises(PackError, match=r"must be a nb\.Pack, got str; make one with nb\.pack\(data\)$"):
        nb.fit(unnamed, "x", **QUIET)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PlanError, match=r"got int; use nb\.regress\(…\)\.PLAN"):
        nb.fit(unnamed, packs["rows"], 3, **QUIET)
    assert repr(unnamed) == "Task nb.regress(…)"


REFUSED: dict[str, tuple[Any, str, str]] = {
    "labels that are floats": (
        lambda: nb.classify(own.line),
        "rows",
        r"nb\.regress is for them\. Labels that are floats .* astype\(int\), one-hot",
    ),
    "another number of classes": (
        lambda: nb.classify(own.Small(4)),
        "images",
        r"one logit for each of 3 classes, \(B, 3\), got \(\d+, 4\)",
    ),
    "values as classes": (
        lambda: nb.classify(own.Small),
        "rows",
        r"nb\.classify needs .* classes; nb\.regress is for them",
    ),
    "classes as values": (
        lambda: nb.regress(own.Small),
        "images",
        r"nb\.regress needs .* values; nb\.classify is for them",
    ),
    "a metric of values": (
        lambda: nb.classify(own.Small, metrics="mae"),
        "images",
        r"'mae' is for values, but .* classes; choose accuracy",
    ),
    "no such metric": (
        lambda: nb.classify(own.Small, metrics=["acuracy"]),
        "images",
        r"no 'acuracy'; did you mean accuracy\?",
    ),
    "pictures that are none": (
        lambda: nb.regress(own.line, augment=["flip"]),
        "rows",
        r"flip needs images, but the inputs are x float32 \(4\)",
    ),
    "ragged mixup": (
        lambda: nb.classify(own.Recurrent, augment=["mixup"]),
        "sequences",
        "mixup needs images or numbers of one shape",
    ),
    "a parameter nobody knows": (
        lambda: nb.classify(lambda depth: own.Small(3)),
        "images",
        r"'depth', but can get only classes, inputs, card, plan",
    ),
    "no module": (lambda: classify(lambda: "net"), "images", r"model must return a torch\.nn\.Module, got str"),
    "no function": (lambda: classify(3), "images", "must be a torch.nn.Module or a function that makes one, got 3"),
    "columns nobody has": (
        lambda: nb.classify(module(forward=lambda self, a, b: a)),
        "images",
        r"Net\.forward\(a, b\): which columns are a, b\?",
    ),
    "values of another shape": (
        lambda: nb.regress(lambda: nn.Linear(4, 2)),
        "rows",
        r"one value for each element of the target, \(\d+,\), got \(\d+, 2\)",
    ),
    "two metrics of one name": (
        lambda: nb.classify(own.Small, metrics=[lambda outputs, batch: (1, 1), lambda outputs, batch: (2, 1)]),
        "images",
        "metrics: '<lambda>' is there twice; rename the function",
    ),
    "a metric called loss": (
        lambda: nb.classify(own.Small, metrics=lambda outputs, batch: {"loss": (1, 1)}),
        "images",
        "'loss' is the loss, which is always reported",
    ),
    "a metric that is no pair": (
        lambda: nb.classify(own.Small, metrics=["accuracy", lambda outputs, batch: outputs.mean()]),
        "images",
        r"<lambda> must be \(sum, count\), which add up over batches, got a tensor of shape \(\)",
    ),
    "whole numbers for a layer of floats": (
        lambda: nb.classify(nn.LazyLinear(2)),
        "whole",
        r"Linear: .*it gets x int64 \(4\): cast them in the Dataset",
    ),
    "a batch that leaves out augment": (
        lambda: Scaled(),
        "images",
        r"its `batch` leaves out augment=\('flip',\); begin it with batch = super\(\)\.batch",
    ),
    "a loss with parameters": (
        lambda: nb.classify(own.Small, loss=nn.Bilinear(3, 3, 1)),
        "images",
        "loss Bilinear has parameters, which are not trained",
    ),
    "a loss of other targets": (
        lambda: nb.classify(own.Small, loss=nn.BCEWithLogitsLoss()),
        "images",
        r"loss BCEWithLogitsLoss does not take outputs \(2, 3\) and y \(2,\) int64: Target size .*; choose another",
    ),
    "a network": (lambda: own.Small(3), "images", r"got the network Small; pass nb\.classify\(net\) or nb\.regress"),
    "a network's class": (lambda: own.Small, "images", r"task must be a nb\.Task, got the network Small"),
    "no call": (lambda: nb.classify, "images", r"got a function; pass nb\.classify\(net\)"),
    "a class with arguments": (
        lambda: Deep,
        "images",
        r"Deep needs width, depth; pass an instance: Deep\(width, depth\)",
    ),
    "a network that has no copy": (
        lambda: nb.classify(Reading()),
        "images",
        "a copy of its network, and Reading cannot be copied: .*; keep what cannot be copied",
    ),
    "a plan that is none": (
        lambda: classify(own.Small, plan={"epochs": 3}),
        "images",
        "plan must be a nb.Plan, got dict",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_train_is_answered_in_a_sentence(tmp_path, packs, name):
    make, data, said = REFUSED[name]
    whole = [(np.arange(4) + i, i % 2) for i in range(20)]
    pack = packs[data] if data in packs else nb.pack(whole, into=tmp_path / "pack", progress=False)
    with pytest.raises(TrainError, match=said):
        nb.fit(make(), pack, own.PLAN, tmp_path / "run", **QUIET)
    assert not (tmp_path / "run").exists(), "said before anything is trained"


# -- answers to files, items and rows


def test_items_of_a_dataset_are_predicted_like_the_packs_samples(tmp_path, packs):
    pack, data = packs["images"], own.images(90)
    run = fitted(own.task, pack, tmp_path / "run", epochs=1)
    places = [int(name.removeprefix("item ")) for name in pack.names[:6]]
    expected = run.predict_pack(pack, range(6))
    chosen = [data[i] for i in places]
    arrays = [image for image, _ in chosen]
    given: list[Any] = [
        chosen,
        arrays,
        np.stack(arrays),
        torch.from_numpy(np.stack(arrays)),
        [Image.fromarray(array) for array in arrays],
        [{"x": array} for array in arrays],
        torch.utils.data.Subset(data, places),  # pyright: ignore[reportArgumentType]
    ]
    for form in given:
        assert run.predict(form) == expected
    assert run.predict(iter(arrays)) == expected
    for single in (chosen[0], arrays[0], torch.from_numpy(arrays[0]), Image.fromarray(arrays[0]), {"x": arrays[0]}):
        [answer] = run.predict(single)
        assert (answer.name, answer.probability) == (expected[0].name, pytest.approx(expected[0].probability, abs=1e-5))
    with pytest.raises(
        PackError, match=r"an item \(ndarray\): x must have the shape \(12, 12, 3\), .*, got \(9, 12, 3\)"
    ):
        run.predict([arrays[0][:9]])
    with pytest.raises(PackError, match="an item must have x, got age; add what is missing"):
        run.predict([{"age": 3}])
    with pytest.raises(PackError, match="not trained on a DataFrame"):
        run.predict(pd.DataFrame({"x": [1]}))


def houses(count: int) -> pd.DataFrame:
    """Prices about 275,000 with a standard deviation of about 110,000."""
    rng = np.random.default_rng(0)
    frame = pd.DataFrame({"area": rng.uniform(30, 200, count), "town": rng.choice(["Ghent", "Lille"], count)})
    frame["price"] = frame["area"] * 2000 + (frame["town"] == "Lille") * 90_000
    return frame


def test_rows_of_a_dataframe_are_predicted_by_the_encoding_of_training(tmp_path):
    frame = houses(120)
    pack = nb.pack(frame, target="price", into=tmp_path / "pack", progress=False)
    run = fitted(nb.regress(own.line), pack, tmp_path / "run", epochs=4, batch_size=8)
    places = [int(name.removeprefix("row ")) for name in pack.names[:5]]
    rows = frame.iloc[places]
    expected = run.predict_pack(pack, range(5))
    assert run.predict(rows) == pytest.approx(expected)
    assert run.predict(rows[["town", "area"]]) == pytest.approx(expected), "by name, and without the target"
    assert run.predict(rows.iloc[0]) == pytest.approx(expected[:1])
    with pytest.raises(PackError, match=r"row 1: town must be one of Ghent, Lille, .*, got Namur"):
        run.predict(pd.DataFrame({"area": [50, 60], "town": ["Lille", "Namur"]}))


def test_two_inputs_and_floats_of_a_transform_are_predicted_as_the_dataset_returns_them(tmp_path, two):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = own.Small(4)
            self.head = nn.Linear(5, 2)

        def forward(self, image, age):
            return self.head(torch.cat([self.net(image), age[:, None]], 1))

    run = fitted(nb.classify(Both), two, tmp_path / "run", epochs=1, batch_size=8)
    image, age = two.sample(0)["image"], two.sample(0)["age"]
    for item in ({"image": image, "age": age}, (image, age), (image, age, 1)):
        assert run.predict(item) == run.predict_pack(two, [0])
    floats = [(torch.from_numpy(image).permute(2, 0, 1) / 255 - 0.5, label) for image, label in own.images(30)]
    pack = nb.pack(floats, into=tmp_path / "floats", progress=False)
    run = fitted(own.task, pack, tmp_path / "other", epochs=1)
    assert pack.columns["x"].dtype == "<f4"
    assert run.predict(floats)[int(pack.names[0].removeprefix("item "))] == run.predict_pack(pack, [0])[0]
    with pytest.raises(PackError, match=r"x must be float32 \(3, 12, 12\), as in other items, got an image"):
        run.predict(Image.new("RGB", (12, 12)))


def test_a_number_and_a_sequence_are_one_item(tmp_path, packs):
    numbers = nb.pack([(float(i), i % 2) for i in range(30)], into=tmp_path / "pack", progress=False)
    net = nn.Sequential(nn.Unflatten(0, (-1, 1)), nn.Linear(1, 2))
    run = fitted(nb.classify(net), numbers, tmp_path / "numbers", epochs=1)
    for one in (3.0, np.float32(3), torch.tensor(3.0)):
        assert run.predict(one) == run.predict([3.0])
    assert run.predict(np.array([3.0, 4.0])) == run.predict([3.0, 4.0])
    with pytest.raises(PackError, match="an item must hold arrays"):
        run.predict(None)
    run = fitted(nb.classify(own.Recurrent), packs["sequences"], tmp_path / "sequences", epochs=1)
    sequence = packs["sequences"].sample(0)["x"]
    assert run.predict(sequence) == run.predict(torch.from_numpy(sequence)) == run.predict([sequence])
    with pytest.raises(PackError, match="split must be one of train, val, test, got 'tset'"):
        nb.evaluate(run, packs["sequences"], split="tset")


MODULE = """
import nbtools as nb
import own

class Mine(own.Mine):
    PLAN = own.PLAN

task = nb.classify(own.Small, plan=own.PLAN)
number = 3
"""


def pictures(folder, count, classes=tuple(own.STRIPES), side=12):
    for i, (image, name) in enumerate(own.images(count)):
        if name in classes:
            (folder / name).mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).resize((side, side)).save(folder / name / f"{i}.png")
    return folder


@pytest.mark.parametrize("name", ["Mine", "task"])
def test_the_terminal_trains_evaluates_on_new_data_and_predicts(tmp_path, capsys, monkeypatch, name):
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "terminal_task", raising=False)
    (tmp_path / "terminal_task.py").write_text(MODULE)
    raw, run = str(pictures(tmp_path / "raw", 60)), ["--run", str(tmp_path / "run")]
    train = ["train", f"terminal_task:{name}", raw, *run, "--no-receipt", "--size", "12,12"]
    assert main([*train, "--epochs", "1"]) == 0
    more = ["--no-receipt", "--data", raw, "--size", "12,12", "--epochs", "2"]
    assert main(["train", *run, *more, "--task", f"terminal_task:{name}"]) == 0
    assert "2 of 2 epochs" in capsys.readouterr().out, "the other spelling resumes the run"
    new = str(pictures(tmp_path / "new", 30, own.STRIPES[1:], side=20))
    assert main(["evaluate", f"--task=terminal_task:{name}", new, *run, "--test", "1.0"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    opened = nb.Run.open(tmp_path / "run")
    pack = opened.pack(new, test=1.0, progress=False)
    assert (pack.classes, len(pack)) == (opened.card.classes, pack.splits["test"])
    assert found == nb.evaluate(opened, pack)
    file = next((tmp_path / "new" / "down").glob("*.png"))
    assert main(["predict", f"terminal_task:{name}", *run, str(file)]) == 0
    assert f"{opened.predict(file)[0]}" in capsys.readouterr().out
    assert opened.predict([str(file)]) == opened.predict(file)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("own:Nobody", r"no task .own:Nobody.: use captcha.*module .own. has no attribute .Nobody."),
        ("nowhere:Mine", "no task 'nowhere:Mine': use captcha"),
    ],
)
def test_a_name_that_is_no_task_is_answered_with_those_there_are(capsys, name, said):
    assert main(["pack", name, "x"]) == 1
    assert re.search(said, capsys.readouterr().err)


class Turning(torch.utils.data.Dataset):
    """Images mirrored at random."""

    def __init__(self):
        self.data = own.images(48)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        image, name = self.data[i]
        return (image[:, ::-1].copy() if torch.rand(()) < 0.5 else image), name


def test_a_dataset_with_random_transforms_is_advised_to_be_read_in_each_epoch(tmp_path):
    pack = nb.pack(Turning(), random=True, into=tmp_path / "pack", progress=False)
    advice = nb.advise(own.task, pack, measure=False)
    assert advice.plan.feed == "workers"
    assert advice.reasons["feed"] == "the Dataset's transforms are random: it is read again in each epoch"
    run = nb.fit(own.task, pack, advice.plan.replace(epochs=1, workers=0), tmp_path / "run", **QUIET)
    assert len(run.history.of("epoch")) == 1
    first, second = (nb.evaluate(run, pack, split="train", feed="workers", workers=0) for _ in range(2))
    assert first == second, "evaluated on the reading that the pack keeps"


def test_advice_measured_for_one_network_without_a_name_is_not_given_to_another(packs):
    wide, slim = (
        nb.classify(lambda classes, n=n: nn.Sequential(nn.Flatten(), nn.Linear(432, n), nn.Linear(n, classes)))
        for n in (9, 3)
    )
    advice = nb.advise(wide, packs["images"], measure=False)
    labels = {label(task, packs["images"], advice, False) for task in (wide, slim, wide)}
    assert len(labels) == 2


CELLS: dict[str, tuple[int, str, float, str]] = {  # lines, metric, at least or at most, cell
    "pictures": (
        6,
        "accuracy",
        0.9,
        """\
import nbtools as nb
from torch import nn

net = nn.Sequential(nn.LazyConv2d(16, 3), nn.ReLU(), nn.AdaptiveMaxPool2d(4), nn.Flatten(), nn.LazyLinear(3))
pack = nb.pack("pictures", val=0.2)
run = nb.fit(nb.classify(net, augment=["crop"]), pack, nb.Plan(epochs=8, batch_size=16, lr=1e-2))
""",
    ),
    "table": (
        8,
        "mae",
        15_000,
        """\
import nbtools as nb
import pandas as pd
from torch import nn

frame = pd.read_csv("houses.csv")
pack = nb.pack(frame, target="price", val=0.2)
net = nn.Sequential(nn.LazyLinear(32), nn.ReLU(), nn.Linear(32, 1))
run = nb.fit(nb.regress(net), pack, nb.Plan(epochs=12, batch_size=8, lr=1e-2))
""",
    ),
    "sequences": (
        25,
        "accuracy",
        0.9,
        """\
import nbtools as nb
import torch
from torch import nn


class Gru(nn.Module):
    def __init__(self, classes, inputs):
        super().__init__()
        self.gru = nn.GRU(inputs, 16, batch_first=True)
        self.head = nn.Linear(16, classes)

    def forward(self, x, lengths):
        steps, _ = self.gru(x)
        return self.head(steps[torch.arange(len(x)), lengths - 1])


pack = nb.pack(list(zip(sequences, labels, strict=True)), val=0.2)
run = nb.fit(nb.classify(Gru), pack, nb.Plan(epochs=15, batch_size=16, lr=1e-2))
""",
    ),
}


@pytest.mark.parametrize("name", CELLS)
def test_a_cell_of_few_lines_trains_to_what_it_should(tmp_path, monkeypatch, name):
    lines, metric, limit, cell = CELLS[name]
    assert len([line for line in cell.splitlines() if line.strip()]) <= lines
    assert all(len(line) <= 120 for line in cell.splitlines())
    monkeypatch.chdir(tmp_path)
    pictures(tmp_path / "pictures", 90)
    houses(200).to_csv("houses.csv", index=False)
    sequences, labels = zip(*own.sequences(120), strict=True)
    monkeypatch.setattr(nb, "fit", partial(nb.fit, **QUIET))
    scope: dict[str, Any] = {"sequences": sequences, "labels": labels, "__name__": "cell"}
    exec(cell, scope)
    value = nb.evaluate(scope["run"], scope["pack"], "val")[metric]
    assert value >= limit if metric == "accuracy" else value <= limit


def test_the_cells_are_formatted():
    ruff = [sys.executable, "-m", "ruff", "format", "--line-length", "120", "-"]
    pytest.importorskip("ruff")
    for *_, cell in CELLS.values():
        assert subprocess.run(ruff, input=cell, capture_output=True, text=True, check=True).stdout == cell


@pytest.mark.full
@pytest.mark.parametrize("name", ["torchvision.models", "timm", "transformers"])
def test_published_models_train_as_they_are(tmp_path, packs, name):
    """In an environment that has them beside a torch that they import with."""
    module: Any = pytest.importorskip(name, exc_type=ImportError)
    pack = packs["images"]
    if name == "transformers":
        config = module.BertConfig(hidden_size=24, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48)
        config.vocab_size, config.num_labels = 20, 2
        rng, samples = np.random.default_rng(0), []
        for i in range(60):
            ids = rng.integers(2, 20, int(rng.integers(4, 12)))
            ids[-1] = i % 2
            samples.append({"input_ids": ids, "attention_mask": np.ones_like(ids), "label": i % 2})
        pack = nb.pack(samples, into=tmp_path / "pack", progress=False)
        make: Any = lambda: module.BertForSequenceClassification(config)  # noqa: E731
        called = "BertForSequenceClassification.forward(input_ids, attention_mask)"
    elif name == "timm":
        make, called = lambda classes: module.create_model("resnet10t", num_classes=classes), "ResNet.forward(x)"
    else:
        make, called = lambda classes: module.resnet18(num_classes=classes), "ResNet.forward(x)"
    state = nb.TrainState(nb.classify(make), pack, own.PLAN)
    assert call_of(state.model).startswith(called)
    run = nb.fit(nb.classify(make), pack, own.PLAN.replace(epochs=1, lr=1e-3), tmp_path / "run", **QUIET)
    assert len(run.predict_pack(pack, range(5))) == 5
    assert np.isfinite(run.summary()["train_loss"]).all()
