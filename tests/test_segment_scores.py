"""Scores against slow obvious versions, pixel by pixel; sums of any batches against one big batch."""

import math

import pytest
import torch
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from nbtools.errors import PlanError
from nbtools.tasks.segment.scores import (
    boundaries,
    boundary_f,
    confusion,
    intersection_union,
    likeliest,
    metrics_of,
    near,
    pixel_accuracy,
    scattered,
)
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


@pytest.fixture(scope="module")
def seen():
    """labels, logits, distance and predictions of a few images."""
    labels, logits = regions(0)
    return labels, logits, torch.stack([slow_distance(one) for one in labels]), logits.argmax(1)


def test_confusion_is_what_counting_pixel_by_pixel_gives(seen):
    labels, _, _, predicted = seen
    counts = [[0] * CLASSES for _ in range(CLASSES)]
    for truth, guess in zip(labels.flatten().tolist(), predicted.flatten().tolist(), strict=True):
        if truth != IGNORE:
            counts[truth][guess] += 1
    assert confusion(predicted, labels, CLASSES).tolist() == counts
    assert (labels == IGNORE).any()


def test_a_gpus_way_of_counting_gives_the_same():
    places = torch.randint(0, 26, (5000,), generator=torch.Generator().manual_seed(2))
    assert torch.equal(scattered(places, minlength=26), places.bincount(minlength=26))


class Unread(TorchDispatchMode):
    """Refuses what must know values before it can go on, and so would wait for a GPU."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags), func
        return func(*args, **(kwargs or {}))


def test_no_score_reads_a_value_so_none_waits_for_the_device(seen, monkeypatch):
    labels, logits, distance, _ = seen
    monkeypatch.setattr(torch, "bincount", scattered)  # as on a GPU
    with Unread():
        found = metrics_of((logits, ()), {"label": labels, "distance": distance})
        with pytest.raises(AssertionError, match="_local_scalar_dense"):
            torch.as_tensor(found["boundary_f"][0]).item()


def test_iou_and_accuracy_are_their_definitions_without_one_more_in_the_denominator(seen):
    labels, _, _, predicted = seen
    counts = confusion(predicted, labels, CLASSES)
    intersection, union = intersection_union(counts)
    valid = labels != IGNORE
    for k in range(CLASSES):
        assert intersection[k] == ((labels == k) & (predicted == k)).sum()
        assert union[k] == (((labels == k) | (predicted == k)) & valid).sum()
    right, pixels = pixel_accuracy(counts)
    assert (right, pixels) == ((labels == predicted).sum(), valid.sum())


def test_a_perfect_answer_scores_one_everywhere():
    labels, _ = regions(3)
    distance = torch.stack([slow_distance(one) for one in labels])
    sums = Sums()
    sums.add(
        metrics_of(
            (F.one_hot(labels % IGNORE, CLASSES).permute(0, 3, 1, 2).float(), ()),
            {"label": labels, "distance": distance},
        )
    )
    assert sums.read() == pytest.approx({"miou": 1, "pixel_accuracy": 1, "boundary_f": 1})


@pytest.mark.parametrize("batch", [1, 2, 4, 6])
def test_miou_of_any_batches_is_that_of_the_whole_set_and_not_their_mean(seen, batch):
    labels, logits, distance, _ = seen
    whole, parts, means = Sums(), Sums(), []
    whole.add(metrics_of((logits, ()), {"label": labels, "distance": distance}))
    for start in range(0, len(labels), batch):
        part = slice(start, start + batch)
        found, alone = metrics_of((logits[part], ()), {"label": labels[part], "distance": distance[part]}), Sums()
        parts.add(found)
        alone.add(found)
        means.append(alone.read()["miou"])
    assert parts.read()["miou"] == whole.read()["miou"]
    assert parts.read()["pixel_accuracy"] == whole.read()["pixel_accuracy"]
    assert parts.read()["boundary_f"] == pytest.approx(whole.read()["boundary_f"], abs=1e-6)
    if batch < len(labels):
        assert abs(sum(means) / len(means) - whole.read()["miou"]) > 1e-3


def test_a_class_that_nobody_drew_or_predicted_leaves_the_mean_alone(seen):
    labels, _, distance, predicted = seen
    found = []
    for classes in (CLASSES, CLASSES + 3):
        sums = Sums()
        logits = F.one_hot(predicted, classes).permute(0, 3, 1, 2).float()
        sums.add(metrics_of((logits, ()), {"label": labels, "distance": distance}))
        found.append(sums.read()["miou"])
    assert found[0] == found[1]


def test_an_image_that_is_all_ignored_counts_for_nothing(seen):
    labels, logits, distance, _ = seen
    empty = {"label": torch.full_like(labels, IGNORE), "distance": torch.full_like(distance, 255 / 8)}
    found = metrics_of((logits, ()), empty)
    assert not any(torch.as_tensor(part).any() for pair in found.values() for part in pair)
    with_it, without = Sums(), Sums()
    without.add(metrics_of((logits, ()), {"label": labels, "distance": distance}))
    with_it.add(metrics_of((logits, ()), {"label": labels, "distance": distance}))
    with_it.add(found)
    assert with_it.read() == without.read()


def test_boundaries_are_those_of_a_look_at_every_neighbour(seen):
    labels, _, distance, _ = seen
    found = boundaries(labels, labels != IGNORE)
    for mask, image in zip(found, labels, strict=True):
        assert {(y, x) for y, x in mask.nonzero().tolist()} == slow_boundary(image)
    assert torch.equal(found, distance == 0)


@pytest.mark.parametrize("radius", [0, 0.99, 1, 1.4, 1.5, 2.25, 3, 4.5, 7.07, 40])
def test_near_is_a_disk_about_every_mark(radius):
    marked = torch.rand(2, *SIZE, generator=torch.Generator().manual_seed(4)) < 0.01
    found = near(marked, radius)
    for mask, image in zip(found, marked, strict=True):
        points = image.nonzero().tolist()
        for y in range(SIZE[0]):
            for x in range(SIZE[1]):
                nearest = min(round(8 * math.dist((y, x), point)) / 8 for point in points)
                assert mask[y, x] == (nearest <= radius)


@pytest.mark.parametrize("tolerance", [0, 1.5, 3])
def test_boundary_f_is_that_of_pixel_by_pixel_matching(seen, tolerance):
    labels, _, distance, predicted = seen
    expected = [slow_f(guess, truth, tolerance) for guess, truth in zip(predicted, labels, strict=True)]
    total, images = boundary_f(predicted, labels, distance, tolerance)
    counted = [f for f in expected if f is not None]
    assert images == len(counted)
    assert total.item() == pytest.approx(sum(counted), abs=1e-5)


def test_boundary_f_is_the_same_when_answer_and_truth_change_places():
    (first, _), (second, _) = regions(5), regions(6)
    first, second = (labels.where(labels != IGNORE, 0) for labels in (first, second))
    there = boundary_f(second, first, torch.stack([slow_distance(one) for one in first]), 2)
    back = boundary_f(first, second, torch.stack([slow_distance(one) for one in second]), 2)
    assert there[0] == pytest.approx(back[0].item(), abs=1e-6)


def test_a_boundary_as_far_as_the_tolerance_is_found_and_one_farther_is_not():
    labels = torch.zeros(1, 20, 40, dtype=torch.int64)
    labels[..., 20:] = 1
    distance = slow_distance(labels[0])[None]
    found = [
        boundary_f(labels.roll(shift, 2).index_fill(2, torch.arange(shift), 0), labels, distance, 3)
        for shift in (3, 4, 5)
    ]
    assert [f[0].item() for f in found] == pytest.approx([1, 0.5, 0])  # of two columns of pixels the nearer one counts


def test_nothing_is_judged_where_labels_are_ignored():
    labels = torch.zeros(1, 20, 40, dtype=torch.int64)
    labels[..., 20:] = 1
    labels[..., 25:] = IGNORE
    distance = slow_distance(labels[0])[None]
    noisy = torch.randint(0, CLASSES, labels.shape, generator=torch.Generator().manual_seed(7))
    predicted = noisy.where(labels == IGNORE, labels)
    assert boundary_f(predicted, labels, distance, 1) == (1, 1)


def test_images_with_a_boundary_in_one_of_the_two_count_as_nothing_right():
    flat, split = torch.zeros(1, 20, 40, dtype=torch.int64), torch.zeros(1, 20, 40, dtype=torch.int64)
    split[..., 20:] = 1
    distances = {id(one): slow_distance(one[0])[None] for one in (flat, split)}
    assert boundary_f(flat, flat, distances[id(flat)]) == (0, 0)
    assert boundary_f(split, flat, distances[id(flat)]) == (0, 1)
    assert boundary_f(flat, split, distances[id(split)]) == (0, 1)


def test_a_tolerance_beyond_what_packs_store_is_refused(seen):
    labels, _, distance, predicted = seen
    with pytest.raises(PlanError, match=r"from 0 to 31.75 px, got 32"):
        boundary_f(predicted, labels, distance, 32)


def test_the_default_tolerance_is_three_quarters_of_a_percent_of_the_diagonal():
    labels = torch.zeros(1, 180, 240, dtype=torch.int64)  # a diagonal of 300: 2.25 px
    labels[..., 120:] = 1
    distance = (torch.arange(240) - 119.5).abs().sub(0.5).expand(1, 180, 240)
    for shift, expected in ((2, 1.0), (3, 0.5), (4, 0.0)):
        predicted = torch.zeros_like(labels)
        predicted[..., 120 + shift :] = 1
        assert boundary_f(predicted, labels, distance)[0].item() == pytest.approx(expected)


def test_the_likeliest_class_is_argmax_ties_and_all():
    logits = torch.randint(0, 3, (2, CLASSES, 9, 7), generator=torch.Generator().manual_seed(8)).float()
    assert torch.equal(likeliest(logits), logits.argmax(1))
