"""Several looks at an image against slow obvious versions, image by image, with a small real network."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from nbtools.data import build
from nbtools.errors import PlanError
from nbtools.tasks.segment.costs import WARM, compared, costs, latency, usual
from nbtools.tasks.segment.inference import eval_cost, infer, scaled, windows
from nbtools.tasks.segment.masks.classes import IGNORE
from nbtools.tasks.segment.masks.distance import distance_map
from nbtools.tasks.segment.plans import Plan
from nbtools.tasks.segment.scores import metrics_of
from nbtools.tasks.segment.task import batch as batch_of
from nbtools.train import Sums

CLASSES = 4
pytestmark = pytest.mark.usefixtures("one_thread")


class Network(nn.Module):
    """A stride of 2 and a head that brings logits back to the size of the image, whatever that is."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, CLASSES, 3, 1, 1)
        )
        self.seen = []

    def forward(self, batch):
        image = batch["image"]
        self.seen.append(tuple(image.shape))
        logits = F.interpolate(3 * self.layers(image), image.shape[2:], mode="bilinear", align_corners=False)
        return logits, ()


class Pointwise(nn.Module):
    """Looks at a pixel alone, and so does not know left from right, nor where a window ends."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Conv2d(3, CLASSES, 1)

    def forward(self, batch):
        return self.layer(batch["image"]), ()


class Constant(nn.Module):
    def forward(self, batch):
        b, _, h, w = batch["image"].shape
        return torch.tensor([0.5, 2.0, -1.0, 0.0]).view(1, -1, 1, 1).expand(b, -1, h, w), ()


def looks(scales=(1.0,), flip=False, window=None):
    return Plan(eval_scales=scales, eval_flip=flip, eval_window=window)


def said(plan):
    return f"scales {plan.eval_scales}, flip {plan.eval_flip}, window {plan.eval_window}"


EVERY = [
    looks((0.5, 1.0, 1.75)),
    looks(flip=True),
    looks(window=32),
    looks((0.5, 1.25), True, 32),
    looks((1.0, 2.0), True, 1000),
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
            for top in places(h, side_h, plan.eval_window):
                for left in places(w, side_w, plan.eval_window):
                    part = turned[:, :, top : top + side_h, left : left + side_w]
                    total[:, top : top + side_h, left : left + side_w] += network({"image": part})[0].softmax(1)[0]
                    count[top : top + side_h, left : left + side_w] += 1
            mean = (total / count).flip(2) if mirrored else total / count
            found.append(F.interpolate(mean[None], (height, width), mode="bilinear", align_corners=False)[0])
    return torch.stack(found).mean(0)


def places(length, side, window):
    """Where windows begin: every two thirds of one, and the last flush with the border."""
    starts, start = [], 0
    while window and start + side < length:
        starts.append(start)
        start += window * 2 // 3
    return [*starts, length - side]


@torch.no_grad()
@pytest.mark.parametrize("plan", EVERY, ids=said)
def test_answers_are_the_mean_probabilities_of_all_looks_image_by_image(network, batch, plan):
    logits, others = infer(network, batch, plan)
    assert others == ()
    assert logits.shape == (3, CLASSES, 47, 75)
    for found, image in zip(logits, batch["image"], strict=True):
        torch.testing.assert_close(found.exp(), one_by_one(network, image, plan))


@torch.no_grad()
def test_one_look_is_the_models_own_answer_to_the_bit(network, batch):
    assert torch.equal(infer(network, batch, looks())[0], network(batch)[0])
    assert network.seen == [(3, 3, 47, 75)] * 2


@torch.no_grad()
@pytest.mark.parametrize("plan", EVERY, ids=said)
def test_answers_are_log_probabilities_so_cross_entropy_of_them_is_the_likelihood(network, batch, plan):
    logits = infer(network, batch, plan)[0]
    target = torch.randint(0, CLASSES, (3, 47, 75), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(logits.exp().sum(1), torch.ones(3, 47, 75))
    torch.testing.assert_close(F.cross_entropy(logits, target), F.nll_loss(logits, target))


@torch.no_grad()
def test_a_class_that_no_look_believes_in_is_unlikely_and_not_impossible(batch):
    def sure(batch):
        logits = torch.zeros(3, CLASSES, *batch["image"].shape[2:])
        logits[:, 0] = 1e4
        return logits, ()

    logits = infer(sure, batch, looks(flip=True))[0]
    assert logits.isfinite().all()
    assert (logits[:, 1:] < -80).all()


@torch.no_grad()
@pytest.mark.parametrize("window", [75, 76, 1000])
def test_a_window_that_holds_the_image_is_the_image(network, batch, window):
    whole = network(batch)[0].softmax(1)
    torch.testing.assert_close(infer(network, batch, looks(window=window))[0].exp(), whole)
    assert network.seen[-1] == (3, 3, 47, 75)


@torch.no_grad()
def test_a_mirror_image_changes_nothing_for_a_network_that_does_not_know_left_from_right(batch):
    torch.manual_seed(0)
    network = Pointwise()
    whole = network(batch)[0].softmax(1)
    for plan in (looks(flip=True), looks(window=32), looks(flip=True, window=32)):
        torch.testing.assert_close(infer(network, batch, plan)[0].exp(), whole)


@torch.no_grad()
def test_a_network_that_always_says_the_same_still_does(batch):
    for plan in EVERY:
        logits = infer(Constant(), batch, plan)[0]
        torch.testing.assert_close(logits.exp(), Constant()(batch)[0].softmax(1))


@torch.no_grad()
def test_a_mirrored_picture_has_the_mirrored_answer(network, batch):
    turned = {**batch, "image": batch["image"].flip(3)}
    torch.testing.assert_close(
        infer(network, turned, looks(flip=True))[0].flip(3), infer(network, batch, looks(flip=True))[0]
    )


@torch.no_grad()
def test_no_look_takes_more_memory_than_the_whole_image_and_none_is_larger_than_a_window(network, batch):
    infer(network, batch, looks((0.5, 1.0, 2.0), True, 32))
    assert all(h <= 32 and w <= 32 for _, _, h, w in network.seen)
    assert max(b * h * w for b, _, h, w in network.seen) <= 3 * (2 * 47) * (2 * 75)
    assert len(network.seen) < sum(len(windows(scaled((47, 75), scale), 32)) for scale in (0.5, 1.0, 2.0)) * 2


@pytest.mark.parametrize("size", [(1, 1), (7, 30), (31, 33), (64, 64), (65, 97)])
@pytest.mark.parametrize("side", [2, 5, 32, 64])
def test_windows_cover_every_pixel_are_of_one_size_and_end_at_the_border(size, side):
    seen = torch.zeros(size)
    places = windows(size, side)
    for rows, columns in places:
        seen[rows, columns] += 1
        assert (rows.stop - rows.start, columns.stop - columns.start) == (min(side, size[0]), min(side, size[1]))
    assert (seen > 0).all()
    assert len(set(map(str, places))) == len(places)
    assert (places[-1][0].stop, places[-1][1].stop) == size


def test_cost_counts_the_pixels_that_the_network_sees(network, batch):
    for plan in [looks(), *EVERY]:
        network.seen.clear()
        with torch.no_grad():
            infer(network, batch, plan)
        pixels = sum(b * h * w for b, _, h, w in network.seen) / (3 * 47 * 75)
        assert eval_cost(plan, (47, 75)) == pytest.approx(pixels)
    assert eval_cost(looks((0.5, 1.0, 2.0), True)) == 2 * (0.25 + 1 + 4)


def test_a_scaled_picture_keeps_at_least_a_pixel():
    assert scaled((3, 100), 0.1) == (1, 10)


@pytest.fixture(scope="module")
def pack(tmp_path_factory):
    """Five pictures in two classes with an ignored corner, as a segmentation pack stores them."""
    rng = np.random.default_rng(0)
    source = tmp_path_factory.mktemp("source")
    (source / "made").write_text("from arrays")

    def fill(writer, _folder):
        writer.classes = list("abcd")
        for i in range(5):
            label = np.zeros((33, 40), np.uint8)
            label[:, 20 + i :] = 1
            label[:8, :8] = IGNORE
            image = (60 * label[..., None] % 255 + rng.integers(0, 120, (33, 40, 3))).astype(np.uint8)
            writer.add(f"{i}", "val", image=image, label=label, distance=distance_map(label))

    into = tmp_path_factory.mktemp("pack")
    return build(source, "segment", {}, fill, read=unread, into=into, progress=False)


def unread(path, options):
    raise AssertionError("these packs are written from arrays, no file is read")


PLAN = Plan(eval_flip=True, batch_size=2)
WAYS = {"one": {}, "both": {"eval_flip": True}, "all": {"eval_scales": (0.5, 1.0), "eval_window": 32}}


def test_costs_are_the_miou_of_each_way_and_the_pixels_it_looks_at(network, pack):
    found = costs(network.train(), pack, PLAN, settings=WAYS, batch_size=2)
    assert network.training
    assert [row.name for row in found.rows] == list(WAYS)
    raw = {name: torch.from_numpy(np.array(pack.arrays[name])) for name in ("image", "label", "distance")}
    whole = batch_of(raw, PLAN, None)
    network.eval()
    for row, knobs in zip(found.rows, WAYS.values(), strict=True):
        plan, sums = Plan(**knobs), Sums()
        with torch.no_grad():
            sums.add(metrics_of(infer(network, whole, plan), whole))
        assert row.miou == pytest.approx(sums.read()["miou"], abs=1e-6)
        assert row.passes == eval_cost(plan, (33, 40))
        assert row.seconds > 0
    assert (found.rows[0].gain, found.rows[0].times) == (0, 1)
    assert found.images == 5


def test_costs_of_some_ids_only_and_the_first_look_of_each_way_is_not_timed(network, pack):
    assert costs(network, pack, PLAN, settings={"one": {}}, ids=[0, 3, 4], batch_size=2).images == 3
    assert [images for images, *_ in network.seen] == [2, 2, 1]


@pytest.mark.usefixtures("fp16_on_cpu")
@pytest.mark.parametrize(("amp", "dtype"), [("off", None), ("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_costs_and_latency_are_in_the_precision_of_the_plan_and_leave_the_mode_of_the_model(network, pack, amp, dtype):
    seen: list[torch.dtype | None] = []
    network.eval().register_forward_pre_hook(
        lambda *_: seen.append(torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else None)
    )
    costs(network, pack, PLAN.replace(amp=amp), settings={"one": {}}, ids=[0])
    latency(network, pack, PLAN.replace(amp=amp), [0])
    assert set(seen) == {dtype}
    assert not network.training


def test_gain_and_time_are_against_the_first_way_and_time_batch_by_batch():
    ways = {"one": Plan(), "two": Plan(eval_flip=True)}
    seconds = {"one": [1.0, 10.0, 2.0], "two": [2.0, 30.0, 2.2]}  # a machine that slows down in between
    one, two = compared("cpu", 6, ways, {"one": 0.5, "two": 0.52}, seconds, (33, 40)).rows
    assert (one.seconds, one.times, one.gain) == (2.0, 1.0, 0.0)
    assert (two.seconds, two.times, two.passes) == (2.2, 2.0, 2.0)
    assert two.gain == pytest.approx(0.02)


def test_costs_show_as_a_table_that_names_device_and_images(network, pack):
    found = costs(network, pack, PLAN)
    for shown in (str(found), found._repr_html_()):
        assert "5 images on cpu" in shown
        for name in usual((33, 40)):
            assert name in shown


def test_the_usual_ways_are_the_references_scales_and_windows_that_part_an_image():
    ways = usual((360, 480))
    assert next(iter(ways.values())) == {}
    assert {"eval_window": 256} in ways.values()
    assert len(windows((360, 480), 256)) > 1
    full = Plan(**next(knobs for knobs in ways.values() if len(knobs) == 2))
    assert eval_cost(full) == pytest.approx(2 * 8.6875)


def test_latency_is_of_single_images_and_leaves_the_warm_up_out(network, pack):
    found = latency(network.train(), pack, PLAN, pack.ids("val"))
    assert network.training
    assert all(shape == (1, 3, 33, 40) for shape in network.seen)
    assert len(network.seen) == 2 * (WARM + 5)  # the plan flips
    assert 0 < found.least <= found.median <= found.most
    assert (found.n, found.size, found.device) == (5, "33 × 40", "cpu")
    assert "33 × 40" in str(found)
    assert "33 × 40" in found._repr_html_()


@pytest.mark.parametrize("ask", [costs, latency])
def test_no_images_are_an_error_that_says_where_there_are_some(network, pack, ask):
    with pytest.raises(PlanError, match="at least one image"):
        ask(network, pack, PLAN, ids=[])
