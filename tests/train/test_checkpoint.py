"""What a run folder goes on from where one of its files is damaged, lost or half written."""

import shutil
from pathlib import Path

import pytest
import toy
from acting import QUIET, same

import nbtools as nb
from nbtools.errors import CheckpointError
from nbtools.train import checkpoint


@pytest.fixture(scope="module")
def untouched(tmp_path_factory, pack):
    return nb.fit(toy, pack, toy.PLAN, tmp_path_factory.mktemp("runs") / "untouched", **QUIET)


def damage(folder: Path, *names: str) -> None:
    for name in names:
        path = folder / f"{name}.safetensors"
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_a_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before_it_and_says_so(pack, tmp_path, untouched):
    folder = shutil.copytree(untouched.folder, tmp_path / "run")
    for harm in (damage, lambda folder, name: (folder / f"{name}.safetensors").write_bytes(b"")):
        newest, older, *_ = checkpoint.names(folder)
        harm(folder, newest)
        run = nb.fit(toy, pack, toy.PLAN, folder, **QUIET)
        assert [event for event in run.events if event.endswith(f"{older} is used meanwhile")]
        assert same(run, untouched)


def test_where_every_checkpoint_is_damaged_the_way_out_is_the_kept_copy_and_none_is_said_to_be_used(pack, tmp_path):
    folder, kept = tmp_path / "run", tmp_path / "kept"
    nb.fit(toy, pack, toy.PLAN, folder, keep=kept, **QUIET)
    damage(folder, *checkpoint.names(folder))
    with pytest.raises(CheckpointError, match=r"its hash is not that of.*move this folder away to resume") as no:
        nb.fit(toy, pack, toy.PLAN, folder, keep=kept, **QUIET)
    assert "used" not in str(no.value)
    folder.rename(tmp_path / "away")
    nb.fit(toy, pack, toy.PLAN, folder, keep=kept, **QUIET)
    assert checkpoint.newest(folder).complaints == ()


@pytest.mark.parametrize("name", ["card.json", "plan.json", "receipt.json"])
def test_a_damaged_file_of_a_run_is_named_with_what_to_do(tmp_path, untouched, name):
    folder = shutil.copytree(untouched.folder, tmp_path / "run")
    fix = "copy the whole run folder again" if name in ("card.json", "plan.json") else "delete it"
    for text in ("{", "[1]"):
        (folder / name).write_text(text)
        with pytest.raises(CheckpointError, match=rf"run/{name} is damaged, .*; {fix}"):
            _ = nb.Run.open(folder, toy).receipt


def test_what_a_killed_process_left_half_written_goes_and_the_files_of_others_stay(pack, tmp_path):
    folder = tmp_path / "run"
    nb.fit(toy, pack, toy.PLAN.replace(epochs=1), folder, **QUIET)
    own = {f"{name}.12-34.part" for name in ("run.json", "history.csv", "plan.json", "plot.png")}
    others = {
        "control.json.12-34.part",
        "notes.json.12-34.part",
        "mine.part",
        "data.2024-01.part",
        "model.onnx.1-2.part",
    }
    for name in own | others:
        (folder / name).touch()
    nb.fit(toy, pack, toy.PLAN, folder, **QUIET)
    assert {path.name for path in folder.glob("*.part")} == others
