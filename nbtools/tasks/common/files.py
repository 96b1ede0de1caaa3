"""The files of a source: listing them, the split that a folder's name gives, opening images, reading lists and tables
as people and programs write them; and a demo's files."""

import csv
import io
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path

from PIL import Image

from nbtools import disk
from nbtools.data import SLOW, bar, compose, open_image, side_by_side, split_word
from nbtools.errors import PackError
from nbtools.tasks.common.rules import Refused

HIDDEN = re.compile(r"(^|/)(\.|__MACOSX/)")  # what systems leave behind: .DS_Store, ._name.png, __MACOSX
DEMO = ".nbtools-demo"  # names of the files that a demo wrote; hidden, so that packing skips it

SEPARATORS = (",", ";", "\t", "|", " ")
HEADS = ("file", "filename", "id", "image", "images", "image_path", "img", "name", "path")  # first cells of headers

Rows = list[tuple[int, list[str]]]
File = tuple[str, Callable[[], bytes]]  # (name relative to the folder, what computes its content)


def walk(folder: Path) -> list[str]:
    """Return all files below a folder, relative to it, sorted; hidden ones are left out."""
    start = len(os.path.join(folder, ""))
    return sorted(name for item in disk.walk(folder) if not HIDDEN.search(name := item.path[start:]))


def split_of(name: str) -> str | None:
    """Return the split that the nearest folder (or archive) on a path names: HWDB2.0Train, valid, test_1; or None."""
    return next(filter(None, map(split_word, reversed(name.split("/")[:-1]))), None)


def decode_image(source: Path | bytes, mode: str = "", side: int = 0) -> Image.Image:
    """Return an image, upright, as RGB or L (grey), or without a mode as it is. side: as of `open_image`.

    Raises Refused for what is no whole image, or not of 8 bits.
    """
    try:
        image = open_image(source, side)
    except PackError as error:
        raise Refused(*error.args) from None
    return on_white(image, mode) if mode else image


def on_white(image: Image.Image, mode: str = "RGB") -> Image.Image:
    """Return the image as RGB or L (grey), on white paper where it is transparent: a plain conversion shows hidden
    colours. Raises Refused for more than 8 bits a channel."""
    if image.mode.startswith(("I", "F")):
        raise Refused(f"mode {image.mode}", "an image must have 8 bits per channel", "convert it to 8 bits")
    if image.has_transparency_data:
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image.convert("RGBA"))
    return image.convert(mode)


def read_rows(text: str, file: str, fits: Callable[[list[str]], bool], heads: Collection[str] = HEADS) -> Rows:
    """Return (line number, cells) of each row that is not empty, cut at the separator with which most of the first 100
    fit: comma, semicolon, tab, bar or blanks; at the comma if none does. A first row that does not fit and begins with
    one of `heads` is a header, and left out. Raises Refused for no CSV."""
    cuts = [partial(csv_rows, text, separator, file) for separator in SEPARATORS]
    rows = list(max(cuts, key=lambda cut: sum(fits(cells) for _, cells in islice(cut(), 100)))())
    headed = bool(rows) and not fits(rows[0][1]) and rows[0][1][0].casefold() in heads
    return rows[headed:]


def csv_rows(text: str, separator: str, file: str) -> Iterator[tuple[int, list[str]]]:
    lines = io.StringIO(text, newline="")
    plain = (f"{' '.join(line.split())}\n" for line in lines) if separator == " " else lines
    reader = csv.reader(plain, delimiter=separator, skipinitialspace=True)
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield reader.line_num, [cell.strip() for cell in cells]
    except csv.Error as error:
        raise Refused(str(error)[:80], "the file must be CSV", "save it as CSV in UTF-8, with commas", file) from None


def with_slashes(path: str) -> str:
    """Return a path from a list with slashes, whatever system wrote it, to be looked up among composed file names."""
    return compose(path).replace("\\", "/").removeprefix("./")


def read_text(path: Path, fix: str) -> str:
    """Return the text of a file that the caller names. Raises Refused, with this fix if it cannot be read."""
    try:
        return decode_text(path.read_bytes(), str(path))
    except OSError as error:
        raise Refused(error.strerror, "the file must be readable", fix, str(path)) from None


def decode_text(data: bytes, file: str) -> str:
    """Return text of UTF-8, or of UTF-16 with a byte order mark. Raises Refused naming the first byte that is none."""
    try:
        return data.decode("utf-16" if data[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8-sig")
    except UnicodeDecodeError as error:
        value, fix = f"byte {data[error.start]:#04x} at offset {error.start:,}", "save it as UTF-8; it may be GB18030"
        raise Refused(value, "the file must be UTF-8 text", fix, file) from None


def characters(classes: Iterable[str], option: str = "classes") -> tuple[str, ...]:
    """Return the classes of a recogniser of text. Raises PackError naming the option unless each is one character."""
    counts = Counter(classes if isinstance(classes, Iterable) else [classes])
    wrong = [one for one, count in counts.items() if count > 1 or not isinstance(one, str) or len(one) != 1]
    if wrong or not counts:
        came = repr(wrong[0]) if wrong else "none"
        raise PackError(f"{option} must be single characters, each once, got {came}; give a string or a list of them")
    return tuple(counts)


def write_demo(folder: str | Path, files: Iterable[File], suffixes: tuple[str, ...]) -> Path:
    """Write files into a folder in place of those of an earlier demo; return the folder.

    suffixes: of what a reader of the folder would take for data. Raises PackError if the folder has such files and no
    demo wrote it, or a foreign file has a name that is needed; DiskError.
    """
    folder, files = Path(folder).expanduser(), [*files]
    names, listed = [name for name, _ in files], folder / DEMO
    with disk.explained("writing demo data", folder):
        folder.mkdir(parents=True, exist_ok=True)
        own = set(listed.read_text("utf-8").splitlines()) if listed.exists() else set()
        for name in sorted(set(walk(folder)) - own):
            if name in names or (not own and name.lower().endswith(suffixes)):
                reason = "was not written by this demo, and would be mixed with it or lost"
                raise PackError(f"{folder / name} {reason}: choose another folder, or empty this one")
        for name in own:
            (folder / name).unlink(missing_ok=True)
        disk.write_atomic(listed, "\n".join(names))  # first: the next demo removes what an interrupted one wrote
        contents = side_by_side(lambda k: files[k][1](), range(len(files)))
        shown = bar(contents, "writing demo data", len(files), unit=" files", leave=False, delay=SLOW)
        for name, data in zip(names, shown, strict=True):
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)
    return folder


def require(kept: bool, rule: str, value: object) -> None:
    """Raise PackError unless a rule is kept, such as `count must be 1 or more`. value: what came."""
    if not kept:
        raise PackError(f"{rule}, got {value!r}")


def whole(value: object, least: int, most: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
