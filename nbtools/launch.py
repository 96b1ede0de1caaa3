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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch.distributed import is_torchelastic_launched
from torch.distributed.elastic.multiprocessing.errors import record

from nbtools import errors
from nbtools.data import Pack, cores
from nbtools.errors import CheckpointError, NbtoolsError, PackError, TrainError
from nbtools.fit import Given, chosen_plan, fit, forget, places
from nbtools.folder import only_one, restore
from nbtools.live import FirstSignal, closing, running_kernel
from nbtools.run import Run
from nbtools.table import plural
from nbtools.train import RankLost, TaskLike, as_task, import_task, readable, require_sizes, task_name
from nbtools.train import device as devices
from nbtools.watch import Remote

RESTARTS = 3
ASKED, LOG = "asked.pickle", "torchrun.log"
T = TypeVar("T")

RANK = """
import ctypes, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it dies with torchrun
from nbtools.launch import fit_as_asked
fit_as_asked()
"""
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
"""torchrun, which is asked to end when the process dies that started it: it passes that on, and the run is saved."""


def launch(
    task: TaskLike,
    pack: Pack,
    plan: Any = None,
    run: str | Path = "runs/run",
    keep: str | Path | None = None,
    receipt: bool = True,
    progress: bool = True,
    *,
    processes: int,
    restarts: int = RESTARTS,
) -> Run:
    """Train in several processes of this machine, and draw the run here as `fit` does; returns the Run.

    task: importable by name, since each process imports it. plan, run, keep, receipt: as for `fit`; the plan's batch
    size is that of all processes together, so their number changes neither lr nor schedule. processes: at most one a
    GPU. restarts: how often all processes start again from the last checkpoint when one of them is lost; errors that
    nbtools raises on purpose are not tried again.

    Panel, `control.json` and the terminal act on the run as on any other. Stop and the first Ctrl-C finish the step,
    save, and return the run; a second one ends all processes at once. They end too when this process dies (Linux).
    Raises TrainError, PlanError or CheckpointError, those of the process that failed first.
    """
    task = as_task(task)
    if not isinstance(pack, Pack):
        raise PackError(f"pack must be a nb.Pack, got {type(pack).__name__}; make one with the task's pack(source)")
    require_processes(processes)
    name = importable(task)
    folder, kept = places(run, keep, release_gpu=False)
    with only_one(folder):
        forget(folder)
        restore(folder, kept)
    plan = plan() if callable(plan) and not isinstance(plan, type) else plan
    wanted = chosen_plan(task, pack, plan, folder)
    require_sizes(readable(task, pack, wanted), wanted)
    advised = getattr(plan, "advised", getattr(plan, "plan", None))
    asked = {
        "task": name,
        "pack": str(pack.folder.absolute()),
        "raw": pack.raw,  # the source files, for workers and for the receipt
        "plan": wanted.to_dict(),
        "advised": None if advised is None else advised.to_dict(),
        "run": str(folder),
        "keep": None if kept is None else str(kept),
        "receipt": receipt,
    }
    given = plan if getattr(plan, "plan", None) is wanted else wanted
    remote = Remote(Run(folder, task, readable(task, pack, wanted).card, wanted), given, progress)
    remote.requests.advised = advised or remote.requests.advised
    post = remote.requests.post
    with (
        FirstSignal(signal.SIGTERM, partial(post, "stop", by="SIGTERM"), later=True),
        FirstSignal(signal.SIGINT, partial(post, "stop")),
    ):
        Launcher(asked, processes, restarts, remote).train()
    found = Run.open(folder, task)
    found.events = remote.view.events
    return found


def importable(task: TaskLike) -> str:
    """The name from which other processes import a task. Raises TrainError for one that they cannot import."""
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


def require_processes(count: int) -> None:
    """Raise TrainError for a number below 1, more processes than GPUs, one GPU for several, and inside torchrun."""
    if is_torchelastic_launched():
        raise TrainError(
            f"processes (--processes) starts torchrun, got {count} in a process that torchrun started; leave it out, "
            "or start this without torchrun"
        )
    if count < 1:
        raise TrainError(f"processes (--processes) must be ≥ 1, got {count}; start one for each GPU")
    name = os.environ.get("NBTOOLS_DEVICE", "cuda")
    devices.require_own(name, count)
    here = torch.cuda.device_count() if name.startswith("cuda") else 0
    if 0 < here < count:
        raise TrainError(
            f"processes (--processes) must be at most the number of GPUs, which is {here} here, got {count}: two on a "
            f"GPU take turns, and share its memory; start {here}",
            entry="DDP does not start",
        )


@dataclass(frozen=True)
class Failure:
    """How a rank failed; None: torchrun. kind: the name of its exception, "" where it ended without one. text: its
    message, or how it ended."""

    rank: int | None
    kind: str
    text: str
    trace: str = ""
    time: float = 0.0

    @classmethod
    def read(cls, path: Path) -> Self:
        """What torch's `record` wrote when an exception left a rank."""
        found = json.loads(path.read_text())["message"]
        kind, _, text = found["message"].partition(": ")
        more = found["extraInfo"]
        return cls(int(path.parent.name), kind, text, more["py_callstack"], float(more["timestamp"]))

    @property
    def ours(self) -> type[NbtoolsError] | None:
        """The class of an error that nbtools raised on purpose."""
        found = getattr(errors, self.kind, TrainError if self.kind in ("Diverged", RankLost.__name__) else None)
        return found if isinstance(found, type) and issubclass(found, NbtoolsError) else None

    def __str__(self) -> str:
        if self.ours is not None:
            return self.text
        who = "torchrun" if self.rank is None else f"rank {self.rank}"
        return f"{who} failed with {self.kind}: {self.text}" if self.kind else f"{who} {self.text}"


class Launcher:
    """torchrun and its ranks, as far as the process that started them knows.

    asked: what each rank is to do. place: the folder of that, of what they print, and of their errors. attempt: how
    often they were started again.
    """

    def __init__(self, asked: Mapping[str, Any], processes: int, restarts: int, remote: Remote):
        self.asked, self.processes, self.restarts, self.remote = asked, processes, restarts, remote
        self.place = Path(tempfile.mkdtemp(prefix="nbtools-launch-"))
        self.attempt = 0

    def train(self) -> None:
        """Until the run ends. Raises the error of the rank that failed first."""
        self.remote.view.tell(f"starting {plural(self.processes, 'process')} under torchrun …", passing=True)
        failure = None
        try:
            with self.started() as agent:
                self.remote.follow(lambda: agent.poll() is None, self.look)
            if agent.returncode:
                failure = self.failure() if agent.returncode > 0 else Failure(None, "", ending(agent.returncode))
        finally:
            if failure is None or failure.ours:
                shutil.rmtree(self.place, ignore_errors=True)
        if failure is not None:
            rest = f"; what all ranks printed is in {self.place}\n{failure.trace}".rstrip()
            raise failure.ours(str(failure)) if failure.ours else TrainError(f"{failure}{rest}")

    @contextmanager
    def started(self) -> Iterator[subprocess.Popen[bytes]]:
        """torchrun in a session of its own, which Ctrl-C does not reach; ended with all ranks if the block ends
        before it does."""
        (self.place / ASKED).write_bytes(pickle.dumps(self.asked))
        count = ["--standalone", "--nproc-per-node", str(self.processes), "--max-restarts", str(self.restarts)]
        logs = ["--redirects", "3", "--log-dir", str(self.place), "--no-python"]
        ranks = [sys.executable, "-u", "-c", RANK, str(self.place / ASKED)]
        paths = os.pathsep.join(str(Path(path).absolute()) for path in sys.path)  # where the task is
        threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // self.processes)))
        with (self.place / LOG).open("wb") as log:
            agent = subprocess.Popen(
                [sys.executable, "-c", AGENT, *count, *logs, *ranks],
                env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": threads},
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

    def look(self) -> None:
        """Notice a shutdown of the kernel, and that all ranks started again."""
        if closing(running_kernel()):
            self.remote.requests.post("stop", by="the kernel's shutdown")
        if any(self.place.glob(f"*/attempt_{self.attempt + 1}")):
            again = f"starting again from the last checkpoint (restart {self.attempt + 1} of {self.restarts})"
            self.remote.view.tell(f"{self.failure()}; {again}")
            self.attempt += 1
            self.remote.paused = False  # the new processes do not know of a pause

    def failure(self) -> Failure:
        """Why the last attempt failed: the first error that is not about another rank; else how a rank ended without
        one; else what the others say of it."""
        found = map(Failure.read, self.place.glob(f"*/attempt_{self.attempt}/*/error.json"))
        reports = sorted(found, key=lambda one: (one.kind == RankLost.__name__, one.time, one.rank))
        log = (self.place / LOG).read_text(errors="replace")
        ended = re.findall(r"failed \(exitcode: (-?\d+)\) local_rank: (\d+)", log)[self.attempt :]
        silent = [Failure(int(rank), "", ending(int(code))) for code, rank in ended]
        silent = [one for one in silent if one.rank not in {report.rank for report in reports}]
        if reports and reports[0].kind == RankLost.__name__:
            reports = [*silent, *reports]
        return [*reports, *silent, Failure(None, "", f"failed: {log.strip()[-1000:]}")][0]


def ending(code: int) -> str:
    """How a process ended."""
    if code >= 0:
        return f"ended with exit code {code}"
    memory = ", which the system sends when memory runs out" if code == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{memory}"


# -- what a rank runs


def fit_as_asked() -> None:
    """`fit` of what the file asks for, in each process that torchrun starts for `launch`."""
    asked = pickle.loads(Path(sys.argv[1]).read_bytes())

    def train() -> None:
        task = import_task(asked["task"], "nb.launch")
        given = {name: asked[name] and type(task.PLAN).from_dict(asked[name]) for name in ("plan", "advised")}
        pack = dataclasses.replace(Pack.open(asked["pack"]), raw=asked["raw"])
        fit(task, pack, Given(**given), asked["run"], asked["keep"], asked["receipt"], progress=False)

    noting_errors(train)


def noting_errors(act: Callable[[], T]) -> T | None:
    """Run it; under torchrun its error is kept for whoever asks for the root cause. An error that nbtools raised on
    purpose would come again: torchrun, which has no exit code for that, is asked to end."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return act()
    try:
        return record(act)()
    except NbtoolsError as error:
        if not isinstance(error, RankLost):
            os.kill(os.getppid(), signal.SIGTERM)
        raise
