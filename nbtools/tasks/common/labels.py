"""Labels and class lists: characters ↔ places in the classes, and tables of labels as CSV."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from nbtools.data import Pack
from nbtools.errors import PackError
from nbtools.tasks.common.files import decode_text
from nbtools.tasks.common.report import Refused, Row


def characters(classes: Iterable[str], option: str = "classes") -> tuple[str, ...]:
    """The classes of a recogniser of text. Raises PackError naming the option unless each is one character, once."""
    listed = list(classes) if isinstance(classes, Iterable) else [classes]
    wrong = [c for c in listed if not isinstance(c, str) or len(c) != 1]
    wrong += [c for c, count in Counter(listed).items() if count > 1] if not wrong else []
    if wrong or not listed:
        came = repr(wrong[0]) if wrong else "none"
        raise PackError(f"{option} must be single characters, each once, got {came}; give a string or a list of them")
    return tuple(listed)


def spell(classes: Sequence[str], places: Iterable[int]) -> str:
    """The text of a row of places in the classes."""
    return "".join(classes[place] for place in places)


def text_of(pack: Pack, i: int) -> str:
    """The text of sample i of a pack whose column `label` holds places in its classes."""
    return spell(pack.classes, pack.sample(i)["label"])


def csv_rows(data: bytes, file: str) -> Iterator[tuple[int, list[str]]]:
    """(line number, cells) of each row that is not empty. Raises Refused for what is no CSV in UTF-8."""
    reader = csv.reader(io.StringIO(decode_text(data, file), newline=""))
    try:
        for cells in reader:
            if any(cell.strip() for cell in cells):
                yield reader.line_num, cells
    except csv.Error as error:
        fix = "save it as CSV in UTF-8, with commas"
        raise Refused(Row("", "the file must be CSV", str(error)[:80], fix, file=file)) from None


def csv_bytes(head: Iterable[object], rows: Iterable[Iterable[object]]) -> bytes:
    """A CSV file with a header."""
    content = io.StringIO(newline="")
    csv.writer(content, lineterminator="\n").writerows([head, *rows])
    return content.getvalue().encode()
