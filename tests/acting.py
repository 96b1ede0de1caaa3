"""Runs of the toy task in which something happens at a step, what two runs have in common, and refusals."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import toy

import nbtools as nb
from nbtools.live import send
from nbtools.train import checkpoint

QUIET: dict[str, Any] = {"receipt": False, "progress": False}
STEPS = 9  # of an epoch of the toy's 200 samples


def acting(actions: Mapping[int, Callable[[], Any]] | None = None, **hooks: Any) -> Any:
    """The toy task; an action happens within its training step, from 1. seen: (step, plan, ids); acted: the steps."""
    waiting, seen, acted, usual = dict(actions or {}), [], [], toy.batch

    def batch(raw, plan, draws):
        if draws is not None:
            seen.append((len(seen) + 1, plan, raw["id"].tolist()))
            if act := waiting.pop(len(seen), None):
                act()
                acted.append(len(seen))
        return usual(raw, plan, draws)

    return toy.with_(batch=batch, seen=seen, acted=acted, **hooks)


def asking(folder: Path, *actions: str, force: bool = False, **settings: Any) -> Callable[[], Any]:
    return lambda: send(folder, actions, settings, force)


@contextmanager
def beside(folder: Path, user: Callable[[], Any]) -> Iterator[None]:
    """What a user does while the run in a folder trains here; where they fail, it is stopped, and the test fails."""

    def act() -> None:
        try:
            user()
        except BaseException:
            send(folder, ["stop"])
            raise

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(act)
        yield
    done.result()


def interrupted(act: Callable[[], Any]) -> nb.Run:
    with pytest.raises(KeyboardInterrupt) as caught:
        act()
    return caught.value.args[0]


def refused(kind: type[BaseException], words: str | None, act: Callable[..., Any], /, *given: Any, **more: Any) -> None:
    with pytest.raises(kind, match=words):
        act(*given, **more)


def losses(run: nb.Run) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in run.history.of("step")]


def texts(run: nb.Run, kind: str = "event") -> list[str]:
    return [row["what"] for row in run.history.of(kind)]


def same(one: nb.Run, other: nb.Run) -> bool:
    ours, theirs = (checkpoint.newest(run.folder).tensors for run in (one, other))
    return losses(one) == losses(other) and set(ours) == set(theirs) and all((ours[n] == theirs[n]).all() for n in ours)


def last_step(folder: Path) -> int:
    return checkpoint.place(checkpoint.read_index(folder).get("last", "0-0"))[1]
