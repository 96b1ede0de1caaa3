"""Staging: whole or not at all, once, from anywhere; and every refusal says what to do."""

import contextlib
import errno
import hashlib
import http.server
import io
import itertools
import multiprocessing
import os
import random
import re
import signal
import sys
import threading
import types
import urllib.request
from functools import partial
from pathlib import Path

import pytest
from archives import archived, ended_at, forked, kill, put, tar_bytes, tree, zip_bytes

import nbtools as nb
from nbtools import errors
from nbtools.__main__ import main
from nbtools.data import cache, drive, drive_path, place_to_keep, release_runtime, sources, transfer

pytestmark = [
    pytest.mark.usefixtures("place"),
    pytest.mark.filterwarnings("ignore:Call to deprecated method:DeprecationWarning"),  # gdown 5 calls bs4
]
FILES = {"digits/labels.csv": b"file,label\n", "digits/images/1.png": bytes(range(256)) * 8000, "digits/2.png": b"2"}
INSIDE = {name.removeprefix("digits/"): content for name, content in FILES.items()}
TAR = tar_bytes(FILES)
FILE_ID, FOLDER_ID = "1AbCdEfGhIjKlMnOpQrStUvWxYz0123", "1FoLdErIdOfTwentyEightLetters"
QUOTA = (
    "<html><head><title>Google Drive - Quota exceeded</title></head><body><p>Sorry, you can't view or download this "
    "file at this time.</p><p>Too many users have viewed or downloaded this file recently.</p></body></html>"
)
SIGN_IN = (
    "<!DOCTYPE html><html><head><title>Google Drive: Sign-in</title></head><body>Sign in to continue</body></html>"
)


def stage(source, into=None, **options) -> Path:
    return nb.stage(source, into, **{"progress": False, **options})


def published(folder: Path) -> list[str]:
    """What stands in a target besides `.part` and the locks."""
    return [entry.name for entry in folder.glob("*") if entry.suffix != ".part" and entry.name != "locks"]


def seen_at(folder: Path) -> dict[Path, int]:
    """When each file below a folder was last changed."""
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*")}


# What a source is, and where it comes out


def test_a_local_folder_is_used_where_it_is_and_copied_when_a_place_is_named(place):
    put(place / "elsewhere" / "a.png", b"a")
    (place / "raw").mkdir()
    (place / "raw" / "sub").symlink_to(place / "elsewhere")
    assert stage(place / "raw") == place / "raw"
    assert not cache().exists()
    folder = stage(place / "raw", place / "fast")
    assert folder.is_relative_to(place / "fast")
    assert tree(folder) == {"sub/a.png": b"a"}


@pytest.mark.parametrize("link", ["itself", "a folder in it", "a file in it"])
def test_a_link_to_drive_is_still_drive(place, link):
    """The guide linked its data folder to Drive, and read Drive at each access."""
    target = put(place / "drive" / "digits" / "train" / "1.png", b"1").parent
    if link == "itself":
        (target / "circle").symlink_to(target.parent)
        (place / "data").symlink_to(target.parent)
    elif link == "a folder in it":
        (place / "data").mkdir()
        (place / "data" / "train").symlink_to(target)
    else:
        (place / "data" / "train").mkdir(parents=True)
        (place / "data" / "train" / "1.png").symlink_to(target / "1.png")
    folder = stage(place / "data")
    assert tree(folder) == {"train/1.png": b"1"}
    assert not folder.resolve().is_relative_to(place / "drive")
    assert not any(path.is_symlink() for path in folder.rglob("*"))


# Once


@pytest.mark.parametrize("name", ["digits.tar", "drive:sets/digits.zip", "drive:digits.tar.gz"])
def test_an_archive_comes_out_once_at_its_only_folder(place, name):
    data = archived(FILES, name.partition(".")[2])
    path = put(place / name.replace(":", "/"), data)
    source = name if ":" in name else path
    folder = stage(source)
    assert folder.name == "digits"
    assert tree(folder) == INSIDE
    assert not list(cache().glob("*.part"))
    before = seen_at(folder)
    assert stage(source) == folder
    assert seen_at(folder) == before
    put(path, archived({"a": b"1", "b/c": b"2"}, name.partition(".")[2]))
    assert tree(stage(source)) == {"a": b"1", "b/c": b"2"}, "the source changed"


@pytest.mark.parametrize("name", ["digits.tar", "drive:digits.tar"])
def test_sha256_must_match_also_on_the_second_call(place, capsys, name):
    path = put(place / name.replace(":", "/"), TAR)
    source, digest = name if ":" in name else path, hashlib.sha256(TAR).hexdigest()
    stage(source, sha256=digest.upper())
    with pytest.raises(errors.ArchiveError, match=f"SHA-256 is {digest}, not abc"):
        stage(source, sha256="abc")
    with pytest.raises(errors.StageError, match="sha256 is for an archive"):
        stage(path.parent, sha256=digest)
    assert main(["stage", str(source), "--sha256", "abc"]) == 1
    assert f"its SHA-256 is {digest}, not abc" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["digits.tar", "digits.tar.gz", "drive:digits.zip", "drive:digits.tar.xz"])
def test_an_archive_may_stay_one_file(place, name):
    """A plain tar or a zip, used where it lies if it is one on local disk."""
    data = archived(FILES, name.partition(".")[2])
    source = put(place / name.replace(":", "/"), data)
    path = stage(name if ":" in name else source, extract=False)
    assert path.read_bytes() == (data if "zip" in name else TAR)
    assert (path == source) == (name == "digits.tar")
    assert stage(name if ":" in name else source, extract=False) == path
    assert tree(stage(name if ":" in name else source)) == INSIDE, "each has a place of its own"


# Whole or not at all


def stage_and_note(place: Path, barrier) -> None:
    barrier.wait()
    folder = stage("drive:digits.tar")
    put(place / f"result-{os.getpid()}", f"{folder} {len(tree(folder))}".encode())


def test_eight_stagers_at_once_have_one_folder(place):
    put(place / "drive" / "digits.tar", TAR)
    barrier = multiprocessing.get_context("fork").Barrier(8)
    for process in [forked(stage_and_note, place, barrier) for _ in range(8)]:
        process.join()
    results = [path.read_text() for path in place.glob("result-*")]
    assert results == 8 * [f"{stage('drive:digits.tar')} 3"]
    assert len(published(cache())) == 1


BIG = tar_bytes({"digits/a": bytes(range(256)) * 10_000})


@contextlib.contextmanager
def reads(patch, act):
    """Within, `act(n, read)` is in place of the n-th read of a file on Drive; `read(count)` gives at most so much."""
    count = itertools.count()

    class Mounted(io.FileIO):
        def read(self, size=-1):
            return act(next(count), lambda most=size: io.FileIO.read(self, most))

    with patch.context() as one:
        one.setattr(transfer, "FileIO", Mounted)
        one.setattr(transfer, "PAUSE", 0.001)
        yield count


def away(code: int = errno.EIO):
    raise OSError(code, os.strerror(code))


def test_a_mount_that_stops_answering_says_so_and_the_next_call_resumes(place, monkeypatch):
    put(place / "drive" / "digits.tar", BIG)
    with (
        reads(monkeypatch, lambda n, read: read() if n == 0 else away(errno.ENOTCONN)),
        pytest.raises(errors.StageError, match=r"digits\.tar: stopped responding .*What arrived is kept: run it again"),
    ):
        stage("drive:digits.tar")
    assert published(cache()) == []
    with reads(monkeypatch, lambda n, read: read()) as count:
        assert tree(stage("drive:digits.tar")) == {"a": bytes(range(256)) * 10_000}
    assert next(count) == 3, "two of three pieces, and the end: what arrived was kept"


FLAKY = {
    "errno 5 at every second read": lambda n, read: away() if n % 2 else read(),
    "errno 107 four times in a row": lambda n, read: away(errno.ENOTCONN) if 1 <= n < 5 else read(),
    "an end that comes too early": lambda n, read: b"" if n in (0, 2) else read(),
    "reads that bring less than asked for": lambda n, read: read(100_000),
}


@pytest.mark.parametrize("act", FLAKY.values(), ids=FLAKY)
@pytest.mark.parametrize("source", ["drive:digits.tar", "drive:folder"])
def test_what_a_mount_fails_to_give_is_tried_again_and_nothing_is_missing(place, monkeypatch, act, source):
    put(place / "drive" / "digits.tar", BIG)
    put(place / "drive" / "folder" / "a", bytes(range(256)) * 10_000)

    with reads(monkeypatch, act):
        folder = stage(source)
    assert tree(folder) == {"a": bytes(range(256)) * 10_000}


def stage_with_error(nth: int, source: str, into: Path) -> None:
    """Errno 5 once, at the nth file opened or folder listed on Drive; ends with 3 if there were fewer."""
    count = itertools.count(1)

    def hook(event: str, found: tuple) -> None:
        if event in ("open", "os.scandir", "os.listdir") and "/drive/" in f"{found[0]}/" and next(count) == nth:
            away()

    sys.addaudithook(hook)
    stage(source, into)
    os._exit(3 if next(count) <= nth else 0)


@pytest.mark.parametrize("source", ["drive:digits.tar", "drive:folder"])
def test_one_error_wherever_a_mount_is_looked_at_ends_nothing(place, monkeypatch, source):
    monkeypatch.setattr(transfer, "PAUSE", 0.001)
    side(put(place / "drive" / "digits.tar", TAR), hashlib.sha256(TAR).hexdigest())
    for name in "abc":
        put(place / "drive" / "folder" / name / "x", name.encode() * 5000)
    for nth in range(1, 100):
        process = forked(stage_with_error, nth, source, place / f"into-{nth}")
        process.join()
        if process.exitcode == 3:
            break
        assert process.exitcode == 0, nth
    assert 3 < nth < 99


@pytest.mark.parametrize("source", ["drive:digits.tar", "drive:folder"])
def test_a_file_that_another_of_its_size_replaces_during_its_copy_is_never_a_mixture(place, monkeypatch, source):
    path = put(place / "drive" / ("digits.tar" if "tar" in source else "folder/a"), BIG)
    os.utime(path, (1, 1))

    def replaced(n, read):
        if n == 1:
            put(path, BIG[::-1])
        return read()

    def uploaded(n, read):
        """By Drive, which rounds its time of change."""
        os.utime(path, ns=(0, 10**9 + 10**6))
        return read()

    with (
        reads(monkeypatch, replaced),
        pytest.raises(errors.StageError, match=r"it changed while it was being copied \(2570240 bytes were expected\)"),
    ):
        stage(source)
    assert published(cache()) == []
    put(path, BIG)
    os.utime(path, (1, 1))
    with reads(monkeypatch, uploaded):
        assert BIG in tree(stage(source, extract=False).parent).values()


def test_a_part_that_was_damaged_is_not_resumed(place, monkeypatch):
    put(place / "drive" / "digits.tar", BIG)
    with reads(monkeypatch, lambda n, read: read() if n < 2 else away()), pytest.raises(errors.StageError):
        stage("drive:digits.tar")
    [part] = [path for path in cache().rglob("*") if path.is_file() and path.stat().st_size == 2 << 20]
    data = part.read_bytes()
    part.write_bytes(data[:700] + b"\xff" + data[701:])
    assert tree(stage("drive:digits.tar")) == {"a": bytes(range(256)) * 10_000}


# Hashes


def side(path: Path, text: str) -> Path:
    return put(path.with_name(f"{path.name}.sha256"), text.encode())


@pytest.mark.parametrize(
    ("form", "place_of"), [("{} *digits.tar\n", "drive"), ("{}  other.tar\n{}  digits.tar\n", "here")]
)
def test_the_hash_in_a_file_next_to_an_archive_must_match(place, form, place_of):
    path = put(place / place_of / "digits.tar", TAR)
    source, digest = "drive:digits.tar" if place_of == "drive" else path, hashlib.sha256(TAR).hexdigest()
    other = form.replace("{}", "0" * 64, 1)
    side(path, other.format(digest) if "other" in form else other)
    if "other" not in form:
        with pytest.raises(errors.ArchiveError, match=f"its SHA-256 is {digest}, not 000"):
            stage(source)
        assert published(cache()) == []
        assert stage(source, sha256=digest), "what the caller says counts"
        side(path, form.format(digest.upper()))
    assert tree(stage(source)) == INSIDE
    side(path, "not a hash")
    with pytest.raises(errors.StageError, match=r"digits\.tar\.sha256: must have a line of 64 hexadecimal digits"):
        stage(source)


# Space


def test_a_part_of_an_older_version_is_not_resumed(place, monkeypatch):
    path = put(place / "drive" / "digits.tar", tar_bytes({"digits/a": b"older" * 300_000}))
    with reads(monkeypatch, lambda n, read: read() if n < 1 else away()), pytest.raises(errors.StageError):
        stage("drive:digits.tar")
    put(path, TAR)
    assert tree(stage("drive:digits.tar")) == INSIDE


@pytest.mark.parametrize(("form", "extract"), [("tar", True), pytest.param("tar.gz", False, marks=pytest.mark.full)])
def test_a_kill_at_any_operation_leaves_only_a_part_and_the_next_call_succeeds(place, form, extract):
    source, files = f"drive:digits.{form}", {"digits/a": b"a" * 5000, "digits/sub/b": b"b"}
    put(place / "drive" / f"digits.{form}", archived(files, form))
    for nth in range(0, 300, 3):
        into = place / f"into-{nth}"
        ended = ended_at(nth, kill, partial(stage, extract=extract), source, into)
        path = stage(source, into, extract=extract)
        assert tree(path) == {"a": b"a" * 5000, "sub/b": b"b"} if extract else path.read_bytes() == tar_bytes(files)
        assert len(published(into)) == 1
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
    assert 15 < nth < 297


REFUSED = {
    "missing": ("digit.tar", None, r"there is no .*digit\.tar.* has digits\.tar"),
    "missing folder": ("nowhere/x.tar", None, r"there is no .*nowhere/x\.tar"),
    "missing on Drive": ("drive:digits.zip", None, r"drive:digits\.zip: there is no .* has digits\.tar"),
    "outside of Drive": ("drive:../x", None, r"no `\.\.`"),
    "truncated": ("half.tar", TAR[:9000], "digits/images/1.png.*damaged"),
    "truncated on Drive": ("drive:half.tar", TAR[:9000], "digits/images/1.png.*damaged"),
    "without its end": ("half.tar", TAR.rstrip(b"\0") + bytes(600), "truncated"),
    "not an archive": ("notes.txt", b"hello world", "not an archive: it begins with b'hello world'"),
    "empty file": ("nothing.tar", b"", "not an archive"),
    "empty archive": ("nothing.tar", bytes(10240), "holds no files"),
    "quota page": ("digits.tar.gz", QUOTA.encode(), "quota.*Make a copy"),
    "sign-in page": ("digits.zip", SIGN_IN.encode(), "permission.*Anyone with the link"),
    "some page": ("digits.zip", b"\n<html><title>Hi</title>", r"a web page \('Hi'\) arrived"),
    "hostile": ("digits.zip", zip_bytes(("../evil", b"x")), r"entry '\.\./evil'"),
    "empty folder": ("raw", "folder", "raw holds no files"),
}


@pytest.mark.parametrize(("name", "content", "words"), REFUSED.values(), ids=REFUSED)
def test_bad_sources_are_refused_in_words_and_nothing_is_published(place, name, content, words):
    put(place / "digits.tar", TAR)
    put(place / "drive" / "digits.tar", TAR)
    path = place / name.replace("drive:", "drive/")
    if content == "folder":
        (path / "sub").mkdir(parents=True)
    elif content is not None:
        put(path, content)
    with pytest.raises(errors.StageError, match=words):
        stage(name if name.startswith("drive:") else path, place / "target")
    assert list((place / "target").glob("*")) == []
    assert not (place / "evil").exists()


def test_a_place_that_cannot_be_written_is_named(place):
    put(place / "digits.tar", TAR)
    for into in (place / "digits.tar", place / "digits.tar" / "below"):
        with pytest.raises(errors.DiskError, match=r"digits\.tar.*a file is where a folder should be"):
            stage(place / "digits.tar", into)
    assert (place / "digits.tar").read_bytes() == TAR


def test_too_little_space_is_reported_before_the_first_byte(place, monkeypatch):
    put(place / "drive" / "digits.tar", TAR)
    path = put(place / "digits.tar.xz", archived({"a": random.Random(0).randbytes(5000)}, "tar.xz"))
    for source, free, words in (
        ("drive:digits.tar", 1_000_000, r"needs 4\.1 MB, only 1\.0 MB are free there. Free some space"),
        (path, 1000, r"needs 5\.\d kB, only 1\.0 kB are free there\. Free some space"),
    ):
        monkeypatch.setattr(os, "statvfs", lambda _, free=free: types.SimpleNamespace(f_bavail=1, f_frsize=free))
        with pytest.raises(errors.DiskError, match=words):
            stage(source)
        assert published(cache()) == []


# Drive


def test_a_place_to_keep_is_made_on_drive_and_a_path_on_drive_must_exist(place):
    assert place_to_keep("drive:new/pack.tar") == place / "drive" / "new" / "pack.tar"
    assert (place / "drive" / "new").is_dir()
    assert place_to_keep(place / "mine" / "pack.tar") == place / "mine" / "pack.tar"
    with pytest.raises(errors.StageError, match="there is no"):
        drive_path("drive:new/pack.tar")


class MessageError(Exception):
    """What Colab raises where the browser answers that access was not granted."""


class FakeColab(types.ModuleType):
    """google.colab, which notes its calls and raises what `errors` has for one; a mount that is gone leaves folders."""

    def __init__(self, point: Path) -> None:
        super().__init__("google.colab")
        self.drive = self.runtime = self
        self.point, self.mounted, self.calls, self.errors = point, False, [], {}
        self.flush_and_unmount, self.unassign = partial(self.call, "flush"), partial(self.call, "unassign")

    def call(self, name: str | bool) -> None:
        self.calls.append(name)
        if name in self.errors:
            raise self.errors[name]

    def mount(self, point: str, force_remount: bool) -> None:
        assert point == str(self.point)
        self.call(force_remount)
        (self.point / "MyDrive").mkdir(parents=True, exist_ok=True)
        self.mounted = True


@pytest.fixture
def colab(place, monkeypatch) -> FakeColab:
    fake = FakeColab(place / "content")
    monkeypatch.delenv("NBTOOLS_DRIVE")
    monkeypatch.setattr(drive, "MOUNT", fake.point)
    monkeypatch.setattr(os.path, "ismount", lambda path: path == fake.point and fake.mounted)
    monkeypatch.setitem(sys.modules, "google", types.ModuleType("google"))
    monkeypatch.setitem(sys.modules, "google.colab", fake)
    monkeypatch.setattr(drive, "_declined", False)
    return fake


@pytest.mark.parametrize("calls", [[], [False], [False, True]])
def test_drive_is_mounted_on_colab_when_needed_and_forced_when_stale(colab, calls):
    put(colab.point / "MyDrive" / "digits.tar", TAR)
    colab.mounted = not calls
    colab.errors = {False: ValueError("mount failed")} if True in calls else {}
    assert tree(stage("drive:digits.tar")) == INSIDE
    assert colab.calls == calls


def test_a_drive_that_does_not_mount_is_an_error_with_its_reason_and_an_empty_one_an_empty_place(colab):
    colab.errors = dict.fromkeys((False, True), ValueError("mount failed"))
    for look in (stage, nb.kept):
        with pytest.raises(errors.StageError, match="not mounted: ValueError: mount failed"):
            look("drive:nbtools-data/captcha.tar")
    colab.errors = {}
    assert nb.kept("drive:nbtools-data/captcha.tar") is None


def test_the_machine_is_given_back_after_drive_is_written_out_and_kept_where_it_cannot_be(colab, monkeypatch):
    colab.mounted = put(colab.point / "MyDrive" / "run.json").exists()
    release_runtime()
    assert colab.calls == ["flush", "unassign"]
    colab.calls, colab.errors = [], {"flush": ValueError("unmount failed")}
    with pytest.raises(errors.StageError, match=r"machine is kept: .*ValueError: unmount failed"):
        release_runtime()
    monkeypatch.delitem(sys.modules, "google.colab")
    release_runtime()
    assert colab.calls == ["flush"], "Drive was looked for where there is none"


def test_where_drive_is_declined_nothing_counts_as_kept_and_the_dialog_comes_once(colab, capsys):
    colab.errors = {False: MessageError("Error: credential propagation was unsuccessful")}
    assert nb.kept("drive:nbtools-data/captcha.tar") is None
    assert nb.kept("drive:nbtools-data/runs/captcha", "a short run") is None
    assert place_to_keep("drive:nbtools-data/runs/captcha") is None
    printed = capsys.readouterr().err
    assert printed.count("Access to Drive was declined in Colab's dialog") == 3
    for words in (
        "using demo data instead.",
        "using a short run instead.",
        "nothing is kept at drive:nbtools-data/runs/",
    ):
        assert words in printed
    with pytest.raises(errors.NbtoolsError, match="declined in Colab's dialog"):
        stage("drive:datasets/captcha.tar")
    assert colab.calls == [False], "the user was asked again"
    colab.mounted = put(colab.point / "MyDrive" / "digits.tar", TAR).exists()
    assert nb.kept("drive:digits.tar"), "allowed by hand after all"


def test_a_folder_without_files_keeps_nothing_and_a_place_that_cannot_be_looked_at_is_an_error(place):
    (place / "drive" / "nbtools-data" / "runs" / "captcha").mkdir(parents=True)
    assert nb.kept("drive:nbtools-data/runs/captcha") is None
    put(place / "drive" / "nbtools-data" / "file", b"a file")
    with pytest.raises(errors.DiskError, match=r"looking at drive:nbtools-data/file/sign: .*a file is where a folder"):
        nb.kept("drive:nbtools-data/file/sign")


def test_drive_off_colab_names_the_variable(monkeypatch):
    monkeypatch.delenv("NBTOOLS_DRIVE")
    with pytest.raises(errors.StageError, match="NBTOOLS_DRIVE"):
        stage("drive:digits.tar")


# Over the network


class Web(http.server.BaseHTTPRequestHandler):
    """Plays a file server and the pages of Drive. Drops every connection after `drop` bytes of content."""

    data, ranges, status, requests = b"", True, 200, []
    drop: int | None = None
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        self.close_connection = True
        Web.requests.append((self.path, self.headers.get("Range")))
        address = f"http://{self.headers['Host']}"
        pages = {
            "/quota": QUOTA,
            "/sign-in": SIGN_IN,
            f"/uc?id={FILE_ID}&export=download": "<html><title>Google Drive - Virus scan warning</title><body>"
            f'<form id="download-form" action="{address}/download" method="get">'
            f'<input type="hidden" name="id" value="{FILE_ID}"><input type="hidden" name="confirm" value="t">'
            "</form></body></html>",
            "/uc?id=quota-quota&export=download": QUOTA,
            "/uc?id=sign-in-sign-in&export=download": SIGN_IN,
            f"/embeddedfolderview?id={FOLDER_ID}": "<html><title>digits</title><body>"
            f'<a href="https://drive.google.com/file/d/{FILE_ID}/view?usp=drive_web">digits.tar</a></body></html>',
            f"/drive/folders/{FOLDER_ID}?hl=en": "<html><title>digits - Google Drive</title><script>"
            f"""window['_DRIVE_ivd'] = '[[["{FILE_ID}",null,"digits.tar","application/x-tar"]]]';</script></html>""",
        }
        if page := pages.get(self.path):
            return self.answer(Web.status, page.encode(), "text/html; charset=utf-8")
        if Web.status != 200 or "missing" in self.path:
            return self.answer(Web.status if Web.status != 200 else 404, b"", "text/plain")
        start = re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) if Web.ranges else None
        at = int(start[1]) if start else 0
        extra = {"Content-Range": f"bytes {at}-{len(Web.data) - 1}/{len(Web.data)}"} if start else {}
        self.answer(206 if start else 200, Web.data[at:], "application/x-tar", **extra)

    def answer(self, status: int, body: bytes, form: str, **headers: str) -> None:
        self.send_response(status)
        headers |= {"Content-Type": form, "Content-Length": str(len(body)), "ETag": '"1"'}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):  # a probe reads the headers and leaves
            self.wfile.write(body[: Web.drop])


@pytest.fixture
def web(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Web)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    Web.data, Web.drop, Web.ranges, Web.status, Web.requests = TAR, None, True, 200, []
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    monkeypatch.setattr(transfer, "OPENER", direct)
    monkeypatch.setattr(sources, "SITE", address)
    monkeypatch.setattr(transfer, "PAUSE", 0.001)
    yield address
    server.shutdown()
    thread.join()
    server.server_close()


def test_an_address_is_downloaded_once(web):
    folder = stage(f"{web}/digits.tar?x=1")
    assert tree(folder) == INSIDE
    asked = len(Web.requests)
    assert stage(f"{web}/digits.tar?x=1") == folder
    assert len(Web.requests) == asked


def test_dropped_connections_are_resumed_in_this_call_and_in_the_next(web):
    Web.drop = 700_000
    assert tree(stage(f"{web}/digits.tar")) == INSIDE
    assert [wanted for _, wanted in Web.requests] == [None, None, "bytes=700000-", "bytes=1400000-"]
    Web.ranges = False
    with pytest.raises(errors.StageError, match=r"ended after 700000 of \d+ bytes; 700 kB are kept"):
        stage(f"{web}/other.tar")
    Web.ranges, Web.drop = True, None
    assert tree(stage(f"{web}/other.tar")) == INSIDE
    assert Web.requests[-1][1] == "bytes=700000-"


@pytest.mark.parametrize(
    ("address", "status", "words"),
    [
        ("{web}/quota", 200, "quota"),
        ("{web}/sign-in", 403, "HTTP 403 Forbidden.*permission"),
        ("{web}/missing.tar", 200, "HTTP 404 Not Found"),
        ("{web}/digits.tar", 503, "HTTP 503 Service Unavailable"),
        ("http://127.0.0.1:1/digits.tar", 200, "cannot be downloaded: .*refused"),
        ("https://drive.google.com/file/d/quota-quota/view", 200, "quota"),
    ],
)
def test_pages_and_statuses_instead_of_a_file_are_explained(web, address, status, words):
    Web.status = status
    with pytest.raises(errors.StageError, match=words):
        stage(address.format(web=web))
    assert published(cache()) == []


@pytest.mark.parametrize("link", ["file/d/{}/view?usp=sharing", "open?id={}"])
def test_a_drive_link_is_followed_past_the_virus_scan_page(web, link):
    Web.drop = 1_500_000
    assert tree(stage("https://drive.google.com/" + link.format(FILE_ID))) == INSIDE
    assert Web.requests[-1] == (f"/download?id={FILE_ID}&confirm=t", "bytes=1500000-")


@pytest.fixture
def gdown_reads(web, monkeypatch):
    """gdown's own requests, whatever its version, reach the local server."""
    import requests

    request = requests.Session.request

    def local(self, method, url, **options):
        return request(self, method, url.replace("https://drive.google.com", web), **options)

    monkeypatch.setattr(requests.Session, "request", local)
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def test_a_drive_folder_is_downloaded_file_by_file_and_one_that_is_not_shared_is_refused(gdown_reads):
    link = "https://drive.google.com/drive/folders/"
    assert tree(stage(f"{link}{FOLDER_ID}?usp=sharing")) == {"digits.tar": TAR}
    with pytest.raises(errors.StageError, match=r"does not list this folder .*Share"):
        stage(f"{link}missing-missing-missing-missing")
