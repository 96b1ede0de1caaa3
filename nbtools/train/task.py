"""Task: what is trained. Every hook is defined here with its default; only `model` and `loss` have none.

B samples, H and W pixels, K classes.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from nbtools.data import Card, Draws, Pack, Sample, Survey, build_pack
from nbtools.data import pack as pack_dataset
from nbtools.errors import CheckpointError, NbtoolsError, TrainError
from nbtools.train.augment import strengths
from nbtools.train.defaults import (
    answers,
    expressions,
    images_of,
    packed_dataset,
    prepare,
    preview,
    sample_of,
    show,
)
from nbtools.train.metrics import MEANINGS, Batch, Pair, best_of, listed, name_of
from nbtools.train.plan import Plan

OWN = "nbtools.train.own:"  # the name of what nb.classify returned, and no variable of a module holds
Tensors = Mapping[str, tuple[Sequence[int | str], str]]
"""Name → (shape, text). An axis that may have any length has a name in place of its length; (): that of the columns."""
TaskLike = Any
"""What `nb.fit` and the like accept as a task: a `Task`, or a module, class or object with some of its hooks."""


class OneByOne:
    """PLAN with samples read from the source files by the process that trains."""

    def __get__(self, task: Task | None, kind: type[Task]) -> Plan:
        return (kind if task is None else task).PLAN.replace(feed="workers", workers=0)


class FirstMetric:
    """The first of `metrics` that is given by name, else -loss."""

    def __get__(self, task: Task | None, kind: type[Task]) -> str:
        return best_of((kind if task is None else task).metrics)


class Task:
    """Subclass it, or write a module with functions of these names: `model`, `loss`, and what else the task needs. With
    a pack of `nb.pack` the other hooks have defaults that work.

    A raw batch holds tensors on the device under the names of the pack's columns; for a ragged column `x`, padded with
    0 to the longest sample of the batch, also its lengths `x_length` (B,); and `id` (B,), the samples' indices in the
    pack. What `predict` reads has neither targets nor `id`.
    """

    PLAN: Plan = Plan()
    """The recommended settings. A task with settings of its own subclasses Plan."""
    BASELINE: Any = OneByOne()
    """The settings that a receipt compares with. Default: PLAN, its samples read one by one on demand."""
    PRESETS: Mapping[str, Any] = {}
    """Further settings to choose from, as a guide's optimised ones: name → Plan, or a function of the card that returns
    one, and raises NbtoolsError where the data does not allow it. A receipt also measures the first. Default: none."""
    BEST: Any = FirstMetric()
    """The metric that chooses the best checkpoint, on the validation split; "-cer" where lower is better. Default: the
    first of `metrics` that is given by name, else -loss."""
    MEANINGS: Mapping[str, str] = {}
    """Metric → what it says, in plain words: shown with evaluations, and under the pointer on a table's headers."""
    SMOKE: Mapping[str, Any] = {}
    """Options of `demo` for the smoke test, where not every network can read what it writes by default."""
    COLUMN_OPTIONS: Mapping[str, Collection[str]] = {}
    """Options of `pack` that concern a single column, which some networks do not read: column → options, first the one
    that names its array in the files. Default: none."""
    save: Any = None
    """save(answer, file, folder, card) -> text: write the answer to a file's sample into a folder, for tasks whose
    answers are files; the terminal prints the text. None: the terminal prints the answer."""
    augment: Any = ()
    """Names of augmentations of the default `batch`: crop, flip, rotate, colour, erase, mixup; a mapping gives their
    strengths. Default: none."""
    pretrained: Any = False
    """Whether the network's weights are pretrained, so that advice starts from a lower lr. Default: False; frozen
    parameters say so too."""
    card: Card | None = None
    """The card of the pack that it trains or answers on, where `nb.pack` made that; set by whoever uses the task, on a
    copy of it."""
    text_of: Any = None
    """text_of(pack, i) -> text: what `decode` should answer for sample i, as `run.report` compares it. None: the target
    of an `nb.pack`, or the column `label`."""
    preview: Any = None
    """preview(pack, i, answer) -> (image (H, W) or (H, W, 3 or 4) uint8, truth, predicted): sample i for the live
    picture, with the answer from `decode`; a fourth value True where answers are names, right or wrong as a whole.
    None: images of `nb.pack` are shown, and no other samples."""

    # -- training

    def model(self, card: Card, plan: Any) -> nn.Module:
        """The network for a data set; card: its classes, columns and options. No default."""
        raise TrainError(f"{spoken(self)} has no model(card, plan); a task needs model and loss: define it")

    def loss(self, model: Any, batch: Batch, plan: Any) -> tuple[Tensor, Tensor | float] | Tensor:
        """(sum of the loss, number of terms) of a batch, or its mean over the samples; `model(batch)` returns the
        outputs, also where the network of an `nb.pack` takes columns: those that its signature names. No default."""
        raise TrainError(f"{spoken(self)} has no loss(model, batch, plan); a task needs model and loss: define it")

    def batch(self, raw: Batch, plan: Any, draws: Draws | None) -> Batch:
        """The network's input, from the pack's arrays: normalised, and augmented if draws are given. Default: for a
        pack of `nb.pack` images (B, C, H, W) float32 and other inputs, augmented by the names in `augment` and
        normalised by the card's mean and std; else the arrays unchanged."""
        return raw if self.card is None else prepare(raw, self.card, draws, self.augment)

    def inputs(self, plan: Any, columns: Collection[str]) -> Collection[str]:
        """The columns of a pack that the plan's network reads: samples that have nothing in one of them are left out of
        training, evaluation and prediction. Default: none, which leaves out no sample."""
        return ()

    def groups(self, model: nn.Module, plan: Any) -> list[dict[str, Any]]:
        """Parameter groups: `{"params": [...]}`, with `"lr_scale": 10.0` for a multiple of the plan's lr, `"decays":
        False` for no weight decay. Default: one group of all that require a gradient."""
        return [{"params": [p for p in model.parameters() if p.requires_grad]}]

    # -- evaluation and answers

    def infer(self, model: nn.Module, batch: Batch, plan: Any) -> Any:
        """The outputs in evaluation and prediction. Default: `model(batch)`."""
        return model(batch)

    def metrics(self, outputs: Any, batch: Batch) -> Mapping[str, Pair]:
        """Metric → (numerator, denominator), summed over a split. For a pack of `nb.pack` it may also be a list of
        names: accuracy, top5_accuracy, balanced_accuracy, f1, mae, mse, and of functions of (outputs, batch) that
        return such pairs; or one such function. Default: none; the loss is always reported."""
        return {}

    def decode(self, outputs: Any, card: Card) -> list[Any]:
        """The answer for each sample, such as a text. Default: for the targets of `nb.pack` a class with its
        probability, or values; else its row of the outputs."""
        return list(outputs) if self.card is None else answers(outputs, card)

    def show(self, *samples: Any, **options: Any) -> Any:
        """A figure of samples. Default: show(pack, ids, predicted=None) for images of `nb.pack`; else raises
        NbtoolsError."""
        if samples and isinstance(samples[0], Pack) and packed_dataset(samples[0].card):
            return show(*samples, **options)
        raise NbtoolsError(f"{spoken(self)} cannot draw samples: it has no show(pack, ids); define it")

    def tensors(self, card: Card, plan: Any) -> tuple[Tensors, Tensors]:
        """What the network takes out of a batch, and what it returns, for `run.export("model.onnx")`. The text of an
        input is the NumPy expression that makes it from the pack's columns, these padded with 0 to the longest sample;
        that of an output says what it means. Empty shapes follow from the columns of an `nb.pack`. Default: nothing,
        which ONNX refuses; with `nb.pack` the texts of what the default `batch` makes."""
        if not packed_dataset(card) or getattr(self.batch, "__func__", None) is not Task.batch:
            return {}, {}
        return expressions(card), {}

    # -- plans

    def suggest(self, card: Card, accelerator: str) -> Mapping[str, tuple[Any, str]]:
        """Settings for a data set, each with its reason; accelerator: cuda, mps or cpu. Default: none, but for a
        Dataset with random transforms the feed that reads it in each epoch."""
        if not card.options.get("random"):
            return {}
        return {"feed": ("workers", "the Dataset's transforms are random: it is read again in each epoch")}

    def with_network(self, plan: Any, pack: Pack | Card, network: str) -> Any:
        """The plan with the settings that suit another network. Default: the plan."""
        return plan

    # -- data

    def survey(self, folder: Path, options: Any) -> Survey:
        """The samples of a source, each with its label and split if it has them. Default: raises NbtoolsError."""
        raise NbtoolsError(f"{spoken(self)} cannot list samples: it has no survey(folder, options); define it")

    def read(self, path: Path, options: Any) -> Sample:
        """The arrays of one raw file. Default: with `nb.pack` of an image file, or of an item in its place; else raises
        NbtoolsError."""
        if self.card is not None:
            return sample_of(path, self.card)
        raise NbtoolsError(f"{spoken(self)} cannot read files: it has no read(path, options); define it")

    def pack(
        self,
        source: str | Path,
        *,
        val: float = 0.1,
        test: float = 0.1,
        into: str | Path | None = None,
        progress: bool = True,
        **options: Any,
    ) -> Pack:
        """The pack of a source; options: for `survey`. Default: `build_pack` of `survey` and `read`; without a `survey`
        `nb.pack`."""
        ends: Any = {"val": val, "test": test, "into": into, "progress": progress}
        if self.packs_datasets:
            return pack_dataset(source, **ends, **options)
        return build_pack(source, task_name(self), options, self.survey, self.read, **ends, processes=False)

    @property
    def packs_datasets(self) -> bool:
        """Whether `pack` is that of `nb.pack`, as there is no `survey`."""
        ours = (getattr(hook, "__func__", None) for hook in (self.survey, self.pack))
        return [*ours] == [Task.survey, Task.pack]

    def pack_options(self, card: Card) -> Mapping[str, Any]:
        """Options of `pack` with which another source has the classes and the preprocessing of a card, so that the
        card's run can be evaluated on it. Default: none; with `nb.pack` the card itself."""
        return {"like": card} if packed_dataset(card) else {}

    def validate(self, source: str | Path, **options: Any) -> Any:
        """A report of everything that is wrong with a source; `.ok`: no errors. Default: raises NbtoolsError, since
        packing checks the files."""
        raise NbtoolsError(
            f"{spoken(self)} checks its files while it packs them: call its pack(source), and check pack.bad"
        )

    def features(self, source: str | Path, into: Path, **options: Any) -> Any:
        """Features of filmed clips by a pretrained network. Default: raises NbtoolsError."""
        raise NbtoolsError(f"{spoken(self)} makes no features from frames; use the task sign")

    def demo(self, folder: str | Path, count: int = 100) -> Path:
        """Write a small data set in the raw format. Default: raises NbtoolsError."""
        raise NbtoolsError(f"{spoken(self)} cannot write demo data: it has no demo(folder, count); define it")

    def __repr__(self) -> str:
        return f"Task {spoken(self)}"


HOOKS = tuple(name for name in vars(Task) if not name.startswith("_") and name not in ("card", "packs_datasets"))


class Adapted(Task):
    """A module, class or object as a Task: its own hooks, and the defaults for the others."""

    def __init__(self, source: Any):
        self.source = source
        vars(self).update({name: getattr(source, name) for name in HOOKS if hasattr(source, name)})


def as_task(task: Any) -> Task:
    """The one adapter: a Task unchanged, a subclass of it as an instance, anything else as an Adapted. Raises
    TrainError for a network, a function, and a class whose instances need arguments."""
    if isinstance(task, Task):
        return task
    kind = task if isinstance(task, type) else type(task)
    if not (hasattr(task, "model") and hasattr(task, "loss")) and issubclass(kind, nn.Module | FunctionType):
        came = "a function" if kind is FunctionType else f"the network {kind.__name__}"
        raise TrainError(f"task must be a nb.Task, got {came}; pass nb.classify(net) or nb.regress(net)")
    if kind is not task or not issubclass(kind, Task):
        return Adapted(task)
    given = inspect.signature(kind).parameters.values()
    if needed := [p.name for p in given if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]:
        arguments = ", ".join(needed)
        raise TrainError(f"{kind.__name__} needs {arguments}; pass an instance: {kind.__name__}({arguments})")
    return kind()


def bound(task: TaskLike, card: Card) -> Task:
    """The task as it trains and answers on a pack: for one of `nb.pack` a copy that knows its card."""
    task = as_task(task)
    if not packed_dataset(card) or task.card is card:
        return task
    own, origin = copy.copy(task), origin_of(task)
    vars(own).update(card=card, _origin=origin)
    if origin.preview is None:
        own.preview = preview if images_of(card) else None
    return own


def origin_of(task: Task) -> Task:
    """The task that `bound` copied, which has the name."""
    return vars(task).get("_origin", task)


def objective(task: Task) -> tuple[Any, list[str], dict[str, float]]:
    """Return the loss (None: the default), the metrics' names and the augmentations' strengths with which a run on a
    pack of `nb.pack` trains; (None, [], {}) for other tasks, whose name stands for all of them."""
    if task.card is None:
        return None, [], {}
    loss = getattr(task, "given_loss", type(task).loss)
    metrics = [name_of(metric) for metric in listed(getattr(task, "measured", task.metrics))]
    return loss, metrics, {name: float(strength) for name, strength in strengths(task.augment).items()}


def set_training(model: nn.Module, training: bool = True) -> None:
    """`model.train(training)`, but norm layers whose parameters are all frozen stay in eval mode, and so do the
    statistics that they apply."""
    model.train(training)
    for layer in model.modules() if training else ():
        trained = [p.requires_grad for p in layer.parameters(recurse=False)]
        if isinstance(layer, _NormBase) and trained and not any(trained):
            layer.eval()


def summed(found: Any, size: int) -> tuple[Tensor, Tensor | float]:
    """What a task's `loss` returned for so many samples as (sum, count): a scalar is their mean."""
    if not isinstance(found, Tensor):
        return found
    return (found.sum(), found.numel()) if found.dim() else (found * size, size)


def readable(task: TaskLike, pack: Pack, plan: Any) -> Pack:
    """The part of a pack that the plan's network can read; the pack itself where it can read all, or nothing: its
    `model` then says what is missing."""
    columns = as_task(task).inputs(plan, pack.columns)
    if not columns or not set(columns) <= pack.columns.keys():
        return pack
    return pack.part(columns, pack.columns.keys() & as_task(task).COLUMN_OPTIONS.keys() - set(columns))


def unread(task: TaskLike, pack: Pack, plan: Any) -> str:
    """What the plan's network cannot read of a pack, in a sentence; "" if it can read all."""
    part = readable(task, pack, plan)
    if part.splits == pack.splits:
        return ""
    counts = [f"{part.splits[split]:,} of {count:,} {split}" for split, count in pack.splits.items() if count]
    arrays = dict.fromkeys(array_of(task, pack.card, name) for name in as_task(task).inputs(plan, pack.columns))
    return f"this network reads {', '.join(counts)} samples; the others have no {' or '.join(arrays)}"


def array_of(task: TaskLike, card: Card, column: str) -> str:
    """What the files call the array that became a column."""
    first, *_ = (*as_task(task).COLUMN_OPTIONS.get(column, ()), "")
    return card.options.get(first) or column


def order(value: float, loss: float | None, sign: float) -> tuple[float, float]:
    """Return what is greater for the better of two evaluations: by the metric, and where that is equal by the lower
    validation loss. Where both are equal, the later epoch is the better one."""
    return sign * value, -loss if loss is not None and math.isfinite(loss) else -math.inf


def best_metric(task: Task) -> tuple[str, float]:
    """(metric that chooses the best checkpoint, +1 or -1 where lower is better)."""
    return task.BEST.lstrip("-"), -1.0 if task.BEST.startswith("-") else 1.0


def meanings_of(task: TaskLike) -> dict[str, str]:
    """Metric → what it says, in plain words, as far as the task or nbtools knows."""
    return {**MEANINGS, **as_task(task).MEANINGS}


def task_name(task: Any) -> str:
    """`package.module` or `module:name`, from which a run imports its task again; `module:` for an object without a
    name.

    An instance has the name of the variable that holds it, in its class's module or a notebook; a Task without
    attributes of its own, the name of its class.
    """
    task = origin_of(task) if isinstance(task, Task) else task
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
    """A task's name in a sentence: of one without a name what made it, as `nb.classify(…)`."""
    name = task_name(task)
    return getattr(as_task(task), "made", name[:-1]) if name.endswith(":") else name


def import_task(name: str, where: Path | str) -> Task:
    """The task of that name. where: what names it. Raises CheckpointError if it cannot be imported."""
    module, colon, attribute = name.partition(":")
    try:
        found = importlib.import_module(module)
        if colon and not attribute:
            raise AttributeError(f"an object of {module} that has no name there")
        return as_task(attrgetter(attribute)(found) if attribute else found)
    except (ImportError, AttributeError) as error:
        fix = "put the file next to the notebook, or pass task="
        if module == "__main__":
            fix = "a script or a notebook made it: run its cell first, or import it from the script, and pass task="
        own = "nb.classify(…) or nb.regress(…) with the same network" if name.startswith(OWN) else ""
        raise CheckpointError(f"{where}: its task {name!r} cannot be imported ({error}); {fix}{own}") from None
