"""The only place that draws: a history decided into a picture, and the picture drawn as SVG or PNG."""

from nbtools.live.plot.chart import About, Preview
from nbtools.live.plot.live import LivePlot, in_notebook

__all__ = ["About", "LivePlot", "Preview", "in_notebook"]
