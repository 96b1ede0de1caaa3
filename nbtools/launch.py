"""launch: nb.fit in several processes of this machine, one for each GPU, under torchrun.

The process that calls it never trains: it starts torchrun, draws what the run folder shows, sends requests through
`control.json`, and ends every process with itself. In a notebook the kernel's memory and its GPU stay free.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import is_torchelastic_launched

from nbtools.data import Pack
from nbtools.errors import TrainError, ctrl_c
from nbtools.fit import Given, called, chosen_plan, fit, forget, meant, own_folder, panel_of, places, require_pack
from nbtools.folder import only_one, restore
from nbtools.live import FirstSignal, Panel, closing, running_kernel
from nbtools.run import Run
from nbtools.table import plural
from nbtools.train import TaskLike, Torchrun, as_task, import_task, importable, readable, require_sizes
from nbtools.train import device as devices
from nbtools.watch import Remote

RESTARTS = 3


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
    name = importable(task, "nb.launch")
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
        place = Path(tempfile.mkdtemp(prefix="nbtools-launch-"))
        follow(Torchrun(place, processes, restarts), asked, remote)
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
        with torchrun.started(fit_as_asked, *asked) as agent:
            remote.follow(lambda: agent.poll() is None, look)
        if agent.returncode:
            error, more = torchrun.failure(agent.returncode)
            raise type(error)(f"{error}{more}")
    finally:
        if not more:
            shutil.rmtree(torchrun.place, ignore_errors=True)


def fit_as_asked(
    task: str, folder: Path, raw: Any, plan: Any, run: Path, keep: Any, receipt: bool, fresh: bool
) -> None:
    """`fit` in each rank. task: its name; folder: of the pack; raw: its source files; the others: as for `fit`."""
    pack = dataclasses.replace(Pack.open(folder), raw=raw)
    fit(import_task(task, "nb.launch"), pack, plan, run, keep, receipt, progress=False, fresh=fresh)
