"""A process that is asked to end while it trains: kernels that are shut down, and SIGTERM. What was trained is kept."""

import os
import signal
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
import toy
from acting import QUIET, acting, last_step, same
from kernels import LIMIT, parent, started, until

import nbtools as nb

PLAN = toy.PLAN.replace(epochs=4)
TRAIN = """
import time, nbtools as nb, toy
from pathlib import Path
pack = toy.make_pack(Path("toy"), count=60)
def batch(raw, plan, draws):
    if draws is not None:
        with open("steps", "a") as file:
            file.write("step\\n")
        while Path("steps").stat().st_size >= 25 and not Path("go").exists():
            time.sleep(0.01)
    return toy.batch(raw, plan, draws)
held = toy.with_(batch=batch)
print("ready", flush=True)
run = nb.fit(held, pack, toy.PLAN.replace(epochs=4, feed='workers', workers=1), "run", receipt=False)
"""
"""A cell whose fifth step lasts until a file `go` is there; every step is noted in a file `steps`."""


@pytest.mark.parametrize("stack", ["colab", pytest.param("newest", marks=pytest.mark.full)])
def test_a_kernel_shut_down_finishes_the_step_saves_and_ends(stack, tmp_path):
    """By what jupyter_client's shutdown_kernel sends, SIGKILL aside: the step under way outlasts all of it."""
    steps = tmp_path / "steps"
    steps.touch()
    with started(stack, tmp_path) as kernel:
        cell = kernel.client.execute(TRAIN)
        kernel.printed("ready")
        until(lambda: steps.read_text().count("step\n") == 5, "the fifth step")
        kernel.manager.interrupt_kernel()
        kernel.client.shutdown()
        kernel.client.get_control_msg(timeout=LIMIT)
        kernel.manager.signal_kernel(signal.SIGTERM)
        (tmp_path / "go").touch()
        provisioner: Any = kernel.manager.provisioner
        assert provisioner.process.wait(LIMIT) in (0, -signal.SIGTERM)
        with suppress(Empty):
            while True:
                kernel.said.append(kernel.client.get_iopub_msg(timeout=1))
    assert last_step(tmp_path / "run") == steps.read_text().count("step\n") == 5
    shown = [m["content"].get("data", {}).get("text/plain", "") for m in kernel.said if parent(m) == cell]
    assert "after step 5; run it again to continue" in "".join(shown)
    assert [m["content"]["ename"] for m in kernel.said if m["msg_type"] == "error"] == []
    assert "nbtools" not in (tmp_path / "stderr").read_text()  # ipykernel 7 has complaints of its own
    goes_on_bit_equal(nb.Pack.open(tmp_path / "toy" / "pack"), tmp_path)


def goes_on_bit_equal(pack: nb.Pack, folder: Path) -> None:
    """Whether the run in a folder, run again, becomes the one that was never ended."""
    whole = nb.fit(toy, pack, PLAN, folder / "whole", **QUIET)
    again = nb.fit(toy, pack, PLAN, folder / "run", **QUIET)
    assert same(again, whole)
    assert len(again.history.of("epoch")) == PLAN.epochs


def test_sigterm_is_a_request_to_stop_and_comes_through_when_the_run_is_saved(tmp_path, request):
    saved: list[bool] = []  # at each SIGTERM that comes through to whoever handles it in this process

    def handle(number, frame):
        saved.append(last_step(tmp_path / "run") > 0)

    request.addfinalizer(partial(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, handle)))
    pack = toy.make_pack(tmp_path, count=60)
    task = acting({5: partial(os.kill, os.getpid(), signal.SIGTERM)})
    run = nb.fit(task, pack, PLAN, tmp_path / "run", keep=tmp_path / "kept", **QUIET)
    assert run.events[-1] == "stopped by SIGTERM after step 5; run it again to continue"
    assert last_step(tmp_path / "run") == last_step(nb.Run.open(tmp_path / "kept", task).folder) == 5
    assert saved == [True]
    goes_on_bit_equal(pack, tmp_path)
    assert saved == [True]
