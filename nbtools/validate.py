"""What is wrong with a data set, before it is packed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nbtools.train import TaskLike, as_task


def validate(task: TaskLike, source: str | Path, **options: Any) -> Any:
    """The task's report on a source: every rule that a file breaks, with the value and what to do. Shows as a table;
    `.ok` is True if there are no errors. options: the task's own.

    Raises NbtoolsError for a task that checks while it packs.
    """
    return as_task(task).validate(source, **options)
