"""The table of a run with its verdict as a line below."""

from __future__ import annotations

from html import escape

import pandas as pd


class Summary(pd.DataFrame):
    """A DataFrame that also shows `verdict`: what the run is bound by, and the one change worth making."""

    _metadata = ["verdict"]  # noqa: RUF012  (pandas' own way to keep an attribute over operations)
    verdict: str = ""

    @property
    def _constructor(self) -> type[Summary]:
        return Summary

    def _repr_html_(self) -> str | None:
        shown = super()._repr_html_()  # pyright: ignore[reportAttributeAccessIssue]  (pandas' stubs lack it)
        return f"{shown}<div>{escape(self.verdict)}</div>" if shown and self.verdict else shown

    def __repr__(self) -> str:
        return "\n".join(filter(None, [super().__repr__(), self.verdict]))
