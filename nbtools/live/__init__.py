"""What is shown and changed while it trains: kernel messages, requests, panel, plots."""

from nbtools.live.kernel import Messages
from nbtools.live.panel import Panel
from nbtools.live.plot import axes, figure
from nbtools.live.plot.axes import NAME, PLOT, SMALL
from nbtools.live.plot.axis import Scale, number
from nbtools.live.plot.chart import (
    BLUE,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILLION,
    Chart,
    Line,
    Mark,
    Picture,
    extent,
    thinned,
)
from nbtools.live.plot.columns import XS, Columns, Series, along, spent, taken
from nbtools.live.plot.figure import AXIS, HEAD, LEFT, RIGHT
from nbtools.live.plot.live import in_notebook
from nbtools.live.plot.page import LEGEND, Page, legend
from nbtools.live.plot.picture import calmed, decade, falling, rates, shares, train_loss
from nbtools.live.requests import ACTIONS, REFUSED, FirstSignal, Plans, Requests, advised, send
from nbtools.live.surface import Surface
from nbtools.live.view import View

__all__ = [
    "ACTIONS",
    "AXIS",
    "BLUE",
    "GREEN",
    "HEAD",
    "LEFT",
    "LEGEND",
    "NAME",
    "ORANGE",
    "PLOT",
    "PURPLE",
    "REFUSED",
    "RIGHT",
    "SKY",
    "SMALL",
    "VERMILLION",
    "XS",
    "Chart",
    "Columns",
    "FirstSignal",
    "Line",
    "Mark",
    "Messages",
    "Page",
    "Panel",
    "Picture",
    "Plans",
    "Requests",
    "Scale",
    "Series",
    "Surface",
    "View",
    "advised",
    "along",
    "axes",
    "calmed",
    "decade",
    "extent",
    "falling",
    "figure",
    "in_notebook",
    "legend",
    "number",
    "rates",
    "send",
    "shares",
    "spent",
    "taken",
    "thinned",
    "train_loss",
]
