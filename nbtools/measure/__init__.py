"""The machine, the profile of a step, the bottleneck, batch and lr finders, advice, receipt."""

from nbtools.measure.advice import Advice, Machine, decide, explained, processes
from nbtools.measure.advisor import advise, expected
from nbtools.measure.batch import find_batch
from nbtools.measure.check import check, smoke_test
from nbtools.measure.machine import REASONS, Gpu, Sampler, described, follow, gpus, machine, nvml_index
from nbtools.measure.profile import StepProfile
from nbtools.measure.receipt import Receipt, comparable, preset, receipt
from nbtools.measure.stepper import Stepper, untouched
from nbtools.measure.sweep import lr_sweep
from nbtools.measure.trials import first_losses, step_profile
from nbtools.measure.verdict import Verdict, verdict
