"""Plan: every training setting in one frozen value, checked when it is made; lr as a function of it; what a run may
change. A task adds settings by subclassing it with `knob(...)` fields, which panel and terminal read."""

import dataclasses
import difflib
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, Self, get_args, get_origin, get_type_hints

from nbtools.data import Pack, batches_in
from nbtools.errors import NbtoolsError, PlanError, TrainError
from nbtools.show import plural, shown
from nbtools.train.optimizer import OPTIMIZERS

FIXED = ("optimizer", "compile", "channels_last", "sync_batchnorm", "deterministic", "ema", "seed")
"""Settings that a started run cannot change, with all that its task adds; the others may change while it trains."""
AT_START = ("feed", "workers", "prefetch", "checkpoint_activations", "graph")
"""Settings that may change when a run is resumed, not while it trains."""
ADVISED = {"lr", "batch_size"}  # what advice chooses where a call gives neither
LR_FACTORS: dict[str, Callable[[float], float]] = {"none": lambda k: 1.0, "sqrt": math.sqrt, "linear": lambda k: k}
"""The choices of `lr_rule` → the factor on lr for a batch k times as large."""
ELSEWHERE = {"amp": "precision fp16 bf16", "betas": "momentum", "run": "output_dir out", "processes": "gpus devices"}
ELSEWHERE |= {"lr": "learning_rate", "weight_decay": "wd", "batch_size": "bs"}  # setting → its names elsewhere
DECAY = 0.01  # torch's of AdamW: what a weight decay is compared with where none is advised
MANY = 3  # more settings than this, changed at once, must be confirmed in a started run


def knob(
    default: Any,
    help: str,
    *,
    choices: Sequence[Any] | None = None,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    unit: str = "",
    live: bool = False,
    asks_beyond: float | None = None,
) -> Any:
    """Return a Plan field: its default, one line of help, and the rule of a value (≥ least, > above, ≤ most). live: a
    started run may change this setting of a task: neither model nor optimizer depends on it. asks_beyond: more than
    this many times the advised value may be a typo, and a run asks before applying it."""
    rule = {"choices": choices, "least": least, "above": above, "most": most, "live": live, "asks_beyond": asks_beyond}
    return dataclasses.field(default=default, metadata={"help": help, "unit": unit, **rule})


class Settings:
    """Refuse a name that is none of the fields, as `Plan` does. A class of its own: help shows the fields of Plan."""

    def __new__(cls, *_: Any, **settings: Any) -> Self:
        for name in settings:
            kinds(cls, name)
        return super().__new__(cls)


@dataclasses.dataclass(frozen=True)
class Plan(Settings):
    """Hold the settings of a training run, not of the data or machine. Raises PlanError naming the field and rule."""

    epochs: int = knob(10, "passes over the training split", least=1)
    batch_size: int = knob(64, "samples per optimizer step", least=1)
    micro_batch_size: int | None = knob(None, "samples per forward pass; None: the batch size", least=1)
    lr: float = knob(1e-3, "peak learning rate", above=0, asks_beyond=10)
    lr_rule: str = knob("none", "how lr follows a change of batch size", choices=tuple(LR_FACTORS))
    schedule: str = knob("cosine", "lr curve after warmup", choices=("constant", "cosine", "poly", "step", "plateau"))
    warmup_epochs: float = knob(0.0, "linear warmup of lr from 0, step by step", least=0, unit="epochs")
    min_lr: float = knob(0.0, "lowest lr, except for constant", least=0)
    optimizer: str = knob("adamw", "update rule, fused", choices=tuple(OPTIMIZERS))
    weight_decay: float = knob(0.0, "decoupled for adamw, an L2 term for adam and sgd", least=0, asks_beyond=10)
    betas: tuple[float, float] = knob((0.9, 0.999), "adam's decay rates; first: sgd momentum", least=0, most=0.99999)
    eps: float = knob(1e-8, "added to the denominator of adam's step; larger is steadier in bf16", above=0)
    clip_norm: float | None = knob(None, "maximum gradient norm; None: no clipping", above=0)
    amp: str = knob("off", "mixed precision in forward and backward; fp16 needs CUDA", choices=("off", "bf16", "fp16"))
    compile: bool = knob(False, "torch.compile the model: a slow first step, faster ones after")
    graph: bool = knob(False, "replay whole steps as CUDA graphs (CUDA; no fp16, compile, checkpoint_activations)")
    channels_last: bool = knob(False, "NHWC weights and activations for convolutions")
    checkpoint_activations: bool = knob(False, "recompute activations in backward: less memory, about 1/3 more work")
    sync_batchnorm: bool = knob(False, "several GPUs: batch norm over the samples of all processes at once")
    deterministic: bool = knob(False, "refuse kernels whose results differ from run to run")
    workers: int = knob(0, 'DataLoader processes for feed "workers"', least=0)
    prefetch: int = knob(2, "batches prepared ahead (per worker, or in the streaming ring)", least=1)
    feed: str = knob(
        "auto",
        "batches from a pack in memory (resident), copied one by one (streamed), or by DataLoader processes (workers)",
        choices=("auto", "resident", "streamed", "workers"),
    )
    eval_every: int = knob(1, "epochs between evaluations on the validation split", least=1, unit="epochs")
    eval_samples: int | None = knob(None, "validation samples per evaluation during training; None: all", least=1)
    early_stop: int | None = knob(None, "stop after this many evaluations without improvement; None: never", least=1)
    patience: int = knob(5, "evaluations without improvement before plateau multiplies lr by 0.1", least=1)
    ema: float | None = knob(None, "decay of a moving average of the weights, used to evaluate", above=0, most=0.99999)
    seed: int = knob(0, "seed for weights, order, augmentation and dropout", least=0, most=2**31 - 1)

    _advised: ClassVar[frozenset[str]] = frozenset()  # of one instance: settings that are still an advice's own

    def __post_init__(self) -> None:
        for name, value in self.to_dict().items():
            object.__setattr__(self, name, checked(type(self), name, value))
        for name, most, fix in (
            ("micro_batch_size", "batch_size", "lower it, or set None for the whole batch at once"),
            ("min_lr", "lr", "lower it or raise lr"),
            ("warmup_epochs", "epochs", "lower it or raise epochs"),
        ):
            value, bound = getattr(self, name), getattr(self, most)
            if value is not None and value > bound:
                raise PlanError(f"Plan.{name} must be at most {most} ({shown(bound)}), got {shown(value)}; {fix}")

    def replace(self, /, **changes: Any) -> Self:
        """Return a copy with some settings changed; an unknown name is an error that lists similar ones."""
        return type(self)(**{**self.to_dict(), **changes}).marked(self._advised.difference(changes))

    def turn(self, /, **settings: Any) -> Self:
        """Return a copy with settings as a user changes them: a batch size given without an lr adjusts lr by `lr_rule`
        (√k: arXiv 2205.10287, linear: 1706.02677); a smaller one takes micro-batch along, a lower lr min_lr, and
        fewer epochs than those of the warmup the warmup."""
        first = {name: settings[name] for name in ("epochs", "batch_size", "lr_rule", "lr") if name in settings}
        resized = self.replace(**first, micro_batch_size=None, min_lr=0.0, warmup_epochs=0.0)
        factor = 1.0 if "lr" in settings else LR_FACTORS[resized.lr_rule](resized.batch_size / self.batch_size)
        lr = resized.lr if factor == 1 else float(f"{resized.lr * factor:.12g}")  # there and back is the same lr
        micro = self.micro_batch_size and min(self.micro_batch_size, resized.batch_size)
        share = 1.0 if self.warmup_epochs <= resized.epochs else resized.epochs / self.epochs
        lowered = {"min_lr": min(self.min_lr, lr), "warmup_epochs": min(self.warmup_epochs * share, resized.epochs)}
        new = resized.replace(**{"micro_batch_size": micro, "lr": lr, **lowered, **settings})
        return new.marked(self._advised.difference(settings, new.changes_from(self)))

    def marked(self, advised: Iterable[str]) -> Self:
        """Return an equal plan in which these settings count as the advice's own, not as given by code or by hand."""
        new = dataclasses.replace(self)
        object.__setattr__(new, "_advised", frozenset(advised))
        return new

    def given(self) -> dict[str, Any]:
        """Return the settings that were given in code or by hand, as JSON has them: those that are no advice's own."""
        return json.loads(json.dumps({n: value for n, value in self.to_dict().items() if n not in self._advised}))

    def while_training(self) -> Self:
        """Return the plan for evaluations during training: a task overrides it to leave costly options to the end."""
        return self

    def lr_at(self, progress: float, drops: int = 0, own: Callable[[float], float] | None = None) -> float:
        """Return lr at a point of the run, in epochs: linear warmup, then the schedule. drops: of a plateau, so far;
        own: a task's schedule in place of both, the factor on lr at 0…1 of the run. Pure: a resume needs no memory."""
        if own is not None:
            return self.lr * float(own(min(1.0, progress / self.epochs)))
        if progress < self.warmup_epochs:
            return self.lr * progress / self.warmup_epochs
        if self.schedule == "constant":
            return self.lr
        if self.schedule == "step":  # at a third and two thirds of the epochs, hctr's of 90 at 30 and 60
            drops = min(int(3 * progress / self.epochs), 2)
        if self.schedule in ("plateau", "step"):
            return max(self.min_lr, self.lr * 0.1**drops)
        t = min(1.0, (progress - self.warmup_epochs) / max(self.epochs - self.warmup_epochs, 1e-9))
        fall = (1 + math.cos(math.pi * t)) / 2 if self.schedule == "cosine" else (1 - t) ** 0.9  # BiSeNetV2, DeepLab
        return self.min_lr + (self.lr - self.min_lr) * fall

    def length_of(self, samples: int) -> str:
        """Return how long this plan trains on so many samples: steps per epoch, in all, and with a rising lr."""
        steps = batches_in(samples, self.batch_size)
        whole = f"{plural(self.epochs * steps, 'step')} in {plural(self.epochs, 'epoch')}"
        rising = f"{plural(math.ceil(self.warmup_epochs * steps), 'step')} of warmup"
        return f"{plural(samples, 'sample')} · {plural(steps, 'step')} per epoch · {whole} · {rising}"

    def require_batch(self, count: int) -> None:
        """Raise TrainError where a train split of `count` samples is smaller than a batch."""
        if self.batch_size > count:
            split = f"the train split ({plural(count, 'sample')})"
            raise TrainError(f"Plan.batch_size {self.batch_size} is larger than {split}; set it to at most {count}")

    def changes_from(self, old: "Plan") -> dict[str, str]:
        """Return what differs from another plan: field → `0.001 → 0.0005`."""
        pairs = ((name, getattr(old, name), value) for name, value in self.to_dict().items())
        return {name: f"{shown(before)} → {shown(now)}" for name, before, now in pairs if before != now}

    def fixed_settings(self, resumed: bool = False) -> dict[str, str]:
        """Return the settings that a run cannot change while it trains, or when it is resumed, each with the reason."""
        basic = Plan.__dataclass_fields__
        own = [f.name for f in dataclasses.fields(self) if f.name not in basic and not f.metadata["live"]]
        at_start = "fixed while it trains: it takes effect at the start; stop, change it, and resume"
        always = dict.fromkeys((*FIXED, *own), "fixed in a started run: its model and optimizer depend on it")
        return always if resumed else {**always, **dict.fromkeys(AT_START, at_start)}

    def refuse_fixed(self, old: "Plan", resumed: bool = False) -> None:
        """Raise TrainError where this plan changes what a started run cannot; resumed: settings of AT_START may."""
        differing = self.changes_from(old)
        for name in self.fixed_settings(resumed):
            if name in differing:
                rule = f"Plan.{name} cannot change in a started run, got {differing[name]}"
                raise TrainError(f"{rule}; keep the value, or use another run folder")

    def to_dict(self) -> dict[str, Any]:
        """Return plain values by field name, ready for JSON."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    @classmethod
    def parse(cls, name: str, text: str) -> Any:
        """Return the value that a user typed for one setting: `none`, `true`, `0.9,0.999`, `3e-4`. Raises PlanError."""
        kind, count, optional = kinds(cls, name)
        if text.lower() in ("none", "") and optional:
            return None
        try:
            if count is not None:
                return tuple(kind(part) for part in text.strip("()[] ").split(",") if part.strip())
            return BOOLEANS[text.lower()] if kind is bool else kind(text)
        except (ValueError, KeyError):
            rule = WORDS[kind] if count is None else "numbers separated by commas"
            raise PlanError(f"{cls.__qualname__}.{name} must be {rule}, got {text!r}") from None


BOOLEANS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a word"}
hints = cache(get_type_hints)


def kinds(plan: type[Any], name: str) -> tuple[type, int | None, bool]:
    """Return of a setting (its type, or that of its members; how many members a tuple has, 0 for any number, None for a
    single value; whether it may be None). Raises PlanError for a setting that the plan does not have."""
    require_known(f"{plan.__qualname__} has no setting", name, [field.name for field in dataclasses.fields(plan)])
    hint = hints(plan)[name]
    optional = type(None) in get_args(hint)
    kind = get_args(hint)[0] if optional else hint
    if get_origin(kind) is not tuple:
        return kind, None, optional
    kind, *rest = get_args(kind)
    return kind, 0 if rest == [...] else 1 + len(rest), optional


def checked(plan: type[Plan], name: str, value: Any) -> Any:
    """Return a value for one setting in its field's type. Raises PlanError naming field and rule."""
    (kind, count, optional), where = kinds(plan, name), f"{plan.__qualname__}.{name}"
    if value is None and optional:
        return None
    if count is None:
        return member(where, value, kind, plan.__dataclass_fields__[name].metadata)
    if not isinstance(value, (tuple, list)) or (count and count != len(value)):
        raise PlanError(f"{where} must be {count or 'several'} values, got {value!r}")
    return tuple(member(where, each, kind, plan.__dataclass_fields__[name].metadata) for each in value)


def member(where: str, value: Any, kind: type, rule: Mapping[str, Any]) -> Any:
    """Return one value in its type. where: `Plan.lr`; rule: of `knob`. Raises PlanError."""
    value = value.item() if getattr(value, "ndim", None) == 0 else value  # of NumPy and torch
    if kind is float and type(value) is int:
        value = float(value) if abs(value) < 2**1000 else math.inf
    elif kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    least, above, most, choices = (rule[each] for each in ("least", "above", "most", "choices"))
    one_of = choices and f"one of {', '.join(map(str, choices))}"
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise PlanError(f"{where} must be {one_of or WORDS[kind]}, got {value!r}")
    for wrong, words in (
        (kind is float and not math.isfinite(value), "finite"),
        (choices and value not in choices, one_of),
        (least is not None and value < least, f"at least {least}"),
        (above is not None and value <= above, f"greater than {above}"),
        (most is not None and value > most, f"at most {most}"),
    ):
        if wrong:
            raise PlanError(f"{where} must be {words}, got {value!r}")
    return value


def require_known(what: str, name: str, known: Collection[str], kind: type[NbtoolsError] = PlanError) -> None:
    """Raise an error of this kind for a name that is none of the known ones: it lists similar names, else all."""
    if name not in known:
        close = similar(name, known)
        hint = f"did you mean {' or '.join(close)}?" if close else f"it has {', '.join(known)}"
        raise kind(f"{what} {name!r}; {hint}")


def similar(name: str, known: Collection[str]) -> list[str]:
    """Return the known names that a wrong one may mean: what others call it, else similar, else sharing a word."""
    alike = [each for each in known if name in ELSEWHERE.get(each, "").split()]
    words = [each for each in known if {*name.split("_")} & {*each.split("_")}]
    return alike or difflib.get_close_matches(name, known, n=3) or words[:3]


def list_changes(changes: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {change}" for name, change in changes.items())


def require_sizes(pack: Pack, plan: Plan | None = None) -> None:
    """Raise TrainError for a pack with too few samples to train on, or too few for a batch of the plan."""
    count, bad = len(pack.ids("train")), pack.manifest["bad"]
    if count < 2:
        rule = f"{pack.folder}: training needs at least 2 samples, the train split has {count} of {len(pack)}"
        less = "pack more, or less of it as val and test"
        raise TrainError(f"{rule}; {f'correct the {bad:,} that were left out, see pack.bad' if bad else less}")
    if plan is not None:
        plan.require_batch(count)


def doubts(old: Plan, new: Plan, advised: Plan) -> dict[str, str]:
    """Return what needs confirmation before a run changes from the old plan to the new: setting → a sentence. Under "",
    that more than MANY change at once, for example by a click on a preset."""
    sentences = {}
    for field in dataclasses.fields(new):
        before, value, usual = (getattr(plan, field.name) for plan in (old, new, advised))
        factor = field.metadata["asks_beyond"]
        if factor is not None and value > max(before, factor * (usual or DECAY) * (1 + 1e-9)):
            times = f"{value / usual:,.0f}× the advised {shown(usual)}" if usual else "large; none is advised"
            sentences[field.name] = f"{field.name} {shown(value)} is {times}"
    if len(changed := new.changes_from(old)) > MANY:
        sentences[""] = f"{len(changed)} settings change at once: {list_changes(changed)}"
    return sentences
