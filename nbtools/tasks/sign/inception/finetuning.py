"""The backbone trained on the labelled clips, end to end with a GRU that is then left behind, before it makes features.

A clip has about 122 frames, and each keeps 98 MB of InceptionV3's activations until backward: they are computed
again there, so that only those of `batch_size` frames exist at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nbtools.data import Refused, bar
from nbtools.errors import PackError
from nbtools.tasks.sign import task
from nbtools.tasks.sign.clips.files import found_lists, split_of, walked
from nbtools.tasks.sign.clips.matching import Told
from nbtools.tasks.sign.clips.rules import FEATURES
from nbtools.tasks.sign.inception.backbone import Backbone
from nbtools.tasks.sign.inception.frames import Film, chunks
from nbtools.tasks.sign.networks.gru import Gru
from nbtools.tasks.sign.plans import Plan
from nbtools.train import again

STEP = 8  # clips an optimizer step
FASTER = 10  # times the GRU's lr is the backbone's: it begins with nothing


@dataclass(frozen=True)
class Taught:
    """A clip to train on, and its (gloss, category)."""

    film: Film
    label: tuple[int, int]


@dataclass(frozen=True)
class Tuning:
    """How to train a backbone. lr: its own; batch_size: frames at once."""

    epochs: int
    lr: float
    batch_size: int
    seed: int
    progress: bool


def taught(folder: Path, films: Iterable[Film]) -> list[Taught]:
    """The clips in train folders that have a label. Raises PackError where there are none."""
    known = {film.name: film for film in films}
    told = Told()
    for name, data in found_lists(folder, walked(folder)):
        told.listen(name, data, list(known))
    told.agree()
    chosen = [Taught(known[name], told.labels[name]) for name in sorted(told.labels) if split_of(name) == "train"]
    if not chosen:
        raise PackError(
            f"{folder}: finetune trains on clips with a label below a folder train/, and there are none; sort clips "
            "into train/ and val/, with a labels.csv each: a backbone that has seen val is not judged by it"
        )
    return chosen


def finetune(backbone: Backbone, clips: list[Taught], how: Tuning) -> tuple[float, ...]:
    """Train the backbone in place; the mean loss of each epoch. Nothing is kept of a run that was killed.

    Raises PackError naming the clip whose frames cannot be decoded.
    """
    device = backbone.device
    glosses, categories = (max(clip.label[i] for clip in clips) + 1 for i in range(2))
    losses = []
    with torch.random.fork_rng([device] if device.type == "cuda" else []), ThreadPoolExecutor() as pool:
        torch.manual_seed(how.seed)
        gru = Gru(FEATURES, glosses, categories).to(device)
        optimizer = torch.optim.AdamW(
            [{"params": backbone.parameters(), "lr": how.lr}, {"params": gru.parameters(), "lr": how.lr * FASTER}]
        )
        backbone.train()
        for _ in (shown := bar(range(how.epochs), "fine-tuning", disable=not how.progress, leave=False)):
            order = torch.randperm(len(clips)).tolist()
            total = torch.zeros((), device=device)
            for at in range(0, len(clips), STEP):
                optimizer.zero_grad()
                group = [clips[i] for i in order[at : at + STEP]]
                for clip in group:
                    loss = lost(backbone, gru, clip, how.batch_size, pool)
                    (loss / len(group)).backward()
                    total += loss.detach()
                optimizer.step()
            losses.append(float(total) / len(clips))
            shown.set_postfix(loss=f"{losses[-1]:.3f}")
        backbone.eval()
    return tuple(losses)


def lost(backbone: Backbone, gru: Gru, clip: Taught, batch_size: int, pool: ThreadPoolExecutor) -> Tensor:
    """The loss of one clip, by its frames."""
    try:
        parts = [again(backbone, part.to(backbone.device)) for part in chunks(clip.film, batch_size, pool)]
    except Refused as error:
        value, rule, fix = error.row.reasons
        raise PackError(f"{clip.film.name}: {rule}, got {value}; {fix}") from error
    features = torch.cat(parts)[None]
    length, label = torch.tensor([features.shape[1]]), torch.tensor([clip.label])
    batch = {"features": features, "features_length": length.to(features.device), "label": label.to(features.device)}
    return task.loss(gru, batch, Plan(network="gru"))[0]
