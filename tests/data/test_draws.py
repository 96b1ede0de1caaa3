"""Draws: a sample's random numbers are its own, whatever batch it comes in, and stay the same."""

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


def test_the_numbers_are_those_that_runs_were_made_with():
    """Frozen: another generator would change every resumed run and every pinned result."""
    draws = Draws(3, 1, torch.tensor([0, 1, 1_000_000]))
    draws.uniform(shape=(2,))
    assert draws.uniform().tolist() == [0.5000614523887634, 0.376944363117218, 0.6421011686325073]
    assert draws.uniform(-1, 1, (2,))[0].tolist() == [-0.8139041662216187, 0.9814735651016235]
    assert draws.normal().tolist() == pytest.approx([0.83038205, 0.03075605, -0.07408998], abs=1e-6)
