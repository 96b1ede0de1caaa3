"""Plan, Task, TrainState, the loop, evaluation, checkpoints, history."""

from nbtools.train import checkpoint, device, evaluation, meter
from nbtools.train.checkpoint import CONTROL, Keeper
from nbtools.train.defaults import Answer, Batch, Labels, Pair, logits_of
from nbtools.train.device import DTYPES, again, unrecordable
from nbtools.train.evaluation import Sums, forward, rehearse
from nbtools.train.graph import MOST_GRAPHS, synchronizing
from nbtools.train.history import KEYS, History, Record
from nbtools.train.loop import obey, train
from nbtools.train.meter import Diverged
from nbtools.train.optimizer import OPTIMIZERS
from nbtools.train.own import classify, regress
from nbtools.train.plan import ADVISED, LR_FACTORS, Plan, doubts, knob, list_changes, require_sizes, similar
from nbtools.train.ranks import RankLost, Ranks, join, naming
from nbtools.train.state import TrainState, adopt, change, order, require_change
from nbtools.train.step import gradients, release, train_step
from nbtools.train.task import Task, TaskLike, Tensors, as_task, bind, build, identity, import_task, task_name, title_of
