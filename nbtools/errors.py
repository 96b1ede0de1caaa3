"""The errors that nbtools raises on purpose: each names the field, the rule, the value, and what to do next."""

from collections.abc import Callable, Mapping
from typing import NoReturn


class NbtoolsError(Exception):
    """The base class; catching it catches every error that nbtools raises on purpose, and nothing else."""


class PlanError(NbtoolsError, ValueError):
    """A training setting breaks its rule."""


class DiskError(NbtoolsError):
    """A disk is full, read-only or failing; the message names which, and what was being done."""


class StageError(NbtoolsError):
    """A data set could not be fetched to local disk."""


class DriveRefused(StageError):
    """The dialog in which Colab asks for access to Drive was declined."""


class ArchiveError(StageError):
    """An archive is damaged, hostile, or of an unknown format."""


class PackError(NbtoolsError):
    """Raw data cannot be packed, or a pack cannot be opened."""


class CheckpointError(NbtoolsError):
    """A run folder or a checkpoint in it is missing, damaged, or from another run."""


class TrainError(NbtoolsError):
    """Training cannot start or continue."""


class MissingExtra(NbtoolsError, ImportError):
    """An optional package is needed for this; the message names it, and how to install it."""


def successors(module: str, gone: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """A module's `__getattr__` that says what to use in place of names that earlier versions had."""

    def refuse(name: str) -> NoReturn:
        instead = f"; {gone[name]}" if name in gone else ""
        raise AttributeError(f"module {module!r} has no attribute {name!r}{instead}")

    return refuse
