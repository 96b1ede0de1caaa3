"""The toy task in processes of a run, which note their steps. Something happens to one of them, as the file `act.json`
in the working directory says: {"rank": 1, "step": 5, "does": "kill"}."""

from __future__ import annotations

import atexit
import json
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import toy
from torch import nn
from toy import BASELINE, BEST, decode, demo, loss, metrics, pack, preview, read, survey

from nbtools.errors import PackError
from nbtools.live import png

__all__ = ["BASELINE", "BEST", "decode", "demo", "loss", "metrics", "model", "pack", "preview", "read", "survey"]

PLAN = toy.Plan(epochs=3, batch_size=16, lr=1e-2, clip_norm=1.0)
taken = 0  # steps of this process


def model(card, plan):
    """Without BatchNorm, whose statistics are those of a share. Ranks do not draw the run's picture, which takes longer
    than its training."""
    if "RANK" in os.environ:
        png.draw = lambda *_: b"\x89PNG"
    return Net(plan.hidden)


class Net(nn.Module):
    def __init__(self, hidden: int):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, hidden), nn.ReLU(), nn.Linear(hidden, toy.CLASSES))

    def forward(self, batch):
        return self.layers(batch["x"])


def batch(raw, plan, draws):
    if draws is not None:
        rank = int(os.environ.get("RANK", 0))
        act(rank)
        values = {"lr": plan.lr, "batch_size": plan.batch_size, "ids": raw["id"].tolist()}
        with open(f"steps-{rank}.jsonl", "a") as file:
            file.write(json.dumps({"time": time.time(), "pid": os.getpid(), **values}) + "\n")
        time.sleep(float(os.environ.get("CREW_STEP", 0)))
    return toy.batch(raw, plan, draws)


def act(rank: int) -> None:
    global taken
    taken += 1
    path, asked = Path("act.json"), {}
    with suppress(FileNotFoundError):  # another rank may remove it at any moment
        asked = json.loads(path.read_text())
    if (asked.get("rank"), asked.get("step")) == (rank, taken):
        if asked["once"]:
            path.unlink()
        ACTS[asked["does"]]()


def refuse() -> None:
    raise PackError("sample 7: the label is missing, got None; write one")


def fail() -> None:
    raise ValueError("a fault of the user's own")


def orphan() -> None:
    """Rank 0 vanishes without closing its connections, and the user interrupts this one."""
    os.kill(json.loads(Path("steps-0.jsonl").read_text().splitlines()[0])["pid"], signal.SIGSTOP)
    os.kill(os.getpid(), signal.SIGINT)


ACTS = {
    "refuse": refuse,
    "fail": fail,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "orphan": orphan,
    "hang": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "crash at its exit": lambda: atexit.register(os.abort),
}
