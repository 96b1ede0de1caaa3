"""Try CUDA graphs on a plan in a child process: a capture that fails may end the process (pytorch#180395), and what it
leaves behind is an allocator that believes in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import torch

from nbtools.data import Pack
from nbtools.measure.profile import shapes
from nbtools.measure.timing import Stepper, in_turns
from nbtools.train import Plan, TaskLike, import_task, task_name
from nbtools.train import device as devices

PATIENCE = 60.0  # seconds for the child, of which importing torch and starting CUDA take 6 to 20
CHILD = "import sys; from nbtools.measure.graphs import child; child(*sys.argv[1:])"

Outcome = tuple[list[float], str]
"""(samples/s over those of the plan without graphs, turn by turn; why there are none)"""


def replayed(task: TaskLike, pack: Pack, plan: Plan, device: torch.device, seconds: float) -> Outcome:
    """Return what graphs give in turns of about so many seconds with the plan. A task that no other process can import
    is tried in this one, where `nbtools.train.graph` lets a child try a small step first."""
    name = task_name(task)
    if name.endswith(":") or name.startswith("__main__"):
        return beside_eager(task, pack, plan, device, seconds)
    devices.give_back(device)
    values = [name, str(pack.folder), plan.to_json(), str(device), str(seconds)]
    path = {"PYTHONPATH": os.pathsep.join(sys.path)}
    try:
        done = subprocess.run(
            [sys.executable, "-c", CHILD, *values],
            env=os.environ | path,
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


def child(name: str, folder: str, plan: str, device: str, seconds: str) -> None:
    """Print the outcome as JSON."""
    task = import_task(name, "the trial of graphs")
    made = type(task.PLAN).from_dict(json.loads(plan))
    print(json.dumps(beside_eager(task, Pack.open(folder), made, torch.device(device), float(seconds))))


def beside_eager(task: TaskLike, pack: Pack, plan: Plan, device: torch.device, seconds: float) -> Outcome:
    graph = plan.replace(graph=device.type == "cuda")
    steppers = [Stepper(task, pack, each, device).warm_up() for each in (plan, graph)]
    steppers[1].advance(steps=4 * shapes(steppers[1].pack, plan))  # each shape is recorded at its third batch
    if (graphs := steppers[1].state.graphs) is not None and graphs.off:
        return [], graphs.off
    steppers[1].turns.clear()
    in_turns(steppers, seconds)
    return steppers[1].over(steppers[0]), ""
