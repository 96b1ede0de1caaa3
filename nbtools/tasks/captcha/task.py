"""How captchas are trained: plans, batches and their augmentation, losses, metrics, decoding.

B samples, H × W pixels, N characters, T time steps."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nbtools.data import Card, Draws, Pack, constant, places
from nbtools.errors import PlanError
from nbtools.tasks.captcha.networks import Ctc, Guide, Small
from nbtools.tasks.common import ctc
from nbtools.tasks.common.metrics import THUMB, at_most, bucket_knob, epochs_for, text_metrics
from nbtools.train import Batch, Pair, Tensors, knob
from nbtools.train import Plan as BasePlan

Outputs = Tensor | tuple[Tensor, Tensor]

BEST = "whole_accuracy"
FIXED_IMAGES = 40_000  # to train on, all epochs together: 99 % of four generated digits are read after half of them
NETWORKS = {"guide": Guide, "small": Small, "ctc": Ctc}
LOSSES = ("soft_margin", "cross_entropy")
LINES = 280_000  # of the real captchas, 20 minutes on two cores: their CER stopped falling after 200,000


@dataclass(frozen=True)
class Plan(BasePlan):
    """The settings of captchas, in addition to those of every plan."""

    network: str = knob("auto", "auto: guide, or ctc for lines; small: for CPUs", choices=("auto", *NETWORKS))
    loss: str = knob("soft_margin", "for fixed captchas; soft_margin is the original", choices=LOSSES)
    augment: float = knob(0.0, "strength of the augmentation; 0: none", least=0, most=2)
    bucket: int = bucket_knob("columns")


BASELINE = Plan(epochs=150, batch_size=64, optimizer="adam", lr=2e-4, min_lr=1e-6, eval_every=5, feed="workers")
"""The guide's "before": every image decoded again in the main process, no mixed precision."""

GUIDE = BASELINE.replace(batch_size=512, amp="fp16", workers=12)
RECIPE = Plan(epochs=150, batch_size=1024, lr=6e-4, lr_rule="sqrt", min_lr=1e-6, warmup_epochs=5, weight_decay=1e-4)
LARGE = RECIPE.replace(clip_norm=1.0, amp="fp16", eval_every=5, feed="workers", workers=16)
PRESETS = {
    "guide": GUIDE,
    "guide-gpus": GUIDE.replace(batch_size=1536, micro_batch_size=512),
    "guide-large": LARGE,
    "guide-large-gpus": LARGE.replace(batch_size=3072, micro_batch_size=1024),
}
"""The optimised settings of the two guides, for one of their GPUs, and with the batch of all three in three passes."""

PLAN = RECIPE.replace(clip_norm=1.0, amp="bf16", channels_last=True, workers=16)
"""The recipe for a GPU with bfloat16. `nb.advise` fits it to the machine and the data."""


def suggest(card: Card, accelerator: str) -> dict[str, tuple[Any, str]]:
    if card.options["layout"] == "lines":
        return for_lines(card, accelerator == "cuda")
    if accelerator == "cuda":
        return {"network": ("guide", f"the original network: a GPU is fast enough for it, {THUMB}")}
    epochs = epochs_for(card, FIXED_IMAGES)
    return {  # measured on two cores of a Xeon (AVX-512) with 4,800 four-digit captchas
        "network": ("small", "trains 8 times as many images/s as the original, and needs fewer (measured on our CPU)"),
        "loss": ("cross_entropy", "learns in fewer epochs than the original soft margin (measured on our CPU)"),
        "augment": (0.3, "mild, for a small set; costs 7 % of a step (measured on our CPU)"),
        "batch_size": (at_most(64, card), "17 % faster than 32 in bf16, and as good; 128: +6 % (measured on our CPU)"),
        "lr": (2e-3, "read 99 % of generated four-digit captchas after 4 epochs of 4,800 (measured on our CPU)"),
        "epochs": (epochs, f"{FIXED_IMAGES:,} images in all (measured on our CPU)"),
        "warmup_epochs": (min(1.0, epochs / 5), f"Adam's first estimates are poor, {THUMB}"),
        "weight_decay": (0.02, f"for a small set, {THUMB}"),
        "clip_norm": (5.0, f"only guards against outliers, {THUMB}"),
        "channels_last": (True, "a fifth less time per step (measured on our CPU)"),
    }


def for_lines(card: Card, cuda: bool) -> dict[str, tuple[Any, str]]:
    """Return the settings of lines. Measured on a CPU with 3,100 real captchas; no GPU was available."""
    epochs, sqrt = epochs_for(card, LINES), f"the CPU's 3e-3 at batch 32 by the sqrt rule, {THUMB}"
    padding = "a third as many widths for 1 % more padding" if cuda else "a sixth as many widths for 2 % more padding"
    return {
        "network": ("ctc", "lines need CTC"),
        "bucket": (card.options["height"] // (8 if cuda else 4), f"{padding} (measured on our data)"),
        "augment": (1.3, "at 1.0 the training loss fell to half the validation's in 66 epochs (measured on our CPU)"),
        "batch_size": (at_most(128 if cuda else 32, card), f"many steps for a small set, {THUMB}"),
        "lr": (6e-3, sqrt) if cuda else (3e-3, "with cosine; twice that is no better (measured on our CPU)"),
        "epochs": (epochs, f"{LINES:,} lines in all, about 20 minutes (measured on our CPU)"),
        "warmup_epochs": (round(epochs * 0.06, 1), f"6 % of the run, {THUMB}: CTC predicts blank everywhere at first"),
        "weight_decay": (0.05, f"for a small set, {THUMB}"),
        "clip_norm": (5.0, f"only guards against outliers, {THUMB}"),
        "channels_last": (True, "a quarter less time per step (measured on our CPU)"),
        "eval_every": (2, f"an evaluation takes a tenth of an epoch's time, {THUMB}"),
    }


def model(card: Card | Pack, plan: Plan) -> nn.Module:
    """Return the network for a data set. Raises PlanError if they do not fit each other."""
    layout = card.options["layout"]
    network = plan.network if plan.network != "auto" else "ctc" if layout == "lines" else "guide"
    if (network == "ctc") != (layout == "lines"):
        rule = f'Plan.network = "{network}" cannot read captchas of layout "{layout}"'
        raise PlanError(f"{rule}; choose {'ctc' if layout == 'lines' else 'guide or small'}, or auto")
    built = NETWORKS[network](card)
    built.stages.recompute = plan.checkpoint_activations
    return built


def batch(raw: Batch, plan: Plan, draws: Draws | None) -> Batch:
    """Return uint8 as image (B, 1, H, W): fixed in [-1, 1], lines upright in [-0.3, 1.7]; augmented given draws."""
    if "image_length" not in raw:
        image = raw["image"].unsqueeze(1).float().div_(127.5).sub_(1)
        return {**raw, "image": image if draws is None or not plan.augment else jitter(image, draws, plan.augment)}
    ink, lengths = raw["image"].transpose(1, 2).unsqueeze(1).float().div_(255), raw["image_length"]
    if draws is not None and plan.augment:
        ink, lengths = distort(ink, lengths, draws, plan.augment)
    return {**raw, "image": ink.mul_(2).sub_(0.3), "image_length": lengths}


def loss(model: Callable[[Batch], Outputs], batch: Batch, plan: Plan) -> tuple[Tensor, int]:
    """Return the sum of a loss over the batch, and how many terms it has: samples, or characters for cross-entropy."""
    outputs, labels = model(batch), batch["label"]
    if isinstance(outputs, tuple):
        return ctc.loss(outputs, labels, batch["label_length"]), len(labels)
    if plan.loss == "cross_entropy":
        return F.cross_entropy(outputs.flatten(0, 1), labels.flatten(), reduction="sum"), labels.numel()
    targets = (labels[..., None] == torch.arange(outputs.shape[2], device=labels.device)).float()
    logits = outputs.float()  # autocast does not list this loss, and a sum in bf16 keeps three digits
    return F.multilabel_soft_margin_loss(logits.flatten(1), targets.flatten(1), reduction="sum"), len(labels)


def metrics(outputs: Outputs, batch: Batch) -> dict[str, Pair]:
    """Return char_accuracy and whole_accuracy; for lines cer, ar, cr and whole_accuracy."""
    if isinstance(outputs, tuple):
        return text_metrics(ctc.greedy(outputs), ctc.texts(batch["label"], batch["label_length"]))
    right = outputs.argmax(2) == batch["label"]
    return {"char_accuracy": (right.sum(), right.numel()), "whole_accuracy": (right.all(1).sum(), len(right))}


def decode(outputs: Outputs, card: Card | Pack) -> list[str]:
    rows = ctc.greedy(outputs) if isinstance(outputs, tuple) else outputs.argmax(2).tolist()
    return ["".join(card.classes[place] for place in row) for row in rows]


def tensors(card: Card, plan: Plan) -> tuple[Tensors, Tensors]:
    if card.options["layout"] == "lines":
        line = "2 * (image.transpose(0, 2, 1)[:, None] / 255) - 0.3"
        return ctc.tensors(card.options["height"], len(card.classes), line)
    logits = ("batch", card.options["length"], len(card.classes)), "argmax over the last axis: k is classes[k]"
    return {"image": (("batch", 1, *card.options["size"]), "image[:, None] / 127.5 - 1")}, {"logits": logits}


def jitter(images: Tensor, draws: Draws, strength: float) -> Tensor:
    """Shift, scale and shear images (B, 1, H, W) in [-1, 1] a little, and change their contrast."""
    height, width = images.shape[2:]
    most = (0.08, 0.08, 0.15, 0.04, 0.06, 0.08, 0.25, 0.2)
    drawn = draws.uniforms(*((-m * strength, m * strength) for m in most))
    wide, high, shear, lean, right, down, gain, offset = drawn.unbind(1)
    rows = [1 + wide, shear * height / width, right], [lean * width / height, 1 + high, down]
    grid = F.affine_grid(torch.stack([*rows[0], *rows[1]], 1).view(-1, 2, 3), list(images.shape), align_corners=False)
    if mps := images.device.type == "mps":  # which lacks border padding (pytorch#125098): the same, by places inside
        grid = torch.stack([grid[..., i].clamp(1 / n - 1, 1 - 1 / n) for i, n in enumerate((width, height))], 3)
    moved = F.grid_sample(images, grid, padding_mode="zeros" if mps else "border", align_corners=False)
    return moved.mul_((1 + gain).view(-1, 1, 1, 1)).add_(offset.view(-1, 1, 1, 1)).clamp_(-1, 1)


def distort(ink: Tensor, lengths: Tensor, draws: Draws, strength: float) -> tuple[Tensor, Tensor]:
    """Bend and stretch lines of ink (B, 1, H, W) in [0, 1], lengths (B,) in columns; return both, new.

    Slant, size and height wander along a line. A length never shrinks, so every label that fitted still fits.
    """
    (height, width), turn = ink.shape[2:], 2 * math.pi
    ranges = [(-m * strength, m * strength) for m in (0.1, 0.25, 0.15, 0.06, 0.3)]
    wander = [bound for one in ranges[1:4] for bound in (one, (24, 200), (24, 200), (0, turn), (0, turn))]
    drawn = draws.uniforms(ranges[0], *wander, ranges[4])
    stretch, gain = 1 + drawn[:, 0], 1 + drawn[:, -1]
    whole, periods, phases = drawn[:, 1:-1].unflatten(1, (3, 5)).split([1, 2, 2], 2)  # (B, 3, 1 or 2)

    wider = math.ceil(width * (1 + 0.1 * strength))
    x, y = places(wider, ink.device), places(height, ink.device)[:, None] - (height - 1) / 2
    waves = torch.sin(turn * x / periods[..., None] + phases[..., None]).sum(2)  # (B, 3, W)
    waves = waves * constant((0.25 * strength / 2, 0.15 * strength / 2, 0.05 * strength / 2), ink.device)[:, None]
    slant = (whole[:, 0] + waves[:, 0])[:, None]  # (B, 1, W)
    size = ((1 + whole[:, 1]) * (1 + waves[:, 1]))[:, None]
    rise = ((whole[:, 2] + waves[:, 2]) * height)[:, None]
    grid = torch.stack([stretch.view(-1, 1, 1) * x + slant * y, y * size + rise + (height - 1) / 2], 3)
    grid = grid.add_(0.5).mul_(constant((2 / width, 2 / height), ink.device)).sub_(1)
    moved = F.grid_sample(ink, grid, align_corners=False)
    lengths = torch.maximum(lengths, torch.ceil(lengths / stretch).long() + 2).clamp(max=wider)
    return moved.mul_(gain.view(-1, 1, 1, 1)).clamp_(0, 1), lengths
