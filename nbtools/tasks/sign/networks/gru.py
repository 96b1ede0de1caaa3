"""The GRU on ready features of whole frames. B clips, T frames, D = 2048 numbers a frame, G glosses, C categories."""

from __future__ import annotations

from torch import Tensor, nn

Batch = dict[str, Tensor]
Outputs = tuple[Tensor, Tensor]

SIZES = (16, 12)


class Gru(nn.Module):
    """The guide's GRU of 16 and then 12 units, without the InceptionV3 before it: 101,743 parameters for 105 glosses in
    10 categories.

    Clips are padded, not packed: a GRU that runs forward has seen nothing of the padding when it comes to a clip's last
    frame, and PackedSequence costs cuDNN's fast path and a wait for the lengths. torch.compile gives nothing here.
    """

    dropout = 0.3

    def __init__(self, inputs: int, glosses: int, categories: int, dropout: float | None = None):
        super().__init__()
        self.first = initialised(nn.GRU(inputs, SIZES[0], batch_first=True))
        self.second = initialised(nn.GRU(SIZES[0], SIZES[1], batch_first=True))
        self.drop = nn.Dropout(self.dropout if dropout is None else dropout)
        self.gloss, self.category = nn.Linear(SIZES[1], glosses), nn.Linear(SIZES[1], categories)

    def forward(self, batch: Batch) -> Outputs:
        """features (B, T, D) float, features_length (B,) → logits of gloss (B, G), category (B, C)."""
        lengths = batch["features_length"]
        x = self.second(self.drop(self.first(batch["features"])[0]))[0]
        last = (lengths - 1).clamp(min=0).view(-1, 1, 1).expand(-1, 1, SIZES[1])
        hidden = self.drop(x.gather(1, last).squeeze(1) * (lengths > 0)[:, None])  # a clip of no frame: zeros
        return self.gloss(hidden), self.category(hidden)


def initialised(gru: nn.GRU) -> nn.GRU:
    """The guide's: torch's own, ± 1/√16 for 2048 inputs, would start with saturated gates."""
    for name, weight in gru.named_parameters():
        if name.startswith("weight_ih"):
            nn.init.xavier_uniform_(weight)
        elif name.startswith("weight_hh"):
            nn.init.orthogonal_(weight)
        else:
            nn.init.zeros_(weight)
    return gru
