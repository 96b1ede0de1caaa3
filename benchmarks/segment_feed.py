"""What a batch of images and labels costs until it is uint8 tensors: packed, against a DataLoader that decodes.

    python -m benchmarks.segment_feed [--quick]

CPU time of the whole process, its threads and its workers, an image. Pictures of `segment.demo` in two forms: `png`,
360 × 480 as CamVid's are, packed at that size; and `photos`, JPEGs of 1080 × 1920 with CVAT polygons, packed at 384²,
which the DataLoader decodes whole and draws at every access, as the guide does (`task_reader`, over the pack's own raw
files, decodes a photograph at less than its size). Same batches in the same order, and the same values where they can
be, which is checked first. Packed batches have the distance to the boundary besides.

Then augmented on both sides, to floats, with the scales, flips and jitter of the task's plan and crops of 256²:
Pillow picture by picture in the DataLoader, against whole batches of the pack on the device.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from time import perf_counter

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from benchmarks.feed import cost
from benchmarks.paired import Figure, Receipt, in_turns, on_one_core, times
from benchmarks.segment_files import SIDE, VARIED, Item, Photos, Pngs, Varied, as_pngs
from nbtools.data import Draws, Pack, Resident, batches_left, collate
from nbtools.data.feed import Streamed
from nbtools.tasks import segment
from nbtools.train.device import keep_freed

ROUNDS, COUNT, PHOTOS, BATCH = 9, 160, 56, 32
CPU, GPU = torch.device("cpu"), torch.device("cuda")


def batches(made: Pack) -> list[np.ndarray]:
    """An epoch's batches of ids; every contestant pays for their order."""
    return batches_left(made.ids("train"), None, 0, 0, [[BATCH, 0]])


def loaded(made: Pack, dataset: Dataset, workers: int) -> DataLoader:
    order = [ids.tolist() for ids in batches(made)]
    return DataLoader(
        dataset, batch_sampler=order, num_workers=workers, collate_fn=partial(collate, columns=made.columns)
    )


def same(made: Pack, files: Dataset, feeds: Sequence[Callable[..., Iterable[Item]]]) -> None:
    """Raise SystemExit where a feed and the files do not give the same values."""
    for feed in feeds:
        for raw, expected in zip(feed(batches(made)), loaded(made, files, 0), strict=True):
            if not all(torch.equal(raw[name], value) for name, value in expected.items()):
                raise SystemExit(f"{made.folder}: the pack gives other values than the files hold")


def contestants(made: Pack, files: Dataset, passes: int) -> dict[str, Callable[[], float]]:
    """name → CPU-µs an image of one round."""
    raw = made.raw
    assert raw is not None
    resident, streamed = Resident(made, CPU), Streamed(made, CPU, prefetch=2)
    same(made, files if isinstance(files, Pngs) else raw, (resident, streamed))
    return {
        **{f"dataloader_{w}": partial(cost, lambda w=w: loaded(made, files, w)) for w in (0, 2)},
        "task_reader": partial(cost, lambda: loaded(made, raw, 0)),
        "streamed": partial(cost, lambda: streamed(batches(made)), passes),
        "packed": partial(cost, lambda: resident(batches(made)), passes),
    }


def augmenting(made: Pack, files: Pngs) -> dict[str, Callable[[], float]]:
    """Both sides end in what the network reads. Where there is a GPU, also the clock's µs an image on it."""
    varied = Varied(files.source, files.names)

    def one_by_one(workers: int) -> Iterator[Item]:
        return (segment.batch(raw, VARIED, None) for raw in loaded(made, varied, workers))

    def whole(feed: Resident) -> Iterator[Item]:
        return (segment.batch(raw, VARIED, Draws(0, 0, raw["id"])) for raw in feed(batches(made)))

    def on_gpu(feed: Resident) -> float:
        began = perf_counter()
        count = sum(len(batch["id"]) for batch in whole(feed))
        torch.cuda.synchronize()
        return (perf_counter() - began) / count * 1e6

    return {
        **{f"dataloader_{w}": partial(cost, partial(one_by_one, w)) for w in (0, 2)},
        **({"on_gpu": partial(on_gpu, Resident(made, GPU))} if torch.cuda.is_available() else {}),
        "packed": partial(cost, partial(whole, Resident(made, CPU))),
    }


def figures(name: str, found: dict[str, list[float]]) -> list[Figure]:
    """All that one case showed, ratios last: the better DataLoader's cost over the pack's."""
    best = [min(pair) for pair in zip(found["dataloader_0"], found["dataloader_2"], strict=True)]
    units = {"on_gpu": "µs/image"}
    compared = [way for way in ("streamed", "packed") if way in found]
    return [
        *(Figure.of(f"{name}_{way}", units.get(way, "CPU-µs/image"), values) for way, values in found.items()),
        *(Figure.of(f"{name}_{way}_ratio", "×", times({**found, "best": best}, "best", way)) for way in compared),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time an image: packed against DataLoader + Pillow")
    parser.add_argument("--quick", action="store_true", help="in seconds, to see that it runs; writes no receipt")
    quick = parser.parse_args().quick
    machine = on_one_core()
    keep_freed()  # as training does
    warnings.filterwarnings("ignore", message="This DataLoader will create 2 worker")  # two on the one core: CPU time
    rounds, count, photos, passes = (1, 10, 3, 2) if quick else (ROUNDS, COUNT, PHOTOS, 5)
    with tempfile.TemporaryDirectory() as folder:
        source = segment.demo(Path(folder, "photos"), photos, size=(1080, 1920), form="cvat")
        made = segment.pack(source, size=SIDE, fit="stretch", into=Path(folder, "photos.pack"), progress=False)
        readers = Photos(source, made.names, made.classes)
        others = figures("photos", in_turns(contestants(made, readers, passes), rounds))
        source = as_pngs(segment.demo(Path(folder, "png"), count, size=(360, 480), form="labels"))
        made = segment.pack(source, into=Path(folder, "png.pack"), progress=False)
        files = Pngs(source, made.names)
        others += figures("augmented", in_turns(augmenting(made, files), rounds))
        *more, last = figures("png", in_turns(contestants(made, files, passes), rounds))
    headline = Figure("segment_feed_ratio", last.unit, last.value, last.n, last.least, last.most)
    promise, images = "≥ 20× for png; augmented never below 1×", {"png": count, "photos": photos}
    conditions = {"promise": promise, "images": images, "batch": BATCH, "pillow": Image.__version__}
    result = Receipt(headline, (*others, *more), conditions, machine)
    if not quick:
        result.write()
    print(result)


if __name__ == "__main__":
    main()
