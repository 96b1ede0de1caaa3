"""Metrics and tables against slow obvious versions, pixel by pixel; sums of any batches against one big batch; and what
the position of a pixel alone predicts."""

import math

import numpy as np
import pytest
import torch
from packs import pack_of
from torch.nn import functional as F

from nbtools.data import collate
from nbtools.errors import PackError
from nbtools.tasks import segment
from nbtools.tasks.segment import scores
from nbtools.train import Sums

CLASSES, IGNORE = 5, 255
HEIGHT, WIDTH = SIZE = 20, 27


def regions(seed, count=6):
    """Labels (B, H, W) in patches, some of them ignored, and logits (B, K, H, W) that are right here and there."""
    generator = torch.Generator().manual_seed(seed)

    def noise(cells):
        coarse = torch.randn(count, CLASSES, cells, cells, generator=generator)
        return F.interpolate(coarse, SIZE, mode="bilinear", align_corners=False)

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
    return torch.tensor([[eighths((y, x), edge) for x in range(labels.shape[1])] for y in range(labels.shape[0])])


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
    """labels, logits, distance and predictions of a few images, one of them all ignored."""
    labels, logits = regions(0)
    labels[5] = IGNORE
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
    more = F.one_hot(predicted, CLASSES + 3).permute(0, 3, 1, 2).float()
    assert read((more, labels, distance))["miou"] == found["miou"], "a class that is nowhere changes nothing"


@pytest.mark.parametrize("batch", [1, 4])
def test_miou_of_any_batches_is_that_of_the_whole_set_and_not_their_mean(seen, batch):
    labels, logits, distance, _ = seen
    whole = read((logits, labels, distance))
    parts = [(logits[i : i + batch], labels[i : i + batch], distance[i : i + batch]) for i in range(0, 6, batch)]
    found = read(*parts)
    assert (found["miou"], found["pixel_accuracy"]) == (whole["miou"], whole["pixel_accuracy"])
    assert found["boundary_f"] == pytest.approx(whole["boundary_f"], abs=1e-6)
    assert abs(sum(read(part)["miou"] for part in parts) / len(parts) - whole["miou"]) > 1e-3


@pytest.mark.parametrize("tolerance", [None, 1.5])
def test_boundary_f_is_that_of_pixel_by_pixel_matching(seen, monkeypatch, tolerance):
    labels, logits, distance, predicted = seen
    if tolerance is not None:
        monkeypatch.setattr(scores, "TOLERANCE", tolerance / math.hypot(*SIZE) * (1 + 1e-9))
    within = 0.0075 * math.hypot(*SIZE) if tolerance is None else tolerance
    expected = [slow_f(guess, truth, within) for guess, truth in zip(predicted, labels, strict=True)]
    total, images = segment.metrics((logits, ()), {"label": labels, "distance": distance})["boundary_f"]
    counted = [f for f in expected if f is not None]
    assert images == len(counted) == 5
    assert float(total) == pytest.approx(sum(counted), abs=1e-5)


# Tables


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    labels, _ = regions(7, 5)
    labels[4] = IGNORE
    return packed(tmp_path_factory.mktemp("tables"), {"val": labels.numpy().astype(np.uint8)})


def packed(folder, labels, classes="abcde"):
    samples = {
        f"{split}/{n}": {"image": np.zeros((*x.shape, 3), np.uint8), "label": x, "distance": segment.distance_map(x)}
        for split, some in labels.items()
        for n, x in enumerate(some)
    }
    splits = [name.partition("/")[0] for name in samples]
    return pack_of(samples, folder, task="segment", split=splits, classes=list(classes))


@pytest.fixture(scope="module")
def answers():
    return list(regions(7, 5)[1].argmax(1).numpy().astype(np.uint8))


def evaluated(pack, ids, answers):
    """What `evaluate` returns for these predictions."""
    raw = collate([pack.sample(int(i)) for i in ids], pack.columns)
    batch = segment.batch(raw, segment.Plan(), None)
    maps = torch.from_numpy(np.stack(answers).astype(int))
    logits = F.one_hot(maps, len(pack.classes)).permute(0, 3, 1, 2).float()
    return read((logits, batch["label"], batch["distance"]))


def test_the_tables_are_what_counting_pixel_by_pixel_gives(pack, answers):
    ids = range(5)
    pairs = list(zip(pack.arrays["label"].ravel().tolist(), np.stack(answers).ravel().tolist(), strict=True))
    counts = np.array([[pairs.count((t, p)) for p in range(CLASSES)] for t in range(CLASSES)])
    assert (segment.confusion(pack, ids, answers).to_numpy() == counts).all()
    table = segment.by_class(pack, ids, answers).set_index("class")
    assert list(table.iou) == sorted(table.iou)
    for k, name in enumerate(pack.classes):
        row, both, true, found = table.loc[name], counts[k, k], counts[k].sum(), counts[:, k].sum()
        other = max((j for j in range(CLASSES) if j != k), key=lambda j: counts[k, j])
        assert (row.iou, row.precision, row.recall) == (both / (true + found - both), both / found, both / true)
        assert (row.share, row.confused, row.lost) == (true / counts.sum(), "abcde"[other], counts[k, other] / true)
    assert table.iou.mean() == pytest.approx(evaluated(pack, ids, answers)["miou"])


def test_scores_of_images_are_those_of_an_evaluation_of_each_alone_and_the_worst_come_first(pack, answers):
    table = segment.image_scores(pack, range(5), answers)
    assert (table.id.tolist(), table.name.tolist()) == (list(range(5)), pack.names)
    for i, *found in table.drop(columns="name").to_numpy()[:-1]:
        assert found == pytest.approx(list(evaluated(pack, [i], [answers[int(i)]]).values()))
    assert np.isnan([table[name].iloc[-1] for name in ("miou", "pixel_accuracy", "boundary_f")]).all()
    worst = segment.worst(pack, range(5), answers)
    assert worst == table.iloc[:-1].sort_values("miou").id.tolist(), "all but the one without labels"
    assert segment.worst(pack, range(5), answers, 2) == worst[:2]


@pytest.mark.parametrize(
    ("predicted", "message"),
    [
        ([], "got 0 for 1 id;"),
        ([np.zeros(SIZE, np.uint8)] * 2, "got 2 for 1 id;"),
        ([np.zeros(SIZE[::-1], np.uint8)], r"got \(27, 20\)"),
        ([np.full(SIZE, 5, np.uint8)], "numbers below 5, got .* from 0 to 5 for id 0"),
        ([np.full(SIZE, -1)], "numbers below 5, got .* from -1 to 0 for id 0"),
    ],
)
def test_predictions_that_do_not_belong_to_the_ids_are_refused(pack, predicted, message):
    for refused in (segment.show, segment.by_class, segment.confusion, segment.image_scores, segment.worst):
        with pytest.raises(PackError, match=message):
            refused(pack, [0], predicted)


def halves(left, right):
    label = np.full(SIZE, left, np.uint8)
    label[:, 9:] = right
    return label


def test_the_prior_is_the_most_frequent_class_at_each_pixel_and_scored_as_an_evaluation_would(tmp_path):
    labels = {"train": [halves(0, 1), halves(0, 2), halves(1, 1), halves(0, 255)], "val": [halves(0, 1), halves(0, 2)]}
    pack = packed(tmp_path, labels, "abc")
    assert segment.position_prior(pack) == pytest.approx(evaluated(pack, pack.ids("val"), [halves(0, 1)] * 2))
    with pytest.raises(PackError, match=r"'test'.* is empty; choose another"):
        segment.position_prior(pack, "test")
    never = {"train": [halves(255, 2), halves(255, 1), halves(255, 2)], "val": [halves(2, 2)]}
    found = segment.position_prior(packed(tmp_path / "never", never, "abc"))
    assert found["pixel_accuracy"] == 1, "where training has no label, the most frequent class"
