"""KeyboardInterrupt anywhere in a step, as a second Ctrl-C raises it: nothing is left behind, and the run resumes to
the same bits."""

import gc
import inspect
import multiprocessing
import random
import shutil
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import toy
from acting import QUIET, acting, same
from serving import until

import nbtools as nb

PACKAGE = str(Path(nb.__file__).parent)
STEP = 5  # the last of an epoch: an evaluation and checkpoints follow
PLAN = toy.PLAN.replace(epochs=2, batch_size=16)
CASES = {
    "resident": PLAN.replace(feed="resident", ema=0.9, amp="bf16", micro_batch_size=8),
    "streamed": PLAN.replace(feed="streamed"),
}

pytestmark = [
    pytest.mark.timeout(1200),  # every place takes some minutes
    pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    """Five batches an epoch."""
    return toy.make_pack(tmp_path_factory.mktemp("toy"), count=110)


@pytest.fixture(autouse=True)
def saving_each_step(monkeypatch):
    """Without waiting for the disk, as no power cut follows."""
    monkeypatch.setattr("os.fsync", lambda file: None)
    monkeypatch.setattr("nbtools.folder.SAVE_EVERY", 0.0)
    monkeypatch.setattr("nbtools.folder.SAVE_SHARE", float("inf"))


class Interrupt:
    """Raises KeyboardInterrupt at the n-th place, from `begin` to `end`, where CPython looks for signals in nbtools's
    code in this thread: where a function begins and where a call returns. (It also does where a loop starts anew.) Not
    where a generator yields or goes on: an error of a profile's function skips its `finally` there, one of a signal
    does not."""

    def __init__(self, at: float):
        self.at, self.count = at, 0

    def begin(self) -> None:
        sys.setprofile(self.look)

    def end(self) -> None:
        sys.setprofile(None)

    def look(self, frame: FrameType, event: str, arg: object) -> None:
        if event in ("call", "return") and frame.f_code.co_flags & inspect.CO_GENERATOR:
            return
        if event == "c_call" or not (ours(frame) or (event == "return" and ours(frame.f_back))):
            return
        self.count += 1
        if self.count == self.at:
            raise KeyboardInterrupt


def ours(frame: FrameType | None) -> bool:
    return frame is not None and frame.f_code.co_filename.startswith(PACKAGE)


def interrupted(pack: nb.Pack, plan: nb.Plan, folder: Path, at: float) -> int:
    """How many places there are from step STEP to the next, evaluation and all, in a run that is interrupted at one."""
    interrupt = Interrupt(at)
    parts = 2 if plan.micro_batch_size else 1
    task = acting({STEP * parts: interrupt.begin, (STEP + 1) * parts: interrupt.end})
    try:  # it ends by itself where Python drops an interrupt: when it finalizes an object
        nb.fit(task, pack, plan, folder, **QUIET)
    except KeyboardInterrupt:
        assert interrupt.count == at
    finally:
        interrupt.end()
    return interrupt.count


def modes() -> tuple[Any, ...]:
    """Whether gradients are on, the depth of autocast contexts, and whether they are on."""
    torch.autocast_increment_nesting()
    kinds = [torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda")]
    return torch.is_grad_enabled(), torch.autocast_decrement_nesting(), kinds


def left() -> dict[str, Any]:
    """What a run must leave as it was."""
    return {
        "threads": {thread.name for thread in threading.enumerate() if thread.name.startswith("nbtools")},
        "processes": len(multiprocessing.active_children()),
        "handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)],
        "modes": (*modes(), torch.get_deterministic_debug_mode()),
    }


@pytest.mark.parametrize("name", [*CASES])
@pytest.mark.parametrize("most", [12, pytest.param(10**6, marks=pytest.mark.full)])
def test_an_interrupt_anywhere_leaves_nothing_behind_and_the_run_resumes_bit_for_bit(pack, tmp_path, name, most):
    """At so many places at most, drawn by a seed."""
    whole, before = nb.fit(toy, pack, CASES[name], tmp_path / "whole", **QUIET), left()
    count = interrupted(pack, CASES[name], tmp_path / "counted", float("inf"))
    assert count > 400
    for at in random.Random(name).sample(range(1, count), min(most, count - 1)):
        folder = tmp_path / str(at)
        interrupted(pack, CASES[name], folder, at)
        until(lambda: left() == before or (gc.collect() and left() == before), f"{at}: {left()}")  # as threads end
        assert same(nb.fit(toy, pack, CASES[name], folder, **QUIET), whole), at
        shutil.rmtree(folder)


def test_an_interrupt_while_torch_enters_a_context_leaves_it_entered_for_no_later_run(pack, tmp_path):
    """Under autocast that is left on, steps would go on with the weights of the first."""

    def interrupt() -> None:
        for context in (torch.no_grad(), torch.autocast("cpu", torch.float16)):
            context.__enter__()
        raise KeyboardInterrupt

    before = modes()
    with pytest.raises(KeyboardInterrupt):
        nb.fit(acting({STEP: interrupt}), pack, PLAN.replace(amp="bf16"), tmp_path / "run", **QUIET)
    assert modes() == before
