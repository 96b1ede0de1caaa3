"""The loss against slow loops over images and pixels, and what must not change it: batches, ignored pixels, halves."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nbtools.tasks.segment import losses
from nbtools.tasks.segment.losses import loss_of
from nbtools.tasks.segment.masks.classes import IGNORE
from nbtools.tasks.segment.networks.bisenetv2 import SLIM, BiSeNetV2
from nbtools.tasks.segment.plans import Plan

CLASSES = 4
PLAN = Plan(ohem_threshold=0.7, ohem_least=0.25, edge_factor=2.0, edge_weight=10.0, edge_width=2.0, edge_threshold=0.3)
KINDS = ("random", "easy", "few valid", "ties", "all ignored", "one valid")


def image_of(kind, generator, height=9, width=7):
    """(logits, label, distance) of one image: easy ones have fewer hard pixels than are kept in any case."""
    logits = torch.randn(CLASSES, height, width, generator=generator)
    label = torch.randint(0, CLASSES, (height, width), generator=generator)
    label[torch.rand(height, width, generator=generator) < 0.2] = IGNORE
    if kind in ("easy", "ties"):
        logits = logits + 6 * F.one_hot(label.clamp(max=CLASSES - 1), CLASSES).permute(2, 0, 1)
    if kind == "ties":
        logits = (logits / 6).round() * 6  # few different values, so that pixels tie for the last places
    if kind == "few valid":
        label[torch.rand(height, width, generator=generator) < 0.9] = IGNORE
    if kind in ("all ignored", "one valid"):
        label[:] = IGNORE
    if kind == "one valid":
        label[3, 4] = 2
    return logits, label, torch.rand(height, width, generator=generator) * 6


def batch_of(kinds=KINDS, seed=0, auxiliary=2):
    """(outputs that require gradients, batch); auxiliary logits are alternately of full size and of a fourth."""
    generator = torch.Generator().manual_seed(seed)
    logits, label, distance = (torch.stack(part) for part in zip(*(image_of(k, generator) for k in kinds), strict=True))
    sizes = [(9, 7) if i % 2 == 0 else (3, 2) for i in range(auxiliary)]
    others = [torch.randn(len(kinds), CLASSES, *size, generator=generator) for size in sizes]
    outputs = logits.requires_grad_(), tuple(x.requires_grad_() for x in others)
    return outputs, {"label": label, "distance": distance}


def part_of(outputs, batch, rows):
    main, auxiliary = outputs
    return (main[rows], tuple(x[rows] for x in auxiliary)), {name: x[rows] for name, x in batch.items()}


def slow_hard(logits, label, plan):
    """The mean over the kept pixels of one image, pixel by pixel."""
    found = [
        -logits[:, y, x].log_softmax(0)[label[y, x]]
        for y in range(label.shape[0])
        for x in range(label.shape[1])
        if label[y, x] != IGNORE
    ]
    if not found:
        return torch.zeros(())
    found.sort(key=torch.Tensor.item, reverse=True)
    hard = [e for e in found if math.exp(-e.item()) < plan.ohem_threshold]
    least = math.ceil(len(found) * plan.ohem_least)
    return torch.stack(hard if len(hard) > least else found[:least]).mean()


def slow_edge(logits, label, distance, plan):
    above, below = torch.zeros(()), 0.0
    for y in range(label.shape[0]):
        for x in range(label.shape[1]):
            if label[y, x] != IGNORE:
                close = math.exp(-float(distance[y, x]) / plan.edge_width)
                weight = 1 + (plan.edge_weight - 1) * close if close >= plan.edge_threshold else 1.0
                above = above - weight * logits[:, y, x].log_softmax(0)[label[y, x]]
                below += weight
    return above / max(below, 1)


def slow_loss(outputs, batch, plan):
    main, auxiliary = outputs
    total = torch.zeros(())
    for b, label in enumerate(batch["label"]):
        total = total + slow_hard(main[b], label, plan)
        total = total + plan.edge_factor * slow_edge(main[b], label, batch["distance"][b], plan)
        for logits in auxiliary:
            seen = label if logits.shape[2] == label.shape[0] else label[::4, ::4]
            total = total + plan.aux_weight * slow_hard(logits[b], seen, plan)
    return total


def gradients(loss, outputs):
    main, auxiliary = outputs
    return torch.autograd.grad(loss, [main, *auxiliary])


@pytest.mark.parametrize("plan", [PLAN, PLAN.replace(ohem_threshold=0.05, aux_weight=0.4), PLAN.replace(edge_factor=0)])
def test_the_loss_is_that_of_a_loop_over_images_and_pixels(plan):
    outputs, batch = batch_of()
    total, count = loss_of(outputs, batch, plan)
    assert torch.allclose(total, slow_loss(outputs, batch, plan), rtol=1e-5)
    assert int(count) == len(KINDS) - 1  # all but the ignored one


def test_its_gradient_is_that_of_the_loop_where_no_pixels_tie():
    outputs, batch = batch_of([k for k in KINDS if k != "ties"])
    fast = gradients(loss_of(outputs, batch, PLAN)[0], outputs)
    slow = gradients(slow_loss(outputs, batch, PLAN), outputs)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(fast, slow, strict=True))


def test_the_least_share_is_of_valid_pixels_and_the_threshold_gives_more_where_more_are_hard():
    entropy = torch.arange(1.0, 9).view(1, 2, 4) / 8  # eight pixels from 1/8 to 1
    valid = torch.ones(1, 2, 4, dtype=torch.bool)
    valid[0, 1] = False  # the four hardest are ignored
    weights = losses.hardest(entropy, valid, 1e-6, 0.5)
    assert weights[0].flatten().tolist() == [0, 0, 0.5, 0.5, 0, 0, 0, 0]
    weights = losses.hardest(entropy, valid, math.exp(-0.2), 0.5)  # 2/8, 3/8 and 4/8 are above .2
    assert torch.allclose(weights[0].flatten(), torch.tensor([0, 1, 1, 1, 0, 0, 0, 0]) / 3)


@pytest.mark.parametrize(("least", "kept"), [(0.3, 15), (1 / 16, 4), (1.0, 50), (1e-9, 1)])
def test_one_pixel_at_least_is_kept_and_no_share_asks_for_more_than_there_are(least, kept):
    entropy, valid = torch.rand(1, 5, 10), torch.ones(1, 5, 10, dtype=torch.bool)
    weights = losses.hardest(entropy, valid, 1e-6, least)  # 50 · 0.3 is more than 15 in float32
    assert torch.equal(weights.flatten().nonzero().flatten(), entropy.flatten().topk(kept).indices.sort().values)
    assert weights.sum().item() == pytest.approx(1)


def test_pixels_that_tie_share_the_last_places_whatever_their_order():
    entropy = torch.tensor([[[0.3, 0.1, 0.1, 0.1, 0.0]]])
    weights = losses.hardest(entropy, torch.ones(1, 1, 5, dtype=torch.bool), 0.5, 0.4)  # two places, one above the tie
    assert torch.allclose(weights, torch.tensor([[[1 / 2, 1 / 6, 1 / 6, 1 / 6, 0]]]))


@pytest.mark.parametrize(
    ("distance", "weight"),
    [
        (0, 10),
        (0.5, 1 + 9 * math.exp(-0.25)),
        (2, 1 + 9 / math.e),
        (2.375, 1 + 9 * math.exp(-1.1875)),
        (2.5, 1),
        (31, 1),
    ],
)
def test_a_pixel_on_a_boundary_weighs_ten_and_one_where_closeness_is_below_the_threshold(distance, weight):
    found = losses.boundary_weights(torch.tensor([float(distance)]), 10.0, 2.0, 0.3)
    assert float(found) == pytest.approx(weight)


def test_a_threshold_of_one_leaves_the_boundarys_own_pixels_their_weight():
    found = losses.boundary_weights(torch.tensor([0.0, 0.125, 5.0]), 10.0, 2.0, 1.0)
    assert found.tolist() == [10, 1, 1]


def test_a_batch_without_a_valid_pixel_adds_nothing_and_its_gradient_is_zero_not_nan():
    torch.manual_seed(0)
    network = BiSeNetV2(CLASSES, sizes=SLIM)
    batch = {
        "image": torch.randn(2, 3, 40, 48),
        "label": torch.full((2, 40, 48), IGNORE),
        "distance": torch.zeros(2, 40, 48),
    }
    total, count = loss_of(network(batch), batch, PLAN)
    total.backward()
    assert total.item() == count.item() == 0
    grads = [p.grad for p in network.parameters()]
    assert all(g is not None and not g.any() for g in grads)


def test_micro_batches_add_up_to_the_loss_and_the_gradient_of_the_whole_batch():
    torch.manual_seed(0)
    network = BiSeNetV2(CLASSES, sizes=SLIM)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.eval()  # the statistics of a batch are its own
    _, batch = batch_of(seed=3)
    batch["image"] = torch.randn(len(KINDS), 3, 9, 7)
    whole = loss_of(network(batch), batch, PLAN)
    expected = torch.autograd.grad(whole[0], list(network.parameters()))
    parts = [{name: x[rows] for name, x in batch.items()} for rows in (slice(0, 1), slice(1, 4), slice(4, 6))]
    found = [loss_of(network(part), part, PLAN) for part in parts]
    gradient = torch.autograd.grad(torch.stack([total for total, _ in found]).sum(), list(network.parameters()))
    assert torch.allclose(torch.stack([total for total, _ in found]).sum(), whole[0], rtol=1e-5)
    assert sum(int(count) for _, count in found) == int(whole[1])
    assert all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in zip(gradient, expected, strict=True))


def test_coarse_logits_are_judged_by_the_pixels_they_are_centred_on():
    for size in ((180, 240), (33, 7), (360, 480), (1, 5)):
        labels = torch.arange(size[0] * size[1]).view(1, *size)
        for stride in (4, 8, 16, 32):
            places = [-(-n // stride) for n in size]
            assert torch.equal(losses.sampled(labels, torch.zeros(1, 2, *places)), labels[:, ::stride, ::stride])


@pytest.mark.parametrize("autocast", [True, False])
def test_half_precision_logits_are_judged_in_full(autocast):
    (main, auxiliary), batch = batch_of()
    half = main.detach().bfloat16(), tuple(x.detach().bfloat16() for x in auxiliary)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        total, _ = loss_of(half, batch, PLAN)
    expected, _ = loss_of((half[0].float(), tuple(x.float() for x in half[1])), batch, PLAN)
    assert total.dtype == torch.float32
    assert torch.equal(total, expected)


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(("plan", "softmaxes"), [(PLAN, 3), (PLAN.replace(aux_weight=0.0), 1)])
def test_each_output_is_compared_with_the_labels_once_and_nothing_waits_for_the_device(plan, softmaxes):
    outputs, batch = batch_of()
    with Calls() as calls:
        loss_of(outputs, batch, plan)
    assert calls.names.count("_log_softmax") == softmaxes
    assert not {"_local_scalar_dense", "nonzero", "index", "masked_select"} & set(calls.names)


def test_without_a_boundary_term_no_distance_is_read_and_evaluation_has_the_main_logits_alone():
    outputs, batch = batch_of()
    plan = PLAN.replace(edge_factor=0.0)
    alone = (outputs[0], ())
    total, _ = loss_of(alone, {"label": batch["label"]}, plan)
    assert torch.allclose(total, slow_loss(alone, batch, plan), rtol=1e-5)
