"""Plan, Task, TrainState, the loop, evaluation, checkpoints, history."""

from nbtools.train import checkpoint, device, evaluation
from nbtools.train.checkpoint import CONTROL
from nbtools.train.defaults import DATASET, Answer, items_of
from nbtools.train.device import DTYPES, again, synchronizing
from nbtools.train.evaluation import Sums, forward
from nbtools.train.graph import MOST_GRAPHS, unrecordable
from nbtools.train.history import KEYS, History, Record
from nbtools.train.keep import KEPT, Keeper, kept_until, noted
from nbtools.train.loop import adopt, caught_up, obey, require_change, train
from nbtools.train.metrics import Batch, Pair
from nbtools.train.network import build, call_of
from nbtools.train.optimizer import LARGER, OPTIMIZERS, built_in
from nbtools.train.own import classify, regress
from nbtools.train.plan import (
    AT_START,
    Plan,
    Steps,
    beyond,
    doubts,
    fixed,
    idle,
    knob,
    listed,
    lr_at,
    lr_factor,
    refuse_fixed,
    require_batch,
    require_sizes,
    require_training,
    shown,
    times,
)
from nbtools.train.ranks import RankLost, Ranks, join, naming, share, shares
from nbtools.train.recovery import LEFT_OUT, Diverged, train_step
from nbtools.train.rehearsal import rehearse
from nbtools.train.state import TrainState
from nbtools.train.step import attempt, clear_gradients, differentiate, release
from nbtools.train.task import (
    Task,
    TaskLike,
    Tensors,
    array_of,
    as_task,
    best_metric,
    bound,
    import_task,
    meanings_of,
    objective,
    order,
    own_optimizer,
    readable,
    spoken,
    task_name,
    unread,
)
