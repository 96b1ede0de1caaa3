"""The terminal: `python -m nbtools COMMAND`, of `gpus stage demo validate features pack advise train watch control
evaluate predict`.

Knobs of the task's Plan and options of its `pack` are read from their own definitions, so a new one is an option here
by itself. Progress goes to stderr, results to stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nbtools.arguments import (
    add_knobs,
    add_signature,
    add_training,
    answering,
    find_task,
    given,
    options_of,
    plan_of,
)
from nbtools.data import stage
from nbtools.errors import CheckpointError, NbtoolsError
from nbtools.fit import fit
from nbtools.folder import busy, kept_folder, restore
from nbtools.live import ACTIONS, advised, send
from nbtools.measure import advise, gpus
from nbtools.run import Run, evaluate
from nbtools.smoke import smoke
from nbtools.table import plural
from nbtools.train import Task, doubts
from nbtools.validate import validate
from nbtools.watch import watch


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 when it succeeded, 1 with a sentence on stderr when nbtools refused, or where the data that it
    validated has errors, 130 for Ctrl-C."""
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

    command(commands, "gpus", "what this machine trains on", show_gpus)
    one = command(commands, "stage", "bring a data set to local disk", show_stage)
    one.add_argument("source", help=SOURCE)
    one.add_argument("--into", help="folder to put it in")
    one = command(commands, "watch", "follow a run that another process trains", show_run)
    one.add_argument("run", type=Path, metavar="FOLDER", help="the run folder")
    one = command(commands, "control", "send requests to a run, or change its settings", ask_run)
    one.add_argument("run", type=Path, metavar="FOLDER", help="the run folder")
    one.add_argument("requests", nargs="+", metavar="REQUEST", help=f"{', '.join(ACTIONS)}, or SETTING=VALUE: lr=1e-4")
    one.add_argument(
        "--force", action="store_true", help="apply what would be asked about once more, such as a much larger lr"
    )
    for name, (text, act) in TASK_COMMANDS.items():
        one = command(commands, name, text, act)
        one.add_argument("task", help="captcha, hwdb, sign, segment, or the dotted name of a module of yours")
        if name == "demo":
            one.add_argument("folder", type=Path)
            add_signature(one, task.demo, skip=("folder",))
        if name in ("pack", "validate", "features"):
            one.add_argument("source", help=SOURCE)
        if name == "features":
            one.add_argument("into", type=Path, help="folder of the clips that get them; may be the source")
            add_signature(one, task.features, skip=("source", "into", "network", "progress"))
        if name == "validate":
            add_signature(one, task.validate, skip=("source", "progress"))
        needed = "--smoke-test" not in arguments
        if name in ("advise", "train", "evaluate"):
            one.add_argument("--data", required=needed, metavar="SOURCE", help=SOURCE)
        if name == "advise":
            one.add_argument("--no-measure", action="store_true", help="rules of thumb, and what was measured before")
            one.add_argument("--compile", action="store_true", help="try compiled steps too: a minute or two more")
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
        raise NbtoolsError("several processes are not there yet: leave --processes out, and one device trains")
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
        raise CheckpointError(f"{options.run}: no process of this machine trains here; python -m nbtools train goes on")
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
    "validate": ("what is wrong with a data set", show_validation),
    "features": ("make features of filmed clips by a pretrained network", show_features),
    "pack": ("decode a data set once", show_pack),
    "advise": ("a plan for this machine and data, with reasons", show_advice),
    "train": ("train; on an existing run folder, go on", run_training),
    "evaluate": ("metrics of a run on a split; the last line is JSON", show_evaluation),
    "predict": ("what a run reads in raw files", show_predictions),
}

if __name__ == "__main__":
    sys.exit(main())
