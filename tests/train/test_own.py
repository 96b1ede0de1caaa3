"""nb.classify, nb.regress and a class of two methods: what a network gets, what is learned, scored and answered."""

import copy
import inspect
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import own
import pandas as pd
import pytest
import torch
import toy
from acting import QUIET, refused
from packs import raw_batch
from PIL import Image
from torch import nn
from torch.nn import functional as F

import nbtools as nb
from nbtools.data import Card
from nbtools.errors import CheckpointError, PackError, TrainError
from nbtools.train import Sums
from nbtools.train.defaults import score

pytestmark = pytest.mark.usefixtures("one_cache")
classify: Any = nb.classify


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packs")
    return {name: own.packed(name, folder) for name in own.DATA} | {"toy": toy.make_pack(folder)}


def fitted(task, pack, folder, **plan):
    return nb.fit(task, pack, own.PLAN.replace(**plan), folder, **QUIET)


def split_of(pack: nb.Pack, name: str = "val") -> dict[str, torch.Tensor]:
    return {column: torch.from_numpy(pack.arrays[column][pack.ids(name)]) for column in ("x", "y")}


CALLS: dict[str, Any] = {  # how a forward names its inputs → what it sees of (image, age)
    "by name": lambda self, age, image: (image, age),
    "one by keyword only": lambda self, age, *, image: (image, age),
    "in order": lambda self, a, b: (a, b),
    "the dict": lambda self, batch: (batch["image"], batch["age"]),
    "all by name": lambda self, **columns: (columns["image"], columns["age"]),
    "a wrapper's": lambda self, *args, **columns: (columns["image"], columns["age"]),
}


@pytest.mark.parametrize("name", CALLS)
def test_a_forward_gets_what_its_signature_names(tmp_path, name):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(1, 2)

        def forward(self, *args, **named):
            image, age = CALLS[name](self, *args, **named)
            assert (image.shape[1:], age.ndim) == ((3, 12, 12), 1)
            return self.head(age[:, None])

    Net.forward.__signature__ = inspect.signature(CALLS[name])  # pyright: ignore[reportFunctionMemberAccess]
    items = [{"image": image, "age": np.float32(i), "y": i % 2} for i, (image, _) in enumerate(own.images(20))]
    pack = nb.pack(items, into=tmp_path / "pack", progress=False)
    run = fitted(nb.classify(Net), pack, tmp_path / "run", epochs=1, batch_size=8)
    image, age = pack.sample(0)["image"], pack.sample(0)["age"]
    for item in ({"image": image, "age": age}, (image, age), (image, age, 1)):
        assert run.predict(item) == run.predict_pack(pack, [0])


def test_a_network_never_gets_the_target_for_an_input_of_its_name(tmp_path):
    class Pair(nn.Linear):
        def forward(self, x, y):
            return super().forward(torch.cat([x, y], 1))

    drawn = np.random.default_rng(0).random((40, 2)).astype(np.float32)
    items = [(pair[:1], pair[1:], "less" if pair[0] < pair[1] else "more") for pair in drawn]
    pack = nb.pack(items, target=2, into=tmp_path / "pack", progress=False)
    assert list(pack.options["inputs"]) == ["x1", "x2"]
    assert nb.evaluate(nb.TrainState(nb.classify(Pair(2, 2)), pack, nb.Plan()), pack, "train")["loss"] > 0


def test_a_sequence_alone_and_in_a_padded_batch_gets_the_same_answer(tmp_path, packs):
    run = fitted(nb.classify(own.Mean(3, 2)), packs["sequences"], tmp_path / "run", epochs=1)
    alone = [run.predict_pack(packs["sequences"], [i])[0] for i in range(5)]
    together = run.predict_pack(packs["sequences"], range(5))
    assert [a.name for a in alone] == [a.name for a in together]
    assert [a.probability for a in alone] == pytest.approx([a.probability for a in together], abs=1e-5)


def test_features_of_series_are_normalised_apart_and_masks_of_0_and_1_stay_as_they_are(tmp_path):
    x = np.random.default_rng(0).normal(5, 1, (40, 2, 9)) * [[1], [1e3]] + [[0], [1e4]]
    masks = np.arange(40 * 16, dtype=np.uint8).reshape(40, 1, 4, 4) % 2
    pack = nb.pack((x, masks), val=0, test=0, into=tmp_path / "pack", progress=False)
    batch = nb.TrainState(nb.regress(own.line), pack, own.PLAN).task.batch(raw_batch(pack, range(40)), own.PLAN, None)
    assert [*batch["x"].mean((0, 2)), *batch["x"].std((0, 2))] == pytest.approx([0, 0, 1, 1], abs=1e-2)
    assert batch["y"].tolist() == masks.tolist()


NOTICED: dict[str, tuple[nn.Module, str]] = {  # at a network's end, which the default loss does not expect
    "images": (nn.Softmax(1), "the network returns probabilities"),
    "labels": (nn.Sigmoid(), "the network returns probabilities"),
    "rows": (nn.ReLU(), "which the network cannot all reach; leave out the ReLU"),
}


@pytest.mark.parametrize("name", NOTICED)
def test_a_last_layer_with_which_the_default_loss_learns_badly_is_noticed(tmp_path, packs, name):
    made = {"images": own.Small(3), "labels": nn.Linear(4, 2), "rows": nn.Linear(4, 1)}[name]
    for last, noticed in ((NOTICED[name][0], True), (nn.LogSoftmax(1), False), (nn.Identity(), False)):
        task = (nb.regress if name == "rows" else nb.classify)(nn.Sequential(made, last))
        run = fitted(task, packs[name], tmp_path / type(last).__name__, epochs=1)
        assert any(NOTICED[name][1] in event for event in run.events) == noticed


def test_waiting_for_evaluations_that_never_come_is_noticed(tmp_path):
    pack = nb.pack(own.images(60), val=0, into=tmp_path / "pack", progress=False)
    run = nb.fit(nb.classify(own.Small), pack, own.PLAN.replace(early_stop=1), tmp_path / "run", **QUIET)
    assert run.events == ["without a validation split early_stop and plateau do nothing; pack with val=0.1"]


def test_frozen_parts_stay_with_their_statistics(pack):
    net = toy.Net(16, 0.0)
    net.layers[0] = nn.Sequential(net.layers[0], nn.BatchNorm1d(16, affine=False))
    net.layers[:2].requires_grad_(False)
    state = nb.TrainState(toy.with_(model=lambda *_: copy.deepcopy(net)), pack, toy.PLAN)
    list(nb.train(state.task, state, pack))
    before, after = net.state_dict(), state.model.state_dict()
    moved = [name for name, value in before.items() if not torch.equal(value, after[name])]
    assert moved == ["layers.4.weight", "layers.4.bias"], "not a running mean, of layers.0 or layers.1"


MAPS: dict[str, Any] = {  # what a flip or a crop would leave as it is → shapes
    r"flip would leave the target \(": {"image": (3, 8, 8), "y": (8, 8)},
    r"flip would leave depth \(": {"image": (3, 8, 8), "depth": (8, 8)},
    r"crop would leave the target \(": {"image": (3, 8, 8), "y": (4,)},  # a box, which moves with a flip
}


@pytest.mark.parametrize("said", MAPS)
def test_what_has_places_of_its_own_is_not_left_as_it_is_while_the_image_turns(tmp_path, said):
    shapes = MAPS[said].items()
    items = [{"y": i % 2} | {key: np.full(shape, i, np.float32) for key, shape in shapes} for i in range(20)]
    boxes, make = said.startswith("crop"), nb.regress if "y" in MAPS[said] else nb.classify
    pack = nb.pack(items, into=tmp_path / "pack", points="target" if boxes else None, progress=False)
    with pytest.raises(TrainError, match=said):
        nb.TrainState(make(nn.Identity(), augment=["flip", "crop"][: 1 + boxes]), pack, nb.Plan())


def test_metrics_by_name_are_what_counting_one_by_one_gives_and_the_given_module_stays_as_it_was(tmp_path, packs):
    pack, names, net = packs["images"], ["accuracy", "top5_accuracy", "balanced_accuracy", "f1"], own.Small(3)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    run = fitted(nb.classify(net, metrics=names, augment=["crop"]), pack, tmp_path / "run")
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert (net.training, len(net._forward_pre_hooks), {*run.model().state_dict()}) == (True, 0, {*before})
    assert run.best["val_accuracy"] == max(run.summary()["val_accuracy"])
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


def test_a_weighted_loss_is_the_mean_over_the_weights_whatever_the_batch(packs):
    weight, pack = torch.tensor([1.0, 10.0, 0.1]), packs["images"]
    half = type("Half", (nn.CrossEntropyLoss,), {"forward": lambda self, x, y: F.cross_entropy(x, y) / 2})()
    for loss in (nn.CrossEntropyLoss(weight, label_smoothing=0.1), nn.CrossEntropyLoss(weight, ignore_index=2), half):
        state, raw = nb.TrainState(nb.classify(own.Small, loss=loss), pack, own.PLAN), split_of(pack)
        with torch.no_grad():
            expected = float(loss(state.model.eval()(state.task.batch(raw, own.PLAN, None)), raw["y"]))
        for size in (5, 90):
            assert nb.evaluate(state, pack, "val", batch_size=size)["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_given_loss_is_computed_in_float32_without_autocast(packs):
    seen, enabled, plan = set(), torch.is_autocast_enabled, own.PLAN.replace(amp="bf16", epochs=1)
    task = classify(own.Small, loss=lambda *of: seen.add((of[0].dtype, enabled("cpu"))) or F.cross_entropy(*of))
    next(nb.train(task, nb.TrainState(task, packs["images"], plan), packs["images"]))
    assert seen == {(torch.float32, False)}


def test_labels_are_learned_by_binary_cross_entropy_and_all_above_a_half_are_answered(tmp_path):
    """x (6,) → which of three of its numbers are above 0, and a label that no sample has."""
    x = np.random.default_rng(0).normal(size=(200, 6)).astype(np.float32)
    items = [(row, np.array([*(row[:3] > 0), False], np.uint8)) for row in x]
    pack = nb.pack(items, val=0.3, into=tmp_path / "pack", progress=False)
    names, options = ["a", "b", "c", "none has it"], {**pack.options, "kind": "labels"}
    pack = replace(pack, card=replace(pack.card, classes=names, options=options))
    run = fitted(nb.classify(lambda inputs, classes: nn.Linear(inputs, classes)), pack, tmp_path / "run", epochs=12)
    assert list(run.summary())[1:4] == ["val_loss", "val_map", "val_f1"]
    assert run.best["val_map"] == max(run.summary()["val_map"]) > 0.9
    raw = split_of(pack)
    logits = run.model("cpu")(run.task.batch(raw, own.PLAN, None)).detach()
    files = list(raw["x"].numpy())
    for answer, row in zip(nb.Run.open(tmp_path / "run", run.task).predict(files), logits.sigmoid(), strict=True):
        expected = {name: float(p) for name, p in zip(names, row, strict=True) if p > 0.5}
        assert {label.name: label.probability for label in answer} == pytest.approx(expected, abs=1e-5)
    np.testing.assert_allclose(run.predict(files, all=True).to_numpy(), logits.sigmoid().numpy(), atol=1e-5)
    values, said, true = nb.evaluate(run, pack, "val"), (logits > 0).numpy(), raw["y"].numpy() > 0
    assert values["loss"] == pytest.approx(float(F.binary_cross_entropy_with_logits(logits, raw["y"].float())))
    totals = said.sum(0) + true.sum(0)
    assert values["f1"] == pytest.approx((2 * (said & true).sum(0)[totals > 0] / totals[totals > 0]).mean())
    report, either = run.report(pack, "val"), (said | true).sum(1)
    assert report.table.F1["macro mean"] == pytest.approx(values["f1"])
    assert report.table.support["a"] == true[:, 0].sum()
    assert report.worst["right"].iloc[0] == ((said & true).sum(1)[either > 0] / either[either > 0]).min()


def test_mean_average_precision_is_that_of_the_whole_split_whatever_the_batches():
    """The mean, over labels, of the precision at each sample that has the label, ranked by its logit."""
    logits = (torch.randperm(300, generator=torch.Generator().manual_seed(0)).view(100, 3) - 150) / 32.0
    y = (torch.rand(100, 3, generator=torch.Generator().manual_seed(1)) < logits.sigmoid()).to(torch.uint8)
    ranked = y.gather(0, logits.argsort(0, descending=True)).double()  # no ties
    precision = ranked.cumsum(0) / torch.arange(1, 101)[:, None]
    expected = float(((precision * ranked).sum(0) / ranked.sum(0)).mean())
    card = Card("", [*"abc"], {"kind": "labels"}, {}, {})
    for size in (100, 7):
        sums = Sums()
        for part in range(0, 100, size):
            sums.add(score(["map"], logits[part : part + size], {"y": y[part : part + size]}, card))
        assert sums.read()["map"] == pytest.approx(expected)


def test_values_are_learned_standardised_and_scored_and_answered_in_their_own_unit(tmp_path, packs):
    def within_500(outputs, batch):
        return ((outputs.view(-1) - batch["y"]).abs() < 500).sum(), len(batch["y"])

    metrics = ["mae", "mse", within_500, lambda outputs, batch: {"least": (outputs.min(), 1)}]
    pack, task = packs["rows"], nb.regress(own.line, metrics=metrics)
    run = fitted(task, pack, tmp_path / "run", epochs=12, batch_size=8)
    targets = pack.arrays["y"][pack.ids("val")].astype(float)
    apart = np.abs(np.array(run.predict_pack(pack, pack.ids("val"))) - targets)
    assert apart.mean() < 0.3 * targets.std()
    expected = {"mae": apart.mean(), "mse": np.square(apart).mean(), "within_500": np.mean(apart < 500)}
    expected["loss"] = expected["mse"] / np.var(pack.arrays["y"][pack.ids("train")].astype(float))
    values = nb.evaluate(run, pack, "val")
    assert {name: values[name] for name in expected} == pytest.approx(expected, rel=1e-3)
    assert values["least"] > 500
    assert (task.BEST, run.best["val_mae"]) == ("-mae", min(run.summary()["val_mae"]))


TAGS = {  # loss of probabilities or counts → predictions of PReLU, which returns what is above 0 as it is
    nn.BCEWithLogitsLoss(): torch.sigmoid,
    partial(F.binary_cross_entropy_with_logits, reduction="mean"): torch.sigmoid,
    nn.BCELoss(): lambda x: x,
    nn.PoissonNLLLoss(): torch.exp,
    nn.KLDivLoss(): torch.exp,
}


@pytest.mark.parametrize("loss", TAGS, ids=["module", "function", "BCE", "Poisson", "KLDiv"])
def test_targets_of_a_loss_of_probabilities_are_not_standardised_and_logits_are_answered_as_such(tmp_path, loss):
    """pytorch#110865: BCEWithLogitsLoss takes targets from -0.6 to 2 in silence."""
    x = torch.rand(40, 3, generator=torch.Generator().manual_seed(0))
    pack = nb.pack(torch.utils.data.TensorDataset(x, (x > 0.7).float()), into=tmp_path / "pack", progress=False)
    pack.card.options["mean"].pop("x")  # the network gets x as it is
    state, raw = nb.TrainState(nb.regress(nn.PReLU(), loss=loss), pack, own.PLAN), split_of(pack)
    assert nb.evaluate(state, pack, "val")["loss"] == pytest.approx(float(loss(raw["x"], raw["y"])), rel=1e-5)
    torch.testing.assert_close(torch.tensor(state.task.decode(raw["x"], pack.card)), TAGS[loss](raw["x"]))


class Shared(own.Mine):
    net = own.Small(3)

    def model(self, card, plan):
        return self.net


class Listing(own.Small):
    def forward(self, x):
        return [super().forward(x)]


class Growing(own.Small):
    def forward(self, x):
        self.head = vars(self).get("head", nn.Linear(3, 3))
        return self.head(super().forward(x))


class Free(torch.optim.SGD):
    def eval(self) -> None: ...


class Expanded(own.Small):
    def __init__(self, classes):
        super().__init__(classes)
        self.register_buffer("shift", torch.ones(1).expand(2))


class Ask(own.Small):
    def forward(self, a, b):
        return a


def agreement(outputs, y):
    return (outputs.argmax(1) == y).float().sum(), len(y)


SGD, ONE_CYCLE = torch.optim.SGD(own.Small(3).parameters(), 0.1), torch.optim.lr_scheduler.OneCycleLR
UNFIT: dict[str, dict[str, Any]] = {  # what is said → what nb.classify gets for the images
    r"one logit for each of 3 classes, .*\(\d+, 4\)": {"model": own.Small(4)},
    "itself, got DataParallel around it": {"model": nn.DataParallel(own.Small(3))},
    "the network has lazy layers, whose sizes are unknown so far; give": {"model": nn.LazyConv2d(3, 1)},
    r"'depth', but can get only classes, inp": {"model": lambda depth: own.Small(3)},
    r"model must return a torch\.nn\.Module, got str": {"model": lambda: "net"},
    r"Ask\.forward\(a, b\): which columns are a, b\? The pack has x;": {"model": Ask},
    r"returns a list without a tensor as \.logits or \['out'\]": {"model": Listing},
    r"'mae' is for values of nb\.pack, but": {"metrics": "mae"},
    "did you mean accuracy": {"metrics": ["acuracy"]},
    r"must be \(sum, count\).* shape \(\)": {"metrics": ["accuracy", lambda outputs, batch: outputs.mean()]},
    r"agreement must take \(outputs, batch\), where": {"metrics": agreement},
    "metrics must be names, and functions": {"metrics": {"f1": agreement}},
    "loss must be a function of .*got <class": {"loss": nn.CrossEntropyLoss},
    "loss Bilinear has parameters": {"loss": nn.Bilinear(3, 3, 1)},
    "takes 0 or 1 for each output, but y holds class indices": {"loss": nn.BCEWithLogitsLoss()},
    "loss takes probabilities, but .* the sigmoid": {"loss": nn.BCELoss()},
    "loss takes probabilities, but metrics": {"loss": partial(F.binary_cross_entropy, reduction="sum")},
    r"a function of \(groups, plan\), got SGD": {"optimizer": SGD},
    r"optimizer must be a class of torch\.optim, .* got 'lion'": {"optimizer": "lion"},
    r"got SGD with an lr, which is the plan's: pass plan=nb\.Plan": {"optimizer": partial(torch.optim.SGD, lr=0.1)},
    "must be in exactly one of the optimizer's": {"optimizer": lambda groups, plan: SGD},
    "a factor ≥ 0 on lr: 'float' object is not callable; correct it": {"schedule": 0.1},
    r"function of progress, .*: OneCycleLR.*missing": {"schedule": ONE_CYCLE},
    "on lr: unsupported operand": {"schedule": lambda progress: 1 - progress},
    r"that needs no closure .*, got LBFGS": {"optimizer": torch.optim.LBFGS},
    r"and has no eval\(\), got Free": {"optimizer": Free},
    r"creates head\.weight, which no .*; make it in __init__": {"model": Growing(3)},
    "does not take its own state_dict, so no checkpoint could be read: .*single": {"model": Expanded},
    "_extra_state is no tensor, and checkpoints": {"model": type("Extra", (own.Small,), {"get_extra_state": dict})(3)},
    r"the weights are torch\.float64: pass net\.float": {"model": own.Small(3).double()},
    "a factor ≥ 0 on lr, got -1": {"schedule": lambda plan: lambda t: t - 1},
}
BARE = toy.with_(PLAN=own.PLAN, model=toy.linear, metrics=lambda *_: __import__("rapids"))
OTHERS: dict[str, tuple[Any, str]] = {  # what is said → a task, and its data
    r"these are values; floats become classes with astype\(int\)": (nb.classify(own.line), "rows"),
    r"these are values; several labels are lists of names, with classes=": (nb.classify(own.line), "lists"),
    r"but these are none; name one: nb\.pack\(…, target=…\)": (nb.regress(own.line), "bare"),
    r"needs images, but the inputs are x float": (nb.regress(own.line, augment=["flip"]), "rows"),
    r"one value for each element .*, got \(\d+, 2\)": (nb.regress(lambda: nn.Linear(4, 2)), "rows"),
    r"does not take the pack's x float32 \(4\).* and 64x1\)": (nb.regress(nn.Linear(64, 1)), "rows"),
    "whole numbers are not converted: pack float32, or pixels as uint8": (nb.classify(nn.Linear(4, 2)), "whole"),
    r"model returns the same network each time, .*; make a new one in it, or": (Shared(), "images"),
    r"got the network Small; pass nb\.classify\(net\) or nb\.regress": (own.Small(3), "images"),
    "the loss or a metric does not take .*: No module named 'rapids'": (BARE, "toy"),
}


@pytest.mark.parametrize("said", [*UNFIT, *OTHERS])
def test_what_cannot_train_is_answered_in_a_sentence(tmp_path, packs, said):
    def fit(plan: nb.Plan | None) -> None:
        task, data = OTHERS.get(said) or (classify(**{"model": own.Small, **UNFIT[said]}), "images")
        nb.fit(task, packs[data], plan, tmp_path / "run", **QUIET)

    for plan in (own.PLAN, None):
        refused(TrainError, said, fit, plan)
        assert not (tmp_path / "run").exists(), "said before anything is trained"


class Attends(own.Small):
    def forward(self, x):
        self.seen = [made := super().forward(x)]
        return made


@pytest.mark.parametrize("net", [Attends(3), nn.Sequential(own.Small(3), nn.utils.weight_norm(nn.Linear(3, 3)))])
def test_a_network_called_before_trains_and_the_callers_random_numbers_are_left_alone(tmp_path, packs, net):
    net(torch.zeros(2, 3, 12, 12))
    torch.manual_seed(5)
    drawn = torch.rand(3)
    torch.manual_seed(5)
    assert fitted(nb.classify(net), packs["images"], tmp_path / "run", epochs=1).predict(own.images(3))
    assert torch.equal(torch.rand(3), drawn)


class Odd(nn.Sequential):  # which samples in every mode, has an infinite buffer, one that is made later, a Conv3d …
    def __init__(self):
        super().__init__(nn.Conv3d(4, 2, 1), nn.Flatten(), nn.utils.weight_norm(nn.Linear(2, 2)))
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))
        self.register_buffer("late", None, persistent=False)

    def forward(self, x):
        self.late = torch.randn(len(x), 1)
        return super().forward(x[..., None, None, None]) * self.late + self.get_buffer("mask").exp()


def test_looking_at_a_run_changes_neither_it_nor_the_callers_settings_and_its_average_has_every_buffer(packs, tmp_path):
    runs, plan, pack = list[nb.Run](), own.PLAN.replace(epochs=3, ema=0.9, channels_last=True), packs["points"]
    for every, look in ((1, False), (1, True), (3, False)):
        calls = [lambda record, run: run.index.get("best") and nb.evaluate(run, pack, "test")] * look
        given = nb.classify(Odd), pack, plan.replace(eval_every=every, deterministic=True), tmp_path / str(len(runs))
        runs.append(nb.fit(*given, callbacks=calls, **QUIET))
    assert not torch.are_deterministic_algorithms_enabled()
    assert len({tuple(run.summary()["train_loss"]) for run in runs}) == 1
    assert np.isfinite([run.best["val_loss"] for run in runs]).all()


def test_a_loss_that_never_is_a_number_or_has_parameters_that_nothing_would_train_is_refused(packs, tmp_path):
    mine, centres = own.Mine(), nn.Linear(3, 1)
    vars(mine).update(centres=centres, loss=lambda model, batch, plan: centres(model(batch)).mean())
    nan = nb.classify(own.Small, loss=lambda outputs, y: outputs.mean() * np.nan)
    for task, said in ((mine, "the loss reads parameters that"), (nan, "the loss is not finite in the first 4 steps")):
        refused(TrainError, said, fitted, task, packs["images"], tmp_path / said[-5:])


class Sparse(own.Mine):
    """Its loss reads weights, and calls layers, of which one is a BatchNorm."""

    def loss(self, model, batch, plan):
        weights = sum(p.abs().sum() for p in model[-1].parameters())
        return super().loss(model, batch, plan) + 1e-3 * weights + 1e-3 * model[1](model[0](batch["x"])).mean()


def test_a_loss_may_read_the_network_and_an_evaluation_changes_nothing(tmp_path, packs):
    assert fitted(Sparse(), packs["images"], tmp_path / "run").best["val_loss"] > 0
    state = nb.TrainState(Sparse(), packs["images"], own.PLAN)
    assert nb.evaluate(state, packs["images"], "train") == nb.evaluate(state, packs["images"], "train")


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
    grey = arrays[0][..., 0]
    assert run.predict(grey) == run.predict([Image.fromarray(grey)])
    for wrong, said in (
        ([arrays[0][:9]], r"item 0 \(ndarray\): x must be uint8 \(12, 12, 3\), .*, got uint8 \(9, 12, 3\)"),
        ([{"age": 3}], "an item must have x, got age; add what is missing"),
        (pd.DataFrame({"x": [1]}), r"x must be uint8 \(12, 12, 3\), .*, got int64 \(1,\)"),
    ):
        refused(PackError, said, run.predict, wrong)


def test_rows_of_a_dataframe_are_predicted_by_the_names_of_their_columns(tmp_path):
    rows = own.rows(120)
    frame = pd.DataFrame([x for x, _ in rows], columns=list("abcd")).assign(price=[y for _, y in rows])
    pack = nb.pack(frame, target="price", into=tmp_path / "pack", progress=False)
    run = fitted(nb.regress(own.line), pack, tmp_path / "run", epochs=1)
    chosen = frame.iloc[[int(name.removeprefix("row ")) for name in pack.names[:5]]]
    expected = run.predict_pack(pack, range(5))
    assert run.predict(chosen[["d", "b", "a", "c"]]) == pytest.approx(expected), "also without the target"
    assert run.predict(chosen.iloc[0]) == pytest.approx(expected[:1])
    chosen.to_csv(tmp_path / "new.csv")
    assert run.predict(tmp_path / "new.csv") == pytest.approx(expected)
    refused(PackError, "must be an image to be read from a file, .*; pass arrays", run.predict, [tmp_path / "new.csv"])
    again = run.pack(frame.assign(e=1)[["e", "d", "price", "c", "b", "a"]], test=1.0, progress=False)
    assert again.arrays["x"][:5].tolist() == frame[[*"abcd"]].to_numpy(np.float32)[:5].tolist()
    assert nb.evaluate(run, nb.pack((again.arrays["x"], frame["price"]), test=1.0, progress=False))["mae"] > 0
    refused(PackError, "the table has no column 'b'; its columns are a", run.predict, chosen[["a"]])


class Denoiser(nb.Task):
    """Predicts the noise that its loss adds, so the loss calls the network on something else than the batch."""

    def model(self, card, plan):
        return nn.Linear(4, 4)

    def loss(self, model, batch, plan):
        noise = torch.ones_like(batch["x"])
        return F.mse_loss(model({**batch, "x": batch["x"] + noise}), noise)


def test_a_loss_may_call_the_network_on_other_samples_than_those_of_the_batch(packs, tmp_path):
    run = fitted(Denoiser(), pack := packs["points"], tmp_path, epochs=2)
    with torch.no_grad():
        x = (split_of(pack)["x"] - torch.tensor(pack.options["mean"]["x"])) / torch.tensor(pack.options["std"]["x"])
        true = F.mse_loss(run.model("cpu")(x.float() + 1), torch.ones_like(x))
    assert run.best["val_loss"] == pytest.approx(float(true), rel=1e-4)


def test_metrics_may_be_arrays_of_numpy_of_one_shape_for_all_batches(packs, tmp_path):
    def right(outputs, batch):
        hits = (outputs.argmax(1) == batch["y"]).numpy()
        y = batch["y"].numpy()
        return np.bincount(y[hits], minlength=2), np.bincount(y, minlength=2)

    task = classify(nn.Linear(4, 2), metrics=["balanced_accuracy", right])
    best = fitted(task, packs["points"], tmp_path, epochs=2).best
    assert best["val_right"] == pytest.approx(best["val_balanced_accuracy"])
    unsummed = classify(nn.Linear(4, 2), metrics=[lambda made, batch: (made.argmax(1) == batch["y"], len(made))])
    said = "metric <lambda> must be sums of one shape for all batches, got .*; sum it up"
    refused(TrainError, said, fitted, unsummed, packs["points"], tmp_path / "b", epochs=1, batch_size=10)


def test_frozen_parts_in_eval_mode_stay_so_while_the_rest_trains(packs, tmp_path):
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.teacher = nn.Sequential(nn.Linear(4, 8), nn.Dropout()).requires_grad_(False).eval()
            self.head = nn.Sequential(nn.Dropout(), nn.Linear(8, 2))

        def forward(self, x):
            modes.add((self.teacher[1].training, self.head[0].training))
            return self.head(self.teacher(x))

    modes = set()
    fitted(classify(Net()), packs["points"], tmp_path, epochs=2)
    assert modes == {(False, False), (False, True)}


GAMMA, CALLS_OF_LOSS, mean = 1.0, 0, 0.1


def test_what_a_loss_reads_is_part_of_the_run_and_where_it_lies_in_memory_is_not(packs, tmp_path, monkeypatch):
    class Weighed(nb.Task):
        gamma = 1.0

        def model(self, card, plan):
            return nn.Linear(4, 2)

        def loss(self, model, batch, plan):
            return self.gamma * F.cross_entropy(model(batch), batch["y"])

    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = [lambda outputs, y: F.cross_entropy(outputs, y)]

        def forward(self, outputs, y):
            return self.parts[0](outputs, y)

    def loss(outputs, y, share=1.0):
        global CALLS_OF_LOSS
        CALLS_OF_LOSS = CALLS_OF_LOSS + 1  # what it sets itself is not what it is given
        return (GAMMA * share * F.cross_entropy(outputs, y, reduction="none")).mean()

    def again(make, name):
        return fitted(make(), packs["points"], tmp_path / name, epochs=1)

    for name, make in {"sum": lambda: classify(nn.Linear(4, 2), loss=Sum()), "class": Weighed}.items():
        assert again(make, name).history.rows == again(make, name).history.rows
    again(lambda: classify(nn.Linear(4, 2), loss=loss), "global")
    monkeypatch.setitem(globals(), "mean", 0.2)  # a method's name
    again(lambda: classify(nn.Linear(4, 2), loss=loss), "global")
    monkeypatch.setitem(globals(), "GAMMA", 2.0)
    Weighed.gamma = 2.0
    for name, make in {"global": lambda: classify(nn.Linear(4, 2), loss=loss), "class": Weighed}.items():
        refused(CheckpointError, r"another run \(.*=1.0.* → .*=2.0", again, make, name)
