"""Samples with the model's answers: which ones, chosen while it trains; HTML for the live view, text for a terminal and
the picture that stays."""

from __future__ import annotations

import base64
import io
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any

import numpy as np
from torch import Tensor

from nbtools.data import Pack, gather
from nbtools.errors import TrainError
from nbtools.show import plain
from nbtools.train import TrainState, evaluation

SAMPLES, POOL = 8, 64  # shown in the live picture; looked through for the worst
COST = 0.002  # share of the time that they may take
PATIENCE = 0.5  # seconds at most to look for the worst: the next step, or a stop, waits for it
FIRST, WORST = "first", "worst"
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
        """Return (character, what was read for it), by place where lengths agree, else by the fewest edits: "" if
        nothing was read, or nothing was to be read."""
        if self.whole:
            return [(self.truth, self.predicted)]
        if len(self.truth) == len(self.predicted):
            return [*zip(self.truth, self.predicted, strict=True)]
        return aligned(self.truth, self.predicted)


def aligned(truth: str, predicted: str) -> list[tuple[str, str]]:
    """Return (character, what was read for it) of an alignment with the fewest edits."""
    row = [(j, [("", c) for c in predicted[:j]]) for j in range(len(predicted) + 1)]  # (edits, pairs) of predicted[:j]
    for a in truth:
        above, row = row, [(row[0][0] + 1, [*row[0][1], (a, "")])]
        for j, b in enumerate(predicted):
            ways = ((above[j], a != b, (a, b)), (above[j + 1], 1, (a, "")), (row[j], 1, ("", b)))
            (edits, pairs), more, pair = min(ways, key=lambda way: way[0][0] + way[1])
            row.append((edits + more, [*pairs, pair]))
    return row[-1][1]


class Previews:
    """A few samples of the validation split with the network's current answers; none if the task has no `preview`.

    which: first, the same ones each time, evenly spaced over the split; worst, those of the highest loss in the last
    evaluation; or ids of the pack, see `chosen`.
    """

    def __init__(self, state: TrainState, pack: Pack, which: str | Sequence[int] = FIRST):
        self.state, self.pack, self.which = state, pack, which
        ids = pack.ids("val") if len(pack.ids("val")) else pack.ids("train")
        self.ids = [int(i) for i in ids] if state.task.preview is not None else []
        self.next = 0.0

    def due(self) -> bool:
        """Return whether another update costs less than its share of the time."""
        return bool(self.ids) and time.monotonic() >= self.next

    def now(self) -> list[Preview]:
        """Return the samples, and the answers of the weights that evaluation uses."""
        if not self.ids:
            return []
        start, state = time.monotonic(), self.state
        ids = spread(self.ids, SAMPLES) if isinstance(self.which, str) else self.which
        ids = self.worst() if self.which == WORST else ids
        plan = state.applied.while_training()
        _, outputs = evaluation.forward(state.task, state.evaluated, self.raw(ids), plan, state.device)
        answers = state.task.decode(outputs, state.card)
        previews = [Preview(*state.task.preview(self.pack, i, a)) for i, a in zip(ids, answers, strict=True)]
        end = time.monotonic()
        self.next = end + (end - start) / COST
        return previews

    def worst(self) -> list[int]:
        """Return those of the highest loss, the highest first, of the worst batches of the last evaluation, else of
        samples all over the split; as many as PATIENCE lasts for."""
        end, state = time.monotonic() + PATIENCE, self.state
        pool = evaluation.worst_first(state.last_evaluation)[:POOL] or spread(self.ids, POOL)
        one_by_one = (self.raw([i]) for k, i in enumerate(pool) if k < SAMPLES or time.monotonic() < end)
        losses = evaluation.losses(state.task, state.evaluated, one_by_one, state.applied, state.device)
        return [pool[k] for k in np.argsort(-losses, kind="stable")[:SAMPLES]]

    def raw(self, ids: Sequence[int]) -> dict[str, Tensor]:
        return {name: tensor.to(self.state.device) for name, tensor in gather(self.pack, np.array(ids)).items()}


def chosen(which: Any, pack: Pack) -> str | list[int]:
    """Return FIRST, WORST or ids of the pack, of which SAMPLES can be shown. Raises TrainError for anything else."""
    if isinstance(which, str) and which in (FIRST, WORST):
        return which
    ids: list[Any] = list(which) if isinstance(which, Iterable) else []
    if not ids or not all(isinstance(i, (int, np.integer)) and 0 <= i < len(pack) for i in ids):
        rule = f"samples must be {FIRST!r}, {WORST!r} or a list of ids of the pack"
        raise TrainError(f"{rule}, got {which!r}; its ids are 0 to {len(pack) - 1:,}")
    return [int(i) for i in ids[:SAMPLES]]


def spread(ids: Sequence[int], count: int) -> list[int]:
    """Return at most so many of them, evenly spaced."""
    return [ids[k] for k in np.unique(np.linspace(0, len(ids) - 1, count).round().astype(int))]


def long(images: Sequence[np.ndarray]) -> bool:
    """Return whether one is a long line of text: the short ones among them are lines too."""
    return any(image.shape[1] > LONG * image.shape[0] for image in images)


def html(previews: Sequence[Preview]) -> str:
    """Return the samples as cards, equally wide, or equally high where they are lines of text; for a page with
    live.css. All text is escaped."""
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
