"""Optimizers and schedules: one table of the built-in ones, and a task's own."""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import nn
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer

from nbtools.errors import TrainError
from nbtools.show import plural


@dataclass(frozen=True)
class Rule:
    kind: Callable[..., Optimizer]
    settings: Callable[[Any], dict[str, Any]]  # those of a plan that may change while it trains
    buffers: tuple[str, ...]  # kept for each parameter, of its shape; `step` is a count
    lr_rule: tuple[str, str]  # what advice makes of lr for another batch size (`Plan.lr_rule`), and its source
    lr: float  # where advice starts for fresh weights, at batch 64; a twentieth of it for pretrained ones


MOMENTS, SQRT, LINEAR = ("step", "exp_avg", "exp_avg_sq"), ("sqrt", "arXiv 2205.10287"), ("linear", "arXiv 1706.02677")
OPTIMIZERS = {  # the choices of `Plan.optimizer`
    "adamw": Rule(AdamW, lambda plan: {"betas": plan.betas, "eps": plan.eps}, MOMENTS, SQRT, 2e-3),
    "adam": Rule(Adam, lambda plan: {"betas": plan.betas, "eps": plan.eps}, MOMENTS, SQRT, 2e-3),
    "sgd": Rule(SGD, lambda plan: {"momentum": plan.betas[0]}, ("momentum_buffer",), LINEAR, 0.025),
}


def build_optimizer(task: Any, model: nn.Module, plan: Any) -> Optimizer:
    """Return the optimizer of `task.optimizer`, each group with its `lr_scale`: the lr of a step is the plan's times
    that. Raises TrainError unless it holds exactly the trained parameters."""
    groups = [{"decays": g.get("weight_decay") != 0.0, "own": [*g], **g} for g in task.groups(model, plan)]
    for group in groups:
        group.setdefault("lr_scale", group.get("lr", plan.lr) / plan.lr)
        group |= {"params": [*group["params"]], "lr": plan.lr * group["lr_scale"]}
        group |= {} if group["decays"] else {"weight_decay": 0.0}
    require_all(model, groups, "the task's groups")
    optimizer = task.optimizer(groups, plan)
    if not isinstance(optimizer, Optimizer) or isinstance(optimizer, LBFGS) or hasattr(optimizer, "eval"):
        rule = "optimizer must return an Optimizer that needs no closure and has no eval()"
        raise TrainError(f"{rule}, got {type(optimizer).__name__}; choose another, or Plan(ema=0.999) for an average")
    require_all(model, optimizer.param_groups, "the optimizer's groups")
    for group in optimizer.param_groups if not hasattr(optimizer, "built_in") else ():
        group["lr_scale"] = float(group["lr"]) / plan.lr
    return optimizer


def require_all(model: nn.Module, groups: list[dict[str, Any]], of: str) -> None:
    held = Counter(id(p) for group in groups for p in group["params"])
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and held.pop(id(parameter), 0) != 1:
            raise TrainError(f"{name} must be in exactly one of {of}; build them from the given parameters")
    if held:
        raise TrainError(f"{plural(len(held), 'parameter')} of {of} are frozen or another network's; leave them out")


def build_schedule(task: Any, plan: Any) -> Any:
    """Return the function of `task.schedule`, None for the plan's own. Raises TrainError but for factors from 0 up."""
    rule = "schedule(plan) must return None or a function of progress, 0 to 1, that returns a factor ≥ 0 on lr"
    try:
        factor: Any = task.schedule(plan)
        values = [] if factor is None else [float(factor(progress)) for progress in (0.0, 0.5, 1.0)]
    except (TypeError, ValueError, ArithmeticError, LookupError) as error:
        raise TrainError(f"{rule}: {error}; correct it") from error
    if not all(0 <= value < math.inf for value in values):
        raise TrainError(f"{rule}, got {', '.join(map(repr, values))}; correct it")
    return factor


def plan_optimizer(groups: list[dict[str, Any]], plan: Any) -> Optimizer:
    """Return the table's optimizer in its fused form: 4 kernels a step and group instead of hundreds."""
    optimizer = OPTIMIZERS[plan.optimizer].kind(groups, lr=plan.lr, fused=True)
    vars(optimizer)["built_in"] = True  # of the table: weight decay and betas are the plan's
    follow(optimizer, plan)
    if plan.graph:
        for group in optimizer.param_groups:  # lr where a recorded step reads it, in the dtype that CUDA's kernels take
            lr = torch.tensor(plan.lr, dtype=torch.float32, device=group["params"][0].device)
            group.update(lr=lr, capturable=True)
        vars(optimizer)["_warned_capturable_if_run_uncaptured"] = True  # as some steps are, and should be
    return optimizer


def follow(optimizer: Optimizer, plan: Any) -> None:
    """Take over a plan's weight decay and betas; lr is set in every step. A group keeps its own settings, a custom
    optimizer all. Make the buffers that torch would make in the first step, where memory could run out between two of
    them. Fused SGD besides leaves its momentum uninitialised where the first step overflows in fp16 (torch 2.13)."""
    rule = OPTIMIZERS[plan.optimizer]
    for group in optimizer.param_groups if hasattr(optimizer, "built_in") else ():
        wanted = {**rule.settings(plan), "weight_decay": plan.weight_decay if group["decays"] else 0.0}
        group.update({name: value for name, value in wanted.items() if name not in group.get("own", ())})
        for parameter, name in product(group["params"], rule.buffers):
            if name not in optimizer.state[parameter]:
                step = torch.zeros((), dtype=torch.float32, device=parameter.device)  # whatever torch's default is
                optimizer.state[parameter][name] = step if name == "step" else torch.zeros_like(parameter)
