"""A forked child: it has everything imported, so that one starts and ends in milliseconds."""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import os
import signal
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from tqdm import tqdm

from nbtools.errors import NbtoolsError

DONE, FAILED, REFUSED = range(3)  # how a job ends: it returned; an error of any kind; one of nbtools
LIMIT = 60.0  # seconds after which a job hangs, which is a failure
for name in ("torch._dynamo", "torch.nn.parallel", "torch.distributed.optim"):
    importlib.import_module(name)  # as a run does
gc.freeze()  # else a collection in a child copies all pages


class Child:
    """A process of a session of its own that does a job, and ends with this one. env: added to its environment.
    limit: seconds after which it is killed."""

    def __init__(self, job: Callable[[], Any], env: dict[str, str] | None = None, limit: float = LIMIT) -> None:
        self.limit, self.due, self.hangs = limit, time.monotonic() + limit, False
        # No pipe: it would stay open as long as a worker that outlives the child.
        self.answer = tempfile.TemporaryFile()  # noqa: SIM115
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
            self.pid = os.fork()
        if self.pid == 0:
            try:
                os.setsid()
                ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
                os.environ.update(env or {})
                tqdm.set_lock(threading.RLock())  # its own is shared by processes, and stays with one that is killed
                nowhere = os.open(os.devnull, os.O_RDWR)
                for stream in (1, 2):
                    os.dup2(nowhere, stream)
                faulthandler.register(signal.SIGUSR1, file=self.answer)
                code, text = DONE, repr(job())
            except NbtoolsError as error:
                code, text = REFUSED, f"{type(error).__name__}: {error}"
            except BaseException:
                code, text = FAILED, traceback.format_exc()
            os.write(self.answer.fileno(), text.encode())
            os._exit(code)

    def end(self) -> tuple[int, str]:
        """(how it ended, negative for a signal; its result or error in words). Whatever else it started is killed."""
        while (ended := self.ended()) is None:
            time.sleep(0.0005)
        return ended

    def ended(self) -> tuple[int, str] | None:
        """As `end`, or None as long as it works."""
        if not self.hangs and time.monotonic() > self.due:
            self.hangs = True
            os.kill(self.pid, signal.SIGUSR1)  # to say where
            time.sleep(0.1)
            self.kill()
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid == 0:
            return None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        with self.answer:
            self.answer.seek(0)
            text = self.answer.read().decode()
        code = os.waitstatus_to_exitcode(status)
        return (FAILED, f"nothing in {self.limit} s: {text}") if self.hangs else (code, text)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
