"""The program of every rank but the first: train as rank 0 does, and serve it in between, until it ends the run."""

from __future__ import annotations

from nbtools.data import Feed, Pack
from nbtools.train.changes import adopt
from nbtools.train.loop import train
from nbtools.train.meter import Diverged
from nbtools.train.ranks import Ended, Restarted
from nbtools.train.state import TrainState
from nbtools.train.task import TaskLike


def obey(task: TaskLike, state: TrainState, pack: Pack, feed: Feed | None = None) -> None:
    """Train as rank 0 says: `train` on its state, begun anew whenever rank 0 begins anew, until it ends the run."""
    begun = None
    while True:
        try:
            if begun is None:
                state.ranks.tell()
            else:
                take_over(state, begun)
                begun = None
                for _ in train(task, state, pack, feed):
                    continue
        except Restarted as restarted:
            begun = restarted.with_traceback(None)  # its frames hold the feed
        except Diverged:
            continue  # so does rank 0, and decides what to do
        except Ended:
            return


def take_over(state: TrainState, begun: Restarted) -> None:
    """Make the state rank 0's."""
    plan, facts, tensors = begun.args
    adopt(state, type(state.plan).from_dict(plan))  # first: a scaler takes over its saved state
    state.load(tensors, facts)
    state.plan = state.applied
    state.events.clear()
