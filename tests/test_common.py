"""What the tasks share: text metrics against slow obvious versions, CTC, source files, demo folders, figures."""

import builtins
import random
import sys

import pytest
import torch

from nbtools.errors import MissingExtra
from nbtools.tasks.common.metrics import accuracy, edits, text_metrics, whole_accuracy


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
