"""The errors that nbtools raises on purpose: each names the field, the rule, the value, and what to do next."""


class NbtoolsError(Exception):
    """The base class. entry: a heading of docs/troubleshooting.md, which the message then ends with."""

    def __init__(self, *args: object, entry: str = "") -> None:
        super().__init__(*args)
        self.entry = entry

    def __str__(self) -> str:
        text = super().__str__()
        return f"{sentence(text)} See “{self.entry}” in docs/troubleshooting.md" if self.entry else text


class PlanError(NbtoolsError, ValueError):
    """A training setting breaks its rule."""


class DiskError(NbtoolsError):
    """A disk is full, read-only or failing."""


class StageError(NbtoolsError):
    """A data set could not be fetched to local disk."""


class DriveRefused(StageError):
    """The dialog in which Colab asks for access to Drive was declined."""


class ArchiveError(StageError):
    """An archive is damaged, hostile, or of an unknown format."""


class PackError(NbtoolsError):
    """Raw data cannot be packed, or a pack cannot be opened. Of a single sample its arguments are value, rule, fix."""

    def __str__(self) -> str:
        return "{1}, got {0}; {2}".format(*self.args) if len(self.args) == 3 else super().__str__()


class CheckpointError(NbtoolsError):
    """A run folder or a checkpoint in it is missing, damaged, or from another run."""


class TrainError(NbtoolsError):
    """Training cannot start or continue, or a network cannot be exported."""


class MissingExtra(NbtoolsError, ImportError):
    """An optional package is needed; the message says how to install it."""


def sentence(text: str) -> str:
    """Return a text with a full stop, unless it ends with one or asks."""
    return text if text.endswith((".", "?")) else f"{text}."
