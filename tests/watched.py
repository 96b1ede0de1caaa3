"""The captcha task, which writes down when it trains on what, in watched.jsonl: a line for each batch."""

import json
import time

from torch import Tensor

from nbtools.data import Draws
from nbtools.tasks import captcha
from nbtools.tasks.captcha import BASELINE, BEST, PLAN, Plan, decode, demo, loss, metrics, model, pack, preview, show  # noqa: F401

LOG = "watched.jsonl"
PAUSE = 0.04  # seconds of each step, which leave the processor to the page
KNOBS = ("lr", "batch_size", "amp", "clip_norm", "weight_decay", "eval_every", "early_stop")


def batch(raw: dict[str, Tensor], plan: Plan, draws: Draws | None) -> dict[str, Tensor]:
    if "id" in raw:  # samples to preview have none
        row = {"time": time.time(), "training": draws is not None, **{name: getattr(plan, name) for name in KNOBS}}
        with open(LOG, "a") as file:  # closed each time: whoever reads it finds whole lines
            file.write(json.dumps(row) + "\n")
        time.sleep(PAUSE if draws is not None else 0)
    return captcha.batch(raw, plan, draws)
