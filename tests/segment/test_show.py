"""Labels over images, the figures that name their classes, and the live picture."""

import io
from typing import Any

import numpy as np
from packs import pack_of

from nbtools.tasks import segment

HEIGHT, WIDTH = 24, 32


def test_images_stand_next_to_their_classes_and_to_what_was_predicted(tmp_path):
    """Noise in blocks of classes, the last sample without any label."""
    rng, samples = np.random.default_rng(0), {}
    for n in range(3):
        blocks = rng.integers(0, 3, (3, 4)).repeat(8, 0).repeat(8, 1)
        label = np.where(n == 2, 255, blocks).astype(np.uint8)
        image = rng.integers(0, 256, (HEIGHT, WIDTH, 3), dtype=np.uint8)
        samples[f"{n}.png"] = {"image": image, "label": label, "distance": segment.distance_map(label)}
    pack = pack_of(samples, tmp_path, task="segment", classes=["$a_b$ %d <b>", "a long name " * 9, "手写\n\t"])
    answers = [np.full((HEIGHT, WIDTH), n, np.uint8) for n in range(3)]
    sheet = segment.show(pack, range(3), answers)
    sheet.savefig(io.BytesIO(), format="raw")  # without a warning
    legend: Any = sheet.axes[0].get_legend()
    assert [text.get_text()[:6] for text in legend.get_texts()] == ["$a_b$ ", "a long", "手写\n\t", "ignore"]
    assert [text.get_text() for text in sheet.axes[0].texts][:3] == ["0 · 0.png", "truth", "predicted"]
    drawn = [np.asarray(image.get_array()).astype(int) for image in sheet.axes[0].images]
    assert len(drawn) == 9
    assert np.ptp(drawn[7], 2).max() == 0, "pixels without a label are grey"
    assert segment.preview(pack, 0, pack.arrays["label"][0])[1:] == ("", "100% of pixels right | truth")
    assert segment.preview(pack, 2, answers[0])[2] == "no labels | truth"
