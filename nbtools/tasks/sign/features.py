"""Frames → X2048: a separate step, once before training, by a frozen backbone or one that is fine-tuned first.

A folder of images is a clip. T frames of H × W pixels, D = 2048 numbers a frame.
"""

import hashlib
import io
import re
from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from nbtools import disk
from nbtools.data import bar, cores, local, stage
from nbtools.errors import MissingExtra, PackError, StageError
from nbtools.show import plural
from nbtools.tasks.common.files import decode_image, split_of, walk
from nbtools.tasks.common.rules import Refused, Report
from nbtools.tasks.sign import task
from nbtools.tasks.sign.data import AGAIN, FEATURES, MASK, SUFFIX, TIMES, Ids, arrays_in, open_clip, read_lists
from nbtools.tasks.sign.networks import Gru
from nbtools.train import again
from nbtools.train import device as devices

FRAMES = (".jpg", ".jpeg", ".png", ".bmp")
SIDE, MEAN, STD = 299, (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # InceptionV3's pixels; ImageNet's colours
KEY, IMAGENET = "X2048", "imagenet"
TUNED, MADE_BY = "backbone.safetensors", "backbone.txt"
LR, CLIPS_A_STEP = 1e-4, 8  # of fine-tuning
FASTER = 10  # the GRU's lr, as a multiple of the backbone's: it starts from scratch

Film = list[Path]  # the frames of a clip, in order
Clips = list[tuple[Film, Ids]]


def features(
    source: str | Path,
    into: str | Path,
    *,
    weights: str | None = IMAGENET,
    network: nn.Module | None = None,
    finetune: int = 0,
    batch_size: int = 32,
    progress: bool = True,
) -> Report:
    """Write features (T, D) float32 of every folder of frames below a folder, archive or link into `into/CLIP.npz`,
    next to the arrays that are there, with the lists of labels. Return what could not be used. Clips that have features
    are skipped; where all have them no network is built.

    weights: "imagenet", or None for random ones. network: your own in place of InceptionV3, from normalised frames
    (N, 3, 299, 299) to (N, D). finetune: epochs in which it is trained first, on the labelled clips below train/; it is
    kept as `into/backbone.safetensors`. batch_size: frames at once.
    Raises PackError, MissingExtra without torchvision, StageError if the weights' download fails, DiskError.
    """
    folder, into = stage(source, progress=progress), local(str(into))
    films, bad = find_films(folder), []
    todo = [name for name in films if not (into / name).is_file() or KEY not in arrays_in(into / name)]
    if todo:
        network = (network or inception(weights)).to(devices.pick()).eval()
        if finetune:
            tune(network, into / TUNED, train_clips(folder, films), finetune, batch_size, progress)
        refuse_mixture(into, weights_of(network))
        for name in (name for name in walk(folder) if name.lower().endswith(".csv") and not (into / name).exists()):
            write(into / name, (folder / name).read_bytes())
        for name in bar(todo, "features", disable=not progress, leave=False):
            try:
                write_features(into / name, films[name], network, batch_size)
            except Refused as refusal:
                bad.append(refusal.row(name))
    about = f"{into}: {plural(len(todo) - len(bad), 'clip')} got features, {len(films) - len(todo):,} already had them"
    return Report(bad, about)


def write_features(path: Path, film: Film, network: nn.Module, batch_size: int) -> None:
    """Write a clip with features, whole or not at all; not compressed, which would save 13 % and take 18 times as long.
    Raises Refused for frames that cannot be used, PackError for a network that returns something else, DiskError."""
    arrays, content = {}, io.BytesIO()
    if path.is_file():
        with open_clip(path) as npz:
            arrays = dict(npz)
    with torch.inference_mode():
        made = torch.cat([network(normalise(frames, network)) for frames in batches_of(film, batch_size)])
    if made.shape != (len(film), FEATURES):
        came = f"{tuple(made.shape)} for {len(film)} frames"
        raise PackError(f"network must return (N, {FEATURES}), got {came}; take its output before the classifier")
    for name in ("X", MASK, TIMES):
        if name in arrays and len(arrays[name]) != len(made):
            raise Refused(len(made), f"there must be as many frames as in {name}, {len(arrays[name])}", AGAIN)
    np.savez(content, **{**arrays, KEY: made.float().cpu().numpy()})
    write(path, content.getvalue())


def write(path: Path, data: bytes) -> None:
    with disk.explained("writing features", path):
        disk.write_atomic(path, data)


def refuse_mixture(into: Path, weights: bytes) -> None:
    """Raise PackError if features in a folder are of other weights; else write down that they are of these."""
    path, mark = into / MADE_BY, hashlib.sha256(weights).hexdigest()
    if path.is_file() and path.read_text() != mark:
        raise PackError(f"{into} has features of another backbone, and they cannot be mixed; choose another folder")
    if weights:
        write(path, mark.encode())


def find_films(folder: Path) -> dict[str, Film]:
    """Return clip → its frames, by the numbers in their names: frame_2 before frame_10. Raises PackError without."""
    films = defaultdict(list)
    for name in sorted(walk(folder), key=lambda name: [int(n) if n.isdigit() else n for n in re.split(r"(\d+)", name)]):
        if name.lower().endswith(FRAMES):
            parent = PurePosixPath(name).parent
            films[f"{parent if parent.name else folder.resolve().name}{SUFFIX}"].append(folder / name)
    if not films:
        fix = "give a folder with a folder of images for each clip: ffmpeg -i VIDEO -vf fps=30 CLIP/%05d.jpg makes one"
        raise PackError(f"{folder}: no frames ({', '.join(FRAMES)}); {fix}")
    return dict(films)


def batches_of(film: Film, size: int) -> Iterator[Tensor]:
    """Yield frames (n, 3, H, W) uint8, n ≤ size at once, decoded by threads. Raises Refused for frames that
    cannot be decoded or differ in size."""
    shape = None
    with ThreadPoolExecutor(cores()) as pool:  # decoders release the interpreter's lock
        for start in range(0, len(film), size):
            some = [*pool.map(picture_of, film[start : start + size])]
            shape = shape or some[0].shape
            for other in {picture.shape for picture in some} - {shape}:
                value = f"{other[0]} × {other[1]} after {shape[0]} × {shape[1]} pixels"
                raise Refused(value, "all frames of a clip must have one size", "extract them again at one size")
            yield torch.from_numpy(np.stack(some)).permute(0, 3, 1, 2)


def picture_of(path: Path) -> np.ndarray:
    try:
        return np.asarray(decode_image(path, "RGB"))
    except Refused as refusal:
        refusal.file = f"{path.parent.name}/{path.name}"
        raise


def normalise(frames: Tensor, network: nn.Module) -> Tensor:
    """Map frames (N, 3, H, W) uint8 to (N, 3, 299, 299) on the network's device: squeezed into the square whole, as by
    the extractor of the published clips, and normalised as ImageNet's pictures."""
    device = next(network.parameters()).device
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) for values in (MEAN, STD))
    return (F.interpolate(frames.to(device).float() / 255, (SIDE, SIDE), mode="bilinear") - mean) / std


def inception(weights: str | None) -> nn.Module:
    """Return torchvision's InceptionV3 up to its pooled features (N, D); its weights of ImageNet are 104 MB, downloaded
    once. Raises MissingExtra, StageError."""
    try:
        from torchvision import models  # pyright: ignore[reportMissingImports]
    except (ImportError, RuntimeError, AttributeError, OSError) as error:  # all seen with a build that does not fit
        fix = "install the extra features, or next to a CPU build of torch, the torchvision of the same index"
        rule = f"features of frames need torchvision, which does not import here ({error})"
        raise MissingExtra(f"{rule}; {fix}") from error
    published = models.Inception_V3_Weights.IMAGENET1K_V1 if weights == IMAGENET else None
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        try:
            network = models.inception_v3(weights=published, init_weights=False, transform_input=True)
        except OSError as error:
            raise StageError(f"InceptionV3's weights could not be downloaded ({error}); try again") from error
        for module in network.modules() if weights is None else ():
            if isinstance(module, nn.Conv2d):  # torchvision's initialisation makes features of 10¹¹, torch's of 10⁻⁸
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    network.aux_logits, network.AuxLogits, network.fc = False, None, nn.Identity()
    return network


def weights_of(network: nn.Module) -> bytes:
    return safetensors.torch.save({name: tensor.cpu().contiguous() for name, tensor in network.state_dict().items()})


def train_clips(folder: Path, films: dict[str, Film]) -> Clips:
    """Return frames and label of the clips in train folders that have one. Raises PackError if there are none."""
    labels, *_ = read_lists(folder, [*films])
    clips = [(film, labels[name]) for name, film in films.items() if name in labels and split_of(name) == "train"]
    if not clips:
        rule = "finetune needs labelled clips in a folder train/, and there are none"
        raise PackError(f"{folder}: {rule}; sort clips into train/ and val/, with a labels.csv each")
    return clips


def tune(network: nn.Module, path: Path, clips: Clips, epochs: int, batch_size: int, progress: bool) -> None:
    """Train a backbone in place, end to end with a GRU that is then dropped, and write it; or take what an earlier call
    wrote. Batch norms keep their statistics: the frames of a clip, near copies of each other, would spoil them."""
    if path.is_file():
        network.load_state_dict(safetensors.torch.load_file(path))
        return
    refuse_mixture(path.parent, b"")
    device = next(network.parameters()).device
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        gru = Gru(FEATURES, *(max(ids[k] for _, ids in clips) + 1 for k in range(2))).to(device)
        groups = [{"params": network.parameters(), "lr": LR}, {"params": gru.parameters(), "lr": LR * FASTER}]
        optimizer = torch.optim.AdamW(groups)
        for module in network.modules():
            module.train(not isinstance(module, _BatchNorm))
        for _ in bar(range(epochs), "fine-tuning", disable=not progress, leave=False):
            for step in torch.randperm(len(clips)).split(CLIPS_A_STEP):
                optimizer.zero_grad()
                for film, ids in (clips[i] for i in step.tolist()):
                    (clip_loss(network, gru, film, ids, batch_size) / len(step)).backward()
                optimizer.step()
    network.eval()
    write(path, weights_of(network))


def clip_loss(network: nn.Module, gru: Gru, film: Film, ids: Ids, batch_size: int) -> Tensor:
    """Return the loss of one clip. A frame keeps 98 MB of InceptionV3's activations until backward, and a clip has
    about 122: they are computed again there, so that only those of `batch_size` frames exist at once."""
    features = torch.cat([again(network, normalise(frames, network)) for frames in batches_of(film, batch_size)])[None]
    length, label = (torch.tensor([value], device=features.device) for value in (features.shape[1], ids))
    batch = {"features": features, "features_length": length, "label": label}
    return task.loss(gru, batch, task.Plan(network="gru"))[0]
