"""Measuring leaves no trace: random states, switches of torch and memory are as they were before."""

from __future__ import annotations

import gc
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from nbtools.train import device as devices


@contextmanager
def untouched(device: torch.device) -> Iterator[None]:
    """Whatever is trained inside, outside nothing changed: the random states of torch, NumPy and Python, determinism,
    cuDNN's and TF32's switches; what was made inside is freed, its memory given back."""
    numbers = random.getstate(), np.random.get_state()
    switches = read_switches()
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
        try:
            yield
        finally:
            random.setstate(numbers[0])
            np.random.set_state(numbers[1])
            write_switches(switches)
            gc.collect()
            devices.give_back(device)


def read_switches() -> dict[str, Any]:
    """Those that `nbtools.device.prepare` sets. precision: None where torch does not tell it because the user set
    `fp32_precision` (torch ≥ 2.9), which is kept instead."""
    try:
        precision, backends = torch.get_float32_matmul_precision(), []
    except RuntimeError:
        precision, backends = None, [module.fp32_precision for module in products()]
    return {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
        "precision": precision,
        "backends": backends,
    }


def write_switches(switches: dict[str, Any]) -> None:
    torch.use_deterministic_algorithms(switches["deterministic"], warn_only=switches["warn_only"])
    torch.backends.cudnn.benchmark = switches["benchmark"]
    if switches["precision"] is not None and read_switches()["precision"] != switches["precision"]:
        torch.set_float32_matmul_precision(switches["precision"])
    for module, precision in zip(products(), switches["backends"], strict=False):
        module.fp32_precision = precision


def products() -> tuple[Any, ...]:
    """The matrix products that `torch.set_float32_matmul_precision` sets."""
    return torch.backends.cuda.matmul, torch.backends.mkldnn.matmul  # pyright: ignore[reportAttributeAccessIssue]
