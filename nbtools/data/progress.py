"""Progress bars, which tqdm draws, and messages above them: on stderr, in a notebook in the output of the cell.

`bar` counts; `work` is for phases whose length is only expected: `phase` begins one, and `tick` draws now and then.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

from tqdm import tqdm

LEAST, PATIENCE = 0.25, 30.0  # seconds between updates: quicker ones hang a Colab tab (lightning#2517); in a log file
SLOW = 2.0  # seconds before there is a bar of work that may be short
BYTES = {"unit": "B", "unit_scale": True}  # options of a bar
CLOCK = "{l_bar}{bar}| {remaining} left{postfix}"

ongoing: list[tuple[tqdm, dict[str, float], float]] = []
"""(bar, phase → expected seconds, start), at most one: what is measured inside of other work has no bar of its own."""
attending: list[Callable[[], object]] = []


def bar(*arguments: Any, **options: Any) -> tqdm:
    """Return a tqdm bar, whose arguments and options are tqdm's."""
    options["mininterval"] = LEAST if in_notebook() or sys.stderr.isatty() else PATIENCE
    if in_notebook():  # which shows stderr in red
        options |= {"file": sys.stdout, "ncols": 90}
    elif not sys.stderr.isatty():
        options |= {"file": Log(), "position": 0}
    return tqdm(*arguments, **options)


class Log:
    """A stderr that is a file: each state of a bar is a line."""

    def write(self, text: str) -> None:
        if line := text.strip():
            print(line, file=sys.stderr, flush=True)


@contextmanager
def work(doing: str, progress: bool = True, /, **expected: float) -> Iterator[None]:
    """Show the time left while the block lasts. expected: phase → seconds, in their order."""
    if ongoing or not progress:
        yield
        return
    options = {"bar_format": CLOCK, "smoothing": 0, "miniters": 0, "leave": False, "delay": SLOW}
    with bar(desc=doing, total=sum(expected.values()), **options) as shown:
        ongoing.append((shown, expected, monotonic()))
        try:
            yield
        finally:
            ongoing.clear()


def phase(name: str, seconds: float | None = None) -> None:
    """Begin a phase of the work that is shown, if any is. seconds: what it will take, where that is clearer now."""
    for shown, expected, start in ongoing:
        expected[name] = expected.get(name, 0.0) if seconds is None else seconds
        later = [*expected.values()][[*expected].index(name) :]
        shown.total = monotonic() - start + sum(later)
        shown.set_postfix_str(name, refresh=False)
    tick()


def tick() -> None:
    """Draw the bar of the work that is shown, and call what `meanwhile` was given."""
    for shown, _, start in ongoing:
        shown.n = spent = monotonic() - start
        shown.total = max(shown.total, 1.1 * spent + 0.5)  # an estimate that is exceeded grows
        shown.update(0)
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
    return getattr(core and core.get_ipython(), "kernel", None) is not None
