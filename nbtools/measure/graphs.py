"""Try CUDA graphs or the compiler on a plan in a child process, which can be ended: a capture that fails may end the
process (pytorch#180395) and leaves an allocator that believes in it, and compiling takes as long as it takes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import torch

from nbtools.data import Pack
from nbtools.measure.profile import shapes
from nbtools.measure.timing import Stepper, in_turns
from nbtools.train import Plan, TaskLike, import_task, task_name
from nbtools.train import device as devices

PATIENCE = 60.0  # seconds for the child, of which importing torch and starting CUDA take 6 to 20
CHILD = "import sys; from nbtools.measure.graphs import child; child(*sys.argv[1:])"

Outcome = tuple[list[float], str]
"""(samples/s over those of the plan without the change, turn by turn; why there are none)"""


def beside(
    task: TaskLike, pack: Pack, plan: Plan, change: dict[str, Any], device: torch.device, seconds: float
) -> Outcome:
    """Return what a change gives in turns of about so many seconds with the plan. For a task that no other process can
    import graphs are tried in this one, where `nbtools.train.graph` lets a child try a small step first."""
    name, changed = task_name(task), plan.replace(**change)
    if name.endswith(":") or name.startswith("__main__"):
        if changed.compile:
            return [], "is tried in another process, and none can import this task"
        return turns(task, pack, plan, changed, device, seconds)
    devices.give_back(device)
    values = [name, str(pack.folder), plan.to_json(), changed.to_json(), str(device), str(seconds)]
    try:
        done = subprocess.run(
            [sys.executable, "-c", CHILD, *values],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            check=True,
        )
        ratios, why = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        return [], f"a child process that tries it did not end in {PATIENCE:g} s"
    except (subprocess.CalledProcessError, ValueError, IndexError) as error:
        last = (getattr(error, "stderr", "") or str(error)).strip().splitlines()[-1]
        return [], f"a child process that tried it failed: {last}"
    return ratios, why


def child(name: str, folder: str, plan: str, changed: str, device: str, seconds: str) -> None:
    """Print the outcome as JSON."""
    task = import_task(name, "the trial of graphs")
    first, second = (type(task.PLAN).from_dict(json.loads(text)) for text in (plan, changed))
    print(json.dumps(turns(task, Pack.open(folder), first, second, torch.device(device), float(seconds))))


def turns(task: TaskLike, pack: Pack, plan: Plan, changed: Plan, device: torch.device, seconds: float) -> Outcome:
    first, second = (Stepper(task, pack, each, device).warm_up() for each in (plan, changed))
    second.advance(steps=4 * shapes(second.pack, plan))  # each shape is recorded, or compiled, at its third batch
    second.turns.clear()
    if (graphs := second.state.graphs) is not None and graphs.off:
        return [], graphs.off
    in_turns([first, second], seconds)
    return second.over(first), ""
