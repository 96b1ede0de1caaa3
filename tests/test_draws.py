"""Draws: a sample's random numbers are its own, whatever batch it comes in; and they are random."""

import math

import numpy as np
import pytest
import torch

from nbtools.data import Draws, Keys
from nbtools.data.draws import MASK, mix, mixed

IDS = torch.arange(1000)


def sequence(draws: Draws) -> list[torch.Tensor]:
    """What an augmentation might take, one after the other."""
    return [draws.uniform(), draws.uniform(-1, 1, (2, 3)), draws.normal((4,)), draws.chance(0.3), draws.uniform()]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_numbers_of_a_sample_do_not_depend_on_batch_size_or_order_nor_touch_the_global_state(size):
    before = torch.get_rng_state()
    whole = sequence(Draws(5, 2, IDS))
    assert torch.equal(torch.get_rng_state(), before)
    assert [part.shape[1:] for part in whole] == [(), (2, 3), (4,), (), ()]
    order = torch.randperm(1000, generator=torch.Generator().manual_seed(0))
    for ids in (*order.split(size)[:20], IDS[:0]):
        for part, all_of_it in zip(sequence(Draws(5, 2, ids)), whole, strict=True):
            assert torch.equal(part, all_of_it[ids])


def test_every_call_takes_new_numbers():
    draws = Draws(5, 2, IDS)
    first, second = draws.uniform(shape=(3,)), draws.uniform(shape=(3,))
    assert (first[:, :, None] == second[:, None, :]).float().mean() < 0.001
    assert torch.equal(Draws(5, 2, IDS).uniform(shape=(6,)), torch.cat([first, second], 1))


def test_several_ranges_at_once_and_a_block_of_numbers_give_those_of_single_calls():
    """Also across the ends of a block, where the next is hashed, and where a caller goes back."""
    ranges = [(0, 1), (-0.3, 0.3), (24, 200), (0, 2 * math.pi), (0.25, 2)] * 9
    one, many = Draws(5, 2, IDS), Draws(5, 2, IDS)
    singly = [one.uniform(low, high) for low, high in ranges]
    assert torch.equal(torch.cat([many.uniforms(*ranges[:7]), many.uniforms(*ranges[7:])], 1), torch.stack(singly, 1))
    one.count = many.count = 2
    assert Draws(5, 2, IDS).bits((0,)).shape == (len(IDS), 0)
    assert torch.equal(many.bits((3,)), torch.stack([one.bits() for _ in range(3)], 1))
    assert torch.equal(many.bits((3, 30))[:, 1], Draws(5, 2, IDS).bits((100,))[:, 35:65])


def test_keys_that_are_looked_up_give_the_numbers_of_hashed_ones_and_lie_where_they_lay():
    known, ids = Keys(1000, torch.device("cpu")), IDS.flip(0)[:7]
    there = known.of(5, 2).data_ptr()
    for seed, epoch in ((5, 2), (5, 3), (6, 3), (5, 2)):
        looked_up, hashed = Draws(seed, epoch, ids, known), Draws(seed, epoch, ids)
        assert torch.equal(looked_up.bits((40,)), hashed.bits((40,)))
    assert known.of(5, 4).data_ptr() == there


@pytest.mark.parametrize("p", [0.0, 1e-9, 0.1, 1 / 3, 0.5, 0.7, 1 - 1e-7, 1.0])
def test_chance_is_where_a_uniform_number_is_less(p):
    one, other = (Draws(3, 0, torch.arange(100_000)) for _ in range(2))
    assert torch.equal(one.chance(p), other.uniform() < p)


def chi_square(values: np.ndarray, bins: int) -> float:
    """Of values in [0, 1) in equal bins, as standard deviations from its mean (bins - 1, variance 2 (bins - 1))."""
    counts = np.bincount((values * bins).astype(int), minlength=bins)
    expected = len(values) / bins
    return (((counts - expected) ** 2 / expected).sum() - (bins - 1)) / math.sqrt(2 * (bins - 1))


def test_uniform_numbers_are_uniform_over_samples_draws_and_epochs():
    over_samples = Draws(0, 0, torch.arange(200_000)).uniform()
    over_draws = Draws(0, 0, torch.arange(1)).uniform(shape=(200_000,))[0]
    over_epochs = torch.cat([Draws(0, e, IDS).uniform() for e in range(100)])
    for values in (over_samples.double().numpy(), over_draws.double().numpy(), over_epochs.double().numpy()):
        assert 0 <= values.min() < values.max() < 1
        assert abs(chi_square(values, 256)) < 4
        assert abs(chi_square(values * 256 % 1, 256)) < 4  # the next 8 bits


def test_neighbours_are_independent():
    """Samples, draws, epochs and seeds next to each other: correlations within 4 / √n of 0, and pairs fill a square."""
    numbers = Draws(1, 1, torch.arange(100_001)).uniform(shape=(2,)).double()
    other = {place: Draws(*place, IDS).uniform(shape=(100,)).double().flatten() for place in [(0, 1), (1, 0), (1, 1)]}
    pairs = [(numbers[:-1, 0], numbers[1:, 0]), (numbers[:, 0], numbers[:, 1])]
    for a, b in [*pairs, (other[1, 0], other[1, 1]), (other[0, 1], other[1, 1]), (other[0, 1], other[1, 0])]:
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 4 / math.sqrt(len(a))
        square = ((a * 16).floor() * 16 + (b * 16).floor()) / 256
        assert abs(chi_square(square.numpy(), 256)) < 4


def test_normal_numbers_have_the_moments_of_a_normal_and_chance_its_probability():
    values = Draws(2, 0, torch.arange(50_000)).normal((4,)).double().flatten()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96)):
        assert abs(float((values**power).mean()) - moment) < 4 * math.sqrt(variance / len(values))
    draws = Draws(3, 0, torch.arange(100_000))
    assert float(draws.chance(0.3).float().mean()) == pytest.approx(0.3, abs=4 * math.sqrt(0.21 / 100_000))
    assert draws.chance(1.0).all() > draws.chance(0.0).any()


@pytest.mark.parametrize("high", [1.0, 2.0, 3.0, 10.0, 26.0, 36.0, 1000.0])
def test_a_range_from_zero_never_reaches_its_end(high):
    class Largest(Draws):
        def bits(self, shape=()):
            return torch.full((1,), MASK)

    assert float(Largest(0, 0, torch.zeros(1, dtype=torch.int64)).uniform(0, high)) < high


def test_the_generator_is_pcgs_and_the_one_that_runs_were_made_with():
    """Frozen: another generator would change every resumed run and every pinned result. pcg_hash (Jarzynski & Olano
    2020) of 0 is 129708002."""
    assert mix(torch.tensor(0)) == mixed(0) == 129708002
    assert len(mix(torch.arange(300_000)).unique()) == 300_000
    draws = Draws(3, 1, torch.tensor([0, 1, 1_000_000]))
    assert draws.bits((2,)).tolist() == [[358559445, 4138466694], [2779273659, 1012548349], [2688244461, 3513015907]]
    assert draws.uniform().tolist() == [0.5000614523887634, 0.376944363117218, 0.6421011686325073]
    assert draws.uniform(-1, 1, (2,))[0].tolist() == [-0.8139041662216187, 0.9814735651016235]
    assert draws.normal().tolist() == pytest.approx([0.83038205, 0.03075605, -0.07408998], abs=1e-6)
    assert mixed(3, 1) == 2781714507


def test_numbers_are_float32_whatever_torchs_default_is():
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        assert Draws(0, 0, torch.arange(3)).uniform(-1, 1, (2,)).dtype == torch.float32
    finally:
        torch.set_default_dtype(before)
