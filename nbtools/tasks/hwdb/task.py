"""How lines are trained: plans, batches and their augmentation, loss, metrics, decoding.

B samples, H × W pixels, N characters, T time steps; ink (B, 1, H, W) in [0, 1], 0 is paper; lengths (B,) columns.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from nbtools.data import SPLITS, Card, Draws, Pack, constant, places
from nbtools.errors import PlanError
from nbtools.tasks.common import ctc
from nbtools.tasks.common.metrics import THUMB, at_most, bucket_knob, epochs_for, text_metrics
from nbtools.tasks.hwdb import networks
from nbtools.tasks.hwdb.data import HCTR_HEIGHT
from nbtools.train import Batch, Pair, Tensors, knob
from nbtools.train import Plan as BasePlan

BEST = "-cer"
CHOICES = ("auto", *networks.NETWORKS)
LINES_A_CLASS = 150  # to train on, over all epochs: that many read the demo's new writers with CER 0.02 (measured)
STRETCH, SLANT = 0.08, 0.2  # largest change of a line's length; columns a row leans by
SPOTS = 3


@dataclass(frozen=True)
class Plan(BasePlan):
    """The settings of lines, in addition to those of every plan."""

    network: str = knob("auto", f"hctr: the reference's, from {HCTR_HEIGHT} px up; slim: for CPUs", choices=CHOICES)
    augment: float = knob(0.0, "strength of the augmentation; 0: none", least=0, most=2)
    bucket: int = bucket_knob("columns")


BASELINE = Plan(epochs=90, batch_size=8, optimizer="sgd", lr=1e-3, weight_decay=1e-4, schedule="step", feed="workers")
"""The reference's recipe: every line decoded again in the main process, no mixed precision."""

GUIDE = BASELINE.replace(epochs=10, batch_size=64, lr=3e-3, lr_rule="sqrt", schedule="constant", amp="fp16", workers=8)
PRESETS = {
    "guide": GUIDE,
    "guide-batch-48": GUIDE.replace(batch_size=48, lr=2.5e-3),
    "guide-batch-32": GUIDE.replace(batch_size=32, lr=2e-3),
    "guide-lr-0.002": GUIDE.replace(lr=2e-3, clip_norm=5.0),
    "guide-lr-0.0015": GUIDE.replace(lr=1.5e-3, clip_norm=5.0),
}
"""The guide's optimised settings, its ladder where memory runs out, and its two lrs for a loss that is unstable or NaN.
Its ten epochs end before the lr would fall."""

PLAN = Plan(epochs=30, batch_size=64, lr=2.83e-3, lr_rule="sqrt", amp="bf16", channels_last=True, workers=8)
PLAN = PLAN.replace(warmup_epochs=2, weight_decay=0.01, clip_norm=5.0, augment=1.0)
"""For a GPU with bfloat16: the guide's batch, the reference's lr by the √ rule, and from the start the clipping that
the guide turns to after a NaN. AdamW, where the reference has SGD at that lr: slim was measured with it (3e-3 on a
CPU), hctr was not. `nb.advise` fits it to the machine and the data."""


def suggest(card: Card, accelerator: str) -> dict[str, tuple[Any, str]]:
    """Return the task's settings for a machine: field → (value, reason). Those for slim were measured on a CPU with
    1,828 lines of the demo, 60 characters, 32 pixels high."""
    cuda, height = accelerator == "cuda", card.options["height"]
    bucket = height // 4, "an eighth as many widths for 1 % more padding (measured on our data)"
    if cuda and network_for(card) == "hctr":
        network = "hctr", f"the reference's own: a GPU is fast enough for it, {THUMB}"
        return {"bucket": bucket, "network": network, "batch_size": (at_most(64, card), f"the guide's 64, {THUMB}")}
    if not cuda:  # oneDNN keeps what it planned for each width, and the heap around it has ever more holes
        bucket = height // 2, "a seventh as many widths for 2 % more padding (measured on our data), less memory"
    sizes = "a better CER than 32 after 4 epochs (measured on our CPU)"
    rates = "with warmup and cosine; 5e-3 ended at CER 0.04 instead of 0.03 (measured on our CPU)"
    mild = "a run this short ended at CER 0.08 with 1.0, but 0.03 with this (measured on our CPU)"
    epochs = epochs_for(card, (4 if cuda else 1) * LINES_A_CLASS * len(card.classes))
    scaled = f"the CPU's by the sqrt rule, {THUMB}"
    return {
        "bucket": bucket,
        "network": ("slim", f"few enough operations for a CPU, {THUMB}; hctr is for tall lines"),
        "augment": (0.5, mild) if epochs <= 12 else (1.0, f"few lines, seen often, {THUMB}"),
        "batch_size": (at_most(64, card), scaled) if cuda else (at_most(16, card), sizes),
        "lr": (6e-3, scaled) if cuda else (3e-3, rates),
        "epochs": (epochs, f"enough to show every class often, between 3 and 200, {THUMB}"),
        "warmup_epochs": (round(epochs * 0.08, 2), f"8 % of the run, {THUMB}: CTC predicts blank everywhere at first"),
        "weight_decay": (0.02, f"for a small set, {THUMB}"),
        "clip_norm": (5.0, f"only guards against outliers, {THUMB}"),
        "channels_last": (cuda, THUMB if cuda else "9 % more time per step (measured on our CPU)"),
    }


def network_for(card: Card | Pack, plan: Plan = PLAN) -> str:
    """Return the network of a plan; `auto` is decided by the height of the lines."""
    return plan.network if plan.network != "auto" else "hctr" if card.options["height"] >= HCTR_HEIGHT else "slim"


def part(pack: Pack, plan: Plan) -> Pack:
    """Return the pack without training lines whose text does not fit into their time steps: these teach nothing."""
    columns, characters = (torch.from_numpy(pack.offsets[name]).diff() for name in ("image", "label"))
    labels = nn.utils.rnn.pad_sequence([*torch.from_numpy(pack.arrays["label"]).split(characters.tolist())], True)
    fits = ctc.feasible(-(-columns // networks.STRIDES[network_for(pack, plan)]), labels, characters).numpy()
    return pack.with_split(pack.split + len(SPLITS) * (~fits & (pack.split == 0)))


def model(card: Card | Pack, plan: Plan) -> nn.Module:
    """Return the network for a data set. Raises PlanError if it cannot read lines of that height."""
    name, height = network_for(card, plan), card.options["height"]
    kind = networks.NETWORKS[name]
    if height < kind.least_height:
        rule = f'Plan.network = "{name}" reads lines ≥ {kind.least_height} pixels high, but these are {height}'
        raise PlanError(f"{rule}; pack with a larger height=, or choose another network")
    network = kind(height, len(card.classes))
    network.recompute = plan.checkpoint_activations
    return network


def batch(raw: Batch, plan: Plan, draws: Draws | None) -> Batch:
    """Turn uint8 ink on its side (B, W, H) into image (B, 1, H, W), upright, paper 0, full ink 2; augment given draws.

    That is 1 - g, where g = (grey / 255 - .5) / .5 of dark strokes on white paper is the guide's: sign and offset are
    absorbed by the first batch norm, so that paper, padding and what convolutions see around a picture are all 0.
    """
    ink, lengths = raw["image"].transpose(1, 2).unsqueeze(1).contiguous() / 255, raw["image_length"]
    if draws is not None and plan.augment:
        image, lengths = augment_lines(ink, lengths, draws, plan.augment)
    else:
        image = ink.mul_(2)
    return {**raw, "image": image, "image_length": lengths}


def loss(model: Callable[[Batch], ctc.Outputs], batch: Batch, plan: Plan) -> tuple[Tensor, Tensor]:
    """Return the sum of the CTC loss over the lines whose text fits into their time steps, and how many these are.

    The others have an infinite loss, and no gradient could change that: they count as empty texts, times 0, so that the
    host need not know which they are; `metrics` counts them.
    """
    logits, steps = model(batch)
    labels, lengths = batch["label"], batch["label_length"]
    fits = ctc.feasible(steps, labels, lengths)
    each = ctc.loss((logits, steps), labels, lengths * fits, reduction="none")
    return (each * fits).sum(), fits.sum()


def metrics(outputs: ctc.Outputs, batch: Batch) -> dict[str, Pair]:
    """Return cer, ar, cr and whole_accuracy, over all lines; infeasible: the share of lines that the loss excludes.

    By the definitions of the ICDAR 2013 competition, ar = 1 - (substitutions + deletions + insertions) / characters,
    and cr the same without insertions. A character of the truth that is unknown counts as an error in any case.
    """
    logits, steps = outputs
    labels, lengths = batch["label"], batch["label_length"]
    known = labels.where(labels != logits.shape[2] - 2, -1)  # the last class is unknown; no answer is -1
    misfits = (~ctc.feasible(steps, labels, lengths)).sum()
    return text_metrics(ctc.greedy(outputs), ctc.texts(known, lengths)) | {"infeasible": (misfits, len(labels))}


def decode(outputs: ctc.Outputs, card: Card | Pack) -> list[str]:
    return ["".join(card.classes[place] for place in places) for places in ctc.greedy(outputs)]


def tensors(card: Card, plan: Plan) -> tuple[Tensors, Tensors]:
    return ctc.tensors(card.options["height"], len(card.classes), "2 * (image.transpose(0, 2, 1)[:, None] / 255)")


def augment_lines(ink: Tensor, lengths: Tensor, draws: Draws, strength: float) -> tuple[Tensor, Tensor]:
    """Return lines bent, with thicker or thinner strokes, in another contrast, partly covered by spots of paper, in
    [0, 2]; and their lengths, which never shrink: every text that fitted still fits. strength: 1 is the recipe's."""
    height, width = ink.shape[2:]
    bends = ((-m * strength, m * strength) for m in (STRETCH, SLANT, 0.1, 0.05, 0.12, 0.5))
    box, strip = 0.25 * strength * height, 0.1 * strength * height
    spot = ((0, 1), (0, height), (0, box), (0, box), (0, 1), (0, strip))
    drawn = draws.uniforms(*bends, (-0.3, 0.3), (-0.08, 0.08), *SPOTS * spot)
    bend, thick, contrast, spots = drawn.split([5, 1, 2, 6 * SPOTS], 1)
    wider = math.ceil(width * (1 + STRETCH * strength) + SLANT * strength * height) + 1
    x, y = places(wider, ink.device), places(height, ink.device)
    ink, lengths = bend_lines(ink, lengths, bend, x, y[:, None])
    gain, offset = (contrast * (2 * strength)).view(-1, 2, 1, 1, 1).unbind(1)
    amount = thick.view(-1, 1, 1, 1)  # of a pixel, towards the 3 × 3 maximum, or the minimum where it is below 0
    signed = ink * amount.sign()
    most = F.max_pool2d(F.pad(signed, (1, 1, 1, 1)), 3, 1)
    ink = most.sub_(signed).mul_(amount).add_(ink).mul_(2 + gain).add_(offset).clamp_(0, 2)
    return ink.masked_fill_(cover_mask(x, y, lengths[:, None], spots.unflatten(1, (SPOTS, 6))), 0), lengths


def bend_lines(ink: Tensor, lengths: Tensor, drawn: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return lines stretched, slanted, scaled, shifted and turned a little, for columns x (W,) and rows y (H, 1)."""
    height, width = ink.shape[2:]
    drawn = drawn[..., None, None]
    (_, slant, _, rise, turn), (stretch, _, size, *_) = drawn.unbind(1), (1 + drawn).unbind(1)  # each (B, 1, 1)
    y = y - (height - 1) / 2
    lean = slant.abs() * (height / 2)  # room on either side for what leans out
    from_x = ((x - lean) - slant * y).div_(stretch)
    along = (from_x / lengths.view(-1, 1, 1)).sub_(0.5)
    from_y = along.mul_(turn).add_(rise).mul_(height).add_(y / size).add_((height - 1) / 2)
    grid = torch.stack([from_x, from_y], 3).add_(0.5).mul_(constant((2 / width, 2 / height), ink.device)).sub_(1)
    grown = torch.add(lengths * stretch.view(-1), lean.view(-1), alpha=2).ceil_().long()
    return F.grid_sample(ink, grid, align_corners=False), torch.maximum(lengths, grown)


def cover_mask(x: Tensor, y: Tensor, lengths: Tensor, spots: Tensor) -> Tensor:
    """Return (B, 1, H, W) bool: what lies beyond the lengths (B, 1), and spots (B, SPOTS, 6) of paper: rectangles of up
    to a quarter of the height, and strips across all of it of up to a tenth; no character is covered whole."""
    top, high = spots[..., 1], spots[..., 3]
    left = spots[..., 0::4] * lengths[..., None]  # (B, SPOTS, 2): of rectangle and strip
    right, bottom = left + spots[..., 2::3], top + high
    across = (x >= left[..., None]) & (x < right[..., None])  # (B, SPOTS, 2, W)
    down = (y >= top[..., None]) & (y < bottom[..., None])  # (B, SPOTS, H)
    boxes = (down[..., None] & across[:, :, :1]).any(1)  # (B, H, W)
    columns = across[:, :, 1].any(1) | (x >= lengths)
    return (boxes | columns[:, None])[:, None]
