"""The machine, the time of a step, advice, the batch and the learning rate, what limits a run, the receipt."""

from nbtools.measure.advice import Advice, Machine, decide
from nbtools.measure.advisor import advise
from nbtools.measure.finders import LrTrial, find_batch, lr_sweep
from nbtools.measure.machine import Gpu, Sampler, check, gpus, machine
from nbtools.measure.profile import Verdict, verdict
from nbtools.measure.receipt import Receipt, comparable, preset, receipt
from nbtools.measure.timing import Stepper, Timing, finish, untouched
from nbtools.measure.turns import timed
