"""Skeletons drawn and animated: what is seen is there, what is not is not; charts and tables that add up."""

import io
import itertools
import random
from types import SimpleNamespace

import numpy as np
import pytest
from IPython.core.formatters import DisplayFormatter
from PIL import Image, ImageSequence

from nbtools.errors import DiskError, PackError
from nbtools.figures import RIGHT, WRONG
from nbtools.tasks import sign
from nbtools.tasks.sign import visualize
from nbtools.tasks.sign.visualize import frame, keypoints

COUNT = 40
SEEN = np.ones(78, bool)
POINTS = np.random.default_rng(0).uniform(0.3, 0.7, (78, 2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return sign.demo(tmp_path_factory.mktemp("signs"), COUNT, glosses=6, categories=2, features=True, frames=(10, 20))


@pytest.fixture(scope="module")
def pack(folder, tmp_path_factory):
    return sign.pack(folder, into=tmp_path_factory.mktemp("packed"), progress=False)


def test_what_is_not_seen_is_not_drawn_and_no_limb_leads_there():
    """An elbow at the zero of a missing point would draw a line to the corner of the picture."""
    assert not np.asarray(frame(POINTS, ~SEEN, 60)).any()
    moved, seen = POINTS.copy(), SEEN.copy()
    moved[13] = 0
    assert np.asarray(frame(moved, seen, 200))[:30, :30].any()
    seen[13] = False
    assert not np.asarray(frame(moved, seen, 200))[:30, :30].any()


def test_show_has_a_strip_from_the_first_frame_to_the_last_with_gloss_category_and_what_is_wrong(pack):
    ids = [0, 5, 9]
    truth = [sign.text_of(pack, i) for i in ids]
    assert truth == [pack.classes[pack.sample(i)["label"][0]] for i in ids]
    [axes] = sign.show(pack, ids).axes
    categories = [pack.options["categories"][pack.sample(i)["label"][1]] for i in ids]
    abouts = [f" · {c} · {len(pack.sample(i)['x'])} frames" for c, i in zip(categories, ids, strict=True)]
    expected = [t + about for t, about in zip(truth, abouts, strict=True)]
    assert [text.get_text() for text in axes.texts] == expected
    points, seen = keypoints(pack.sample(5))
    cells = np.split(np.asarray(axes.images[1].get_array()), visualize.MOMENTS, axis=1)
    for t in (0, -1):
        assert (cells[t][:, 1:] == np.asarray(frame(points[t], seen[t], visualize.CELL))[:, 1:]).all()
    other = next(name for name in pack.classes if name != truth[1])
    [axes] = sign.show(pack, np.array(ids), [truth[0], other, truth[2]]).axes
    assert [(text.get_text(), text.get_color()) for text in axes.texts] == [
        (expected[0], RIGHT),
        (f"{truth[1]} ≠ {other}{abouts[1]}", WRONG),
        (expected[2], RIGHT),
    ]
    assert "No samples to show: the list of ids is empty." in repr(sign.show(pack, [], []))
    with pytest.raises(PackError, match="one gloss for each id, got 1 for 2 ids"):
        sign.show(pack, [0, 1], ["x"])


def test_an_animation_is_a_png_with_every_frame_at_30_a_second_and_saved_where_asked(pack, tmp_path):
    points, seen = keypoints(pack.sample(2))
    movie = sign.animate(pack, 2, size=64)
    data = movie._repr_png_()
    shown, about = DisplayFormatter().format(movie)
    assert shown == {"image/png": data, "text/plain": f"{sign.text_of(pack, 2)}, {len(points)} frames"}
    assert about == {"image/png": {"alt": shown["text/plain"]}}
    assert b"acTL" in data, "an animated PNG says so before its first picture"
    image = Image.open(io.BytesIO(data))
    pauses = [one.info["duration"] for one in ImageSequence.Iterator(image)]
    assert sum(pauses) == pytest.approx(1000 * len(points) / 30, rel=0.02)  # equal frames in a row may be one
    image.seek(0)
    assert (np.asarray(image.convert("RGBA")) == np.asarray(frame(points[0], seen[0], 64))).all()
    for name, form in (("clip.png", "PNG"), ("clip.GIF", "GIF")):
        with Image.open(movie.save(tmp_path / name)) as image:
            assert (image.format, getattr(image, "n_frames", 1) > 5, image.info["loop"]) == (form, True, 0)
    with pytest.raises(PackError, match=r"saved as \.png or \.gif, got 'clip\.mp4'"):
        movie.save(tmp_path / "clip.mp4")
    (tmp_path / "file").touch()
    with pytest.raises(DiskError):
        movie.save(tmp_path / "file" / "clip.png")


OF = dict(zip("abcde", "xxyyz", strict=True))


@pytest.mark.parametrize("seed", range(3))
def test_the_tables_of_glosses_and_categories_are_what_counting_gives(seed):
    rng = random.Random(seed)
    truth = rng.choices("abcd", k=200)
    predicted = [name if rng.random() < 0.6 else rng.choice("abcde") for name in truth]
    table = sign.by_class(truth, predicted, OF)
    for cells in table.to_dict("records"):
        row = SimpleNamespace(**cells)
        read = [p for t, p in zip(truth, predicted, strict=True) if t == row.gloss]
        wrong = sorted({p for p in read if p != row.gloss}, key=lambda p: (-read.count(p), p))
        assert (row.category, row.clips, row.right) == (OF[row.gloss], len(read), read.count(row.gloss))
        assert (row.confused, row.times) == (wrong[0], read.count(wrong[0]))
    assert set(table.gloss) == set(truth)
    assert list(table.accuracy) == sorted(table.right / table.clips), "the worst first"
    assert sign.confusion(truth, predicted).to_numpy().sum() == len(truth)
    coarse = sign.confusion(sign.grouped(truth, OF), sign.grouped(predicted, OF), "xyz")
    pairs = [(OF[t], OF[p]) for t, p in zip(truth, predicted, strict=True)]
    for stood, read in itertools.product("xyz", repeat=2):
        assert coarse.loc[stood, read] == pairs.count((stood, read))
    by_category = sign.by_class(sign.grouped(truth, OF), sign.grouped(predicted, OF))
    assert all(coarse.loc[name, name] == n for name, n in by_category.set_index("class").right.items())
