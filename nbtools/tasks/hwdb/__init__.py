"""Handwritten lines of text: pages of CASIA-HWDB, or any folder of images of lines, and networks with CTC."""

from typing import NoReturn

from nbtools.tasks.common.labels import text_of
from nbtools.tasks.hwdb.analysis import by_frequency, by_width, confusions, frequencies, scores, worst
from nbtools.tasks.hwdb.data import pack, read
from nbtools.tasks.hwdb.decode import beam, peaks_of, search, tune
from nbtools.tasks.hwdb.demo import demo
from nbtools.tasks.hwdb.language_model import NGram
from nbtools.tasks.hwdb.report import report
from nbtools.tasks.hwdb.task import BASELINE, BEST, PLAN, Plan, batch, decode, loss, metrics, model, suggest
from nbtools.tasks.hwdb.visualize import bars, confused, preview, show

__all__ = [
    "BASELINE",
    "BEST",
    "PLAN",
    "NGram",
    "Plan",
    "bars",
    "batch",
    "beam",
    "by_frequency",
    "by_width",
    "confused",
    "confusions",
    "decode",
    "demo",
    "frequencies",
    "loss",
    "metrics",
    "model",
    "pack",
    "peaks_of",
    "preview",
    "read",
    "report",
    "scores",
    "search",
    "show",
    "suggest",
    "text_of",
    "tune",
    "worst",
]

GONE = {
    "compose": "lines of people's drawings are composed by benchmarks/compose.py",
    "demo_text": "train a language model on the texts of the training lines, hwdb.text_of(pack, i)",
}
"""Names of version 0.1 → what to do instead."""


def __getattr__(name: str) -> NoReturn:
    instead = f"; {GONE[name]}" if name in GONE else ""
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}{instead}")
