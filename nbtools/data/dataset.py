"""nb.pack: your data becomes the columns of a Pack; and items to predict on are read the same way. Folders of images by
class and tables are lists of items: dicts by column, with the paths of images in place of them. What a folder is
follows from the images that it holds: hidden ones and those in __MACOSX or @eaDir do not count."""

import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache, partial
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from nbtools.data.build import RawFiles, make_pack, open_pack
from nbtools.data.fetch import drive_path, files_in, is_far
from nbtools.data.forms import IMAGES, RESIZES, TARGET, TARGETS, compose, fit, is_image, is_missing, plain_values
from nbtools.data.items import Items, Part, Table, column_name, parts_of, target_of
from nbtools.data.pack import Card, Column, Sample, is_pack
from nbtools.data.progress import say
from nbtools.data.splits import require_shares, some
from nbtools.data.stage import stage
from nbtools.errors import PackError
from nbtools.show import plural

if TYPE_CHECKING:
    import pandas as pd

TASK = "dataset"
NO_CLASS = ("images", "imgs", "jpegimages")  # folders of data sets with masks, or lists of labels
COUNT = r"(?i:id|index|\w*[_ ]id)|\w*[a-z]I[dD]"  # names of columns that count the rows
WRITTEN = {"keep_default_na": False, "na_values": [""]}  # of pandas: NA, None and nan are texts
NUMBERS = {"include": ["number", "bool", "boolean"], "exclude": ["timedelta", "complexfloating"]}
SPLIT = r"(?<![a-z])(?:(train)(?:ing)?|e?(val)(?:id|idation|uation)?|dev|(test)(?:ing)?)(?:set|data|images?)?(?![a-z])"
WHOLE = rf"{SPLIT}(.(set|data|images?))?"  # a name that is nothing else


def pack(
    data: Any = None,
    *more: Any,
    inputs: Any = None,
    target: Any = None,
    image: str | None = None,
    root: str | Path | None = None,
    sep: str | None = None,
    classes: Sequence[str] | Literal[False] | None = None,
    train: Any = None,
    val: float | Any = 0.1,
    test: float | Any = 0.1,
    groups: Any = None,
    seed: int = 0,
    folds: int | None = None,
    size: int | tuple[int, int] | None = None,
    resize: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    points: Any = None,
    text: Any = None,
    store: bool = True,
    into: str | Path | None = None,
    like: Any = None,
    progress: bool = True,
) -> Any:
    """Return the pack of your own data: read once, and only opened on later calls.

    data, or train: arrays (x, y), or a dict of them; a Dataset, array or list of items (arrays, numbers, PIL images,
    tuples or dicts), a DataFrame, a CSV file, or images by class, `class/*.png` or `train/class/*.png`, as for `stage`.
    target, inputs: keys or columns; by default y, label, labels or target, the second of (x, y), and all others. image:
    the column of file names in root, or beside the CSV. text: a function of a text, kept by its name. sep: splits a
    text into several labels, an empty one into none; these, or lists of names, become y (K,) of 0 and 1. classes: all,
    in order, and arrays of 0 and 1 are then labels; by default those that occur; False: whole numbers are values. val,
    test: data, shares, or numbers of samples; test=1.0: all. groups: what stays in one split: a column, one value per
    item, or a function of its name. folds: return this many packs.
    size: (H, W) for PIL images, target masks (nearest ids) and points. resize: crop (the default for classes),
    pad, squash. points: columns, also the target's, of (…, 2) x, y or (…, 4) x1, y1, x2, y2 in pixels. mean, std: per
    channel of images in 0…1; by default those of the training split, or of 64 items with store=False: then no copy is
    made, and each epoch reads the Dataset. into: a folder for the pack; by default in the cache, named by options and
    data (of a lazy Dataset 64 items and its `targets` or `labels`). like: as `run.pack` passes it.
    Items that cannot be used are listed in `pack.bad`. Raises PackError, DiskError or StageError.
    """
    if more or hasattr(target, "shape"):
        came = f"{1 + len(more)} arguments" if more else f"target={type(target).__name__}"
        raise PackError(f"pack takes its data as one argument, got {came}; write nb.pack((x, y)), or train=…, val=…")
    inputs = [inputs] if isinstance(inputs, str | int) else inputs
    numbers: Any = (x.item() if isinstance(x, np.generic) else x for x in (val, test, size, folds))
    val, test, size, folds = numbers
    given = {"target": target, "inputs": inputs, "image": image, "sep": sep, "resize": resize}
    given |= {"classes": names_in(classes), "points": points, "text": text, "store": store}
    given |= {name: x if x is None else np.ravel(x).tolist() for name, x in (("mean", mean), ("std", std))}
    like, columns = like or ({}, None)
    options = SimpleNamespace(**given, like=like, size=size_of(size, resize), key=(target, inputs), columns=columns)
    if isinstance(data, str | Path) and not is_table(data) and is_pack(folder := stage(data, progress=progress)):
        pack = open_pack(folder, TASK, test, **given, size=options.size)
        return pack.folds(folds, seed) if folds else pack
    shares, val, test = divide(data, train, val, test)
    items, draw = Items(*open_parts(shares, options, root, groups, progress), options=options), (val, test, seed)
    if progress and items.resize:
        say_resize(items, items.resize, resize is None)
    for name in items.images if progress else ():
        if (column := items.columns[name]).layout == "hwc" and column.dtype == "<f4":
            say(f"{name} {column} is read as images (H, W, C), and reaches the network as (C, H, W); else reshape it")
    pack = make_pack(TASK, {"key": items.key(draw), "source": options.source}, into, items.survey, draw, progress)
    pack = dataclasses.replace(pack, raw=RawFiles(pack, Path(), partial(items.read_again, pack.classes)))
    return pack.folds(folds, seed) if folds else pack


def names_in(classes: Any) -> list[str] | Literal[False] | None:
    """Return the classes as texts. Raises PackError for what has no order, or has one twice."""
    if classes is None or classes is False:
        return classes
    names = [] if isinstance(classes, int | Mapping | set) else [*map(compose, classes)]
    if not 0 < len({*names}) == len(names):
        raise PackError(f"classes must be a list of names, each once, in the order of their numbers, got {classes!r}")
    return names


def say_resize(items: Items, resize: Sequence[Any], chosen: bool) -> None:
    """Say how images are resized, if that was `chosen` here, and what on them does not follow, though it should."""
    if chosen:
        say("images are resized to {} × {} by resize={!r}; the choices are {}".format(*resize, ", ".join(RESIZES)))
    column = items.columns[TARGET] if items.kind == "values" else Column("fixed", "", ())
    axes = len(column.shape) + (column.kind == "ragged")
    if TARGET not in {*items.pictures, *items.marked} and (axes > 1 or column.shape in ((2,), (4,))):
        fix = "points='target' moves points and boxes; give masks as PIL images"
        say(f"the target {column} is left as it is: {fix}")


def size_of(size: Any, resize: str | None) -> list[int] | None:
    """Return [height, width]. Raises PackError for an invalid size, and for a resize without one."""
    pair = [] if size is None else [size, size] if np.ndim(size) == 0 else [*size]
    if len(pair) not in (0, 2) or not all(isinstance(n, int) and n > 0 for n in pair):
        raise PackError(f"size must be one number of pixels or (height, width), got {size!r}")
    if resize is not None and (resize not in RESIZES or not pair):
        raise PackError(f"resize must be one of {', '.join(RESIZES)}, with a size=, got {resize!r}, size={size}")
    return pair or None


def divide(data: Any, train: Any, val: Any, test: Any) -> tuple[dict[str | None, Any], float, float]:
    """Return split → its data, None: of data yet to be divided; and the shares of val and test that are drawn."""
    if (data is None) == (train is None):
        raise PackError(f"pack takes the data, or train=…, got {'neither' if data is None else 'both'}; pass one")
    given = {name: part for name, part in (("val", val), ("test", test)) if not isinstance(part, int | float | None)}
    val, test = (0 if name in given else share for name, share in (("val", val), ("test", test)))
    require_shares(val, test)
    return {"train" if given else None: train if data is None else data, **given}, val, test


def open_parts(given: Mapping[str | None, Any], options: Any, root: Any, groups: Any, progress: bool) -> Any:
    """Return the parts, and the groups, of a column its values. Raises PackError for what has no items to ask for."""
    parts, values, roles, column = list[Part](), [], None, groups if isinstance(groups, str) else None
    options.source = " + ".join(f"{x}" if isinstance(x, str | Path) else type(x).__name__ for x in given.values())
    every = vars(options) | {"root": root}
    asked = [name for name in ("sep", "image", "root", "target", "inputs") if every[name] is not None]
    for split, data in given.items():
        path, name = isinstance(data, str | Path), f"{split}/{{}} {{}}" if split else "{} {}"
        if is_table(data):
            named = options.image, options.target, column, *TARGETS
            goals = TARGETS if options.target is None else np.atleast_1d(np.array(options.target, object)).tolist()
            kept = (options.image, column, *(goals if options.classes else ()))
            doubted = goals if options.classes is None and options.sep is None else ()
            frame = read_table(data := drive_path(data) if path else data, named, kept, doubted)
            if options.image and split is None:
                refuse_splits(frame, (options.image, options.target, column))
            roles = roles or roles_of(frame, options, column, progress)  # the first is that of training
            folder = stage(root) if root is not None else data.parent if path else Path()
            if progress and options.image and not parts and is_far(folder):
                say(f"images in {folder} are read from Drive one by one; a zip, root='drive:….zip', is faster")
            rows = rows_of(frame, *roles, options, folder)
            files = frame[options.image] if options.image else [None] * len(rows)
            files = [f"{i}: {file}" if isinstance(file, str | Path) else i for i, file in enumerate(files)]
            parts.append((split, rows, [name.format("row", file) for file in files]))
            values += [] if column is None else by_name(frame, [column])[0][column].tolist()
            options.key, options.columns = (TARGET if roles[0] else None, None), roles[1]
        elif asked[:1] and not (options.like or options.columns) and (path or asked[0] not in ("target", "inputs")):
            fix = f"name the table in it: nb.pack(nb.stage({str(data)!r}) / 'labels.csv', {asked[0]}=…)"
            fix = fix if path else "return images, and a list of labels, instead"
            raise PackError(f"{asked[0]}= is for tables, got {options.source}; {fix}")
        elif path:
            parts += image_folders(stage(data, progress=progress), split, options.classes is not None, progress)
            options.key = (TARGET, None)
        else:
            if isinstance(data, tuple) and len(data) == 2 and options.key[0] != 0:
                x, options.columns = by_name(data[0], options.columns)
                data = x, data[1]
            data = list_items(data)
            parts.append((split, data, [name.format("item", i) for i in range(len(data))]))
    return parts, values if column is not None else groups


def by_name(x: Any, names: Sequence[str] | None) -> tuple[Any, Any]:
    """Return columns of a DataFrame in this order, by default its own, and their names; an array as it is."""
    own = [*getattr(x, "columns", ())]
    if not all(isinstance(name, str) for name in own) or not 0 < len({*own}) == len(own):
        return x, names
    if absent := [name for name in names or () if name not in own]:
        raise PackError(f"the table has no column {absent[0]!r}; its columns are {', '.join(own)}")
    return x[[*(names or own)]], names or own


def list_items(data: Any) -> Any:
    """Return the rows of columns, (x, y) or by name; other data as it is. Raises PackError unless it has an item i."""
    fix, names = "pass list(dataset), or define __getitem__ and __len__", data if isinstance(data, Mapping) else None
    if isinstance(data, tuple | Mapping):
        columns: Any = data if names is None else [*names.values()]
        several = len(data) > 1 if names is None else not names.keys() & {"train", "val", "test"}
        if several and all(isinstance(column, list) or getattr(column, "ndim", 0) for column in columns):
            arrays = ("to_numpy", "toarray", "cpu")  # of pandas, SciPy, torch
            columns = [next((getattr(x, f)() for f in arrays if hasattr(x, f)), x) for x in columns]
            columns = [np.where(x.mask, None, x.data) if np.ma.is_masked(x) and x.ndim == 1 else x for x in columns]
            if len(counts := sorted({len(column) for column in columns})) > 1:
                raise PackError(f"columns must all have the same number of items, got {', '.join(map(str, counts))}")
            columns = [x if isinstance(x, list | torch.Tensor) else np.asanyarray(x) for x in columns]
            return Table(dict(zip(names or range(len(columns)), columns, strict=True)), names is not None)
        fix = "pass arrays (x, y), a list of items, or splits as train=…, val=… and test=…"
    elif hasattr(data, "__getitem__") and hasattr(data, "__len__"):
        return data
    elif hasattr(data, "dataset"):
        fix = "pass its dataset: loader.dataset"
    raise PackError(f"data must be a Dataset with __getitem__ and __len__, got {type(data).__name__}; {fix}")


@lru_cache  # a source has many names in few folders
def split_word(name: str) -> str | None:
    """Return train, val or test if a name has it as a word, also as training_set, valid, TestData, seg_test."""
    match = re.search(SPLIT, name, re.I)
    return (match[match.lastindex].lower() if match.lastindex else "val") if match else None


def image_folders(root: Path, split: str | None, one: bool, progress: bool) -> list[Part]:
    """Return the images of a folder of classes, or of its folders train, val and test. one: there may be one class."""
    files = [name for name in files_in(root) if not re.search(r"(^|/)(\.|(__MACOSX|@eaDir)/)", name)]
    names = [name for name in files if name.lower().endswith(IMAGES)]
    place = descend(names, "")
    folders = inside(names, place)
    deep = {f: word for f in folders if (word := split_word(f)) and inside(names, f"{place}{f}/")}
    below = {split_word(inner[1]) for name in names if len(inner := name.removeprefix(place).split("/")) > 2}
    crossed = split is None and None not in below and not deep and {"train"} < below  # class/train/…, class/test/…
    places = [(word, place) for word in sorted(map(str, below))] if crossed else [(split, place)]
    if split is None and "train" in deep.values():
        several = len({*deep.values()}) > 1
        places = [(word if several else None, descend(names, f"{place}{folder}/")) for folder, word in deep.items()]
    elif not folders or (split is None and not one and (len(folders) == 1 or all(map(split_word, folders)))):
        came = f"only {some(folders)}" if folders else f"no folder with images, but {some(files)}"
        fix = "name the folder above or a table in it, or load arrays yourself"
        raise PackError(f"{root} must hold a folder of images for each class, got {came}; {fix}")
    parts, left_out = list[Part](), {*files}
    for word, at in places:
        there = [name for name in names if name.startswith(at) and "/" in name[len(at) :]]
        there = [name for name in there if not crossed or split_word(name[len(at) :].split("/")[1]) == word]
        found = inside(there, at)
        inner = sorted({(*name[len(at) :].split("/")[:2],) for name in there if name.count("/", len(at)) > 1})
        odd = [] if one or word else [each for each in found if re.fullmatch(WHOLE, each, re.I)]
        odd += [each for each in found if each.lower() in NO_CLASS]
        twice = Counter(folder for folder, deep in inner if folder != deep in found)  # once: as numbers of sessions
        odd += [folder for folder, deep in inner if twice[folder] > 1 or deep.lower() in ("mask", "masks")]
        if odd:
            fix = "pass masks as a list of (image, mask), labels as a table"
            fix = "name all classes=[…]" if split_word(odd[0]) else fix
            raise PackError(f"{root / at}: {odd[0]!r} is not a class (folders: {', '.join(found)}); move it, or {fix}")
        items = [{"image": root / name, TARGET: compose(name[len(at) :].split("/")[0])} for name in there]
        parts.append((word, items, [f"{split}/{name}" if split else name for name in there]))
        left_out.difference_update(there)
    if progress and left_out:
        say(f"{plural(len(left_out), 'file')} left out, such as {min(left_out)}: not images in class folders")
    return parts


def inside(names: Iterable[str], place: str) -> list[str]:
    rest = (name[len(place) :] for name in names if name.startswith(place))
    return sorted({name.partition("/")[0] for name in rest if "/" in name})


def descend(names: list[str], place: str) -> str:
    """Return the place where the classes are: below folders that hold nothing but another one of folders."""
    folders = inside(names, place)
    deep = all(name.count("/", len(place)) != 1 for name in names if name.startswith(place))
    return descend(names, f"{place}{folders[0]}/") if deep and len(folders) == 1 else place


def is_table(data: Any) -> bool:
    """Return whether data are a DataFrame, a table of Polars or PyArrow, or the path of a CSV file."""
    other = hasattr(data, "to_pandas") and not hasattr(data, "features")  # which Datasets of Hugging Face have
    path = isinstance(data, str | Path) and str(data).lower().endswith((".csv", ".tsv")) and "://" not in str(data)
    return path or hasattr(data, "select_dtypes") or (other and not hasattr(data, "ndim"))


def read_table(data: Any, named: Collection[Any] = (), kept: Any = (), doubted: Any = ()) -> "pd.DataFrame":
    """Return a DataFrame, or that of a CSV file, whose separator is the most frequent one in its first line. named:
    columns of classes, groups and files, in which 01 is not 1, and no whole number becomes a float or loses digits;
    kept, doubted: those of them in which a text that often means nothing, as None, is one, or is refused."""
    import pandas as pd

    if isinstance(data, Path):
        try:
            with open(data, encoding="utf-8-sig") as file:
                sep = max(",;\t|", key=file.readline().count)
            read = partial(pd.read_csv, data, sep=sep, encoding="utf-8-sig", skipinitialspace=True)
            if not isinstance(read(nrows=9, dtype="string").index, pd.RangeIndex):
                raise ValueError("rows of more fields than the header has names")
            frame, texts = read(), read(usecols=lambda name: name.strip() in named, dtype="string", **WRITTEN)
            numbers = [name for name in frame if re.fullmatch(r"-?\d+(\.\d*)?", name)]
            rising = all(map(str.isdecimal, numbers)) and sorted({*map(int, numbers)}) == [*map(int, numbers)]
            if not rising or any((texts[name] == name).any() for name in texts):  # else 0, 1, 2 of pandas, or years
                raise ValueError(f"the first line {', '.join(frame)}")
        except (OSError, ValueError) as error:  # pandas' own are ValueErrors
            fix = "or pass a DataFrame: pd.read_csv(…, encoding=…, header=…, index_col=False)"
            raise PackError(f"{data} must be a table in UTF-8 with a header line, got {error}; {fix}") from None
        for name, cells in texts.items():
            words = [word for word in cells[frame[name].isna()] if not is_missing(word)]  # pandas': NA, None, null …
            if words and pd.api.types.infer_dtype(frame[name]) == "string":
                if name.strip() in doubted:
                    fix = "may be a class, or mean nothing: name all classes=[…], or empty these cells"
                    raise PackError(f"{data}: {words[0]!r} in column {name!r} {fix}")
                frame[name] = cells if name.strip() in kept else frame[name]
            cells = cells.where(frame[name].notna())
            if cells.str.fullmatch(r"-?(0\d+|\d{16,}) *").any():
                frame[name] = cells
            elif cells.str.fullmatch(r"-?\d+ *").all():
                frame[name] = frame[name].astype("Int64")
        data = frame.rename(columns=str.strip)
    data = data.to_pandas() if hasattr(data, "to_pandas") else data
    if data.columns.nlevels > 1 or not data.columns.map(str).is_unique:
        raise PackError(f"a table's column names must be unique, got {', '.join(map(str, data))}; rename some")
    return data.rename(columns=str)


def roles_of(frame: "pd.DataFrame", options: Any, besides: Any, progress: bool) -> tuple[list[str], list[str]]:
    """Return the columns of the target, and of inputs: by default the image, without one all others, but for pandas'
    unnamed ones and row numbers, as is said. Raises PackError where there is no single reading."""
    target = target_of(dict(frame), *options.key)
    goals = [str(name) for name in (target if isinstance(target, list | tuple) else [target]) if name is not None]
    if options.classes and {*options.classes} == {*map(compose, goals)}:
        goals.sort(key=lambda name: options.classes.index(compose(name)))
    own = [] if options.image is None else [options.image]
    idle = [name for name in frame if name.startswith("Unnamed: ")]  # an index, or what is behind a last comma
    idle += [name for name in frame.select_dtypes("integer") if re.fullmatch(COUNT, name) and frame[name].is_unique]
    rest = own or options.columns or [name for name in frame if name not in (*goals, besides, *idle)]
    if progress and idle and rest != own and options.inputs is None:
        say(f"unnamed columns and row numbers are left out: {', '.join(idle)}; inputs=[…] includes them")
    inputs = [*dict.fromkeys(map(str, rest if options.inputs is None else [*own, *options.inputs]))]
    large = frame[[name for name in (*inputs, *goals) if name in frame]].select_dtypes(**NUMBERS).head(1000)
    counts, kept = (dict[str, Any](each.nunique()) for each in (large, large.astype("float32")))
    if progress and (same := [name for name in counts if 2 * kept[name] < counts[name]]):
        say(f"float32 cannot tell most values of {', '.join(same)} apart: subtract their mean or start first")
    if not inputs or {*inputs} & {*goals}:
        raise PackError(f"inputs and target must be separate columns, got {inputs} and {goals}; choose with inputs=[…]")
    return goals, inputs


def refuse_splits(frame: "pd.DataFrame", used: Sequence[Any]) -> None:
    """Raise PackError where another column of a list of images tells their splits."""
    for name in frame.select_dtypes(exclude="number").columns.difference([*map(str, used)]):
        words = {word: split_word(word) for word in frame[name].map(str).unique()}
        if None not in words.values() and len({*words.values()}) > 1 and len(words) < 6:
            parts = ", ".join(f"{split}=df[df[{name!r}] == {word!r}]" for word, split in words.items())
            raise PackError(f"column {name!r} has the splits: pass {parts}, or df.drop(columns={name!r}) to ignore it")


def rows_of(frame: "pd.DataFrame", goals: Sequence[str], inputs: Sequence[str], options: Any, root: Path) -> Table:
    """Return the rows as items: numbers are one array, `x`; the file in the column `image`, in root, is the image;
    texts are columns of their own; `sep` divides a target into labels. Raises PackError for other columns."""
    frame, _ = by_name(frame, (*goals, *inputs))
    values = frame[[name for name in inputs if name != options.image]].infer_objects()
    numbers = values.select_dtypes(**NUMBERS)
    numbers = numbers.dropna(axis="columns", how="all") if len(frame) > 1 else numbers
    texts = [name for name in values if name not in numbers]
    if texts and not options.text and len(frame):
        fix = f"choose others with inputs={[*numbers] or '[…]'}, name target= or image= among them, convert texts with"
        fix += " text=function or pd.get_dummies(df), and turn dates, durations and decimal commas into numbers"
        raise PackError(f"these columns are not numeric: {', '.join(texts)}; {fix}")
    own = {"x": len(numbers.columns), "image": options.image in inputs, TARGET: goals}
    if taken := [name for name in texts if own.get(name)]:
        raise PackError(f"nbtools has a column {taken[0]!r} of its own; rename that of texts")
    if options.text and not texts:
        raise PackError(f"text= needs a text column, not {', '.join(inputs)}; df[[…]].astype(str) makes one")
    columns: dict[str, Any] = {name: frame[name].tolist() for name in texts}
    if options.image in inputs:
        held = [f.get("bytes") or f.get("path") if isinstance(f, dict) else f for f in frame[options.image]]
        held = [f if isinstance(f, bytes) or is_image(f) else "" if is_missing(f) else str(f) for f in held]
        held = [Path(f.replace("\\", "/")) if f and isinstance(f, str) else f for f in held]
        files = [f for f in held if isinstance(f, Path)][:99]  # the list may name the folder of images too
        root = next((at for f in files for at in (root, root.parent) if (at / f).exists()), root)
        columns["image"] = [root / f if isinstance(f, Path) else f or None for f in held]
    if len(numbers.columns):
        columns["x"] = numbers.to_numpy(np.float32, na_value=np.nan)
    if len(goals) == 1:
        sep, values = options.sep, frame[goals[0]].tolist()  # in which pd.read_parquet has arrays for lists
        values = [x.tolist() if isinstance(x, np.ndarray) and x.dtype == object else x for x in values]
        if sep:  # an empty cell has no label
            values = ["" if is_missing(text) else str(text) for text in values]
            values = [[name.strip() for name in text.split(sep) if name.strip()] for text in values]
        columns[TARGET] = values
    elif len(frame[[*goals]].select_dtypes(**NUMBERS).columns) < len(goals):
        raise PackError(f"several targets must be numeric, got {', '.join(goals)}; name one, or use pd.get_dummies(df)")
    elif goals:
        columns[TARGET] = frame[[*goals]].to_numpy(np.float32, na_value=np.nan)
    return Table(columns)


def options_like(card: Card) -> dict[str, Any]:
    """Return options of `pack` with which another source has the classes and the preprocessing of a card."""
    roles = {name: value for name, value in card.options["roles"].items() if name != "key"}
    classes = {"values": False, "none": None}.get(card.options["kind"], card.classes)
    values = [name for name in card.columns if name != TARGET or card.options["kind"] == "values"]
    roles["like"] = {name: card.columns[name] for name in values}, card.options["columns"]
    return {**roles, "classes": classes, "text": resolve_name(card.options["text"]) if card.options["text"] else None}


def items_of(given: Any, card: Card, root: str | Path | None = None) -> Sequence[Any]:
    """Return what `run.predict` got, item by item: a file, a text, an item (a dict, a tuple, an image, a number, a
    sample's array), or several: a list, a Dataset, an array of them, a DataFrame or CSV file. Raises PackError."""
    columns = card.options["columns"]
    if getattr(given, "ndim", 0) == 1 and hasattr(given, "iloc") and not {*(columns or ())} & {*given.index}:
        given = given.tolist()  # a Series of items, not a row
    given = given.to_frame().T.infer_objects() if getattr(given, "ndim", 2) == 1 and hasattr(given, "iloc") else given
    if hasattr(given, "iloc") and (columns is None or isinstance(card.options["roles"]["key"], int)):
        given = by_name(given, columns)[0].to_numpy()  # as of (x, y)
    elif columns and (hasattr(given, "iloc") or is_table(given)):
        place = (given := drive_path(given)).parent if isinstance(given, str | Path) else Path()
        roles = SimpleNamespace(**card.options["roles"], text=card.options["text"])
        return rows_of(read_table(given, [roles.image]), (), columns, roles, place if root is None else stage(root))
    first = card.columns[card.options["inputs"][0]]
    grey = first.layout == "hwc" and getattr(given, "dtype", None) == np.uint8
    ranks = 0, len(first.shape) + (first.kind == "ragged"), 2 * grey
    files = isinstance(given, tuple) and first.layout and all(str(part).lower().endswith(IMAGES) for part in given)
    given = [*given] if files and card.options["kind"] != "values" else given  # no picture with its mask
    if isinstance(given, (str, bytes, Path, dict, tuple)) or is_image(given) or getattr(given, "ndim", -1) in ranks:
        return [given]
    given = list_items(given) if hasattr(given, "dataset") else given  # not a DataLoader
    return given if hasattr(given, "__getitem__") else list(given) if isinstance(given, Iterable) else [given]


def sample_of(item: Any, card: Card) -> Sample:
    """Return an item, or an image file, as packing would have stored its inputs: as the Dataset returns it, or without
    its target; else a dict by the columns, or values in their order. Raises PackError(value, rule, fix)."""
    options = card.options
    columns = {name: card.columns[name] for name in options["inputs"]}
    if options["columns"] and isinstance(item, Mapping):  # a row of a table
        numbers = [item.get(name) for name in options["columns"]]
        numbers = [float(number) for number in numbers if isinstance(number, int | float | np.number | np.bool_)]
        item = {**item, "x": numbers} if numbers else item
        item = {**item, "image": item[file]} if (file := options["roles"]["image"]) in item else item
    parts, roles = parts_of(item), options["roles"]
    values = {column_name(key): value for key, value in parts.items()}
    if not isinstance(item, Mapping):
        chosen = [parts[key] for key in (roles["inputs"] or parts) if key != roles["key"] and key in parts]
        values = dict(zip(columns, chosen if len(chosen) == len(columns) else parts.values(), strict=False))
    if not values.keys() >= columns.keys():
        raise PackError(", ".join(values), f"an item must have {', '.join(columns)}", "add what is missing")
    for name, column in columns.items():
        if isinstance(path := values[name], str | Path) and not (column.layout or options["text"]):
            raise PackError(path, f"{name} must be an image to be read from a file", "pass arrays or rows")
        values[name] = Path(path) if isinstance(path, str) and column.layout else path
    values = {name: values[name] for name in columns}
    values = plain_values(values, options["resize"], options["text"], [*options["points"]])
    return {name: np.asarray(fit(name, value, columns[name])) for name, value in values.items()}
