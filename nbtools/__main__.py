"""The terminal: `python -m nbtools COMMAND`, of `gpus stage demo validate features pack advise train watch control
evaluate predict`.

The fields of the task's Plan and the options of its `pack` are read from their definitions, so a new one automatically
becomes an option here. Progress goes to stderr, results to stdout.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import json
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nbtools.data import Pack, stage
from nbtools.errors import CheckpointError, NbtoolsError
from nbtools.fit import fit
from nbtools.folder import busy, kept_folder, restore, stored_plan
from nbtools.live import ACTIONS, advised, send
from nbtools.measure import advise, find_batch, find_workers, gpus
from nbtools.run import Run, evaluate
from nbtools.smoke import smoke
from nbtools.table import plural
from nbtools.train import Plan, Task, as_task, doubts
from nbtools.validate import validate
from nbtools.watch import watch


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns 0 if it succeeded, 1 with a sentence on stderr if nbtools raised an error or the
    validated data has errors, 130 for Ctrl-C."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = parser(arguments).parse_args(arguments)
        return int(options.act(options) is False)
    except NbtoolsError as error:
        print(f"nbtools: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("nbtools: stopped by you", file=sys.stderr)
        return 130


def parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The command line; a task's own options are there once its name stands in the arguments."""
    top = argparse.ArgumentParser(prog="python -m nbtools", description="Train in notebooks without wasting the GPU.")
    commands = top.add_subparsers(required=True, metavar="COMMAND")
    named = len(arguments) > 1 and arguments[0] in TASK_COMMANDS and not arguments[1].startswith("-")
    task = find_task(arguments[1]) if named else Task()

    command(commands, "gpus", "show what this machine trains on", show_gpus)
    one = command(commands, "stage", "fetch a data set to local disk", show_stage)
    one.add_argument("source", help=SOURCE)
    one.add_argument("--into", help="folder to put it in")
    one = command(commands, "watch", "follow a run that another process trains", show_run)
    one.add_argument("run", type=Path, metavar="FOLDER", help="the run folder")
    one = command(commands, "control", "send requests to a run, or change its settings", ask_run)
    one.add_argument("run", type=Path, metavar="FOLDER", help="the run folder")
    one.add_argument("requests", nargs="+", metavar="REQUEST", help=f"{', '.join(ACTIONS)}, or SETTING=VALUE: lr=1e-4")
    one.add_argument(
        "--force", action="store_true", help="apply what would otherwise have to be confirmed, such as a much larger lr"
    )
    for name, (text, act) in TASK_COMMANDS.items():
        one = command(commands, name, text, act)
        one.add_argument("task", help="captcha, hwdb, sign, segment, or the dotted name of your own module")
        if name == "demo":
            one.add_argument("folder", type=Path)
            add_signature(one, task.demo, skip=("folder",))
        if name in ("pack", "validate", "features"):
            one.add_argument("source", help=SOURCE)
        if name == "features":
            one.add_argument("into", type=Path, help="folder of the clips that receive them; may be the source")
            add_signature(one, task.features, skip=("source", "into", "network", "progress"))
        if name == "validate":
            add_signature(one, task.validate, skip=("source", "progress"))
        needed = "--smoke-test" not in arguments
        if name in ("advise", "train", "evaluate"):
            one.add_argument("--data", required=needed, metavar="SOURCE", help=SOURCE)
        if name == "advise":
            one.add_argument("--no-measure", action="store_true", help="use rules of thumb, and earlier measurements")
            one.add_argument("--compile", action="store_true", help="also try compiled steps: a minute or two more")
            one.add_argument("--noise", action="store_true", default=None, help=argparse.SUPPRESS)
        if name in ("train", "evaluate", "predict"):
            one.add_argument("--run", required=needed, type=Path, metavar="FOLDER", help="the run folder")
        if name == "evaluate":
            one.add_argument("--split", default="test", choices=("train", "val", "test"))
            add_knobs(one, type(task.PLAN), answering(type(task.PLAN)))
        if name == "predict":
            one.add_argument("files", nargs="+", type=Path)
            if task.save is not None:
                one.add_argument("--into", required=True, type=Path, metavar="FOLDER", help="where answers are written")
        if name in ("pack", "advise", "train", "evaluate"):
            add_signature(one, task.pack, skip=("source", "progress"))
        if name == "train":
            add_training(one, task)
    return top


def command(commands: Any, name: str, text: str, act: Any) -> argparse.ArgumentParser:
    one = commands.add_parser(name, help=text, description=text)
    one.set_defaults(act=act)
    return one


def show_gpus(options: argparse.Namespace) -> None:
    print(gpus())


def show_stage(options: argparse.Namespace) -> None:
    print(stage(options.source, options.into))


def show_demo(options: argparse.Namespace) -> None:
    print(find_task(options.task).demo(options.folder, **options_of(options, "option_")))


def show_validation(options: argparse.Namespace) -> bool:
    report = validate(find_task(options.task), options.source, **options_of(options, "option_"))
    print(report)
    return report.ok


def show_features(options: argparse.Namespace) -> bool:
    made = find_task(options.task).features(options.source, options.into, **options_of(options, "option_"))
    print(made)
    return made.ok


def packed(options: argparse.Namespace, source: str) -> Any:
    pack = find_task(options.task).pack(source, **options_of(options, "option_"))
    if len(pack.bad):
        print(f"{plural(len(pack.bad), 'file')} left out, listed in {pack.folder / 'bad.csv'}:", file=sys.stderr)
        print(pack.bad.head(10).to_string(index=False), file=sys.stderr)
    return pack


def show_pack(options: argparse.Namespace) -> None:
    print(packed(options, options.source))


def show_advice(options: argparse.Namespace) -> None:
    pack = packed(options, options.data)
    asked = {"noise": options.noise, "compiling": options.compile}
    advice = advise(find_task(options.task), pack, measure=not options.no_measure, **asked)
    for part in (advice.batches, advice.workers, advice.profile, advice):
        if part is not None:
            print(part, end="\n\n")


def run_training(options: argparse.Namespace) -> None:
    task = find_task(options.task)
    if options.processes != 1:
        raise NbtoolsError(
            "--processes must be 1: several processes are not supported yet; leave it out, and one trains"
        )
    if options.smoke_test:
        print(smoke(task, **given(task.PLAN, options)))
        return
    restore(options.run, kept_folder(options.keep))
    pack = packed(options, options.data)
    plan = plan_of(task, pack, options)
    run = fit(task, pack, plan, options.run, options.keep, receipt=not options.no_receipt)
    print(run.summary().to_string())
    print(run.receipt or "no receipt")
    print(run.verdict or "no verdict")
    print(run)


def show_run(options: argparse.Namespace) -> None:
    print(watch(options.run, wait=0))


def ask_run(options: argparse.Namespace) -> None:
    run = Run.open(options.run)
    if not busy(options.run):
        raise CheckpointError(
            f"{options.run}: no process of this machine trains here; python -m nbtools train resumes the run"
        )
    pairs = [request.partition("=") for request in options.requests]
    settings = {name: run.plan.parse(name, value) for name, equals, value in pairs if equals}
    wanted = run.plan.turn(**settings)  # raises for what no plan allows; the run answers for what it cannot change
    if not options.force and (asks := doubts(run.plan, wanted, advised(options.run, run.plan))):
        command = f"python -m nbtools control {options.run} {' '.join(options.requests)} --force"
        raise NbtoolsError(f"{'; '.join(asks.values())}; to apply it anyway: {command}")
    send(options.run, [name for name, equals, _ in pairs if not equals], settings, options.force)


def show_evaluation(options: argparse.Namespace) -> None:
    run = Run.open(options.run, find_task(options.task))
    print(json.dumps(evaluate(run, packed(options, options.data), options.split, **given(run.plan, options))))


def show_predictions(options: argparse.Namespace) -> None:
    run = Run.open(options.run, find_task(options.task))
    for file, answer in zip(options.files, run.predict(options.files), strict=True):
        said = run.task.save(answer, file, options.into, run.card) if run.task.save is not None else answer
        print(f"{file}\t{said}")


SOURCE = "a folder, an archive, drive:…, a Google Drive link, or a pack"
TASK_COMMANDS = {
    "demo": ("write a small data set in the task's raw format", show_demo),
    "validate": ("report what is wrong with a data set", show_validation),
    "features": ("make features of filmed clips with a pretrained network", show_features),
    "pack": ("decode a data set once", show_pack),
    "advise": ("propose a plan for this machine and data, with reasons", show_advice),
    "train": ("train; an existing run folder is resumed", run_training),
    "evaluate": ("compute the metrics of a run on a split; the last line is JSON", show_evaluation),
    "predict": ("predict raw files with a run", show_predictions),
}


BUILT_IN = "nbtools.tasks"
MEASURED = (("batch_size", "auto"), ("workers", "auto"))  # settings that may be left to measuring


def add_signature(one: argparse.ArgumentParser, function: Any, skip: Sequence[str]) -> None:
    """The keyword parameters of a function as options."""
    group = one.add_argument_group("the task's options for " + function.__name__)
    for name, parameter in inspect.signature(function).parameters.items():
        if name not in skip and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            default = f"default {parameter.default}" if parameter.default is not None else "default: from the data"
            text, dest = default.replace("%", "%%"), f"option_{name}"
            group.add_argument(
                flag(name), dest=dest, metavar="VALUE", type=literal, help=text, default=argparse.SUPPRESS
            )


def add_training(one: argparse.ArgumentParser, task: Task) -> None:
    one.add_argument("--keep", metavar="FOLDER", help="second folder for copies of the run, e.g. drive:runs/captcha")
    one.add_argument("--smoke-test", action="store_true", help="no data: one step on demo samples, saved and loaded")
    one.add_argument("--processes", type=int, default=1, metavar="N", help="only 1 is supported yet")
    one.add_argument("--no-receipt", action="store_true", help="do not measure the baseline at the end")
    one.add_argument(
        "--from",
        dest="base",
        choices=("advised", "plan", "baseline"),
        default="advised",
        help="where settings that are not given come from",
    )
    add_knobs(one, type(task.PLAN), dataclasses.fields(task.PLAN))


def add_knobs(one: argparse.ArgumentParser, kind: type[Plan], fields: Sequence[dataclasses.Field[Any]]) -> None:
    """Fields of a Plan as options."""
    group = one.add_argument_group("settings of the Plan")
    hints = typing.get_type_hints(kind)
    for field in fields:
        choices, text = field.metadata.get("choices"), field.metadata.get("help", "")
        shown = (f"{text} ({', '.join(map(str, choices))})" if choices else text).replace("%", "%%")
        shown += "; auto: measure it here" if (field.name, "auto") in MEASURED else ""
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
    """A typed option as a plain value: a number, true, false, none, several of them separated by commas, else text."""
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
    """A built-in task by its short name, or any importable module. Raises NbtoolsError naming the built-in tasks."""
    for module in (f"{BUILT_IN}.{name}", name) if all(map(str.isidentifier, name.split("."))) else ():
        try:
            return as_task(importlib.import_module(module))
        except ModuleNotFoundError as error:
            if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
                raise
    import pkgutil

    import nbtools.tasks as tasks

    known = ", ".join(sorted(m.name for m in pkgutil.iter_modules(tasks.__path__)))
    raise NbtoolsError(f"no task {name!r}: use {known}, or any module of yours that can be imported from here")


def options_of(options: argparse.Namespace, prefix: str) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in vars(options).items() if name.startswith(prefix)}


def plan_of(task: Any, pack: Pack, options: argparse.Namespace) -> Plan:
    """The started run's plan, else the one that --from names; with the settings given on the command line.

    What follows from them is reported on stderr: another batch size without an lr adjusts lr by the plan's lr_rule, and
    in a new run fewer epochs shorten the warmup.
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
    """The plan that --from names; an advised one is for the requested network."""
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
    """The settings of evaluation, called eval_…: a trained run may be evaluated with others."""
    return [f for f in dataclasses.fields(kind) if f.metadata.get("live") and f.name.startswith("eval_")]


def given(plan: Plan, options: argparse.Namespace) -> dict[str, Any]:
    """The settings on the command line, without those that are to be measured."""
    knobs = {name: value for name, value in options_of(options, "knob_").items() if (name, value) not in MEASURED}
    return {name: plan.parse(name, value) if isinstance(value, str) else value for name, value in knobs.items()}


def measured(task: Any, pack: Pack, plan: Plan, options: argparse.Namespace) -> Plan:
    """The plan with the settings that the command line leaves to measuring; the result is reported on stderr."""
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


if __name__ == "__main__":
    sys.exit(main())
