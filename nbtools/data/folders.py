"""A folder of images by class, `class/*.png`, as a Dataset; with splits of its own `train/class/*.png`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from nbtools import disk
from nbtools.data.items import TARGET
from nbtools.errors import PackError

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("val", "valid", "validation"), "val"),
    **dict.fromkeys(("test", "testing"), "test"),
}


class Images(Dataset):
    """Images by class, `class/*.png`, in sorted order, as torchvision's ImageFolder reads them."""

    def __init__(self, root: Path):
        self.root, self.names, self.bad = root, [], []
        for item in disk.walk(root):
            name = Path(item.path).relative_to(root).as_posix()
            if any(part.startswith(".") or part == "__MACOSX" for part in name.split("/")):
                continue
            if "/" in name and name.lower().endswith(IMAGES):
                self.names.append(name)
            else:
                self.bad.append(
                    (
                        name,
                        "a file",
                        "images must lie in class folders, class/*.png",
                        "move it into a class folder, or away",
                    )
                )
        self.names.sort()
        found = {name.partition("/")[0] for name in self.names}
        empty = sorted(path.name for path in root.iterdir() if path.is_dir() and path.name not in found)
        rule, fix = "a class folder must hold images", "delete it, or fill it"
        self.bad += [(name, "an empty folder", rule, fix) for name in empty if name[0] not in "._"]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, i: int) -> dict[str, Any]:
        from PIL import Image

        with Image.open(self.root / self.names[i]) as image:
            image.load()
        return {"image": image, TARGET: self.names[i].partition("/")[0]}


def image_folders(root: Path, split: str | None) -> list[tuple[str | None, Images]]:
    """The folder, or its folders train, val and test. Raises PackError where images do not lie in class folders."""
    tops = {path.name: WORDS.get(path.name.lower()) for path in sorted(root.iterdir()) if path.is_dir()}
    if split is None and "train" in tops.values() and all(tops.values()):
        return [(word, Images(root / name)) for name, word in tops.items()]
    found = Images(root)
    classes = {name.partition("/")[0] for name in found.names}
    if not classes or (len(classes) == 1 and split is None):
        came = f"one folder, {next(iter(classes))!r}" if classes else "no folder with images"
        raise PackError(f"{root} must hold a folder of images for each class, got {came}; name the folder above them")
    return [(split, found)]
