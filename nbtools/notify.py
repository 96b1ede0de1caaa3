"""A web hook: one POST that says how a run ended, to whatever reads JSON (a chat's incoming hook, a phone's push
service). Its address is a secret, whoever knows it can write there: it is never stored, printed, or part of an error.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from nbtools.errors import CheckpointError, TrainError
from nbtools.live import ended
from nbtools.run import Run
from nbtools.train import TaskLike
from nbtools.version import VERSION

PATIENCE = 5.0  # seconds that a run waits for the answer, at its very end


class Stay(HTTPRedirectHandler):
    """No redirect is followed: it may lead to http."""

    def redirect_request(self, *_: Any) -> None:
        return None


def require_hook(address: str | None) -> None:
    """Raise TrainError unless it is https."""
    if address is not None and not (isinstance(address, str) and address.lower().startswith("https://")):
        raise TrainError(
            "notify must be the address of a web hook that begins with https://, since it is a secret; the one given "
            "(not repeated here) does not"
        )


class Hook:
    """Sends one message from a thread. address: of the hook; None: there is none, and nothing is done. Raises
    TrainError unless it is https."""

    def __init__(self, address: str | None):
        require_hook(address)
        self.address, self.thread, self.why, self.sent = address, None, "", 0.0

    @contextmanager
    def telling(self, folder: Path, task: TaskLike, stopped: Callable[[], bool]) -> Iterator[None]:
        """Send how the block, the training of a run, ended. stopped: whether somebody asked for that."""
        try:
            yield
        except BaseException as error:
            self.send(folder, task, ended(error, stopped()))
            self.wait()
            raise
        self.send(folder, task, ended(None, stopped()))

    def send(self, *what: Any) -> None:
        """Begin to send a `message`."""
        if self.address is not None:
            self.thread, self.sent = threading.Thread(target=self.post, args=what, daemon=True), monotonic()
            self.thread.start()

    def post(self, *what: Any) -> None:
        """Note why it failed, without texts of the error: they may name the address."""
        try:
            headers = {"Content-Type": "application/json", "User-Agent": f"nbtools/{VERSION}"}
            request = Request(str(self.address), json.dumps(message(*what)).encode(), headers, method="POST")
            with build_opener(Stay).open(request, timeout=PATIENCE):
                pass
        except HTTPError as error:
            self.why = f"it answered {error.code}"
        except URLError as error:
            self.why = type(error.reason).__name__
        except Exception as error:
            self.why = type(error).__name__

    def wait(self) -> str:
        """Why the message did not arrive, or "", at the latest PATIENCE after it was sent."""
        if self.thread is not None:
            self.thread.join(max(self.sent + PATIENCE - monotonic(), 0.0))
            self.why = f"no answer in {PATIENCE:g} s" if self.thread.is_alive() else self.why
        return f"the web hook of notify= was not reached: {self.why}" if self.why else ""


def message(folder: Path, task: TaskLike, state: str) -> dict[str, Any]:
    """run, state, best (epoch and metrics; {} before the first evaluation), and the same in a sentence: text, by which
    name the hooks of most chats expect it."""
    best, reached = {}, ""
    with suppress(CheckpointError):  # it ended before its first checkpoint
        run = Run.open(folder, task)
        best, reached = run.best, f", best {run.reached}" if run.reached else ""
    values = {n: v for n, v in best.items() if n.startswith("val_") and math.isfinite(v)}
    found = {"epoch": best["epoch"], **values} if values else {}
    return {"run": folder.name, "state": state, "best": found, "text": f"{folder.name}: {state}{reached}"}
