"""Demo clips: the format of real ones, the same from the same seed, signers held out, hands that are lost, and signs
that only the order of their postures tells apart."""

import json
import os
import re
import tarfile
from pathlib import Path

import numpy as np
import pytest

import nbtools as nb
from nbtools.errors import PackError
from nbtools.tasks import sign
from nbtools.tasks.sign.keypoints import FACE, HANDS, LEFT, POSE, RIGHT

DATA = os.environ.get("NBTOOLS_REAL_DATA", "")
COUNT, GLOSSES, CATEGORIES = 300, 10, 2

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


@pytest.mark.real
@pytest.mark.skipif(not DATA, reason="NBTOOLS_REAL_DATA names no folder of real data")
def test_a_clip_has_the_keys_types_and_meta_of_a_real_one(tmp_path):
    with tarfile.open(Path(DATA) / "fsl-clips.tar") as tar:
        tar.extractall(tmp_path, filter="data")
    sign.demo(tmp_path / "demo", 1, features=True)
    with np.load(tmp_path / "fsl-clips/clip_10.npz") as real, np.load(next(tmp_path.rglob("clip_00000.npz"))) as made:
        assert made.files == real.files
        assert {key: made[key].dtype.kind for key in made} == {key: real[key].dtype.kind for key in real}
        assert {key: made[key].shape[1:] for key in made} == {key: real[key].shape[1:] for key in real}
        ours, theirs = (json.loads(str(clip["meta"])) for clip in (made, real))
        assert {**ours, "video": ""} == {**theirs, "video": ""}


def signers_of(folder):
    """The signer of each clip, from its meta."""
    signers = []
    for path in sorted(folder.glob("*.npz")):
        with np.load(path) as clip:
            signers.append(int(re.findall(r"signer (\d+)", json.loads(str(clip["meta"]))["video"])[0]))
    return np.array(signers)


def test_val_signers_never_train_every_gloss_comes_equally_often_and_signers_differ(clips, packed):
    train, val = (signers_of(clips / name) for name in ("train", "val"))
    assert set(train).isdisjoint(val)
    assert (len(set(train)), len(set(val))) == (24, 6)
    assert packed.splits == {"train": 240, "val": 60, "test": 0}
    assert packed.card.counts == {"gloss": [24] * GLOSSES, "category": [120, 120]}
    first = packed.arrays["label"][packed.ids("train")[:GLOSSES], 0]
    assert sorted(first) == list(range(GLOSSES)), "every gloss is there from the first"
    assert packed.options["categories"] == ["greeting", "survival"]
    assert packed.classes[:4] == ["greeting 1a", "survival 1a", "greeting 1b", "survival 1b"]
    frames = packed.lengths("x", np.arange(len(packed)))
    assert 24 <= frames.min() < 30
    assert 42 < frames.max() <= 48
    own = frames[packed.ids("train")]
    assert np.mean([own[train == one].std() for one in set(train)]) < 0.6 * frames.std(), "a signer has a pace"
    rises = {one: np.zeros(2) for one in set(train)}
    for i, one in zip(packed.ids("train"), train, strict=True):
        rises[one] += np.nanstd(normalised(packed.sample(int(i)))[:, 15:17, 1], 0)
    left = sum(moved[0] > 1.2 * moved[1] for moved in rises.values())
    assert 1 <= left <= 8 < len(rises) - left, "a few are left-handed"


def test_the_notebook_can_be_run_again(tmp_path, monkeypatch):
    """It plants a damaged clip, which must not keep the next demo from replacing its own."""
    source = (Path(__file__).parent.parent / "notebooks/src/sign/1_data.py").read_text()
    (plant,) = (cell for cell in source.split("# %%") if "sign.demo(" in cell)
    monkeypatch.chdir(tmp_path)
    for count in (8, 6):
        exec(plant, {"RAW": None, "COUNT": count, "GLOSSES": 2})
        report = nb.validate(sign, "data/sign", progress=False)
        assert [row.rule for row in report.rows] == ["the array must be readable", "the clip of a row must exist"]
        assert report.clips == count + 1


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


def normalised(sample):
    """Points (T, 78, 2) about the shoulders, in their width; NaN where not seen."""
    points, seen = sample["x"].reshape(-1, 78, 2), sample["mask"]
    shoulders = points[seen[:, 11:13].all(1), 11:13]
    width = np.linalg.norm(shoulders[:, 0] - shoulders[:, 1], axis=1).mean()
    return np.where(seen[..., None], (points - shoulders.mean((0, 1))) / width, np.nan)


def mean_frame(sample):
    """The mean place of each point where it is seen, and how often it is."""
    points = normalised(sample)
    with np.errstate(invalid="ignore"):
        mean = np.nansum(points, 0) / np.isfinite(points).sum(0)
    return np.concatenate([np.nan_to_num(mean).ravel(), sample["mask"].mean(0)])


def moments(sample, count=12):
    """Hands and arms at so many moments from when the first hand rises to when the last one falls; where a point is not
    seen, as it was before."""
    points = normalised(sample)[:, [*range(11, 17), *range(LEFT.start, RIGHT.stop)]].reshape(len(sample["x"]), -1)
    for t in range(1, len(points)):
        points[t] = np.where(np.isnan(points[t]), points[t - 1], points[t])
    points = np.nan_to_num(points, nan=2.0)
    high = points[:, [9, 11]].min(1)  # the higher wrist's y
    raised = np.flatnonzero(high < (high.min() + high.max()) / 2)
    return points[np.linspace(raised[0], raised[-1], count).round().astype(int)].ravel()


def linear(packed, features_of, strength):
    """(gloss, category) accuracy on the signers held out, of ridge regression on standardised features."""
    (x, labels), (asked, truth) = (
        (np.array([features_of(packed.sample(int(i))) for i in ids]), packed.arrays["label"][ids])
        for ids in (packed.ids("train"), packed.ids("val"))
    )
    mean, spread = x.mean(0), x.std(0) + 1e-6
    a, b = (np.c_[(values - mean) / spread, np.ones(len(values))] for values in (x, asked))
    found = []
    for k in (0, 1):
        targets = np.eye(labels[:, k].max() + 1)[labels[:, k]]
        weights = np.linalg.solve(a.T @ a + strength * np.eye(a.shape[1]), a.T @ targets)
        found.append(((b @ weights).argmax(1) == truth[:, k]).mean())
    return found


@pytest.mark.parametrize("strength", [1, 1000])
def test_a_linear_model_on_the_mean_frame_cannot_name_half_of_the_glosses(packed, strength):
    gloss, category = linear(packed, mean_frame, strength)
    assert gloss < 0.5
    assert category > 0.9, "the category is where the hands are: a model that cannot tell it proves nothing"


def test_the_order_of_postures_tells_the_glosses_apart(packed):
    assert linear(packed, moments, 100)[0] > 0.75


@pytest.mark.full
def test_the_advised_plan_passes_three_quarters(tmp_path):
    source = sign.demo(tmp_path / "raw", 600, glosses=12, categories=2)
    pack = sign.pack(source, progress=False)
    plan = nb.advise(sign, pack, measure=False).plan
    run = nb.fit(sign, pack, plan, tmp_path / "run", receipt=False, progress=False)
    assert nb.evaluate(run, pack, split="val")["gloss_accuracy"] > 0.75


def test_what_is_not_seen_is_zero_and_hands_are_seen_whole_or_not_at_all(packed):
    hidden = dict.fromkeys(("left", "right", "face", "frame", "idle"), 0)
    for i in range(len(packed)):
        points, seen = packed.sample(i)["x"].reshape(-1, 78, 2), packed.sample(i)["mask"]
        assert (points[~seen] == 0).all()
        assert ((points[seen] > 0) & (points[seen] < 1)).all()
        for name, hand in zip(("left", "right"), HANDS, strict=True):
            found = seen[:, hand].sum(1)
            assert np.isin(found, (0, 21)).all()
            hidden[name] += (found == 0).any()
            hidden["idle"] += (found == 0).all()
        hidden["face"] += (~seen[:, FACE].any(1) & seen[:, POSE].any(1)).any()
        hidden["frame"] += (~seen.any(1)).any()
    assert all(times > 20 for name, times in hidden.items() if name != "face"), hidden
    assert hidden["face"] > 5
