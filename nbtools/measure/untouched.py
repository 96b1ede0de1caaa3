"""Measuring leaves no trace: random states, switches of torch and memory are as they were before."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from nbtools import device as devices

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"


@contextmanager
def untouched(device: torch.device) -> Iterator[None]:
    """Whatever is trained inside, outside nothing changed: the random states of torch, NumPy and Python, determinism,
    cuDNN's and TF32's switches; what was made inside is freed, its memory given back."""
    numbers = random.getstate(), np.random.get_state()
    switches, workspace = read_switches(), os.environ.get(CUBLAS)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.enable_grad():
        try:
            yield
        finally:
            random.setstate(numbers[0])
            np.random.set_state(numbers[1])
            write_switches(switches)
            if workspace is None:
                os.environ.pop(CUBLAS, None)
            gc.collect()
            devices.give_back(device)


def read_switches() -> dict[str, Any]:
    """Those that `nbtools.device.prepare` sets."""
    switches: dict[str, Any] = {
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "benchmark": torch.backends.cudnn.benchmark,
    }
    matmul = torch.backends.cuda.matmul
    if hasattr(matmul, "fp32_precision"):  # torch ≥ 2.9; reading the older flag as well raises
        conv = torch.backends.cudnn.conv  # pyright: ignore[reportAttributeAccessIssue]
        return {**switches, "matmul": matmul.fp32_precision, "conv": conv.fp32_precision}
    return {**switches, "precision": torch.get_float32_matmul_precision()}


def write_switches(switches: dict[str, Any]) -> None:
    torch.use_deterministic_algorithms(switches["deterministic"], warn_only=switches["warn_only"])
    torch.backends.cudnn.benchmark = switches["benchmark"]
    if "precision" in switches:
        torch.set_float32_matmul_precision(switches["precision"])
        return
    torch.backends.cuda.matmul.fp32_precision = switches["matmul"]
    torch.backends.cudnn.conv.fp32_precision = switches["conv"]  # pyright: ignore[reportAttributeAccessIssue]
