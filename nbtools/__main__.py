"""The terminal: `python -m nbtools COMMAND`, of `gpus stage cache watch control export demo
validate features pack advise train evaluate predict`.

The fields of the task's Plan and the options of its `pack` become options by themselves (`nbtools.options`). Results go
to stdout, with --json as one document, and all else to stderr.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed import is_torchelastic_launched

from nbtools.data import Pack, cached, pack, stage
from nbtools.errors import CheckpointError, NbtoolsError
from nbtools.fit import fit
from nbtools.launch import launch, require_processes
from nbtools.live import ACTIONS, advised, send
from nbtools.measure import advise, check, follow, smoke_test
from nbtools.options import (
    BUILT_IN,
    Parser,
    add_knobs,
    add_signature,
    documented,
    find_task,
    given,
    own,
    plain,
    plan_of,
    read_samples,
)
from nbtools.run import Run, busy, evaluate, validate
from nbtools.table import plural
from nbtools.train import Task, doubts, reporting, unread
from nbtools.watch import watch

RUN: Any = {"type": Path, "metavar": "FOLDER", "help": "the run folder"}
SOURCE = "a folder, an archive, drive:…, a Google Drive link, or a pack"
EXIT_CODES = """exit codes:
  0    done
  1    refused or failed, for the reason on stderr; or a report with errors
  2    not a valid command line
  130  interrupted, or a run stopped before its end: train saves first
  141  the reader of stdout has gone, as head does
  143  SIGTERM: train saves first"""


class Result(NamedTuple):
    """What a command prints on stdout, a text or with --json a value, and its exit code."""

    text: object
    value: Any
    code: int = 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command → one of EXIT_CODES; an error of nbtools is a sentence on stderr."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        arguments = ordered(arguments)
        options = parser(arguments).parse_args(arguments)
        with redirect_stdout(sys.stderr) if options.json else nullcontext():  # a task of one's own may print
            found = options.act(options)
        if found is None or isinstance(found, int):
            return found or 0
        if not isinstance(found, Result):
            found = Result(found, {"folder": found} if isinstance(found, Path) else found)
        print(json.dumps(plain(found.value)) if options.json else found.text, flush=True)
        return found.code
    except NbtoolsError as error:
        print(f"nbtools: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("nbtools: stopped by you", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
        return 141


def ordered(arguments: list[str]) -> list[str]:
    """`--task NAME` as the word after the command, and a source that follows the task as `--data SOURCE`."""
    command, words = arguments[:1], arguments[1:]
    for place, word in enumerate(words if command and command[0] in TASK_COMMANDS else ()):
        flag, equals, name = word.partition("=")
        if flag == "--task" and (equals or place + 1 < len(words)):
            words = [name or words[place + 1], *words[:place], *words[place + (1 if equals else 2) :]]
            break
    source = words[1] if command and command[0] in WITH_DATA and len(words) > 1 else "-"
    if not source.startswith("-"):
        words.insert(1, "--data")
    return command + words


def parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The command line; a task's own options are added once its name is among the arguments."""
    top = Parser(
        prog="python -m nbtools",
        description="Train in notebooks and terminals without wasting the GPU. COMMAND --help ends with examples.",
        epilog=EXIT_CODES,
    )
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
        one = commands.add_parser(name, **documented(define))
        one.set_defaults(act=define(one), json=False)
    for name, define in TASK_COMMANDS.items():
        one = commands.add_parser(name, **documented(define))
        known = f"{', '.join(BUILT_IN)}, or your own: a module, or module:Name; also --task NAME"
        one.add_argument("task", type=same, help=known)
        one.set_defaults(act=define(one, task))
    for name, one in commands.choices.items():
        if name != "control":
            one.add_argument("--json", action="store_true", help="print the result as one JSON document")
    return top


# -- commands: each adds its options, and returns what it does with them; the docstring is its help

Act = Callable[[argparse.Namespace], Any]
"""Returns a Result, or a value to print as one, a path as a folder's; where it has printed already an exit code, or
None for 0."""


def gpus_command(one: argparse.ArgumentParser) -> Act:
    """check this machine: GPUs, versions, memory, precisions and how fast matrix products are in each

    python -m nbtools gpus
    python -m nbtools gpus --watch
    """
    one.add_argument("--watch", action="store_true", help="show what is in use every second, until Ctrl-C")

    def show(options: argparse.Namespace) -> Result | None:
        if not options.watch:
            found = check()
            return Result(str(found), found)
        if options.json:
            one.error("--watch has no end, and --json prints one document: leave one of them out")
        clear = "\x1b[H\x1b[2J" if sys.stdout.isatty() else ""
        with suppress(KeyboardInterrupt):
            follow(lambda text: print(clear + text, flush=True))

    return show


def stage_command(one: argparse.ArgumentParser) -> Act:
    """fetch a data set to local disk

    python -m nbtools stage drive:datasets/captcha.tar
    python -m nbtools stage data.tar --into data
    """
    one.add_argument("source", help=SOURCE)
    one.add_argument("--into", help="folder to put it in")
    one.add_argument("--sha256", metavar="HASH", help="that the archive must have; default: of FILE.sha256 next to it")
    return lambda options: stage(options.source, options.into, sha256=options.sha256)


def cache_command(one: argparse.ArgumentParser) -> Act:
    """list what stage and pack left on this disk; delete what was used least recently

    python -m nbtools cache
    python -m nbtools cache --free 20GB
    """
    one.add_argument("--free", metavar="SIZE", help="delete until so much is free, e.g. 20GB")
    one.add_argument("--days", type=float, metavar="N", help="delete what was not used for N days")
    return lambda options: cached(options.free, options.days)


def watch_command(one: argparse.ArgumentParser) -> Act:
    """follow a run that another process is training

    python -m nbtools watch runs/captcha
    """
    one.add_argument("run", **RUN)
    return lambda options: watch(options.run, wait=0)


def control_command(one: argparse.ArgumentParser) -> Act:
    """send requests to a run, or change its settings

    python -m nbtools control runs/captcha pause lr=1e-4
    python -m nbtools control runs/captcha lr=0.1 --force
    """
    one.add_argument("run", **RUN)
    one.add_argument("requests", nargs="+", metavar="REQUEST", help=f"{', '.join(ACTIONS)}, or SETTING=VALUE: lr=1e-4")
    text = "apply changes that otherwise need confirmation, such as a much larger lr"
    one.add_argument("--force", action="store_true", help=text)
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


def export_command(one: argparse.ArgumentParser) -> Act:
    """write a run's best weights as safetensors with a JSON card, or as model.onnx the network itself

    python -m nbtools export runs/captcha captcha-model
    python -m nbtools export runs/captcha captcha.onnx
    """
    one.add_argument("run", **RUN)
    one.add_argument("path", type=Path, help="file to write: safetensors, or ONNX if it ends in .onnx")
    text = "pack on whose samples the outputs are compared with torch's"
    one.add_argument("--pack", type=Path, metavar="FOLDER", help=text)

    def act(options: argparse.Namespace) -> Result:
        with redirect_stdout(sys.stderr):  # how its answers compare
            path = Run.open(options.run).export(options.path, options.pack and Pack.open(options.pack))
        return Result(path, {"path": path})

    return act


def demo_command(one: argparse.ArgumentParser, task: Task) -> Act:
    """write a small data set in the task's raw format

    python -m nbtools demo captcha data --count 600
    """
    one.add_argument("folder", type=Path)
    add_signature(one, task.demo)
    return lambda options: Path(task.demo(options.folder, **own(options)))


def validate_command(one: argparse.ArgumentParser, task: Task) -> Act:
    """report what is wrong with a data set

    python -m nbtools validate sign data/processed --require-x2048
    python -m nbtools validate segment garments --json
    """
    one.add_argument("source", help=SOURCE)
    add_signature(one, task.validate)
    return lambda options: as_result(validate(task, options.source, **own(options)))


def features_command(one: argparse.ArgumentParser, task: Task) -> Act:
    """make features of filmed clips with a pretrained network

    python -m nbtools features sign films films
    """
    one.add_argument("source", help=SOURCE)
    one.add_argument("into", type=Path, help="folder of the clips to add them to; may be the source")
    add_signature(one, task.features, "into", "network")
    return lambda options: as_result(task.features(options.source, options.into, **own(options)))


def as_result(report: Any) -> Result:
    return Result(report, report, int(not report.ok))


def pack_command(one: argparse.ArgumentParser, task: Task) -> Act:
    """decode a data set once

    python -m nbtools pack captcha data
    python -m nbtools pack sign data/processed --val 0.2 --json
    """
    one.add_argument("source", help=SOURCE)
    add_packing(one, task)

    def act(options: argparse.Namespace) -> Result:
        pack = packed(task, options.source, options)
        about = {"bytes": pack.bytes, "bad": pack.bad.to_dict("records")}
        return Result(pack, {"folder": pack.folder, **pack.card.to_dict(), **about})

    return act


def add_packing(one: argparse.ArgumentParser, task: Task) -> None:
    """The options of a task's `pack`; of `nb.pack` too, where the default leads there."""
    add_signature(one, task.pack)
    if task.packs_datasets:
        add_signature(one, pack, "data", "train", "val", "test", "like", "into")


def packed(task: Task | Run, source: str, options: argparse.Namespace) -> Pack:
    pack = task.pack(source, **own(options))
    if len(pack.bad):
        print(f"{plural(len(pack.bad), 'file')} left out, listed in {pack.folder / 'bad.csv'}:", file=sys.stderr)
        print(pack.bad.head(10).to_string(index=False), file=sys.stderr)
    return pack


def advise_command(one: argparse.ArgumentParser, task: Task) -> Act:
    """propose a plan for this machine and data, with reasons

    python -m nbtools advise captcha --data data
    python -m nbtools advise captcha --data data --no-measure --json
    """
    one.add_argument("--data", required=True, metavar="SOURCE", help=SOURCE)
    text = "do not measure: use rules of thumb and earlier measurements"
    one.add_argument("--no-measure", action="store_true", help=text)
    one.add_argument("--compile", action="store_true", help="also try compiled steps: a minute or two more")
    one.add_argument("--why", action="store_true", help="also the measurements that it rests on")
    add_packing(one, task)

    def show(options: argparse.Namespace) -> Result:
        asked = {"compiling": options.compile}
        advice = advise(task, packed(task, options.data, options), measure=not options.no_measure, **asked)
        parts = filter(None, (advice.batches, advice.profile) if options.why else ())
        texts = map(str, [*parts, advice])
        return Result("\n\n".join(texts), advice)

    return show


def train_command(one: argparse.ArgumentParser, task: Task) -> Act:
    """train; an existing run folder is resumed; without --run the same settings resume, others get a new runs/TASK-N

    python -m nbtools train captcha --data data --run runs/captcha --epochs 20
    python -m nbtools train captcha --smoke-test
    """
    one.add_argument("--data", metavar="SOURCE", help=SOURCE)
    one.add_argument("--run", **RUN)
    text = "start over in that folder; without it a started run resumes, and a finished one is extended by more epochs"
    one.add_argument("--fresh", action="store_true", help=text)
    one.add_argument("--keep", metavar="FOLDER", help="second folder for copies of the run, e.g. drive:runs/captcha")
    text = "samples shown with their predictions: first, worst, or ids of the pack, 12,40,77; kept for when it resumes"
    one.add_argument("--samples", type=read_samples, metavar="WHICH", help=text)
    one.add_argument("--smoke-test", action="store_true", help="no data: one step on demo samples, saved and loaded")
    one.add_argument("--processes", type=int, default=1, metavar="N", help="train in N processes, at most one a GPU")
    one.add_argument("--no-receipt", action="store_true", help="do not measure the receipt at the end")
    text = "source of the settings that are not given: advice, the task's plan, its baseline, or one of its presets"
    bases = ("advised", "plan", "baseline", *task.PRESETS)
    one.add_argument("--from", dest="base", choices=bases, default="advised", help=text)
    add_knobs(one, type(task.PLAN), dataclasses.fields(task.PLAN))
    add_packing(one, task)
    return lambda options: reporting(lambda: train_run(task, options))


def train_run(task: Task, options: argparse.Namespace) -> Result | None:
    rank = int(os.environ.get("RANK", 0))  # under torchrun
    if options.processes != 1:
        require_processes(options.processes)
        if options.smoke_test:
            raise NbtoolsError(
                f"--smoke-test is one step of one process, got --processes {options.processes}; leave one out"
            )
        if options.samples is not None:
            raise NbtoolsError(f"--samples are shown where one process trains, got --processes {options.processes}")
    if options.smoke_test:
        text = smoke_test(task, **given(task.PLAN, options))
        return Result(text, {"smoke_test": text})
    if options.data is None:
        raise NbtoolsError("train needs --data SOURCE; only --smoke-test needs none")
    with redirect_stderr(io.StringIO()) if rank else nullcontext():  # every rank packs, and one tells of it
        pack = packed(task, options.data, options)
    plan = partial(plan_of, task, pack, options)
    one = partial(fit, samples=options.samples)
    act = one if options.processes == 1 else partial(launch, processes=options.processes)
    more = {"receipt": not options.no_receipt, "fresh": options.fresh}
    interrupted = False
    try:
        run = act(task, pack, plan, options.run, options.keep, **more)
    except KeyboardInterrupt as error:  # its lines come all the same where a run was saved
        if (run := vars(error).get("run")) is None:
            raise
        interrupted = True
    if rank:
        return None
    parts = (run.summary().to_string(), run.receipt or "no receipt", run.verdict or "no verdict", run)
    stopped = interrupted or run.state == "stopped"
    code = 130 if stopped and not is_torchelastic_launched() else 0  # torchrun would start it again
    return Result("\n".join(map(str, parts)), run, code)


def evaluate_command(one: argparse.ArgumentParser, task: Task) -> Act:
    """compute the metrics of a run on a split, packed with its classes; the last line is JSON

    python -m nbtools evaluate captcha --data data --run runs/captcha
    python -m nbtools evaluate captcha --data new --test 1.0 --run runs/captcha
    """
    one.add_argument("--data", required=True, metavar="SOURCE", help=SOURCE)
    one.add_argument("--run", **RUN, required=True)
    which = "with --test 1.0 it is all of SOURCE, for data that the run has not seen"
    one.add_argument("--split", default="test", choices=("train", "val", "test"), help=f"default test; {which}")
    fields = dataclasses.fields(task.PLAN)
    add_knobs(one, type(task.PLAN), [f for f in fields if f.metadata.get("live") and f.name.startswith("eval_")])
    add_packing(one, task)

    def show(options: argparse.Namespace) -> Result:
        run = Run.open(options.run, task)
        pack = packed(run, options.data, options)
        if limits := unread(task, pack, run.plan):
            print(limits, file=sys.stderr)
        metrics = evaluate(run, pack, options.split, **given(run.plan, options))
        count = run.readable(pack).splits[options.split]
        print(f"{plural(count, 'sample')} of the {options.split} split counted", file=sys.stderr)
        return Result(json.dumps(plain(metrics)), metrics)

    return show


def predict_command(one: argparse.ArgumentParser, task: Task) -> Act:
    """predict raw files with a run

    python -m nbtools predict captcha --run runs/captcha new.png
    """
    one.add_argument("--run", **RUN, required=True)
    one.add_argument("files", nargs="+", type=Path)
    if task.save is not None:
        one.add_argument("--into", required=True, type=Path, metavar="FOLDER", help="folder for the predictions")

    def show(options: argparse.Namespace) -> Result:
        run, found = Run.open(options.run, task), []
        for file, answer in zip(options.files, run.predict(options.files), strict=True):
            text = task.save(answer, file, options.into, run.card) if task.save is not None else answer
            found.append({"file": file, "prediction": text})
        print(f"{plural(len(found), 'file')} predicted by {run}", file=sys.stderr)
        return Result("\n".join(f"{one['file']}\t{one['prediction']}" for one in found), found)

    return show


WITH_DATA = ("advise", "train", "evaluate")
COMMANDS = {
    "gpus": gpus_command,
    "stage": stage_command,
    "cache": cache_command,
    "watch": watch_command,
    "control": control_command,
    "export": export_command,
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

if __name__ == "__main__":
    sys.exit(main())
