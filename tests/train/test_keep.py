"""Where a file of a run's folder is damaged or lost; and a run kept on a second disk, complete or absent there."""

import json
import os
import shutil
import signal
import threading
from functools import partial
from pathlib import Path

import pytest
import toy
from acting import QUIET, acting, refused, same
from archives import away, tree

import nbtools as nb
from nbtools.errors import CheckpointError
from nbtools.live import Surface
from nbtools.train import checkpoint

pytestmark = pytest.mark.usefixtures("desk")
PLAN = toy.PLAN.replace(epochs=2)
PAUSE = partial(threading.Event().wait, 0.5)  # lets a copy end, before the next is due


@pytest.fixture(scope="module")
def whole(tmp_path_factory, pack):
    folder = tmp_path_factory.mktemp("kept")
    return nb.fit(toy, pack, PLAN, folder / "run", keep=folder / "drive", **QUIET)


@pytest.fixture
def drive(whole, tmp_path) -> Path:
    return shutil.copytree(whole.folder.with_name("drive"), tmp_path / "drive")


def damage(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / f"{name}.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"!")


def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before_it_and_says_so(pack, whole, monkeypatch):
    folder, waits, read = shutil.copytree(whole.folder, Path("run")), [away], Path.read_text
    monkeypatch.setattr("nbtools.data.fetch.PAUSE", 0.001)
    monkeypatch.setattr(Path, "read_text", lambda p, **k: waits.pop()() if waits and p.stem[0] == "0" else read(p, **k))
    assert (checkpoint.newest(folder).complaints, waits) == ((), []), "it answers again"
    for harm in (damage, lambda folder, name: (folder / f"{name}.safetensors").write_bytes(b"")):
        newest, older, *_ = checkpoint.names(folder)
        harm(folder, newest)
        run = nb.fit(toy, pack, PLAN, folder, **QUIET)
        [event] = [event for event in run.events if event.endswith(f"{older} is used instead")]
        assert "copy it" not in event
        assert same(run, whole)


def test_where_every_checkpoint_is_damaged_the_way_out_is_the_kept_copy_and_none_is_said_to_be_used(pack, drive, whole):
    folder = shutil.copytree(whole.folder, Path("run"))
    damage(folder, *checkpoint.names(folder))
    said = r"its hash differs from the one recorded.*move this folder away to resume"
    with pytest.raises(CheckpointError, match=said) as caught:
        nb.fit(toy, pack, PLAN, folder, keep=drive, **QUIET)
    assert "used" not in str(caught.value)
    folder.rename("away")
    nb.fit(toy, pack, PLAN, folder, keep=drive, **QUIET)
    assert checkpoint.newest(folder).complaints == ()


def test_a_damaged_file_of_a_run_is_named_with_what_to_do_and_one_of_an_older_version_by_its_maker(pack, whole):
    folder = shutil.copytree(whole.folder, Path("run"))
    for name, fix in (("receipt", "delete it"), ("plan", "copy the whole run"), ("card", "copy the whole run")):
        for text in ("{", "[1]"):
            (folder / f"{name}.json").write_text(text)
            with pytest.raises(CheckpointError, match=rf"run/{name}\.json is damaged, .*; {fix}"):
                _ = nb.Run.open(folder, toy).receipt
    index = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps({**index, "version": 1, "nbtools": "0.2.0"}))
    for act in (lambda: nb.Run.open(folder, toy), lambda: nb.fit(toy, pack, PLAN, folder, **QUIET)):
        refused(CheckpointError, r"made by nbtools 0\.2\.0 .* train again in another folder", act)


def breaking(patch: pytest.MonkeyPatch, target: Path, act) -> None:
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
    run = nb.fit(acting({1: lambda: shutil.copytree(drive, "other")}), pack, PLAN, "straight", keep="other", **QUIET)
    assert any("another session has kept its run there since" in text for text in run.events)
    assert tree(Path("other")) == tree(drive), "what it kept stays"
    straight = nb.fit(toy, pack, PLAN.replace(epochs=4), "straight", **QUIET)
    assert all(same(each, straight) for each in (again, nb.Run.open(drive, toy)))


def test_weights_that_never_reached_drive_are_made_up_for_from_those_before_and_else_named(drive, whole, pack):
    (drive / f"{checkpoint.names(drive)[0]}.safetensors").unlink()
    run = nb.fit(toy, pack, PLAN, "run", keep=drive, **QUIET)
    assert any("damaged or missing" in text for text in run.events)
    assert same(run, whole)
    kept = nb.Run.open(drive, toy)
    assert same(kept, whole)
    damage(drive, *checkpoint.names(drive))
    refused(CheckpointError, r"safetensors: damaged or missing .* where the run is kept", kept.model)


def test_training_goes_on_while_drive_is_away_which_is_said_once_and_made_up_for(pack, tmp_path, monkeypatch):
    gone, steps = threading.Event(), -(-pack.splits["train"] // PLAN.batch_size)
    monkeypatch.setattr("nbtools.folder.SAVE_SHARE", float("inf"))
    breaking(monkeypatch, tmp_path / "drive", lambda: gone.is_set() and away())
    acts = {2 * steps + 2: gone.set, 3 * steps - 1: PAUSE, 4 * steps - 1: PAUSE, 4 * steps + 2: gone.clear}
    run = nb.fit(acting({**acts, 4 * steps + 4: PAUSE}), pack, PLAN.replace(epochs=6), "run", keep="drive", **QUIET)
    straight = nb.fit(toy, pack, PLAN.replace(epochs=6), "straight", **QUIET)
    said = [text for text in run.events if text.startswith(f"{tmp_path}/drive")]
    assert ["not kept (" in text for text in said] == [True], said
    assert same(run, straight)
    assert same(nb.Run.open("drive", toy), straight)


def test_a_kept_checkpoint_that_is_not_needed_is_emptied_before_it_is_deleted(pack, tmp_path, monkeypatch):
    sizes, unlink = list[int](), Path.unlink

    def noting(path: Path, missing_ok: bool = False) -> None:
        if path.parent.name == "drive" and path.suffix == ".safetensors":
            sizes.append(path.stat().st_size)
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", noting)
    monkeypatch.setattr("nbtools.folder.SAVE_SHARE", float("inf"))
    task = acting({-(-pack.splits["train"] // PLAN.batch_size) * k + 2: PAUSE for k in range(1, 8)})
    nb.fit(task, pack, PLAN.replace(epochs=8), "run", keep="drive", **QUIET)
    assert {*sizes} == {0}


def test_a_drive_that_hangs_is_said_and_the_wait_for_it_can_be_interrupted(pack, tmp_path, monkeypatch):
    over, report = threading.Event(), Surface.report

    def interrupt(surface, message):
        report(surface, message)
        if "; interrupt to stop waiting" in message:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(checkpoint, "PATIENCE", 0.2)
    monkeypatch.setattr(Surface, "report", interrupt)
    breaking(monkeypatch, tmp_path / "drive", over.wait)
    try:
        run = nb.fit(toy, pack, PLAN.replace(epochs=1), "run", keep="drive", **QUIET)
    finally:
        over.set()
    assert any("the last state was not copied (interrupted)" in text for text in run.events)
    assert (tmp_path / "run" / "run.json").exists()


def test_what_reads_back_differently_is_not_kept(pack, tmp_path, monkeypatch):
    real = os.fsync

    def spoiling(file: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{file}")) if os.path.exists("/proc/self/fd") else Path()
        if "drive" in name.parts and ".safetensors" in name.name:
            os.truncate(name, 10)
        real(file)

    monkeypatch.setattr(os, "fsync", spoiling)
    run = nb.fit(toy, pack, PLAN, "run", keep="drive", **QUIET)
    assert any("reads back differently" in text for text in run.events)
    assert "run.json" not in tree(tmp_path / "drive")
