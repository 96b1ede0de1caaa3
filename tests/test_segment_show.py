"""Labels over pictures pixel by pixel, sheets that say what they show, tables against slow counting, the prior."""

import io
import itertools
import math

import numpy as np
import pytest
import torch
from IPython.core.formatters import DisplayFormatter
from matplotlib.colors import to_rgb
from PIL import Image

from nbtools import letters
from nbtools.data import Draws, collate, packing
from nbtools.errors import PackError
from nbtools.live import samples as cards
from nbtools.live.samples import Preview
from nbtools.tasks import segment
from nbtools.tasks.common.figures import RIGHT, WRONG
from nbtools.tasks.segment import task
from nbtools.tasks.segment.looking import analysis, baseline, charts, legend, marking, panels, show
from nbtools.tasks.segment.looking import overlay as drawing
from nbtools.tasks.segment.plans import Plan
from nbtools.train import Sums

HEIGHT, WIDTH = 24, 32
NAMES = ("background", "shirt", "trousers")
SEVEN = np.array([[230, 159, 0], [86, 180, 233], [0, 158, 115], [240, 228, 66], [0, 114, 178], [213, 94, 0], [9, 9, 9]])


def packed(folder, labels, names=NAMES, channels=3, colours=None):
    """A pack of labels by split, (H, W) or one number for all pixels; its pictures are noise."""
    rng = np.random.default_rng(0)

    def fill(writer, _):
        writer.classes = list(names)
        for split, n in ((split, n) for split, some in labels.items() for n in range(len(some))):
            label = np.full((HEIGHT, WIDTH), 0, np.uint8) + np.asarray(labels[split][n], np.uint8)
            image = rng.integers(0, 256, (*label.shape, channels), dtype=np.uint8)
            writer.add(f"{split}/{n}.png", split, image=image, label=label, distance=distance(label))

    options = {"colours": colours or [SEVEN[k % 7].tolist() for k in range(len(names))], "channels": channels}
    (folder / "raw").mkdir()
    (folder / "raw" / "some.png").touch()
    return packing.build(
        folder / "raw", "segment", options, fill, read=lambda *_: {}, into=folder / "pack", progress=False
    )


def distance(label):
    """(H, W) uint8 eighths of a pixel to the nearest boundary, by looking at all of them."""
    valid = label != 255
    edge = np.zeros(label.shape, bool)
    for one, other in (np.s_[1:], np.s_[:-1]), (np.s_[:, 1:], np.s_[:, :-1]):
        differ = (label[one] != label[other]) & valid[one] & valid[other]
        edge[one] |= differ
        edge[other] |= differ
    edge = np.argwhere(edge)
    if not len(edge):
        return np.full(label.shape, 255, np.uint8)
    places = np.argwhere(label >= 0)
    least = np.sqrt(((places[:, None] - edge) ** 2).sum(2).min(1))
    return np.minimum(np.round(8 * least), 255).astype(np.uint8).reshape(label.shape)


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


def evaluated(pack, ids, answers):
    """What `evaluate` says of these answers: the task's metrics of logits, batch by batch of 2."""
    sums = Sums()
    every = list(zip(map(int, ids), answers, strict=True))
    for some in (every[n : n + 2] for n in range(0, len(every), 2)):
        raw = collate([pack.sample(i) for i, _ in some], pack.columns)
        batch = task.batch({"label": raw["label"], "distance": raw["distance"], "image": raw["image"]}, Plan(), None)
        maps = torch.from_numpy(np.stack([answer for _, answer in some]).astype(int))
        logits = torch.nn.functional.one_hot(maps, len(pack.classes)).permute(0, 3, 1, 2).float()
        sums.add(task.metrics((logits, ()), batch))
    return sums.read()


# Overlays


def test_a_class_is_its_colour_over_the_picture_as_strongly_as_asked():
    image = np.random.default_rng(1).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    label = np.full((6, 8), 1, np.uint8)
    luma = image @ [[0.299], [0.587], [0.114]]
    for alpha in (0.0, 0.4, 1.0):
        below = (1 - alpha) * image + alpha * luma
        expected = np.round((1 - alpha) * below + alpha * SEVEN[1])
        assert (drawing.overlay(image, label, SEVEN, alpha) == expected).all()
    label[:, 4:] = 2
    found = drawing.overlay(image, label, SEVEN[:3], [1, 0, 1])
    assert (found[:, :3] == image[:, :3]).all()
    assert (found[:, 5:] == SEVEN[2]).all()


def test_a_line_two_pixels_wide_lies_on_the_boundary_and_nowhere_else():
    label = patches(3)
    before, behind = drawing.sides(label)
    for y, x in itertools.product(range(HEIGHT), range(WIDTH)):
        right, below = label[y, min(x + 1, WIDTH - 1)], label[min(y + 1, HEIGHT - 1), x]
        left, above = label[y, max(x - 1, 0)], label[max(y - 1, 0), x]
        assert before[y, x] == (label[y, x] != right or label[y, x] != below)
        assert behind[y, x] == ((label[y, x] != left or label[y, x] != above) and not before[y, x])
    black = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
    drawn = drawing.overlay(black, label, np.zeros((3, 3), np.uint8))
    known = label != 255
    assert (drawn[before & known] > 200).all()
    assert (drawn[behind & known] < 30).all()
    assert (drawn[known & ~before & ~behind] == 0).all()


def test_ignored_pixels_are_grey_stripes_whatever_the_picture_and_so_are_ids_beyond_the_classes():
    image = np.zeros((32, 32, 3), np.uint8)
    image[..., 0] = 255
    for value in (255, 3, 200):
        drawn = drawing.overlay(image, np.full((32, 32), value, np.uint8), SEVEN[:3])
        assert (drawn == drawn[..., :1]).all(), "no colour"
        light, dark = drawn.max(), drawn.min()
        assert light > dark + 60
        assert 0.2 < (drawn[..., 0] == dark).mean() < 0.3
        assert (drawn[1:, :-1] == drawn[:-1, 1:]).all(), "along the other diagonal nothing changes"


def test_errors_are_vermilion_and_only_where_there_is_a_truth():
    image = np.random.default_rng(2).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    label, predicted = np.zeros((8, 8), np.uint8), np.zeros((8, 8), np.uint8)
    label[0], predicted[:4] = 255, 1
    drawn = drawing.errors(image, label, predicted)
    ink = np.array(to_rgb(WRONG)) * 255
    assert (abs(drawn[1:4] - ink) <= 0.15 * 255 + 1).all()
    for rest in (drawn[0], drawn[4:]):
        assert (rest == rest[..., :1]).all()
    assert drawn[4:].min() >= 255 * (1 - drawing.DIMMED)


def test_a_fourth_channel_is_seen_as_alpha_on_white():
    image = np.zeros((1, 3, 4), np.uint8)
    image[0, :, 3] = 0, 51, 255
    assert drawing.opaque(image)[0, :, 0].tolist() == [255, 204, 0]
    clear = drawing.overlay(image, np.zeros((1, 3), np.uint8), SEVEN, 0.0)
    assert clear[0, :, 0].tolist() == [255, 204, 0]


def test_a_background_is_drawn_faintly_and_other_classes_are_not(pack):
    assert drawing.alphas_of(pack).tolist() == [drawing.FAINT, drawing.ALPHA, drawing.ALPHA]
    assert (drawing.colours_of(pack) == SEVEN[:3]).all()


def test_a_number_stands_where_its_class_has_room_about_it():
    label = np.zeros((60, 80), np.uint8)
    label[20:40, 30:60], label[:, 70:73], label[50:] = 4, 2, 255
    found = {place: (x, y) for place, x, y in marking.spots(label)}
    assert sorted(found) == [0, 4], "3 px are no room, and what is ignored has no number"
    for place, (x, y) in found.items():
        across, up = marking.ROOM
        assert (label[y - up : y + up + 1, x - across : x + across + 1] == place).all()
    x, y = found[4]
    assert abs(x - 44.5) <= 1
    assert abs(y - 29.5) <= 1
    assert marking.spots(label[:4, :4]) == []


# Sheets


def test_show_hangs_each_picture_beside_its_classes_and_names_those_that_are_seen(pack):
    ids = pack.ids("train")[:3]
    sheet = show.show(pack, ids)
    images = sheet.axes[0].images
    seen = np.unique([pack.arrays["label"][i] for i in ids])
    assert len(images) == 6 + len(seen)
    for n, i in enumerate(ids):
        picture, label = panels.in_cell(pack.arrays["image"][i], pack.arrays["label"][i])
        assert (np.asarray(images[2 * n].get_array()) == picture).all()
        expected = drawing.overlay(picture, label, SEVEN[:3], [drawing.FAINT, drawing.ALPHA, drawing.ALPHA])
        assert (np.asarray(images[2 * n + 1].get_array()) == expected).all()
        assert f"{i} · train/{n}.png" in texts(sheet)
    named = ["ignored" if place == 255 else f"{place} {NAMES[place]}" for place in seen]
    assert texts(sheet)[-len(seen) :] == named
    swatch = next(image for image in images if np.asarray(image.get_array()).shape == (1, 1, 3))
    assert np.asarray(swatch.get_array())[0, 0].tolist() == SEVEN[seen[0]].tolist()


def test_a_picture_fills_its_cell_however_tall_or_flat_or_small_it_is():
    for (height, width), size in {
        (24, 32): (218, 290),
        (384, 288): (340, 255),
        (10, 900): (3, 290),
        (1, 1): (290, 290),
    }.items():
        picture, label = panels.in_cell(np.zeros((height, width, 3), np.uint8), np.zeros((height, width), np.uint8))
        assert picture.shape == (*size, 3)
        assert label.shape == size


def test_with_predictions_each_row_says_the_images_miou_and_what_share_is_wrong(pack, answers):
    ids = [1, 7]
    sheet = show.show(pack, ids, [answers[i].astype(np.int64) for i in ids])
    table = analysis.image_scores(pack, ids, [answers[i] for i in ids])
    said = [(text.get_text(), text.get_color()) for text in sheet.axes[0].texts]
    for miou, accuracy in zip(table.miou, table.pixel_accuracy, strict=True):
        assert (f"predicted · mIoU {miou:.2f}", "black") in said
        assert (f"wrong · {1 - accuracy:.1%} of pixels", WRONG) in said
    picture, label, answer = panels.in_cell(pack.arrays["image"][7], pack.arrays["label"][7], answers[7])
    shown = np.asarray(sheet.axes[0].images[7].get_array())
    assert (shown == drawing.errors(picture, label, answer)).all()


def test_of_an_image_without_labels_no_miou_is_said_and_nothing_is_wrong(pack, answers):
    i = int(pack.ids("val")[-1])
    assert {"predicted · no labels", "wrong · 0.0% of pixels"} <= set(texts(show.show(pack, [i], [answers[i]])))
    assert show.preview(pack, i, answers[i])[1:] == ("", "no labels | truth")


def test_pictures_lie_on_whole_pixels_so_that_lines_stay_crisp(pack):
    sheet = show.show(pack, [0])
    image = np.asarray(Image.open(io.BytesIO(sheet._repr_png_() or b"")).convert("RGB"))
    assert image.shape[1] == legend.WIDE
    drawn = sheet.axes[0].images[0]
    left, right, bottom, top = (round(x) for x in drawn.get_extent())
    assert (image[top:bottom, left:right] == np.asarray(drawn.get_array())).all()


@pytest.mark.parametrize(
    ("names", "channels"),
    [
        (("background", "shirt"), 4),
        (tuple(f"class {n}" for n in range(34)), 3),
        (("$a_b$ %d <b>", "a very long name of a class of things " * 4, "手写\n\t"), 3),
    ],
    ids=["two classes and alpha", "34 classes", "strange names"],
)
def test_every_picture_is_drawn_without_warnings_and_inside_its_sheet(tmp_path, names, channels):
    every = np.arange(HEIGHT * WIDTH, dtype=np.uint8).reshape(HEIGHT, WIDTH) % len(names)
    pack = packed(tmp_path, {"train": [every], "val": [1]}, names, channels)
    answers = [np.ones((HEIGHT, WIDTH), np.uint8), pack.arrays["label"][0]]
    charts.balance(pack).savefig(io.BytesIO(), format="raw")
    charts.confused(analysis.confusion(pack, [0, 1], answers)).savefig(io.BytesIO(), format="raw")
    for sheet in (show.show(pack, [0], answers[:1]), legend.classes_legend(pack)):
        sheet.savefig(io.BytesIO(), format="raw")
        width, height = sheet.get_size_inches() * 100
        boxes = [text.get_window_extent() for text in sheet.axes[0].texts]
        assert len(boxes) >= len(names)
        for box in boxes:
            assert 0 <= box.x0 <= box.x1 <= width
            assert -2 <= box.y0 <= box.y1 <= height


def test_without_ids_a_notebook_shows_a_sentence_and_no_empty_strip(pack):
    for sheet in (segment.show(pack, []), segment.show(pack, [], []), segment.training_views(pack, [], Plan())):
        shown, _ = DisplayFormatter().format(sheet)
        assert shown == {"text/plain": "No samples to show: the list of ids is empty."}
        sheet.savefig(io.BytesIO(), format="raw")


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


def wrong_of(pack):
    """The colour (0 to 255) of what is wrong in the pack's first image where everything is taken for background; the
    title's, which the pixels below it have too."""
    sheet = segment.show(pack, [0], [np.zeros(pack.columns["label"].shape, np.uint8)])
    [title] = [text for text in sheet.axes[0].texts if text.get_text().startswith("wrong")]
    ink = np.array(to_rgb(title.get_color())) * 255
    pixels = np.asarray(sheet.axes[0].images[3].get_array()).reshape(-1, 3).astype(float)
    assert (abs(pixels - ink) <= 0.15 * 255 + 1).all(1).mean() > 0.02, "no pixels in the colour of the title"
    return ink


@pytest.mark.parametrize("vision", MACHADO)
@pytest.mark.parametrize(
    "colours",
    [[(213, 94, 0)], [(230, 159, 0), (86, 180, 233), (0, 158, 115)], SEVEN[:6].tolist()],
    ids=["vermilion", "orange, sky, green", "six of Okabe and Ito's"],
)
def test_what_is_wrong_has_a_colour_that_no_class_has(tmp_path, colours, vision):
    """As the colour-blind see them, too; 0.1 in OKLab is five times what is just seen."""
    names = ("background", *(f"class {n}" for n in range(len(colours))))
    made = packed(tmp_path, {"train": [patches(1, len(names))]}, names, colours=[(0, 0, 0), *colours])
    wrong = oklab(wrong_of(made), vision)
    assert min(np.linalg.norm(wrong - oklab(colour, vision)) for colour in colours) > 0.1


@pytest.mark.parametrize("classes", ["garment", "kinds"])
def test_in_the_demo_a_garment_and_an_error_have_different_colours(tmp_path, classes):
    raw = segment.demo(tmp_path / "raw", count=7, size=(48, 48), classes=classes)
    made = segment.pack(raw, into=tmp_path / "pack", progress=False)
    wrong, colours = wrong_of(made), made.options["colours"][1:]
    for vision in MACHADO:
        assert min(np.linalg.norm(oklab(wrong, vision) - oklab(colour, vision)) for colour in colours) > 0.1


@pytest.mark.parametrize(
    ("predicted", "said"),
    [
        ([], "got 0 for 1 id;"),
        ([np.zeros((HEIGHT, WIDTH), np.uint8)] * 2, "got 2 for 1 id;"),
        ([np.zeros((WIDTH, HEIGHT), np.uint8)], r"got \(32, 24\)"),
        ([np.full((HEIGHT, WIDTH), 3, np.uint8)], "numbers below 3, got .* from 0 to 3 for id 0"),
        ([np.full((HEIGHT, WIDTH), -1)], "numbers below 3, got .* from -1 to 0 for id 0"),
    ],
)
def test_predictions_that_do_not_belong_to_the_ids_are_refused(pack, predicted, said):
    for refused in (show.show, analysis.by_class, analysis.confusion, analysis.image_scores, analysis.worst):
        with pytest.raises(PackError, match=said):
            refused(pack, [0], predicted)


def test_the_live_picture_is_the_prediction_beside_the_truth_and_marks_nothing_as_wrong(pack, answers):
    for i in (0, 7):
        image, truth, said = show.preview(pack, i, answers[i])
        miou = analysis.image_scores(pack, [i], [answers[i]]).miou[0]
        assert (truth, said) == ("", f"mIoU {miou:.2f} | truth")
        assert image.dtype == np.uint8
        assert image.shape[1] <= show.LIVE[0]
        half = (image.shape[1] - show.PAPER) // 2
        picture = drawing.fitted(pack.arrays["image"][i], half, len(image))
        for part, label in ((image[:, :half], answers[i]), (image[:, -half:], pack.arrays["label"][i])):
            expected = show.drawn(pack, picture, drawing.nearest(label, half, len(image)))
            assert (part == expected).all()
        page = cards.html([Preview(image, truth, said)])
        assert said in page
        assert "<u>" not in page


def test_the_text_of_an_image_are_its_classes_the_largest_first(pack, tmp_path):
    label = np.zeros((HEIGHT, WIDTH), np.uint8)
    label[4:], label[20:, :3] = 2, 255
    small = packed(tmp_path, {"train": [label, 255]})
    assert [show.text_of(small, i) for i in (0, 1)] == ["trousers, background", ""]


def test_training_views_are_the_very_crops_that_training_gets(pack):
    plan = Plan(crop=32, scale_low=0.5, scale_high=2, flip=0.5, jitter=0.4, seed=3)
    ids = [0, 3]
    sheet = show.training_views(pack, ids, plan, epoch=2)
    raw = {**collate([pack.sample(i) for i in ids], pack.columns), "id": torch.tensor(ids)}
    batch = task.batch(raw, plan, Draws(3, 2, torch.tensor(ids)))
    for n in range(2):
        pixels = (batch["image"][n] * task.SPREAD + task.MEAN).round().byte().permute(1, 2, 0).contiguous().numpy()
        picture, label = panels.in_cell(pixels, batch["label"][n].byte().numpy())
        shown = [np.asarray(image.get_array()) for image in sheet.axes[0].images[2 * n : 2 * n + 2]]
        assert (shown[0] == picture).all()
        assert (shown[1] == show.drawn(pack, picture, label)).all()
    others = show.training_views(pack, ids, plan, epoch=3).axes[0].images
    assert (np.asarray(others[0].get_array()) != np.asarray(sheet.axes[0].images[0].get_array())).any()


# Tables


def slow_counts(pack, ids, answers):
    truth = [place for i in ids for place in pack.arrays["label"][i].flat]
    pairs = list(zip(truth, (place for answer in answers for place in answer.flat), strict=True))
    return [[sum(pair == (t, p) for pair in pairs) for p in range(3)] for t in range(3)]


def test_the_tables_are_what_counting_pixel_by_pixel_gives(pack, answers):
    ids = pack.ids("val")
    given = [answers[i] for i in ids]
    counts = np.array(slow_counts(pack, ids, given))
    assert (analysis.confusion(pack, ids, given).to_numpy() == counts).all()
    table = analysis.by_class(pack, ids, given).set_index("class")
    assert list(table.iou) == sorted(table.iou)
    for k, name in enumerate(NAMES):
        row, both = table.loc[name], counts[k, k]
        assert row.iou == both / (counts[k].sum() + counts[:, k].sum() - both)
        assert row.precision == both / counts[:, k].sum()
        assert row.recall == both / counts[k].sum()
        assert row.share == counts[k].sum() / counts.sum()
        other = max((j for j in range(3) if j != k), key=lambda j: counts[k, j])
        assert (row.confused, row.lost) == (NAMES[other], counts[k, other] / counts[k].sum())
        assert row.lost > 0


def test_the_mean_of_the_table_is_the_miou_of_an_evaluation(pack, answers):
    ids = pack.ids("val")
    given = [answers[i] for i in ids]
    found = evaluated(pack, ids, given)
    assert analysis.by_class(pack, ids, given).iou.mean() == pytest.approx(found["miou"])
    counts = analysis.confusion(pack, ids, given).to_numpy()
    assert counts.trace() / counts.sum() == pytest.approx(found["pixel_accuracy"])


def test_scores_of_images_are_those_of_an_evaluation_of_each_alone_and_nan_where_all_is_ignored(pack, answers):
    ids = pack.ids("val")
    given = [answers[i] for i in ids]
    table = analysis.image_scores(pack, ids, given)
    assert table.id.tolist() == ids.tolist()
    assert table.name.tolist() == [pack.names[i] for i in ids]
    for i, *found in table.drop(columns="name").to_numpy()[:-1]:
        assert found == pytest.approx(list(evaluated(pack, [i], [answers[int(i)]]).values()))
    assert np.isnan([table[name].iloc[-1] for name in ("miou", "pixel_accuracy", "boundary_f")]).all()


def test_the_worst_images_come_first_and_those_without_labels_not_at_all(pack, answers):
    ids = pack.ids("val")
    given = [answers[i] for i in ids]
    found = analysis.worst(pack, ids, given)
    mious = analysis.image_scores(pack, ids, given).set_index("id").miou
    assert sorted(found) == ids[:-1].tolist()
    assert [mious[i] for i in found] == sorted(mious[:-1])
    assert analysis.worst(pack, ids, given, 2) == found[:2]


def test_a_class_that_is_nowhere_has_no_iou_and_one_that_is_only_predicted_has_zero(tmp_path):
    pack = packed(tmp_path, {"val": [1]}, ("a", "b", "c", "d"))
    answer = np.ones((HEIGHT, WIDTH), np.uint8)
    answer[0] = 3
    table = analysis.by_class(pack, [0], [answer])
    assert table["class"].tolist() == ["d", "b", "a", "c"]
    assert table.iou.tolist()[:2] == [0, 23 / 24]
    assert np.isnan(table.iou[2:]).all()
    assert np.isnan(table.recall[0])
    assert table.confused.tolist() == ["", "d", "", ""]
    empty = analysis.by_class(pack, [], [])
    assert np.isnan(empty.iou).all()
    assert list(analysis.image_scores(pack, [], [])) == ["id", "name", "miou", "pixel_accuracy", "boundary_f"]


# The prior


def halves(left, right):
    label = np.full((HEIGHT, WIDTH), left, np.uint8)
    label[:, WIDTH // 2 :] = right
    return label


def test_the_prior_is_the_most_frequent_class_of_each_place_and_scores_as_an_evaluation_would(tmp_path):
    labels = {"train": [halves(0, 1), halves(0, 2), halves(1, 1), halves(0, 255)], "val": [halves(0, 1), halves(0, 2)]}
    pack = packed(tmp_path, labels)
    assert (baseline.prior(pack) == halves(0, 1)).all()
    found = baseline.position_prior(pack)
    assert found["miou"] == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert found["pixel_accuracy"] == 0.75
    assert found == pytest.approx(evaluated(pack, pack.ids("val"), [baseline.prior(pack)] * 2))
    with pytest.raises(PackError, match=r"'test' of .* is empty"):
        baseline.position_prior(pack, "test")


def test_where_training_has_no_label_the_prior_is_the_most_frequent_class_of_all(tmp_path):
    pack = packed(tmp_path, {"train": [halves(255, 2), halves(255, 1), halves(255, 2)]})
    assert (baseline.prior(pack) == 2).all()


def test_the_prior_is_the_same_however_much_is_counted_at_once(pack, monkeypatch):
    labels = np.stack([pack.arrays["label"][i] for i in pack.ids("train")])
    whole = baseline.prior(pack)
    for y, x in itertools.product(range(0, HEIGHT, 5), range(0, WIDTH, 7)):
        counts = np.bincount(labels[:, y, x], minlength=256)[:3]
        assert whole[y, x] == counts.argmax() or not counts.any()
    monkeypatch.setattr(baseline, "COUNTS", 3 * WIDTH * 5)
    monkeypatch.setattr(baseline, "CHUNK", 2 * WIDTH * 5)
    assert (baseline.prior(pack) == whole).all()


# Charts


def test_the_chart_of_balance_has_each_split_and_adds_up(pack):
    left, right = charts.balance(pack).axes
    assert [bars.get_label() for bars in left.containers] == ["train", "val"]
    order = [label.get_text() for label in left.get_yticklabels()]
    for split, pixels, images in zip(("train", "val"), left.containers, right.containers, strict=True):
        labels = pack.arrays["label"][pack.ids(split)]
        for name, share, held in zip(order, pixels, images, strict=True):
            place = NAMES.index(name)
            assert share.get_width() == pytest.approx((labels == place).sum() / (labels != 255).sum())
            assert held.get_width() == pytest.approx(np.mean([(label == place).any() for label in labels]))
    train = [bar.get_width() for bar in left.containers[0]]
    assert train == sorted(train, reverse=True)
    ignored = (pack.arrays["label"] == 255).mean()
    assert right.get_title(loc="right") == f"{100 * ignored:.1f} % of all pixels are ignored"
    swatches = np.asarray(left.collections[0].get_facecolor())[:, :3] * 255
    assert np.allclose(swatches, [SEVEN[NAMES.index(name)] for name in order])


@pytest.mark.parametrize(
    ("share", "text"), [(0, "none"), (1, "100 %"), (0.123, "12 %"), (0.0123, "1.2 %"), (0.00123, "0.12 %")]
)
def test_a_share_has_two_digits_that_count(share, text):
    assert charts.percent(share) == text


def test_rows_of_the_confusion_picture_are_shares_blue_where_right_and_vermilion_where_wrong(tmp_path):
    pack = packed(tmp_path, {"val": [0, 1]})
    answer = np.zeros((HEIGHT, WIDTH), np.uint8)
    answer[:6] = 1
    table = analysis.confusion(pack, [0, 1], [answer, np.ones_like(answer)])
    [axes] = charts.confused(table).axes
    colours = np.asarray(axes.images[0].get_array())
    assert np.allclose(colours[1, 1], to_rgb(RIGHT))
    assert np.allclose(1 - colours[0, 1], 0.5 * (1 - np.array(to_rgb(WRONG)))), "a quarter, drawn as its root"
    assert np.allclose(colours[2], 1), "no pixels, no colour"
    assert sorted(text.get_text() for text in axes.texts) == ["100", "25", "75"]


# Letters


def test_a_text_that_is_too_long_loses_its_middle_and_as_little_as_must_be():
    text = "train/a folder/0016E5_07959.png"
    style = letters.Letters.of(text)
    whole = style.width(text, 9)
    assert style.shortened(text, 9, math.ceil(whole)) == text
    short = style.shortened(text, 9, whole - 1)
    start, end = short.split("…")
    assert text.startswith(start)
    assert text.endswith(end)
    assert len(text) - 4 <= len(short) < len(text)
    for room in (20, 60, 120):
        assert style.width(style.shortened(text, 9, room), 9) <= room


def test_letters_that_no_font_has_are_written_as_code_points(monkeypatch):
    monkeypatch.setattr(letters, "system", list)
    style = letters.Letters.of("手a\n")
    assert style.plain("手a\n") == "U+624BaU+000A"
    assert style.families == (letters.SANS,)
