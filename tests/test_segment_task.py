"""The segmentation task: batches, loss and plans through the real loop, and the faults of the guide's scripts."""

import itertools
import math
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from nbtools.data import Card, Draws, Entry, build, collate
from nbtools.data.pack import Column
from nbtools.errors import PlanError
from nbtools.measure import Machine, decide
from nbtools.run import Run
from nbtools.tasks.segment import losses, networks, plans
from nbtools.tasks.segment import task as segment
from nbtools.tasks.segment.plans import BASELINE, PLAN, Plan
from nbtools.train import TrainState, loop, scoring
from nbtools.train import device as devices
from nbtools.train.schedule import lr_at

HEIGHT, WIDTH, CLASSES = 32, 48, 3
AUGMENT: dict[str, Any] = {"scale_low": 0.5, "scale_high": 2.0, "flip": 0.5, "jitter": 0.4}
SLIM: dict[str, Any] = {"network": "slim", "batch_size": 8, "optimizer": "sgd", "lr": 2e-2}
READS: Counter[str] = Counter()


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def write(folder: Path, count: int) -> Path:
    """`n.npz`: a coloured box and a coloured band on noise, the class of each pixel, and its distance to a boundary."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True)
    for i in range(count):
        label = np.zeros((HEIGHT, WIDTH), np.uint8)
        y, x = rng.integers(0, 14), rng.integers(0, 24)
        label[y : y + 14, x : x + 18] = 1
        label[-8:] = 2
        image = rng.integers(60, 120, (HEIGHT, WIDTH, 3))
        image[label == 1] += (90, 0, 0)
        image[label == 2] += (0, 0, 90)
        label[:, -2:] = losses.IGNORE
        distance = np.minimum(8 * np.abs(np.arange(HEIGHT) - (HEIGHT - 8))[:, None], 255).repeat(WIDTH, 1)
        np.savez(folder / f"{i}.npz", image=image.astype(np.uint8), label=label, distance=distance.astype(np.uint8))
    return folder


def read(path, options):
    READS[Path(path).stem] += 1
    with np.load(path) as file:
        return {name: file[name] for name in ("image", "label", "distance")}


def make_pack(folder: Path, count=24, ignored=()):
    """A pack of such files, every sixth for validation; `ignored` have no label."""

    def fill(writer, source):
        writer.classes = ["ground", "box", "band"]
        files = [source / f"{i}.npz" for i in range(count)]
        entries = [Entry(path.name, path, "val" if i % 6 == 5 else "train") for i, path in enumerate(files)]
        for i, (entry, arrays) in enumerate(writer.decode(entries, read, {})):
            if i in ignored:
                arrays["label"][:] = losses.IGNORE
            writer.add(entry.name, entry.split, **arrays)

    raw, options = write(folder / "raw", count), {"size": [HEIGHT, WIDTH], "channels": 3}
    return build(raw, "segment", options, fill, read=read, into=folder / "pack", progress=False)


def task_of(**more: Any) -> Any:
    """The task as a value of its own, so that a test may listen in on one of its functions."""
    names = ("BEST", "model", "groups", "batch", "loss", "infer", "metrics", "decode")
    made = {name: getattr(segment, name) for name in names}
    own = {"PLAN": PLAN, "BASELINE": BASELINE, "suggest": plans.suggest, "read": read}
    return SimpleNamespace(**{**made, **own, **more})


TASK = task_of()


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return make_pack(tmp_path_factory.mktemp("segment"))


def raw_batch(pack, ids):
    return {**collate([pack.sample(i) for i in ids], pack.columns), "id": torch.tensor(list(ids))}


def trained(pack, plan, task=TASK):
    """(state, its records) of a whole run."""
    state = TrainState(task, pack, plan, "cpu")
    return state, list(loop.train(task, state, pack))


# -- learning


@pytest.mark.parametrize(
    "knobs",
    [{"lr": 2e-2, "warmup_epochs": 5}, {"optimizer": "adamw", "lr": 1e-2, "head_lr": 1.0}],
    ids=["sgd", "adamw"],
)
def test_one_batch_is_overfitted_by_the_loop(tmp_path, knobs):
    pack = make_pack(tmp_path, 12)
    plan = Plan(**{**SLIM, "epochs": 40, "batch_size": 10, "schedule": "poly", "eval_every": 40, **knobs})
    state, records = trained(pack, plan)
    found = scoring.evaluate(TASK, state.model, pack, plan, "train")
    assert found["miou"] > 0.85
    loss = [r.values["train_loss"] for r in records if r.kind == "epoch"]
    assert loss[-1] < 0.3 * loss[0]
    ids = pack.ids("train")[:4]
    answers = segment.decode(state.model.eval()(segment.batch(raw_batch(pack, ids), plan, None)), pack)
    assert [(a.shape, a.dtype) for a in answers] == [((HEIGHT, WIDTH), np.dtype(np.uint8))] * 4
    truth = [pack.sample(i)["label"] for i in ids]
    assert np.mean([(a == t)[t < CLASSES].mean() for a, t in zip(answers, truth, strict=True)]) > 0.95


def test_every_output_of_training_and_evaluation_is_as_large_as_the_loss_needs(pack):
    raw = raw_batch(pack, range(3))
    for network in ("slim", "bisenetv2"):
        plan = Plan(network=network, crop=64)
        model = segment.model(pack, plan)
        batch = segment.batch(raw, plan, Draws(0, 0, raw["id"]))
        main, auxiliary = model.train()(batch)
        assert main.shape == (3, CLASSES, 64, 64)
        assert len(auxiliary) == 4
        with torch.no_grad():
            main, auxiliary = segment.infer(model.eval(), segment.batch(raw, plan, None), plan)
        assert main.shape == (3, CLASSES, HEIGHT, WIDTH)
        assert auxiliary == ()


def test_a_micro_batch_weighs_what_its_pictures_weigh(pack):
    """The loss of a batch is the sum of those of its pictures, augmented or not."""
    raw, plan = raw_batch(pack, range(6)), Plan(network="slim", **AUGMENT)
    raw["label"][2] = losses.IGNORE
    model = segment.model(pack, plan).eval()

    def of(part):
        return segment.loss(model, segment.batch(part, plan, Draws(0, 0, part["id"])), plan)

    with torch.no_grad():
        whole, count = of(raw)
        parts = [of({name: tensor[i : i + 1] for name, tensor in raw.items()}) for i in range(6)]
    assert (int(count), [int(n) for _, n in parts]) == (5, [1, 1, 0, 1, 1, 1])
    assert float(whole) == pytest.approx(sum(float(part) for part, _ in parts), rel=1e-4)
    assert float(parts[2][0]) == 0


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_heads_learn_ten_times_as_fast_in_at_most_four_groups(pack, optimizer):
    plan = Plan(**{**SLIM, "optimizer": optimizer, "epochs": 1, "weight_decay": 0.01, "schedule": "constant"})
    state, _ = trained(pack, plan)
    groups = state.optimizer.param_groups
    assert len(groups) <= 4
    assert {g["lr"] for g in groups} == {plan.lr, 10 * plan.lr}
    fast = {id(p) for g in groups if g["lr"] > plan.lr for p in g["params"]}
    named = dict(state.model.named_parameters())
    assert {name.split(".")[0] for name, p in named.items() if id(p) in fast} == {"head", "auxiliary"}
    undecayed = {id(p) for g in groups if not g["weight_decay"] for p in g["params"]}
    assert undecayed == {id(p) for p in named.values() if p.dim() < 2}


# -- batches


def test_training_and_answers_see_the_same_tensor(pack):
    """The guide normalised in two places, and differently."""
    raw = raw_batch(pack, [0])
    predicted = collate([read(pack.raw.source / pack.names[0], pack.options)], pack.columns)
    trained, answered = segment.batch(raw, Plan(), Draws(0, 0, raw["id"])), segment.batch(predicted, Plan(), None)
    assert torch.equal(trained["image"], answered["image"])
    expected = (raw["image"].permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.25
    torch.testing.assert_close(trained["image"], expected, atol=1e-6, rtol=0)
    assert trained["label"].dtype == torch.int64
    assert torch.equal(trained["distance"], raw["distance"] / 8)


def test_what_is_outside_of_a_crop_is_zero_and_ignored(pack):
    raw = raw_batch(pack, range(8))
    plan = Plan(**{**AUGMENT, "crop": 128})
    batch = segment.batch(raw, plan, Draws(0, 0, raw["id"]))
    corner = [batch[name][..., y, x] for name in ("image", "label") for y in (0, -1) for x in (0, -1)]
    outside = batch["label"] == losses.IGNORE
    assert outside.float().mean() > 0.5
    assert any((values == 0).all(-1).any() for values in corner[:4])
    assert set(batch["label"].unique().tolist()) == {0, 1, 2, losses.IGNORE}


def test_pictures_alone_are_a_batch_too(pack):
    raw = {"image": raw_batch(pack, range(2))["image"]}
    assert segment.batch(raw, Plan(), None).keys() == {"image"}


def test_a_training_step_never_asks_the_device_for_a_value(pack):
    """Fake tensors have none: `.item()`, a boolean index or a shape that depends on data raises. The guide printed one
    at every step."""
    plan = Plan(crop=64, scale_low=0.25, scale_high=2.0, flip=0.5, jitter=0.4)
    raw, conv = raw_batch(pack, range(4)), nn.Conv2d(3, CLASSES, 1)

    def model(batch):
        return conv(batch["image"]), ()

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        with pytest.raises(RuntimeError):
            torch.ones(1).item()
        fake: dict[str, Any] = {name: mode.from_tensor(tensor) for name, tensor in raw.items()}
        fake_batch = segment.batch(fake, plan, Draws(0, 0, fake["id"]))
        loss_sum, count = segment.loss(model, fake_batch, plan)
        (loss_sum / count.clamp(min=1)).backward()
    assert loss_sum.shape == ()


# -- the guide's faults


def test_warmup_ends_and_the_schedule_moves_at_every_step(pack):
    """The guide stepped its schedule once an epoch, and 1,000 epochs of warmup never ended."""
    plan = Plan(**{**SLIM, "epochs": 4, "batch_size": 4, "schedule": "poly", "warmup_epochs": 1.2})
    state = TrainState(TASK, pack, plan, "cpu")
    steps = [
        (state.lr, [g["lr"] for g in state.optimizer.param_groups])
        for r in loop.train(TASK, state, pack)
        if r.kind == "step"
    ]
    rates = [lr for lr, _ in steps]
    assert rates == pytest.approx([lr_at(plan, (n + 0.5) / 5) for n in range(20)])
    assert rates[:6] == sorted(rates[:6])
    assert max(rates) > 0.95 * plan.lr
    assert rates[6:] == sorted(rates[6:], reverse=True)
    assert len(set(rates)) == 20
    assert rates[-1] < 0.1 * plan.lr
    assert all({round(g / lr, 6) for g in of_groups} == {1.0, 10.0} for lr, of_groups in steps)


def test_batch_norm_learns_on_after_an_evaluation(pack):
    """The guide forgot `train()`: its running averages froze after the first one."""
    plan = Plan(**{**SLIM, "epochs": 2})
    state, modes, averages = TrainState(TASK, pack, plan, "cpu"), [], []
    norm = next(m for m in state.model.modules() if isinstance(m, nn.BatchNorm2d))
    assert norm.running_mean is not None
    for record in loop.train(TASK, state, pack):
        if record.kind in ("step", "evaluation", "epoch"):
            modes.append({m.training for m in state.model.modules()})
            averages.append((record.kind, norm.running_mean.clone()))
        if record.kind == "step" and record.step == 1:
            state.evaluate_next = True
    kinds = [kind for kind, _ in averages]
    assert kinds == ["step", "evaluation", "step", "step", "epoch", "step", "step", "step", "epoch"]
    assert modes == [{True}] * len(modes)
    for (_, before), (kind, after) in itertools.pairwise(averages):
        assert torch.equal(before, after) == (kind != "step")


def test_crop_colours_and_hardness_turned_while_it_trains_act_at_the_next_step(pack):
    seen: list[tuple[tuple[int, ...], float]] = []

    def loss(model, batch, plan):
        if isinstance(model, nn.Module):  # an evaluation hands over what the model said
            seen.append((tuple(batch["image"].shape), plan.ohem_threshold))
        return segment.loss(model, batch, plan)

    plan, task = Plan(**{**SLIM, **AUGMENT, "epochs": 1, "crop": 32}), task_of(loss=loss)
    state = TrainState(task, pack, plan, "cpu")
    for record in loop.train(task, state, pack):
        if record.kind == "step" and state.step == 1:
            state.plan = plan.replace(crop=48, ohem_threshold=0.5, jitter=0.0)
    assert [side for (*_, side), _ in seen] == [32, 48, 48]
    assert [threshold for _, threshold in seen] == [0.7, 0.5, 0.5]


def test_validation_is_neither_augmented_nor_cropped_nor_shuffled(pack):
    seen = []

    def listening(raw, plan, draws):
        if draws is None:
            seen.append((raw["id"], segment.batch(raw, plan, None)))
            return seen[-1][1]
        return segment.batch(raw, plan, draws)

    task = task_of(batch=listening)
    plan = Plan(**{**SLIM, **AUGMENT, "epochs": 2, "batch_size": 3, "crop": 32})
    trained(pack, plan, task)
    ids = torch.cat([i for i, _ in seen])
    assert ids.tolist() == pack.ids("val").tolist() * 2
    images, labels = (torch.cat([batch[name] for _, batch in seen]) for name in ("image", "label"))
    raw = raw_batch(pack, ids.tolist())
    assert torch.equal(images, (raw["image"].permute(0, 3, 1, 2).float() - 127.5) / 63.75)
    assert torch.equal(labels, raw["label"].long())


def test_resumed_in_the_middle_of_an_epoch_a_run_is_the_same_bit_for_bit(pack):
    plan = Plan(
        **{
            **SLIM,
            **AUGMENT,
            "epochs": 2,
            "batch_size": 6,
            "schedule": "poly",
            "warmup_epochs": 0.5,
            "dropout": 0.1,
            "eval_every": 2,
        }
    )
    whole, _ = trained(pack, plan)
    state = TrainState(TASK, pack, plan, "cpu")
    for record in loop.train(TASK, state, pack):
        if record.kind == "step" and record.step == 6:
            tensors = {name: tensor.clone() for name, tensor in state.tensors().items()}
            facts = state.facts()
            break
    again = TrainState(TASK, pack, plan.replace(seed=1), "cpu")
    again.plan = again.applied = plan
    again.load(tensors, facts)
    list(loop.train(TASK, again, pack))
    ours, theirs = again.tensors(), whole.tensors()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (again.step, again.best) == (whole.step, whole.best)


def test_batches_without_a_valid_pixel_are_trained_on_without_nan(tmp_path):
    pack = make_pack(tmp_path, 12, ignored=[i for i in range(12) if i not in (0, 6)])
    empty = []

    def listening(model, batch, plan):
        found = segment.loss(model, batch, plan)
        empty.append(int(found[1]) == 0)
        return found

    plan = Plan(**{**SLIM, **AUGMENT, "epochs": 2, "batch_size": 2})
    state, records = trained(pack, plan, task_of(loss=listening))
    assert any(empty)
    assert not all(empty)
    assert not [r for r in records if r.kind == "event"]
    assert all(math.isfinite(value) for r in records for value in r.values.values() if isinstance(value, float))
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state.model.state_dict().values())


@pytest.mark.parametrize("deterministic", [True, False])
def test_kernels_are_chosen_by_speed_or_for_repeatability_never_both(monkeypatch, deterministic):
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)
    before = torch.are_deterministic_algorithms_enabled()
    try:
        devices.prepare(PLAN.replace(deterministic=deterministic), torch.device("cuda"), many_shapes=False)
        assert torch.are_deterministic_algorithms_enabled() == deterministic
        assert torch.backends.cudnn.benchmark != deterministic
    finally:
        torch.use_deterministic_algorithms(before)


def test_a_pack_decodes_each_picture_once_and_the_guides_way_at_every_access(tmp_path):
    READS.clear()
    pack = make_pack(tmp_path, 12)
    assert set(READS.values()) == {1}
    plan = Plan(**{**SLIM, "epochs": 2, "batch_size": 5})
    resident, _ = trained(pack, plan)
    assert set(READS.values()) == {1}
    again, _ = trained(pack, plan.replace(feed="workers"))
    assert {READS[Path(pack.names[i]).stem] for i in pack.ids("train")} == {3}
    ours, theirs = resident.tensors(), again.tensors()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_evaluations_amid_training_look_once_and_the_last_word_is_all_scales():
    plan = Plan(eval_scales=(0.5, 1.0, 1.5), eval_flip=True, eval_window=64)
    once = plan.while_training()
    assert (once.eval_scales, once.eval_flip, once.eval_window) == ((1.0,), False, 64)
    assert scoring.is_partial(plan, 100)
    assert plan.replace(eval_full=True).while_training() == plan.replace(eval_full=True)
    assert not scoring.is_partial(plan.replace(eval_full=True), 100)


def test_a_run_answers_files_with_the_scales_and_mirror_images_of_its_plan(pack, tmp_path):
    plan = Plan(network="slim", eval_scales=(0.5, 1.0), eval_flip=True)
    torch.manual_seed(0)
    run, model = Run(tmp_path, TASK, pack.card, plan), segment.model(pack, plan).eval()
    nn.init.normal_(dict(model.named_parameters())["head.classify.weight"])
    i = int(pack.ids("val")[0])
    answers = [
        run.decoded(model, collate([run.read(pack.raw.source / pack.names[i])], pack.columns))[0],
        run.decoded(model, raw_batch(pack, [i]))[0],
    ]
    with torch.no_grad():
        batch = segment.batch(raw_batch(pack, [i]), plan, None)
        wanted, once = segment.infer(model, batch, plan), model(batch)
    assert all(np.array_equal(answer, segment.decode(wanted, pack)[0]) for answer in answers)
    assert not np.array_equal(answers[0], segment.decode(once, pack)[0])


# -- plans


def test_the_baseline_is_the_guides():
    said = {"batch_size": 32, "optimizer": "sgd", "schedule": "poly", "amp": "off", "feed": "workers", "workers": 0}
    said |= {"eval_every": 5, "eval_full": True, "eval_flip": True, "eval_scales": (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)}
    said |= {"crop": 384, "scale_low": 0.25, "scale_high": 2.0, "jitter": 0.4, "head_lr": 10.0, "lr": 5e-3}
    said |= {"ohem_threshold": 0.7, "ohem_least": 1 / 16, "edge_factor": 2.0, "edge_weight": 10.0, "edge_width": 2.0}
    assert {name: getattr(BASELINE, name) for name in said} == said
    assert BASELINE.while_training() == BASELINE
    assert BASELINE.betas[0] == 0.9


def card_of(size, train, channels=3):
    pixels = Column("fixed", "|u1", (*size, channels)), Column("fixed", "|u1", tuple(size))
    columns = {"image": pixels[0], "label": pixels[1], "distance": pixels[1]}
    options = {"size": list(size), "channels": channels}
    return Card("segment", list("abc"), options, columns, {"train": train, "val": 1, "test": 0})


@pytest.mark.parametrize("accelerator", ["cuda", "mps", "cpu"])
@pytest.mark.parametrize(("size", "train"), [((120, 160), 80), ((360, 480), 3), ((1024, 2048), 2975), ((40, 33), 500)])
def test_advice_fits_the_data_and_gives_every_number_a_reason(accelerator, size, train):
    card = card_of(size, train, 4)
    advice = decide(TASK, card, Machine(accelerator, "x", 40 if accelerator == "cuda" else 0, 1, 2, (8, 0)))
    plan = advice.plan
    assert isinstance(plan, Plan)
    assert plan.batch_size <= train
    assert plan.crop is None or plan.crop <= max(32, min(size))
    assert all(advice.reasons.values())
    assert plans.network_of(plan) == ("bisenetv2" if accelerator == "cuda" else "slim")
    assert plan.warmup_epochs < plan.epochs
    assert isinstance(segment.model(card, plan), networks.BiSeNetV2)


def test_another_network_comes_with_the_knobs_that_it_learns_better_with(pack):
    plan = PLAN.replace(batch_size=8, crop=64)
    slim = plans.with_network(plan, pack, "slim")
    assert (slim.network, slim.optimizer, slim.head_lr, slim.batch_size, slim.crop) == ("slim", "adamw", 1.0, 8, 64)
    guides = plans.with_network(slim, pack, "bisenetv2")
    assert (guides.network, guides.optimizer, guides.lr, guides.head_lr) == ("bisenetv2", "sgd", 2.5e-3, 10.0)
    with pytest.raises(PlanError, match=r"Plan\.network must be one of auto, bisenetv2, slim, got 'unet'"):
        plans.with_network(plan, pack, "unet")


@pytest.mark.parametrize(
    ("knob", "value"),
    [
        ("crop", 16),
        ("scale_low", 0.1),
        ("flip", 1.5),
        ("jitter", -0.1),
        ("ohem_threshold", 0.0),
        ("ohem_least", 2.0),
        ("edge_weight", 0.5),
        ("edge_width", 0.0),
        ("eval_scales", (1.0, 0.0)),
        ("eval_window", 8),
        ("network", "unet"),
    ],
)
def test_a_knob_outside_its_rule_is_refused_by_name(knob, value):
    with pytest.raises(PlanError, match=rf"Plan\.{knob} must be"):
        Plan(**{knob: value})


def test_knobs_that_contradict_each_other_are_refused():
    with pytest.raises(PlanError, match=r"Plan\.scale_low must be ≤ scale_high \(0\.5\), got 1; lower it or raise"):
        Plan(scale_high=0.5)
    with pytest.raises(PlanError, match=r"Plan\.eval_scales must name at least one zoom, got none"):
        Plan(eval_scales=())
