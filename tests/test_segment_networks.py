"""BiSeNetV2: the published sizes, images of any size, and what must change no prediction."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from nbtools.data import Card
from nbtools.data.pack import Column
from nbtools.tasks import segment
from nbtools.tasks.segment.networks import SIZES, SLIM, BiSeNetV2, Gather, Norm, enlarge

CLASSES = 5
KINDS = ("bisenetv2", "slim")
pytestmark = pytest.mark.usefixtures("one_thread")


def small(kind="slim", **options) -> Any:
    torch.manual_seed(0)
    return BiSeNetV2(CLASSES, sizes=SIZES[kind], **options)


def batch_of(count=2, height=40, width=56, channels=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(0, CLASSES, (count, height // 8, width // 8), generator=generator)
    return {
        "image": torch.randn(count, channels, height, width, generator=generator),
        "label": label.repeat_interleave(8, 1).repeat_interleave(8, 2),
        "distance": torch.rand(count, height, width, generator=generator) * 6,
    }


def shapes_of(network, *image) -> dict[str, tuple[int, ...]]:
    """Name → the shape that a part returns, without a computation."""
    network, found = network.to("meta"), {}
    for name, part in network.named_modules():
        part.register_forward_hook(
            lambda _m, _i, out, name=name: found.update({name: tuple(out.shape)}) if torch.is_tensor(out) else None
        )
    logits, auxiliary = network({"image": torch.empty(image, device="meta")})
    return {**found, "logits": tuple(logits.shape), **{f"logits {i}": tuple(x.shape) for i, x in enumerate(auxiliary)}}


# Sizes


def test_every_stage_has_the_published_channels_and_strides():
    height, width = 512, 1024
    found = shapes_of(BiSeNetV2(19), 2, 3, height, width)
    stages = {
        **{f"detail.0.{i}": (64, 2) for i in range(2)},
        **{f"detail.1.{i}": (64, 4) for i in range(3)},
        **{f"detail.2.{i}": (128, 8) for i in range(3)},
        "stem.conv": (16, 2),
        "stem": (16, 4),
        **{f"semantic.0.{i}": (32, 8) for i in range(2)},
        **{f"semantic.1.{i}": (64, 16) for i in range(2)},
        **{f"semantic.2.{i}": (128, 32) for i in range(4)},
        "semantic.2.3.body.1": (6 * 128, 32),
        "context": (128, 32),
        "aggregation": (128, 8),
        "head.conv": (1024, 8),
        "head.classify": (19, 8),
        **{f"auxiliary.{i}.conv": (128, 4 * 2**i) for i in range(4)},
        **dict.fromkeys(("logits", "logits 0", "logits 1", "logits 2", "logits 3"), (19, 1)),
    }
    assert {name: found[name] for name in stages} == {
        name: (2, channels, height // stride, width // stride) for name, (channels, stride) in stages.items()
    }
    assert not {"detail.0.2", "detail.1.3", "detail.2.3", "semantic.0.2", "semantic.1.2", "semantic.2.4"} & set(found)


def weights(inputs, outputs, kernel=3, groups=1) -> int:
    """Of a convolution without bias and its batch norm."""
    return inputs // groups * outputs * kernel**2 + 2 * outputs


def gather(inputs, outputs, stride) -> int:
    wide = 6 * inputs
    body = weights(inputs, inputs) + weights(inputs, wide, groups=inputs) + weights(wide, outputs, 1)
    if stride == 1:
        return body
    shortcut = weights(inputs, inputs, groups=inputs) + weights(inputs, outputs, 1)
    return body + weights(wide, wide, groups=wide) + shortcut


def head(inputs, middle, classes=19) -> int:
    return weights(inputs, middle) + middle * classes + classes


REFERENCE = {  # layer by layer from the listing of CoinCheung's BiSeNet, bisenetv2/bisenetv2.py, for 19 classes
    "detail": weights(3, 64) + 4 * weights(64, 64) + weights(64, 128) + 2 * weights(128, 128),
    "stem": weights(3, 16) + weights(16, 8, 1) + weights(8, 16) + weights(32, 16),
    "semantic": (gather(16, 32, 2) + gather(32, 32, 1) + gather(32, 64, 2) + gather(64, 64, 1))
    + (gather(64, 128, 2) + 3 * gather(128, 128, 1)),
    "context": 2 * 128 + weights(128, 128, 1) + weights(128, 128),
    "aggregation": 2 * (weights(128, 128, groups=128) + 128 * 128) + 3 * weights(128, 128),
    "head": head(128, 1024),
    "auxiliary": sum(head(channels, 128) for channels in (16, 32, 64, 128)),
}


def parameters(module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_parameters_and_multiplications_are_the_references_and_the_docstrings():
    network, text = BiSeNetV2(19), " ".join((BiSeNetV2.__doc__ or "").split())
    found = {name: parameters(part) for name, part in network.named_children()}
    assert found == REFERENCE
    assert parameters(network) - found["auxiliary"] == 3_358_627
    assert "3,358,627" in text
    slim = BiSeNetV2(11, sizes=SLIM)
    heads = parameters(slim.auxiliary)
    assert f"{parameters(slim) - heads:,} and {heads:,} for 11 classes" in text
    with FlopCounterMode(display=False) as counter:
        network.to("meta").eval()({"image": torch.empty(1, 3, 512, 1024, device="meta")})
    assert counter.get_flop_counts()["Global"][torch.ops.aten.convolution] / 2e9 == pytest.approx(24.6, abs=0.05)


@pytest.mark.parametrize(("kind", "channels"), [("bisenetv2", 3), ("slim", 4)])
@pytest.mark.parametrize("size", [(180, 240), (33, 47)])
def test_logits_have_the_size_of_any_image_and_strides_round_up(kind, channels, size):
    found = shapes_of(small(kind, channels=channels), 2, channels, *size)
    assert found["logits"] == (2, CLASSES, *size)
    assert found["aggregation"][2:] == tuple(math.ceil(n / 8) for n in size)
    assert found["context"][2:] == tuple(math.ceil(n / 32) for n in size)
    for i in range(4):  # of the slim network, those of their stages
        side = size if kind == "bisenetv2" else tuple(math.ceil(n / (4 * 2**i)) for n in size)
        assert found[f"logits {i}"][2:] == side


@pytest.mark.parametrize("factor", [4, 32])
def test_enlarging_is_torchs_bilinear_without_corners_cropped_to_the_size(factor):
    x = torch.randn(2, 3, 3, 5, requires_grad=True)
    size = 3 * factor - 3, 5 * factor - 1
    expected = F.interpolate(x, scale_factor=factor, mode="bilinear", align_corners=False)[:, :, : size[0], : size[1]]
    found, gradient = enlarge(x, factor, size), torch.randn(2, 3, *size)
    assert torch.allclose(found, expected, atol=1e-6)
    pair = [torch.autograd.grad(y, x, gradient)[0] for y in (found, expected)]
    assert torch.allclose(*pair, rtol=1e-4, atol=1e-4)


def test_the_card_and_the_plan_decide_classes_channels_network_dropout_and_recomputing():
    card = Card("segment", ["shirt", "ground"], {}, {"image": Column("fixed", "uint8", (48, 64, 4))}, {"train": 1})
    slim = segment.Plan(network="slim", dropout=0.3, checkpoint_activations=True)
    for plan, dropout, middle in ((slim, 0.3, SLIM.head), (segment.Plan(), 0.1, 1024)):
        network: Any = segment.model(card, plan)
        assert network.stem.conv.conv.in_channels == network.detail[0][0].conv.in_channels == 4
        assert (network.head.classify.out_channels, network.head.conv.conv.out_channels) == (2, middle)
        assert {m.p for m in network.modules() if isinstance(m, nn.Dropout)} == {dropout}
        assert network.recompute == plan.checkpoint_activations


def test_weights_begin_as_the_references_by_fan_out_and_each_gather_layer_as_its_shortcut():
    network = small("bisenetv2")
    for layer in (m for m in network.modules() if isinstance(m, nn.Conv2d)):
        expected = math.sqrt(2 / (layer.out_channels * layer.kernel_size[0] ** 2))
        spread = 4 * expected / math.sqrt(2 * layer.weight.numel())  # of a standard deviation, four of its own
        assert layer.weight.std().item() == pytest.approx(expected, abs=spread)
        assert layer.bias is None or not layer.bias.any()
    layers: list[Any] = [m for m in network.modules() if isinstance(m, Gather)]
    for layer in layers:
        x = torch.randn(2, layer.body[0].conv.in_channels, 9, 7)
        assert torch.equal(layer(x), layer.shortcut(x).relu())


# Training and evaluation


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_in_a_batch_gets_the_logits_that_it_gets_alone_and_no_auxiliary_head_computes(kind):
    network, called = small(kind), []
    for part in network.auxiliary:
        part.register_forward_hook(lambda *_: called.append(1))
    assert len(network(batch_of(4, seed=1))[1]) == len(called) == 4  # and running averages of something
    network.eval()
    batch = batch_of(3)
    with torch.no_grad():
        together, auxiliary = network(batch)
        for b in range(3):
            assert torch.allclose(network({"image": batch["image"][b : b + 1]})[0], together[b : b + 1], atol=1e-5)
    assert (auxiliary, len(called)) == ((), 4)


def test_recomputing_activations_changes_neither_loss_nor_gradient_nor_running_averages():
    plain = small("slim", dropout=0.2)
    again = copy.deepcopy(plain)
    again.recompute = True
    batch, found, passes = batch_of(), [], []
    for network in (plain, again):
        computed = []
        for part in network.modules():
            if isinstance(part, nn.Conv2d):
                part.register_forward_hook(lambda *_, computed=computed: computed.append(1))
        torch.manual_seed(3)
        loss, _ = segment.loss(network, batch, segment.Plan())
        loss.backward()
        passes.append(len(computed))
        found.append([loss, *(p.grad for p in network.parameters()), *network.buffers()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert passes[1] > 1.5 * passes[0]  # not all twice: what backward does not need is left out


def test_a_micro_batch_of_one_image_trains_and_its_pooled_norms_keep_their_averages():
    network = small()
    pooled = [m for m in network.context.pooled.modules() if isinstance(m, Norm)]
    before = [{k: v.clone() for k, v in m.state_dict().items()} for m in pooled]
    loss, _ = segment.loss(network, batch_of(1), segment.Plan())
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
    assert [m.bias.grad is not None and bool(m.bias.grad.any()) for m in pooled] == [True, True]
    for module, old in zip(pooled, before, strict=True):
        assert all(torch.equal(value, old[k]) for k, value in module.state_dict().items())
    torch.manual_seed(0)
    ours, torchs = Norm(3), nn.BatchNorm2d(3)
    for x in (torch.randn(2, 3, 1, 1), torch.randn(1, 3, 2, 1)):  # more than one value: torch's own
        assert torch.equal(ours(x), torchs(x))
    assert all(torch.equal(a, b) for a, b in zip(ours.buffers(), torchs.buffers(), strict=True))
