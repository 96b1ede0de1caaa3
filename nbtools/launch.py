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
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed import is_torchelastic_launched

from nbtools import errors
from nbtools.data import Pack, cores
from nbtools.errors import CheckpointError, NbtoolsError, TrainError, ctrl_c
from nbtools.fit import Given, called, chosen_plan, fit, forget, meant, own_folder, panel_of, places, require_pack
from nbtools.folder import only_one, restore
from nbtools.live import FirstSignal, Panel, closing, running_kernel
from nbtools.run import Run
from nbtools.show import plural
from nbtools.train import RankLost, TaskLike, as_task, import_task, readable, require_sizes, task_name
from nbtools.train import device as devices
from nbtools.watch import Remote

RESTARTS = 3
ASKED, LOG = "asked.pickle", "torchrun.log"
T = TypeVar("T")

RANK = """
import ctypes, os, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it dies with torchrun
from nbtools.launch import fit_as_asked, reporting
reporting(lambda: fit_as_asked(sys.argv[1]))
os._exit(0)
"""
"""A rank, which ends at once when it has done its part: gloo's threads may crash a process that tidies up, and torchrun
would start all ranks of a finished run again."""
AGENT = """
import ctypes, signal, sys

def end(*_):
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Linux sends one for each thread of the process that dies
    signal.raise_signal(signal.SIGTERM)

signal.signal(signal.SIGUSR1, end)
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGUSR1)
from torch.distributed.run import main
main()
"""
"""torchrun, which is asked to end when the process dies that started it: it passes that on, and a run is saved."""


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
    restarts: int = RESTARTS,
    fresh: bool = False,
) -> Run:
    """Train in several processes of this machine, and draw the run here as `fit` does; returns the Run.

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
    asked = name, pack.folder.absolute(), pack.raw, to_ranks, folder, kept, receipt, fresh
    given = plan if isinstance(plan, Panel) or getattr(plan, "plan", None) is wanted else wanted
    if isinstance(plan, Panel):
        plan.adopt(wanted)
    remote = Remote(Run(folder, task, readable(task, pack, wanted).card, wanted), given, progress)
    remote.requests.advised = advised or remote.requests.advised
    post = remote.requests.post
    with (
        FirstSignal(signal.SIGTERM, partial(post, "stop", by="SIGTERM"), later=True),
        FirstSignal(signal.SIGINT, partial(post, "stop")) as interrupts,
    ):
        follow(Torchrun(processes, restarts), asked, remote)
    found = Run.open(folder, task)
    found.events = remote.view.events
    if interrupts.came and running_kernel() is None:
        raise ctrl_c(found)
    return found


def require_processes(count: int) -> None:
    """Raise TrainError for a number below 1, more processes than GPUs, one GPU for several, and inside torchrun."""
    if is_torchelastic_launched():
        raise TrainError(
            f"processes (--processes) starts torchrun, got {count} in a process that torchrun started; leave it out, "
            "or start this without torchrun"
        )
    if count < 1:
        raise TrainError(f"processes (--processes) must be at least 1, got {count}; start one for each GPU")
    name = os.environ.get("NBTOOLS_DEVICE", "cuda")
    devices.require_own(name, count)
    here = torch.cuda.device_count() if name.startswith("cuda") else 0
    if 0 < here < count:
        raise TrainError(
            f"processes (--processes) must be at most the number of GPUs, which is {here} here, got {count}: two on a "
            f"GPU take turns, and share its memory; start {here}",
            entry="DDP does not start",
        )


def importable(task: TaskLike) -> str:
    """Return the name from which other processes import a task. Raises TrainError for one that they cannot import."""
    name = task_name(task)
    try:
        if name.partition(":")[0] == "__main__":
            raise CheckpointError("it is defined in a notebook cell or in the script itself")
        import_task(name, "nb.launch")
        return name
    except CheckpointError as error:
        raise TrainError(
            f"nb.launch needs a task that other processes can import, got {name!r} ({error}); write it to a file next "
            "to the notebook (%%writefile my_task.py), import that, and pass it"
        ) from None


def follow(torchrun: Torchrun, asked: tuple[Any, ...], remote: Remote) -> None:
    """Show the run until it ends. asked: what each rank is to do, see `fit_as_asked`. Raises the error of the rank that
    failed first."""

    def look() -> None:
        if closing(running_kernel()):
            remote.requests.post("stop", by="the kernel's shutdown")
        if error := torchrun.restarting():
            restart = f"restart {torchrun.attempt} of {torchrun.restarts}"
            remote.view.tell(f"{error}; starting again from the last checkpoint ({restart})")
            remote.paused = False  # the new processes do not know of a pause

    more = ""
    remote.view.tell(f"starting {plural(torchrun.processes, 'process')} under torchrun …", passing=True)
    try:
        with torchrun.started(asked) as agent:
            remote.follow(lambda: agent.poll() is None, look)
        if agent.returncode:
            error, more = torchrun.failure(agent.returncode)
            raise type(error)(f"{error}{more}")
    finally:
        if not more:
            shutil.rmtree(torchrun.place, ignore_errors=True)


def fit_as_asked(path: str) -> None:
    """Call `fit` in each rank. path: of what `launch` pickled: the task's name, the folder of the pack, its source
    files, and what `fit` gets."""
    task, folder, raw, plan, run, keep, receipt, fresh = pickle.loads(Path(path).read_bytes())
    pack = dataclasses.replace(Pack.open(folder), raw=raw)
    fit(import_task(task, "nb.launch"), pack, plan, run, keep, receipt, progress=False, fresh=fresh)


class Torchrun:
    """torchrun and its ranks, as far as the process that started them knows.

    place: the folder of what they print, and of their errors. attempt: how often they were started again.
    """

    def __init__(self, processes: int, restarts: int):
        self.place = Path(tempfile.mkdtemp(prefix="nbtools-launch-"))
        self.processes, self.restarts, self.attempt = processes, restarts, 0

    @contextmanager
    def started(self, asked: tuple[Any, ...]) -> Iterator[subprocess.Popen[bytes]]:
        """Start torchrun in a session of its own, which Ctrl-C does not reach; ended with all ranks if the block ends
        before it does. asked: for `fit_as_asked`."""
        (self.place / ASKED).write_bytes(pickle.dumps(asked))
        count = ["--standalone", "--nproc-per-node", str(self.processes), "--max-restarts", str(self.restarts)]
        logs = ["--redirects", "3", "--log-dir", str(self.place), "--no-python"]
        paths = os.pathsep.join(str(Path(path).absolute()) for path in sys.path)  # where the task is
        threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // self.processes)))
        with (self.place / LOG).open("wb") as log:
            agent = subprocess.Popen(
                [sys.executable, "-c", AGENT, *count, *logs, sys.executable, "-u", "-c", RANK, str(self.place / ASKED)],
                env={**os.environ, "OMP_NUM_THREADS": threads, "PYTHONPATH": paths},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            yield agent
        finally:
            if agent.poll() is None:
                agent.kill() if sys.platform == "linux" else agent.terminate()  # its ranks die with it
                agent.wait()

    def restarting(self) -> NbtoolsError | None:
        """Return why, once for each restart of all ranks."""
        if not any(self.place.glob(f"*/attempt_{self.attempt + 1}")):
            return None
        error, _ = self.failure()
        self.attempt += 1
        return error

    def failure(self, code: int = 1) -> tuple[NbtoolsError, str]:
        """Return why the last attempt failed, and where there is more about an error that nbtools did not raise on
        purpose: the first error that is not about another rank; else how a rank ended without one; else what the others
        say of it. code: with which torchrun ended."""
        more = f"; what all ranks printed is in {self.place}"
        if code < 0:
            return TrainError(f"torchrun {ending(code)}"), more
        found: dict[str, tuple[NbtoolsError, str]] = {}
        for path in sorted(self.place.glob(f"*/attempt_{self.attempt}/*/error.json"), key=lambda p: p.stat().st_mtime):
            told, rank = json.loads(path.read_text())["message"], path.parent.name  # what torch's `record` wrote
            kind, _, text = told["message"].partition(": ")
            ours = {"Diverged": TrainError, "RankLost": RankLost}.get(kind) or getattr(errors, kind, None)
            if isinstance(ours, type) and issubclass(ours, NbtoolsError):
                found[rank] = ours(text), ""
            else:
                error = TrainError(f"rank {rank} failed with {kind}: {text}")
                found[rank] = error, f"{more}\n{told['extraInfo']['py_callstack']}".rstrip()
        log = (self.place / LOG).read_text(errors="replace")
        ended = re.findall(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)", log)[self.attempt :]
        silent = [(TrainError(f"rank {rank} {ending(int(code))}"), more) for code, rank in ended if rank not in found]
        first = [each for each in found.values() if not isinstance(each[0], RankLost)]
        return [*first, *silent, *found.values(), (TrainError(f"torchrun failed: {log.strip()[-1000:]}"), more)][0]


def ending(code: int) -> str:
    """Return in words how a process ended."""
    if code >= 0:
        return f"ended with exit code {code}"
    memory = ", which the system sends when memory runs out" if code == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{memory}"


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
