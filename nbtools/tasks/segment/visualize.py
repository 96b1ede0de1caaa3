"""Labels and predictions in class colours: over images, with a line between classes and grey ignored pixels; as files.

A class map is (H, W) uint8, as `decode` and `run.predict_pack` give it. H × W pixels, K classes.
"""

import colorsys
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.patches import Patch
from PIL import Image

from nbtools import disk
from nbtools.data import Card, Pack
from nbtools.errors import PackError
from nbtools.figures import GREY, MARGIN, WIDE, Picture, Sheet, gallery, look, scale, shorten
from nbtools.tasks.common.files import on_white
from nbtools.tasks.common.metrics import pair
from nbtools.tasks.segment.data import BACKGROUND, IGNORE, header_size, inner_box

OKABE_ITO = ((230, 159, 0), (86, 180, 233), (0, 158, 115), (240, 228, 66), (0, 114, 178), (213, 94, 0), (204, 121, 167))
ALPHA, FAINT = 0.6, 0.15  # opacity of a class's colour over the image; of a background's
COLUMNS, NAMES = 4, 5  # pictures in a row; names in a row of the legend
CELL = (WIDE - (COLUMNS + 1) * MARGIN) // COLUMNS  # px: the width of an image
ROW, SIZE = 20, 8.5  # px of a row of the legend; points of its text
LIVE, PAPER = (400, 320), 6  # px of the live picture at most: what a screen of twice the pixels shows; its middle


def show(pack: Pack, ids: Sequence[int] | np.ndarray, predicted: Sequence[np.ndarray] | None = None) -> Sheet:
    """Draw images, each next to its classes, and with one class map an id also next to what was predicted. Classes are
    named below; pixels without a label are grey. Raises PackError for another number of class maps."""
    pictures: list[Picture] = []
    for i, guess in pair([*map(int, ids)], [None] * len(ids) if predicted is None else predicted, "class map"):
        image, label = pack.arrays["image"][i], pack.arrays["label"][i]
        pictures.append((resize_image(image, scale(image, CELL)), f"{i} · {pack.names[i]}", GREY))
        pictures.append((overlay(pack, image, label, CELL), "truth", GREY))
        if guess is not None:
            pictures.append((overlay(pack, image, guess, CELL), "predicted", GREY))
    names = [*(shorten(name, SIZE, WIDE / NAMES - 50) for name in pack.classes), "ignored"]
    columns, below = COLUMNS if predicted is None else 3, MARGIN + ROW * math.ceil(len(names) / NAMES)
    sheet, shades = gallery(pictures, columns, below), [*(colours(pack.classes) / 255), "#c8c8c8"]
    if pictures:
        patches = [Patch(fc=shade, ec=GREY, label=name) for shade, name in zip(shades, names, strict=True)]
        legend = sheet.axes[0].legend(handles=patches, ncols=NAMES, loc="lower left", frameon=False, labelcolor=GREY)
        for text in legend.get_texts():
            text.set(**look(SIZE))
    return sheet


def preview(pack: Pack, i: int, guess: np.ndarray) -> tuple[np.ndarray, str, str]:
    """Return (image (h, w, 3) uint8, "", text) for the live picture: the present prediction, the truth on its right. No
    text is to be compared, so nothing is marked wrong."""
    image, truth = pack.arrays["image"][i], pack.arrays["label"][i]
    left, right = (overlay(pack, image, label, (LIVE[0] - PAPER) / 2, LIVE[1]) for label in (guess, truth))
    paper = np.full((len(left), PAPER, 3), 255, np.uint8)
    valid = truth != IGNORE
    share = f"{(guess == truth)[valid].mean():.0%} of pixels right" if valid.any() else "no labels"
    return np.concatenate([left, paper, right], 1), "", f"{share} | truth"


def overlay(pack: Pack, image: np.ndarray, label: np.ndarray, *limits: float) -> np.ndarray:
    """Return (h, w, 3) uint8 of an image (H, W, C) and a label (H, W), scaled into limits, px: classes in colour, a
    background's faintly; a white line between two; ignored pixels grey. The image below is desaturated as much as it is
    covered: red on yellow would be the orange of another class."""
    size = scale(image, *limits)  # in the size at which they are shown, lines are one pixel wide
    image, label = resize_image(image, size), np.asarray(Image.fromarray(label).resize(size, Image.Resampling.NEAREST))
    alphas = np.array([FAINT if name.casefold() in BACKGROUND else ALPHA for name in pack.classes])
    index, luma = np.where(label == IGNORE, 0, label), image @ np.array([[0.299], [0.587], [0.114]])  # ITU-R BT.601
    alpha = alphas[index][..., None]
    drawn = (1 - alpha) * ((1 - alpha) * image + alpha * luma) + alpha * colours(pack.classes)[index]
    drawn = np.where((label == IGNORE)[..., None], 112 + 0.5 * luma, drawn)
    drawn[:, :-1][label[:, 1:] != label[:, :-1]] = 255
    drawn[:-1][label[1:] != label[:-1]] = 255
    return drawn.round().astype(np.uint8)


def resize_image(image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Return an image (H, W, 3 or 4) on white as (h, w, 3), at a (width, height)."""
    return np.asarray(on_white(Image.fromarray(np.asarray(image))).resize(size, Image.Resampling.LANCZOS))


def colours(names: Sequence[str]) -> np.ndarray:
    """Return (K, 3) uint8, the colours of classes: black for the background, else Okabe and Ito's, then other hues."""
    hues = [np.rint(255 * np.array(colorsys.hsv_to_rgb(k * 0.618 % 1, 0.75, 0.8))) for k in range(len(names))]
    every = [(0, 0, 0) if name.casefold() in BACKGROUND else (*OKABE_ITO, *hues)[k] for k, name in enumerate(names)]
    return np.array(every, np.uint8)


def save(answer: np.ndarray, picture: str | Path, folder: str | Path, card: Card | Pack) -> Path:
    """Write the class map (H, W) uint8 predicted for a picture as `folder/NAME.png`, at the picture's size: a palette
    PNG, whose values are the ids in the masks it learned from; beyond 255, indices into card.classes. Raises PackError
    for a picture that cannot be read, and if there is such a file already."""
    target, size = Path(folder) / f"{Path(picture).stem}.png", header_size(Path(picture))
    if size is None or target.exists():
        what = f"{picture} cannot be read" if size is None else f"{target} is there already"
        raise PackError(f"{what}; choose another folder, one for each folder of pictures")
    ids = card.options["ids"] if max(card.options["ids"]) < 256 else range(len(card.classes))
    values, palette = np.array(ids, np.uint8), np.zeros((max(ids) + 1, 3), np.uint8)
    palette[values] = colours(card.classes)
    mask = Image.fromarray(values[answer]).crop(inner_box(size, card.options["size"]))
    mask = mask.resize((size[1], size[0]), Image.Resampling.NEAREST)
    mask.putpalette(palette.tobytes())
    with disk.explained("writing a prediction", target):
        target.parent.mkdir(parents=True, exist_ok=True)
        mask.save(target, "png")
    return target
