"""How much of a batch is padding on lines as wide as HWDB's: batches as nbtools groups them, and batches drawn blindly.

    python -m benchmarks.padding [--quick]

Widths only, no pixels: 50,000 of them, drawn so that their median is about 1,650 pixels and all lie in 200 to 2,600, as
CASIA-HWDB 2.x has them at a height of 128. Each round draws others, and other orders. Counted over one epoch: pixels of
padding over all pixels of its batches, each as wide as its widest line. Exact; no clock is involved.
"""

from __future__ import annotations

import argparse
from functools import partial

import numpy as np

from benchmarks.paired import Figure, Receipt
from nbtools.data import batches_left

COUNT, ROUNDS = 50_000, 9
BATCHES = (8, 16, 32, 64, 128)
HEADLINE = 64  # the guide's batch
BUCKET = 32  # columns, advised on a GPU for lines 128 pixels high
LEAST, MEDIAN, MOST = 200, 1650, 2600


def widths(count: int, seed: int) -> np.ndarray:
    """(count,) pixels: most lines fill most of the page, the last ones of paragraphs are anything."""
    rng = np.random.default_rng(seed)
    full = rng.normal(MEDIAN + 50, 250, count)
    ends = rng.uniform(LEAST, MOST, count)
    return np.where(rng.random(count) < 0.2, ends, full).clip(LEAST, MOST).astype(np.int64)


def grouped(found: np.ndarray, size: int, seed: int, bucket: int = 1) -> float:
    """Share of padding of an epoch by nbtools' own order, widths rounded up to a multiple of the bucket."""
    return padding([found[ids] for ids in batches_left(np.arange(len(found)), found, seed, 0, [(size, 0)])], bucket)


def blind(found: np.ndarray, size: int, seed: int) -> float:
    """The same where batches are drawn at random, as DataLoader(shuffle=True) does."""
    order = np.random.default_rng(seed).permutation(found)
    return padding(np.split(order, range(size, len(order), size)))


def padding(batches: list[np.ndarray], bucket: int = 1) -> float:
    pixels = sum(len(batch) * -(-int(batch.max()) // bucket) * bucket for batch in batches)
    return 1 - sum(int(batch.sum()) for batch in batches) / pixels


def main() -> None:
    parser = argparse.ArgumentParser(description="padding of batches of lines as wide as HWDB's")
    parser.add_argument("--quick", action="store_true", help="in a second, to see that it runs; writes no receipt")
    quick = parser.parse_args().quick
    count, rounds = (2_000, 1) if quick else (COUNT, ROUNDS)
    sets = [widths(count, seed) for seed in range(rounds)]
    figures: list[Figure] = []
    for name, way in (("grouped", grouped), ("rounded", partial(grouped, bucket=BUCKET)), ("blind", blind)):
        for size in BATCHES:
            shares = [100 * way(found, size, seed) for seed, found in enumerate(sets)]
            figures.append(Figure.of(f"{name}_{size}", "%", shares))
    shares = [100 * grouped(found, HEADLINE, seed) for seed, found in enumerate(sets)]
    conditions = {
        "lines": count,
        "median_width": [int(np.median(found)) for found in sets],
        "range": [LEAST, MOST],
        "headline_batch": HEADLINE,
    }
    result = Receipt(Figure.of("hwdb_padding", "%", shares), tuple(figures), conditions)
    if not quick:
        result.write()
    print(result)


if __name__ == "__main__":
    main()
