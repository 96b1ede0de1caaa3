"""Splits: the same on every machine, stratified, by content; what is wrong with them is said; folds."""

import os
import pickle
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from acting import refused
from packs import pack_of

from nbtools.data import SPLITS, Pack, Survey, build_pack
from nbtools.errors import PackError


def drawn(place, count=50, *, order=None, classes="", **more) -> Pack:
    numbers = order or range(count)
    labels = [{"y": classes[i % len(classes)]} if classes else {} for i in numbers]
    samples = [{"x": np.full(2, i, np.float32), **label} for i, label in zip(numbers, labels, strict=True)]
    more = {"split": None, "val": 0.1, "test": 0.1, "progress": True, "named": "y" if classes else None, **more}
    return pack_of(samples, place / f"{len(os.listdir(place))}", **more)


def rows(made: Pack, split: str) -> set[float]:
    return {float(made.sample(int(i))["x"][0]) for i in made.ids(split)}


def at_least_6(entry, sample) -> None:
    if sample["x"][0] < 6:
        raise PackError("small", "x must be 6 or more", "leave it out")


LAST_TESTS = ["train"] * 8 + ["test"]
GOLDEN = {"0.png": "train", "1.png": "test", "3.png": "val", "6.png": "test", "句.png": "train"}


def test_a_name_has_the_same_split_on_every_machine_and_whatever_comes_with_it(place):
    made = [
        pack_of({n: {"x": np.array(i)} for i, n in enumerate(names)}, place / names[-1], split=None, val=0.1, test=0.1)
        for names in (list(GOLDEN), [*GOLDEN, *(f"{i:03}_x.png" for i in range(500))])
    ]
    for pack in made:
        assert [SPLITS[i] for i in pack.split[:5]] == list(GOLDEN.values())
    assert [made[1].splits[split] / 505 for split in SPLITS] == pytest.approx([0.8, 0.1, 0.1], abs=0.04)


def test_copies_are_in_the_split_of_the_first_whatever_their_labels(place):
    rows = {f"{i}{copy}": {"x": np.array(i), "label": np.array(copy)} for copy in (0, 1) for i in range(100, 200)}
    alone, both = (
        pack_of(dict([*rows.items()][:n]), place / f"{n}", split=None, val=0.1, test=0.1) for n in (100, 200)
    )
    assert both.split.tolist() == alone.split.tolist() * 2


def test_whole_numbers_are_exact_counts_a_share_stands_next_to_one_and_all_may_be_test_or_train(place):
    assert drawn(place, val=7, test=11).splits == {"train": 32, "val": 7, "test": 11}
    assert drawn(place, val=5, test=0.1).splits == {"train": 40, "val": 5, "test": 5}
    with pytest.raises(PackError, match="val=30 and test=20 leave none of 50 samples to train on; lower them"):
        drawn(place, val=30, test=20)
    assert drawn(place, test=1.0, split=["train", "val"] * 25).splits == {"train": 0, "val": 0, "test": 50}
    assert drawn(place, test=1).splits["test"] == 1, "a whole number is a count"
    whole = drawn(place, val=0, test=0)
    assert whole.splits == {"train": 50, "val": 0, "test": 0}
    with pytest.raises(PackError, match=r"is a pack, whose splits cannot change; pass the raw source"):
        build_pack(whole.folder, "plain", {}, lambda *_: Survey([]), lambda *_: {}, test=1.0)


@pytest.mark.parametrize("count", [1, 2, 3, 15])
@pytest.mark.parametrize("survey", [{}, {"exact": True}, {"classes": "ab", "exact": True}])
def test_a_share_gives_at_least_one_sample_and_never_all(place, count, survey):
    splits = drawn(place, count, val=0.01, test=0, **survey).splits
    assert splits == {"train": count - (count > 1), "val": int(count > 1), "test": 0}
    splits = drawn(place, count, val=0, test=0.98, **survey).splits
    assert splits["train"] >= 1
    assert splits["test"] >= (count > 1)


@pytest.mark.parametrize("shares", [(-0.1, 0.1), (0.5, 0.5), (0.1, 1.5), ("x", 0.1), (0.1, float("nan")), (1.0, 0.0)])
def test_shares_that_leave_no_training_data_are_refused(place, shares):
    with pytest.raises(PackError, match=r"whole numbers of samples, or shares ≥ 0 and below 1, .* test=1\.0"):
        drawn(place, val=shares[0], test=shares[1])


def test_the_sources_own_splits_are_kept_and_unknown_ones_refused(place):
    made = drawn(place, 48, split=[*SPLITS] * 16)
    assert [SPLITS[k] for k in made.split] == [*SPLITS] * 16
    made = drawn(place, split=["test"] * 10 + ["train"] * 40, val=25)
    assert made.splits == {"train": 15, "val": 25, "test": 10}, "val is taken from train where there is none"
    refused(PackError, "split must be one of train, val, test, got 'dev'", made.ids, "dev")


def test_a_table_in_another_order_has_its_rows_in_the_same_splits(place):
    first, other = drawn(place, 200, exact=True), drawn(place, 200, exact=True, order=[*range(199, -1, -1)])
    assert first.splits == other.splits == {"train": 160, "val": 20, "test": 20}
    assert all(rows(first, split) == rows(other, split) for split in SPLITS)
    less = drawn(place, exact=True, order=[i for i in range(200) if i != 77])
    assert len(rows(less, "test") - rows(first, "test")) <= 1, "a dropped row moves no more than the border"
    assert rows(drawn(place, 200, exact=True, seed=1), "test") != rows(first, "test")
    few = [drawn(place, order=order, exact=True) for order in ([*range(6)] * 50, [5, 4, 3, 2, 1, 0] * 50)]
    kinds, other = ([Counter(made.sample(i)["x"][0] for i in made.ids(split)) for split in SPLITS] for made in few)
    assert (kinds, {*map(len, kinds)}) == (other, {6}), "rows of a few kinds are divided as others are"


def test_each_class_is_divided_by_the_shares(place):
    made = drawn(place, 200, val=0.1, test=0.2, classes="a" * 13 + "b" * 6 + "c", exact=True)
    assert made.splits == {"train": 140, "val": 20, "test": 40}
    counts = {split: Counter(made.classes[made.arrays["y"][i]] for i in made.ids(split)) for split in SPLITS}
    assert counts["test"] == {"a": 26, "b": 12, "c": 2}
    assert counts["val"] == {"a": 13, "b": 6, "c": 1}
    few = drawn(place, 40, classes="abcdefgh", exact=True)
    assert few.splits == {"train": 32, "val": 4, "test": 4}, "exact also where a class has too few for a whole sample"
    assert not [line for line in few.remarks if "train" in line]


def test_a_group_stays_in_one_split_and_in_one_fold(place):
    surveys: Any = ({}, {"exact": True}, {"classes": "ab", "exact": True})
    for seed, survey in enumerate(surveys * 3):
        giant = drawn(place, 60, groups=["A"] * 50 + ["B"] * 5 + ["C"] * 5, seed=seed, **survey)
        assert giant.splits["train"] >= 50, "the group that holds more than half trains"
        made = drawn(place, 120, val=0.2, test=0.2, groups=[f"patient {i // 6}" for i in range(120)], **survey)
        assert min(made.splits.values()) >= 12
        for pack in (made, *made.folds(3)):
            of = [pack.split[i] for i in range(0, 120, 6)]
            assert np.array_equal(np.repeat(of, 6), pack.split)


SOURCES: dict[str, tuple[int, dict[str, Any]]] = {  # what is said → samples and how they are divided
    "1 class without a train sample (b): not learnable": (9, {"classes": "aaaaaaaab", "split": LAST_TESTS}),
    "the val split is empty, so nothing chooses the best checkpoint or stops early": (1, {}),
    "1 class without a val sample (b): not evaluated": (30, {"classes": "a" * 29 + "b", "val": 1}),
    "26 classes for 30 samples: is the target a class at all?": (30, {"classes": "abcdefghijklmnopqrstuvwxyz"}),
    "all samples are of one class (a): there is nothing to tell apart": (20, {"classes": "a"}),
    "6 of 8 samples of the train split cannot be used, see pack.bad": (9, {"check": at_least_6, "split": LAST_TESTS}),
    "2 of 22 samples cannot be used, see pack.bad": (20, {"bad": [("a.png", "0 bytes", "whole", "copy it")] * 2}),
    "1 group in several of the splits given (2)": (9, {"split": LAST_TESTS, "groups": [*"012"] * 3, "exact": True}),
    "": (40, {"classes": "ab", "exact": True}),
}


@pytest.mark.parametrize("remark", SOURCES)
def test_what_is_wrong_with_the_splits_is_said_once_and_kept(place, capsys, remark):
    count, how = SOURCES[remark]
    made = drawn(place, count, **how)
    assert remark in (made.remarks or [""])
    assert not remark or capsys.readouterr().err.count(remark) == 1
    assert remark in str(made)
    assert Pack.open(made.folder).remarks == made.remarks


def test_folds_validate_each_sample_once_share_the_arrays_and_keep_the_test_split(place):
    made = drawn(place, 63, test=0.2, classes="aab", exact=True)
    folds = made.folds(5)
    assert len({fold.card.digest for fold in (made, *folds)}) == 6
    val = np.concatenate([fold.ids("val") for fold in folds])
    assert sorted(val) == sorted({*range(63)} - {*made.ids("test").tolist()})
    for fold in folds:
        assert np.array_equal(fold.ids("test"), made.ids("test"))
        assert fold.splits == {"train": 50 - fold.splits["val"], "val": 10, "test": 13}
        counts = Counter(made.classes[fold.arrays["y"][i]] for i in fold.ids("val"))
        assert counts == {"a": pytest.approx(7, abs=1), "b": pytest.approx(3, abs=1)}
        assert fold.folder == made.folder
        assert fold.raw[3]["x"].tolist() == made.sample(3)["x"].tolist()
        again = pickle.loads(pickle.dumps(replace(fold, raw=None)))
        assert (again.card, again.split.tolist()) == (fold.card, fold.split.tolist()), "as nb.launch passes it on"
    assert [fold.card for fold in made.folds(5)] == [fold.card for fold in folds]
    with pytest.raises(PackError, match="a fold shares the files of the pack it was divided from; keep that one"):
        folds[0].keep(place / "kept")
    assert made.folds(5, seed=1)[0].ids("val").tolist() != folds[0].ids("val").tolist()
    for k in (1, 51, 2.5):
        refused(PackError, f"folds must be 2 to 50, the number of samples or groups, got {k}", made.folds, k)
