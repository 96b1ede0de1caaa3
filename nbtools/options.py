"""Options of the terminal from a task's signatures and Plan; the task and the plan that a command line names."""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

from nbtools import tasks
from nbtools.data import Pack, pack, say
from nbtools.errors import NbtoolsError, sentence
from nbtools.identity import former_run
from nbtools.measure import advise, preset
from nbtools.train import Plan, Task, as_task, listed

BUILT_IN = tuple(module.name for module in pkgutil.iter_modules(tasks.__path__) if module.name != "common")
# Parameters of tasks' functions that no text is given for; `seed` is the plan's.
UNTYPED = ("data", "train", "like", "network", "progress", "seed", "folds", "text")
BASES = ("advised", "measured", "plan", "baseline")
FROM = "the settings that are not given: by rules, measured now, the task's own plan, its baseline, a preset"
RULES = {"int": "a whole number", "float": "a number", "None": "none"}


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that answers a mistake in one sentence, with the nearest word."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, unknown = super().parse_known_args(args, namespace)
        for name in unknown[:1]:
            self.error(f"unknown argument {name}{meant(name.partition('=')[0], self._option_string_actions)}")
        return options, unknown

    def error(self, message: str) -> NoReturn:
        if wrong := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            message += meant(wrong[1], re.findall(r"[\w.-]+", wrong[2]))
        self.exit(2, f"nbtools: {sentence(message)} See {self.prog} --help\n")


def meant(name: str, names: Iterable[str]) -> str:
    """Return the end of a sentence that names the word nearest to a mistyped one."""
    near = difflib.get_close_matches(name, list(names), 1)
    return f"; did you mean {near[0]}?" if near else ""


def add_options(one: argparse.ArgumentParser, task: Task, source: str) -> None:
    """Add a task's options to a command, as `typed` reads them. source: "plan", the fields of its Plan; "evaluation",
    those of them that only its evaluation needs; else its function of this name."""
    group, functions = one.add_argument_group(f"options of {source}"), [getattr(task, source, None)]
    if source in ("plan", "evaluation"):
        functions = [type(task.PLAN)]
    elif source == "pack" and task.packs_datasets:
        functions.insert(0, pack)
    if source == "plan":
        group.add_argument("--from", dest="base", choices=(*BASES, *task.PRESETS), default="advised", help=FROM)
    for name, (kind, text) in {name: each for function in functions for name, *each in parameters(function)}.items():
        if source == "evaluation" and (hasattr(Plan, name) or not name.startswith("eval_")):
            continue
        flag = f"--{name.replace('_', '-')}"
        how: Any = {"type": partial(read, flag, kind), "metavar": "VALUE"}
        if kind == "bool":
            how = {"action": argparse.BooleanOptionalAction}
        group.add_argument(
            flag, dest=f"{source}.{name}", default=argparse.SUPPRESS, help=text.replace("%", "%%"), **how
        )


def typed(options: argparse.Namespace, source: str) -> dict[str, Any]:
    """Return the options of `add_options` that a command line has."""
    return {name.partition(".")[2]: value for name, value in vars(options).items() if name.startswith(f"{source}.")}


def parameters(function: Any) -> Iterator[tuple[str, str, str]]:
    """Yield (name, type, help) of the parameters of a function, or fields of a Plan, that may be given by name."""
    fields = getattr(function, "__dataclass_fields__", {})
    try:
        signature = inspect.signature(function, eval_str=True)
    except NameError:  # of a type that is imported for type checkers only
        signature = inspect.signature(function)
    for name, each in signature.parameters.items():
        kind, default, rule = each.annotation, each.default, fields[name].metadata if fields else {}
        if kind is each.empty:
            kind = "str | None" if default is None else type(default)
        text = rule.get("help") or ("default: from the data" if default is None else f"default {default}")
        text += f" ({', '.join(map(str, rule['choices']))})" if rule.get("choices") else ""
        if (fields or name not in UNTYPED) and (default is not each.empty or each.kind is each.KEYWORD_ONLY):
            yield name, kind if isinstance(kind, str) else inspect.formatannotation(kind), text


def read(name: str, kind: str, text: str) -> Any:
    """Return a text as a value of a type, such as `int | tuple[int, int] | None`. Raises NbtoolsError."""
    several = re.search(r"(?:tuple|Sequence|Iterable)\[(.*?)\]", kind)
    words, members = set(re.findall(r"\w+", re.sub(r"\w+\[.*?\]", "", kind))), several[1].split(", ") if several else []
    if "None" in words and text.lower() == "none":
        return None
    if words & {"int", "float"} and re.fullmatch(r"-?(0|[1-9]\d*)", text):
        return int(text)  # val=100 are 100 samples; "0123" is a text of digits
    with suppress(ValueError):
        if "float" in words:
            return float(text)
    if members and ("," in text or "str" not in members):  # a text is a sequence of characters
        if "..." in members or len(members) in (1, 1 + text.count(",")):
            return tuple(read(name, members[0], part.strip()) for part in text.split(","))
    elif not words <= RULES.keys() or "str" in members:
        return Path(text) if "Path" in words and "str" not in words else text
    rules = [rule for word, rule in RULES.items() if word in words]
    rules += [f"{len(members)} numbers separated by commas"] if members else []
    raise NbtoolsError(f"{name} must be {' or '.join(rules)}, got {text!r}")


# -- what they ask for


def find_task(name: str) -> Task:
    """Import a built-in task by its short name, or any module, or `module:Name` in it. Raises NbtoolsError."""
    (module, _, attribute), why = name.partition(":"), ""
    if re.fullmatch(r"[^\W\d][\w.]*(:[\w.]+)?", name):
        try:
            module = importlib.import_module(f"nbtools.tasks.{name}" if name in BUILT_IN else module)
            return as_task(attrgetter(attribute)(module) if attribute else module)
        except (ImportError, AttributeError) as error:
            why = f" ({error})"
    own = "or your own that can be imported from here, a module or MODULE:NAME"
    raise NbtoolsError(f"no task {name!r}: use {', '.join(BUILT_IN)}, {own}{why}{meant(name, BUILT_IN)}")


def plan_of(task: Task, pack: Pack, base: str, folder: Path | None, given: Mapping[str, Any]) -> Plan:
    """Return the plan of the run in a folder, else the one that --from names, with the given settings; say what follows
    from them, as lr from a batch size by `Plan.lr_rule`. In a new run fewer epochs shorten the warmup."""
    former, follows = former_run(task, folder) if folder else None, {}
    if former is not None:
        plan = former.applied.marked(former.applied.to_dict())
    else:
        plan = base_plan(task, pack, base, given.get("network"))
        epochs = given.get("epochs", plan.epochs)
        if plan.warmup_epochs and 0 < epochs < plan.epochs:
            follows["warmup_epochs"] = round(plan.warmup_epochs * epochs / plan.epochs, 2)
    new = plan.turn(**{**follows, **given})
    if moved := {name: change for name, change in new.changes_from(plan).items() if name not in given}:
        say(f"from the given settings follows {listed(moved)}")
    return new


def base_plan(task: Task, pack: Pack, base: str, network: str | None) -> Plan:
    """Return the plan that --from names; an advised one is for the requested network. What a preset leaves to machine
    and data is said. Raises NbtoolsError for one that cannot train here."""
    if base in ("advised", "measured"):
        plan = advise(task, pack, measure=base == "measured").plan
        return task.with_network(plan, pack, network) if network else plan
    if base in ("plan", "baseline"):
        return task.PLAN if base == "plan" else task.BASELINE
    plan, why = preset(task, pack, base)
    if plan is None:
        raise NbtoolsError(f"--from {base} cannot train here: {why}")
    if why:
        say(f"{base}: {why}")
    return plan
