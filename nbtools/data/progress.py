"""Progress bars, and messages above them: in a terminal, in a notebook's cell, or as a few lines of a log.

Results go to stdout, and all of this to stderr, but in a notebook: Jupyter shows stderr in red, so there a bar is an
output of its own, of which a sentence stays. `bar` counts; `work` is for what consists of phases whose length is only
expected, as all that is measured is:

    with work("measuring captcha", precision=20, batch=20):
        phase("precision")                        # deep inside, where a bar may or may not be shown
        ...                                       # tick() now and then
        phase("batch", seconds=30)                # it turned out to take longer
"""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from html import escape
from typing import Any

from tqdm import tqdm

from nbtools.show import duration, percent, size

LEAST = 0.25  # seconds between two updates of a bar: quicker ones hang a Colab tab (lightning#2517)
TENTH, PATIENCE = 10, 30.0  # a log has a line for so many more % of a bar, or after so many seconds without one
SLOW = 2.0  # seconds before there is a bar of work that may be short
OVERDUE = 0.25  # of the time that a phase has taken so far is still left of it, where it takes longer than expected
TRACK = "display:inline-block;width:min(240px,30%);height:6px;border-radius:3px;background:rgba(128,128,128,.3)"
FILL = "display:block;height:100%;border-radius:3px;background:#3a8fc4"  # 3:1 on white and on black
LINE = "font-size:13px;line-height:1.6;font-variant-numeric:tabular-nums"


def bar(*arguments: Any, **options: Any) -> tqdm:
    """A tqdm bar; arguments and options are tqdm's. In a notebook it is a `Cell`; where stderr is a file, a few
    lines."""
    options["mininterval"] = max(LEAST, options.get("mininterval", LEAST))
    if options.get("disable"):
        return tqdm(*arguments, **options)
    if in_notebook():
        return Cell(*arguments, **options | {"file": io.StringIO(), "leave": True, "position": 0})
    if not sys.stderr.isatty():
        options |= {"file": Log(), "position": 0, "dynamic_ncols": False}
    return tqdm(*arguments, **options)


class Cell(tqdm):
    """A bar in a notebook: one output, replaced as it grows, by a sentence at the end. tqdm's own widget would be saved
    with its first text, `packing: 0%`."""

    handle: Any = None

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        known = self.format_dict
        text = ended(known) if self.disable else running(known)
        share = None if self.disable or not known["total"] else min(known["n"] / known["total"], 1.0)
        track = "" if share is None else f'<span style="{TRACK}"><span style="{FILL};width:{share:.1%}"></span></span> '
        name, _, rest = escape(text).partition(": ")
        shown = {"text/plain": text, "text/html": f'<div style="{LINE}">{name}: {track}{rest}</div>'}
        if self.handle is not None:
            self.handle.update(shown, raw=True)
            return
        from IPython.display import display

        self.handle = display(shown, raw=True, display_id=True)


def running(known: Mapping[str, Any]) -> str:
    """`packing: 34 %, 2,000 of 6,000 samples, 12 s left`. known: tqdm's `format_dict`."""
    n, total, rate, text = known["n"], known["total"], known["rate"], known["postfix"] or ""
    parts = [percent(n / total)] if total else []
    parts += [text] if text else [counted(known)]
    if known["unit"] == "B" and rate:
        parts.append(f"{size(rate)}/s")
    if not text and total and rate and n < total:
        parts.append(f"{duration((total - n) / rate)} left")
    return f"{known['prefix']}: {', '.join(parts)}"


def ended(known: Mapping[str, Any]) -> str:
    """`packing: 6,000 samples in 9.1 s`, or `packing: 2,000 of 6,000 samples in 3.2 s, then stopped`."""
    seconds, whole = known["elapsed"], not known["total"] or known["n"] >= known["total"]
    took = f"{seconds:.1f} s" if seconds < 10 else duration(seconds)
    if known["postfix"]:  # of phases
        return f"{known['prefix']}: {'done in' if whole else 'stopped after'} {took}"
    return f"{known['prefix']}: {counted(known)} in {took}{'' if whole else ', then stopped'}"


def counted(known: Mapping[str, Any]) -> str:
    """`2,000 of 6,000 samples`, `12.0 MB of 34.0 MB`, or only the number where that is all."""
    n, total, unit = known["n"], known["total"], known["unit"].strip()
    shown, name = (size, "") if unit == "B" else ("{:,}".format, "" if unit == "it" else f" {unit}")
    return f"{shown(n)} of {shown(total)}{name}" if total and n < total else f"{shown(n)}{name}"


class Work:
    """A bar over phases whose seconds are only expected. As many times as long as the past ones took, the others will
    take too: so the time left learns how slow this machine is. expected: phase → seconds; one that is left out no
    longer counts when a later one begins."""

    def __init__(self, doing: str, expected: dict[str, float]):
        self.expected, self.phase, self.doing = expected, "", doing
        self.start = self.since = time.monotonic()
        self.planned = self.taken = self.share = 0.0  # of the phases that are over, and the most that was shown
        self.bar = bar(total=1.0, desc=doing, miniters=0, leave=False, delay=SLOW)

    def begin(self, phase: str, seconds: float | None) -> None:
        now, names = time.monotonic(), list(self.expected)
        if self.phase:
            self.planned += self.expected.pop(self.phase)
            self.taken += now - self.since
        for earlier in names[: names.index(phase)] if phase in names else ():
            self.expected.pop(earlier, None)
        self.phase, self.since = phase, now
        self.expected[phase] = self.expected.get(phase, 0.0) if seconds is None else seconds
        self.tick()

    def left(self) -> float:
        """Seconds, by the pace so far."""
        elapsed, due = time.monotonic() - self.since, self.expected.get(self.phase, 0.0)
        pace = max(1.0, self.taken / self.planned if self.planned else 0.0, elapsed / due if due else 0.0)
        others = sum(seconds for name, seconds in self.expected.items() if name != self.phase)
        return pace * others + max(pace * due - elapsed, OVERDUE * elapsed)

    def tick(self) -> None:
        """Draw when it is due."""
        elapsed, left = time.monotonic() - self.start, self.left()
        self.share = self.bar.n = max(self.share, min(elapsed / max(elapsed + left, 1e-9), 0.99))
        text = ", ".join(filter(None, [self.phase, f"about {duration(max(left, 1.0))} left"]))
        self.bar.bar_format = f"{{l_bar}}{{bar}}| {text}"
        self.bar.set_postfix_str(text, refresh=False)
        self.bar.update(0)

    def end(self, whole: bool) -> None:
        self.bar.n = 1.0 if whole else self.share
        self.bar.close()


ongoing: list[Work] = []  # at most one: what is measured inside of other work has no bar of its own
attending: list[Callable[[], object]] = []


@contextmanager
def work(doing: str, progress: bool = True, /, **expected: float) -> Iterator[None]:
    """Show a bar while the block lasts. expected: phase → seconds, in their order."""
    if ongoing or not progress:
        yield
        return
    ongoing.append(Work(doing, expected))
    whole = False
    try:
        yield
        whole = True
    finally:
        ongoing.pop().end(whole)


def phase(name: str, seconds: float | None = None) -> None:
    """The next phase of the work that is shown, if any is. seconds: what it will take, where that is known better
    now."""
    for one in ongoing:
        one.begin(name, seconds)


def tick() -> None:
    """Some time has passed in long work: draw its bar, if it has one, and do what else is due meanwhile."""
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


class Log(io.StringIO):
    """What a bar writes to where stderr is a file: every tenth of the whole is a line, and at the latest after PATIENCE
    the next state is one, so that a log stays short and a slow bar shows that it moves."""

    encoding = "utf-8"

    def __init__(self) -> None:
        super().__init__()
        self.percent, self.time = 0, time.monotonic()

    def write(self, text: str) -> int:
        line, now = text.strip(), time.monotonic()
        found = re.search(r"(\d+)%", line)
        percent = int(found[1]) if found else self.percent
        if line and (percent >= self.percent + TENTH or now >= self.time + PATIENCE):
            self.percent, self.time = percent // TENTH * TENTH, now
            print(line, file=sys.stderr, flush=True)
        return len(text)


def say(message: str) -> None:
    """Show a line above the bars: in a notebook's cell, or on a terminal's stderr, since its stdout is for results."""
    tqdm.write(message, file=sys.stdout if in_notebook() else sys.stderr)


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this: a terminal's IPython has no kernel."""
    core = sys.modules.get("IPython")
    shell = core.get_ipython() if core is not None else None
    return getattr(shell, "kernel", None) is not None
