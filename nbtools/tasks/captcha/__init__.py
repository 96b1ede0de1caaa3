"""Captchas: images of one size with a fixed number of characters, or lines of any width and length."""

from nbtools.tasks.captcha.data import pack, pack_options, read, survey, validate
from nbtools.tasks.captcha.demo import demo
from nbtools.tasks.captcha.task import (
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
    suggest,
    tensors,
)
from nbtools.tasks.common.texts import preview, show, text_of
