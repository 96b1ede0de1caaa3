"""Measurements on the user's machine: what is measured here and not promised."""

from nbtools.measure.pace import Pace, Rate, machine
from nbtools.measure.receipts import Receipt, receipt

__all__ = ["Pace", "Rate", "Receipt", "machine", "receipt"]
