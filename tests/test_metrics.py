"""Metrics against slow obvious versions; sums of any batches against one big batch."""

import pytest
import torch

from nbtools.tasks.common.metrics import accuracy, whole_accuracy
from nbtools.train import Sums


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
