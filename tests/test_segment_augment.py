"""Augmentation of pictures and their labels: against versions that go pixel by pixel, and against torch's own."""

import math
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from nbtools.data import Draws
from nbtools.tasks.segment import augment
from nbtools.tasks.segment.augment import GREY, OUTSIDE, Crop
from nbtools.tasks.segment.plans import Plan

HEIGHT, WIDTH = 20, 26
ALL: dict[str, Any] = {"crop": 32, "scale_low": 0.25, "scale_high": 2.0, "flip": 0.5, "jitter": 0.4}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def raw_batch(count=4, channels=3, size=(HEIGHT, WIDTH), seed=0):
    torch.manual_seed(seed)
    return {
        "image": torch.randint(0, 256, (count, *size, channels), dtype=torch.uint8),
        "label": torch.randint(0, 5, (count, *size), dtype=torch.uint8),
        "distance": torch.randint(0, 256, (count, *size), dtype=torch.uint8),
        "id": torch.arange(count),
    }


def crop_of(*rows: tuple[float, float, float, bool]) -> Crop:
    scale, top, left, mirrored = zip(*rows, strict=True)
    return Crop(torch.tensor(scale), torch.tensor(top), torch.tensor(left), torch.tensor(mirrored))


def cropped(raw, crop, size, pyramid=True):
    """(image, label) of given crops."""
    picture = tuple(raw["image"].shape[1:3])
    rows, columns = augment.axes(crop, picture, size)
    image = augment.resampled(raw["image"], crop.scale, rows, columns, pyramid)
    return augment.bounded(image, rows, columns), augment.picked(raw["label"], rows, columns)


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


# -- resampling


CROPS = [
    (1.0, 3, 5, False),
    (1.71, 11, 2, True),
    (1.83, 0, 0, False),
    (0.93, -2, -1, False),
    (0.61, -4, -3, True),
    (0.57, -5, -4, False),
    (0.49, -9, -7, True),
    (0.27, -11, -8, False),
]


@pytest.mark.parametrize("size", [(16, 19), (HEIGHT, WIDTH)])
@pytest.mark.parametrize("shape", [(HEIGHT, WIDTH), (21, 27)])
@pytest.mark.parametrize("pyramid", [True, False])
def test_crops_are_what_going_pixel_by_pixel_finds(size, shape, pyramid):
    raw, crop = raw_batch(len(CROPS), 4, shape), crop_of(*CROPS)
    image, label = cropped(raw, crop, size, pyramid)
    for b in range(len(CROPS)):
        slow, ids = slowly(raw["image"], raw["label"], crop, b, size, pyramid)
        torch.testing.assert_close(image[b], slow, atol=0.05, rtol=0)
        assert torch.equal(label[b], ids)


def test_zoomed_to_twice_the_size_a_picture_is_torchs_own():
    raw = raw_batch(1)
    image, label = cropped(raw, crop_of((2.0, 6, 8, False)), (16, 20))
    whole = F.interpolate(raw["image"].permute(0, 3, 1, 2).float(), scale_factor=2, mode="bilinear")
    torch.testing.assert_close(image, whole[:, :, 6:22, 8:28], atol=0.02, rtol=0)
    assert torch.equal(label, raw["label"].repeat_interleave(2, 1).repeat_interleave(2, 2)[:, 6:22, 8:28])


@pytest.mark.parametrize("parts", [2, 4])
def test_down_to_a_quarter_of_the_size_every_pixel_of_a_picture_counts(parts):
    raw, scale = raw_batch(1, size=(32 * parts, 32 * parts)), 1 / parts
    found = augment.augmented(raw, Plan(crop=32, scale_low=scale, scale_high=scale), Draws(0, 0, raw["id"]))
    means = F.avg_pool2d(raw["image"].permute(0, 3, 1, 2).float(), parts)
    torch.testing.assert_close(found["image"], means, atol=0.02, rtol=0)


def test_the_mirror_image_of_a_whole_picture_is_its_columns_backwards():
    raw = raw_batch()
    found = augment.augmented(raw, Plan(flip=1.0), Draws(0, 0, raw["id"]))
    torch.testing.assert_close(found["image"], augment.floats(raw["image"]).flip(3), atol=0.02, rtol=0)
    assert torch.equal(found["label"], raw["label"].flip(2))
    assert torch.equal(found["distance"], raw["distance"].flip(2).float())


def test_outside_of_the_picture_is_grey_and_ignored_and_far_from_any_boundary():
    raw = raw_batch(8)
    found = augment.augmented(raw, Plan(crop=64), Draws(0, 0, raw["id"]))
    outside = found["label"] == OUTSIDE
    assert outside.flatten(1).sum(1).tolist() == [64 * 64 - HEIGHT * WIDTH] * 8
    assert (found["image"].movedim(1, 3)[outside] == GREY).all()
    assert (found["distance"][outside] == OUTSIDE).all()
    for b in range(8):
        torch.testing.assert_close(
            found["image"][b].movedim(0, 2)[~outside[b]], raw["image"][b].flatten(0, 1).float(), atol=0.02, rtol=0
        )


def test_distances_grow_and_shrink_with_the_zoom_and_beyond_their_end_stay_there():
    ramp = torch.arange(0, 60, 4, dtype=torch.uint8).repeat(1, 15, 1)
    ramp[:, :, -1] = OUTSIDE
    raw = {"image": torch.zeros(1, 15, 15, 3, dtype=torch.uint8), "distance": ramp, "id": torch.zeros(1).long()}
    for scale in (2.0, 0.5):
        plan = Plan(scale_low=scale, scale_high=scale, crop=32)
        found = augment.augmented(raw, plan, Draws(0, 0, raw["id"]))["distance"]
        assert set(found.unique().tolist()) <= {*(scale * d for d in range(0, 60, 4)), OUTSIDE}
        assert float(found[found < OUTSIDE].max()) == pytest.approx(scale * 52, abs=4)


# -- labels


def test_class_ids_can_only_vanish_and_none_appears_between_two():
    raw = raw_batch(16)
    raw["label"] = torch.where(raw["label"] > 2, 200, 7).to(torch.uint8)
    found = augment.augmented(raw, Plan(**ALL), Draws(0, 3, raw["id"]))["label"]
    assert set(found.unique().tolist()) == {7, 200, OUTSIDE}


def test_pictures_and_labels_stay_in_register():
    """Red is 50 times the class: away from boundaries it still is, whatever was done to both."""
    raw = raw_batch(32, size=(48, 60))
    raw["label"] = torch.randint(0, 5, (32, 3, 3)).repeat_interleave(16, 1).repeat_interleave(20, 2).to(torch.uint8)
    raw["image"][..., 0] = raw["label"] * 50
    found = augment.augmented(raw, Plan(**{**ALL, "jitter": 0.0}), Draws(0, 0, raw["id"]))
    label, red = found["label"].float(), found["image"][:, 0]
    around = [f(F.pad(label, (1, 1, 1, 1), value=OUTSIDE)[:, None], 3, 1) for f in (F.max_pool2d, smallest)]
    inner = (around[0] == around[1])[:, 0] & (label != OUTSIDE)
    assert inner.float().mean() > 0.2
    torch.testing.assert_close(red[inner], label[inner] * 50, atol=0.05, rtol=0)


def smallest(x, *window):
    return -F.max_pool2d(-x, *window)


# -- where crops lie


@pytest.mark.parametrize(("scale", "side"), [(1.0, 32), (2.0, 32), (1.37, 64), (0.5, 64), (1.0, 64), (0.25, 200)])
def test_a_crop_lies_in_the_picture_or_around_all_of_it_and_anywhere_there(scale, side):
    plan = Plan(crop=side, scale_low=scale, scale_high=scale)
    crop = augment.placed((40, 60), (side, side), plan, Draws(0, 0, torch.arange(4000)))
    for origin, length in ((crop.top, 40), (crop.left, 60)):
        room = scale * length - side
        least, most = (0, math.floor(room)) if room >= 0 else (math.ceil(room), 0)
        assert (origin == origin.round()).all()
        assert (float(origin.min()), float(origin.max())) == (least, most)
        assert len(origin.unique()) == most - least + 1
        assert float(origin.mean()) == pytest.approx((least + most) / 2, abs=0.05 * (most - least) + 1e-6)


def test_zooms_are_drawn_evenly_between_their_bounds():
    crop = augment.placed((40, 60), (40, 60), Plan(scale_low=0.25, scale_high=2.0), Draws(0, 0, torch.arange(4000)))
    assert 0.25 <= float(crop.scale.min()) < 0.26
    assert 1.99 < float(crop.scale.max()) <= 2.0
    assert float((crop.scale < 1).float().mean()) == pytest.approx(0.75 / 1.75, abs=0.02)


@pytest.mark.parametrize("flip", [0.0, 0.3, 1.0])
def test_mirror_images_are_as_frequent_as_asked(flip):
    crop = augment.placed((40, 60), (40, 60), Plan(flip=flip), Draws(0, 0, torch.arange(4000)))
    assert float(crop.mirrored.float().mean()) == pytest.approx(flip, abs=0.03)


# -- colours


def test_colours_change_as_brightness_contrast_and_saturation_one_after_the_other_do():
    raw = raw_batch(3, channels=4)
    image = augment.floats(raw["image"]) / 4 + 96  # nothing to cut off
    found = augment.recoloured(image.clone(), Draws(0, 0, raw["id"]), 0.2)
    again = Draws(0, 0, raw["id"])
    light, contrast, saturation = (again.uniform(0.8, 1.2) for _ in range(3))
    for b in range(3):
        lit = image[b, :3] * light[b]
        steep = (lit - 127.5) * contrast[b] + 127.5
        grey = steep.mean(0)
        torch.testing.assert_close(found[b, :3], grey + (steep - grey) * saturation[b], atol=1e-2, rtol=1e-5)
        assert torch.equal(found[b, 3], image[b, 3])


def test_jitter_stays_within_the_range_of_pixels_and_differs_from_picture_to_picture():
    raw = raw_batch(8)
    raw["image"][:] = raw["image"][:1]
    found = augment.augmented(raw, Plan(jitter=0.9), Draws(0, 0, raw["id"]))["image"]
    assert (float(found.min()), float(found.max())) == (0, 255)
    assert len({round(float(picture.mean()), 3) for picture in found}) == 8


# -- reproducible, and nothing where nothing is asked


@pytest.mark.parametrize("knobs", [ALL, {"flip": 0.5}, {"jitter": 0.4}, {"scale_high": 1.5}])
def test_what_a_picture_becomes_does_not_depend_on_its_batch(knobs):
    raw, plan = raw_batch(9), Plan(**knobs)
    together = augment.augmented(raw, plan, Draws(1, 2, raw["id"]))
    for b in (0, 5):
        part = {name: tensor[b : b + 1] for name, tensor in raw.items()}
        alone = augment.augmented(part, plan, Draws(1, 2, part["id"]))
        assert all(torch.equal(alone[name][0], together[name][b]) for name in ("label", "distance"))
        torch.testing.assert_close(alone["image"][0], together["image"][b], atol=1e-3, rtol=0)


def test_seed_epoch_and_sample_decide_and_nothing_else_does():
    raw, plan = raw_batch(4), Plan(**ALL)
    found = [
        augment.augmented(raw, plan, Draws(seed, epoch, raw["id"]))["image"]
        for seed, epoch in ((0, 0), (0, 0), (0, 1), (1, 0))
    ]
    assert torch.equal(found[0], found[1])
    assert not any(torch.equal(found[0][b], other[b]) for other in found[2:] for b in range(4))


def test_with_every_knob_off_nothing_is_drawn_and_nothing_is_resampled():
    raw, draws = raw_batch(4, channels=4), Draws(0, 0, torch.arange(4))
    found = augment.augmented(raw, Plan(), draws)
    assert torch.equal(found["image"], raw["image"].permute(0, 3, 1, 2).float())
    assert found["label"] is raw["label"]
    assert found["distance"] is raw["distance"]
    assert draws.count == 0


def test_what_came_is_never_changed():
    raw = raw_batch(4)
    before = {name: tensor.clone() for name, tensor in raw.items()}
    for plan in (Plan(), Plan(jitter=0.4), Plan(**ALL)):
        augment.augmented(raw, plan, Draws(0, 0, raw["id"]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in raw.items())
