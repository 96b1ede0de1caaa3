"""CTC by cuDNN, with torch's own loss in the operator's place: packing, masks and weights. tests/cuda compares the
operator itself, and sees that nothing is read on the host."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from nbtools.tasks.common import ctc

T, B, N, C = 20, 6, 5, 9


def operator(logits, texts, steps, lengths, blank, deterministic, zero_infinity):
    """What cuDNN returns: the gradient of logits, anything beyond a sample's steps."""
    assert (texts.dtype, steps.dtype, lengths.dtype) == (torch.int32,) * 3
    assert len(texts) == B * N
    assert deterministic
    assert min(lengths) > 0
    with torch.enable_grad():
        own = logits.detach().requires_grad_()
        used = texts[: int(lengths.sum())].long()
        each = F.ctc_loss(own.log_softmax(2), used, steps.long(), lengths.long(), blank, "none")
        [gradient] = torch.autograd.grad(each.nan_to_num(posinf=0.0).sum(), own)
    for b, last in enumerate(steps.tolist()):
        gradient[last:, b] = torch.nan
    return each.detach(), gradient


@pytest.fixture
def batch(monkeypatch):
    monkeypatch.setattr(torch.ops.aten, "_cudnn_ctc_loss", SimpleNamespace(Tensor=operator), raising=False)
    torch.manual_seed(0)
    logits = torch.randn(T, B, C, requires_grad=True)
    lengths, steps = torch.tensor([5, 1, 3, 5, 0, 4]), torch.tensor([20, 7, 3, 4, 9, 12])
    return logits, torch.randint(C - 1, (B, N)), steps, lengths


def test_losses_and_gradients_are_torchs_own_where_the_text_fits(batch):
    logits, labels, steps, lengths = batch
    labels[2, :3] = torch.tensor([1, 2, 3])  # just fits
    fits = ctc.feasible(steps, labels, lengths)
    assert fits.tolist() == [True, True, True, False, True, True]
    each = ctc.cudnn_losses(logits, labels, steps, lengths)
    expected = F.ctc_loss(logits.log_softmax(2), labels + 1, steps, lengths, reduction="none")
    used = fits & (lengths > 0)
    torch.testing.assert_close(each[used], expected[used])
    assert each.isinf().tolist() == expected.isinf().tolist() == (~fits).tolist()
    assert each[4] == 0
    weights = torch.arange(1.0, B + 1) * used
    [mine] = torch.autograd.grad((each.nan_to_num(posinf=0.0) * weights).sum(), logits)
    [theirs] = torch.autograd.grad((expected[used] * weights[used]).sum(), logits)
    torch.testing.assert_close(mine[:, used], theirs[:, used], atol=1e-5, rtol=1e-4)
    assert not mine[:, ~used].any()


def test_an_operator_that_disagrees_or_is_missing_is_not_used(batch, monkeypatch):
    monkeypatch.setattr(f"{__name__}.B", 3)
    monkeypatch.setattr(f"{__name__}.N", 3)
    agrees = ctc.cudnn_agrees.__wrapped__
    assert agrees(torch.device("cpu"))

    def doubled(*values):
        each, gradient = operator(*values)
        return 2 * each, gradient

    for other in (SimpleNamespace(Tensor=doubled), SimpleNamespace()):
        monkeypatch.setattr(torch.ops.aten, "_cudnn_ctc_loss", other)
        assert not agrees(torch.device("cpu"))
