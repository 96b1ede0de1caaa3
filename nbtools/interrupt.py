"""Holds SIGINT where it would leave something half done: a message between two queues, a lock never released."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self


class HeldInterrupt:
    """Holds SIGINT until the block ends. Off the main thread, where no signals arrive, it does nothing."""

    def __enter__(self) -> Self:
        self._came = False
        self._main = threading.current_thread() is threading.main_thread()
        if self._main:
            self._before = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, *_) -> None:
        if self._main:
            self._restore()

    def _note(self, *_) -> None:
        self._came = True

    def _restore(self) -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL if self._before is None else self._before)
        if self._came:
            self._came = False
            signal.raise_signal(signal.SIGINT)

    @contextmanager
    def let_through(self) -> Iterator[None]:
        """A callback may take long, so it can be interrupted as usual."""
        if not self._main:
            yield
            return
        try:
            self._restore()
            yield
        finally:
            signal.signal(signal.SIGINT, self._note)
