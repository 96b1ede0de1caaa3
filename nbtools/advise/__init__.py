"""A Plan for this machine and this data, with a reason for every number."""

from nbtools.advise.act import advise
from nbtools.advise.advice import Advice
from nbtools.advise.rules import Machine, decide, inspect

__all__ = ["Advice", "Machine", "advise", "decide", "inspect"]
