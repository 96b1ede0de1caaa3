"""What a user watches a run with: functions that get each record with values, and TensorBoard's event files."""

from collections.abc import Callable, Sequence
from typing import Any

from nbtools.errors import MissingExtra, TrainError
from nbtools.run import Run
from nbtools.train import Record

Callback = Callable[[Record, Run], Any]


def callbacks_of(functions: Sequence[Callback], log: str | None) -> list[Callback]:
    """Return what a call of `fit` gives, the logger last. Raises TrainError, and MissingExtra without its package."""
    if not isinstance(functions, Sequence) or not all(map(callable, functions)):
        raise TrainError(f"callbacks must be a list of functions f(record, run), got {functions!r}; pass [f]")
    if log not in (None, "tensorboard"):
        raise TrainError(f'log must be "tensorboard" or None, got {log!r}; any other logger is a function in callbacks')
    return [*functions, *([] if log is None else [tensorboard()])]


def tensorboard() -> Callback:
    """Return what writes the numbers of a run's rows into its folder, by global step."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtra(f'log="tensorboard" needs tensorboard ({error}): pip install "nbtools[log]"') from None
    writer, last = None, 0

    def write(record: Record, run: Run) -> None:
        nonlocal writer, last
        if writer is None or record.step < last:  # the run begins, or went back: rows are repeated
            before = [row["step"] for row in run.history.rows[:-1]]
            writer = SummaryWriter(str(run.folder), purge_step=before[-1] + 1 if before else 0)
        last = record.step
        for name, value in record.values.items():
            if isinstance(value, (int, float)):
                writer.add_scalar(f"{record.kind}/{name}", value, record.step)
        writer.flush()  # a run that is killed repeats only what is beyond its checkpoint

    return write
