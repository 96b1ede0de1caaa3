"""torchrun, started by a process that does not train itself: it ends with that process, and the error of the rank that
failed first is known."""

from __future__ import annotations

import json
import os
import pickle
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from nbtools import errors
from nbtools.data import cores
from nbtools.errors import CheckpointError, NbtoolsError, TrainError
from nbtools.train.ranks import RankLost
from nbtools.train.task import TaskLike, import_task, task_name

ASKED, LOG = "asked.pickle", "torchrun.log"
T = TypeVar("T")

RANK = """
import ctypes, os, pickle, signal, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: it dies with torchrun
from nbtools.train import reporting
from {module} import {function}
reporting(lambda: {function}(*pickle.load(open(sys.argv[1], "rb"))))
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


class Torchrun:
    """torchrun and its ranks, as far as the process that started them knows.

    place: the folder of what they print, and of their errors. attempt: how often they were started again.
    """

    def __init__(self, place: Path, processes: int, restarts: int = 0):
        self.place, self.processes, self.restarts = place, processes, restarts
        self.attempt = 0

    @contextmanager
    def started(self, function: Callable[..., object], *asked: object) -> Iterator[subprocess.Popen[bytes]]:
        """torchrun in a session of its own, which Ctrl-C does not reach; ended with all ranks if the block ends before
        it does. function: of a module, called in each rank with what is asked, which pickle can copy."""
        (self.place / ASKED).write_bytes(pickle.dumps(asked))
        count = ["--standalone", "--nproc-per-node", str(self.processes), "--max-restarts", str(self.restarts)]
        logs = ["--redirects", "3", "--log-dir", str(self.place), "--no-python"]
        code = RANK.format(module=function.__module__, function=function.__name__)
        paths = os.pathsep.join(str(Path(path).absolute()) for path in sys.path)  # where the task is
        threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores() // self.processes)))
        with (self.place / LOG).open("wb") as log:
            agent = subprocess.Popen(
                [sys.executable, "-c", AGENT, *count, *logs, sys.executable, "-u", "-c", code, str(self.place / ASKED)],
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
    """How a process ended."""
    if code >= 0:
        return f"ended with exit code {code}"
    memory = ", which the system sends when memory runs out" if code == -signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{memory}"


def reporting(act: Callable[[], T]) -> T | None:
    """Run it; under torchrun its error is kept for whoever asks for the root cause. An error that nbtools raised on
    purpose would come again: torchrun, which has no exit code for that, is asked to end."""
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
        return act()
    from torch.distributed.elastic.multiprocessing.errors import record

    try:
        return record(act)()
    except NbtoolsError as error:
        if not isinstance(error, RankLost):
            os.kill(os.getppid(), signal.SIGTERM)
        raise


def importable(task: TaskLike, caller: str) -> str:
    """The name from which other processes import a task. Raises TrainError for one that they cannot import."""
    name = task_name(task)
    try:
        if name.partition(":")[0] == "__main__":
            raise CheckpointError("it is defined in a notebook cell or in the script itself")
        import_task(name, caller)
        return name
    except CheckpointError as error:
        raise TrainError(
            f"{caller} needs a task that other processes can import, got {name!r} ({error}); write it to a file next "
            "to the notebook (%%writefile my_task.py), import that, and pass it"
        ) from None
