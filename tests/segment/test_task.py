"""The task through the real loop: batches, loss and plans, and the faults of the guide's scripts."""

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from packs import pack_of, raw_batch
from torch import nn

from nbtools.data import Draws
from nbtools.errors import PlanError
from nbtools.tasks import segment
from nbtools.tasks.segment import Plan
from nbtools.train import TrainState, evaluation
from nbtools.train import train as train_loop
from nbtools.train.plan import lr_at

HEIGHT, WIDTH, CLASSES, IGNORE = 32, 48, 3, 255
AUGMENT: dict[str, Any] = {"scale_low": 0.5, "scale_high": 2.0, "flip": 0.5, "jitter": 0.4}
SLIM: dict[str, Any] = {"network": "slim", "batch_size": 8, "optimizer": "sgd", "lr": 2e-2}


def make_pack(folder, count=24):
    """Coloured boxes and bands on noise, every sixth for validation."""
    rng, samples = np.random.default_rng(0), []
    for _ in range(count):
        label = np.zeros((HEIGHT, WIDTH), np.uint8)
        y, x = rng.integers(0, 14), rng.integers(0, 24)
        label[y : y + 14, x : x + 18], label[-8:] = 1, 2
        image = rng.integers(60, 120, (HEIGHT, WIDTH, 3)) + np.array([[0, 0, 0], [90, 0, 0], [0, 0, 90]])[label]
        label[:, -2:] = IGNORE
        samples.append({"image": image.astype(np.uint8), "label": label, "distance": segment.distance_map(label)})
    splits = ["val" if i % 6 == 5 else "train" for i in range(count)]
    options = {"size": [HEIGHT, WIDTH], "channels": 3}
    return pack_of(samples, folder, task="segment", split=splits, options=options, classes=["ground", "box", "band"])


def task_of(**more: Any) -> Any:
    """The task as a value of its own, so that a test may listen in on one of its functions."""
    return SimpleNamespace(**{**vars(segment), **more})


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return make_pack(tmp_path_factory.mktemp("segment"))


def test_one_batch_is_overfitted_by_the_loop(tmp_path):
    pack = make_pack(tmp_path, 12)
    plan = Plan(**{**SLIM, "epochs": 30, "batch_size": 10, "optimizer": "adamw", "lr": 1e-2, "eval_every": 30})
    state = TrainState(segment, pack, plan.replace(head_lr=1.0, schedule="poly"), "cpu")
    records = list(train_loop(segment, state, pack))
    assert evaluation.evaluate(segment, state.model, pack, plan, "train")["miou"] > 0.85
    loss = [r.values["train_loss"] for r in records if r.kind == "epoch"]
    assert loss[-1] < 0.3 * loss[0]
    raw = raw_batch(pack, pack.ids("train")[:4])
    answers = segment.decode(state.model.eval()(segment.batch(raw, plan, None)), pack)
    assert [(a.shape, a.dtype) for a in answers] == [((HEIGHT, WIDTH), np.dtype(np.uint8))] * 4


def test_training_and_prediction_see_the_same_tensor(pack):
    """The guide normalised in two places, and differently."""
    raw = raw_batch(pack, [0])
    trained, predicted = segment.batch(raw, Plan(), Draws(0, 0, raw["id"])), segment.batch(raw, Plan(), None)
    assert torch.equal(trained["image"], predicted["image"])
    expected = (raw["image"].permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.25
    torch.testing.assert_close(trained["image"], expected, atol=1e-6, rtol=0)
    assert torch.equal(trained["distance"], raw["distance"] / 8)
    assert segment.batch({"image": raw["image"]}, Plan(), None).keys() == {"image"}, "images alone are a batch too"
    cropped = segment.batch(raw, Plan(crop=128), Draws(0, 0, raw["id"]))
    outside = cropped["label"] == IGNORE
    assert (cropped["image"].movedim(1, 3)[outside] == 0).float().mean() > 0.9


@pytest.fixture(scope="module")
def watched(pack):
    """(plan, rows of (kind, lr, lr of each group, an average of a batch norm, modes), validation batches) of a run."""
    evaluated, rows = [], []

    def batch(raw, plan, draws):
        made = segment.batch(raw, plan, draws)
        if draws is None:
            evaluated.append((raw["id"], made))
        return made

    more = {"epochs": 3, "batch_size": 4, "schedule": "poly", "warmup_epochs": 1.2, "crop": 32}
    plan, task = Plan(**{**SLIM, **AUGMENT, **more}), task_of(batch=batch)
    state = TrainState(task, pack, plan, "cpu")
    norm: Any = next(m for m in state.model.modules() if isinstance(m, nn.BatchNorm2d))
    for record in train_loop(task, state, pack):
        if record.kind in ("step", "evaluation", "epoch"):
            lrs = {round(g["lr"] / state.position.lr, 6) for g in state.optimizer.param_groups}
            modes = {m.training for m in state.model.modules()}
            rows.append((record.kind, state.position.lr, lrs, norm.running_mean.clone(), modes))
    return plan, rows, evaluated


def test_warmup_ends_and_the_schedule_moves_at_every_step(watched):
    """The guide stepped its schedule once an epoch, and 1,000 epochs of warmup never ended."""
    plan, rows, _ = watched
    rates = [lr for kind, lr, *_ in rows if kind == "step"]
    assert rates == pytest.approx([lr_at(plan, (n + 0.5) / 5) for n in range(15)])
    assert rates[:6] == sorted(rates[:6])
    assert rates[6:] == sorted(rates[6:], reverse=True)
    assert len(set(rates)) == 15
    assert all(lrs == {1.0, 10.0} for _, _, lrs, *_ in rows)


def test_batch_norm_keeps_learning_after_an_evaluation(watched):
    """The guide forgot `train()`: its running averages froze after the first one."""
    rows = watched[1]
    assert [kind for kind, *_ in rows] == [*["step"] * 5, "epoch"] * 3
    for (*_, before, _), (kind, _, _, after, modes) in itertools.pairwise(rows):
        assert torch.equal(before, after) == (kind != "step")
        assert modes == {True}


def test_validation_is_neither_augmented_nor_cropped_nor_shuffled(watched, pack):
    evaluated = watched[2]
    ids = torch.cat([i for i, _ in evaluated])
    assert ids.tolist() == pack.ids("val").tolist() * 3
    images, labels = (torch.cat([made[name] for _, made in evaluated]) for name in ("image", "label"))
    raw = raw_batch(pack, ids.tolist())
    assert torch.equal(images, (raw["image"].permute(0, 3, 1, 2).float() - 127.5) / 63.75)
    assert torch.equal(labels, raw["label"].long())


def test_impossible_settings_are_refused_by_name():
    impossible: list[dict[str, Any]] = [{"scale_high": 0.5}, {"eval_scales": ()}]
    for settings in impossible:
        with pytest.raises(PlanError, match=r"^Plan\.(scale_low|eval_scales) must .*, got "):
            Plan(**settings)
