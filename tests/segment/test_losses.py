"""BiSeNetV2 at any size, and its loss against slow loops over images and pixels."""

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from nbtools.tasks import segment
from nbtools.tasks.segment.networks import SIZES, BiSeNetV2, Norm

CLASSES, IGNORE, HEIGHT, WIDTH = 4, 255, 9, 7
PLAN = segment.Plan(ohem_least=0.25)
KINDS = ("random", "easy", "few valid", "ties", "all ignored", "one valid")


def image_of(kind, generator):
    """(logits, label, distance) of one image: easy ones have fewer hard pixels than are kept in any case."""
    logits = torch.randn(CLASSES, HEIGHT, WIDTH, generator=generator)
    label = torch.randint(0, CLASSES, (HEIGHT, WIDTH), generator=generator)
    label[torch.rand(HEIGHT, WIDTH, generator=generator) < (0.9 if kind == "few valid" else 0.2)] = IGNORE
    if kind in ("easy", "ties"):
        logits = logits + 6 * F.one_hot(label.clamp(max=CLASSES - 1), CLASSES).permute(2, 0, 1)
    if kind == "ties":
        logits = (logits / 6).round() * 6  # few different values, so that pixels tie for the last places
    if kind in ("all ignored", "one valid"):
        label[:] = IGNORE
    if kind == "one valid":
        label[3, 4] = 2
    return logits, label, torch.rand(HEIGHT, WIDTH, generator=generator) * 6


def batch_of(kinds=KINDS, seed=0):
    """(outputs that require gradients, batch); of two auxiliary logits one has full size, one a fourth."""
    generator = torch.Generator().manual_seed(seed)
    logits, label, distance = (torch.stack(part) for part in zip(*(image_of(k, generator) for k in kinds), strict=True))
    others = [torch.randn(len(kinds), CLASSES, *size, generator=generator) for size in ((HEIGHT, WIDTH), (3, 2))]
    return (logits.requires_grad_(), tuple(x.requires_grad_() for x in others)), {"label": label, "distance": distance}


def slow_ohem(logits, label, plan):
    """The mean over the kept pixels of one image, pixel by pixel."""
    entropies = [-logits[:, y, x].log_softmax(0)[label[y, x]] for y, x in (label != IGNORE).nonzero().tolist()]
    if not entropies:
        return torch.zeros(())
    entropies.sort(key=torch.Tensor.item, reverse=True)
    hard = [e for e in entropies if math.exp(-e.item()) < plan.ohem_threshold]
    least = math.ceil(len(entropies) * plan.ohem_least)
    return torch.stack(hard if len(hard) > least else entropies[:least]).mean()


def slow_edge(logits, label, distance, plan):
    above, below = torch.zeros(()), 0.0
    for y, x in (label != IGNORE).nonzero().tolist():
        close = math.exp(-float(distance[y, x]) / plan.edge_width)
        weight = 1 + (plan.edge_weight - 1) * close if close >= plan.edge_threshold else 1.0
        above = above - weight * logits[:, y, x].log_softmax(0)[label[y, x]]
        below += weight
    return above / max(below, 1)


def slow_loss(outputs, batch, plan):
    main, auxiliary = outputs
    total = torch.zeros(())
    for b, label in enumerate(batch["label"]):
        total = total + slow_ohem(main[b], label, plan)
        total = total + plan.edge_factor * slow_edge(main[b], label, batch["distance"][b], plan)
        for logits in auxiliary:
            seen = label if logits.shape[2] == HEIGHT else label[::4, ::4]
            total = total + plan.aux_weight * slow_ohem(logits[b], seen, plan)
    return total


@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        PLAN.replace(ohem_threshold=0.05, aux_weight=0.4),
        PLAN.replace(ohem_threshold=1e-6, ohem_least=1 / 16, edge_factor=0.0),
        PLAN.replace(ohem_least=1.0, edge_threshold=0.0),
        PLAN.replace(ohem_least=1e-9, edge_width=0.5),
    ],
)
def test_loss_and_gradient_are_those_of_a_loop_over_images_and_pixels(plan):
    outputs, batch = batch_of()
    total, count = segment.loss(lambda _: outputs, batch, plan)
    assert torch.allclose(total, slow_loss(outputs, batch, plan), rtol=1e-5)
    assert int(count) == len(KINDS) - 1  # all but the ignored one
    outputs, batch = batch_of([kind for kind in KINDS if kind != "ties"])
    made = segment.loss(lambda _: outputs, batch, plan)[0], slow_loss(outputs, batch, plan)
    fast, slow = (torch.autograd.grad(one, [outputs[0], *outputs[1]]) for one in made)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(fast, slow, strict=True))
    outputs, batch = batch_of(["all ignored"] * 2)
    total, count = segment.loss(lambda _: outputs, batch, plan)
    [gradient] = torch.autograd.grad(total, outputs[0])
    assert (total.item(), int(count), gradient.any()) == (0, 0, False), "no NaN"


def small(kind: str = "slim", channels: int = 3) -> Any:
    torch.manual_seed(0)
    return BiSeNetV2(CLASSES, channels, SIZES[kind])


@pytest.mark.parametrize(("kind", "channels"), [("bisenetv2", 3), ("slim", 4)])
@pytest.mark.parametrize("size", [(180, 240), (33, 47)])
def test_logits_have_the_size_of_any_image_and_strides_round_up(kind, channels, size):
    network = small(kind, channels).to("meta")
    logits, auxiliary = network({"image": torch.empty(2, channels, *size, device="meta")})
    assert logits.shape == (2, CLASSES, *size)
    for i, found in enumerate(auxiliary):  # of the slim network, those of their stages
        assert found.shape[2:] == (size if kind == "bisenetv2" else tuple(math.ceil(n / (4 * 2**i)) for n in size))


def test_a_micro_batch_of_one_image_trains_and_its_pooled_norms_keep_their_averages():
    network = small()
    pooled = [m for m in network.context.pooled.modules() if isinstance(m, Norm)]
    before = [{k: v.clone() for k, v in m.state_dict().items()} for m in pooled]
    batch = {"image": torch.randn(1, 3, 40, 48), "label": torch.ones(1, 40, 48).long()}
    loss, _ = segment.loss(network, {**batch, "distance": torch.zeros(1, 40, 48)}, PLAN)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
    for module, old in zip(pooled, before, strict=True):
        assert all(torch.equal(value, old[k]) for k, value in module.state_dict().items())


def test_heads_learn_head_lr_times_as_fast_and_norms_and_biases_do_not_decay():
    groups = [*segment.groups(small(), segment.Plan(head_lr=7.0))]
    assert all(group["decays"] == all(p.dim() > 1 for p in group["params"]) for group in groups)
    assert {group["lr_scale"] for group in groups} == {1.0, 7.0}
