"""docs/troubleshooting.md: every entry that an error names is a heading of it, with something to do."""

import dataclasses
import re
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch
import toy

import nbtools as nb
from nbtools import errors
from nbtools.errors import NbtoolsError, PackError, TrainError, see
from nbtools.tasks import captcha, hwdb, segment, sign

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text()
ADDRESS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]["Repository"]
SECTIONS = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n?)*)", TEXT, re.M))


def test_every_entry_that_the_code_names_is_a_heading():
    named = set()
    for path in (ROOT / "nbtools").rglob("*.py"):
        named |= set(re.findall(r'\bentry ?= ?"([^"]+)"', path.read_text()))
    assert len(named) > 8
    assert named <= SECTIONS.keys()


def test_an_entry_is_found_at_the_projects_address_and_without_one_by_its_page(monkeypatch):
    assert see("GPU at 30 %") == f"See “GPU at 30 %”: {ADDRESS}/blob/main/docs/troubleshooting.md#gpu-at-30-"

    def metadata(name):
        raise errors.PackageNotFoundError(name)

    monkeypatch.setattr(errors, "metadata", metadata)
    assert see("NaN") == "See “NaN”: docs/troubleshooting.md#nan"


def test_a_message_without_an_entry_and_one_with_several_arguments_are_as_they_were():
    assert str(TrainError("stop; go on")) == "stop; go on"
    assert str(TrainError("Done.", entry="NaN")) == f"Done. {see('NaN')}"
    assert str(TrainError("Done?", entry="NaN")) == f"Done? {see('NaN')}"
    assert PackError("rule", 3, "fix").args == ("rule", 3, "fix")


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


def quota(pack, folder, patch) -> None:
    (folder / "data.tar").write_text("<!DOCTYPE html><title>Google Drive - Quota exceeded</title>")
    nb.stage(folder / "data.tar")


def machine_returned(pack, folder, patch) -> None:
    patch.setitem(sys.modules, "google.colab", ModuleType("google.colab"))
    nb.fit(toy, pack, toy.PLAN, folder / "run", release_gpu=True)


def other_classes(pack, folder, patch) -> None:
    other = dataclasses.replace(pack, card=dataclasses.replace(pack.card, classes=list("dcba")))
    nb.evaluate(nb.TrainState(toy, pack, toy.PLAN), other)


def wrong_path(pack, folder, patch) -> None:
    patch.setenv("NBTOOLS_DRIVE", str(folder))
    nb.stage("drive:nothing.tar")


PROVOKED = {
    lost_loss: "NaN",
    quota: "Quota page",
    machine_returned: "Session lost",
    other_classes: "Predictions differ between training and inference",
    wrong_path: "Keys, columns and paths",
}


@pytest.mark.usefixtures("own_cache")
@pytest.mark.parametrize("act", PROVOKED, ids=lambda act: act.__name__)
def test_what_goes_wrong_ends_with_its_entry(act, tmp_path, monkeypatch):
    pack = toy.make_pack(tmp_path / "toy", count=60)
    with monkeypatch.context() as patch, pytest.raises(NbtoolsError) as caught:
        act(pack, tmp_path, patch)
    assert str(caught.value).endswith((f". {see(PROVOKED[act])}", f"? {see(PROVOKED[act])}"))
