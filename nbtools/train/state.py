"""TrainState: the complete state of a run. It outlives the loop, so that an interrupt is a pause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import reduce
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from nbtools.data import Card, Keys, Pack
from nbtools.errors import CheckpointError, TrainError
from nbtools.show import plural
from nbtools.train import device as devices
from nbtools.train.graph import Graphs
from nbtools.train.history import Record
from nbtools.train.network import build
from nbtools.train.optimizer import allocate, build_optimizer, parameter_groups
from nbtools.train.plan import Plan
from nbtools.train.ranks import Ranks, Restarted
from nbtools.train.task import TaskLike, bound, readable, spoken


@dataclass
class Position:
    """The position of a run."""

    epoch: int = 0
    step: int = 0
    samples: int = 0
    skipped: int = 0  # of the samples: those whose step fp16 skipped
    segments: list[list[int]] = field(default_factory=list)  # [[batch size, batches]] of this epoch
    lr: float = 0.0  # of the last step


@dataclass
class EpochSums:
    """Sums over this epoch so far."""

    loss: Tensor  # (), on the device
    count: Tensor | float = 0
    logged: tuple[float, float] = (0.0, 0.0)  # loss and count at the last log step
    seconds: float = 0.0  # of training
    waited: float = 0.0  # of these, for data

    @property
    def times(self) -> tuple[float, float]:
        return self.seconds, self.waited

    def add(self, lap: devices.Lap) -> tuple[float, float]:
        """Count the times of a lap, and return them."""
        seconds, waited = lap.seconds()
        self.seconds, self.waited = self.seconds + seconds, self.waited + waited
        return seconds, waited


@dataclass(frozen=True)
class Log:
    """A log step whose loss is still on its way to the host."""

    record: Record  # without the loss and the speed
    since: int  # the log step before
    samples: int  # since then
    lap: devices.Lap  # the steps since then


@dataclass
class Best:
    """The best evaluation so far, by the metric that `best_metric` names."""

    metric: str | None = None
    value: float | None = None
    loss: float | None = None  # of the validation split then
    stale: int = 0  # evaluations since in which the metric did not improve
    drops: int = 0  # of lr, on a plateau


@dataclass
class Recovery:
    """What failed steps left behind."""

    micro: int | None = None  # samples a forward pass: fewer than the plan's after an out-of-memory
    careful_until: int = 0  # each step before this one is checked before it counts
    refused: int = 0  # steps left out


@dataclass(frozen=True)
class Wanted:
    """What the caller of the loop asks for: a plan, an evaluation before the next step, an end and why."""

    plan: Plan
    evaluate: bool
    stopped: str | None


class TrainState:
    """Model, optimizer, and where the run is. Replace `plan` at any time; `applied` is the one that model and optimizer
    follow so far. ranks: the processes that train it together, from `join`."""

    def __init__(
        self,
        task: TaskLike,
        pack: Pack | Card,
        plan: Plan,
        device: torch.device | str | None = None,
        ranks: Ranks | None = None,
    ):
        self.plan, self.applied, self.ranks = plan, plan, ranks
        self.card = readable(task, pack, plan).card if isinstance(pack, Pack) else pack
        self.task = bound(task, self.card)
        self.device = torch.device(device) if device is not None else devices.pick()
        devices.require(plan, self.device, ranks.world if ranks is not None else 1)
        with torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []):
            torch.manual_seed(plan.seed)
            self.model = model = build(self.task, self.card, plan).to(self.device)
            self.cuda_rng: Tensor | None = None
            self.capture_rng()
        if plan.sync_batchnorm and ranks is not None:
            self.model = model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        if plan.channels_last:
            model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  (torch's stub lacks it)
        self.names = {p: name for name, p in model.named_parameters() if p.requires_grad}  # of the trained parameters
        self.parameters = list(self.names)
        if not self.parameters:
            name = type(model).__name__
            raise TrainError(f"{name} has no parameter that requires a gradient; unfreeze what should be trained")
        groups = parameter_groups(model, self.task.groups(model, plan))
        self.optimizer = build_optimizer(groups, plan)
        self.scaler = torch.amp.GradScaler(self.device.type) if plan.amp == "fp16" else None
        self.ema = AveragedModel(model, use_buffers=True) if plan.ema else None  # the step updates it, see step.average
        self.averaged = [*zip(self.ema.module.modules(), model.modules(), strict=True)] if self.ema is not None else []
        self.network: Any = model  # what the training forward calls
        if plan.compile:
            self.network = torch.compile(model)
        if ranks is not None:
            self.network = ranks.wrap(self.network)
        self.position, self.best = Position(), Best()
        self.sums = EpochSums(torch.zeros((), dtype=devices.sum_dtype(self.device), device=self.device))
        self.log: Log | None = None  # the last log step, until its row is yielded
        self.watch = devices.Stopwatch(self.device)
        self.logged = devices.Reading(2, self.device)  # its sums of loss and count in this epoch
        self.unsure = 0  # samples of the last step, if fp16 may have skipped it
        self.scales = devices.Reading(2, self.device)  # the scaler's, before and after that step
        self.scale = inf  # the last of them that is known
        self.copies: dict[str, Tensor] = {}  # host memory that its checkpoints are copied to, see checkpoint.copies
        self.recovery = Recovery(plan.micro_batch_size)
        self.proven: tuple[Plan | None, int] = None, 0  # elements of the largest raw batch that fit under this plan
        self.training = False  # whether torch's random state is the run's own, as it is while its loop runs
        self.evaluate_next = False  # ask for an evaluation before the next step
        self.improved = False  # whether the last evaluation was the best, and is not saved yet
        self.stopped: str | None = None  # why nothing is left to train before the last epoch
        self.events: list[str] = []  # messages for the next yield
        self.graphs = Graphs(self.device, self.events) if plan.graph else None
        self.keys = Keys(0, self.device)  # of draws
        self.know(len(pack) if isinstance(pack, Pack) else sum(pack.splits.values()))

    def __repr__(self) -> str:
        done = f"{self.epoch:,} of {plural(self.plan.epochs, 'epoch')}"
        return f"TrainState of {spoken(self.task)}: {plural(self.step, 'step')}, {done} done, on {self.device}"

    def know(self, samples: int) -> None:
        """Have the keys of so many samples: a pack of which a part is read has more than its card tells."""
        if samples > len(self.keys.table):
            self.keys = Keys(samples, self.device)
            if self.graphs is not None:
                self.graphs.clear()  # which read those of before

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
    def skipped(self) -> int:
        """Of the samples, those whose step fp16 skipped. Waits for the last step, though not for the pass that follows
        it: a step asks for this once its own gradients are on their way."""
        if self.unsure:
            before, self.scale = self.scales.values()
            self.position.skipped += self.unsure * (self.scale < before)  # the only sign of a skipped step
            self.unsure = 0
        return self.position.skipped

    @property
    def over(self) -> bool:
        """Whether there is nothing left to train: an epoch that has begun is finished, even if fewer were requested."""
        return self.over_as(self.wanted)

    def over_as(self, wanted: Wanted) -> bool:
        return wanted.stopped is not None or (self.epoch >= wanted.plan.epochs and not self.position.segments)

    @property
    def wanted(self) -> Wanted:
        """What is asked for at this moment; each attribute is read once, since another thread may replace it."""
        return Wanted(self.plan, self.evaluate_next, self.stopped)

    @property
    def evaluated(self) -> nn.Module:
        """The weights that evaluation and `run.model()` use: the moving average where the plan keeps one."""
        return self.ema.module if self.ema is not None else self.model

    def called(self) -> bool:
        """Whether something is to be done before the next step: on several ranks, whether rank 0 wants it."""
        wanted = self.plan is not self.applied or self.evaluate_next
        return wanted if self.ranks is None else self.ranks.tell(wanted)

    @torch.no_grad()
    def lost(self) -> bool:
        """Whether the loss or a weight is no longer a number: not to be saved. Waits for the device."""
        wide = reduce(torch.promote_types, {p.dtype for p in self.parameters}, torch.float32)
        parameters: Any = self.parameters

        def finite() -> bool:
            norms = torch._foreach_norm(parameters, 2, dtype=wide)  # pyright: ignore[reportPrivateImportUsage]
            return bool(torch.isfinite(torch.stack([self.sums.loss.to(wide), *norms])).all())

        return not devices.required(finite, "checking the weights")

    def facts(self) -> dict[str, Any]:
        """The plain part of the state, for JSON. Waits for the device."""
        log, _, loss = self.log, self.skipped, float(self.sums.loss)
        seconds, waited = (now + more for now, more in zip(self.sums.times, self.watch.peek(), strict=True))
        return {
            "position": asdict(self.position),
            "log": log
            and {
                "record": asdict(log.record),
                "since": log.since,
                "samples": log.samples,
                "lap": log.lap.seconds(),
                "sums": self.logged.values(),
            },
            "sums": {
                **vars(self.sums),
                "loss": loss,
                "count": float(self.sums.count),
                "seconds": seconds,
                "waited": waited,
            },
            "wall": self.watch.wall,
            "best": asdict(self.best),
            "recovery": asdict(self.recovery),
            "stopped": self.stopped,
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
        }

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by name: model., ema., optimizer.<parameter>.<name>, and the random states."""
        if self.training:
            self.capture_rng()
        named = {f"model.{k}": v for k, v in self.model.state_dict().items()}
        if self.ema is not None:
            named |= {f"ema.{k}": v for k, v in self.ema.state_dict().items()}
        named |= {**self.moments(), "rng": self.rng}
        return named if self.cuda_rng is None else {**named, "cuda_rng": self.cuda_rng}

    def moments(self) -> dict[str, Tensor]:
        """What the optimizer keeps: optimizer.<name of the parameter>.<key>."""
        kept = self.optimizer.state
        pairs = ((name, kept.get(parameter, {})) for parameter, name in self.names.items())
        return {f"optimizer.{name}.{key}": v for name, each in pairs for key, v in each.items() if v is not None}

    def spread(self) -> None:
        """Rank 0: give the others this state, where they begin."""
        assert self.ranks is not None
        tensors = {name: tensor.detach().cpu() for name, tensor in self.tensors().items()}
        self.ranks.tell(Restarted(self.applied.to_dict(), self.facts(), tensors))

    def load(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Load the saved state. Parameters that were not trained when it was saved start without moments, and an event
        names them. Raises CheckpointError if the weights are of another network."""
        try:
            self.model.load_state_dict(below(tensors, "model."))
            if self.ema is not None:
                self.ema.load_state_dict(below(tensors, "ema."))
        except RuntimeError as error:
            [came, *others] = str(error).splitlines()[1:] or [str(error)]
            more = f" (and {len(others)} more)" if others else ""
            raise CheckpointError(
                f"the checkpoint has the weights of another network: {came.strip().rstrip('. ')}{more}; for another "
                "network choose another run folder, run='runs/…', or use the run's own task and plan"
            ) from None
        self.load_moments(below(tensors, "optimizer."))
        self.position, self.best = Position(**facts["position"]), Best(**facts["best"])
        self.recovery, self.stopped = Recovery(**facts["recovery"]), facts["stopped"]
        if self.graphs is not None:
            self.graphs.clear()  # they update the moments that were there
        self.unsure, self.scale, self.log = 0, inf, None
        self.watch.spans, self.watch.before = [], max(self.watch.before, facts.get("wall", 0.0))  # time never goes back
        if log := facts.get("log"):
            lap = devices.Lap(None, [], tuple(log["lap"]))
            self.log = Log(Record(**log["record"]), log["since"], log["samples"], lap)
            devices.put(self.logged.tensor, *log["sums"])
            self.logged.send()
        self.sums = EpochSums(**{**facts["sums"], "loss": self.sums.loss.fill_(facts["sums"]["loss"])})
        if float(self.sums.count).is_integer():
            self.sums.count = int(self.sums.count)  # a float plus an int64 tensor is a float32
        if self.scaler is not None and facts["scaler"]:
            self.scaler.load_state_dict(facts["scaler"])
        self.rng, self.cuda_rng = tensors["rng"], tensors.get("cuda_rng", self.cuda_rng)

    def load_moments(self, saved: Mapping[str, Tensor]) -> None:
        """Give each trained parameter its own moments. Those of parameters that are no longer trained are left out."""
        optimizer, fresh = self.optimizer, []
        moments: dict[str, dict[str, Tensor]] = {}
        for full, tensor in saved.items():
            name, _, key = full.rpartition(".")
            moments.setdefault(name, {})[key] = tensor
        ours = {parameter for group in optimizer.param_groups for parameter in group["params"]}
        optimizer.state.clear()
        for parameter, name in self.names.items():
            kept = moments.get(name, {})
            if odd := [v for v in kept.values() if v.dim() and v.shape != parameter.shape]:
                shapes = f"{tuple(odd[0].shape)}, but the parameter has {tuple(parameter.shape)}"
                rule = f"the checkpoint's optimizer state of {name} has the shape {shapes}"
                raise CheckpointError(f"{rule}; for another network choose another run folder, run='runs/…'")
            if parameter in ours and kept:
                optimizer.state[parameter].update({key: like(v, parameter) for key, v in kept.items()})
            if not kept:
                fresh.append(name)
        allocate(optimizer, self.applied)
        if fresh and saved:
            more = f" and {len(fresh) - 3} more" if len(fresh) > 3 else ""
            self.events.append(f"newly trained, without moments from the checkpoint: {', '.join(fresh[:3])}{more}")

    def capture_rng(self) -> None:
        self.rng = torch.get_rng_state()
        if self.device.type == "cuda":
            self.cuda_rng = torch.cuda.get_rng_state(self.device)

    def restore_rng(self) -> None:
        self.training = True
        torch.set_rng_state(self.rng)
        if self.cuda_rng is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(self.cuda_rng, self.device)


def like(saved: Tensor, parameter: Tensor) -> Tensor:
    """An optimizer tensor on the parameter's device, in its memory format where it has its shape."""
    if saved.shape == parameter.shape and saved.dim():
        return torch.empty_like(parameter, dtype=saved.dtype).copy_(saved)
    return saved.to(parameter.device)


def below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors whose names have this prefix, by the rest of their names."""
    return {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
