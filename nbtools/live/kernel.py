"""Widget messages of the kernel whose cell is running, handled between two steps of that cell.

A kernel runs one request after another: while a training cell runs, the clicks on its own panel wait until it ends.
Here the cell itself has the pending `comm_*` messages handled, and every other request keeps its place and order. It
relies on private attributes of ipykernel, read in the sources of 6.17.1, 7.3.0 and 7.4.0; where they are not as
expected `Messages.trouble` explains it, and the cell continues without.
"""

import contextvars
import inspect
import sys
import threading
import time
import traceback
from collections import deque
from contextlib import suppress
from typing import Any, Self

COMMS = frozenset({"comm_open", "comm_msg", "comm_close", "comm_info_request", "kernel_info_request"})
"""Messages that widgets send, and that a reloaded page sends before it shows them."""
PERIOD, SAID = 0.05, 1.0  # seconds between two polls of the kernel's socket; after which it says again that it is busy
EVENTS, POLLIN, POLLOUT = 15, 1, 2  # zmq's, without importing it where there is no kernel
TROUBLE = """Buttons and sliders react only after this cell has ended, because nbtools does not know this notebook's \
kernel ({}: {}); interrupting the kernel and control.json work as usual."""


class Messages:
    """The widget messages pending for the running cell: enter it, in a FirstSignal so that no interrupt comes between a
    message and its place, and call `handle` between steps. trouble: why widgets react only after the cell.

    Inside, it receives the requests to the kernel in its place; the kernel gets all that are no widget's at the end, in
    order. stream: of requests, None where there is nothing to receive; replies: where a handler puts its reply.
    """

    trouble: str | None = None
    stream: Any = None

    def __init__(self) -> None:
        self.kernel, self.comms, self.kept = running_kernel(), deque[list](), list[list]()
        self.due = self.busy = 0.0

    def __enter__(self) -> Self:
        if self.kernel is not None and threading.current_thread() is threading.main_thread():
            try:
                self.connect(self.kernel)
            except Exception as error:  # an unknown kernel may fail anywhere, and training matters more
                self.fail(error)
        return self

    def connect(self, kernel: Any) -> None:
        self.session, threads = kernel.session, getattr(kernel, "shell_channel_thread", None)
        if threads is None:  # ipykernel 6
            stream = self.replies = kernel.shell_stream
        else:
            stream = threads.manager.get_shell_channel_to_subshell_pair(None).to_stream
            self.replies = threads.manager.get_subshell_to_shell_channel_socket(None)
        for comm in [*getattr(getattr(kernel, "comm_manager", None), "comms", {}).values()]:
            comm._reply_subshell_id = None  # 7.4: clicks go where the last came from, a closed page's subshell perhaps
        self.receiver = stream._recv_callback
        stream.on_recv(self.receive, copy=False)
        self.stream = stream
        for _ in range(kernel.msg_queue.qsize() if threads is None else 0):
            _, dispatch, arguments = item = kernel.msg_queue.get_nowait()  # where earlier requests wait for their turn
            self.receive(arguments[0]) if dispatch == kernel.dispatch_shell else kernel.msg_queue.put_nowait(item)

    def __exit__(self, *_) -> None:
        """Give the stream back; tasks are made at once, so that nothing read later overtakes what was kept."""
        stream, self.stream = self.stream, None
        if stream is None or closing(self.kernel):
            return
        stream.on_recv(self.receiver, copy=False)
        for message in [*self.comms, *self.kept]:
            result = self.receiver(message)
            if inspect.iscoroutine(result):
                stream.io_loop.asyncio_loop.create_task(result)

    def fail(self, error: Exception) -> None:
        """Give up, and say why; not of a kernel that is shut down."""
        self.__exit__()
        self.trouble = None if closing(self.kernel) else TROUBLE.format(type(error).__name__, error)

    def handle(self) -> int:
        """Handle the pending widget messages, at most once per PERIOD; return their number."""
        now, count = time.perf_counter(), 0
        if self.stream is None or now < self.due or closing(self.kernel):
            return 0
        self.due = now + PERIOD
        try:
            if now >= self.busy:
                self.kernel._publish_status("busy", "shell")  # a subshell's thread says idle after each of its events
                self.busy = now + SAID
            if not (self.comms or self.stream.socket.get(EVENTS) & POLLIN):
                return 0
            self.stream.flush(POLLIN)
            while self.comms:
                contextvars.copy_context().run(self.answer, self.comms.popleft())  # the cell's own stays as it is
                count += 1
        except Exception as error:
            self.fail(error)
        return count

    def receive(self, message: list) -> None:
        """Keep a raw request. One that cannot be read is left to the kernel to report."""
        kind = None
        with suppress(Exception):
            _, frames = self.session.feed_identities(message, copy=False)
            kind = self.session.deserialize(frames, content=False, copy=False)["header"]["msg_type"]
        (self.comms if kind in COMMS else self.kept).append(message)

    def answer(self, message: list) -> None:
        """Do what Kernel.dispatch_shell does. Frontends wait for busy and idle before they send a slider's next value,
        and recognise an echo by its parent; ipykernel 6 has one buffer of printed text for all parents."""
        kernel = self.kernel
        idents, frames = self.session.feed_identities(message, copy=False)
        msg = self.session.deserialize(frames, content=True, copy=False)
        cell = kernel._parent_ident["shell"], kernel.get_parent("shell")
        flush()
        msg["header"].pop("subshell_id", None)  # else 7.4 sends the next to the subshell, which may be deleted by then
        kernel.set_parent(idents, msg, channel="shell")
        try:
            kernel._publish_status("busy", "shell")
            result = kernel.shell_handlers[msg["header"]["msg_type"]](self.replies, idents, msg)
            if inspect.iscoroutine(result):
                with suppress(StopIteration):  # at its end: those of COMMS await nothing
                    result.send(None)
                    raise RuntimeError("its handlers await something")
            self.stream.flush(POLLOUT)
        except Exception:
            traceback.print_exc()
        finally:
            flush()
            kernel._publish_status("idle", "shell")
            kernel.set_parent(*cell, channel="shell")
            kernel._publish_status("busy", "shell")  # of the cell again, or the page shows an idle kernel


def running_kernel() -> Any:
    """Return the kernel that runs this cell; None outside of notebooks."""
    ipython = sys.modules.get("IPython")
    return getattr(ipython.get_ipython(), "kernel", None) if ipython else None


def closing(kernel: Any) -> bool:
    """Return whether a kernel was asked to shut down: using a socket that its threads close may end the process."""
    return bool(getattr(getattr(kernel, "shell", None), "exit_now", False))


def flush() -> None:
    for out in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # None, closed, or a test's replacement
            out.flush()
