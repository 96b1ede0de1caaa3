"""The terminal: `nbtools COMMAND`, or `python -m nbtools COMMAND`.

The fields of the task's Plan and the parameters of its functions become options by themselves (`nbtools.options`).
Results go to stdout, with --json as one document, and all else to stderr.
"""

from __future__ import annotations

import argparse
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

import nbtools as nb
from nbtools import disk
from nbtools.errors import CheckpointError, NbtoolsError
from nbtools.launch import reporting, require_processes
from nbtools.live import ACTIONS, advised, send
from nbtools.measure import check, follow, smoke_test
from nbtools.options import BUILT_IN, Parser, add_options, find_task, given, plain, plan_of, value_of
from nbtools.run import busy
from nbtools.table import plural
from nbtools.train import Task, doubts, unread

EXAMPLES = """
gpus
gpus --watch
stage drive:datasets/captcha.tar --into data
cache --free 20GB
runs runs
compare runs/captcha-1 runs/captcha-2
watch runs/captcha
control runs/captcha pause lr=1e-4
export runs/captcha captcha.onnx
demo captcha data --count 600
validate sign data/processed --require-x2048
features sign films films
pack captcha data
pack sign data/processed --val 0.2 --json
advise captcha --data data --no-measure
train captcha --data data --run runs/captcha --epochs 20
train captcha --smoke-test
evaluate captcha --data data --run runs/captcha
evaluate captcha --data new --test 1.0 --run runs/captcha
predict captcha --run runs/captcha new.png
predict captcha --run runs/captcha images --csv out.csv
"""
EXIT_CODES = """exit codes:
  0    done
  1    refused or failed, for the reason on stderr; or a report with errors
  2    not a valid command line
  130  interrupted, or a run stopped before its end: train saves first
  141  the reader of stdout has gone, as head does
  143  SIGTERM: train saves first"""


class Result(NamedTuple):
    """What a command prints on stdout: with --json the value, else the text (None: the value's); and its exit code."""

    value: Any
    text: Any = None
    code: int = 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns one of EXIT_CODES. An error of nbtools is a sentence on stderr."""
    if arguments is None:  # the script `nbtools` imports tasks from where it is called, as `python -m nbtools` does
        sys.path.insert(0, os.getcwd())
    try:
        words = ordered(sys.argv[1:] if arguments is None else arguments)
        options = parser(words).parse_args(words)
        with redirect_stdout(sys.stderr) if options.json else nullcontext():  # a task of one's own may print
            found = reporting(lambda: options.act(options))
        value, text, code = found if isinstance(found, Result) else Result(found)
        if value is not None:
            document = {"folder": value} if isinstance(value, Path) else value
            print(json.dumps(plain(document)) if options.json else value if text is None else text, flush=True)
        return code
    except NbtoolsError as error:
        print(f"nbtools: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("nbtools: stopped by you", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
        return 141


def ordered(arguments: Sequence[str]) -> list[str]:
    """Return the words with `--task NAME` as the word after the command."""
    one = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    one.add_argument("--task", nargs="?")
    found, words = one.parse_known_args(arguments)
    return words if found.task is None else [*words[:1], found.task, *words[1:]]


def parser(words: Sequence[str]) -> Parser:
    """Return the parser of a command line, with the options of the task that its second word names."""
    about = "Train in notebooks and terminals without wasting the GPU. COMMAND --help ends with examples."
    top = Parser(prog="python -m nbtools", description=about, epilog=EXIT_CODES)
    top.add_argument("--version", action="version", version=f"nbtools {nb.__version__}")
    commands, task = top.add_subparsers(required=True, metavar="COMMAND"), Task()
    known = f"{', '.join(BUILT_IN)}, or your own: a module, or MODULE:NAME"
    if words and words[0] in TASK_COMMANDS:
        if not words[1:] or (words[1].startswith("-") and not {"-h", "--help"} & {*words}):
            top.error(f"name the task directly after {words[0]}: {known}")
        task = task if words[1].startswith("-") else find_task(words[1])
    for name, (act, arguments, reads) in {**COMMANDS, **TASK_COMMANDS}.items():
        examples = [f"  python -m nbtools {line}" for line in EXAMPLES.splitlines() if line.split()[:1] == [name]]
        one = commands.add_parser(
            name, help=act.__doc__, description=act.__doc__, epilog="\n".join(["examples:", *examples])
        )
        one.set_defaults(act=act)
        if name in TASK_COMMANDS:
            one.add_argument("task", type=lambda _: task, help=f"{known}; also --task NAME")
        for flag, more in arguments:
            one.add_argument(flag, **more)
        one.add_argument("--json", action="store_true", help="print the result as one JSON document")
        for source in reads:
            add_options(one, task, source)
    return top


# -- commands: each takes the parsed options and returns a Result, or its value alone; the docstring is its help

COMMANDS: dict[str, Any] = {}
TASK_COMMANDS: dict[str, Any] = {}


def command(*arguments: tuple[str, dict[str, Any]], reads: Sequence[str] | None = None) -> Any:
    """Register a function as the command of its name. reads: of a command for a task, whence its options come."""

    def register(act: Callable[[Any], Any]) -> Callable[[Any], Any]:
        (COMMANDS if reads is None else TASK_COMMANDS)[act.__name__] = act, arguments, reads or ()
        return act

    return register


def arg(flag: str, help: str, **more: Any) -> tuple[str, dict[str, Any]]:
    return flag, {"help": help, **more}


SWITCH: Any = {"action": "store_true"}
SOURCE = "a folder, an archive, drive:…, a Google Drive link, or a pack"
RUN = arg("run", "the run folder", type=Path, metavar="FOLDER")
WHICH = partial(value_of, kind=Sequence[int] | str)
OF_RUN = arg("--run", "the run folder", type=Path, metavar="FOLDER", required=True)
DATA = (
    arg("data", "as --data SOURCE", nargs="?", default=argparse.SUPPRESS, metavar="SOURCE"),
    arg("--data", SOURCE, metavar="SOURCE"),
)


@command(arg("--watch", "show what is in use every second, until Ctrl-C", **SWITCH))
def gpus(options: argparse.Namespace) -> Any:
    """check this machine: GPUs, versions, memory, precisions and how fast matrix products are in each"""
    if not options.watch:
        return check()
    clear = "\x1b[H\x1b[2J" if sys.stdout.isatty() else ""
    with suppress(KeyboardInterrupt):
        follow(lambda text: print(clear + text, flush=True))


@command(
    arg("source", SOURCE),
    arg("--into", "folder to put it in", metavar="FOLDER"),
    arg("--sha256", "that the archive must have; default: of FILE.sha256 next to it", metavar="HASH"),
)
def stage(options: argparse.Namespace) -> Path:
    """fetch a data set to local disk"""
    return nb.stage(options.source, options.into, sha256=options.sha256)


@command(
    arg("--free", "delete until so much is free, e.g. 20GB", metavar="SIZE"),
    arg("--days", "delete what was not used for N days", type=float, metavar="N"),
)
def cache(options: argparse.Namespace) -> Any:
    """list what stage and pack left on this disk; delete what was used least recently"""
    return nb.cached(options.free, options.days)


@command(arg("folder", "that the run folders are in; default runs", nargs="?", default="runs"))
def runs(options: argparse.Namespace) -> Result:
    """list the runs in a folder and its subfolders, newest first"""
    found = nb.runs(options.folder)
    return Result(found.reset_index().to_dict("records"), found.to_string())


@command(arg("folders", "run folders, or a folder of runs: its newest eight", nargs="+", metavar="FOLDER"))
def compare(options: argparse.Namespace) -> Result:
    """compare runs: which is the best, what came out, and the settings that differ"""
    found = nb.compare(*options.folders)
    records = found.frame.reset_index().to_dict("records")
    return Result({"conclusion": found.conclusion, "best": found.best and found.best.folder, "runs": records}, found)


@command(RUN)
def watch(options: argparse.Namespace) -> nb.Run:
    """follow a run that another process is training"""
    return nb.watch(options.run, wait=0)


@command(
    RUN,
    arg("requests", f"{', '.join(ACTIONS)}, or SETTING=VALUE: lr=1e-4", nargs="+", metavar="REQUEST"),
    arg("--force", "also what needs confirmation, such as a much larger lr", **SWITCH),
)
def control(options: argparse.Namespace) -> None:
    """send requests to a run, or change its settings"""
    run, folder = nb.Run.open(options.run), options.run
    if not busy(folder):
        text = "no process on this machine is training it; python -m nbtools train resumes the run"
        raise CheckpointError(f"{folder}: {text}")
    pairs = [request.partition("=") for request in options.requests]
    settings = {name: run.plan.parse(name, value) for name, equals, value in pairs if equals}
    wanted = run.plan.turn(**settings)  # raises for what no plan allows; the run reports what it cannot change
    if not options.force and (asks := doubts(run.plan, wanted, advised(folder, run.plan))):
        again = f"python -m nbtools control {folder} {' '.join(options.requests)} --force"
        raise NbtoolsError(f"{'; '.join(asks.values())}; to apply it anyway: {again}")
    send(folder, [name for name, equals, _ in pairs if not equals], settings, options.force)


@command(
    RUN,
    arg("path", "file to write: safetensors, or ONNX if it ends in .onnx"),
    arg("--pack", "pack on whose samples the outputs are compared with torch's", metavar="FOLDER"),
)
def export(options: argparse.Namespace) -> Result:
    """write a run's best weights as safetensors with a JSON card, or as model.onnx the network itself"""
    with redirect_stdout(sys.stderr):  # how its answers compare
        path = nb.Run.open(options.run).export(options.path, options.pack and nb.Pack.open(options.pack))
    return Result({"path": path}, path)


@command(arg("folder", "folder to write", type=Path), reads=["demo"])
def demo(options: argparse.Namespace) -> Path:
    """write a small data set in the task's raw format"""
    return options.task.demo(options.folder, **given(options, "demo"))


@command(arg("source", SOURCE), reads=["validate"])
def validate(options: argparse.Namespace) -> Result:
    """report what is wrong with a data set"""
    report = nb.validate(options.task, options.source, **given(options, "validate"))
    return Result(report, code=int(not report.ok))


@command(
    arg("source", SOURCE),
    arg("into", "folder of the clips to add them to; may be the source", type=Path),
    reads=["features"],
)
def features(options: argparse.Namespace) -> Result:
    """make features of filmed clips with a pretrained network"""
    report = options.task.features(options.source, options.into, **given(options, "features"))
    return Result(report, code=int(not report.ok))


@command(arg("data", SOURCE, metavar="SOURCE"), reads=["pack"])
def pack(options: argparse.Namespace) -> Result:
    """decode a data set once"""
    pack = packed(options.task, options)
    about = {"bytes": pack.bytes, "bad": pack.bad.to_dict("records")}
    return Result({"folder": pack.folder, **pack.card.to_dict(), **about}, pack)


def packed(task: Task | nb.Run, options: argparse.Namespace) -> nb.Pack:
    if options.data is None:
        raise NbtoolsError("name the data: --data SOURCE; only train --smoke-test needs none")
    pack = task.pack(options.data, **given(options, "pack"))
    if len(pack.bad):
        print(f"{plural(len(pack.bad), 'file')} left out, listed in {pack.folder / 'bad.csv'}:", file=sys.stderr)
        print(pack.bad.head(10).to_string(index=False), file=sys.stderr)
    return pack


@command(
    *DATA,
    arg("--no-measure", "use rules of thumb and earlier measurements only", **SWITCH),
    arg("--compile", "also try compiled steps: a minute or two more", **SWITCH),
    arg("--why", "each reason in full, and what was measured", **SWITCH),
    reads=["pack"],
)
def advise(options: argparse.Namespace) -> Result:
    """propose a plan for this machine and data, with reasons"""
    pack = packed(options.task, options)
    found = nb.advise(options.task, pack, measure=not options.no_measure, compiling=options.compile)
    parts = (found.batches, found.profile) if options.why else ()
    return Result(found, "\n\n".join([*map(str, filter(None, parts)), str(found)]))


@command(
    *DATA,
    arg("--run", "the run folder", type=Path, metavar="FOLDER"),
    arg(
        "--fresh",
        "start over in that folder; else a started run resumes, and more epochs extend a finished one",
        **SWITCH,
    ),
    arg("--keep", "second folder for copies of the run, e.g. drive:runs/captcha", metavar="FOLDER"),
    arg(
        "--samples", "to show with predictions: first, worst, or ids of the pack, 12,40,77", type=WHICH, metavar="WHICH"
    ),
    arg("--smoke-test", "no data: one step on demo samples, saved and loaded", **SWITCH),
    arg("--processes", "train in N processes, at most one a GPU", type=int, default=1, metavar="N"),
    arg("--no-receipt", "do not measure the receipt at the end", **SWITCH),
    reads=["plan", "pack"],
)
def train(options: argparse.Namespace) -> Result | None:
    """train; an existing run folder is resumed; without --run the same settings resume, others get a new runs/TASK-N"""
    task, processes = options.task, options.processes
    if processes != 1:
        require_processes(processes)
        if options.smoke_test:
            raise NbtoolsError(f"--smoke-test is one step of one process, got --processes {processes}; leave one out")
        if options.samples is not None:
            raise NbtoolsError(f"--samples are shown where one process trains, got --processes {processes}")
    if options.smoke_test:
        text = smoke_test(task, **given(options, "plan"))
        return Result({"smoke_test": text}, text)
    rank = int(os.environ.get("RANK", 0))  # under torchrun every rank packs, and one tells of it
    with redirect_stderr(io.StringIO()) if rank else nullcontext():
        pack = packed(task, options)
    act = partial(nb.fit, samples=options.samples) if processes == 1 else partial(nb.launch, processes=processes)
    more = {"receipt": not options.no_receipt, "fresh": options.fresh}
    try:
        run = act(task, pack, partial(plan_of, task, pack, options), options.run, options.keep, **more)
        stopped = run.state == "stopped"
    except KeyboardInterrupt as error:  # its lines come all the same where a run was saved
        if (run := vars(error).get("run")) is None:
            raise
        stopped = True
    if rank:
        return None
    parts = (run.summary().to_string(), run.receipt or "no receipt", run.verdict or "no verdict", run)
    code = 130 if stopped and not is_torchelastic_launched() else 0  # torchrun would start it again
    return Result(run, "\n".join(map(str, parts)), code)


@command(
    *DATA,
    OF_RUN,
    arg("--split", "default test; all of SOURCE with --test 1.0", default="test", choices=("train", "val", "test")),
    reads=["evaluation", "pack"],
)
def evaluate(options: argparse.Namespace) -> Result:
    """compute the metrics of a run on a split, packed with its classes; the last line is JSON"""
    run = nb.Run.open(options.run, options.task)
    pack = packed(run, options)
    if limits := unread(options.task, pack, run.plan):
        print(limits, file=sys.stderr)
    metrics = nb.evaluate(run, pack, options.split, **given(options, "evaluation"))
    count = run.readable(pack).splits[options.split]
    print(f"{plural(count, 'sample')} of the {options.split} split counted", file=sys.stderr)
    return Result(metrics, json.dumps(plain(metrics)))


@command(
    OF_RUN,
    arg("files", "a file, or a folder of files", nargs="+", type=Path, metavar="FILE"),
    arg("--csv", "write columns name and prediction there", type=Path, metavar="FILE"),
    arg("--into", "folder for predictions that are files", type=Path, default="predictions", metavar="FOLDER"),
    reads=[],
)
def predict(options: argparse.Namespace) -> Result:
    """predict raw files, or all files of folders, with a run"""
    import pandas as pd

    run, save = nb.Run.open(options.run, options.task), options.task.save
    names = {file: name for given in options.files for file, name in files_of(given)}
    answers = run.predict(list(names))
    if save is not None:
        answers = [save(answer, file, options.into, run.card) for file, answer in zip(names, answers, strict=True)]
    print(f"{plural(len(names), 'file')} predicted by {run}", file=sys.stderr)
    found = [{"file": file, "prediction": answer} for file, answer in zip(names, answers, strict=True)]
    if options.csv is None:
        return Result(found, "\n".join(f"{row['file']}\t{row['prediction']}" for row in found))
    rows = pd.DataFrame({"name": names.values(), "prediction": map(str, answers)})
    with disk.explained("writing predictions", options.csv):
        disk.write_atomic(options.csv, rows.to_csv(index=False))
    return Result(found, options.csv)


def files_of(given: Path) -> list[tuple[Path, str]]:
    """Return (file, name) of a file, or of each below a folder that is not hidden, with its name in there."""
    if not given.is_dir():
        return [(given, str(given))]
    pairs = [(file, file.relative_to(given)) for file in sorted(Path(item.path) for item in disk.walk(given))]
    return [(file, name.as_posix()) for file, name in pairs if not any(part.startswith(".") for part in name.parts)]


if __name__ == "__main__":
    sys.exit(main())
