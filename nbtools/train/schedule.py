"""The learning rate as a pure function of plan and progress, so that resuming or turning a knob needs no memory."""

from __future__ import annotations

import math

from nbtools.train.plan import Plan

POLY_POWER = 0.9  # BiSeNetV2's and DeepLab's
PLATEAU_FACTOR = 0.1


def lr_at(plan: Plan, progress: float, drops: int = 0) -> float:
    """lr at a point of the run, in epochs: fractions count, the schedule moves every step.

    Linear warmup, then constant, cosine, poly, or plateau, which has dropped `drops` times.
    """
    if progress < plan.warmup_epochs:
        return plan.lr * progress / plan.warmup_epochs
    if plan.schedule == "constant":
        return plan.lr
    if plan.schedule == "plateau":
        return max(plan.min_lr, plan.lr * PLATEAU_FACTOR**drops)
    t = min(1.0, (progress - plan.warmup_epochs) / max(plan.epochs - plan.warmup_epochs, 1e-9))
    fall = (1 + math.cos(math.pi * t)) / 2 if plan.schedule == "cosine" else (1 - t) ** POLY_POWER
    return plan.min_lr + (plan.lr - plan.min_lr) * fall
