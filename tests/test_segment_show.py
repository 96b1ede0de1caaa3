"""Labels over images pixel by pixel, figures and what their texts say, tables against slow counting, the prior."""

import io
import itertools

import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from packs import pack_of
from PIL import Image

from nbtools.data import Draws, collate
from nbtools.errors import PackError
from nbtools.tasks import segment
from nbtools.tasks.common.figures import WIDE, WRONG
from nbtools.tasks.segment import analysis, visualize
from nbtools.tasks.segment.visualize import ALPHA, FAINT, in_cell, label_spots
from nbtools.train import Sums

HEIGHT, WIDTH = 24, 32
NAMES = ("background", "shirt", "trousers")
SEVEN = np.array([[230, 159, 0], [86, 180, 233], [0, 158, 115], [240, 228, 66], [0, 114, 178], [213, 94, 0], [9, 9, 9]])
pytestmark = pytest.mark.usefixtures("own_cache")


def packed(folder, labels, names=NAMES, channels=3, colours=None):
    """A pack of labels by split, (H, W) or one number for all pixels; its images are noise."""
    rng, samples = np.random.default_rng(0), {}
    for split, n in ((split, n) for split, some in labels.items() for n in range(len(some))):
        label = np.full((HEIGHT, WIDTH), 0, np.uint8) + np.asarray(labels[split][n], np.uint8)
        image = rng.integers(0, 256, (*label.shape, channels), dtype=np.uint8)
        samples[f"{split}/{n}.png"] = {"image": image, "label": label, "distance": segment.distance_map(label)}
    colours = colours or [SEVEN[k % 7].tolist() for k in range(len(names))]
    options, splits = {"colours": colours, "channels": channels}, [name.partition("/")[0] for name in samples]
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


@pytest.fixture(scope="module")
def answers(pack):
    """Predictions for every image, right in about half of the rectangles."""
    found = []
    for i in range(len(pack)):
        label, other = pack.arrays["label"][i], patches(100 + i, ignored=0)
        found.append(np.where((label == 255) | (other != 0), other, label).astype(np.uint8))
    return found


def texts(sheet):
    return [text.get_text() for text in sheet.axes[0].texts]


def image_of(sheet, n):
    return np.asarray(sheet.axes[0].images[n].get_array())


def evaluated(pack, ids, answers):
    """What `evaluate` returns for these predictions: the task's metrics of logits, batch by batch of 2."""
    sums = Sums()
    every = list(zip(map(int, ids), answers, strict=True))
    for some in (every[n : n + 2] for n in range(0, len(every), 2)):
        batch = segment.batch(collate([pack.sample(i) for i, _ in some], pack.columns), segment.Plan(), None)
        maps = torch.from_numpy(np.stack([answer for _, answer in some]).astype(int))
        logits = torch.nn.functional.one_hot(maps, len(pack.classes)).permute(0, 3, 1, 2).float()
        sums.add(segment.metrics((logits, ()), batch))
    return sums.read()


# Overlays


def test_a_class_is_its_colour_over_the_image_as_opaque_as_asked():
    image = np.random.default_rng(1).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    label = np.full((6, 8), 1, np.uint8)
    luma = image @ [[0.299], [0.587], [0.114]]
    for alpha in (0.0, 0.4, 1.0):
        below = (1 - alpha) * image + alpha * luma
        expected = np.round((1 - alpha) * below + alpha * SEVEN[1])
        assert (segment.overlay(image, label, SEVEN, alpha) == expected).all()
    label[:, 4:] = 2
    found = segment.overlay(image, label, SEVEN[:3], [1, 0, 1])
    assert (found[:, :3] == image[:, :3]).all()
    assert (found[:, 5:] == SEVEN[2]).all()
    clear = np.zeros((1, 3, 4), np.uint8)
    clear[0, :, 3] = 0, 51, 255  # alpha, on white
    assert segment.overlay(clear, np.zeros((1, 3), np.uint8), SEVEN, 0.0)[0, :, 0].tolist() == [255, 204, 0]


def test_a_line_two_pixels_wide_lies_on_the_boundary_and_nowhere_else():
    label = patches(3)
    drawn = segment.overlay(np.zeros((HEIGHT, WIDTH, 3), np.uint8), label, np.zeros((3, 3), np.uint8))
    light, dark = np.zeros(label.shape, bool), np.zeros(label.shape, bool)
    for y, x in itertools.product(range(HEIGHT), range(WIDTH)):
        for v, u in ((y, x + 1), (y + 1, x)):
            if v < HEIGHT and u < WIDTH and label[y, x] != label[v, u]:
                light[y, x] = dark[v, u] = True
    known = label != 255
    assert (drawn[light & known] > 200).all()
    assert (drawn[dark & ~light & known] < 30).all()
    assert (drawn[known & ~light & ~dark] == 0).all()


@pytest.mark.parametrize("value", [255, 3, 200])
def test_ignored_pixels_and_ids_beyond_the_classes_are_grey_stripes_on_any_image(value):
    image = np.zeros((32, 32, 3), np.uint8)
    image[..., 0] = 255
    drawn = segment.overlay(image, np.full((32, 32), value, np.uint8), SEVEN[:3])
    assert (drawn == drawn[..., :1]).all(), "no colour"
    light, dark = drawn.max(), drawn.min()
    assert light > dark + 60
    assert 0.2 < (drawn[..., 0] == dark).mean() < 0.3
    assert (drawn[1:, :-1] == drawn[:-1, 1:]).all(), "along the other diagonal nothing changes"


def test_errors_are_vermilion_and_only_where_there_is_a_truth():
    image = np.random.default_rng(2).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    label, predicted = np.zeros((8, 8), np.uint8), np.zeros((8, 8), np.uint8)
    label[0], predicted[:4] = 255, 1
    drawn = visualize.errors(image, label, predicted)
    assert (abs(drawn[1:4] - np.array(to_rgb(WRONG)) * 255) <= 0.15 * 255 + 1).all()
    for rest in (drawn[0], drawn[4:]):
        assert (rest == rest[..., :1]).all()
    assert drawn[4:].min() > 160, "pale"


def test_a_number_stands_where_its_class_has_room_around_it():
    label = np.zeros((60, 80), np.uint8)
    label[20:40, 30:60], label[:, 70:73], label[50:] = 4, 2, 255
    found = {k: (x, y) for k, x, y in label_spots(label)}
    assert sorted(found) == [0, 4], "3 px are no room, and what is ignored has no number"
    for k, (x, y) in found.items():
        assert (label[y - 5 : y + 6, x - 7 : x + 8] == k).all()
    assert np.abs(np.array(found[4]) - (44.5, 29.5)).max() <= 1
    assert label_spots(label[:4, :4]) == []


# Figures


def test_show_puts_each_image_next_to_its_classes_and_names_those_in_sight(pack):
    ids = pack.ids("train")[:3]
    sheet = segment.show(pack, ids)
    seen = np.unique([pack.arrays["label"][i] for i in ids])
    assert len(sheet.axes[0].images) == 6 + len(seen)
    for n, i in enumerate(ids):
        image, label = in_cell(pack.arrays["image"][i], pack.arrays["label"][i])
        assert (image_of(sheet, 2 * n) == image).all()
        expected = segment.overlay(image, label, SEVEN[:3], [FAINT, ALPHA, ALPHA])
        assert (image_of(sheet, 2 * n + 1) == expected).all(), "a background is drawn faintly"
        assert f"{i} · train/{n}.png" in texts(sheet)
    assert texts(sheet)[-len(seen) :] == ["ignored" if k == 255 else f"{k} {NAMES[k]}" for k in seen]
    assert image_of(sheet, 6)[0, 0].tolist() == SEVEN[seen[0]].tolist()
    drawn = np.asarray(Image.open(io.BytesIO(sheet._repr_png_() or b"")).convert("RGB"))
    assert drawn.shape[1] == WIDE
    left, right, bottom, top = (round(x) for x in sheet.axes[0].images[0].get_extent())
    assert (drawn[top:bottom, left:right] == image_of(sheet, 0)).all(), "on whole pixels, so that lines stay crisp"


@pytest.mark.parametrize(
    ("size", "shown"), [((24, 32), (218, 290)), ((384, 288), (340, 255)), ((10, 900), (3, 290)), ((1, 1), (290, 290))]
)
def test_an_image_fills_its_cell_however_tall_or_flat_or_small_it_is(size, shown):
    image, label = in_cell(np.zeros((*size, 3), np.uint8), np.zeros(size, np.uint8))
    assert (image.shape, label.shape) == ((*shown, 3), shown)


def test_with_predictions_each_row_has_the_images_miou_and_the_share_that_is_wrong(pack, answers):
    ids = [1, 7]
    sheet = segment.show(pack, ids, [answers[i].astype(np.int64) for i in ids])
    table = segment.image_scores(pack, ids, [answers[i] for i in ids])
    shown = [(text.get_text(), text.get_color()) for text in sheet.axes[0].texts]
    for miou, accuracy in zip(table.miou, table.pixel_accuracy, strict=True):
        assert (f"predicted · mIoU {miou:.2f}", "black") in shown
        assert (f"wrong · {1 - accuracy:.1%} of pixels", WRONG) in shown
    cells = in_cell(pack.arrays["image"][7], pack.arrays["label"][7], answers[7])
    assert (image_of(sheet, 7) == visualize.errors(*cells)).all()
    empty = int(pack.ids("val")[-1])
    assert {"predicted · no labels", "wrong · 0.0% of pixels"} <= set(
        texts(segment.show(pack, [empty], [answers[empty]]))
    )
    assert segment.preview(pack, empty, answers[empty])[1:] == ("", "no labels | truth")


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
    for sheet in (segment.show(pack, [0], answers[:1]), segment.classes_legend(pack)):
        sheet.savefig(io.BytesIO(), format="raw")
        width, height = sheet.get_size_inches() * 100
        boxes = [text.get_window_extent() for text in sheet.axes[0].texts]
        assert len(boxes) >= len(names)
        for box in boxes:
            assert 0 <= box.x0 <= box.x1 <= width
            assert -2 <= box.y0 <= box.y1 <= height


def test_without_ids_there_is_a_sentence_and_no_empty_figure(pack):
    for sheet in (segment.show(pack, []), segment.show(pack, [], []), segment.training_views(pack, [], segment.Plan())):
        assert repr(sheet) == "No samples to show: the list of ids is empty."


MACHADO = {  # Machado et al. 2009, table 1, severity 1
    "normal": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
}


def oklab(colour, vision):
    """Björn Ottosson's OKLab of an sRGB colour of 0 to 255, as somebody with that vision sees it."""
    share = np.asarray(colour, float) / 255
    linear = np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.array(MACHADO[vision]) @ linear, 0, 1)
    cones = np.cbrt(
        np.array([[0.41222, 0.53633, 0.05145], [0.21190, 0.68070, 0.10740], [0.08830, 0.28172, 0.62998]]) @ linear
    )
    return np.array([[0.21045, 0.79362, -0.00407], [1.97800, -2.42859, 0.45060], [0.02590, 0.78277, -0.80868]]) @ cones


@pytest.mark.parametrize(
    "colours",
    [
        [(213, 94, 0)],
        [(230, 159, 0), (86, 180, 233), (0, 158, 115)],
        SEVEN[:6].tolist(),
        [(86, 180, 233), (240, 228, 66)],
    ],
    ids=["vermilion", "orange, sky, green", "six of Okabe and Ito's", "the demo's"],
)
def test_what_is_wrong_has_a_colour_that_no_class_has_for_the_colour_blind_too(tmp_path, colours):
    names = ("background", *(f"class {n}" for n in range(len(colours))))
    made = packed(tmp_path, {"train": [patches(1, len(names))]}, names, colours=[(0, 0, 0), *colours])
    sheet = segment.show(made, [0], [np.zeros((HEIGHT, WIDTH), np.uint8)])
    [title] = [text for text in sheet.axes[0].texts if text.get_text().startswith("wrong")]
    ink = np.array(to_rgb(title.get_color())) * 255
    assert (abs(image_of(sheet, 3).astype(float) - ink) <= 0.15 * 255 + 1).all(2).mean() > 0.02, "pixels have it too"
    for vision in MACHADO:  # 0.1 in OKLab is five times what is just visible
        assert min(np.linalg.norm(oklab(ink, vision) - oklab(colour, vision)) for colour in colours) > 0.1


def test_the_live_picture_is_the_prediction_next_to_the_truth(pack, answers):
    for i in (0, 7):
        image, truth, text = segment.preview(pack, i, answers[i])
        miou = segment.image_scores(pack, [i], [answers[i]]).miou[0]
        assert (truth, text) == ("", f"mIoU {miou:.2f} | truth")
        assert image.dtype == np.uint8
        assert image.shape[1] <= 400
        half = (image.shape[1] - 6) // 2
        size = half, len(image)
        below = visualize.resize_image(pack.arrays["image"][i], *size)
        for part, label in ((image[:, :half], answers[i]), (image[:, -half:], pack.arrays["label"][i])):
            assert (part == visualize.colour(pack, below, visualize.resize_label(label, *size))).all()


def test_the_text_of_an_image_is_its_classes_the_largest_first(tmp_path):
    label = np.zeros((HEIGHT, WIDTH), np.uint8)
    label[4:], label[20:, :3] = 2, 255
    small = packed(tmp_path, {"train": [label, 255]})
    assert [segment.text_of(small, i) for i in (0, 1)] == ["trousers, background", ""]


def test_training_views_are_the_very_crops_that_training_gets(pack):
    plan, ids = segment.Plan(crop=32, scale_low=0.5, scale_high=2, flip=0.5, jitter=0.4, seed=3), [0, 3]
    sheet = segment.training_views(pack, ids, plan, epoch=2)
    raw = {**collate([pack.sample(i) for i in ids], pack.columns), "id": torch.tensor(ids)}
    batch = segment.batch(raw, plan, Draws(3, 2, torch.tensor(ids)))
    for n in range(2):
        pixels = (batch["image"][n] * 63.75 + 127.5).round().byte().permute(1, 2, 0).contiguous().numpy()
        image, label = in_cell(pixels, batch["label"][n].byte().numpy())
        assert (image_of(sheet, 2 * n) == image).all()
        assert (image_of(sheet, 2 * n + 1) == visualize.colour(pack, image, label)).all()
    assert (image_of(segment.training_views(pack, ids, plan, epoch=3), 0) != image_of(sheet, 0)).any()


def test_the_chart_of_balance_has_each_split_and_adds_up(pack):
    left, right = segment.balance(pack).axes
    assert [bars.get_label() for bars in left.containers] == ["train", "val"]
    order = [label.get_text() for label in left.get_yticklabels()]
    for split, pixels, images in zip(("train", "val"), left.containers, right.containers, strict=True):
        labels = pack.arrays["label"][pack.ids(split)]
        for name, share, held in zip(order, pixels, images, strict=True):
            k = NAMES.index(name)
            assert share.get_width() == pytest.approx((labels == k).sum() / (labels != 255).sum())
            assert held.get_width() == pytest.approx(np.mean([(label == k).any() for label in labels]))
    train = [bar.get_width() for bar in left.containers[0]]
    assert train == sorted(train, reverse=True)
    ignored = (pack.arrays["label"] == 255).mean()
    assert right.get_title(loc="right") == f"{100 * ignored:.1f} % of all pixels are ignored"
    swatches = np.asarray(left.collections[0].get_facecolor())[:, :3] * 255
    assert np.allclose(swatches, [SEVEN[NAMES.index(name)] for name in order])
    assert {"none", "100 %", "12 %", "1.2 %", "0.12 %"} == {
        visualize.percent(x) for x in (0, 1, 0.123, 0.0123, 0.00123)
    }


# Tables


def slow_counts(pack, ids, answers):
    truth = [k for i in ids for k in pack.arrays["label"][i].flat]
    pairs = list(zip(truth, (k for answer in answers for k in answer.flat), strict=True))
    return np.array([[sum(pair == (t, p) for pair in pairs) for p in range(3)] for t in range(3)])


def test_the_tables_are_what_counting_pixel_by_pixel_gives(pack, answers):
    ids = pack.ids("val")
    given = [answers[i] for i in ids]
    counts = slow_counts(pack, ids, given)
    assert (segment.confusion(pack, ids, given).to_numpy() == counts).all()
    table = segment.by_class(pack, ids, given).set_index("class")
    assert list(table.iou) == sorted(table.iou)
    for k, name in enumerate(NAMES):
        row, both = table.loc[name], counts[k, k]
        other = max((j for j in range(3) if j != k), key=lambda j: counts[k, j])
        assert (row.iou, row.precision, row.recall, row.share, row.confused, row.lost) == (
            *(both / (counts[k].sum() + counts[:, k].sum() - both), both / counts[:, k].sum()),
            *(both / counts[k].sum(), counts[k].sum() / counts.sum(), NAMES[other], counts[k, other] / counts[k].sum()),
        )
    found = evaluated(pack, ids, given)
    assert table.iou.mean() == pytest.approx(found["miou"])
    assert counts.trace() / counts.sum() == pytest.approx(found["pixel_accuracy"])


def test_scores_of_images_are_those_of_an_evaluation_of_each_alone_and_the_worst_come_first(pack, answers):
    ids = pack.ids("val")
    given = [answers[i] for i in ids]
    table = segment.image_scores(pack, ids, given)
    assert table.id.tolist() == ids.tolist()
    assert table.name.tolist() == [pack.names[i] for i in ids]
    for i, *found in table.drop(columns="name").to_numpy()[:-1]:
        assert found == pytest.approx(list(evaluated(pack, [i], [answers[int(i)]]).values()))
    assert np.isnan([table[name].iloc[-1] for name in ("miou", "pixel_accuracy", "boundary_f")]).all()
    worst = segment.worst(pack, ids, given)
    assert worst == table.iloc[:-1].sort_values("miou").id.tolist(), "all but the one without labels"
    assert segment.worst(pack, ids, given, 2) == worst[:2]


def test_a_class_that_is_nowhere_has_no_iou_and_one_that_is_only_predicted_has_zero(tmp_path):
    pack, answer = packed(tmp_path, {"val": [1]}, ("a", "b", "c", "d")), np.ones((HEIGHT, WIDTH), np.uint8)
    answer[0] = 3
    table = segment.by_class(pack, [0], [answer])
    assert table["class"].tolist() == ["d", "b", "a", "c"]
    assert table.iou.tolist()[:2] == [0, 23 / 24]
    assert np.isnan(table.iou[2:]).all()
    assert np.isnan(table.recall[0])
    assert table.confused.tolist() == ["", "d", "", ""]
    assert np.isnan(segment.by_class(pack, [], []).iou).all()
    assert list(segment.image_scores(pack, [], [])) == ["id", "name", "miou", "pixel_accuracy", "boundary_f"]


@pytest.mark.parametrize(
    ("predicted", "message"),
    [
        ([], "got 0 for 1 id;"),
        ([np.zeros((HEIGHT, WIDTH), np.uint8)] * 2, "got 2 for 1 id;"),
        ([np.zeros((WIDTH, HEIGHT), np.uint8)], r"got \(32, 24\)"),
        ([np.full((HEIGHT, WIDTH), 3, np.uint8)], "numbers below 3, got .* from 0 to 3 for id 0"),
        ([np.full((HEIGHT, WIDTH), -1)], "numbers below 3, got .* from -1 to 0 for id 0"),
    ],
)
def test_predictions_that_do_not_belong_to_the_ids_are_refused(pack, predicted, message):
    for refused in (segment.show, segment.by_class, segment.confusion, segment.image_scores, segment.worst):
        with pytest.raises(PackError, match=message):
            refused(pack, [0], predicted)


# The prior


def halves(left, right):
    label = np.full((HEIGHT, WIDTH), left, np.uint8)
    label[:, WIDTH // 2 :] = right
    return label


def test_the_prior_is_the_most_frequent_class_at_each_pixel_and_scored_as_an_evaluation_would(tmp_path):
    labels = {"train": [halves(0, 1), halves(0, 2), halves(1, 1), halves(0, 255)], "val": [halves(0, 1), halves(0, 2)]}
    pack = packed(tmp_path, labels)
    assert (segment.prior(pack) == halves(0, 1)).all()
    found = segment.position_prior(pack)
    assert (found["miou"], found["pixel_accuracy"]) == (pytest.approx((1 + 1 / 2 + 0) / 3), 0.75)
    assert found == pytest.approx(evaluated(pack, pack.ids("val"), [segment.prior(pack)] * 2))
    with pytest.raises(PackError, match=r"'test' of .* is empty"):
        segment.position_prior(pack, "test")
    never = packed(tmp_path / "never", {"train": [halves(255, 2), halves(255, 1), halves(255, 2)]})
    assert (segment.prior(never) == 2).all(), "where training has no label"


def test_the_prior_is_the_same_however_much_is_counted_at_once(pack, monkeypatch):
    labels = np.stack([pack.arrays["label"][i] for i in pack.ids("train")])
    whole = segment.prior(pack)
    for y, x in itertools.product(range(0, HEIGHT, 5), range(0, WIDTH, 7)):
        counts = np.bincount(labels[:, y, x], minlength=256)[:3]
        assert whole[y, x] == counts.argmax() or not counts.any()
    monkeypatch.setattr(analysis, "COUNTS", 3 * WIDTH * 5)
    monkeypatch.setattr(analysis, "CHUNK", 2 * WIDTH * 5)
    assert (segment.prior(pack) == whole).all()
