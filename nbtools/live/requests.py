"""Requests to a run: buttons and fields, `control.json` in the run folder, the terminal, Ctrl-C and SIGTERM post them
to one value, and `fit` acts on it between steps."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from torch.distributed import is_torchelastic_launched

from nbtools import disk
from nbtools.errors import NbtoolsError, TrainError
from nbtools.live.kernel import flush, running_kernel
from nbtools.train import CONTROL, Plan, TrainState, checkpoint, doubts

ACTIONS = ("pause", "resume", "stop", "evaluate", "save", "profile", "best", "undo")
REFUSED = "refused: "  # the start of a row of the history that answers a request the run cannot fulfil
UNFINISHED = 2.0  # seconds in which a file that is not JSON may still be being written: `echo … > control.json`
SENDING = 0.3  # seconds for zmq's thread to send what a kernel has flushed: nothing tells when it has


@dataclass
class Plans:
    """Where no TrainState holds them, in another process or before a run: `plan` is wanted, `applied` acts."""

    plan: Plan
    applied: Plan


@dataclass(eq=False)
class Requests:
    """What is requested of a run but not done yet.

    state: takes the wanted plan as its `plan`; its `applied` is the one that acts. advised: what values are compared
    with. check: raises NbtoolsError for a plan that the run cannot continue with. able: whether there is anything to do
    for an action. pending: actions. stopper: who asked for the stop, as the message names it. pace: seconds that a step
    takes. unread: whether the run, in another process, has yet to read the requests.
    """

    state: TrainState | Plans
    advised: Plan
    check: Callable[[Plan], None] = lambda plan: None
    able: Callable[[str], bool] = lambda action: True
    paused: bool = False
    pending: set[str] = field(default_factory=set)
    stopper: str = "you"
    pace: float = 0.0
    unread: bool = False

    def post(self, action: str, by: str = "you") -> None:
        """Request one of ACTIONS."""
        if action in ("pause", "resume"):
            self.paused = action == "pause"
            return
        self.pending.add(action)
        if action == "stop":
            self.stopper = by

    def take(self, action: str) -> bool:
        """Whether an action was pending; it no longer is."""
        found = action in self.pending
        self.pending.discard(action)
        return found

    @property
    def stop(self) -> bool:
        return "stop" in self.pending

    def doubts(self, plan: Plan) -> dict[str, str]:
        """What has to be confirmed before this plan is wanted: setting → a sentence."""
        return doubts(self.state.plan, plan, self.advised)

    @property
    def change(self) -> str:
        """The settings that are wanted but not applied yet, in a line."""
        old, new = self.state.applied, self.state.plan
        changes = new.changes_from(old) if new is not old else {}
        return ", ".join(f"{name} {change}" for name, change in changes.items())


def advised(folder: Path, plan: Plan) -> Plan:
    """The plan that was advised for the run in a folder, else the one it was started with; `plan` if neither is
    known."""
    values = checkpoint.read_index(folder).get("advised", {})
    return plan.replace(**{name: value for name, value in values.items() if name in plan.to_dict()})


def send(
    folder: str | Path, actions: Iterable[str] = (), settings: Mapping[str, Any] | None = None, force: bool = False
) -> Path:
    """Add requests to the run in a folder, which another process is training.

    force: apply values that would otherwise need confirmation (see `Requests.doubts`). Raises TrainError for an
    unknown action, or if there is no folder; a setting is checked by the run, which answers in its history.
    """
    path, waiting = Path(folder) / CONTROL, {}
    if not path.parent.is_dir():
        raise TrainError(f"{folder}: does not exist, so no run can take a request; name the folder of a run")
    with disk.explained("asking a run", path), suppress(FileNotFoundError):  # the run takes it at any moment
        waiting = parsed(path.read_text(errors="replace")) or {}
    wanted = listed([*listed(waiting.pop("do", [])), *actions])
    before = waiting.pop("force", False)
    if waiting:
        force = before and (force or not settings)  # force must not extend to requests of somebody else
    with disk.explained("asking a run", path):
        forced = {"force": True} if force else {}
        return disk.write_atomic(path, json.dumps({"do": wanted, **waiting, **(settings or {}), **forced}))


def receive(folder: Path, requests: Requests) -> None:
    """Post what control.json requests, if the folder has one: `{"do": "pause", "lr": 1e-4}`, settings as in the
    Plan.

    Raises what `requests.check` raises, TrainError or PlanError if a request breaks a rule or must be forced
    (`"force": true`); then none of it is posted. The file is removed either way.
    """
    path, plan = folder / CONTROL, requests.state.plan
    if (settings := taken(path)) is None:
        return
    try:
        actions, force = listed(settings.pop("do", [])), settings.pop("force", False)
        if not isinstance(force, bool):
            raise TrainError(f'"force" must be true or false, got {force!r}')
        wanted = plan.turn(**{n: plan.parse(n, v) if isinstance(v, str) else v for n, v in settings.items()})
        requests.check(wanted)
        if not force and (asks := requests.doubts(wanted)):
            raise TrainError(
                f'{"; ".join(asks.values())}; to apply it anyway add "force": true here, or --force to '
                f"python -m nbtools control {folder} …"
            )
    except NbtoolsError as error:
        raise type(error)(f"{path}: {error}") from None
    for action in actions:
        requests.post(action)
    if wanted != plan:
        requests.state.plan = wanted


def taken(path: Path) -> dict[str, Any] | None:
    """Remove a control file and return what it requests; None if there is none, or it is still being written."""
    try:
        if parsed(read(path)) is None and time.time() - path.lstat().st_mtime < UNFINISHED:
            return None
    except FileNotFoundError:
        return None
    mine = path.with_name(f"{path.name}.part")
    with disk.explained("taking a request", path):
        disk.remove(mine)
        disk.rename(path, mine)  # later requests are read the next time
        text = read(mine)
        disk.remove(mine)
    if (found := parsed(text)) is None:
        raise TrainError(f'{path} must be a JSON object such as {{"do": "pause", "lr": 1e-4}}, got {text[:40]!r}')
    return found


def read(path: Path) -> str:
    """The text of a control file, or why it cannot be read. Raises FileNotFoundError."""
    try:
        return path.read_text(errors="replace")
    except FileNotFoundError:
        raise
    except OSError as error:
        return str(error.strerror)


def parsed(text: str) -> dict[str, Any] | None:
    """The object in a control file, None if it is not an object."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def listed(actions: Any) -> list[str]:
    """One action or several as a list. Raises TrainError for an unknown one."""
    found = actions if isinstance(actions, list) else [actions]
    for action in found:
        if action not in ACTIONS:
            raise TrainError(f"a request must be one of {', '.join(ACTIONS)}, got {action!r}; name one of these")
    return found


class FirstSignal:
    """Turns the first signal of a kind into a call between two instructions, since an exception inside a step would
    tear the state; a second one acts at once, but not under torchrun, which repeats what a scheduler sent to all, and
    kills what does not end. Off the main thread signals cannot be caught: there it does nothing.

    later: deliver the first one too, when the block has ended, unless an exception ended it. Schedulers send SIGTERM,
    and jupyter_client to a kernel that has not shut down after half of `shutdown_wait_time` (2.5 of 5 s), when SIGKILL
    follows. interrupts: raise KeyboardInterrupt after the call, where nothing can be torn.
    """

    interrupts = False

    def __init__(self, number: int, call: Callable[[], object], later: bool = False) -> None:
        self.number, self.call, self.later = number, call, later
        self.came = False
        self.before: Any = None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self.before = signal.signal(self.number, self.receive) or signal.SIG_DFL
        return self

    def receive(self, number: int, frame: FrameType | None) -> None:
        if self.came and not is_torchelastic_launched():
            self.deliver()
        self.came = True
        self.call()
        if self.interrupts:
            raise KeyboardInterrupt

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        self.interrupts = True
        try:
            yield
        finally:
            self.interrupts = False

    def deliver(self) -> None:
        signal.signal(self.number, self.before)
        signal.raise_signal(self.number)

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self.before is None:
            return
        signal.signal(self.number, self.before)
        if self.came and self.later and error is None:  # an error has to be shown, which ends a process as well
            flush()
            if running_kernel():
                time.sleep(SENDING)
            self.deliver()
