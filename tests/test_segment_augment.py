"""Augmentation of images and their labels: against versions that go pixel by pixel, and against torch's own."""

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from nbtools.data import Draws
from nbtools.tasks.segment import Plan, augment
from nbtools.tasks.segment.augment import GREY, OUTSIDE, Crop

HEIGHT, WIDTH = 20, 26
ALL: dict[str, Any] = {"crop": 32, "scale_low": 0.25, "scale_high": 2.0, "flip": 0.5, "jitter": 0.4}
pytestmark = pytest.mark.usefixtures("one_thread")


def raw_batch(count=4, channels=3, size=(HEIGHT, WIDTH), seed=0):
    torch.manual_seed(seed)
    return {
        "image": torch.randint(0, 256, (count, *size, channels), dtype=torch.uint8),
        "label": torch.randint(0, 5, (count, *size), dtype=torch.uint8),
        "distance": torch.randint(0, 256, (count, *size), dtype=torch.uint8),
        "id": torch.arange(count),
    }


def augmented(raw, seed=0, epoch=0, **settings):
    return augment.augment(raw, Plan(**settings), Draws(seed, epoch, raw["id"]))


# Resampling


CROPS = [
    *((1.0, 3, 5, False), (1.71, 11, 2, True), (1.83, 0, 0, False), (0.93, -2, -1, False), (0.61, -4, -3, True)),
    *((0.57, -5, -4, False), (0.49, -9, -7, True), (0.27, -11, -8, False)),
]


def slowly(image, label, crop, b, size, pyramid):
    """Crop b pixel by pixel: (image (C, h, w), label (h, w))."""
    scale, mirrored = float(crop.scale[b]), bool(crop.mirrored[b])
    half = pyramid and scale < 0.5
    source, shrunk = image[b].permute(2, 0, 1).float(), 2 if half else 1
    if half:
        source = F.avg_pool2d(source, 2)
    height, width = source.shape[1:]
    found = torch.full((source.shape[0], *size), GREY)
    ids = torch.full(size, OUTSIDE, dtype=torch.uint8)
    for i in range(size[0]):
        for j in range(size[1]):
            y = (i + 0.5 + float(crop.top[b])) / scale
            x = ((size[1] - 1 - j if mirrored else j) + 0.5 + float(crop.left[b])) / scale
            if not (0 <= y < label.shape[1] and 0 <= x < label.shape[2]):
                continue
            ids[i, j] = label[b, math.floor(y), math.floor(x)]
            v, u = (min(max(p / shrunk - 0.5, 0), n - 1) for p, n in ((y, height), (x, width)))
            (y0, fy), (x0, fx) = ((math.floor(p), p - math.floor(p)) for p in (v, u))
            y1, x1 = min(y0 + 1, height - 1), min(x0 + 1, width - 1)
            above = source[:, y0, x0] * (1 - fx) + source[:, y0, x1] * fx
            below = source[:, y1, x0] * (1 - fx) + source[:, y1, x1] * fx
            found[:, i, j] = above * (1 - fy) + below * fy
    return found, ids


@pytest.mark.parametrize(
    ("size", "shape", "pyramid"), [((16, 19), (20, 26), True), ((20, 26), (21, 27), True), ((16, 19), (21, 27), False)]
)
def test_crops_are_what_going_pixel_by_pixel_finds(monkeypatch, size, shape, pyramid):
    raw = raw_batch(len(CROPS), 4, shape)
    crop = Crop(*map(torch.tensor, zip(*CROPS, strict=True)))
    rows, columns = augment.axes(crop, shape, size)
    image = augment.resample(raw["image"], crop.scale, rows, columns, pyramid)
    image, label = augment.grey_outside(image, rows, columns), augment.resample_nearest(raw["label"], rows, columns)
    for b in range(len(CROPS)):
        slow, ids = slowly(raw["image"], raw["label"], crop, b, size, pyramid)
        torch.testing.assert_close(image[b], slow, atol=0.05, rtol=0)
        assert torch.equal(label[b], ids)


@pytest.mark.parametrize("parts", [2, 4])
def test_down_to_a_quarter_of_the_size_every_pixel_of_an_image_counts(parts):
    raw, scale = raw_batch(1, size=(32 * parts, 32 * parts)), 1 / parts
    found = augmented(raw, crop=32, scale_low=scale, scale_high=scale)
    means = F.avg_pool2d(raw["image"].permute(0, 3, 1, 2).float(), parts)
    torch.testing.assert_close(found["image"], means, atol=0.02, rtol=0)


def test_the_mirror_image_of_a_whole_image_is_its_columns_backwards():
    raw = raw_batch()
    found = augmented(raw, flip=1.0)
    torch.testing.assert_close(found["image"], raw["image"].permute(0, 3, 1, 2).float().flip(3), atol=0.02, rtol=0)
    assert torch.equal(found["label"], raw["label"].flip(2))
    assert torch.equal(found["distance"], raw["distance"].flip(2).float())


def test_outside_the_image_is_grey_and_ignored_and_far_from_any_boundary():
    raw = raw_batch(8)
    found = augmented(raw, crop=64)
    outside = found["label"] == OUTSIDE
    assert outside.flatten(1).sum(1).tolist() == [64 * 64 - HEIGHT * WIDTH] * 8
    assert (found["image"].movedim(1, 3)[outside] == GREY).all()
    assert (found["distance"][outside] == OUTSIDE).all()
    for b in range(8):
        inside = found["image"][b].movedim(0, 2)[~outside[b]]
        torch.testing.assert_close(inside, raw["image"][b].flatten(0, 1).float(), atol=0.02, rtol=0)


@pytest.mark.parametrize("scale", [2.0, 0.5])
def test_distances_scale_with_the_zoom_and_those_at_the_limit_stay_there(scale):
    ramp = torch.arange(0, 60, 4, dtype=torch.uint8).repeat(1, 15, 1)
    ramp[:, :, -1] = OUTSIDE
    raw = {"image": torch.zeros(1, 15, 15, 3, dtype=torch.uint8), "distance": ramp, "id": torch.zeros(1).long()}
    found = augmented(raw, scale_low=scale, scale_high=scale, crop=32)["distance"]
    assert set(found.unique().tolist()) <= {*(scale * d for d in range(0, 60, 4)), OUTSIDE}
    assert float(found[found < OUTSIDE].max()) == pytest.approx(scale * 52, abs=4)


# Labels


def test_class_ids_can_only_vanish_and_none_appears_between_two():
    raw = raw_batch(16)
    raw["label"] = torch.where(raw["label"] > 2, 200, 7).to(torch.uint8)
    assert set(augmented(raw, epoch=3, **ALL)["label"].unique().tolist()) == {7, 200, OUTSIDE}


def test_images_and_labels_stay_aligned():
    """Red is 50 times the class: away from boundaries it still is, whatever was done to both."""
    raw = raw_batch(32, size=(48, 60))
    raw["label"] = torch.randint(0, 5, (32, 3, 3)).repeat_interleave(16, 1).repeat_interleave(20, 2).to(torch.uint8)
    raw["image"][..., 0] = raw["label"] * 50
    found = augmented(raw, **{**ALL, "jitter": 0.0})
    label, red = found["label"].float(), found["image"][:, 0]
    padded = F.pad(label, (1, 1, 1, 1), value=OUTSIDE)[:, None]
    inner = (F.max_pool2d(padded, 3, 1) == -F.max_pool2d(-padded, 3, 1))[:, 0] & (label != OUTSIDE)
    assert inner.float().mean() > 0.2
    torch.testing.assert_close(red[inner], label[inner] * 50, atol=0.05, rtol=0)


# Random numbers


@pytest.mark.parametrize(("scale", "side"), [(1.0, 32), (2.0, 32), (1.37, 64), (0.5, 64), (1.0, 64), (0.25, 200)])
def test_a_crop_lies_in_the_image_or_around_all_of_it_and_anywhere_there(scale, side):
    plan = Plan(crop=side, scale_low=scale, scale_high=scale)
    crop = augment.draw_crops((40, 60), (side, side), plan, Draws(0, 0, torch.arange(4000)))
    for origin, length in ((crop.top, 40), (crop.left, 60)):
        room = scale * length - side
        least, most = (0, math.floor(room)) if room >= 0 else (math.ceil(room), 0)
        assert (origin == origin.round()).all()
        assert (float(origin.min()), float(origin.max())) == (least, most)
        assert len(origin.unique()) == most - least + 1
        assert float(origin.mean()) == pytest.approx((least + most) / 2, abs=0.05 * (most - least) + 1e-6)


def test_zooms_are_uniform_and_mirror_images_as_frequent_as_asked():
    plan = Plan(scale_low=0.25, scale_high=2.0, flip=0.3)
    crop = augment.draw_crops((40, 60), (40, 60), plan, Draws(0, 0, torch.arange(4000)))
    assert 0.25 <= float(crop.scale.min()) < 0.26
    assert 1.99 < float(crop.scale.max()) <= 2.0
    assert float((crop.scale < 1).float().mean()) == pytest.approx(0.75 / 1.75, abs=0.02)
    assert float(crop.mirrored.float().mean()) == pytest.approx(0.3, abs=0.03)


def test_colours_change_as_brightness_contrast_and_saturation_one_after_the_other_do():
    raw = raw_batch(3, channels=4)
    raw["image"] = raw["image"] // 4 + 96  # nothing to clip
    found, draws = augmented(raw, jitter=0.2)["image"], Draws(0, 0, raw["id"])
    light, contrast, saturation = (draws.uniform(0.8, 1.2) for _ in range(3))
    for b, image in enumerate(raw["image"].permute(0, 3, 1, 2).float()):
        steep = (image[:3] * light[b] - 127.5) * contrast[b] + 127.5
        grey = steep.mean(0)
        torch.testing.assert_close(found[b, :3], grey + (steep - grey) * saturation[b], atol=1e-2, rtol=1e-5)
        assert torch.equal(found[b, 3], image[3])


def test_jitter_stays_within_the_range_of_pixels_and_differs_from_image_to_image():
    raw = raw_batch(8)
    raw["image"][:] = raw["image"][:1]
    found = augmented(raw, jitter=0.9)["image"]
    assert (float(found.min()), float(found.max())) == (0, 255)
    assert len({round(float(image.mean()), 3) for image in found}) == 8


@pytest.mark.parametrize("settings", [ALL, {"flip": 0.5}, {"jitter": 0.4}, {"scale_high": 1.5}])
def test_seed_epoch_and_sample_decide_what_an_image_becomes_and_its_batch_does_not(settings):
    raw = raw_batch(9)
    before = {name: tensor.clone() for name, tensor in raw.items()}
    together = augmented(raw, 1, 2, **settings)
    for b in (0, 5):
        alone = augmented({name: tensor[b : b + 1] for name, tensor in raw.items()}, 1, 2, **settings)
        assert all(torch.equal(alone[name][0], together[name][b]) for name in ("label", "distance"))
        torch.testing.assert_close(alone["image"][0], together["image"][b], atol=1e-3, rtol=0)
    assert torch.equal(augmented(raw, 1, 2, **settings)["image"], together["image"])
    for seed, epoch in ((1, 3), (2, 2)):
        assert not torch.equal(augmented(raw, seed, epoch, **settings)["image"], together["image"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in raw.items()), "the raw batch is unchanged"


def test_with_every_setting_off_nothing_is_drawn_and_nothing_is_resampled():
    raw, draws = raw_batch(4, channels=4), Draws(0, 0, torch.arange(4))
    found = augment.augment(raw, Plan(), draws)
    assert torch.equal(found["image"], raw["image"].permute(0, 3, 1, 2).float())
    assert found["label"] is raw["label"]
    assert found["distance"] is raw["distance"]
    assert draws.count == 0
