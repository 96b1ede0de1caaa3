"""docs/troubleshooting.md: every entry that an error names is a heading of it, with something to do."""

import dataclasses
import re
from collections import namedtuple
from pathlib import Path

import pytest
import torch
import toy

import nbtools as nb
from nbtools.errors import NbtoolsError, TrainError
from nbtools.tasks import captcha, hwdb, segment, sign

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text()
SECTIONS = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n?)*)", TEXT, re.M))


def test_every_entry_that_the_code_names_is_a_heading():
    named = set()
    for path in (ROOT / "nbtools").rglob("*.py"):
        named |= set(re.findall(r'\bentry ?= ?"([^"]+)"', path.read_text()))
    assert len(named) > 6
    assert named <= SECTIONS.keys()


def test_a_message_ends_with_its_entry():
    assert str(TrainError("stop; go on")) == "stop; go on"
    for text in ("Done", "Done."):
        assert str(TrainError(text, entry="NaN")) == "Done. See “NaN” in docs/troubleshooting.md"


def test_every_option_and_preset_of_the_page_is_one():
    plans = [task.PLAN for task in (captcha, hwdb, segment, sign)]
    for name, value in re.findall(r"(?<=[` ])--([a-z][\w-]*) ?([\w.-]*)", TEXT):
        field = name.replace("-", "_")
        fitting = [plan for plan in plans if hasattr(plan, field)]
        others = {"data", "why", "keep", "processes", "label", "kp_key", "feature_key", "smoke_test", "from"}
        assert fitting or field in others, name
        assert not value or not fitting or any(takes(plan, field, value) for plan in fitting), name
    presets = {"measured", *(name for task in (captcha, hwdb, segment, sign) for name in task.PRESETS)}
    assert set(re.findall(r"--from ([\w.-]+)", TEXT)) <= presets


def takes(plan: nb.Plan, field: str, value: str) -> bool:
    try:
        return bool(plan.turn(**{field: plan.parse(field, value)}))
    except NbtoolsError:
        return False


def lost_loss(pack, folder, patch) -> None:
    task = toy.with_(loss=lambda model, batch, plan: (model(batch).sum() * torch.nan, 1))
    for _ in nb.train(task, nb.TrainState(task, pack, toy.PLAN), pack):
        continue


def small_shared_memory(pack, folder, patch) -> None:
    patch.setattr("os.statvfs", lambda path: namedtuple("Stat", "f_bavail f_frsize")(1, 512))
    patch.setattr("os.path.isdir", lambda path: True)
    nb.fit(toy, pack, toy.PLAN.replace(feed="workers", workers=4), folder / "run", receipt=False, progress=False)


def quota(pack, folder, patch) -> None:
    (folder / "data.tar").write_text("<!DOCTYPE html><title>Google Drive - Quota exceeded</title>")
    nb.stage(folder / "data.tar")


def other_classes(pack, folder, patch) -> None:
    other = dataclasses.replace(pack, card=dataclasses.replace(pack.card, classes=list("dcba")))
    nb.evaluate(nb.TrainState(toy, pack, toy.PLAN), other)


def wrong_path(pack, folder, patch) -> None:
    patch.setenv("NBTOOLS_DRIVE", str(folder))
    nb.stage("drive:nothing.tar")


PROVOKED = {
    lost_loss: "NaN",
    small_shared_memory: "The loader hangs",
    quota: "Quota page",
    other_classes: "Predictions differ between training and inference",
    wrong_path: "Keys, columns and paths",
}


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("act", PROVOKED, ids=lambda act: act.__name__)
def test_what_goes_wrong_ends_with_its_entry(act, tmp_path, monkeypatch):
    pack = toy.make_pack(tmp_path / "toy", count=60)
    with monkeypatch.context() as patch, pytest.raises(NbtoolsError) as caught:
        act(pack, tmp_path, patch)
    assert str(caught.value).endswith(f" See “{PROVOKED[act]}” in docs/troubleshooting.md")
