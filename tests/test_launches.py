"""What a task does in a step stays on the device of its samples: on a GPU the host waits for nothing. Torch's device
`meta`, whose tensors have no values, stands in for a GPU: another device's tensor raises, and what needs a value."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nbtools.data import Card, Column, Draws, Keys
from nbtools.tasks import captcha, hwdb, segment, sign
from nbtools.tasks.common import ctc
from nbtools.train import Batch

B, LETTERS = 6, "0123456789"
READS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal")  # and an index of booleans


class Waits(TorchDispatchMode):
    """Counts what makes the host wait: values that it reads, and tensors that it sends to another device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found, name = func(*args, **(kwargs or {})), func._schema.name.removeprefix("aten::")
        if name in ("_to_copy", "copy_"):
            self.count += args[name == "copy_"].device.type == "cpu" != found.device.type
        if name in ("index", "index_put_"):
            self.count += any(index is not None and index.dtype == torch.bool for index in args[1])
        self.count += name in READS
        return found


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
    columns |= {"features": Column("ragged", "<f4", (2048,))}
    card = Card("sign", list(LETTERS), {"categories": list("ab")}, columns, {"train": 100}, "x")
    raw = {"x": torch.rand(B, 40, 156), "mask": torch.rand(B, 40, 78) < 0.9, "features": torch.rand(B, 40, 2048)}
    raw |= {f"{name}_length": ragged(40) for name in columns}
    return card, raw | {"label": torch.stack([labels(10, B), labels(2, B)], 1)}


def of_scenes() -> tuple[Card, Batch]:
    card = Card(
        "segment", list("abc"), {"size": [96, 128]}, {"image": Column("fixed", "|u1", (96, 128, 3))}, {"train": 100}
    )
    raw = {"image": labels(256, B, 96, 128, 3), "label": labels(3, B, 96, 128), "distance": labels(256, B, 96, 128)}
    return card, {name: values.byte() for name, values in raw.items()}


CROPS = {"crop": 64, "scale_low": 0.25, "scale_high": 2.0, "flip": 0.5, "jitter": 0.4}


CLIPS = {"time_warp": 0.5, "time_crop": 0.2, "mirror": 0.5, "label_smoothing": 0.1, "bucket": 8}
CASES: dict[str, tuple[Any, Callable[[], tuple[Card, Batch]], dict[str, Any]]] = {
    "captcha": (captcha, of_images, {"network": "small", "loss": "cross_entropy", "augment": 0.3}),
    "lines": (captcha, partial(of_lines, "captcha", 32), {"augment": 1.3}),
    "hwdb": (hwdb, partial(of_lines, "hwdb", 32), {"network": "slim", "augment": 1.0}),
    "sign": (sign, of_clips, CLIPS),
    "segment": (segment, of_scenes, {"network": "slim", **CROPS}),
}


@pytest.mark.parametrize("name", CASES)
def test_batch_forward_loss_and_backward_stay_on_the_device_of_the_samples(name, monkeypatch):
    """The first step may send what then stays there. CTC itself is left out: it reads lengths."""
    monkeypatch.setattr(ctc, "loss", lambda outputs, *_, reduction="sum": outputs[0].sum((0, 2)))
    task, data, settings = CASES[name]
    card, raw = data()
    plan = task.Plan(batch_size=B, **settings)
    model = task.model(card, plan).to("meta").train()
    there = {key: values.to("meta") for key, values in {**raw, "id": torch.arange(B)}.items()}
    keys = Keys(B, torch.device("meta"))
    task.loss(model, task.batch(there, plan, Draws(0, 0, there["id"], keys)), plan)
    with Waits() as waits, Made() as made:
        batch = task.batch(there, plan, Draws(0, 1, there["id"], keys))
        loss_sum, count = task.loss(model, batch, plan)
        (loss_sum / count).sum().backward()
    assert (waits.count, made.count) == (0, 0)
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_what_makes_the_host_wait_is_counted():
    with Waits() as waits, Made() as made:
        x = torch.ones(3)
        float(x.sum()), x[x > 0], x.to("meta")  # pyright: ignore[reportUnusedExpression]
        torch.tensor([1.0])
    assert (waits.count, made.count) == (3, 1)
