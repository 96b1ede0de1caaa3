"""Demo clips are in the guide's format, signers held out; skeletons show what is seen, and nothing else."""

import json
import re

import numpy as np
import pytest

import nbtools as nb
from nbtools.tasks import sign
from nbtools.tasks.sign.visualize import CELL, MOMENTS, skeleton

COUNT, GLOSSES, CATEGORIES = 60, 4, 2

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    return sign.demo(tmp_path_factory.mktemp("signs"), COUNT, glosses=GLOSSES, categories=CATEGORIES, frames=(10, 20))


@pytest.fixture(scope="module")
def packed(clips, tmp_path_factory):
    return sign.pack(clips, into=tmp_path_factory.mktemp("packed"), progress=False)


def test_clips_are_in_the_guides_format_and_the_validator_finds_nothing(tmp_path):
    plain, rich = (sign.demo(tmp_path / str(f), 12, glosses=4, features=f) for f in (False, True))
    report = nb.validate(sign, rich, require_x2048=True, progress=False)
    assert (report.about, report.rows) == ("12 clips, 12 with a label", [])
    with np.load(plain / "train/clip_00000.npz") as a, np.load(rich / "train/clip_00000.npz") as b:
        assert all(np.array_equal(a[key], b[key]) for key in a), "features change nothing else"
        count, features = len(b["X"]), b["X2048"]
        expected = {"X": ("<f4", (count, 156)), "X2048": ("<f4", (count, 2048)), "mask": ("|b1", (count, 78))}
        expected |= {"timestamps_ms": ("<i8", (count,))}
        assert {key: (b[key].dtype.str, b[key].shape) for key in b if key != "meta"} == expected
    assert features.min() == 0
    assert 0.2 < features.mean() < 0.5


def signers_of(folder):
    """The signer of each clip, from its meta."""
    signers = []
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as clip:
            signers.append(re.findall(r"signer (\d+)", json.loads(clip["meta"].item())["video"])[0])
    return signers


def test_val_signers_never_train_and_every_gloss_comes_equally_often(clips, packed):
    train, val = (signers_of(clips / name) for name in ("train", "val"))
    assert set(train).isdisjoint(val)
    assert (len(train), len(val)) == (packed.splits["train"], packed.splits["val"]) == (50, 10)
    labels = packed.arrays["label"][packed.ids("train"), 0]
    assert {*np.bincount(labels)} == {12, 13}
    assert sorted(labels[:GLOSSES]) == list(range(GLOSSES)), "every gloss is there from the first"
    assert packed.options["categories"] == ["greeting", "survival"]
    assert packed.classes[:4] == ["greeting 1a", "survival 1a", "greeting 1b", "survival 1b"]


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


def test_show_has_a_strip_of_each_clip_with_its_category(packed):
    [axes] = sign.show(packed, np.array([0, 5])).axes
    categories = [packed.options["categories"][packed.sample(i)["label"][1]] for i in (0, 5)]
    assert [text.get_text().split(" · ")[1] for text in axes.texts] == categories
    strip = np.asarray(axes.images[1].get_array())
    assert strip.shape == (CELL, MOMENTS * CELL, 4)
    assert all(cell.any() for cell in np.split(strip, MOMENTS, axis=1))


def test_clips_of_features_alone_are_shown_too_and_a_report_names_what_is_confused(tmp_path):
    source = sign.demo(tmp_path / "raw", 40, glosses=4, categories=2, frames=(10, 12), features=True)
    pack = sign.pack(source, kp_key=None, progress=False)
    run = nb.fit(sign, pack, sign.Plan(epochs=1, batch_size=16), tmp_path / "run", receipt=False, progress=False)
    report = run.report(pack, "val")
    assert set(report.table.index) >= set(pack.classes)
    assert report.pictures is not None
