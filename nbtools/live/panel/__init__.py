"""The only user of forms: what a person says of a plan, before a run and while it lasts."""

from nbtools.live.panel.panel import Panel

__all__ = ["Panel"]
