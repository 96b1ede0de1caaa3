"""Hold SIGINT where it would leave something half done: a message between two queues, a lock never released."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class HeldInterrupt:
    """Hold SIGINT until the block ends. Off the main thread, where no signals arrive, it does nothing."""

    def __enter__(self):
        self.came, self.main = False, threading.current_thread() is threading.main_thread()
        if self.main:
            self.before = signal.signal(signal.SIGINT, self.note) or signal.SIG_DFL
        return self

    def note(self, *_) -> None:
        self.came = True

    def __exit__(self, *_) -> None:
        if self.main:
            signal.signal(signal.SIGINT, self.before)
        if self.came:
            self.came = False
            signal.raise_signal(signal.SIGINT)

    @contextmanager
    def let_through(self) -> Iterator[None]:
        """Let it interrupt a block inside as usual, such as a callback, which may take long."""
        try:
            self.__exit__()
            yield
        finally:
            if self.main:
                signal.signal(signal.SIGINT, self.note)
