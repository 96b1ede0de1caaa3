"""Batches, and the augmentation of images and their labels: against a version that goes pixel by pixel."""

import math

import pytest
import torch
from torch.nn import functional as F

from nbtools.data import Draws
from nbtools.tasks import segment
from nbtools.tasks.segment import Plan, task

GREY, OUTSIDE = 127.5, 255
CROPPED = {"crop": 32, "scale_low": 0.25, "scale_high": 2.0, "flip": 0.5}
WHOLE = {"scale_low": 0.5, "scale_high": 2.0}


def raw_batch(count=4, channels=3, size=(20, 26)):
    torch.manual_seed(0)
    label, distance = (torch.randint(0, most, (count, *size), dtype=torch.uint8) for most in (5, 256))
    image = torch.randint(0, 256, (count, *size, channels), dtype=torch.uint8)
    return {"image": image, "label": label, "distance": distance, "id": torch.arange(count)}


def slowly(raw, b, scale, rows, columns, pyramid):
    """Crop b at these centres, pixel by pixel: image (C, h, w), label and distance (h, w)."""
    shrunk = 2 if pyramid and scale < 0.5 else 1
    source = F.avg_pool2d(raw["image"][b].permute(2, 0, 1).float(), shrunk)
    height, width = source.shape[1:]
    size = len(rows), len(columns)
    image, label = torch.full((source.shape[0], *size), GREY), torch.full(size, OUTSIDE, dtype=torch.uint8)
    distance = torch.full(size, float(OUTSIDE))
    for i, y in enumerate(rows.tolist()):
        for j, x in enumerate(columns.tolist()):
            if not (0 <= y < raw["label"].shape[1] and 0 <= x < raw["label"].shape[2]):
                continue
            label[i, j] = raw["label"][b, math.floor(y), math.floor(x)]
            far = float(raw["distance"][b, math.floor(y), math.floor(x)])
            distance[i, j] = far if far == OUTSIDE else far * scale
            v, u = (min(max(p / shrunk - 0.5, 0), n - 1) for p, n in ((y, height), (x, width)))
            (y0, fy), (x0, fx) = ((math.floor(p), p - math.floor(p)) for p in (v, u))
            y1, x1 = min(y0 + 1, height - 1), min(x0 + 1, width - 1)
            above = source[:, y0, x0] * (1 - fx) + source[:, y0, x1] * fx
            below = source[:, y1, x0] * (1 - fx) + source[:, y1, x1] * fx
            image[:, i, j] = above * (1 - fy) + below * fy
    return image, label, distance


@pytest.mark.parametrize(("shape", "settings"), [((20, 26), CROPPED), ((21, 27), WHOLE)])
def test_images_labels_and_distances_are_what_going_pixel_by_pixel_gives(shape, settings):
    raw, plan = raw_batch(6, 4, shape), Plan(**settings)
    size = (plan.crop, plan.crop) if plan.crop else shape
    scale, rows, columns = task.crops(shape, size, plan, Draws(0, 0, raw["id"]))
    made = task.augment(raw, plan, Draws(0, 0, raw["id"]))
    for b in range(6):
        image, label, distance = slowly(raw, b, float(scale[b]), rows[b], columns[b], plan.scale_low < 0.5)
        torch.testing.assert_close(made["image"][b], image, atol=0.05, rtol=0)
        torch.testing.assert_close(made["distance"][b].float(), distance)
        assert torch.equal(made["label"][b], label)


@pytest.mark.parametrize(("scale", "side"), [(2.0, 32), (1.37, 64), (0.25, 200)])
def test_a_crop_lies_in_the_image_or_around_all_of_it_and_anywhere_there(scale, side):
    plan = Plan(crop=side, scale_low=scale, scale_high=scale, flip=0.5)
    _, y, x = task.crops((40, 60), (side, side), plan, Draws(0, 0, torch.arange(4000)))
    steps = x.diff(dim=1) * scale
    assert (steps.abs() - 1).abs().max() < 1e-3
    assert float((steps[:, 0] < 0).float().mean()) == pytest.approx(0.5, abs=0.03), "half of them mirrored"
    for centres, length in ((y, 40), (x, 60)):
        origin = (centres.amin(1) * scale - 0.5).round()
        room = scale * length - side
        least, most = (0, math.floor(room)) if room >= 0 else (math.ceil(room), 0)
        assert (float(origin.min()), float(origin.max()), len(origin.unique())) == (least, most, most - least + 1)
        assert float(origin.mean()) == pytest.approx((least + most) / 2, abs=0.05 * (most - least) + 1e-6)


def test_colours_change_as_brightness_contrast_and_saturation_one_after_the_other_do():
    raw = raw_batch(3, channels=4)
    raw["image"] = raw["image"] // 4 + 96  # nothing to clip
    made = task.augment(raw, Plan(jitter=0.2), Draws(0, 0, raw["id"]))["image"]
    draws = Draws(0, 0, raw["id"])
    light, contrast, saturation = (draws.uniform(0.8, 1.2) for _ in range(3))
    for b, image in enumerate(raw["image"].permute(0, 3, 1, 2).float()):
        steep = (image[:3] * light[b] - 127.5) * contrast[b] + 127.5
        grey = steep.mean(0)
        torch.testing.assert_close(made[b, :3], grey + (steep - grey) * saturation[b], atol=1e-2, rtol=1e-5)
        assert torch.equal(made[b, 3], image[3])


def test_training_and_prediction_see_the_same_tensor():
    raw = raw_batch(1)
    trained, predicted = segment.batch(raw, Plan(), Draws(0, 0, raw["id"])), segment.batch(raw, Plan(), None)
    assert torch.equal(trained["image"], predicted["image"])
    expected = (raw["image"].permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.25
    torch.testing.assert_close(trained["image"], expected, atol=1e-6, rtol=0)
    assert torch.equal(trained["distance"], raw["distance"] / 8)
    assert segment.batch({"image": raw["image"]}, Plan(), None).keys() == {"image"}, "images alone are a batch too"
