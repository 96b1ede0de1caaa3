"""Arguments of the terminal from the signatures of its commands, of a task's functions, and the fields of its Plan."""

from __future__ import annotations

import argparse
import difflib
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

from nbtools import tasks
from nbtools.errors import NbtoolsError, sentence
from nbtools.train import Plan, Task, as_task

Options = Mapping[str, Any]
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
    (module, _, attribute), why = name.partition(":"), ""
    try:
        made = importlib.import_module(f"nbtools.tasks.{name}" if name in BUILT_IN else module)
        return as_task(attrgetter(attribute)(made) if attribute else made)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        why = f" ({error})"
    own = "or your own that can be imported from here, a module or MODULE:NAME"
    raise NbtoolsError(f"no task {name!r}: use {', '.join(BUILT_IN)}, {own}{why}{nearest(name, BUILT_IN)}")


def add_arguments(one: Parser, function: Any, task: Task, of: str = "") -> None:
    """Add an argument for each parameter of a command. of: the source of Options, of which those with a default are
    options: `of_pack`, the task's `pack`; `of_plan`, the fields of its Plan."""
    fields = getattr(function, "__dataclass_fields__", {})
    for name, each in parameters(function).items():
        if each.annotation is Task:
            one.add_argument("task", type=find_task, metavar="TASK", help=f"{', '.join(BUILT_IN)}, or MODULE:NAME")
        elif each.annotation == Options:
            one.set_defaults(**{name: {}})
            for source in sources(task, name.removeprefix("of_")):
                add_arguments(one, source, task, name)
        elif of == "of_evaluation" and (hasattr(Plan, name) or not name.startswith("eval_")):
            continue  # settings that only a task's evaluation needs
        elif not of or (each.default is not each.empty and (fields or name not in UNTYPED)):
            add_argument(one, f"{of}.{name}" if of else name, each, fields[name].metadata if fields else {})


def parameters(function: Any) -> Mapping[str, inspect.Parameter]:
    with suppress(NameError):  # of a type that is imported for type checkers only
        return inspect.signature(function, eval_str=True).parameters
    return inspect.signature(function).parameters


def sources(task: Task, name: str) -> list[Any]:
    """Return the functions, or the Plan, that Options come from."""
    if name in ("plan", "evaluation"):
        return [type(task.PLAN)]
    function = getattr(task, name, None)
    return [] if function is None else [function]


def add_argument(one: Parser, dest: str, each: inspect.Parameter, rule: Mapping[str, Any]) -> None:
    """Add an argument. dest: `data`, or `of_pack.val`; rule: of a field of the Plan."""
    kind, default, name = each.annotation, each.default, each.name.rstrip("_")
    if kind is each.empty:
        kind = "str | None" if default is None else type(default)
    kind, flag = kind if isinstance(kind, str) else inspect.formatannotation(kind), f"--{name.replace('_', '-')}"
    text = rule.get("help") or ("" if default in (each.empty, None) else f"default {default}")
    text += f" ({', '.join(map(str, rule['choices']))})" if rule.get("choices") else ""
    how: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text.replace("%", "%%")}
    if kind == "bool":
        one.add_argument(flag, dest=dest, action=argparse.BooleanOptionalAction, **how)
    elif "." in dest or each.kind is each.KEYWORD_ONLY:
        how |= {"required": default is each.empty, "metavar": "VALUE"}
        one.add_argument(flag, dest=dest, type=partial(read, flag, kind), **how)
    else:
        nargs = "+" if kind.startswith("list[") else None if default is each.empty else "?"
        one.add_argument(dest, type=partial(read, name, kind), metavar=name.upper(), nargs=nargs, **how)


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
    with suppress(ValueError):
        if "float" in one:
            return float(text)
    if not re.search("int|float", kind) or "str" in kind:
        return Path(text) if "Path" in one and "str" not in one else text
    raise NbtoolsError(f"{name} must be {kind}, got {text!r}")
