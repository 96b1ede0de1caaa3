"""Where a train step makes the host wait for the GPU: each such line stops the host from running ahead."""

from __future__ import annotations

import sys
import traceback
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from nbtools.train import Batch, Task, TrainState, step


def syncs(task: Task, state: TrainState, raw: Batch, epoch_size: int) -> tuple[str, ...]:
    """`file:line` of the code that makes the host wait for the device in a step; () without CUDA."""
    if state.device.type != "cuda":
        return ()
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():  # torch warns, once a process, that the mode may miss a synchronizing operation
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("warn")
        return synchronizing(lambda: step(task, state, raw, epoch_size))
    finally:
        torch.cuda.set_sync_debug_mode(before)


def synchronizing(call: Callable[[], Any]) -> tuple[str, ...]:
    """`file:line` below a call from where torch warned of a synchronizing operation, outside torch where there is."""
    places: dict[str, None] = {}

    def caught(message: Warning | str, *rest: Any, **more: Any) -> None:
        if "synchronizing" in str(message):
            places[place(sys._getframe(1))] = None

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = caught
        call()
    return tuple(places)


def place(frame: FrameType | None) -> str:
    """The innermost line of a stack that is neither torch's nor that of the machinery of warnings."""
    stack = list(traceback.walk_stack(frame))
    own = Path(torch.__file__).parent
    for each, line in stack:
        file = Path(each.f_code.co_filename)
        if own not in file.parents and file.name != "warnings.py":
            return f"{file}:{line}"
    return f"{stack[0][0].f_code.co_filename}:{stack[0][1]}"
