"""Frames → X2048: a separate step, once before training, by a frozen backbone or one that is fine-tuned first.

A folder of images is a clip, and so is a file of several images (GIF, WebP, APNG, TIFF). Videos are refused, since
decoding them takes ffmpeg, on which nbtools does not depend. T frames of H × W pixels, D = 2048 numbers a frame.
"""

from __future__ import annotations

import contextlib
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import numpy as np
import safetensors.torch
import torch
from PIL import Image, ImageSequence
from torch import Tensor, nn

from nbtools import disk
from nbtools.data import bar, stage, threaded
from nbtools.errors import PackError
from nbtools.show import plural, sized
from nbtools.tasks.common.demo import require, whole
from nbtools.tasks.common.files import DAMAGED, decode_image, split_of, walk
from nbtools.tasks.common.report import Refused, Report, Row
from nbtools.tasks.sign import task
from nbtools.tasks.sign.clips import (
    FEATURES,
    MASK,
    META_BYTES,
    TIMES,
    Keys,
    has_array,
    keys_in,
    npz_bytes,
    open_npz,
    read_array,
)
from nbtools.tasks.sign.inception import IMAGENET, Backbone, inception, load, read_weights
from nbtools.tasks.sign.labels import CLIP, Ids, label_lists, match
from nbtools.tasks.sign.networks import Gru
from nbtools.tasks.sign.plans import Plan
from nbtools.train import again
from nbtools.train import device as devices

STILLS = (".jpg", ".jpeg", ".bmp")
FILMS = (".gif", ".webp", ".png", ".apng", ".tif", ".tiff")  # may hold one image, or several
VIDEOS = (".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".wmv")
TUNED = "backbone.safetensors"
MAKER = "{}_backbone"  # the array of text next to the features that names the backbone which made them
MIXED = "features of two backbones cannot be mixed; choose another folder, or replace them with overwrite=True"
CLIPS_A_STEP = 8  # of fine-tuning
FASTER = 10  # times the backbone's lr is the GRU's, which begins with nothing


@dataclass(frozen=True)
class Extracted(Report):
    """What `features` did: a table of what could not be used, and the clips that got their features now (written) or
    had them (ready). losses: the mean of each epoch of fine-tuning."""

    written: tuple[str, ...] = ()
    ready: tuple[str, ...] = ()
    losses: tuple[float, ...] = ()

    def footer(self) -> str:
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

    weights: "imagenet", a file, or None for random ones. network: your own in place of InceptionV3, from
    normalised frames (N, 3, 299, 299) to (N, D). crop: the middle of a frame instead of all of it.
    finetune: epochs in which the backbone is first trained, with lr, on the labelled clips below train/; it is kept as
    `into/backbone.safetensors` and loaded from there the next time. batch_size: frames at once.
    overwrite: replace features that another backbone made, or an unknown one; the latter are kept otherwise.
    Raises PackError, TrainError for a missing device, MissingExtra without torchvision, CheckpointError for
    weights that do not fit, DiskError.
    """
    Keys(None, feature_key)  # raises for a name that is another array's
    require(
        {
            "finetune must be a whole number of epochs, 0 or more": (whole(finetune, 0), finetune),
            "lr must be greater than 0": (lr > 0, lr),
            "batch_size must be a whole number of frames, 1 or more": (whole(batch_size, 1), batch_size),
        }
    )
    folder, into = stage(source, progress=progress), Path(into)
    films, rows = find_films(folder)
    makers = {film.name: maker(into / film.name, feature_key) for film in films}
    have = {} if overwrite else {name: made_by for name, made_by in makers.items() if made_by is not None}
    refuse_mixture(into, have.values())
    tuned = into / TUNED
    if finetune and have and not tuned.is_file():
        raise PackError(f"{into} has features of a backbone that was not fine-tuned here: {MIXED}")
    if len(have) == len(films):
        return Extracted(tuple(rows), str(into), (), tuple(have))
    if network is None:
        network = inception(None if finetune and tuned.is_file() else weights, seed)
    backbone = Backbone(network, frozen=not finetune, pretrained=weights is not None, crop=crop)
    backbone.to(devices.pick(device))
    if backbone.mean.device.type == "cpu":  # 120 instead of 165 ms a frame on one core of a Xeon (n=4)
        backbone.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    losses = ()
    if finetune and tuned.is_file():
        load(network, read_weights(tuned), tuned)
    elif finetune:
        losses = train_backbone(backbone, train_clips(folder, films), finetune, lr, batch_size, seed, progress)
        write_weights(network, tuned)
    own = backbone.eval().mark()
    refuse_mixture(into, [*have.values(), own])
    copy_lists(folder, into)
    todo = [film for film in films if makers[film.name] is None or (overwrite and makers[film.name] != own)]
    bad = tuple(fill(into, feature_key, todo, backbone, own, batch_size, progress))
    due, failed = {film.name for film in todo}, {row.file for row in bad}
    written, ready = (tuple(n for n in makers if n in some) for some in (due - failed, makers.keys() - due))
    return Extracted((*rows, *bad), str(into), written, ready, losses)


def refuse_mixture(into: Path, makers: Iterable[str]) -> None:
    """makers: the marks of backbones; '' for an unknown one."""
    if len(known := sorted({made_by for made_by in makers if made_by})) > 1:
        raise PackError(f"{into} would have features of the backbones {' and '.join(known)}: {MIXED}")


def maker(path: Path, key: str) -> str | None:
    """The mark of the backbone that made a clip's features; '' where that is not recorded, None without features."""
    name = MAKER.format(key)
    if path.is_file() and has_array(path, key):
        with contextlib.suppress(Refused), open_npz(path) as npz:
            return str(read_array(npz, name, META_BYTES)) if name in keys_in(npz) else ""
    return None


def copy_lists(folder: Path, into: Path) -> None:
    """Copy lists of labels and names to where the clips are, except those that are there."""
    for name in walk(folder):
        if name.lower().endswith(".csv") and not (into / name).exists():
            with disk.explained("copying labels", into / name):
                disk.write_atomic(into / name, (folder / name).read_bytes())


def fill(
    into: Path, key: str, films: Sequence[Film], backbone: Backbone, own: str, batch_size: int, progress: bool
) -> Iterator[Row]:
    """Write the features of each clip, whole or not at all; yields what could not be used. Raises DiskError.

    Not compressed: features of a frame shrink by 13 %, and that takes 18 times as long (a real clip)."""
    for film in bar(films, "features", disable=not progress, leave=False):
        path, arrays = into / film.name, {}
        try:
            if path.is_file():
                with open_npz(path) as npz:
                    arrays = {name: read_array(npz, name) for name in keys_in(npz)}
            with torch.inference_mode():
                made = torch.cat([backbone(frames) for frames in batches_of(film, batch_size)]).cpu().numpy()
            for name in ("X", MASK, TIMES):
                if name in arrays and len(arrays[name]) != len(made):
                    rule = f"there must be as many frames as in {name}, {len(arrays[name])}"
                    fix = "take the frames that the keypoints were extracted from, or delete the .npz"
                    raise Refused(Row(key, rule, str(len(made)), fix))
            with disk.explained("writing features", path):
                arrays |= {key: made, MAKER.format(key): np.array(own)}
                disk.write_atomic(path, npz_bytes(arrays, level=0))
        except Refused as refusal:
            yield refusal.row.at(film.name)


# Frames


class Film(NamedTuple):
    """A filmed clip. name: of its `.npz`, relative to the source; files: its frames in order, or the one file that
    holds them all."""

    name: str
    files: tuple[Path, ...]


def find_films(folder: Path) -> tuple[list[Film], list[Row]]:
    """The clips below a folder, and what cannot be one. Frames are in the order of the numbers in their names. Raises
    PackError where there is no clip."""
    images, rows, films = defaultdict(list), [], {}
    for name in walk(folder):
        path = PurePosixPath(name)
        if path.suffix.lower() in (*STILLS, *FILMS):
            images[path.parent].append(name)
        elif path.suffix.lower() in VIDEOS:
            rule = "frames must be images: decoding videos takes ffmpeg or PyAV"
            fix = "extract its frames, for example with ffmpeg -i VIDEO -vf fps=30 CLIP/%05d.jpg"
            rows.append(Row("", rule, path.suffix, fix, file=name))
    for parent, names in sorted(images.items()):
        files = [folder / name for name in sorted(names, key=natural)]
        if is_animated(files[0]):
            own = [Film(f"{parent / file.stem}{CLIP}", (file,)) for file in files]
        elif any(parent in other.parents for other in images):
            rule, fix = "frames must be in a folder of their own", "move them into one, or delete them"
            rows.append(Row("", rule, f"{len(names)} next to folders of frames", fix, file=names[0]))
            continue
        else:
            own = [Film(f"{parent if parent.name else folder.resolve().name}{CLIP}", tuple(files))]
        for film in own:
            if films.setdefault(film.name, film) is not film:
                rule, fix = "clips must have unique names", "rename it; both would be written to one .npz"
                rows.append(Row("", rule, f"also {films[film.name].files[0].name}", fix, file=film.files[0].name))
    if not films:
        first = f". The first of {plural(len(rows), 'other file')}: {Refused(rows[0])}" if rows else ""
        raise PackError(
            f"{folder}: no frames; give a folder with a folder of images for each clip, or with GIFs{first}"
        )
    return list(films.values()), rows


def natural(name: str) -> list[str | int]:
    """Sorts frame_2 before frame_10."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", name))]


def is_animated(path: Path) -> bool:
    """Whether a file holds several images; False for one that cannot be read, which is reported when it is decoded."""
    if path.suffix.lower() not in FILMS:
        return False
    with contextlib.suppress(*DAMAGED), Image.open(path) as image:
        return getattr(image, "is_animated", False)
    return False


def batches_of(film: Film, size: int) -> Iterator[Tensor]:
    """A clip's frames (n, 3, H, W) uint8, n ≤ size at once; separate images are decoded ahead in threads.

    Raises Refused for frames that cannot be decoded or differ in size.
    """
    frames = images_in(film.files[0])
    if len(film.files) > 1:
        frames = chain.from_iterable(threaded(lambda path: list(images_in(path)), film.files, size))
    first = None
    while batch := list(islice(frames, size)):
        first = first or batch[0].shape
        for other in {frame.shape for frame in batch} - {first}:
            value = f"{sized(*other[:2])} after {sized(*first[:2])}"
            raise Refused(Row("", "all frames of a clip must have one size", value, "extract them again at one size"))
        yield torch.from_numpy(np.stack(batch)).permute(0, 3, 1, 2)


def images_in(path: Path) -> Iterator[np.ndarray]:
    """(H, W, 3) uint8 of each image in a file."""
    if not is_animated(path):
        yield np.asarray(decode_image(path, key="frame").convert("RGB"))
        return
    try:
        with Image.open(path) as film:
            for image in ImageSequence.Iterator(film):
                yield np.asarray(image.convert("RGB"))
    except DAMAGED as error:
        if disk.is_away(error):
            raise
        fix = "delete it, or copy it again from its origin"
        raise Refused(Row("frame", "the file must be a whole image", str(error), fix)) from None


# Fine-tuning


def train_clips(folder: Path, films: Sequence[Film]) -> list[tuple[Film, Ids]]:
    """The clips in train folders that have a label. Raises PackError if there are none."""
    labels, _ = match(label_lists(folder, walk(folder)), [film.name for film in films])
    chosen = [(film, labels[film.name]) for film in films if film.name in labels and split_of(film.name) == "train"]
    if not chosen:
        raise PackError(
            f"{folder}: finetune trains on clips with a label below a folder train/, and there are none; sort clips "
            "into train/ and val/, with a labels.csv each: a backbone that has seen val cannot be validated on it"
        )
    return chosen


def train_backbone(
    backbone: Backbone,
    clips: Sequence[tuple[Film, Ids]],
    epochs: int,
    lr: float,
    batch_size: int,
    seed: int,
    progress: bool,
) -> tuple[float, ...]:
    """Train the backbone in place, end to end with a GRU that is then dropped; the mean loss of each epoch.

    clips: with (gloss, category). lr: the backbone's. batch_size: frames at once. Interrupted training keeps nothing.
    Raises PackError naming the clip whose frames cannot be decoded.
    """
    device, losses = backbone.mean.device, []
    glosses, categories = (max(ids[i] for _, ids in clips) + 1 for i in range(2))
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        gru = Gru(FEATURES, glosses, categories).to(device)
        groups = [{"params": backbone.parameters(), "lr": lr}, {"params": gru.parameters(), "lr": lr * FASTER}]
        optimizer = torch.optim.AdamW(groups)
        backbone.train()
        for _ in (shown := bar(range(epochs), "fine-tuning", disable=not progress, leave=False)):
            total = torch.zeros((), device=device)
            for step in torch.randperm(len(clips)).split(CLIPS_A_STEP):
                optimizer.zero_grad()
                for film, ids in (clips[i] for i in step.tolist()):
                    loss = clip_loss(backbone, gru, film, ids, batch_size)
                    (loss / len(step)).backward()
                    total += loss.detach()
                optimizer.step()
            losses.append(float(total) / len(clips))
            shown.set_postfix(loss=f"{losses[-1]:.3f}")
    return tuple(losses)


def clip_loss(backbone: Backbone, gru: Gru, film: Film, ids: Ids, batch_size: int) -> Tensor:
    """The loss of one clip. A frame keeps 98 MB of InceptionV3's activations until backward, and a clip has about 122:
    they are computed again there, so that only those of `batch_size` frames exist at once."""
    try:
        features = torch.cat([again(backbone, frames) for frames in batches_of(film, batch_size)])[None]
    except Refused as refusal:
        raise PackError(str(Refused(refusal.row.at(film.name)))) from refusal
    length, label = torch.tensor([features.shape[1]]), torch.tensor([ids])
    batch = {"features": features, "features_length": length.to(features.device), "label": label.to(features.device)}
    return task.loss(gru, batch, Plan(network="gru"))[0]


def write_weights(network: nn.Module, path: Path) -> None:
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in network.state_dict().items()}
    with disk.explained("saving the fine-tuned backbone", path):
        disk.write_atomic(path, safetensors.torch.save(state))
