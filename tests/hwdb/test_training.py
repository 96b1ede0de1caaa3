"""How handwritten lines are trained: batches, augmentation, mask and ReLU, CTC, metrics; and the guide's faults."""

import numpy as np
import pytest
import torch
from cases import CASES
from packs import pack_of
from torch import nn
from torch.nn import functional as F

from nbtools.data import open_feed
from nbtools.tasks import hwdb
from nbtools.tasks.hwdb import networks


@pytest.mark.parametrize(("name", "stride"), [("hctr", 32), ("slim", 4)])
def test_a_line_of_any_height_and_width_has_as_many_steps_as_strides_begun(name, stride):
    for width, height in zip((1, 31, 32, 33, 70, 97), (32, 45, 64, 128, 32, 45), strict=True):
        network, batch = networks.NETWORKS[name](height, 12, width=0.25).eval(), torch.rand(1, 1, height, width)
        with torch.no_grad():
            logits, steps = network({"image": batch, "image_length": torch.tensor([width])})
        assert steps.tolist() == [len(logits)] == [-(-width // stride)]
        assert logits.shape[1:] == (1, 13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_mask_and_relu_in_one_pass_have_the_bits_of_two_forward_and_backward(dtype, layout):
    padding = networks.beyond(torch.tensor((97, 33, 200, 64)), 200)
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
    for plain, fused in zip(*results, strict=True):
        assert plain.ne(0).any()
        assert torch.equal(plain, fused)


def test_each_line_keeps_its_own_length_image_and_text_and_padding_is_paper(tmp_path):
    lines = CASES["hwdb slim"].pack(tmp_path, 10)
    [raw] = open_feed(lines, hwdb.Plan(feed="resident"), torch.device("cpu"))([np.array([0, 5, 3])])
    batch = hwdb.batch(raw, hwdb.Plan(), None)
    for b, i in enumerate(batch["id"].tolist()):
        length, sample = int(batch["image_length"][b]), lines.sample(i)
        guides = ((255 - torch.from_numpy(sample["image"].T.astype(np.float32))) / 255 - 0.5) / 0.5  # of the white scan
        torch.testing.assert_close(batch["image"][b, 0, :, :length], 1 - guides)
        assert not batch["image"][b, ..., length:].any()
        assert batch["label"][b, : batch["label_length"][b]].tolist() == sample["label"].tolist()


def labelled(rows):
    labels = nn.utils.rnn.pad_sequence([torch.tensor(row, dtype=torch.long) for row in rows], batch_first=True)
    return {"label": labels, "label_length": torch.tensor([len(row) for row in rows])}


def test_a_line_without_room_for_its_text_is_left_out_and_counted():
    """Its loss is infinite: in the sum it would be a NaN for every other line, and zeroed nobody would know."""
    torch.manual_seed(0)
    logits, batch = 3 * torch.randn(14, 5, 7), labelled(([0, 1, 2, 3], [4, 4, 0], [2], [], [1, 1, 1]))
    logits.requires_grad_()
    short = torch.tensor([14, 3, 3, 5, 4])  # two equal neighbours need a blank between them
    total, count = hwdb.loss(lambda _: (logits, short), batch, hwdb.PLAN)
    total.backward()
    lengths = short, batch["label_length"]
    each = F.ctc_loss(logits.double().log_softmax(2), batch["label"] + 1, *lengths, reduction="none")
    assert total.item() == pytest.approx(each[[0, 2, 3]].sum().item(), rel=1e-5)
    assert count == 3
    assert logits.grad is not None
    assert [bool(logits.grad[:, b].any()) for b in range(5)] == [True, False, True, True, False]
    assert hwdb.metrics((logits, short), batch)["infeasible"] == (2, 5)
    assert hwdb.metrics((logits, torch.tensor([14, 9, 3, 5, 5])), batch)["infeasible"] == (0, 5)


@pytest.mark.parametrize(("network", "fitting"), [("slim", [1, 2, 3]), ("hctr", [3])])
def test_training_lines_without_room_for_their_text_are_left_out_and_others_stay(tmp_path, network, fitting):
    lines = zip((8, 9, 8, 33, 4), ([0, 0], [0, 0], [0, 1], [1, 0], [0, 1]), strict=True)
    arrays = [{"image": np.zeros((width, 64), np.uint8), "label": np.array(text)} for width, text in lines]
    how = {"classes": "01?", "options": {"height": 64}, "ragged": ("image", "label")}
    part = hwdb.part(pack_of(arrays, tmp_path, split=["train"] * 4 + ["val"], **how), hwdb.Plan(network=network))
    assert (part.ids("train").tolist(), part.ids("val").tolist()) == (fitting, [4])


def test_an_unknown_character_is_never_read_right():
    unknown = 4  # the last class
    for read, truth, wrong in (([0, unknown], [0, unknown], 1), ([0, 1], [0, unknown], 1), ([0, 1], [0, 1], 0)):
        path = torch.tensor([k for place in read for k in (place + 1, 0)])  # a blank after each
        scores = hwdb.metrics((F.one_hot(path, 6).float()[:, None], torch.tensor([len(path)])), labelled([truth]))
        assert (scores["cer"], scores["whole_accuracy"]) == ((wrong, 2), (1 - wrong, 1))
