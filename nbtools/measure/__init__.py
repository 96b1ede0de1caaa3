"""The machine, the profile of a step, the bottleneck, batch and lr finders, advice, receipt."""

from nbtools.measure.advice import Advice, Machine, advise, decide
from nbtools.measure.batch import BatchReport, find_batch
from nbtools.measure.machine import REASONS, Gpu, Sampler, gpus, machine, nvml_index
from nbtools.measure.profile import StepProfile, Tried
from nbtools.measure.receipt import Receipt, comparable, receipt
from nbtools.measure.stepper import Stepper, made_ready, untouched
from nbtools.measure.sweep import Sweep, lr_sweep
from nbtools.measure.trials import choose_precision, find_precision, first_losses, step_profile
from nbtools.measure.verdict import Verdict, verdict
from nbtools.measure.workers import WorkersReport, find_workers

__all__ = [
    "REASONS",
    "Advice",
    "BatchReport",
    "Gpu",
    "Machine",
    "Receipt",
    "Sampler",
    "StepProfile",
    "Stepper",
    "Sweep",
    "Tried",
    "Verdict",
    "WorkersReport",
    "advise",
    "choose_precision",
    "comparable",
    "decide",
    "find_batch",
    "find_precision",
    "find_workers",
    "first_losses",
    "gpus",
    "lr_sweep",
    "machine",
    "made_ready",
    "nvml_index",
    "receipt",
    "step_profile",
    "untouched",
    "verdict",
]
