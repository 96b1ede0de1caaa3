"""How long a model takes for one single sample, as its user experiences it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from nbtools.errors import PlanError

if TYPE_CHECKING:
    import pandas as pd

WARM = 3  # predictions before the clock counts: the first ones load libraries and choose kernels


def measure_latency(
    predict: Callable[[Any], object], samples: Sequence[Any] | np.ndarray, device: torch.device, about: str
) -> pd.DataFrame:
    """Return a row of device, one sample (what it is), predictions, and milliseconds: median and 95 %; each sample is
    predicted once, after a few to warm up. predict must wait for the device. Raises PlanError without samples."""
    import pandas as pd

    if not len(samples):
        raise PlanError("latency needs at least one sample, got none; take some of pack.ids('val')")
    seconds = []
    for sample in [*samples[:WARM], *samples]:
        began = perf_counter()
        predict(sample)
        seconds.append(perf_counter() - began)
    median, slow = np.quantile(seconds[-len(samples) :], [0.5, 0.95])
    row = {"device": str(device), "one sample": about, "predictions": len(samples), "median": median, "95 %": slow}
    return pd.DataFrame([row]).assign(**{name: f"{1e3 * row[name]:.2f} ms" for name in ("median", "95 %")})
