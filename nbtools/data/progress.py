"""Progress bars, which tqdm draws, and messages above them: on stderr, in a notebook in the output of the cell.

`bar` counts; `work` is for phases whose length is only expected:

    with work("measuring captcha", precision=20, batch=20):
        phase("precision")             # deep inside, where a bar may or may not be shown
        ...                            # tick() now and then
        phase("batch", seconds=30)     # it turned out to take longer
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tqdm import tqdm

LEAST = 0.25  # seconds between two updates of a bar: quicker ones hang a Colab tab (lightning#2517)
PATIENCE = 30.0  # the same where stderr is a file, so that a log stays short
SLOW = 2.0  # seconds before there is a bar of work that may be short
PHASES = "{l_bar}{bar}| {remaining} left{postfix}"


def bar(*arguments: Any, **options: Any) -> tqdm:
    """Return a tqdm bar, whose arguments and options are tqdm's; where stderr is a file, a line now and then."""
    notebook = in_notebook()
    least = LEAST if notebook or sys.stderr.isatty() else PATIENCE
    options["mininterval"] = max(least, options.get("mininterval", least))
    if notebook:  # Jupyter shows stderr in red
        options |= {"file": sys.stdout, "ncols": 90, "dynamic_ncols": False}
    elif not sys.stderr.isatty():
        options |= {"file": Log(), "position": 0, "dynamic_ncols": False}
    return tqdm(*arguments, **options)


class Log:
    """A stderr that is a file: each state of a bar is a line."""

    def write(self, text: str) -> None:
        if line := text.strip():
            print(line, file=sys.stderr, flush=True)


class Work:
    """A bar over phases, in expected seconds: so tqdm's time left learns how slow this machine is."""

    def __init__(self, doing: str, expected: dict[str, float]):
        self.expected, self.phase, self.done, self.start = expected, "", 0.0, time.monotonic()
        self.bar = bar(desc=doing, bar_format=PHASES, smoothing=0, miniters=0, leave=False, delay=SLOW)

    def begin(self, phase: str, seconds: float | None) -> None:
        self.done += self.expected.pop(self.phase, 0.0)
        while phase in self.expected and phase != next(iter(self.expected)):
            del self.expected[next(iter(self.expected))]  # skipped
        self.expected[phase] = self.expected.get(phase, 0.0) if seconds is None else seconds
        self.phase, self.start = phase, time.monotonic()
        self.bar.set_postfix_str(phase, refresh=False)
        self.tick()

    def tick(self) -> None:
        elapsed, due = time.monotonic() - self.start, self.expected.get(self.phase, 0.0)
        self.bar.total = self.done + sum(self.expected.values())
        self.bar.n = self.done + min(elapsed, 0.95 * due)
        self.bar.update(0)


ongoing: list[Work] = []  # at most one: what is measured inside of other work has no bar of its own
attending: list[Callable[[], object]] = []


@contextmanager
def work(doing: str, progress: bool = True, /, **expected: float) -> Iterator[None]:
    """Show a bar while the block lasts. expected: phase → seconds, in their order."""
    if ongoing or not progress:
        yield
        return
    ongoing.append(Work(doing, expected))
    try:
        yield
    finally:
        ongoing.pop().bar.close()


def phase(name: str, seconds: float | None = None) -> None:
    """Begin the next phase of the work that is shown, if any is. seconds: what it will take, where that is known better
    now."""
    for one in ongoing:
        one.begin(name, seconds)


def tick() -> None:
    """Draw the bar of long work, if it has one, and do what else is due meanwhile."""
    for one in ongoing:
        one.tick()
    for act in attending:
        act()


@contextmanager
def meanwhile(act: Callable[[], object]) -> Iterator[None]:
    """Call this at every tick of the block."""
    attending.append(act)
    try:
        yield
    finally:
        attending.pop()


def say(message: str) -> None:
    """Show a line above the bars: in a notebook's cell, or on a terminal's stderr, since its stdout is for results."""
    tqdm.write(message, file=sys.stdout if in_notebook() else sys.stderr)


def in_notebook() -> bool:
    """Return whether a Jupyter kernel runs this: a terminal's IPython has no kernel."""
    core = sys.modules.get("IPython")
    shell = core.get_ipython() if core is not None else None
    return getattr(shell, "kernel", None) is not None
