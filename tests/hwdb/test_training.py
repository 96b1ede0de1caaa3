"""How handwritten lines are trained: networks, batches, augmentation, CTC, metrics, plans; and the guide's faults."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nbtools.data import Card, Draws, open_feed
from nbtools.errors import PlanError
from nbtools.tasks import hwdb
from nbtools.tasks.common import ctc
from nbtools.tasks.common.metrics import text_metrics
from nbtools.tasks.hwdb import networks
from nbtools.tasks.hwdb.data import UNKNOWN
from nbtools.train import TrainState, train
from nbtools.train.evaluation import evaluate
from tests.packs import pack_of, raw_batch

LETTERS = [chr(0x4E00 + k) for k in range(9)]
LENGTHS = (97, 33, 200, 64)
CPU = torch.device("cpu")


def glyph(letter, height=32, width=40):
    """Blocks of ink in a pattern of its own for each letter; one stands at its right edge."""
    blocks = np.random.default_rng(letter).random((width // 8, height // 8)) < 0.5
    blocks[-1, 1] = True
    return np.kron(blocks, np.full((8, 8), 255)).astype(np.uint8)


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    """Ten lines of one to six glyphs, on their side, as `hwdb.pack` writes them; the last two to validate on."""
    texts = [[int(k) for k in np.random.default_rng(n).permutation(9)[: 1 + n % 6]] for n in range(10)]
    samples = [{"image": np.concatenate([glyph(one) for one in text]), "label": np.array(text)} for text in texts]
    shape = {"ragged": ("image", "label"), "bucket_by": "image", "classes": [*LETTERS, UNKNOWN]}
    split = ["train"] * 8 + ["val"] * 2
    return pack_of(samples, tmp_path_factory.mktemp("lines"), task="hwdb", split=split, options={"height": 32}, **shape)


def narrow(card, plan):
    """The plan's network with a quarter of its channels: a CPU trains it in a test."""
    torch.manual_seed(0)
    name = "slim" if plan.network == "auto" else plan.network
    return networks.NETWORKS[name](card.options["height"], len(card.classes), width=0.25)


TASK: Any = SimpleNamespace(**{**vars(hwdb), "model": narrow})


def without_dropout(network):
    for module in network.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return network


def card_of(height, classes=60):
    named = [*map(chr, range(0x4E00, 0x4E00 + classes)), UNKNOWN]
    return Card("hwdb", named, {"height": height}, {}, {"train": 30_000})


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


def test_hctr_has_the_references_53_1_million_parameters_and_no_recurrent_layer_and_slim_is_small():
    with torch.device("meta"):
        network = hwdb.model(card_of(128, 7373), hwdb.Plan(network="hctr"))
        slim = hwdb.model(card_of(32), hwdb.Plan(network="slim"))
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
        hwdb.model(card_of(least - 1), hwdb.Plan(network=name))


@pytest.mark.parametrize(("name", "height"), [("hctr", 45), ("slim", 32)])
def test_a_line_gets_the_answer_in_a_padded_batch_that_it_gets_alone(name, height):
    """The guide's collate gave every sample the padded length as its own."""
    network, batch = small(name, height).eval(), padded(height=height, width=231)
    with torch.no_grad():
        logits, steps = network(batch)
        for b, length in enumerate(LENGTHS):
            alone = {"image": batch["image"][[b], ..., :length], "image_length": batch["image_length"][[b]]}
            own, [count] = network(alone)
            assert len(own) == count == steps[b]
            assert own.abs().max() > 0.1
            torch.testing.assert_close(logits[:count, b], own[:, 0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_mask_and_relu_in_one_pass_have_the_bits_of_two_forward_and_backward(dtype, layout):
    padding = networks.beyond(torch.tensor(LENGTHS), 200)
    x, gradient = (torch.randn(4, 8, 5, 200).to(dtype, memory_format=layout) for _ in range(2))
    results = []
    for act in (lambda y: y.masked_fill_(padding, 0).relu_(), lambda y: networks.MaskedReLU.apply(y, padding)):
        leaf = x.clone().requires_grad_()
        written = leaf * 1
        y = act(written)
        y.backward(gradient)
        assert y.data_ptr() == written.data_ptr()  # in place
        assert leaf.grad is not None
        results.append((y.detach(), leaf.grad))
    bits = torch.int32 if dtype == torch.float32 else torch.int16
    for plain, fused in zip(*results, strict=True):
        assert plain.ne(0).any()
        assert torch.equal(plain.contiguous().view(bits), fused.contiguous().view(bits))


def test_each_line_keeps_its_own_length_image_and_text_and_padding_is_paper(lines):
    """The guide gave each line the padded length, repeated its last column, cut the widest lines, and with them a
    proportional part of their texts."""
    [raw] = open_feed(lines, hwdb.Plan(feed="resident"), CPU)([np.array([0, 5, 3])])
    batch = hwdb.batch(raw, hwdb.Plan(), None)
    for b, i in enumerate(batch["id"].tolist()):
        length, sample = int(batch["image_length"][b]), lines.sample(i)
        guides = ((255 - torch.from_numpy(sample["image"].T.astype(np.float32))) / 255 - 0.5) / 0.5  # of the white scan
        torch.testing.assert_close(batch["image"][b, 0, :, :length], 1 - guides)
        assert not batch["image"][b, ..., length:].any()
        assert batch["label"][b, : batch["label_length"][b]].tolist() == sample["label"].tolist()


def test_augmentation_hides_little_and_leaves_padding_blank(lines):
    raw = raw_batch(lines, range(8))
    before, batch = (hwdb.batch(raw, hwdb.Plan(augment=2), draws) for draws in (None, Draws(0, 0, raw["id"])))
    assert 0 <= batch["image"].min() <= batch["image"].max() <= 2
    assert 0.4 < batch["image"].sum() / before["image"].sum() < 2
    lengths = batch["image_length"].tolist()
    assert not any(row[..., length:].any() for row, length in zip(batch["image"], lengths, strict=True))


TEXTS = ([0, 1, 2, 3], [4, 4, 0], [2], [], [1, 1, 1])
STEPS = (14, 9, 3, 5, 5)


def labelled(rows):
    labels = nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True)
    return {"label": labels, "label_length": torch.tensor([len(row) for row in rows])}


def answers():
    torch.manual_seed(0)
    return 3 * torch.randn(max(STEPS), len(TEXTS), 7), torch.tensor(STEPS), labelled(TEXTS)


def alone_in_float64(logits, steps, b):
    log_probs = logits[: steps[b], b].double().log_softmax(1)
    text = torch.tensor(TEXTS[b], dtype=torch.long) + 1
    return F.ctc_loss(log_probs, text, torch.tensor(int(steps[b])), torch.tensor(len(text)), reduction="sum")


def test_a_line_without_room_for_its_text_is_left_out_and_counted():
    """Its loss is infinite: in the sum it would be a NaN for every other line, and zeroed nobody would know."""
    logits, steps, batch = answers()
    logits.requires_grad_()
    short = torch.tensor([14, 3, 3, 5, 4])  # two equal neighbours need a blank between them
    total, count = hwdb.loss(lambda _: (logits, short), batch, hwdb.PLAN)
    total.backward()
    assert total.item() == pytest.approx(sum(alone_in_float64(logits, short, b).item() for b in (0, 2, 3)), rel=1e-5)
    assert count == 3
    assert logits.grad is not None
    assert [bool(logits.grad[:, b].any()) for b in range(5)] == [True, False, True, True, False]
    assert hwdb.metrics((logits, short), batch)["infeasible"] == (2, 5)
    assert hwdb.metrics((logits, steps), batch)["infeasible"] == (0, 5)
    total, count = hwdb.loss(lambda _: (logits, torch.ones(5, dtype=torch.long)), labelled([[1, 2]] * 5), hwdb.PLAN)
    assert (total.item(), count.item()) == (0, 0)  # nothing but such lines


def test_an_unknown_character_is_never_read_right():
    unknown = 4  # the last class
    for read, truth, wrong in (([0, unknown], [0, unknown], 1), ([0, 1], [0, unknown], 1), ([0, 1], [0, 1], 0)):
        path = torch.tensor([k for place in read for k in (place + 1, 0)])  # a blank after each
        scores = hwdb.metrics((F.one_hot(path, 6).float()[:, None], torch.tensor([len(path)])), labelled([truth]))
        assert (scores["cer"], scores["whole_accuracy"]) == ((wrong, 2), (1 - wrong, 1))


@pytest.mark.parametrize(("network", "steps"), [("slim", 20), ("hctr", 10)])
def test_each_network_overfits_one_batch(lines, network, steps):
    plan, ids = hwdb.Plan(network=network), (1, 7)
    model = without_dropout(narrow(lines, plan))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    batch = hwdb.batch(raw_batch(lines, ids), plan, None)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_sum, count = hwdb.loss(model, batch, plan)
        (loss_sum / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
    truth = [hwdb.text_of(lines, i) for i in ids]
    assert [len(text) for text in truth] == [2, 2]
    assert hwdb.decode(model(batch), lines) == truth


def test_every_line_is_trained_on_and_evaluated_the_last_partial_batch_too(lines):
    """The guide dropped the last batch where it was not full, in the test as well."""
    plan = hwdb.Plan(network="slim", epochs=1, batch_size=3, augment=1.0, lr=1e-3)
    state = TrainState(TASK, lines, plan, CPU)
    rows = list(train(TASK, state, lines))
    assert state.samples == 8
    assert [r for r in rows if r.kind == "step"][-1].step == 3  # the batch size reaches the loader: the guide's did not
    truth = {i: lines.sample(i)["label"].tolist() for i in lines.ids("val")}
    model = state.model.eval()
    with torch.no_grad():
        read = {i: ctc.greedy(model(hwdb.batch(raw_batch(lines, [i]), plan, None)))[0] for i in truth}
    wrong, count = text_metrics([read[i] for i in truth], list(truth.values()))["cer"]
    assert rows[-1].values["val_cer"] == pytest.approx(wrong / count)
    for batch_size in (1, 2):
        scores = evaluate(TASK, model, lines, plan.replace(batch_size=batch_size), "val")
        assert scores["cer"] == pytest.approx(wrong / count)
