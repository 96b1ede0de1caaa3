"""The toy task in processes of a run, which note their steps. Something happens to one of them, see `will`."""

import atexit
import json
import os
import signal
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import torch
import toy
from toy import BASELINE, BEST, PLAN, decode, demo, loss, metrics, pack, preview, read, survey  # noqa: F401

from nbtools.errors import PackError
from nbtools.live import draw

ERRORS = {
    "refuse": PackError("sample 7: the label is missing, got None; write one"),
    "fail": ValueError("a fault of the user's own"),
    "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
}
steps = count(1)  # of this process


def model(card, plan):
    """Without BatchNorm. Ranks do not draw the run's picture, which takes longer than its training."""
    if "RANK" in os.environ:
        draw.png = lambda *_: b"\x89PNG"
    return toy.linear(card, plan)


def batch(raw, plan, draws):
    if draws is not None:
        rank = int(os.environ.get("RANK", 0))
        act(rank, next(steps))
        values = {"lr": plan.lr, "batch_size": plan.batch_size, "ids": raw["id"].tolist()}
        with open(f"steps-{rank}.jsonl", "a") as file:
            file.write(json.dumps({"time": time.time(), "pid": os.getpid(), **values}) + "\n")
        time.sleep(float(os.environ.get("CREW_STEP", 0)))
    return toy.batch(raw, plan, draws)


def notes(rank: int) -> list[dict[str, Any]]:
    path = Path(f"steps-{rank}.jsonl")
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def will(does: str, rank: int, step: int, once: bool = True) -> None:
    """Something happens to a rank at a step of each of its processes, or once: an error, a signal."""
    Path("act.json").write_text(json.dumps([rank, step, does, once]))


def act(rank: int, step: int) -> None:
    asked: list[Any] = []
    with suppress(FileNotFoundError):  # another rank may remove it at any moment
        asked = json.loads(Path("act.json").read_text())
    if asked[:2] == [rank, step]:
        _, _, does, once = asked
        if once:
            Path("act.json").unlink()
        if does in ERRORS:
            raise ERRORS[does]
        if does == "crash at its exit":
            atexit.register(os.abort)
        else:
            os.kill(os.getpid(), getattr(signal, does))
