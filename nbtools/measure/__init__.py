"""Measurements on the user's machine: what is measured here and not promised."""

from nbtools.measure.figures import Tried
from nbtools.measure.finder import Finding, find_batch
from nbtools.measure.ladder import Ladder, ladder
from nbtools.measure.noise import Noise, noise_scale
from nbtools.measure.pace import Pace, Rate, machine
from nbtools.measure.profile import StepProfile, step_profile
from nbtools.measure.race import Race, time_to
from nbtools.measure.receipts import Receipt, receipt
from nbtools.measure.rungs import Rung
from nbtools.measure.sweep import Sweep
from nbtools.measure.tries import choose_precision, find_precision
from nbtools.measure.verdict import Verdict, verdict
from nbtools.measure.workers import WorkersFinding, find_workers

__all__ = [
    "Finding",
    "Ladder",
    "Noise",
    "Pace",
    "Race",
    "Rate",
    "Receipt",
    "Rung",
    "StepProfile",
    "Sweep",
    "Tried",
    "Verdict",
    "WorkersFinding",
    "choose_precision",
    "find_batch",
    "find_precision",
    "find_workers",
    "ladder",
    "machine",
    "noise_scale",
    "receipt",
    "step_profile",
    "time_to",
    "verdict",
]
