"""The networks that read lines. Each takes the batch, image (B, 1, H, W) float ink and image_length (B,) → logits
(T, B, 1 + classes), blank 0, and each line's own steps (B,).

A line in a padded batch gets the answer that it gets alone: see `masked`. In training alone batch norm's statistics
count the padding, as they do wherever lines are padded; batches of like widths keep that to a few percent.

B samples, H × W pixels, T = ⌈W / stride⌉ time steps.
"""

from __future__ import annotations

from nbtools.errors import PlanError
from nbtools.tasks.hwdb.networks.crnn import Crnn
from nbtools.tasks.hwdb.networks.hctr import Hctr
from nbtools.tasks.hwdb.networks.slim import Slim

NETWORKS: dict[str, type[Hctr] | type[Slim] | type[Crnn]] = {"hctr": Hctr, "slim": Slim, "crnn": Crnn}


def built(name: str, height: int, classes: int, dropout: float | None = None) -> Hctr | Slim | Crnn:
    """A network for lines of a height. Raises PlanError where it cannot read them."""
    kind = NETWORKS[name]
    if height < kind.least_height:
        raise PlanError(
            f'Plan.network = "{name}" reads lines ≥ {kind.least_height} pixels high, and these are {height}; pack '
            "with a larger height=, or choose another network"
        )
    return kind(height, classes, dropout)
