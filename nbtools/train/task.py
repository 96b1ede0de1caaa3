"""Task: what is trained. Every hook is defined here with its default; only `model` and `loss` have none.

B samples, H and W pixels, K classes.
"""

from __future__ import annotations

import copy
import importlib
import math
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.optim import Optimizer

from nbtools.data import Card, Draws, Pack, Sample, Survey, build_pack, sample_of
from nbtools.data import pack as pack_dataset
from nbtools.errors import CheckpointError, NbtoolsError, TrainError
from nbtools.train.augment import strengths
from nbtools.train.defaults import answers, expressions, images_of, packed_dataset, prepare, preview
from nbtools.train.metrics import MEANINGS, Batch, Pair, best_of, listed, name_of
from nbtools.train.optimizer import plan_optimizer
from nbtools.train.plan import Plan

Tensors = Mapping[str, tuple[Sequence[int | str], str]]
"""Name → (shape, text). An axis that may have any length has a name in place of its length; (): that of the columns."""
TaskLike = Any
"""What `nb.fit` and the like accept as a task: a `Task`, or a module, class or object with some of its hooks."""


class Derived:
    """A default that follows from other attributes of the task, or of the class."""

    def __init__(self, derive: Callable[[Any], Any]):
        self.derive = derive

    def __get__(self, task: Task | None, kind: type[Task]) -> Any:
        return self.derive(kind if task is None else task)


class Task:
    """Subclass it, or write a module with functions of these names: `model`, `loss`, and what else the task needs. With
    a pack of `nb.pack` the other hooks have defaults that work.

    A raw batch holds the pack's columns on the device; for a ragged column `x`, padded with 0 to the longest sample,
    also its lengths `x_length` (B,); and `id` (B,), indices in the pack. `predict` has neither targets nor `id`.
    """

    PLAN: Plan = Plan()
    """The recommended settings. A task with settings of its own subclasses Plan."""
    BASELINE: Any = Derived(lambda task: task.PLAN.replace(feed="workers", workers=0))
    """The settings that a receipt compares with. Default: PLAN, its samples read one by one on demand."""
    PRESETS: Mapping[str, Any] = {}
    """Name → Plan, or a function of the card that returns one or raises NbtoolsError. A receipt measures the first."""
    BEST: Any = Derived(lambda task: best_of(task.metrics))
    """The metric that chooses the best checkpoint, "-cer" where lower is better. Default: the first by name."""
    MEANINGS: Mapping[str, str] = {}
    """Metric → what it says, in plain words."""
    SMOKE: Mapping[str, Any] = {}
    """Options of `demo` for the smoke test, where not every network can read what it writes by default."""
    COLUMN_OPTIONS: Mapping[str, Collection[str]] = {}
    """Column that only some networks read → its options of `pack`, first the one that names its array in the files."""
    save: Any = None
    """save(answer, file, folder, card) -> text: write the answer to a file's sample. None: the terminal prints it."""
    augment: Any = ()
    """Names of augmentations of the default `batch`: crop, flip, rotate, colour, erase, mixup; or name → strength."""
    pretrained: Any = False
    """Whether the network's weights are pretrained: advice then starts from a lower lr, as for frozen parameters."""
    card: Card | None = None
    """The card of the pack that it trains or answers on, where `nb.pack` made that; `bound` sets it on a copy."""
    text_of: Any = None
    """text_of(pack, i) -> text: what `decode` should answer for sample i. None: an `nb.pack`'s target, or `label`."""
    preview: Any = None
    """preview(pack, i, answer) -> (image (H, W) or (H, W, 3 or 4) uint8, truth, predicted): sample i for the live
    picture; a fourth value True where answers are right or wrong as a whole. Default: for images of `nb.pack`."""

    # -- training

    def model(self, card: Card, plan: Any) -> nn.Module:
        """Return the network for a data set; card: its classes, columns and options. No default."""
        raise lacking(self, "train", "model(card, plan)")

    def loss(self, model: Any, batch: Batch, plan: Any) -> tuple[Tensor, Tensor | float] | Tensor:
        """Return (sum of the loss, number of terms) of a batch, or its mean; `model(batch)` returns the outputs, also
        where the network of an `nb.pack` takes columns. No default."""
        raise lacking(self, "train", "loss(model, batch, plan)")

    def batch(self, raw: Batch, plan: Any, draws: Draws | None) -> Batch:
        """Return the network's input: normalised, and augmented if draws are given. Default: with `nb.pack` what
        `prepare` makes of the arrays; else the arrays unchanged."""
        return raw if self.card is None else prepare(raw, self.card, draws, self.augment)

    def inputs(self, plan: Any, columns: Collection[str]) -> Collection[str]:
        """Return the columns that the plan's network reads: samples without one of them are left out. Default: none."""
        return ()

    def groups(self, model: nn.Module, plan: Any) -> list[dict[str, Any]]:
        """Return the parameter groups: `{"params": [...]}`, with `"lr_scale": 10.0` for a multiple of the plan's lr,
        `"decays": False` for no weight decay. Default: one group of all that require a gradient."""
        return [{"params": [p for p in model.parameters() if p.requires_grad]}]

    def optimizer(self, groups: list[dict[str, Any]], plan: Any) -> Optimizer:
        """Return the optimizer of these groups, each with its `lr`, which schedule and panel multiply later. Default:
        `plan.optimizer`; an own one has its own weight decay and betas, whatever the plan's."""
        return plan_optimizer(groups, plan)

    def schedule(self, plan: Any) -> Callable[[float], Any] | None:
        """Return f(progress), the factor on `plan.lr` at 0 to 1 of the planned epochs. Default: None: the plan's."""
        return None

    # -- evaluation and answers

    def infer(self, model: nn.Module, batch: Batch, plan: Any) -> Any:
        """Return the outputs in evaluation and prediction. Default: `model(batch)`."""
        return model(batch)

    def metrics(self, outputs: Any, batch: Batch) -> Mapping[str, Pair]:
        """Return metric → (numerator, denominator), summed over a split. For `nb.pack` also a list of names in METRICS
        and of functions of (outputs, batch) that return such pairs. Default: none; the loss is always reported."""
        return {}

    def decode(self, outputs: Any, card: Card) -> list[Any]:
        """Return the answer for each sample. Default: of `nb.pack` a class or values; else its row of the outputs."""
        return list(outputs) if self.card is None else answers(outputs, card)

    def show(self, *samples: Any, **options: Any) -> Any:
        """Return a figure of samples. No default."""
        raise lacking(self, "draw samples", "show(pack, ids)")

    def tensors(self, card: Card, plan: Any) -> tuple[Tensors, Tensors]:
        """Return what the network takes out of a batch, and what it returns, for `run.export("model.onnx")`. An input's
        text is the NumPy expression that makes it from the pack's columns, padded with 0; an output's is its meaning.
        Default: with `nb.pack` what the default `batch` makes; else nothing, which ONNX refuses."""
        default = getattr(self.batch, "__func__", None) is Task.batch
        return (expressions(card) if packed_dataset(card) and default else {}), {}

    # -- plans

    def suggest(self, card: Card, accelerator: str) -> Mapping[str, tuple[Any, str]]:
        """Return settings for a data set, each with its reason; accelerator: cuda, mps or cpu."""
        reason = "the Dataset's transforms are random: it is read again in each epoch"
        return {"feed": ("workers", reason)} if card.options.get("random") else {}

    def with_network(self, plan: Any, pack: Pack | Card, network: str) -> Any:
        """Return the plan with the settings that suit another network. Default: the plan."""
        return plan

    # -- data

    def survey(self, folder: Path, options: Any) -> Survey:
        """Return the samples of a source, each with its label and split if it has them. No default."""
        raise lacking(self, "list samples", "survey(folder, options)")

    def read(self, path: Path, options: Any) -> Sample:
        """Return the arrays of one raw file. Default: with `nb.pack` of an image file, or of an item in its place."""
        if self.card is not None:
            return sample_of(path, self.card)
        raise lacking(self, "read files", "read(path, options)")

    def pack(
        self, source: Any, *, val: float = 0.1, test: float = 0.1, into: str | Path | None = None, progress=True, **more
    ) -> Pack:
        """Return the pack of a source. Default: `build_pack` of `survey` and `read`; without a `survey` `nb.pack`."""
        ends: Any = {"val": val, "test": test, "into": into, "progress": progress}
        if self.packs_datasets:
            return pack_dataset(source, **ends, **more)
        return build_pack(source, task_name(self), more, self.survey, self.read, **ends, processes=False)

    @property
    def packs_datasets(self) -> bool:
        """Return whether `pack` is that of `nb.pack`, as there is no `survey`."""
        ours = (getattr(hook, "__func__", None) for hook in (self.survey, self.pack))
        return [*ours] == [Task.survey, Task.pack]

    def pack_options(self, card: Card) -> Mapping[str, Any]:
        """Return options of `pack` with which another source has the classes and the preprocessing of a card."""
        return {"like": card} if packed_dataset(card) else {}

    def validate(self, source: str | Path, **options: Any) -> Any:
        """Return a report of everything that is wrong with a source; `.ok`: no errors. No default."""
        raise NbtoolsError(f"{spoken(self)} checks its files while packing: call its pack(source), see pack.bad")

    def features(self, source: str | Path, into: Path, **options: Any) -> Any:
        """Write features of filmed clips by a pretrained network. No default."""
        raise NbtoolsError(f"{spoken(self)} makes no features from frames; use the task sign")

    def demo(self, folder: str | Path, count: int = 100) -> Path:
        """Write a small data set in the raw format. No default."""
        raise lacking(self, "write demo data", "demo(folder, count)")

    def __repr__(self) -> str:
        return f"Task {spoken(self)}"


HOOKS = tuple(name for name in vars(Task) if not name.startswith("_") and name not in ("card", "packs_datasets"))


def lacking(task: Task, what: str, hook: str) -> TrainError:
    return TrainError(f"{spoken(task)} cannot {what}: it has no {hook}; define it")


# -- what a task means to a run


def summed(loss: Any, size: int) -> tuple[Tensor, Tensor | float]:
    """Return what a task's `loss` returned for so many samples as (sum, count): a scalar is their mean."""
    if not isinstance(loss, Tensor):
        return loss
    return (loss.sum(), loss.numel()) if loss.dim() else (loss * size, size)


def set_training(model: nn.Module, training: bool = True) -> None:
    """Call `model.train(training)`, but leave norm layers whose parameters are all frozen in eval mode, and so the
    statistics that they apply."""
    model.train(training)
    for layer in model.modules() if training else ():
        trained = [p.requires_grad for p in layer.parameters(recurse=False)]
        if isinstance(layer, _NormBase) and trained and not any(trained):
            layer.eval()


def objective(task: Task) -> tuple[Any, list[str], dict[str, float], dict[str, str]]:
    """Return the loss (None: the default), the metrics' names, the augmentations' strengths, and the names of optimizer
    and schedule of a run on a pack of `nb.pack`; nothing for other tasks, whose name stands for all of them."""
    if task.card is None:
        return None, [], {}, {}
    loss = getattr(task, "given_loss", type(task).loss)
    metrics = [name_of(metric) for metric in listed(getattr(task, "measured", task.metrics))]
    names, given = {"optimizer": "default", "schedule": "default"}, getattr(task, "given", {})
    for name in names:
        if getattr(hook := getattr(task, name), "__func__", None) is not getattr(Task, name):
            names[name] = qualified(given.get(name) or hook)
    return loss, metrics, {name: float(strength) for name, strength in strengths(task.augment).items()}, names


def qualified(function: Any) -> str:
    """Return the name of a class or a function, of a partial with its keywords."""
    settings = ", ".join(f"{name}={value!r}" for name, value in getattr(function, "keywords", {}).items())
    function = getattr(function, "func", function)
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{name}({settings})" if settings else name


def order(value: float, loss: float | None, sign: float) -> tuple[float, float]:
    """Return what is greater for the better of two evaluations: by the metric, then by the lower validation loss."""
    return sign * value, -loss if loss is not None and math.isfinite(loss) else -math.inf


def best_metric(task: Task) -> tuple[str, float]:
    """Return the metric that chooses the best checkpoint, and its sign: -1 where lower is better."""
    return task.BEST.lstrip("-"), -1.0 if task.BEST.startswith("-") else 1.0


def meanings_of(task: TaskLike) -> dict[str, str]:
    """Return metric → what it says, in plain words, as far as the task or nbtools knows."""
    return {**MEANINGS, **as_task(task).MEANINGS}


def readable(task: TaskLike, pack: Pack, plan: Any) -> Pack:
    """Return the part of a pack that the plan's network can read; the pack itself where it can read all, or nothing:
    its `model` then says what is missing."""
    columns = as_task(task).inputs(plan, pack.columns)
    if not columns or not set(columns) <= pack.columns.keys():
        return pack
    return pack.part(columns, pack.columns.keys() & as_task(task).COLUMN_OPTIONS.keys() - set(columns))


def unread(task: TaskLike, pack: Pack, plan: Any) -> str:
    """Return what the plan's network cannot read of a pack, in a sentence; "" if it can read all."""
    part = readable(task, pack, plan)
    if part.splits == pack.splits:
        return ""
    counts = [f"{part.splits[split]:,} of {count:,} {split}" for split, count in pack.splits.items() if count]
    arrays = dict.fromkeys(array_of(task, pack.card, name) for name in as_task(task).inputs(plan, pack.columns))
    return f"this network reads {', '.join(counts)} samples; the others have no {' or '.join(arrays)}"


def array_of(task: TaskLike, card: Card, column: str) -> str:
    """Return what the files call the array that became a column."""
    first, *_ = (*as_task(task).COLUMN_OPTIONS.get(column, ()), "")
    return card.options.get(first) or column


# -- the adapter, and names


class Adapted(Task):
    """A module, class or object as a Task: its own hooks, and the defaults for the others."""

    def __init__(self, source: Any):
        self.source = source
        vars(self).update({name: getattr(source, name) for name in HOOKS if hasattr(source, name)})


def as_task(task: Any) -> Task:
    """Return a Task unchanged, a subclass of it as an instance, anything else as an Adapted. Raises TrainError for a
    network, a function, and a class whose instances need arguments."""
    if isinstance(task, Task):
        return task
    kind = task if isinstance(task, type) else type(task)
    if issubclass(kind, nn.Module | FunctionType) and not (hasattr(task, "model") and hasattr(task, "loss")):
        came = "a function" if kind is FunctionType else f"the network {kind.__name__}"
        raise TrainError(f"task must be a nb.Task, got {came}; pass nb.classify(net) or nb.regress(net)")
    if kind is not task or not issubclass(kind, Task):
        return Adapted(task)
    try:
        return kind()
    except TypeError as error:
        raise TrainError(f"{kind.__name__} cannot be made without arguments ({error}); pass an instance") from error


def bound(task: TaskLike, card: Card) -> Task:
    """Return the task as it trains and answers on a pack: for one of `nb.pack` a copy that knows its card."""
    task = as_task(task)
    if not packed_dataset(card) or task.card is card:
        return task
    own = copy.copy(task)
    vars(own).update(card=card, _name=task_name(task))
    if own.preview is None and images_of(card):
        own.preview = preview
    return own


def task_name(task: Any) -> str:
    """Return `package.module` or `module:name`, from which a run imports its task again: of an instance the variable
    that holds it, of a Task without attributes of its own its class; `module:` where there is none."""
    if isinstance(task, Task) and "_name" in vars(task):  # of what `bound` copied
        return vars(task)["_name"]
    task = task.source if isinstance(task, Adapted) else task
    if isinstance(task, ModuleType):
        return task.__name__
    if isinstance(task, type):
        return f"{task.__module__}:{task.__qualname__}"
    kind = type(task)
    for module in (getattr(task, "__module__", kind.__module__), "__main__"):
        for name, value in list(vars(sys.modules.get(module, object)).items()):
            if value is task and not name.startswith("_"):  # IPython's _ and _12
                return f"{module}:{name}"
    return f"{kind.__module__}:{kind.__qualname__ if isinstance(task, Task) and not vars(task) else ''}"


def spoken(task: TaskLike) -> str:
    """Return a task's name in a sentence: of one without a name what made it, as `nb.classify(…)`."""
    name = task_name(task)
    return getattr(as_task(task), "made", name[:-1]) if name.endswith(":") else name


def import_task(name: str, where: Path | str) -> Task:
    """Return the task of that name; where: what names it. Raises CheckpointError if it cannot be imported."""
    module, colon, attribute = name.partition(":")
    if colon and not attribute:
        fix = "pass task= with the same one, such as nb.classify(…) of its network"
        raise CheckpointError(f"{where}: its task {name!r} has no name there to open it by; {fix}")
    try:
        source = importlib.import_module(module)
        return as_task(attrgetter(attribute)(source) if attribute else source)
    except (ImportError, AttributeError) as error:
        ours = "a script or a notebook made it: run its cell first, or import it from the script, and pass task="
        fix = ours if module == "__main__" else "put the file next to the notebook, or pass task="
        raise CheckpointError(f"{where}: its task {name!r} cannot be imported ({error}); {fix}") from None
