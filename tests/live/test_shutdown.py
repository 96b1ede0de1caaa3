"""A process that is asked to end while it trains: kernels that are shut down, and SIGTERM. What was trained is kept."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import Empty
from types import SimpleNamespace

import pytest
import toy
from acting import QUIET, acting, last_step, same
from kernels import PATIENCE, Client, parent, started
from serving import until

import nbtools as nb

PLAN = toy.PLAN.replace(epochs=4)
TRAIN = f"""
import sys, time; sys.path.insert(0, {str(Path(__file__).parents[1])!r})
import torch; torch.set_num_threads(1)
import nbtools as nb, toy
from pathlib import Path
from types import SimpleNamespace
pack = toy.make_pack(Path("toy"), count=60)
def batch(raw, plan, draws):
    if draws is not None:
        with open("steps", "a") as file:
            file.write("step\\n")
        while Path("steps").stat().st_size >= 25 and not Path("go").exists():
            time.sleep(0.01)
    return toy.batch(raw, plan, draws)
held = SimpleNamespace(**dict(vars(toy), batch=batch))
print("ready", flush=True)
run = nb.fit(held, pack, toy.PLAN.replace(epochs=4, {{knobs}}), "run", receipt=False)
"""
"""A cell whose fifth step lasts until a file `go` is there; every step is noted in a file `steps`."""


def as_jupyter_does(kernel: Client, finish_step: Callable[[], None]) -> None:
    """What jupyter_client's shutdown_kernel sends, SIGKILL aside: the step under way outlasts all of it."""
    kernel.manager.interrupt_kernel()
    kernel.client.shutdown()
    kernel.client.get_control_msg(timeout=PATIENCE)
    kernel.manager.signal_kernel(signal.SIGTERM)
    finish_step()


def by_message_alone(kernel: Client, finish_step: Callable[[], None]) -> None:
    kernel.client.shutdown()
    kernel.client.get_control_msg(timeout=PATIENCE)
    finish_step()


WAYS = [
    pytest.param(("colab", as_jupyter_does, "feed='workers', workers=1"), id="colab-jupyter-workers"),
    pytest.param(
        ("newest", by_message_alone, "feed='workers', workers=1"), id="newest-message", marks=pytest.mark.full
    ),
    pytest.param(("ipykernel-7.3", by_message_alone, ""), id="ipykernel-7.3-message", marks=pytest.mark.full),
]


@pytest.fixture(params=WAYS)
def ended(request, tmp_path):
    """A kernel that was asked to end in the midst of a run's fifth step, and what it said until it had ended."""
    stack, shut_down, knobs = request.param
    with started(stack, tmp_path) as kernel:
        cell = kernel.client.execute(TRAIN.format(knobs=knobs))
        kernel.printed("ready")
        until(lambda: steps(tmp_path) == 5, "the fifth step")
        shut_down(kernel, (tmp_path / "go").touch)
        code = kernel.ended()
        said = list(pending(kernel))
        yield SimpleNamespace(folder=tmp_path, code=code, said=said, cell=cell)


def steps(folder: Path) -> int:
    return (folder / "steps").read_text().count("step\n") if (folder / "steps").exists() else 0


def pending(kernel: Client):
    """What the kernel published and nobody has read yet."""
    while True:
        try:
            yield kernel.client.get_iopub_msg(timeout=1)
        except Empty:
            return


def test_a_kernel_shut_down_finishes_the_step_saves_and_ends(ended):
    assert ended.code in (0, -signal.SIGTERM)
    assert last_step(ended.folder / "run") == steps(ended.folder) == 5
    said = [m["content"] for m in ended.said if parent(m) == ended.cell]
    logs = [content["data"]["text/plain"] for content in said if "text/plain" in content.get("data", {})]
    assert "after step 5; run it again to continue" in "".join(logs)
    assert [m["content"]["ename"] for m in ended.said if m["msg_type"] == "error"] == []
    assert "nbtools" not in (ended.folder / "stderr").read_text()  # ipykernel 7 has complaints of its own
    goes_on_bit_equal(nb.Pack.open(ended.folder / "toy" / "pack"), ended.folder)


def goes_on_bit_equal(pack: nb.Pack, folder: Path) -> None:
    """Whether the run in a folder, run again, becomes the one that was never ended."""
    whole = nb.fit(toy, pack, PLAN, folder / "whole", **QUIET)
    again = nb.fit(toy, pack, PLAN, folder / "run", **QUIET)
    assert same(again, whole)
    assert len(again.history.of("epoch")) == PLAN.epochs


@pytest.fixture
def terminated(tmp_path):
    """SIGTERMs that came through to whoever handles them in this process, and whether training was saved by then."""
    came: list[tuple[int, bool]] = []

    def handle(number, frame):
        came.append((number, last_step(tmp_path / "run") > 0))

    before = signal.signal(signal.SIGTERM, handle)
    yield came
    signal.signal(signal.SIGTERM, before)


def test_sigterm_is_a_request_to_stop_and_comes_through_when_the_run_is_saved(tmp_path, terminated):
    pack = toy.make_pack(tmp_path, count=60)
    task = acting({5: partial(os.kill, os.getpid(), signal.SIGTERM)})
    run = nb.fit(task, pack, PLAN, tmp_path / "run", keep=tmp_path / "kept", **QUIET)
    assert run.events[-1] == "stopped by SIGTERM after step 5; run it again to continue"
    assert last_step(tmp_path / "run") == last_step(nb.Run.open(tmp_path / "kept", task).folder) == 5
    assert terminated == [(signal.SIGTERM, True)], "it came through before the run was saved"
    goes_on_bit_equal(pack, tmp_path)
    assert len(terminated) == 1


def test_sigterm_ends_the_receipt_which_can_be_had_later(tmp_path, terminated):
    pack = toy.make_pack(tmp_path, count=60)
    steps = PLAN.epochs * -(-pack.splits["train"] // PLAN.batch_size)
    task = acting({steps + 1: partial(os.kill, os.getpid(), signal.SIGTERM)})
    run = nb.fit(task, pack, PLAN, tmp_path / "run", progress=False)
    assert run.events[-1] == "no receipt: interrupted; run it again to get it"
    assert (run.receipt, len(run.summary())) == (None, PLAN.epochs)
    assert terminated == [(signal.SIGTERM, True)]


def test_kill_ends_training_in_a_terminal_with_nothing_lost(tmp_path):
    data = toy.demo(tmp_path / "raw", count=60)
    command = [sys.executable, "-m", "nbtools", "train", "toy", "--data", str(data), "--run", str(tmp_path / "run")]
    paths = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    environment = os.environ | {"PYTHONPATH": paths, "NBTOOLS_CACHE": str(tmp_path / "cache")}
    process = subprocess.Popen(
        [*command, "--no-receipt", "--epochs", "100000"],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    history = tmp_path / "run" / "history.csv"
    until(lambda: history.exists() and len(history.read_text().splitlines()) > 20, "rows")
    process.terminate()
    said = process.communicate(timeout=PATIENCE)[1]
    assert process.returncode == -signal.SIGTERM, said
    assert f"stopped by SIGTERM after step {last_step(tmp_path / 'run')}; run it again to continue" in said
    assert "Traceback" not in said
