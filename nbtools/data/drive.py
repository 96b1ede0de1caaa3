"""Google Drive: its mount on Colab, its `drive:` paths, what is kept there, its links, and the web pages it sends
instead of files.

Drive is $NBTOOLS_DRIVE if that is set, else Colab's mount. gdown reads Drive's pages (they change, and it keeps up),
with the two functions that 5.2 and 6 have in common; the bytes come through `sources`.
"""

import difflib
import html
import importlib
import os
import re
import sys
import urllib.parse
from pathlib import Path, PurePosixPath
from threading import current_thread, main_thread

from nbtools import disk
from nbtools.data.progress import say
from nbtools.errors import DriveRefused, MissingExtra, StageError

MOUNT = Path("/content/drive")  # Colab's
SITE = "https://drive.google.com"

_declined = False  # whether Colab's dialog was declined: it is not shown a second time


def drive_path(path: str | Path) -> Path:
    """The local path of `drive:path/in/My Drive`; other paths unchanged. Raises StageError, naming what is there
    under a similar name, where nothing is at the path, or DiskError."""
    with disk.explained(f"looking at {path}", Path(path)):
        place = parent = local(str(path))
        if disk.exists(place):
            return place
    while not parent.is_dir():
        parent = parent.parent
    names = sorted(entry.name for entry in parent.iterdir())
    near = difflib.get_close_matches(place.relative_to(parent).parts[0], names, n=3, cutoff=0.5) or names[:5]
    there = f"{parent} has {', '.join(near)}" if near else f"{parent} is empty"
    raise StageError(f"{path}: there is no {place}. {there}.", entry="Keys, columns and paths")


def kept(place: str, instead: str = "demo data") -> Path | None:
    """What a notebook kept at a `drive:` place; None if nothing is there yet, or access to Drive was
    declined. A sentence names the place and what is used instead.

    Raises StageError or DiskError if Drive cannot be read, which does not mean that nothing is kept.
    """
    try:
        with disk.explained(f"looking at {place}", Path(place)):
            found = local(place)
            if disk.exists(found) and not (found.is_dir() and not any(found.iterdir())):
                return found
        reason = f"Nothing is kept at {place} yet"
    except DriveRefused as refusal:
        reason = str(refusal)
    say(f"{reason}: using {instead} instead.")
    return None


def place_to_keep(where: str | Path) -> Path | None:
    """The local path to write what should outlive this machine to; on Drive its folder is made. None, and a sentence,
    if access to Drive was declined."""
    if not str(where).startswith("drive:"):
        return Path(where)
    try:
        with disk.explained(f"creating the folder of {where}", Path(where)):
            place = local(str(where))
            place.parent.mkdir(parents=True, exist_ok=True)
    except DriveRefused as refusal:
        say(f"{refusal}: nothing is kept at {where}, and the work of this session is lost with the machine.")
        return None
    return place


def local(text: str) -> Path:
    """The absolute path, below Drive or not, whether it exists or not."""
    if not text.startswith("drive:"):
        return Path(text).expanduser().absolute()
    inside = PurePosixPath(text.removeprefix("drive:").lstrip("/"))
    if ".." in inside.parts:
        raise StageError(f"{text}: a drive: path stays inside My Drive and holds no `..`.")
    mine = root()
    return mine / inside


def root() -> Path:
    """The folder that is My Drive; on Colab it is mounted first, which asks for access."""
    global _declined
    if folder := os.environ.get("NBTOOLS_DRIVE"):
        return Path(folder).absolute()
    reason = "it does not respond"
    for force in (False, True):  # a stale mount needs the second try
        if answers(MOUNT):
            return MOUNT / "MyDrive"
        if _declined:
            break
        try:
            from google.colab import drive  # pyright: ignore[reportMissingImports]

            drive.mount(str(MOUNT), force_remount=force)
        except ImportError:
            raise StageError(
                "drive: is Colab's Drive, and this is not Colab. Set NBTOOLS_DRIVE to a folder to use instead."
            ) from None
        except Exception as error:  # colab raises ValueError, RuntimeError and its own MessageError, by version
            _declined = type(error).__name__ == "MessageError"  # the browser's answer, when access is not granted
            reason = f"{type(error).__name__}: {error}"
    if answers(MOUNT, bare=True):
        return MOUNT / "MyDrive"
    if _declined:
        raise DriveRefused("Access to Drive was declined in Colab's dialog (restart the session to be asked again)")
    raise StageError(f"Drive is not mounted: {reason}. Allow access in Colab's dialog, or restart the runtime.")


def remount(path: Path) -> None:
    """Mount Drive anew if a path, or `drive:…`, is on Colab's: a mount that gave errno 5 or 107 does not come back by
    itself. Only the main thread can, since Colab may ask the user."""
    named = str(path).startswith("drive:") and not os.environ.get("NBTOOLS_DRIVE")
    if _declined or not (named or path.is_relative_to(MOUNT)) or current_thread() is not main_thread():
        return
    try:
        from google.colab import drive  # pyright: ignore[reportMissingImports]

        drive.mount(str(MOUNT), force_remount=True)
    except Exception as error:  # colab raises ValueError, RuntimeError and its own MessageError, by version
        say(f"Drive could not be mounted again: {type(error).__name__}: {error}.")


def answers(mount: Path, bare: bool = False) -> bool:
    """Whether Drive can be read: a folder called MyDrive may remain when the mount is gone. bare: an empty Drive counts
    too, as of a new account."""
    try:
        return os.path.ismount(mount) and (bool(os.listdir(mount / "MyDrive")) or bare)
    except OSError:
        return False


def on_colab() -> bool:
    return "google.colab" in sys.modules  # Colab's kernel imports it at its start; importing it elsewhere is slow


def release_runtime() -> None:
    """On Colab, flush what has not reached Drive yet, then give the machine back, disk and all; elsewhere do nothing.

    Raises StageError if Drive cannot be flushed: the machine is kept then, since its data would be lost.
    """
    if not on_colab():
        return
    from google.colab import drive, runtime  # pyright: ignore[reportMissingImports]

    try:
        if answers(MOUNT):
            drive.flush_and_unmount()
    except Exception as error:  # colab raises ValueError and its own errors, by version
        raise StageError(
            f"The machine is kept: Drive could not be flushed ({type(error).__name__}: {error}). Check the kept "
            "folder on Drive, then release the machine with Runtime, Disconnect and delete runtime."
        ) from None
    runtime.unassign()


def confirmed(page: str, url: str) -> str | None:
    """The address behind the page that says that a file is too large for the virus scan; None for any other page."""
    try:
        return urllib.parse.urljoin(url, gdown("download").get_url_from_gdrive_confirmation(page))
    except gdown("exceptions").FileURLRetrievalError:
        return None


def files_in_folder(folder_id: str) -> dict[str, str]:
    """Relative path → id of the files in a shared Drive folder."""
    list_folder = gdown("download_folder").download_folder
    try:
        listed = list_folder(id=folder_id, quiet=True, skip_download=True)
    except Exception as error:  # 5.2 raises RuntimeError and friends, 6 its own, both those of requests
        reason = f"{type(error).__name__}: {error}"
    else:
        files = {file.path: file.id for file in listed or ()}
        if len(files) < len(listed or ()):
            raise StageError(f"{SITE}/drive/folders/{folder_id}: two files here have the same name. Rename one.")
        if files:
            return files
        reason = "it is empty, or not shared"
    raise StageError(
        f"{SITE}/drive/folders/{folder_id}: Drive does not list this folder ({reason}). Choose Share → Anyone with "
        "the link in Drive. Better: put the files into one tar and share that; gdown 5 lists 50 files at most."
    )


def complaint(page: str) -> str:
    """Why a web page arrived instead of an archive, quota or permission, and what to do about it."""
    title = re.search(r"(?is)<title[^>]*>(.*?)</title>", page)
    name = " ".join(html.unescape(title[1]).split())[:80] if title else "untitled"
    text = re.sub(r"(?is)<(script|style)\b.*?</\1>|<[^>]*>", " ", page)
    if re.search(r"(?i)quota|too many users|limit (was |is )?(reached|exceeded)", text):
        advice = (
            "the download quota of this file is used up. Open the link in a browser, choose Make a copy, and stage "
            "your copy as drive:…, or try again tomorrow."
        )
    elif re.search(r"(?i)sign.?in|log.?in|permission|request access|need access|access denied|forbidden", text):
        advice = (
            "you have no permission for this file. Its owner chooses Share → Anyone with the link; or mount the Drive "
            "that has it and stage it as drive:…."
        )
    else:
        advice = "open the address in a browser, and use the address of the file itself."
    return f"a web page ({name!r}) arrived instead of an archive: {advice}"


def gdown(module: str):
    try:
        return importlib.import_module(f"gdown.{module}")
    except ImportError as error:
        raise MissingExtra(f"Drive links need gdown ({error}): pip install 'gdown>=5.2,<7'") from error
