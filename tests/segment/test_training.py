"""BiSeNetV2 at any size; augmentation, loss, inference at several scales and metrics against slow obvious versions, by
loops over images and pixels; labels over images."""

import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from packs import pack_of
from torch.nn import functional as F

from nbtools.data import Draws
from nbtools.tasks import segment
from nbtools.tasks.segment import Plan, task
from nbtools.tasks.segment.networks import SIZES, BiSeNetV2, Norm
from nbtools.train import Sums

CLASSES, IGNORE, HEIGHT, WIDTH = 4, 255, 9, 7
PLAN = Plan(ohem_least=0.25)
KINDS = ("random", "easy", "few valid", "ties", "all ignored", "one valid")


def image_of(kind, generator):
    """(logits, label, distance) of one image: easy ones have fewer hard pixels than are kept in any case."""
    logits = torch.randn(CLASSES, HEIGHT, WIDTH, generator=generator)
    label = torch.randint(0, CLASSES, (HEIGHT, WIDTH), generator=generator)
    label[torch.rand(HEIGHT, WIDTH, generator=generator) < (0.9 if kind == "few valid" else 0.2)] = IGNORE
    if kind in ("easy", "ties"):
        logits = logits + 6 * F.one_hot(label.clamp(max=CLASSES - 1), CLASSES).permute(2, 0, 1)
    if kind == "ties":
        logits = (logits / 6).round() * 6  # few different values, so that pixels tie for the last places
    if kind in ("all ignored", "one valid"):
        label[:] = IGNORE
    if kind == "one valid":
        label[3, 4] = 2
    return logits, label, torch.rand(HEIGHT, WIDTH, generator=generator) * 6


def batch_of(kinds=KINDS, seed=0):
    """(outputs that require gradients, batch); of two auxiliary logits one has full size, one a fourth."""
    generator = torch.Generator().manual_seed(seed)
    logits, label, distance = (torch.stack(part) for part in zip(*(image_of(k, generator) for k in kinds), strict=True))
    others = [torch.randn(len(kinds), CLASSES, *size, generator=generator) for size in ((HEIGHT, WIDTH), (3, 2))]
    return (logits.requires_grad_(), tuple(x.requires_grad_() for x in others)), {"label": label, "distance": distance}


def slow_ohem(logits, label, plan):
    entropies = [-logits[:, y, x].log_softmax(0)[label[y, x]] for y, x in (label != IGNORE).nonzero().tolist()]
    if not entropies:
        return torch.zeros(())
    entropies.sort(key=torch.Tensor.item, reverse=True)
    hard = [e for e in entropies if math.exp(-e.item()) < plan.ohem_threshold]
    least = math.ceil(len(entropies) * plan.ohem_least)
    return torch.stack(hard if len(hard) > least else entropies[:least]).mean()


def slow_edge(logits, label, distance, plan):
    above, below = torch.zeros(()), 0.0
    for y, x in (label != IGNORE).nonzero().tolist():
        close = math.exp(-float(distance[y, x]) / plan.edge_width)
        weight = 1 + (plan.edge_weight - 1) * close if close >= plan.edge_threshold else 1.0
        above = above - weight * logits[:, y, x].log_softmax(0)[label[y, x]]
        below += weight
    return above / max(below, 1)


def slow_loss(outputs, batch, plan):
    main, auxiliary = outputs
    total = torch.zeros(())
    for b, label in enumerate(batch["label"]):
        total = total + slow_ohem(main[b], label, plan)
        total = total + plan.edge_factor * slow_edge(main[b], label, batch["distance"][b], plan)
        for logits in auxiliary:
            seen = label if logits.shape[2] == HEIGHT else label[::4, ::4]
            total = total + plan.aux_weight * slow_ohem(logits[b], seen, plan)
    return total


@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        PLAN.replace(ohem_threshold=0.05, aux_weight=0.4),
        PLAN.replace(ohem_threshold=1e-6, ohem_least=1 / 16, edge_factor=0.0),
        PLAN.replace(ohem_least=1.0, edge_threshold=0.0),
        PLAN.replace(ohem_least=1e-9, edge_width=0.5),
    ],
)
def test_loss_and_gradient_are_those_of_a_loop_over_images_and_pixels(plan):
    outputs, batch = batch_of()
    total, count = segment.loss(lambda _: outputs, batch, plan)
    assert torch.allclose(total, slow_loss(outputs, batch, plan), rtol=1e-5)
    assert int(count) == len(KINDS) - 1  # all but the ignored one
    outputs, batch = batch_of([kind for kind in KINDS if kind != "ties"])
    made = segment.loss(lambda _: outputs, batch, plan)[0], slow_loss(outputs, batch, plan)
    fast, slow = (torch.autograd.grad(one, [outputs[0], *outputs[1]]) for one in made)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(fast, slow, strict=True))
    outputs, batch = batch_of(["all ignored"] * 2)
    total, count = segment.loss(lambda _: outputs, batch, plan)
    [gradient] = torch.autograd.grad(total, outputs[0])
    assert (total.item(), int(count), gradient.any()) == (0, 0, False), "no NaN"


def small(kind: str = "slim", channels: int = 3) -> Any:
    torch.manual_seed(0)
    return BiSeNetV2(CLASSES, channels, SIZES[kind])


@pytest.mark.parametrize(("kind", "channels"), [("bisenetv2", 3), ("slim", 4)])
@pytest.mark.parametrize("size", [(180, 240), (33, 47)])
def test_logits_have_the_size_of_any_image_and_strides_round_up(kind, channels, size):
    network = small(kind, channels).to("meta")
    logits, auxiliary = network({"image": torch.empty(2, channels, *size, device="meta")})
    assert logits.shape == (2, CLASSES, *size)
    for i, found in enumerate(auxiliary):  # of the slim network, those of their stages
        assert found.shape[2:] == (size if kind == "bisenetv2" else tuple(math.ceil(n / (4 * 2**i)) for n in size))


def test_a_micro_batch_of_one_image_trains_and_its_pooled_norms_keep_their_averages():
    network = small()
    pooled = [m for m in network.context.pooled.modules() if isinstance(m, Norm)]
    before = [{k: v.clone() for k, v in m.state_dict().items()} for m in pooled]
    batch = {"image": torch.randn(1, 3, 40, 48), "label": torch.ones(1, 40, 48).long()}
    loss, _ = segment.loss(network, {**batch, "distance": torch.zeros(1, 40, 48)}, PLAN)
    loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in network.parameters())
    for module, old in zip(pooled, before, strict=True):
        assert all(torch.equal(value, old[k]) for k, value in module.state_dict().items())


def test_heads_learn_head_lr_times_as_fast_and_norms_and_biases_do_not_decay():
    groups = [*segment.groups(small(), Plan(head_lr=7.0))]
    assert all(group["decays"] == all(p.dim() > 1 for p in group["params"]) for group in groups)
    assert {group["lr_scale"] for group in groups} == {1.0, 7.0}


GREY = 127.5
CROPPED = {"crop": 32, "scale_low": 0.25, "scale_high": 2.0, "flip": 0.5}
WHOLE = {"scale_low": 0.5, "scale_high": 2.0}


def raw_batch(count=4, channels=3, size=(20, 26)):
    torch.manual_seed(0)
    label, distance = (torch.randint(0, most, (count, *size), dtype=torch.uint8) for most in (5, 256))
    image = torch.randint(0, 256, (count, *size, channels), dtype=torch.uint8)
    return {"image": image, "label": label, "distance": distance, "id": torch.arange(count)}


def slowly(raw, b, scale, rows, columns, pyramid):
    """Crop b at these centres, pixel by pixel: image (C, h, w), label and distance (h, w)."""
    shrunk = 2 if pyramid and scale < 0.5 else 1
    source = F.avg_pool2d(raw["image"][b].permute(2, 0, 1).float(), shrunk)
    height, width = source.shape[1:]
    size = len(rows), len(columns)
    image, label = torch.full((source.shape[0], *size), GREY), torch.full(size, IGNORE, dtype=torch.uint8)
    distance = torch.full(size, float(IGNORE))
    for i, y in enumerate(rows.tolist()):
        for j, x in enumerate(columns.tolist()):
            if not (0 <= y < raw["label"].shape[1] and 0 <= x < raw["label"].shape[2]):
                continue
            label[i, j] = raw["label"][b, math.floor(y), math.floor(x)]
            far = float(raw["distance"][b, math.floor(y), math.floor(x)])
            distance[i, j] = far if far == IGNORE else far * scale
            v, u = (min(max(p / shrunk - 0.5, 0), n - 1) for p, n in ((y, height), (x, width)))
            (y0, fy), (x0, fx) = ((math.floor(p), p - math.floor(p)) for p in (v, u))
            y1, x1 = min(y0 + 1, height - 1), min(x0 + 1, width - 1)
            above = source[:, y0, x0] * (1 - fx) + source[:, y0, x1] * fx
            below = source[:, y1, x0] * (1 - fx) + source[:, y1, x1] * fx
            image[:, i, j] = above * (1 - fy) + below * fy
    return image, label, distance


@pytest.mark.parametrize(("shape", "settings"), [((20, 26), CROPPED), ((21, 27), WHOLE)])
def test_images_labels_and_distances_are_what_going_pixel_by_pixel_gives(shape, settings):
    raw, plan = raw_batch(6, 4, shape), Plan(**settings)
    size = (plan.crop, plan.crop) if plan.crop else shape
    scale, rows, columns = task.crops(shape, size, plan, Draws(0, 0, raw["id"]))
    made = task.augment(raw, plan, Draws(0, 0, raw["id"]))
    for b in range(6):
        image, label, distance = slowly(raw, b, float(scale[b]), rows[b], columns[b], plan.scale_low < 0.5)
        torch.testing.assert_close(made["image"][b], image, atol=0.05, rtol=0)
        torch.testing.assert_close(made["distance"][b].float(), distance)
        assert torch.equal(made["label"][b], label)


@pytest.mark.parametrize(("scale", "side"), [(2.0, 32), (1.37, 64), (0.25, 200)])
def test_a_crop_lies_in_the_image_or_around_all_of_it_and_anywhere_there(scale, side):
    plan = Plan(crop=side, scale_low=scale, scale_high=scale, flip=0.5)
    _, y, x = task.crops((40, 60), (side, side), plan, Draws(0, 0, torch.arange(4000)))
    steps = x.diff(dim=1) * scale
    assert (steps.abs() - 1).abs().max() < 1e-3
    assert float((steps[:, 0] < 0).float().mean()) == pytest.approx(0.5, abs=0.03), "half of them mirrored"
    for centres, length in ((y, 40), (x, 60)):
        origin = (centres.amin(1) * scale - 0.5).round()
        room = scale * length - side
        least, most = (0, math.floor(room)) if room >= 0 else (math.ceil(room), 0)
        assert (float(origin.min()), float(origin.max()), len(origin.unique())) == (least, most, most - least + 1)
        assert float(origin.mean()) == pytest.approx((least + most) / 2, abs=0.05 * (most - least) + 1e-6)


def test_colours_change_as_brightness_contrast_and_saturation_one_after_the_other_do():
    raw = raw_batch(3, channels=4)
    raw["image"] = raw["image"] // 4 + 96  # nothing to clip
    made = task.augment(raw, Plan(jitter=0.2), Draws(0, 0, raw["id"]))["image"]
    draws = Draws(0, 0, raw["id"])
    light, contrast, saturation = (draws.uniform(0.8, 1.2) for _ in range(3))
    for b, image in enumerate(raw["image"].permute(0, 3, 1, 2).float()):
        steep = (image[:3] * light[b] - 127.5) * contrast[b] + 127.5
        grey = steep.mean(0)
        torch.testing.assert_close(made[b, :3], grey + (steep - grey) * saturation[b], atol=1e-2, rtol=1e-5)
        assert torch.equal(made[b, 3], image[3])


def test_training_and_prediction_see_the_same_tensor():
    raw = raw_batch(1)
    trained, predicted = segment.batch(raw, Plan(), Draws(0, 0, raw["id"])), segment.batch(raw, Plan(), None)
    assert torch.equal(trained["image"], predicted["image"])
    expected = (raw["image"].permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.25
    torch.testing.assert_close(trained["image"], expected, atol=1e-6, rtol=0)
    assert torch.equal(trained["distance"], raw["distance"] / 8)
    assert segment.batch({"image": raw["image"]}, Plan(), None).keys() == {"image"}, "images alone are a batch too"


def one_by_one(network, image, plan):
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
    network, passes = small().eval(), []
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
