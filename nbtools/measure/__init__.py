"""The machine, the profile of a step, the bottleneck, batch and lr finders, advice, receipt."""

from nbtools.measure.advice import Advice, Machine, advise, decide
from nbtools.measure.figures import Tried
from nbtools.measure.finder import Finding, find_batch
from nbtools.measure.machine import REASONS, Gpu, Sampler, gpus, machine, nvml_index
from nbtools.measure.pace import Pace, Rate
from nbtools.measure.profile import StepProfile, step_profile
from nbtools.measure.receipts import Receipt, comparable, receipt
from nbtools.measure.rungs import Rung
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
    "Machine",
    "Pace",
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
    "comparable",
    "decide",
    "find_batch",
    "find_precision",
    "find_workers",
    "gpus",
    "machine",
    "nvml_index",
    "receipt",
    "step_profile",
    "verdict",
]
