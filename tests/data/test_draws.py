"""Draws: a sample's random numbers are its own, whatever batch it comes in; and they are random."""

import math

import numpy as np
import pytest
import torch

from nbtools.data import Draws, Keys

IDS = torch.arange(1000)


def sequence(draws: Draws) -> list[torch.Tensor]:
    """What an augmentation might take, one after the other."""
    several = draws.uniforms((0, 1), (-2, 3))
    return [draws.uniform(), draws.uniform(-1, 1, (2, 3)), several, draws.normal((40,)), draws.chance(0.3)]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_numbers_of_a_sample_do_not_depend_on_batch_size_or_order_nor_touch_the_global_state(size):
    before = torch.get_rng_state()
    whole = sequence(Draws(5, 2, IDS))
    assert torch.equal(torch.get_rng_state(), before)
    assert [part.shape[1:] for part in whole] == [(), (2, 3), (2,), (40,), ()]
    order, keys = torch.randperm(1000, generator=torch.Generator().manual_seed(0)), Keys(1000, IDS.device)
    for ids in (*order.split(size)[:20], IDS[:0]):
        for draws in (Draws(5, 2, ids), Draws(5, 2, ids, keys)):
            for part, all_of_it in zip(sequence(draws), whole, strict=True):
                assert torch.equal(part, all_of_it[ids])


def deviation(values: torch.Tensor, bins: int = 256) -> float:
    """Chi square of values in [0, 1) in equal bins, as standard deviations from its mean."""
    counts, expected = np.bincount((values.double().numpy() * bins).astype(int), minlength=bins), len(values) / bins
    return abs((((counts - expected) ** 2 / expected).sum() - (bins - 1)) / math.sqrt(2 * (bins - 1)))


def test_numbers_are_uniform_and_neighbours_independent():
    """Samples, draws, epochs and seeds next to each other: correlations within 4 / √n of 0, and pairs fill a square."""
    numbers = Draws(1, 1, torch.arange(100_001)).uniform(shape=(2,)).double()
    other = {place: Draws(*place, IDS).uniform(shape=(100,)).double().flatten() for place in [(0, 1), (1, 0), (1, 1)]}
    pairs = [(numbers[:-1, 0], numbers[1:, 0]), (numbers[:, 0], numbers[:, 1])]
    for a, b in [*pairs, (other[1, 0], other[1, 1]), (other[0, 1], other[1, 1]), (other[0, 1], other[1, 0])]:
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 4 / math.sqrt(len(a))
        assert deviation(((a * 16).floor() * 16 + (b * 16).floor()) / 256) < 4
        assert deviation(a) < 4 > deviation(a * 256 % 1)  # also the next 8 bits


def test_the_numbers_are_those_that_runs_were_made_with():
    """Frozen: another generator would change every resumed run and every pinned result."""
    draws = Draws(3, 1, torch.tensor([0, 1, 1_000_000]))
    draws.uniform(shape=(2,))
    assert draws.uniform().tolist() == [0.5000614523887634, 0.376944363117218, 0.6421011686325073]
    assert draws.uniform(-1, 1, (2,))[0].tolist() == [-0.8139041662216187, 0.9814735651016235]
    assert draws.normal().tolist() == pytest.approx([0.83038205, 0.03075605, -0.07408998], abs=1e-6)
    values, chances = Draws(2, 0, torch.arange(50_000)).normal((4,)), Draws(3, 0, torch.arange(100_000)).chance(0.3)
    assert (float(values.mean()), float(values.std())) == pytest.approx((0, 1), abs=0.01)
    assert float(chances.float().mean()) == pytest.approx(0.3, abs=0.01)
