"""The terminal: `nbtools COMMAND`, or `python -m nbtools COMMAND`.

Results go to stdout, with --json as one document, and all else to stderr. COMMANDS at the end says all: what each takes
and does; a task's own options are read from signatures (`nbtools.options`).
"""

import csv
import io
import json
import os
import re
import sys
from argparse import Namespace
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
from nbtools.options import BUILT_IN, Parser, add_options, find_task, plan_of, read, typed
from nbtools.run import busy
from nbtools.show import plural
from nbtools.train import Task, doubts, unread

DATA = "a folder, an archive, drive:…, a Google Drive link, https://…, or a pack"
COMMANDS = f"""
gpus                 check this machine: GPUs, versions, memory, precisions and how fast matrix products are in each
  --watch            show what is in use every second, until Ctrl-C
demo TASK +demo      write a small data set in the task's raw format
  FOLDER             folder to write
stage                fetch a data set to local disk
  SOURCE             {DATA}
  --into FOLDER      folder to put it in
  --sha256 TEXT      that the archive must have; default: of FILE.sha256 next to it
pack TASK +pack      decode a data set once
  DATA               {DATA}
advise TASK +pack    propose a plan for this machine and data, with reasons
  --data TEXT        {DATA}
  --no-measure       use rules of thumb and earlier measurements only
  --compile          also try compiled steps: a minute or two more
  --why              each reason in full, and what was measured
train TASK +plan +pack     train, or resume a started run: that of --run, else the newest with the same settings
  --data TEXT        {DATA}
  --run FOLDER       the run folder; default: runs/TASK-N
  --fresh            start over in that folder; else a started run resumes, and more epochs extend a finished one
  --keep TEXT        second folder for copies of the run: drive:runs/captcha
  --processes N      train in N processes, at most one a GPU
  --no-receipt       do not measure the receipt at the end
  --smoke-test       no data: one step on demo samples, saved and loaded
evaluate TASK +evaluation +pack    compute the metrics of a run on a split, packed with its classes; ends with JSON
  --data TEXT        {DATA}
  --run FOLDER       the run folder
  --split TEXT       train, val or test, the default; with --test 1.0 all of the data
predict              predict raw files with a run
  RUN                the run folder
  FILES...           files, or folders of files
  --csv FILE         write columns name and prediction there
  --into FOLDER      folder for predictions that are files; default: predictions
validate TASK +validate    report what is wrong with a data set
  SOURCE             {DATA}
features TASK +features    make features of filmed clips with a pretrained network
  SOURCE             {DATA}
  INTO               folder of the clips to add them to; may be the source
cache                list what stage and pack left on this disk; delete what was used least recently
  --free TEXT        delete until so much is free: 20GB
  --days DAYS        delete what was not used for so many days
runs                 list the runs in a folder and its subfolders, newest first
  [RUNS]             the folder that they are in; default: runs
compare              compare runs: which is the best, what came out, and the settings that differ
  FOLDERS...         run folders, or a folder of runs: its newest eight
watch                follow a run that another process is training
  RUN                the run folder
control              send requests to a run, or change its settings
  RUN                the run folder
  REQUESTS...        {", ".join(ACTIONS)}, or SETTING=VALUE: lr=1e-4
  --force            also what needs confirmation, such as a much larger lr
export               write a run's best weights as safetensors with a JSON card, or the network itself as ONNX
  RUN                the run folder
  PATH               file to write: safetensors, or ONNX if it ends in .onnx
  --pack FOLDER      pack on whose samples the outputs are compared with torch's
"""
"""A line for each command and its arguments; `+plan`: a task's options of this kind, see `add_options`."""
CODES = "exit codes: 0 done, 1 refused, failed, or a report with errors, 2 not a valid command line, 130 stopped by you"


class Result(NamedTuple):
    """What a command prints on stdout: with --json the value, else the text (None: the value's); and its exit code."""

    value: Any
    text: Any = None
    code: int = 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code. An error of nbtools is a sentence on stderr."""
    if arguments is None:  # the script `nbtools` imports tasks from where it is called, as `python -m nbtools` does
        sys.path.insert(0, os.getcwd())
    try:
        words = sys.argv[1:] if arguments is None else arguments
        options = parser(words).parse_args(words)
        with redirect_stdout(sys.stderr) if options.json else nullcontext():  # a task of one's own may print
            made = reporting(lambda: options.act(options))
        value, text, code = made if isinstance(made, Result) else Result(made)
        if value is not None:
            value = {"folder": value} if options.json and isinstance(value, Path) else value
            print(document(value) if options.json else value if text is None else text, flush=True)
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


def parser(words: Sequence[str]) -> Parser:
    """Return the parser of a command line, with the options of the task that its second word names."""
    about = "Train in notebooks and terminals without wasting the GPU."
    one = top = Parser(prog="python -m nbtools", description=about, epilog=CODES, allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"nbtools {nb.__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    for line in COMMANDS.strip().splitlines():
        head, text = re.split(" {2,}", line.strip(), maxsplit=1)
        name, *more = head.split()
        if line.startswith(" "):
            add_argument(one, name, text, *more)
            continue
        usage = " ".join(["%(prog)s [options]", *more[:1]])
        one = commands.add_parser(name, help=text, description=text, usage=usage, allow_abbrev=False)
        one.set_defaults(act=ACTS[name])
        one.add_argument("--json", action="store_true", help="print the result as one JSON document")
        if more and words[:1] == [name]:
            add_task(one, words[1:], [source.strip("+") for source in more[1:]])
    return top


def add_argument(one: Parser, name: str, text: str, value: str = "") -> None:
    """Add an argument as a line of COMMANDS names it: `--fresh`, `--run FOLDER`, `RUN`, `FILES...`, `[DATA]`."""
    word = value or name.strip("[.]")
    how: Any = {"type": partial(read, name, KINDS.get(word, "str")), "metavar": word}
    if not name.startswith("--"):
        one.usage = f"{one.usage} {name}"
        how["nargs"] = "+" if name.endswith("...") else "?" if name.startswith("[") else None
    elif not value:
        how = {"action": "store_true"}
    one.add_argument(name if name.startswith("--") else word.lower(), help=text, **how)


def add_task(one: Parser, words: Sequence[str], sources: Sequence[str]) -> None:
    """Add the task that the first word names, and its options; of any task where that is --help."""
    known, task = f"{', '.join(BUILT_IN)}, or your own: a module, or MODULE:NAME", Task()
    if words[:1] not in (["-h"], ["--help"]):
        if not words or words[0].startswith("-"):
            one.error(f"name the task directly after {one.prog.split()[-1]}: {known}")
        task = find_task(words[0])
    one.add_argument("task", type=lambda _: task, metavar="TASK", help=known)
    for source in sources:
        add_options(one, task, source)


def document(value: Any) -> str:
    """Return a value as strict JSON, with null for NaN and infinity."""

    def plain(value: Any) -> Any:
        convert = next((each for each in ("to_dict", "tolist") if hasattr(value, each)), "__str__")  # of plans; arrays
        return getattr(value, convert)()

    return json.dumps(json.loads(json.dumps(value, default=plain), parse_constant=lambda _: None))


# -- commands: each takes the parsed options


def gpus(options: Namespace) -> Any:
    """Check this machine, or follow what is in use."""
    if not options.watch:
        return check()
    clear = "\x1b[H\x1b[2J" if sys.stdout.isatty() else ""
    with suppress(KeyboardInterrupt):
        follow(lambda text: print(clear + text, flush=True))


def packed(task: Task | nb.Run, options: Namespace) -> nb.Pack:
    """Return the pack of --data, and print which files were left out."""
    if options.data is None:
        raise NbtoolsError("name the data: --data SOURCE")
    pack = task.pack(options.data, **typed(options, "pack"))
    if len(pack.bad):
        print(f"{plural(len(pack.bad), 'file')} left out, listed in {pack.folder / 'bad.csv'}:", file=sys.stderr)
        print(pack.bad.head(10).to_string(index=False), file=sys.stderr)
    return pack


def pack(options: Namespace) -> Result:
    """Return a pack with its card."""
    made = packed(options.task, options)
    about = {"bytes": made.bytes, "bad": made.bad.to_dict("records")}
    return Result({"folder": made.folder, **made.card.to_dict(), **about}, made)


def advise(options: Namespace) -> Result:
    """Return the advice; with --why also what was measured."""
    pack = packed(options.task, options)
    advice = nb.advise(options.task, pack, measure=not options.no_measure, compiling=options.compile)
    parts = (advice.batches, advice.profile) if options.why else ()
    return Result(advice, "\n\n".join([*map(str, filter(None, parts)), str(advice)]))


def train(options: Namespace) -> Result | None:
    """Train, in this process or several; return the run."""
    task, given, rank = options.task, typed(options, "plan"), int(os.environ.get("RANK", 0))
    if (processes := 1 if options.processes is None else options.processes) != 1:
        require_processes(processes)
    if options.smoke_test and processes > 1:
        raise NbtoolsError(f"--smoke-test is one step of one process, got --processes {processes}; leave one out")
    if options.smoke_test:
        text = smoke_test(task, **given)
        return Result({"smoke_test": text}, text)
    with redirect_stderr(io.StringIO()) if rank else nullcontext():  # under torchrun every rank packs, and one tells
        pack = packed(task, options)
    act = nb.fit if processes == 1 else partial(nb.launch, processes=processes)
    plan = partial(plan_of, task, pack, options.base, None if options.fresh else options.run, given)
    try:
        run = act(task, pack, plan, options.run, options.keep, receipt=not options.no_receipt, fresh=options.fresh)
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


def evaluate(options: Namespace) -> Result:
    """Return metric → value on a split; the data is packed with the run's classes."""
    if options.run is None:
        raise NbtoolsError("name the run: --run FOLDER")
    run, split = nb.Run.open(options.run, options.task), options.split or "test"
    pack = packed(run, options)
    if limits := unread(options.task, pack, run.plan):
        print(limits, file=sys.stderr)
    metrics = nb.evaluate(run, pack, split, **typed(options, "evaluation"))
    print(metrics, file=sys.stderr)
    return Result(metrics, document(metrics))


def predict(options: Namespace) -> Result:
    """Return a row a file, and write them as CSV; predictions that are files themselves go below --into."""
    run = nb.Run.open(options.run)
    files = [file for file in options.files if not file.is_dir()]
    answers = list(zip(files, map(str, files), run.predict(files), strict=True))
    for folder in (folder for folder in options.files if folder.is_dir()):
        answers += [(folder / name, name, answer) for name, answer in run.predict(folder).items()]
    if (save := run.task.save) is not None:
        into = options.into or Path("predictions")
        answers = [(file, name, save(answer, file, into, run.card)) for file, name, answer in answers]
    print(f"{plural(len(answers), 'file')} predicted by {run}", file=sys.stderr)
    rows = [{"file": file, "prediction": answer} for file, _, answer in answers]
    if options.csv is None:
        return Result(rows, "\n".join(f"{file}\t{answer}" for file, _, answer in answers))
    with disk.explained("writing predictions", options.csv), io.StringIO() as text:
        table = [("name", "prediction"), *((name, answer) for _, name, answer in answers)]
        csv.writer(text, lineterminator="\n").writerows(table)
        disk.write_atomic(options.csv, text.getvalue())
    return Result(rows, options.csv)


def checked(report: Any) -> Result:
    """Return a report; one with errors makes the exit code 1."""
    return Result(report, code=int(not report.ok))


def runs(options: Namespace) -> Result:
    """List the runs in a folder."""
    made = nb.runs(options.runs or "runs")
    return Result(made.reset_index().to_dict("records"), made.to_string())


def compare(options: Namespace) -> Result:
    """Return what the comparison of runs says, with their results as rows."""
    made = nb.compare(*options.folders)
    rows = made.frame.reset_index().to_dict("records")
    return Result({"conclusion": made.conclusion, "best": made.best and made.best.folder, "runs": rows}, made)


def control(options: Namespace) -> None:
    """Send requests and settings to the process that trains a run."""
    folder, plan = options.run, nb.Run.open(options.run).plan
    if not busy(folder):
        text = "no process on this machine is training it; python -m nbtools train resumes the run"
        raise CheckpointError(f"{folder}: {text}")
    pairs = [request.partition("=") for request in options.requests]
    settings = {name: plan.parse(name, value) for name, equals, value in pairs if equals}
    wanted = plan.turn(**settings)  # raises for what no plan allows; the run reports what it cannot change
    if not options.force and (asks := doubts(plan, wanted, advised(folder, plan))):
        again = f"python -m nbtools control {folder} {' '.join(options.requests)} --force"
        raise NbtoolsError(f"{'; '.join(asks.values())}; to apply it anyway: {again}")
    send(folder, [name for name, equals, _ in pairs if not equals], settings, options.force)


def export(options: Namespace) -> Result:
    """Write the weights or the ONNX graph, and print on stderr how its answers compare."""
    with redirect_stdout(sys.stderr):
        path = nb.Run.open(options.run).export(options.path, options.pack and nb.Pack.open(options.pack))
    return Result({"path": path}, path)


KINDS = {**dict.fromkeys(("RUN", "FILES", "FOLDER", "FILE", "INTO"), "Path"), "N": "int", "DAYS": "float"}
OWN = (gpus, pack, advise, train, evaluate, predict, runs, compare, control, export)
ACTS: dict[str, Callable[[Namespace], Any]] = {act.__name__: act for act in OWN} | {
    "demo": lambda o: o.task.demo(o.folder, **typed(o, "demo")),
    "stage": lambda o: nb.stage(o.source, o.into, sha256=o.sha256),
    "validate": lambda o: checked(nb.validate(o.task, o.source, **typed(o, "validate"))),
    "features": lambda o: checked(o.task.features(o.source, o.into, **typed(o, "features"))),
    "cache": lambda o: nb.cached(o.free, o.days),
    "watch": lambda o: nb.watch(o.run, wait=0),
}

if __name__ == "__main__":
    sys.exit(main())
