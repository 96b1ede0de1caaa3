"""Frames → X2048: a step of its own, once before training. T frames, D = 2048 numbers a frame."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import safetensors.torch
import torch
from torch import nn

from nbtools import disk
from nbtools.data import bar, stage
from nbtools.errors import PackError
from nbtools.table import plural
from nbtools.tasks.common.demo import require, whole
from nbtools.tasks.common.files import split_of, walk
from nbtools.tasks.common.report import Refused, Report, Row
from nbtools.tasks.sign.clips import MASK, META_BYTES, TIMES, Keys, has_features, npz_bytes, open_npz
from nbtools.tasks.sign.frames import Film, batches_of, find_films
from nbtools.tasks.sign.inception import IMAGENET, Backbone, inception, load, read_weights
from nbtools.tasks.sign.inception import finetune as train_backbone
from nbtools.tasks.sign.labels import REFERENCE, Ids, label_lists, match
from nbtools.train import pick_device

TUNED = "backbone.safetensors"
MAKER = "{}_backbone"  # the array of text next to the features that names the backbone which made them
MIXED = "features of two backbones do not mix; choose another folder, or overwrite=True makes them anew"


@dataclass(frozen=True)
class Extracted(Report):
    """What `features` did: a table of what could not be used, and the clips that got their features now (written) or
    had them (ready). losses: the mean of each epoch of fine-tuning."""

    written: tuple[str, ...] = ()
    ready: tuple[str, ...] = ()
    losses: tuple[float, ...] = ()

    @property
    def folder(self) -> Path:
        return Path(self.about)

    @property
    def summary(self) -> str:
        counts = f"{plural(len(self.written), 'clip')} got features, {len(self.ready):,} had them"
        return f"{self.about}: {counts}, {plural(len(self.rows), 'file')} could not be used"


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
    """Write features (T, D) float32 of every filmed clip below a folder, archive or link into `into/CLIP.npz`, next to
    the arrays that are there, and copy the lists of labels. An interrupted extraction resumes: clips that have features
    are skipped, and where all have them no network is built.

    A clip is a folder of images, or a GIF, WebP, APNG or TIFF of several; videos need ffmpeg first.
    weights: "imagenet", a file, or None for random ones. network: one of your own in place of InceptionV3, from
    normalised frames (N, 3, 299, 299) to (N, D). crop: the middle of a frame instead of all of it.
    finetune: epochs in which the backbone is first trained, with lr, on the labelled clips below train/; it is kept as
    `into/backbone.safetensors` and loaded from there the next time. batch_size: frames at once.
    overwrite: replace features that another backbone made, or an unknown one; the latter are kept otherwise.
    Raises PackError, TrainError for a device that is not there, MissingExtra without torchvision, CheckpointError for
    weights that do not fit, DiskError.
    """
    Keys(None, feature_key)  # raises for a name that is another array's
    require(
        {
            "finetune must be a whole number of epochs, 0 or more": (whole(finetune, 0), finetune),
            "lr must be above 0": (lr > 0, lr),
            "batch_size must be a whole number of frames, 1 or more": (whole(batch_size, 1), batch_size),
        }
    )
    folder, into = stage(source, progress=progress), Path(into)
    films, rows = find_films(folder)
    if not films:
        raise PackError(no_frames(folder, rows))
    makers = {film.name: maker(into / film.name, feature_key) for film in films}
    have = tuple(name for name, made_by in makers.items() if made_by is not None and not overwrite)
    tuned = into / TUNED
    if finetune and have and not tuned.is_file():
        raise PackError(f"{into / have[0]} has features, of no backbone that was fine-tuned here: {MIXED}")
    if len({made_by for made_by in makers.values() if made_by}) > 1 and not overwrite:
        raise PackError(f"{into} has features of several backbones: {MIXED}")
    if len(have) == len(films):
        return Extracted(tuple(rows), str(into), (), have)
    if network is None:
        network = inception(tuned if finetune and tuned.is_file() else weights, seed)
    backbone = Backbone(network, frozen=not finetune, pretrained=weights is not None, crop=crop).to(pick_device(device))
    if backbone.device.type == "cpu":
        # 120 instead of 165 ms a frame on one core of a Xeon (n=4)
        backbone.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    losses = ()
    if finetune and tuned.is_file():
        load(backbone.network, read_weights(tuned), tuned)
    elif finetune:
        losses = train_backbone(backbone, train_clips(folder, films), finetune, lr, batch_size, seed, progress)
        keep(backbone, tuned)
    backbone.eval()
    own = backbone.mark()
    todo = [film for film in films if is_due(into / film.name, makers[film.name], own, overwrite)]
    copy_lists(folder, into)
    bad = tuple(fill(into, feature_key, todo, backbone, own, batch_size, progress))
    names, failed = [film.name for film in todo], {row.file for row in bad}
    written = tuple(name for name in names if name not in failed)
    ready = tuple(name for name in makers if name not in names)
    return Extracted((*rows, *bad), str(into), written, ready, losses)


def keep(backbone: Backbone, path: Path) -> None:
    """Write the fine-tuned weights. Raises DiskError."""
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in backbone.network.state_dict().items()}
    with disk.explained("keeping the fine-tuned backbone", path):
        disk.write_atomic(path, safetensors.torch.save(state))


def no_frames(folder: Path, rows: Sequence[Row]) -> str:
    if not rows:
        return f"{folder}: no frames; give a folder of folders of images, one for each clip, or of GIFs"
    value, rule, fix = rows[0].reasons
    return f"{folder}: no frames. The first of {len(rows)} other files: {rows[0].file}: {rule}, got {value}; {fix}"


def train_clips(folder: Path, films: Sequence[Film]) -> list[tuple[Film, Ids]]:
    """The clips in train folders that have a label. Raises PackError where there are none."""
    films_by_name = {film.name: film for film in films}
    labels = match(dict(label_lists(folder, walk(folder))), list(films_by_name)).labels
    chosen = [(films_by_name[name], labels[name]) for name in sorted(labels) if split_of(name) == "train"]
    if not chosen:
        raise PackError(
            f"{folder}: finetune trains on clips with a label below a folder train/, and there are none; sort clips "
            "into train/ and val/, with a labels.csv each: a backbone that has seen val is not judged by it"
        )
    return chosen


def is_due(path: Path, made_by: str | None, own: str, overwrite: bool) -> bool:
    """Whether a clip is to get features. Raises PackError where it has some that would not fit."""
    if made_by not in (None, "", own) and not overwrite:
        raise PackError(f"{path} has features of the backbone {made_by}, and this is {own}: {MIXED}")
    return made_by is None or (overwrite and made_by != own)


def copy_lists(folder: Path, into: Path) -> None:
    """Copy lists of labels and names to where the clips are, except those that are there."""
    names = walk(folder)
    lists = dict(label_lists(folder, names))
    lists |= {name: (folder / name).read_bytes() for name in names if PurePosixPath(name).name.lower() == REFERENCE}
    for name, data in lists.items():
        if not (into / name).exists():
            with disk.explained("copying labels", into / name):
                disk.write_atomic(into / name, data)


def fill(
    into: Path, key: str, films: Sequence[Film], backbone: Backbone, own: str, batch_size: int, progress: bool
) -> Iterator[Row]:
    """Write the features of each clip; yields what could not be used."""
    for film in bar(films, "features", disable=not progress, leave=False):
        path = into / film.name
        try:
            others = other_arrays(path, key)
            with torch.inference_mode():
                parts = [backbone(frames.to(backbone.device)) for frames in batches_of(film, batch_size)]
            store(path, key, torch.cat(parts).cpu().numpy(), own, others)
        except Refused as refusal:
            yield refusal.row.at(film.name)


def maker(path: Path, key: str) -> str | None:
    """The mark of the backbone that made a clip's features; '' where that is not recorded, None without features."""
    if not path.is_file() or not has_features(path, key):
        return None
    try:
        with open_npz(path) as npz:
            name = MAKER.format(key)
            return str(npz.array(name, META_BYTES)) if name in npz.entries else ""
    except Refused:
        return ""


def other_arrays(path: Path, key: str) -> dict[str, np.ndarray]:
    """All that a clip holds but its features; nothing where there is no such file. Raises Refused."""
    if not path.is_file():
        return {}
    with open_npz(path) as npz:
        return {name: npz.array(name) for name in npz.entries if name not in (key, MAKER.format(key))}


def store(path: Path, key: str, features: np.ndarray, mark: str, others: dict[str, np.ndarray]) -> None:
    """Rewrite a clip, whole or not at all. Raises Refused where it had another number of frames, DiskError.

    Not compressed: features of a frame shrink by 13 %, and that takes 18 times as long (a real clip)."""
    for name in (Keys().x, MASK, TIMES):
        if name in others and len(others[name]) != len(features):
            fix = "take the frames that the keypoints were extracted from, or delete the .npz"
            rule = f"there are as many frames as in {name}, {len(others[name])}"
            raise Refused(Row(key, rule, str(len(features)), fix))
    with disk.explained("writing features", path):
        disk.write_atomic(path, npz_bytes({**others, key: features, MAKER.format(key): np.array(mark)}, level=0))
