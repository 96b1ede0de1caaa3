"""Whether other arithmetic, a precision or a memory layout, learns the same: its loss and its gradient at the same
weights, on the same batches and with dropout off, beside what two equal runs differ by.

Two trajectories would say nothing: chaos alone parts those of hctr by 3.5 % in 20 steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from nbtools.data import Pack, Padding, Raw, gather, on
from nbtools.errors import NbtoolsError
from nbtools.measure.timing import Clock, Stepper, typical
from nbtools.show import percent
from nbtools.train import Plan, TaskLike, gradients
from nbtools.train import device as devices

STEPS, BATCHES, SAMPLES = 6, 3, 8  # after which, on which losses and gradients are compared; of a batch at most
SAME_LOSS, SAME_GRADIENT = 0.01, 0.99  # relative; cosine: bf16 keeps 8 bits, 0.4 % a number
CONTROL = 3.0  # times what two equal runs differ by


def objection(task: TaskLike, pack: Pack, plan: Plan, change: Mapping[str, Any], clock: Clock) -> str:
    """Return how loss and gradient of some batches differ with other arithmetic, beyond what is due to chance; "" if
    they do not."""
    device, size = devices.pick(), min(plan.batch_size, SAMPLES)
    plan = plan.replace(batch_size=size, micro_batch_size=None, warmup_epochs=0.0, schedule="constant")
    padding = Padding(pack, plan)
    try:
        plain, other = (
            without_dropout(Stepper(task, pack, each, device, clock=clock, learning=True))
            for each in (plan, plan.replace(**change))
        )
        batches = [on(device, gather(pack, ids, padding)) for ids, _ in typical(pack, plan, BATCHES)]
        for number in range(STEPS):  # the gradients of first weights are mostly rounding in bf16
            plain.step(batches[number % len(batches)])
        other.state.model.load_state_dict(plain.state.model.state_dict())
        first, again, changed = (gradient(stepper, batches) for stepper in (plain, plain, other))
    except (RuntimeError, NbtoolsError) as error:
        return f"fails ({str(error).partition(chr(10))[0]})"
    (control, alike), (far, cosine) = apart(first, again), apart(first, changed)
    if not far <= max(SAME_LOSS, CONTROL * control):
        return f"is faster, but its loss differs by {percent(far, 1)}"
    if not 1 - cosine <= max(1 - SAME_GRADIENT, CONTROL * (1 - alike)):
        return f"is faster, but its gradient has a cosine of {cosine:.3f} to the plan's"
    return ""


def without_dropout(stepper: Stepper) -> Stepper:
    for layer in stepper.state.model.modules():
        if isinstance(layer, nn.modules.dropout._DropoutNd):
            layer.p = 0.0
        elif isinstance(layer, nn.RNNBase | nn.MultiheadAttention):
            layer.dropout = 0.0
    return stepper


def gradient(stepper: Stepper, batches: Sequence[Raw]) -> tuple[float, Tensor]:
    """Return (mean loss, gradient) of batches, the same random numbers drawn each time."""
    loss, parts, state = 0.0, list[Tensor](), stepper.state
    state.restore_rng()
    for raw in batches:
        stepper.clock()
        total, count = gradients(state, raw, len(raw["id"]))
        loss += float(total) / max(float(count), 1) / len(batches)
        parts.append(torch.cat([p.grad.double().flatten() for p in state.parameters if p.grad is not None]))
        parts[-1] /= state.scaler.get_scale() if state.scaler is not None else 1.0
    return loss, torch.stack(parts).sum(0)


def apart(these: tuple[float, Tensor], those: tuple[float, Tensor]) -> tuple[float, float]:
    """Return (how far the second loss is from the first, the cosine between the gradients)."""
    far = abs(those[0] - these[0]) / max(abs(these[0]), 1e-12)
    return far, float(torch.nn.functional.cosine_similarity(these[1], those[1], 0))
