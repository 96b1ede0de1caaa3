"""A matplotlib figure that a notebook draws by itself, for what tasks show; and the colours of right and wrong."""

from __future__ import annotations

import io

from matplotlib.figure import Figure

WRONG = "#d55e00"  # vermilion of the colour-blind-safe palette (Okabe & Ito)
RIGHT = "#0072b2"


class Sheet(Figure):
    """A Figure without pyplot, whose state leaks from cell to cell: IPython alone knows no way to show one. note: the
    sentence that a notebook shows in place of an empty strip where there is nothing to draw."""

    note = ""

    def __repr__(self) -> str:
        return self.note or super().__repr__()

    def _repr_png_(self) -> bytes | None:
        if self.note:
            return None  # IPython then shows the text
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()


def blank(note: str = "No samples to show: the list of ids is empty.") -> Sheet:
    """The sheet for no samples, for instance of wrong answers where none is wrong."""
    sheet = Sheet(figsize=(4, 0.5))
    sheet.note = note
    return sheet
