"""The plans of segmentation: the guide's before, the recommended one, and what to change for other machines."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from nbtools.data import Card, Pack
from nbtools.errors import PlanError
from nbtools.train import plan

THUMB = "rule of thumb"
ALL_SCALES = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)  # the reference's (CoinCheung/BiSeNet, bisenetv2_city.py)

SECONDS = 1800.0  # of training on one CPU core that a plan is advised for
PIXEL = (
    0.6e-6  # seconds that slim takes a pixel of a picture, all in all, on one core (measured: 0.5, beside others 0.7)
)


@dataclass(frozen=True)
class Plan(plan.Plan):
    """The knobs of segmentation, beside those of every plan."""

    network: str = plan.knob(
        "auto",
        "bisenetv2: the guide's; slim: the same with few channels, for CPUs; auto: bisenetv2",
        choices=("auto", "bisenetv2", "slim"),
    )
    dropout: float | None = plan.knob(None, "in the heads; None: the network's own, 0.1", least=0, most=0.9)
    crop: int | None = plan.knob(
        None,
        "height and width of training crops, best multiples of 32; None: the whole picture",
        least=32,
        unit="px",
        live=True,
    )
    scale_low: float = plan.knob(
        1.0, "augmentation: the least zoom of a training picture", least=0.25, most=4, live=True
    )
    scale_high: float = plan.knob(
        1.0, "augmentation: the largest zoom of a training picture", least=0.25, most=4, live=True
    )
    flip: float = plan.knob(0.0, "augmentation: chance of a left-right mirror image", least=0, most=1, live=True)
    jitter: float = plan.knob(
        0.0, "augmentation: brightness, contrast and saturation times 1 ± this", least=0, most=0.9, live=True
    )
    ohem_threshold: float = plan.knob(
        0.7, "pixels count whose class is given less than this probability", above=0, most=1, live=True
    )
    ohem_least: float = plan.knob(
        1 / 16, "share of a picture's pixels, the hardest, that counts in any case", above=0, most=1, live=True
    )
    aux_weight: float = plan.knob(1.0, "weight of each auxiliary head in the loss; 0: they learn nothing", least=0)
    edge_factor: float = plan.knob(2.0, "weight of the boundary term in the loss; 0: none", least=0, live=True)
    edge_weight: float = plan.knob(
        10.0, "what a pixel on a boundary weighs in that term, against 1 far off", least=1, live=True
    )
    edge_width: float = plan.knob(
        2.0, "distance from a boundary at which closeness has fallen to 1/e", above=0, unit="px", live=True
    )
    edge_threshold: float = plan.knob(0.3, "closeness below this counts as none", least=0, most=1, live=True)
    head_lr: float = plan.knob(10.0, "lr of the heads, times that of the rest", above=0)
    eval_scales: tuple[float, ...] = plan.knob(
        (1.0,), "zooms whose answers are averaged in evaluation", above=0, most=4, live=True
    )
    eval_flip: bool = plan.knob(False, "average with the answer to the mirror image, too: twice the time", live=True)
    eval_window: int | None = plan.knob(
        None,
        "side of windows that an evaluation slides over a picture; None: all of it at once",
        least=32,
        unit="px",
        live=True,
    )
    eval_full: bool = plan.knob(False, "all scales and mirror images in the evaluations while training, too", live=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale_low > self.scale_high:
            raise PlanError(
                f"Plan.scale_low must be ≤ scale_high ({self.scale_high:g}), got {self.scale_low:g}; "
                "lower it or raise scale_high"
            )
        if not self.eval_scales:
            raise PlanError("Plan.eval_scales must name at least one zoom, got none; 1.0 is the picture as it is")

    def while_training(self) -> Self:
        """Evaluations amid training look once at each picture, as it is: six scales and their mirror images are 17
        times the pixels."""
        plan = super().while_training()
        return plan if self.eval_full else plan.replace(eval_scales=(1.0,), eval_flip=False)


def network_of(plan: Plan) -> str:
    """The network of a plan."""
    return "bisenetv2" if plan.network == "auto" else plan.network


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
"""The guide's "before": every picture decoded again in the main process, no mixed precision, and every fifth epoch an
evaluation with all scales and mirror images. Its warmup counted 1,000 steps of epochs, and never ended: here 5."""

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
"""For a GPU with bfloat16: the reference's recipe (SGD with momentum, heads ten times the lr, warmup, poly), and
evaluations that take one look at a picture. `nb.advise` fits it to the machine and the data."""


def suggest(card: Card, accelerator: str) -> dict[str, tuple[Any, str]]:
    """The task's knobs for a machine: field → (value, reason)."""
    return on_gpu(card) if accelerator == "cuda" else on_cpu(card)


def on_gpu(card: Card) -> dict[str, tuple[Any, str]]:
    """The reference's recipe, fitted to the pictures. No GPU was at hand."""
    batch = at_most(min(32, max(8, card.splits["train"] // 20)), card)
    crop = min(384, max(32, min(card.options["size"]) // 32 * 32))
    return {
        "network": ("bisenetv2", "the guide's own: a GPU has time for it"),
        "batch_size": (batch, f"the guide's 32, less for a small set: 20 steps an epoch, {THUMB}"),
        "crop": (crop, f"the guide's 384, or the multiple of 32 that the pictures hold, {THUMB}"),
        **course(card, 100_000, batch, f"100,000 pictures in all, {THUMB}"),
        **recipe("bisenetv2", batch),
    }


def on_cpu(card: Card) -> dict[str, tuple[Any, str]]:
    """Measured on one core of a Xeon (AVX-512) with the 80 + 30 street scenes of CamVid."""
    height, width = card.options["size"]
    batch, pictures = at_most(8, card), round(SECONDS / (height * width * PIXEL))
    return {
        "network": ("slim", "a step takes a sixth of the time of the guide's (measured)"),
        "batch_size": (batch, f"many small steps for a small set, {THUMB}"),
        "crop": (None, "pictures small enough for a CPU, whole; crops of half their area learn no worse (measured)"),
        "scale_low": (
            0.5,
            "below it little is left of a small picture; from 0.75 to 1.5 is as good at first (measured)",
        ),
        **course(
            card, pictures, batch, f"{pictures:,} pictures in all, {SECONDS / 60:.0f} minutes on one core (measured)"
        ),
        **recipe("slim", batch),
        "channels_last": (True, "12 % less time a step on a CPU (measured)"),
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
            "head_lr": (1.0, "AdamW's steps are of one size everywhere"),
        }
    return {
        "optimizer": ("sgd", "the reference's, with momentum 0.9"),
        "lr": (
            float(f"{5e-3 * batch / 16:.3g}"),
            "the reference's 5e-3 at batch 16, by the linear rule (arXiv 1706.02677)",
        ),
        "lr_rule": ("linear", "SGD's, arXiv 1706.02677"),
        "weight_decay": (5e-4, "the reference's; norms and biases have none"),
        "head_lr": (10.0, "the reference's"),
    }


def course(card: Card, pictures: int, batch: int, why: str) -> dict[str, tuple[Any, str]]:
    """How long to train and to warm up, and when to evaluate, for so many pictures shown in all."""
    train = max(card.splits["train"], 1)
    epochs = min(1000, max(10, round(pictures / train)))
    why += "" if 10 < epochs < 1000 else ", but from 10 to 1,000 epochs"
    warmup = round(min(epochs / 10, 1000 * batch / train), 1)
    return {
        "epochs": (epochs, why),
        "warmup_epochs": (warmup, "the guide's 1,000 steps, but no more than a tenth of the run"),
        "eval_every": (max(1, epochs // 100), "about 100 evaluations in a run, of one look at each picture"),
    }


def with_network(plan: Plan, card: Card | Pack, network: str) -> Plan:
    """An advised plan for the network that a person names instead; raises PlanError for one that there is not."""
    named = plan.replace(network=network)
    return named.replace(**{name: value for name, (value, _) in recipe(network_of(named), plan.batch_size).items()})


def at_most(batch: int, card: Card) -> int:
    return min(batch, max(card.splits["train"], 1))
