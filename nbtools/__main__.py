"""The terminal: `nbtools COMMAND`, or `python -m nbtools COMMAND`.

A command is a function of COMMANDS: its docstring is the help, its parameters are the arguments, keyword-only ones the
options; `of_pack: Options` are those of the task's `pack`, `of_plan` the fields of its Plan. Results go to stdout, all
else to stderr.
"""

from __future__ import annotations

import inspect
import io
import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any

from torch.distributed import is_torchelastic_launched

import nbtools as nb
from nbtools import disk, measure
from nbtools.data import say
from nbtools.errors import CheckpointError, NbtoolsError
from nbtools.identity import former_run
from nbtools.launch import reporting, require_processes
from nbtools.live import advised, send
from nbtools.options import Options, Parser, add_arguments, find_task, nearest
from nbtools.run import busy
from nbtools.show import plural
from nbtools.train import Task, doubts, listed, unread

BASES = ("advised", "measured", "plan", "baseline")
CODES = "exit codes: 0 done, 1 refused, failed, or a report with errors, 2 not a valid command line, 130 stopped by you"


def gpus() -> Any:
    """Check this machine: GPUs, versions, memory, precisions and how fast matrix products are in each."""
    return measure.check()


def demo(task: Task, folder: Path, *, of_demo: Options) -> Any:
    """Write a small data set in the task's raw format."""
    return task.demo(folder, **of_demo)


def stage(source: str, *, into: Path | None = None, sha256: str | None = None) -> Any:
    """Fetch a data set to local disk: a folder, an archive, drive:…, a Google Drive link, https://…"""
    return nb.stage(source, into, sha256=sha256)


def pack(task: Task, data: str, *, of_pack: Options) -> Any:
    """Decode a data set once. DATA: what `stage` fetches, or a pack."""
    made = task.pack(data, **of_pack)
    if len(made.bad):
        say(f"{plural(len(made.bad), 'file')} left out, listed in {made.folder / 'bad.csv'}")
    return made


def advise(task: Task, *, data: str, measure: bool = True, compile: bool = False, of_pack: Options) -> Any:
    """Propose a plan for this machine and data, with reasons. --no-measure: by rules of thumb and earlier measurements
    only; --compile: try compiled steps too, for a minute or two more."""
    return nb.advise(task, pack(task, data, of_pack=of_pack), measure=measure, compiling=compile)


def train(
    task: Task,
    *,
    data: str | None = None,
    run: Path | None = None,
    keep: str | None = None,
    from_: str = "advised",
    fresh: bool = False,
    processes: int = 1,
    receipt: bool = True,
    smoke_test: bool = False,
    of_plan: Options,
    of_pack: Options,
) -> Any:
    """Train, or resume a started run: that of --run, else the newest with the same settings; more epochs extend a
    finished one. --keep: a second folder for copies, drive:…; --from: where settings that are not given come from: by
    rules (advised), measured now, the task's own plan, its baseline, or one of its presets; --fresh: start over in that
    folder; --processes: at most one a GPU; --no-receipt: do not measure the receipt at the end; --smoke-test: no data,
    one step on demo samples, saved and loaded."""
    if processes != 1:
        require_processes(processes)
    if smoke_test:
        return measure.smoke_test(task, **of_plan)
    if data is None:
        raise NbtoolsError("name the data: --data SOURCE")
    rank = int(os.environ.get("RANK", 0))
    with redirect_stderr(io.StringIO()) if rank else nullcontext():  # under torchrun every rank packs, and one tells
        made = pack(task, data, of_pack=of_pack)
    plan = partial(plan_of, task, made, from_, None if fresh else run, of_plan)
    act = nb.fit if processes == 1 else partial(nb.launch, processes=processes)
    try:
        done = act(task, made, plan, run, keep, receipt=receipt, fresh=fresh)
    except KeyboardInterrupt as error:  # its lines come all the same where a run was saved
        if (done := vars(error).get("run")) is None:
            raise
    return None if rank else done


def plan_of(task: Task, pack: nb.Pack, base: str, folder: Path | None, given: Options) -> nb.Plan:
    """Return the plan of the run in a folder, else the one that --from names, with the given settings; say what follows
    from them, as lr from a batch size by `Plan.lr_rule`."""
    former = former_run(task, folder) if folder else None
    plan = former.applied.marked(former.applied.to_dict()) if former else base_plan(task, pack, base, given)
    follows: dict[str, Any] = {}
    if not former and (share := given.get("epochs", plan.epochs) / plan.epochs) < 1:
        follows = {"warmup_epochs": round(plan.warmup_epochs * share, 2)}
    new = plan.turn(**{**follows, **given})
    if moved := {name: change for name, change in new.changes_from(plan).items() if name not in given}:
        say(f"from the given settings follows {listed(moved)}")
    return new


def base_plan(task: Task, pack: nb.Pack, base: str, given: Options) -> nb.Plan:
    """Return the plan that --from names; an advised one is for the given network. Raises NbtoolsError for one that
    cannot train here."""
    names = (*BASES, *task.PRESETS)
    if base not in names:
        raise NbtoolsError(f"--from must be one of {', '.join(names)}, got {base!r}{nearest(base, names)}")
    if base in ("advised", "measured"):
        plan = nb.advise(task, pack, measure=base == "measured").plan
        return task.with_network(plan, pack, given["network"]) if "network" in given else plan
    if base in BASES:
        return task.PLAN if base == "plan" else task.BASELINE
    plan, why = measure.preset(task, pack, base)
    if plan is None:
        raise NbtoolsError(f"--from {base} cannot train here: {why}")
    if why:
        say(f"{base}: {why}")
    return plan


def evaluate(task: Task, *, data: str, run: Path, split: str = "test", of_evaluation: Options, of_pack: Options) -> Any:
    """Compute the metrics of a run on a split (train, val or test) of data that is packed with its classes; --test 1.0:
    all of the data. Ends with JSON."""
    opened: Any = nb.Run.open(run, task)
    made = pack(opened, data, of_pack=of_pack)  # with its classes
    if limits := unread(task, made, opened.plan):
        print(limits, file=sys.stderr)
    return nb.evaluate(opened, made, split, **of_evaluation)


def predict(run: Path, files: list[Path], *, csv: Path | None = None, into: Path = Path("predictions")) -> Any:
    """Predict raw files, or folders of them, with a run. --csv: write columns name and prediction there; --into: folder
    for predictions that are files."""
    import pandas as pd

    opened, loose = nb.Run.open(run), [file for file in files if not file.is_dir()]
    rows = list(zip(loose, map(str, loose), opened.predict(loose), strict=True)) if loose else []
    for folder in filter(Path.is_dir, files):
        rows += [(folder / name, name, answer) for name, answer in opened.predict(folder).items()]
    if (save := opened.task.save) is not None:
        rows = [(file, name, save(answer, file, into, opened.card)) for file, name, answer in rows]
    print(f"{plural(len(rows), 'file')} predicted by {opened}", file=sys.stderr)
    table = pd.DataFrame(rows, columns=["file", "name", "prediction"])
    if csv is None:
        return table[["file", "prediction"]].astype({"file": str})
    with disk.explained("writing predictions", csv):
        return disk.write_atomic(csv, table[["name", "prediction"]].astype(str).to_csv(index=False))


def validate(task: Task, source: str, *, of_validate: Options) -> Any:
    """Report what is wrong with a data set."""
    return nb.validate(task, source, **of_validate)


def features(task: Task, source: str, into: Path, *, of_features: Options) -> Any:
    """Make features of filmed clips with a pretrained network, and add them to the clips in INTO."""
    return task.features(source, into, **of_features)


def cache(*, free: str | None = None) -> Any:
    """List what stage and pack left on this disk. --free 20GB: delete what was used least recently until so much is
    free."""
    return nb.cached(free)


def runs(folder: Path = Path("runs")) -> Any:
    """List the runs in a folder and its subfolders, newest first."""
    return nb.runs(folder).reset_index()


def compare(folders: list[Path]) -> Any:
    """Compare runs, or the newest eight in a folder: which is the best, what came out, and the settings that differ."""
    return nb.compare(*folders)


def watch(run: Path) -> Any:
    """Follow a run that another process is training."""
    return nb.watch(run, wait=0)


def control(run: Path, requests: list[str]) -> None:
    """Send requests to a run: pause, resume, stop, evaluate, save, profile, best or undo; or change its settings:
    lr=1e-4."""
    plan = nb.Run.open(run).plan
    if not busy(run):
        text = "no process on this machine is training it; python -m nbtools train resumes the run"
        raise CheckpointError(f"{run}: {text}")
    pairs = [request.partition("=") for request in requests]
    settings = {name: plan.parse(name, value) for name, equals, value in pairs if equals}
    if asks := doubts(plan, plan.turn(**settings), advised(run, plan)):
        anyway = f"nbtools.live.send({str(run)!r}, settings={settings}, force=True)"
        raise NbtoolsError(f"{'; '.join(asks.values())}; to apply it anyway: {anyway}")
    send(run, [name for name, equals, _ in pairs if not equals], settings)


def export(run: Path, path: Path, *, pack: Path | None = None) -> Any:
    """Write a run's best weights as safetensors with a JSON card, or the network itself if PATH ends in .onnx. --pack:
    the pack on whose samples its outputs are compared with torch's."""
    with redirect_stdout(sys.stderr):
        return nb.Run.open(run).export(path, pack and nb.Pack.open(pack))


COMMANDS = [gpus, demo, stage, pack, advise, train, evaluate, predict, validate, features, cache, runs, compare, watch]
COMMANDS += [control, export]


# -- the command line


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return its exit code. An error of nbtools is a sentence on stderr."""
    if arguments is None:  # the script `nbtools` imports tasks from where it is called, as `python -m nbtools` does
        sys.path.insert(0, os.getcwd())
    words = sys.argv[1:] if arguments is None else arguments
    try:
        given = vars(parser(words).parse_args(words))
        act = given.pop("act")
        for name in [name for name in given if "." in name]:  # of_pack.val: an entry of the argument of_pack
            of, field = name.split(".")
            given[of][field] = given.pop(name)
        if (value := reporting(partial(act, **given))) is not None:
            print(text(value), flush=True)
    except NbtoolsError as error:
        print(f"nbtools: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("nbtools: stopped by you", file=sys.stderr)
        return 130
    except BrokenPipeError:  # as by `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at its end
        return 141
    stopped = isinstance(value, nb.Run) and value.state == "stopped" and not is_torchelastic_launched()
    return 130 if stopped else int(getattr(value, "ok", True) is False)  # torchrun would start it again


def text(value: Any) -> str:
    """Return a result as lines for a person."""
    if isinstance(value, nb.Run):
        parts = value.summary().to_string(), value.receipt or "no receipt", value.verdict or "no verdict", value
        return "\n".join(map(str, parts))
    if hasattr(value, "to_string"):
        lines = "prediction" in value  # one a file, for scripts
        return value.to_csv(sep="\t", header=False, index=False).strip() if lines else value.to_string(index=False)
    return json.dumps(value) if isinstance(value, dict) else str(value)


def parser(words: Sequence[str]) -> Parser:
    """Return the parser of a command line, with the options of the task that its second word names."""
    about = "Train in notebooks and terminals without wasting the GPU."
    top = Parser(prog="python -m nbtools", description=about, epilog=CODES, allow_abbrev=False)
    top.add_argument("--version", action="version", version=f"nbtools {nb.__version__}")
    commands = top.add_subparsers(metavar="COMMAND", required=True)
    for act in COMMANDS:
        about, task = " ".join((act.__doc__ or "").split()), Task()
        one = commands.add_parser(
            act.__name__, help=about.split(". ")[0], description=about, conflict_handler="resolve", allow_abbrev=False
        )
        one.set_defaults(act=act)
        if words[:1] == [act.__name__]:
            if "task" in inspect.signature(act).parameters and words[1:2] not in (["-h"], ["--help"]):
                task = find_task("".join(words[1:2]))  # its options are known before the line is parsed
            top.names = one._option_string_actions
        add_arguments(one, act, task)
    return top


if __name__ == "__main__":
    sys.exit(main())
