"""A job in a forked child: it has everything imported, so that one starts and ends in milliseconds."""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import math
import os
import signal
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from typing import IO, Any

from tqdm import tqdm

from nbtools.errors import NbtoolsError

DONE, FAILED, REFUSED = range(3)  # how a job ends: it returned; an error of any kind; one of nbtools
LIMIT = 60.0  # seconds after which a job hangs, which is a failure
for name in ("torch._dynamo", "torch.nn.parallel", "torch.distributed.optim"):
    importlib.import_module(name)  # as a run does
gc.freeze()  # else a collection in a child copies all pages


def forked(job: Callable[[], Any]) -> tuple[int, str]:
    """(how a job ended, negative for a signal; its result or error in words). Whatever else it started is killed."""
    hangs, due = False, time.monotonic() + LIMIT
    with tempfile.TemporaryFile() as answer, warnings.catch_warnings():  # a pipe would wait for workers that live on
        warnings.filterwarnings("ignore", ".*fork", DeprecationWarning)
        if (pid := os.fork()) == 0:
            work(job, answer)
        while (ended := os.waitpid(pid, os.WNOHANG)) == (0, 0):
            if time.monotonic() > due:
                hangs, due = True, math.inf
                os.kill(pid, signal.SIGUSR1)  # to say where
                time.sleep(0.1)
                os.kill(pid, signal.SIGKILL)
            time.sleep(0.0005)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        answer.seek(0)
        text = answer.read().decode()
    return (FAILED, f"nothing in {LIMIT} s: {text}") if hangs else (os.waitstatus_to_exitcode(ended[1]), text)


def work(job: Callable[[], Any], answer: IO[bytes]) -> None:
    """Do a job in a session of its own that ends with this one's."""
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
        tqdm.set_lock(threading.RLock())  # its own is shared by processes, and stays with one that is killed
        nowhere = os.open(os.devnull, os.O_RDWR)
        for stream in (1, 2):
            os.dup2(nowhere, stream)
        faulthandler.register(signal.SIGUSR1, file=answer)
        code, text = DONE, repr(job())
    except NbtoolsError as error:
        code, text = REFUSED, f"{type(error).__name__}: {error}"
    except BaseException:
        code, text = FAILED, traceback.format_exc()
    os.write(answer.fileno(), text.encode())
    os._exit(code)
