"""launch: nb.fit in several processes under torchrun, which the calling process watches as `nb.watch` does."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import sleep
from types import SimpleNamespace
from typing import Any

from torch.distributed import is_torchelastic_launched
from torch.distributed.elastic.multiprocessing.errors import record

from nbtools import disk, errors
from nbtools.data import Pack, cores, say
from nbtools.errors import NbtoolsError, TrainError
from nbtools.fit import fit, opening
from nbtools.live import FirstSignal, running_kernel
from nbtools.run import Run
from nbtools.train import CONTROL, RankLost, TaskLike, as_task, checkpoint, import_task, task_name
from nbtools.watch import MOMENT, Remote

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
    """Train in several processes of this machine, and draw the run here as `fit` does; return the Run. Stop and the
    first Ctrl-C finish the step and save; a second one, and the end of this process (Linux), end all at once.

    task: importable by name, since each process imports it. plan, run, keep, receipt, fresh: as for `fit`; the batch
    size is that of all processes together. processes: at most one a GPU. restarts: how often all processes start again
    from the last checkpoint when one is lost. Raises TrainError with the error of the process that failed first.
    """
    task, name = as_task(task), task_name(task)
    if is_torchelastic_launched():
        raise TrainError(f"processes (--processes) starts torchrun, got {processes} in a process of it; leave it out")
    if processes < 1:
        raise TrainError(f"processes (--processes) must be at least 1, got {processes}; start one for each GPU")
    if name.startswith("__main__:") or name.endswith(":"):
        fix = "write it to a file next to the notebook (%%writefile my_task.py), import that, and pass it"
        raise TrainError(f"nb.launch needs a task that other processes can import, got {name!r}; {fix}")
    folder, kept = opening(task, pack, plan, run, keep, fresh)
    parts = {part: getattr(plan, part, None) for part in ("advised", "id")}  # what a rank reads of a Panel
    call = plan and SimpleNamespace(plan=getattr(plan, "plan", plan), **parts)
    if progress:
        say(f"starting {processes} processes under torchrun …")
    with disk.explained("starting a run", folder):
        disk.remove(folder / CONTROL)  # which was meant for an earlier run
    events, interrupted = [], False
    with start((name, pack, call, folder, kept, receipt, fresh), processes, restarts) as torchrun:
        while torchrun.poll() is None and not checkpoint.read_index(folder):
            sleep(MOMENT)
        if checkpoint.read_index(folder):
            remote = Remote(Run.open(folder, task), plan, progress)
            with FirstSignal(signal.SIGINT, partial(remote.requests.post, "stop")) as ctrl_c:
                remote.follow(lambda: torchrun.poll() is None)
            events, interrupted = remote.view.events, ctrl_c.came
    result = Run.open(folder, task)
    result.events = events
    if interrupted and running_kernel() is None:
        raise KeyboardInterrupt(result)
    return result


@contextmanager
def start(job: tuple[Any, ...], processes: int, restarts: int) -> Iterator[subprocess.Popen[Any]]:
    """Run torchrun where Ctrl-C does not reach it; its processes end with the block. Raises TrainError."""
    options = f"--standalone --nproc-per-node {processes} --max-restarts {restarts} --redirects 3 --no-python".split()
    paths = os.pathsep.join(str(Path(path).absolute()) for path in sys.path)  # where the task is
    env = {"OMP_NUM_THREADS": str(max(1, cores() // processes)), **os.environ, "PYTHONPATH": paths}
    with tempfile.TemporaryDirectory(prefix="nbtools-launch-", ignore_cleanup_errors=True) as folder:
        place = Path(folder)  # of what the processes print, and of their errors
        (place / "job.pickle").write_bytes(pickle.dumps(job))
        command = [sys.executable, "-c", CODE.format("torch.distributed.run", "main", "main"), *options]
        ranks = [sys.executable, "-u", "-c", CODE.format("nbtools.launch", "rank", "rank"), f"{place}/job.pickle"]
        quiet: Any = {"env": env, "stdin": subprocess.DEVNULL, "start_new_session": True}
        with (place / "torchrun.log").open("wb") as log:
            torchrun = subprocess.Popen([*command, "--log-dir", folder, *ranks], stdout=log, stderr=log, **quiet)
        try:
            yield torchrun
        finally:
            if torchrun.poll() is None:
                torchrun.kill() if sys.platform == "linux" else torchrun.terminate()  # its ranks die with it
            code = torchrun.wait()
        if code:
            raise TrainError(failure(place))


def rank() -> None:
    """Call `fit` in a process of torchrun's. sys.argv: the file of a job, see `launch`."""
    task, pack, plan, run, keep, receipt, fresh = pickle.loads(Path(sys.argv[1]).read_bytes())
    make, code = partial(import_task, task, "nb.launch"), 1
    try:
        reporting(lambda: fit(make(), pack, plan, run, keep, receipt, progress=False, fresh=fresh))
        code = 0
    except BaseException:
        traceback.print_exc()
    os._exit(code)  # gloo's threads may crash or hang a process that tidies up


def reporting(act: Callable[[], Any]) -> Any:
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


def failure(place: Path) -> str:
    """Return why it failed: the latest error that is not about another rank, else what torchrun says."""
    for path in sorted(place.glob("*/*/*/error.json"), key=os.path.getmtime, reverse=True):
        message = json.loads(path.read_text())["message"]  # what torch's `record` wrote
        kind = message["message"].partition(":")[0]
        if kind != RankLost.__name__:
            trace = "" if hasattr(errors, kind) else f"\n{message['extraInfo']['py_callstack']}"
            return f"rank {path.parent.name} failed with {message['message']}{trace}"
    return f"a process was lost; torchrun says: {(place / 'torchrun.log').read_text(errors='replace').strip()[-2000:]}"
