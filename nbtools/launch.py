"""Runs in other processes: `watch` shows one, and sends it requests through `control.json`; `launch` starts `nb.fit` in
several under torchrun, and watches them."""

import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from time import monotonic, sleep
from types import SimpleNamespace
from typing import Any

from torch.distributed import is_torchelastic_launched
from torch.distributed.elastic.multiprocessing.errors import record

from nbtools import errors, live, train
from nbtools.data import Pack, cores, say
from nbtools.errors import CheckpointError, NbtoolsError, TrainError
from nbtools.fit import fit, opening
from nbtools.run import PLAN, Run, as_plan, busy, read_json, what_next
from nbtools.train import CONTROL, KEYS, RankLost, Record, TaskLike, checkpoint, import_task

MOMENT, READ_EVERY = 0.05, 0.5  # seconds between two checks for requests, and between two reads of the history


def watch(run: Run | str | Path, wait: float = 60.0) -> Run:
    """Draw a run that another process on this machine trains, with buttons and fields that act on it, until it ends;
    return the Run. An interrupt ends the watching, not the run; one that is over, or kept here, is drawn once.

    wait: seconds to wait for the run to start. Raises CheckpointError if there is no run.
    """
    folder, end = Path(run), monotonic() + wait
    if wait and not checkpoint.read_index(folder):
        say(f"{folder} holds no run yet; waiting up to {wait:g} s for one …")
    while not checkpoint.read_index(folder) and monotonic() < end:
        sleep(MOMENT)
    remote = Remote(Run.open(folder))
    with live.FirstSignal(signal.SIGINT, lambda: None) as ctrl_c:
        remote.follow(lambda: busy(folder) and not ctrl_c.came)
    if busy(folder):
        remote.tell(f"{folder} is still training; watch it again, or stop it: python -m nbtools control {folder} stop")
    return Run.open(folder)


class Remote(live.View):
    """A View of a run in another process. given: the panel or the Advice to show; None: the run's plan. sent: actions
    that it has not taken yet; asked: the plan and the pause that it was asked for. paused: what it last said itself."""

    def __init__(self, run: Run, given: Any = None, show: bool = True):
        super().__init__(run.folder, run.history, run.plan, run.card, run.index.get("metric", "-loss"), given, show)
        self.run, self.plans, count = run, live.Plans(run.plan, run.plan), run.card.splits["train"]
        advised = live.advised_plan(run.folder, run.plan)
        self.requests = live.Requests(self.plans, advised, lambda new: new.require_batch(count))
        self.sent, self.asked, self.paused = set[str](), (run.plan, False), False
        self.status = live.TRAINING if self.history.rows else live.STARTING

    def follow(self, lasts: Callable[[], bool]) -> None:
        """Draw while the run lasts, and send what is requested; then draw how it ended, and say what to do next."""
        due, panel = 0.0, self.panel if self.notebook else None
        try:
            with live.Messages() as messages, ExitStack() as stack:
                if panel is not None:
                    stack.callback(panel.end)
                    panel.begin(self.requests)
                self.start(self.status)
                while lasts():
                    messages.handle()
                    self.send()
                    if (begun := monotonic()) >= due:
                        self.read()
                        due = monotonic() + max(READ_EVERY, 20 * (monotonic() - begun))  # thousands of rows take long
                    if panel is not None:
                        panel.refresh()
                    self.draw(live.PAUSED if self.requests.paused else self.status)
                    sleep(MOMENT)
                self.read()
        finally:
            self.finish([], self.run.state)
            if self.run.state in live.OVER and self.run.index:  # else it goes on, or did not begin
                self.tell(what_next(self.run))

    def send(self) -> None:
        """Send what was requested since the last call, once the run has taken that; until then an action is pending."""
        requests, (plan, paused), folder = self.requests, self.asked, self.run.folder
        if (folder / CONTROL).exists() or not folder.is_dir():
            return
        requests.pending -= self.sent
        self.sent = set(requests.pending)
        turned = ["pause" if requests.paused else "resume"] * (requests.paused != paused)
        settings = {name: getattr(self.plans.plan, name) for name in self.plans.plan.changes_from(plan)}
        if self.sent or turned or settings:  # which the panel has asked to confirm already
            live.send(folder, [*self.sent, *turned], settings, force=bool(settings))
        self.asked = self.plans.plan, requests.paused

    def read(self) -> None:
        """Follow the run's plan, and show the rows that are new, or other ones where it went back."""
        before, new, plan = self.history.rows, [], self.plans.applied
        if self.history.refresh():
            pairs = zip(map(str, before), map(str, self.history.rows), strict=False)  # as text: NaN is not NaN
            new = self.history.rows[next((i for i, (old, now) in enumerate(pairs) if old != now), len(before)) :]
        with suppress(CheckpointError):  # of a folder that was moved, or in which another run begins
            plan = as_plan(type(plan), read_json(self.run.folder / PLAN))
            if self.paused != (paused := "paused" in self.run.index) and self.requests.paused == self.asked[1]:
                self.paused = self.requests.paused = paused
                self.asked = self.asked[0], paused
        back = (row for row in new if row.get("asked") == "undo" or f"{row.get('what')}".startswith(live.REFUSED))
        if plan != self.plans.applied or any(row.get("mark") for row in new) or any(back):
            self.plans.plan = self.plans.applied = plan
            self.asked = plan, self.asked[1]
            self.changed(plan)
        for row in new:
            self.status, values = live.TRAINING, {name: value for name, value in row.items() if name not in KEYS}
            self.advance(Record(row["kind"], row["epoch"], row["step"], row["samples"], values))


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
    **settings: Any,
) -> Run:
    """Train in several processes on this machine, and draw the run here as `fit` does; return the Run. Stop and the
    first Ctrl-C finish the step and save; a second one, and the end of this process (Linux), end all at once.

    task: importable by name, since each process imports it. plan, run, keep, receipt, fresh: as for `fit`; the batch
    size is that of all processes together. processes: up to one per GPU. restarts: how often all processes start again
    from the last checkpoint when one is lost. Raises TrainError with the error of the process that failed first.
    """
    task, name = train.as_task(task), train.task_name(task)
    if is_torchelastic_launched():
        raise TrainError(f"processes (--processes) starts torchrun, got {processes} inside torchrun; leave it out")
    if processes < 1:
        raise TrainError(f"processes (--processes) must be at least 1, got {processes}; start one for each GPU")
    if name.startswith("__main__:") or name.endswith(":"):
        fix = "write it to a file next to the notebook (%%writefile my_task.py), import that, and pass it"
        raise TrainError(f"nb.launch needs a task that other processes can import, got {name!r}; {fix}")
    folder, kept = opening(task, pack, plan, run, keep, fresh, **settings)
    parts = {part: getattr(plan, part, None) for part in ("advised", "id", "lr_trial")}  # what a rank reads of a Panel
    call = plan and SimpleNamespace(plan=getattr(plan, "plan", plan), **parts)
    if progress:
        say(f"starting {processes} processes under torchrun …")
    events, interrupted, before = [], False, checkpoint.read_index(folder)
    with start((name, pack, call, folder, kept, receipt, fresh), processes, restarts) as torchrun:
        while torchrun.poll() is None and checkpoint.read_index(folder) in ({}, before):
            sleep(MOMENT)
        if checkpoint.read_index(folder):
            remote = Remote(Run.open(folder, task), plan, progress)
            with live.FirstSignal(signal.SIGINT, partial(remote.requests.post, "stop")) as ctrl_c:
                remote.follow(lambda: torchrun.poll() is None)
            events, interrupted = remote.events, ctrl_c.came
    result = Run.open(folder, task)
    result.events = events
    if interrupted and live.running_kernel() is None:
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
    reporting(lambda: fit(import_task(task, "nb.launch"), pack, plan, run, keep, receipt, progress=False, fresh=fresh))
    os._exit(0)  # gloo's threads may crash a process that tidies up, and torchrun would start a finished run again


def reporting(act: Callable[[], Any]) -> Any:
    """Run it; under torchrun its error is kept for whoever asks for the root cause. An error that nbtools raised on
    purpose would recur: torchrun, which has no exit code for that, is asked to end."""
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
        message = read_json(path)["message"]  # what torch's `record` wrote
        kind = message["message"].partition(":")[0]
        if kind != RankLost.__name__:
            trace = "" if hasattr(errors, kind) else f"\n{message['extraInfo']['py_callstack']}"
            return f"rank {path.parent.name} failed with {message['message']}{trace}"
    return f"a process was lost; torchrun says: {(place / 'torchrun.log').read_text(errors='replace').strip()[-2000:]}"
