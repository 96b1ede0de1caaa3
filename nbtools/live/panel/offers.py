"""What a change of batch size did to lr, and what the rules for it would do: numbers to see before they are taken."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nbtools import table
from nbtools.train import Plan, lr_factor

RULES = {
    "none": ("keep", "lr as it was"),
    "sqrt": ("√ rule", "times √k for a batch k times as large: rule of thumb for Adam (arXiv 2205.10287)"),
    "linear": ("linear", "times k for a batch k times as large: rule of thumb for SGD with warmup (arXiv 1706.02677)"),
}
"""lr_rule → what its button says, what taking it does."""
SAME = 5e-3  # relative: three digits show no difference


@dataclass(frozen=True)
class Before:
    """The batch size and lr that offers count from: those before the batch was changed, until lr is touched."""

    batch_size: int
    lr: float

    def offers(self, batch_size: int) -> dict[str, float]:
        """lr_rule → lr at another batch size, in the three digits that its button shows; lr itself under `none`."""
        k = batch_size / self.batch_size
        found = {rule: float(f"{self.lr * lr_factor(rule, k):.3g}") for rule in RULES}
        return {**found, "none": self.lr}

    def words(self, plan: Plan) -> tuple[str, dict[str, str]]:
        """(what happened on the way to this plan, lr_rule → what the button of another lr says); empty at the same
        batch size."""
        if self.batch_size == plan.batch_size:
            return "", {}
        did = f"lr stays {table.shown(plan.lr)}"
        if plan.lr != self.lr:
            did = f"lr {table.shown(self.lr)} → {table.shown(plan.lr)} by its rule ({plan.lr_rule})"
        others = {
            n: lr for n, lr in self.offers(plan.batch_size).items() if not math.isclose(lr, plan.lr, rel_tol=SAME)
        }
        labels = {rule: f"{RULES[rule][0]}: {table.shown(lr)}" for rule, lr in others.items()}
        return f"batch {self.batch_size} → {plan.batch_size}: {did}", labels
