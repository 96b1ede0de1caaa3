"""How signs are trained: plans, the network, batches, loss, metrics, decoding.

B clips, T frames, P = 78 points, D = 2048 numbers a frame, G glosses, C categories.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.nn import functional as F

from nbtools.data import Card, Draws, Pack
from nbtools.errors import PlanError
from nbtools.tasks.common.metrics import THUMB, at_most, bucket_knob, epochs_for
from nbtools.tasks.sign.keypoints import Keypoints, prepare_clips
from nbtools.tasks.sign.networks import Gru, Outputs, Transformer
from nbtools.train import Batch, Pair, Tensors, knob
from nbtools.train import Plan as BasePlan

BEST = "gloss_accuracy"
READS = {"transformer": ("x", "mask"), "gru": ("features",)}
FRAMES = ("none", "body", "hands")  # of reference, of coordinates
SHOWN = 480  # clips of a gloss to train on, all epochs together: more taught ten signs nothing (measured)


@dataclass(frozen=True)
class Plan(BasePlan):
    """The settings of signs, in addition to those of every plan."""

    network: str = knob("auto", "transformer: on keypoints, if any; gru: on features", choices=("auto", *READS))
    alpha: float = knob(0.5, "weight of the gloss in the loss", least=0)
    beta: float = knob(0.5, "weight of the category in the loss", least=0)
    label_smoothing: float = knob(0.0, "share of a target spread over all classes", least=0, most=0.99)
    dropout: float | None = knob(None, "dropout; None: the network's (Transformer 0.1, GRU 0.3)", least=0, most=0.99)
    normalise: str = knob("hands", "points relative to frame; shoulders; shoulders, fingers to wrists", choices=FRAMES)
    bucket: int = bucket_knob("frames")
    time_warp: float = knob(0.0, "augmentation: change of length and pace; 1: up to 30 %", least=0, most=1)
    time_crop: float = knob(0.0, "augmentation: largest share of a clip cut off at its ends", least=0, most=0.9)
    mirror: float = knob(0.0, "augmentation: chance of mirroring; 0 if left and right are two signs", least=0, most=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.alpha == self.beta == 0:
            raise PlanError("Plan.alpha and Plan.beta must not both be 0, or nothing is learned; raise one of them")


BASELINE = Plan(epochs=20, batch_size=32, optimizer="adam", lr=1e-4, schedule="constant", normalise="none")
BASELINE = BASELINE.replace(feed="workers", workers=0)
"""The guide's "before": its defaults, every clip decompressed again in the main process, no mixed precision."""

FAST = BASELINE.replace(batch_size=64, amp="fp16", workers=8)
GUIDE = FAST.replace(epochs=50, micro_batch_size=32, lr=3e-4, weight_decay=1e-4, clip_norm=1.0, schedule="cosine")
GPUS = GUIDE.replace(epochs=100, batch_size=128, micro_batch_size=64, lr=5e-5, schedule="plateau")
LITTLE = FAST.replace(epochs=40, network="gru", micro_batch_size=16, schedule="plateau", patience=3)
PRESETS = {
    "guide": GUIDE.replace(early_stop=10),
    "guide-gpus": GPUS.replace(early_stop=15),
    "guide-low-memory": LITTLE.replace(early_stop=8),
    "guide-cpu": BASELINE.replace(epochs=30, batch_size=8, schedule="plateau"),
    "guide-quick": BASELINE.replace(epochs=10, batch_size=16),
}
"""The guide's recommended sets. Its batch of 32, accumulated twice, is a batch of 64 in two passes."""

PLAN = Plan(epochs=100, batch_size=32, lr=5e-4, lr_rule="sqrt", warmup_epochs=10, weight_decay=0.05, clip_norm=1.0)
PLAN = PLAN.replace(amp="bf16", workers=8, time_warp=0.5, time_crop=0.2, mirror=0.5)
"""For a GPU with bfloat16. `nb.advise` fits it to the machine and the data."""


def suggest(card: Card, accelerator: str) -> dict[str, tuple[Any, str]]:
    if network_of(PLAN, card.columns) == "gru":
        return for_gru(card)
    settings = for_transformer(card)
    if accelerator == "cuda":
        small = f"the guide's 32, or all there are: kernel launches limit a step, {THUMB}"
        settings["batch_size"] = at_most(32, card), small
        settings["lr"] = 7e-4, f"the CPU's 5e-4 at batch 16 by the sqrt rule, {THUMB}"
        settings["bucket"] = 16, f"so that compiled code sees few different lengths, {THUMB}"
    return settings


def for_transformer(card: Card) -> dict[str, tuple[Any, str]]:
    """Measured on one core of a Xeon (AVX-512) with 160 clips of ten signs, 30 frames each; twice the batch on one
    thread of a two-core EPYC: 1.02× (0.84–1.38, n = 7) the clips per second."""
    epochs = epochs_for(card, SHOWN * len(card.classes), least=10)
    return {
        "network": ("transformer", "there are keypoints"),
        "batch_size": (at_most(16, card), "many small steps; twice the batch is 1.02× as fast (measured on our CPU)"),
        "lr": (5e-4, "with warmup and cosine; twice that is no better (measured on our CPU)"),
        "epochs": (epochs, f"each gloss is seen about {SHOWN} times, in 10 to 200 epochs, {THUMB}"),
        "warmup_epochs": (round(epochs * 0.1, 1), f"10 % of the run, {THUMB}"),
        "normalise": ("hands", "trained on 40 clips: 76 % of 160 others right, 59 % with body (measured on our CPU)"),
        "mirror": (0.5, "some signers lead with the other hand: 76 % → 91 % right (measured on our CPU)"),
        "time_warp": (0.5, "with cropping: 76 % → 81 % right (measured on our CPU)"),
        "time_crop": (0.2, f"where a recording starts and ends is arbitrary, {THUMB}"),
    }


def for_gru(card: Card) -> dict[str, tuple[Any, str]]:
    """Measured with 480 demo clips of 12 signs: 45–68 % of unseen signers' in 60 epochs (three seeds)."""
    epochs = epochs_for(card, 5 * SHOWN * len(card.classes), least=10)
    return {
        "network": ("gru", "reads features"),
        "batch_size": (at_most(32, card), "the guide's 32, or all there are"),
        "lr": (3e-3, "with warmup and cosine; 1e-2 reached 66 %, this 70 % of demo clips (measured on our CPU)"),
        "epochs": (epochs, f"each gloss is seen about {5 * SHOWN} times, {THUMB}: small networks need many steps"),
        "warmup_epochs": (round(epochs * 0.1, 1), f"10 % of the run, {THUMB}"),
        "weight_decay": (0.0, f"16 and 12 units are too few to overfit, {THUMB}"),
    }


def with_network(plan: Plan, card: Card | Pack, network: str) -> Plan:
    card = card.reading(["features"]).card if isinstance(card, Pack) else card
    settings = {name: value for name, (value, _) in for_gru(card).items()} if network == "gru" else {}
    return plan.replace(**{**settings, "network": network})


def network_of(plan: Plan, columns: Collection[str]) -> str:
    return plan.network if plan.network != "auto" else "transformer" if "x" in columns else "gru"


def reads_of(plan: Plan, columns: Collection[str]) -> tuple[str, ...]:
    """Return the columns that the plan's network reads. Raises PlanError where they are missing."""
    name = network_of(plan, columns)
    if (own := READS[name][0]) not in columns:
        rule = f'Plan.network = "{name}" reads {own!r}, and this data has {", ".join(sorted(columns))}'
        raise PlanError(f"{rule}; choose another network, or pack clips that hold it (kp_key, feature_key)")
    return READS[name]


def model(card: Card | Pack, plan: Plan) -> Transformer | Gru:
    """Return the network of a plan for a data set. Raises PlanError if that lacks what it reads."""
    first, *_ = reads_of(plan, card.columns)
    sizes = card.columns[first].shape[-1], len(card.classes), len(card.options["categories"])
    if first == "features":
        return Gru(*sizes, dropout=plan.dropout)
    network = Transformer(*sizes, dropout=plan.dropout)
    network.recompute = plan.checkpoint_activations
    return network


def part(pack: Pack, plan: Plan) -> Pack:
    """Return the pack as the plan's network reads it: without the other network's column, and the clips that have only
    that. Raises PlanError for one without the network's own column."""
    reads = reads_of(plan, pack.columns)
    made = pack.reading((*reads, "label"))
    if made.columns.keys() == pack.columns.keys():
        return made
    unread = "feature_key" if "x" in reads else "kp_key"
    made = replace(made, card=replace(made.card, options={**made.options, unread: None}))
    return replace(made, raw=made.raw and replace(made.raw, pack=made))  # else its workers would read both columns


def batch(raw: Batch, plan: Plan, draws: Draws | None) -> Batch:
    """Return what the network reads: x (B, T, 156), mask (B, T, P) and x_length, or features (B, T, D) and
    features_length; label (B, 2), gloss and category. Keypoints are augmented given draws."""
    kept = {name: raw[name] for name in ("label", "id") if name in raw}
    if network_of(plan, raw) == "gru":
        return {**kept, "features": raw["features"], "features_length": raw["features_length"]}
    points = raw["x"].unflatten(2, (-1, 2))
    points, seen, lengths = prepare_clips(Keypoints(points, raw["mask"].bool(), raw["x_length"]), plan, draws)
    return {**kept, "x": points.flatten(2), "mask": seen, "x_length": lengths}


def loss(model: Callable[[Batch], Outputs], batch: Batch, plan: Plan) -> tuple[Tensor, int]:
    """Return the sum of alpha · CE(gloss) + beta · CE(category) over the clips, and how many they are."""
    labels, outputs, smoothing = batch["label"], model(batch), plan.label_smoothing
    gloss, category = (
        F.cross_entropy(logits.float(), labels[:, k], reduction="sum", label_smoothing=smoothing)
        for k, logits in enumerate(outputs)
    )
    return plan.alpha * gloss + plan.beta * category, len(labels)


def metrics(outputs: Outputs, batch: Batch) -> dict[str, Pair]:
    """Return gloss_accuracy, cat_accuracy, and top5."""
    (gloss, category), labels = outputs, batch["label"]
    right = {"gloss_accuracy": gloss.argmax(1) == labels[:, 0], "cat_accuracy": category.argmax(1) == labels[:, 1]}
    right["top5"] = (gloss.topk(min(5, gloss.shape[1]), 1).indices == labels[:, :1]).any(1)
    return {name: (each.sum(), len(labels)) for name, each in right.items()}


def decode(outputs: Outputs, card: Card | Pack) -> list[str]:
    return [card.classes[i] for i in outputs[0].argmax(1).tolist()]


def tensors(card: Card | Pack, plan: Plan) -> tuple[Tensors, Tensors]:
    first, *_ = reads_of(plan, card.columns)
    numbers, length = card.columns[first].shape[0], f"{first}_length"
    reads = {first: (("batch", "frames", numbers), first), length: (("batch",), length)}
    if first == "x":
        about = f"x * mask.repeat(2, 2), normalised as {plan.normalise!r} (sign.batch)"
        reads |= {"x": (("batch", "frames", numbers), about), "mask": (("batch", "frames", numbers // 2), "mask")}
    return reads, {
        "gloss": (("batch", len(card.classes)), "argmax: k is classes[k]"),
        "category": (("batch", len(card.options["categories"])), 'argmax: k is options["categories"][k]'),
    }
