"""A matplotlib figure that a notebook draws by itself, for what tasks show; and the colours of right and wrong."""

from __future__ import annotations

import io

from matplotlib.figure import Figure

WRONG = "#d55e00"  # vermilion of the colour-blind-safe palette (Okabe & Ito)
RIGHT = "#0072b2"


class Sheet(Figure):
    """A Figure without pyplot, whose state leaks from cell to cell: IPython alone knows no way to show one."""

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png")
        return file.getvalue()
