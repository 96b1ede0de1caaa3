"""Several scales, mirror images and windows against a slow obvious version, image by image; and what they cost."""

import numpy as np
import pytest
import torch
from packs import pack_of
from torch import nn
from torch.nn import functional as F

from nbtools.errors import PlanError
from nbtools.tasks import segment
from nbtools.tasks.segment import Plan, costs, infer, latency
from nbtools.tasks.segment.inference import eval_cost, usual
from nbtools.train import Sums

CLASSES = 4


class Network(nn.Module):
    """A stride of 2 and a head that brings logits back to the size of the image, whatever that is."""

    def __init__(self):
        super().__init__()
        layers = nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, CLASSES, 3, 1, 1)
        self.layers, self.seen, self.dtypes = nn.Sequential(*layers), [], set()

    def forward(self, batch):
        image = batch["image"]
        self.seen.append(tuple(image.shape))
        self.dtypes.add(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
        logits = F.interpolate(3 * self.layers(image), image.shape[2:], mode="bilinear", align_corners=False)
        return logits, ()


def plan_of(scales=(1.0,), flip=False, window=None):
    return Plan(eval_scales=scales, eval_flip=flip, eval_window=window)


EVERY = [
    plan_of((0.5, 1.0, 1.75)),
    plan_of((0.5, 1.25), True, 32),
    plan_of((1.0, 2.0), True, 1000),
]


@pytest.fixture
def network():
    torch.manual_seed(0)
    return Network().eval()


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(1)
    return {"image": torch.randn(3, 3, 47, 75, generator=generator), "id": torch.arange(3)}


def one_by_one(network, image, plan):
    """(K, H, W) probabilities of one image (3, H, W), window by window; every pixel is divided by its own count."""
    height, width = image.shape[1:]
    found = []
    for scale in plan.eval_scales:
        h, w = round(height * scale), round(width * scale)
        small = F.interpolate(image[None], (h, w), mode="bilinear", align_corners=False)
        for mirrored in (False, True) if plan.eval_flip else (False,):
            turned = small.flip(3) if mirrored else small
            total, count = torch.zeros(CLASSES, h, w), torch.zeros(h, w)
            side_h, side_w = min(plan.eval_window or h, h), min(plan.eval_window or w, w)
            for top in starts(h, side_h, plan.eval_window):
                for left in starts(w, side_w, plan.eval_window):
                    part = turned[:, :, top : top + side_h, left : left + side_w]
                    total[:, top : top + side_h, left : left + side_w] += network({"image": part})[0].softmax(1)[0]
                    count[top : top + side_h, left : left + side_w] += 1
            mean = (total / count).flip(2) if mirrored else total / count
            found.append(F.interpolate(mean[None], (height, width), mode="bilinear", align_corners=False)[0])
    return torch.stack(found).mean(0)


def starts(length, side, window):
    """Where windows begin: every two thirds of one, and the last flush with the border."""
    found, start = [], 0
    while window and start + side < length:
        found.append(start)
        start += window * 2 // 3
    return [*found, length - side]


@torch.no_grad()
@pytest.mark.parametrize("plan", EVERY, ids=lambda p: f"{p.eval_scales} {p.eval_flip} {p.eval_window}")
def test_logits_are_the_logarithm_of_the_mean_probabilities_image_by_image(network, batch, plan):
    logits, others = infer(network, batch, plan)
    seen = [b * h * w for b, _, h, w in network.seen]
    assert eval_cost(plan, (47, 75)) == pytest.approx(sum(seen) / (3 * 47 * 75))
    assert max(seen) <= 3 * (2 * 47) * (2 * 75), "one pass at a time"
    assert others == ()
    assert logits.shape == (3, CLASSES, 47, 75)
    for found, image in zip(logits, batch["image"], strict=True):
        torch.testing.assert_close(found.exp(), one_by_one(network, image, plan))
    target = torch.randint(0, CLASSES, (3, 47, 75), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(F.cross_entropy(logits, target), F.nll_loss(logits, target))


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    """Five images in two classes with an ignored corner."""
    rng, samples = np.random.default_rng(0), {}
    for i in range(5):
        label = np.zeros((33, 40), np.uint8)
        label[:, 20 + i :] = 1
        label[:8, :8] = 255
        image = (60 * label[..., None] % 255 + rng.integers(0, 120, (33, 40, 3))).astype(np.uint8)
        samples[f"{i}"] = {"image": image, "label": label, "distance": segment.distance_map(label)}
    return pack_of(samples, tmp_path_factory.mktemp("pack"), task="segment", split="val", classes=list("abcd"))


PLAN = Plan(eval_flip=True, batch_size=2)


def test_costs_are_the_miou_of_each_way_and_the_pixels_it_evaluates(network, pack):
    ways = usual((33, 40))
    found = costs(network.train(), pack, PLAN, batch_size=2)
    assert network.training
    assert (list(found.index), found.index.name) == (list(ways), "5 images on cpu")
    raw = {name: torch.from_numpy(np.array(pack.arrays[name])) for name in ("image", "label", "distance")}
    whole = segment.batch(raw, PLAN, None)
    network.eval()
    for (_, row), settings in zip(found.iterrows(), ways.values(), strict=True):
        sums = Sums()
        with torch.no_grad():
            sums.add(segment.metrics(infer(network, whole, Plan(**settings)), whole))
        assert row.miou == pytest.approx(sums.read()["miou"], abs=1e-6)
        assert row.gain == row.miou - found.miou.iloc[0]
        assert row.pixels == eval_cost(Plan(**settings), (33, 40))
        assert row.ms > 0
    assert found.pixels.iloc[:2].tolist() == [1, 2]
    assert found.pixels.iloc[3] == 2 * found.pixels.iloc[2] == pytest.approx(2 * 8.6875, rel=0.05)


@pytest.mark.parametrize("ask", [costs, latency])
def test_without_images_the_error_names_where_there_are_some(network, pack, ask):
    with pytest.raises(PlanError, match=r"got none; take some of pack\.ids\('val'\)"):
        ask(network, pack, PLAN, ids=[])
