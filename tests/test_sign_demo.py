"""Demo clips: the format of real ones, the same from the same seed, signers held out, hands that are lost, and signs
that only the order of their postures tells apart."""

import json
import re

import numpy as np
import pytest

import nbtools as nb
from nbtools.errors import PackError
from nbtools.tasks import sign

COUNT, GLOSSES, CATEGORIES = 60, 4, 2

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """300 clips of ten glosses in two categories, 60 of them held out."""
    return sign.demo(tmp_path_factory.mktemp("signs"), COUNT, glosses=GLOSSES, categories=CATEGORIES)


@pytest.fixture(scope="module")
def packed(clips, tmp_path_factory):
    return sign.pack(clips, into=tmp_path_factory.mktemp("packed"), progress=False)


def files(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}


def test_the_same_seed_gives_the_same_bytes_and_few_clips_are_the_first_of_many(tmp_path):
    asked = {"a": (23, 0), "b": (23, 0), "c": (40, 0), "d": (23, 1)}
    few, again, many, other = (files(sign.demo(tmp_path / n, count, seed=seed)) for n, (count, seed) in asked.items())
    assert few == again
    there = {name for name in few if name.endswith(".npz")}
    assert len(there) == 23
    assert all(many[name] == few[name] != other[name] for name in there)


def test_clips_are_in_the_guides_format_and_the_validator_finds_nothing(tmp_path):
    plain, rich = (sign.demo(tmp_path / str(f), 12, glosses=4, features=f) for f in (False, True))
    report = nb.validate(sign, rich, require_x2048=True, progress=False)
    assert (report.clips, report.labelled, report.rows) == (12, 12, ())
    with np.load(plain / "train/clip_00000.npz") as a, np.load(rich / "train/clip_00000.npz") as b:
        assert all(np.array_equal(a[key], b[key]) for key in a), "features change nothing else"
        count, features = len(b["X"]), b["X2048"]
        expected = {"X": ("<f4", (count, 156)), "X2048": ("<f4", (count, 2048)), "mask": ("|b1", (count, 78))}
        expected |= {"timestamps_ms": ("<i8", (count,))}
        assert {key: (b[key].dtype.str, b[key].shape) for key in b if key != "meta"} == expected
        steps = np.diff(b["timestamps_ms"])
        assert 26 <= steps.min() < steps.max() <= 40  # 30 frames a second, jittered
    with np.load(rich / "val/clip_00010.npz") as other:
        far = np.linalg.norm(features[count // 2] - other["X2048"][len(other["X2048"]) // 2])
    assert features.min() == 0
    assert 0.2 < features.mean() < 0.5
    assert np.linalg.norm(np.diff(features, axis=0), axis=1).mean() < far, "they follow the frames"


def signers_of(folder):
    """The signer of each clip, from its meta."""
    signers = []
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as clip:
            signers.append(int(re.findall(r"signer (\d+)", json.loads(str(clip["meta"]))["video"])[0]))
    return np.array(signers)


def test_val_signers_never_train_and_every_gloss_comes_equally_often(clips, packed):
    train, val = (signers_of(clips / name) for name in ("train", "val"))
    assert set(train).isdisjoint(val)
    assert (len(train), len(val)) == (packed.splits["train"], packed.splits["val"]) == (50, 10)
    assert {*packed.card.counts["gloss"]} == {12, 13}
    first = packed.arrays["label"][packed.ids("train")[:GLOSSES], 0]
    assert sorted(first) == list(range(GLOSSES)), "every gloss is there from the first"
    assert packed.options["categories"] == ["greeting", "survival"]
    assert packed.classes[:4] == ["greeting 1a", "survival 1a", "greeting 1b", "survival 1b"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"count": 0}, "count must be 1 clip or more, got 0"),
        ({"glosses": 3}, "glosses must be at least one a category, 4, got 3"),
        ({"categories": 11}, "categories must be 1 to 10, got 11"),
        ({"frames": (30, 20)}, r"frames must be \(fewest, most\), from 10 to 3,000, got \(30, 20\)"),
        ({"seed": -1}, "seed must be 0 or more, got -1"),
    ],
)
def test_impossible_requests_are_refused_before_anything_is_written(tmp_path, options, message):
    with pytest.raises(PackError, match=message):
        sign.demo(tmp_path / "new", **{"count": 5, **options})
    assert not (tmp_path / "new").exists()


@pytest.mark.full
def test_the_advised_plan_passes_three_quarters(tmp_path):
    source = sign.demo(tmp_path / "raw", 600, glosses=12, categories=2)
    pack = sign.pack(source, progress=False)
    plan = nb.advise(sign, pack, measure=False).plan
    run = nb.fit(sign, pack, plan, tmp_path / "run", receipt=False, progress=False)
    assert nb.evaluate(run, pack, split="val")["gloss_accuracy"] > 0.75
