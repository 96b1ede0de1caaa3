"""TrainState, all that a run is at one moment: it outlives the loop, so that an interrupt is a pause."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from nbtools.data import Card, Pack
from nbtools.errors import CheckpointError, TrainError
from nbtools.table import plural
from nbtools.train import device as devices
from nbtools.train.plan import Plan
from nbtools.train.task import Task, TaskLike, as_task, task_name

FIXED = ("optimizer", "compile", "graph", "channels_last", "checkpoint_activations", "deterministic", "ema", "seed")
"""Knobs that a started run keeps, beside all that its task adds; the others may change while it trains."""

FACTS = (
    *("epoch", "step", "samples", "skipped", "segments", "micro", "best", "stale", "drops", "stopped"),
    *("seconds", "waited", "lr", "careful_until", "refused"),
)
"""The plain attributes of a TrainState that a checkpoint carries."""


class TrainState:
    """Model, optimizer, and the position in the run. `plan` may be replaced at any time; `applied` is the one that
    model and optimizer follow so far.

    segments: [[batch size, batches done]] of this epoch. samples: seen since the start; skipped: those of them whose
    step fp16 refused. best: of the metric that `best_metric` names; stale: evaluations since; drops: of a plateau.
    loss_sum, count: this epoch's so far, on the device; logged: them at the last log step. seconds, waited: training
    time of this epoch, and the part of it that waited for data. lr: of the last step. events: what there is to tell
    at the next yield. evaluate_next: ask for an evaluation before the next step. proven: (plan, elements of the largest
    raw batch that fit into memory under it).
    """

    def __init__(self, task: TaskLike, pack: Pack | Card, plan: Plan, device: torch.device | str | None = None):
        self.task, self.plan, self.applied = as_task(task), plan, plan
        self.card = pack.card if isinstance(pack, Pack) else pack
        self.device = torch.device(device) if device is not None else devices.pick()
        devices.require(plan, self.device)
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(plan.seed)
            model = self.task.model(self.card, plan).to(self.device)
            self.rng = torch.get_rng_state()
            self.cuda_rng = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        self.model = model
        if plan.channels_last:
            model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  (torch's stub lacks it)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if not self.parameters:
            raise TrainError(
                f"{type(model).__name__} has no parameter that requires a gradient; unfreeze what is to learn"
            )
        self.optimizer = build_optimizer(grouped(self.task, model, plan), plan)
        self.scaler = torch.amp.GradScaler(self.device.type) if plan.amp == "fp16" else None
        self.ema = AveragedModel(model, use_buffers=True) if plan.ema else None  # the step updates it, see step.average
        self.network = compiled(model, plan)
        self.micro = plan.micro_batch_size
        self.proven: tuple[Plan | None, int] = None, 0
        self.epoch = self.step = self.samples = self.skipped = 0
        self.segments: list[list[int]] = []
        self.best: float | None = None
        self.stale = self.drops = 0
        self.stopped: str | None = None
        self.seconds = self.waited = self.lr = 0.0
        self.loss_sum = torch.zeros(
            (), dtype=torch.float32 if self.device.type == "mps" else torch.float64, device=self.device
        )
        self.count: Tensor | float = 0
        self.logged = (0.0, 0.0)
        self.careful_until = self.refused = 0
        self.improved = False
        self.training = False
        self.events: list[str] = []
        self.evaluate_next = False

    def __repr__(self) -> str:
        done = f"{self.epoch:,} of {plural(self.plan.epochs, 'epoch')}"
        return f"TrainState of {task_name(self.task)}: {plural(self.step, 'step')}, {done} done, on {self.device}"

    @property
    def over(self) -> bool:
        """Whether there is nothing left to train: an epoch that has begun is finished, even if fewer were requested."""
        return self.stopped is not None or (self.epoch >= self.plan.epochs and not self.segments)

    @property
    def careful(self) -> bool:
        """Whether every step is checked before it counts: on the way again through steps that lost the loss."""
        return self.step < self.careful_until

    @property
    def evaluated(self) -> nn.Module:
        """The weights that evaluation and `run.model()` use: the moving average where the plan keeps one."""
        return self.ema.module if self.ema is not None else self.model

    def take_parts(self, micro: int | None) -> None:
        """Set the samples of a forward pass, without CUDA graphs where that makes parts of a batch: the replay of a
        part overwrites the gradients of the part before, and neither clones nor marked steps prevent it
        (pytorch#169545)."""
        self.micro = micro
        if micro is not None and micro < self.plan.batch_size and self.plan.graph and self.network is not self.model:
            self.network = self.model
            torch.compiler.reset()  # else the graphs keep their memory; anything else compiled is compiled again
            self.events.append(
                "graph off: CUDA graphs need the whole batch in one forward pass; the model runs eagerly"
            )

    def lost(self) -> bool:
        """Whether the loss or a weight is no longer a number: not to be saved. Waits for the device."""
        weights = [torch.linalg.vector_norm(p.detach(), dtype=torch.float32) for p in self.parameters]
        return not bool(torch.isfinite(torch.stack([self.loss_sum.to(torch.float32), *weights])).all())

    def facts(self) -> dict[str, Any]:
        """The plain part of the state, for JSON."""
        return {
            **{name: getattr(self, name) for name in FACTS},
            "count": float(self.count),
            "logged": list(self.logged),
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
        }

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the state by name: model., ema., optimizer.<parameter>.<name>, sums and random states."""
        if self.training:
            self.capture_rng()
        found = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        if self.ema is not None:
            found |= {f"ema.{k}": v for k, v in self.ema.state_dict().items()}
        for i, parameter in enumerate(self.parameters):
            found |= {
                f"optimizer.{i}.{k}": v for k, v in self.optimizer.state.get(parameter, {}).items() if v is not None
            }
        found |= {"loss_sum": self.loss_sum, "rng": self.rng}
        return found if self.cuda_rng is None else {**found, "cuda_rng": self.cuda_rng}

    def load(self, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
        """Become the saved state. Raises CheckpointError where the weights are of another model."""
        load_module(self.model, tensors, "model.")
        if self.ema is not None:
            load_module(self.ema, tensors, "ema.")
        self.optimizer.state.clear()
        for i, parameter in enumerate(self.parameters):
            prefix = f"optimizer.{i}."
            saved = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
            if saved:
                self.optimizer.state[parameter] = {k: like(v, parameter) for k, v in saved.items()}
        at_rest(self.optimizer)
        for name in FACTS:
            setattr(self, name, facts[name])
        self.take_parts(self.micro)
        count = facts["count"]
        self.count = int(count) if float(count).is_integer() else count  # a float plus an int64 tensor is a float32
        self.logged = (facts["logged"][0], facts["logged"][1])
        if self.scaler is not None and facts["scaler"]:
            self.scaler.load_state_dict(facts["scaler"])
        self.loss_sum.copy_(tensors["loss_sum"])
        self.rng, self.cuda_rng = tensors["rng"], tensors.get("cuda_rng", self.cuda_rng)

    def capture_rng(self) -> None:
        """Take over torch's random state, which is the run's own only while its loop runs."""
        self.rng = torch.get_rng_state()
        if self.device.type == "cuda":
            self.cuda_rng = torch.cuda.get_rng_state(self.device)

    def restore_rng(self) -> None:
        self.training = True
        torch.set_rng_state(self.rng)
        if self.device.type == "cuda" and self.cuda_rng is not None:
            torch.cuda.set_rng_state(self.cuda_rng, self.device)


def like(saved: Tensor, parameter: Tensor) -> Tensor:
    """An optimizer tensor on the parameter's device, in its memory format where it has its shape."""
    if saved.shape == parameter.shape and saved.dim():
        return torch.empty_like(parameter, dtype=saved.dtype).copy_(saved)
    return saved.to(parameter.device)


def load_module(module: nn.Module, tensors: dict[str, Tensor], prefix: str) -> None:
    saved = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    try:
        module.load_state_dict(saved)
    except RuntimeError as error:
        raise CheckpointError(f"the weights are of another model: {error}; use the run's own task and plan") from None


def grouped(task: Task, model: nn.Module, plan: Plan) -> list[dict[str, Any]]:
    """The task's parameter groups. Raises TrainError unless each that learns is in just one."""
    learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [{**group, "params": list(group["params"])} for group in task.groups(model, plan)]
    placed = Counter(id(p) for group in groups for p in group["params"])
    for name, parameter in learning.items():
        if placed.pop(id(parameter), 0) != 1:
            raise TrainError(f"{name} must be in just one of the groups of the task; correct its groups(model, plan)")
    if placed:
        raise TrainError(
            f"{plural(len(placed), 'parameter')} of the task's groups(model, plan) do not learn; leave them out"
        )
    for group in groups:
        group.setdefault("lr_scale", 1.0)
        group.setdefault("decays", True)
        group.update({} if group["decays"] else {"weight_decay": 0.0})
    return groups


def build_optimizer(parameters: list[Any], plan: Plan) -> torch.optim.Optimizer:
    """The fused form: 4 kernels a step and group instead of hundreds. parameters, or groups of them."""
    if plan.optimizer == "sgd":
        return at_rest(torch.optim.SGD(parameters, plan.lr, plan.betas[0], weight_decay=plan.weight_decay, fused=True))
    kind = torch.optim.AdamW if plan.optimizer == "adamw" else torch.optim.Adam
    return at_rest(kind(parameters, plan.lr, betas=plan.betas, weight_decay=plan.weight_decay, fused=True))


def at_rest(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer with all that it keeps for each parameter, at 0, which torch makes in the first step only. There
    memory could run out between two of these tensors, or after another group of parameters was updated; with these made
    in advance an update allocates nothing. Besides, fused SGD leaves its momentum uninitialised, and keeps what the
    memory happened to hold where the first step overflows in fp16 (torch 2.13)."""
    sgd = isinstance(optimizer, torch.optim.SGD)
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        kept = optimizer.state[parameter]
        if not sgd:
            kept.setdefault("step", torch.zeros((), device=parameter.device))
        for name in ("momentum_buffer",) if sgd else ("exp_avg", "exp_avg_sq"):
            if name not in kept:
                kept[name] = torch.zeros_like(parameter)
    return optimizer


def compiled(model: nn.Module, plan: Plan) -> Any:
    """What the training forward calls; the raw module is what is saved (`_orig_mod.` would break checkpoints)."""
    if not (plan.compile or plan.graph):
        return model
    return torch.compile(model, mode="reduce-overhead" if plan.graph else None)
