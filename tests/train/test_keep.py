"""A run kept on a second disk: complete or absent there, read back, and no reason for training to stop."""

import errno
import json
import os
import shutil
import signal
import threading
from pathlib import Path

import pytest
import toy
from acting import QUIET, acting, same
from archives import tree

import nbtools as nb
from nbtools.errors import CheckpointError, PackError
from nbtools.train import checkpoint

PLAN = toy.PLAN.replace(epochs=2)


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("NBTOOLS_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def whole(tmp_path_factory, pack):
    """A run that is kept, to be copied."""
    place = tmp_path_factory.mktemp("kept")
    return nb.fit(toy, pack, PLAN, place / "run", keep=place / "drive", **QUIET)


@pytest.fixture
def drive(whole, place) -> Path:
    return shutil.copytree(whole.folder.with_name("drive"), place / "drive")


def breaking(patch: pytest.MonkeyPatch, target: Path, act) -> None:
    """Call act() before a file below `target` gets its name."""
    real = os.replace

    def replace(source, to):
        if Path(to).absolute().is_relative_to(target.absolute()):
            act()
        real(source, to)

    patch.setattr(os, "replace", replace)


def test_what_is_kept_opens_and_resumes_on_another_machine(drive, whole, pack):
    found = nb.Run.open(drive, toy)
    assert found.history.rows == whole.history.rows
    assert same(found, whole)
    assert list(nb.runs(drive.parent).index) == ["drive"]
    again = nb.fit(toy, pack, PLAN.replace(epochs=4), "run", keep=drive, **QUIET)
    nb.fit(toy, pack, PLAN, "straight", **QUIET)
    straight = nb.fit(toy, pack, PLAN.replace(epochs=4), "straight", **QUIET)
    assert same(again, straight)
    assert same(nb.Run.open(drive, toy), straight)


def test_weights_that_never_reached_drive_are_made_up_for_from_those_before(drive, whole, pack):
    """A write to Drive ends before it is there."""
    (drive / f"{checkpoint.names(drive)[0]}.safetensors").unlink()
    run = nb.fit(toy, pack, PLAN, "run", keep=drive, **QUIET)
    assert any("damaged or missing" in text for text in run.events)
    assert same(run, whole)
    assert same(nb.Run.open(drive, toy), whole)


def test_damaged_or_missing_weights_are_named(drive):
    run = nb.Run.open(drive, toy)
    for harm in (lambda path: path.write_bytes(path.read_bytes()[:-1] + b"x"), Path.unlink):
        for path in drive.glob("*.safetensors"):
            harm(path)
        with pytest.raises(CheckpointError, match=r"safetensors: damaged or missing .* where the run is kept"):
            run.model()


def test_training_goes_on_while_drive_is_away_which_is_said_once_and_made_up_for(pack, place, monkeypatch):
    gone = threading.Event()
    monkeypatch.setattr("nbtools.folder.SAVE_SHARE", float("inf"))
    breaking(monkeypatch, place / "drive", lambda: gone.is_set() and away())
    steps = len(range(0, pack.splits["train"], PLAN.batch_size))
    task = acting(
        {2 * steps + 2: gone.set, 4 * steps + 2: gone.clear, 4 * steps + 4: lambda: threading.Event().wait(0.5)}
    )
    run = nb.fit(task, pack, PLAN.replace(epochs=6), "run", keep="drive", **QUIET)
    straight = nb.fit(toy, pack, PLAN.replace(epochs=6), "straight", **QUIET)
    said = [text for text in run.events if text.startswith("drive")]
    assert ["not kept (" in text for text in said] == [True], said
    assert same(run, straight)
    assert same(nb.Run.open("drive", toy), straight)


def away() -> None:
    raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))


def test_a_drive_that_stays_away_is_named_at_the_end_with_what_is_not_safe(pack, place, monkeypatch):
    breaking(monkeypatch, place / "drive", away)
    run = nb.fit(toy, pack, PLAN, "run", keep="drive", **QUIET)
    assert any("; kept: nothing yet; all of it is in run" in text for text in run.events)


def test_a_drive_that_hangs_is_said_and_the_wait_for_it_can_be_interrupted(pack, place, monkeypatch, capsys):
    ready, over = threading.Event(), threading.Event()
    monkeypatch.setattr(checkpoint, "PATIENCE", 0.2)
    breaking(monkeypatch, place / "drive", lambda: (ready.set(), over.wait()))
    timer = threading.Timer(1.0, lambda: ready.wait() and os.kill(os.getpid(), signal.SIGINT))
    task = acting({1: timer.start})
    try:
        run = nb.fit(task, pack, PLAN.replace(epochs=1), "run", keep="drive", **QUIET)
    except KeyboardInterrupt as error:
        run = vars(error)["run"]
    finally:
        over.set()
    assert any("waiting for the last copy" in text for text in run.events)
    assert any("not kept to the end (interrupted)" in text for text in run.events)
    assert (place / "run" / "run.json").exists()


def test_what_reads_back_differently_is_not_kept(pack, place, monkeypatch):
    real = os.fsync

    def spoiling(file: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{file}")) if os.path.exists("/proc/self/fd") else Path()
        if "drive" in name.parts and ".safetensors" in name.name:
            os.truncate(name, 10)
        real(file)

    monkeypatch.setattr(os, "fsync", spoiling)
    run = nb.fit(toy, pack, PLAN, "run", keep="drive", **QUIET)
    assert any("reads back differently" in text for text in run.events)
    assert "run.json" not in tree(place / "drive")


def test_runs_and_packs_of_older_versions_are_refused_by_the_name_of_their_maker(pack, place, whole):
    folder = shutil.copytree(whole.folder, place / "old")
    index = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**index, "version": 1, "nbtools": "0.2.0"}))
    for act in (lambda: nb.Run.open(folder, toy), lambda: nb.fit(toy, pack, PLAN, folder, **QUIET)):
        with pytest.raises(CheckpointError, match=r"made by nbtools 0\.2\.0 .* train anew in another folder"):
            act()
    made = shutil.copytree(pack.folder, place / "pack")
    manifest = json.loads((made / "pack.json").read_text())
    (made / "pack.json").write_text(json.dumps({**manifest, "version": 2, "nbtools": "0.2.0"}))
    with pytest.raises(PackError, match=r"nbtools 0\.2\.0 made this pack, in format 2, .* pack again"):
        nb.Pack.open(made)
