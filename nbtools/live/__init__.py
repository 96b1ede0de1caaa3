"""What is shown and changed while it trains: kernel messages, requests, panel, plots."""

from nbtools.live.columns import XS, Columns, Series, along, spent, taken
from nbtools.live.facts import AGAIN, DONE, EVALUATING, MEASURING, OVER, STARTING, TRAINING, ended
from nbtools.live.kernel import Messages, closing, running_kernel
from nbtools.live.log import OPENING
from nbtools.live.panel import Panel
from nbtools.live.picture import worded
from nbtools.live.requests import ACTIONS, REFUSED, FirstSignal, Plans, Requests, advised, send
from nbtools.live.samples import FIRST, WORST, chosen
from nbtools.live.surface import Surface
from nbtools.live.view import View
