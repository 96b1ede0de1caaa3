"""What holds for each network of the four tasks, on packs of random tensors: see `cases`."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from acting import refused
from cases import AUGMENT, CASES, Case, fixed, image
from tape import synchronizing
from test_every_task import card_of
from torch import Tensor, nn

from nbtools.data import Draws, Keys, gather
from nbtools.errors import PlanError
from nbtools.measure.turns import without_dropout
from nbtools.tasks import captcha, hwdb, segment, sign
from nbtools.tasks.common import ctc
from nbtools.tasks.hwdb.networks import Hctr
from nbtools.train import Sums


def narrow(name: str) -> Case:
    if name == "captcha guide":
        return replace(CASES[name], draw=image(24, 64), survey=fixed(24, 64))
    if name == "hwdb hctr":
        quarter = {"model": lambda card, plan: Hctr(card.options["height"], len(card.classes), width=0.25)}  # channels
        return replace(CASES[name], task=SimpleNamespace(**{**vars(hwdb), **quarter}))
    return CASES[name]


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    return {name: narrow(name).pack(tmp_path_factory.mktemp("case") / "made", 12) for name in CASES}


def built(name: str, pack: Any, **changes: Any) -> tuple[Any, Any, Any]:
    task, plan = narrow(name).task, CASES[name].plan.replace(**changes)
    torch.manual_seed(0)
    without_dropout(model := task.model(pack, plan))
    return task, plan, model


LEARNS: dict[str, tuple[float, int]] = {  # network → lr, steps after which it knows a batch by heart
    "captcha guide": (1e-3, 8),
    "captcha small": (5e-3, 30),
    "captcha ctc": (3e-3, 20),
    "hwdb slim": (1e-2, 20),
    "hwdb hctr": (1e-2, 15),
    "sign transformer": (1e-3, 10),
    "sign gru": (3e-2, 60),
    "segment slim": (1e-2, 20),
    "segment bisenetv2": (1e-2, 10),
}


@pytest.mark.parametrize("name", CASES)
def test_each_network_overfits_one_batch(name, packs):
    (lr, steps), pack = LEARNS[name], packs[name]
    loss = {"loss": "cross_entropy"} if name == "captcha small" else {}
    task, plan, model = built(name, pack, **loss)
    ids = pack.ids("train")[:3]
    optimizer, batch = torch.optim.AdamW(model.parameters(), lr), task.batch(gather(pack, ids), plan, None)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_sum, count = task.loss(model, batch, plan)
        (loss_sum / count).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
    outputs, sums = model(batch), Sums()
    sums.add(task.metrics(outputs, batch))
    scores, answers = sums.read(), task.decode(outputs, pack)
    if name.startswith("segment"):
        assert scores["pixel_accuracy"] > 0.9
        assert [(a.shape, a.dtype) for a in answers] == [((96, 128), "uint8")] * 3
    else:
        assert scores["gloss_accuracy" if name.startswith("sign") else "whole_accuracy"] == 1
        assert answers == [task.text_of(pack, i) for i in ids]


@pytest.mark.parametrize("name", [name for name in CASES if name != "captcha ctc"])
def test_loss_and_gradient_of_a_padded_batch_are_the_sums_over_its_samples(name, packs):
    pack = packs[name]
    task, plan, model = built(name, pack)
    for module in model.modules():  # fresh ones shift by 0, and would hide what padding does
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1, 0.2)
            nn.init.normal_(module.bias)
    model.eval()

    def passed(ids: Any) -> tuple[float, int, Tensor]:
        batch = task.batch(gather(pack, ids), plan, None)
        for column in ("x", "features"):  # beyond a clip's end stands anything
            if f"{column}_length" in batch:
                frames = torch.arange(batch[column].shape[1]) >= batch[f"{column}_length"][:, None]
                batch[column] = batch[column].masked_fill(frames[..., None], 9.0)
        model.zero_grad()
        total, count = task.loss(model, batch, plan)
        total.backward()
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        return float(total.detach()), int(count), gradient

    ids = pack.ids("train")[:4]
    (loss, count, gradient), alone = passed(ids), [passed(ids[k : k + 1]) for k in range(4)]
    assert count == sum(each[1] for each in alone) > 0
    assert loss == pytest.approx(sum(each[0] for each in alone), rel=1e-4)
    expected = torch.stack([each[2] for each in alone]).sum(0)
    assert float((gradient - expected).norm() / expected.norm()) < 1e-3


CAPTCHA = {"layout": "fixed", "size": [60, 160], "length": 4}
PUBLISHED: list[tuple[Any, dict[str, Any], int, dict[str, Any], int]] = [
    (captcha, {}, 36, CAPTCHA, 19_072_400),
    (hwdb, {}, 7374, {"height": 128}, 53_104_143),
    (sign, {"x": 156, "mask": 78}, 105, {"categories": ["c"] * 10}, 3_280_371),
    (sign, {"features": 2048}, 105, {"categories": ["c"] * 10}, 101_743),
    (segment, {"image": 3}, 19, {"size": [512, 1024]}, 3_358_627 + 287_308),
]
UNREADABLE: list[tuple[Any, str, dict[str, Any], str]] = [
    (captcha, "guide", {"layout": "lines"}, 'network = "guide" cannot read captchas of layout "lines"'),
    (captcha, "ctc", CAPTCHA, 'network = "ctc" cannot read captchas of layout "fixed"'),
    (hwdb, "hctr", {"height": 63}, "reads lines ≥ 64 pixels high, but these are 63; pack with a larger"),
    (sign, "transformer", {}, r"reads 'x', and this data has features;"),
]


@pytest.mark.parametrize(("task", "columns", "classes", "options", "parameters"), PUBLISHED)
def test_the_guides_networks_have_the_published_numbers_of_parameters(task, columns, classes, options, parameters):
    with torch.device("meta"):
        model = task.model(card_of("", options, 30_000, classes, **columns), task.Plan())
    assert sum(p.numel() for p in model.parameters()) == parameters


@pytest.mark.parametrize(("task", "network", "options", "said"), UNREADABLE)
def test_a_network_that_cannot_read_the_data_is_refused(task, network, options, said):
    refused(PlanError, said, task.model, card_of("", options, features=2048), task.Plan(network=network))


@pytest.mark.parametrize("name", CASES)
def test_batch_forward_loss_and_backward_stay_on_the_device_of_the_samples(name, packs, monkeypatch):
    """The first step may send what stays there; no CTC, which reads lengths. The device `meta` stands for a GPU."""
    monkeypatch.setattr(ctc, "loss", lambda outputs, *_, reduction="sum": outputs[0].sum((0, 2)))
    pack = packs[name]
    task, plan, model = built(name, pack, **AUGMENT[name.split()[0]])
    model, ids = model.to("meta").train(), pack.ids("train")[:6]
    there = {key: values.to("meta") for key, values in gather(pack, ids).items()}
    keys = Keys(len(ids), torch.device("meta"))
    task.loss(model, task.batch(there, plan, Draws(0, 0, there["id"], keys)), plan)

    def step() -> None:
        total, count = task.loss(model, task.batch(there, plan, Draws(0, 1, there["id"], keys)), plan)
        (total / count).sum().backward()

    assert synchronizing(step)[1] == []
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_what_makes_the_host_wait_is_noticed():
    x = torch.ones(3)
    for act in (lambda: float(x.sum()), lambda: x[x > 0], lambda: x.to("meta"), lambda: torch.tensor([1.0])):
        assert len(synchronizing(act)[1]) == 1
