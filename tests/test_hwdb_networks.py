"""The three networks of handwritten lines: sizes and lengths, and that padding changes no answer and no gradient."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

from nbtools.errors import PlanError
from nbtools.tasks.common import ctc
from nbtools.tasks.hwdb.networks import NETWORKS, Bidirectional, Block, ConvNorm, Excite, Hctr, beyond, build, flipped

NAMES = sorted(NETWORKS)
LENGTHS = (97, 33, 200, 64)
pytestmark = pytest.mark.usefixtures("one_thread")


def small(name, height=32, classes=12, seed=0) -> Any:
    """A narrow network whose batch norms shift and scale: one that is fresh shifts by 0, and would hide what padding
    does."""
    torch.manual_seed(seed)
    network = NETWORKS[name](height, classes, width=0.25)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1, 0.2)
            nn.init.normal_(module.bias)
            assert module.running_mean is not None
            assert module.running_var is not None
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
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


# Sizes


def test_hctr_has_the_53_1_million_parameters_and_the_layers_that_its_table_says():
    with torch.device("meta"):
        network: Any = Hctr(128, 7374)
    parts = {
        "stem": network.stages[0],
        **{f"stage {k}": network.stages[k] for k in (1, 2, 3, 4)},
        "linear": network.linear,
    }
    counts = {name: sum(p.numel() for p in part.parameters()) for name, part in parts.items()}
    table = re.findall(r"\| (\S.*?) +\| [\d,]+ +\| .*? \| +([\d,]+) \|", Hctr.__doc__ or "")
    assert {name: int(count.replace(",", "")) for name, count in table} == counts
    assert sum(counts.values()) == 53_104_143
    assert network.linear.in_features == 2048


def test_hctr_has_the_references_blocks_and_dropout():
    with torch.device("meta"):
        network: Any = Hctr(128, 7374)
    assert [len([p for p in s.parts if isinstance(p, Block)]) for s in network.stages] == [0, 2, 4, 5, 1]
    assert [stage.dropout.p for stage in network.stages] == [0, 0.3, 0.3, 0.3, 0.9]
    block = network.stages[2].parts[0]
    assert block.dropout.p == 0.1
    assert [m.weight.shape for m in block.excite.gate if isinstance(m, nn.Linear)] == [(16, 256), (256, 16)]
    assert not [m for m in network.modules() if isinstance(m, nn.RNNBase)]


@pytest.mark.parametrize(("name", "stride"), [("hctr", 32), ("slim", 4), ("crnn", 4)])
@pytest.mark.parametrize("width", [1, 31, 32, 33, 64, 70, 97])
def test_a_line_has_as_many_steps_as_strides_begun(name, stride, width):
    network = small(name).eval()
    batch = padded((width,))
    with torch.no_grad():
        logits, steps = network(batch)
    assert steps.tolist() == [len(logits)] == [-(-width // stride)]
    assert NETWORKS[name].stride == stride


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("height", [32, 45, 64, 128])
def test_any_height_is_read(name, height):
    logits, _ = small(name, height).eval()(padded((40, 20), height))
    assert logits.shape[1:] == (2, 13)


@pytest.mark.parametrize(("name", "least"), [("hctr", 64), ("slim", 16), ("crnn", 16)])
def test_lines_too_low_for_a_network_are_refused(name, least):
    with torch.device("meta"):
        assert build(name, least, 3)
    rule = rf'network = "{name}" reads lines ≥ {least} pixels high, and these are {least - 1}; pack with a larger'
    with pytest.raises(PlanError, match=rule):
        build(name, least - 1, 3)


def test_slim_is_small():
    assert 0.3e6 < sum(p.numel() for p in build("slim", 32, 60).parameters()) < 1e6


@pytest.mark.parametrize("name", NAMES)
def test_the_plans_dropout_stands_before_the_classifier(name):
    def share(dropout):
        with torch.device("meta"):
            network: Any = build(name, 64, 3, dropout)
        return (network.stages[-1].dropout if name == "hctr" else network.drop).p

    assert (share(None), share(0.15), share(0.0)) == (NETWORKS[name].dropout, 0.15, 0.0)


# Padding


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("height", [32, 45])
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


@pytest.mark.parametrize("name", NAMES)
def test_the_gradient_of_a_line_does_not_depend_on_the_padding_beside_it(name):
    labels, lengths = torch.tensor([[1, 5]]), torch.tensor([2])

    def gradients(batch, b):
        network = small(name).eval()
        logits, steps = network(batch)
        ctc.loss((logits[:, b : b + 1], steps[b : b + 1]), labels, lengths).backward()
        return {n: p.grad for n, p in network.named_parameters()}

    batch = padded()
    together, own = gradients(batch, 0), gradients(alone(batch, 0), 0)
    for n, gradient in own.items():
        most = float(gradient.abs().max())
        assert most > 0 or "gate" in n, n  # the two hidden units of a narrow gate may both be off
        torch.testing.assert_close(together[n], gradient, rtol=0, atol=2e-5 * most, msg=n)


def test_excitation_sees_the_mean_of_each_lines_own_columns():
    torch.manual_seed(0)
    excite, x, lengths = Excite(32), torch.randn(3, 32, 4, 20), torch.tensor([20, 7, 1])
    blank = beyond(lengths, 20)
    found = excite(x.masked_fill(blank, 0), blank)
    for b, length in enumerate(lengths.tolist()):
        own = x[b, :, :, :length]
        gate = excite.gate(own.mean((1, 2)))
        torch.testing.assert_close(found[b, :, :, :length], own * gate[:, None, None])


def test_bidirectional_is_torchs_bidirectional_lstm_on_each_line_alone():
    torch.manual_seed(0)
    both, lengths = Bidirectional(5, 6), torch.tensor([9, 4, 1])
    torchs = nn.LSTM(5, 6, bidirectional=True)
    weights = {f"{n}": w for n, w in both.forth.state_dict().items()}
    weights |= {f"{n}_reverse": w for n, w in both.back.state_dict().items()}
    torchs.load_state_dict(weights)
    x = torch.randn(9, 3, 5)
    found = both(x, lengths)
    for b, length in enumerate(lengths.tolist()):
        torch.testing.assert_close(found[:length, b], torchs(x[:length, b])[0])


def test_flipping_a_line_leaves_its_padding():
    x = torch.arange(10).view(5, 2, 1)
    assert flipped(x, torch.tensor([5, 3]))[..., 0].t().tolist() == [[8, 6, 4, 2, 0], [5, 3, 1, 7, 9]]


# Memory


def kept(module, *inputs):
    """(bytes that backward keeps, weights apart, what the module returns)."""
    found = {}

    def pack(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(*inputs)
    weights = {p.untyped_storage().data_ptr() for p in module.parameters()}
    return sum(size for place, size in found.items() if place not in weights), out


@pytest.mark.parametrize("name", NAMES)
def test_recomputing_keeps_less_and_changes_no_gradient_and_no_running_average(name):
    network, results, sizes = small(name), [], []
    for recompute in (False, True):
        torch.manual_seed(3)
        again = copy.deepcopy(network).train()
        again.recompute = recompute
        size, outputs = kept(again, padded((64, 40)))
        ctc.loss(outputs, torch.tensor([[1], [5]]), torch.tensor([1, 1])).backward()
        results.append([*again.buffers(), *(p.grad for p in again.parameters())])
        sizes.append(size)
    for stored, recomputed in zip(*results, strict=True):
        torch.testing.assert_close(recomputed, stored)
    assert sizes[1] < 0.8 * sizes[0]  # the LSTMs stay


def test_zeroing_padding_costs_no_activation_memory():
    """It writes into a tensor that backward does not keep: only the mask, a bool a column, is kept beside."""
    unit, x = ConvNorm(8, 8), torch.randn(2, 8, 16, 24, requires_grad=True)
    blank = beyond(torch.tensor([24, 10]), 24)
    bare, _ = kept(nn.Sequential(unit.conv, unit.norm, nn.ReLU(inplace=True)), x)
    blanked, _ = kept(unit, x, blank)
    assert bare > 2 * x.numel() * 4
    assert blanked <= bare + blank.untyped_storage().nbytes()
