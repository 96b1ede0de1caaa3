"""Scales and mirror images against a slow obvious version; metrics against counting pixels; labels over images."""

import io
from typing import Any

import numpy as np
import pytest
import torch
from packs import pack_of
from torch.nn import functional as F

from nbtools.tasks import segment
from nbtools.tasks.segment import Plan
from nbtools.tasks.segment.networks import SIZES, BiSeNetV2
from nbtools.train import Sums

CLASSES, IGNORE = 4, 255


def one_by_one(network, image, plan):
    """(K, H, W) probabilities of one image (3, H, W)."""
    size, every = image.shape[1:], []
    for scale in plan.eval_scales:
        small = F.interpolate(image[None], [round(n * scale) for n in size], mode="bilinear", align_corners=False)
        for mirrored in (False, True) if plan.eval_flip else (False,):
            found = network({"image": small.flip(3) if mirrored else small})[0].softmax(1)
            found = found.flip(3) if mirrored else found
            every.append(F.interpolate(found, size, mode="bilinear", align_corners=False)[0])
    return torch.stack(every).mean(0)


@torch.no_grad()
@pytest.mark.parametrize(("scales", "flip"), [((0.5, 1.0, 1.75), False), ((0.5, 1.25), True), ((1.0,), True)])
def test_logits_are_the_logarithm_of_the_mean_probabilities_image_by_image(scales, flip):
    torch.manual_seed(0)
    network, passes = BiSeNetV2(CLASSES, sizes=SIZES["slim"]).eval(), []
    network.register_forward_hook(lambda *_: passes.append(1))
    plan = Plan(eval_scales=scales, eval_flip=flip)
    batch = {"image": torch.randn(3, 3, 47, 75), "id": torch.arange(3)}
    logits, others = segment.infer(network, batch, plan)
    assert len(passes) == len(scales) * (1 + flip), "one pass at a time"
    assert others == ()
    for one, image in zip(logits, batch["image"], strict=True):
        torch.testing.assert_close(one.exp(), one_by_one(network, image, plan))
    target = torch.randint(0, CLASSES, (3, 47, 75))
    torch.testing.assert_close(F.cross_entropy(logits, target), F.nll_loss(logits, target))


def read(*batches):
    """The values of the task's metrics over batches of (labels, logits)."""
    sums = Sums()
    for labels, logits in batches:
        sums.add(segment.metrics((logits, ()), {"label": labels}))
    return sums.read()


@pytest.mark.parametrize("size", [1, 4])
def test_miou_and_accuracy_are_their_definitions_over_any_batches_and_not_the_mean_of_theirs(size):
    """Labels (B, H, W) in patches, some ignored, in one image all of them; logits that are right here and there."""
    generator = torch.Generator().manual_seed(0)
    noise = [torch.randn(6, CLASSES, cells, cells, generator=generator) for cells in (4, 3, 7)]
    truth, gaps, more = (F.interpolate(each, (20, 27), mode="bilinear", align_corners=False) for each in noise)
    labels, logits = truth.argmax(1).where(gaps[:, 0] > -0.8, IGNORE), truth + 0.5 * more
    labels[5] = IGNORE
    parts = [(labels[i : i + size], logits[i : i + size]) for i in range(0, 6, size)]
    predicted, valid = logits.argmax(1), labels != IGNORE
    both = [((labels == k) & (predicted == k)).sum() for k in range(CLASSES)]
    either = [(((labels == k) | (predicted == k)) & valid).sum() for k in range(CLASSES)]
    values = read(*parts)
    assert values == read((labels, logits))
    assert values["miou"] == pytest.approx(float(np.mean([b / e for b, e in zip(both, either, strict=True)])))
    assert values["pixel_accuracy"] == pytest.approx(float((labels == predicted).sum() / valid.sum()))
    assert abs(np.mean([read(part)["miou"] for part in parts]) - values["miou"]) > 1e-3


def test_images_stand_next_to_their_classes_and_to_what_was_predicted(tmp_path):
    """Noise in blocks of classes, the last sample without any label."""
    rng, samples = np.random.default_rng(0), {}
    for n in range(3):
        blocks = rng.integers(0, 3, (3, 4)).repeat(8, 0).repeat(8, 1)
        label = np.where(n == 2, 255, blocks).astype(np.uint8)
        image = rng.integers(0, 256, (24, 32, 3), dtype=np.uint8)
        samples[f"{n}.png"] = {"image": image, "label": label, "distance": segment.distance_map(label)}
    pack = pack_of(samples, tmp_path, task="segment", classes=["$a_b$ %d <b>", "a long name " * 9, "手写\n\t"])
    answers = [np.full((24, 32), n, np.uint8) for n in range(3)]
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
