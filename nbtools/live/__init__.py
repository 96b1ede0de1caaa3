"""What is shown and changed while it trains: kernel messages, requests, panel, plots."""

from nbtools.live.facts import DONE, OPENING, OVER, STARTING, TRAINING
from nbtools.live.kernel import Messages, running_kernel
from nbtools.live.panel import Panel
from nbtools.live.plot import Columns, compared
from nbtools.live.requests import REFUSED, FirstSignal, Plans, Requests, advised, send
from nbtools.live.samples import chosen
from nbtools.live.surface import Surface
from nbtools.live.svg import page
from nbtools.live.view import View
