"""Raw batches → what the network takes, augmented as a whole on their device, from each sample's own random numbers
only: the result does not depend on the batch or the machine.

One resampling per batch: scale, position and mirroring of a crop are one affine map from its pixels to the image's.
Images are read bilinearly, class ids and distances at the nearest pixel, so no class appears between two others.

B samples, C channels, H × W pixels of an image, h × w of a crop.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from nbtools.data import Draws
from nbtools.tasks.segment.classes import IGNORE
from nbtools.tasks.segment.plans import Plan
from nbtools.tasks.segment.scores import FAR, PER_PIXEL

MEAN, SPREAD = 127.5, 63.75  # of pixel values; defined here alone, for training and for predictions
GREY = 127.5  # the centre of contrast, and what lies outside the image
OUTSIDE = IGNORE | FAR  # both are 255: no class there, and as far from a boundary as distances go
HALF = 0.5  # scale below which an image of half the size is read: bilinear weights reach no further than 2 pixels

Raw = dict[str, Tensor]


class Crop(NamedTuple):
    """Where each crop of h × w pixels lies in its zoomed image. All (B,): scale; top and left, in pixels of the zoomed
    image, negative where that is smaller than the crop; mirrored."""

    scale: Tensor
    top: Tensor
    left: Tensor
    mirrored: Tensor


class Axis(NamedTuple):
    """What the n rows or columns of a crop read: at (B, n), the centre of each in the image, whose first pixel extends
    from 0 to 1; inside (B, n) bool, whether that is in the image."""

    at: Tensor
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
    rows, columns = axes(crop, picture, size)
    image = jitter(resample(raw["image"], crop.scale, rows, columns, plan.scale_low < HALF), draws, plan.jitter)
    # Grey outside the image, by products: `where` with a mask takes 20 times as long on a CPU
    image.sub_(GREY).mul_(rows.inside[:, None, :, None]).mul_(columns.inside[:, None, None]).add_(GREY)
    found = {name: resample_nearest(raw[name], rows, columns) for name in ("label", "distance") if name in raw}
    if "distance" in found:  # in pixels of the crop; those at the limit stay there
        far, scaled = found["distance"] == OUTSIDE, found["distance"] * crop.scale[:, None, None]
        found["distance"] = torch.where(far, OUTSIDE, scaled)
    return {**raw, **found, "image": image}


def draw_crops(picture: tuple[int, int], size: tuple[int, int], plan: Plan, draws: Draws) -> Crop:
    """Random crops: inside the zoomed image where it is larger, else around all of it; height and width independently.
    Scales are uniform, as in the reference (CoinCheung/BiSeNet, transform_cv2.py)."""
    scale = draws.uniform(plan.scale_low, plan.scale_high)

    def origin(whole: int, part: int) -> Tensor:
        room = scale * whole - part
        most = room.abs().floor()
        return torch.minimum((draws.uniform() * (most + 1)).floor(), most).copysign(room)

    return Crop(scale, origin(picture[0], size[0]), origin(picture[1], size[1]), draws.chance(plan.flip))


def axes(crop: Crop, picture: tuple[int, int], size: tuple[int, int]) -> tuple[Axis, Axis]:
    """What the rows and the columns of crops read."""

    def axis(step: Tensor, origin: Tensor, whole: int) -> Axis:
        at = (step + 0.5 + origin[:, None]) / crop.scale[:, None]
        return Axis(at, (at >= 0) & (at < whole))

    down, right = (torch.arange(n, device=crop.scale.device) for n in size)
    across = torch.where(crop.mirrored[:, None], size[1] - 1 - right, right)
    return axis(down, crop.top, picture[0]), axis(across, crop.left, picture[1])


def resample(image: Tensor, scale: Tensor, rows: Axis, columns: Axis, pyramid: bool) -> Tensor:
    """(B, H, W, C) uint8 → (B, C, h, w) float32 in [0, 255], bilinear; edge pixels are repeated beyond the image.

    pyramid: images zoomed to less than a half are read from a copy of half the size, means of 2 × 2 pixels, stored
    below the image in the same tensor, so every pixel counts down to a scale of 0.25. The root mean square difference
    to Pillow's resizing of a street scene at 0.25 is then 2.7 of 255 instead of 7.1, for a third more time.
    """
    height, width = image.shape[1:3]
    source, level = to_float(image), torch.zeros_like(scale)[:, None]
    if pyramid:  # by sums of slices: a sixth of the time of `avg_pool2d` on a CPU; a last odd row is left out
        low, narrow = height // 2, width // 2
        pairs = source[:, :, 0 : 2 * low : 2] + source[:, :, 1 : 2 * low : 2]
        halved = (pairs[..., 0 : 2 * narrow : 2] + pairs[..., 1 : 2 * narrow : 2]).mul_(0.25)
        source = torch.cat([source, F.pad(halved, (0, width - narrow))], 2)
        level = (scale < HALF).float()[:, None]

    def within(at: Tensor, whole: int, start: int) -> Tensor:
        """Pixel centres in `source`, from -1 to 1 over its length."""
        most = torch.where(level > 0, whole // 2, whole) - 0.5
        return torch.minimum((at / (1 + level)).clamp(min=0.5), most) + level * start

    y = within(rows.at, height, height) * (2 / source.shape[2]) - 1
    x = within(columns.at, width, 0) * (2 / width) - 1
    grid = torch.stack([x[:, None].expand(-1, y.shape[1], -1), y[:, :, None].expand(-1, -1, x.shape[1])], 3)
    return F.grid_sample(source, grid, align_corners=False)


def resample_nearest(values: Tensor, rows: Axis, columns: Axis) -> Tensor:
    """(B, H, W) uint8 → (B, h, w) uint8 at the nearest pixels; OUTSIDE beyond the image."""
    height, width = values.shape[1:]
    y, x = rows.at.long().clamp(0, height - 1), columns.at.long().clamp(0, width - 1)
    index = y[:, :, None] * width + x[:, None]
    found = values.flatten(1).gather(1, index.flatten(1)).view(index.shape)
    beyond = [(~axis.inside).to(torch.uint8) * OUTSIDE for axis in (rows, columns)]
    return found.bitwise_or_(beyond[0][:, :, None]).bitwise_or_(beyond[1][:, None])  # 255 | x = 255


def jitter(image: Tensor, draws: Draws, strength: float) -> Tensor:
    """Brightness, contrast around grey and saturation of RGB, each times 1 ± strength, as one matrix product; a fourth
    channel is unchanged. image (B, C, H, W) float in [0, 255], modified in place. The reference does the same in this
    order, but clips to [0, 255] after each of the three."""
    if not strength:
        return image
    light, contrast, saturation = (draws.uniform(1 - strength, 1 + strength)[:, None, None] for _ in range(3))
    gain = light * contrast
    matrix = gain * (saturation * torch.eye(3, device=image.device) + (1 - saturation) / 3)  # (B, 3, 3)
    offset = (GREY * (1 - contrast)).expand(-1, 3, 1)
    colours = image[:, :3]
    colours.copy_(torch.baddbmm(offset, matrix, colours.flatten(2)).clamp_(0, 255).view_as(colours))
    return image


def to_float(image: Tensor) -> Tensor:
    """(B, H, W, C) uint8 → (B, C, H, W) float32, a new tensor."""
    return image.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
