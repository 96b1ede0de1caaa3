"""The terminal: `python -m nbtools COMMAND`, of `gpus stage watch control guide demo validate features pack advise
train evaluate predict`.

The fields of the task's Plan and the options of its `pack` are read from their definitions, so a new one automatically
becomes an option here. Progress goes to stderr, results to stdout.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import json
import math
import pkgutil
import re
import sys
import tempfile
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.utils._pytree import tree_leaves

from nbtools import guides, tasks
from nbtools.data import Pack, open_feed, stage
from nbtools.errors import CheckpointError, NbtoolsError, TrainError, sentence
from nbtools.fit import fit
from nbtools.folder import busy, stored_plan
from nbtools.live import ACTIONS, advised, send
from nbtools.measure import advise, find_batch, find_workers, gpus, preset
from nbtools.run import Run, evaluate, validate
from nbtools.table import plural
from nbtools.train import Plan, Task, TrainState, as_task, checkpoint, doubts, evaluation, train_step, unread
from nbtools.watch import watch

BUILT_IN = tuple(found.name for found in pkgutil.iter_modules(tasks.__path__) if found.name != "common")
SOURCE = "a folder, an archive, drive:…, a Google Drive link, or a pack"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0 if it succeeded, 1 with a sentence on stderr if nbtools raised an error or the
    validated data has errors, 130 for Ctrl-C."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if arguments[:1] == ["guide"] and arguments[1:2] not in (["-h"], ["--help"]):
            arguments.insert(1, "--")  # what follows has options of its own
        options = parser(arguments).parse_args(arguments)
        return options.act(options) or 0
    except NbtoolsError as error:
        print(f"nbtools: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("nbtools: stopped by you", file=sys.stderr)
        return 130


class Parser(argparse.ArgumentParser):
    """Takes options by their whole names, and a switch also with its value: `--flag false` is `--no-flag`. Answers a
    mistake in one sentence, also an option of a guide."""

    def __init__(self, **more: Any):
        super().__init__(**more, allow_abbrev=False)

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
            text = guides.answer(unknown, getattr(found, "task", ""), self._option_string_actions)
            self.error(text or f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        bare = re.fullmatch(r"argument (--\S+): expected one argument", message)
        text = guides.answer([bare[1]], "", self._option_string_actions) if bare else ""
        self.exit(2, f"nbtools: {sentence(text or message)} See {self.prog} --help\n")


def parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The command line; a task's own options are added once its name is among the arguments."""
    top = Parser(prog="python -m nbtools", description="Train in notebooks without wasting the GPU.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    word = next(iter(arguments[1:]), "-")
    if word.startswith("-"):
        word = next((other for other in arguments if other in BUILT_IN), None)
    task = find_task(word) if word is not None and arguments[0] in TASK_COMMANDS else Task()

    def same(name: str) -> str:
        if name != word:
            raise argparse.ArgumentTypeError(f"name it directly after the command, got {name!r} after the options")
        return name

    for name, define in COMMANDS.items():
        one = commands.add_parser(name, help=define.__doc__, description=define.__doc__)
        one.set_defaults(act=define(one))
    for name, define in TASK_COMMANDS.items():
        one = commands.add_parser(name, help=define.__doc__, description=define.__doc__)
        known = f"{', '.join(BUILT_IN)}, or the dotted name of your own module"
        one.add_argument("task", type=same, help=known)
        one.set_defaults(act=define(one, task))
    return top


def find_task(name: str) -> Task:
    """A built-in task by its short name, or any importable module. Raises NbtoolsError naming the built-in tasks."""
    if name in BUILT_IN:
        return as_task(importlib.import_module(f"nbtools.tasks.{name}"))
    try:
        if all(map(str.isidentifier, name.split("."))):
            return as_task(importlib.import_module(name))
    except ModuleNotFoundError as error:
        if not f"{name}.".startswith(f"{error.name}."):  # a module that the task imports
            raise
    raise NbtoolsError(
        f"no task {name!r}: use {', '.join(BUILT_IN)}, or any module of yours that can be imported from here"
    )


# -- commands: each adds its options, and returns what it does with them; the docstring is its help

Act = Callable[[argparse.Namespace], int | None]  # the exit code, None if it succeeded


def gpus_command(_: argparse.ArgumentParser) -> Act:
    """show what this machine trains on"""
    return lambda options: print(gpus())


def stage_command(one: argparse.ArgumentParser) -> Act:
    """fetch a data set to local disk"""
    one.add_argument("source", help=SOURCE)
    one.add_argument("--into", help="folder to put it in")
    return lambda options: print(stage(options.source, options.into))


def watch_command(one: argparse.ArgumentParser) -> Act:
    """follow a run that another process is training"""
    one.add_argument("run", type=Path, metavar="FOLDER", help="the run folder")
    return lambda options: print(watch(options.run, wait=0))


def control_command(one: argparse.ArgumentParser) -> Act:
    """send requests to a run, or change its settings"""
    one.add_argument("run", type=Path, metavar="FOLDER", help="the run folder")
    one.add_argument("requests", nargs="+", metavar="REQUEST", help=f"{', '.join(ACTIONS)}, or SETTING=VALUE: lr=1e-4")
    one.add_argument(
        "--force", action="store_true", help="apply changes that otherwise need confirmation, such as a much larger lr"
    )
    return control


def control(options: argparse.Namespace) -> None:
    run = Run.open(options.run)
    if not busy(options.run):
        raise CheckpointError(
            f"{options.run}: no process on this machine is training it; python -m nbtools train resumes the run"
        )
    pairs = [request.partition("=") for request in options.requests]
    settings = {name: run.plan.parse(name, value) for name, equals, value in pairs if equals}
    wanted = run.plan.turn(**settings)  # raises for what no plan allows; the run reports what it cannot change
    if not options.force and (asks := doubts(run.plan, wanted, advised(options.run, run.plan))):
        command = f"python -m nbtools control {options.run} {' '.join(options.requests)} --force"
        raise NbtoolsError(f"{'; '.join(asks.values())}; to apply it anyway: {command}")
    send(options.run, [name for name, equals, _ in pairs if not equals], settings, options.force)


def guide_command(one: argparse.ArgumentParser) -> Act:
    """run a command of a guide that nbtools replaces, and show what it is here"""
    one.add_argument("--print", action="store_true", help="only show it")
    text = "as the guide has it: main.py -m hctr -d DIR -b 64, or settings of its config: ims_per_gpu=64"
    one.add_argument("words", nargs=argparse.REMAINDER, metavar="COMMAND", help=text)

    def run(options: argparse.Namespace) -> int:
        show = "--print" in options.words
        ours = guides.translate([word for word in options.words if word not in ("--", "--print")])
        print(ours, file=sys.stdout if show else sys.stderr)
        print(*ours.notes, sep="\n", end="\n" if ours.notes else "", file=sys.stderr)
        return 0 if show else main(ours.words)

    return run


def demo_command(one: argparse.ArgumentParser, task: Task) -> Act:
    """write a small data set in the task's raw format"""
    one.add_argument("folder", type=Path)
    add_signature(one, task.demo)
    return lambda options: print(task.demo(options.folder, **own(options)))


def validate_command(one: argparse.ArgumentParser, task: Task) -> Act:
    """report what is wrong with a data set"""
    one.add_argument("source", help=SOURCE)
    add_signature(one, task.validate)
    return lambda options: print_report(validate(task, options.source, **own(options)))


def features_command(one: argparse.ArgumentParser, task: Task) -> Act:
    """make features of filmed clips with a pretrained network"""
    one.add_argument("source", help=SOURCE)
    one.add_argument("into", type=Path, help="folder of the clips that receive them; may be the source")
    add_signature(one, task.features, "into", "network")
    return lambda options: print_report(task.features(options.source, options.into, **own(options)))


def print_report(report: Any) -> int:
    """Returns 1 if it found errors."""
    print(report)
    return int(not report.ok)


def pack_command(one: argparse.ArgumentParser, task: Task) -> Act:
    """decode a data set once"""
    one.add_argument("source", help=SOURCE)
    add_signature(one, task.pack)
    return lambda options: print(packed(task, options.source, options))


def packed(task: Task | Run, source: str, options: argparse.Namespace) -> Pack:
    pack = task.pack(source, **own(options))
    if len(pack.bad):
        print(f"{plural(len(pack.bad), 'file')} left out, listed in {pack.folder / 'bad.csv'}:", file=sys.stderr)
        print(pack.bad.head(10).to_string(index=False), file=sys.stderr)
    return pack


def advise_command(one: argparse.ArgumentParser, task: Task) -> Act:
    """propose a plan for this machine and data, with reasons"""
    one.add_argument("--data", required=True, metavar="SOURCE", help=SOURCE)
    one.add_argument("--no-measure", action="store_true", help="use rules of thumb and earlier measurements")
    one.add_argument("--compile", action="store_true", help="also try compiled steps: a minute or two more")
    text = "also what N processes would give, on as many GPUs or on this CPU, and whether that is worth it"
    one.add_argument("--processes", type=int, default=1, metavar="N", help=text)
    one.add_argument("--noise", action="store_true", default=None, help=argparse.SUPPRESS)
    add_signature(one, task.pack)

    def show(options: argparse.Namespace) -> None:
        asked = {"noise": options.noise, "compiling": options.compile, "processes": options.processes}
        advice = advise(task, packed(task, options.data, options), measure=not options.no_measure, **asked)
        for part in filter(None, (advice.batches, advice.workers, advice.profile, advice)):
            print(part, end="\n\n")

    return show


def train_command(one: argparse.ArgumentParser, task: Task) -> Act:
    """train; an existing run folder is resumed"""
    one.add_argument("--data", metavar="SOURCE", help=SOURCE)
    one.add_argument("--run", type=Path, metavar="FOLDER", help="the run folder")
    one.add_argument("--keep", metavar="FOLDER", help="second folder for copies of the run, e.g. drive:runs/captcha")
    one.add_argument("--smoke-test", action="store_true", help="no data: one step on demo samples, saved and loaded")
    one.add_argument("--processes", type=int, default=1, metavar="N", help="only 1 is supported so far")
    one.add_argument("--no-receipt", action="store_true", help="do not measure the baseline at the end")
    one.add_argument(
        "--from",
        dest="base",
        choices=("advised", "plan", "baseline", *task.PRESETS),
        default="advised",
        help="source of the settings that are not given: advice, the task's plan, its baseline, or one of its presets",
    )
    add_knobs(one, type(task.PLAN), dataclasses.fields(task.PLAN))
    add_signature(one, task.pack)
    return partial(train_run, task)


def train_run(task: Task, options: argparse.Namespace) -> None:
    if options.processes != 1:
        rule = "--processes must be 1: several processes are not supported yet"
        raise NbtoolsError(f"{rule}; leave it out", entry="Several processes on the GPU")
    if options.smoke_test:
        print(smoke_test(task, **given(task.PLAN, options)))
        return
    if options.data is None or options.run is None:
        raise NbtoolsError("train needs --data SOURCE and --run FOLDER; only --smoke-test needs neither")
    pack = packed(task, options.data, options)
    plan = partial(plan_of, task, pack, options)
    run = fit(task, pack, plan, options.run, options.keep, receipt=not options.no_receipt)
    print(run.summary().to_string(), run.receipt or "no receipt", run.verdict or "no verdict", run, sep="\n")


def smoke_test(task: Task, **knobs: Any) -> str:
    """One step on demo data, saved and loaded again, in a temporary folder; returns the result in a sentence. knobs:
    settings in place of the advised ones.

    Raises TrainError if the loss is not a number or the loaded weights give different outputs.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pack = task.pack(task.demo(folder / "raw", 48, **task.SMOKE), into=folder / "pack", progress=False)
        plan = advise(task, pack, measure=False).plan.turn(**knobs)
        plan = plan.replace(batch_size=min(4, pack.splits["train"]), micro_batch_size=None)
        state, loaded = TrainState(task, pack, plan), TrainState(task, pack, plan)
        raw = next(iter(open_feed(pack, plan, state.device)([pack.ids("train")[: plan.batch_size]])))
        total, count = train_step(state, raw, pack.splits["train"])
        loss = float(total) / max(float(count), 1)
        if not math.isfinite(loss):
            rule = f"the loss of the first step is {loss}"
            raise TrainError(f"{rule}; train with amp=off, and check the labels", entry="NaN")
        checkpoint.save(folder / "run", state, rows=0)
        checkpoint.load(folder / "run", loaded)
    answers = (evaluation.forward(task, one.evaluated, raw, plan, one.device)[1] for one in (state, loaded))
    if not all(map(torch.equal, *(map(torch.as_tensor, tree_leaves(answer)) for answer in answers))):
        rule = "the outputs of the loaded weights differ from those of the saved ones"
        raise TrainError(
            f"{rule}: is the forward pass random in eval?", entry="Predictions differ between training and inference"
        )
    return (
        f"it works on {state.device}: {plural(len(pack), 'demo sample')} packed, "
        f"{sum(p.numel() for p in state.parameters):,} parameters, first loss {loss:.4g}; "
        "saved, and loaded with equal outputs"
    )


def plan_of(task: Task, pack: Pack, options: argparse.Namespace) -> Plan:
    """The started run's plan, else the one that --from names; with the settings given on the command line.

    What follows from them is reported on stderr: another batch size without an lr adjusts lr by the plan's lr_rule, and
    in a new run fewer epochs shorten the warmup.
    """
    plan, knobs = stored_plan(task, options.run), given(task.PLAN, options)
    if plan is None:
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
        crew = find_workers(task, pack, plan)
        print(crew.reason, file=sys.stderr)
        plan = plan.replace(workers=crew.workers, prefetch=crew.prefetch)
    return plan


def evaluate_command(one: argparse.ArgumentParser, task: Task) -> Act:
    """compute the metrics of a run on a split, packed with its classes; the last line is JSON"""
    one.add_argument("--data", required=True, metavar="SOURCE", help=SOURCE)
    one.add_argument("--run", required=True, type=Path, metavar="FOLDER", help="the run folder")
    which = "with --test 1.0 that is all of SOURCE: for data that the run has not seen"
    one.add_argument("--split", default="test", choices=("train", "val", "test"), help=f"default test; {which}")
    fields = dataclasses.fields(task.PLAN)
    add_knobs(one, type(task.PLAN), [f for f in fields if f.metadata.get("live") and f.name.startswith("eval_")])
    add_signature(one, task.pack)

    def show(options: argparse.Namespace) -> None:
        run = Run.open(options.run, task)
        pack = packed(run, options.data, options)
        if limits := unread(task, pack, run.plan):
            print(limits, file=sys.stderr)
        print(json.dumps(evaluate(run, pack, options.split, **given(run.plan, options))))

    return show


def predict_command(one: argparse.ArgumentParser, task: Task) -> Act:
    """predict raw files with a run"""
    one.add_argument("--run", required=True, type=Path, metavar="FOLDER", help="the run folder")
    one.add_argument("files", nargs="+", type=Path)
    if task.save is not None:
        one.add_argument("--into", required=True, type=Path, metavar="FOLDER", help="folder for the predictions")

    def show(options: argparse.Namespace) -> None:
        run = Run.open(options.run, task)
        for file, answer in zip(options.files, run.predict(options.files), strict=True):
            text = task.save(answer, file, options.into, run.card) if task.save is not None else answer
            print(f"{file}\t{text}")

    return show


COMMANDS = {
    "gpus": gpus_command,
    "stage": stage_command,
    "watch": watch_command,
    "control": control_command,
    "guide": guide_command,
}
TASK_COMMANDS = {
    "demo": demo_command,
    "validate": validate_command,
    "features": features_command,
    "pack": pack_command,
    "advise": advise_command,
    "train": train_command,
    "evaluate": evaluate_command,
    "predict": predict_command,
}

# -- options read from definitions

AUTO = (("batch_size", "auto"), ("workers", "auto"))  # settings that may be `auto`: measured
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
        text += "; auto: measure it here" if (field.name, "auto") in AUTO else ""
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


def described(kind: Any) -> str:
    """The rule for the texts of an annotation."""
    origin, args = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin in UNIONS:
        return " or ".join(dict.fromkeys(map(described, args)))
    if origin in SEVERAL:
        return f"{len(args)} numbers with commas between" if is_counted(kind) else "numbers with commas between"
    return PLAIN[kind][0] if kind in PLAIN else "text"


def is_counted(kind: Any) -> bool:
    """Whether it is a tuple of this length."""
    return typing.get_origin(kind) is tuple and Ellipsis not in typing.get_args(kind)


if __name__ == "__main__":
    sys.exit(main())
