"""Progress bars: tqdm's own in a terminal, and in a notebook one line of text in an output of its own.

tqdm's bar for notebooks is a widget. A saved notebook keeps its first text, `packing: 0%`, whether the cell
ended or not; a display that is updated in place is saved in its last state.
"""

from __future__ import annotations

import io
import sys
from typing import Any

from tqdm import tqdm

LEAST = 0.25  # seconds between two updates: quicker ones hang a Colab tab (lightning#2517)


def bar(*arguments: Any, **options: Any) -> tqdm:
    """A tqdm bar; arguments and options are tqdm's. In a notebook its last line stays, whatever `leave` says: an output
    cannot be removed without a trace."""
    options["mininterval"] = max(LEAST, options.get("mininterval", LEAST))
    if in_notebook() and not options.get("disable"):
        options |= {"file": Line(), "leave": True, "position": 0, "dynamic_ncols": False}
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


def in_notebook() -> bool:
    """Whether a Jupyter kernel runs this: a terminal's IPython has no kernel."""
    core = sys.modules.get("IPython")
    shell = core.get_ipython() if core is not None else None
    return getattr(shell, "kernel", None) is not None
