"""Disks: the local cache, and My Drive as a folder: $NBTOOLS_DRIVE, or Colab's mount, which may stop responding."""

import difflib
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from threading import current_thread, main_thread
from typing import TypeVar

from nbtools import disk
from nbtools.data.progress import say
from nbtools.errors import DiskError, DriveRefused, StageError

MOUNT = Path("/content/drive")  # Colab's
PAUSE, TRIES = 1.0, 5  # seconds before the second try of what failed, doubled with each
T = TypeVar("T")

_declined = False  # whether Colab's dialog was declined: it is not shown a second time


def cache() -> Path:
    """Return where staged data and packs are stored by default: local, fast, and lost with the machine."""
    return Path(os.environ.get("NBTOOLS_CACHE") or Path(tempfile.gettempdir()) / "nbtools").absolute()


def local(text: str) -> Path:
    """Return the absolute path, below Drive or not, whether it exists or not."""
    if not text.startswith("drive:"):
        return Path(text).expanduser().absolute()
    inside = PurePosixPath(text.removeprefix("drive:").lstrip("/"))
    if ".." in inside.parts:
        raise StageError(f"{text}: a drive: path stays inside My Drive and holds no `..`.")
    folder = os.environ.get("NBTOOLS_DRIVE")
    return (Path(folder).absolute() if folder else mount()) / inside


def drive_path(path: str | Path) -> Path:
    """Return the local path of `drive:path/in/My Drive`, or of another path, which must exist. Raises StageError, with
    what is there under a similar name, and DiskError."""
    with disk.explained(f"looking at {path}", Path(path)):
        place = parent = local(str(path))
        if disk.exists(place):
            return place
        while not parent.is_dir():
            parent = parent.parent
        names = sorted(os.listdir(parent))
    near = difflib.get_close_matches(place.relative_to(parent).parts[0], names, cutoff=0.5) or names[:5]
    there = f"{parent} has {', '.join(near) or 'nothing'}"
    raise StageError(f"{path}: there is no {place}. {there}.", entry="Keys, columns and paths")


def kept(place: str, instead: str = "demo data") -> Path | None:
    """Return what a notebook kept at a `drive:` place; None, and a sentence with what is used instead, if nothing is
    there yet or access to Drive was declined. Raises StageError or DiskError if Drive cannot be read."""
    reason = f"Nothing is kept at {place} yet"
    try:
        with disk.explained(f"looking at {place}", Path(place)):
            path = local(place)
            if disk.exists(path) and not (path.is_dir() and not os.listdir(path)):
                return path
    except DriveRefused as refusal:
        reason = str(refusal)
    say(f"{reason}: using {instead} instead.")
    return None


def place_to_keep(where: str | Path) -> Path | None:
    """Return the local path to write what should outlive this machine to; on Drive its folder is made. None, and a
    sentence, if access to Drive was declined."""
    if not str(where).startswith("drive:"):
        return Path(where)
    try:
        with disk.explained(f"creating the folder of {where}", Path(where)):
            place = local(str(where))
            place.parent.mkdir(parents=True, exist_ok=True)
            return place
    except DriveRefused as refusal:
        say(f"{refusal}: nothing is kept at {where}, and the work of this session is lost with the machine.")
        return None


def is_far(path: Path) -> bool:
    """Return whether a path, or what a link in it leads to, is on Drive or another slow mount, but not in the cache."""
    roots = [MOUNT.resolve(), Path(os.environ.get("NBTOOLS_DRIVE") or MOUNT).resolve()]
    items = disk.walk(path) if path.is_dir() else ()
    places = {path, *(item.path if item.is_symlink() else os.path.dirname(item.path) for item in items)}
    real = {Path(os.path.realpath(place)) for place in places}
    far = (any(map(place.is_relative_to, roots)) or disk.is_slow(place) for place in real)
    return not path.is_relative_to(cache()) and any(far)


def retry(look: Callable[[], T], place: Path) -> T:
    """Return what `look` returns, tried again with longer pauses while a mount does not answer."""
    for tries in range(TRIES - 1):
        try:
            return look()
        except (OSError, DiskError) as error:
            if not disk.is_away(error.__cause__ or error):
                raise
        time.sleep(PAUSE * 2**tries)
        remount(place)
    return look()


# -- Colab's mount


def mount() -> Path:
    """Return Colab's My Drive; it is mounted first, which asks for access. Raises DriveRefused, StageError."""
    global _declined
    try:
        if not (answers() or _declined):
            from google.colab import drive  # pyright: ignore[reportMissingImports]

            drive.mount(str(MOUNT), force_remount=True)  # the folder that a lost mount leaves counts as mounted
    except ImportError:
        fix = "Set NBTOOLS_DRIVE to a folder to use instead"
        raise StageError(f"drive: is Colab's Drive, and this is not Colab. {fix}.") from None
    except Exception as error:  # ValueError, RuntimeError or Colab's own MessageError, by version
        if not (_declined := type(error).__name__ == "MessageError"):  # the browser's answer: access is not granted
            reason = f"Drive is not mounted: {type(error).__name__}: {error}"
            raise StageError(f"{reason}. Allow access in Colab's dialog, or restart the runtime.") from None
    if _declined:
        raise DriveRefused("Access to Drive was declined in Colab's dialog (restart the session to be asked again)")
    return MOUNT / "MyDrive"


def answers() -> bool:
    """Return whether Drive can be read: a folder MyDrive may remain when the mount is gone."""
    try:
        return os.path.ismount(MOUNT) and os.listdir(MOUNT / "MyDrive") is not None
    except OSError:
        return False


def remount(path: Path) -> None:
    """Mount Drive anew if a path, or `drive:…`, is on Colab's, and that does not answer: it does not come back by
    itself. Only the main thread can, since Colab may ask the user."""
    named = str(path).startswith("drive:") and not os.environ.get("NBTOOLS_DRIVE")
    if (named or path.is_relative_to(MOUNT)) and current_thread() is main_thread():
        try:
            mount()
        except StageError as error:
            say(str(error))


def release_runtime() -> None:
    """On Colab, flush what has not reached Drive yet, then give the machine back, disk and all. Raises StageError, and
    keeps the machine, if Drive cannot be flushed."""
    if "google.colab" not in sys.modules:  # Colab's kernel imports it at its start
        return
    from google.colab import drive, runtime  # pyright: ignore[reportMissingImports]

    try:
        if answers():
            drive.flush_and_unmount()
    except Exception as error:
        fix = "Check the kept folder on Drive, then choose Runtime, Disconnect and delete runtime"
        raise StageError(f"The machine is kept: Drive could not be flushed ({error}). {fix}.") from None
    runtime.unassign()
