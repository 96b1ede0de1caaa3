"""Captchas: images of one size with as many characters, or lines of any width and length."""

from nbtools.tasks.captcha.data import pack, read
from nbtools.tasks.captcha.demo import demo
from nbtools.tasks.captcha.plans import BASELINE, PLAN, Plan, suggest
from nbtools.tasks.captcha.show import preview, show, text_of
from nbtools.tasks.captcha.task import BEST, batch, decode, loss, metrics, model

__all__ = [
    "BASELINE",
    "BEST",
    "PLAN",
    "Plan",
    "batch",
    "decode",
    "demo",
    "loss",
    "metrics",
    "model",
    "pack",
    "preview",
    "read",
    "show",
    "suggest",
    "text_of",
]
