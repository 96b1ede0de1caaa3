"""The lists and tables that come with data, as people and programs write them: any separator, quotes of CSV, a header
or none, UTF-8 or Excel's UTF-16; and texts as places in a list of characters."""

import csv
import io
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

from nbtools.data import Pack
from nbtools.errors import PackError
from nbtools.tasks.common.files import Refused

SEPARATORS = (",", ";", "\t", "|", " ")
JUDGED = 100  # rows that decide on the separator
HEADS = ("file", "filename", "id", "image", "images", "image_path", "img", "name", "path")  # first cells of headers

Rows = list[tuple[int, list[str]]]


def read_rows(text: str, file: str, fits: Callable[[list[str]], bool], heads: Collection[str] = HEADS) -> Rows:
    """Return (line number, cells) of each row that is not empty, cut at the separator with which most rows fit: comma,
    semicolon, tab, bar or blanks; at the comma if none does. A first row that does not fit and begins with one of
    `heads` is a header, and left out. Raises Refused for no CSV."""
    cuts = [partial(csv_rows, text, separator, file) for separator in SEPARATORS]
    rows = list(max(cuts, key=lambda cut: sum(fits(cells) for _, cells in islice(cut(), JUDGED)))())
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
    """Return a path of a list as names of files have it: with slashes, whatever system wrote it."""
    return path.strip().replace("\\", "/").removeprefix("./")


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


def spell(classes: Sequence[str], places: Iterable[int]) -> str:
    """Return the text of a row of places in the classes."""
    return "".join(classes[place] for place in places)


def text_of(pack: Pack, i: int) -> str:
    """Return the text of sample i of a pack whose column `label` holds places in its classes."""
    return spell(pack.classes, pack.sample(i)["label"])
