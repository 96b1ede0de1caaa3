"""Skeletons drawn and animated: what is seen is there, what is not is not; charts and tables that add up."""

import io
import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
from IPython.core.formatters import DisplayFormatter
from matplotlib.colors import to_rgb
from PIL import Image, ImageSequence

from nbtools.errors import DiskError, PackError
from nbtools.tasks import sign
from nbtools.tasks.common.figures import RIGHT, WRONG
from nbtools.tasks.sign import visualize
from nbtools.tasks.sign.keypoints import FACE, HANDS, LEFT, POSE
from nbtools.tasks.sign.keypoints import RIGHT as RIGHT_HAND
from nbtools.tasks.sign.visualize import BODY_INK, FACE_INK, LEFT_INK, RIGHT_INK, frame

COUNT = 40
WHOLE = visualize.View(0.0, 0.0, 1.0)
SEEN = np.ones(78, bool)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return sign.demo(tmp_path_factory.mktemp("signs"), COUNT, glosses=6, categories=2, features=True)


@pytest.fixture(scope="module")
def pack(folder, tmp_path_factory):
    return sign.pack(folder, into=tmp_path_factory.mktemp("packed"), progress=False)


@pytest.fixture(scope="module")
def points(pack):
    """(78, 2): somebody of whom every point is seen."""
    for i in range(len(pack)):
        places, seen = visualize.keypoints(pack, i)
        if seen.all(1).any():
            return places[seen.all(1).argmax()]
    raise AssertionError("no frame of the demo shows all points")


def inked(image, colour):
    """Whether a picture holds pixels of exactly a colour."""
    return bool((np.asarray(image) == np.round(255 * np.array(to_rgb(colour)))).all(-1).any())


@pytest.mark.parametrize(
    ("part", "colour"), [(LEFT, LEFT_INK), (RIGHT_HAND, RIGHT_INK), (FACE, FACE_INK), (POSE, BODY_INK)]
)
def test_a_part_is_drawn_in_its_colour_where_it_is_seen_and_only_there(points, part, colour):
    only = ~SEEN
    only[part] = True
    alone = frame(points, only, WHOLE, 300)
    assert inked(alone, colour)
    assert not inked(alone, RIGHT)
    assert not inked(alone, WRONG), "these colours mean right and wrong"
    if part in HANDS:
        assert not inked(frame(points, ~only, WHOLE, 300), colour)


def test_what_is_not_seen_is_not_drawn_and_no_limb_leads_there(points):
    """An elbow at the zero of a missing point would draw a line to the corner of the picture."""
    assert (np.asarray(frame(0 * points, ~SEEN, WHOLE, 60)) == 255).all()
    moved, seen = points.copy(), SEEN.copy()
    moved[13] = 0
    assert (np.asarray(frame(moved, seen, WHOLE, 200))[:30, :30] < 255).any()
    seen[13] = False
    assert (np.asarray(frame(moved, seen, WHOLE, 200))[:30, :30] == 255).all()


def test_each_point_of_a_body_is_drawn():
    """Each moved alone changes the picture; so no limb is forgotten in the table."""
    points = np.random.default_rng(0).uniform(0.3, 0.7, (78, 2))
    drawn = np.asarray(frame(points, SEEN, WHOLE, 120))
    of_pose_hands = {15 + k for k in range(8)}  # wrists and, of the pose, fingers: the hands show them better
    for point in set(range(78)) - of_pose_hands:
        moved = points.copy()
        moved[point] = 0.05
        assert (np.asarray(frame(moved, SEEN, WHOLE, 120)) != drawn).any(), point


def test_a_view_holds_all_that_is_seen_in_a_square_and_nothing_else_matters(pack):
    points, seen = visualize.keypoints(pack, 0)
    view = visualize.view_of(points, seen)
    placed = view.place(points, 100)[seen]
    assert placed.min() > 0
    assert placed.max() < 100
    assert (placed.max(0) - placed.min(0)).max() > 85
    assert visualize.view_of(np.where(seen[..., None], points, 17.0), seen) == view
    assert visualize.view_of(points, np.zeros_like(seen)) == WHOLE


def test_show_has_a_strip_from_the_first_frame_to_the_last_with_gloss_category_and_what_is_wrong(pack):
    ids = [0, 5, 9]
    truth = [sign.text_of(pack, i) for i in ids]
    assert truth == [pack.classes[pack.sample(i)["label"][0]] for i in ids]
    [axes] = sign.show(pack, ids).axes
    categories = [pack.options["categories"][pack.sample(i)["label"][1]] for i in ids]
    expected = [(t, f"{c} · {len(pack.sample(i)['x'])} frames") for t, c, i in zip(truth, categories, ids, strict=True)]
    assert [text.get_text() for text in axes.texts] == list(itertools.chain(*expected))
    points, seen = visualize.keypoints(pack, 5)
    cells = np.split(np.asarray(axes.images[1].get_array()), visualize.MOMENTS, axis=1)
    for place, t in ((0, 0), (-1, -1)):
        alone = np.asarray(frame(points[t], seen[t], visualize.view_of(points, seen), visualize.CELL))
        assert (cells[place][:, 1:] == alone[:, 1:]).all()
    other = next(name for name in pack.classes if name != truth[1])
    [axes] = sign.show(pack, np.array(ids), [truth[0], other, truth[2]]).axes
    assert [(text.get_text(), text.get_color()) for text in axes.texts[::2]] == [
        (truth[0], RIGHT),
        (f"{truth[1]} ≠ {other}", WRONG),
        (truth[2], RIGHT),
    ]


def test_a_figure_of_clips_is_a_png_and_one_of_none_a_sentence(pack):
    assert Image.open(io.BytesIO(sign.show(pack, [0], ["$\\alpha <b>_"])._repr_png_() or b"")).format == "PNG"
    shown, _ = DisplayFormatter().format(sign.show(pack, [], []))
    assert shown == {"text/plain": "No samples to show: the list of ids is empty."}
    with pytest.raises(PackError, match="one gloss for each id, got 1 for 2 ids"):
        sign.show(pack, [0, 1], ["x"])


def test_an_animation_is_a_png_with_every_frame_at_30_a_second(pack):
    points, seen = visualize.keypoints(pack, 2)
    movie = sign.animate(pack, 2, size=64)
    assert len(movie.frames) == len(points)
    data = movie._repr_png_()
    assert b"acTL" in data, "an animated PNG says so before its first picture"
    image = Image.open(io.BytesIO(data))
    pauses = [one.info["duration"] for one in ImageSequence.Iterator(image)]
    assert sum(pauses) == pytest.approx(1000 * len(points) / 30, rel=0.02)  # equal frames in a row may be one
    image.seek(0)
    first = frame(points[0], seen[0], visualize.view_of(points, seen), 64)
    assert (np.asarray(image.convert("RGB")) == np.asarray(first)).all()
    assert image.info["loop"] == 0


def test_an_animation_is_saved_where_asked_and_other_files_are_refused(pack, tmp_path):
    movie = sign.animate(pack, 2, size=16)
    for name, form in (("clip.png", "PNG"), ("clip.GIF", "GIF")):
        with Image.open(movie.save(tmp_path / name)) as image:
            assert (image.format, getattr(image, "n_frames", 1) > 10) == (form, True)
    with pytest.raises(PackError, match=r"saved as \.png or \.gif, got 'clip\.mp4'"):
        movie.save(tmp_path / "clip.mp4")
    (tmp_path / "file").touch()
    with pytest.raises(DiskError):
        movie.save(tmp_path / "file" / "clip.png")


def test_the_live_picture_shows_the_paths_of_the_hands(pack):
    images = set()
    for i in range(4):
        image, truth, answer, whole = sign.preview(pack, i, "answer")
        assert (image.dtype, image.shape[2], truth, answer, whole) == (
            np.uint8,
            3,
            sign.text_of(pack, i),
            "answer",
            True,
        )
        _, seen = visualize.keypoints(pack, i)
        for hand, ink in zip(HANDS, (LEFT_INK, RIGHT_INK), strict=True):
            assert inked(image, ink) == seen[:, hand].any()
        images.add(image.tobytes())
    assert len(images) == 4


def test_a_pack_of_features_alone_has_charts_and_says_that_there_is_nothing_to_draw(folder, tmp_path):
    alone = sign.pack(folder, kp_key=None, into=tmp_path / "pack", progress=False)
    with pytest.raises(PackError, match="no keypoints to draw"):
        sign.animate(alone, 0)
    assert sign.lengths(alone).axes[0].patches


def test_every_clip_is_in_the_chart_of_lengths_and_of_glosses(pack):
    def heights(axes):
        return sum(patch.get_height() for patch in axes.patches if patch.get_height() > 0)

    assert heights(sign.lengths(pack).axes[0]) == COUNT
    [axes] = sign.classes(pack).axes
    assert heights(axes) == COUNT
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert labels == sorted(pack.classes, key=lambda name: name.split()[0])
    train = [patch.get_height() for patch in axes.containers[0]]
    assert dict(zip(labels, train, strict=True)) == dict(zip(pack.classes, pack.card.counts["gloss"], strict=True))


OF = dict(zip("abcde", "xxyyz", strict=True))


def answers(seed, count=200):
    rng = random.Random(seed)
    truth = rng.choices("abcd", k=count)
    return truth, [name if rng.random() < 0.6 else rng.choice("abcde") for name in truth]


@pytest.mark.parametrize("seed", range(5))
def test_the_tables_of_glosses_and_categories_are_what_counting_gives(seed):
    truth, predicted = answers(seed)
    table = sign.by_class(truth, predicted, OF)
    for cells in table.to_dict("records"):
        row = SimpleNamespace(**cells)
        read = [p for t, p in zip(truth, predicted, strict=True) if t == row.gloss]
        wrong = sorted({p for p in read if p != row.gloss}, key=lambda p: (-read.count(p), p))
        assert (row.category, row.clips, row.right) == (OF[row.gloss], len(read), read.count(row.gloss))
        assert (row.confused, row.times) == (wrong[0], read.count(wrong[0]))
    assert set(table.gloss) == set(truth)
    assert list(table.accuracy) == sorted(table.right / table.clips), "the worst first"
    fine = sign.confusion(truth, predicted)
    coarse = sign.confusion(sign.grouped(truth, OF), sign.grouped(predicted, OF), "xyz")
    assert fine.to_numpy().sum() == coarse.to_numpy().sum() == len(truth)
    for stood, read in itertools.product("xyz", repeat=2):
        parts = [fine.loc[a, b] for a, b in itertools.product(fine.index, repeat=2) if (OF[a], OF[b]) == (stood, read)]
        assert coarse.loc[stood, read] == sum(parts)
    by_category = sign.by_class(sign.grouped(truth, OF), sign.grouped(predicted, OF))
    assert all(coarse.loc[name, name] == n for name, n in by_category.set_index("class").right.items())


def test_classes_that_no_clip_has_get_a_row_of_zeros_and_strange_ones_an_error(pack):
    table = sign.confusion(["a"], ["b"], "abc")
    assert table.to_numpy().tolist() == [[0, 1, 0], [0, 0, 0], [0, 0, 0]]
    assert sign.confused(table)._repr_png_()
    with pytest.raises(PackError, match="'b' is missing"):
        sign.confusion(["a"], ["b"], "ac")
    with pytest.raises(PackError, match="got 2 for 1 id"):
        sign.by_class(["a"], ["a", "b"])
    empty = sign.by_class([], [])
    assert (len(empty), next(iter(empty))) == (0, "class")
    of = sign.categories_of(pack)
    assert of == sign.categories_of(pack.card)
    assert list(of.values()) == ["greeting"] * 3 + ["survival"] * 3
    assert all(name.startswith(category) for name, category in of.items())
