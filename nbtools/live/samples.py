"""Samples with the model's answers: which ones, chosen while it trains; HTML for the live view, text for a terminal and
the picture that stays."""

from __future__ import annotations

import base64
import io
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from nbtools.data import Pack, collate
from nbtools.errors import TrainError
from nbtools.live.chart import GREEN, VERMILLION
from nbtools.show import columns, padded, plain
from nbtools.train import TrainState, evaluation

SAMPLES, POOL = 8, 64  # shown in the live picture; of which the worst are chosen
COST = 0.002  # share of the time that they may take
PATIENCE = 0.5  # seconds at most to look for the worst: the next step, or a stop, waits for it
FIRST, WORST = "first", "worst"
WIDTH, HEIGHT = 200, 160  # px that a sample is wide, and high at most
LONG, LINE_HEIGHT = 5, 48  # a line of text: wider than this many times its height; px that it is high
LEAST = 160  # px of a card, so that a short line's text has room
SHARP = 2  # pixels a px
SHOWN = 4  # samples in a terminal
TRUTH, PREDICTED = "truth", "predicted"
LABEL, INDENT = len(PREDICTED) + 1, 66  # letters in a text, and px in a card, before a truth and a prediction

STYLE = f"""
.nbt-cards{{display:flex;flex-wrap:wrap;gap:12px 16px;padding:2px 2px 8px}}
.nbt-cards figure{{margin:0;max-width:100%}}
.nbt-cards img{{display:block;max-width:100%;height:auto;border-radius:2px;margin:0 0 3px}}
.nbt-cards div{{font:13px/18px ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;overflow-wrap:anywhere;
 padding-left:{INDENT}px;text-indent:-{INDENT}px}}
.nbt-cards div>span{{display:inline-block;width:{INDENT}px;text-indent:0;opacity:.6;font-size:11px}}
.nbt-cards u{{color:{VERMILLION};font-weight:700;text-decoration:underline 2px;text-underline-offset:2px}}
.nbt-cards b{{color:{GREEN};margin-left:6px}}
"""


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

    def pairs(self) -> list[tuple[str, str]]:
        """(character, what was read for it): "" if nothing was read, or nothing was to be read."""
        if self.whole or len(self.truth) == len(self.predicted):
            return [(self.truth, self.predicted)] if self.whole else [*zip(self.truth, self.predicted, strict=True)]
        return aligned(self.truth, self.predicted)


def aligned(truth: str, predicted: str) -> list[tuple[str, str]]:
    """Return (character, what was read for it) of an alignment with the fewest edits."""
    rows = [[*range(len(predicted) + 1)]]  # rows[i][j]: edits from truth[:i] to predicted[:j]
    for i, a in enumerate(truth, 1):
        row = [i]
        for j, b in enumerate(predicted, 1):
            row.append(min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (a != b)))
        rows.append(row)
    i, j, pairs = len(truth), len(predicted), []
    while i or j:
        if i and j and rows[i][j] == rows[i - 1][j - 1] + (truth[i - 1] != predicted[j - 1]):
            i, j = i - 1, j - 1
            pairs.append((truth[i], predicted[j]))
        elif i and rows[i][j] == rows[i - 1][j] + 1:
            i -= 1
            pairs.append((truth[i], ""))
        else:
            j -= 1
            pairs.append(("", predicted[j]))
    return pairs[::-1]


class Previews:
    """A few samples of the validation split with the network's current answers; none if the task has no `preview`.

    which: first, the same ones each time, evenly spaced over the split; worst, those of the highest loss among POOL
    such ones; or ids of the pack, see `chosen`. asked: what the user has chosen since.
    """

    def __init__(self, state: TrainState, pack: Pack, which: str | Sequence[int] = FIRST):
        self.state, self.pack, self.which = state, pack, which
        self.asked: str | Sequence[int] | None = None
        ids = pack.ids("val") if len(pack.ids("val")) else pack.ids("train")
        self.ids = [int(i) for i in ids] if state.task.preview is not None else []
        self.next = 0.0

    def due(self) -> bool:
        """Whether another update costs less than its share of the time."""
        return bool(self.ids) and time.monotonic() >= self.next

    def now(self) -> list[Preview]:
        """The samples, and the answers of the weights that evaluation uses."""
        if not self.ids:
            return []
        start, state = time.monotonic(), self.state
        ids = self.worst() if self.which == WORST else spread(self.ids, SAMPLES) if self.which == FIRST else self.which
        plan = state.applied.while_training()
        _, outputs = evaluation.forward(state.task, state.evaluated, self.raw(ids), plan, state.device)
        answers = state.task.decode(outputs, state.card)
        found = [Preview(*state.task.preview(self.pack, i, a)) for i, a in zip(ids, answers, strict=True)]
        end = time.monotonic()
        self.next = end + (end - start) / COST
        return found

    def worst(self) -> list[int]:
        """Those of the highest loss, the highest first; of as many as PATIENCE lasts for."""
        end, state = time.monotonic() + PATIENCE, self.state
        pool = [int(i) for i in np.random.default_rng(0).permutation(spread(self.ids, POOL))]
        one_by_one = (self.raw([i]) for k, i in enumerate(pool) if k < SAMPLES or time.monotonic() < end)
        losses = evaluation.losses(state.task, state.evaluated, one_by_one, state.applied, state.device)
        return [pool[k] for k in np.argsort(-losses, kind="stable")[:SAMPLES]]

    def raw(self, ids: Sequence[Any]) -> dict[str, Tensor]:
        batch = collate([self.pack.sample(int(i)) for i in ids], self.pack.columns)
        batch["id"] = torch.tensor([int(i) for i in ids])
        return {name: tensor.to(self.state.device) for name, tensor in batch.items()}


def chosen(which: Any, pack: Pack) -> str | list[int]:
    """FIRST, WORST or ids of the pack, of which SAMPLES can be shown. Raises TrainError for anything else."""
    if isinstance(which, str) and which in (FIRST, WORST):
        return which
    ids: list[Any] = list(which) if isinstance(which, Iterable) else []
    if not ids or not all(isinstance(i, (int, np.integer)) for i in ids):
        raise TrainError(f"samples must be {FIRST!r}, {WORST!r} or a list of ids of the pack, got {which!r}")
    if unknown := [i for i in ids if not 0 <= i < len(pack)]:
        raise TrainError(f"sample {unknown[0]} is not in the pack; choose ids from 0 to {len(pack) - 1:,}")
    return [int(i) for i in ids[:SAMPLES]]


def spread(ids: Sequence[int], count: int) -> list[int]:
    """At most so many of them, evenly spaced."""
    return [ids[k] for k in np.unique(np.linspace(0, len(ids) - 1, count).round().astype(int))]


class Choice:
    """Which samples are shown, as controls in a row, `box`. chosen: called with it after each change."""

    def __init__(self, which: str | Sequence[int], chosen: Callable[[str | Sequence[int]], object]):
        from ipywidgets import Dropdown, HBox, Layout, Text

        free, given = {"description_width": "initial"}, not isinstance(which, str)
        options = [("the first", FIRST), ("the worst", WORST), ("chosen", "")]
        narrow = Layout(width="auto", margin="0 16px 0 0")
        self.kind = Dropdown(
            options=options, value="" if given else which, description="samples", style=free, layout=narrow
        )
        self.numbers = Text(  # a default layout that is replaced would stay in the kernel
            value=", ".join(map(str, which)) if given else "",
            placeholder="ids, as 12, 40, 77",
            continuous_update=False,
            layout=Layout(width="240px", visibility="visible" if given else "hidden"),
        )
        self.box, self.chosen = HBox([self.kind, self.numbers]), chosen
        for widget in (self.kind, self.numbers):
            widget.observe(self.read, names="value")

    def read(self, _: Any) -> None:
        kind, ids = str(self.kind.value), [int(digits) for digits in re.findall(r"\d+", self.numbers.value)]
        self.numbers.layout.visibility = "hidden" if kind else "visible"
        if kind or ids:
            self.chosen(kind or ids[:SAMPLES])


def sizes(images: Sequence[np.ndarray]) -> list[tuple[int, int]]:
    """(width, height) in px at which images are shown: equally wide, or equally high where they are lines of text."""
    found = []
    for height, width in (image.shape[:2] for image in images):
        scale = LINE_HEIGHT / height if lines(images) else min(WIDTH / width, HEIGHT / height)
        found.append((max(1, round(width * scale)), max(1, round(height * scale))))
    return found


def lines(images: Sequence[np.ndarray]) -> bool:
    """Whether one is a long line of text: the short ones among them are lines too."""
    return any(image.shape[1] > LONG * image.shape[0] for image in images)


def thumbnail(image: np.ndarray, size: tuple[int, int]) -> bytes:
    """A PNG with no more pixels than a screen shows; a small image keeps its own, the screen enlarges it."""
    from PIL import Image

    width, height = (SHARP * side for side in size)
    made = Image.fromarray(image)
    if made.width > width or made.height > height:
        made = made.resize((min(width, made.width), min(height, made.height)), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    made.save(stream, "png", compress_level=3)  # half the time of 6 for a tenth more bytes, on six lines 1,238 wide
    return stream.getvalue()


def html(previews: Sequence[Preview]) -> str:
    """The samples as cards, wrong characters underlined; a page needs STYLE once. All text is escaped."""
    cards = "".join(map(card, previews, sizes([preview.image for preview in previews])))
    return f'<div class="nbt-cards">{cards}</div>' if previews else ""


def card(preview: Preview, size: tuple[int, int]) -> str:
    data = base64.b64encode(thumbnail(preview.image, size)).decode()
    tick = " <b>✓</b>" if preview.right else ""
    texts = (TRUTH, preview.truth), (PREDICTED, preview.predicted)
    alt = "; ".join(f"{label}: {text}" for label, text in texts if text)
    lines = "".join(
        f"<div><span>{label}</span>{marked or '–'}{tick if label == PREDICTED else ''}</div>"
        for label, marked in underlined(preview)
    )
    return (
        f'<figure style="width:{max(size[0], LEAST)}px"><img src="data:image/png;base64,{data}" alt="{escape(alt)}" '
        f'width="{size[0]}" height="{size[1]}"/>{lines}</figure>'
    )


def underlined(preview: Preview) -> Iterator[tuple[str, str]]:
    """(label, HTML) of the truth, where what was not read is underlined, and of the prediction, where what was misread
    is; without a truth, nothing is wrong."""
    if not preview.truth:
        if preview.predicted:
            yield PREDICTED, escape(preview.predicted)
        return
    groups = [(wrong, list(pairs)) for wrong, pairs in groupby(preview.pairs(), lambda pair: pair[0] != pair[1])]
    for side, label in enumerate((TRUTH, PREDICTED)):
        parts = [(escape("".join(pair[side] for pair in pairs)), wrong) for wrong, pairs in groups]
        yield label, "".join(f"<u>{part}</u>" if wrong and part else part for part, wrong in parts)


def text(previews: Sequence[Preview], room: int) -> list[str]:
    """The first samples in lines of at most so many columns, control characters escaped; nothing of samples without a
    text."""
    return [line for preview in previews[:SHOWN] for line in block(preview, room)]


def block(preview: Preview, room: int, write: Callable[[str], str] = plain) -> list[str]:
    """The lines of one sample: truth, prediction and marks below the wrong characters, repeated where they are longer
    than the room. write: how a character is written."""
    if not preview.truth:
        return [f"{PREDICTED} " + "".join(map(write, preview.predicted))] if preview.predicted else []
    found, rows, used = [], [[]], 0
    for a, b in preview.pairs():
        pair = ("".join(map(write, a)), "".join(map(write, b)))
        wide = max(map(columns, pair))
        if rows[-1] and used + wide > room - LABEL - 2:
            rows.append([])
            used = 0
        rows[-1].append((pair, wide))
        used += wide
    for row in rows:
        lines = [each.ljust(LABEL) for each in (TRUTH, PREDICTED, "")]
        for pair, wide in row:
            for i, part in enumerate((*pair, "^" * wide if pair[0] != pair[1] else "")):
                lines[i] += padded(part, wide)
        found += [line.rstrip() for line in lines if line.strip()]
    return [*found[:-1], found[-1] + (" ✓" if preview.right else "")]
