"""What an older nbtools wrote can be opened and predicted from. A version that writes otherwise adds a folder
below `old/`: `0.1.0` has packs of a toy (48 sequences) and of captchas (8 images), and a run of two epochs on the toy.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import toy

import nbtools as nb
from nbtools.errors import CheckpointError
from nbtools.tasks import captcha

OLD = sorted((Path(__file__).parent / "old").iterdir())


@pytest.fixture(params=OLD, ids=lambda path: path.name)
def old(request, tmp_path, monkeypatch) -> Path:
    """A copy, so that nothing writes into the repository."""
    monkeypatch.setenv("NBTOOLS_CACHE", str(tmp_path / "cache"))
    return shutil.copytree(request.param, tmp_path / "old")


def test_an_old_pack_is_whole_and_opens_by_its_task(old):
    pack = captcha.pack(old / "captcha.tar", progress=False).verify()
    assert pack.splits == {"train": 6, "val": 1, "test": 1}
    assert pack.sample(0)["image"].shape == tuple(pack.options["size"])
    assert [captcha.text_of(pack, i) for i in range(8)] == [name.partition("_")[0] for name in pack.names]
    sequences = toy.pack(old / "pack.tar", ragged=True).verify()
    assert len(sequences) == 48
    assert sequences.raw is None
    assert [len(x) for x in np.split(sequences.arrays["x"], sequences.offsets["x"][1:-1])] == (
        sequences.lengths("x", np.arange(48)).tolist()
    )


def test_an_old_run_opens_and_predicts_and_is_refused_to_resume(old, tmp_path):
    pack = toy.pack(old / "pack.tar", ragged=True)
    run = nb.Run.open(old / "run", toy)
    assert [row["epoch"] for row in run.history.of("epoch")] == [0, 1]
    assert nb.evaluate(run, pack, split="val")["accuracy"] >= 0
    files = sorted(toy.demo(tmp_path / "raw", 4, True).glob("*.npy"))
    assert set(run.predict(files)) <= set("abcd")
    with pytest.raises(CheckpointError, match=r"of an nbtools before 0\.3.*start over in another folder"):
        nb.fit(toy, pack, toy.PLAN.replace(epochs=4), old / "run", receipt=False, progress=False)
    assert [row["epoch"] for row in nb.Run.open(old / "run", toy).history.of("epoch")] == [0, 1]


def test_what_is_written_now_names_its_maker(tmp_path, monkeypatch):
    monkeypatch.setenv("NBTOOLS_CACHE", str(tmp_path / "cache"))
    pack = toy.pack(toy.demo(tmp_path / "raw", 40), into=tmp_path / "pack")
    nb.fit(toy, pack, toy.PLAN.replace(epochs=1), tmp_path / "run", receipt=False, progress=False)
    assert pack.manifest["nbtools"] == nb.__version__
    assert json.loads((tmp_path / "run" / "run.json").read_text())["nbtools"] == nb.__version__
