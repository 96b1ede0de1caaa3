"""launch: nb.fit in several processes of this machine, one for each GPU, under torchrun.

The process that calls it never trains: it starts torchrun, draws what the run folder shows, sends requests through
`control.json`, and ends every process with itself. In a notebook the kernel's memory and its GPU stay free.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any, TypeVar

import torch
from torch.distributed import is_torchelastic_launched

from nbtools import errors
from nbtools.data import Pack, cores, say
from nbtools.errors import NbtoolsError, TrainError, ctrl_c
from nbtools.fit import fit, forget, places, require_pack
from nbtools.identity import Call, called, own_folder, panel_of
from nbtools.live import FirstSignal, closing, running_kernel
from nbtools.run import Run
from nbtools.show import plural
from nbtools.train import RankLost, TaskLike, as_task, checkpoint, import_task, task_name
from nbtools.watch import MOMENT, Remote

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

    Stop and the first Ctrl-C finish the step, save, and return the run; a second one ends all processes at once. They
    end too when this process dies (Linux). Raises TrainError with the error of the process that failed first.
    """
    task = as_task(task)
    require_pack(task, pack)
    require_processes(processes)
    name, (folder, kept), plan = importable(task), places(run, keep, release_gpu=False), called(plan)
    folder = folder or own_folder(task, pack, plan, fresh)
    forget(folder)
    given = getattr(plan, "plan", plan)  # that of a Panel or an Advice
    call = plan and Call(given, given, advised=getattr(plan, "advised", None), panel=panel_of(plan))
    job = name, pack, call, folder, kept, receipt, fresh
    if progress:
        say(f"starting {plural(processes, 'process')} under torchrun …")
    with started(job, processes, restarts) as torchrun:
        while torchrun.poll() is None and not checkpoint.read_index(folder):
            sleep(MOMENT)
        begun = bool(checkpoint.read_index(folder))
        remote = Remote(Run.open(folder, task), plan, progress) if begun else None
        interrupted = remote is not None and follow(torchrun, remote)
    result = Run.open(folder, task)
    result.events = remote.view.events if remote is not None else []
    if interrupted and running_kernel() is None:
        raise ctrl_c(result)
    return result


def follow(torchrun: subprocess.Popen[bytes], remote: Remote) -> bool:
    """Show the run until it ends, and stop it where a signal or the kernel's shutdown asks for that; return whether
    Ctrl-C did."""

    def look() -> None:
        if closing(running_kernel()):
            remote.requests.post("stop", by="the kernel's shutdown")

    stop = partial(remote.requests.post, "stop")
    with FirstSignal(signal.SIGTERM, partial(stop, by="SIGTERM"), later=True), FirstSignal(signal.SIGINT, stop) as ctrl:
        remote.follow(lambda: torchrun.poll() is None, look)
    return ctrl.came


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
    if name.startswith("__main__:") or name.endswith(":"):
        fix = "write it to a file next to the notebook (%%writefile my_task.py), import that, and pass it"
        raise TrainError(f"nb.launch needs a task that other processes can import, got {name!r}; {fix}")
    return name


@contextmanager
def started(job: tuple[Any, ...], processes: int, restarts: int) -> Iterator[subprocess.Popen[bytes]]:
    """Run torchrun in a session of its own, which Ctrl-C does not reach; all its processes end with the block. job: see
    `rank`. Raises TrainError where they fail."""
    options = f"--standalone --nproc-per-node {processes} --max-restarts {restarts} --redirects 3 --no-python".split()
    paths = os.pathsep.join(str(Path(path).absolute()) for path in sys.path)  # where the task is
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // processes)))
    with tempfile.TemporaryDirectory(prefix="nbtools-launch-", ignore_cleanup_errors=True) as folder:
        place = Path(folder)  # of what the processes print, and of their errors
        (place / "job.pickle").write_bytes(pickle.dumps(job))
        code = CODE.format("nbtools.launch", "rank", "rank")
        ranks = [sys.executable, "-u", "-c", code, str(place / "job.pickle")]
        command = [sys.executable, "-c", CODE.format("torch.distributed.run", "main", "main"), *options]
        with (place / "torchrun.log").open("wb") as log:
            torchrun = subprocess.Popen(
                [*command, "--log-dir", folder, *ranks],
                env={**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": paths},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            yield torchrun
        finally:
            if torchrun.poll() is None:
                torchrun.kill() if sys.platform == "linux" else torchrun.terminate()  # its ranks die with it
            code = torchrun.wait()
        if code:
            raise TrainError(failure(place))


def rank() -> None:
    """Call `fit` in a process of torchrun's. sys.argv: the file of a job: the task's name, the pack with its
    source files, and what `fit` gets."""
    task, pack, plan, run, keep, receipt, fresh = pickle.loads(Path(sys.argv[1]).read_bytes())

    def act() -> None:
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


def failure(place: Path) -> str:
    """Return why the last attempt failed: the first error that is not about another rank, else what torchrun says."""
    attempt = max(place.glob("*/attempt_*"), key=os.path.getmtime, default=place)
    for path in sorted(attempt.glob("*/error.json"), key=os.path.getmtime):
        message = json.loads(path.read_text())["message"]  # what torch's `record` wrote
        kind = message["message"].partition(":")[0]
        if kind != RankLost.__name__:
            trace = "" if hasattr(errors, kind) else f"\n{message['extraInfo']['py_callstack']}"
            return f"rank {path.parent.name} failed with {message['message']}{trace}"
    return f"a process was lost; torchrun says: {(place / 'torchrun.log').read_text(errors='replace').strip()[-2000:]}"
