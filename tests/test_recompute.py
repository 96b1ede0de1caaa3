"""`Plan.checkpoint_activations` of every network that has it: less memory at the peak of a step, and the same bits."""

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.recompute import CASES, CPU, begun
from nbtools.measure import memory
from nbtools.tasks.hwdb import networks
from nbtools.train import attempt

HCTR = ((32, 2, 0.3), (32, 2, 0.3), (48, 2, 0.3), (48, 1, 0.9))  # fewer channels and blocks
CRNN = (((16,), (2, 2)), ((32,), (2, 2)), ((32, 32), (2, 1)), ((32, 32), (2, 1)))
LINES, IMAGES = (6, 64, 160), (4, 96, 96)
SMALL: dict[str, tuple[tuple[int, int, int], dict[str, Any]]] = {  # network: size, settings
    "captcha guide": ((64, 16, 32), {}),
    "captcha small": ((64, 16, 32), {}),
    "captcha ctc": ((6, 32, 160), {}),
    "hwdb hctr": (LINES, {}),
    "hwdb slim": (LINES, {}),
    "hwdb crnn": (LINES, {"amp": "bf16"}),
    "segment bisenetv2": (IMAGES, {}),
    "segment slim": ((2, 96, 96), {"micro_batch_size": 1}),
    "sign transformer": ((4, 60, 156), {}),
}
SLOW = ("captcha guide", "hwdb hctr", "segment bisenetv2")  # of the same parts as the others


def trained(case: str, recompute: bool) -> tuple[dict[str, Tensor], int]:
    """(everything that two steps leave behind, bytes at the peak of the first)."""
    size, settings = SMALL[case]
    state, raw = begun(case, size, recompute, **settings)
    state.restore_rng()
    losses: list[Tensor] = []
    most = memory.peak(CPU, lambda: losses.append(attempt(state, raw, 100, size[0])[0]))
    losses.append(attempt(state, raw, 100, size[0])[0])
    gradients = {f"gradient {i}": p.grad for i, p in enumerate(state.parameters) if p.grad is not None}
    return {**state.tensors(), **gradients, "losses": torch.stack(losses)}, most


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.full] * (case in SLOW)) for case in CASES])
def test_recomputing_lowers_the_peak_of_a_step_and_changes_no_bit(case, monkeypatch):
    """Losses, gradients, weights, moments, batch norm's averages and counters, and the numbers that dropout draws."""
    monkeypatch.setattr(networks, "HCTR", HCTR)
    monkeypatch.setattr(networks, "CRNN", CRNN)
    (stored, most), (recomputed, less) = trained(case, False), trained(case, True)
    assert stored.keys() == recomputed.keys()
    assert [name for name in stored if not torch.equal(stored[name], recomputed[name])] == []
    assert less < 0.75 * most, f"{less / most:.2f}"
