"""Arguments of the terminal: from a command's signature, those of a task's functions, and the fields of its Plan."""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterable, Mapping
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

from nbtools import tasks
from nbtools.errors import NbtoolsError, sentence
from nbtools.train import Plan, Task, as_task

Options = Mapping[str, Any]
EMPTY = inspect.Parameter.empty
BUILT_IN = tuple(module.name for module in pkgutil.iter_modules(tasks.__path__) if module.name != "common")
# Parameters of tasks' functions that no text is given for; `seed` is the plan's.
UNTYPED = ("data", "train", "like", "network", "progress", "seed", "folds", "text")


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that answers a mistake in one line, with the option or command nearest to a mistyped one."""

    names: Iterable[str] = ()  # of the options of the command

    def error(self, message: str) -> NoReturn:
        if wrong := re.search(r"unrecognized arguments: ([^\s=]+)", message):
            message += nearest(wrong[1], self.names)
        elif wrong := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            message += nearest(wrong[1], re.findall(r"\w+", wrong[2]))
        self.exit(2, f"nbtools: {sentence(message)} See {self.prog} --help\n")


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the end of a sentence that names the word nearest to a mistyped one."""
    near = difflib.get_close_matches(name, list(names), 1)
    return f"; did you mean {near[0]}?" if near else ""


def find_task(name: str) -> Task:
    """Import a built-in task by its short name, or any module, or `module:Name` in it. Raises NbtoolsError."""
    module, _, attribute = name.partition(":")
    try:
        made = importlib.import_module(f"nbtools.tasks.{name}" if name in BUILT_IN else module)
        return as_task(attrgetter(attribute)(made) if attribute else made)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        own = f"or your own that can be imported from here, a module or MODULE:NAME ({error})"
        message = f"no task {name!r}: use {', '.join(BUILT_IN)}, {own}{nearest(name, BUILT_IN)}"
    raise NbtoolsError(message)


def add_arguments(one: Parser, act: Any, task: Task) -> None:
    """Add an argument for each parameter of a command; `of_…` stands for options of the task: the fields of its Plan,
    those of them that its evaluation alone has, or the parameters with a default of its function of that name."""
    for name, each in parameters(act).items():
        if name == "task":
            one.add_argument(name, type=find_task, metavar="TASK", help=f"{', '.join(BUILT_IN)}, or MODULE:NAME")
        elif not name.startswith("of_"):
            add_argument(one, name, each, each.kind is each.KEYWORD_ONLY)
        else:
            one.set_defaults(**{name: {}})
            plan = type(task.PLAN) if name in ("of_plan", "of_evaluation") else None
            for key, option in parameters(plan or getattr(task, name.removeprefix("of_"), None)).items():
                own = key.startswith("eval_") and not hasattr(Plan, key)
                if (own or name != "of_evaluation") and (plan or key not in UNTYPED) and option.default is not EMPTY:
                    rule = plan.__dataclass_fields__[key].metadata if plan else {}
                    add_argument(one, f"{name}.{key}", option, True, rule)


def add_argument(one: Parser, dest: str, each: inspect.Parameter, option: bool, rule: Mapping[str, Any] = {}) -> None:
    """Add a parameter, as an option or by its place. rule: of a field of the Plan."""
    kind, default, name = each.annotation, each.default, each.name.rstrip("_")
    if kind is EMPTY:
        kind = "str | None" if default is None else type(default)
    kind, flag = kind if isinstance(kind, str) else inspect.formatannotation(kind), f"--{name.replace('_', '-')}"
    text = rule.get("help") or ("" if default in (EMPTY, None) else f"default {default}")
    text += f" ({', '.join(map(str, rule['choices']))})" if rule.get("choices") else ""
    how: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
    if kind == "bool":
        one.add_argument(flag, dest=dest, action=argparse.BooleanOptionalAction, **how)
    elif option:
        how |= {"required": default is EMPTY, "metavar": "VALUE"}
        one.add_argument(flag, dest=dest, type=partial(read, flag, kind), **how)
    else:
        nargs = "+" if kind.startswith("list[") else None if default is EMPTY else "?"
        one.add_argument(dest, type=partial(read, name, kind), metavar=name.upper(), nargs=nargs, **how)


def parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a function, with types that can be evaluated; none for None."""
    if function is None:
        return {}
    try:
        return inspect.signature(function, eval_str=True).parameters
    except NameError:  # of a type that is imported for type checkers only
        return inspect.signature(function).parameters


def read(name: str, kind: str, text: str) -> Any:
    """Return a text as a value of a type, such as `int | tuple[int, int] | None`. Raises NbtoolsError."""
    several = re.search(r"(?:tuple|Sequence|Iterable)\[(.*?)\]", kind)
    one = kind.replace(several[0], "") if several else kind
    if "None" in one and text.lower() == "none":
        return None
    if several and ("," in text or several[1].endswith("...")):
        return tuple(read(name, several[1], part.strip()) for part in text.split(","))
    if re.search("int|float", one) and re.fullmatch(r"-?(0|[1-9]\d*)", text):
        return int(text)  # val=100 are 100 samples; "0123" is a text of digits
    if "float" in one and re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", text):
        return float(text)
    if "str" in kind or not re.search("int|float", kind):
        return Path(text) if "Path" in one and "str" not in one else text
    raise NbtoolsError(f"{name} must be {kind}, got {text!r}")
