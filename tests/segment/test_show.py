"""Labels over images, and the figures that name their classes."""

import io
from typing import Any

import numpy as np
import pytest
from packs import pack_of

from nbtools.errors import PackError
from nbtools.tasks import segment

HEIGHT, WIDTH = 24, 32
NAMES = ("background", "shirt", "trousers")


def packed(folder, names=NAMES, channels=3):
    """Three samples of random rectangles, some of them ignored, over noise; nothing of the last has a label."""
    rng, samples = np.random.default_rng(0), {}
    for n in range(3):
        label = np.full((HEIGHT, WIDTH), 255 if n == 2 else n, np.uint8)
        for _ in range(6 if n < 2 else 0):
            y, x = rng.integers(HEIGHT), rng.integers(WIDTH)
            label[y : y + 9, x : x + 12] = 255 if rng.random() < 0.2 else rng.integers(3)
        image = rng.integers(0, 256, (HEIGHT, WIDTH, channels), dtype=np.uint8)
        samples[f"{n}.png"] = {"image": image, "label": label, "distance": segment.distance_map(label)}
    return pack_of(samples, folder, task="segment", classes=list(names))


def texts(sheet):
    return [text.get_text() for text in sheet.axes[0].texts]


def test_images_stand_next_to_their_classes_and_to_what_was_predicted(tmp_path):
    pack = packed(tmp_path)
    answers = [np.full((HEIGHT, WIDTH), n, np.uint8) for n in range(3)]
    sheet = segment.show(pack, range(3), answers)
    assert texts(sheet)[:3] == ["0 · 0.png", "truth", "predicted"]
    drawn = [np.asarray(image.get_array()).astype(int) for image in sheet.axes[0].images]
    assert len(drawn) == 9
    assert np.ptp(drawn[7], 2).max() == 0, "pixels without a label are grey"
    assert len(texts(segment.show(pack, [0, 1]))) == 4
    with pytest.raises(PackError, match=r"got 1 for 3 ids"):
        segment.show(pack, range(3), answers[:1])
    assert "No samples to show" in repr(segment.show(pack, []))


def test_the_live_picture_has_the_prediction_left_of_the_truth(tmp_path):
    pack = packed(tmp_path)
    answer = np.where(pack.arrays["label"][0] == 255, 0, pack.arrays["label"][0])
    image, truth, text = segment.preview(pack, 0, answer)
    assert (image.shape[2], truth, text) == (3, "", "100% of pixels right | truth")
    assert segment.preview(pack, 2, answer)[2] == "no labels | truth"


@pytest.mark.parametrize("names", [NAMES, ("$a_b$ %d <b>", "a very long name of a class of things " * 4, "手写\n\t")])
@pytest.mark.parametrize("channels", [3, 4])
def test_every_figure_is_drawn_without_warnings_and_names_the_classes(tmp_path, names, channels):
    pack = packed(tmp_path, names, channels)
    for sheet in (segment.show(pack, [0]), segment.training_views(pack, [0], segment.Plan(crop=32, flip=0.5))):
        sheet.savefig(io.BytesIO(), format="raw")
        legend: Any = sheet.axes[0].get_legend()
        named = [text.get_text() for text in legend.get_texts()]
        assert named[0].startswith(names[0][:6])
        assert named[3:] == ["ignored"]
