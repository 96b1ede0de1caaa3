"""Bring a data set to fast local disk, whole or not at all, and once.

`source.decide` looks and chooses, `bring` fetches, `stage` publishes. On disk, for a source called `digits.tar`:

    <cache>/digits-1f3a5b7c/             appears at once, by one rename
        .stage.json                      the receipt: source, version, size, mtime, sha256
        digits/…                         the data; or digits.tar, with extract=False
    <cache>/digits-1f3a5b7c.part/        all that is unfinished; the next call resumes or replaces it
    <cache>/locks/                       so that of many processes one copies and the others wait
"""

import contextlib
import hashlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from nbtools import disk
from nbtools.data import fetch
from nbtools.data.bring import bring, checked
from nbtools.data.source import COLAB_MOUNT, Decision, decide, missing
from nbtools.errors import ArchiveError, DriveRefused, StageError

RECEIPT = ".stage.json"  # no archive can give its folder this name
KEPT, FORMER = "drive:nbtools-data/", "drive:nbtools/"  # where notebooks keep packs and runs, and where they used to

_refused = False  # whether Colab's dialog was declined: it is not shown a second time


@dataclass(frozen=True)
class Receipt:
    """What was staged: by it the next call knows that there is nothing to do."""

    source: str
    origin: str
    version: str
    size: int
    mtime: float
    sha256: str | None  # of the archive; folders have none
    folder: str  # what `stage` returns, relative to the target


def stage(
    source: str | Path,
    into: str | Path | None = None,
    *,
    extract: bool | Callable[[Path], bool] = True,
    sha256: str | None = None,
    progress: bool = True,
) -> Path:
    """A folder on local disk with the files of a source, which is copied only if it must be.

    source: a folder, an archive (tar, tar.gz, tar.xz, tar.bz2, zip), `drive:path/in/My Drive`, a Drive link, or the
    http(s) address of an archive. into: the folder below which it is put, else $NBTOOLS_CACHE or nbtools in the
    temporary folder. extract: False leaves an archive one file, a plain tar or a zip, which `members` reads where it
    lies: 50,000 images are not written one by one; a function of the archive may choose. sha256: what the archive must
    have.
    Raises StageError, ArchiveError among them, or DiskError when that cannot be; then nothing is published.
    """
    sha256 = sha256.lower() if sha256 else None
    with disk.explained(f"looking at {source}", Path(source)):
        path = None if re.match("https?://", str(source)) else drive_path(source)
        root = cache() if into is None else Path(into).expanduser().absolute()
        chosen = extract if callable(extract) else None if extract else lambda archive: False
        decision = decide(str(source), path, root, into is None, chosen)
        if decision.how == "use":
            if sha256 and path is not None and path.is_file():
                checked(path, str(source), sha256)
            return Path(decision.origin)
    if found := _staged(decision, sha256):
        return found
    lock = hashlib.sha256(str(decision.target).encode()).hexdigest()[:16]
    with disk.explained(f"staging {source}", decision.target):
        disk.make_folder(decision.target.parent)
        with disk.Lock(cache() / "locks" / f"stage-{lock}.lock"):
            return _staged(decision, sha256) or _act(decision, chosen, sha256, progress)


def cache() -> Path:
    """Where staged data and packs live unless told otherwise: local, fast, and lost with the machine."""
    return Path(os.environ.get("NBTOOLS_CACHE") or Path(tempfile.gettempdir()) / "nbtools").absolute()


def drive_path(path: str | Path, create: bool = False) -> Path:
    """The local path of `drive:path/in/My Drive`; other paths as they are. With `create` the folder above it is made,
    without it the path must exist. Drive is $NBTOOLS_DRIVE where that is set, else Colab's mount."""
    text = str(path)
    if not create:
        if found := existing(text):
            return found
        raise missing(text, _local(text))
    local = _local(text)
    with disk.explained(f"making a place for {text}", local):
        disk.make_folder(local.parent)
    return local


def existing(text: str) -> Path | None:
    """The local path of what exists, or None. Files in the notebooks' former folder on Drive are found too, and a
    sentence names them. Raises StageError or DiskError where that cannot be read."""
    former = text.replace(KEPT, FORMER, 1) if text.startswith(KEPT) else text
    for name in dict.fromkeys((text, former)):
        local = _local(name)
        with disk.explained(f"looking at {name}", local):
            if not _is_there(local):
                continue
        if name != text:
            print(f"{text} is not there yet; using {name}, where notebooks used to keep it.")
        return local
    return None


def kept(place: str, instead: str = "demo data") -> Path | None:
    """What a notebook kept at a `drive:` place; None where nothing is there yet, or the dialog that asks for Drive was
    declined. A sentence names the place and what is used instead.

    Raises StageError or DiskError where Drive cannot be read: that does not mean that nothing is kept.
    """
    try:
        with disk.explained(f"looking at {place}", Path(place)):
            found = existing(place)
            if found and not (found.is_dir() and not any(found.iterdir())):
                return found
        reason = f"Nothing is kept at {place} yet"
    except DriveRefused as refusal:
        reason = str(refusal)
    print(f"{reason}: using {instead} instead.")
    return None


def place_to_keep(where: str | Path) -> Path | None:
    """The local path to write what should outlive this machine to; on Drive its folder is made. None, and a sentence,
    where the dialog that asks for Drive was declined."""
    try:
        return drive_path(where, create=True) if str(where).startswith("drive:") else Path(where)
    except DriveRefused as refusal:
        print(f"{refusal}: nothing is kept at {where}, and the work of this session is lost when its machine goes.")
        return None


def _local(text: str) -> Path:
    inside = PurePosixPath(text.removeprefix("drive:").lstrip("/"))
    if text.startswith("drive:") and ".." in inside.parts:
        raise StageError(f"{text}: a drive: path stays inside My Drive and holds no `..`.")
    return _drive_root() / inside if text.startswith("drive:") else Path(text).expanduser().absolute()


def _is_there(path: Path) -> bool:
    try:
        path.stat()
    except FileNotFoundError:  # Path.exists() returns False on other errors too, from Python 3.14 on
        return False
    return True


def _drive_root() -> Path:
    global _refused
    if folder := os.environ.get("NBTOOLS_DRIVE"):
        return Path(folder).absolute()
    reason = "it does not answer"
    for force in (False, True):  # a stale mount needs the second try
        if _answers(COLAB_MOUNT):
            return COLAB_MOUNT / "MyDrive"
        if _refused:
            break
        try:
            from google.colab import drive  # pyright: ignore[reportMissingImports]

            drive.mount(str(COLAB_MOUNT), force_remount=force)
        except ImportError:
            raise StageError(
                "drive: is Colab's Drive, and this is not Colab. Set NBTOOLS_DRIVE to a folder that stands for it."
            ) from None
        except Exception as error:  # colab raises ValueError, RuntimeError and its own MessageError, by version
            _refused = type(error).__name__ == "MessageError"  # the browser's answer, when access is not granted
            reason = f"{type(error).__name__}: {error}"
    if _answers(COLAB_MOUNT, bare=True):
        return COLAB_MOUNT / "MyDrive"
    if _refused:
        raise DriveRefused("Access to Drive was declined in Colab's dialog (restart the session to be asked again)")
    raise StageError(f"Drive is not mounted: {reason}. Allow access in Colab's dialog; else restart the runtime.")


def on_colab() -> bool:
    return "google.colab" in sys.modules  # Colab's kernel imports it at its start; importing it elsewhere is slow


def release_runtime() -> None:
    """On Colab write out what Drive has not got yet, then give the machine back, disk and all; elsewhere nothing.

    Raises StageError where Drive cannot be written out: the machine is kept then, since what it holds may be lost.
    """
    if not on_colab():
        return
    from google.colab import drive, runtime  # pyright: ignore[reportMissingImports]

    try:
        if _answers(COLAB_MOUNT):
            drive.flush_and_unmount()
    except Exception as error:  # colab raises ValueError and its own errors, by version
        raise StageError(
            f"The machine is kept: Drive could not be written out ({type(error).__name__}: {error}). Look at the kept "
            "folder on Drive, then release the machine by Runtime, Disconnect and delete runtime."
        ) from None
    runtime.unassign()


def _answers(mount: Path, bare: bool = False) -> bool:
    """Whether Drive can be read: a folder called MyDrive may remain when the mount is gone. bare: an empty Drive counts
    too, as of a new account."""
    try:
        return os.path.ismount(mount) and (bool(os.listdir(mount / "MyDrive")) or bare)
    except OSError:
        return False


def _staged(decision: Decision, sha256: str | None) -> Path | None:
    """What an earlier call made from the same version of the source."""
    try:
        receipt = Receipt(**json.loads((decision.target / RECEIPT).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    data = decision.target / receipt.folder
    same = decision.version in ("", receipt.version) and sha256 in (None, receipt.sha256)
    return data if same and data.exists() else None


def _act(decision: Decision, extract: Callable[[Path], bool] | None, sha256: str | None, progress: bool) -> Path:
    """Copy, check, extract if it is to be, and publish; the caller holds the lock."""
    if sha256 and decision.how in ("folder", "drive folder"):
        raise StageError(f"{decision.source}: sha256 is that of an archive, and this is a folder. Leave it out.")
    remote = None
    if decision.how == "url":
        remote = fetch.probe(decision.origin)
    elif decision.how == "drive file":
        remote = fetch.drive_file(decision.origin)
    version = remote.version if remote else decision.version or "listed"
    part = decision.target.with_name(f"{decision.target.name}.part")
    new = _workplace(part, version) / "new"
    try:
        data, size, digest = bring(decision, remote, new / decision.name, extract, sha256, progress)
    except ArchiveError:
        disk.remove(part)  # else the next call would resume a bad copy
        raise
    relative = data.relative_to(new).as_posix()
    receipt = Receipt(decision.source, decision.origin, version, size, decision.mtime, digest, relative)
    disk.write_atomic(new / RECEIPT, json.dumps(asdict(receipt), indent=2) + "\n")
    disk.remove(decision.target)  # an older version of the source
    disk.publish_folder(new, decision.target)
    with contextlib.suppress(OSError):  # all is published; what stays is empty folders
        disk.remove(part)
    return decision.target / relative


def _workplace(part: Path, version: str) -> Path:
    """The place for one version of a source; what is left of others goes."""
    disk.make_folder(part / version)
    for other in part.iterdir():
        if other.name != version:
            disk.remove(other)
    return part / version
