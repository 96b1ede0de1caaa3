"""The batch finder against Lightning's: how long each takes, and how fast the batch that each chooses trains.

    python -m benchmarks.finder [--quick]

One job for both: captchas, the network and plan that nbtools advises on a CPU, the same tensor work a step. Each round
runs `find_batch` and Lightning's `Tuner.scale_batch_size` (mode "power", its defaults), then trains both choices in
turns in the same loop. Lightning doubles until memory ends or the data set does, and to 8192 where neither ends.
"""

# Only `make bench` installs the peers:
# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.paired import Figure, Receipt, in_turns, on_one_core, times
from nbtools.data import Draws, Pack, collate
from nbtools.measure import find_batch
from nbtools.measure.batch import Trial
from nbtools.measure.stepper import typical
from nbtools.tasks import captcha
from nbtools.train import Task
from nbtools.train.optimizer import build_optimizer

TASK, CPU = cast(Task, captcha), torch.device("cpu")
ROUNDS, TURNS, COUNT, SECONDS = 9, 3, 1024, 20.0
UNITS = {"seconds": "s", "batch": "samples", "rate": "samples/s"}
FIRST = 8  # batch size that a Lightning model begins with; its finder then begins with 2


Found = dict[str, list[float]]


class Samples(Dataset):
    """A pack's training samples one by one, from memory: what a DataLoader reads."""

    def __init__(self, pack: Pack):
        self.pack, self.ids = pack, pack.ids("train")

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {**self.pack.sample(self.ids[i]), "id": self.ids[i]}


def lightning(pack: Pack, plan: captcha.Plan, folder: Path) -> int:
    """The batch size that Lightning's finder chooses."""
    from lightning import LightningModule, Trainer
    from lightning.pytorch.tuner.tuning import Tuner

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.batch_size = captcha.model(pack.card, plan), FIRST

        def train_dataloader(self) -> DataLoader:
            def read(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
                return collate(samples, pack.columns)

            return DataLoader(Samples(pack), self.batch_size, shuffle=True, collate_fn=read)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return build_optimizer([{"params": list(self.model.parameters())}], plan)

        def training_step(self, raw: dict[str, torch.Tensor]) -> torch.Tensor:
            loss, count = captcha.loss(self.model, captcha.batch(raw, plan, Draws(0, 0, raw["id"])), plan)
            return loss / count

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        gradient_clip_val=plan.clip_norm,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    found = Tuner(trainer).scale_batch_size(Module())
    assert found is not None
    return found


def race(pack: Pack, plan: captcha.Plan, sizes: dict[str, int], turns: int) -> dict[str, float]:
    """samples/s of each one's choice: whole epochs of steps in turns, medians."""
    trial, count = Trial(TASK, pack, plan, CPU), pack.splits["train"]

    def pace(size: int) -> float:
        loads = typical(pack, plan.replace(batch_size=size), count)
        rate, reason = trial.rate(loads, max(1, count // size), lead=1)
        assert rate is not None, reason
        return rate

    for size in set(sizes.values()):
        trial.largest(size)
    found = in_turns({name: lambda size=size: pace(size) for name, size in sizes.items()}, turns)
    return {name: statistics.median(rates) for name, rates in found.items()}


def compared(pack: Pack, plan: captcha.Plan, folder: Path, rounds: int, turns: int, seconds: float) -> Found:
    """<contestant>_seconds, _batch and _rate, a value each round; another one begins each round."""
    finders: dict[str, Callable[[], int]] = {
        "nbtools": lambda: find_batch(TASK, pack, plan, CPU, seconds).batch_size,
        "lightning": lambda: lightning(pack, plan, folder),
    }
    found: Found = {f"{who}_{what}": [] for what in UNITS for who in finders}
    for k in range(rounds):
        sizes: dict[str, int] = {}
        for who in sorted(finders, reverse=bool(k % 2)):
            start = perf_counter()
            sizes[who] = finders[who]()
            found[f"{who}_seconds"].append(perf_counter() - start)
            found[f"{who}_batch"].append(sizes[who])
        for who, rate in race(pack, plan, sizes, turns).items():
            found[f"{who}_rate"].append(rate)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description="nbtools' batch finder against Lightning's")
    parser.add_argument("--quick", action="store_true", help="in seconds, to see that it runs; writes no receipt")
    quick = parser.parse_args().quick
    machine = on_one_core()
    rounds, turns, count, seconds = (1, 1, 64, 1.0) if quick else (ROUNDS, TURNS, COUNT, SECONDS)
    conditions = {"images": count, "seconds_asked": seconds, "lightning": version()}  # imported before it is timed
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        source = captcha.demo(folder / "raw", count)
        pack = captcha.pack(source, val=0, test=0, into=folder / "pack", progress=False)
        advised = {field: value for field, (value, _) in captcha.suggest(pack.card, "cpu").items()}
        plan = captcha.PLAN.replace(**{f: advised[f] for f in ("network", "augment", "clip_norm")}, amp="off")
        found = compared(pack, plan, folder, rounds, turns, seconds)
    figures = [Figure.of(name, UNITS[name.split("_")[1]], values) for name, values in found.items()]
    quicker = Figure.of("finder_time_ratio", "×", times(found, "lightning_seconds", "nbtools_seconds"))
    headline = Figure.of("finder_ratio", "×", times(found, "nbtools_rate", "lightning_rate"))
    result = Receipt(headline, (*figures, quicker), {**conditions, "network": plan.network}, machine)
    if not quick:
        result.write()
    print(result)


def version() -> str:
    import lightning
    import lightning.pytorch.tuner.tuning

    return lightning.__version__


if __name__ == "__main__":
    main()
