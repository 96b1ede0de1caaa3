"""Words of the terminal: options read from definitions, which are the parameters of a task's functions and the fields
of its Plan, so that a new one becomes an option by itself; the plan that a command line asks for; tasks by name.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import importlib
import inspect
import math
import pkgutil
import sys
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from nbtools import tasks
from nbtools.data import Pack, cores
from nbtools.errors import NbtoolsError, sentence
from nbtools.identity import former_run
from nbtools.live import FIRST, WORST
from nbtools.measure import advise, find_batch, preset, processes
from nbtools.train import Plan, Task, as_task

AUTO = (("batch_size", "auto"), ("workers", "auto"))  # settings that may be `auto`
BUILT_IN = tuple(found.name for found in pkgutil.iter_modules(tasks.__path__) if found.name != "common")
SWITCH: Any = {"action": argparse.BooleanOptionalAction}  # Python 3.14 takes no metavar with it


def add_signature(one: argparse.ArgumentParser, function: Any, *skip: str) -> None:
    """The keyword parameters of a task's function as options."""
    group = one.add_argument_group("the task's options for " + function.__name__)
    try:
        signature = inspect.signature(function, eval_str=True)
    except NameError:  # of a type that is imported for type checkers only
        signature = inspect.signature(function)
    for name, parameter in signature.parameters.items():
        variadic = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        if not variadic and name not in ("source", "folder", "progress", *skip):
            text = "default: from the data" if parameter.default is None else f"default {parameter.default}"
            reads: Any = SWITCH if kind_of(parameter) is bool else {"type": partial(read_option, parameter)}
            add_option(group, f"option_{name}", text, **reads)


def add_knobs(one: argparse.ArgumentParser, kind: type[Plan], fields: Iterable[dataclasses.Field[Any]]) -> None:
    """Fields of a Plan as options."""
    group, hints = one.add_argument_group("settings of the Plan"), typing.get_type_hints(kind)
    for field in fields:
        choices, text = field.metadata.get("choices"), field.metadata.get("help", "")
        text += f" ({', '.join(map(str, choices))})" if choices else ""
        text += {"batch_size": "; auto: measure it here", "workers": "; auto: by the cores"}.get(field.name, "")
        add_option(group, f"knob_{field.name}", text, **(SWITCH if hints[field.name] is bool else {}))


def add_option(group: Any, dest: str, text: str, **more: Any) -> None:
    """An option that is absent from the namespace unless it is given."""
    flag = "--" + dest.partition("_")[2].replace("_", "-")
    more = {"default": argparse.SUPPRESS, **({} if "action" in more else {"metavar": "VALUE"}), **more}
    group.add_argument(flag, dest=dest, help=text.replace("%", "%%"), **more)


def options_of(options: argparse.Namespace, prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in vars(options).items() if name.startswith(prefix)}


def own(options: argparse.Namespace) -> dict[str, Any]:
    """The task's own options."""
    return options_of(options, "option_")


def given(plan: Plan, options: argparse.Namespace) -> dict[str, Any]:
    """The settings on the command line, without those that are to be measured."""
    knobs = {name: value for name, value in options_of(options, "knob_").items() if (name, value) not in AUTO}
    return {name: plan.parse(name, value) if isinstance(value, str) else value for name, value in knobs.items()}


def kind_of(parameter: inspect.Parameter) -> Any:
    """A parameter's annotation; without one, the type of its default."""
    kind, default = parameter.annotation, parameter.default
    if kind is parameter.empty or isinstance(kind, str):
        return str | None if default is None else type(default)
    return kind


def read_option(parameter: inspect.Parameter, text: str) -> Any:
    """An option's text as the parameter's annotation has it; without one, as its default. Raises NbtoolsError for what
    does not fit."""
    kind = kind_of(parameter)
    try:
        return converted(text, kind)
    except (KeyError, ValueError):
        flag = parameter.name.replace("_", "-")
        raise NbtoolsError(f"--{flag} must be {described(kind)}, got {text!r}") from None


def whole(text: str) -> int:
    if str(int(text)) != text.strip():  # "0123" is a text of digits, where a text may stand
        raise ValueError
    return int(text)


def number(text: str) -> float:
    try:
        return whole(text)  # val=100 are 100 samples
    except ValueError:
        return float(text)


PLAIN: dict[Any, tuple[str, Callable[[str], Any]]] = {
    int: ("a whole number", whole),
    float: ("a number", number),
    bool: ("true or false", {"true": True, "false": False}.__getitem__),
    types.NoneType: ("none", {"none": None}.__getitem__),
}
"""Type → the rule for its texts, and how one is read; a text of any other type is taken unchanged."""
UNIONS, SEVERAL = (types.UnionType, typing.Union), (tuple, list, Sequence, Iterable)


def converted(text: str, kind: Any) -> Any:
    """A text as a value of an annotation; commas stand between several. Raises KeyError or ValueError."""
    origin, args = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in UNIONS:
        for one in sorted(args, key=lambda one: (typing.get_origin(one) or one) not in (*PLAIN, *SEVERAL)):  # text last
            with suppress(KeyError, ValueError):
                return converted(text, one)
        raise ValueError
    if kind in PLAIN:
        return PLAIN[kind][1](text.lower())
    if origin in SEVERAL and not (args == (str,) and "," not in text):  # a text is a sequence of characters
        parts = text.split(",")
        kinds = args if is_counted(kind) else [args[0] if args else int | float | str] * len(parts)
        return tuple(converted(part, one) for part, one in zip(parts, kinds, strict=True))
    return Path(text) if kind is Path else text


def read_samples(text: str) -> str | list[int]:
    """Which samples to show, see `nb.fit`: a word, or ids of the pack separated by commas. Raises ArgumentTypeError."""
    try:
        return text if text in (FIRST, WORST) else [whole(part) for part in text.split(",")]
    except ValueError:
        rule = f"must be {FIRST}, {WORST}, or ids of the pack separated by commas, as 12,40,77"
        raise argparse.ArgumentTypeError(f"{rule}, got {text!r}") from None


def described(kind: Any) -> str:
    """The rule for the texts of an annotation."""
    origin, args = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in UNIONS:
        return " or ".join(dict.fromkeys(map(described, args)))
    if origin in SEVERAL:
        return f"{len(args)} numbers separated by commas" if is_counted(kind) else "numbers separated by commas"
    return PLAIN[kind][0] if kind in PLAIN else "text"


def is_counted(kind: Any) -> bool:
    """Whether it is a tuple of this length."""
    return typing.get_origin(kind) is tuple and Ellipsis not in typing.get_args(kind)


# -- the plan of a command line


def plan_of(task: Task, pack: Pack, options: argparse.Namespace) -> Plan:
    """The started run's plan, else the one that --from names; with the settings given on the command line.

    What follows from them is reported on stderr: another batch size without an lr adjusts lr by the plan's lr_rule, and
    in a new run fewer epochs shorten the warmup.
    """
    former, knobs = None, given(task.PLAN, options)
    if options.run is not None and not options.fresh:
        former = former_run(task, options.run)
    if former is not None:
        plan = former.applied.marked(former.applied.to_dict())
    else:
        plan = based(task, pack, options.base, knobs.get("network"))
        epochs = knobs.get("epochs", plan.epochs)
        if "warmup_epochs" not in knobs and plan.warmup_epochs and 0 < epochs < plan.epochs:
            knobs["warmup_epochs"] = round(plan.warmup_epochs * epochs / plan.epochs, 2)
    turned = measured(task, pack, plan.turn(**knobs), options)
    moved = turned.changes_from(plan)
    for name in sorted(moved.keys() - options_of(options, "knob_").keys()):
        ruled = name == "lr" and "batch_size" in moved
        why = f" for batch {moved['batch_size']} ({turned.lr_rule} rule)" if ruled else ""
        print(f"{name} {moved[name]}{why}", file=sys.stderr)
    return turned


def based(task: Task, pack: Pack, base: str, network: str | None) -> Plan:
    """The plan that --from names; an advised one is for the requested network. What a preset leaves to the machine and
    the data is reported on stderr. Raises NbtoolsError for one that cannot train here."""
    if base in task.PRESETS:
        plan, why = preset(task, pack, base)
        if plan is None:
            raise NbtoolsError(f"--from {base} cannot train here: {why}")
        if why:
            print(f"{base}: {why}", file=sys.stderr)
        return plan
    if base != "advised":
        return task.PLAN if base == "plan" else task.BASELINE
    plan = advise(task, pack, measure=False).plan
    return task.with_network(plan, pack, network) if network else plan


def measured(task: Task, pack: Pack, plan: Plan, options: argparse.Namespace) -> Plan:
    """The plan with the settings that the command line asks to measure; the result is reported on stderr."""
    asked = options_of(options, "knob_").items()
    if AUTO[0] in asked:
        found = find_batch(task, pack, plan)
        print(found, file=sys.stderr)
        plan = plan.turn(batch_size=found.batch_size)
    if AUTO[1] in asked:
        number, why = processes(cores())
        print(f"workers {number}: {why}", file=sys.stderr)
        plan = plan.replace(workers=number)
    return plan


# -- the command line as a whole


class Parser(argparse.ArgumentParser):
    """Takes options by their whole names, and a switch also with its value: `--flag false` is `--no-flag`. Answers a
    mistake in one sentence."""

    def __init__(self, **more: Any):
        super().__init__(**more, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        words: list[str] = []
        for word in args:
            flag, equals, value = word.partition("=") if "=" in word else ((words or [""])[-1], "", word)
            negated = f"--no-{flag.removeprefix('--')}"
            if value.lower() in ("true", "false") and negated in self._option_string_actions:
                words[len(words) - (not equals) :] = [flag if value.lower() == "true" else negated]
            else:
                words.append(word)
        found, unknown = super().parse_known_args(words, namespace)
        if unknown:
            options = "; ".join(self.no_option(word) for word in unknown if word.startswith("-"))
            self.error(options or f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def no_option(self, word: str) -> str:
        name = word.partition("=")[0]
        close = difflib.get_close_matches(name, self._option_string_actions, 1)
        return f"no option {name}" + (f"; did you mean {close[0]}?" if close else "")

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"nbtools: {sentence(message)} See {self.prog} --help\n")


def documented(define: Callable[..., Any]) -> dict[str, Any]:
    """The help of a command: the first line of its function's docstring, and the examples below it."""
    first, _, examples = (inspect.getdoc(define) or "").partition("\n\n")
    return {"help": first, "description": first, "epilog": "examples:\n" + textwrap.indent(examples, "  ")}


def find_task(name: str) -> Task:
    """A built-in task by its short name, or any importable module, or `module:Name` in it. Raises NbtoolsError naming
    the built-in tasks."""
    if name in BUILT_IN:
        return as_task(importlib.import_module(f"nbtools.tasks.{name}"))
    module, colon, attribute = name.partition(":")
    try:
        if all(map(str.isidentifier, module.split("."))):
            found = importlib.import_module(module)
            if not colon:
                return as_task(found)
            if attribute.isidentifier() and hasattr(found, attribute):
                return as_task(getattr(found, attribute))
            fix = f"its tasks are {', '.join(tasks_in(found)) or 'none'}"
            raise NbtoolsError(f"no task {attribute!r} in {found.__file__ or module}: {fix}")
    except ModuleNotFoundError as error:
        if not f"{module}.".startswith(f"{error.name}."):  # a module that the task imports
            raise
    raise NbtoolsError(
        f"no task {name!r}: use {', '.join(BUILT_IN)}, or any module of yours that can be imported from here"
    )


def tasks_in(module: Any) -> list[str]:
    """The names of a module's own tasks: instances of Task and subclasses."""
    kinds = {name: value if isinstance(value, type) else type(value) for name, value in vars(module).items()}
    return [name for name, kind in kinds.items() if issubclass(kind, Task) and kind is not Task]


def plain(value: Any) -> Any:
    """A value as JSON has it: without NaN and infinity, and without types of ours."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): plain(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    for convert in ("to_dict", "tolist"):  # reports, plans and cards; arrays and tensors
        if hasattr(value, convert):
            return plain(getattr(value, convert)())
    return str(value)
