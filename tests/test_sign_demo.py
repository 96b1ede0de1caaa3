"""Demo clips: the format of real ones, the same from the same seed, and signs that only their movement tells apart."""

import csv
import itertools
import json
import os
import tarfile
from pathlib import Path

import numpy as np
import pytest

from nbtools.errors import PackError
from nbtools.tasks.sign.acting import detector, motions, signers
from nbtools.tasks.sign.acting.demo import demo, takes
from nbtools.tasks.sign.clips.data import pack as pack_signs
from nbtools.tasks.sign.clips.validate import validate
from nbtools.tasks.sign.landmarks import FACE, HANDS, LEFT, POSE, RIGHT

DATA = os.environ.get("NBTOOLS_REAL_DATA", "")
COUNT, GLOSSES, CATEGORIES = 300, 10, 2


@pytest.fixture(scope="module")
def clips(tmp_path_factory):
    """300 clips of ten glosses in two categories, 60 of them held back."""
    return demo(tmp_path_factory.mktemp("signs"), COUNT, glosses=GLOSSES, categories=CATEGORIES)


@pytest.fixture(scope="module")
def packed(clips, tmp_path_factory):
    return pack_signs(clips, into=tmp_path_factory.mktemp("packed"), progress=False)


def files(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}


def rows(folder, name):
    return list(csv.DictReader((folder / name / "labels.csv").read_text().splitlines()))


def film(gloss, person=0, seed=0, **changes):
    return detector.filmed(signers.signer(person, 0), gloss, (24, 48), np.random.default_rng(seed), **changes)


def family(count=6, seed=0):
    """The six glosses of the first movement of one category."""
    return motions.lexicon(count, 1, seed)


# The files


def test_the_same_seed_gives_the_same_bytes_and_few_clips_are_the_first_of_many(tmp_path):
    few, again, many, other = (
        files(demo(tmp_path / name, count, seed=seed))
        for name, count, seed in (("a", 23, 0), ("b", 23, 0), ("c", 40, 0), ("d", 23, 1))
    )
    assert few == again
    there = {name for name in few if name.endswith(".npz")}
    assert len(there) == 23
    assert all(many[name] == few[name] for name in there)
    assert all(other[name] != few[name] for name in there)


@pytest.mark.parametrize("features", [False, True])
def test_the_validator_has_nothing_to_say_about_a_demo(tmp_path, features):
    folder, key = demo(tmp_path, 24, glosses=4, features=features), "X2048" if features else None
    report = validate(folder, feature_key=key, require_x2048=features, progress=False)
    assert (report.clips, report.labelled, list(report.rows)) == (24, 24, [])


@pytest.mark.real
@pytest.mark.skipif(not DATA, reason="NBTOOLS_REAL_DATA names no folder of real data")
def test_a_clip_has_the_keys_types_and_meta_of_a_real_one(tmp_path):
    with tarfile.open(Path(DATA) / "fsl-clips.tar") as tar:
        tar.extractall(tmp_path, filter="data")
    demo(tmp_path / "demo", 1, features=True)
    with np.load(tmp_path / "fsl-clips/clip_10.npz") as real, np.load(next(tmp_path.rglob("clip_00000.npz"))) as made:
        assert made.files == real.files
        assert {key: made[key].dtype.kind for key in made} == {key: real[key].dtype.kind for key in real}
        assert {key: made[key].shape[1:] for key in made} == {key: real[key].shape[1:] for key in real}
        ours, theirs = (json.loads(str(clip["meta"])) for clip in (made, real))
        assert {**ours, "video": ""} == {**theirs, "video": ""}


def test_arrays_have_the_types_of_the_guide(tmp_path):
    with np.load(demo(tmp_path, 1, features=True) / "train/clip_00000.npz") as clip:
        count = len(clip["X"])
        said = {key: (clip[key].dtype.str, clip[key].shape) for key in clip if key != "meta"}
        assert said == {
            "X": ("<f4", (count, 156)),
            "X2048": ("<f4", (count, 2048)),
            "mask": ("|b1", (count, 78)),
            "timestamps_ms": ("<i8", (count,)),
        }
        assert 24 <= count <= 48
        steps = np.diff(clip["timestamps_ms"])
        assert 26 <= steps.min() < steps.max() <= 40  # 30 frames a second, jittered
        assert json.loads(str(clip["meta"]))["keypoints_total"] == 78


def test_val_signers_never_train_and_every_gloss_does(clips):
    taken = list(takes(COUNT, GLOSSES, 0))
    signing = [{take.signer for take in taken if take.held is held} for held in (False, True)]
    assert signing[0].isdisjoint(signing[1])
    assert [len(rows(clips, name)) for name in ("train", "val")] == [240, 60]
    glosses = [row["gloss"] for row in rows(clips, "train")]
    assert sorted(map(int, set(glosses[:GLOSSES]))) == list(range(GLOSSES))
    assert {glosses.count(gloss) for gloss in glosses} == {24}
    assert [(row["file"], row["gloss"]) for row in rows(clips, "val")] == [
        (f"clip_{take.number:05}", str(take.gloss)) for take in taken if take.held
    ]


def test_a_pack_of_a_demo_knows_names_and_categories(packed):
    assert packed.splits == {"train": 240, "val": 60, "test": 0}
    assert packed.options["categories"] == ["greeting", "survival"]
    assert packed.classes[:4] == ["greeting 1a", "survival 1a", "greeting 1b", "survival 1b"]
    assert packed.options["category_of"] == [0, 1] * 5


def test_a_new_demo_replaces_an_old_one(tmp_path):
    demo(tmp_path, 30)
    assert len(list(demo(tmp_path, 3).rglob("*.npz"))) == 3
    assert len(rows(tmp_path, "val")) == 0


def test_the_notebook_can_be_run_again(tmp_path, monkeypatch):
    """It damages one of the demo's clips, which the next demo must know for its own."""
    source = (Path(__file__).parent.parent / "notebooks/src/sign/1_data.py").read_text()
    (plant,) = (cell for cell in source.split("# %%") if "sign.demo(" in cell)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NBTOOLS_CACHE", str(tmp_path / "cache"))
    for _ in range(2):
        exec(plant, {"RAW": None, "COUNT": 6, "GLOSSES": 2})
        report = validate("data/sign", progress=False)
        assert [row.rule for row in report.rows] == ["the array can be read", "the clip of a row is there"]


@pytest.mark.parametrize("content", [b"", b"PK", b"clip"])
def test_a_clip_that_no_demo_wrote_is_not_lost(tmp_path, content):
    demo(tmp_path, 2)
    (tmp_path / "val/mine.npz").write_bytes(content)
    with pytest.raises(PackError, match=r"mine\.npz was not written by this demo"):
        demo(tmp_path, 2)
    assert (tmp_path / "val/mine.npz").read_bytes() == content
    assert len(list((tmp_path / "train").glob("*.npz"))) == 2


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"count": 0}, "count must be 1 clip or more, got 0"),
        ({"glosses": 3}, "glosses must be 4 to 4,032, of 4 categories, got 3"),
        ({"categories": 11}, "categories must be 1 to 10, got 11"),
        ({"categories": 0}, "categories must be 1 to 10, got 0"),
        ({"frames": (9, 20)}, r"frames must be \(fewest, most\), from 10 to 3,000, got \(9, 20\)"),
        ({"frames": (30, 20)}, r"got \(30, 20\)"),
        ({"seed": -1}, "seed must be 0 or more, got -1"),
    ],
)
def test_what_cannot_be_made_is_said_before_anything_is_written(tmp_path, options, said):
    with pytest.raises(PackError, match=said):
        demo(tmp_path / "new", **{"count": 5, **options})
    assert not (tmp_path / "new").exists()


# What tells glosses apart


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
    """Hands and arms at so many moments, evenly from when the first hand rises to when the last one falls; where a
    point is not seen, as it was before."""
    points = normalised(sample)[:, [*range(11, 17), *range(LEFT.start, RIGHT.stop)]].reshape(len(sample["x"]), -1)
    for t in range(1, len(points)):
        points[t] = np.where(np.isnan(points[t]), points[t - 1], points[t])
    points = np.nan_to_num(points, nan=2.0)
    high = points[:, [9, 11]].min(1)  # the higher wrist's y
    raised = np.flatnonzero(high < (high.min() + high.max()) / 2)
    chosen = np.linspace(raised[0], raised[-1], count).round().astype(int)
    return points[chosen].ravel()


def linear(inputs, labels, asked, strength):
    """Labels of the asked by ridge regression on standardised inputs, as one-hot targets."""
    mean, spread = inputs.mean(0), inputs.std(0) + 1e-6
    a, b = (np.c_[(x - mean) / spread, np.ones(len(x))] for x in (inputs, asked))
    weights = np.linalg.solve(a.T @ a + strength * np.eye(a.shape[1]), a.T @ np.eye(labels.max() + 1)[labels])
    return (b @ weights).argmax(1)


@pytest.fixture(scope="module")
def known(packed):
    """(samples to train on, samples of new signers, labels of both)."""
    parts = [[packed.sample(int(i)) for i in packed.ids(name)] for name in ("train", "val")]
    return *parts, *(np.array([sample["label"] for sample in part]) for part in parts)


@pytest.mark.parametrize("strength", [1, 10, 100, 1000])
def test_a_linear_model_on_the_mean_frame_cannot_name_half_of_the_glosses(known, strength):
    train, val, labels, truth = known
    inputs, asked = (np.array([mean_frame(sample) for sample in part]) for part in (train, val))
    gloss, category = ((linear(inputs, labels[:, k], asked, strength) == truth[:, k]).mean() for k in (0, 1))
    assert gloss < 0.5
    assert category > 0.9, "the category is where the hands are: a model that cannot say it proves nothing"


def test_a_linear_model_on_twelve_moments_names_most_glosses(known):
    train, val, labels, truth = known
    inputs, asked = (np.array([moments(sample) for sample in part]) for part in (train, val))
    assert (linear(inputs, labels[:, 0], asked, 100) == truth[:, 0]).mean() > 0.85


@pytest.mark.parametrize("seed", range(4))
def test_a_family_shows_the_same_postures_each_time_in_another_order(seed):
    time = np.linspace(0, 1, 400)
    sequences = [np.concatenate(gloss.at(time), 1) for gloss in family(seed=seed)]
    postures = sequences[0]
    for sequence in sequences:
        nearest = np.linalg.norm(postures[::10, None] - sequence, axis=2).min(1)
        assert nearest.max() < 0.05, "no posture of the movement is left out"
        assert np.allclose(sequence.mean(0), postures.mean(0), atol=0.06)
        assert (sequence >= postures.min(0) - 1e-9).all(), "and there are no others"
        assert (sequence <= postures.max(0) + 1e-9).all()
    for one, other in itertools.combinations(sequences, 2):
        assert np.abs(one - other).max() > 0.25


def test_each_path_is_nothing_in_the_mean_and_not_its_own_reverse():
    u = (np.arange(10_000) + 0.5) / 10_000
    for name, path in motions.PATHS.items():
        way = np.stack(path(u), 1)
        assert np.abs(way.mean(0)).max() < 0.1, name
        assert np.abs(way - way[::-1]).max() > 1, name
        assert np.abs(way).max() < 1.6, name


def test_glosses_of_a_category_differ_in_movement_and_the_first_stay_the_first():
    many, few = motions.lexicon(105, 10, 3), motions.lexicon(40, 10, 3)
    assert many[:40] == few
    assert len({gloss.name for gloss in many}) == 105
    assert [gloss.category for gloss in many[:12]] == [*range(10), 0, 1]
    ways = {(g.category, g.path, g.hands, g.shapes, g.turn, g.backwards, g.begin) for g in many}
    assert len(ways) == 105


# People and detectors


@pytest.mark.parametrize("scale", [0.93, 1.07])
def test_arms_have_bones_that_keep_their_length(scale):
    wrist = np.random.default_rng(0).uniform(-1.2, 1.2, (500, 3))
    elbow, reached = signers.reached(wrist, scale)
    upper, lower = (scale * bone for bone in signers.ARM)
    assert np.allclose(np.linalg.norm(elbow - [-0.5, 0, 0], axis=1), upper)
    assert np.allclose(np.linalg.norm(reached - elbow, axis=1), lower)
    near = np.linalg.norm(wrist - [-0.5, 0, 0], axis=1) < 1.4
    near &= np.linalg.norm(wrist - [-0.5, 0, 0], axis=1) > 0.3
    assert np.allclose(reached[near], wrist[near])


def test_fingers_keep_their_length_however_they_bend_and_a_fist_is_shorter_than_a_flat_hand():
    rng = np.random.default_rng(0)
    bends = np.concatenate([rng.uniform(0, 1, (50, 5)), np.zeros((1, 5)), np.ones((1, 5))])
    limb = signers.Limb(np.zeros((52, 3)), bends, rng.uniform(-1, 3, 52), rng.uniform(0, 3, 52))
    fingers = signers.opened(limb)[:, 1:].reshape(52, 5, 4, 3)
    assert np.allclose(np.linalg.norm(np.diff(fingers, axis=2), axis=3), signers.BONES)
    tips = np.linalg.norm(fingers[:, 1:, 3], axis=2)
    assert (tips[-1] < 0.75 * tips[-2]).all()


def test_a_left_handed_person_signs_in_mirror_image():
    gloss = next(g for g in motions.lexicon(60, 1, 0) if g.hands == "one")
    people = [signers.signer(n, 0) for n in range(60)]
    sides = {
        person.left_handed: [np.nanstd(signed_by(person, gloss)[:, wrist], 0).sum() for wrist in (15, 16)]
        for person in people
    }
    assert sides[False][1] > 3 * sides[False][0], "a right-handed person's right wrist moves"
    assert sides[True][0] > 3 * sides[True][1]
    assert 2 <= sum(person.left_handed for person in people) <= 15


def signed_by(person, gloss, count=40):
    raised = np.clip(np.minimum(np.arange(count), np.arange(count)[::-1]) / 8, 0, 1)
    return signers.signed(person, gloss, raised, np.linspace(0, 1, count), np.random.default_rng(0))


def test_what_is_not_seen_is_zero_and_hands_are_seen_whole_or_not_at_all(packed):
    hidden = {"left": 0, "right": 0, "face": 0, "frame": 0}
    for i in range(len(packed)):
        sample = packed.sample(i)
        points, seen = sample["x"].reshape(-1, 78, 2), sample["mask"]
        assert (points[~seen] == 0).all()
        assert ((points[seen] > 0) & (points[seen] < 1)).all()
        for name, hand in zip(("left", "right"), HANDS, strict=True):
            found = seen[:, hand].sum(1)
            assert np.isin(found, (0, 21)).all()
            hidden[name] += (found == 0).any()
        hidden["face"] += (~seen[:, FACE].any(1) & seen[:, POSE].any(1)).any()
        hidden["frame"] += (~seen.any(1)).any()
    assert all(times > 20 for times in (hidden["left"], hidden["right"], hidden["frame"])), hidden
    assert hidden["face"] > 5


@pytest.mark.parametrize("left_handed", [False, True])
def test_the_hand_that_does_not_sign_is_often_never_found(left_handed):
    x = np.full((30, 78, 2), 0.5)
    masks = [detector.seen(x, True, left_handed, np.random.default_rng(n)) for n in range(100)]
    never = [np.mean([not mask[:, hand].any() for mask in masks]) for hand in HANDS]
    signing, idle = never if left_handed else never[::-1]
    assert signing < 0.05
    assert 0.25 < idle < 0.55


def test_clips_are_as_long_as_people_are_slow(packed):
    frames = packed.lengths("x", np.arange(len(packed)))
    assert 24 <= frames.min() < 30
    assert 42 < frames.max() <= 48
    spread = [frames[10 * person : 10 * person + 10].std() for person in range(24)]
    assert np.mean(spread) < 0.6 * frames.std(), "a person has a tempo"


def test_features_tell_of_the_frames_and_change_nothing_else():
    gloss = family()[0]
    plain, rich = film(gloss), film(gloss, features=True)
    assert plain.features is None
    assert all(np.array_equal(a, b) for a, b in ((plain.x, rich.x), (plain.mask, rich.mask), (plain.times, rich.times)))
    features, other = rich.features, film(family()[3], seed=1, features=True).features
    assert features is not None
    assert other is not None
    assert features.dtype == np.float32
    assert features.min() == 0
    assert 0.2 < features.mean() < 0.5
    near = np.linalg.norm(np.diff(features, axis=0), axis=1).mean()
    assert near < np.linalg.norm(features[len(features) // 2] - other[len(other) // 2])
