"""The contestants of `overhead`: one training, driven by hand, by nbtools, and by its peers."""

# Only `make bench` installs the peers:
# pyright: reportMissingImports=false

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks import tiny
from nbtools import TrainState, train
from nbtools.data import Pack

CLIP = 1.0
EPOCHS = 26  # the first carries the start and is not timed
SLICE = 16  # steps that a contestant makes before the next one's turn: drifts of the machine then meet all alike
PLAN = tiny.PLAN.replace(epochs=EPOCHS, clip_norm=CLIP)
Losses = list[float]  # each epoch's mean
Contestant = Callable[[Pack, Losses], Iterator[None]]  # makes SLICE steps at each `next`


class Batches:
    """The gather: what a DataLoader is to the peers. Each pass is the next epoch, in nbtools' order."""

    def __init__(self, pack: Pack):
        self.x, self.label = (torch.from_numpy(pack.arrays[name]) for name in ("x", "label"))
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.x) // PLAN.batch_size

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        order = torch.from_numpy(np.random.default_rng([PLAN.seed, self.epoch]).permutation(len(self.x)))
        self.epoch += 1
        for ids in order.split(PLAN.batch_size):
            yield self.x.index_select(0, ids), self.label.index_select(0, ids).view(-1)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), PLAN.lr, betas=PLAN.betas, weight_decay=PLAN.weight_decay, fused=True)


def set_lr(optimizer: torch.optim.Optimizer, progress: float) -> None:
    """Cosine to 0; progress of the whole run, 0–1, taken in the middle of a step."""
    lr = PLAN.lr * ((1 + math.cos(math.pi * progress)) / 2)
    for group in optimizer.param_groups:
        group["lr"] = lr


@dataclass(frozen=True)
class Kit:
    """What a loop written by hand is made of."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    clear: Callable[[], object]
    backward: Callable[[Tensor], None]
    clip: Callable[[], object]


def by_hand(kit: Kit, batches: Batches, losses: Losses) -> Iterator[None]:
    step, total = 0, PLAN.epochs * len(batches)
    for _ in range(PLAN.epochs):
        loss_sum, count = torch.zeros((), dtype=torch.float64), 0
        for x, label in batches:
            kit.clear()
            loss = F.cross_entropy(kit.model(x), label, reduction="sum")
            kit.backward(loss / len(x))
            kit.clip()
            step += 1
            set_lr(kit.optimizer, (step - 0.5) / total)
            kit.optimizer.step()
            loss_sum += loss.detach()
            count += len(x)
            if step % SLICE == 0:
                yield
        losses.append(float(loss_sum) / count)


def bare(pack: Pack, losses: Losses) -> Iterator[None]:
    model = tiny.seeded(PLAN)
    optimizer, clip = adamw(model), partial(nn.utils.clip_grad_norm_, list(model.parameters()), CLIP)
    return by_hand(Kit(model, optimizer, optimizer.zero_grad, Tensor.backward, clip), Batches(pack), losses)


def nbtools(pack: Pack, losses: Losses) -> Iterator[None]:
    for record in train(tiny, TrainState(tiny, pack, PLAN), pack):
        if record.kind == "step" and record.step % SLICE == 0:
            yield
        elif record.kind == "epoch":
            losses.append(record.values["train_loss"])


def fabric(pack: Pack, losses: Losses) -> Iterator[None]:
    from lightning.fabric import Fabric

    runner, model = Fabric(accelerator="cpu", devices=1), tiny.seeded(PLAN)
    wrapped, optimizer = runner.setup(model, adamw(model))
    clip = partial(runner.clip_gradients, wrapped, optimizer, max_norm=CLIP, error_if_nonfinite=False)
    return by_hand(Kit(wrapped, optimizer, optimizer.zero_grad, runner.backward, clip), Batches(pack), losses)


def accelerate(pack: Pack, losses: Losses) -> Iterator[None]:
    from accelerate import Accelerator

    runner, model = Accelerator(cpu=True), tiny.seeded(PLAN)
    wrapped, optimizer = runner.prepare(model, adamw(model))
    clip = partial(runner.clip_grad_norm_, list(wrapped.parameters()), CLIP)
    return by_hand(Kit(wrapped, optimizer, optimizer.zero_grad, runner.backward, clip), Batches(pack), losses)


def lightning(pack: Pack, losses: Losses) -> Iterator[None]:
    from lightning import LightningModule, Trainer

    class Module(LightningModule):
        def __init__(self, batches: Batches, pause: Callable[[], None]) -> None:
            super().__init__()
            self.model, self.done, self.total = tiny.seeded(PLAN), 0, PLAN.epochs * len(batches)
            self.pause = pause

        def configure_optimizers(self) -> torch.optim.Optimizer:
            self.adamw = adamw(self.model)
            return self.adamw

        def on_train_epoch_start(self) -> None:
            self.loss_sum, self.count = torch.zeros((), dtype=torch.float64), 0

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            x, label = batch
            loss = F.cross_entropy(self.model(x), label, reduction="sum")
            self.done += 1
            set_lr(self.adamw, (self.done - 0.5) / self.total)
            self.loss_sum += loss.detach()
            self.count += len(x)
            return loss / len(x)

        def on_train_batch_end(self, *_: object) -> None:
            if self.done % SLICE == 0:
                self.pause()

        def on_train_epoch_end(self) -> None:
            losses.append(float(self.loss_sum) / self.count)

    def fit(pause: Callable[[], None]) -> None:
        batches = Batches(pack)
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        trainer = Trainer(accelerator="cpu", devices=1, max_epochs=PLAN.epochs, gradient_clip_val=CLIP, barebones=True)
        trainer.fit(Module(batches, pause), train_dataloaders=batches)

    return pausing(fit)


def pausing(fit: Callable[[Callable[[], None]], None]) -> Iterator[None]:
    """A loop that cannot be left, as a generator: it runs on a thread that waits in `pause` until its next turn."""
    turn, done = threading.Semaphore(0), threading.Semaphore(0)

    def pause() -> None:
        done.release()
        turn.acquire()

    def run() -> None:
        torch.set_num_threads(1)  # a thread begins with OpenMP's default, not with the process's setting
        turn.acquire()
        fit(pause)
        done.release()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        turn.release()
        done.acquire()
        yield


CONTESTANTS: dict[str, tuple[Contestant, str]] = {
    "bare": (bare, "torch"),
    "nbtools": (nbtools, "torch"),
    "fabric": (fabric, "lightning"),
    "accelerate": (accelerate, "accelerate"),
    "lightning": (lightning, "lightning"),
}
"""name → (contestant, the package it needs)."""
