"""The machine, the profile of a step, the bottleneck, batch and lr finders, advice, receipt."""

from nbtools.measure.advice import Advice
from nbtools.measure.advise import advise
from nbtools.measure.figures import Tried
from nbtools.measure.finder import Finding, find_batch
from nbtools.measure.gpu import REASONS, Gpu, gpus
from nbtools.measure.ladder import Ladder, ladder
from nbtools.measure.noise import Noise, noise_scale
from nbtools.measure.pace import Pace, Rate, machine
from nbtools.measure.profile import StepProfile, step_profile
from nbtools.measure.race import Race, time_to
from nbtools.measure.receipts import Receipt, receipt
from nbtools.measure.rungs import Rung
from nbtools.measure.sampler import Sampler
from nbtools.measure.sweep import SECONDS, STEPS, Sweep
from nbtools.measure.tries import choose_precision, find_precision
from nbtools.measure.verdict import Verdict, verdict
from nbtools.measure.workers import WorkersFinding, find_workers

__all__ = [
    "REASONS",
    "SECONDS",
    "STEPS",
    "Advice",
    "Finding",
    "Gpu",
    "Ladder",
    "Noise",
    "Pace",
    "Race",
    "Rate",
    "Receipt",
    "Rung",
    "Sampler",
    "StepProfile",
    "Sweep",
    "Tried",
    "Verdict",
    "WorkersFinding",
    "advise",
    "choose_precision",
    "find_batch",
    "find_precision",
    "find_workers",
    "gpus",
    "ladder",
    "machine",
    "noise_scale",
    "receipt",
    "step_profile",
    "time_to",
    "verdict",
]
