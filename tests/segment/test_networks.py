"""BiSeNetV2: the published sizes, images of any size, and what must change no prediction."""

import math
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from nbtools.tasks import segment
from nbtools.tasks.segment.networks import SIZES, SLIM, BiSeNetV2, Norm

CLASSES = 5


def small(kind="slim", **options) -> Any:
    torch.manual_seed(0)
    return BiSeNetV2(CLASSES, sizes=SIZES[kind], **options)


def batch_of(count=2, height=40, width=56, seed=0):
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(0, CLASSES, (count, height // 8, width // 8), generator=generator)
    return {
        "image": torch.randn(count, 3, height, width, generator=generator),
        "label": label.repeat_interleave(8, 1).repeat_interleave(8, 2),
        "distance": torch.rand(count, height, width, generator=generator) * 6,
    }


def parameters(module) -> int:
    return sum(p.numel() for p in module.parameters())


PUBLISHED = {  # counted layer by layer in the listing of CoinCheung's BiSeNet, bisenetv2/bisenetv2.py, for 19 classes
    "detail": 519_232,
    "stem": 6_432,
    "semantic": 988_464,
    "context": 164_608,
    "aggregation": 478_720,
    "head": 1_201_171,
    "auxiliary": 287_308,
}


def test_parameters_and_multiplications_are_the_references_and_the_docstrings():
    network, text = BiSeNetV2(19), " ".join((BiSeNetV2.__doc__ or "").split())
    assert {name: parameters(part) for name, part in network.named_children()} == PUBLISHED
    assert f"{parameters(network) - PUBLISHED['auxiliary']:,} parameters" in text
    slim = BiSeNetV2(11, sizes=SLIM)
    heads = parameters(slim.auxiliary)
    assert f"{parameters(slim) - heads:,} and {heads:,} for 11 classes" in text
    with FlopCounterMode(display=False) as counter:
        network.to("meta").eval()({"image": torch.empty(1, 3, 512, 1024, device="meta")})
    assert counter.get_flop_counts()["Global"][torch.ops.aten.convolution] / 2e9 == pytest.approx(24.6, abs=0.05)


@pytest.mark.parametrize(("kind", "channels"), [("bisenetv2", 3), ("slim", 4)])
@pytest.mark.parametrize("size", [(180, 240), (33, 47)])
def test_logits_have_the_size_of_any_image_and_strides_round_up(kind, channels, size):
    network = small(kind, channels=channels).to("meta")
    logits, auxiliary = network({"image": torch.empty(2, channels, *size, device="meta")})
    assert logits.shape == (2, CLASSES, *size)
    for i, found in enumerate(auxiliary):  # of the slim network, those of their stages
        assert found.shape[2:] == (size if kind == "bisenetv2" else tuple(math.ceil(n / (4 * 2**i)) for n in size))


def test_a_micro_batch_of_one_image_trains_and_its_pooled_norms_keep_their_averages():
    network = small()
    pooled = [m for m in network.context.pooled.modules() if isinstance(m, Norm)]
    before = [{k: v.clone() for k, v in m.state_dict().items()} for m in pooled]
    loss, _ = segment.loss(network, batch_of(1), segment.Plan())
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
    for module, old in zip(pooled, before, strict=True):
        assert all(torch.equal(value, old[k]) for k, value in module.state_dict().items())
