"""Defaults against defaults: what the two lines reach on problems that nobody tuned them on.

    python -m benchmarks.defaults [--seeds 5] [--quick]

Digits, wine, breast cancer and diabetes of scikit-learn, and four generated problems (`tests.problems`), a quarter each
held out. `nbtools` is `nb.fit(nb.classify(net), nb.pack(items))`. The others train the same network for the epochs that
nbtools planned, on standardised data, with AdamW and one cycle of lr: `grid` with the best of six lrs on a validation
split, `fastai` with that of `lr_find`, `lightning` with that of its `Tuner`. `boosting` is scikit-learn's
HistGradientBoosting, without a network. Test accuracy; of diabetes the mean absolute error.
"""

# Only `make bench` installs the peers:
# pyright: reportMissingImports=false, reportAttributeAccessIssue=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import argparse
import logging
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader, TensorDataset

import nbtools as nb
from benchmarks.paired import Figure, Receipt, on_one_core
from tests.problems import GRID, PROBLEMS

BATCH = 64
SEED = 7  # of the generated problems


@dataclass(frozen=True)
class Problem:
    """One split of a data set. net: makes the network of (classes or 1, inputs)."""

    classes: int  # 0: values
    net: Callable[[], nn.Module]
    train: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]
    seed: int

    def score(self, outputs: Tensor | np.ndarray) -> float:
        """Return accuracy in %, or mean absolute error. outputs: logits (N, K), classes (N,), or values (N,)."""
        answers, true = np.asarray(outputs), self.test[1]
        if not self.classes:
            return float(np.abs(answers - true).mean())
        return 100 * float(((answers.argmax(1) if answers.ndim > 1 else answers) == true).mean())

    def loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(outputs, y) if self.classes else F.mse_loss(outputs[:, 0], y)

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return (x, y, test x), standardised by channel or feature; images channels first, tokens as they are."""
        x, held = (torch.from_numpy(np.ascontiguousarray(part[0])) for part in (self.train, self.test))
        y = torch.from_numpy(self.train[1])
        if not self.classes:
            y = ((y - y.mean()) / y.std()).float()
        if x.is_floating_point() or x.dtype == torch.uint8:
            axes = tuple(range(x.dim() - 1))
            mean, std = x.float().mean(axes), x.float().std(axes) + 1e-8
            x, held = (((each.float() - mean) / std) for each in (x, held))
        return (x.permute(0, 3, 1, 2), y, held.permute(0, 3, 1, 2)) if x.dim() == 4 else (x, y, held)

    def loaders(self) -> tuple[DataLoader, DataLoader, Tensor]:
        """Return training and validation batches, four fifths and one, and the test inputs."""
        x, y, held = self.tensors()
        train, val = TensorDataset(x, y), np.random.default_rng(self.seed).permutation(len(x))
        parts = (torch.utils.data.Subset(train, ids.tolist()) for ids in (val[len(x) // 5 :], val[: len(x) // 5]))
        first, second = (DataLoader(part, min(BATCH, len(part)), shuffle=True) for part in parts)
        return first, second, held


def problem(name: str, seed: int) -> Problem:
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    if name in PROBLEMS:
        make, network = PROBLEMS[name]
        x, y = (np.array(each) for each in zip(*make(SEED), strict=True))
    else:
        loaded: Any = getattr(datasets, f"load_{name}")()
        x, y = loaded.data.astype(np.float32), loaded.target
    classes = 0 if name == "diabetes" else len(set(y))
    parts = train_test_split(x, y, test_size=0.25, random_state=seed, stratify=y if classes else None)

    def net() -> nn.Module:
        if name == "bags":
            return network(classes)
        inputs = x.shape[-1]
        if name in PROBLEMS:
            return network(classes, inputs)
        return nn.Sequential(
            *(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU()), nn.Linear(64, classes or 1)
        )

    return Problem(classes, net, (parts[0], parts[2]), (parts[1], parts[3]), seed)


# -- contestants: (problem, epochs) → score


def nbtools(job: Problem, folder: Path) -> tuple[float, int]:
    """Return score and planned epochs."""
    kind: Any = int if job.classes else float
    pack = nb.pack([(x, kind(y)) for x, y in zip(*job.train, strict=True)], into=folder / "pack", progress=False)
    task = nb.classify(job.net()) if job.classes else nb.regress(job.net())
    run = nb.fit(task, pack, run=folder / "run", receipt=False, progress=False)
    answers = run.predict([*job.test[0]])
    return job.score(np.array([kind(a.name) if job.classes else a for a in answers])), run.plan.epochs


def one_cycle(job: Problem, lr: float, epochs: int, batches: DataLoader) -> nn.Module:
    torch.manual_seed(job.seed)
    net = job.net()
    optimizer = torch.optim.AdamW(net.parameters(), lr)
    schedule = OneCycleLR(optimizer, lr, epochs * len(batches))
    for _ in range(epochs):
        for x, y in batches:
            optimizer.zero_grad()
            job.loss(net(x), y).backward()
            optimizer.step()
            schedule.step()
    return net.eval()


@torch.no_grad()
def answered(job: Problem, net: nn.Module, held: Tensor) -> float:
    outputs = net(held)
    if job.classes:
        return job.score(outputs)
    y = torch.from_numpy(job.train[1])
    return job.score(outputs[:, 0] * y.std() + y.mean())


def grid(job: Problem, epochs: int) -> float:
    batches, val, held = job.loaders()
    nets = [one_cycle(job, lr, epochs, batches) for lr in GRID]
    with torch.no_grad():
        losses = [sum(float(job.loss(net(x), y)) * len(x) for x, y in val) for net in nets]
    return answered(job, nets[int(np.nanargmin(losses))], held)


def fastai(job: Problem, epochs: int) -> float:
    import fastai.callback.schedule  # noqa: F401
    from fastai.data.core import DataLoaders
    from fastai.learner import Learner

    batches, val, held = job.loaders()
    learner = Learner(DataLoaders(batches, val), job.net(), loss_func=job.loss)
    with learner.no_bar(), learner.no_logging():
        learner.fit_one_cycle(epochs, learner.lr_find(show_plot=False).valley)
    return answered(job, learner.model.eval(), held)


def lightning(job: Problem, epochs: int) -> float:
    from lightning import LightningModule, Trainer
    from lightning.pytorch.tuner.tuning import Tuner

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.lr = job.net(), 1e-3

        def training_step(self, batch: list[Tensor]) -> Tensor:
            return job.loss(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), self.lr)
            schedule = OneCycleLR(optimizer, self.lr, epochs * len(batches))
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    batches, _, held = job.loaders()
    module, quiet = Module(), {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(accelerator="cpu", max_epochs=epochs, default_root_dir=folder, **quiet)
        Tuner(trainer).lr_find(module, batches)
        trainer.fit(module, batches)
    return answered(job, module.net.eval(), held)


def boosting(job: Problem, epochs: int) -> float:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    model = HistGradientBoostingClassifier if job.classes else HistGradientBoostingRegressor
    x, held = (part[0].reshape(len(part[0]), -1) for part in (job.train, job.test))
    return job.score(model(random_state=job.seed).fit(x, job.train[1]).predict(held))


PEERS = {name: train for name, train in (("fastai", fastai), ("lightning", lightning)) if find_spec(name)}
PEERS |= {"grid": grid, "boosting": boosting}
NAMES = ("digits", "wine", "breast_cancer", "diabetes", *PROBLEMS)


def main() -> None:
    parser = argparse.ArgumentParser(description="what default plans reach, in nbtools and its peers")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="wine and diabetes, one seed; writes no receipt")
    given = parser.parse_args()
    machine, scores = on_one_core(), {}
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    names, seeds = (("wine", "diabetes"), 1) if given.quick else (NAMES, given.seeds)
    for name in names:
        for seed in range(seeds):
            job = problem(name, seed)
            torch.manual_seed(seed)
            with tempfile.TemporaryDirectory() as folder:
                score, epochs = nbtools(job, Path(folder))
            row = {"nbtools": score, **{peer: train(job, epochs) for peer, train in PEERS.items()}}
            for peer, value in row.items():
                scores.setdefault((name, peer), []).append(value)
            print(name, seed, {peer: round(value, 1) for peer, value in row.items()}, flush=True)
    figures = [Figure.of(f"{name}: {peer}", "" if name == "diabetes" else "%", v) for (name, peer), v in scores.items()]
    accuracy = {peer: mean_accuracy(scores, peer) for peer in ("nbtools", *PEERS)}
    figures += [Figure.of(f"mean accuracy: {peer}", "%", values) for peer, values in accuracy.items()]
    receipt = Receipt(
        Figure.of("defaults_accuracy", "%", accuracy["nbtools"]), tuple(figures), {"seeds": seeds}, machine
    )
    if not given.quick:
        receipt.write()
    print(receipt)


def mean_accuracy(scores: dict[tuple[str, str], list[float]], peer: str) -> list[float]:
    """Return the mean over all problems of classes, seed by seed."""
    return np.mean([v for (name, who), v in scores.items() if who == peer and name != "diabetes"], axis=0).tolist()


if __name__ == "__main__":
    main()
