"""What a person sees and turns while it trains: kernel messages, requests, panel, plots."""

from nbtools.live.control import Wishes
from nbtools.live.kernel import Messages
from nbtools.live.panel.panel import Panel
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
from nbtools.live.surface import Interrupt, Surface, Termination, advised
from nbtools.live.view import View

__all__ = [
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
    "RIGHT",
    "SKY",
    "SMALL",
    "VERMILLION",
    "XS",
    "Chart",
    "Columns",
    "Interrupt",
    "Line",
    "Mark",
    "Messages",
    "Page",
    "Panel",
    "Picture",
    "Scale",
    "Series",
    "Surface",
    "Termination",
    "View",
    "Wishes",
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
    "shares",
    "spent",
    "taken",
    "thinned",
    "train_loss",
]
