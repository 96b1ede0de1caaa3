"""Precisions, compiled and replayed steps against plain float32: at the same weights, on the same batch, without
dropout, and beside controls. Trajectories are chaotic, and gradients of deep networks nearly so: they are compared with
what two equal passes differ by, and with what rounding the weights does in float32."""

import math

import pytest
import torch
from cases import CASES, LEAN, first_losses, one_pass, require_close

import nbtools as nb
from nbtools.tasks.common import ctc
from nbtools.train import DTYPES, synchronizing

pytestmark = pytest.mark.cuda


@pytest.fixture(scope="module")
def passes(packs):
    made = {}

    def of(name, device):
        if name not in made:
            how = {"plain": None, "again": None, **DTYPES}
            made[name] = {what: one_pass(CASES[name], packs(name), device, dtype) for what, dtype in how.items()}
        return made[name]

    return of


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("small_here")
def test_float32_on_the_gpu_is_float32_on_the_cpu(name, packs, device, passes):
    """But for TF32, with which products and convolutions round as fp16 does."""
    there, here = one_pass(CASES[name], packs(name), torch.device("cpu")), passes(name, device)
    assert math.isfinite(there[0])
    require_close(there, here["plain"], [here["again"], here["fp16"]])


@pytest.mark.parametrize("amp", DTYPES)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("small_here")
def test_mixed_precision_has_the_loss_and_the_gradient_of_float32(name, amp, packs, device, passes):
    """On a CPU bf16 is 1.7 to 2.4 times as far from float32 as rounded weights are, in every network."""
    if amp == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        pytest.skip("bf16 is only emulated here")
    here = passes(name, device)
    for channels_last in (False, True) if name in ("captcha small", "segment slim") else (False,):
        found = one_pass(CASES[name], packs(name), device, amp=amp, channels_last=channels_last)
        require_close(found, here["plain"], [here["again"], here[amp]])


@pytest.mark.parametrize("name", ["captcha ctc", "hwdb slim"])
@pytest.mark.usefixtures("gpu")
def test_fp16_starts_at_a_scale_at_which_every_step_counts(name, packs, device):
    """CTC's loss is a sum over a line: its first gradients overflow at the scaler's 65,536."""
    found, state = first_losses(CASES[name], packs(name), device, 20, amp="fp16")
    assert all(map(math.isfinite, found))
    assert float(state.optimizer.state[state.parameters[0]]["step"]) == 20, "skipped steps are not counted"


@pytest.mark.parametrize("name", LEAN)
def test_replayed_steps_train_to_the_losses_of_eager_ones(name, packs, device):
    if CASES[name].ctc and device.type == "cpu":
        pytest.skip("torch's own CTC, which reads lengths on the host")
    same = {"deterministic": True, **({"bucket": 200} if CASES[name].ctc else {})}
    eager, again = (first_losses(CASES[name], packs(name), device, 14, **same)[0] for _ in range(2))
    found, state = first_losses(CASES[name], packs(name), device, 14, graph=True, **same)
    assert (state.graphs.off, state.graphs.replayed > 5) == ("", True)
    far, noise = (sum(abs(a - b) for a, b in zip(x, eager, strict=True)) for x in (found, again))
    assert far <= max(1e-3 * sum(map(abs, eager)), 3 * noise), "on average, beside what two equal runs are apart"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch, while it compiles
def test_a_compiled_step_has_the_loss_and_the_gradient_of_an_eager_one(packs, device, passes):
    name = "captcha small"
    try:
        found = one_pass(CASES[name], packs(name), device, compile=True)
    finally:
        torch.compiler.reset()
    here = passes(name, device)
    require_close(found, here["plain"], [here["again"], here["fp16"]], loss=1e-3)  # it chooses other kernels


def test_advice_replays_the_steps_of_signs_which_take_longer_to_launch_than_to_compute(packs, gpu, monkeypatch):
    monkeypatch.setattr("nbtools.measure.finders.LEAST_S", 0.0)  # no trial of learning rates
    case, pack = CASES["sign transformer"], packs("sign transformer")
    advice = nb.advise(case.task, pack, seconds=12.0)
    assert advice.plan.graph, advice.reasons
    assert advice.ratios["rules"] < 1 / 1.5


@pytest.mark.parametrize(("steps", "size", "classes"), [(40, 128, 37), (60, 64, 7374), (480, 32, 500)])
def test_ctc_by_cudnn_is_torchs_own_with_the_same_bits_each_time_and_without_a_wait(gpu, steps, size, classes):
    assert ctc.cudnn_agrees(gpu)
    torch.manual_seed(0)
    logits = torch.randn(size, classes, steps, device=gpu).permute(2, 0, 1).requires_grad_()
    labels, lengths = torch.randint(classes - 1, (size, 12), device=gpu), torch.randint(1, 13, (size,), device=gpu)
    own = torch.randint(24, steps + 1, (size,), device=gpu)

    def once():
        each = ctc.cudnn_losses(logits, labels, own, lengths)
        return each.detach(), torch.autograd.grad(each.sum(), logits)[0]

    once()
    (first, second), waits = synchronizing(lambda: [once() for _ in range(2)])
    assert waits == []
    assert all(map(torch.equal, first, second))
    exact = logits.detach().double().requires_grad_()
    expected = torch.nn.functional.ctc_loss(exact.log_softmax(2), labels + 1, own, lengths, reduction="none")
    torch.testing.assert_close(first[0].double(), expected.detach(), rtol=1e-3, atol=1e-3)
    expected = torch.autograd.grad(expected.sum(), exact)[0]
    torch.testing.assert_close(first[1].double(), expected, rtol=0.0, atol=2e-2)  # float32's: alpha reaches 3,200
