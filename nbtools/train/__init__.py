"""Plan, Task, TrainState, the loop, evaluation, checkpoints, history."""

from nbtools.train.bounds import fixed, refuse_fixed, require_batch, require_change, require_sizes
from nbtools.train.checkpoint import CONTROL, best_of
from nbtools.train.device import DTYPES, autocast, prepare, within_memory
from nbtools.train.device import pick as pick_device
from nbtools.train.history import KEYS, History, Record
from nbtools.train.loop import adopt, caught_up, train
from nbtools.train.metrics import Pair, Sums
from nbtools.train.plan import Plan, beyond, doubts, knob, lr_factor, said, times
from nbtools.train.recompute import again
from nbtools.train.scoring import forward, score
from nbtools.train.state import TrainState, load_module
from nbtools.train.step import LEFT_OUT, Diverged, attempt, backward, clear_gradients, release, step
from nbtools.train.task import Batch, Task, TaskLike, as_task, best_metric, import_task, task_name

__all__ = [
    "CONTROL",
    "DTYPES",
    "KEYS",
    "LEFT_OUT",
    "Batch",
    "Diverged",
    "History",
    "Pair",
    "Plan",
    "Record",
    "Sums",
    "Task",
    "TaskLike",
    "TrainState",
    "adopt",
    "again",
    "as_task",
    "attempt",
    "autocast",
    "backward",
    "best_metric",
    "best_of",
    "beyond",
    "caught_up",
    "clear_gradients",
    "doubts",
    "fixed",
    "forward",
    "import_task",
    "knob",
    "load_module",
    "lr_factor",
    "pick_device",
    "prepare",
    "refuse_fixed",
    "release",
    "require_batch",
    "require_change",
    "require_sizes",
    "said",
    "score",
    "step",
    "task_name",
    "times",
    "train",
    "within_memory",
]
