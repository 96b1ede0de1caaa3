"""Skeletons drawn and animated: what is seen is there, what is not is not; charts and tables that add up."""

import io
import itertools
import random

import numpy as np
import pandas as pd
import pytest
from IPython.core.formatters import DisplayFormatter
from matplotlib.colors import to_rgb
from PIL import Image, ImageSequence

from nbtools.errors import DiskError, PackError
from nbtools.tasks import sign
from nbtools.tasks.common.figures import RIGHT, WRONG
from nbtools.tasks.sign.acting import motions, signers
from nbtools.tasks.sign.acting.demo import demo
from nbtools.tasks.sign.clips.data import pack as pack_signs
from nbtools.tasks.sign.landmarks import FACE, LEFT, POSE
from nbtools.tasks.sign.landmarks import RIGHT as RIGHT_HAND
from nbtools.tasks.sign.looking import analysis, charts, drawing
from nbtools.tasks.sign.looking.show import (
    CELL,
    LIVE,
    MARGIN,
    MOMENTS,
    animate,
    category_of,
    keypoints,
    preview,
    show,
    strip,
    text_of,
)

COUNT = 40
WHOLE = drawing.View(0.0, 0.0, 1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return demo(tmp_path_factory.mktemp("signs"), COUNT, glosses=6, categories=2, features=True)


@pytest.fixture(scope="module")
def pack(folder, tmp_path_factory):
    return pack_signs(folder, into=tmp_path_factory.mktemp("packed"), progress=False)


@pytest.fixture(scope="module")
def person():
    """(points (78, 2), all seen) of somebody with both hands up."""
    gloss = next(gloss for gloss in motions.lexicon(60, 1, 0) if gloss.hands == "both")
    points = signers.signed(signers.signer(0, 0), gloss, np.ones(3), np.linspace(0, 1, 3), np.random.default_rng(0))
    return points[0], np.ones(78, bool)


def inked(image, colour):
    """Whether a picture holds pixels of exactly a colour."""
    wanted = np.round(255 * np.array(to_rgb(colour)))
    return bool((np.asarray(image) == wanted).all(-1).any())


# Frames


@pytest.mark.parametrize(
    ("gone", "colour"),
    [(LEFT, drawing.LEFT_INK), (RIGHT_HAND, drawing.RIGHT_INK)],
    ids=["left", "right"],
)
def test_a_hand_is_drawn_in_its_colour_where_it_is_seen_and_only_there(person, gone, colour):
    points, seen = person
    assert inked(drawing.frame(points, seen, WHOLE, 200), colour)
    hidden = seen.copy()
    hidden[gone] = False
    image = drawing.frame(points, hidden, WHOLE, 200)
    assert not inked(image, colour)
    other = drawing.RIGHT_INK if colour == drawing.LEFT_INK else drawing.LEFT_INK
    assert inked(image, other)


def test_a_frame_that_shows_nothing_is_blank_wherever_its_zeros_lie(person):
    points, seen = person
    assert (np.asarray(drawing.frame(0 * points, ~seen, WHOLE, 60)) == 255).all()


def test_no_limb_goes_to_a_point_that_is_not_seen(person):
    """An elbow at the zero of a missing point would draw a line to the corner of the picture."""
    points, seen = person[0].copy(), person[1].copy()
    points[13], seen[13] = 0, False
    image = np.asarray(drawing.frame(points, seen, WHOLE, 200))
    assert (image[:30, :30] == 255).all()
    seen[13] = True
    assert (np.asarray(drawing.frame(points, seen, WHOLE, 200))[:30, :30] < 255).any()


def test_each_point_of_a_body_is_drawn():
    """Each moved alone changes the picture; so no limb is forgotten in the table."""
    points = np.random.default_rng(0).uniform(0.3, 0.7, (78, 2))
    seen = np.ones(78, bool)
    drawn = np.asarray(drawing.frame(points, seen, WHOLE, 120))
    of_pose_hands = {15 + k for k in range(8)}  # wrists and, of the pose, fingers: the hands show them better
    for point in set(range(78)) - of_pose_hands:
        moved = points.copy()
        moved[point] = 0.05
        assert (np.asarray(drawing.frame(moved, seen, WHOLE, 120)) != drawn).any(), point


def test_a_view_holds_all_that_is_seen_in_a_square_and_nothing_else_matters(pack):
    points, seen = keypoints(pack, 0)
    view = drawing.view_of(points, seen)
    placed = view.placed(points, 100)[seen]
    assert placed.min() > 0
    assert placed.max() < 100
    assert (placed.max(0) - placed.min(0)).max() > 85
    away = np.where(seen[..., None], points, 17.0)
    assert drawing.view_of(away, seen) == view
    assert drawing.view_of(points, np.zeros_like(seen)) == WHOLE


# Clips


def test_a_strip_shows_the_first_and_the_last_frame_and_some_between(pack):
    points, seen = keypoints(pack, 1)
    image = strip(points, seen, size=40, count=5)
    assert image.shape == (40, 200, 3)
    view = drawing.view_of(points, seen)
    for place, t in ((0, 0), (4, -1)):
        expected = np.asarray(drawing.frame(points[t], seen[t], view, 40))
        assert (image[:, 40 * place + 1 : 40 * place + 40] == expected[:, 1:]).all()


def test_show_says_gloss_category_and_frames_and_marks_what_is_wrong(pack):
    ids = [0, 5, 9]
    truth = [text_of(pack, i) for i in ids]
    assert truth == [pack.classes[pack.sample(i)["label"][0]] for i in ids]
    [axes] = show(pack, ids).axes
    said = [text.get_text() for text in axes.texts]
    frames = [len(pack.sample(i)["x"]) for i in ids]
    assert said[::2] == truth
    assert said[1::2] == [f"{category_of(pack, i)} · {n} frames" for i, n in zip(ids, frames, strict=True)]
    assert len(axes.images) == 3
    other = next(name for name in pack.classes if name != truth[1])
    [axes] = show(pack, np.array(ids), [truth[0], other, truth[2]]).axes
    assert [(text.get_text(), text.get_color()) for text in axes.texts[::2]] == [
        (truth[0], RIGHT),
        (f"{truth[1]} ≠ {other}", WRONG),
        (truth[2], RIGHT),
    ]


def test_a_sheet_of_clips_is_a_png_and_one_of_none_a_sentence(pack):
    image = Image.open(io.BytesIO(show(pack, [0, 1])._repr_png_() or b""))
    assert image.format == "PNG"
    assert image.width == 2 * MARGIN + MOMENTS * CELL
    for nothing in (sign.show(pack, []), sign.show(pack, [], [])):
        shown, _ = DisplayFormatter().format(nothing)
        assert shown == {"text/plain": "No samples to show: the list of ids is empty."}


def test_hands_have_neither_the_colour_of_right_nor_of_wrong(person):
    points, seen = person
    image = drawing.frame(points, seen, WHOLE, 300)
    assert inked(image, drawing.RIGHT_INK)
    for said in (RIGHT, WRONG):
        assert not inked(image, said)


@pytest.mark.parametrize("name", ["$\\alpha", "a_b$c$", "<b>&", "_", "%d"])
def test_any_name_is_drawn_as_it_is(pack, name):
    shown = show(pack, [0], [name])
    assert name in shown.axes[0].texts[0].get_text()
    shown._repr_png_()


def test_predictions_belong_to_ids(pack):
    with pytest.raises(PackError, match="one gloss an id, got 1 for 2 ids"):
        show(pack, [0, 1], ["x"])


def test_an_animation_is_a_png_with_every_frame_at_30_a_second(pack):
    points, seen = keypoints(pack, 2)
    movie = animate(pack, 2, size=64)
    assert len(movie.frames) == len(points)
    data = movie._repr_png_()
    assert data.startswith(b"\x89PNG")
    assert b"acTL" in data, "an animated PNG says so before its first picture"
    image = Image.open(io.BytesIO(data))
    pauses = [frame.info["duration"] for frame in ImageSequence.Iterator(image)]
    assert sum(pauses) == pytest.approx(1000 * len(points) / 30, rel=0.02)  # equal frames in a row may be one
    image.seek(0)
    first = drawing.frame(points[0], seen[0], drawing.view_of(points, seen), 64)
    assert (np.asarray(image.convert("RGB")) == np.asarray(first)).all()
    assert image.info["loop"] == 0


@pytest.mark.parametrize(("name", "form"), [("clip.png", "PNG"), ("clip.GIF", "GIF")])
def test_an_animation_is_saved_where_asked(pack, tmp_path, name, form):
    path = animate(pack, 2, size=32).save(tmp_path / name)
    with Image.open(path) as image:
        assert (image.format, getattr(image, "n_frames", 1) > 10) == (form, True)


def test_other_files_and_folders_that_are_not_there_are_refused(pack, tmp_path):
    movie = animate(pack, 2, size=16)
    with pytest.raises(PackError, match=r"saved as \.png or \.gif, got 'clip\.mp4'"):
        movie.save(tmp_path / "clip.mp4")
    (tmp_path / "file").touch()
    with pytest.raises(DiskError):
        movie.save(tmp_path / "file" / "clip.png")


def test_the_live_picture_shows_the_ways_of_the_hands(pack):
    images = []
    for i in range(4):
        image, truth, answer, whole = preview(pack, i, "answer")
        assert whole
        assert (image.dtype, image.shape, answer) == (np.uint8, (2 * LIVE, 2 * LIVE, 3), "answer")
        assert truth == text_of(pack, i)
        _, seen = keypoints(pack, i)
        for hand, ink in ((LEFT, drawing.LEFT_INK), (RIGHT_HAND, drawing.RIGHT_INK)):
            assert inked(image, ink) == seen[:, hand].any()
        images.append(image.tobytes())
    assert len(set(images)) == 4


def test_a_pack_of_features_alone_says_that_there_is_nothing_to_draw(folder, tmp_path):
    alone = pack_signs(folder, kp_key=None, into=tmp_path / "pack", progress=False)
    with pytest.raises(PackError, match="no keypoints to draw"):
        animate(alone, 0)
    assert charts.lengths(alone).axes[0].patches


# Charts


def heights(axes):
    return sum(patch.get_height() for patch in axes.patches if patch.get_height() > 0)


def test_every_clip_is_in_the_chart_of_lengths_and_of_glosses(pack):
    assert heights(charts.lengths(pack).axes[0]) == COUNT
    [axes] = charts.classes(pack).axes
    assert heights(axes) == COUNT
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == sorted(pack.classes, key=lambda name: name.split()[0])
    train = [patch.get_height() for patch in axes.containers[0]]
    counts = np.bincount(pack.arrays["label"][pack.ids("train"), 0], minlength=6)
    assert dict(zip(labels, train, strict=True)) == dict(zip(pack.classes, counts, strict=True))


# Tables


def answers(count=200, seed=0, names="abcde"):
    rng = random.Random(seed)
    truth = rng.choices(names[:-1], k=count)
    return truth, [name if rng.random() < 0.6 else rng.choice(names) for name in truth]


def columns(table, *names):
    return list(zip(*(table[name] for name in names), strict=True))


def slow_rows(truth, predicted):
    """The table by counting anew for each cell."""
    rows = {}
    for name in set(truth):
        read = [p for t, p in zip(truth, predicted, strict=True) if t == name]
        wrong = sorted({p for p in read if p != name}, key=lambda p: (-read.count(p), p))
        other = wrong[0] if wrong else ""
        rows[name] = (len(read), read.count(name), other, read.count(other) if other else 0)
    return rows


@pytest.mark.parametrize("seed", range(5))
def test_the_table_of_glosses_is_what_counting_gives(seed):
    truth, predicted = answers(seed=seed)
    table = analysis.by_class(truth, predicted, dict(zip("abcde", "xxyyz", strict=True)))
    found = {gloss: tuple(cells) for gloss, *cells in columns(table, "gloss", "clips", "right", "confused", "times")}
    assert found == slow_rows(truth, predicted)
    assert table.clips.sum() == len(truth)
    assert table.right.sum() == sum(map(str.__eq__, truth, predicted))
    assert list(table.accuracy) == sorted(table.right / table.clips)
    assert [*table.category] == [{"a": "x", "b": "x", "c": "y", "d": "y"}[name] for name in table.gloss]


@pytest.mark.parametrize("seed", range(3))
def test_the_confusions_of_categories_are_those_of_their_glosses_together(seed):
    truth, predicted = answers(seed=seed)
    of = dict(zip("abcde", "xxyyz", strict=True))
    fine = analysis.confusion(truth, predicted)
    coarse = analysis.confusion(analysis.grouped(truth, of), analysis.grouped(predicted, of), "xyz")
    assert fine.to_numpy().sum() == coarse.to_numpy().sum() == len(truth)
    for stood, read in itertools.product("xyz", repeat=2):
        parts = [fine.loc[a, b] for a, b in itertools.product(fine.index, repeat=2) if (of[a], of[b]) == (stood, read)]
        assert coarse.loc[stood, read] == sum(parts)
    rows = columns(analysis.by_class(truth, predicted), "class", "right")
    assert all(right == fine.loc[gloss, gloss] for gloss, right in rows)


def test_classes_that_no_clip_has_get_a_row_of_zeros_and_strange_ones_an_error():
    table = analysis.confusion(["a"], ["b"], "abc")
    assert table.to_numpy().tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0]]
    with pytest.raises(PackError, match="'b' is missing"):
        analysis.confusion(["a"], ["b"], "ac")
    with pytest.raises(PackError, match="got 1 and 2"):
        analysis.by_class(["a"], ["a", "b"])
    empty = analysis.by_class([], [])
    assert (len(empty), next(iter(empty))) == (0, "class")


def test_a_pack_tells_the_category_of_each_gloss_in_their_order(pack):
    of = analysis.categories_of(pack)
    assert of == analysis.categories_of(pack.card)
    assert list(of.values()) == ["greeting"] * 3 + ["survival"] * 3
    assert all(name.startswith(category) for name, category in of.items())


def test_the_confusion_picture_is_blue_where_right_and_vermilion_where_wrong():
    truth, predicted = ["a"] * 100 + ["b"] * 4, ["a"] * 99 + ["b"] + ["b"] * 4
    [axes] = charts.confused(analysis.confusion(truth, predicted, "abc")).axes
    [image] = axes.images
    colours = np.asarray(image.get_array())
    assert np.allclose(colours[1, 1], to_rgb(RIGHT))
    assert np.allclose(colours[1, 0], 1)
    assert np.allclose(colours[2], 1), "no clips, no colour"
    far = 1 - colours[0, 1]
    assert far.max() >= 0.1 - 1e-9, "one clip in a hundred is seen"
    assert np.allclose(far / far.max(), (1 - np.array(to_rgb(WRONG))) / (1 - np.array(to_rgb(WRONG))).max())
    assert sorted(text.get_text() for text in axes.texts) == ["1", "4", "99"]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["a", "b", "c"]


@pytest.mark.parametrize("count", [1, 105, 130])
def test_a_confusion_picture_of_any_size_is_drawn(count):
    names = [f"gloss ${n}_" for n in range(count)]
    table = pd.DataFrame(np.eye(count, dtype=int), names, names)
    shown = charts.confused(table)
    assert len(Image.open(io.BytesIO(shown._repr_png_() or b"")).getbands()) >= 3
    assert max(shown.get_size_inches()) <= 16


def test_face_and_body_have_colours_of_their_own(person):
    points, seen = person
    for part, ink in ((FACE, drawing.FACE_INK), (POSE, drawing.BODY_INK)):
        only = np.zeros_like(seen)
        only[part] = True
        assert inked(drawing.frame(points, only, WHOLE, 300), ink)
