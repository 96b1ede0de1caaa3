"""Lists of labels: `labels.csv` with the columns file, gloss and cat, ids from 0, and perhaps others; and the names of
the ids in `labels_reference.csv`, with the columns gloss_id, label, cat_id and category."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from nbtools.data import WARNING, Row

LABELS, REFERENCE = "labels.csv", "labels_reference.csv"
COLUMNS = ("file", "gloss", "cat")
NAMES = ("gloss_id", "label", "cat_id", "category")
ID = re.compile("[0-9]{1,4}")  # a mistyped id must not make a network of a billion outputs


@dataclass(frozen=True)
class Label:
    """One row of a list. where: `train/labels.csv:14`; label: (gloss, cat), None where they cannot be read."""

    file: str
    where: str
    label: tuple[int, int] | None


@dataclass(frozen=True)
class Listed:
    """What a list says; whole: whether it could be read at all."""

    labels: list[Label] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    whole: bool = True


@dataclass(frozen=True)
class Names:
    """id → name, and gloss → category, as far as a reference tells them."""

    glosses: dict[int, str] = field(default_factory=dict)
    categories: dict[int, str] = field(default_factory=dict)
    category_of: dict[int, int] = field(default_factory=dict)


def is_list(data: bytes) -> bool:
    """Whether a CSV begins with the columns of a list of labels, whatever it is called."""
    head = data.partition(b"\n")[0].decode("utf-8-sig", "replace")
    return set(COLUMNS) <= set(folded(head.split(",")))


def read_labels(data: bytes, name: str) -> Listed:
    """The rows of a list, and what is wrong with them."""
    listed = Listed()
    try:
        table = list(numbered(data))
    except (UnicodeDecodeError, csv.Error) as error:
        fix = "save it as CSV in UTF-8, with commas"
        return Listed(rows=[Row("", "a list is CSV in UTF-8", str(error)[:80], fix, file=name)], whole=False)
    head = folded(table[0][1]) if table else []
    if missing := [column for column in COLUMNS if column not in head]:
        fix = "write file,gloss,cat as the first line, with commas between"
        rule = "a list has the columns file, gloss and cat"
        came = ",".join(head)[:60] or "an empty file"
        return Listed(rows=[Row(", ".join(missing), rule, came, fix, file=name)], whole=False)
    places = [head.index(column) for column in COLUMNS]
    for line, cells in table[1:]:
        add(listed, cells, len(head), places, f"{name}:{line}")
    return listed


def numbered(data: bytes) -> Iterator[tuple[int, list[str]]]:
    """(line, cells) of each row of a CSV that is not empty."""
    reader = csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""))
    for cells in reader:
        if any(cell.strip() for cell in cells):
            yield reader.line_num, cells


def folded(cells: Sequence[str]) -> list[str]:
    return [cell.strip().strip('"').casefold() for cell in cells]


def add(listed: Listed, cells: list[str], width: int, places: list[int], where: str) -> None:
    """Put one row to the others: as a label if it has a file, and to the faults if something is wrong."""
    if len(cells) != width:
        rule, fix = "a row has as many cells as the first line", "correct the row; quote a name that holds a comma"
        listed.rows.append(Row("", rule, f"{len(cells)} of {width}", fix, file=where))
        if len(cells) > places[0] and cells[places[0]].strip():
            listed.labels.append(Label(cells[places[0]].strip(), where, None))
        return
    file, *ids = (cells[place].strip() for place in places)
    if not file:
        rule, fix = "a row names its clip", "write the clip's name, or delete the row"
        listed.rows.append(Row("file", rule, "nothing", fix, file=where))
        return
    wrong = [(key, text) for key, text in zip(COLUMNS[1:], ids, strict=True) if not ID.fullmatch(text)]
    for key, text in wrong[:1]:
        rule, fix = f"{key} is a whole number from 0 to 9999", "write its id, and names into labels_reference.csv"
        listed.rows.append(Row(key, rule, text or "nothing", fix, file=where))
    listed.labels.append(Label(file, where, None if wrong else (int(ids[0]), int(ids[1]))))


def read_names(data: bytes, name: str) -> tuple[Names, list[Row]]:
    """What a reference calls the ids; a warning where it cannot be read, since names are for people only."""
    names = Names()
    try:
        table = list(numbered(data))
        head = folded(table[0][1]) if table else []
        gloss, label, cat, category = (head.index(column) for column in NAMES)
        for line, cells in table[1:]:
            if not ID.fullmatch(cells[gloss]) or not ID.fullmatch(cells[cat]):
                raise ValueError(f"ids {cells[gloss]!r} and {cells[cat]!r} in line {line}")
            names.glosses[int(cells[gloss])] = cells[label].strip()
            names.categories[int(cells[cat])] = cells[category].strip()
            names.category_of[int(cells[gloss])] = int(cells[cat])
    except (UnicodeDecodeError, csv.Error, ValueError, IndexError) as error:
        rule = f"a reference has the columns {', '.join(NAMES)}"
        fix = "correct it; until then ids are shown"
        return Names(), [Row("", rule, str(error)[:80], fix, WARNING, name)]
    return names, []
