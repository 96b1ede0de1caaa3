"""Progress bars, and messages above them: in a terminal, in a notebook's cell, or as a few lines of a log.

Results go to stdout, and all of this to stderr; a notebook's cell shows both.
"""

from __future__ import annotations

import io
import re
import sys
import time
from typing import Any

from tqdm import tqdm

LEAST = 0.25  # seconds between two updates of a bar: quicker ones hang a Colab tab (lightning#2517)
TENTH, PATIENCE = 10, 30.0  # a log has a line for so many more % of a bar, or after so many seconds without one


def bar(*arguments: Any, **options: Any) -> tqdm:
    """A tqdm bar; arguments and options are tqdm's. In a notebook it is one line of text in a separate output, which
    stays whatever `leave` says: tqdm's widget would be saved with its first text, `packing: 0%`. Where stderr is a
    file, it is a few lines."""
    options["mininterval"] = max(LEAST, options.get("mininterval", LEAST))
    if options.get("disable"):
        return tqdm(*arguments, **options)
    if in_notebook():
        options |= {"file": Line(), "leave": True, "position": 0, "dynamic_ncols": False}
    elif not sys.stderr.isatty():
        options |= {"file": Log(), "position": 0, "dynamic_ncols": False}
    return tqdm(*arguments, **options)


class Line(io.StringIO):
    """What a bar writes to in a notebook: one output whose text is replaced."""

    encoding = "utf-8"  # else tqdm draws with # and digits

    def __init__(self) -> None:
        super().__init__()
        self.handle: Any = None

    def write(self, text: str) -> int:
        from IPython.display import display

        if line := text.strip():
            shown = {"text/plain": line}
            if self.handle is None:
                self.handle = display(shown, raw=True, display_id=True)
            else:
                self.handle.update(shown, raw=True)
        return len(text)


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
