"""Metrics against slow obvious versions, pixel by pixel; sums of any batches against one big batch."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nbtools.errors import PlanError
from nbtools.tasks import segment
from nbtools.tasks.segment import scores
from nbtools.tasks.segment.scores import boundary_f
from nbtools.train import Sums

CLASSES, IGNORE = 5, 255
SIZE = (20, 27)


def regions(seed, count=6, size=SIZE):
    """Labels (B, H, W) in patches, some of them ignored, and logits (B, K, H, W) that are right here and there."""
    generator = torch.Generator().manual_seed(seed)

    def noise(cells):
        coarse = torch.randn(count, CLASSES, cells, cells, generator=generator)
        return F.interpolate(coarse, size, mode="bilinear", align_corners=False)

    truth = noise(4)
    labels = truth.argmax(1).where(noise(3)[:, 0] > -0.8, IGNORE)
    return labels, truth + 0.5 * noise(7)


def slow_boundary(labels):
    """The boundary pixels (y, x) of one image (H, W), neighbour by neighbour."""
    height, width = labels.shape
    found = set()
    for y in range(height):
        for x in range(width):
            for v, u in ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1)):
                inside = 0 <= v < height and 0 <= u < width
                if inside and IGNORE not in (labels[y, x], labels[v, u]) and labels[y, x] != labels[v, u]:
                    found.add((y, x))
    return found


def eighths(one, many):
    """Distance in pixels to the nearest of many, as a pack stores it."""
    nearest = min((math.dist(one, other) for other in many), default=math.inf)
    return min(round(8 * nearest) if many else 255, 255) / 8


def slow_distance(labels):
    """(H, W) float: the distance of every pixel to the boundary."""
    edge = slow_boundary(labels)
    height, width = labels.shape
    return torch.tensor([[eighths((y, x), edge) for x in range(width)] for y in range(height)])


def slow_f(predicted, labels, tolerance):
    """Boundary F1 of one image, or None without any boundary."""
    true = slow_boundary(labels)
    found = slow_boundary(torch.where(labels == IGNORE, IGNORE, predicted))
    if not true and not found:
        return None
    precision = sum(eighths(p, true) <= tolerance for p in found) / max(len(found), 1) if true else 0
    recall = sum(eighths(t, found) <= tolerance for t in true) / max(len(true), 1) if found else 0
    return 2 * precision * recall / (precision + recall) if precision + recall else 0


def halves(column, size=(20, 40)):
    """(1, H, W): class 1 from a column on, class 0 before it."""
    return (torch.arange(size[1]) >= column).long().expand(1, *size).clone()


@pytest.fixture(scope="module")
def seen():
    """labels, logits, distance and predictions of a few images."""
    labels, logits = regions(0)
    return labels, logits, torch.stack([slow_distance(one) for one in labels]), logits.argmax(1)


def read(*batches):
    """The values of the task's metrics over batches of (logits, labels, distance)."""
    sums = Sums()
    for logits, labels, distance in batches:
        sums.add(segment.metrics((logits, ()), {"label": labels, "distance": distance}))
    return sums.read()


def test_miou_and_accuracy_are_their_definitions_without_one_more_in_the_denominator(seen):
    labels, logits, distance, predicted = seen
    valid = labels != IGNORE
    both = [((labels == k) & (predicted == k)).sum() for k in range(CLASSES)]
    either = [(((labels == k) | (predicted == k)) & valid).sum() for k in range(CLASSES)]
    found = read((logits, labels, distance))
    assert found["miou"] == pytest.approx(float(sum(b / e for b, e in zip(both, either, strict=True)) / CLASSES))
    assert found["pixel_accuracy"] == pytest.approx(float((labels == predicted).sum() / valid.sum()))
    counts = [[int(((labels == t) & (predicted == p)).sum()) for p in range(CLASSES)] for t in range(CLASSES)]
    assert scores.confusion(predicted, labels, CLASSES).tolist() == counts


@pytest.mark.parametrize("batch", [1, 2, 4, 6])
def test_miou_of_any_batches_is_that_of_the_whole_set_and_not_their_mean(seen, batch):
    labels, logits, distance, _ = seen
    whole = read((logits, labels, distance))
    parts = [(logits[i : i + batch], labels[i : i + batch], distance[i : i + batch]) for i in range(0, 6, batch)]
    found = read(*parts)
    assert (found["miou"], found["pixel_accuracy"]) == (whole["miou"], whole["pixel_accuracy"])
    assert found["boundary_f"] == pytest.approx(whole["boundary_f"], abs=1e-6)
    if batch < len(labels):
        assert abs(sum(read(part)["miou"] for part in parts) / len(parts) - whole["miou"]) > 1e-3


def test_a_perfect_prediction_scores_one_and_ties_take_the_first_class():
    labels, _ = regions(3)
    distance = torch.stack([slow_distance(one) for one in labels])
    perfect = F.one_hot(labels % IGNORE, CLASSES).permute(0, 3, 1, 2).float()
    assert read((perfect, labels, distance)) == pytest.approx({"miou": 1, "pixel_accuracy": 1, "boundary_f": 1})
    logits = torch.randint(0, 3, (2, CLASSES, 9, 7), generator=torch.Generator().manual_seed(8)).float()
    card: Any = None  # not read
    assert np.array_equal(segment.decode((logits, ()), card), logits.argmax(1))


def test_a_class_that_is_nowhere_and_an_image_that_is_all_ignored_change_nothing(seen):
    labels, logits, distance, predicted = seen
    more = [F.one_hot(predicted, classes).permute(0, 3, 1, 2).float() for classes in (CLASSES, CLASSES + 3)]
    assert len({read((one, labels, distance))["miou"] for one in more}) == 1
    empty = logits, torch.full_like(labels, IGNORE), torch.full_like(distance, 255 / 8)
    assert read((logits, labels, distance), empty) == read((logits, labels, distance))


class Unread(TorchDispatchMode):
    """Refuses what must know values before it can go on, and so would wait for a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags), func
        return func(*args, **(kwargs or {}))


def test_no_metric_reads_a_value_so_none_waits_for_the_device(seen, monkeypatch):
    labels, logits, distance, _ = seen
    values = torch.randint(0, 26, (5000,), generator=torch.Generator().manual_seed(2))
    assert torch.equal(scores.scatter_count(values, minlength=26), values.bincount(minlength=26))
    monkeypatch.setattr(torch, "bincount", scores.scatter_count)  # as on a GPU
    with Unread():
        found = segment.metrics((logits, ()), {"label": labels, "distance": distance})
        with pytest.raises(AssertionError, match="_local_scalar_dense"):
            torch.as_tensor(found["boundary_f"][0]).item()


# Boundaries


def test_boundaries_are_those_of_a_look_at_every_neighbour(seen):
    labels, _, distance, _ = seen
    found = scores.boundaries(labels, labels != IGNORE)
    for mask, image in zip(found, labels, strict=True):
        assert {(y, x) for y, x in mask.nonzero().tolist()} == slow_boundary(image)
    assert torch.equal(found, distance == 0)


@pytest.mark.parametrize("tolerance", [0, 1.5, 7.07])
def test_boundary_f_is_that_of_pixel_by_pixel_matching(seen, tolerance):
    labels, _, distance, predicted = seen
    expected = [slow_f(guess, truth, tolerance) for guess, truth in zip(predicted, labels, strict=True)]
    total, images = boundary_f(predicted, labels, distance, tolerance)
    counted = [f for f in expected if f is not None]
    assert images == len(counted)
    assert total.item() == pytest.approx(sum(counted), abs=1e-5)


def test_boundary_f_is_the_same_when_prediction_and_truth_change_places():
    first, second = (labels.where(labels != IGNORE, 0) for labels, _ in (regions(5), regions(6)))
    there = boundary_f(second, first, torch.stack([slow_distance(one) for one in first]), 2)
    back = boundary_f(first, second, torch.stack([slow_distance(one) for one in second]), 2)
    assert there[0] == pytest.approx(back[0].item(), abs=1e-6)


def test_a_boundary_as_far_as_the_tolerance_is_found_and_one_farther_is_not():
    labels = halves(20)
    found = [boundary_f(halves(20 + n), labels, slow_distance(labels[0])[None], 3)[0].item() for n in (3, 4, 5)]
    assert found == pytest.approx([1, 0.5, 0])  # of two columns of pixels the nearer one counts
    labels = halves(120, (180, 240))  # a diagonal of 300 px, so 2.25 by default
    distance = (torch.arange(240) - 119.5).abs().sub(0.5).expand(1, 180, 240)
    found = [boundary_f(halves(120 + n, (180, 240)), labels, distance)[0].item() for n in (2, 3, 4)]
    assert found == pytest.approx([1, 0.5, 0])


def test_ignored_pixels_are_not_judged_and_an_image_with_one_boundary_of_two_has_nothing_right():
    labels = halves(20)
    labels[..., 25:] = IGNORE
    noisy = torch.randint(0, CLASSES, labels.shape, generator=torch.Generator().manual_seed(7))
    assert boundary_f(noisy.where(labels == IGNORE, labels), labels, slow_distance(labels[0])[None], 1) == (1, 1)
    flat, split = halves(40), halves(20)
    far, near = slow_distance(flat[0])[None], slow_distance(split[0])[None]
    assert boundary_f(flat, flat, far) == (0, 0)
    assert boundary_f(split, flat, far) == (0, 1)
    assert boundary_f(flat, split, near) == (0, 1)


def test_a_tolerance_beyond_what_packs_store_is_refused(seen):
    labels, _, distance, predicted = seen
    with pytest.raises(PlanError, match=r"from 0 to 31.75 px, got 32"):
        boundary_f(predicted, labels, distance, 32)
