"""Staging: whole or not at all, once, from anywhere; and every refusal says what to do."""

import asyncio
import contextlib
import errno
import gzip
import hashlib
import http.server
import io
import os
import re
import shutil
import sys
import threading
import types
import urllib.request
import zlib
from functools import partial
from pathlib import Path
from unittest.mock import MagicMock, patch

import pytest
from acting import refused
from archives import archived, away, put, tar_bytes, tree

import nbtools as nb
from nbtools import disk, errors
from nbtools.__main__ import main
from nbtools.data import cache, drive_path, fetch, place_to_keep, progress, release_runtime

pytestmark = [
    pytest.mark.usefixtures("place"),
    pytest.mark.filterwarnings("ignore:Call to deprecated method:DeprecationWarning"),  # gdown 5 calls bs4
]
FILES = {"digits/labels.csv": b"file,label\n", "digits/images/1.png": bytes(range(256)) * 8000, "digits/2.png": b"2"}
INSIDE = {name.removeprefix("digits/"): content for name, content in FILES.items()}
TAR = tar_bytes(FILES)
QUOTA = """<!DOCTYPE html><html><head><title>Google Drive – Kontingent</title><style>.uc-error-caption{}</style></head>
<p class="uc-error-caption">Sie k&ouml;nnen diese Datei momentan nicht herunterladen.</p>
<p class="uc-error-subcaption">Zu viele Nutzer haben sie aufgerufen.</p></html>"""  # where German is preferred
SIGN_IN = """<!doctype html><html lang=fr><title>Connexion</title><form action="https://accounts.google.com/v3/signin">
<input type="email" name="identifier"></form></html>"""
stage = partial(nb.stage, progress=False)


def published(folder: Path) -> list[str]:
    return [entry.name for entry in folder.glob("*") if entry.suffix != ".part" and entry.name != "locks"]


LINKS = {"itself": ("data", "train"), "a folder": ("data/train", "train"), "a file": ("data/1.png", "train/1.png")}


@pytest.mark.parametrize(("link", "target"), LINKS.values(), ids=LINKS)
def test_a_folder_is_used_where_it_is_but_a_link_to_drive_is_still_drive(place, monkeypatch, link, target):
    for root in (place / "elsewhere", place / "drive"):
        put(root / "train" / "1.png", b"1")
        (root / "train" / "circle").symlink_to(root)
        (root.with_suffix(".links") / link).parent.mkdir(parents=True)
        (root.with_suffix(".links") / link).symlink_to(root / target)
    local = place / "elsewhere.links" / "data"
    assert stage(local) == local
    assert not cache().exists()
    for folder in (stage(place / "drive.links" / "data"), stage(local, place / "fast")):
        assert b"1" in tree(folder).values()
        assert folder.resolve().is_relative_to(cache()) or folder.is_relative_to(place / "fast")
        assert not any(path.is_symlink() for path in folder.rglob("*"))
    monkeypatch.setenv("NBTOOLS_CACHE", str(place / "drive"))
    assert stage(place / "drive" / "train") == place / "drive" / "train", "what is in the cache stays there"


@pytest.mark.parametrize("name", ["digits.tar", "drive:sets/digits.zip", "drive:digits.tar.gz"])
def test_an_archive_comes_out_once_at_its_only_folder(place, name):
    path = put(place / name.replace(":", "/"), archived(FILES, name.partition(".")[2]))
    source = name if ":" in name else path
    folder = stage(source)
    assert folder.name == "digits"
    assert tree(folder) == INSIDE
    assert not list(cache().glob("*.part"))
    before = (folder / "2.png").stat()
    assert stage(source) == folder
    assert (folder / "2.png").stat() == before
    for lose in ((folder / "2.png").unlink, partial(shutil.rmtree, folder)):
        lose()
        assert tree(stage(source)) == INSIDE
    put(path, archived({"a": b"1", "b/c": b"2"}, name.partition(".")[2]))
    assert tree(stage(source)) == {"a": b"1", "b/c": b"2"}, "the source changed"


@pytest.mark.parametrize("notebook", [False, True])
def test_what_is_done_and_why_is_said_with_its_speed_in_a_notebook_not_in_red(place, monkeypatch, capsys, notebook):
    monkeypatch.setattr(progress, "in_notebook", lambda: notebook)
    put(place / "drive" / "digits.tar", TAR)
    nb.stage("drive:digits.tar")
    printed, silent = sorted(capsys.readouterr(), key=len, reverse=True)
    assert re.search(r"drive:digits\.tar: copied from a slow disk, to .*digits-\w{8}", printed)
    assert re.search(r"copy digits: 100%.*B/s", printed)
    nb.stage("drive:digits.tar")
    assert (silent, capsys.readouterr()) == ("", ("", ""))


def test_the_hash_that_is_given_must_match_also_on_the_second_call(place, capsys):
    put(place / "drive" / "digits.tar", TAR)
    digest = hashlib.sha256(TAR).hexdigest()
    stage("drive:digits.tar", sha256=digest.upper())
    refused(errors.StageError, "sha256 is for an archive", stage, put(place / "folder" / "a").parent, sha256=digest)
    assert main(["stage", "drive:digits.tar", "--sha256", "abc"]) == 1
    assert f"its SHA-256 is {digest}, not abc" in capsys.readouterr().err


def test_the_cache_is_the_users_own_where_the_common_one_is_somebody_elses(place, monkeypatch):
    monkeypatch.delenv("NBTOOLS_CACHE")
    monkeypatch.setattr(fetch.tempfile, "tempdir", str(place))
    assert cache() == put(place / "nbtools" / "a").parent
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert cache() == place / f"nbtools-{os.getuid()}"
    monkeypatch.setenv("NBTOOLS_CACHE", "~/mine")
    assert cache() == Path.home() / "mine"


OLD = tar_bytes({"digits/b": bytes(2_560_000)})
BIG = tar_bytes({"digits/a": bytes(range(256)) * 10_000})


@contextlib.contextmanager
def reads(patch, act):
    """Within, `act(n, read)` is in place of the n-th read of a file on Drive; `read(count)` gives at most so much."""
    count = iter(range(10**6))

    class Mounted(io.FileIO):
        def read(self, size=-1):
            return act(next(count), lambda most=size: io.FileIO.read(self, most))

    with patch.context() as one:
        one.setattr(fetch, "FileIO", Mounted)
        one.setattr(fetch, "PAUSE", 0.001)
        yield count


def test_one_error_of_a_mount_is_tried_again_and_google_documents_are_left_out(place, monkeypatch, capsys):
    for name, data in {"a/x": b"1", "b.gsheet": b"1", "c.gdoc": b"", "d": b""}.items():
        put(place / "drive" / "folder" / name, data)
    codes, scandir, google = [errno.EIO], os.scandir, (".gsheet", ".gdoc")
    monkeypatch.setattr(fetch, "PAUSE", 0.001)
    monkeypatch.setattr(os, "scandir", lambda p: away(codes.pop()) if codes and "/drive/" in f"{p}" else scandir(p))
    monkeypatch.setattr(fetch, "FileIO", lambda p: away(errno.EOPNOTSUPP) if p.suffix in google else io.FileIO(p))
    assert (tree(stage("drive:folder")), codes) == ({"a/x": b"1", "d": b""}, [])
    assert capsys.readouterr().err.count(": a Google document, left out") == 2


MOUNTS = {  # what happens at the n-th read of a file on Drive → what is said, if anything is
    "errno 5 at every second read": (lambda n, read, path: away(errno.EIO) if n % 2 else read(), ""),
    "errno 107 four times in a row": (lambda n, read, path: away() if 1 <= n < 5 else read(), ""),
    "it stops answering": (
        lambda n, read, path: read() if n in ((0, 1, 2, 3, 10) if path.name == "a" else (0, 1, 8)) else away(),
        r"stopped responding: .*What arrived is kept: run it again",
    ),
    "another in its place": (lambda n, read, path: (n == 1 and put(path, BIG), read())[1], "changed while .*copied"),
    "it is deleted": (lambda n, read, path: (n == 1 and path.unlink(), read())[1], "no longer there, 5 times in a row"),
}


@pytest.mark.parametrize("name", MOUNTS)
@pytest.mark.parametrize("source", ["drive:digits.tar", "drive:folder"])
def test_what_a_mount_fails_to_give_is_tried_again_and_never_missing_or_a_mixture(place, monkeypatch, name, source):
    path = put(place / "drive" / ("digits.tar" if "tar" in source else "folder/a"), OLD if "place" in name else BIG)
    os.utime(path, (1, 1))
    put(place / "drive" / "folder" / "0", b"0")
    act, said = MOUNTS[name]
    refused = pytest.raises(errors.StageError, match=said) if said else contextlib.nullcontext()
    with reads(monkeypatch, lambda n, read: act(n, read, path)), refused:
        stage(source)
    assert bool(published(cache())) == (not said)
    if not path.exists():
        put(path, BIG)
    with reads(monkeypatch, lambda n, read: read()) as count:
        assert tree(stage(source)) == ({"a": bytes(range(256)) * 10_000} if "tar" in source else {"0": b"0", "a": BIG})
    if "stops" in name:  # at one more try it would respond
        assert next(count) == 2, "the last of three pieces, and the end: what came is kept"


REFUSED = {
    "missing": ("drive:digits.zip", None, r"drive:digits\.zip: there is no .* has digits\.tar"),
    "outside of Drive": ("drive:../x", None, r"without `\.\.`"),
    "no archive in it": ("labels.csv.gz", gzip.compress(b"file"), r"labels\.csv\.gz: not an archive: it begins with"),
    "empty folder": ("raw", "folder", "raw holds no files"),
}


@pytest.mark.parametrize(("name", "content", "words"), REFUSED.values(), ids=REFUSED)
def test_bad_sources_are_refused_in_words_and_nothing_is_published(place, name, content, words):
    put(place / "drive" / "digits.tar", TAR)
    path = place / name.replace("drive:", "drive/")
    if content == "folder":
        (path / "sub").mkdir(parents=True)
    elif content is not None:
        put(path, content)
    refused(errors.StageError, words, stage, name if name.startswith("drive:") else path, place / "target")
    assert list((place / "target").glob("*")) == []


def test_too_little_space_is_reported_before_the_first_byte(place, monkeypatch):
    put(place / "drive" / "digits.tar", TAR)
    path = put(place / "digits.zip", archived({"a": bytes(5000)}, "zip"))
    full = types.SimpleNamespace(f_bavail=1, f_frsize=1000, f_blocks=1, f_bfree=1)
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    for source, need in (("drive:digits.tar", r"4\.1 MB"), (path, r"5\.\d kB")):
        refused(errors.DiskError, rf"needs {need}, but only 1\.0 kB is free there. Free some space", stage, source)
        assert published(cache()) == []


def test_a_place_to_keep_is_made_on_drive_and_a_path_on_drive_must_exist(place, monkeypatch):
    assert place_to_keep("drive:new/pack.tar") == place / "drive" / "new" / "pack.tar"
    assert (place / "drive" / "new").is_dir()
    assert nb.kept("drive:new") is None
    refused(errors.StageError, "there is no", drive_path, "drive:other/pack.tar")
    put(place / "drive" / "file", b"a file")
    refused(errors.DiskError, r"looking at drive:file/sign: .*Choose another folder", nb.kept, "drive:file/sign")
    monkeypatch.delenv("NBTOOLS_DRIVE")
    refused(errors.StageError, "NBTOOLS_DRIVE", stage, "drive:digits.tar")


@pytest.fixture
def colab(place, monkeypatch) -> MagicMock:
    """google.colab, which notes its calls; `place / "content"` is its mount point."""
    fake, point = MagicMock(mounted=False), place / "content"

    def mount(*_, force_remount: bool) -> None:
        (point / "MyDrive").mkdir(parents=True, exist_ok=True)
        fake.mounted = force_remount

    fake.drive.mount.side_effect = mount
    monkeypatch.delenv("NBTOOLS_DRIVE")
    monkeypatch.setattr(fetch, "MOUNT", point)
    monkeypatch.setattr(os.path, "ismount", lambda path: path == point and fake.mounted)
    monkeypatch.setitem(sys.modules, "google", types.ModuleType("google"))
    monkeypatch.setitem(sys.modules, "google.colab", fake)
    monkeypatch.setattr(fetch, "_declined", False)
    return fake


@pytest.mark.parametrize("mounted", [True, False])
def test_drive_is_mounted_on_colab_when_needed_whatever_a_lost_mount_left(place, colab, monkeypatch, mounted):
    """Also where it is lost while a file is read; from the main thread alone, since Colab may ask."""
    put(place / "content" / "MyDrive" / "digits.tar", TAR)
    colab.mounted = mounted
    with reads(monkeypatch, lambda n, read: vars(colab).update(mounted=False) or away() if n == 1 else read()):
        assert tree(stage("drive:digits.tar")) == INSIDE
    colab.mounted = False
    asyncio.run(asyncio.to_thread(fetch.remount, fetch.MOUNT))
    assert colab.drive.mount.call_count == 1 + (not mounted)


def test_a_drive_that_the_user_mounted_elsewhere_is_used_where_it_is(place, colab, monkeypatch):
    put(place / "gdrive" / "MyDrive" / "digits.tar", TAR)
    monkeypatch.setattr(disk, "MOUNTS", put(place / "mounts", f"drive {place}/gdrive fuse.drive rw 0 0\n".encode()))
    monkeypatch.setattr(os.path, "ismount", (place / "gdrive").__eq__)
    assert (tree(stage("drive:digits.tar")), colab.drive.mount.called) == (INSIDE, False)
    monkeypatch.setattr(os.path, "ismount", lambda path: False)  # it is lost
    fetch.remount(place / "gdrive" / "MyDrive" / "digits.tar")
    assert colab.drive.mount.call_args.args == (str(place / "gdrive"),)


def test_the_machine_is_given_back_after_drive_is_written_out_and_kept_where_it_cannot_be(place, colab, monkeypatch):
    colab.mounted = put(place / "content" / "MyDrive" / "run.json").exists()
    release_runtime()
    assert [name for name, *_ in colab.mock_calls] == ["drive.flush_and_unmount", "runtime.unassign"]
    colab.drive.flush_and_unmount.side_effect = ValueError("unmount failed")
    refused(errors.StageError, r"machine is kept: .*unmount failed", release_runtime)
    monkeypatch.delitem(sys.modules, "google.colab")
    release_runtime()
    assert (colab.drive.flush_and_unmount.call_count, colab.runtime.unassign.call_count) == (2, 1)


def test_where_drive_is_declined_nothing_counts_as_kept_and_the_dialog_comes_once(colab, capsys):
    for error, said in ((ValueError("no"), "not mounted: ValueError: no"), (NotImplementedError(), "NBTOOLS_DRIVE")):
        colab.drive.mount.side_effect = error  # the second one on Kaggle, which has Colab's package
        refused(errors.StageError, said, nb.kept, "drive:captcha.tar")
    denied = type("MessageError", (Exception,), {})  # what the browser's answer becomes in Colab
    colab.drive.mount.side_effect = denied("Error: credential propagation was unsuccessful")
    assert nb.kept("drive:nbtools-data/runs/captcha", "a short run") is None
    assert place_to_keep("drive:nbtools-data/runs/captcha") is None
    printed = capsys.readouterr().err
    for end in ("using a short run instead.", "nothing is kept at drive:nbtools-data/runs/"):
        assert re.search(rf"Access to Drive was declined in Colab's dialog .*{end}", printed)
    refused(errors.NbtoolsError, "declined in Colab's dialog", stage, "drive:datasets/captcha.tar")
    assert colab.drive.mount.call_count == 3, "the user was asked again"


SCAN = '<html><title>Virus scan</title><form id="download-form" action="{}/download"><input type="hidden" name="id" '
SCAN += 'value="{}"><input type="hidden" name="confirm" value="t"></form></html>'
ENTRY = '<div class="flip-entry"><a href="https://{}" target="_blank"><img alt=""><div>{}</div></a></div>'
FOLDER = (
    ("drive.google.com/file/d/with-key/view?usp=drive_web&amp;resourcekey=0-k", "digits.tar"),
    ("drive.google.com/drive/folders/below?usp=drive_web", "b&auml;r"),
    ("docs.google.com/document/d/1x/edit", "Notes"),
)
PAGES = (  # a path → status, page or where it moved to; the first that matches
    (r"id=with-key(?!.*resourcekey=0-k)", 404, ""),
    (r"sign-in", 403, SIGN_IN),
    (r"id=quota", 200, QUOTA),
    (r"busy", 429, ""),
    (r"/moved", 302, "/there.tar"),
    (r"/open\?id=shortcut", 302, "/file/d/with-key/view?resourcekey=0-k"),
    (r"/open\?id=folder", 302, "/drive/folders/folder?usp=drive_open"),
    (r"/uc\?.*id=(file|with-key)", 200, SCAN),
    (r"id=folder", 200, "".join(ENTRY.format(*one) for one in FOLDER)),
    (r"id=below", 200, ENTRY.format("drive.google.com/file/d/file/view", "a/b.tar")),
    (r"id=twice", 200, 2 * ENTRY.format("drive.google.com/file/d/file/view", "a/b.tar")),
    (r"^/(uc|open|file|drive)\b", 200, "<html><title>digits.tar</title></html>"),
)


class Web(http.server.BaseHTTPRequestHandler):
    """Plays a file server and Drive's pages, whose ids say what they are, after `first`. It drops after `drop`."""

    data, ranges, requests, first = b"", True, [], []
    drop: int | None = None
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def do_GET(self) -> None:
        self.close_connection = True
        Web.requests.append((self.path, self.headers.get("Range")))
        known = (each[1:] for each in PAGES if re.search(each[0], self.path))
        status, page = Web.first.pop() if Web.first else next(known, (200, ""))
        headers, body = {"ETag": f'"{zlib.crc32(Web.data)}"', "Content-Type": "text/html; charset=utf-8"}, page.encode()
        if status == 302:
            headers["Location"] = page
        elif page == SCAN:
            body = SCAN.format(f"http://{self.headers['Host']}", re.findall(r"id=([\w-]+)", self.path)[0]).encode()
        elif status == 200 and not page:
            asked = re.match(r"bytes=(\d+)-", self.headers.get("Range", "")) if Web.ranges else None
            at, status = (int(asked[1]), 206) if asked else (0, 200)
            headers |= {"Content-Disposition": "a"} if "/down" in self.path else {"Content-Type": "application/x-tar"}
            headers |= {"Content-Range": f"bytes {at}-{len(Web.data) - 1}/{len(Web.data)}"} if asked else {}
            body = Web.data[at:]
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):  # a probe reads the headers and leaves
            self.wfile.write(body[: Web.drop])


@pytest.fixture
def web(monkeypatch):
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Web)
    threading.Thread(target=server.serve_forever, args=(0.01,)).start()
    address = f"http://127.0.0.1:{server.server_port}"
    Web.data, Web.drop, Web.ranges, Web.requests, Web.first = TAR, None, True, [], []
    monkeypatch.setattr(fetch, "PAUSE", 0.001)
    monkeypatch.setattr(fetch, "OPENER", urllib.request.build_opener(urllib.request.ProxyHandler({})))
    monkeypatch.setattr(fetch, "SITE", address)
    monkeypatch.setattr(fetch, "HOSTS", (*fetch.HOSTS, "127.0.0.1"))
    yield address
    server.shutdown()  # waits for the end of the thread's loop
    server.server_close()


@pytest.fixture
def site(web, monkeypatch):
    monkeypatch.setattr(fetch, "HOSTS", fetch.HOSTS[:-1])
    return web


def test_an_address_is_downloaded_once_and_resumed_where_the_connection_drops_in_this_call_and_the_next(site):
    Web.drop, Web.first = 700_000, [(503, "")]
    assert tree(stage(f"{site}/digits.tar?x=1")) == INSIDE
    assert [wanted for _, wanted in Web.requests] == [None, None, None, "bytes=700000-", "bytes=1400000-"]
    stage(f"{site}/digits.tar?x=1")
    assert len(Web.requests) == 5
    for name, data, wanted in (("a", BIG, "bytes=1500000-"), ("b", OLD, None)):  # as it was; another of its size
        Web.ranges, Web.drop, Web.data = False, 1_500_000, BIG
        with pytest.raises(errors.StageError, match=r"ended after 1500000 of \d+ bytes, .*kept"):
            stage(address := f"{site}/{name * 250}.tar")
        Web.ranges, Web.drop, Web.data = True, None, data
        assert [*tree(stage(address))] == [name]
        assert Web.requests[-1][1] == wanted
    Web.drop = 1_500_000
    stage(f"{site}/moved")
    assert [path for path, _ in Web.requests[-4:]] == 2 * ["/moved", "/there.tar"], "the second address may expire"
    Web.drop = None
    with patch.object(fetch.disk, "rename", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        stage(f"{site}/whole.tar")
    count = len(Web.requests)
    assert [*tree(stage(f"{site}/whole.tar"))] == ["b"]
    assert Web.requests[count:] == [("/whole.tar", None)], "what it is, and no byte of it"


DRIVE = "https://drive.google.com"
TO_FILES = ["file/d/file/view?usp=sharing", "open?id=file", "file/d/with-key/edit?resourcekey=0-k", "open?id=shortcut"]
FILELESS = {  # an address that gives no file → what is said
    "{web}/x?id=quota": "Sie können .* nicht .* Zu viele.*quota.*Make a copy",
    "{web}/sign-in": "HTTP 403 Forbidden.*'Connexion'.* no permission .*Anyone with the link",
    "{web}/busy.tar": "cannot be downloaded: HTTP 429 Too Many Requests",
    "http://127.0.0.1:1/digits.tar": "cannot be downloaded: .*refused",
    f"{DRIVE}/file/d/with-key/view": "404 Not Found.*Share",
    f"{DRIVE}/file/d/viewer/view": "a web page .'digits.tar'. arrived",
    f"{DRIVE}/drive/folders/twice": "two files in this Drive folder have the name 'a_b.tar'",
    f"{DRIVE}/drive/folders/viewer": "lists no files in this folder.*Share",
    f"{DRIVE}/drive/my-drive": "no file or folder in this Drive link",
}


@pytest.mark.parametrize("address", FILELESS)
def test_pages_and_statuses_instead_of_a_file_are_explained(web, request, address):
    if not address.startswith(DRIVE):
        request.getfixturevalue("site")
    refused(errors.StageError, FILELESS[address], stage, address.format(web=web))
    assert published(cache()) == []


@pytest.mark.parametrize("link", TO_FILES)
def test_a_drive_link_is_followed_past_the_virus_scan_page_and_resumed_with_its_key(web, link):
    Web.drop = 1_500_000
    assert tree(stage(f"{DRIVE}/{link}")) == INSIDE
    path, wanted = Web.requests[-1]
    name, key = ("file", "") if "=0-k" not in link and "shortcut" not in link else ("with-key", "&resourcekey=0-k")
    assert (path, wanted) == (f"/download?id={name}&confirm=t{key}", "bytes=1500000-")


@pytest.mark.parametrize("link", ["drive/folders/folder?usp=sharing", "drive/u/0/folders/folder", "open?id=folder"])
def test_a_drive_folder_is_downloaded_file_by_file_with_the_keys_of_its_files(web, capsys, link):
    assert tree(stage(f"{DRIVE}/{link}")) == {"digits.tar": TAR, "bär/a_b.tar": TAR}
    assert "Notes: a Google document, left out" in capsys.readouterr().err
