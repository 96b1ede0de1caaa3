"""The terminal, `nbtools COMMAND`. A command is a function: its docstring is the help, its parameters are arguments, or
options if they have a default or are keywords; of_pack: those of the task's `pack`; of_plan: the fields of its Plan.
Results go to stdout, all else to stderr."""

import argparse
import importlib
import inspect
import json
import os
import pkgutil
import re
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, NoReturn

import nbtools as nb
from nbtools import disk, measure, tasks
from nbtools.errors import CheckpointError, NbtoolsError, sentence
from nbtools.launch import reporting
from nbtools.live import advised_plan, send
from nbtools.run import busy
from nbtools.train import Task, as_task, doubts, similar

Options = Mapping[str, Any]
EMPTY = inspect.Parameter.empty
BUILT_IN = tuple(module.name for module in pkgutil.iter_modules(tasks.__path__) if module.name != "common")
UNTYPED = ("data", "train", "like", "network", "progress", "folds", "text", "more")  # arguments that take no text
CODES = "exit codes: 0 done, 1 refused, failed, or a report with errors, 2 invalid command line, 130 stopped by you"


def advise(task: Task, *, data: str, measure: bool = True, of_pack: Options) -> Any:
    """Propose a plan for this machine and data, with reasons. --no-measure: use rules of thumb and earlier results."""
    return nb.advise(task, task.pack(data, **of_pack), measure=measure)


def train(
    task: Task,
    *,
    data: str = "",
    run: Path | None = None,
    keep: str | None = None,
    fresh: bool = False,
    processes: int = 1,
    measured: bool = False,
    receipt: bool = True,
    smoke_test: bool = False,
    of_plan: Options,
    of_pack: Options,
) -> Any:
    """Train, or resume a started run: that of --run, else the newest with the same settings; more epochs extend a
    finished one. --keep: a second folder for copies, drive:…; --fresh: start over in that folder; --processes: at most
    one per GPU; --measured: measure the advised plan first; --no-receipt: do not measure the receipt at the end;
    --smoke-test: train one epoch of 48 demo samples in a temporary folder; needs no --data."""
    if smoke_test:
        with tempfile.TemporaryDirectory() as name:
            made = task.pack(task.demo(Path(name, "raw"), 48, **task.SMOKE), into=Path(name, "pack"), progress=False)
            plan = plan_of(task, made, False, {"epochs": 1, "batch_size": 4, **of_plan})
            tried = nb.fit(task, made, plan, Path(name, "run"), receipt=False, progress=False)
            return f"It works: an epoch on demo data was trained, saved and loaded: {nb.evaluate(tried, made, 'val')}"
    if not data:
        raise NbtoolsError("name the data: --data SOURCE")
    made = task.pack(data, **of_pack)
    plan = plan_of(task, made, measured, of_plan)
    act = nb.fit if processes == 1 else partial(nb.launch, processes=processes)
    return act(task, made, plan, run, keep, receipt=receipt, fresh=fresh)


def plan_of(task: Task, pack: nb.Pack, measured: bool, given: Options) -> nb.Plan:
    """Return the advised plan for the given network, with the given settings; fewer epochs shorten its warmup. All else
    counts as advised: a started run keeps its own."""
    plan = nb.advise(task, pack, measure=measured).plan
    plan = task.with_network(plan, pack, given["network"]) if "network" in given else plan
    share = min(1.0, given.get("epochs", plan.epochs) / plan.epochs)
    new = plan.turn(**{"warmup_epochs": round(plan.warmup_epochs * share, 2), **given})
    return new.marked(new.to_dict().keys() - given.keys())


def evaluate(task: Task, *, data: str, run: Path, split: str = "test", of_plan: Options, of_pack: Options) -> Any:
    """Compute the metrics of a run on a split (train, val or test) of data packed with its classes; --test 1.0: use all
    data. The last line is JSON."""
    opened = nb.Run.open(run, task)
    return nb.evaluate(opened, opened.pack(data, **of_pack), split, **of_plan)


def predict(run: Path, files: list[Path], *, csv: Path | None = None, into: Path = Path("predictions")) -> Any:
    """Predict on raw files, folders or tables with a run. --csv: write columns name and prediction there; --into:
    folder for predictions that are files, with the subfolders of theirs."""
    import pandas as pd

    opened, tables = nb.Run.open(run), (".csv", ".tsv")
    sources = [file for file in files if file.is_dir() or file.suffix.lower() in tables]
    loose = [file for file in files if file not in sources]
    rows = [(file, str(file), into, answer) for file, answer in zip(loose, opened.predict(loose), strict=True)]
    for source in sources:
        answers = opened.predict(source)
        named = answers if isinstance(answers, dict) else {f"row {i}": answer for i, answer in enumerate(answers)}
        rows += [(source / name, name, into / Path(name).parent, answer) for name, answer in named.items()]
    if (save := opened.task.save) is not None:
        rows = [(file, name, where, save(answer, file, where, opened.card)) for file, name, where, answer in rows]
    table = pd.DataFrame(rows, columns=["file", "name", "where", "prediction"]).astype(str)
    if csv is None:
        return table[["file", "prediction"]].to_csv(sep="\t", header=False, index=False).rstrip("\n")
    with disk.explained("writing predictions", csv):
        return disk.write_atomic(csv, table[["name", "prediction"]].to_csv(index=False))


def runs(folder: Path) -> Any:
    """List the runs in a folder and its subfolders, newest first."""
    return table.reset_index() if len(table := nb.runs(folder)) else f"{folder}: no runs, here or below"


def compare(folders: list[Path]) -> Any:
    """Compare runs, or all runs in a folder: which is best, the results, and the settings that differ."""
    return nb.compare(*folders)


def watch(run: Path) -> Any:
    """Follow a run that another process is training."""
    return nb.watch(run, wait=0)


def control(run: Path, requests: list[str]) -> None:
    """Send requests to a run: pause, resume, stop, evaluate, save, profile, best or undo; or settings: lr=1e-4."""
    plan = nb.Run.open(run).plan
    if not busy(run):
        raise CheckpointError(f"{run}: no process on this machine is training it; python -m nbtools train resumes it")
    pairs = [request.partition("=") for request in requests]
    settings = {name: plan.parse(name, value) for name, equals, value in pairs if equals}
    if asks := doubts(plan, plan.turn(**settings), advised_plan(run, plan)):
        anyway = f"nbtools.live.send({str(run)!r}, settings={settings}, force=True)"
        raise NbtoolsError(f"{'; '.join(asks.values())}; to apply it anyway: {anyway}")
    send(run, [name for name, equals, _ in pairs if not equals], settings)


def export(run: Path, path: Path, *, pack: Path | None = None) -> Any:
    """Write a run's best weights as safetensors with a JSON card, or the network itself if PATH ends in .onnx. --pack:
    the pack on whose samples its outputs are compared with torch's."""
    return nb.Run.open(run).export(path, pack and nb.Pack.open(pack))


OWN = (advise, train, evaluate, predict, runs, compare, watch, control, export)
COMMANDS = {"gpus": measure.check, "stage": nb.stage, "cache": nb.cached, **{act.__name__: act for act in OWN}}
HOOKS = {  # commands that are functions of a task
    "demo": "Write a small data set in the task's raw format.",
    "pack": "Decode a data set once. SOURCE: anything that `stage` accepts, or a pack.",
    "validate": "Report what is wrong with a data set.",
    "features": "Extract features from filmed clips with a pretrained network, and add them to the clips in INTO.",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code. An error of nbtools is a sentence on stderr."""
    if arguments is None:  # the script `nbtools` imports tasks from where it is called, as `python -m nbtools` does
        sys.path.insert(0, os.getcwd())
    words = sys.argv[1:] if arguments is None else arguments
    try:
        given = vars(parser(words).parse_args(words))
        for name in [name for name in given if "." in name]:  # of_pack.val: an entry of the argument of_pack
            (of, field), value = name.split("."), given.pop(name)
            typed = of == "of_plan" and isinstance(value, str)
            given[of][field] = given["task"].PLAN.parse(field, value) if typed else value
        value = reporting(partial(given.pop("act"), **given))
    except NbtoolsError as error:
        print(f"nbtools: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("nbtools: stopped by you", file=sys.stderr)
        return 130
    if value is not None and os.environ.get("RANK", "0") == "0":
        try:
            print(text(value), flush=True)
        except BrokenPipeError:  # of `| head`, which has seen enough; Python flushes the pipe once more at the end
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    if isinstance(value, nb.Run) and value.state == "stopped" and "RANK" not in os.environ:
        return 130  # under torchrun it would be started again
    return int(getattr(value, "ok", True) is False)


def text(value: Any) -> str:
    """Return a result as lines for a person; metrics as JSON."""
    if isinstance(value, nb.Run):
        parts = value.summary().to_string(), value.receipt or "no receipt", value.verdict or "no verdict", value
        return "\n".join(map(str, parts))
    if hasattr(value, "to_string"):
        return value.to_string(index=False)
    return json.dumps(value) if isinstance(value, dict) else str(value)


class Parser(argparse.ArgumentParser):
    """An ArgumentParser that answers a mistake in one line, with the option or command nearest to a mistyped one."""

    options: Iterable[str] = ()  # of the command, where it exists

    def error(self, message: str) -> NoReturn:
        if wrong := re.search(r"unrecognized arguments: ([^\s=]+)|invalid choice: '(.*?)'", message):
            names = {each.lstrip("-").replace("-", "_"): each for each in self.options or (*HOOKS, *COMMANDS)}
            near = similar((wrong[1] or wrong[2]).lstrip("-").replace("-", "_"), names)
            message += f"; did you mean {names[near[0]]}?" if near else ""
        self.exit(2, f"nbtools: {sentence(message)} See {self.prog} --help\n")


def parser(words: Sequence[str]) -> Parser:
    """Return the parser of a command line, with the options of the task that its second word names."""
    shape: Any = {"allow_abbrev": False, "formatter_class": argparse.RawDescriptionHelpFormatter}  # for code
    top = Parser(prog="python -m nbtools", description=nb.__doc__, epilog=CODES, **shape)
    top.add_argument("--version", action="version", version=f"nbtools {nb.__version__}")
    commands, (command, second, *_) = top.add_subparsers(metavar="COMMAND", required=True), [*words, "", ""]
    for name in (*HOOKS, *COMMANDS):
        about = " ".join((HOOKS.get(name) or COMMANDS[name].__doc__ or "").split())
        shown: dict[str, Any] = {"help": about.split(". ")[0], "description": about}
        one = commands.add_parser(name, **shown, conflict_handler="resolve", allow_abbrev=False)
        if command == name:
            add_arguments(one, name, second)
            top.options = one._option_string_actions
    return top


def find_task(name: str) -> Task:
    """Import a built-in task by its short name, or any module, or `module:Name` in it. Raises NbtoolsError."""
    module, _, attribute = name.partition(":")
    try:
        made = importlib.import_module(f"nbtools.tasks.{name}" if name in BUILT_IN else module)
        return as_task(attrgetter(attribute)(made) if attribute else made)
    except (ImportError, AttributeError, ValueError, TypeError) as error:
        own = f"or one of your own that can be imported from here, as a module or MODULE:NAME ({error})"
        raise NbtoolsError(f"no task {name!r}: use {', '.join(BUILT_IN)}, {own}") from None


def add_arguments(one: Parser, command: str, second: str) -> None:
    """Add what a command takes. of_…: the fields of the task's plan, or what its function of that name takes."""
    task = Task()
    if command in HOOKS or "task" in inspect.signature(COMMANDS[command]).parameters:
        task = task if second in ("-h", "--help") else find_task(second)
        one.add_argument("task", type=lambda _: task, metavar="TASK", help=f"{', '.join(BUILT_IN)}, or MODULE:NAME")
    act = COMMANDS.get(command) or getattr(task, command)
    one.set_defaults(act=act if command in COMMANDS else lambda task, **given: act(**given))
    for name, each in inspect.signature(act).parameters.items():
        if name.startswith("of_"):
            one.set_defaults(**{name: {}})
            plan = type(task.PLAN) if name == "of_plan" else None
            for key, option in inspect.signature(plan or getattr(task, name[3:])).parameters.items():
                if key == "seed" and not plan:  # --seed is the plan's
                    option = option.replace(name="split_seed")
                if plan or not (option.default is EMPTY or key in UNTYPED):
                    add(one, f"{name}.{key}", option, plan)
        elif name not in UNTYPED[1:] and name != "task":
            add(one, name, each)


def add(one: Parser, dest: str, each: inspect.Parameter, plan: Any = None) -> None:
    """Add a parameter. plan: the class of which it is a field, which explains it, and parses it later."""
    name, default, flag = each.name, each.default, f"--{each.name.replace('_', '-')}"
    guess = str if default in (None, EMPTY) else type(default)  # nb.pack takes any data, a terminal a text
    kind = inspect.formatannotation(guess if each.annotation is EMPTY or name == "data" else each.annotation).strip("'")
    rule = plan.__dataclass_fields__[name].metadata if plan else {}
    about = rule.get("help") or ("" if default in (EMPTY, None) else f"default {default}")
    about += f" ({', '.join(map(str, rule['choices']))})" if rule.get("choices") else ""
    how: dict[str, Any] = {"default": argparse.SUPPRESS, "help": about.replace("%", "%%")}
    parse = str if plan else partial(read, flag, kind)
    if kind == "bool":
        one.add_argument(flag, dest=dest, action=argparse.BooleanOptionalAction, **how)
    elif each.kind is each.KEYWORD_ONLY or (default is not EMPTY and name != "data"):
        one.add_argument(flag, dest=dest, type=parse, required=default is EMPTY, metavar="VALUE", **how)
    else:
        one.add_argument(name, type=parse, metavar=name.upper(), nargs="+" if kind.startswith("list[") else None)


def read(flag: str, kind: str, text: str) -> Any:
    """Return a text as a value of a type, such as `int | tuple[int, int] | None`. Raises NbtoolsError."""
    kind = kind.replace("Any", "str | Sequence[str]")  # names of columns
    several = re.search(r"(?:tuple|Sequence|Iterable)\[(.*?)\]", kind)
    if "None" in kind and text.lower() == "none":
        return None
    if several and "," in text:
        return tuple(read(flag, several[1] or "Any", part.strip()) for part in text.split(","))
    for number, kinds in ((int, "int|float"), (float, "float"), (str, "str|Any"), (Path, "Path")):
        with suppress(ValueError):
            if re.search(kinds, kind):
                return number(text)
    raise NbtoolsError(f"{flag} must be {kind}, got {text!r}")


if __name__ == "__main__":
    sys.exit(main())
