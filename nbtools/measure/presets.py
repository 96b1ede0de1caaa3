"""A task's presets on this machine: what each leaves to the device, the cores and the data, or why it cannot train."""

from __future__ import annotations

from typing import Any

import torch

from nbtools.data import Pack, cores, require_shared_memory
from nbtools.errors import NbtoolsError
from nbtools.show import plural
from nbtools.train import Plan, TaskLike, as_task, readable
from nbtools.train import device as devices


def preset(task: TaskLike, pack: Pack, name: str, /, **own: Any) -> tuple[Plan | None, str]:
    """(plan, what differs from the task's own and why); (None, why), if it cannot train on this machine or data. own:
    settings in place of the preset's."""
    made, device = as_task(task).PRESETS[name], devices.pick()
    try:
        plan = (made if isinstance(made, Plan) else made(pack.card)).replace(**own)
        pack = readable(task, pack, plan)
        fitted, changes = fitting(plan, pack, device)
        devices.require(fitted, device)
        if fitted.feed == "workers":
            require_shared_memory(pack, fitted)
    except NbtoolsError as error:
        return None, error.args[0]
    moved = fitted.changes_from(plan).items()
    return fitted, "; ".join(f"{n} {change}{f' ({changes[n][1]})' if n in changes else ''}" for n, change in moved)


def fitting(plan: Plan, pack: Pack, device: torch.device) -> tuple[Plan, dict[str, tuple[Any, str]]]:
    """(the plan as it fits here, setting → (value, why)): what has to differ. fp16 becomes float32 without a GPU, as
    torch's own autocast for CUDA does there."""
    found: dict[str, tuple[Any, str]] = {}
    if plan.batch_size > (train := pack.splits["train"]):
        found["batch_size"] = train, "the whole train split"
    if plan.amp == "fp16" and device.type not in devices.FP16_DEVICES:
        found["amp"] = "off", "fp16 needs a GPU"
    if plan.feed == "workers" and pack.raw is None:
        found["feed"] = "auto", "the source files are gone"
    if plan.workers > cores():
        found["workers"] = cores(), f"this machine has {plural(cores(), 'core')}"
    return plan.turn(**{setting: value for setting, (value, _) in found.items()}), found
