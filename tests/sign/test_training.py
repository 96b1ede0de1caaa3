"""What the settings of signs do to batches, loss, metrics and augmentation, and none of the guide's faults."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from packs import raw_batch

from nbtools.data import Draws
from nbtools.errors import PlanError
from nbtools.measure import Machine, decide
from nbtools.tasks import sign
from nbtools.tasks.sign import data
from nbtools.tasks.sign.keypoints import LEFT, POINTS, RIGHT, SHOULDERS
from nbtools.tasks.sign.networks import Gru, Transformer
from nbtools.tasks.sign.task import Plan
from nbtools.train import TrainState, as_task, train

pytestmark = pytest.mark.usefixtures("one_cache")

GLOSSES = 6
ALL: dict[str, Any] = {"time_warp": 1.0, "time_crop": 0.4, "mirror": 0.5}


def make_pack(folder: Path, count=24, **options):
    """14 of 24 clips train; frames, hands and faces are missing here and there."""
    sign.demo(folder / "raw", count, glosses=GLOSSES, categories=3, features=True, frames=(10, 16))
    return sign.pack(folder / "raw", into=folder / "pack", progress=False, **options)


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    return make_pack(tmp_path_factory.mktemp("sign"))


@pytest.fixture
def narrow(monkeypatch):
    """The same network, small: what is claimed with it does not depend on its size."""
    monkeypatch.setattr(Transformer, "width", 32)
    monkeypatch.setattr(Transformer, "depth", 1)


@pytest.mark.parametrize(("network", "lr", "steps"), [("transformer", 1e-2, 30), ("gru", 3e-2, 60)])
def test_each_network_overfits_one_batch(pack, network, lr, steps, narrow):
    torch.manual_seed(0)
    plan = Plan(network=network, dropout=0.0)
    model = sign.model(pack, plan)
    optimizer = torch.optim.Adam(model.parameters(), lr)
    raw = raw_batch(pack, range(8))
    raw["features"] = torch.randn(raw["features"].shape)  # the demo's end in one posture, which takes more steps
    batch = sign.batch(raw, plan, None)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_sum, count = sign.loss(model, batch, plan)
        (loss_sum / count).backward()
        optimizer.step()
    found = sign.metrics(model.eval()(batch), batch)
    assert found["gloss_accuracy"] == found["cat_accuracy"] == (8, 8)
    assert sign.decode(model(batch), pack) == [sign.text_of(pack, i) for i in range(8)]


def test_auto_reads_keypoints_where_there_are_any_and_else_features(pack, tmp_path):
    bare = make_pack(tmp_path, 6, kp_key=None)
    for of, name, network in ((pack, "x", Transformer), (bare, "features", Gru)):
        assert isinstance(sign.model(of, Plan()), network)
        assert name in sign.batch(raw_batch(of, [0, 1]), Plan(), None)
    with pytest.raises(PlanError, match=r'network = "transformer" reads \'x\', and this data has features, label'):
        sign.model(bare, Plan(network="transformer"))


def test_the_loss_is_the_sum_of_both_heads_by_alpha_and_beta_in_float32_against_the_formula():
    plan = Plan(alpha=0.7, beta=0.2, label_smoothing=0.1)
    torch.manual_seed(0)
    outputs = gloss, category = torch.randn(7, 6).bfloat16(), torch.randn(7, 3).bfloat16()
    labels = torch.stack([torch.randint(6, (7,)), torch.randint(3, (7,))], 1)
    expected = 0.0
    for b in range(7):
        for logits, place, factor in ((gloss, 0, 0.7), (category, 1, 0.2)):
            p = logits[b].float().log_softmax(0)
            expected += factor * -(0.9 * p[labels[b, place]] + 0.1 * p.mean())
    loss_sum, count = sign.loss(lambda _: outputs, {"label": labels}, plan)
    assert (count, float(loss_sum), loss_sum.dtype) == (7, pytest.approx(float(expected), rel=1e-5), torch.float32)


@pytest.mark.parametrize("classes", [3, 9])
def test_metrics_are_the_obvious_counts(classes):
    torch.manual_seed(0)
    gloss, category = torch.randn(40, classes), torch.randn(40, 4)
    labels = torch.stack([torch.randint(classes, (40,)), torch.randint(4, (40,))], 1)
    found = sign.metrics((gloss, category), {"label": labels})
    ranks = [int((row > row[truth]).sum()) for row, truth in zip(gloss, labels[:, 0], strict=True)]
    assert found["gloss_accuracy"] == (ranks.count(0), 40)
    assert found["top5"] == (sum(r < 5 for r in ranks), 40)
    assert found["cat_accuracy"] == ((category.argmax(1) == labels[:, 1]).sum(), 40)


@pytest.mark.parametrize("kind", ["body", "hands"])
def test_where_a_body_stands_and_how_large_it_is_changes_nothing(pack, kind):
    plan, raw = Plan(normalise=kind), raw_batch(pack, range(5))
    nearer = {**raw, "x": torch.where(raw["x"] != 0, raw["x"] * 0.7 + 0.11, 0)}
    x = sign.batch(raw, plan, None)["x"]
    torch.testing.assert_close(sign.batch(nearer, plan, None)["x"], x, atol=2e-4, rtol=0)
    both = raw["mask"][0, :, SHOULDERS].all(1)
    left, right = x.unflatten(2, (-1, 2))[0, both, SHOULDERS].mean(0)
    torch.testing.assert_close(left, -right, atol=1e-4, rtol=0)
    assert float((left - right).norm()) == pytest.approx(1, abs=1e-4)


@pytest.mark.parametrize("kind", ["none", "body", "hands"])
def test_without_shoulders_or_any_point_nothing_is_nan(pack, kind, narrow):
    for places in (SHOULDERS, slice(0, POINTS)):
        raw = raw_batch(pack, range(3))
        raw["mask"] = raw["mask"].clone()
        raw["mask"][:, :, places] = False
        batch = sign.batch(raw, Plan(normalise=kind), None)
        assert torch.isfinite(batch["x"]).all()
        assert torch.isfinite(sign.loss(sign.model(pack, Plan()), batch, Plan())[0])


def test_the_mirror_image_of_a_mirror_image_is_the_clip(pack):
    raw, plan = raw_batch(pack, range(6)), Plan(normalise="none", mirror=1.0)
    once = sign.batch(raw, plan, Draws(0, 0, raw["id"]))
    twice = sign.batch({**once, "id": raw["id"]}, plan, Draws(0, 0, raw["id"]))
    torch.testing.assert_close(twice["x"], sign.batch(raw, Plan(normalise="none"), None)["x"], atol=1e-6, rtol=0)
    assert torch.equal(once["mask"][:, :, RIGHT], raw["mask"][:, :, LEFT])
    left, right = raw["x"].unflatten(2, (-1, 2))[:, :, LEFT], once["x"].unflatten(2, (-1, 2))[:, :, RIGHT]
    seen = raw["mask"][:, :, LEFT]
    torch.testing.assert_close(right[seen], left[seen] * torch.tensor([-1.0, 1]) + torch.tensor([1.0, 0]))


def test_a_point_that_is_not_seen_says_nothing_and_nothing_is_seen_beyond_a_clip(pack):
    raw = raw_batch(pack, range(12))
    noisy = {**raw, "x": torch.where(raw["mask"].repeat_interleave(2, 2), raw["x"], 9.0)}
    changed, blind = (sign.batch(each, Plan(**ALL), Draws(1, 0, raw["id"])) for each in (raw, noisy))
    torch.testing.assert_close(blind["x"], changed["x"], atol=1e-5, rtol=1e-4)
    for seen, frames in zip(changed["mask"], changed["x_length"].tolist(), strict=True):
        assert not seen[frames:].any()


def test_a_warped_clip_keeps_its_ends_and_its_order():
    """A point that only moves to the right still does, from where it began to where it stopped."""
    line = torch.linspace(0.1, 0.9, 20)[None, :, None].expand(3, 20, 2 * POINTS)
    raw = {"x": line, "mask": torch.ones(3, 20, POINTS), "x_length": torch.tensor([20, 20, 11]), "id": torch.arange(3)}
    batch = sign.batch(raw, Plan(normalise="none", time_warp=1.0), Draws(0, 0, raw["id"]))
    lengths = batch["x_length"].tolist()
    for b, (length, last) in enumerate(zip(lengths, (0.9, 0.9, float(line[0, 10, 0])), strict=True)):
        own = batch["x"][b, :length, 0]
        assert (own.diff() > 0).all()
        assert own[[0, -1]].tolist() == pytest.approx([0.1, last], abs=1e-5)
        assert batch["mask"][b].any(1).tolist() == [t < length for t in range(batch["mask"].shape[1])]
    assert lengths != [20, 20, 11]


def steps_of(pack, plan):
    """(samples of each step, state) of an epoch."""
    state = TrainState(as_task(sign), pack, plan, "cpu")
    seen = [record.samples for record in train(as_task(sign), state, pack) if record.kind == "step"]
    return np.diff([0, *seen]).tolist(), state


def test_the_advised_batch_size_is_the_one_that_the_feed_gives(pack, narrow):
    """The guide computed it after its loaders were built."""
    for asked in (None, 5):
        found = {"batch_size": (asked, "measured")} if asked else None
        plan = decide(as_task(sign), pack.card, Machine("cpu", "x", cores=2), found).plan
        sizes, _ = steps_of(pack, plan.replace(epochs=1, warmup_epochs=0))
        assert max(sizes) == plan.batch_size
        assert sum(sizes) == pack.splits["train"]
    assert plan.batch_size == 5


@pytest.mark.parametrize("network", ["transformer", "gru"])
def test_accumulated_gradients_are_those_of_one_big_batch_and_leftover_ones_a_step_too(pack, network, narrow):
    """14 clips in batches of 8 out of micro-batches of 3: 8, and the 6 that the guide dropped."""
    weights, more = [], {"dropout": 0.0, "optimizer": "sgd", **ALL}
    for micro in (None, 3):
        sizes, state = steps_of(pack, Plan(network=network, epochs=1, batch_size=8, micro_batch_size=micro, **more))
        assert (sorted(sizes), state.step) == ([6, 8], 2)
        weights.append([p.detach() for p in state.model.parameters()])
    for whole, parts in zip(*weights, strict=True):
        torch.testing.assert_close(parts, whole, atol=1e-6, rtol=1e-5)


def test_a_pack_decompresses_each_clip_once_and_the_guides_way_at_every_access(tmp_path, monkeypatch, narrow):
    reads, read = Counter(), data.read

    def counted(path, options):
        reads[path.relative_to(tmp_path / "raw").as_posix()] += 1
        return read(path, options)

    monkeypatch.setattr(data, "read", counted)
    pack = make_pack(tmp_path, 12)
    plan = Plan(epochs=2, batch_size=5)
    steps_of(pack, plan)
    assert set(reads.values()) == {1}
    steps_of(pack, plan.replace(feed="workers"))
    assert {reads[pack.names[i]] for i in pack.ids("train")} == {3}


def test_a_loss_of_nothing_is_refused():
    with pytest.raises(PlanError, match=r"Plan\.alpha and Plan\.beta must not both be 0"):
        Plan(alpha=0, beta=0)
