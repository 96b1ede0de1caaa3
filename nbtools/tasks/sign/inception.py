"""The network that makes features of frames: torchvision's InceptionV3 without its classifiers, frozen or fine-tuned.

Nothing here imports torchvision before `inception` is called: ready features never need it.
N frames of H × W pixels, D = 2048 numbers a frame.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm

from nbtools.errors import CheckpointError, MissingExtra, PackError, StageError
from nbtools.tasks.sign.clips import FEATURES

SIDE, SHORT = 299, 342  # pixels that the network reads, and of the shorter side before torchvision's own crop
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet
IMAGENET = "imagenet"
SAFE = (2, 10)  # the first torch whose `weights_only` has no known way around it
STEM = "Conv2d_1a_3x3.conv.weight"  # the first parameter: a prefix of its name is a prefix of all
CLASSIFIERS = ("AuxLogits.", "fc.")


class Backbone(nn.Module):
    """frames (N, 3, H, W) uint8 → features (N, D) float32, by a network that reads (N, 3, 299, 299), normalised.

    A frame is squeezed into the square whole, as by the extractor of the published clips; crop=True takes its middle,
    as the published weights' own transform does, which loses hands at the sides of a wide picture.
    frozen: nothing of it is trained. Otherwise all is, but with `pretrained` its batch norms keep their statistics: the
    frames of a clip are near copies of each other, and would spoil them.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, *, frozen: bool = True, pretrained: bool = True, crop: bool = False):
        super().__init__()
        self.network, self.frozen, self.pretrained, self.crop = network, frozen, pretrained, crop
        for name, values in (("mean", MEAN), ("std", STD)):
            self.register_buffer(name, torch.tensor(values).view(3, 1, 1), persistent=False)
        network.requires_grad_(not frozen)
        self.train(not frozen)

    def train(self, mode: bool = True) -> Backbone:
        super().train(mode and not self.frozen)
        for module in self.network.modules() if self.pretrained else ():
            if isinstance(module, _BatchNorm):
                module.eval()
        return self

    def forward(self, frames: Tensor) -> Tensor:
        features = self.network(self.prepared(frames.to(self.mean.device)))
        if not isinstance(features, Tensor) or features.shape != (len(frames), FEATURES):
            came = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise PackError(
                f"network must return ({len(frames)}, {FEATURES}) for ({len(frames)}, 3, {SIDE}, {SIDE}), got {came}; "
                "take its output before the classifier, pooled over the image"
            )
        return features.float()

    def prepared(self, frames: Tensor) -> Tensor:
        """(N, 3, 299, 299) float32, normalised as ImageNet's pictures."""
        pictures = frames.float() / 255
        if self.crop:
            height, width = pictures.shape[2:]
            size = [int(SHORT * side / min(height, width)) for side in (height, width)]
            pictures = F.interpolate(pictures, size, mode="bilinear", antialias=True)
            top, left = (round((side - SIDE) / 2) for side in size)
            pictures = pictures[:, :, top : top + SIDE, left : left + SIDE]
        else:
            pictures = F.interpolate(pictures, (SIDE, SIDE), mode="bilinear")
        return (pictures - self.mean) / self.std

    def mark(self) -> str:
        """A short name of the weights and of how frames are cropped: equal if they make the same features."""
        digest = hashlib.blake2b(f"crop={self.crop}".encode(), digest_size=8)
        for name, tensor in self.network.state_dict().items():
            digest.update(f"{name} {tuple(tensor.shape)}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
        return digest.hexdigest()


def inception(weights: str | Path | None = IMAGENET, seed: int = 0) -> nn.Module:
    """torchvision's InceptionV3 up to its pooled features (N, D).

    weights: "imagenet" (torchvision's, 104 MB, downloaded once), a file (.safetensors, .pth), or None: random ones.
    Raises MissingExtra without torchvision, CheckpointError for a file that does not fit, StageError if the
    download fails.
    """
    models = torchvision_models()
    state = None if weights is None else imagenet(models) if weights == IMAGENET else read_weights(Path(weights))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        network = models.inception_v3(weights=None, init_weights=False, transform_input=True)
        for module in network.modules() if state is None else ():
            if isinstance(module, nn.Conv2d):  # torchvision's initialisation makes features of 10¹¹, torch's of 10⁻⁸
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
    network.aux_logits, network.AuxLogits, network.fc = False, None, nn.Identity()
    if state is not None:
        load(network, without_classifiers(state, weights), weights)
    return network


def torchvision_models() -> ModuleType:
    try:
        from torchvision import models  # pyright: ignore[reportMissingImports]
    except (ImportError, RuntimeError, AttributeError, OSError) as error:  # all seen with a build that does not fit
        raise MissingExtra(
            f"features of frames need torchvision, which does not import here ({error}): install nbtools[features], or "
            "next to a CPU build of torch, the torchvision of the same index. Ready features need no torchvision"
        ) from error
    return models


def imagenet(models: ModuleType) -> dict[str, Any]:
    """From torch's own cache, where torchvision looks too; but torchvision would run what a planted file says."""
    published = models.Inception_V3_Weights.IMAGENET1K_V1
    path = Path(torch.hub.get_dir(), "checkpoints", published.url.rpartition("/")[2])
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(published.url, str(path), path.stem.rpartition("-")[2], progress=False)
    except (OSError, RuntimeError) as error:
        raise StageError(
            f"the weights of InceptionV3 could not be downloaded from {published.url} ({error}); fetch the file "
            "elsewhere and give it as weights=, or weights=None for random ones"
        ) from error
    return read_weights(path)


def read_weights(path: Path) -> dict[str, Any]:
    """What a file holds; nothing but plain tensors is unpickled, and only by a torch that can be trusted to do that
    (CVE-2025-32434 before 2.6, CVE-2026-24747 before 2.10). Raises CheckpointError."""
    from safetensors.torch import load_file

    if path.suffix != ".safetensors" and tuple(map(int, torch.__version__.split(".")[:2])) < SAFE:
        raise CheckpointError(
            f"weights: {path} is a pickle, which torch {torch.__version__} can be tricked into running; use torch ≥ "
            "2.10, or on a machine that may run it save its state_dict with safetensors.torch.save_file"
        )
    try:
        return load_file(path) if path.suffix == ".safetensors" else torch.load(path, "cpu", weights_only=True)
    except Exception as error:  # torch.load raises whatever its unpickler encounters
        why = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
        raise CheckpointError(
            f"weights: {path} cannot be read as weights: {why}; copy it again from its origin"
        ) from error


def load(network: nn.Module, state: Mapping[str, Any], origin: object) -> None:
    """Raises CheckpointError if the weights are not of this network."""
    try:
        network.load_state_dict(state)
    except (RuntimeError, AttributeError, TypeError) as error:
        why = " ".join(str(error).split())[:200]
        raise CheckpointError(f"weights: {origin} does not fit the network: {why}; give another file") from error


def without_classifiers(state: Mapping[str, Any], origin: object) -> dict[str, Tensor]:
    """InceptionV3's own weights, from torchvision's file or from a network that contains it under any name.

    Raises CheckpointError if there are none."""
    for inner in (state, *(value for value in state.values() if isinstance(value, Mapping))):
        prefix = next((name.removesuffix(STEM) for name in inner if name.endswith(STEM)), None)
        if prefix is not None:
            own = {name[len(prefix) :]: value for name, value in inner.items() if name.startswith(prefix)}
            return {name: value for name, value in own.items() if not name.startswith(CLASSIFIERS)}
    raise CheckpointError(f"weights: {origin} is not an InceptionV3: it has no {STEM}; give another file")
