"""What the terminal's options mean: a task by its name, its own options by their signatures, and knobs as a plan."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import sys
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from nbtools.data import Pack
from nbtools.errors import NbtoolsError
from nbtools.folder import stored_plan
from nbtools.measure import advise, find_batch, find_workers
from nbtools.train import Plan, Task, as_task

BUILT_IN = "nbtools.tasks"
MEASURED = (("batch_size", "auto"), ("workers", "auto"))  # knobs that may be left to measuring


def add_signature(one: argparse.ArgumentParser, function: Any, skip: Sequence[str]) -> None:
    """The keyword parameters of a function as options."""
    group = one.add_argument_group("the task's options of " + function.__name__)
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in skip and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            default = f"default {parameter.default}" if parameter.default is not None else "default: by the data"
            text, dest = default.replace("%", "%%"), f"option_{name}"
            group.add_argument(
                flag(name), dest=dest, metavar="VALUE", type=literal, help=text, default=argparse.SUPPRESS
            )


def add_training(one: argparse.ArgumentParser, task: Task) -> None:
    one.add_argument("--keep", metavar="FOLDER", help="second folder for copies of the run, e.g. drive:runs/captcha")
    one.add_argument("--smoke-test", action="store_true", help="no data: one step of demo samples, saved and loaded")
    one.add_argument("--processes", type=int, default=1, metavar="N", help="several are not there yet")
    one.add_argument("--no-receipt", action="store_true", help="do not measure the baseline at the end")
    one.add_argument(
        "--from",
        dest="base",
        choices=("advised", "plan", "baseline"),
        default="advised",
        help="where knobs not given come from",
    )
    add_knobs(one, type(task.PLAN), dataclasses.fields(task.PLAN))


def add_knobs(one: argparse.ArgumentParser, kind: type[Plan], fields: Sequence[dataclasses.Field[Any]]) -> None:
    """Fields of a Plan as options."""
    group = one.add_argument_group("knobs of the Plan")
    hints = typing.get_type_hints(kind)
    for field in fields:
        choices, text = field.metadata.get("choices"), field.metadata.get("help", "")
        shown = (f"{text} ({', '.join(map(str, choices))})" if choices else text).replace("%", "%%")
        shown += "; auto: measured here" if (field.name, "auto") in MEASURED else ""
        if hints[field.name] is bool:
            group.add_argument(
                flag(field.name),
                dest=f"knob_{field.name}",
                action=argparse.BooleanOptionalAction,
                help=shown,
                default=argparse.SUPPRESS,
            )
        else:
            group.add_argument(
                flag(field.name),
                dest=f"knob_{field.name}",
                metavar="VALUE",
                help=shown,
                default=argparse.SUPPRESS,
            )


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def literal(text: str) -> Any:
    """A typed option as a plain value: a number, true, false, none, several of them with commas, else text."""
    if "," in text:
        return tuple(literal(part) for part in text.split(","))
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text) if not (kind is int and text != str(int(text))) else text  # "0123": a text of digits
        except ValueError:
            continue
    return text


def find_task(name: str) -> Task:
    """A built-in task by its short name, or any importable module. Raises NbtoolsError naming what there is."""
    for module in (f"{BUILT_IN}.{name}", name) if all(map(str.isidentifier, name.split("."))) else ():
        try:
            return as_task(importlib.import_module(module))
        except ModuleNotFoundError as error:
            if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
                raise
    import pkgutil

    import nbtools.tasks as tasks

    known = ", ".join(sorted(m.name for m in pkgutil.iter_modules(tasks.__path__)))
    raise NbtoolsError(f"no task {name!r}: there are {known}, and any module of yours that can be imported from here")


def options_of(options: argparse.Namespace, prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in vars(options).items() if name.startswith(prefix)}


def plan_of(task: Any, pack: Pack, options: argparse.Namespace) -> Plan:
    """The started run's plan, else the one that --from names; with the knobs given on the command line.

    What follows from them is said on stderr: another batch size without an lr moves lr by the plan's lr_rule, and in a
    new run fewer epochs shorten the warmup.
    """
    plan = stored_plan(task, options.run)
    knobs: dict[str, Any] = {}
    if plan is None:
        plan = based(task, pack, options)
        knobs = shortened(plan, given(plan, options))
    knobs |= given(plan, options)
    turned = measured(task, pack, plan.turn(**knobs), options)
    moved = turned.changes_from(plan)
    for name in sorted(moved.keys() - options_of(options, "knob_").keys()):
        ruled = name == "lr" and "batch_size" in moved
        why = f" for batch {moved['batch_size']} ({turned.lr_rule} rule)" if ruled else ""
        print(f"{name} {moved[name]}{why}", file=sys.stderr)
    return turned


def based(task: Any, pack: Pack, options: argparse.Namespace) -> Plan:
    """The plan that --from names; an advised one for the network that was asked for."""
    if options.base != "advised":
        return task.PLAN if options.base == "plan" else task.BASELINE
    plan = advise(task, pack, measure=False).plan
    network = given(plan, options).get("network")
    return task.with_network(plan, pack, network) if network else plan


def shortened(plan: Plan, knobs: Mapping[str, Any]) -> dict[str, Any]:
    """The warmup's share of fewer epochs, where no warmup is given: --epochs 3 is no reason to refuse a plan of 100
    with 10 of warmup, nor to spend the three on it."""
    epochs = knobs.get("epochs", plan.epochs)
    if "warmup_epochs" in knobs or not plan.warmup_epochs or not 0 < epochs < plan.epochs:
        return {}
    return {"warmup_epochs": round(plan.warmup_epochs * epochs / plan.epochs, 2)}


def answering(kind: type[Plan]) -> list[dataclasses.Field[Any]]:
    """The knobs of how a task answers, called eval_…: a trained run may be evaluated with others."""
    return [f for f in dataclasses.fields(kind) if f.metadata.get("live") and f.name.startswith("eval_")]


def given(plan: Plan, options: argparse.Namespace) -> dict[str, Any]:
    """The knobs on the command line, without those that are to be measured."""
    knobs = {name: value for name, value in options_of(options, "knob_").items() if (name, value) not in MEASURED}
    return {name: plan.parse(name, value) if isinstance(value, str) else value for name, value in knobs.items()}


def measured(task: Any, pack: Pack, plan: Plan, options: argparse.Namespace) -> Plan:
    """The plan with the knobs that the command line leaves to measuring here, and what was found on stderr."""
    asked = options_of(options, "knob_").items()
    if MEASURED[0] in asked:
        found = find_batch(task, pack, plan)
        print(found, file=sys.stderr)
        plan = plan.turn(batch_size=found.batch_size)
    if MEASURED[1] in asked:
        crew = find_workers(task, pack, plan)
        print(crew.reason, file=sys.stderr)
        plan = plan.replace(workers=crew.workers, prefetch=crew.prefetch)
    return plan
