"""Claims on real data that is not part of the project: they run where NBTOOLS_REAL_DATA names its folder."""

import os
from pathlib import Path

import pytest

import nbtools as nb
from nbtools.tasks import captcha

DATA = os.environ.get("NBTOOLS_REAL_DATA", "")
pytestmark = [pytest.mark.real, pytest.mark.skipif(not DATA, reason="NBTOOLS_REAL_DATA names no folder of real data")]


def test_real_captchas_of_any_width_and_length_are_staged_packed_and_learned(tmp_path, monkeypatch):
    monkeypatch.setenv("NBTOOLS_CACHE", str(tmp_path))
    folder = nb.stage(Path(DATA) / "captcha-lines.tar", progress=False)
    pack = captcha.pack(folder, label="-", case="lower", test=500, progress=False)
    assert (len(pack), pack.splits["test"], len(pack.bad)) == (4000, 500, 0)
    assert pack.options["layout"] == "lines"
    assert "".join(pack.classes) == "0123456789abcdefghijklmnopqrstuvwxyz"
    plan = nb.advise(captcha, pack, measure=False).plan.replace(epochs=6, warmup_epochs=1.0)
    run = nb.fit(captcha, pack, plan, tmp_path / "run", receipt=False, progress=False)
    assert nb.evaluate(run, pack)["cer"] < 0.6
    names = [name for name, split in zip(pack.names, pack.split, strict=True) if split == 2][:40]
    read = run.predict([folder / name for name in names])
    assert read == run.predict_pack(pack, [pack.names.index(name) for name in names])
