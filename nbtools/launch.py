"""launch: nb.fit in several processes of this machine, one for each GPU, under torchrun.

The process that calls it never trains: it starts torchrun, draws what the run folder shows, sends requests through
`control.json`, and ends every process with itself. In a notebook the kernel's memory and its GPU stay free.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
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
from nbtools.identity import called, meant, own_folder
from nbtools.live import FirstSignal, Panel, closing, running_kernel
from nbtools.run import Run
from nbtools.show import plural
from nbtools.train import RankLost, TaskLike, as_task, import_task, readable, require_sizes, task_name
from nbtools.watch import Remote

T = TypeVar("T")
CODE = """
import ctypes, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG: end this process when the one dies that started it
from {} import {}
{}()
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
        call = meant(task, pack, plan, folder, fresh)
    part = readable(task, pack, call.plan)
    require_sizes(part, call.plan)
    if isinstance(plan, Panel):
        plan.adopt(call.plan)
    given = plan if isinstance(plan, Panel) or getattr(plan, "plan", None) is call.plan else call.plan
    remote = Remote(Run(folder, task, part.card, call.plan), given, progress)
    remote.requests.advised = call.advised or remote.requests.advised
    # each rank decides anew, since the run has changed where torchrun starts it again
    job = name, pack.folder.absolute(), pack.raw, call._replace(plan=call.given), folder, kept, receipt, fresh
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


def require_processes(count: int) -> None:
    """Raise TrainError for a number of processes that cannot start here."""
    what, name = "processes (--processes)", os.environ.get("NBTOOLS_DEVICE", "cuda")
    if is_torchelastic_launched():
        raise TrainError(f"{what} starts torchrun, got {count} in a process that torchrun started; leave it out")
    gpus = torch.cuda.device_count() if name.startswith("cuda") else 0
    if count < 1 or 0 < gpus < count:
        most = f" and at most {gpus}, the number of GPUs" if gpus else ""
        raise TrainError(f"{what} must be at least 1{most}, got {count}; start one for each GPU")


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
    remote.view.tell(f"starting {plural(processes, 'process')} under torchrun …", passing=True)
    with tempfile.TemporaryDirectory(prefix="nbtools-launch-", ignore_cleanup_errors=True) as folder:
        place = Path(folder)  # of what the processes print, and of their errors
        torchrun = start(place, job, processes, restarts)
        try:
            remote.follow(lambda: torchrun.poll() is None, partial(listen, remote))
        finally:
            if torchrun.poll() is None:
                torchrun.kill() if sys.platform == "linux" else torchrun.terminate()  # its ranks die with it
            code = torchrun.wait()
        if code:
            raise failure(place)


def listen(remote: Remote) -> None:
    if closing(running_kernel()):
        remote.requests.post("stop", by="the kernel's shutdown")


def start(place: Path, job: tuple[Any, ...], processes: int, restarts: int) -> subprocess.Popen[bytes]:
    """Start torchrun in a session of its own, which Ctrl-C does not reach."""
    (place / "job.pickle").write_bytes(pickle.dumps(job))
    options = f"--standalone --nproc-per-node {processes} --max-restarts {restarts} --redirects 3 --no-python".split()
    code = CODE.format("nbtools.launch", "rank", "rank")
    ranks = [sys.executable, "-u", "-c", code, str(place / "job.pickle")]
    torchrun = [sys.executable, "-c", CODE.format("torch.distributed.run", "main", "main")]
    paths = os.pathsep.join(str(Path(path).absolute()) for path in sys.path)  # where the task is
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // processes)))
    with (place / "torchrun.log").open("wb") as log:
        return subprocess.Popen(
            [*torchrun, *options, "--log-dir", str(place), *ranks],
            env={**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


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


def failure(place: Path) -> NbtoolsError:
    """Return why the last attempt failed: the first error that is not about another rank, else what torchrun says."""
    attempt = max(place.glob("*/attempt_*"), key=os.path.getmtime, default=place)
    for path in sorted(attempt.glob("*/error.json"), key=os.path.getmtime):
        message = json.loads(path.read_text())["message"]  # what torch's `record` wrote
        kind, _, text = message["message"].partition(": ")
        ours = TrainError if kind == "Diverged" else getattr(errors, kind, None)
        if isinstance(ours, type) and issubclass(ours, NbtoolsError):
            return ours(text)
        if kind != RankLost.__name__:
            trace = message["extraInfo"]["py_callstack"].rstrip()
            return TrainError(f"rank {path.parent.name} failed with {kind}: {text}\n{trace}")
    log = (place / "torchrun.log").read_text(errors="replace")
    return TrainError(f"a process was lost; torchrun says: {log.strip()[-2000:]}")
