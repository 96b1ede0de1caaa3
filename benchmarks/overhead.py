"""What the train loop costs above the tensor work that it drives: CPU time a step, over that of a bare loop.

    python -m benchmarks.overhead [--quick]

The work: gather a batch from resident tensors, set lr (cosine, every step), zero_grad, forward, backward, clip the
gradient norm, fused AdamW, add loss and count to sums. `bare` does nothing else, with torch's own calls; nbtools also
yields a record a step, and writes loss and speed on log steps. Both begin with the same weights, see the same batches,
and must end every epoch with the same loss, bit for bit. They run in one process and in turns of a few steps.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from time import process_time

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import nbtools as nb
from benchmarks.paired import Figure, Receipt, above, in_turns, on_one_core, times
from nbtools.data import Card

FEATURES, CLASSES, HIDDEN = 32, 10, 32
SAMPLES = 2**13  # a power of two: progress, and so lr, is then exact however it is computed
EPOCHS = 26  # the first carries the start and is not timed
SLICE = 16  # steps before the other's turn: drifts of the machine then meet both alike
PLAN = nb.Plan(epochs=EPOCHS, batch_size=32, lr=1e-2, clip_norm=1.0, feed="resident")


def network() -> nn.Module:
    """x (B, FEATURES) → logits (B, CLASSES)."""
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))


class Tiny(nb.Task):
    """Takes vectors as they are, without normalising them."""

    def model(self, card: Card, plan: nb.Plan) -> nn.Module:
        return network()

    def batch(self, raw: dict[str, Tensor], plan: nb.Plan, draws: object) -> dict[str, Tensor]:
        return raw

    def loss(self, model: nn.Module, batch: dict[str, Tensor], plan: nb.Plan) -> tuple[Tensor, int]:
        return F.cross_entropy(model(batch), batch["y"], reduction="sum"), len(batch["y"])


def packed(folder: Path, count: int) -> nb.Pack:
    """Vectors around one of CLASSES centres; all of them to train on."""
    rng = np.random.default_rng(0)
    labels = rng.integers(CLASSES, size=count)
    x = (rng.normal(size=(CLASSES, FEATURES))[labels] + rng.normal(size=(count, FEATURES))).astype(np.float32)
    return nb.pack([*zip(x, labels.tolist(), strict=True)], val=0, test=0, into=folder / "pack", progress=False)


def bare(pack: nb.Pack, losses: list[float]) -> Iterator[None]:
    """Make SLICE steps at each `next`."""
    x, y = torch.from_numpy(pack.arrays["x"]), torch.from_numpy(pack.arrays["y"])
    with torch.random.fork_rng():
        torch.manual_seed(PLAN.seed)
        model = network()
    parameters = [*model.parameters()]
    optimizer = torch.optim.AdamW(parameters, PLAN.lr, betas=PLAN.betas, weight_decay=PLAN.weight_decay, fused=True)
    step, total = 0, PLAN.epochs * len(x) // PLAN.batch_size
    for epoch in range(PLAN.epochs):
        order = torch.from_numpy(np.random.default_rng([PLAN.seed, epoch]).permutation(len(x)))
        loss_sum, count = torch.zeros((), dtype=torch.float64), 0
        for ids in order.split(PLAN.batch_size):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x.index_select(0, ids)), y.index_select(0, ids), reduction="sum")
            (loss / len(ids)).backward()
            nn.utils.clip_grad_norm_(parameters, 1.0)
            for group in optimizer.param_groups:
                group["lr"] = PLAN.lr * ((1 + math.cos(math.pi * (step + 0.5) / total)) / 2)
            optimizer.step()
            step, count = step + 1, count + len(ids)
            loss_sum += loss.detach()
            if step % SLICE == 0:
                yield
        losses.append(float(loss_sum) / count)


def nbtools(pack: nb.Pack, losses: list[float]) -> Iterator[None]:
    """Make SLICE steps at each `next`."""
    task = Tiny()
    for record in nb.train(task, nb.TrainState(task, pack, PLAN), pack):
        if record.kind == "step" and record.step % SLICE == 0:
            yield
        elif record.kind == "epoch":
            losses.append(record.values["train_loss"])


def measure(pack: nb.Pack, rounds: int) -> dict[str, list[float]]:
    """Return CPU-µs a step of both in each round: an epoch, after one that carries the start. Raises SystemExit where
    their losses differ in one bit."""
    losses: dict[str, list[float]] = {"bare": [], "nbtools": []}
    running = {"bare": bare(pack, losses["bare"]), "nbtools": nbtools(pack, losses["nbtools"])}
    slices = len(pack) // PLAN.batch_size // SLICE

    def advance(name: str) -> float:
        start = process_time()
        next(running[name])
        return (process_time() - start) * 1e6 / (slices * SLICE)

    turns = {name: partial(advance, name) for name in running}
    in_turns(turns, 1, slices)
    steps = in_turns(turns, rounds, slices)
    if losses["nbtools"] != losses["bare"]:
        raise SystemExit(f"nbtools does other work: its losses are {losses['nbtools']}, bare's {losses['bare']}")
    return steps


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time a step that the loop costs above bare PyTorch")
    parser.add_argument("--quick", action="store_true", help="in seconds, to see that it runs; writes no receipt")
    quick = parser.parse_args().quick
    machine, unit = on_one_core(), "CPU-µs/step"
    with tempfile.TemporaryDirectory() as folder:
        steps = measure(packed(Path(folder), SAMPLES // 8 if quick else SAMPLES), 2 if quick else EPOCHS - 1)
    conditions = {
        "promise": "≤ 1.25 × bare: 100 CPU-µs above a step of 400",
        "step": f"MLP {FEATURES}-{HIDDEN}-{CLASSES}, batch {PLAN.batch_size}, clip {PLAN.clip_norm}, fused AdamW",
        "same_losses": "bit for bit, every epoch of every run",
    }
    steps["above_bare"] = above(steps, "nbtools", "bare")
    ratio = Figure.of("loop_overhead", "×", times(steps, "nbtools", "bare"))
    receipt = Receipt(ratio, tuple(Figure.of(name, unit, each) for name, each in steps.items()), conditions, machine)
    if not quick:
        receipt.write()
    print(receipt)


if __name__ == "__main__":
    main()
