"""Metrics against slow obvious versions; sums of any batches against one big batch."""

import builtins
import random
import sys

import pytest
import torch

from nbtools.errors import MissingExtra
from nbtools.train import Sums, metrics, text_metrics
from nbtools.train.metrics import accuracy, edits, whole_accuracy


def slow_distance(a: str, b: str) -> int:
    """Levenshtein's recurrence, row by row."""
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        previous, row = row, [i]
        for j, y in enumerate(b, 1):
            row.append(min(previous[j] + 1, row[-1] + 1, previous[j - 1] + (x != y)))
    return row[-1]


def test_edits_are_as_few_as_the_recurrence_says_and_fit_the_lengths():
    rng = random.Random(0)
    for _ in range(2000):
        guess, truth = ("".join(rng.choices("abc", k=rng.randrange(9))) for _ in range(2))
        substitutions, deletions, insertions = edits(guess, truth)
        assert substitutions + deletions + insertions == slow_distance(truth, guess)
        assert deletions - insertions == len(truth) - len(guess)


@pytest.mark.parametrize(
    ("guess", "truth", "found"),
    [
        ("abc", "abc", (0, 0, 0)),
        ("abd", "abc", (1, 0, 0)),
        ("ab", "abc", (0, 1, 0)),
        ("xabc", "abc", (0, 0, 1)),
        ("", "abc", (0, 3, 0)),
        ("abc", "", (0, 0, 3)),
        ("", "", (0, 0, 0)),
        ([1, 2, 300], (1, 2), (0, 0, 1)),
    ],
)
def test_deletions_are_what_the_guess_lacks_and_insertions_what_it_has_too_much(guess, truth, found):
    assert edits(guess, truth) == found


def test_cer_ar_and_cr_by_their_definitions_over_all_characters():
    guesses, truths = ["abd", "ab", "xabc", "abc"], ["abc", "abc", "abc", "abc"]  # S, D, I, right: 12 characters
    found = text_metrics(guesses, truths)
    assert found == {"cer": (3, 12), "ar": (9, 12), "cr": (10, 12), "whole_accuracy": (1, 4)}


def test_ar_may_be_negative_and_cr_is_not():
    found = text_metrics(["aaaaaa"], ["b"])
    assert found["cer"] == (6, 1)
    assert found["ar"] == (-5, 1)
    assert found["cr"] == (0, 1)


def test_a_list_and_a_tuple_of_the_same_classes_are_whole():
    assert text_metrics([[1, 2]], [(1, 2)])["whole_accuracy"] == (1, 1)


def test_as_many_guesses_as_targets_are_required():
    with pytest.raises(ValueError, match="argument 2"):
        text_metrics(["a"], ["a", "b"])


def test_a_missing_rapidfuzz_is_named_with_the_command_that_installs_it(monkeypatch):
    real = builtins.__import__

    def without(name, *rest):
        if name.startswith("rapidfuzz"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    for name in [n for n in sys.modules if n.startswith("rapidfuzz")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingExtra, match=r"pip install rapidfuzz, or nbtools\[text\]"):
        edits("a", "b")


def test_accuracies_count_positions_and_rows():
    generator = torch.Generator().manual_seed(0)
    predicted = torch.randint(3, (50, 4), generator=generator)
    target = torch.randint(3, (50, 4), generator=generator)
    target[:9] = predicted[:9]
    rows = [(p, t) for p, t in zip(predicted.tolist(), target.tolist(), strict=True)]
    right, count = accuracy(predicted, target)
    assert (int(right), count) == (sum(a == b for p, t in rows for a, b in zip(p, t, strict=True)), 200)
    whole, samples = whole_accuracy(predicted, target)
    assert (int(whole), samples) == (sum(p == t for p, t in rows), 50)
    assert int(whole) >= 9


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_sums_over_batches_of_any_size_equal_one_big_batch_exactly(size):
    generator = torch.Generator().manual_seed(1)
    predicted = torch.randint(4, (1000, 4), generator=generator)
    target = torch.randint(4, (1000, 4), generator=generator)
    sums = Sums()
    for p, t in zip(predicted.split(size), target.split(size), strict=True):
        sums.add({"accuracy": accuracy(p, t), "whole": whole_accuracy(p, t)})
    right, count = accuracy(predicted, target)
    whole, rows = whole_accuracy(predicted, target)
    assert sums.read() == {"accuracy": int(right) / count, "whole": int(whole) / rows}


def test_a_mean_of_batch_means_would_not_do():
    """7 of 8 right in a full batch, 0 of 1 in a ragged last one: 7/9, and not (7/8 + 0) / 2."""
    sums = Sums()
    sums.add({"accuracy": (7, 8)})
    sums.add({"accuracy": (torch.tensor(0), torch.tensor(1))})
    assert sums.read() == {"accuracy": 7 / 9}


def test_nothing_counted_is_zero_and_not_nan():
    assert Sums().read() == {}
    sums = Sums()
    sums.add({"miou": (torch.tensor(0.0), 0)})
    assert sums.read() == {"miou": 0.0}


@pytest.mark.parametrize("size", [1, 3, 10])
def test_a_mean_over_classes_is_of_exact_sums_and_of_those_that_were_there(size):
    right, all_of = torch.randint(5, (10, 4)), torch.randint(5, 9, (10, 4))
    right[:, 2] = all_of[:, 2] = 0  # a class that nobody has
    sums = Sums()
    for n, d in zip(right.split(size), all_of.split(size), strict=True):
        sums.add({"accuracy": (int(n.sum()), int(d.sum())), "miou": (n.sum(0), d.sum(0))})
    exact = [int(right[:, k].sum()) / int(all_of[:, k].sum()) for k in (0, 1, 3)]
    assert sums.read() == {"accuracy": int(right.sum()) / int(all_of.sum()), "miou": sum(exact) / 3}


def test_classes_of_which_none_was_there_are_zero_and_not_nan():
    sums = Sums()
    sums.add({"miou": (torch.zeros(3), torch.zeros(3))})
    assert sums.read() == {"miou": 0.0}


def test_sums_stay_exact_where_float32_would_stop_counting():
    sums = Sums()
    sums.add({"accuracy": (2**24, 2**24)})
    for _ in range(10):
        sums.add({"accuracy": (torch.tensor(0), 1)})
    assert sums.read()["accuracy"] == 2**24 / (2**24 + 10)


def test_reading_is_one_transfer_whatever_the_number_of_metrics(monkeypatch):
    sums = Sums()
    sums.add({str(i): (torch.tensor(i), 100) for i in range(20)})
    transfers = []
    real = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: transfers.append(1) or real(self))
    monkeypatch.setattr(torch.Tensor, "item", lambda self: pytest.fail("a transfer a metric"))
    assert sums.read() == {str(i): i / 100 for i in range(20)}
    assert len(transfers) == 1
    assert metrics.Sums("cpu").dtype == torch.float64
