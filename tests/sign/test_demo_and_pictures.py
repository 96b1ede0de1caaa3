"""Demo clips are in the guide's format, signers held out; skeletons show what is seen, and nothing else."""

import json
import re

import numpy as np
import pytest

import nbtools as nb
from nbtools.tasks import sign
from nbtools.tasks.sign.visualize import skeleton

pytestmark = pytest.mark.usefixtures("own_cache")


def test_clips_are_in_the_guides_format_and_the_validator_finds_nothing(tmp_path):
    rich = sign.demo(tmp_path, 12, glosses=4, features=True)
    report = nb.validate(sign, rich, require_x2048=True, progress=False)
    assert (report.about, report.rows) == ("12 clips, 12 with a label", [])
    with np.load(rich / "train/clip_00000.npz") as clip:
        count = len(clip["X"])
        expected = {"X": ("<f4", (count, 156)), "X2048": ("<f4", (count, 2048)), "mask": ("|b1", (count, 78))}
        expected |= {"timestamps_ms": ("<i8", (count,))}
        assert {key: (clip[key].dtype.str, clip[key].shape) for key in clip if key != "meta"} == expected


def test_val_signers_never_train_and_every_gloss_comes_equally_often(tmp_path):
    clips = sign.demo(tmp_path, 60, glosses=4, categories=2, frames=(10, 20))
    packed = sign.pack(clips, progress=False)
    signers: dict[str, list[str]] = {"train": [], "val": []}
    for path in clips.glob("*/*.npz"):
        with np.load(path) as clip:
            signers[path.parent.name] += re.findall(r"signer (\d+)", json.loads(clip["meta"].item())["video"])
    assert set(signers["train"]).isdisjoint(signers["val"])
    assert {split: len(names) for split, names in signers.items()} == {"train": 50, "val": 10}
    assert packed.splits == {"train": 50, "val": 10, "test": 0}
    labels = packed.arrays["label"][packed.ids("train"), 0]
    assert {*np.bincount(labels)} == {12, 13}
    assert packed.options["categories"] == ["greeting", "survival"]


@pytest.mark.full
def test_the_advised_plan_passes_three_quarters(tmp_path):
    source = sign.demo(tmp_path / "raw", 600, glosses=12, categories=2)
    pack = sign.pack(source, progress=False)
    plan = nb.advise(sign, pack, measure=False).plan
    run = nb.fit(sign, pack, plan, tmp_path / "run", receipt=False, progress=False)
    assert nb.evaluate(run, pack, split="val")["gloss_accuracy"] > 0.75


def test_what_is_not_seen_is_not_drawn_and_no_limb_leads_there():
    """An elbow at the zero of a missing point would draw a line to the corner of the picture."""
    seen, points = np.ones(78, bool), np.random.default_rng(0).uniform(0.3, 0.7, (78, 2))
    assert not np.asarray(skeleton(points, ~seen, 60)).any()
    points[13] = 0
    assert np.asarray(skeleton(points, seen, 200))[:30, :30].any()
    seen[13] = False
    assert not np.asarray(skeleton(points, seen, 200))[:30, :30].any()
