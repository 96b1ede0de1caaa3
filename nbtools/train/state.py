"""TrainState: the complete state of a run. It outlives the loop, so that an interrupt is a pause."""

import copy
import json
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel
from torch.types import Device
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_dumps, treespec_loads

from nbtools.data import Keys, Pack
from nbtools.errors import CheckpointError, TrainError
from nbtools.show import plural
from nbtools.train import device as devices
from nbtools.train.graph import Graphs
from nbtools.train.history import Record
from nbtools.train.meter import Meter
from nbtools.train.optimizer import build_optimizer, build_schedule, follow
from nbtools.train.plan import Plan, list_changes
from nbtools.train.ranks import Ranks, Restarted
from nbtools.train.task import TaskLike, as_task, bind, build, copied

POSITION = ("epoch", "step", "samples", "segments", "lr")  # of a state: where it is
FORM = "form of a list or dict: "
EMULATED = "this GPU only emulates bfloat16, which is slow: set amp=fp16"
T = TypeVar("T")
OTHER_RUN = "for another network choose another run folder, run='runs/…'"


@dataclass
class Best:
    """The best evaluation so far, by the metric that `Task.BEST` names."""

    metric: str | None = None
    value: float | None = None
    loss: float | None = None  # of the validation split then
    stale: int = 0  # evaluations since in which the metric did not improve
    drops: int = 0  # of lr, on a plateau


def order(value: float, loss: float | None, sign: float) -> tuple[float, float]:
    """Return what is greater for the better of two evaluations: by the metric, then by the lower validation loss."""
    return sign * value, -loss if loss is not None and math.isfinite(loss) else -math.inf


class TrainState:
    """Model, optimizer, and where the run is.

    The plan is in three places: `plan`, the wanted one, which may be replaced at any time; `applied`, which model and
    optimizer follow; and the one that is recorded with each checkpoint. ranks: the processes that train it together. It
    opens on any device, as that of a finished run does; `train` and others refuse what the device cannot follow.
    """

    def __init__(self, task: TaskLike, pack: Pack, plan: Plan, device: Device = None, ranks: Ranks | None = None):
        self.plan = self.applied = plan
        self.ranks = ranks or Ranks()
        self.card = as_task(task).part(pack, plan).card
        self.epoch_size: float = self.card.splits["train"]  # samples; a trial of learning rates sets its own
        self.task = bind(task, self.card)
        self.device = device = torch.device(device) if device is not None else devices.pick()
        self.cuda_rng, self.evaluating = None, False
        with devices.untouched(device):
            for seed in (torch.manual_seed, np.random.seed, random.seed):
                seed(plan.seed)  # of the weights, behind which the run's own random numbers begin
            self.model = build(self.task, self.card, plan).to(device)
            self.capture_rng()
        if plan.sync_batchnorm and self.ranks.world > 1:
            self.model = nn.SyncBatchNorm.convert_sync_batchnorm(self.model)
        for weight in [p for p in self.model.parameters() if plan.channels_last and p.dim() == 4]:  # not a Conv3d's
            weight.data = weight.data.contiguous(memory_format=torch.channels_last)
        self.names = {p: name for name, p in self.model.named_parameters() if p.requires_grad}  # of the trained ones
        self.parameters = list(self.names)
        if not self.parameters:
            rule = f"{type(self.model).__name__} has no parameter that requires a gradient"
            raise TrainError(f"{rule}; unfreeze what should be trained, and put a list of layers into nn.ModuleList")
        self.optimizer = build_optimizer(self.task, self.model, plan)
        self.built_in = hasattr(self.optimizer, "built_in")
        if plan.graph and not self.built_in:
            raise TrainError("Plan.graph needs a built-in Plan.optimizer, whose lr a graph reads; set graph=False")
        self.schedule = build_schedule(self.task, plan)
        self.events: list[str] = []  # messages for the next yield
        self.set_precision(plan)
        self.ema = AveragedModel(copied(self.model), self.device, use_buffers=True) if plan.ema else None
        self.evaluated: nn.Module = self.model if self.ema is None else self.ema.module  # what `run.model()` returns
        self.network: Any = self.ranks.wrap(torch.compile(self.model) if plan.compile else self.model)  # for training
        self.epoch = self.step = self.samples = 0
        self.segments: list[list[int]] = []  # [[batch size, batches]] of this epoch
        self.lr = 0.0  # of the last step
        self.best = Best()
        self.micro = plan.micro_batch_size  # samples a forward pass: fewer than the plan's after an out-of-memory
        self.careful_until = self.skipped = 0  # each step before this one is checked before it counts; steps left out
        self.meter = Meter(self.device)
        own = {"warmup_epochs": self.schedule is not None, "weight_decay": not self.built_in}
        for name in (name for name, unused in own.items() if unused and plan.given().get(name)):
            self.events.append(f"Plan.{name} has no effect: the task's own optimizer or schedule decides it")
        if plan.checkpoint_activations and not any(hasattr(layer, "recompute") for layer in self.model.modules()):
            self.events.append("checkpoint_activations by itself acts only on built-in networks")
        self.graphs = Graphs(device, self.events) if plan.graph and device.type in devices.GRAPH_DEVICES else None
        self.keys = Keys(len(pack), self.device)  # of draws
        self.evaluate_next = False  # ask for an evaluation before the next step
        self.improved = False  # whether the last evaluation was the best, and is not saved yet
        self.stopped: str | None = None  # why nothing is left to train before the last epoch

    def set_precision(self, plan: Plan) -> None:
        fp16 = plan.amp == "fp16"  # else the scaler idles; from torch's 65,536 CTC would lose its first 5 to 8 steps
        self.scaler = torch.amp.GradScaler(self.device.type, init_scale=2.0**10, growth_interval=500, enabled=fp16)
        slow = plan.amp == "bf16" and devices.reduced_precision(self.device) == "fp16"
        self.events[:] = [*(each for each in self.events if each != EMULATED), *[EMULATED] * slow]

    @property
    def over(self) -> bool:
        """Return whether nothing is left to train: an epoch that has begun is finished, even if fewer are wanted."""
        return self.stopped is not None or (self.epoch >= self.plan.epochs and not self.segments)

    def record(self, kind: str, values: dict[str, Any] | None = None) -> Record:
        return Record(kind, self.epoch, self.step, self.samples, values or {})

    def begin(self) -> None:
        """Begin the loop: give the other ranks this state, and draw this run's random numbers."""
        if self.ranks.world > 1 and self.ranks.first:
            tensors = {name: tensor.detach().cpu() for name, tensor in self.tensors().items()}
            self.ranks.broadcast(Restarted())
            self.ranks.broadcast((self.applied.to_dict(), tensors, self.facts()))
        self.outside = devices.untouched(self.device)
        self.outside.__enter__()  # the caller's own random numbers go on behind the loop
        self.restore_rng()
        self.meter.watch.start()

    def end(self) -> None:
        """End or pause the loop, without what only steps need: a receipt needs the memory."""
        self.meter.watch.stop()
        self.capture_rng()
        self.optimizer.zero_grad()
        self.forget_graphs()
        self.outside.__exit__(None, None, None)

    def agree(self) -> Self:
        """Return the state, which on several ranks wants what rank 0 does, whose watcher may have changed it at any
        record. Raises TrainError for a plan that this run cannot adopt."""
        try:
            require_change(self, self.plan)
        except TrainError:
            self.plan = self.applied
            raise
        plan = self.plan.to_dict() if self.plan is not self.applied else None
        plan, self.evaluate_next, self.stopped = self.ranks.broadcast((plan, self.evaluate_next, self.stopped))
        if not self.ranks.first:
            self.plan = self.applied if plan is None else type(self.plan)(**plan)
        return self

    def judge(self, values: Mapping[str, Any]) -> None:
        """Decide whether an evaluation is the best so far, and what follows: a plateau, an early stop."""
        metric, sign = self.task.BEST.lstrip("-"), -1.0 if self.task.BEST.startswith("-") else 1.0
        if self.best.metric not in (None, metric):
            self.best = Best(drops=self.best.drops)  # a best value of another metric does not count
        best = self.best
        if f"val_{metric}" not in values:
            named = ", ".join(name.removeprefix("val_") for name in values if name != "eval_time")
            raise TrainError(f"the task's BEST is {metric!r}, but its metrics are {named}; name one of them")
        value, loss = values[f"val_{metric}"], values["val_loss"]
        beaten = best.value is None or order(value, loss, sign) >= order(best.value, best.loss, sign)
        self.improved = math.isfinite(value) and beaten
        best.stale = 0 if self.improved and value != best.value else best.stale + 1  # ties are saved too
        if self.improved:
            best.metric, best.value, best.loss = metric, value, loss
        if self.applied.schedule == "plateau" and best.stale and best.stale % self.applied.patience == 0:
            best.drops += 1
        early = self.plan.early_stop  # the wanted one: one that was just turned off ends nothing
        if early is not None and best.stale >= early:
            self.stopped = f"early stop: {metric} did not improve in {plural(best.stale, 'evaluation')}"

    def forget_graphs(self) -> None:
        if self.graphs is not None:
            self.graphs.clear()

    def capture_rng(self) -> None:
        if self.evaluating:
            return
        self.rng, self.host_rng = torch.get_rng_state(), (random.getstate(), np.random.get_state())
        if self.device.type == "cuda":
            self.cuda_rng = torch.cuda.get_rng_state(self.device)

    def restore_rng(self) -> None:
        torch.set_rng_state(self.rng)
        (version, words, normal), numpys = self.host_rng
        random.setstate((version, tuple(words), normal))
        np.random.set_state(numpys)
        if self.cuda_rng is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(self.cuda_rng, self.device)

    def lost(self) -> bool:
        """Return whether the loss or a weight is no longer finite: not to be saved. Waits for the device."""
        return not bool(torch.stack([torch.isfinite(each).all() for each in (self.meter.loss, *self.parameters)]).all())

    def facts(self) -> dict[str, Any]:
        """Return the plain part of the state, for JSON. Waits for the device."""
        return {
            "position": copy.deepcopy({name: getattr(self, name) for name in POSITION}),  # written while it trains on
            "meter": self.meter.facts(),
            "best": asdict(self.best),
            "recovery": {"micro": self.micro, "careful_until": self.careful_until, "skipped": self.skipped},
            "stopped": self.stopped,
            "scaler": self.scaler.state_dict(),
            "groups": [{k: v for k, v in g.items() if type(v) in (int, float)} for g in self.optimizer.param_groups],
            "optimizer": {name: value for name, value in self.moments().items() if not isinstance(value, Tensor)},
        }

    def tensors(self) -> dict[str, Tensor]:
        """Return its tensors by name: model., ema., optimizer.<parameter>.<name>, and the random states."""
        if self.meter.watch.since is not None:  # its loop runs, and torch's random state is the run's own
            self.capture_rng()
        parts = {"model": self.model.state_dict(), "ema": {} if self.ema is None else self.ema.state_dict()}
        parts["optimizer"] = self.moments()
        named = {f"{part}.{k}": v for part, held in parts.items() for k, v in held.items() if isinstance(v, Tensor)}
        host = json.dumps(self.host_rng, default=np.ndarray.tolist).encode()
        named |= {"rng": self.rng, "host_rng": torch.frombuffer(bytearray(host), dtype=torch.uint8)}
        return named if self.cuda_rng is None else {**named, "cuda_rng": self.cuda_rng}

    def moments(self) -> dict[str, Any]:
        """Return what the optimizer keeps, tensors and plain values: <name of the parameter>.<key>; of a list or dict,
        as SOAP keeps, its form, and as <key>.<n> its values."""
        moments = dict[str, Any]()
        for parameter, name in self.names.items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                moments[f"{name}.{key}"] = value
                if isinstance(value, list | tuple | dict):
                    leaves, form = tree_flatten(value)
                    moments |= {f"{name}.{key}.{n}": leaf for n, leaf in enumerate(leaves)}
                    moments[f"{name}.{key}"] = FORM + treespec_dumps(form)
        return moments

    def load(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Load the saved state. Parameters that were not trained when it was saved start without moments, and an event
        names them. Raises CheckpointError if the weights are of another network."""
        try:
            self.model.load_state_dict(below(tensors, "model."))
            if self.ema is not None:
                self.ema.load_state_dict(below(tensors, "ema."))
        except RuntimeError as error:
            first = [*str(error).splitlines()[1:], str(error)][0].strip().rstrip(". ")
            raise CheckpointError(f"the checkpoint has the weights of another network: {first}; {OTHER_RUN}") from None
        self.load_moments({**below(tensors, "optimizer."), **facts["optimizer"]})
        groups, saved = self.optimizer.param_groups, facts.get("groups", [])
        for group, numbers in zip(groups, saved, strict=True) if len(groups) == len(saved) else ():
            group.update({"lr_scale": numbers["lr_scale"]} if self.built_in else numbers)  # also Prodigy's step size
        vars(self).update(copy.deepcopy(facts["position"]), **facts["recovery"], stopped=facts["stopped"])
        self.best = Best(**facts["best"])
        self.forget_graphs()  # they update the moments that were there
        self.meter.load(facts["meter"], self.step, self.samples)
        if facts["scaler"]:
            self.scaler.load_state_dict(facts["scaler"])
        self.rng, self.cuda_rng = tensors["rng"], tensors.get("cuda_rng", self.cuda_rng)
        self.host_rng = json.loads(bytes(tensors["host_rng"].tolist())) if "host_rng" in tensors else self.host_rng

    def load_moments(self, saved: Mapping[str, Any]) -> None:
        """Give each trained parameter its own moments, leave out others. Raises CheckpointError for other shapes."""
        optimizer, states, fresh = self.optimizer, dict[int, dict[str, Any]](), list[str]()
        for place, parameter in enumerate(p for group in optimizer.param_groups for p in group["params"]):
            name = self.names[parameter]
            states[place] = {key: copy.deepcopy(value) for key, value in below(saved, f"{name}.").items()}
            for key, value in states[place].items():
                if key != "step" and isinstance(value, Tensor) and value.shape == parameter.shape:
                    states[place][key] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)  # in its layout
                elif isinstance(value, Tensor) and value.dim() and self.built_in:
                    shapes = f"{tuple(value.shape)}, but the parameter has {tuple(parameter.shape)}"
                    raise CheckpointError(f"the optimizer state of {name} has the shape {shapes}; {OTHER_RUN}")
            for key, value in [*states[place].items()]:
                if isinstance(value, str) and value.startswith(FORM):
                    form = treespec_loads(value.removeprefix(FORM))
                    leaves = [states[place].pop(f"{key}.{n}") for n in range(form.num_leaves)]
                    states[place][key] = tree_unflatten(leaves, form)
            fresh += [] if states[place] else [name]
        optimizer.load_state_dict({**optimizer.state_dict(), "state": states})
        follow(optimizer, self.applied)
        if fresh and saved:
            more = f" and {len(fresh) - 3} more" if len(fresh) > 3 else ""
            self.events.append(f"newly trained, without saved optimizer state: {', '.join(fresh[:3])}{more}")


def below(values: Mapping[str, T], prefix: str) -> dict[str, T]:
    """Return the values whose names have this prefix, by the rest of their names."""
    return {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}


def require_change(state: TrainState, new: Plan) -> None:
    if new is state.applied:
        return
    new.refuse_fixed(state.applied)
    differing = new.changes_from(state.applied)
    idle: dict[str, str] = {} if state.built_in else dict.fromkeys(("weight_decay", "betas", "eps"), "optimizer")
    idle |= {} if state.schedule is None else dict.fromkeys(("schedule", "warmup_epochs"), "schedule")
    for name in idle.keys() & differing.keys():
        rule = f"Plan.{name} has no effect on the task's own {idle[name]}, got {differing[name]}"
        raise TrainError(f"{rule}; set it where the {idle[name]} is made, in another run")
    devices.require(new, state.device)
    new.require_batch(state.card.splits["train"])


def adopt(state: TrainState, new: Plan) -> None:
    differing = new.changes_from(state.applied)
    if differing.keys() & {"micro_batch_size", "batch_size"}:
        state.micro = new.micro_batch_size
    if "amp" in differing:
        state.set_precision(new)
    state.forget_graphs()  # which compute by the plan of before
    follow(state.optimizer, new)
    state.applied = new


def change(state: TrainState, new: Plan) -> Iterator[Record]:
    """Yield a row of what a plan changes, before it is adopted: a watcher may save by the old one."""
    if differing := new.changes_from(state.applied):
        yield state.record("change", {"what": list_changes(differing)})
    adopt(state, new)
