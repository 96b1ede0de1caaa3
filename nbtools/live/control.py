"""What a person asks of a run under way: buttons, `control.json` in the run folder and Ctrl-C say it in one value, read
between steps."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nbtools import disk
from nbtools.errors import NbtoolsError, TrainError
from nbtools.train import CONTROL, Plan, doubts

FILE = CONTROL
ACTIONS = ("pause", "resume", "stop", "evaluate", "save", "profile", "best", "undo")
MOST = 100_000  # characters that a request may have
REFUSED = "not taken: "  # how the row of a history begins that answers what the run cannot do
UNFINISHED = 2.0  # seconds that a file which is no JSON yet may still be being written: `echo … > control.json`


@dataclass
class Wishes:
    """Pending requests. plan: the last one requested, None where no knob was turned yet. stopper: who or what asked for
    the stop, as the message names it."""

    paused: bool = False
    stop: bool = False
    evaluate: bool = False
    save: bool = False
    profile: bool = False
    best: bool = False
    undo: bool = False
    plan: Plan | None = None
    stopper: str = "you"

    def do(self, action: str) -> None:
        """Wish one of ACTIONS."""
        if action in ("pause", "resume"):
            self.paused = action == "pause"
        else:
            setattr(self, action, True)


def send(
    folder: str | Path, actions: Iterable[str] = (), knobs: Mapping[str, Any] | None = None, force: bool = False
) -> Path:
    """Ask the process that trains in a run folder for something, beside what it has not read yet.

    force: apply values that the run would ask about once more (see `nbtools.plan.doubts`). Raises TrainError for an
    unknown action and where there is no folder; a knob is checked by the run, which answers in its history.
    """
    path, said = Path(folder) / FILE, {}
    if not path.parent.is_dir():
        raise TrainError(f"{folder}: not there any more, so nobody can be asked; name the folder of a run")
    with disk.explained("asking a run", path), suppress(FileNotFoundError):  # the run takes it at any moment
        said = orders(read(path)) or {}
    asked = [*listed(said.pop("do", [])), *actions]
    for action in asked:
        require(action)
    before = said.pop("force", False)
    if said:
        force = before and (force or not knobs)  # force must not extend to requests of somebody else
    with disk.explained("asking a run", path):
        forced = {"force": True} if force else {}
        return disk.write_atomic(path, json.dumps({"do": asked, **said, **(knobs or {}), **forced}))


def receive(
    folder: Path,
    wishes: Wishes,
    plan: Plan,
    check: Callable[[Plan], None] | None = None,
    advised: Plan | None = None,
) -> None:
    """Take control.json, if one lies in the folder, as wishes: `{"do": "pause", "lr": 1e-4}`, knobs as in the Plan.

    check: raises NbtoolsError for a plan that the run cannot continue with. advised: the plan that values are compared
    with; None: the present one. Raises what check raises, TrainError or PlanError where the request breaks a rule or
    must be forced (`"force": true`); then none of it applies. The file is removed either way.
    """
    path = folder / FILE
    try:
        text, written = read(path), path.stat().st_mtime
    except FileNotFoundError:
        return
    except OSError as error:
        text, written = f"{error.strerror}", 0.0
    if orders(text) is None and time.time() - written < UNFINISHED:
        return
    text = taken(path, text)
    said = orders(text)
    if said is None:
        raise TrainError(f'{path} must be a JSON object such as {{"do": "pause", "lr": 1e-4}}, got {text[:40]!r}')
    try:
        actions, force = listed(said.pop("do", [])), said.pop("force", False)
        for action in actions:
            require(action)
        if not isinstance(force, bool):
            raise TrainError(f'"force" must be true or false, got {force!r}')
        wanted = plan.turn(**{n: plan.parse(n, v) if isinstance(v, str) else v for n, v in said.items()})
        if check is not None:
            check(wanted)
        if not force and (asks := doubts(plan, wanted, advised or plan)):
            raise TrainError(
                f'{"; ".join(asks.values())}; to apply it anyway add "force": true here, or --force to '
                f"python -m nbtools control {folder} …"
            )
    except NbtoolsError as error:
        raise type(error)(f"{path}: {error}") from None
    for action in actions:
        wishes.do(action)
    if said:
        wishes.plan = wanted


def read(path: Path) -> str:
    """As much of the file as a request may have. Raises OSError."""
    with path.open(errors="replace") as file:
        return file.read(MOST)


def taken(path: Path, text: str) -> str:
    """Take the file away and return what it says by then: more may have been asked since it was read as `text`."""
    mine = path.with_name(f"{path.name}.part")
    with disk.explained("taking a request", path):
        disk.remove(mine)
        disk.rename(path, mine)
        with suppress(OSError):  # a folder, or not readable: `text` says so
            text = read(mine)
        disk.remove(mine)
    return text


def orders(text: str) -> dict[str, Any] | None:
    """The object in a control file, None where it is none."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return said if isinstance(said, dict) else None


def listed(said: Any) -> list[Any]:
    return said if isinstance(said, list) else [said]


def require(action: Any) -> None:
    if action not in ACTIONS:
        raise TrainError(f"a run can be asked to {', '.join(ACTIONS)}, got {action!r}; say one of these")
