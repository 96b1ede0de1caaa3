"""The version of the package: `nbtools.__version__`, and what a pack and a run record of their maker."""

VERSION = "0.3.0.dev0"
