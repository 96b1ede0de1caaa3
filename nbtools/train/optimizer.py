"""Optimizers, one table: a new one is one entry of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nbtools.errors import TrainError
from nbtools.show import plural


@dataclass(frozen=True)
class Rule:
    """An update rule."""

    kind: type[torch.optim.Optimizer]
    settings: Callable[[Any], dict[str, Any]]  # those of a plan that may change while it trains
    buffers: tuple[str, ...]  # kept for each parameter, of its shape; `step` is a count
    lr_rule: tuple[str, str]  # what advice makes of lr for another batch size (`Plan.lr_rule`), and its source
    lr: float  # where advice starts for fresh weights, at batch 64; a twentieth of it for pretrained ones


SQRT, LINEAR = ("sqrt", "arXiv 2205.10287"), ("linear", "arXiv 1706.02677")
OPTIMIZERS = {
    "adamw": Rule(torch.optim.AdamW, lambda plan: {"betas": plan.betas}, ("step", "exp_avg", "exp_avg_sq"), SQRT, 2e-3),
    "adam": Rule(torch.optim.Adam, lambda plan: {"betas": plan.betas}, ("step", "exp_avg", "exp_avg_sq"), SQRT, 2e-3),
    "sgd": Rule(torch.optim.SGD, lambda plan: {"momentum": plan.betas[0]}, ("momentum_buffer",), LINEAR, 0.025),
}
"""The choices of `Plan.optimizer`."""
LARGER = (  # batch times → lr times, epochs of warmup; each from, to
    (1, (1, 1), (0, 0)),
    (2, (1.5, 2), (3, 5)),
    (4, (2, 3), (5, 10)),
    (8, (2, 4), (10, 20)),
    (16, (3, 5), (20, 30)),
)
"""The table of the guide for very large batches: a rule of thumb, not measured by us. Advice takes the shortest warmup,
and lr by the optimizer's own rule; for AdamW that lies within the table but for a doubled batch, times 1.41."""


def build_optimizer(groups: list[dict[str, Any]], plan: Any) -> torch.optim.Optimizer:
    """The fused form: 4 kernels a step and group instead of hundreds."""
    fused: Any = {"lr": plan.lr, "fused": True}
    optimizer = OPTIMIZERS[plan.optimizer].kind(groups, **fused)
    follow(optimizer, plan)
    allocate(optimizer, plan)
    if plan.graph:
        for group in optimizer.param_groups:  # lr where a recorded step reads it, in the dtype that CUDA's kernels take
            lr = torch.tensor(plan.lr, dtype=torch.float32, device=group["params"][0].device)
            group.update(lr=lr, capturable=True)
        vars(optimizer)["_warned_capturable_if_run_uncaptured"] = True  # as some steps are, and should be
    return optimizer


def allocate(optimizer: torch.optim.Optimizer, plan: Any) -> None:
    """Make the buffers that torch would make in the first step, where memory could run out between two of them; with
    its buffers in place an update allocates nothing. Besides, fused SGD leaves its momentum uninitialised, and keeps
    whatever the memory held if the first step overflows in fp16 (torch 2.13)."""
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        state = optimizer.state[parameter]
        for name in OPTIMIZERS[plan.optimizer].buffers:
            if name not in state:
                like = torch.zeros((), device=parameter.device) if name == "step" else torch.zeros_like(parameter)
                state[name] = like


def follow(optimizer: torch.optim.Optimizer, plan: Any) -> None:
    """Take over a plan's weight decay and moments; lr is set in every step."""
    for group in optimizer.param_groups:
        group["weight_decay"] = plan.weight_decay if group.get("decays", True) else 0.0
        group.update(OPTIMIZERS[plan.optimizer].settings(plan))


def parameter_groups(model: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A task's groups, completed. Raises TrainError unless each trainable parameter is in exactly one."""
    groups = [{"lr_scale": 1.0, "decays": True, **group, "params": list(group["params"])} for group in groups]
    count = Counter(id(p) for group in groups for p in group["params"])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and count.pop(id(parameter), 0) != 1:
            raise TrainError(f"{name} must be in exactly one of the task's groups; correct groups(model, plan)")
    if count:
        frozen = plural(len(count), "parameter")
        raise TrainError(f"{frozen} of the task's groups(model, plan) do not require a gradient; leave them out")
    return groups
