"""`Plan.checkpoint_activations`, for every network there is: less memory at the peak of a step, and the same bits."""

from typing import Any

import pytest
import torch
from torch import Tensor

from nbtools.data import Card
from nbtools.data.pack import Column
from nbtools.measure import memory
from nbtools.tasks import captcha, hwdb, segment, sign
from nbtools.tasks.hwdb import networks as hwdb_networks
from nbtools.train import TrainState, attempt

pytestmark = pytest.mark.usefixtures("one_thread")

CPU = torch.device("cpu")
TASKS: dict[str, Any] = {"captcha": captcha, "hwdb": hwdb, "segment": segment, "sign": sign}
OPTIONS: dict[str, Any] = {
    "captcha": {"layout": "fixed", "size": [16, 32], "length": 4, "height": 32},
    "hwdb": {"height": 64},
    "segment": {},
    "sign": {"categories": list("ab")},
}
COLUMNS = {
    "image": Column("fixed", "uint8", (64, 96, 3)),
    "x": Column("ragged", "float32", (156,)),
    "features": Column("ragged", "float32", (64,)),
}
HCTR = ((32, 2, 0.3), (32, 2, 0.3), (48, 2, 0.3), (48, 1, 0.9))  # fewer channels and blocks
CRNN = (((16,), (2, 2)), ((32,), (2, 2)), ((32, 32), (2, 1)), ((32, 32), (2, 1)))

CASES: dict[str, dict[str, Any]] = {  # network: settings
    "captcha guide": {},
    "captcha small": {},
    "captcha ctc": {"layout": "lines"},
    "hwdb hctr": {},
    "hwdb slim": {},
    "hwdb crnn": {"amp": "bf16"},
    "segment bisenetv2": {"crop": 96},
    "segment slim": {"crop": 96, "micro_batch_size": 1},
    "sign transformer": {},
}
SLOW = ("captcha guide", "hwdb hctr", "segment bisenetv2")  # of the same parts as the others


def raw_batch(task: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """What the pack of a task would give to a network."""
    torch.manual_seed(1)
    if options.get("layout") == "fixed":
        return {"image": random_bytes(64, *options["size"]), "label": torch.randint(6, (64, 4))}
    if task == "segment":
        label = torch.randint(6, (4, 12, 12)).repeat_interleave(8, 1).repeat_interleave(8, 2)
        return {"image": random_bytes(4, 96, 96, 3), "label": label.byte(), "distance": random_bytes(4, 96, 96)}
    if task == "sign":
        length = torch.linspace(20, 60, 4).long()
        return {"x": torch.randn(4, 60, 156), "x_length": length, "label": torch.randint(2, (4, 2))}
    length, three = torch.linspace(80, 160, 6).long(), torch.full((6,), 3)  # lines lie on their side
    images, label = random_bytes(6, 160, options["height"]), torch.randint(1, 7, (6, 3))
    return {"image": images, "image_length": length, "label": label, "label_length": three}


def random_bytes(*shape: int) -> Tensor:
    return torch.randint(256, shape, dtype=torch.uint8)


def trained(case: str, recompute: bool) -> tuple[dict[str, Tensor], int]:
    """(everything that two steps leave behind, bytes at the peak of the first)."""
    task, _, network = case.partition(" ")
    layout = {name: value for name, value in CASES[case].items() if name == "layout"}
    options, settings = {**OPTIONS[task], **layout}, {n: v for n, v in CASES[case].items() if n not in layout}
    plan = TASKS[task].Plan(network=network, batch_size=64, checkpoint_activations=recompute, **settings)
    state = TrainState(TASKS[task], Card(task, list("abcdef"), options, COLUMNS, {"train": 100}), plan, CPU)
    raw = raw_batch(task, options)
    raw["id"] = torch.arange(len(raw["label"]))
    state.restore_rng()
    losses: list[Tensor] = []
    most = memory.peak(CPU, lambda: losses.append(attempt(state, raw, 100, len(raw["id"]))[0]))
    losses.append(attempt(state, raw, 100, len(raw["id"]))[0])
    gradients = {f"gradient {i}": p.grad for i, p in enumerate(state.parameters) if p.grad is not None}
    return {**state.tensors(), **gradients, "losses": torch.stack(losses)}, most


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.full] * (case in SLOW)) for case in CASES])
def test_recomputing_lowers_the_peak_of_a_step_and_changes_no_bit(case, monkeypatch):
    """Losses, gradients, weights, moments, batch norm's averages and counters, and the numbers that dropout draws."""
    monkeypatch.setattr(hwdb_networks, "HCTR", HCTR)
    monkeypatch.setattr(hwdb_networks, "CRNN", CRNN)
    (stored, most), (recomputed, less) = trained(case, False), trained(case, True)
    assert stored.keys() == recomputed.keys()
    assert [name for name in stored if not torch.equal(stored[name], recomputed[name])] == []
    assert less < 0.75 * most, f"{less / most:.2f}"
