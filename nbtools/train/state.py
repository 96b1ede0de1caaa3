"""TrainState: all that a run is at one moment. It outlives the loop, so that an interrupt is a pause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from nbtools.data import Card, Pack
from nbtools.errors import CheckpointError, TrainError
from nbtools.table import plural
from nbtools.train import device as devices
from nbtools.train.optimizer import allocate, build_optimizer, parameter_groups
from nbtools.train.plan import Plan
from nbtools.train.task import TaskLike, as_task, task_name


@dataclass
class Position:
    """Where a run is. epoch, step, samples: done; skipped: those of the samples whose step fp16 left out; segments:
    [[batch size, batches done]] of this epoch; lr: of the last step."""

    epoch: int = 0
    step: int = 0
    samples: int = 0
    skipped: int = 0
    segments: list[list[int]] = field(default_factory=list)
    lr: float = 0.0


@dataclass
class EpochSums:
    """This epoch so far. loss, count: sums on the device, and logged: their values at the last log step; seconds: of
    training, and waited: the part of them that waited for data."""

    loss: Tensor
    count: Tensor | float = 0
    logged: tuple[float, float] = (0.0, 0.0)
    seconds: float = 0.0
    waited: float = 0.0


@dataclass
class Best:
    """value: the best one of the metric that `best_metric` names; stale: evaluations since; drops: of a plateau."""

    value: float | None = None
    stale: int = 0
    drops: int = 0


@dataclass
class Recovery:
    """micro: samples a forward pass, fewer than the plan's after an out-of-memory; careful_until: the step up to which
    each one is checked before it counts, on the way again through steps that lost the loss; refused: steps left out."""

    micro: int | None = None
    careful_until: int = 0
    refused: int = 0


class TrainState:
    """Model, optimizer, and where the run is. Replace `plan` at any time; `applied` is the one that model and optimizer
    follow so far.

    stopped: why nothing is left to train before the last epoch. improved: whether the last evaluation was the best, and
    is not saved yet. events: what there is to tell at the next yield. evaluate_next: ask for an evaluation before the
    next step. proven: (plan, elements of the largest raw batch that fit into memory under it).
    """

    def __init__(self, task: TaskLike, pack: Pack | Card, plan: Plan, device: torch.device | str | None = None):
        self.task, self.plan, self.applied = as_task(task), plan, plan
        self.card = pack.card if isinstance(pack, Pack) else pack
        self.device = torch.device(device) if device is not None else devices.pick()
        devices.require(plan, self.device)
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(plan.seed)
            self.model = model = self.task.model(self.card, plan).to(self.device)
            self.cuda_rng: Tensor | None = None
            self.capture_rng()
        if plan.channels_last:
            model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  (torch's stub lacks it)
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if not self.parameters:
            raise TrainError(
                f"{type(model).__name__} has no parameter that requires a gradient; unfreeze what is to learn"
            )
        self.optimizer = build_optimizer(parameter_groups(model, self.task.groups(model, plan)), plan)
        self.scaler = torch.amp.GradScaler(self.device.type) if plan.amp == "fp16" else None
        self.ema = AveragedModel(model, use_buffers=True) if plan.ema else None  # the step updates it, see step.average
        self.network: Any = model  # what the training forward calls
        if plan.compile or plan.graph:
            self.network = torch.compile(model, mode="reduce-overhead" if plan.graph else None)
        self.position, self.best = Position(), Best()
        self.sums = EpochSums(torch.zeros((), dtype=devices.sum_dtype(self.device), device=self.device))
        self.recovery = Recovery(plan.micro_batch_size)
        self.proven: tuple[Plan | None, int] = None, 0
        self.stopped: str | None = None
        self.training = self.improved = self.evaluate_next = False
        self.events: list[str] = []

    def __repr__(self) -> str:
        done = f"{self.epoch:,} of {plural(self.plan.epochs, 'epoch')}"
        return f"TrainState of {task_name(self.task)}: {plural(self.step, 'step')}, {done} done, on {self.device}"

    @property
    def epoch(self) -> int:
        return self.position.epoch

    @property
    def step(self) -> int:
        return self.position.step

    @property
    def samples(self) -> int:
        return self.position.samples

    @property
    def over(self) -> bool:
        """Whether there is nothing left to train: an epoch that has begun is finished, even if fewer were requested."""
        return self.stopped is not None or (self.epoch >= self.plan.epochs and not self.position.segments)

    @property
    def evaluated(self) -> nn.Module:
        """The weights that evaluation and `run.model()` use: the moving average where the plan keeps one."""
        return self.ema.module if self.ema is not None else self.model

    def lost(self) -> bool:
        """Whether the loss or a weight is no longer a number: not to be saved. Waits for the device."""
        weights = [torch.linalg.vector_norm(p.detach(), dtype=torch.float32) for p in self.parameters]
        return not bool(torch.isfinite(torch.stack([self.sums.loss.to(torch.float32), *weights])).all())

    def take_parts(self, micro: int | None) -> None:
        """Set the samples of a forward pass, without CUDA graphs where that makes parts of a batch: the replay of a
        part overwrites the gradients of the part before, and neither clones nor marked steps prevent it
        (pytorch#169545)."""
        self.recovery.micro = micro
        if micro is not None and micro < self.plan.batch_size and self.plan.graph and self.network is not self.model:
            self.network = self.model
            torch.compiler.reset()  # else the graphs keep their memory; anything else compiled is compiled again
            self.events.append(
                "graph off: CUDA graphs need the whole batch in one forward pass; the model runs eagerly"
            )

    def facts(self) -> dict[str, Any]:
        """The plain part of the state, for JSON. Waits for the device."""
        loss, count = float(self.sums.loss), float(self.sums.count)
        return {
            "position": asdict(self.position),
            "sums": {**vars(self.sums), "loss": loss, "count": count},
            "best": asdict(self.best),
            "recovery": asdict(self.recovery),
            "stopped": self.stopped,
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
        }

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the state by name: model., ema., optimizer.<parameter>.<name>, and the random states."""
        if self.training:
            self.capture_rng()
        named = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        if self.ema is not None:
            named |= {f"ema.{k}": v for k, v in self.ema.state_dict().items()}
        for i, parameter in enumerate(self.parameters):
            kept = self.optimizer.state.get(parameter, {})
            named |= {f"optimizer.{i}.{k}": v for k, v in kept.items() if v is not None}
        named["rng"] = self.rng
        return named if self.cuda_rng is None else {**named, "cuda_rng": self.cuda_rng}

    def load(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Become the saved state. Raises CheckpointError where the weights are of another model."""
        load_module(self.model, tensors, "model.")
        if self.ema is not None:
            load_module(self.ema, tensors, "ema.")
        self.optimizer.state.clear()
        for i, parameter in enumerate(self.parameters):
            if saved := below(tensors, f"optimizer.{i}."):
                self.optimizer.state[parameter] = {k: like(v, parameter) for k, v in saved.items()}
        allocate(self.optimizer, self.applied)
        facts = facts if "position" in facts else regrouped(tensors, facts)
        self.position, self.best = Position(**facts["position"]), Best(**facts["best"])
        self.recovery, self.stopped = Recovery(**facts["recovery"]), facts["stopped"]
        self.take_parts(self.recovery.micro)
        loss, count, logged, *times = (facts["sums"][name] for name in ("loss", "count", "logged", "seconds", "waited"))
        count = int(count) if float(count).is_integer() else count  # a float plus an int64 tensor is a float32
        self.sums = EpochSums(self.sums.loss.fill_(loss), count, (logged[0], logged[1]), *times)
        if self.scaler is not None and facts["scaler"]:
            self.scaler.load_state_dict(facts["scaler"])
        self.rng, self.cuda_rng = tensors["rng"], tensors.get("cuda_rng", self.cuda_rng)

    def capture_rng(self) -> None:
        """Take over torch's random state, which is the run's own only while its loop runs."""
        self.rng = torch.get_rng_state()
        if self.device.type == "cuda":
            self.cuda_rng = torch.cuda.get_rng_state(self.device)

    def restore_rng(self) -> None:
        self.training = True
        torch.set_rng_state(self.rng)
        if self.cuda_rng is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(self.cuda_rng, self.device)


def regrouped(tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> dict[str, Any]:
    """What versions before 0.2 saved side by side, and the sum of the loss as a tensor."""

    def take(*names: str) -> dict[str, Any]:
        return {name: facts[name] for name in names}

    return {
        "position": take("epoch", "step", "samples", "skipped", "segments", "lr"),
        "sums": {"loss": float(tensors["loss_sum"]), **take("count", "logged", "seconds", "waited")},
        "best": {"value": facts["best"], **take("stale", "drops")},
        "recovery": take("micro", "careful_until", "refused"),
        **take("stopped", "scaler"),
    }


def like(saved: Tensor, parameter: Tensor) -> Tensor:
    """An optimizer tensor on the parameter's device, in its memory format where it has its shape."""
    if saved.shape == parameter.shape and saved.dim():
        return torch.empty_like(parameter, dtype=saved.dtype).copy_(saved)
    return saved.to(parameter.device)


def below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names begin so, by the rest of their names."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}


def load_module(module: nn.Module, tensors: Mapping[str, Tensor], prefix: str) -> None:
    try:
        module.load_state_dict(below(tensors, prefix))
    except RuntimeError as error:
        raise CheckpointError(f"the weights are of another model: {error}; use the run's own task and plan") from None
