"""Widget messages of the kernel whose cell is running, handled between two steps of that cell.

A kernel runs one request after another: while a training cell runs, the clicks on its own panel wait until it ends.
Here the cell itself has the pending `comm_*` messages handled, and every other request keeps its place and order. It
relies on private attributes of ipykernel, read in the sources of 6.17.1, 7.3.0 and 7.4.0; where they are not as
expected `Messages.trouble` explains it, and the cell continues without.
"""

from __future__ import annotations

import contextvars
import inspect
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Self

COMMS = frozenset({"comm_open", "comm_msg", "comm_close", "comm_info_request", "kernel_info_request"})
"""Messages that widgets send, and that a reloaded page sends before it shows them."""
NEEDED = ("session", "shell_handlers", "set_parent", "get_parent", "_parent_ident", "_publish_status")
PERIOD, SAID = 0.05, 1.0  # seconds between two polls of the kernel's socket; after which it says again that it is busy
EVENTS, POLLIN, POLLOUT = 15, 1, 2  # zmq's, without importing it where there is no kernel


class Messages:
    """The widget messages pending for the running cell: enter it, in a FirstSignal so that no interrupt comes between a
    message and its place, and call `handle` between steps. A call costs a clock read (0.2 µs) and, once per PERIOD, a
    poll of the kernel's socket (3 to 60 µs). trouble: why widgets react only after the cell has ended, for the user."""

    trouble: str | None = None

    def __init__(self) -> None:
        self._due = self._busy = 0.0
        self._kernel: Any = None
        self._inbox: Inbox | None = None

    def __enter__(self) -> Self:
        self._kernel = running_kernel()
        try:
            self._inbox = inbox(self._kernel)
        except Exception as error:  # an unknown kernel may fail anywhere, and training matters more
            self.trouble = sentence(error)
        return self

    def __exit__(self, *_) -> None:
        box, self._inbox = self._inbox, None
        if box and not closing(self._kernel):
            box.close()

    def handle(self) -> int:
        """Handle the pending widget messages, at most once per PERIOD; return their number."""
        now, count, box = time.perf_counter(), 0, self._inbox
        if box is None or now < self._due:
            return 0
        self._due = now + PERIOD
        try:
            if not closing(self._kernel) and now >= self._busy:
                self._kernel._publish_status("busy", "shell")  # a subshell's thread says idle after each of its events
                self._busy = now + SAID
            if closing(self._kernel) or not box.waits():
                return 0
            box.fetch()
            while box.comms:
                # In a separate context: the cell's variables (its parent header among them) are unchanged.
                contextvars.copy_context().run(self._answer, box.comms.popleft(), box)
                count += 1
        except Exception as error:
            self.__exit__()
            if not closing(self._kernel):
                self.trouble = sentence(error)
        return count

    def _answer(self, message: list, box: Inbox) -> None:
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
            box.handle(kernel.shell_handlers[msg["header"]["msg_type"]], idents, msg)
        except Exception:
            traceback.print_exc()
        finally:
            flush()
            kernel._publish_status("idle", "shell")
            kernel.set_parent(*cell, channel="shell")
            kernel._publish_status("busy", "shell")  # of the cell again, or the page shows an idle kernel


class Inbox:
    """Receives the requests to a kernel in its place while a cell runs. Widget messages are handled; the kernel gets
    all others at the end, in order. stream: of requests; replies: where a handler puts its reply."""

    def __init__(self, kernel: Any, stream: Any, replies: Any) -> None:
        self.comms: deque[list] = deque()
        self._kept: list[list] = []
        self._session, self._stream, self._replies = kernel.session, stream, replies
        self._receiver: Callable[[list], Any] = stream._recv_callback
        stream.on_recv(self.receive, copy=False)

    def receive(self, message: list) -> None:
        (self.comms if is_comm(self._session, message) else self._kept).append(message)

    def waits(self) -> bool:
        return bool(self.comms) or bool(self._stream.socket.get(EVENTS) & POLLIN)

    def fetch(self) -> None:
        self._stream.flush(POLLIN)

    def handle(self, handler: Callable[..., Any], idents: list, message: dict) -> None:
        result = handler(self._replies, idents, message)
        if inspect.iscoroutine(result):  # those of COMMS await nothing
            with suppress(StopIteration):
                result.send(None)
                result.close()
                raise RuntimeError("its handlers await something")
        self._stream.flush(POLLOUT)

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


def inbox(kernel: Any) -> Inbox | None:
    """Return where the messages for this cell are; None without a kernel, and off the main thread."""
    if kernel is None or threading.current_thread() is not threading.main_thread():
        return None
    for name in NEEDED:
        getattr(kernel, name)  # an AttributeError at once, and not at the first click
    if threads := getattr(kernel, "shell_channel_thread", None):  # ipykernel 7
        manager = threads.manager
        stream = manager.get_shell_channel_to_subshell_pair(None).to_stream
        return Inbox(kernel, stream, manager.get_subshell_to_shell_channel_socket(None))
    box, queue = Inbox(kernel, kernel.shell_stream, kernel.shell_stream), kernel.msg_queue
    for _ in range(queue.qsize()):  # ipykernel 6 has moved earlier requests here, where they wait for their turn
        _, dispatch, arguments = item = queue.get_nowait()
        box.receive(arguments[0]) if dispatch == kernel.dispatch_shell else queue.put_nowait(item)
    return box


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
