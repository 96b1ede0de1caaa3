"""What an older nbtools wrote can be opened, resumed and predicted from. A version that writes otherwise adds a folder
below `old/`: `0.1.0` has packs of a toy (48 sequences) and of captchas (8 images), and a run of two epochs on the toy.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import toy

import nbtools as nb
from nbtools.tasks import captcha
from nbtools.train import checkpoint

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


def test_an_old_run_opens_predicts_and_resumes_on_the_old_pack(old, tmp_path):
    pack = toy.pack(old / "pack.tar", ragged=True)
    run = nb.Run.open(old / "run", toy)
    assert [row["epoch"] for row in run.history.of("epoch")] == [0, 1]
    assert nb.evaluate(run, pack, split="val")["accuracy"] >= 0
    files = sorted(toy.demo(tmp_path / "raw", 4, True).glob("*.npy"))
    assert set(run.predict(files)) <= set("abcd")
    resumed = nb.fit(toy, pack, toy.PLAN.replace(epochs=4), old / "run", receipt=False, progress=False)
    assert [row["epoch"] for row in resumed.history.of("epoch")] == [0, 1, 2, 3]


def test_a_best_metric_with_as_many_digits_as_a_hash_is_no_hash(old, tmp_path):
    """Older facts of the best weights have no seal, and begin with the metric."""
    path = old / "run" / "0001-00000002.weights.json"
    path.write_text(path.read_text().replace("0.1,", f"{5 / 6},"))
    assert nb.Run.open(old / "run", toy).model() is not None
    pack, plan = toy.pack(old / "pack.tar", ragged=True), toy.PLAN.replace(epochs=3)
    nb.fit(toy, pack, plan, old / "run", tmp_path / "kept", receipt=False, progress=False)
    assert nb.Run.open(tmp_path / "kept", toy).best


def test_an_old_run_whose_index_was_lost_keeps_its_best_weights(old):
    (old / "run" / "run.json").unlink()
    pack, never_better = toy.pack(old / "pack.tar", ragged=True), toy.with_(metrics=lambda *_: {"accuracy": (0, 1)})
    nb.fit(never_better, pack, toy.PLAN.replace(epochs=3), old / "run", receipt=False, progress=False)
    assert (old / "run" / "0001-00000002.weights.safetensors").exists()
    assert checkpoint.read_index(old / "run")["best"] == "0001-00000002.weights"


def test_what_is_written_now_names_its_maker(tmp_path, monkeypatch):
    monkeypatch.setenv("NBTOOLS_CACHE", str(tmp_path / "cache"))
    pack = toy.pack(toy.demo(tmp_path / "raw", 40), into=tmp_path / "pack")
    nb.fit(toy, pack, toy.PLAN.replace(epochs=1), tmp_path / "run", receipt=False, progress=False)
    assert pack.manifest["nbtools"] == nb.__version__
    assert json.loads((tmp_path / "run" / "run.json").read_text())["nbtools"] == nb.__version__
