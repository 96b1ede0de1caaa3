"""Samples with the model's answers, chosen while it trains; as HTML for the live view, as text for the picture."""

import base64
import io
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from html import escape
from itertools import groupby, zip_longest
from typing import Any

import numpy as np

from nbtools.data import Pack, gather
from nbtools.errors import TrainError
from nbtools.show import plain
from nbtools.train import TrainState, evaluation

SAMPLES, COST = 8, 0.0005  # samples in the live picture; share of the time that they may take
WIDTH, HEIGHT = 200, 160  # px that a sample is wide, and high at most
LONG, LINE_HEIGHT = 5, 48  # a line of text: wider than this many times its height; px that it is high


@dataclass(frozen=True)
class Preview:
    """One sample with its right answer and the model's. image: (H, W) or (H, W, 3 or 4) uint8 of any size. whole:
    answers are names, right or wrong as a whole and not letter by letter."""

    image: np.ndarray
    truth: str = ""
    predicted: str = ""
    whole: bool = False

    @property
    def right(self) -> bool:
        return bool(self.truth) and self.truth == self.predicted

    def answers(self) -> list[tuple[str, str]]:
        """Return (label, text) of the truth and the prediction; nothing of samples without a text."""
        both = [("truth", self.truth), ("predicted", self.predicted)]
        return both if self.truth else [pair for pair in both if pair[1]]

    def pairs(self) -> list[tuple[str, str]]:
        """Return (character, what was read for it, "" for nothing), by place, or by what both have in common."""
        if self.whole:
            return [(self.truth, self.predicted)]
        if len(self.truth) == len(self.predicted):
            return [*zip(self.truth, self.predicted, strict=True)]
        pairs = list[tuple[str, str]]()
        for _, a, b, c, d in SequenceMatcher(None, self.truth, self.predicted, autojunk=False).get_opcodes():
            pairs += zip_longest(self.truth[a:b], self.predicted[c:d], fillvalue="")
        return pairs


class Previews:
    """A few samples with the network's current answers; none if the task has no `preview`. ids: in the pack; None: a
    few evenly spaced over the validation split, the same each time."""

    def __init__(self, state: TrainState, pack: Pack, ids: Sequence[int] | None = None):
        self.state, self.pack, self.next = state, pack, 0.0
        split = pack.ids("val") if len(pack.ids("val")) else pack.ids("train")
        places = np.unique(np.linspace(0, len(split) - 1, SAMPLES).round().astype(int))
        self.ids: Sequence[int] = (split[places].tolist() if ids is None else ids) if state.task.preview else []

    def due(self) -> bool:
        """Return whether another update costs less than its share of the time."""
        return bool(self.ids) and time.monotonic() >= self.next

    def now(self) -> list[Preview]:
        """Return the samples, and the answers of the weights that evaluation uses."""
        if not self.ids:
            return []
        start, state = time.monotonic(), self.state
        raw = {name: tensor.to(state.device) for name, tensor in gather(self.pack, np.array(self.ids)).items()}
        _, outputs = evaluation.forward(state.task, state.evaluated, raw, state.applied.while_training())
        answers = zip(self.ids, state.task.decode(outputs, state.card), strict=True)
        previews = [Preview(*state.task.preview(self.pack, i, answer)) for i, answer in answers]
        self.next = (end := time.monotonic()) + (end - start) / COST
        return previews


def choose_ids(ids: Any, pack: Pack) -> list[int]:
    """Return ids of the pack, as many as can be shown. Raises TrainError for anything else."""
    given: list[Any] = list(ids) if isinstance(ids, Iterable) else []
    if not given or not all(isinstance(i, (int, np.integer)) and 0 <= i < len(pack) for i in given):
        rule = f"samples must be a list of ids of the pack, 0 to {len(pack) - 1:,}"
        raise TrainError(f"{rule}, got {ids!r}; leave it out to see a few from the validation split")
    return [int(i) for i in given[:SAMPLES]]


def long(images: Sequence[np.ndarray]) -> bool:
    """Return whether one is a long line of text: the short ones among them are lines too."""
    return any(image.shape[1] > LONG * image.shape[0] for image in images)


def html(previews: Sequence[Preview]) -> str:
    """Return the samples as escaped cards for a page with live.css, equally wide; those of lines are equally high."""
    lines, cards = long([preview.image for preview in previews]), []
    for preview in previews:
        height, width = preview.image.shape[:2]
        scale = LINE_HEIGHT / height if lines else min(WIDTH / width, HEIGHT / height)
        cards.append(card(preview, max(1, round(width * scale)), max(1, round(height * scale))))
    return f'<div class="nbt-cards">{"".join(cards)}</div>' if cards else ""


def card(preview: Preview, width: int, height: int) -> str:
    """Return a sample with its truth and prediction, in which wrong characters are underlined."""
    from PIL import Image

    image, stream = Image.fromarray(preview.image), io.BytesIO()
    image.thumbnail((2 * width, 2 * height), Image.Resampling.LANCZOS)  # no more pixels than a screen shows
    image.save(stream, "png", compress_level=3)  # half the time of 6 for a tenth more bytes
    groups = [(wrong, [*pairs]) for wrong, pairs in groupby(preview.pairs(), lambda pair: pair[0] != pair[1])]
    texts, tick = [], " <b>✓</b>" * preview.right
    for label, text in preview.answers():
        side, marked = label == "predicted", ""
        for wrong, pairs in groups:
            part = escape("".join(pair[side] for pair in pairs))
            marked += f"<u>{part}</u>" if wrong and part and preview.truth else part
        texts.append(f"<div><span>{label}</span>{marked if text else '–'}{tick * side}</div>")
    source = f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"
    alt = escape("; ".join(f"{label}: {text}" for label, text in preview.answers()))
    picture = f'<img src="{source}" alt="{alt}" width="{width}" height="{height}"/>'
    return f'<figure style="width:{width}px">{picture}{"".join(texts)}</figure>'


def text(preview: Preview, room: int) -> list[str]:
    """Return truth and prediction in lines of at most so many columns, control characters escaped."""
    lines = [f"{label:<10}{plain(words)}" for label, words in preview.answers()]
    lines = [line if len(line) < room - 2 else f"{line[: room - 3]}…" for line in lines]
    return [*lines[:-1], f"{lines[-1]} ✓"] if preview.right else lines
