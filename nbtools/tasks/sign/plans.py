"""The plans of signs: the guide's "before", the recommended one, and the changes for other machines and networks."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from nbtools.data import Card, Pack
from nbtools.errors import PlanError
from nbtools.tasks.common.plans import THUMB, at_most, bucket_knob, epochs_for
from nbtools.train import Plan as BasePlan
from nbtools.train import knob

SHOWN = 480  # clips of a gloss to train on, all epochs together: more taught ten signs nothing (measured)


@dataclass(frozen=True)
class Plan(BasePlan):
    """The settings of signs, in addition to those of every plan."""

    network: str = knob(
        "auto",
        "transformer: on keypoints; gru: on ready-made features; auto: transformer if there are keypoints",
        choices=("auto", "transformer", "gru"),
    )
    alpha: float = knob(0.5, "weight of the gloss in the loss", least=0)
    beta: float = knob(0.5, "weight of the category in the loss", least=0)
    label_smoothing: float = knob(0.0, "share of a target spread over all classes", least=0, most=0.99)
    class_weights: str = knob(
        "none",
        "class weights in the loss: balanced: inverse frequency in the training clips; sqrt: its square root",
        choices=("none", "balanced", "sqrt"),
    )
    dropout: float | None = knob(
        None, "dropout of the network; None: its own (Transformer 0.1, GRU 0.3)", least=0, most=0.99
    )
    normalise: str = knob(
        "hands",
        "coordinates: none: as in the frame; body: relative to the shoulders; hands: also fingers to their wrists",
        choices=("none", "body", "hands"),
    )
    long_clips: str = knob(
        "refuse",
        "clips with more frames than the position table: refuse, or cut into windows",
        choices=("refuse", "windows"),
    )
    bucket: int = bucket_knob("frames")
    time_warp: float = knob(0.0, "augmentation: change of length and pace; 1: up to 30 %", least=0, most=1)
    time_crop: float = knob(0.0, "augmentation: largest share of a clip that is cut off at its ends", least=0, most=0.9)
    mirror: float = knob(
        0.0,
        "augmentation: chance of a left-right mirror image, hands swapped; not if right and left are two signs",
        least=0,
        most=1,
    )
    move: float = knob(
        0.0, "augmentation: rotation, size and shift of the body; 1: up to 0.2 rad, 15 %", least=0, most=3
    )
    drop_points: float = knob(0.0, "augmentation: chance that a point is missing in a clip", least=0, most=0.9)
    drop_hand: float = knob(0.0, "augmentation: chance that a hand is missing for a while", least=0, most=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha == self.beta == 0:
            raise PlanError("Plan.alpha and Plan.beta must not both be 0, or nothing is learned; raise one of them")


def network_of(plan: Plan, columns: Collection[str]) -> str:
    """The network of a plan for data with these columns."""
    return plan.network if plan.network != "auto" else "transformer" if "x" in columns else "gru"


BASELINE = Plan(
    epochs=20,
    batch_size=32,
    optimizer="adam",
    lr=1e-4,
    schedule="constant",
    normalise="none",
    feed="workers",
    workers=0,
)
"""The guide's "before": its defaults, every clip decompressed again in the main process, no mixed precision."""

GUIDE = BASELINE.replace(
    epochs=50,
    batch_size=64,
    micro_batch_size=32,
    lr=3e-4,
    weight_decay=1e-4,
    clip_norm=1.0,
    schedule="cosine",
    early_stop=10,
    amp="fp16",
    workers=8,
)

PRESETS = {
    "guide": GUIDE,
    "guide-gpus": GUIDE.replace(
        epochs=100, batch_size=128, micro_batch_size=64, lr=5e-5, schedule="plateau", early_stop=15
    ),
    "guide-low-memory": GUIDE.replace(
        network="gru",
        epochs=40,
        micro_batch_size=16,
        lr=1e-4,
        weight_decay=0.0,
        clip_norm=None,
        schedule="plateau",
        patience=3,
        early_stop=8,
    ),
    "guide-cpu": BASELINE.replace(epochs=30, batch_size=8, schedule="plateau"),
    "guide-quick": BASELINE.replace(epochs=10, batch_size=16),
}
"""The guide's recommended sets: for one GPU, for several, for little memory, for a CPU, and a quick one. Its batch of
32, accumulated twice, is a batch of 64 in two passes."""

PLAN = Plan(
    epochs=100,
    batch_size=32,
    lr=5e-4,
    lr_rule="sqrt",
    warmup_epochs=10,
    weight_decay=0.05,
    clip_norm=1.0,
    amp="bf16",
    workers=8,
    time_warp=0.5,
    time_crop=0.2,
    mirror=0.5,
)
"""For a GPU with bfloat16: AdamW with warmup, cosine and clipping, fingers relative to their wrists, and augmentation.
`nb.advise` fits it to the machine and the data."""


def suggest(card: Card, accelerator: str) -> dict[str, tuple[Any, str]]:
    """The task's settings for a machine: field → (value, reason)."""
    if network_of(PLAN, card.columns) == "gru":
        return for_gru(card)
    settings = for_transformer(card)
    if accelerator == "cuda":
        small = "the guide's 32, or all there are; kernel launches limit a step"
        settings |= {
            "batch_size": (at_most(32, card), small),
            "lr": (7e-4, f"the CPU's 5e-4 at batch 16 by the sqrt rule, {THUMB}"),
            "bucket": (16, "so that compiled code sees few lengths"),
        }
    return settings


def for_transformer(card: Card) -> dict[str, tuple[Any, str]]:
    """Keypoints. Measured on one core of a Xeon (AVX-512) with 160 clips of ten signs, 30 frames each; twice the batch
    on one thread of a two-core EPYC: 1.02× (0.84–1.38, n = 7) the clips per second."""
    epochs = epochs_for(card, SHOWN * len(card.classes), least=10)
    return {
        "network": ("transformer", "there are keypoints"),
        "batch_size": (at_most(16, card), "many small steps; on a CPU twice as much is 1.02× as fast (measured)"),
        "lr": (5e-4, "with warmup and cosine; twice that is no better (measured)"),
        "epochs": (epochs, f"each gloss is seen about {SHOWN} times, in 10 to 200 epochs"),
        "warmup_epochs": (round(epochs * 0.1, 1), f"10 % of the run, {THUMB}"),
        "normalise": ("hands", "76 % of 160 other clips are right, 59 % by the body alone, from 40 clips (measured)"),
        "mirror": (0.5, "some signers lead with the other hand: 76 % → 91 % of these (measured)"),
        "time_warp": (0.5, "with cropping 76 % → 81 % of these (measured)"),
        "time_crop": (0.2, "where a recording starts and ends is arbitrary"),
    }


def for_gru(card: Card) -> dict[str, tuple[Any, str]]:
    """Features. Measured with 480 demo clips of 12 signs: 45–68 % of unseen signers' in 60 epochs (three seeds)."""
    epochs = epochs_for(card, 5 * SHOWN * len(card.classes), least=10)
    return {
        "network": ("gru", "there are features and no keypoints"),
        "batch_size": (at_most(32, card), "the guide's 32, or all there are"),
        "lr": (3e-3, "with warmup and cosine; with 1e-2 66 % instead of 70 % of earlier demo clips (measured)"),
        "epochs": (
            epochs,
            f"each gloss is seen about {5 * SHOWN} times: a small network needs many steps, and they are quick",
        ),
        "warmup_epochs": (round(epochs * 0.1, 1), f"10 % of the run, {THUMB}"),
        "weight_decay": (0.0, "16 and 12 units are too few to overfit"),
    }


def with_gru(plan: Plan, card: Card | Pack) -> Plan:
    """The plan for the GRU on the same data: the network, and the settings with which it learns better."""
    card = card.reading(["features"]).card if isinstance(card, Pack) else card
    return plan.replace(**{name: value for name, (value, _) in for_gru(card).items()})


def with_network(plan: Plan, card: Card | Pack, network: str) -> Plan:
    """An advised plan for the network that the user names instead. Raises PlanError for one that does not exist."""
    named = plan.replace(network=network)
    return with_gru(named, card) if network == "gru" else named
