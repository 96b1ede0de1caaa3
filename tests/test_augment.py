"""Augmentation by name: against versions that go image by image, and what decides an image's random numbers."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from nbtools.data import Draws
from nbtools.errors import TrainError
from nbtools.train.augment import IMAGES, augment, strengths

CLASSES = 5


def batch_of(count: int = 6, channels: int = 3, size: tuple[int, int] = (12, 16)) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    y = torch.arange(count) % CLASSES
    return {"image": torch.rand(count, channels, *size), "y": y, "id": torch.arange(count) + 40}


def augmented(batch: dict[str, torch.Tensor], names: Any, seed: int = 0, epoch: int = 0) -> dict[str, torch.Tensor]:
    return augment(batch, ["image"], ["image"], CLASSES, Draws(seed, epoch, batch["id"]), names)


@pytest.mark.parametrize("names", [*([name] for name in IMAGES), list(IMAGES)], ids=str)
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


def test_two_images_of_a_sample_are_augmented_alike():
    batch = batch_of()
    batch["other"] = batch["image"].clone()
    found = augment(batch, ["image", "other"], ["image", "other"], CLASSES, Draws(0, 0, batch["id"]), list(IMAGES))
    assert torch.equal(found["image"], found["other"])
    assert torch.equal(found["image"], augmented(batch, list(IMAGES))["image"])


def test_a_crop_is_a_shift_by_whole_pixels_of_the_image_mirrored_at_its_edges():
    batch = batch_of(200)
    found, shifts = augmented(batch, {"crop": 0.25})["image"].numpy(), set()
    for image, made in zip(batch["image"].numpy(), found, strict=True):
        wide = np.pad(image, ((0, 0), (4, 4), (4, 4)), mode="reflect")
        places = [(y, x) for y in range(9) for x in range(9) if np.array_equal(wide[:, y : y + 12, x : x + 16], made)]
        assert len(places) == 1
        shifts |= set(places)
    assert {y for y, _ in shifts} == set(range(1, 8)), "a quarter of 12 pixels either way"
    assert {x for _, x in shifts} == set(range(9))


def test_every_second_image_is_mirrored():
    batch = batch_of(4000, 1, (1, 2))
    found = augmented(batch, ["flip"])["image"]
    mirrored = (found == batch["image"].flip(3)).flatten(1).all(1)
    assert (mirrored | (found == batch["image"]).flatten(1).all(1)).all()
    assert float(mirrored.float().mean()) == pytest.approx(0.5, abs=0.03)


def test_a_rotation_is_pillows_about_the_centre():
    ramp = torch.arange(24.0)[:, None] * 4 + torch.arange(32.0) * 2
    batch = {"image": ramp.expand(4, 1, 24, 32) / 255, "id": torch.arange(4)}
    draws = Draws(0, 0, batch["id"])
    angles = draws.uniform(-20, 20)
    found = augmented(batch, {"rotate": 20})["image"]
    for angle, made in zip(angles.tolist(), found[:, 0], strict=True):
        image = Image.fromarray(ramp.numpy()).rotate(angle, Image.Resampling.BILINEAR)
        inside = (slice(8, 16), slice(10, 22))  # whatever the angle; edges are filled differently
        torch.testing.assert_close(made[inside] * 255, torch.from_numpy(np.array(image))[inside], atol=0.6, rtol=0)


def test_colours_change_as_contrast_brightness_and_saturation_one_after_the_other_do():
    batch = batch_of(4)
    draws = Draws(0, 0, batch["id"])
    light, contrast, saturation = (draws.uniform(0.6, 1.4) for _ in range(3))
    for b, made in enumerate(augmented(batch, {"colour": 0.4})["image"]):
        image = batch["image"][b]
        steep = ((image - image.mean()) * contrast[b] + image.mean()) * light[b]
        torch.testing.assert_close(made, steep.mean(0) + (steep - steep.mean(0)) * saturation[b])


def test_what_is_erased_is_one_rectangle_of_a_size_within_the_limits_in_every_second_image():
    batch, shares = batch_of(400, 1, (40, 40)), []
    found = augmented(batch, {"erase": 0.3})["image"]
    for image, made in zip(batch["image"][:, 0], found[:, 0], strict=True):
        gone = image != made
        if gone.any():
            rows, columns = gone.any(1).nonzero().flatten(), gone.any(0).nonzero().flatten()
            assert gone[rows.min() : rows.max() + 1, columns.min() : columns.max() + 1].all()
            assert torch.unique(made[gone]) == pytest.approx(float(image.mean()))
            shares.append(float(gone.float().mean()))
    assert len(shares) == pytest.approx(200, abs=40)
    assert min(shares) < 0.04
    assert 0.25 < max(shares) < 0.35


def test_mixup_mixes_images_and_targets_alike_and_the_order_of_a_batch_is_all_the_same():
    batch = batch_of(8)
    found = augmented(batch, ["mixup"])
    assert found["y"].shape == (8, CLASSES)
    torch.testing.assert_close(found["y"].sum(1), torch.ones(8))
    for b in range(8):
        own = int(batch["y"][b])
        share = 1 - float(found["y"][b, own]) if float(found["y"][b, own]) < 1 else 0.0
        assert share <= 0.5
        likely = [o for o in range(8) if o != b and (share == 0 or float(found["y"][b, int(batch["y"][o])]) > 0)]
        mixes = [(1 - share) * batch["image"][b] + share * batch["image"][o] for o in likely]
        assert share == 0 or any(torch.allclose(found["image"][b], mix, atol=1e-5) for mix in mixes)
    order = torch.tensor([3, 1, 0, 2, 7, 5, 6, 4])
    again = augmented({name: tensor[order] for name, tensor in batch.items()}, ["mixup"])
    for name in ("image", "y"):
        assert torch.equal(again[name], found[name][order])
    values = augment({**batch, "y": batch["y"].float()}, ["image"], ["image"], 0, Draws(0, 0, batch["id"]), ["mixup"])
    assert values["y"].shape == (8,)
    assert torch.equal(values["image"], found["image"])


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["filp"], r"augment has no 'filp'; did you mean flip\?"),
        (["zoom"], r"augment has no 'zoom'; there are crop, flip, rotate, colour, erase, mixup"),
        ({"rotate": -3}, r"the strength of rotate must be at least 0, got -3"),
        ({"rotate": math.nan}, "must be at least 0, got nan"),
    ],
)
def test_a_wrong_name_or_strength_is_answered_in_a_sentence(names, said):
    with pytest.raises(TrainError, match=said):
        strengths(names)
