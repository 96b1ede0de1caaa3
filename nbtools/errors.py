"""The errors that nbtools raises on purpose: each names the field, the rule, the value, and what to do next."""

import re
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, metadata
from typing import Any, NoReturn

PAGE = "docs/troubleshooting.md"


class NbtoolsError(Exception):
    """The base class; catching it catches every error that nbtools raises on purpose, and nothing else. entry: the
    heading in docs/troubleshooting.md that explains more; the message then ends with its address."""

    def __init__(self, *args: object, entry: str = "") -> None:
        super().__init__(*args)
        self.entry = entry

    def __str__(self) -> str:
        text = super().__str__()
        return f"{sentence(text)} {see(self.entry)}" if self.entry else text


def ctrl_c(run: Any) -> KeyboardInterrupt:
    """Return the KeyboardInterrupt that ends a script's loop too, once everything is saved; its `run` is the run."""
    # Not of a class of its own: for KeyboardInterrupt alone Python ends by SIGINT, which ends a shell's loop too.
    error = KeyboardInterrupt(f"{run}; run it again to continue")
    vars(error)["run"] = run
    return error


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


class ExportError(NbtoolsError):
    """A network cannot be exported, or answers differently once it is."""


class MissingExtra(NbtoolsError, ImportError):
    """An optional package is needed for this; the message names it, and how to install it."""


def sentence(text: str) -> str:
    """With a full stop, unless it ends with one or asks."""
    return text if text.endswith((".", "?")) else f"{text}."


def see(entry: str) -> str:
    """A reference to a heading in docs/troubleshooting.md, at the repository's address in the installed package."""
    try:
        urls = metadata("nbtools").get_all("Project-URL") or []
    except PackageNotFoundError:  # imported from a folder, which has the file
        urls = []
    addresses = [f"{url.removeprefix('Repository, ')}/blob/main/" for url in urls if url.startswith("Repository, ")]
    anchor = re.sub(r"[^\w -]", "", entry.lower()).replace(" ", "-")  # as GitHub makes them
    return f"See “{entry}”: {''.join(addresses[:1])}{PAGE}#{anchor}"


def successors(module: str, gone: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """A module's `__getattr__` that says what to use in place of names that earlier versions had."""

    def refuse(name: str) -> NoReturn:
        instead = f"; {gone[name]}" if name in gone else ""
        raise AttributeError(f"module {module!r} has no attribute {name!r}{instead}")

    return refuse
