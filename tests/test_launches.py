"""What a training step costs a GPU beyond its arithmetic, counted without one: launched kernels, values that the host
reads, tensors that it copies to the device.

Each task's step runs on the CPU, and again on torch's device `meta`, which stands in for a GPU.
"""

from __future__ import annotations

import importlib
import pkgutil
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import nbtools as nb
from nbtools.data import STAYING, Card, Column, Draws, Keys, constant, places
from nbtools.tasks import captcha, hwdb, segment, sign
from nbtools.tasks.common import ctc
from nbtools.train import Batch
from nbtools.train.augment import IMAGES, MIXUP, augment
from nbtools.train.step import attempt

B, LETTERS = 6, "0123456789"
READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal")  # and an index of booleans
UNLAUNCHED = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "alias", "lift_fresh", "_unsafe_view")
"""Allocations, and what only describes a tensor anew; views are told by their schema."""


class Launches(TorchDispatchMode):
    """Counts, by name, the operations that launch a kernel, and what makes the host wait: values that
    it reads, tensors that it sends to another device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.reads = self.sent = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, name = func(*args, **(kwargs or {})), func._schema.name.removeprefix("aten::")
        if not func.is_view and name not in UNLAUNCHED:
            self.names[name] += 1
        if name in ("_to_copy", "copy_"):
            self.sent += args[name == "copy_"].device.type == "cpu" != found.device.type
        if name in ("index", "index_put_"):
            self.reads += any(index is not None and index.dtype == torch.bool for index in args[1])
        self.reads += name in READS
        return found

    @property
    def launched(self) -> int:
        return self.names.total()


class Made(TorchFunctionMode):
    """Counts the tensors that the host makes of its own values, which on a GPU are copies that it waits for."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.tensor, torch.as_tensor, torch.from_numpy)
        return func(*args, **(kwargs or {}))


def labels(classes: int, *shape: int) -> torch.Tensor:
    return torch.randint(classes, shape)


def ragged(width: int, *shape: int, count: int = B) -> torch.Tensor:
    return torch.linspace(width // 2, width, count).long()


def of_images() -> tuple[Card, Batch]:
    card = Card("captcha", list(LETTERS), {"layout": "fixed", "size": [60, 160], "length": 4}, {}, {"train": 100})
    return card, {"image": labels(256, B, 60, 160).byte(), "label": labels(10, B, 4)}


def of_lines(task: str, height: int) -> tuple[Card, Batch]:
    card = Card(task, list(LETTERS), {"layout": "lines", "height": height}, {}, {"train": 100}, "image")
    image, length = labels(256, B, 200, height).byte(), ragged(200)
    image *= torch.arange(200)[:, None] < length[:, None, None]
    return card, {
        "image": image,
        "image_length": length,
        "label": labels(10, B, 3),
        "label_length": torch.tensor([3, 2, 3, 1, 3, 2]),
    }


def of_clips() -> tuple[Card, Batch]:
    columns = {"x": Column("ragged", "<f4", (156,)), "mask": Column("ragged", "|b1", (78,))}
    counts = {"gloss": [10] * 10, "category": [50] * 2}
    columns |= {"features": Column("ragged", "<f4", (2048,))}
    card = Card("sign", list(LETTERS), {"categories": list("ab")}, columns, {"train": 100}, "x", counts=counts)
    raw = {"x": torch.rand(B, 40, 156), "mask": torch.rand(B, 40, 78) < 0.9, "features": torch.rand(B, 40, 2048)}
    raw |= {f"{name}_length": ragged(40) for name in columns}
    return card, raw | {"label": torch.stack([labels(10, B), labels(2, B)], 1)}


def of_scenes() -> tuple[Card, Batch]:
    card = Card(
        "segment", list("abc"), {"size": [96, 128]}, {"image": Column("fixed", "|u1", (96, 128, 3))}, {"train": 100}
    )
    raw = {"image": labels(256, B, 96, 128, 3), "label": labels(3, B, 96, 128), "distance": labels(256, B, 96, 128)}
    return card, {name: values.byte() for name, values in raw.items()}


WEIGHED = {"class_weights": "balanced", "label_smoothing": 0.1, "bucket": 8}
HIDING = {"move": 1.0, "drop_points": 0.1, "drop_hand": 0.2}
CROPS = {"crop": 64, "scale_low": 0.25, "scale_high": 2.0, "flip": 0.5, "jitter": 0.4}


class Case(NamedTuple):
    task: Any
    data: Callable[[], tuple[Card, Batch]]
    settings: dict[str, Any]
    batch: int  # the most launches of `batch`, augmented
    loss: int  # and of `loss` behind the network


LINES, CLIPS = {"augment": 1.0}, {"time_warp": 0.5, "time_crop": 0.2, "mirror": 0.5}
CASES = {
    "captcha small": Case(captcha, of_images, {"network": "small", "loss": "cross_entropy", "augment": 0.3}, 30, 2),
    "captcha guide": Case(captcha, of_images, {"network": "guide", "augment": 0.3}, 30, 14),
    "captcha ctc": Case(captcha, partial(of_lines, "captcha", 32), {"augment": 1.3}, 51, 4),
    "hwdb slim": Case(hwdb, partial(of_lines, "hwdb", 32), {"network": "slim", **LINES}, 70, 14),
    "hwdb hctr": Case(hwdb, partial(of_lines, "hwdb", 64), {"network": "hctr", **LINES}, 70, 14),
    "sign transformer": Case(sign, of_clips, CLIPS, 79, 7),
    "sign with all settings": Case(sign, of_clips, CLIPS | HIDING | WEIGHED, 123, 23),
    "sign gru": Case(sign, of_clips, {"network": "gru"}, 0, 7),
    "segment slim": Case(segment, of_scenes, {"network": "slim", **CROPS}, 71, 158),
    "segment bisenetv2": Case(segment, of_scenes, {"network": "bisenetv2", **CROPS}, 71, 68),
}


OWN = 87  # launches of every augmentation by name


def made(name: str) -> tuple[Case, nb.TrainState, Batch]:
    case = CASES[name]
    torch.manual_seed(0)
    card, raw = case.data()
    plan = case.task.Plan(batch_size=B, clip_norm=1.0, **case.settings)
    return case, nb.TrainState(case.task, card, plan), {**raw, "id": torch.arange(B)}


LARGE = "hwdb hctr"  # 53 M parameters


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.full) if n == LARGE else n for n in CASES])
def test_a_step_launches_no_more_than_its_budget_and_the_host_reads_nothing(name):
    case, state, raw = made(name)
    ready = case.task.batch(raw, state.plan, Draws(0, 0, raw["id"], state.keys))
    with Launches() as batch:  # what stays on the device is made
        case.task.batch(raw, state.plan, Draws(0, 0, raw["id"], state.keys))
    with torch.no_grad():
        outputs = state.model.train()(ready)
    with Launches() as loss:
        case.task.loss(lambda _: outputs, ready, state.plan)
    with Launches() as step:
        attempt(state, raw, 100)
    assert batch.launched <= case.batch, batch.names
    assert loss.launched <= case.loss, loss.names
    assert step.reads == 0, step.names


@pytest.mark.parametrize("name", CASES)
def test_batch_forward_loss_and_backward_stay_on_the_device_of_the_samples(name, monkeypatch):
    """On `meta`, whose tensors have no values: another device's tensor raises, and what needs a value. The first step
    may send what then stays there. CTC itself is left out: it reads lengths."""
    monkeypatch.setattr(ctc, "loss", lambda outputs, *_, reduction="sum": outputs[0].sum((0, 2)))
    case, (card, raw) = CASES[name], CASES[name].data()
    plan = case.task.Plan(batch_size=B, **case.settings)
    model = case.task.model(card, plan).to("meta").train()
    there = {key: values.to("meta") for key, values in {**raw, "id": torch.arange(B)}.items()}
    keys = Keys(B, torch.device("meta"))
    case.task.loss(model, case.task.batch(there, plan, Draws(0, 0, there["id"], keys)), plan)
    with Launches() as seen, Made() as made:
        batch = case.task.batch(there, plan, Draws(0, 1, there["id"], keys))
        loss_sum, count = case.task.loss(model, batch, plan)
        (loss_sum / count).sum().backward()
    assert (seen.sent, seen.reads, made.count) == (0, 0, 0)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_augmentation_by_name_launches_no_more_than_its_budget_and_stays_on_the_device():
    batch = {"image": torch.rand(B, 3, 32, 32), "y": labels(5, B), "id": torch.arange(B)}
    there = {key: values.to("meta") for key, values in batch.items()}
    for each in (batch, there):
        keys = Keys(B, each["id"].device)
        for _ in range(2):
            with Launches() as seen, Made() as made:
                augment(each, ["image"], ["image"], 5, Draws(0, 0, each["id"], keys), [*IMAGES, MIXUP])
        assert seen.launched <= OWN, seen.names
    assert (seen.sent, seen.reads, made.count) == (0, 0, 0)


def test_of_what_stays_on_a_device_so_much_stays_and_no_more():
    """Whatever sizes samples have: each function of sizes that keeps its tensors has a limit, and it holds."""
    modules = [importlib.import_module(each.name) for each in pkgutil.walk_packages(nb.__path__, "nbtools.")]
    found = {name: each for module in modules for name, each in vars(module).items() if hasattr(each, "cache_info")}
    keeping = {name: each for name, each in found.items() if each.__wrapped__.__annotations__.get("return") == "Tensor"}
    assert keeping.keys() >= {"constant", "places", "counters", "pixels", "along", "weights"}
    assert {name for name, each in keeping.items() if each.cache_info().maxsize is None} == set()
    before = [weakref.ref(places(n, torch.device("cpu"))) for n in range(1, STAYING + 2)]
    before += [weakref.ref(constant((n,), torch.device("cpu"))) for n in range(STAYING + 1)]
    assert sum(each() is None for each in before) >= 2


def test_what_makes_the_host_wait_is_counted_and_raises_without_values():
    with Launches() as seen:
        x = torch.ones(3)
        found = float(x.sum()), x[x > 0], x.view(3, 1).t()
        x[x > 1] = 0
    assert found[0] == 3
    assert seen.names == {"ones": 1, "sum": 1, "_local_scalar_dense": 1, "gt": 2, "index": 1, "index_put_": 1}
    assert seen.reads == 3
    with Launches() as seen, Made() as made:
        there = x.to("meta")
        torch.tensor([1.0], device="meta")
    assert (seen.sent, made.count) == (1, 1)
    for waits in (lambda: float(there.sum()), lambda: there.nonzero(), lambda: there + x, lambda: there[there > 0]):
        with pytest.raises((RuntimeError, NotImplementedError)):
            waits()
