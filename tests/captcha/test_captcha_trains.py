"""The three networks of captchas, losses, metrics, batches and advice; and the faults of the guide's scripts."""

import pickle

import numpy as np
import pytest
import torch
from packs import raw_batch
from torch.nn import functional as F

from nbtools.data import Card, open_feed
from nbtools.errors import PlanError
from nbtools.tasks import captcha
from nbtools.train.evaluation import evaluate


def card_of(layout):
    options = {"layout": layout, "size": [60, 160], "length": 4, "height": 32}
    return Card(
        "captcha", [*"0123456789abcdefghijklmnopqrstuvwxyz"], options, {}, {"train": 100, "val": 10, "test": 10}
    )


def test_the_guides_network_has_its_19_07_million_parameters():
    with torch.device("meta"):
        network = captcha.model(card_of("fixed"), captcha.PLAN)
    assert round(sum(p.numel() for p in network.parameters()) / 1e6, 2) == 19.07


@pytest.mark.parametrize(
    ("network", "loss", "lr", "steps"),
    [("guide", "soft_margin", 1e-3, 8), ("small", "cross_entropy", 5e-3, 30), ("ctc", "soft_margin", 3e-3, 40)],
)
def test_each_network_overfits_one_batch(packs, network, loss, lr, steps):
    pack = packs["lines" if network == "ctc" else "fixed"]
    plan = captcha.Plan(network=network, loss=loss)
    torch.manual_seed(0)
    model = captcha.model(pack, plan)
    for module in model.modules():
        if isinstance(module, (torch.nn.Dropout, torch.nn.Dropout2d)):
            module.p = 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    ids = sorted(range(len(pack)), key=lambda i: len(pack.sample(i)["image"]))[:3]  # the shortest lines
    batch = captcha.batch(raw_batch(pack, ids), plan, None)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_sum, count = captcha.loss(model, batch, plan)
        (loss_sum / count).backward()
        optimizer.step()
    assert captcha.decode(model(batch), pack) == [captcha.text_of(pack, i) for i in ids]


@pytest.mark.parametrize(("network", "layout"), [("guide", "lines"), ("small", "lines"), ("ctc", "fixed")])
def test_a_network_that_cannot_read_the_layout_is_refused(network, layout):
    with pytest.raises(PlanError, match=f'network = "{network}" cannot read captchas of layout "{layout}"'):
        captcha.model(card_of(layout), captcha.PLAN.replace(network=network))


def test_the_losses_are_sums_of_torchs_own():
    logits, labels = torch.randn(5, 4, 10), torch.randint(10, (5, 4))
    one_hot = F.one_hot(labels, 10).float().view(5, 40)
    expected = {
        "soft_margin": torch.nn.MultiLabelSoftMarginLoss()(logits.view(5, 40), one_hot),
        "cross_entropy": F.cross_entropy(logits.view(20, 10), labels.view(20)),
    }
    for name, mean in expected.items():
        total, count = captcha.loss(lambda _: logits, {"label": labels}, captcha.Plan(loss=name))
        assert torch.isclose(total / count, mean)


def test_scores_count_samples_and_not_batches(fixed):
    torch.manual_seed(0)
    model = captcha.model(fixed, captcha.Plan(network="small")).eval()
    truth = {i: fixed.sample(i)["label"].tolist() for i in fixed.ids("train")}
    with torch.no_grad():
        guesses = {
            i: model(captcha.batch(raw_batch(fixed, [i]), captcha.PLAN, None))[0].argmax(1).tolist() for i in truth
        }
    characters = sum(a == b for i in truth for a, b in zip(guesses[i], truth[i], strict=True)) / (4 * len(truth))
    for batch_size in (1, 7, len(truth)):
        scores = evaluate(captcha, model, fixed, captcha.Plan(network="small", batch_size=batch_size), "train")
        assert scores["char_accuracy"] == pytest.approx(characters)
        assert scores["whole_accuracy"] == sum(guesses[i] == truth[i] for i in truth) / len(truth)


def test_a_line_reads_the_same_in_any_batch(lines):
    """Padding must not leak into what is read, beyond rounding."""
    torch.manual_seed(0)
    model = captcha.model(lines, captcha.PLAN).eval()
    with torch.no_grad():
        logits, steps = model(captcha.batch(raw_batch(lines, range(5)), captcha.PLAN, None))
        alone, [own] = model(captcha.batch(raw_batch(lines, [2]), captcha.PLAN, None))
    assert steps[2] == own == len(alone)
    assert torch.allclose(logits[: own - 16, 2], alone[: own - 16, 0], atol=1e-4)


def test_the_data_set_can_be_sent_to_workers_and_gives_the_packs_values(fixed):
    """The guide's class was local to a function, which workers cannot unpickle."""
    copy = pickle.loads(pickle.dumps(fixed.raw))
    assert np.array_equal(copy[3]["image"], fixed.sample(3)["image"])
    ids = np.arange(9)
    [raw] = open_feed(fixed, captcha.Plan(feed="workers", workers=1, batch_size=9), torch.device("cpu"))([ids])
    for column in ("image", "label"):
        assert torch.equal(raw[column], torch.from_numpy(fixed.arrays[column][ids]))
