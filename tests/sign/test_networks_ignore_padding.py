"""The two networks of signs are the guide's, and padding and missing points change no result."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from nbtools.errors import PlanError
from nbtools.tasks.sign.keypoints import LEFT, POINTS, RIGHT
from nbtools.tasks.sign.networks import POSITIONS, Gru, Transformer

LENGTHS = (13, 1, 30, 7)
NAMES = ("transformer", "gru")


class Small(Transformer):
    width, depth = 32, 2


def small(name="transformer", **options) -> Any:
    torch.manual_seed(0)
    return Gru(20, 7, 3, **options) if name == "gru" else Small(2 * POINTS, 7, 3, **options)


def clips(lengths=LENGTHS, frames=None, garbage=0.0) -> dict[str, torch.Tensor]:
    """A batch for either network; beyond the clips' ends stands garbage."""
    generator = torch.Generator().manual_seed(1)
    frames = frames or max(lengths)
    x = torch.full((len(lengths), frames, 2 * POINTS), garbage)
    features = torch.full((len(lengths), frames, 20), garbage)
    mask = torch.zeros(len(lengths), frames, POINTS, dtype=torch.bool)
    for b, length in enumerate(lengths):
        x[b, :length] = torch.randn(length, 2 * POINTS, generator=generator)
        features[b, :length] = torch.randn(length, 20, generator=generator)
        mask[b, :length] = torch.rand(length, POINTS, generator=generator) < 0.9
    length = torch.tensor(lengths)
    return {"x": x, "mask": mask, "x_length": length, "features": features, "features_length": length}


def alone(batch, b):
    length = int(batch["x_length"][b])
    return {n: t[b : b + 1, :length] if t.dim() > 1 else t[b : b + 1] for n, t in batch.items()}


def loss(outputs):
    """Any function of all logits that is a sum over clips."""
    gloss, category = outputs
    return gloss.square().sum() + 2 * category.log_softmax(1)[:, 0].sum()


def test_the_networks_are_the_guides():
    network = Transformer(156, 105, 10)
    assert sum(p.numel() for p in network.parameters()) == 3_280_371
    assert [m.p for m in network.modules() if isinstance(m, nn.Dropout)] == [0.1] * (1 + 2 * 4 + 2)
    gru = Gru(2048, 105, 10)
    assert sum(p.numel() for p in gru.parameters()) == 101_743
    assert [(m.input_size, m.hidden_size) for m in gru.modules() if isinstance(m, nn.GRU)] == [(2048, 16), (16, 12)]


def test_a_layer_is_torchs_pre_ln_encoder_layer():
    ours: Any = small().layers[0]
    theirs = nn.TransformerEncoderLayer(32, 8, 128, 0.0, batch_first=True, norm_first=True)
    with torch.no_grad():
        theirs.self_attn.in_proj_weight.copy_(ours.attention.qkv.weight)
        theirs.self_attn.in_proj_bias.copy_(ours.attention.qkv.bias)
    for to, module in (
        ("self_attn.out_proj", ours.attention.out),
        ("linear1", ours.feed[1]),
        ("linear2", ours.feed[4]),
    ):
        theirs.get_submodule(to).load_state_dict(module.state_dict())
    x, keys = torch.randn(2, 9, 32), torch.tensor([[True] * 9, [True] * 5 + [False] * 4])
    found = ours.eval()(x, keys[:, None, None])
    expected = theirs.train()(x, src_key_padding_mask=~keys)  # in eval mode it takes another path and zeroes padding
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_the_gru_gives_what_packed_sequences_give():
    network, batch = small("gru").eval(), clips()
    packed = pack_padded_sequence(batch["features"], batch["features_length"], batch_first=True, enforce_sorted=False)
    hidden = network.second(network.first(packed)[0])[1][-1]
    torch.testing.assert_close(network(batch)[0], network.gloss(hidden), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_clip_alone_and_in_a_padded_batch_agree_and_so_do_their_gradients(name):
    network, batch = small(name, dropout=0.0), clips(frames=41, garbage=9.0)
    together = network(batch)
    loss(together).backward()
    gradients = [p.grad.clone() for p in network.parameters()]
    network.zero_grad()
    for b in range(len(LENGTHS)):
        one = network(alone(batch, b))
        for logits, single in zip(together, one, strict=True):
            torch.testing.assert_close(logits[b], single[0], atol=1e-5, rtol=0)
        loss(one).backward()
    for gradient, parameter in zip(gradients, network.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("missing", ["both hands", "every frame of one clip", "everything"])
def test_what_is_missing_gives_no_nan_and_no_nan_gradient(missing):
    network, batch = small(), clips((9, 4))
    if missing == "both hands":
        for hand in (LEFT, RIGHT):
            batch["mask"][:, :, hand] = False
            batch["x"].view(2, 9, POINTS, 2)[:, :, hand] = 0
    else:
        batch["mask"][: 2 if missing == "everything" else 1] = False
    keys = []
    for layer in network.layers:
        layer.register_forward_hook(lambda _m, given, _out: keys.append(given[1]))
    outputs = network(batch)
    loss(outputs).backward()
    assert all(k.any(3).all() for k in keys)  # older kernels make NaN of a softmax over nothing
    assert all(torch.isfinite(t).all() for t in outputs)
    assert all(torch.isfinite(p.grad).all() for p in network.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_a_clip_of_no_frame_in_a_batch_gives_no_nan_and_changes_nobody(name):
    network, batch = small(name).eval(), clips((5, 0))
    with torch.no_grad():
        logits = network(batch)[0]
        torch.testing.assert_close(logits[0], network(alone(batch, 0))[0][0], atol=1e-6, rtol=1e-5)
    assert torch.isfinite(logits).all()


def test_clips_as_long_as_the_table_are_read_and_longer_ones_refused_with_the_way_out():
    network = small().eval()
    with torch.no_grad():
        assert network(clips((POSITIONS,)))[0].shape == (1, 7)
        with pytest.raises(PlanError, match=r"a clip has 301 frames.* 300; cut or thin out such clips"):
            network(clips((POSITIONS + 1,)))
