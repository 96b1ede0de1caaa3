"""What a run can be, and what a started one may still change; whatever breaks a rule is refused by its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from nbtools.data import Pack
from nbtools.errors import TrainError
from nbtools.table import plural
from nbtools.train.device import require
from nbtools.train.plan import Plan
from nbtools.train.state import FIXED, TrainState

AT_START = ("feed", "workers", "prefetch")  # a run may be resumed with others, but they do not change under way


def fixed(plan: Plan) -> dict[str, str]:
    """The knobs that a run keeps while it trains, each with the reason."""
    knobs = {field.name for field in dataclasses.fields(plan) if not field.metadata.get("live")}
    own = knobs - {field.name for field in dataclasses.fields(Plan)}
    return {
        **dict.fromkeys((*FIXED, *sorted(own)), "fixed in a started run: its model and optimizer are built on it"),
        **dict.fromkeys(AT_START, "fixed while it trains: batches are on their way; stop, change it, and go on"),
    }


def refuse_fixed(differing: Mapping[str, str], plan: Plan, resumed: bool = False) -> None:
    """Raise TrainError for a knob that a run keeps; one that is resumed may have those of AT_START otherwise."""
    for name in fixed(plan):
        if name in differing and not (resumed and name in AT_START):
            raise TrainError(
                f"Plan.{name} cannot change in a started run, and was asked to: {differing[name]}; keep the value, or "
                "start another run folder"
            )


def require_sizes(pack: Pack, plan: Plan) -> None:
    count = len(pack.ids("train"))
    if count < 2:
        raise TrainError(
            f"{pack.folder}: the train split has {count} sample(s), training needs at least 2; pack more data"
        )
    require_batch(plan, count)


def require_batch(plan: Plan, count: int) -> None:
    if plan.batch_size > count:
        raise TrainError(
            f"Plan.batch_size {plan.batch_size} is larger than the train split ({plural(count, 'sample')}); take at "
            f"most {count}"
        )


def require_change(state: TrainState, new: Plan, epoch_size: int) -> None:
    """Raise TrainError for a plan that this run cannot take over where it stands."""
    refuse_fixed(new.changes_from(state.applied), new)
    require(new, state.device)
    require_batch(new, epoch_size)
