"""Images and masks of a source → pack: image (H, W, C), label (H, W) and distance (H, W), all uint8 and of one size.

Where the labels of images lie: `sources`. A mask's values are ids: grey of 1 to 16 bits, or the indices of a palette;
classes.txt names them: one name per line, ids from 0, or lines id,name.

label: class indices, 255 where a pixel is ignored. distance: eighths of a pixel to the nearest class boundary.
"""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from itertools import pairwise
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from nbtools.data import Card, Entry, Pack, Sample, Survey, build_pack, lacking, say, side_by_side, some, stage
from nbtools.errors import MissingExtra, PackError
from nbtools.show import plural, size_text
from nbtools.tasks.common.files import decode_image, on_white, read_rows, read_text
from nbtools.tasks.common.rules import WARNING, Refused, Report, Row, check_each
from nbtools.tasks.segment import cvat
from nbtools.tasks.segment.cvat import Size
from nbtools.tasks.segment.sources import Item, Source

IGNORE = 255  # in packed labels
MOST_CLASSES = 254
MIXED = 384, 384  # pixels to which images of several sizes are scaled: the guide's
LARGEST = 1024 * 2048  # pixels of images that are packed at their own size: Cityscapes'
LEAST, MOST = 32, 4096  # pixels of a side
PER_PIXEL = 8  # a distance is stored in eighths of a pixel, so a byte reaches 31.875 px
FAR = 255  # this far or farther, or no boundary at all
BACKGROUND = ("background", "_background_", "bg")  # black, and what no drawn shape covers
TYPED = re.compile(r"""[{\s"']*(\d+)["']?\s*:[\s"']*(.*?)["'\s}]*""")  # in a terminal: 0:background, or of a dict
ORIENTATION = 0x0112  # the EXIF tag

Ignored = int | str | Iterable[int | str] | None
Given = str | Path | Mapping[int, str] | Sequence[str]
Options = Mapping[str, Any]


def pack(
    source: str | Path,
    *,
    size: int | tuple[int, int] | None = None,
    channels: int = 3,
    classes: Given | None = None,
    ignore: Ignored = None,
    val: float = 0.1,
    test: float = 0.1,
    into: str | Path | None = None,
    progress: bool = True,
) -> Pack:
    """Return the pack of images with labels, from a folder, archive or link. A second call opens the finished pack, and
    interrupted packing resumes. Needs scipy for the distances to the class boundary.

    size: (height, width) or one side, in pixels; by default the images' own if they have one size of at most 2
    million pixels, else 384 × 384, with a message. Others are scaled to fit inside; the rest is 0, and ignored.
    channels: 3 (transparency lies on white) or 4 (RGBA). classes: names, in order of their ids from 0; or a mapping
    id → name, in a terminal 0:background,255:object; or a file as classes.txt; by default that file of the source, else
    the labels of CVAT's file, else the ids in the masks. What no shape of CVAT covers is the class called background.
    ignore: ids or names to leave out, besides 255, which is left out unless `classes` names it.
    val, test: shares, or whole numbers for exactly that many; the source's own folders and lists come first.
    test=1.0 makes all of them test, for a source that a run is evaluated on.
    Raises PackError if nothing can be used. `validate` also reports what is wrong with single files.
    """
    scan, options = cache(Source), options_of(size, channels, classes, ignore)
    look = partial(survey, progress=progress, scan=scan)
    more: dict[str, Any] = {"reader": lambda folder: partial(read_sample, scan(folder)), "val": val, "test": test}
    return build_pack(source, "segment", options, look, read, **more, into=into, progress=progress)


def pack_options(card: Card) -> dict[str, Any]:
    """Return options of `pack` with which another source has the classes and the preprocessing of a card."""
    options, ignored = card.options, card.options["ignored"]
    classes = dict(zip(options["ids"], card.classes, strict=True)) | {i: name for i, name in ignored if name}
    ignore = [i for i, _ in ignored]
    return {"size": options["size"], "channels": options["channels"], "classes": classes, "ignore": ignore}


def options_of(size: Any, channels: int, classes: Given | None, ignore: Ignored) -> dict[str, Any]:
    """Return the options of `pack` and `validate` as plain values; what is None is decided from the files."""
    sides = size if isinstance(size, tuple | list) else (size, size)
    if size is not None and not (len(sides) == 2 and all(isinstance(s, int) and LEAST <= s <= MOST for s in sides)):
        raise PackError(f"size must be (height, width) in pixels, {LEAST} to {MOST} each, or one side, got {size!r}")
    if channels not in (3, 4):
        raise PackError(f"channels must be 3 (RGB) or 4 (RGBA), got {channels!r}")
    several: Any = [ignore] if isinstance(ignore, int | str) else ignore or ()
    return {
        "size": None if size is None else list(sides),
        "channels": channels,
        "classes": None if classes is None else parse_classes(classes),
        "ignore": [one if isinstance(one, str) else int(one) for one in several],
    }


def parse_classes(classes: Given) -> list[tuple[int, str]]:
    if isinstance(classes, str | Path):
        return read_classes(Path(classes).expanduser())
    listed = classes if hasattr(classes, "__getitem__") else ()  # an order, as neither a number nor a set has
    typed = [TYPED.fullmatch(f"{name}") for name in listed]
    pairs = [*(classes.items() if isinstance(classes, Mapping) else enumerate(listed))]
    pairs = [(int(match[1]), match[2]) for match in typed if match and all(typed)] or pairs
    if not pairs or not all(isinstance(i, Integral) and isinstance(name, str) for i, name in pairs):
        raise PackError(f"classes must be names in the order of their ids, or id → name, got {classes!r}")
    return [(int(i), str(name)) for i, name in pairs]


def read_classes(path: Path) -> list[tuple[int, str]]:
    text = read_text(path, "give two names or more, or a text file of them in UTF-8")
    table = re.sub(r"^ *(\d+|id) +(?![,;|])", r"\1\t", text, flags=re.I | re.M)  # a name may have blanks itself
    rows = [cells for _, cells in read_rows(table, path.name, is_class, heads=("id",))]
    if not any(map(is_class, rows)):
        return [*enumerate(filter(None, map(str.strip, text.splitlines())))]
    if wrong := [cells for cells in rows if not is_class(cells)]:
        raise PackError(f"{path.name}: every line must be id,name like the others, got {','.join(wrong[0])!r}")
    return [(int(cells[0]), cells[1]) for cells in rows]


def is_class(cells: list[str]) -> bool:
    return len(cells) > 1 and cells[0].isdecimal()


def class_options(classes: Sequence[tuple[int, str]], ignore: Sequence[int | str]) -> dict[str, Any]:
    """Return as a pack's options names and ids of the classes, and [id, name] of what is ignored."""
    for what, values in zip(("id", "name"), zip(*classes, strict=True), strict=False):
        if twice := [value for value, times in Counter(values).items() if times > 1]:
            raise PackError(f"classes: each {what} must be used only once, got {twice[0]!r} twice; rename one")
    ids, names = {name: i for i, name in classes}, dict(classes)
    if strange := [one for one in ignore if isinstance(one, str) and one not in ids]:
        raise PackError(f"ignore must be ids, or names of classes ({', '.join(ids)}), got {strange[0]!r}")
    ignored = {ids[one] if isinstance(one, str) else one for one in ignore} | ({IGNORE} - names.keys())
    kept = {i: name for i, name in classes if i not in ignored}
    if not 2 <= len(kept) <= MOST_CLASSES:
        came = f"a class table must have 2 to {MOST_CLASSES} classes, got {len(kept)} besides those ignored"
        raise PackError(f"{came}; give classes=, for a mask of 0 and 255 {{0: 'background', 255: 'object'}}")
    return {"names": [*kept.values()], "ids": [*kept], "ignored": [[i, names.get(i, "")] for i in sorted(ignored)]}


def survey(folder: Path, asked: Options, progress: bool = False, scan: Callable[[Path], Source] = Source) -> Survey:
    """Return the labelled images of a folder, and the options that the files decide: sizes and ids that nothing names
    are read from images and masks. scan: gives the contents of the folder."""
    source, size = scan(folder), asked["size"]
    items, bad = source.items, [row[:4] for row in source.rows]
    if not items:
        return Survey([], bad=bad)
    if size is None:
        own = {one for one in side_by_side(lambda name: header_size(source.folder / name), items) if one}
        [one, *others] = own or [MIXED]
        size = MIXED if others or min(one) < LEAST or one[0] * one[1] > LARGEST else one
        if progress and own != {size}:
            say(f"images are scaled to {size_text(*size)}; size= chooses another")
    options = {"size": [*size], "channels": asked["channels"]}
    options |= class_options(classes_of(source) if asked["classes"] is None else asked["classes"], asked["ignore"])
    named = {name.casefold() for name in (*options["names"], *(name for _, name in options["ignored"]))}
    if any(item.drawing for item in items.values()) and named.isdisjoint(BACKGROUND):
        why = "classes must name what no shape covers: add 'background'"
        raise PackError(f"{why}, got {', '.join(options['names'])}; ignore='background' leaves it out")
    entries = [Entry(item.name, split=item.split) for item in items.values()]
    return Survey(entries, options["names"], options, bad=bad, learn=partial(learn, asked))


def learn(asked: Options, pack: Pack, train: np.ndarray) -> tuple[Options, list[str]]:
    """Return no more options, and a remark on classes without a training pixel. Raises PackError for one and 255."""
    seen = np.zeros((2, 256), bool)  # in training labels, in others
    for split, label in zip(pack.split, np.asarray(pack.arrays["label"]), strict=True):
        seen[min(split, 1)] |= np.bincount(label.ravel(), minlength=256) > 0
    trained, every = ([name for k, name in enumerate(pack.classes) if row[k]] for row in (seen[0], seen[0] | seen[1]))
    if len(every) < 2 and seen[:, IGNORE].any() and pack.options["ignored"] and not asked["ignore"]:
        came = f"only {', '.join(every) or 'no class'} has pixels, besides 255, which is ignored"
        raise PackError(f"{came}; give classes={{0: 'background', 255: 'object'}}, or ignore=255 if that is meant")
    return {}, lacking(pack.classes, trained, "train pixel")


def classes_of(source: Source) -> list[tuple[int, str]]:
    """Return the classes of classes.txt, of CVAT's labels with the background first, or of the ids in masks."""
    if tables := [name for name in source.names.values() if name.lower().rpartition("/")[2] == "classes.txt"]:
        return read_classes(source.folder / min(tables, key=lambda name: (name.count("/"), name)))
    if any(item.drawing for item in source.items.values()):
        own = [label for label in source.labels if label.casefold() in BACKGROUND][:1]
        return [*enumerate([*(own or BACKGROUND[:1]), *(label for label in source.labels if label not in own)])]
    masks = {source.folder / item.label for item in source.items.values()}
    values = check_each(lambda mask: np.unique(read_ids(mask)).tolist(), masks, progress=False)
    try:
        seen = {i for i in values if isinstance(i, int)} or {*read_ids(min(masks)).flat}  # which says why there is none
    except Refused as refusal:
        raise PackError(f"{min(masks)}: {refusal}") from None
    ids = sorted(seen - {IGNORE})
    apart = all(after - before >= 16 for before, after in pairwise([*ids, IGNORE]))  # grey, else JPEG's noise near 255
    if IGNORE in seen and len(ids) > 1 and (apart or (max(ids) >= 240 and len(ids) < 200)):
        came = f"masks have {some([*map(str, ids)])} and 255: are these shades of grey? 255 would be ignored"
        raise PackError(f"{came}; name the ids, classes={{id: name}}, or export masks whose values are ids")
    return [(int(i), f"class {i:d}") for i in ids]


def read(path: Path, options: Options) -> Sample:
    """Return {"image": …} of one file as the pack holds it, for predictions. Raises Refused on what cannot be used."""
    return {"image": read_image(Path(path), options)[0]}


def read_sample(source: Source, path: Path, options: Options) -> Sample:
    """Return image, label and distance of an image file of a source, read whole at each access: packing does that once
    an image, and `feed="workers"` at every step, as scripts do. Raises Refused on what cannot be used."""
    item = source.items[Path(path).relative_to(source.folder).as_posix()]
    image, label = read_item(source.folder, item, options)
    return {"image": image, "label": label, "distance": distance_map(label)}


def read_item(folder: Path, item: Item, options: Options) -> tuple[np.ndarray, np.ndarray]:
    """Return (image, label) at the packed size. Raises Refused, whose value names the file of a bad label."""
    image, size = read_image(folder / item.name, options)
    left, top, right, bottom = box = inner_box(size, options["size"])
    try:
        if item.drawing is None:
            label = Image.fromarray(read_mask(folder / item.label, options, size))
        else:
            require_size(item.drawing.size or size, size)
            indices = {name: IGNORE for _, name in options["ignored"]} | {n: k for k, n in enumerate(options["names"])}
            background = next(k for name, k in indices.items() if name.casefold() in BACKGROUND)
            label = cvat.draw(item.drawing, size, (bottom - top, right - left), indices, background)
    except Refused as refusal:
        value, rule, fix = refusal.args
        raise Refused(f"{item.label}: {value}", rule, fix) from None
    return image, fit_image(label, box, options["size"], IGNORE, Image.Resampling.NEAREST)


def read_image(path: Path, options: Options) -> tuple[np.ndarray, Size]:
    """Return (pixels (H, W, C) uint8, size of the whole upright picture)."""
    image = decode_image(path, side=min(options["size"]))  # a large JPEG at a half, a quarter or an eighth
    image = image.convert("RGBA") if options["channels"] == 4 and image.mode[0] not in "IF" else on_white(image)
    size = header_size(path) or (image.height, image.width)
    box = inner_box(size, options["size"])
    method = Image.Resampling.BOX if box[2] - box[0] < image.width else Image.Resampling.BILINEAR
    return fit_image(image, box, options["size"], 0, method), size


def header_size(path: Path) -> Size | None:
    """Return the size of the upright picture, without decoding it; None if it cannot be read."""
    with contextlib.suppress(Exception), Image.open(path) as image:  # Pillow raises whatever it meets in damaged files
        turned = "exif" in image.info and image.getexif().get(ORIENTATION) in range(5, 9)  # else a PNG is decoded
        return image.size if turned else (image.height, image.width)


def inner_box(size: Size, packed: Sequence[int]) -> tuple[int, int, int, int]:
    """Return where in a packed image a picture, scaled to fit, lies in the middle: left, top, right, bottom."""
    scale = min(packed[0] / size[0], packed[1] / size[1])
    height, width = (max(1, min(most, round(n * scale))) for n, most in zip(size, packed, strict=True))
    top, left = (packed[0] - height) // 2, (packed[1] - width) // 2
    return left, top, left + width, top + height


def fit_image(image: Image.Image, box: Sequence[int], packed: Sequence[int], fill: int, method: Any) -> np.ndarray:
    """Return an image resized into a box of a packed one, (H, W) or (H, W, C) uint8."""
    left, top, right, bottom = box
    inner = np.asarray(image.resize((right - left, bottom - top), method))
    canvas = np.full((*packed, *inner.shape[2:]), fill, np.uint8)
    canvas[top:bottom, left:right] = inner
    return canvas


def read_mask(path: Path, options: Options, size: Size) -> np.ndarray:
    """Return (h, w) uint8: the class indices of the mask of an image of a size."""
    ids = read_ids(path)
    require_size((ids.shape[0], ids.shape[1]), size)
    values = np.unique(ids)
    indices = {i: IGNORE for i, _ in options["ignored"]} | {i: k for k, i in enumerate(options["ids"])}
    if unknown := [value for value in values.tolist() if value not in indices]:
        fix = "add them to classes=, or to ignore=; or correct the label"
        raise Refused(str(unknown)[1:-1][:80], "ids must be in the class table", fix)
    return np.array([indices[value] for value in values.tolist()], np.uint8)[np.searchsorted(values, ids)]


def require_size(label: Size, image: Size) -> None:
    if label != image:
        value, fix = f"{size_text(*label)}, the image has {size_text(*image)}", "export it again from that image"
        raise Refused(value, "a label must have the size of its image", fix)


def read_ids(path: Path) -> np.ndarray:
    ids = np.asarray(decode_image(path))
    if path.suffix.lower() in (".jpg", ".jpeg") or ids.ndim != 2 or ids.dtype.kind not in "biu":
        rule, fix = "a mask must have one channel of ids, stored without loss", "export it as PNG whose values are ids"
        raise Refused(f"{path.suffix} of {ids.dtype} {ids.shape}", rule, fix)
    return ids


def distance_map(label: np.ndarray) -> np.ndarray:
    """Return (H, W) uint8 of a label (H, W) uint8: eighths of a pixel from each pixel's centre to that of the nearest
    boundary pixel, which has 0 itself; at most 255. Ignored pixels make no boundary."""
    try:
        from scipy.ndimage import distance_transform_edt
    except ImportError:
        raise MissingExtra("distances to boundaries need scipy: pip install scipy, or the extra segment") from None
    valid, edge = label != IGNORE, np.zeros(label.shape, bool)
    for one, other in ((np.s_[1:], np.s_[:-1]), (np.s_[:, 1:], np.s_[:, :-1])):
        differ = (label[one] != label[other]) & valid[one] & valid[other]
        edge[one] |= differ
        edge[other] |= differ
    if not edge.any():
        return np.full(label.shape, FAR, np.uint8)
    return np.minimum(np.rint(np.asarray(distance_transform_edt(~edge)) * PER_PIXEL), FAR).astype(np.uint8)


def validate(
    source: str | Path,
    *,
    size: int | tuple[int, int] | None = None,
    channels: int = 3,
    classes: Given | None = None,
    ignore: Ignored = None,
    progress: bool = True,
) -> Report:
    """Check every image and every label of a folder, archive or link: each rule broken is a row. Options as for `pack`:
    an error is what a pack with the same ones leaves out. Raises PackError without a class table."""
    made = Source(stage(source, progress=progress))
    if not (made.items or made.rows):
        raise PackError(f"{source}: no images; give the folder that holds images/ and labels/")
    inventory = survey(made.folder, options_of(size, channels, classes, ignore), progress, lambda _: made)
    read, options = partial(read_item, made.folder), inventory.options
    results = check_each(lambda name: np.unique(read(made.items[name], options)[1]).tolist(), made.items, progress)
    rows = [*made.rows, *(one for one in results if isinstance(one, Row))]
    seen = {one for one in results if isinstance(one, int)}
    missing = [name for k, name in enumerate(inventory.classes) if k not in seen and seen]
    fix = "nothing; or annotate some, or correct its id in classes="
    rows += [Row(f"class {name}", "none", "every class should have pixels", fix, WARNING) for name in missing]
    if empty := [item for item in made.items.values() if item.drawing and not item.drawing.shapes]:
        value, fix = f"{plural(len(empty), 'image')}, as {empty[0].name}", "nothing; or annotate them, or delete them"
        rows.append(Row(empty[0].label, value, "an image without a shape is all background", fix, WARNING))
    return Report(rows, f"{plural(len(made.items), 'image')} with a label")
