"""Runs in several processes under torchrun: what reaches them, what becomes of one that fails, and that none stays."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import crew
import hooks
import pytest
import toy
from acting import QUIET, interrupted, last_step, same, texts
from ranks import together
from serving import until

import nbtools as nb
from nbtools.__main__ import main
from nbtools.errors import PackError, TrainError
from nbtools.fit import Given
from nbtools.launch import Launcher
from nbtools.live import send
from nbtools.train import CONTROL, Torchrun, as_task, checkpoint, ranks
from nbtools.watch import Remote

TESTS = Path(__file__).parent


@pytest.fixture
def pack(tmp_path, monkeypatch) -> Iterator[nb.Pack]:
    """The toy's, and the test in a folder of its own, where the ranks note their steps. The port of the guides' scripts
    is taken."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # for what a process that is killed leaves behind
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setenv("MASTER_PORT", str(taken.getsockname()[1]))
        yield toy.make_pack(tmp_path, count=80)


def notes(rank: int) -> list[dict[str, Any]]:
    """What a rank noted of its steps, of which the last line may be in the writing."""
    path = Path(f"steps-{rank}.jsonl")
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def launched(pack: nb.Pack, run: str = "run", processes: int = 2, epochs: int = 3, **more: Any) -> nb.Run:
    """From the source files, not the pack, which every process has to find."""
    plan = crew.PLAN.replace(epochs=epochs, feed="workers")
    return nb.launch(crew, pack, plan, run, processes=processes, **QUIET, **more)


def will(does: str, rank: int, step: int, once: bool = True) -> None:
    """Something happens to a rank at a step of each of its processes, or once."""
    Path("act.json").write_text(json.dumps({"rank": rank, "step": step, "does": does, "once": once}))


@contextmanager
def beside(act: Callable[[], Any]) -> Iterator[None]:
    """Act in a thread, whose errors are the test's."""
    errors = []

    def run():
        try:
            act()
        except BaseException as error:
            errors.append(error)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
            os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        thread.join()
        if errors:
            raise errors[0]


def left_behind(folder: Path) -> list[int]:
    """Processes that work in a folder, this one aside."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if place.joinpath("cwd").resolve() == folder.resolve() and int(place.name) != os.getpid():
                found.append(int(place.name))
        except OSError:
            continue
    return found


@pytest.fixture
def forked(monkeypatch):
    """Processes that have imported torch already, in place of torchrun's."""

    @contextmanager
    def started(torchrun: Torchrun, function: Callable[..., Any], *asked: Any) -> Iterator[SimpleNamespace]:
        with ThreadPoolExecutor(1) as pool:
            ends = pool.submit(together, torchrun.processes, function, *asked, TORCHELASTIC_RUN_ID="run")
            yield SimpleNamespace(poll=lambda: ends.result() and 0 if ends.done() else None, returncode=0)

    monkeypatch.setattr(Torchrun, "started", started)


# -- before anything starts


class Cell(nb.Task):
    """As if a notebook's cell had defined it."""

    __module__ = "__main__"


def test_a_task_that_other_processes_cannot_import_is_refused_in_a_sentence(pack):
    with pytest.raises(TrainError, match=r"can import, got '__main__:Cell' \(it is defined in a notebook cell.*%%writ"):
        nb.launch(Cell, pack, toy.PLAN, processes=2)
    with pytest.raises(TrainError, match="has no name there"):
        nb.launch(toy.with_(), pack, toy.PLAN, processes=2)
    with pytest.raises(TrainError, match=r"processes \(--processes\) must be at least 1, got 0; start one"):
        nb.launch(toy, pack, toy.PLAN, processes=0)
    assert not Path("runs").exists()


def test_several_processes_are_refused_on_one_gpu_by_its_number(pack, monkeypatch):
    monkeypatch.setenv("NBTOOLS_DEVICE", "cuda:0")
    with pytest.raises(
        TrainError, match="a GPU of its own, so NBTOOLS_DEVICE must not name one by number, got 'cuda:0'; set "
    ):
        nb.launch(crew, pack, crew.PLAN, processes=2)
    monkeypatch.setenv("WORLD_SIZE", "2")  # torchrun by hand
    with pytest.raises(TrainError, match="each of 2 processes takes a GPU of its own"):
        nb.fit(crew, pack, crew.PLAN)


def test_processes_inside_torchrun_or_in_a_smoke_test_are_refused(pack, monkeypatch, capsys):
    assert main(["train", "captcha", "--smoke-test", "--processes", "2"]) == 1
    assert "--smoke-test is one step of one process, got --processes 2; leave one out" in capsys.readouterr().err
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    assert main(["train", "crew", "--data", "raw", "--run", "run", "--processes", "2"]) == 1
    assert "starts torchrun, got 2 in a process that torchrun started; leave it out" in capsys.readouterr().err


def test_requests_made_before_the_run_has_its_folder_are_sent_once_it_has(pack, tmp_path):
    remote = Remote(nb.Run(Path("run"), as_task(crew), pack.card, crew.PLAN), show=False)
    remote.requests.post("stop")
    remote.requests.post("pause")
    remote.send()
    Path("run").mkdir()
    remote.send()
    assert json.loads(Path("run", CONTROL).read_text())["do"] == ["stop", "pause"]
    Path("run", CONTROL).unlink()
    remote.send()
    assert not Path("run", CONTROL).exists(), "once"


@pytest.mark.full
@pytest.mark.parametrize("resumed", [False, True])
def test_a_stop_while_the_processes_start_is_no_request_to_a_former_run(pack, tmp_path, monkeypatch, resumed):
    if resumed:
        launched(pack, epochs=1)
        Path("run", CONTROL).write_text(json.dumps({"lr": 0.009}))
    train = Launcher.train

    def stopped(self):
        os.kill(os.getpid(), signal.SIGINT)
        train(self)

    monkeypatch.setattr(Launcher, "train", stopped)
    run = interrupted(lambda: launched(pack, epochs=100_000))
    assert any("stopped by you after step" in text for text in texts(run))
    assert run.plan.lr == crew.PLAN.lr
    assert left_behind(tmp_path) == []


# -- what a run does


def fitted(folder: Path, run: str, **plan: Any) -> nb.Run:
    return nb.fit(crew, nb.Pack.open(folder), crew.PLAN.replace(**plan), run, **QUIET)


def weights(run: Path) -> dict[str, Any]:
    tensors = checkpoint.newest(run).tensors
    return {name: tensor for name, tensor in tensors.items() if name.startswith("model.")}


def test_a_run_in_two_processes_of_torchrun_is_the_fit_of_one_and_tells_its_hook_once(pack, tmp_path, monkeypatch):
    will("crash at its exit", rank=1, step=3)
    with hooks.listening(tmp_path, monkeypatch) as hook:
        one, two = fitted(pack.folder, "one"), launched(pack, "two", notify=hook.address)
    assert [said["text"][:9] for _, _, said in hook.posts] == ["two: done"]
    assert left_behind(tmp_path) == []
    ours, theirs = weights(one.folder), weights(two.folder)
    assert all((theirs[name] - ours[name]).norm() <= 1e-3 * ours[name].norm() for name in ours)
    kinds = [(row["kind"], row["step"], row["samples"]) for row in one.history.rows]
    opening, *rows = two.history.rows
    assert "batch      16 per step: 8 + 8 on 2 processes\t" in opening["what"]
    assert [(row["kind"], row["step"], row["samples"]) for row in rows] == kinds
    assert one.best["val_accuracy"] == two.best["val_accuracy"]


def in_place(pack: Path, run: str, epochs: int = 3) -> str:
    return str(fitted(pack, run, epochs=epochs))


@pytest.mark.parametrize("how", ["forked", pytest.param("pack", marks=pytest.mark.full)], ids=["forked", "torchrun"])
def test_what_is_asked_of_two_processes_reaches_both_at_the_same_step(pack, tmp_path, monkeypatch, request, how):
    request.getfixturevalue(how)
    monkeypatch.setenv("CREW_STEP", "0.02")

    def user():
        until(lambda: len(notes(1)) > 5, "steps")
        send("run", settings={"lr": 0.005})
        until(lambda: notes(0)[-1]["lr"] == 0.005, "another lr")
        send("run", ["evaluate"], {"batch_size": 24})
        until(lambda: notes(1)[-1]["batch_size"] == 24, "another batch size")
        send("run", ["pause"])
        until(lambda: time.time() - notes(0)[-1]["time"] > 1, "a pause")
        until(lambda: checkpoint.place(checkpoint.read_index(Path("run"))["last"])[1] == len(notes(0)), "a checkpoint")
        before = len(notes(1))
        send("run", ["resume"])
        until(lambda: len(notes(1)) > before + 2, "steps after Resume")
        send("run", ["stop"])

    with beside(user):
        run = launched(pack, epochs=100_000)
    assert left_behind(tmp_path) == []
    ours, theirs = ([(note["lr"], note["batch_size"], len(note["ids"])) for note in notes(rank)] for rank in range(2))
    assert [row[:2] for row in ours] == [row[:2] for row in theirs]
    assert {row[1:] for row in ours[:-1] if row[1] == 24} >= {(24, 12)}
    assert last_step(Path("run")) == len(ours)
    assert any("stopped by you after step" in text for text in texts(run))
    [opened] = [row["what"] for row in run.history.of("event") if row.get("asked") == "opening"]
    assert "batch      16 per step: 8 + 8 on 2 processes\t" in opened
    assert any(text.startswith("batch_size 16 → 24") for text in texts(run, "change"))


# -- what becomes of a rank that fails


@pytest.mark.full
def test_an_error_of_ours_is_shown_once_and_not_tried_again(pack, tmp_path, capfd):
    will("refuse", rank=1, step=4, once=False)
    with pytest.raises(PackError, match=r"^sample 7: the label is missing, got None; write one$"):
        nb.launch(crew, pack, crew.PLAN, "run", receipt=False, processes=2)
    assert "restart" not in capfd.readouterr().err
    assert len({note["pid"] for note in notes(1)}) == 1
    assert left_behind(tmp_path) == []


@pytest.mark.full
def test_any_other_error_is_that_of_the_rank_that_failed_first_with_its_traceback(pack, tmp_path):
    will("fail", rank=1, step=4, once=False)
    with pytest.raises(TrainError) as caught:
        launched(pack, restarts=1)
    text = str(caught.value)
    assert text.startswith("rank 1 failed with ValueError: a fault of the user's own; what all ranks printed is in ")
    assert re.search(r"crew\.py\", line \d+, in fail", text)
    assert len({note["pid"] for note in notes(1)}) == 2, "one restart"
    assert left_behind(tmp_path) == []


@pytest.mark.full
@pytest.mark.parametrize("rank", [0, 1])
def test_after_a_kill_all_start_again_and_the_run_becomes_the_one_that_was_never_killed(pack, tmp_path, rank):
    will("kill", rank, step=6)
    run = launched(pack)
    [told] = [event for event in run.events if "restart 1 of 3" in event]
    assert told.startswith(
        f"rank {rank} was ended by SIGKILL, which the system sends when memory runs out; starting again"
    )
    assert left_behind(tmp_path) == []
    assert any(text.startswith("resumed from step") for text in texts(run))
    assert [row["epoch"] for row in run.history.of("epoch")] == [0, 1, 2]
    together(2, in_place, pack.folder, str(tmp_path / "whole"))
    assert same(run, nb.Run.open("whole", crew))


@pytest.mark.full
def test_settings_and_a_pause_outlive_a_restart(pack):
    def user():
        until(lambda: len(notes(1)) > 5, "steps")
        send("run", settings={"lr": 0.005})
        until(lambda: notes(0)[-1]["lr"] == 0.005, "another lr")
        os.kill(notes(1)[-1]["pid"], signal.SIGKILL)
        until(lambda: len({note["pid"] for note in notes(1)}) == 2, "another process")
        send("run", ["stop"])

    with beside(user):
        given = Given(crew.PLAN.replace(epochs=100_000), advised=crew.PLAN.replace(lr=0.0123))
        run = nb.launch(crew, pack, given, "run", processes=2, **QUIET)
    assert checkpoint.read_index(run.folder)["advised"]["lr"] == 0.0123
    pids = list(dict.fromkeys(note["pid"] for note in notes(1)))
    assert {note["lr"] for note in notes(1) if note["pid"] == pids[1]} == {0.005}
    assert run.plan.lr == 0.005


@pytest.mark.full
def test_a_rank_that_hangs_is_named_within_the_timeout_and_all_start_again(pack, tmp_path, monkeypatch):
    monkeypatch.setenv("NBTOOLS_TIMEOUT", "5")
    will("hang", rank=1, step=6)
    run = launched(pack)
    [told] = [event for event in run.events if "restart 1 of 3" in event]
    assert "no answer for 5 s from rank 1 of 2: it hangs" in told
    gap = [later["time"] - note["time"] for note, later in itertools.pairwise(notes(0))]
    assert max(gap) < 5 + 5 + 30 + 60, "the timeout, the others' reports, torchrun's patience, and a start"
    assert len(run.history.of("epoch")) == 3
    assert left_behind(tmp_path) == []


def test_an_interrupt_of_a_rank_that_lost_rank_0_does_not_wait_for_others(pack, tmp_path):
    will("orphan", rank=1, step=4)
    with pytest.raises(AssertionError, match=r"(?s)rank 1: .*no answer for 2 s from rank 0 of 2: it hangs"):
        together(2, in_patience, pack.folder, "run", lost=0, timeout=40, NBTOOLS_TIMEOUT="2")


def in_patience(pack: Path, run: str) -> str:
    ranks.PATIENCE = 60.0
    return in_place(pack, run)


@contextmanager
def nodes(count: int, *more: str) -> Iterator[list[subprocess.Popen[str]]]:
    """Two processes that train, on so many nodes of torchrun, which stand on one machine, and meet at a port of the
    system's choice; ended with the test."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meet = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "run", "--max-restarts", "2"]
    command = ["-m", "torch.distributed.run", "--nnodes", str(count), "--nproc-per-node", str(2 // count), *meet]
    processes = [
        subprocess.Popen(
            [sys.executable, *command, "-m", "--", *TRAIN[1:], *more],
            env=environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(count)
    ]
    try:
        yield processes
    finally:
        for process in processes:
            process.terminate()
            process.communicate()


@pytest.mark.full
def test_settings_outlive_a_restart_for_a_process_that_was_lost_on_another_machine(pack, tmp_path):
    """Whose torchrun alone counts it."""
    with nodes(2, "--epochs", "100000") as processes:
        until(lambda: len(notes(1)) > 5, "steps", 100)
        send("run", settings={"lr": 0.005})
        until(lambda: notes(1)[-1]["lr"] == 0.005, "another lr")
        os.kill(notes(1)[-1]["pid"], signal.SIGKILL)
        until(lambda: len({note["pid"] for note in notes(0)}) == 2, "another process", 100)
        send("run", ["stop"])
        said = [process.communicate(timeout=100) for process in processes]
    pids = list(dict.fromkeys(note["pid"] for note in notes(0)))
    assert {note["lr"] for note in notes(0) if note["pid"] == pids[1]} == {0.005}, said
    assert any(text.startswith("resumed from step") for text in texts(nb.Run.open("run", crew)))


# -- what ends all processes

SCRIPT = """
import sys, torch; torch.set_num_threads(1)
import nbtools as nb, crew
nb.launch(crew, nb.Pack.open(sys.argv[1]), crew.PLAN.replace(epochs=100_000), "run", receipt=False, processes=2)
"""


def environment() -> dict[str, str]:
    paths = os.pathsep.join(filter(None, [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": paths, "NBTOOLS_CACHE": str(Path("cache").absolute())}


@contextmanager
def beginning(*command: str, steps: int = 3) -> Iterator[subprocess.Popen[str]]:
    """A process that trains, once both ranks have begun more than so many steps; ended with the test."""
    process = subprocess.Popen(
        [sys.executable, *command], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        until(lambda: process.poll() is not None or min(len(notes(0)), len(notes(1))) > steps, "steps")
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_whatever_ends_the_process_that_started_them_ends_all_and_the_run_is_saved(pack, tmp_path, number):
    with beginning("-c", SCRIPT, str(pack.folder)) as process:
        process.send_signal(number)
        said = process.communicate(timeout=60)[1]
    until(lambda: not left_behind(tmp_path), "the end of all processes", 40)
    assert process.returncode == -number, said
    assert last_step(Path("run")) == len(notes(0)) == len(notes(1)), "both stopped after the same step, and it is saved"


@pytest.mark.full
def test_a_second_interrupt_ends_all_at_once(pack, tmp_path, monkeypatch):
    monkeypatch.setenv("CREW_STEP", "60")
    with beginning("-c", SCRIPT, str(pack.folder), steps=0) as process:
        process.send_signal(signal.SIGINT)
        time.sleep(1)
        assert process.poll() is None, "the first one waits for the step"
        process.send_signal(signal.SIGINT)
        assert "KeyboardInterrupt" in process.communicate(timeout=30)[1]
    until(lambda: not left_behind(tmp_path), "the end of all processes", 10)


@pytest.mark.full
def test_torchrun_that_is_killed_takes_its_ranks_along(pack, tmp_path):
    def user():
        until(lambda: len(notes(1)) > 3, "steps")
        parent = int(Path(f"/proc/{notes(1)[-1]['pid']}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(parent, signal.SIGKILL)

    with beside(user), pytest.raises(TrainError, match="torchrun was ended by SIGKILL"):
        launched(pack, epochs=100_000)
    until(lambda: not left_behind(tmp_path), "the end of all processes", 10)


# -- the terminal


TRAIN = ("-m", "nbtools", "train", "crew", "--data", "raw", "--run", "run", "--from", "plan", "--no-receipt")


@pytest.mark.full
def test_the_terminal_trains_in_several_processes(pack, tmp_path):
    command = [sys.executable, *TRAIN, "--epochs", "2", "--processes", "2", "--json"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["epochs"]) == 2
    assert "epoch 2 of 2  train " in done.stderr
    assert "\nbatch      16 per step: 8 + 8 on 2 processes\n" in done.stderr
    assert len(notes(0)) == len(notes(1)) > 0


@pytest.mark.full
@pytest.mark.parametrize("count", [1, 2])
def test_any_torchrun_trains_and_packs_once(pack, tmp_path, count):
    with nodes(count, "--epochs", "2") as processes:
        said = [process.communicate(timeout=200) for process in processes]
    assert [process.returncode for process in processes] == [0] * count, said
    assert sum(text.count("train loss") for out, _ in said for text in [out]) == 1, "rank 0 alone prints the result"
    assert len(nb.Run.open("run", crew).history.of("epoch")) == 2
    assert len(notes(0)) == len(notes(1)) > 0


@pytest.mark.full
def test_a_scheduler_that_ends_every_process_at_once_leaves_a_saved_run(pack, tmp_path):
    """As Slurm does: torchrun gets the signal, and sends it a second time to those that have it already."""
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--")
    with beginning(*torchrun, *TRAIN[1:], "--epochs", "100000") as process:
        for pid in (*{notes(rank)[-1]["pid"] for rank in range(2)}, process.pid):
            os.kill(pid, signal.SIGTERM)
        process.communicate(timeout=60)
    until(lambda: not left_behind(tmp_path), "the end of all processes")
    assert last_step(Path("run")) == len(notes(0)) == len(notes(1))


# -- for minutes


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_thirty_kills_at_random_moments_leave_every_epoch_complete_and_the_weights_of_a_run_without_any(
    pack, tmp_path, monkeypatch
):
    monkeypatch.setenv("CREW_STEP", "0.05")
    draw = random.Random(0)
    killed: list[int] = []

    def user():
        for _ in range(30):
            until(lambda: {note["pid"] for note in notes(1)[-1:]} - {*killed}, "steps of a new process", 120)
            time.sleep(draw.uniform(0, 1))
            pids = [notes(rank)[-1]["pid"] for rank in range(2)]
            killed.extend(pids)
            os.kill(draw.choice(pids), signal.SIGKILL)

    with beside(user):
        run = launched(pack, epochs=200, restarts=30)
    assert [row["epoch"] for row in run.history.of("epoch")] == list(range(200))
    assert sum("ended by SIGKILL" in event for event in run.events) == 30
    assert left_behind(tmp_path) == []
    monkeypatch.setenv("CREW_STEP", "0")
    together(2, in_place, pack.folder, str(tmp_path / "whole"), 200)
    assert same(run, nb.Run.open("whole", crew))
