"""Requests to a run: panel, terminal, control.json and signals put them into one `Requests`, read between two steps."""

import json
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from torch.distributed import is_torchelastic_launched

from nbtools import disk
from nbtools.errors import NbtoolsError, TrainError
from nbtools.live.kernel import flush, running_kernel
from nbtools.train import CONTROL, Plan, TrainState, checkpoint, doubts, list_changes

ACTIONS = ("pause", "resume", "stop", "evaluate", "save", "profile", "best", "undo")
REFUSED = "refused: "  # the start of a row of the history that answers a request the run cannot fulfil
SENDING = 0.3  # seconds for zmq's thread to send what a kernel has flushed: nothing tells when it has


@dataclass
class Plans:
    """The wanted plan and the applied one, where no TrainState holds them: before a run, and of another process."""

    plan: Plan
    applied: Plan


@dataclass(eq=False)
class Requests:
    """Hold what is requested of a run. `state.plan` is the wanted plan, `state.applied` the one in effect; advised:
    what values are compared with. check: raises NbtoolsError for a plan that the run cannot continue with. able:
    whether an action has anything to do. stopper: who asked for the stop."""

    state: TrainState | Plans
    advised: Plan
    check: Callable[[Plan], None] = lambda plan: None
    able: Callable[[str], bool] = lambda action: True
    paused: bool = False
    pending: set[str] = field(default_factory=set)
    stopper: str = "you"

    def post(self, action: str, by: str = "you") -> None:
        if action in ("pause", "resume", "stop"):
            self.paused = action == "pause"
        if action not in ("pause", "resume"):
            self.pending.add(action)
            self.stopper = by if action == "stop" else self.stopper

    def take(self, action: str) -> bool:
        """Return whether an action was pending; it no longer is."""
        pending = action in self.pending
        self.pending.discard(action)
        return pending

    @property
    def stop(self) -> bool:
        return "stop" in self.pending

    def want(self, plan: Plan, sure: bool = False) -> dict[str, str]:
        """Want a plan, unless it has to be confirmed first: return setting → a sentence. Raises as `check` does."""
        self.check(plan)
        asks = {} if sure else doubts(self.state.plan, plan, self.advised)
        if not asks and plan != self.state.plan:
            self.state.plan = plan
        return asks

    @property
    def change(self) -> str:
        """Return the settings that are wanted but not applied yet, in a line."""
        return list_changes(self.state.plan.changes_from(self.state.applied))


def advised_plan(folder: Path, plan: Plan) -> Plan:
    """Return the plan that was advised for the run in a folder, else the one it was started with, else `plan`."""
    values = checkpoint.read_index(folder).get("advised", {})
    return plan.replace(**{name: value for name, value in values.items() if name in plan.to_dict()})


def send(
    folder: str | Path, actions: Iterable[str] = (), settings: Mapping[str, Any] | None = None, force: bool = False
) -> Path:
    """Add requests to the run in a folder, which another process trains and which answers in its history. force: apply
    values that would need confirmation. Raises TrainError for an unknown action, or if there is no folder."""
    path, waiting = Path(folder) / CONTROL, {}
    if not path.parent.is_dir():
        raise TrainError(f"{folder}: does not exist, so no run can take a request; name a run's folder")
    with disk.explained("sending a request", path):
        with suppress(FileNotFoundError, ValueError):  # the run takes it at any moment
            waiting = disk.from_json(path.read_text())
        actions, forced = parse_actions([*parse_actions(waiting.pop("do", [])), *actions]), waiting.pop("force", False)
        if waiting:
            force = forced and (force or not settings)  # force must not extend to requests of somebody else
        return disk.write_atomic(path, json.dumps({"do": actions, "force": force, **waiting, **(settings or {})}))


def receive(folder: Path, requests: Requests) -> None:
    """Post what control.json requests, and remove it. Raises NbtoolsError for what is refused: then none is posted."""
    path, mine, plan = folder / CONTROL, folder / f"{CONTROL}.part", requests.state.plan
    if not path.exists():
        return
    with disk.explained("taking a request", path):
        disk.rename(path, mine)  # later requests are read the next time
        text = mine.read_text(errors="replace")
        disk.remove(mine)
    try:
        settings = disk.from_json(text)
    except ValueError:
        rule = 'a request must be a JSON object such as {"do": "pause", "lr": 1e-4}'
        raise TrainError(f"{path}: {rule}, got {text[:40]!r}; write one") from None
    try:
        actions, force = parse_actions(settings.pop("do", [])), settings.pop("force", False)
        if not isinstance(force, bool):
            raise TrainError(f'"force" must be true or false, got {force!r}; write true')
        wanted = plan.turn(**{n: plan.parse(n, v) if isinstance(v, str) else v for n, v in settings.items()})
        if asks := requests.want(wanted, sure=force):
            raise TrainError(f'{"; ".join(asks.values())}; to apply it anyway add "force": true')
    except NbtoolsError as error:
        raise type(error)(f"{path}: {error}") from None
    for action in actions:
        requests.post(action)


def parse_actions(actions: Any) -> list[str]:
    """Return one action or several as a list. Raises TrainError for an unknown one."""
    actions = actions if isinstance(actions, list) else [actions]
    if unknown := [action for action in actions if action not in ACTIONS]:
        raise TrainError(f"a request must be one of {', '.join(ACTIONS)}, got {unknown[0]!r}; name one of these")
    return actions


class FirstSignal:
    """Turns the first signal of a kind into a call: an exception inside a step would tear the state. A second one acts
    at once, but not under torchrun, which repeats what a scheduler sent to all. later: deliver the first one too when
    the block has ended well. Off the main thread, where no signals arrive, it does nothing."""

    def __init__(self, number: int, call: Callable[[], object], later: bool = False) -> None:
        self.number, self.call, self.later = number, call, later
        self.came, self.before = False, None

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self.before = signal.signal(self.number, self.receive) or signal.SIG_DFL
        return self

    def receive(self, *_: Any) -> None:
        if self.came and not is_torchelastic_launched():
            signal.signal(self.number, self.before)
            signal.raise_signal(self.number)
        self.came = True
        self.call()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: Any) -> None:
        if self.before is None:
            return
        signal.signal(self.number, self.before)
        if self.came and self.later and error is None:  # an error has to be shown, which ends a process as well
            flush()
            time.sleep(SENDING if running_kernel() else 0)
            signal.raise_signal(self.number)
