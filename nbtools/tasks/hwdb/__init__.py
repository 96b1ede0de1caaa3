"""Handwritten lines of text: pages of CASIA-HWDB, or any folder of images of lines, and networks with CTC."""

from nbtools.tasks.common.texts import preview, show, text_of
from nbtools.tasks.hwdb.data import pack, pack_options, read, survey, validate
from nbtools.tasks.hwdb.decode import peaks_of, scores, search
from nbtools.tasks.hwdb.demo import demo
from nbtools.tasks.hwdb.language_model import NGram
from nbtools.tasks.hwdb.task import (
    BASELINE,
    BEST,
    PLAN,
    PRESETS,
    Plan,
    batch,
    decode,
    loss,
    metrics,
    model,
    part,
    suggest,
    tensors,
)
