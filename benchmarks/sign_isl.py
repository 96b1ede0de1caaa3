"""What is read of ten real signs, 160 clips to train on and 40 to validate: by the Transformer with the advised plan,
and by the nearest neighbour in mean and deviation of every coordinate, which learns nothing.

The same calls as a notebook's: stage → pack → advise → fit. A figure is of the last epoch, not of the best: 40 clips
both choose and tell too little. The clips are third-party data and not part of the project: NBTOOLS_REAL_DATA names the
folder that holds `isl-keypoints.tar`.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

import nbtools as nb
from benchmarks.paired import Figure, Receipt, on_one_core
from nbtools import show
from nbtools.data import Draws, Pack, collate
from nbtools.tasks import sign

SEEDS = 5


def main() -> None:
    data = os.environ.get("NBTOOLS_REAL_DATA")
    if not data:
        print("sign_isl: skipped; it needs isl-keypoints.tar in the folder that NBTOOLS_REAL_DATA names")
        return
    machine = on_one_core()
    pack = sign.pack(nb.stage(Path(data) / "isl-keypoints.tar"))
    advice = nb.advise(sign, pack, measure=False)
    plan = sign.Plan.from_dict(advice.plan.to_dict())
    print(pack, advice, sep="\n\n")
    neighbours = {
        "nearest neighbour": nearest(pack, sign.Plan(normalise="none")),
        f"nearest neighbour, {plan.normalise}": nearest(pack, sign.Plan(normalise=plan.normalise)),
        f"nearest neighbour, {plan.normalise}, mirrored too": nearest(pack, sign.Plan(mirror=1.0)),
    }
    found = [learned(pack, plan.replace(seed=seed)) for seed in range(SEEDS)]
    accuracies, minutes = zip(*found, strict=True)
    headline = mean_of("sign_isl", "val_gloss_accuracy", accuracies)
    rows = [(name, f"{value:.3f}", "1", "") for name, value in neighbours.items()]
    spread = f"{headline.least:.3f}–{headline.most:.3f}"
    rows.append(("Transformer, the mean", f"{headline.value:.3f}", str(headline.n), spread))
    print(show.text(("method", "gloss accuracy", "seeds", "spread"), rows))
    figures = [Figure.of(name, "of clips", [value]) for name, value in neighbours.items()]
    figures.append(Figure.of("time of a run", "CPU-min", minutes))
    conditions = {
        "data": f"{pack.splits['train']} train, {pack.splits['val']} val, {len(pack.classes)} signs",
        "accuracy by seed": accuracies,
        "plan": plan.to_dict(),
    }
    receipt = Receipt(headline, tuple(figures), conditions, machine)
    receipt.write()
    print(receipt)


def learned(pack: Pack, plan: sign.Plan) -> tuple[float, float]:
    """(gloss accuracy on validation after the last epoch, CPU minutes) of one run."""
    start = time.process_time()
    with tempfile.TemporaryDirectory() as scratch:
        run = nb.fit(sign, pack, plan, run=Path(scratch) / "sign", receipt=False)
        return float(run.summary()["val_gloss_accuracy"].iloc[-1]), (time.process_time() - start) / 60


def nearest(pack: Pack, plan: sign.Plan) -> float:
    """Gloss accuracy on validation of the nearest training clip, or mirror image of one where the plan mirrors."""
    val, expected = summarised(pack, "val", plan)
    train, truth = summarised(pack, "train", plan)
    if plan.mirror:
        train, truth = torch.cat([train, summarised(pack, "train", plan, augmented=True)[0]]), truth.repeat(2)
    guesses = truth[torch.cdist(val, train).argmin(1)]
    return (guesses == expected).double().mean().item()


def summarised(pack: Pack, split: str, plan: sign.Plan, augmented: bool = False) -> tuple[Tensor, Tensor]:
    """(mean and deviation of every coordinate over a clip's frames (n, 312), glosses (n,))."""
    ids = pack.ids(split)
    draws = Draws(plan.seed, 0, torch.from_numpy(ids)) if augmented else None
    batch = sign.batch(collate([pack.sample(int(i)) for i in ids], pack.columns), plan, draws)
    clips = [x[:length] for x, length in zip(batch["x"], batch["x_length"].tolist(), strict=True)]
    features = [torch.cat([x.mean(0), x.std(0, correction=0)]) for x in clips]
    return torch.stack(features), batch["label"][:, 0]


def mean_of(name: str, unit: str, values: Sequence[float]) -> Figure:
    """The mean in place of the median: what the claim is about."""
    return dataclasses.replace(Figure.of(name, unit, values), value=sum(values) / len(values))


if __name__ == "__main__":
    sys.exit(main())
