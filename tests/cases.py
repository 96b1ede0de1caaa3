"""The networks of the four tasks at small sizes, on packs of random tensors: no file is drawn, read or decoded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from packs import pack_of
from torch import Tensor

import nbtools as nb
from nbtools.data import gather, on
from nbtools.measure import Stepper, untouched
from nbtools.measure.turns import without_dropout
from nbtools.tasks import captcha, hwdb, segment, sign
from nbtools.tasks.hwdb.data import UNKNOWN
from nbtools.train import TrainState, task_name, train
from nbtools.train import device as devices
from nbtools.train.step import gradients

BATCH, LETTERS = 8, list("0123456789")
SCALE = 1024.0  # of fp16's loss: no gradient of fresh weights overflows
Rng = np.random.Generator


@dataclass(frozen=True)
class Case:
    """A network. draw(rng) → a sample's arrays; settings: beyond a plain plan of the task; survey: of its pack."""

    task: Any
    draw: Callable[[Rng], dict[str, np.ndarray]]
    settings: Mapping[str, Any]
    survey: Mapping[str, Any]
    ctc: bool = False
    large: bool = False

    @property
    def plan(self) -> Any:
        course = {"epochs": 2, "eval_every": 2, "schedule": "constant", "min_lr": 0.0, "warmup_epochs": 0.0}
        plain = {"amp": "off", "ema": None, "micro_batch_size": None, "channels_last": False, "compile": False}
        lr = self.task.PLAN.lr / 10
        return self.task.PLAN.replace(**{**course, **plain, "batch_size": BATCH, "lr": lr, **self.settings})

    @property
    def scored(self) -> Any:
        """The task as it is trained and evaluated here: edit distances of texts need a package that may be absent."""
        if not self.ctc:
            return self.task
        return SimpleNamespace(**{**vars(self.task), "metrics": lambda outputs, batch: {}, "BEST": "-loss"})

    def pack(self, folder: Path, count: int) -> nb.Pack:
        rng = np.random.default_rng(0)
        splits = ["val" if i % 6 == 5 else "train" for i in range(count)]
        samples = [self.draw(rng) for _ in range(count)]
        return pack_of(samples, folder, task=task_name(self.task), split=splits, **self.survey)


def image(height: int, width: int) -> Callable[[Rng], dict[str, np.ndarray]]:
    size = height, width
    return lambda rng: {"image": rng.integers(256, size=size, dtype=np.uint8), "label": rng.integers(10, size=4)}


def line(rng: Rng, height: int = 32) -> dict[str, np.ndarray]:
    ink = rng.integers(256, size=(int(rng.integers(120, 200)), height), dtype=np.uint8)
    return {"image": ink, "label": rng.integers(10, size=int(rng.integers(1, 4)))}


def clip(rng: Rng) -> dict[str, np.ndarray]:
    """Of one of two lengths, so that almost all batches have one shape."""
    frames = int(rng.choice((24, 48)))
    return {
        "x": rng.random((frames, 156), np.float32),
        "mask": rng.random((frames, 78)) < 0.9,
        "features": rng.random((frames, 2048), np.float32),
        "label": np.array([rng.integers(10), rng.integers(2)]),
    }


def scene(rng: Rng) -> dict[str, np.ndarray]:
    label = rng.integers(3, size=(3, 4), dtype=np.uint8).repeat(32, 0).repeat(32, 1)
    noise, distance = rng.integers(128, size=(96, 128, 3)), rng.integers(256, size=(96, 128), dtype=np.uint8)
    pixels = (noise + 120 * np.eye(3, dtype=int)[label]).astype(np.uint8)
    return {"image": pixels, "label": label, "distance": distance}


def fixed(height: int, width: int) -> dict[str, Any]:
    return {"classes": LETTERS, "options": {"layout": "fixed", "size": [height, width], "length": 4}}


RAGGED = {"ragged": ("x", "mask", "features"), "bucket_by": "x"}
CLIPS = {"classes": LETTERS, "options": {"categories": ["a", "b"]}, **RAGGED}
SCENES = {"classes": list("abc"), "options": {"size": [96, 128]}}


def lines(height: int, *more: str) -> dict[str, Any]:
    ragged = {"ragged": ("image", "label"), "bucket_by": "image"}
    return {"classes": [*LETTERS, *more], "options": {"layout": "lines", "height": height}, **ragged}


CASES = {
    "captcha guide": Case(captcha, image(60, 160), {"network": "guide"}, fixed(60, 160), large=True),
    "captcha small": Case(captcha, image(60, 160), {"network": "small"}, fixed(60, 160)),
    "captcha ctc": Case(captcha, line, {"network": "ctc"}, lines(32), ctc=True),
    "hwdb slim": Case(hwdb, line, {"network": "slim"}, lines(32, UNKNOWN), ctc=True),
    "hwdb hctr": Case(hwdb, partial(line, height=64), {"network": "hctr"}, lines(64, UNKNOWN), ctc=True, large=True),
    "sign transformer": Case(sign, clip, {"network": "transformer"}, CLIPS),
    "sign gru": Case(sign, clip, {"network": "gru"}, CLIPS),
    "segment slim": Case(segment, scene, {"network": "slim", "crop": 64}, SCENES),
    "segment bisenetv2": Case(segment, scene, {"network": "bisenetv2", "crop": 64}, SCENES, large=True),
}
AUGMENT: dict[str, dict[str, Any]] = {
    "captcha": {"augment": 1.0},
    "hwdb": {"augment": 1.0},
    "sign": {"time_warp": 0.5, "time_crop": 0.2, "mirror": 0.5, "label_smoothing": 0.1, "bucket": 8},
    "segment": {"scale_low": 0.25, "scale_high": 2.0, "flip": 0.5, "jitter": 0.4},
}
"""Task → all that it draws random numbers for."""


def augmented(name: str) -> Any:
    return CASES[name].plan.replace(**AUGMENT[name.split()[0]])


LEAN = ("captcha small", "captcha ctc", "sign transformer", "segment slim")
"""One network of each kind, for what takes several runs."""
Pass = tuple[float, Tensor]
"""The mean loss and the gradient of one batch at fresh weights, without dropout."""


def one_pass(case: Case, pack: nb.Pack, device: torch.device, rounded: Any = None, **changes: Any) -> Pass:
    """rounded: by which dtype's rounding the weights are changed first, off any grid: TF32 would not notice fp16's."""
    with untouched(device):
        state = TrainState(case.task, pack, case.plan.replace(**changes), device)
        devices.prepare(state.plan, device)
        without_dropout(state.model)
        for p in state.parameters if rounded else ():
            p.data.mul_(1 + torch.finfo(rounded or torch.float32).eps * (torch.rand_like(p) - 0.5))
        if state.scaler.is_enabled():
            state.scaler = torch.amp.GradScaler(device.type, init_scale=SCALE / 16 if case.ctc else SCALE)
        total, count = gradients(state, on(device, gather(pack, pack.ids("train")[:BATCH])), BATCH)
        gradient = torch.cat([p.grad.flatten() for p in state.parameters if p.grad is not None]).double()
        return float(total) / float(count), gradient / state.scaler.get_scale()


def apart(a: Pass, b: Pass) -> tuple[float, float]:
    (loss, x), (other, y) = a, (b[0], b[1].to(a[1].device))
    return abs(loss - other) / abs(other), float(1 - x @ y / (x.norm() * y.norm()).clamp(min=1e-30))


def require_close(found: Pass, expected: Pass, controls: Sequence[Pass], loss: float = 0.01, gradient: float = 1e-3):
    """As close as this, or as four times what the controls are apart: an equal pass, one with rounded weights."""
    far, noise = apart(found, expected), [apart(each, expected) for each in controls]
    print(f"loss {far[0]:.3%} apart, 1 - cosine {far[1]:.1e}; controls", *(f"{a:.3%} {b:.1e}" for a, b in noise))
    assert far[0] <= max(loss, *(4 * a for a, _ in noise))
    assert far[1] <= max(gradient, *(4 * b for _, b in noise))


Losses = list[float]


def run(task: Any, pack: nb.Pack, state: TrainState, evaluating: bool = False) -> tuple[Losses, dict[str, Tensor]]:
    """(the losses of its log steps, what is left), evaluated after every third step where asked."""
    losses = []
    for record in train(task, state, pack):
        losses += [record.values["loss"]] if record.kind == "step" and "loss" in record.values else []
        state.evaluate_next = evaluating and record.kind == "step" and state.step % 3 == 0
    return losses, {name: tensor.detach().clone() for name, tensor in state.tensors().items()}


def first_losses(case: Case, pack: nb.Pack, device: torch.device, steps: int, **changes: Any) -> tuple[Losses, Any]:
    with untouched(device):
        stepper = Stepper(case.task, pack, case.plan.replace(**changes), device, learning=True)
        without_dropout(stepper.state.model)
        sums = (stepper.step(next(stepper.batches)) for _ in range(steps))
        return [float(total) / float(count) for total, count in sums], stepper.state
