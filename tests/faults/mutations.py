"""Damaged and hostile files of every format that is read, each from its seed alone.

Of a mutated file there are two good ends: an error of nbtools, or content that is right: what was written, or where a
format has no checksum, what another reader finds there.
"""

from __future__ import annotations

import bz2
import contextlib
import csv
import gzip
import io
import json
import lzma
import os
import random
import shutil
import tarfile
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import toy
from archives import archived, tar_bytes, tree
from faults import jobs
from test_hwdb_format import line, page

from nbtools import disk
from nbtools.data import Pack, archive, archive_index, read_member
from nbtools.errors import NbtoolsError
from nbtools.live import requests
from nbtools.tasks.hwdb.formats import lines_of
from nbtools.tasks.segment import cvat
from nbtools.tasks.sign import clips, labels
from nbtools.tasks.sign.labels import read_table
from nbtools.train import checkpoint

FILES = {"data/labels.csv": b"file,label\n", "data/images/a.bin": bytes(range(256)) * 3, "data/é": b"x" * 40}
RIGHT = {*FILES.values()}
SMALL = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 13}]  # a larger window costs more than all else
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "tar": bytes,
    "tar.gz": lambda data: gzip.compress(data, 1),
    "tar.xz": lambda data: lzma.compress(data, filters=SMALL),
}
FORMS = (*PACKERS, "zip")
BLOCK = tarfile.BLOCKSIZE


@cache
def whole(names: tuple[str, ...], form: str) -> bytes:
    """An archive of some of FILES, a tar without the zeros after its end."""
    files = {name: FILES[name] for name in names}
    if form == "zip":
        return archived(files, form)
    blocks = sum(1 + -(-len(content) // BLOCK) for content in files.values())
    return PACKERS[form](tar_bytes(files)[: (blocks + 4) * BLOCK])  # room for a long name's header


def mutated(rng: random.Random, data: bytes, most: int = 4) -> bytes:
    """A few bits flipped, bytes set to odd values, or pieces cut out, doubled, zeroed or moved; or the end cut off."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, most)):
        at, length = rng.randrange(len(changed) or 1), rng.choice((1, 2, 4, 8, 100, BLOCK))
        piece = changed[at : at + length]
        match rng.randrange(7):
            case 0 | 1:
                changed[at : at + 1] = bytes([changed[at] ^ 1 << rng.randrange(8)]) if changed else b"\0"
            case 2:
                changed[at : at + length] = rng.choice((b"\xff", b"\x80", b"/", b".", b"0", b"7"))[:1] * len(piece)
            case 3:
                changed[at : at + length] = b""
            case 4:
                changed[at : at + length] = 2 * piece
            case 5:
                changed[at : at + length] = bytes(len(piece))
            case 6:
                to = rng.randrange(len(changed) or 1)
                changed[to : to + len(piece)] = piece
    return bytes(changed[: rng.randrange(len(changed) or 1)] if rng.random() < 0.05 else changed) or b"\0"


FIELDS = {
    "name": (0, 100),
    "mode": (100, 8),
    "size": (124, 12),
    "type": (156, 1),
    "link": (157, 100),
    "prefix": (345, 9),
}
ODD = (
    b"../",
    b"/etc/x",
    b"a\\..\\b",
    b"C:x",
    b"\0",
    b"1",
    b"2",
    b"5",
    b"L",
    b"x",
    b"g",
    b"S",
    b"77777777777",
    b"\xff" * 12,
)


def odd_header(rng: random.Random, tar: bytes) -> bytes:
    """A header of a tar with an odd field, and a checksum that is right."""
    changed, at = bytearray(tar), BLOCK * rng.randrange(len(tar) // BLOCK)
    start, length = FIELDS[rng.choice([*FIELDS])]
    value = rng.choice((*ODD, *map(str.encode, FILES)))[:length]
    changed[at + start : at + start + len(value)] = value
    header = changed[at : at + BLOCK]
    header[148:156] = b" " * 8
    changed[at + 148 : at + 156] = b"%06o\0 " % sum(header)
    return bytes(changed)


def an_archive(rng: random.Random, form: str) -> tuple[bytes, bool]:
    """(an archive; whether its checksums vouch for the original content)."""
    names = tuple(name for name in FILES if rng.random() < 0.7) or (rng.choice([*FILES]),)
    if form == "zip":
        data = whole(names, form)
        old, new = rng.choice(names).encode(), rng.choice(ODD)
        if rng.random() < 0.1 and len(old) > len(new):  # a name, in both directories
            return data.replace(old, new + old[len(new) :]), True
        if rng.random() < 0.5:  # a bit of a content, or of a header between two
            changed = bytearray(data)
            changed[rng.randrange(30, data.index(b"PK\1\2"))] ^= 1 << rng.randrange(8)
            return bytes(changed), True
        return mutated(rng, data, 2), True
    if form == "tar" or rng.random() < 0.7:
        return PACKERS[form]((odd_header if rng.random() < 0.5 else mutated)(rng, whole(names, "tar"))), False
    return mutated(rng, whole(names, form), 2), True


def by_another(data: bytes, form: str) -> set[bytes]:
    """The contents of plain files as Python's own reader finds them."""
    opened = {"tar": bytes, "tar.gz": gzip.decompress, "tar.xz": lzma.decompress, "tar.bz2": bz2.decompress}[form](data)
    with tarfile.open(fileobj=io.BytesIO(opened)) as tar:
        return {content.read() for member in tar if member.isreg() and (content := tar.extractfile(member))}


def contents(folder: str, above: str = "") -> dict[str, bytes]:
    """As `archives.tree`, in a tenth of the time; a link is a failure."""
    found = {}
    with os.scandir(folder) as items:
        for item in items:
            assert not item.is_symlink(), "a link was made"
            if item.is_dir():
                found |= contents(item.path, f"{above}{item.name}/")
            else:
                with open(item.path, "rb", buffering=0) as file:
                    found[above + item.name] = file.read()
    return found


def archive_case(form: str) -> Callable[[random.Random, Path], str]:
    def case(rng: random.Random, place: Path) -> str:
        data, vouched = an_archive(rng, form)
        path, out = place / "some.archive", place / "inside" / "out"
        path.write_bytes(data)
        out.parent.mkdir()
        made, real = [], disk.create
        disk.create = lambda target: (made.append(target), real(target))[1]
        try:
            archive.extract(path, out)
            found = contents(str(out))
        except NbtoolsError:
            found = None
        finally:
            disk.create = real
        assert sorted(os.listdir(place)) == ["inside", "some.archive"], "something lies outside"
        assert set(os.listdir(out.parent)) <= {"out"}, "something lies outside"
        if found is None:
            return f"refused {'in' if made else 'before'} extraction"
        same = RIGHT.issuperset(found.values())
        assert same or (not vouched and by_another(data, form).issuperset(found.values())), "wrong content is accepted"
        if form in archive.IN_PLACE and rng.random() < 0.3:
            archive.index_of.cache_clear()  # which knows a file by size and time: cases are faster than some clocks
            there = {name: read_member(path, name) for name in archive_index(path).files}
            assert there == found, "in place there is something else than comes out"
        return "accepted, right"

    return case


# -- lists of labels

LIST = ("file", "gloss", "cat")
CELLS = ("a.npz", "=1+1", "+x", "@y", '"', "", "é", "日本", " b ", "a,b", "7", "003", "-3", "line\nbreak", "'", "x\0y")


def labels_case(rng: random.Random, place: Path) -> str:
    """A list as people write it: each row is right, or there is a sentence about it."""
    head = [*LIST, *rng.choices(("", "note", "File ", "gloss", "cat"), k=rng.choice((0, 0, 0, 1, 2)))]
    rng.shuffle(head)
    rows = [
        [rng.choice(CELLS) for _ in range(len(head) if rng.random() < 0.8 else rng.randint(1, 6))] for _ in range(4)
    ]
    text = io.StringIO(newline="")
    end, quoting = rng.choice(("\n", "\r\n")), rng.choice((csv.QUOTE_ALL, csv.QUOTE_MINIMAL))
    csv.writer(text, lineterminator=end, quoting=quoting).writerows([head, *rows])
    data = text.getvalue().encode("utf-8-sig" if rng.random() < 0.3 else "utf-8")
    damaged = rng.random() < 0.5
    data = mutated(rng, data) if damaged else data
    found, complaints = read_table(data, "labels.csv", LIST, lambda *cells: [*cells])
    table = slow_table(data)
    head = labels.folded(table[0]) if table else []
    if any(head.count(name) != 1 for name in LIST):
        assert not found, "a list without its columns is accepted"
        assert complaints, "a list is refused in silence"
        return "refused"
    right = [row for row in table[1:] if len(row) == len(head)]
    places = [head.index(name) for name in LIST]
    assert [cells for _, cells in found] == [[row[at].strip() for at in places] for row in right], "another table"
    assert len(complaints) == len(table) - 1 - len(right), "a row is lost in silence"
    return "a row refused" if complaints else "accepted, right"


def slow_table(data: bytes) -> list[list[str]]:
    """The rows of a CSV file that hold anything, one character after the other; none where it is not text."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return []
    rows, row, cell, state = [], [], "", "start"  # of a cell; plain, quoted, or after a quote within quotes
    for letter in [*text, "end"]:
        if state == "quoted" and letter != "end":
            state, cell = ("after", cell) if letter == '"' else (state, cell + letter)
        elif state == "start" and letter == '"':
            state = "quoted"
        elif letter in (",", "\n", "\r", "end"):
            row, cell, state = [*row, cell], "", "start"
            if letter != ",":
                rows, row = [*rows, row], []
        else:
            state, cell = "quoted" if (state, letter) == ("after", '"') else "plain", cell + letter
    return [row for row in rows if any(one.strip() for one in row)]


def damaged_one(rng: random.Random, place: Path, made: Path) -> None:
    """A copy of a folder with one of its files mutated, or cut, or gone."""
    shutil.copytree(made, place / made.name)
    path = rng.choice(sorted(item for item in (place / made.name).iterdir() if item.is_file()))
    path.write_bytes(mutated(rng, path.read_bytes()))
    if rng.random() < 0.05:
        path.unlink()


def pack_case(rng: random.Random, place: Path) -> str:
    made = template("pack", lambda folder: toy.make_pack(folder, count=9))
    damaged_one(rng, place, made)
    try:
        found = Pack.open(place / "pack").verify()
    except NbtoolsError:
        return "refused"
    assert found.card == Pack.open(made).card, "a damaged pack is accepted"
    return "accepted, right"


def checkpoint_case(rng: random.Random, place: Path) -> str:
    made = template("run", jobs.saves)
    damaged_one(rng, place, made)
    try:
        found = checkpoint.newest(place / "run")
        checkpoint.weights(place / "run")
    except NbtoolsError:
        return "refused"
    whole = checkpoint.read(made, found.name)
    assert found.facts == whole.facts, "damaged facts are accepted"
    same = all(np.array_equal(found.tensors[name].numpy(), one.numpy()) for name, one in whole.tensors.items())
    assert same, "damaged tensors are accepted"
    return "an older one is taken" if found.complaints else "accepted, right"


ODD_VALUES = (None, True, -1, 0, 3, 0.5, 1e308, float("nan"), float("inf"), 10**30, "", "x", "1e9", "auto", [], [1], {})


def odd_json(rng: random.Random, values: dict[str, Any]) -> bytes:
    """Mutated bytes, or odd values in whole JSON."""
    if rng.random() < 0.5:
        return mutated(rng, json.dumps(values).encode(), 2)
    name = rng.choice((*values, "another"))
    return json.dumps({**values, name: rng.choice(ODD_VALUES)}).encode()


def plan_case(rng: random.Random, place: Path) -> str:
    data = odd_json(rng, toy.PLAN.to_dict())
    try:
        toy.Plan.from_json(data.decode("utf-8", "replace"))
    except NbtoolsError:
        return "refused"
    return "accepted"


def control_case(rng: random.Random, place: Path) -> str:
    asks = {"do": ["pause", "save"], "lr": 0.001, "batch_size": 8, "amp": "off", "force": True}
    (place / "control.json").write_bytes(odd_json(rng, asks))
    os.utime(place / "control.json", (0, 0))  # else one that is no JSON may still be being written
    asked = requests.Requests(requests.Plans(toy.PLAN, toy.PLAN), toy.PLAN)
    try:
        requests.receive(place, asked)
    except NbtoolsError:
        return "refused"
    assert asked.pending <= {*requests.ACTIONS}
    return "accepted"


PAGE = page(line(b"a\0b\0", 0, 0, 4, 30, bytes(120)), line(b"c\0", 9, 0, 3, 8, bytes(24)))


def page_case(rng: random.Random, place: Path) -> str:
    data, count = mutated(rng, PAGE, 2), 0
    try:
        for found in lines_of(data, "a.dgrl"):
            count += len(found.text) + found.image(data).size
    except NbtoolsError:
        return "refused"
    return "accepted"


def clip_case(rng: random.Random, place: Path) -> str:
    arrays = {"X": np.full((3, 156), 0.5, np.float32), "mask": np.ones((3, 78), bool), "timestamps_ms": np.arange(3)}
    members, inside = {}, rng.random() < 0.7
    for name, array in arrays.items():
        np.save(data := io.BytesIO(), array)
        odd = inside and rng.random() < 0.5
        members[f"{name}.npy"] = mutated(rng, data.getvalue(), 2) if odd else data.getvalue()
    npz = archived(members, "zip")
    (place / "a.npz").write_bytes(npz if inside else mutated(rng, npz))
    try:
        clips.examine(place / "a.npz", clips.Keys())
    except NbtoolsError:
        return "refused"
    return "accepted"


CVAT = b"""<?xml version="1.0"?><annotations><meta><task><labels><label><name>shoe</name><color>#ff0000</color></label>
</labels></task></meta><image id="0" name="a.jpg" width="40" height="30"><polygon label="shoe" points="1,1;30,1;30,20"/>
<mask label="shoe" rle="2,2" left="1" top="1" width="2" height="2"/></image></annotations>"""


def cvat_case(rng: random.Random, place: Path) -> str:
    (place / "annotations.xml").write_bytes(mutated(rng, CVAT, 1))
    try:
        document = cvat.parse(place / "annotations.xml", "annotations.xml")
        for drawing in document.drawings:
            for shape in drawing.shapes:
                cvat.outline(shape, {"shoe": 1}, (30, 40))
    except NbtoolsError:
        return "refused"
    return "accepted"


def template(name: str, make: Callable[[Path], object]) -> Path:
    """What `make` leaves under this name, made once."""
    folder = Path(os.environ["FAULTS_PLACE"]) / f"made-{name}"
    if not folder.exists():
        make(folder)
    return folder / name


CASES: dict[str, Callable[[random.Random, Path], str]] = {
    **{form: archive_case(form) for form in FORMS},
    "labels": labels_case,
    "packs": pack_case,
    "checkpoints": checkpoint_case,
    "plans": plan_case,
    "control files": control_case,
    ".dgrl": page_case,
    "NPZ": clip_case,
    "CVAT": cvat_case,
}


def swept(name: str, seeds: Iterable[int], root: Path) -> tuple[Counter[str], list[str]]:
    """(files by what became of them, what went wrong)."""
    totals, wrong, place = Counter(), [], root / "case"
    os.environ["FAULTS_PLACE"] = str(root)
    for seed in seeds:
        place.mkdir(parents=True)
        try:
            totals[CASES[name](random.Random(f"{name} {seed}"), place)] += 1
        except Exception as error:
            totals["wrong"] += 1
            wrong.append(f"{name}, seed {seed}: {type(error).__name__}: {error}")
        shutil.rmtree(place)
    return totals, wrong


# -- truncation, and published traversals


def truncations(form: str, root: Path, step: int = 1) -> tuple[Counter[str], list[str]]:
    """An archive cut at each byte is refused, or its content is whole."""
    data, totals, wrong = archived(FILES, form), Counter(), []
    root.mkdir(exist_ok=True)
    for cut in range(0, len(data), step):
        (path := root / "cut").write_bytes(data[:cut])
        try:
            archive.extract(path, root / "out")
            totals["whole"] += 1
            wrong += [] if tree(root / "out") == FILES else [f"{form}, cut at {cut}: accepted"]
        except NbtoolsError:
            totals["refused"] += 1
        shutil.rmtree(root / "out", ignore_errors=True)
    return totals, wrong


def special(name: str, kind: bytes, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


def long_links() -> list[Any]:
    """CVE-2025-4517: a chain of links whose real path is longer than the system allows is believed unresolved."""
    name, steps, members = "d" * 247, "abcdefghijklmnop", []
    where = ""
    for step in steps:
        members += [special(f"{where}{name}", tarfile.DIRTYPE), special(f"{where}{step}", tarfile.SYMTYPE, name)]
        where += f"{name}/"
    link = f"{'/'.join(steps)}/{'l' * 254}"
    members += [special(link, tarfile.SYMTYPE, "../" * len(steps))]
    members += [special("escape", tarfile.SYMTYPE, f"{link}/../evil"), ("escape", b"evil")]
    return members


TRAVERSALS: dict[str, list[Any]] = {
    "CVE-2007-4559, a name that leads upwards": [("../evil", b"evil")],
    "CVE-2001-1267, within a name": [special("a", tarfile.DIRTYPE), ("a/../../evil", b"evil")],
    "a link, then a file through it": [special("x", tarfile.SYMTYPE, ".."), ("x/evil", b"evil")],
    "a dangling link, then a file of its name": [special("x", tarfile.SYMTYPE, "../evil"), ("x", b"evil")],
    "a dangling link, and a hard link to it": [
        special("x", tarfile.SYMTYPE, "../evil"),
        special("y", tarfile.LNKTYPE, "x"),
        ("y", b"evil"),
    ],
    "CVE-2025-4517, links beyond the longest path": long_links(),
}


def escapes(data: bytes, root: Path, extract: Callable[[Path, Path], object]) -> bool:
    """Whether an archive put a file next to the folder that it was extracted into."""
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir(parents=True)
    (root / "some.tar").write_bytes(data)
    with contextlib.suppress(Exception):
        extract(root / "some.tar", root / "out")
    return (root / "evil").exists()


def by_python(path: Path, out: Path, how: Literal["fully_trusted", "data"]) -> None:
    out.mkdir()
    with tarfile.open(path) as tar:
        tar.extractall(out, filter=how)
