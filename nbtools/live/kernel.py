"""Widget messages of the kernel whose cell is running, handled between two steps of that cell.

A kernel runs one request after another: while a training cell runs, the clicks on its own panel wait until it ends.
Here the cell itself has the pending `comm_*` messages handled, and every other request keeps its place and order. It
relies on private attributes of ipykernel, read in the sources of 6.17.1, 7.3.0 and 7.4.0; where they are not as
expected `Messages.trouble` explains it, and the cell continues without.
"""

import contextvars
import inspect
import math
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from nbtools.errors import HeldInterrupt

COMMS = frozenset({"comm_open", "comm_msg", "comm_close", "comm_info_request", "kernel_info_request"})
"""Messages that widgets send, and that a reloaded page sends before it shows them."""
NEEDED = ("session", "shell_handlers", "set_parent", "get_parent", "_parent_ident", "_publish_status")
PERIOD = 0.05  # seconds between two polls of the kernel's socket
EVENTS, POLLIN, POLLOUT = 15, 1, 2  # zmq's, without importing it where there is no kernel


class Messages:
    """The widget messages pending for the running cell: enter it, and call `handle` between steps. A call costs a clock
    read (0.2 µs) and, once per PERIOD, a poll of the kernel's socket (3 to 60 µs). trouble: why widgets react only
    after the cell has ended, for the user."""

    trouble: str | None = None

    def __init__(self) -> None:
        self._due = math.inf
        self._kernel: Any = None
        self._inbox: Queued | Received | None = None

    def __enter__(self) -> "Messages":
        self.trouble, self._kernel = None, running_kernel()
        try:
            with HeldInterrupt():
                self._inbox = inbox(self._kernel)
        except KeyboardInterrupt:
            self.__exit__()
            raise
        except Exception as error:  # an unknown kernel may fail anywhere, and training matters more
            self.trouble = sentence(error)
        self._due = 0.0 if self._inbox else math.inf
        return self

    def __exit__(self, *_) -> None:
        box, self._inbox, self._due = self._inbox, None, math.inf
        if box and not closing(self._kernel):
            with HeldInterrupt():
                box.close()

    def handle(self) -> int:
        """Handle the pending widget messages, at most once per PERIOD; return their number."""
        if time.perf_counter() < self._due:
            return 0
        if closing(self._kernel):
            self.__exit__()
            return 0
        self._due = time.perf_counter() + PERIOD
        count, box = 0, self._inbox
        try:
            if not box or not box.waits():
                return 0
            with HeldInterrupt() as interrupt:
                box.fetch()
                while box.comms:
                    # In a separate context: the cell's variables (its parent header among them) are unchanged.
                    contextvars.copy_context().run(self._answer, box.comms.popleft(), box, interrupt)
                    count += 1
        except Exception as error:
            if not closing(self._kernel):
                self.trouble = sentence(error)
            self.__exit__()
        return count

    def _answer(self, message: list, box: "Queued | Received", interrupt: HeldInterrupt) -> None:
        """Do what Kernel.dispatch_shell does. Frontends wait for busy and idle before they send a slider's next value,
        and recognise an echo by its parent; ipykernel 6 has one buffer of printed text for all parents."""
        kernel = self._kernel
        idents, frames = kernel.session.feed_identities(message, copy=False)
        msg = kernel.session.deserialize(frames, content=True, copy=False)
        cell = kernel._parent_ident["shell"], kernel.get_parent("shell")
        flush()
        kernel.set_parent(idents, msg, channel="shell")
        try:
            kernel._publish_status("busy", "shell")
            with interrupt.let_through():
                box.handle(kernel.shell_handlers[msg["header"]["msg_type"]], idents, msg)
        except Exception:
            traceback.print_exc()
        finally:
            try:
                flush()
                kernel._publish_status("idle", "shell")
            finally:
                kernel.set_parent(*cell, channel="shell")
                kernel._publish_status("busy", "shell")  # of the cell again, or the page shows an idle kernel


class Queued:
    """ipykernel 6: requests are moved from the socket to `msg_queue`, where they wait for their turn."""

    def __init__(self, kernel: Any) -> None:
        self.comms: deque[list] = deque()
        self._kernel, self._stream, self._queue = kernel, kernel.shell_stream, kernel.msg_queue
        self._waiting = -1  # none looked at

    def waits(self) -> bool:
        return bool(self._stream.socket.get(EVENTS) & POLLIN) or self._queue.qsize() != self._waiting

    def fetch(self) -> None:
        """Take the comm messages out, when something arrived: each read checks a signature."""
        self._stream.flush(POLLIN)
        for _ in range(self._queue.qsize() if self._queue.qsize() != self._waiting else 0):
            _, dispatch, arguments = item = self._queue.get_nowait()
            if dispatch == self._kernel.dispatch_shell and is_comm(self._kernel.session, arguments[0]):
                self.comms.append(arguments[0])
            else:
                self._queue.put_nowait(item)
        self._waiting = self._queue.qsize()

    def handle(self, handler: Callable[..., Any], idents: list, message: dict) -> None:
        done(handler(self._stream, idents, message))
        self._stream.flush(POLLOUT)

    def close(self) -> None:
        """Put back in front what was not handled."""
        rest = [self._queue.get_nowait() for _ in range(self._queue.qsize())]
        for message in self.comms:
            self._kernel.schedule_dispatch(self._kernel.dispatch_shell, message)
        for item in rest:
            self._queue.put_nowait(item)


class Received:
    """ipykernel 7: a stream hands each request to a task, which cannot be taken back and waits for the cell's lock. So
    while the cell runs another receiver keeps the requests, and the kernel's own gets them at the end, in order."""

    def __init__(self, kernel: Any, stream: Any, replies: Any) -> None:
        self.comms: deque[list] = deque()
        self._kept: list[list] = []
        self._session, self._stream, self._replies = kernel.session, stream, replies
        self._receiver: Callable[[list], Any] = stream._recv_callback
        stream.on_recv(self._receive, copy=False)

    def _receive(self, message: list) -> None:
        (self.comms if is_comm(self._session, message) else self._kept).append(message)

    def waits(self) -> bool:
        return bool(self.comms) or bool(self._stream.socket.get(EVENTS) & POLLIN)

    def fetch(self) -> None:
        self._stream.flush(POLLIN)

    def handle(self, handler: Callable[..., Any], idents: list, message: dict) -> None:
        done(handler(self._replies, idents, message))

    def close(self) -> None:
        """Give the stream back; tasks are made at once, so that nothing read later overtakes what was kept."""
        self._stream.on_recv(self._receiver, copy=False)
        for message in [*self.comms, *self._kept]:
            result = self._receiver(message)
            if inspect.iscoroutine(result):
                self._stream.io_loop.asyncio_loop.create_task(result)


def running_kernel() -> Any:
    """Return the kernel that runs this cell; None outside of notebooks."""
    ipython = sys.modules.get("IPython")
    return getattr(ipython.get_ipython(), "kernel", None) if ipython else None


def closing(kernel: Any) -> bool:
    """Return whether a kernel was asked to shut down: using a socket that its threads close may end the process."""
    return bool(getattr(getattr(kernel, "shell", None), "exit_now", False))


def inbox(kernel: Any) -> Queued | Received | None:
    """Return where the messages for this cell are; None without a kernel, and off the main thread."""
    if kernel is None or threading.current_thread() is not threading.main_thread():
        return None
    for name in NEEDED:
        getattr(kernel, name)  # an AttributeError at once, and not at the first click
    if threads := getattr(kernel, "shell_channel_thread", None):  # ipykernel 7
        manager = threads.manager
        stream = manager.get_shell_channel_to_subshell_pair(None).to_stream
        return Received(kernel, stream, manager.get_subshell_to_shell_channel_socket(None))
    return Queued(kernel)


def done(result: Any) -> None:
    """Run a coroutine handler to its end: those of COMMS await nothing."""
    if inspect.iscoroutine(result):
        with suppress(StopIteration):
            result.send(None)
            result.close()
            raise RuntimeError("its handlers await something")


def is_comm(session: Any, message: list) -> bool:
    """Return whether a raw request is a widget's. One that cannot be read is left to the kernel to report."""
    try:
        _, frames = session.feed_identities(message, copy=False)
        return session.deserialize(frames, content=False, copy=False)["header"]["msg_type"] in COMMS
    except Exception:
        return False


def flush() -> None:
    for out in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # None, closed, or a test's replacement
            out.flush()


def sentence(error: Exception) -> str:
    return (
        "Buttons and sliders react only after this cell has ended, because nbtools does not know this notebook's "
        f"kernel ({type(error).__name__}: {error}); interrupting the kernel and control.json work as usual."
    )
