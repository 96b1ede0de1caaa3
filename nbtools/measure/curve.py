"""What a learning-rate sweep's curve says: the losses smoothed without lag, and the lr that they suggest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

KEPT = 0.8  # of a running average, from step to step
LEAST_STEPS = 25  # that draw a curve through noise
BELOW = 10.0  # the suggestion is so many times below the lr of the least loss
NEARLY = 0.05  # of its fall above the least loss: in a flat valley noise says where the least one is
FALL = 0.01  # of the loss: less is no fall
RULE = "rule of thumb (fastai's `minimum`, arXiv 2002.04688; the beginning of a flat valley: ours)"


def smooth(losses: Sequence[float]) -> list[float]:
    """Running averages forward and then backward, each with the correction for its start."""
    return averaged(averaged(losses)[::-1])[::-1]


def averaged(values: Sequence[float]) -> list[float]:
    found, running = [], 0.0
    for k, value in enumerate(values, 1):
        running = KEPT * running + (1 - KEPT) * value
        found.append(running / (1 - KEPT**k))
    return found


def judge(
    lrs: Sequence[float], losses: Sequence[float], curve: Sequence[float], lost: float | None, ends: tuple[float, float]
) -> tuple[float | None, str]:
    """(suggestion, reason): a tenth of the lr from which on the smoothed loss is nearly at its least, or None.

    Nearer to it, an lr that a sweep survives for a step is often too much for a thousand of them.
    """
    low, high = ends
    if len(losses) < LEAST_STEPS // 3:
        when = f"within the first steps, at lr {lost:.2g}" if lost and losses else "before lr rose"
        return None, f"the loss was lost {when}; sweep lower (low={low / 100:.0e}), and look at data and loss"
    least = min(curve)
    fall = curve[0] - least
    scatter = 1.4826 * float(np.median(np.abs(np.subtract(losses, curve))))  # a standard deviation, outliers aside
    if fall <= max(scatter, FALL * abs(curve[0])):
        end = f"before it was lost at lr {lost:.2g}" if lost else f"up to lr {high:g}"
        return None, (
            f"the smoothed loss fell by {max(fall, 0.0):.2g} and single ones scatter by {scatter:.2g}: nothing was "
            f"learnt {end}; take more steps, another range, or a larger batch"
        )
    k = next(k for k, loss in enumerate(curve) if loss <= least + NEARLY * fall)
    at = f"the smoothed loss, {curve[0]:.3g} at first, is nearly at its least ({least:.3g}) from lr {lrs[k]:.2g} on"
    if lost is None and k >= 0.9 * len(curve):
        return None, f"{at}, the end of the range, and may fall further; sweep higher (high={10 * high:g})"
    if lrs[k] / BELOW < low:
        return None, f"{at}, and a tenth of that was not measured; sweep lower (low={low / 100:.0e})"
    end = f"lost at lr {lost:.2g}" if lost else f"not lost up to lr {high:g}"
    return float(f"{lrs[k] / BELOW:.2g}"), f"{at}, {end}; a tenth of that lr is a {RULE}"
