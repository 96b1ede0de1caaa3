"""A changed plan: wanted by panel, terminal or code, agreed on by all ranks, then applied to model and optimizer."""

from __future__ import annotations

from collections.abc import Generator, Iterator

from nbtools.errors import TrainError
from nbtools.train.device import require
from nbtools.train.history import Record
from nbtools.train.optimizer import follow
from nbtools.train.plan import Plan, listed, refuse_fixed, require_batch
from nbtools.train.state import TrainState, Wanted, new_scaler


def agree(state: TrainState, samples: int) -> Wanted:
    """Return what is wanted by now, on several ranks by rank 0: to be called after each record, since whoever watches
    rank 0 may have changed it. Raises TrainError for a plan that this run cannot adopt at this point, which is then
    forgotten. samples: of the training split."""
    wanted, ranks = state.wanted, state.ranks
    try:
        require_change(state, wanted.plan, samples)
    except TrainError:
        state.plan = state.applied
        raise
    if ranks.world == 1:
        return wanted
    plan = wanted.plan.to_dict() if wanted.plan is not state.applied else None
    plan, evaluate, stopped = ranks.broadcast((plan, wanted.evaluate, wanted.stopped))
    if ranks.first:
        return wanted
    state.plan = state.applied if plan is None else type(state.plan).from_dict(plan)
    state.stopped = stopped
    return Wanted(state.plan, evaluate, stopped)


def changes(state: TrainState, samples: int) -> Generator[Record, None, Wanted]:
    """Apply a replaced plan to model and optimizer; a row says what changes. Returns what else is wanted."""
    while (wanted := agree(state, samples)).plan is not state.applied:
        if differing := wanted.plan.changes_from(state.applied):
            yield state.record("change", {"what": listed(differing)})  # a watcher may save: the old plan still applies
        adopt(state, wanted.plan)
    return wanted


def require_change(state: TrainState, new: Plan, epoch_size: int) -> None:
    """Raise TrainError for a plan that this run cannot adopt at this point."""
    if new is state.applied:
        return
    differing = new.changes_from(state.applied)
    refuse_fixed(differing, new)
    for name in ("weight_decay", "betas", "eps"):
        if name in differing and not state.built_in:
            rule = f"Plan.{name} does nothing to the task's own optimizer, got {differing[name]}"
            raise TrainError(f"{rule}; set it where the optimizer is made, in another run")
    require(new, state.device)
    require_batch(new, epoch_size)


def adopt(state: TrainState, new: Plan, since: Plan | None = None) -> None:
    """Make model and optimizer follow a plan. since: the one that they follow now; None: the applied one."""
    differing = new.changes_from(since or state.applied)
    if differing.keys() & {"micro_batch_size", "batch_size"}:
        state.recovery.micro = new.micro_batch_size
    if "amp" in differing:
        state.scaler, state.unscaled = new_scaler(new, state.device), True
    follow(state.optimizer, new)
    state.applied = new


def caught_up(state: TrainState, saved: Plan) -> Iterator[Record]:
    """Keep the settings that were changed since a checkpoint was saved, and record them in a row."""
    adopt(state, state.applied, since=saved)
    if differing := state.applied.changes_from(saved):
        yield state.record("change", {"what": listed(differing)})
