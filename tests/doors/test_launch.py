"""Runs in several processes under torchrun: what reaches them, what becomes of one that fails, and that none stays."""

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import crew
import pytest
import toy
from acting import QUIET, beside, last_step, refused, same, texts
from crew import notes, will
from jupyters import until
from ranks import together
from test_run_folder import TRIAL

import nbtools as nb
from nbtools.errors import TrainError
from nbtools.launch import Remote
from nbtools.live import send
from nbtools.measure import Advice

TESTS = Path(__file__).parent.parent
FAILS = {  # what a rank does → what it fails with
    "refuse": "PackError: sample 7: the label is missing, got None; write one",
    "memory": "TrainError: out of memory on rank 1 of 2 (CUDA out of memory); set a smaller micro_batch_size",
    "fail": "ValueError: a fault of the user's own",
}


@pytest.fixture
def pack(tmp_path, monkeypatch) -> nb.Pack:
    """The toy's, and the test in a folder of its own, where the ranks note their steps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # for what a process that is killed leaves behind
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("MASTER_PORT", "1")  # torchrun finds a port by itself
    return toy.make_pack(tmp_path, count=80)


def launched(pack: nb.Pack, run: str = "run", epochs: int = 3, **more: Any) -> nb.Run:
    """From the source files, not the pack, which every process has to find."""
    advice = Advice(crew.PLAN.replace(epochs=epochs, feed="workers"), {}, lr_trial=TRIAL)
    return nb.launch(crew, pack, advice, run, processes=2, **QUIET, **more)


def left_behind(folder: Path) -> list[str]:
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            found += [place.name] if place.joinpath("cwd").resolve() == folder.resolve() else []
    return [name for name in found if name != str(os.getpid())]


def test_what_cannot_start_is_refused_in_a_sentence(pack, monkeypatch):
    cell = type("Cell", (nb.Task,), {"__module__": "__main__"})  # as if a notebook had defined it
    for task, count, said in (
        (cell, 2, r"can import, got '__main__:Cell'; .*%%writefile"),
        (toy, 0, r"processes \(--processes\) must be at least 1, got 0; start one"),
    ):
        refused(TrainError, said, nb.launch, task, pack, toy.PLAN, processes=count)
    monkeypatch.setenv("NBTOOLS_DEVICE", "cuda:0")
    monkeypatch.setenv("WORLD_SIZE", "2")  # torchrun by hand
    with pytest.raises(TrainError, match=r"each process needs a GPU of its own: .* NBTOOLS_DEVICE is 'cuda:0'"):
        nb.fit(crew, pack, crew.PLAN)
    assert not Path("runs").exists()


def test_what_is_asked_of_two_processes_reaches_both_at_the_same_step(pack, tmp_path, monkeypatch):
    monkeypatch.setenv("CREW_STEP", "0.02")
    will("crash at its exit", rank=1, step=3)
    remotes, drawn = list[Remote](), list[str]()
    launch = sys.modules["nbtools.launch"]
    monkeypatch.setattr(launch, "Remote", lambda *given: remotes.append(Remote(*given)) or remotes[0])
    monkeypatch.setattr("nbtools.live.View.draw", lambda view, status="": drawn.append(status))
    nb.fit(toy, pack, toy.PLAN.replace(epochs=1), "run", **QUIET)  # in whose place the other starts

    def user():
        until(lambda: len(notes(1)) > 5, "steps", 120)
        send("run", settings={"lr": 0.005})
        until(lambda: notes(0)[-1]["lr"] == 0.005, "another lr")
        send("run", ["evaluate"], {"batch_size": 24})
        until(lambda: notes(1)[-1]["batch_size"] == 24, "another batch size")
        remotes[0].requests.post("pause")
        until(lambda: time.time() - notes(0)[-1]["time"] > 1 and last_step(Path("run")) == len(notes(0)), "a pause")
        before = len(notes(1))
        remotes[0].requests.post("resume")
        until(lambda: len(notes(1)) > before + 2, "steps after Resume")
        send("run", ["stop"])

    with beside(Path("run"), user):
        run = launched(pack, epochs=100_000, fresh=True)
    assert ("paused" in drawn, remotes[0].run.plan.epochs, run.lr_trial) == (True, 100_000, TRIAL)
    assert left_behind(tmp_path) == []
    ours, theirs = ([(note["lr"], note["batch_size"], len(note["ids"])) for note in notes(rank)] for rank in range(2))
    assert [row[:2] for row in ours] == [row[:2] for row in theirs]
    assert {row[1:] for row in ours[:-1] if row[1] == 24} >= {(24, 12)}
    assert last_step(Path("run")) == len(ours)
    assert any("stopped by you after step" in text for text in texts(run))
    assert "batch 16 on 2 processes, " in texts(run)[0]
    assert any(text.startswith("batch_size 16 → 24") for text in texts(run, "change"))


@pytest.mark.full
@pytest.mark.parametrize("does", FAILS)
def test_an_error_in_a_rank_reaches_the_notebook_and_a_foreign_one_is_tried_again(pack, tmp_path, does):
    will(does, rank=1, step=4, once=False)
    with pytest.raises(TrainError) as caught:
        launched(pack, restarts=1)
    assert str(caught.value).startswith(f"rank 1 failed with {FAILS[does]}")
    assert ("crew.py" in str(caught.value)) == (does == "fail"), "its traceback"
    assert len({note["pid"] for note in notes(1)}) == (2 if does == "fail" else 1), "starts"
    assert left_behind(tmp_path) == []


def whole(pack: Path, run: Path, epochs: int) -> None:
    nb.fit(crew, nb.Pack.open(pack), crew.PLAN.replace(epochs=epochs), run, **QUIET)


@pytest.mark.full
@pytest.mark.parametrize(("sign", "rank"), [("SIGKILL", 0), ("SIGKILL", 1), ("SIGSTOP", 1)])
def test_after_a_rank_is_lost_all_start_again_and_the_run_is_the_same(pack, tmp_path, monkeypatch, sign, rank):
    monkeypatch.setenv("NBTOOLS_TIMEOUT", "5")
    will(sign, rank, step=6)
    run = launched(pack)
    assert left_behind(tmp_path) == []
    assert any("a process was lost" in event for event in run.events)
    assert [row["epoch"] for row in run.history.of("epoch")] == [0, 1, 2]
    together(2, whole, pack.folder, tmp_path / "whole", 3)
    assert same(run, nb.Run.open("whole", crew))


@contextmanager
def begun(by_hand: bool, *more: str) -> Iterator[subprocess.Popen[str]]:
    """Two processes that train for long, by --processes or by torchrun, once both have begun. Ended with the test."""
    train = ["-m", "nbtools", "train", "crew", "--data", "raw", "--run", "run", "--no-receipt", *more]
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts", "2"]
    command = [sys.executable, *([*torchrun, "-m", "--", *train[1:]] if by_hand else [*train, "--processes", "2"])]
    paths = os.pathsep.join(filter(None, [str(TESTS), str(TESTS.parent), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": paths, "NBTOOLS_CACHE": str(Path("cache").absolute())}
    process = subprocess.Popen(command, env=env, stdout=-1, stderr=-1, text=True)
    try:
        until(lambda: min(len(notes(0)), len(notes(1))) >= 3, "steps", 100)
        yield process
    finally:
        process.terminate()
        process.communicate()


@pytest.mark.full
@pytest.mark.parametrize(("by_hand", "number"), [(False, "SIGKILL"), (False, "SIGINT"), (True, "SIGTERM")])
def test_whatever_ends_the_process_that_started_them_ends_all_and_the_run_is_saved(pack, tmp_path, by_hand, number):
    """A scheduler, as Slurm, sends SIGTERM to each of torchrun's processes too, which get it from torchrun again."""
    with begun(by_hand, "--epochs", "100000") as process:
        for pid in {notes(rank)[-1]["pid"] for rank in range(2)} if by_hand else ():
            os.kill(pid, signal.SIGTERM)
        process.send_signal(signal.Signals[number])
        said = process.communicate(timeout=60)[1]
        until(lambda: not left_behind(tmp_path), "the end of all processes", 40)
    if not by_hand:
        assert process.returncode == (130 if number == "SIGINT" else -signal.Signals[number]), said
    if number != "SIGKILL":  # after which a run goes on from its last checkpoint
        assert last_step(Path("run")) == len(notes(0)) == len(notes(1)), "both stopped after the same step, and saved"


@pytest.mark.full
@pytest.mark.parametrize("by_hand", [False, True])
def test_the_terminal_and_torchrun_train_and_pack_once(pack, by_hand):
    with begun(by_hand, "--epochs", "2") as process:
        said = process.communicate(timeout=200)
    assert process.returncode == 0, said
    assert said[0].count("train_loss") == 1, "rank 0 alone prints the result"
    assert len(nb.Run.open("run").history.of("epoch")) == 2
    assert len(notes(0)) == len(notes(1)) > 0
