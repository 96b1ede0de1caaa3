"""How segmentation is trained: plans, the network, batches and their augmentation, loss, metrics, decoding.

B samples, C channels, K classes, H × W pixels of an image, h × w of a crop.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nbtools.data import Card, Draws, Pack
from nbtools.errors import PlanError
from nbtools.tasks.common.metrics import THUMB, at_most, epochs_for
from nbtools.tasks.segment.data import FAR, IGNORE, PER_PIXEL
from nbtools.tasks.segment.losses import edge_weights, hard_pixels, subsample
from nbtools.tasks.segment.networks import HEADS, SIZES, BiSeNetV2, Outputs
from nbtools.train import Batch, Pair, Tensors, knob
from nbtools.train import Plan as BasePlan

ALL_SCALES = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)  # the reference's (CoinCheung/BiSeNet, bisenetv2_city.py)
BEST = "miou"  # the metric that chooses the best checkpoint
SECONDS = 1800.0  # of training on one CPU core that a plan is advised for
PIXEL = 0.6e-6  # seconds of slim a pixel of an image, in all, on one core (measured: 0.5, next to other work 0.7)
FEWEST, MOST = 10, 1000  # epochs advised

MEAN, SPREAD = 127.5, 63.75  # of pixel values; defined here alone, for training and for predictions
GREY = 127.5  # the centre of contrast, and what lies outside the image
HALF = 0.5  # scale below which an image of half the size is read: bilinear weights reach no further than 2 pixels


@dataclass(frozen=True)
class Plan(BasePlan):
    """The settings of segmentation, in addition to those of every plan."""

    network: str = knob(
        "auto", "auto, bisenetv2: the original; slim: with few channels, for CPUs", choices=("auto", *SIZES)
    )
    crop: int | None = knob(None, "side of training crops; None: the whole image", least=32, unit="px", live=True)
    scale_low: float = knob(1.0, "augmentation: the smallest zoom of a training image", least=0.25, most=4, live=True)
    scale_high: float = knob(1.0, "augmentation: the largest zoom of a training image", least=0.25, most=4, live=True)
    flip: float = knob(0.0, "augmentation: chance of a left-right mirror image", least=0, most=1, live=True)
    jitter: float = knob(0.0, "augmentation: brightness, contrast, saturation × 1 ± this", least=0, most=0.9, live=True)
    ohem_threshold: float = knob(0.7, "class probability above which a pixel is left out", above=0, most=1, live=True)
    ohem_least: float = knob(1 / 16, "share of pixels, hardest first, that always count", above=0, most=1, live=True)
    aux_weight: float = knob(1.0, "weight of each auxiliary head in the loss; 0: the heads learn nothing", least=0)
    edge_factor: float = knob(2.0, "weight of the boundary term in the loss; 0: none", least=0, live=True)
    edge_weight: float = knob(10.0, "weight in that term of a boundary pixel; 1 far away", least=1, live=True)
    edge_width: float = knob(2.0, "distance from a boundary where closeness is 1/e", above=0, unit="px", live=True)
    edge_threshold: float = knob(0.3, "closeness below this counts as none", least=0, most=1, live=True)
    head_lr: float = knob(10.0, "lr of the heads, as a multiple of the others' lr", above=0)
    eval_scales: tuple[float, ...] = knob((1.0,), "zooms to average over in evaluation", above=0, most=4, live=True)
    eval_flip: bool = knob(False, "also average with the mirror image's prediction: twice the time", live=True)
    eval_full: bool = knob(False, "use all scales and mirror images in evaluations during training too", live=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale_low > self.scale_high:
            rule = f"Plan.scale_low must be at most scale_high ({self.scale_high:g}), got {self.scale_low:g}"
            raise PlanError(f"{rule}; lower it or raise scale_high")
        if not self.eval_scales:
            raise PlanError("Plan.eval_scales must name at least one zoom, got none; 1.0 is the image at its own size")

    @property
    def net(self) -> str:
        return "bisenetv2" if self.network == "auto" else self.network

    def while_training(self) -> Self:
        """Return the plan of evaluations while training: each image passes through the network once; six scales and
        their mirror images are 17 times the pixels."""
        plan = super().while_training()
        return plan if self.eval_full else plan.replace(eval_scales=(1.0,), eval_flip=False)


BASELINE = Plan(epochs=100, batch_size=32, optimizer="sgd", lr=5e-3, schedule="poly", weight_decay=1e-4)
BASELINE = BASELINE.replace(warmup_epochs=5, crop=384, scale_low=0.25, scale_high=2.0, flip=0.5, jitter=0.4)
BASELINE = BASELINE.replace(eval_every=5, eval_scales=ALL_SCALES, eval_flip=True, eval_full=True, feed="workers")
"""The guide's "before": every image decoded again in the main process, no mixed precision, and every fifth epoch an
evaluation with all scales and mirror images. Its warmup counted 1,000 steps as epochs and never ended: here 5."""

GUIDE = BASELINE.replace(batch_size=64, amp="fp16", workers=8)
PRESETS = {
    "guide": GUIDE,
    "guide-low-memory": GUIDE.replace(micro_batch_size=32),
    "guide-extreme": GUIDE.replace(batch_size=128, workers=16, prefetch=4),
}

PLAN = BASELINE.replace(lr_rule="linear", amp="bf16", channels_last=True, feed="auto", workers=8, prefetch=2)
PLAN = PLAN.replace(eval_every=1, eval_scales=(1.0,), eval_flip=False, eval_full=False)
"""For a GPU with bfloat16: the reference's recipe (SGD with momentum, heads at ten times the lr, warmup, poly), and
evaluations in a single pass."""


def suggest(card: Card, accelerator: str) -> dict[str, tuple[Any, str]]:
    """Return the task's settings for a machine: field → (value, reason). For a GPU the reference's; for a CPU measured
    on one core of a Xeon (AVX-512) with the 80 + 30 street scenes of CamVid."""
    height, width = card.options["size"]
    if accelerator == "cuda":
        batch = at_most(min(32, max(8, card.splits["train"] // 20)), card)
        crop = min(384, max(32, min(height, width) // 32 * 32))
        return {
            "network": ("bisenetv2", f"the original network: a GPU is fast enough for it, {THUMB}"),
            "batch_size": (batch, f"the guide's 32, less for a small set: 20 steps per epoch, {THUMB}"),
            "crop": (crop, f"the guide's 384, or the multiple of 32 that fits into the images, {THUMB}"),
            **course(card, 100_000, batch, f"100,000 images in all, {THUMB}"),
            **recipe("bisenetv2", batch),
        }
    batch, images = at_most(8, card), round(SECONDS / (height * width * PIXEL))
    zoom = "a smaller zoom leaves little of a small image; 0.75 to 1.5 is as good at first (measured on our CPU)"
    return {
        "network": ("slim", "a step takes a sixth of the original network's time (measured on our CPU)"),
        "batch_size": (batch, f"many small steps, {THUMB}; twice the batch is no faster (measured on our CPU)"),
        "crop": (None, "whole images, as they are small; crops of half their area are no worse (measured on our CPU)"),
        "scale_low": (0.5, zoom),
        **course(card, images, batch, f"{images:,} images: {SECONDS / 60:.0f} min on one core (measured on our CPU)"),
        **recipe("slim", batch),
        "channels_last": (True, "12 % less time per step (measured on our CPU)"),
    }


def recipe(network: str, batch: int) -> dict[str, tuple[Any, str]]:
    if network == "slim":
        why = "measured on our CPU, CamVid, 90 seconds: mIoU 0.49; with lr 5e-3 0.47, 2e-3 0.45; with SGD 0.42"
        return {
            "optimizer": ("adamw", why),
            "lr": (1e-2, why),
            "lr_rule": ("sqrt", "AdamW's, arXiv 2205.10287"),
            "weight_decay": (1e-2, f"for a small set, {THUMB}"),
            "head_lr": (1.0, "AdamW takes steps of the same size in every layer"),
        }
    linear = "the reference's 5e-3 at batch 16, by the linear rule (arXiv 1706.02677)"
    return {
        "optimizer": ("sgd", "the reference's, with momentum 0.9"),
        "lr": (float(f"{5e-3 * batch / 16:.3g}"), linear),
        "lr_rule": ("linear", "SGD's, arXiv 1706.02677"),
        "weight_decay": (5e-4, "the reference's; norms and biases have none"),
        "head_lr": (10.0, "the reference's"),
    }


def course(card: Card, images: int, batch: int, why: str) -> dict[str, tuple[Any, str]]:
    """Return how long to train and to warm up, and when to evaluate, for this many images shown in all."""
    epochs = epochs_for(card, images, FEWEST, MOST)
    why += "" if FEWEST < epochs < MOST else f", but from {FEWEST} to {MOST:,} epochs"
    warmup = round(min(epochs / 10, 1000 * batch / max(card.splits["train"], 1)), 1)
    return {
        "epochs": (epochs, why),
        "warmup_epochs": (warmup, f"the guide's 1,000 steps, but no more than a tenth of the run, {THUMB}"),
        "eval_every": (max(1, epochs // 100), f"about 100 evaluations in a run, each in a single pass, {THUMB}"),
    }


def with_network(plan: Plan, card: Card | Pack, network: str) -> Plan:
    named = plan.replace(network=network)
    return named.replace(**{name: value for name, (value, _) in recipe(named.net, plan.batch_size).items()})


def model(card: Card | Pack, plan: Plan) -> BiSeNetV2:
    """Return the network that the plan names, with the channels and classes of a data set."""
    channels = card.columns["image"].shape[-1]
    network = BiSeNetV2(len(card.classes), channels, SIZES[plan.net])
    network.recompute = plan.checkpoint_activations
    return network


def groups(model: nn.Module, plan: Plan) -> list[dict[str, Any]]:
    """Return the parameter groups: heads learn `head_lr` times as fast, norms and biases have no weight decay."""
    parts: dict[tuple[bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        parts.setdefault((name.startswith(HEADS), parameter.dim() > 1), []).append(parameter)
    return [
        {"params": parameters, "lr_scale": plan.head_lr if head else 1.0, "decays": decays}
        for (head, decays), parameters in parts.items()
    ]


def batch(raw: Batch, plan: Plan, draws: Draws | None) -> Batch:
    """Return what the network takes: image (B, C, H, W) float32 from -2 to 2, and, if the raw batch has them, label
    (B, H, W) int64 and distance (B, H, W) float32 in pixels. Augmented, and so cropped, only if draws are given."""
    raw = {**raw, "image": to_float(raw["image"])} if draws is None else augment(raw, plan, draws)
    made = {**raw, "image": raw["image"].sub_(MEAN).div_(SPREAD)}
    if "label" in raw:
        made["label"] = raw["label"].long()
    if "distance" in raw:
        made["distance"] = raw["distance"] / PER_PIXEL
    return made


def loss(model: Callable[[Batch], Outputs], batch: Batch, plan: Plan) -> tuple[Tensor, Tensor]:
    """Return (sum over images, number of images with a valid pixel) of main logits (B, K, H, W) and auxiliary ones.
    batch: label (B, H, W) int64 and, with edge_factor, distance (B, H, W) to the nearest boundary in pixels."""
    (main, auxiliary), labels = model(batch), batch["label"]
    outputs = [main, *auxiliary] if plan.aux_weight else [main]
    targets, valid = [subsample(labels, logits) for logits in outputs], labels != IGNORE
    entropies = [  # (B, H, W) each, 0 where ignored; never in half precision
        F.cross_entropy(logits.float(), target, ignore_index=IGNORE, reduction="none")
        for logits, target in zip(outputs, targets, strict=True)
    ]
    weights = hard_pixels(entropies, targets, plan.ohem_threshold, plan.ohem_least)
    if plan.edge_factor:
        edges = edge_weights(batch["distance"], valid, plan.edge_weight, plan.edge_width, plan.edge_threshold)
        weights[0] = weights[0] + plan.edge_factor * edges
    total, *more = ((each * entropy).sum() for each, entropy in zip(weights, entropies, strict=True))
    for term in more:
        total = total + plan.aux_weight * term
    return total, valid.flatten(1).any(1).sum()


def infer(model: Callable[[Batch], Outputs], batch: Batch, plan: Plan) -> Outputs:
    """Return logits (B, K, H, W) of a model in eval mode for image (B, C, H, W), and no auxiliary outputs.

    A single pass returns the model's own logits. Otherwise the probabilities of all scales and mirror images are
    averaged at full size, and returned as logarithms, which cross-entropy and argmax take as logits.
    """
    if plan.eval_scales == (1.0,) and not plan.eval_flip:
        return model(batch)
    height, width = batch["image"].shape[2:]
    total = torch.zeros((), device=batch["image"].device)
    for scale in plan.eval_scales:
        zoomed = resize(batch["image"], (max(1, round(height * scale)), max(1, round(width * scale))))
        mean = model({**batch, "image": zoomed})[0].float().softmax(1)
        if plan.eval_flip:
            mean = (mean + model({**batch, "image": zoomed.flip(3)})[0].float().softmax(1).flip(3)) / 2
        total = total + resize(mean, (height, width))
    return (total / len(plan.eval_scales)).clamp_min_(torch.finfo(torch.float32).tiny).log_(), ()


def metrics(outputs: Outputs, batch: Mapping[str, Tensor]) -> dict[str, Pair]:
    """Return miou and pixel_accuracy of logits (B, K, H, W), given label (B, H, W). Nothing waits for the device."""
    labels, classes = batch["label"], outputs[0].shape[1]
    cell = (labels * classes + argmax(outputs[0])).where(labels != IGNORE, classes * classes).flatten()
    counts = torch.zeros(classes * classes + 1, dtype=torch.int64, device=cell.device)
    counts.scatter_add_(0, cell, torch.ones_like(cell))  # `bincount` waits for a GPU
    counts = counts[:-1].view(classes, classes)  # of pixels: their class (row), predicted (column)
    both = counts.diagonal()
    return {"miou": (both, counts.sum(0) + counts.sum(1) - both), "pixel_accuracy": (both.sum(), counts.sum())}


def decode(outputs: Outputs, card: Card | Pack) -> list[np.ndarray]:
    """Return the class of each pixel, (H, W) uint8, for each image."""
    return list(argmax(outputs[0]).to("cpu").numpy().astype(np.uint8))


def tensors(card: Card | Pack, plan: Plan) -> tuple[Tensors, Tensors]:
    """Return what the network reads and returns, for files that leave nbtools: a single pass, at any size."""
    pixels = f"(image.transpose(0, 3, 1, 2) - {MEAN}) / {SPREAD}"
    inputs = {"image": (("batch", card.columns["image"].shape[-1], "height", "width"), pixels)}
    return inputs, {"logits": (("batch", len(card.classes), "height", "width"), "argmax over axis 1: k is classes[k]")}


def augment(raw: Batch, plan: Plan, draws: Draws) -> Batch:
    """Return a raw batch as training sees it, from each sample's own random numbers only: image (B, C, h, w) float in
    [0, 255], label (B, h, w) uint8, distance (B, h, w) in eighths of a pixel.

    One resampling: zoom, place and mirroring of a crop are one affine map from its pixels to the image's. Images are
    read bilinearly, class ids and distances at the nearest pixel, so no class appears between two others.
    """
    height, width = raw["image"].shape[1:3]
    size = (plan.crop, plan.crop) if plan.crop is not None else (height, width)
    if size == (height, width) and plan.scale_low == plan.scale_high == 1 and plan.flip <= 0:
        return {**raw, "image": jitter(to_float(raw["image"]), draws, plan.jitter)}
    scale, y, x = crops((height, width), size, plan, draws)
    inside = ((y >= 0) & (y < height))[:, :, None] & ((x >= 0) & (x < width))[:, None]  # (B, h, w)
    image = jitter(resample(raw["image"], scale, y, x, plan.scale_low < HALF), draws, plan.jitter)
    made = {**raw, "image": image.sub_(GREY).mul_(inside[:, None]).add_(GREY)}  # `where` is 20 × slower
    nearest = y.long().clamp(0, height - 1)[:, :, None] * width + x.long().clamp(0, width - 1)[:, None]
    outside = inside.byte() - 1  # 1 → 0, 0 → 255: both IGNORE and FAR
    for name in {"label", "distance"} & raw.keys():
        made[name] = raw[name].flatten(1).gather(1, nearest.flatten(1)).view_as(inside).bitwise_or_(outside)
    if "distance" in made:  # in pixels of the crop; those at the limit stay there
        made["distance"] = (made["distance"] * scale[:, None]).masked_fill_(made["distance"] == FAR, FAR)
    return made


def crops(picture: tuple[int, int], size: tuple[int, int], plan: Plan, draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
    """Return random crops: their zoom (B, 1), and where the centres of their rows (B, h) and columns (B, w) lie in the
    image, whose first pixel extends from 0 to 1.

    A crop lies inside the zoomed image where that is larger, else around all of it; height and width independently.
    Zooms are uniform, as in the reference (CoinCheung/BiSeNet, transform_cv2.py).
    """
    scale, down, right = draws.uniforms((plan.scale_low, plan.scale_high), (0, 1), (0, 1)).split(1, 1)
    mirrored, centres = draws.chance(plan.flip)[:, None], []
    for drawn, length, side in zip((down, right), picture, size, strict=True):
        room = scale * length - side
        start = (drawn * (room.abs().floor() + 1)).floor().copysign(room)
        at = torch.arange(side, device=scale.device) + 0.5
        at = torch.where(mirrored, at.flip(0), at) if drawn is right else at
        centres.append((at + start) / scale)
    return scale, *centres


def resample(image: Tensor, scale: Tensor, y: Tensor, x: Tensor, pyramid: bool) -> Tensor:
    """Return images (B, H, W, C) uint8 at centres of pixels, (B, C, h, w) float32, bilinear; edge pixels are repeated
    beyond the image.

    pyramid: images zoomed to less than a half are read from a copy of half the size, means of 2 × 2 pixels, stored
    below the image in the same tensor, so every pixel counts down to a scale of 0.25.
    """
    source, (height, width) = to_float(image), image.shape[1:3]
    rows, columns = y.clamp(0.5, height - 0.5), x.clamp(0.5, width - 0.5)
    if pyramid:
        small, even = scale < HALF, source[:, :, : height // 2 * 2, : width // 2 * 2]
        pairs = even[:, :, ::2] + even[:, :, 1::2]  # by slices: `avg_pool2d` takes six times as long on a CPU
        half = (pairs[..., ::2] + pairs[..., 1::2]) / 4
        source = torch.cat([source, F.pad(half, (0, width % 2 + width // 2))], 2)
        rows = torch.where(small, (y / 2).clamp(0.5, height // 2 - 0.5) + height, rows)
        columns = torch.where(small, (x / 2).clamp(0.5, width // 2 - 0.5), columns)
    across, down = columns * (2 / width) - 1, rows * (2 / source.shape[2]) - 1  # from -1 to 1 over `source`
    size = (-1, y.shape[1], x.shape[1])
    grid = torch.stack([across[:, None].expand(size), down[:, :, None].expand(size)], 3)
    return F.grid_sample(source, grid, align_corners=False)


def jitter(image: Tensor, draws: Draws, strength: float) -> Tensor:
    """Return images (B, C, H, W) in [0, 255] with brightness, contrast around grey and saturation of RGB, each times
    1 ± strength, as one matrix product; a fourth channel is unchanged. The reference clips after each."""
    if not strength:
        return image
    one = 1 - strength, 1 + strength
    drawn = draws.uniforms(one, one, one)[..., None, None]
    (light, contrast, saturation), (_, lost, grey) = drawn.unbind(1), (1 - drawn).unbind(1)  # each (B, 1, 1)
    eye = torch.eye(3, device=image.device)
    matrix = light * contrast * torch.addcmul(grey / 3, saturation, eye)  # (B, 3, 3); products with 0 and 1 are exact
    colours = image[:, :3]
    made = torch.baddbmm((GREY * lost).expand(-1, 3, 1), matrix, colours.flatten(2)).clamp_(0, 255).view_as(colours)
    return made if image.shape[1] == 3 else torch.cat([made, image[:, 3:]], 1)


def to_float(image: Tensor) -> Tensor:
    """Return (B, H, W, C) uint8 as (B, C, H, W) float32, a new tensor."""
    return image.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)


def resize(images: Tensor, size: tuple[int, int]) -> Tensor:
    return images if images.shape[2:] == size else F.interpolate(images, size, mode="bilinear", align_corners=False)


def argmax(logits: Tensor) -> Tensor:
    """Return (B, H, W) int64. `Tensor.argmax` takes 8 times as long on a CPU: 7 of 11 ms for 180 × 240."""
    return logits.max(1).indices
