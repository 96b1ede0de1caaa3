"""Bring a data set to fast local disk, whole or not at all, and once.

`source.decide` looks and chooses, `stage` acts. On disk, for a source called `digits.tar`:

    <cache>/digits-1f3a5b7c/             appears at once, by one rename
        .stage.json                      the receipt: source, version, size, mtime, sha256
        digits/…                         the data
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
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from tqdm import tqdm

from nbtools import archive, disk, fetch
from nbtools.errors import ArchiveError, StageError
from nbtools.source import COLAB_MOUNT, Decision, decide, listing, missing, require_archive

RECEIPT = ".stage.json"  # no archive can give its folder this name
MANY = 1000  # files: Drive gives about 50 kB/s on small ones


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
    source: str | Path, into: str | Path | None = None, *, sha256: str | None = None, progress: bool = True
) -> Path:
    """A folder on local disk with the files of a source, which is copied only if it must be.

    source: a folder, an archive (tar, tar.gz, tar.xz, tar.bz2, zip), `drive:path/in/My Drive`, a Drive link, or the
    http(s) address of an archive. into: the folder below which it is put, else $NBTOOLS_CACHE or nbtools in the
    temporary folder. sha256: what the archive must have.
    Raises StageError, ArchiveError among them, or DiskError when that cannot be; then nothing is published.
    """
    sha256 = sha256.lower() if sha256 else None
    with disk.explained(f"looking at {source}", Path(source)):
        path = None if re.match("https?://", str(source)) else drive_path(source)
        root = cache() if into is None else Path(into).expanduser().absolute()
        decision = decide(str(source), path, root, use=into is None)
    if decision.how == "use":
        return Path(decision.origin)
    if found := _staged(decision, sha256):
        return found
    lock = hashlib.sha256(str(decision.target).encode()).hexdigest()[:16]
    with disk.explained(f"staging {source}", decision.target):
        disk.make_folder(decision.target.parent)
        with disk.Lock(cache() / "locks" / f"stage-{lock}.lock"):
            return _staged(decision, sha256) or _act(decision, sha256, progress)


def cache() -> Path:
    """Where staged data and packs live unless told otherwise: local, fast, and lost with the machine."""
    return Path(os.environ.get("NBTOOLS_CACHE") or Path(tempfile.gettempdir()) / "nbtools").absolute()


def drive_path(path: str | Path, create: bool = False) -> Path:
    """The local path of `drive:path/in/My Drive`; other paths as they are. With `create` the folder above it is made,
    without it the path must exist. Drive is $NBTOOLS_DRIVE where that is set, else Colab's mount."""
    text = str(path)
    inside = PurePosixPath(text.removeprefix("drive:").lstrip("/"))
    if text.startswith("drive:") and ".." in inside.parts:
        raise StageError(f"{text}: a drive: path stays inside My Drive and holds no `..`.")
    local = _drive_root() / inside if text.startswith("drive:") else Path(text).expanduser().absolute()
    if create:
        with disk.explained(f"making a place for {text}", local):
            disk.make_folder(local.parent)
    elif not local.exists():
        raise missing(text, local)
    return local


def _drive_root() -> Path:
    if folder := os.environ.get("NBTOOLS_DRIVE"):
        return Path(folder).absolute()
    reason = "it does not answer"
    for force in (False, True):  # a stale mount needs the second try
        if _answers(COLAB_MOUNT):
            return COLAB_MOUNT / "MyDrive"
        try:
            from google.colab import drive  # pyright: ignore[reportMissingImports]

            drive.mount(str(COLAB_MOUNT), force_remount=force)
        except ImportError:
            raise StageError(
                "drive: is Colab's Drive, and this is not Colab. Set NBTOOLS_DRIVE to a folder that stands for it."
            ) from None
        except Exception as error:  # colab raises ValueError, RuntimeError and its own MessageError, by version
            reason = f"{type(error).__name__}: {error}"
    if _answers(COLAB_MOUNT):
        return COLAB_MOUNT / "MyDrive"
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


def _answers(mount: Path) -> bool:
    """Whether Drive can be read: a folder called MyDrive also stands there when the mount is gone."""
    try:
        return os.path.ismount(mount) and bool(os.listdir(mount / "MyDrive"))
    except OSError:
        return False


def _staged(decision: Decision, sha256: str | None) -> Path | None:
    """The folder that an earlier call made from the same version of the source."""
    try:
        receipt = Receipt(**json.loads((decision.target / RECEIPT).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    folder = decision.target / receipt.folder
    same = decision.version in ("", receipt.version) and sha256 in (None, receipt.sha256)
    return folder if same and folder.is_dir() else None


def _act(decision: Decision, sha256: str | None, progress: bool) -> Path:
    """Copy, check, extract and publish; the caller holds the lock."""
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
        folder, size, digest = _bring(decision, remote, new / decision.name, sha256, progress)
    except ArchiveError:
        disk.remove(part)  # else the next call would resume a bad copy
        raise
    relative = folder.relative_to(new).as_posix()
    receipt = Receipt(decision.source, decision.origin, version, size, decision.mtime, digest, relative)
    disk.write_atomic(new / RECEIPT, json.dumps(asdict(receipt), indent=2) + "\n")
    disk.remove(decision.target)  # an older version of the source
    disk.publish_folder(new, decision.target)
    with contextlib.suppress(OSError):  # all is published; what stays is empty folders
        disk.remove(part)
    return decision.target / relative


def _bring(
    decision: Decision, remote: fetch.Remote | None, data: Path, sha256: str | None, progress: bool
) -> tuple[Path, int, str | None]:
    """Put the files of a source into `data` → (the folder that holds them, bytes of the source, SHA-256)."""
    if decision.how == "folder":
        return data, _copy_folder(decision, data, progress), None
    if decision.how == "drive folder":
        return data, _download_folder(decision, data, progress), None
    path = _fetch_archive(decision, remote, data.parent.with_name("archive"), progress)
    size, digest = path.stat().st_size, _checked(path, decision.source, sha256)
    folder = _extract(path, data, progress)
    if decision.how != "archive":
        disk.remove(path)
    return folder, size, digest


def _workplace(part: Path, version: str) -> Path:
    """The place for one version of a source; what is left of others goes."""
    disk.make_folder(part / version)
    for other in part.iterdir():
        if other.name != version:
            disk.remove(other)
    return part / version


def _copy_folder(decision: Decision, data: Path, progress: bool) -> int:
    origin = Path(decision.origin)
    files = sorted(listing(origin).items())
    total = sum(size for _, (size, _) in files)
    if progress and len(files) > MANY:
        tqdm.write(f"{origin}: {len(files)} files, which is slow there. One tar of them copies many times faster.")
    disk.require_space(data, total - sum(size for size, _ in listing(data).values()))
    with _bar(total, f"copy {decision.name}", progress) as moved:
        for name, (size, _) in files:
            fetch.copy(origin / name, data / name, size, moved)
    return total


def _download_folder(decision: Decision, data: Path, progress: bool) -> int:
    listed = fetch.drive_folder(decision.origin)
    files = {name: file_id for file_id, name in listed}
    if len(files) < len(listed):
        raise StageError(f"{decision.source}: two files in this Drive folder have the same name. Rename one.")
    with _bar(0, f"download {decision.name}", progress) as moved:
        for name, file_id in files.items():
            target = data.joinpath(*archive.safe_parts(name))
            if not target.exists():
                remote = fetch.drive_file(file_id)
                part = data.parent.with_name(f"{file_id}-{remote.version}")
                disk.require_space(data, remote.size or 0)
                fetch.download(remote, part, moved)
                disk.make_folder(target.parent)
                disk.rename(part, target)
    return sum(size for size, _ in listing(data).values())


def _fetch_archive(decision: Decision, remote: fetch.Remote | None, copy: Path, progress: bool) -> Path:
    """The archive on local disk: where it is, or its copy."""
    if decision.how == "archive":
        return Path(decision.origin)
    total = (remote.size or 0) if remote else decision.size
    here = copy.stat().st_size if copy.exists() else 0
    disk.require_space(copy, 2 * total - here)  # itself, and at least as much again unpacked
    with _bar(total, f"{'download' if remote else 'copy'} {decision.name}", progress) as moved:
        if remote:
            fetch.download(remote, copy, moved)
        else:
            fetch.copy(Path(decision.origin), copy, total, moved)
    return copy


def _checked(path: Path, source: str, sha256: str | None) -> str:
    """An archive's SHA-256, which must be the expected one if there is one."""
    require_archive(path, source)
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 not in (None, digest):
        raise ArchiveError(
            f"{source}: its SHA-256 is {digest}, not {sha256}. Copy it again, or ask who gave the number."
        )
    return digest


def _extract(path: Path, data: Path, progress: bool) -> Path:
    """Unpack into `data`; return it, or the only folder in it."""
    size = archive.unpacked_size(path)
    disk.remove(data.parent)
    disk.require_space(data, size)
    disk.make_folder(data.parent)
    with _bar(size, f"extract {data.name}", progress) as moved:
        archive.extract(path, data, progress=moved)
    top = list(data.iterdir())
    return top[0] if len(top) == 1 and top[0].is_dir() else data


@contextlib.contextmanager
def _bar(total: int, doing: str, progress: bool) -> Iterator[Callable[[int], object]]:
    """MB/s and time left, at most four times a second: more updates hang a Colab tab (lightning#2517)."""
    with tqdm(
        total=total or None, desc=doing, unit="B", unit_scale=True, mininterval=0.25, disable=not progress
    ) as bar:
        yield bar.update
