"""Handwritten lines of text, from pages of CASIA-HWDB or any folder of lines to a recogniser: a CNN with CTC."""

from nbtools.tasks.hwdb.lines.data import pack, read
from nbtools.tasks.hwdb.lines.report import report
from nbtools.tasks.hwdb.looking.analysis import by_frequency, by_width, confusions, frequencies, scores, worst
from nbtools.tasks.hwdb.looking.show import bars, confused, preview, show, text_of
from nbtools.tasks.hwdb.plans import BASELINE, PLAN, Plan, suggest
from nbtools.tasks.hwdb.reading.beam import beam, search
from nbtools.tasks.hwdb.reading.ngram import NGram
from nbtools.tasks.hwdb.reading.tuning import peaks_of, tune
from nbtools.tasks.hwdb.task import BEST, batch, decode, loss, metrics, model
from nbtools.tasks.hwdb.writing.compose import compose
from nbtools.tasks.hwdb.writing.demo import demo
from nbtools.tasks.hwdb.writing.language import demo_text

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
    "compose",
    "confused",
    "confusions",
    "decode",
    "demo",
    "demo_text",
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
