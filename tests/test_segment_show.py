"""Labels over images pixel by pixel, figures and what their texts say."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from packs import pack_of
from PIL import Image

from nbtools.data import Draws, collate
from nbtools.figures import WIDE, WRONG
from nbtools.tasks import segment

HEIGHT, WIDTH = 24, 32
NAMES = ("background", "shirt", "trousers")
COLOURS = [[0, 0, 0], [86, 180, 233], [240, 228, 66]]
LUMA = np.array([[0.299], [0.587], [0.114]])


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


def legend_of(sheet) -> Any:
    return sheet.axes[0].get_legend()


def names_in(sheet):
    return [text.get_text() for text in legend_of(sheet).get_texts()]


def test_classes_lie_in_their_colours_over_the_image_with_a_white_line_between_and_stripes_where_ignored(tmp_path):
    label = np.zeros((HEIGHT, WIDTH), np.uint8)
    label[:, 8:16], label[:, 16:24], label[:, 24:] = 1, 2, 255
    made = packed(tmp_path, {"train": [label]}, image=(200, 30, 60))
    _, drawn = images_of(segment.show(made, [0]))
    wide = drawn.shape[1] // 4
    seen = np.array([200, 30, 60])
    for k, alpha in ((0, 0.15), (1, 0.6), (2, 0.6)):
        below = (1 - alpha) * seen + alpha * (seen @ LUMA)
        part = drawn[:, k * wide + 2 : (k + 1) * wide - 2]
        assert (abs(part - ((1 - alpha) * below + alpha * np.array(COLOURS[k]))) <= 1).all()
    for k in (1, 2, 3):
        assert (drawn[:, k * wide - 1 : k * wide + 1] == 255).all(2).any(1).all(), "a line between two classes"
    ignored = drawn[:, 3 * wide + 2 :]
    assert (ignored == ignored[..., :1]).all(), "no colour"
    assert ignored.max() > ignored.min() + 60
    assert (ignored[1:, :-1] == ignored[:-1, 1:]).all(), "stripes"


def test_show_puts_each_image_next_to_its_classes_numbered_and_names_those_in_sight(pack):
    ids = pack.ids("train")[:3]
    sheet = segment.show(pack, ids)
    seen = np.unique([pack.arrays["label"][i] for i in ids])
    assert names_in(sheet) == ["ignored" if k == 255 else f"{k} {NAMES[k]}" for k in seen]
    assert len(images_of(sheet)) == 6
    assert {f"{i} · train/{n}.png" for n, i in enumerate(ids)} <= set(texts(sheet))
    drawn = np.asarray(Image.open(io.BytesIO(sheet._repr_png_() or b"")).convert("RGB"))
    assert drawn.shape[1] == WIDE
    left, right, bottom, top = (round(x) for x in sheet.axes[0].images[0].get_extent())
    assert (drawn[top:bottom, left:right] == images_of(sheet)[0]).all(), "on whole pixels, so that lines stay crisp"
    shown = sheet.axes[0].images[1]  # a number lies inside its class
    left, right, bottom, top = shown.get_extent()
    label = pack.arrays["label"][ids[0]]
    numbers = [t for t in sheet.axes[0].texts if t.get_text() in "012" and left < t.get_position()[0] < right]
    assert numbers
    for text in (t for t in numbers if top < t.get_position()[1] < bottom):
        x, y = text.get_position()
        k = label[int((y - top) / (bottom - top) * HEIGHT), int((x - left) / (right - left) * WIDTH)]
        assert str(k) == text.get_text()


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


@pytest.mark.parametrize(
    ("names", "channels"),
    [
        (("background", "shirt"), 4),
        (tuple(f"class {n}" for n in range(34)), 3),
        (("$a_b$ %d <b>", "a very long name of a class of things " * 4, "手写\n\t"), 3),
    ],
    ids=["two classes and alpha", "34 classes", "strange names"],
)
def test_every_figure_is_drawn_without_warnings_and_texts_stay_inside(tmp_path, names, channels):
    every = np.arange(HEIGHT * WIDTH, dtype=np.uint8).reshape(HEIGHT, WIDTH) % len(names)
    pack = packed(tmp_path, {"train": [every], "val": [1]}, names, channels)
    answers = [np.ones((HEIGHT, WIDTH), np.uint8), pack.arrays["label"][0]]
    segment.balance(pack).savefig(io.BytesIO(), format="raw")
    segment.confused(segment.confusion(pack, [0, 1], answers)).savefig(io.BytesIO(), format="raw")
    sheet = segment.show(pack, [0], answers[:1])
    sheet.savefig(io.BytesIO(), format="raw")
    width, height = sheet.get_size_inches() * 100
    assert len(names_in(sheet)) == len(names)
    for text in (*sheet.axes[0].texts, *legend_of(sheet).get_texts()):
        box = text.get_window_extent()
        assert 0 <= box.x0 <= box.x1 <= width
        assert -2 <= box.y0 <= box.y1 <= height
    lowest = min(image.get_window_extent().y0 for image in sheet.axes[0].images)
    assert legend_of(sheet).get_window_extent().y1 <= lowest + 1, "the legend lies below the pictures"


def test_without_ids_there_is_a_sentence_and_no_empty_figure(pack):
    for sheet in (segment.show(pack, []), segment.show(pack, [], []), segment.training_views(pack, [], segment.Plan())):
        assert repr(sheet) == "No samples to show: the list of ids is empty."


def test_the_live_picture_is_the_prediction_next_to_the_truth(pack):
    truth = pack.arrays["label"][7]
    image, _, text = segment.preview(pack, 7, np.where(truth == 255, 0, truth).astype(np.uint8))
    half = (image.shape[1] - 6) // 2
    assert (image.dtype, image.shape[1] <= 400, text) == (np.uint8, True, "mIoU 1.00 | truth")
    same = (image[:, :half] == image[:, -half:]).all(2).mean()
    assert (truth != 255).mean() - 0.1 < same < 1, "all but what is ignored"


def test_training_views_are_the_very_crops_that_training_gets(pack):
    plan, ids = segment.Plan(crop=32, scale_low=0.5, scale_high=2, flip=0.5, jitter=0.4, seed=3), [0, 3]
    shown = images_of(segment.training_views(pack, ids, plan, epoch=2))
    raw = {**collate([pack.sample(i) for i in ids], pack.columns), "id": torch.tensor(ids)}
    batch = segment.batch(raw, plan, Draws(3, 2, torch.tensor(ids)))
    for n in range(2):
        pixels = (batch["image"][n] * 63.75 + 127.5).round().byte().permute(1, 2, 0).contiguous().numpy()
        size = shown[2 * n].shape[1::-1]
        assert (shown[2 * n] == np.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.LANCZOS))).all()
    assert (images_of(segment.training_views(pack, ids, plan, epoch=3))[0] != shown[0]).any()


def test_the_chart_of_balance_has_each_split_and_adds_up(pack):
    [axes] = segment.balance(pack).axes
    assert [bars.get_label() for bars in axes.containers] == ["train", "val"]
    order = [label.get_text() for label in axes.get_yticklabels()]
    for split, bars in zip(("train", "val"), axes.containers, strict=True):
        labels = pack.arrays["label"][pack.ids(split)]
        for name, bar in zip(order, bars, strict=True):
            assert bar.get_width() == pytest.approx((labels == NAMES.index(name)).sum() / (labels != 255).sum())
    train = [bar.get_width() for bar in axes.containers[0]]
    assert train == sorted(train, reverse=True)
    assert (
        axes.get_title(loc="right") == f"{100 * (pack.arrays['label'] == 255).mean():.1f} % of all pixels are ignored"
    )
