"""What is wrong with a data set, before anything is made of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nbtools.errors import NbtoolsError
from nbtools.train import task_name


def validate(task: Any, source: str | Path, **options: Any) -> Any:
    """The task's report on a source: every rule that a file breaks, with the value and what to do. It shows as a table,
    and `.ok` says whether nothing is an error. options: the task's own.

    Raises NbtoolsError for a task that checks while it packs.
    """
    check = getattr(task, "validate", None)
    if check is None:
        raise NbtoolsError(
            f"{task_name(task)} checks its files while it packs them: call its pack(source), and look at pack.bad"
        )
    return check(source, **options)
