"""What a task does in a step stays on the device of its samples: on a GPU the host waits for nothing. Torch's device
`meta`, whose tensors have no values, stands in for a GPU: another device's tensor raises, and what needs a value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_export import packs  # noqa: F401
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from nbtools.data import Draws, Keys, collate
from nbtools.tasks import captcha, hwdb, segment, sign
from nbtools.tasks.common import ctc

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


CLIPS = {"time_warp": 0.5, "time_crop": 0.2, "mirror": 0.5, "move": 1.0, "drop_points": 0.1, "drop_hand": 0.2}
WEIGHED = {"class_weights": "balanced", "label_smoothing": 0.1, "bucket": 8}
CROPS = {"crop": 32, "scale_low": 0.25, "scale_high": 2.0, "flip": 0.5, "jitter": 0.4}
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "captcha": (captcha, {"network": "small", "loss": "cross_entropy", "augment": 0.3}),
    "lines": (captcha, {"network": "ctc", "augment": 1.3}),
    "hwdb": (hwdb, {"network": "slim", "augment": 1.0}),
    "sign": (sign, CLIPS | WEIGHED),
    "segment": (segment, {"network": "slim", **CROPS}),
}


@pytest.mark.parametrize("name", CASES)
def test_batch_forward_loss_and_backward_stay_on_the_device_of_the_samples(name, packs, monkeypatch):  # noqa: F811
    """The first step may send what then stays there. CTC itself is left out: it reads lengths."""
    monkeypatch.setattr(ctc, "loss", lambda outputs, *_, reduction="sum": outputs[0].sum((0, 2)))
    (task, settings), pack = CASES[name], packs(name)
    ids = pack.ids("train")[:6]
    raw = collate([pack.sample(int(i)) for i in ids], pack.columns) | {"id": torch.arange(6)}
    plan = task.Plan(batch_size=6, **settings)
    model = task.model(pack.card, plan).to("meta").train()
    there, keys = {key: values.to("meta") for key, values in raw.items()}, Keys(6, torch.device("meta"))
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
