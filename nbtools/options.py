"""Options of the terminal, read from signatures and from the fields of a Plan; the plan that a command line asks for;
tasks by name."""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import math
import pkgutil
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

from nbtools import tasks
from nbtools.data import Pack, cores, pack, say
from nbtools.errors import NbtoolsError, sentence
from nbtools.identity import former_run
from nbtools.measure import advise, find_batch, preset, processes
from nbtools.train import Plan, Task, as_task

BUILT_IN = tuple(found.name for found in pkgutil.iter_modules(tasks.__path__) if found.name != "common")
AUTO = (("batch_size", "auto"), ("workers", "auto"))  # settings that may be `auto`
OTHERS = ("data", "train", "like", "network", "progress")  # parameters of functions that no text is given for
SEVERAL = (tuple, list, Sequence, Iterable)


class Parser(argparse.ArgumentParser):
    """Takes options by their whole names, and answers a mistake in one sentence, with the nearest option."""

    def __init__(self, **more: Any):
        super().__init__(**more, allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            name = unknown[0].partition("=")[0]
            close = difflib.get_close_matches(name, self._option_string_actions, 1)
            self.error(f"no option {name}" + (f"; did you mean {close[0]}?" if close else ""))
        return found, unknown

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"nbtools: {sentence(message)} See {self.prog} --help\n")


def add_options(one: argparse.ArgumentParser, task: Task, source: str) -> None:
    """Add a task's options to a command. source: "plan", the fields of its Plan and where others come from;
    "evaluation", its own fields that only evaluating needs; else its function with these parameters."""
    group = one.add_argument_group(f"options of {source}")
    functions = [type(task.PLAN) if source in ("plan", "evaluation") else getattr(task, source)]
    if source == "plan":
        bases = ("advised", "plan", "baseline", *task.PRESETS)
        text = "source of the settings that are not given: advice, the task's plan, its baseline, or one of its presets"
        group.add_argument("--from", dest="base", choices=bases, default="advised", help=text)
    if source == "pack" and task.packs_datasets:
        functions.insert(0, pack)
    for name, (kind, text) in {name: each for function in functions for name, each in parameters(function)}.items():
        how: Any = {"type": partial(read, source, name, kind), "metavar": "VALUE"}
        if kind is bool:
            how = {"action": argparse.BooleanOptionalAction}
        how |= {"dest": f"{source} {name}", "default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
        if source != "evaluation" or (name.startswith("eval_") and not hasattr(Plan, name)):
            group.add_argument(f"--{name.replace('_', '-')}", **how)


def parameters(function: Any) -> Iterator[tuple[str, tuple[Any, str]]]:
    """Yield the parameters of a function, or the fields of a Plan, that a text can be given for: name, (type, help)."""
    fields = getattr(function, "__dataclass_fields__", {})
    try:
        signature = inspect.signature(function, eval_str=True)
    except NameError:  # of a type that is imported for type checkers only
        signature = inspect.signature(function)
    for name, each in signature.parameters.items():
        kind, default, rule = each.annotation, each.default, fields[name].metadata if name in fields else {}
        if kind is each.empty or isinstance(kind, str):
            kind = str | None if default is None else type(default)
        text = rule.get("help") or ("default: from the data" if default is None else f"default {default}")
        text += f" ({', '.join(map(str, rule['choices']))})" if rule.get("choices") else ""
        text += "; auto: by this machine" if fields and (name, "auto") in AUTO else ""
        if (fields or name not in OTHERS) and (default is not each.empty or each.kind is each.KEYWORD_ONLY):
            yield name, (kind, text)


def given(options: argparse.Namespace, source: str) -> dict[str, Any]:
    """Return the options from a source that were given, without settings to be measured: name → value."""
    found = {name.removeprefix(f"{source} "): v for name, v in vars(options).items() if name.startswith(f"{source} ")}
    return {name: value for name, value in found.items() if (name, value) not in AUTO}


def read(source: str, name: str, kind: Any, text: str) -> Any:
    """Return the value of an option. Raises NbtoolsError for a text that its type does not allow."""
    if source == "plan" and (name, text) in AUTO:
        return text
    try:
        return value_of(text, kind)
    except ValueError as error:
        raise NbtoolsError(f"--{name.replace('_', '-')} must be {error}, got {text!r}") from None


def value_of(text: str, kind: Any) -> Any:
    """Return a text as a value of an annotation; commas stand between several. Raises ValueError with the rule."""
    origin, members = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        rules, first = [], (int, float, types.NoneType, *SEVERAL)  # and then what takes any text
        for member in sorted(members, key=lambda each: (typing.get_origin(each) or each) not in first):
            try:
                return value_of(text, member)
            except ValueError as error:
                rules.append(str(error))
        raise ValueError(" or ".join(rules))
    if kind is types.NoneType:
        if text.lower() != "none":
            raise ValueError("none")
        return None
    if kind in (int, float):
        if re.fullmatch(r"-?(0|[1-9]\d*)", text.strip()):  # val=100 are 100 samples; "0123" is a text of digits
            return int(text)
        try:
            return float(text if kind is float else "")
        except ValueError:
            raise ValueError("a number" if kind is float else "a whole number") from None
    if origin in SEVERAL and not (members == (str,) and "," not in text):  # a text is a sequence of characters
        parts, counted = text.split(","), origin is tuple and members and Ellipsis not in members
        kinds = members if counted else [members[0] if members else int | float | str] * len(parts)
        try:
            return tuple(value_of(part, each) for part, each in zip(parts, kinds, strict=True))
        except ValueError:
            raise ValueError(f"{f'{len(members)} ' if counted else ''}numbers separated by commas") from None
    return Path(text) if kind is Path else text


# -- the plan of a command line


def plan_of(task: Task, pack: Pack, options: argparse.Namespace) -> Plan:
    """Return the started run's plan, else the one that --from names; with the settings given on the command line.

    What follows from them is said: another batch size without an lr adjusts lr by the plan's lr_rule, and in a new run
    fewer epochs shorten the warmup.
    """
    knobs, typed = given(options, "plan"), {name.removeprefix("plan ") for name in vars(options)}
    former = None if options.run is None or options.fresh else former_run(task, options.run)
    if former is not None:
        plan = former.applied.marked(former.applied.to_dict())
    else:
        plan = base_plan(task, pack, options.base, knobs.get("network"))
        epochs = knobs.get("epochs", plan.epochs)
        if "warmup_epochs" not in knobs and plan.warmup_epochs and 0 < epochs < plan.epochs:
            knobs["warmup_epochs"] = round(plan.warmup_epochs * epochs / plan.epochs, 2)
    new = plan.turn(**knobs)
    if "batch_size" in typed - knobs.keys():
        batch = find_batch(task, pack, new)
        say(str(batch))
        new = new.turn(batch_size=batch.batch_size)
    if "workers" in typed - knobs.keys():
        number, why = processes(cores())
        say(f"workers {number}: {why}")
        new = new.replace(workers=number)
    moved = new.changes_from(plan)
    for name in sorted(moved.keys() - typed):
        ruled = name == "lr" and "batch_size" in moved
        say(f"{name} {moved[name]}" + (f" for batch {moved['batch_size']} ({new.lr_rule} rule)" if ruled else ""))
    return new


def base_plan(task: Task, pack: Pack, base: str, network: str | None) -> Plan:
    """Return the plan that --from names; an advised one is for the requested network. What a preset leaves to machine
    and data is said. Raises NbtoolsError for one that cannot train here."""
    if base in task.PRESETS:
        plan, why = preset(task, pack, base)
        if plan is None:
            raise NbtoolsError(f"--from {base} cannot train here: {why}")
        if why:
            say(f"{base}: {why}")
        return plan
    if base != "advised":
        return task.PLAN if base == "plan" else task.BASELINE
    plan = advise(task, pack, measure=False).plan
    return task.with_network(plan, pack, network) if network else plan


# -- tasks, and JSON


def find_task(name: str) -> Task:
    """Import a built-in task by its short name, or any module, or `module:Name` in it. Raises NbtoolsError."""
    (module, _, attribute), why = name.partition(":"), ""
    if re.fullmatch(r"[^\W\d][\w.]*(:[\w.]+)?", name):
        try:
            found = importlib.import_module(f"nbtools.tasks.{name}" if name in BUILT_IN else module)
            return as_task(attrgetter(attribute)(found) if attribute else found)
        except (ImportError, AttributeError) as error:
            why = f" ({error})"
    own = "or your own that can be imported from here, a module or MODULE:NAME"
    raise NbtoolsError(f"no task {name!r}: use {', '.join(BUILT_IN)}, {own}{why}")


def plain(value: Any) -> Any:
    """Return a value as JSON has it: without NaN and infinity, and without types of ours."""
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
