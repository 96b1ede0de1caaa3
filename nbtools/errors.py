"""The errors that nbtools raises on purpose: each names the field, the rule, the value, and what to do next. Ctrl-C."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class NbtoolsError(Exception):
    """The base class. entry: a heading of docs/troubleshooting.md, which the message then ends with."""

    def __init__(self, *args: object, entry: str = "") -> None:
        super().__init__(*args)
        self.entry = entry

    def __str__(self) -> str:
        text = super().__str__()
        return f"{sentence(text)} See “{self.entry}” in docs/troubleshooting.md" if self.entry else text


class PlanError(NbtoolsError, ValueError):
    """A training setting breaks its rule."""


class DiskError(NbtoolsError):
    """A disk is full, read-only or failing."""


class StageError(NbtoolsError):
    """A data set could not be fetched to local disk."""


class DriveRefused(StageError):
    """The dialog in which Colab asks for access to Drive was declined."""


class ArchiveError(StageError):
    """An archive is damaged, hostile, or of an unknown format."""


class PackError(NbtoolsError):
    """Raw data cannot be packed, or a pack cannot be opened. Of a single sample its arguments are value, rule, fix."""

    def __str__(self) -> str:
        if len(self.args) != 3:
            return super().__str__()
        value, rule, fix = self.args
        return f"{rule}, got {value}; {fix}"


class CheckpointError(NbtoolsError):
    """A run folder or a checkpoint in it is missing, damaged, or from another run."""


class TrainError(NbtoolsError):
    """Training cannot start or continue, or a network cannot be exported."""


class MissingExtra(NbtoolsError, ImportError):
    """An optional package is needed; the message says how to install it."""


def sentence(text: str) -> str:
    """Return a text with a full stop, unless it ends with one or asks."""
    return text if text.endswith((".", "?")) else f"{text}."


def ctrl_c(run: Any) -> KeyboardInterrupt:
    """Return the KeyboardInterrupt to raise once everything is saved; its `run` is the run."""
    # Not of a class of its own: for KeyboardInterrupt alone Python ends by SIGINT, which ends a shell's loop too.
    error = KeyboardInterrupt(f"{run}; run it again to continue")
    vars(error)["run"] = run
    return error


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
