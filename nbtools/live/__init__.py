"""What is shown and changed while it trains: kernel messages, requests, panel, plots."""

from nbtools.live import png
from nbtools.live.chart import (
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
    Scale,
    extent,
    number,
    thinned,
)
from nbtools.live.kernel import Messages
from nbtools.live.panel import Panel
from nbtools.live.picture import (
    XS,
    Columns,
    Series,
    along,
    calmed,
    decade,
    falling,
    rates,
    shares,
    spent,
    taken,
    train_loss,
)
from nbtools.live.plot import LivePlot
from nbtools.live.requests import ACTIONS, REFUSED, FirstSignal, Plans, Requests, advised, send
from nbtools.live.samples import Preview
from nbtools.live.surface import Surface
from nbtools.live.view import View

__all__ = [
    "ACTIONS",
    "BLUE",
    "GREEN",
    "ORANGE",
    "PURPLE",
    "REFUSED",
    "SKY",
    "VERMILLION",
    "XS",
    "Chart",
    "Columns",
    "FirstSignal",
    "Line",
    "LivePlot",
    "Mark",
    "Messages",
    "Panel",
    "Picture",
    "Plans",
    "Preview",
    "Requests",
    "Scale",
    "Series",
    "Surface",
    "View",
    "advised",
    "along",
    "calmed",
    "decade",
    "extent",
    "falling",
    "number",
    "png",
    "rates",
    "send",
    "shares",
    "spent",
    "taken",
    "thinned",
    "train_loss",
]
