"""Task: what is trained, hook by hook, and how a run finds it again. B samples, H and W pixels, K classes."""

import copy
import dis
import hashlib
import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from inspect import Parameter
from numbers import Real
from operator import attrgetter
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, jit, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.utils._pytree import tree_leaves, tree_map

from nbtools.data import Card, Draws, Pack, Sample, options_like, pack, sample_of
from nbtools.errors import CheckpointError, TrainError
from nbtools.train import defaults
from nbtools.train.defaults import Batch, Pair
from nbtools.train.device import in_float32
from nbtools.train.optimizer import plan_optimizer
from nbtools.train.plan import ADVISED, Plan

PLAIN = int, float, str, tuple, type(None)  # settings of a module that count, but for these:
VARYING = "training", "process_group", "device", "name_or_path"
Tensors = Mapping[str, tuple[Sequence[int | str], str]]
"""Name → (shape, text). An axis that may have any length has a name in place of its length; (): that of the columns."""
TaskLike = Any  # what `nb.fit` and the like accept: a `Task`, or a module, class or object with some of its hooks


class Lacking(TrainError, AttributeError):
    """A task lacks a hook that has no default."""


class Task:
    """Subclass it, or write a module with functions of these names: `model`, `loss`, and what else the task needs. With
    a pack of `nb.pack` the other hooks have defaults that work.

    A raw batch holds the pack's columns on the device; for a ragged column `x`, padded with 0 to the longest sample,
    also its lengths `x_length` (B,); and `id` (B,), indices in the pack. `predict` has neither targets nor `id`.
    """

    PLAN: Plan = Plan()  # the recommended settings; a task with settings of its own subclasses Plan
    BASELINE: Any  # what a receipt compares with; default: PLAN, its samples read one by one on demand
    PRESETS: Mapping[str, Any] = {}  # name → Plan; a receipt measures the first
    BEST: Any  # metric that chooses the best checkpoint, "-cer" where lower is better; default: the first by name
    SMOKE: Mapping[str, Any] = {}  # options of `demo` for the smoke test
    augment: Any = ()  # names of augmentations of the default `batch`, or name → strength
    pretrained: Any = False  # whether weights are pretrained: advice starts from a lower lr, as for frozen parameters
    card: Card | None = None  # of the pack of `nb.pack` that it trains or answers on; `bind` sets it on a copy

    model: Any
    """model(card, plan) -> a new network for a data set; card: its classes, columns and options."""
    loss: Any
    """loss(model, batch, plan) -> (sum of the loss, number of terms), or the mean over the batch; `model(batch)`
    returns the outputs, even if the network for an `nb.pack` takes columns."""

    def batch(self, raw: Batch, plan: Any, draws: Draws | None) -> Batch:
        """Return the network's input: normalised, and augmented if draws are given."""
        return raw if self.card is None else defaults.prepare(raw, self.card, draws, self.augment)

    def part(self, pack: Pack, plan: Any) -> Pack:
        """Return the pack as the plan's network reads it: without samples and columns that are of no use to it."""
        return pack

    def groups(self, model: nn.Module, plan: Any) -> list[dict[str, Any]]:
        """Return the parameter groups: `{"params": [...]}`, with `"lr_scale": 10.0` for a multiple of the plan's lr,
        `"decays": False` for no weight decay."""
        return [{"params": [p for p in model.parameters() if p.requires_grad]}]

    def optimizer(self, groups: list[dict[str, Any]], plan: Any) -> torch.optim.Optimizer:
        """Return the optimizer of these groups, each with its `lr`, which schedule and panel multiply later. A
        custom one keeps its own weight decay and betas, whatever the plan's."""
        return plan_optimizer(groups, plan)

    def schedule(self, plan: Any) -> Callable[[float], Any] | None:
        """Return f(progress), the factor on `plan.lr` at 0 to 1 of the planned epochs; None: the plan's schedule."""

    def infer(self, model: nn.Module, batch: Batch, plan: Any) -> Any:
        """Return the outputs for evaluation and prediction, as `loss` gets them from `model(batch)`."""
        return model(batch)

    def metrics(self, outputs: Any, batch: Batch) -> Mapping[str, Pair]:
        """Return metric → (numerator, denominator), summed over a split, besides the loss. For `nb.pack` also a list of
        names in METRICS and of functions of (outputs, batch) that return such pairs."""
        return {}

    def decode(self, outputs: Any, card: Card) -> list[Any]:
        """Return the answer for each sample. Default: of `nb.pack` a class, labels or values; else its outputs."""
        return list(outputs) if self.card is None else defaults.answers(outputs, card)

    text_of: Any = None
    """text_of(pack, i) -> text: what `decode` should answer for sample i. None: an `nb.pack`'s target, or `label`."""
    preview: Any = None
    """preview(pack, i, answer) -> (image (H, W) or (H, W, 3 or 4) uint8, truth, predicted): sample i for the live
    picture; a fourth value True where answers are right or wrong as a whole. Default: for images of `nb.pack`."""
    save: Any = None
    """save(answer, file, folder, card) -> text: write the answer to a file's sample. None: the terminal prints it."""

    def tensors(self, card: Card, plan: Any) -> tuple[Tensors, Tensors]:
        """Return what the network takes out of a batch, and what it returns, for `run.export("model.onnx")`, with a
        text about each. Default: with `nb.pack` its inputs; else nothing, which ONNX refuses."""
        inputs = card.options["inputs"] if defaults.packed_dataset(card) else []
        lengths = [f"{name}_length" for name in inputs if card.columns[name].kind == "ragged"]
        described = dict.fromkeys(inputs, ((), defaults.PREPARED)) | dict.fromkeys(lengths, ((), "steps of a sample"))
        return described, {"output": ((), "as the loss takes it: logits, or values standardised by y's mean and std")}

    def suggest(self, card: Card, accelerator: str) -> Mapping[str, tuple[Any, str]]:
        """Return settings for a data set, each with its reason; accelerator: cuda, mps or cpu."""
        if card.options.get("stored", True):
            return {}
        return {"feed": ("workers", "the Dataset's items are not stored: it is read again in each epoch")}

    def with_network(self, plan: Any, pack: Pack | Card, network: str) -> Any:
        """Return the plan with the settings that suit another network."""
        return plan

    pack: Any = staticmethod(pack)
    """pack(source, val=0.1, test=0.1, into=None, progress=True, …) -> the pack of a source."""

    def pack_options(self, card: Card) -> Mapping[str, Any]:
        """Return options of `pack` with which another source has the classes and the preprocessing of a card."""
        return options_like(card) if defaults.packed_dataset(card) else {}

    def read(self, path: Any, options: Any) -> Sample:
        """Return the arrays of one raw file; with `nb.pack` of an image file, or of an item in its place."""
        return sample_of(path, self.card) if self.card is not None else self.__getattr__("read")

    demo: Any
    """demo(folder, count=100) -> folder: write a small data set in the raw format."""
    validate: Any
    """validate(source, …) -> a report of everything that is wrong with a source; `.ok`: no errors."""
    features: Any
    """features(source, into, …) -> a report: extract features from filmed clips with a pretrained network."""

    def __getattr__(self, name: str) -> Any:  # of what is not defined above
        if name == "BASELINE":
            return self.PLAN.replace(feed="workers", workers=0)
        if name == "BEST":
            named = (one for one in defaults.as_tuple(getattr(self, "measured", self.metrics)) if isinstance(one, str))
            return next((defaults.METRICS[each][1] + each for each in named), "-loss")
        fix = "it checks as it packs, see pack.bad" if name == "validate" else "define it"
        raise AttributeError(name) if name.startswith("_") else Lacking(f"{title_of(self)} has no {name}; {fix}")

    def __repr__(self) -> str:
        return f"Task {title_of(self)}"


HOOKS = {name for name in (*vars(Task), *Task.__annotations__) if not name.startswith("_")} - {"card"}


def as_task(task: Any) -> Task:
    """Return a Task unchanged, a subclass of it as an instance, any other module, class or object as one that has its
    hooks, and the defaults for the others. Raises TrainError for a network and a function."""
    if isinstance(task, Task):
        return task
    kind = task if isinstance(task, type) else type(task)
    if issubclass(kind, Task):
        return kind()
    if issubclass(kind, nn.Module | FunctionType) and not hasattr(task, "loss"):
        came = "a function" if kind is FunctionType else f"the network {kind.__name__}"
        raise TrainError(f"task must be an nb.Task, got {came}; pass nb.classify(net) or nb.regress(net)")
    adapted = Task()
    vars(adapted).update({name: getattr(task, name) for name in HOOKS if hasattr(task, name)}, _name=task_name(task))
    return adapted


def bind(task: TaskLike, card: Card) -> Task:
    """Return the task as it trains and answers on a pack: for one of `nb.pack` a copy that knows its card."""
    task = as_task(task)
    if not defaults.packed_dataset(card) or task.card is card:
        return task
    own = copy.copy(task)
    vars(own).update(card=card, _name=task_name(task))
    held = {name: x for name, x in vars(own).items() if name in ("criterion", "chosen")}  # which may count their calls
    vars(own).update(tree_map(lambda x: copy.deepcopy(x) if isinstance(x, nn.Module) else shallow(x), held))
    if own.preview is None and defaults.images_of(card):
        own.preview = defaults.preview
    return own


def build(task: Task, card: Card, plan: Any) -> nn.Module:
    """Return the network of a bound task; for a pack of `nb.pack` one that takes batches. Raises TrainError."""
    if isinstance(task.model, nn.Module):
        raise TrainError(f"{title_of(task)}: model must be a function of (card, plan), not the network it makes")
    model = task.model(card, plan)
    if not isinstance(model, nn.Module):
        raise TrainError(f"{title_of(task)}: model must return a torch.nn.Module, got {type(model).__name__}")
    if any(map(nn.parameter.is_lazy, model.parameters())):
        fix = "give the layers their sizes, or call the network on a sample first"
        raise TrainError(f"{title_of(task)}: the network has lazy layers, whose sizes are unknown so far; {fix}")
    if isinstance(model, nn.DataParallel | jit.ScriptModule) or hasattr(model, "_orig_mod"):  # torch.compile's
        rule = f"{title_of(task)}: the network must be the module itself, got {type(model).__name__} around it"
        raise TrainError(f"{rule}; leave that out: Plan(compile=True) compiles it, nb.launch uses several GPUs")
    held = model.state_dict()
    if odd := [name for name, each in held.items() if not isinstance(each, Tensor)]:
        fix = "let get_extra_state return a tensor, or nothing"
        raise TrainError(f"{title_of(task)}: {odd[0]} is no tensor, and checkpoints hold tensors only; {fix}")
    try:
        model.load_state_dict(held | {name: each.clone() for name, each in model.named_buffers() if name in held})
    except RuntimeError as error:
        rule = f"{title_of(task)}: the network does not take its own state_dict, so no checkpoint could be read"
        raise TrainError(f"{rule}: {str(error).splitlines()[-1].strip()}; correct it") from None
    for layer in model.modules():
        if isinstance(layer, nn.RNNBase) and "forward" not in vars(layer):
            vars(layer)["forward"] = partial(in_float32, layer)
    if task.card is not None:
        defaults.require_augmentable(card, task.augment)
        hook = partial(pass_columns, *find_columns(model, card))
        model.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
    frozen = [name for name, layer in model.named_modules() if {p.requires_grad for p in layer.parameters()} == {False}]
    vars(model)["_resting"] = [name for name in frozen * model.training if not model.get_submodule(name).training]
    set_training(model)
    return model


def shallow(x: Any) -> Any:
    return x if isinstance(x, jit.ScriptFunction) else copy.copy(x)  # which cannot be copied


def copied(network: nn.Module) -> nn.Module:
    """Return a deep copy, without the graph of what modules keep, such as activations of a call before."""
    kept = tree_leaves([vars(module) for module in network.modules()])
    return copy.deepcopy(network, {id(x): x.detach() for x in kept if getattr(x, "grad_fn", None) is not None})


def set_training(model: nn.Module) -> None:
    """Call `model.train()`, but leave frozen parts that were in eval mode, and norm layers all frozen, in eval mode."""
    model.train()
    for name in vars(model).get("_resting", ()):
        model.get_submodule(name).eval()
    for part in model.modules():
        if {p.requires_grad for p in part.parameters()} == {False}:
            for layer in part.modules():
                if isinstance(layer, _NormBase):  # also one without parameters
                    layer.eval()


def find_columns(model: nn.Module, card: Card) -> tuple[tuple[str, ...], bool]:
    """Return (the columns that forward takes, whether by name): the inputs and their lengths, `<input>_length`, that
    its parameters name; else the inputs in order; none where it takes the whole `batch`. Raises TrainError."""
    inputs, start = card.options["inputs"], f"{type(model).__name__}.forward"
    parameters = inspect.signature(model.forward).parameters.values()
    plain = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    kinds = {p.kind for p in parameters if not plain}  # forward(**columns), or a wrapper's (*args, **kwargs)
    if plain and plain[0].name == "batch":
        return (), False
    offered = [*inputs, *(f"{name}_length" for name in inputs if card.columns[name].kind == "ragged")]
    columns, required = [p.name for p in plain if p.name in offered], [p.name for p in plain if p.default is p.empty]
    unknown = [name for name in required if name not in columns]
    if unknown and (columns or len(unknown) != len(inputs)):
        came = f"which columns are {', '.join(unknown)}? The pack has {', '.join(offered)}"
        fix = "name the parameters after the columns, or take the whole dict: forward(self, batch)"
        raise TrainError(f"{start}({', '.join(required)}): {came}; {fix}")
    named = Parameter.VAR_POSITIONAL not in kinds or (len(inputs) > 1 and "x1" not in inputs)  # no tuple's parts
    return tuple(columns or inputs), bool(columns) or (Parameter.VAR_KEYWORD in kinds and named)


def pass_columns(columns: tuple[str, ...], by_name: bool, module: nn.Module, given: Any, named: Any) -> Any:
    """Replace a batch, and nothing else, by its columns: a forward pre-hook."""
    if not columns or named or len(given) != 1 or not isinstance(given[0], dict):
        return None
    taken = {name: given[0][name] for name in columns}
    return ((), taken) if by_name else ((*taken.values(),), {})


def as_sum(loss: Any, size: int) -> tuple[Tensor, Tensor | float]:
    """Return (sum, count) of what a `loss` returned for so many samples: a scalar is their mean. Raises TrainError."""
    if isinstance(loss, Tensor):
        return (loss.sum(), loss.numel()) if loss.dim() else (loss * size, size)
    pair = loss if isinstance(loss, tuple) and len(loss) == 2 and isinstance(loss[0], Tensor) else ()
    if pair and all(each.numel() == 1 if isinstance(each, Tensor) else isinstance(each, Real) for each in pair):
        total, count = pair
        return total.squeeze(), count.detach().squeeze() if isinstance(count, Tensor) else count
    rule = "loss must return a tensor, the mean or a term per sample, or (sum, count), the sum a tensor"
    raise TrainError(f"{rule}; got a {type(loss).__name__}; compute it by operations of torch, without .item()")


def identity(task: Task, card: Card, model: nn.Module, plan: Plan) -> dict[str, list[str]]:
    """Return what a run is besides its plan, each part as a list of lines; the name of a task of other packs than those
    of `nb.pack` stands for its loss, metrics and augmentation."""
    parts, name = {"pack": [card.digest[:12]], "network": [*structure(model)]}, task_name(task)
    if task.card is not None:
        given = vars(task).get("given", {"loss": task.loss})
        loss, metrics = given["loss"], defaults.as_tuple(getattr(task, "measured", task.metrics))
        named = [qualified_name(loss) if loss else "default"]
        parts["loss"] = [*structure(loss, values=True)] if isinstance(loss, nn.Module) else named  # class weights too
        parts["metrics"] = [metric if isinstance(metric, str) else qualified_name(metric) for metric in metrics]
        parts["augment"] = [f"{name} {strength}" for name, strength in defaults.strengths(task.augment).items()]
        for part in ("optimizer", "schedule"):
            own = getattr(hook := getattr(task, part), "__func__", None) is not getattr(Task, part)
            parts[part] = [qualified_name(given.get(part) or hook) if own else "default"]
        if "given" not in vars(task):  # a Task that somebody wrote, whose loss may read its attributes
            kinds = [kind for kind in reversed(type(task).__mro__) if kind not in Task.__mro__]
            own = [(n, x) for kind in kinds for n, x in vars(kind).items() if n not in HOOKS]
            held = {n: x for n, x in own if isinstance(x, int | float | str)} | vars(task)
            parts["settings"] = [*settings(held, values=False)]  # a list may collect something
        if not plan.given().keys() & ADVISED:
            parts["recipe"] = [f"lr {task.PLAN.lr}, batch size {task.PLAN.batch_size}"]
    parts["trained"] = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    if ":" not in name:  # else the name of a variable, which may change
        parts["task"] = [name]
    return {part: [re.sub(" at 0x[0-9a-f]+", "", line) for line in lines] for part, lines in parts.items()}


def structure(model: nn.Module, values: bool = False) -> Iterator[str]:
    """Yield a line a module, with its type and its plain settings, and a line a tensor, with its shape or values."""
    for name, module in model.named_modules():
        kind = "BatchNorm" if isinstance(module, _BatchNorm) else type(module).__name__  # also ranks' Sync…
        yield f"{name}: {kind}({', '.join(settings(vars(module), values))})".removeprefix(": ")
    for name, tensor in model.state_dict().items():
        yield f"{name} {[*tensor.shape]} {digest(tensor) if values else ''}".strip()


def settings(held: Mapping[str, Any], values: bool) -> Iterator[str]:
    """Yield `name=value` of plain attributes, also within dicts and dataclasses; values: also of lists and tensors."""
    for n, x in held.items():
        x = digest(x) if values and isinstance(x, Tensor) else x
        x = qualified_name(x) if isinstance(x, FunctionType | BuiltinFunctionType) else x  # such as F.relu
        if hasattr(x, "__dataclass_fields__") or type(x).__name__.endswith("Namespace"):
            skipped = isinstance(x, type | Plan | Card) or hasattr(x, "model_type")  # of which others tell, as layers
            x = {} if skipped else getattr(x, "__dict__", {})
        if isinstance(x, dict) and not values:
            x = tuple(settings(x, values)) or []
        if isinstance(x, (*PLAIN, list, dict) if values else PLAIN) and n not in VARYING and str(n)[:1] != "_":
            yield f"{n}={x}"


def digest(tensor: Tensor) -> str:
    held = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(held.numpy().tobytes()).hexdigest()[:12]


def qualified_name(function: Any) -> str:
    """Return the name of a class or function, with keywords of a partial and plain values of an object, or read."""
    inner = getattr(function, "func", function)
    inner = getattr(inner, "__func__", inner)  # of a method
    held = {} if isinstance(inner, type) else getattr(inner, "__dict__", {})
    held = read_by(inner) if isinstance(inner, FunctionType) else held
    held = {n: digest(x) if isinstance(x, Tensor) and x.is_floating_point() else x for n, x in held.items()}
    plain = {name: value for name, value in held.items() if isinstance(value, int | float | str | None)}
    given = {**plain, **getattr(function, "keywords", {})}
    named = (name for name in given if name[0] != "_" and name.lower() not in ("training", "device"))
    settings = ", ".join(f"{n}={qualified_name(given[n]) if callable(given[n]) else repr(given[n])}" for n in named)
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    return f"{name}({settings})" if settings else name


def read_by(function: FunctionType) -> dict[str, Any]:
    """Return by name what a function, not torch's, reads: of its module what it does not set, defaults, its closure."""
    if (function.__module__ or "").partition(".")[0] == "torch":
        return {}
    code, steps = function.__code__, [*dis.get_instructions(function)]
    loaded, stored = ({each.argval for each in steps if each.opname == f"{act}_GLOBAL"} for act in ("LOAD", "STORE"))
    held = {name: function.__globals__.get(name, ...) for name in sorted(loaded - stored)}
    defaults_of = zip(code.co_varnames[: code.co_argcount][::-1], (function.__defaults__ or ())[::-1], strict=False)
    return {**held, **dict(defaults_of), **inspect.getclosurevars(function).nonlocals}


def task_name(task: Any) -> str:
    """Return `package.module` or `module:name`, from which a run imports its task again: of an instance the variable
    that holds it, of a Task without attributes of its own its class; `module:` where there is none."""
    if isinstance(task, ModuleType):
        return task.__name__
    if isinstance(task, type):
        return f"{task.__module__}:{task.__qualname__}"
    kind, known = type(task), getattr(task, "__dict__", {})
    if isinstance(task, Task) and "_name" in known:  # of what `bind` copied, or `as_task` made
        return known["_name"]
    for module in (getattr(task, "__module__", kind.__module__), "__main__"):
        for name, value in list(vars(sys.modules.get(module, object)).items()):
            if value is task and not name.startswith("_"):  # IPython's _ and _12
                return f"{module}:{name}"
    return f"{kind.__module__}:{kind.__qualname__ if isinstance(task, Task) and not known else ''}"


def title_of(task: TaskLike) -> str:
    """Return a task's name in a sentence: a notebook's variable; without a name what made it, `nb.classify(…)`."""
    name = task_name(task)
    return vars(task).get("made", name[:-1]) if name.endswith(":") else name.removeprefix("__main__:")


def import_task(name: str, where: Path | str) -> Task:
    """Return the task of that name; where: what names it. Raises CheckpointError if it cannot be imported."""
    module, colon, attribute = name.partition(":")
    if colon and not attribute:
        rule = f"{where}: its task has no name to import it by"
        raise CheckpointError(f"{rule}; pass the same one as task=, such as nb.classify(net)")
    try:
        source = importlib.import_module(module)
        return as_task(attrgetter(attribute)(source) if attribute else source)
    except (Exception, SystemExit) as error:  # whatever a module raises while it is imported
        fix = "run the cell that defines it, put its file next to the notebook, or pass task="
        raise CheckpointError(f"{where}: its task {name!r} cannot be imported ({error}); {fix}") from None
