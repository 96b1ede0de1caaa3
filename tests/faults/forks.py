"""A forked child: it has everything imported, so that one starts and ends in milliseconds."""

import contextlib
import gc
import importlib
import os
import select
import signal
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from nbtools.errors import NbtoolsError

DONE, FAILED, REFUSED = range(3)  # how a job ends: it returned; an error of any kind; one of nbtools
LIMIT = 20.0  # seconds after which a job hangs, which is a failure
for name in ("torch._dynamo", "torch.nn.parallel", "torch.distributed.optim"):
    importlib.import_module(name)  # as a run does
gc.freeze()  # else a collection in a child copies all pages


class Child:
    """A process of a session of its own that does a job. env: added to its environment."""

    def __init__(self, job: Callable[[], Any], env: dict[str, str] | None = None) -> None:
        self.pipe, end = os.pipe()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            os.close(self.pipe)
            os.environ.update(env or {})
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in (1, 2):
                os.dup2(nowhere, stream)
            try:
                code, text = DONE, repr(job())
            except NbtoolsError as error:
                code, text = REFUSED, f"{type(error).__name__}: {error}"
            except BaseException:
                code, text = FAILED, traceback.format_exc()
            for start in range(0, len(data := text.encode()), 4096):
                os.write(end, data[start : start + 4096])
            os._exit(code)
        os.close(end)

    def end(self) -> tuple[int, str]:
        """(how it ended, negative for a signal; its result or error in words). Whatever else it started is killed."""
        with open(self.pipe, "rb") as file:
            hangs = not select.select([file], [], [], LIMIT)[0]
            if hangs:
                self.kill()
            text = file.read().decode()
        _, status = os.waitpid(self.pid, 0)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        return (FAILED, f"nothing in {LIMIT} s") if hangs else (os.waitstatus_to_exitcode(status), text)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)


def done(job: Callable[[], Any]) -> Any:
    """What a job returns in a process of its own, as text. Raises AssertionError with its traceback."""
    code, text = Child(job).end()
    assert code == DONE, text
    return text
