"""How handwritten lines are trained: networks, batches, augmentation, CTC, metrics, plans; and the faults of the
guide's."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nbtools.data import Card, Draws, gather, open_feed
from nbtools.errors import PlanError
from nbtools.measure import Machine, decide
from nbtools.tasks import hwdb
from nbtools.tasks.common import ctc
from nbtools.tasks.common.metrics import text_metrics
from nbtools.tasks.hwdb import networks
from nbtools.tasks.hwdb.formats import UNKNOWN
from nbtools.train import TrainState, train
from nbtools.train.evaluation import evaluate
from tests.packs import pack_of

LETTERS = [chr(0x4E00 + k) for k in range(9)]
CPU = torch.device("cpu")


def glyph(letter, height=32, width=40):
    """Blocks of ink in a pattern of its own for each letter; one stands at its right edge."""
    blocks = np.random.default_rng(letter).random((width // 8, height // 8)) < 0.5
    blocks[-1, 1] = True
    return np.kron(blocks, np.full((8, 8), 255)).astype(np.uint8)


def packed(folder, texts, splits, height=32):
    """A pack of lines of such glyphs, on their side, as `hwdb.pack` writes them; texts: places in LETTERS."""
    samples = [
        {"image": np.concatenate([glyph(letter, height) for letter in text]), "label": np.array(text)} for text in texts
    ]
    shape = {"ragged": ("image", "label"), "bucket_by": "image", "classes": [*LETTERS, UNKNOWN]}
    options = {"height": height}
    return pack_of(samples, folder, task="hwdb", split=splits, options=options, **shape)


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """Ten lines of one to six glyphs, the last two to validate on."""
    texts = [[int(k) for k in np.random.default_rng(n).permutation(9)[: 1 + n % 6]] for n in range(10)]
    return packed(tmp_path_factory.mktemp("lines"), texts, ["train"] * 8 + ["val"] * 2)


def raw_of(pack, ids):
    return gather(pack, np.array(list(ids)))


def narrow(card, plan):
    """The plan's network with a quarter of its channels: a CPU trains it in a test."""
    torch.manual_seed(0)
    name = "slim" if plan.network == "auto" else plan.network
    return networks.NETWORKS[name](card.options["height"], len(card.classes), width=0.25)


TASK: Any = SimpleNamespace(**{name: getattr(hwdb, name) for name in hwdb.__all__} | {"model": narrow})


# networks

LENGTHS = (97, 33, 200, 64)


def small(name, height=32) -> Any:
    """A narrow network whose batch norms shift and scale: one that is fresh shifts by 0, and would hide what padding
    does."""
    torch.manual_seed(0)
    network = networks.NETWORKS[name](height, 12, width=0.25)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1, 0.2)
            nn.init.normal_(module.bias)
            module.load_state_dict({"running_mean": torch.randn(module.num_features)}, strict=False)
            module.load_state_dict({"running_var": torch.rand(module.num_features) + 0.5}, strict=False)
    return network


def padded(lengths=LENGTHS, height=32, width=None):
    """A batch of lines of noise, paper beyond their ends."""
    generator = torch.Generator().manual_seed(1)
    image = torch.zeros(len(lengths), 1, height, width or max(lengths))
    for row, length in zip(image, lengths, strict=True):
        row[..., :length] = 2 * torch.rand(1, height, length, generator=generator)
    return {"image": image, "image_length": torch.tensor(lengths)}


def alone(batch, b):
    length = int(batch["image_length"][b])
    return {"image": batch["image"][b : b + 1, ..., :length], "image_length": batch["image_length"][b : b + 1]}


def test_hctr_has_the_references_53_1_million_parameters_and_no_recurrent_layer_and_slim_is_small():
    with torch.device("meta"):
        network, slim = (
            hwdb.model(card_of(height, classes=classes), hwdb.Plan(network=name))
            for name, height, classes in (("hctr", 128, 7373), ("slim", 32, 60))
        )
    assert sum(p.numel() for p in network.parameters()) == 53_104_143
    assert sorted({m.p for m in network.modules() if isinstance(m, nn.Dropout)} - {0}) == [0.1, 0.3, 0.9]
    assert not [m for m in network.modules() if isinstance(m, nn.RNNBase)]
    assert 0.3e6 < sum(p.numel() for p in slim.parameters()) < 1e6


@pytest.mark.parametrize(("name", "stride", "least"), [("hctr", 32, 64), ("slim", 4, 16)])
def test_a_line_of_any_height_has_as_many_steps_as_strides_begun_and_is_refused_where_it_is_too_low(
    name, stride, least
):
    for width, height in zip((1, 31, 32, 33, 70, 97), (32, 45, 64, 128, 32, 45), strict=True):
        with torch.no_grad():
            logits, steps = small(name, height).eval()(padded((width,), height))
        assert steps.tolist() == [len(logits)] == [-(-width // stride)]
        assert logits.shape[1:] == (1, 13)
    rule = rf'network = "{name}" reads lines ≥ {least} pixels high, but these are {least - 1}; pack with a larger'
    with pytest.raises(PlanError, match=rule):
        networks.build(name, least - 1, 3)


@pytest.mark.parametrize(("name", "height"), [("hctr", 45), ("slim", 32)])
def test_a_line_gets_the_answer_in_a_padded_batch_that_it_gets_alone(name, height):
    """The guide's collate gave every sample the padded length as its own."""
    network, batch = small(name, height).eval(), padded(height=height, width=231)
    with torch.no_grad():
        logits, steps = network(batch)
        for b in range(len(LENGTHS)):
            own, [count] = network(alone(batch, b))
            assert len(own) == count == steps[b]
            assert own.abs().max() > 0.1
            torch.testing.assert_close(logits[:count, b], own[:, 0], rtol=0, atol=1e-5)


# batches


def test_each_line_keeps_its_own_length_image_and_text_and_padding_is_paper(lines):
    """The guide gave each line the padded length, repeated its last column, cut the widest lines, and with them a
    proportional part of their texts."""
    plan, network, seen = hwdb.Plan(batch_size=3, feed="resident"), networks.build("slim", 32, 10).eval(), []
    for raw in open_feed(lines, plan, CPU)([np.array([0, 5, 3]), np.array([4, 1])]):
        batch = hwdb.batch(raw, plan, None)
        _, steps = network(batch)
        for b, i in enumerate(batch["id"].tolist()):
            length, label = int(batch["image_length"][b]), batch["label"][b, : batch["label_length"][b]]
            image, ink = batch["image"][b, 0], torch.from_numpy(lines.sample(i)["image"].T.astype(np.float32))
            guides = ((255 - ink) / 255 - 0.5) / 0.5  # of the paper-white scan
            torch.testing.assert_close(image[:, :length], 1 - guides)
            assert not image[:, length:].any()
            assert int(steps[b]) == 10 * len(label)
            assert label.tolist() == lines.sample(i)["label"].tolist()
            seen.append(i)
    assert sorted(seen) == [0, 1, 3, 4, 5]


# augmentation


def varied(pack, ids, strength=1.0, epoch=0):
    raw = raw_of(pack, ids)
    return hwdb.batch(raw, hwdb.Plan(augment=strength), Draws(0, epoch, raw["id"]))


def test_augmentation_changes_lines_and_evaluation_never_does(lines):
    plain = hwdb.batch(raw_of(lines, range(8)), hwdb.Plan(augment=1.0), None)["image"]
    changed = varied(lines, range(8))["image"][..., : plain.shape[3]]
    assert all((a - b).abs().mean() > 0.05 for a, b in zip(changed, plain, strict=True))
    assert torch.equal(hwdb.batch(raw_of(lines, range(8)), hwdb.Plan(augment=1.0), None)["image"], plain)
    assert torch.equal(varied(lines, range(8), 0.0)["image"], plain)
    assert not torch.equal(varied(lines, range(8), epoch=1)["image"], varied(lines, range(8))["image"])


def test_what_a_line_becomes_depends_on_nothing_beside_it(lines):
    strength = 2.0
    together = varied(lines, range(8), strength)
    for i in range(8):
        alone = varied(lines, [i], strength)
        [length] = alone["image_length"].tolist()
        assert together["image_length"][i] == length
        torch.testing.assert_close(
            together["image"][i, ..., :length], alone["image"][0, ..., :length], rtol=0, atol=5e-3
        )


def test_augmentation_shortens_no_line_hides_little_and_leaves_padding_blank(lines):
    before = hwdb.batch(raw_of(lines, range(8)), hwdb.Plan(), None)
    for epoch in range(4):
        batch = varied(lines, range(8), 2.0, epoch)
        assert (batch["image_length"] >= before["image_length"]).all()
        assert (batch["image_length"] <= batch["image"].shape[3]).all()
        assert 0 <= batch["image"].min() <= batch["image"].max() <= 2
        assert 0.4 < batch["image"].sum() / before["image"].sum() < 2
        for row, length in zip(batch["image"], batch["image_length"], strict=True):
            assert not row[..., length:].any()


# CTC


TEXTS = ([0, 1, 2, 3], [4, 4, 0], [2], [], [1, 1, 1])
STEPS = (14, 9, 3, 5, 5)


def answers():
    torch.manual_seed(0)
    logits, steps = 3 * torch.randn(max(STEPS), len(TEXTS), 7), torch.tensor(STEPS)
    labels = nn.utils.rnn.pad_sequence([torch.tensor(text, dtype=torch.long) for text in TEXTS], batch_first=True)
    return logits, steps, {"label": labels, "label_length": torch.tensor([len(text) for text in TEXTS])}


def alone_in_float64(logits, steps, b):
    log_probs = logits[: steps[b], b].double().log_softmax(1)
    text = torch.tensor(TEXTS[b], dtype=torch.long) + 1
    return F.ctc_loss(log_probs, text, torch.tensor(int(steps[b])), torch.tensor(len(text)), reduction="sum")


def test_the_loss_and_its_gradient_are_those_of_each_line_alone_in_float64():
    logits, steps, batch = answers()
    given, exact = logits.clone().requires_grad_(), logits.double().requires_grad_()
    found, count = hwdb.loss(lambda _: (given, steps), batch, hwdb.PLAN)
    wanted = torch.stack([alone_in_float64(exact, steps, b) for b in range(len(TEXTS))]).sum()
    found.backward()
    wanted.backward()
    assert count == len(TEXTS)
    assert abs(found.item() / wanted.item() - 1) < 1e-5
    torch.testing.assert_close(given.grad, exact.grad, rtol=1e-4, atol=1e-6, check_dtype=False)


def test_a_line_without_room_for_its_text_is_left_out_and_counted():
    """Its loss is infinite: in the sum it would be a NaN for every other line, and zeroed nobody would know."""
    logits, steps, batch = answers()
    logits.requires_grad_()
    short = torch.tensor([14, 3, 3, 5, 4])  # two equal neighbours need a blank between them
    found, count = hwdb.loss(lambda _: (logits, short), batch, hwdb.PLAN)
    found.backward()
    assert found.item() == pytest.approx(sum(alone_in_float64(logits, short, b).item() for b in (0, 2, 3)), rel=1e-5)
    assert count == 3
    assert logits.grad is not None
    assert [bool(logits.grad[:, b].any()) for b in range(5)] == [True, False, True, True, False]
    assert hwdb.metrics((logits, short), batch)["infeasible"] == (2, 5)
    assert hwdb.metrics((logits, steps), batch)["infeasible"] == (0, 5)
    logits.grad = None
    long = [0, 1, 4]  # nothing but such lines
    some = {name: values[long] for name, values in batch.items()}
    found, count = hwdb.loss(lambda _: (logits[:, long], torch.ones(3, dtype=torch.long)), some, hwdb.PLAN)
    found.backward()
    assert (found.item(), count.item()) == (0, 0)
    assert logits.grad is not None
    assert not logits.grad.any()


# metrics and decoding


def one_hot(rows, classes):
    """An answer that reads exactly these places, a blank after each."""
    path = nn.utils.rnn.pad_sequence([torch.tensor([k for p in row for k in (p + 1, 0)] or [0]) for row in rows])
    return F.one_hot(path, 1 + classes).float(), torch.tensor([max(2 * len(row), 1) for row in rows])


def labelled(rows):
    labels = nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True)
    return {"label": labels, "label_length": torch.tensor([len(row) for row in rows])}


def test_an_unknown_character_is_never_read_right():
    unknown = 4  # the last class
    for read in ([0, unknown], [0, 1], [0]):
        found = hwdb.metrics(one_hot([read], 5), labelled([[0, unknown]]))
        assert (found["cer"], found["whole_accuracy"]) == ((1, 2), (0, 1))
    assert hwdb.metrics(one_hot([[0, 1]], 5), labelled([[0, 1]]))["cer"] == (0, 2)


# training


@pytest.mark.parametrize(("network", "steps"), [("slim", 20), ("hctr", 10)])
def test_each_network_overfits_one_batch(lines, network, steps):
    plan, ids = hwdb.Plan(network=network), (1, 7)
    model = narrow(lines, plan)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    batch = hwdb.batch(raw_of(lines, ids), plan, None)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_sum, count = hwdb.loss(model, batch, plan)
        (loss_sum / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
    truth = ["".join(LETTERS[k] for k in lines.sample(i)["label"]) for i in ids]
    assert [len(text) for text in truth] == [2, 2]
    assert hwdb.decode(model(batch), lines) == truth


def test_every_line_is_trained_on_and_evaluated_the_last_partial_batch_too(lines):
    """The guide dropped the last batch where it was not full, in the test as well."""
    plan = hwdb.Plan(network="slim", epochs=1, batch_size=3, augment=1.0, lr=1e-3)
    state = TrainState(TASK, lines, plan, CPU)
    rows = list(train(TASK, state, lines))
    assert state.samples == 8
    assert [r for r in rows if r.kind == "step"][-1].step == 3  # the batch size reaches the loader: the guide's did not
    last = rows[-1].values
    truth = {i: lines.sample(i)["label"].tolist() for i in lines.ids("val")}
    model = state.model.eval()
    with torch.no_grad():
        read = {i: ctc.greedy(model(hwdb.batch(raw_of(lines, [i]), plan, None)))[0] for i in truth}
    wrong, count = text_metrics([read[i] for i in truth], list(truth.values()))["cer"]
    wanted = wrong / count
    assert last["val_cer"] == pytest.approx(wanted)
    for batch_size in (1, 2):
        found = evaluate(TASK, model, lines, plan.replace(batch_size=batch_size), "val")
        assert found["cer"] == pytest.approx(wanted)


def test_demo_pages_are_packed_trained_on_and_read(tmp_path, monkeypatch):
    monkeypatch.setenv("NBTOOLS_CACHE", str(tmp_path / "cache"))
    folder = hwdb.demo(tmp_path / "pages", 40, characters=12, height=32)
    pack = hwdb.pack(folder, height=32, val=6, into=tmp_path / "pack", progress=False)
    plan = hwdb.Plan(epochs=3, batch_size=8, lr=3e-3, augment=0.5, clip_norm=5.0, amp="bf16")
    state = TrainState(hwdb, pack, plan, CPU)
    losses = [r.values["train_loss"] for r in train(hwdb, state, pack) if r.kind == "epoch"]
    assert losses[-1] < losses[0]
    found = evaluate(hwdb, state.model, pack, plan, "test")
    assert found["infeasible"] == 0
    assert np.isfinite(list(found.values())).all()
    [raw] = open_feed(pack, hwdb.BASELINE, CPU)([pack.ids("train")[:8]])
    for row, i, length in zip(raw["image"], raw["id"].tolist(), raw["image_length"].tolist(), strict=True):
        assert np.array_equal(row[:length].numpy(), pack.sample(i)["image"])


# plans


def card_of(height, train_lines=30_000, classes=60):
    return Card(
        "hwdb", [*map(chr, range(0x4E00, 0x4E00 + classes)), UNKNOWN], {"height": height}, {}, {"train": train_lines}
    )


def test_auto_takes_the_references_network_for_high_lines_and_a_name_is_taken_or_refused(lines):
    for height, network in ((32, networks.Slim), (64, networks.Slim), (96, networks.Hctr)):
        with torch.device("meta"):
            assert isinstance(hwdb.model(card_of(height), hwdb.Plan()), network)
    model = hwdb.model(lines, hwdb.Plan(network="slim", checkpoint_activations=True))
    assert isinstance(model, networks.Slim)
    assert model.recompute
    with pytest.raises(PlanError, match=r'network = "hctr" reads lines ≥ 64 pixels high, but these are 32'):
        hwdb.model(lines, hwdb.Plan(network="hctr"))


def test_the_baseline_is_the_references_recipe_and_the_plan_its_rate_by_the_sqrt_rule_clipped_and_warmed_up():
    base = hwdb.BASELINE
    assert (base.batch_size, base.lr, base.optimizer, base.betas[0], base.weight_decay) == (8, 1e-3, "sgd", 0.9, 1e-4)
    assert (base.epochs, base.amp, base.feed, base.workers, base.augment) == (90, "off", "workers", 0, 0)
    plan = hwdb.PLAN
    assert plan.lr == pytest.approx(hwdb.BASELINE.lr * (plan.batch_size / hwdb.BASELINE.batch_size) ** 0.5, rel=1e-2)
    assert (plan.batch_size, plan.lr_rule, plan.clip_norm, plan.amp) == (64, "sqrt", 5.0, "bf16")
    assert plan.warmup_epochs > 0
    assert plan.turn(batch_size=16).lr == pytest.approx(plan.lr / 2)


@pytest.mark.parametrize("accelerator", ["cuda", "cpu"])
@pytest.mark.parametrize("height", [32, 128])
def test_advice_gives_a_network_for_the_machine_and_a_reason_for_every_number(accelerator, height):
    machine = Machine(accelerator, "x", 40 if accelerator == "cuda" else 0, 1, 2, (8, 0))
    card = card_of(height)
    advice = decide(TASK, card, machine)
    large = accelerator == "cuda" and height == 128
    with torch.device("meta"):
        model = hwdb.model(card, hwdb.Plan.from_dict(advice.plan.to_dict()))
    assert isinstance(model, networks.Hctr if large else networks.Slim)
    assert all(advice.reasons.values())
    assert advice.plan.warmup_epochs > 0
    assert advice.plan.clip_norm == 5.0
    if large:
        assert (advice.plan.batch_size, advice.plan.lr, advice.plan.amp) == (64, 2.83e-3, "bf16")
