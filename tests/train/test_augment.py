"""A sample's random numbers are its own, whatever batch it comes in; augmentation beside versions image by image."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from acting import refused

from nbtools.data import Card, Column, Draws, Keys, places
from nbtools.errors import TrainError
from nbtools.train.defaults import STRENGTHS, augment, strengths

IDS = torch.arange(1000)


def sequence(draws: Draws) -> list[torch.Tensor]:
    several = draws.uniforms((0, 1), (-2, 3))
    return [draws.uniform(), draws.uniform(-1, 1, (2, 3)), several, draws.normal((40,)), draws.chance(0.3)]


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_the_numbers_of_a_sample_do_not_depend_on_batch_size_or_order_nor_touch_the_global_state(size):
    before = torch.get_rng_state()
    whole = sequence(Draws(5, 2, IDS))
    assert torch.equal(torch.get_rng_state(), before)
    assert [part.shape[1:] for part in whole] == [(), (2, 3), (2,), (40,), ()]
    assert places(700, IDS.device).data_ptr() == places(1000, IDS.device).data_ptr(), "else each length stays"
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


CARD = Card("dataset", list("abcde"), {"kind": "classes", "inputs": ["image", "other"]}, {}, {})


def batch_of(count: int = 6, channels: int = 3, size: tuple[int, int] = (12, 16)) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    ids = torch.arange(count)
    return {"image": torch.rand(count, channels, *size), "y": ids % 5, "id": ids + 40}


def augmented(batch: Any, names: Any, seed: int = 0, epoch: int = 0, card: Card = CARD) -> dict[str, torch.Tensor]:
    images = [name for name in ("image", "other") if name in batch]
    return augment(batch, card, images, Draws(seed, epoch, batch["id"]), names)


@pytest.mark.parametrize("names", [*([name] for name in STRENGTHS), [*STRENGTHS]], ids=str)
@pytest.mark.parametrize("channels", [1, 3])
def test_seed_epoch_and_sample_decide_what_an_image_becomes_and_its_batch_does_not(names, channels):
    batch = batch_of(9, channels)
    before, together = batch["image"].clone(), augmented(batch, names, 1, 2)["image"]
    for b in (0, 5):
        alone = augmented({name: tensor[b : b + 1] for name, tensor in batch.items()}, names, 1, 2)["image"]
        torch.testing.assert_close(alone[0], together[b], atol=1e-5, rtol=0)
    assert torch.equal(batch["image"], before), "the raw batch is left alone"
    for other in (augmented(batch, names, 2, 2), augmented(batch, names, 1, 3)):
        assert not torch.equal(other["image"], together)
    batch["other"] = batch["image"].clone()
    two = augmented(batch, names, 1, 2)
    assert torch.equal(two["image"], two["other"]), "two images of a sample are augmented alike"
    assert torch.equal(two["image"], together)


def test_a_crop_is_a_shift_by_whole_pixels_of_the_image_mirrored_at_its_edges():
    batch = batch_of(200)
    cropped, shifts = augmented(batch, {"crop": 0.25})["image"].numpy(), set()
    for image, made in zip(batch["image"].numpy(), cropped, strict=True):
        wide = np.pad(image, ((0, 0), (4, 4), (4, 4)), mode="reflect")
        places = [(y, x) for y in range(9) for x in range(9) if np.array_equal(wide[:, y : y + 12, x : x + 16], made)]
        assert len(places) == 1
        shifts |= set(places)
    assert {y for y, _ in shifts} == set(range(1, 8)), "a quarter of 12 pixels either way"
    assert {x for _, x in shifts} == set(range(9))


def test_points_and_boxes_stay_on_the_pixels_that_they_mark_when_the_image_is_mirrored():
    """A pixel's left edge becomes its right one: point (x, y) of W = 16 pixels is at 16 - x."""
    batch = {"image": torch.zeros(40, 1, 12, 16), "id": torch.arange(40)}
    rows, columns = torch.randint(12, (40,)), torch.randint(16, (40,))
    batch["image"][torch.arange(40), 0, rows, columns] = 1
    batch["y"] = torch.stack([columns + 0.5, rows + 0.5], 1)[:, None]  # (40, 1, 2), the middle of that pixel
    box = torch.stack([columns, rows, columns + 1, rows + 1], 1).float()
    batch |= {"boxes": torch.stack([box, torch.zeros_like(box)], 1), "boxes_length": torch.ones(40)}  # padded to 2
    columns_of = {"y": Column("fixed", "<f4", (1, 2)), "boxes": Column("ragged", "<f4", (4,))}
    options = {"points": {"y": ["image", "points"], "boxes": ["image", "boxes"]}, "kind": "values", "inputs": ["image"]}
    made = augmented(batch, ["flip"], card=Card("dataset", [], options, columns_of, {}))
    assert 5 < (made["y"] != batch["y"]).flatten(1).any(1).sum() < 35
    for image, point, (first, padding) in zip(made["image"][:, 0], made["y"], made["boxes"], strict=True):
        [(row, column)] = image.nonzero().tolist()
        assert point.tolist() == [[column + 0.5, row + 0.5]]
        assert first.tolist() == [column, row, column + 1, row + 1]
        assert not padding.any()


def test_colours_change_as_contrast_brightness_and_saturation_one_after_the_other_do():
    batch = batch_of(4)
    light, contrast, saturation = Draws(0, 0, batch["id"]).uniforms(*3 * [(0.6, 1.4)]).t()
    for b, made in enumerate(augmented(batch, {"colour": 0.4})["image"]):
        image = batch["image"][b]
        steep = ((image - image.mean()) * contrast[b] + image.mean()) * light[b]
        torch.testing.assert_close(made, steep.mean(0) + (steep - steep.mean(0)) * saturation[b])


def test_a_wrong_name_or_strength_is_answered_in_a_sentence():
    cases: Any = (
        (["filp"], r"augment has no 'filp'; did you mean flip\?"),
        (["zoom"], r"augment has no 'zoom'; it has crop, flip, colour"),
        ({"crop": -3}, r"the strength of crop must be at least 0, got -3"),
        ({"crop": math.nan}, "must be at least 0, got nan"),
        *[(given, r"must be names of crop, .*; transforms go into the Dataset") for given in (True, [math.sin])],
    )
    for names, said in cases:
        refused(TrainError, said, strengths, names)
