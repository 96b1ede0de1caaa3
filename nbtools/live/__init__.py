"""What is shown and changed during training: kernel messages, requests, panel, plots."""

from nbtools.live.draw import as_data, page, png
from nbtools.live.facts import DONE, MEASURING, OVER, PAUSED, STARTING, TRAINING
from nbtools.live.kernel import Messages, running_kernel
from nbtools.live.panel import Panel
from nbtools.live.plot import Columns, comparison
from nbtools.live.requests import REFUSED, FirstSignal, Plans, Requests, advised_plan, send
from nbtools.live.samples import choose_ids
from nbtools.live.surface import Surface
from nbtools.live.view import View, keep, show
