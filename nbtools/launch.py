"""launch: nb.fit in several processes of this machine, one for each GPU, under torchrun.

The process that calls it never trains: it starts torchrun, draws what the run folder shows, sends requests through
`control.json`, and ends every process with itself. In a notebook the kernel's memory and its GPU stay free.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed import is_torchelastic_launched

from nbtools import errors
from nbtools.data import Pack, cores
from nbtools.errors import CheckpointError, NbtoolsError, TrainError, ctrl_c
from nbtools.fit import fit, forget, places, require_pack
from nbtools.folder import only_one, restore
from nbtools.identity import Given, called, chosen_plan, meant, own_folder, panel_of
from nbtools.live import FirstSignal, Panel, closing, running_kernel
from nbtools.run import Run
from nbtools.show import plural
from nbtools.train import RankLost, TaskLike, as_task, import_task, readable, require_sizes, task_name
from nbtools.train import device as devices
from nbtools.watch import Remote

T = TypeVar("T")
CODE = """
import ctypes, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, {1:d})  # PR_SET_PDEATHSIG: the signal when the process dies that started this one
from nbtools.launch import {0}
{0}()
"""


def launch(
    task: TaskLike,
    pack: Pack,
    plan: Any = None,
    run: str | Path | None = None,
    keep: str | Path | None = None,
    receipt: bool = True,
    progress: bool = True,
    *,
    processes: int,
    restarts: int = 3,
    fresh: bool = False,
) -> Run:
    """Train in several processes of this machine, and draw the run here as `fit` does; return the Run.

    task: importable by name, since each process imports it. plan, run, keep, receipt, fresh: as for `fit`; the
    batch size is that of all processes together, so their number changes neither lr nor schedule. processes: at most
    one a GPU. restarts: how often all processes start again from the last checkpoint when one of them is lost; errors
    that nbtools raises on purpose are not tried again.

    Panel, `control.json` and the terminal act on the run as on any other. Stop and the first Ctrl-C finish the step,
    save, and return the run; a second one ends all processes at once. They end too when this process dies (Linux).
    Raises TrainError, PlanError or CheckpointError, those of the process that failed first.
    """
    task = as_task(task)
    require_pack(task, pack)
    require_processes(processes)
    name = importable(task)
    folder, kept = places(run, keep, release_gpu=False)
    if folder is None:
        plan = called(plan)
        folder = own_folder(task, pack, plan, fresh)
    with only_one(folder):
        forget(folder)
        restore(folder, kept, fresh)
        plan = called(plan)
        wanted = meant(task, pack, plan, folder, fresh).plan
    require_sizes(readable(task, pack, wanted), wanted)
    advised = getattr(plan, "advised", getattr(plan, "plan", None))
    to_ranks = Given(wanted if plan is None else chosen_plan(task, pack, plan), advised, panel_of(plan))
    job = name, pack.folder.absolute(), pack.raw, to_ranks, folder, kept, receipt, fresh
    remote = view_of(Run(folder, task, readable(task, pack, wanted).card, wanted), plan, progress)
    remote.requests.advised = advised or remote.requests.advised
    post = remote.requests.post
    with (
        FirstSignal(signal.SIGTERM, partial(post, "stop", by="SIGTERM"), later=True),
        FirstSignal(signal.SIGINT, partial(post, "stop")) as interrupts,
    ):
        follow(job, processes, restarts, remote)
    result = Run.open(folder, task)
    result.events = remote.view.events
    if interrupts.came and running_kernel() is None:
        raise ctrl_c(result)
    return result


def view_of(run: Run, plan: Any, progress: bool) -> Remote:
    """Return what draws a run here: with the caller's panel or advice, where that is the run's plan."""
    if isinstance(plan, Panel):
        plan.adopt(run.plan)
    shown = plan if isinstance(plan, Panel) or getattr(plan, "plan", None) is run.plan else run.plan
    return Remote(run, shown, progress)


def require_processes(count: int) -> None:
    """Raise TrainError for a number below 1, more processes than GPUs, one GPU for several, and inside torchrun."""
    what, name = "processes (--processes)", os.environ.get("NBTOOLS_DEVICE", "cuda")
    if is_torchelastic_launched():
        rule = f"{what} starts torchrun, got {count} in a process that torchrun started"
        raise TrainError(f"{rule}; leave it out, or start this without torchrun")
    if count < 1:
        raise TrainError(f"{what} must be at least 1, got {count}; start one for each GPU")
    devices.require_own(name, count)
    here = torch.cuda.device_count() if name.startswith("cuda") else 0
    if 0 < here < count:
        rule = f"{what} must be at most the number of GPUs, which is {here} here, got {count}"
        raise TrainError(f"{rule}: two on a GPU share its memory; start {here}", entry="DDP does not start")


def importable(task: TaskLike) -> str:
    """Return the name from which other processes import a task. Raises TrainError for one that they cannot import."""
    name = task_name(task)
    try:
        if name.partition(":")[0] == "__main__":
            raise CheckpointError("it is defined in a notebook cell or in the script itself")
        import_task(name, "nb.launch")
        return name
    except CheckpointError as error:
        rule = f"nb.launch needs a task that other processes can import, got {name!r} ({error})"
        fix = "write it to a file next to the notebook (%%writefile my_task.py), import that, and pass it"
        raise TrainError(f"{rule}; {fix}") from None


def follow(job: tuple[Any, ...], processes: int, restarts: int, remote: Remote) -> None:
    """Train under torchrun, and show the run until it ends; all processes end if this does. job: see `rank`. Raises the
    error of the rank that failed first."""
    attempt = 0

    def look() -> None:
        nonlocal attempt
        if closing(running_kernel()):
            remote.requests.post("stop", by="the kernel's shutdown")
        if any(place.glob(f"*/attempt_{attempt + 1}")):
            error, attempt = failure(place, attempt), attempt + 1
            remote.view.tell(f"{error}; starting again from the last checkpoint (restart {attempt} of {restarts})")
            remote.paused = False  # the new processes do not know of a pause

    remote.view.tell(f"starting {plural(processes, 'process')} under torchrun …", passing=True)
    with tempfile.TemporaryDirectory(prefix="nbtools-launch-", ignore_cleanup_errors=True) as folder:
        place = Path(folder)  # of what the processes print, and of their errors
        torchrun = start(place, job, processes, restarts)
        try:
            remote.follow(lambda: torchrun.poll() is None, look)
        finally:
            if torchrun.poll() is None:
                torchrun.kill() if sys.platform == "linux" else torchrun.terminate()  # its ranks die with it
            code = torchrun.wait()
        if code:
            raise failure(place, attempt, code)


def start(place: Path, job: tuple[Any, ...], processes: int, restarts: int) -> subprocess.Popen[bytes]:
    """Start torchrun in a session of its own, which Ctrl-C does not reach."""
    (place / "job.pickle").write_bytes(pickle.dumps(job))
    options = f"--standalone --nproc-per-node {processes} --max-restarts {restarts} --redirects 3 --no-python".split()
    ranks = [sys.executable, "-u", "-c", CODE.format("rank", signal.SIGKILL), str(place / "job.pickle")]
    paths = os.pathsep.join(str(Path(path).absolute()) for path in sys.path)  # where the task is
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // processes)))
    with (place / "torchrun.log").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, "-c", CODE.format("agent", signal.SIGUSR1), *options, "--log-dir", str(place), *ranks],
            env={**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def agent() -> None:
    """Run torchrun in a process that is asked to end when the one dies that started it: the run is saved."""

    def end(*_: Any) -> None:
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Linux sends one for each thread of the process that dies
        signal.raise_signal(signal.SIGTERM)

    from torch.distributed.run import main  # takes its time

    signal.signal(signal.SIGUSR1, end)
    main()


def rank() -> None:
    """Call `fit` in a process of torchrun's. sys.argv: the file of a job: the task's name, the folder of the pack, its
    source files, and what `fit` gets."""

    def act() -> None:
        task, folder, raw, plan, run, keep, receipt, fresh = pickle.loads(Path(sys.argv[1]).read_bytes())
        pack = dataclasses.replace(Pack.open(folder), raw=raw)
        fit(import_task(task, "nb.launch"), pack, plan, run, keep, receipt, progress=False, fresh=fresh)

    reporting(act)
    os._exit(0)  # gloo's threads may crash a process that tidies up, and torchrun would start a finished run again


def reporting(act: Callable[[], T]) -> T | None:
    """Run it; under torchrun its error is kept for whoever asks for the root cause. An error that nbtools raised on
    purpose would come again: torchrun, which has no exit code for that, is asked to end."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return act()
    from torch.distributed.elastic.multiprocessing.errors import record  # takes its time

    try:
        return record(act)()
    except NbtoolsError as error:
        if not isinstance(error, RankLost):
            os.kill(os.getppid(), signal.SIGTERM)
        raise


def failure(place: Path, attempt: int, code: int = 1) -> NbtoolsError:
    """Return why an attempt failed: the first error that is not about another rank, else how a rank ended without one,
    else what the others say of it. code: with which torchrun ended."""
    if code < 0:
        return TrainError(f"torchrun {ending(code)}")
    told: dict[str, NbtoolsError] = {}
    for path in sorted(place.glob(f"*/attempt_{attempt}/*/error.json"), key=lambda path: path.stat().st_mtime):
        message, number = json.loads(path.read_text())["message"], path.parent.name  # what torch's `record` wrote
        kind, _, text = message["message"].partition(": ")
        ours = {"Diverged": TrainError, "RankLost": RankLost}.get(kind) or getattr(errors, kind, None)
        if isinstance(ours, type) and issubclass(ours, NbtoolsError):
            told[number] = ours(text)
        else:
            trace = message["extraInfo"]["py_callstack"].rstrip()
            told[number] = TrainError(f"rank {number} failed with {kind}: {text}\n{trace}")
    log = (place / "torchrun.log").read_text(errors="replace")
    ended = re.findall(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)", log)[attempt:]
    silent = [TrainError(f"rank {number} {ending(int(code))}") for code, number in ended if number not in told]
    first = [error for error in told.values() if not isinstance(error, RankLost)]
    return [*first, *silent, *told.values(), TrainError(f"torchrun failed: {log.strip()[-1000:]}")][0]


def ending(code: int) -> str:
    """Return in words how a process ended."""
    if code >= 0:
        return f"ended with exit code {code}"
    memory = ", which the system sends when memory runs out" if code == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{memory}"
