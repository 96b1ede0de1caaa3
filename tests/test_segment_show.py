"""Labels over images pixel by pixel, figures and what their texts say."""

import io
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_rgb
from packs import pack_of

from nbtools.figures import WRONG
from nbtools.tasks import segment

HEIGHT, WIDTH = 24, 32
NAMES = ("background", "shirt", "trousers")
COLOURS = [[0, 0, 0], [86, 180, 233], [240, 228, 66]]


def packed(folder, labels, names=NAMES, channels=3, image=None):
    """A pack of labels by split, (H, W) or one number for all pixels; its images are noise, or one colour."""
    rng, samples = np.random.default_rng(0), {}
    for split, n in ((split, n) for split, some in labels.items() for n in range(len(some))):
        label = np.full((HEIGHT, WIDTH), 0, np.uint8) + np.asarray(labels[split][n], np.uint8)
        noise = rng.integers(0, 256, (*label.shape, channels), dtype=np.uint8)
        seen = noise if image is None else np.full((*label.shape, 3), image, np.uint8)
        samples[f"{split}/{n}.png"] = {"image": seen, "label": label, "distance": segment.distance_map(label)}
    options = {"colours": [COLOURS[k % 3] for k in range(len(names))], "channels": channels}
    splits = [name.partition("/")[0] for name in samples]
    return pack_of(samples, folder, task="segment", split=splits, options=options, classes=list(names))


def patches(seed, classes=3, ignored=0.1):
    """A label of random rectangles, some of them ignored."""
    rng = np.random.default_rng(seed)
    label = np.full((HEIGHT, WIDTH), rng.integers(classes), np.uint8)
    for _ in range(6):
        y, x = rng.integers(HEIGHT), rng.integers(WIDTH)
        label[y : y + 9, x : x + 12] = 255 if rng.random() < ignored else rng.integers(classes)
    return label


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    labels = {"train": [patches(n) for n in range(6)], "val": [*(patches(n, ignored=0.3) for n in range(6, 10)), 255]}
    return packed(tmp_path_factory.mktemp("show"), labels)


def texts(sheet):
    return [text.get_text() for text in sheet.axes[0].texts]


def images_of(sheet):
    return [np.asarray(image.get_array()).astype(int) for image in sheet.axes[0].images]


def test_with_predictions_each_row_has_the_images_miou_and_what_is_wrong_of_it(pack):
    rng, ids = np.random.default_rng(1), [1, 7, int(pack.ids("val")[-1])]
    answers = [rng.integers(0, 3, (3, 4)).repeat(8, 0).repeat(8, 1).astype(np.uint8) for _ in ids]
    sheet, table = segment.show(pack, ids, answers), segment.image_scores(pack, ids, answers)
    for miou, accuracy in zip(table.miou[:2], table.pixel_accuracy[:2], strict=True):
        assert {f"predicted · mIoU {miou:.2f}", f"wrong · {100 * (1 - accuracy):.1f} % of pixels", "truth"} <= set(
            texts(sheet)
        )
    assert {"predicted · no labels", "wrong · 0.0 % of pixels"} <= set(texts(sheet))
    for n, (i, answer) in enumerate(zip(ids, answers, strict=True)):
        drawn = images_of(sheet)[4 * n + 3]
        inked = (abs(drawn - np.array(to_rgb(WRONG)) * 255) <= 0.15 * 255 + 1).all(2).mean()
        label = pack.arrays["label"][i]
        assert inked == pytest.approx(((label != answer) & (label != 255)).mean(), abs=0.03)
    assert segment.preview(pack, ids[2], answers[2])[1:] == ("", "no labels | truth")


def test_without_ids_there_is_a_sentence_and_no_empty_figure(pack):
    for sheet in (segment.show(pack, []), segment.show(pack, [], []), segment.training_views(pack, [], segment.Plan())):
        assert "No samples to show: the list of ids is empty." in repr(sheet)


@pytest.mark.parametrize("names", [NAMES, ("$a_b$ %d <b>", "a very long name of a class of things " * 4, "手写\n\t")])
def test_every_figure_is_drawn_without_warnings_and_names_the_classes_in_sight(tmp_path, names):
    every = np.arange(HEIGHT * WIDTH, dtype=np.uint8).reshape(HEIGHT, WIDTH) % len(names)
    pack = packed(tmp_path, {"train": [every], "val": [1]}, names)
    answers = [np.ones((HEIGHT, WIDTH), np.uint8), pack.arrays["label"][0]]
    segment.balance(pack).savefig(io.BytesIO(), format="raw")
    segment.confused(segment.confusion(pack, [0, 1], answers)).savefig(io.BytesIO(), format="raw")
    segment.training_views(pack, [0], segment.Plan(crop=32, flip=0.5)).savefig(io.BytesIO(), format="raw")
    sheet = segment.show(pack, [0], answers[:1])
    sheet.savefig(io.BytesIO(), format="raw")
    legend: Any = sheet.axes[0].get_legend()
    named = [text.get_text() for text in legend.get_texts()]
    assert len(named) == len(names)
    assert named[0].startswith(f"0 {names[0][:6]}")
