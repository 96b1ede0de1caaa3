"""The plans of segmentation: the guide's "before", the recommended one, and the advice for a machine and its data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from nbtools.data import Card, Pack
from nbtools.errors import PlanError
from nbtools.tasks.common.plans import THUMB, at_most, epochs_for
from nbtools.train import Plan as BasePlan
from nbtools.train import knob

ALL_SCALES = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)  # the reference's (CoinCheung/BiSeNet, bisenetv2_city.py)
BEST = "miou"  # the metric that chooses the best checkpoint
SECONDS = 1800.0  # of training on one CPU core that a plan is advised for
PIXEL = 0.6e-6  # seconds of slim a pixel of an image, in all, on one core (measured: 0.5, next to other work 0.7)
FEWEST, MOST = 10, 1000  # epochs advised
TWICE = "twice as many are 0.99× as fast (measured: 0.90 to 1.34, n = 7, two cores of an EPYC)"


@dataclass(frozen=True)
class Plan(BasePlan):
    """The settings of segmentation, in addition to those of every plan."""

    network: str = knob(
        "auto",
        "bisenetv2: the original network; slim: the same with few channels, for CPUs; auto: bisenetv2",
        choices=("auto", "bisenetv2", "slim"),
    )
    dropout: float | None = knob(None, "dropout in the heads; None: the network's own, 0.1", least=0, most=0.9)
    crop: int | None = knob(
        None,
        "height and width of training crops, preferably multiples of 32; None: the whole image",
        least=32,
        unit="px",
        live=True,
    )
    scale_low: float = knob(1.0, "augmentation: the smallest zoom of a training image", least=0.25, most=4, live=True)
    scale_high: float = knob(1.0, "augmentation: the largest zoom of a training image", least=0.25, most=4, live=True)
    flip: float = knob(0.0, "augmentation: chance of a left-right mirror image", least=0, most=1, live=True)
    jitter: float = knob(
        0.0, "augmentation: brightness, contrast and saturation times 1 ± this", least=0, most=0.9, live=True
    )
    ohem_threshold: float = knob(
        0.7, "only pixels whose class gets less than this probability count in the loss", above=0, most=1, live=True
    )
    ohem_least: float = knob(
        1 / 16, "share of an image's pixels, the hardest, that always counts", above=0, most=1, live=True
    )
    aux_weight: float = knob(1.0, "weight of each auxiliary head in the loss; 0: the heads learn nothing", least=0)
    edge_factor: float = knob(2.0, "weight of the boundary term in the loss; 0: none", least=0, live=True)
    edge_weight: float = knob(
        10.0, "weight of a pixel on a boundary in that term, against 1 far away", least=1, live=True
    )
    edge_width: float = knob(
        2.0, "distance from a boundary at which closeness falls to 1/e", above=0, unit="px", live=True
    )
    edge_threshold: float = knob(0.3, "closeness below this counts as none", least=0, most=1, live=True)
    head_lr: float = knob(10.0, "lr of the heads, as a multiple of the others' lr", above=0)
    eval_scales: tuple[float, ...] = knob(
        (1.0,), "zooms whose predictions are averaged in evaluation", above=0, most=4, live=True
    )
    eval_flip: bool = knob(False, "also average with the prediction for the mirror image: twice the time", live=True)
    eval_window: int | None = knob(
        None,
        "side of windows that slide over an image in evaluation; None: all of it at once",
        least=32,
        unit="px",
        live=True,
    )
    eval_full: bool = knob(False, "all scales and mirror images also in evaluations during training", live=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale_low > self.scale_high:
            raise PlanError(
                f"Plan.scale_low must be at most scale_high ({self.scale_high:g}), got {self.scale_low:g}; "
                "lower it or raise scale_high"
            )
        if not self.eval_scales:
            raise PlanError("Plan.eval_scales must name at least one zoom, got none; 1.0 is the image at its own size")

    @property
    def net(self) -> str:
        return "bisenetv2" if self.network == "auto" else self.network

    def while_training(self) -> Self:
        """Evaluations while training pass each image through the network once: six scales and their mirror images are
        17 times the pixels."""
        plan = super().while_training()
        return plan if self.eval_full else plan.replace(eval_scales=(1.0,), eval_flip=False)


BASELINE = Plan(
    epochs=100,
    batch_size=32,
    optimizer="sgd",
    lr=5e-3,
    schedule="poly",
    warmup_epochs=5,
    weight_decay=1e-4,
    crop=384,
    scale_low=0.25,
    scale_high=2.0,
    flip=0.5,
    jitter=0.4,
    eval_every=5,
    eval_scales=ALL_SCALES,
    eval_flip=True,
    eval_full=True,
    feed="workers",
    workers=0,
)
"""The guide's "before": every image decoded again in the main process, no mixed precision, and every fifth epoch an
evaluation with all scales and mirror images. Its warmup counted 1,000 steps as epochs and never ended: here 5."""

GUIDE = BASELINE.replace(batch_size=64, amp="fp16", workers=8)
PRESETS = {
    "guide": GUIDE,
    "guide-low-memory": GUIDE.replace(micro_batch_size=32),
    "guide-extreme": GUIDE.replace(batch_size=128, workers=16, prefetch=4),
}
"""The guide's three sets: fast, little memory (32 images accumulated twice), and extreme."""

PLAN = BASELINE.replace(
    lr_rule="linear",
    amp="bf16",
    channels_last=True,
    eval_every=1,
    eval_full=False,
    eval_scales=(1.0,),
    eval_flip=False,
    feed="auto",
    workers=8,
    prefetch=2,
)
"""For a GPU with bfloat16: the reference's recipe (SGD with momentum, heads at ten times the lr, warmup, poly), and
evaluations in a single pass. `nb.advise` fits it to the machine and the data."""


def suggest(card: Card, accelerator: str) -> dict[str, tuple[Any, str]]:
    """The task's settings for a machine: field → (value, reason). For a GPU, where nothing was measured, the
    reference's; for a CPU measured on one core of a Xeon (AVX-512) with the 80 + 30 street scenes of CamVid."""
    height, width = card.options["size"]
    if accelerator == "cuda":
        batch = at_most(min(32, max(8, card.splits["train"] // 20)), card)
        crop = min(384, max(32, min(height, width) // 32 * 32))
        return {
            "network": ("bisenetv2", "the original network: a GPU is fast enough for it"),
            "batch_size": (batch, f"the guide's 32, less for a small set: 20 steps per epoch, {THUMB}"),
            "crop": (crop, f"the guide's 384, or the multiple of 32 that fits into the images, {THUMB}"),
            **course(card, 100_000, batch, f"100,000 images in all, {THUMB}"),
            **recipe("bisenetv2", batch),
        }
    batch, images = at_most(8, card), round(SECONDS / (height * width * PIXEL))
    zoom = "a smaller zoom leaves little of a small image; 0.75 to 1.5 is as good at first (measured)"
    return {
        "network": ("slim", "a step takes a sixth of the time of the original network's (measured)"),
        "batch_size": (batch, f"many small steps for a small set, {THUMB}; {TWICE}"),
        "crop": (None, "images small enough for a CPU, whole; crops of half their area learn no worse (measured)"),
        "scale_low": (0.5, zoom),
        **course(card, images, batch, f"{images:,} images in all, {SECONDS / 60:.0f} minutes on one core (measured)"),
        **recipe("slim", batch),
        "channels_last": (True, "12 % less time per step on a CPU (measured)"),
    }


def recipe(network: str, batch: int) -> dict[str, tuple[Any, str]]:
    """What each network learns well with, at a batch size."""
    if network == "slim":
        why = "CamVid at 120 × 160, 90 CPU seconds: mIoU 0.49; with lr 5e-3 0.47, 2e-3 0.45; with SGD 0.42 (measured)"
        # at 180 × 240, 25 to 37 CPU minutes: 0.568, with 5e-3 0.547
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
    """How long to train and to warm up, and when to evaluate, for this many images shown in all."""
    epochs = epochs_for(card, images, FEWEST, MOST)
    why += "" if FEWEST < epochs < MOST else f", but from {FEWEST} to {MOST:,} epochs"
    warmup = round(min(epochs / 10, 1000 * batch / max(card.splits["train"], 1)), 1)
    return {
        "epochs": (epochs, why),
        "warmup_epochs": (warmup, "the guide's 1,000 steps, but no more than a tenth of the run"),
        "eval_every": (max(1, epochs // 100), "about 100 evaluations in a run, each in a single pass"),
    }


def with_network(plan: Plan, card: Card | Pack, network: str) -> Plan:
    """An advised plan for another network than the advised one; raises PlanError if there is none of that name."""
    named = plan.replace(network=network)
    return named.replace(**{name: value for name, (value, _) in recipe(named.net, plan.batch_size).items()})
