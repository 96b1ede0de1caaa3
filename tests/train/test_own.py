"""A task of one's own in a cell: nb.classify, nb.regress and a class with two methods, on data that no demo writes."""

import copy
import inspect
from dataclasses import replace
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
from nbtools.data import Card
from nbtools.errors import PackError, TrainError
from nbtools.train import Sums
from nbtools.train.defaults import score

pytestmark = pytest.mark.usefixtures("one_cache")

classify: Any = nb.classify


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packs")
    return {name: own.packed(name, folder) for name in own.DATA}


def fitted(task, pack, folder, **plan):
    return nb.fit(task, pack, (task.PLAN if nb.Plan() != task.PLAN else own.PLAN).replace(**plan), folder, **QUIET)


# -- learning


def test_a_module_that_is_given_stays_as_it_was(tmp_path, packs):
    net = own.Small(3)
    before = copy.deepcopy(net.state_dict())
    task = nb.classify(net, metrics=["accuracy", "balanced_accuracy"], augment=["crop"])
    run = fitted(task, packs["images"], tmp_path / "run", epochs=2)
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


def test_a_sequence_alone_and_in_a_padded_batch_gets_the_same_answer(tmp_path, packs):
    run = fitted(own.order, packs["sequences"], tmp_path / "run", epochs=1)
    alone = [run.predict_pack(packs["sequences"], [i])[0] for i in range(5)]
    together = run.predict_pack(packs["sequences"], range(5))
    assert [a.name for a in alone] == [a.name for a in together]
    assert [a.probability for a in alone] == pytest.approx([a.probability for a in together], abs=1e-5)


# -- what every task's runs do


@pytest.mark.parametrize("name", ["sequences", "colours", "two methods"])
def test_interrupted_after_any_records_equals_uninterrupted_also_across_changes_of_batch_size(packs, name):
    task, data = own.TASKS[name]
    state, history = trained(packs[data], task, own.PLAN, {2: 5, 5: 30}, {1, 3, 7})
    expected, rows = trained(packs[data], task, own.PLAN, {2: 5, 5: 30})
    assert log(history) == log(rows)
    same(state, expected)


# -- the call of a network


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """Two inputs: an image and a number."""
    samples = [{"image": image, "age": np.float32(i), "y": i % 2} for i, (image, _) in enumerate(own.images(20))]
    return nb.pack(samples, into=tmp_path_factory.mktemp("two") / "pack", progress=False)


CALLS: dict[str, Any] = {  # how a forward names its inputs → what it sees of (image, age)
    "by name": lambda self, age, image: (image, age),
    "one by keyword only": lambda self, age, *, image: (image, age),
    "in order": lambda self, a, b: (a, b),
    "the dict": lambda self, batch: (batch["image"], batch["age"]),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_forward_gets_what_its_signature_names(tmp_path, two, name):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(1, 2)

        def logits(self, given):
            image, age = given
            assert (image.shape[1:], age.ndim) == ((3, 12, 12), 1)
            return self.head(age[:, None])

    call = CALLS[name]
    Net.forward = lambda self, *args, **named: self.logits(call(self, *args, **named))
    Net.forward.__signature__ = inspect.signature(call)  # pyright: ignore[reportFunctionMemberAccess]
    run = nb.fit(nb.classify(Net), two, own.PLAN.replace(epochs=1, batch_size=8), tmp_path / "run", **QUIET)
    image, age = two.sample(0)["image"], two.sample(0)["age"]
    for item in ({"image": image, "age": age}, (image, age), (image, age, 1)):
        assert run.predict(item) == run.predict_pack(two, [0])


def test_a_network_never_gets_the_target_for_an_input_of_its_name(tmp_path):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(2, 2)

        def forward(self, x, y):
            return self.head(torch.cat([x, y], 1))

    drawn = np.random.default_rng(0).random((40, 2)).astype(np.float32)
    items = [(pair[:1], pair[1:], "less" if pair[0] < pair[1] else "more") for pair in drawn]
    pack = nb.pack(items, target=2, into=tmp_path / "pack", progress=False)
    assert list(pack.options["inputs"]) == ["x1", "x2"]
    assert nb.evaluate(nb.TrainState(nb.classify(Pair), pack, nb.Plan()), pack, "train")["loss"] > 0


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


MAPS: dict[str, Any] = {
    "an image as target": ({"image": (3, 8, 8), "y": (8, 8)}, ["flip"], r"flip would leave the target \("),
    "a map beside the image": ({"image": (3, 8, 8), "depth": (8, 8)}, ["flip", "colour"], r"flip would leave depth \("),
    "boxes": ({"image": (3, 8, 8), "y": (2, 4)}, ["flip"], r"flip would leave the target \("),
}


@pytest.mark.parametrize("name", MAPS)
def test_what_has_places_of_its_own_is_not_left_as_it_is_while_the_image_turns(tmp_path, name):
    shapes, augment, said = MAPS[name]
    items = [{key: np.full(shape, i / 20, np.float32) for key, shape in shapes.items()} for i in range(20)]
    items = [item if "y" in item else {**item, "y": i % 2} for i, item in enumerate(items)]
    pack = nb.pack(items, into=tmp_path / "pack", progress=False)
    make = nb.regress if "y" in shapes else nb.classify
    with pytest.raises(TrainError, match=said):
        nb.TrainState(make(nn.Identity(), augment=augment), pack, nb.Plan())


class Same(nn.Module):
    """Its input."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return x + 0 * self.weight


TARGETS = {
    "whole numbers": (np.int64, (2,)),
    "a sequence": (np.float32, (5, 2)),
    "an image": (np.uint8, (8, 6, 3)),
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


# -- several labels a sample


@pytest.fixture(scope="module")
def tagged(tmp_path_factory):
    """x (6,) → which of three of its numbers are above 0, and a label that no sample has."""
    x = np.random.default_rng(0).normal(size=(200, 6)).astype(np.float32)
    items = [(row, np.array([*(row[:3] > 0), False], np.uint8)) for row in x]
    pack = nb.pack(items, val=0.3, into=tmp_path_factory.mktemp("tags") / "pack", progress=False)
    options = {**pack.options, "kind": "labels"}
    return replace(pack, card=replace(pack.card, classes=["a", "b", "c", "none has it"], options=options))


def test_labels_are_learned_by_binary_cross_entropy_and_all_above_a_half_are_answered(tmp_path, tagged):
    run = fitted(nb.classify(lambda inputs, classes: nn.Linear(inputs, classes)), tagged, tmp_path / "run", epochs=12)
    assert list(run.summary())[1:4] == ["val_loss", "val_map", "val_f1"]
    assert run.best["val_map"] == max(run.summary()["val_map"]) > 0.9
    ids = tagged.ids("val")
    x, y = (torch.from_numpy(tagged.arrays[name][ids]) for name in ("x", "y"))
    answers = nb.Run.open(tmp_path / "run", run.task).predict(list(x.numpy()))
    batch = run.task.batch({"x": x, "y": y}, own.PLAN, None)
    logits = run.model("cpu")(batch).detach()
    for answer, row in zip(answers, logits.sigmoid(), strict=True):
        assert {label.name: label.probability for label in answer} == pytest.approx(
            {name: float(p) for name, p in zip(tagged.classes, row, strict=True) if p > 0.5}, abs=1e-5
        )
    shares = run.predict(list(x.numpy()), all=True)
    np.testing.assert_allclose(shares.to_numpy(), logits.sigmoid().numpy(), atol=1e-5)
    values = nb.evaluate(run, tagged, "val")
    assert values["loss"] == pytest.approx(float(F.binary_cross_entropy_with_logits(logits, y.float())), rel=1e-5)
    said, true = (logits > 0).numpy(), y.numpy() > 0
    totals = said.sum(0) + true.sum(0)
    assert values["f1"] == pytest.approx((2 * (said & true).sum(0)[totals > 0] / totals[totals > 0]).mean())
    report = run.report(tagged, "val")
    assert report.table.F1["macro mean"] == pytest.approx(values["f1"])
    assert report.table.support["a"] == true[:, 0].sum()
    either = (said | true).sum(1)
    assert report.worst["right"].iloc[0] == ((said & true).sum(1)[either > 0] / either[either > 0]).min()


def test_mean_average_precision_is_that_of_the_whole_split_whatever_the_batches():
    """The mean, over labels, of the precision at each sample that has the label, ranked by its logit."""
    logits = (torch.randperm(300, generator=torch.Generator().manual_seed(0)).view(100, 3) - 150) / 32.0
    y = (torch.rand(100, 3, generator=torch.Generator().manual_seed(1)) < logits.sigmoid()).to(torch.uint8)
    ranked = y.gather(0, logits.argsort(0, descending=True)).double()  # no ties
    precision = ranked.cumsum(0) / torch.arange(1, 101)[:, None]
    expected = float(((precision * ranked).sum(0) / ranked.sum(0)).mean())
    for size in (100, 7):
        sums = Sums()
        for part in range(0, 100, size):
            batch = {"y": y[part : part + size]}
            card = Card("", list("abc"), {"kind": "labels"}, {}, {})
            sums.add(score(["map"], logits[part : part + size], batch, card))
        assert sums.read()["map"] == pytest.approx(expected)


# -- metrics


def test_metrics_by_name_are_what_counting_one_by_one_gives(tmp_path, packs):
    pack, names = packs["images"], ["accuracy", "top5_accuracy", "balanced_accuracy", "f1"]
    run = fitted(nb.classify(own.Small, metrics=names), pack, tmp_path / "run", epochs=1)
    ids = pack.ids("val")
    y = np.array([pack.classes[int(pack.sample(i)["y"])] for i in ids])
    guess = np.array([answer.name for answer in run.predict_pack(pack, ids)])
    right = {k: np.sum((guess == k) & (y == k)) for k in pack.classes}
    expected = {
        "accuracy": np.mean(guess == y),
        "top5_accuracy": 1.0,
        "balanced_accuracy": np.mean([right[k] / np.sum(y == k) for k in pack.classes]),
        "f1": np.mean([2 * right[k] / (np.sum(y == k) + np.sum(guess == k)) for k in pack.classes]),
    }
    found = nb.evaluate(run, pack, "val")
    assert {name: found[name] for name in names} == pytest.approx(expected)


def test_a_function_is_a_metric_in_the_unit_of_the_targets(tmp_path, packs):
    def within_500(outputs, batch):
        return ((outputs.view(-1) - batch["y"]).abs() < 500).sum(), len(batch["y"])

    task = nb.regress(
        own.line, metrics=["mae", "mse", within_500, lambda outputs, batch: {"least": (outputs.min(), 1)}]
    )
    run = fitted(task, packs["rows"], tmp_path / "run", epochs=2, batch_size=16)
    found, ids = nb.evaluate(run, packs["rows"], "val"), packs["rows"].ids("val")
    answers = np.array(run.predict_pack(packs["rows"], ids))
    targets = np.array([float(packs["rows"].sample(i)["y"]) for i in ids])
    assert found["within_500"] == pytest.approx(np.mean(np.abs(answers - targets) < 500))
    assert found["mae"] == pytest.approx(np.abs(answers - targets).mean(), rel=1e-4)
    assert found["mse"] == pytest.approx(np.square(answers - targets).mean(), rel=1e-4)
    assert found["least"] > 500
    assert task.BEST == "-mae"


def test_a_weighted_loss_is_the_mean_over_the_weights_whatever_the_batch(packs):
    weight, pack = torch.tensor([1.0, 10.0, 0.1]), packs["images"]
    for loss in (nn.CrossEntropyLoss(weight, label_smoothing=0.1), nn.CrossEntropyLoss(weight, ignore_index=2)):
        state = nb.TrainState(nb.classify(own.Small, loss=loss), pack, own.PLAN)
        raw = {name: torch.from_numpy(pack.arrays[name][pack.ids("val")]) for name in ("x", "y")}
        with torch.no_grad():
            expected = float(loss(state.model.eval()(state.task.batch(raw, own.PLAN, None)), raw["y"]))
        for size in (5, 90):
            assert nb.evaluate(state, pack, "val", batch_size=size)["loss"] == pytest.approx(expected, rel=1e-5)


TAGS = {  # loss of probabilities or counts → predictions of a network that returns its input
    nn.BCEWithLogitsLoss(): torch.sigmoid,
    F.binary_cross_entropy_with_logits: torch.sigmoid,
    partial(F.binary_cross_entropy_with_logits, reduction="mean"): torch.sigmoid,
    nn.BCELoss(): lambda x: x,
    nn.PoissonNLLLoss(): lambda x: x,
}


@pytest.mark.parametrize("loss", TAGS, ids=["module", "function", "partial", "BCE", "Poisson"])
def test_targets_of_a_loss_of_probabilities_are_not_standardised_and_logits_are_answered_as_such(tmp_path, loss):
    """pytorch#110865: BCEWithLogitsLoss takes targets from -0.6 to 2 in silence."""
    x = torch.rand(40, 3, generator=torch.Generator().manual_seed(0))
    y = (x > 0.7).float()
    pack = nb.pack(torch.utils.data.TensorDataset(x, y), into=tmp_path / "pack", progress=False)
    pack.card.options["mean"].pop("x")  # the network gets x as it is
    state = nb.TrainState(nb.regress(Same, loss=loss), pack, own.PLAN)
    ids = pack.ids("val")
    raw = {name: torch.from_numpy(pack.arrays[name][ids]) for name in ("x", "y")}
    assert nb.evaluate(state, pack, "val")["loss"] == pytest.approx(float(loss(raw["x"], raw["y"])), rel=1e-5)
    answers = torch.tensor(state.task.decode(raw["x"], pack.card))
    torch.testing.assert_close(answers, TAGS[loss](raw["x"]))


class Shared(own.Mine):
    def __init__(self):
        self.net = own.Small(3)

    def model(self, card, plan):
        return self.net


class Ask(own.Small):
    def forward(self, a, b):
        return a


NO_PAIR = ["accuracy", lambda outputs, batch: outputs.mean()]
REFUSED: dict[str, tuple[Any, str, str]] = {  # what makes the task, the data, what is said
    "values": (lambda: nb.classify(own.line), "rows", r"these are values; floats become classes with astype\(int\)"),
    "other classes": (lambda: nb.classify(own.Small(4)), "images", r"one logit for each of 3 classes, .*\(\d+, 4\)"),
    "other metric": (lambda: nb.classify(own.Small, metrics="mae"), "images", r"'mae' is for values of nb\.pack, but"),
    "no metric": (lambda: nb.classify(own.Small, metrics=["acuracy"]), "images", "did you mean accuracy"),
    "no pair": (lambda: nb.classify(own.Small, metrics=NO_PAIR), "images", r"must be \(sum, count\).* shape \(\)"),
    "no picture": (lambda: nb.regress(own.line, augment=["flip"]), "rows", r"needs images, but the inputs are x float"),
    "parameter": (lambda: nb.classify(lambda depth: own.Small(3)), "images", r"'depth', but can get only classes, inp"),
    "lazy": (lambda: nb.classify(nn.LazyLinear(3)), "images", "layers that learn their sizes when first called; give"),
    "no module": (lambda: classify(lambda: "net"), "images", r"model must return a torch\.nn\.Module, got str"),
    "shared": (lambda: Shared(), "images", r"model returns the same network each time, .*; make a new one in it, or"),
    "columns": (lambda: nb.classify(Ask), "images", r"Ask\.forward\(a, b\): which columns are a, b\? The pack has x;"),
    "shape": (lambda: nb.regress(lambda: nn.Linear(4, 2)), "rows", r"one value for each element .*, got \(\d+, 2\)"),
    "parameters": (lambda: nb.classify(own.Small, loss=nn.Bilinear(3, 3, 1)), "images", "loss Bilinear has parameters"),
    "loss": (
        lambda: nb.classify(own.Small, loss=nn.BCEWithLogitsLoss()),
        "images",
        r"outputs \(9, 3\), y \(9,\): Target",
    ),
    "network": (lambda: own.Small(3), "images", r"got the network Small; pass nb\.classify\(net\) or nb\.regress"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_train_is_answered_in_a_sentence(tmp_path, packs, name):
    make, data, said = REFUSED[name]
    with pytest.raises(TrainError, match=said):
        nb.fit(make(), packs[data], own.PLAN, tmp_path / "run", **QUIET)
    assert not (tmp_path / "run").exists(), "said before anything is trained"


# -- answers to files, items and rows


def test_items_of_a_dataset_are_predicted_like_the_packs_samples(tmp_path, packs):
    pack, data = packs["images"], own.images(90)
    run = fitted(own.task, pack, tmp_path / "run", epochs=1)
    places = [int(name.removeprefix("item ")) for name in pack.names[:6]]
    expected = run.predict_pack(pack, range(6))
    chosen, arrays = [data[i] for i in places], [data[i][0] for i in places]
    subset: Any = torch.utils.data.Subset(data, places)  # pyright: ignore[reportArgumentType]
    several = [chosen, arrays, np.stack(arrays), torch.from_numpy(np.stack(arrays)), [{"x": a} for a in arrays], subset]
    for given in (*several, [Image.fromarray(array) for array in arrays], iter(arrays)):
        assert run.predict(given) == expected
    for single in (chosen[0], arrays[0], torch.from_numpy(arrays[0]), Image.fromarray(arrays[0]), {"x": arrays[0]}):
        [answer] = run.predict(single)
        assert (answer.name, answer.probability) == (expected[0].name, pytest.approx(expected[0].probability, abs=1e-5))
    with pytest.raises(
        PackError, match=r"an item \(ndarray\): x must be uint8 \(12, 12, 3\), .*, got uint8 \(9, 12, 3\)"
    ):
        run.predict([arrays[0][:9]])
    with pytest.raises(PackError, match="an item must have x, got age; add what is missing"):
        run.predict([{"age": 3}])
    with pytest.raises(PackError, match="not trained on a DataFrame"):
        run.predict(pd.DataFrame({"x": [1]}))


def test_rows_of_a_dataframe_are_predicted_by_the_names_of_their_columns(tmp_path):
    frame = pd.DataFrame([x for x, _ in own.rows(120)], columns=list("abcd")).assign(
        price=[y for _, y in own.rows(120)]
    )
    pack = nb.pack(frame, target="price", into=tmp_path / "pack", progress=False)
    run = fitted(nb.regress(own.line), pack, tmp_path / "run", epochs=1)
    rows = frame.iloc[[int(name.removeprefix("row ")) for name in pack.names[:5]]]
    expected = run.predict_pack(pack, range(5))
    assert run.predict(rows[["d", "b", "a", "c"]]) == pytest.approx(expected), "also without the target"
    assert run.predict(rows.iloc[0]) == pytest.approx(expected[:1])
    with pytest.raises(PackError, match="the table has no column 'b'; its columns are a"):
        run.predict(rows[["a"]])
