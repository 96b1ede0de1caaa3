"""Raw batches → what the network takes, augmented as a whole on their device, from each sample's own random numbers
only: the result does not depend on the batch or the machine.

One resampling per batch: scale, position and mirroring of a crop are one affine map from its pixels to the image's.
Images are read bilinearly, class ids and distances at the nearest pixel, so no class appears between two others.

B samples, C channels, H × W pixels of an image, h × w of a crop.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nbtools.data import STAYING, Draws, constant
from nbtools.tasks.segment.classes import IGNORE
from nbtools.tasks.segment.plans import Plan
from nbtools.tasks.segment.scores import FAR, PER_PIXEL

MEAN, SPREAD = 127.5, 63.75  # of pixel values; defined here alone, for training and for predictions
GREY = 127.5  # the centre of contrast, and what lies outside the image
OUTSIDE = IGNORE | FAR  # both are 255: no class there, and as far from a boundary as distances go
BELOW = 1 - 2**-24  # times a whole number: the largest float32 that is less
HALF = 0.5  # scale below which an image of half the size is read: bilinear weights reach no further than 2 pixels

Raw = dict[str, Tensor]


class Crop(NamedTuple):
    """Where each crop of h × w pixels lies in its zoomed image. All (B,): scale; top and left, in pixels of the zoomed
    image, negative where that is smaller than the crop; mirrored."""

    scale: Tensor
    top: Tensor
    left: Tensor
    mirrored: Tensor


class Centres(NamedTuple):
    """What the h rows and then the w columns of a crop read: at (B, h + w), the centre of each in the image, whose
    first pixel extends from 0 to 1; nearest (B, h + w), the same within the image; inside (B, h, w) bool, whether both
    of a pixel's are in the image."""

    at: Tensor
    nearest: Tensor
    inside: Tensor


def batch(raw: Raw, plan: Plan, draws: Draws | None) -> Raw:
    """What the network takes: image (B, C, H, W) float32 from -2 to 2, and, if the raw batch has them, label (B, H, W)
    int64 and distance (B, H, W) float32 in pixels. Augmented, and so cropped, only if draws are given."""
    raw = {**raw, "image": to_float(raw["image"])} if draws is None else augment(raw, plan, draws)
    found = {**raw, "image": raw["image"].sub_(MEAN).div_(SPREAD)}
    if "label" in raw:
        found["label"] = raw["label"].long()
    if "distance" in raw:
        found["distance"] = raw["distance"] / PER_PIXEL
    return found


def augment(raw: Raw, plan: Plan, draws: Draws) -> Raw:
    """A raw batch as training sees it: image (B, C, h, w) float in [0, 255], label (B, h, w) uint8, distance (B, h, w)
    float in eighths of a pixel; label and distance unchanged if no setting moves pixels."""
    picture = raw["image"].shape[1], raw["image"].shape[2]
    size = (plan.crop, plan.crop) if plan.crop is not None else picture
    if size == picture and plan.scale_low == plan.scale_high == 1 and plan.flip <= 0:
        return {**raw, "image": jitter(to_float(raw["image"]), draws, plan.jitter)}
    crop = draw_crops(picture, size, plan, draws)
    centres = centres_of(crop, picture, size)
    image = resample(raw["image"], crop.scale, centres.at, size, plan.scale_low < HALF)
    image = jitter(image, draws, plan.jitter)
    # Grey outside the image, by products: `where` with a mask takes 20 times as long on a CPU
    image.sub_(GREY).mul_(centres.inside[:, None]).add_(GREY)
    found = resample_nearest({name: raw[name] for name in ("label", "distance") if name in raw}, centres)
    if "distance" in found:  # in pixels of the crop; those at the limit stay there
        far, scaled = found["distance"] == OUTSIDE, found["distance"] * crop.scale[:, None, None]
        found["distance"] = torch.where(far, constant((OUTSIDE,), far.device), scaled)
    return {**raw, **found, "image": image}


def draw_crops(picture: tuple[int, int], size: tuple[int, int], plan: Plan, draws: Draws) -> Crop:
    """Random crops: inside the zoomed image where it is larger, else around all of it; height and width independently.
    Scales are uniform, as in the reference (CoinCheung/BiSeNet, transform_cv2.py)."""
    device = draws.ids.device
    scale, drawn = draws.uniforms((plan.scale_low, plan.scale_high), (0, 1), (0, 1)).split([1, 2], 1)
    room = scale * constant(picture, device) - constant(size, device)  # (B, 2)
    most = room.abs().floor()
    top, left = (drawn * (most + 1)).floor().copysign(room).unbind(1)  # at most `most`: draws are at most BELOW
    return Crop(scale[:, 0], top, left, draws.chance(plan.flip))


def centres_of(crop: Crop, picture: tuple[int, int], size: tuple[int, int]) -> Centres:
    device = crop.scale.device
    plain, mirrored = (pixels(size, mirror, device) for mirror in (False, True))
    origin = torch.cat([start[:, None].expand(-1, n) for start, n in zip((crop.top, crop.left), size, strict=True)], 1)
    at = (torch.where(crop.mirrored[:, None], mirrored, plain) + origin) / crop.scale[:, None]
    nearest = at.clamp(constant((0,), device), along(picture[0] * BELOW, picture[1] * BELOW, size, device))
    rows, columns = (nearest == at).split(size, 1)
    return Centres(at, nearest, rows[:, :, None] & columns[:, None])


@lru_cache(STAYING)
def pixels(size: tuple[int, int], mirrored: bool, device: torch.device) -> Tensor:
    """(h + w,): the centres of a crop's rows and columns; stays on the device, as what `along` returns does."""
    down, right = (torch.arange(n, device=device) + 0.5 for n in size)
    return torch.cat([down, right.flip(0) if mirrored else right])


@lru_cache(STAYING)
def along(rows: float, columns: float, size: tuple[int, int], device: torch.device) -> Tensor:
    """(h + w,) float32: one value for every row of a crop, another for every column."""
    values = zip((float(rows), float(columns)), size, strict=True)
    return torch.cat([torch.full((n,), value, device=device) for value, n in values])


def resample(image: Tensor, scale: Tensor, at: Tensor, size: tuple[int, int], pyramid: bool) -> Tensor:
    """(B, H, W, C) uint8 → (B, C, h, w) float32 in [0, 255], bilinear; edge pixels are repeated beyond the image.

    pyramid: images zoomed to less than a half are read from a copy of half the size, means of 2 × 2 pixels, stored
    below the image in the same tensor, so every pixel counts down to a scale of 0.25. The root mean square difference
    to Pillow's resizing of a street scene at 0.25 is then 2.7 of 255 instead of 7.1, for a third more time.
    """
    device, (height, width) = image.device, image.shape[1:3]
    least, most = constant((0.5,), device), along(height - 0.5, width - 0.5, size, device)
    if pyramid:
        source, place = with_half(image), at.clamp(least, most)
        last = along(height // 2 - 0.5, width // 2 - 0.5, size, device)
        below = (at / 2).clamp(least, last) + along(height, 0, size, device)
        place = torch.where((scale < HALF)[:, None], below, place)
    else:
        source, place = to_float(image), at.clamp(least, most)
    y, x = (place * along(2 / source.shape[2], 2 / width, size, device) - 1).split(
        size, 1
    )  # from -1 to 1 over `source`
    grid = torch.stack([x[:, None].expand(-1, size[0], -1), y[:, :, None].expand(-1, -1, size[1])], 3)
    return F.grid_sample(source, grid, align_corners=False)


def with_half(image: Tensor) -> Tensor:
    """(B, H, W, C) uint8 → (B, C, H + H // 2, W) float32: the image, and below it the means of 2 × 2 pixels, then 0.

    Means by slices take a sixth of the time of `avg_pool2d` on a CPU; a last odd row or column is left out."""
    count, height, width, channels = image.shape
    low, narrow = height // 2, width // 2
    source = torch.empty(count, channels, height + low, width, device=image.device)
    whole, half = source.split([height, low], 2)
    whole.copy_(image.permute(0, 3, 1, 2))
    pairs = whole[:, :, 0 : 2 * low : 2].lerp(whole[:, :, 1 : 2 * low : 2], 0.5)
    torch.lerp(pairs[..., 0 : 2 * narrow : 2], pairs[..., 1 : 2 * narrow : 2], 0.5, out=half[..., :narrow])
    half[..., narrow:].zero_()
    return source


def resample_nearest(columns: Raw, centres: Centres) -> Raw:
    """Each (B, H, W) uint8 → (B, h, w) uint8 at the nearest pixels; OUTSIDE where those are not inside."""
    if not columns:
        return {}
    width, inside = next(iter(columns.values())).shape[2], centres.inside
    y, x = centres.nearest.long().split(inside.shape[1:], 1)
    index = torch.add(x[:, None], y[:, :, None], alpha=width).flatten(1)
    outside = inside.view(torch.uint8) - 1  # 1 → 0, 0 → 255, which is OUTSIDE
    nearest = {name: values.flatten(1).gather(1, index).view_as(inside) for name, values in columns.items()}
    return {name: values.bitwise_or_(outside) for name, values in nearest.items()}  # 255 | x = 255


def jitter(image: Tensor, draws: Draws, strength: float) -> Tensor:
    """Brightness, contrast around grey and saturation of RGB, each times 1 ± strength, as one matrix product; a fourth
    channel is unchanged. image (B, C, H, W) float in [0, 255]. The reference does the same in this
    order, but clips to [0, 255] after each of the three."""
    if not strength:
        return image
    one = 1 - strength, 1 + strength
    drawn = draws.uniforms(one, one, one)[..., None, None]
    (light, contrast, saturation), (_, lost, grey) = drawn.unbind(1), (1 - drawn).unbind(1)  # each (B, 1, 1)
    eye = constant((1, 0, 0, 0, 1, 0, 0, 0, 1), image.device).view(3, 3)
    matrix = light * contrast * torch.addcmul(grey / 3, saturation, eye)  # (B, 3, 3); products with 0 and 1 are exact
    colours = image[:, :3]
    found = torch.baddbmm((GREY * lost).expand(-1, 3, 1), matrix, colours.flatten(2)).clamp_(0, 255).view_as(colours)
    return found if image.shape[1] == 3 else torch.cat([found, image[:, 3:]], 1)


def to_float(image: Tensor) -> Tensor:
    """(B, H, W, C) uint8 → (B, C, H, W) float32, a new tensor."""
    return image.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
