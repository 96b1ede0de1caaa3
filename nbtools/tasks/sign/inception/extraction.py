"""Frames → X2048: a step of its own, once before training. T frames, D = 2048 numbers a frame."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import safetensors.torch
import torch
from torch import nn

from nbtools import disk, table
from nbtools.data import Refused, Row, bar, stage
from nbtools.errors import PackError
from nbtools.tasks.sign.clips.clip import Keys
from nbtools.tasks.sign.clips.files import found_lists, walked
from nbtools.tasks.sign.clips.labels import REFERENCE
from nbtools.tasks.sign.inception.backbone import IMAGENET, Backbone, inception, load, mark, read_weights
from nbtools.tasks.sign.inception.finetuning import Tuning, taught
from nbtools.tasks.sign.inception.finetuning import finetune as finetune_on
from nbtools.tasks.sign.inception.frames import Film, chunks, found
from nbtools.tasks.sign.inception.storing import maker, others, store

COLUMNS = ("file", "rule", "value", "fix")
TUNED = "backbone.safetensors"
MIXED = "features of two backbones do not mix; choose another folder, or overwrite=True makes them anew"


@dataclass(frozen=True)
class Extracted:
    """What `features` did. written, ready: clips that got their features now, and that had them; rows: what could not
    be used; losses: the mean of each epoch of fine-tuning."""

    folder: Path
    written: tuple[str, ...]
    ready: tuple[str, ...]
    rows: tuple[Row, ...] = ()
    losses: tuple[float, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.rows

    @property
    def summary(self) -> str:
        counts = f"{table.plural(len(self.written), 'clip')} got features, {len(self.ready):,} had them"
        return f"{self.folder}: {counts}, {table.plural(len(self.rows), 'file')} could not be used"

    def shown(self) -> list[list[str]]:
        return [[row.file, row.rule, row.value, row.fix] for row in self.rows]

    def __str__(self) -> str:
        return f"{table.text(COLUMNS, self.shown())}\n\n{self.summary}" if self.rows else self.summary

    def _repr_html_(self) -> str:
        return table.html(COLUMNS if self.rows else (), self.shown(), caption=self.summary)


def features(
    source: str | Path,
    into: str | Path,
    *,
    weights: str | Path | None = IMAGENET,
    network: nn.Module | None = None,
    feature_key: str = "X2048",
    crop: bool = False,
    finetune: int = 0,
    lr: float = 1e-4,
    batch_size: int = 32,
    device: str | None = None,
    seed: int = 0,
    overwrite: bool = False,
    progress: bool = True,
) -> Extracted:
    """Write features (T, D) float32 of every filmed clip below a folder, archive or link into `into/CLIP.npz`, beside
    the arrays that are there; lists of labels come along. Call it again after an interruption: clips that have features
    are skipped, and where all have them no network is built.

    A clip is a folder of images, or a GIF, WebP, APNG or TIFF of several; videos need ffmpeg first.
    weights: "imagenet", a file, or None for a network that has learned nothing. network: one of your own in place of
    InceptionV3, from normalised frames (N, 3, 299, 299) to (N, D). crop: the middle of a frame instead of all of it.
    finetune: epochs in which the backbone is first trained, with lr, on the labelled clips below train/; it is kept as
    `into/backbone.safetensors`, and taken from there the next time. batch_size: frames at once.
    overwrite: replace features that another backbone made, or an unknown one; the latter are kept otherwise.
    Raises PackError, MissingExtra without torchvision, CheckpointError for weights that do not fit, DiskError.
    """
    require(feature_key, finetune, lr, batch_size)
    folder, into = stage(source, progress=progress), Path(into)
    films, rows = found(folder)
    if not films:
        raise PackError(nothing(folder, rows))
    makers = {film.name: maker(into / film.name, feature_key) for film in films}
    have = tuple(name for name, made_by in makers.items() if made_by is not None and not overwrite)
    tuned = into / TUNED if finetune and (into / TUNED).is_file() else None
    if finetune and have and not tuned:
        raise PackError(f"{into / have[0]} has features, of no backbone that was fine-tuned here: {MIXED}")
    if len({made_by for made_by in makers.values() if made_by}) > 1 and not overwrite:
        raise PackError(f"{into} has features of several backbones: {MIXED}")
    if len(have) == len(films):
        return Extracted(into, (), have, tuple(rows))
    if network is None:
        network = inception(tuned or weights, seed)
    backbone = Backbone(network, frozen=not finetune, settled=weights is not None, crop=crop).to(place(device))
    if backbone.device.type == "cpu":
        # 120 instead of 165 ms a frame on one core of a Xeon (n=4)
        backbone.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    how = Tuning(finetune, lr, batch_size, seed, progress)
    losses = learned(backbone, into / TUNED, folder, films, how) if finetune else ()
    own = mark(backbone)
    todo = [film for film in films if wanted(into / film.name, makers[film.name], own, overwrite)]
    copy_lists(folder, into)
    bad = tuple(filled(into, feature_key, todo, backbone, own, how))
    names = [film.name for film in todo]
    written = tuple(name for name in names if name not in {row.file for row in bad})
    ready = tuple(name for name in makers if name not in names)
    return Extracted(into, written, ready, (*rows, *bad), losses)


def require(feature_key: str, finetune: int, lr: float, batch_size: int) -> None:
    Keys(None, feature_key)  # raises for a name that is another array's
    rules = {
        "finetune must be a whole number of epochs, 0 or more": (finetune == int(finetune) >= 0, finetune),
        "lr must be above 0": (lr > 0, lr),
        "batch_size must be a whole number of frames, 1 or more": (batch_size == int(batch_size) >= 1, batch_size),
    }
    for rule, (kept, value) in rules.items():
        if not kept:
            raise PackError(f"{rule}, got {value}")


def nothing(folder: Path, rows: list[Row]) -> str:
    if not rows:
        return f"{folder}: no frames; give a folder of folders of images, one for each clip, or of GIFs"
    value, rule, fix = rows[0].reasons
    return f"{folder}: no frames. The first of {len(rows)} other files: {rows[0].file}: {rule}, got {value}; {fix}"


def place(device: str | None) -> torch.device:
    """The device of that name, else the one that NBTOOLS_DEVICE names, else the fastest. Raises PackError where there
    is no such device."""
    if device is None:
        device = os.environ.get("NBTOOLS_DEVICE")
    if device is None:
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return found or torch.device("cpu")
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError) as error:
        said = str(error).splitlines()[0]
        raise PackError(
            f"device must be one that torch has here, such as cpu or cuda, got {device!r}: {said}"
        ) from error


def learned(backbone: Backbone, file: Path, folder: Path, films: list[Film], how: Tuning) -> tuple[float, ...]:
    """Fine-tune the backbone and keep its weights, or give it those that were kept; → losses."""
    losses = ()
    if file.is_file():
        load(backbone.network, read_weights(file), file)
    else:
        losses = finetune_on(backbone, taught(folder, films), how)
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in backbone.network.state_dict().items()}
        with disk.explained("keeping the fine-tuned backbone", file):
            disk.write_atomic(file, safetensors.torch.save(state))
    backbone.eval()
    return losses


def wanted(path: Path, made_by: str | None, own: str, overwrite: bool) -> bool:
    """Whether a clip is to get features. Raises PackError where it has some that would not fit."""
    if made_by not in (None, "", own) and not overwrite:
        raise PackError(f"{path} has features of the backbone {made_by}, and this is {own}: {MIXED}")
    return made_by is None or (overwrite and made_by != own)


def copy_lists(folder: Path, into: Path) -> None:
    """Lists of labels and names to where the clips are, except those that are there."""
    names = list(walked(folder))
    lists = dict(found_lists(folder, names))
    lists |= {name: (folder / name).read_bytes() for name in names if PurePosixPath(name).name.lower() == REFERENCE}
    for name, data in lists.items():
        if not (into / name).exists():
            with disk.explained("copying labels", into / name):
                disk.write_atomic(into / name, data)


def filled(into: Path, key: str, films: list[Film], backbone: Backbone, own: str, how: Tuning) -> Iterator[Row]:
    """Write the features of each clip; what could not be used."""
    with ThreadPoolExecutor() as pool:
        for film in bar(films, "features", disable=not how.progress, leave=False):
            path = into / film.name
            try:
                rest = others(path, key)
                store(path, key, seen(backbone, film, how.batch_size, pool), own, rest)
            except Refused as refusal:
                yield refusal.row.at(film.name)


@torch.inference_mode()
def seen(backbone: Backbone, film: Film, batch_size: int, pool: ThreadPoolExecutor) -> np.ndarray:
    """(T, D) float32."""
    parts = [backbone(part.to(backbone.device)) for part in chunks(film, batch_size, pool)]
    return torch.cat(parts).cpu().numpy()
