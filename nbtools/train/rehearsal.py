"""Pass a few samples through network, loss and metrics before anything is trained or written."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from nbtools.data import TARGET, Draws, Pack, gather
from nbtools.errors import NbtoolsError, TrainError
from nbtools.train.device import autocast, out_of_memory
from nbtools.train.evaluation import forward
from nbtools.train.metrics import score
from nbtools.train.state import TrainState
from nbtools.train.task import spoken

SAMPLES = 8


def rehearse(state: TrainState, pack: Pack) -> None:
    """Raise TrainError, with shapes, if the network does not take the pack's samples, or loss and metrics what it
    returns. No weight and no random state changes."""
    task, plan, device, outputs = state.task, state.applied.while_training(), state.device, None
    ids = pack.ids("train")
    first = ids[:SAMPLES]
    target = pack.arrays[TARGET] if pack.options.get("kind") == "classes" and TARGET in pack.arrays else np.zeros(())
    if target.ndim == 1:  # a loss may not take the highest one
        first = np.append(first, ids[np.argmax(target[ids])])
    raw = {name: tensor.to(device) for name, tensor in gather(pack, first).items()}
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            if task.card is not None:
                if not {*state.model.parameters()}.isdisjoint(task.model(state.card, plan).parameters()):
                    rule = f"{spoken(task)}: model returns the same network each time, and a later run goes on with it"
                    raise TrainError(f"{rule}; make a new one in it, or pass it to nb.classify, which copies it")
                task.batch(raw, plan, Draws(plan.seed, 0, raw["id"]))
            batch, outputs = forward(task, state.model, raw, plan, device)
            if device.type == "cuda":  # whose kernels end the process where a class is out of range
                with suppress(RuntimeError):  # of a loss with tensors of its own on the GPU
                    score_batch(task, *tree_map_only(Tensor, Tensor.cpu, (outputs, batch)), plan=plan)
            with autocast(plan, device, state.model):
                score_batch(task, outputs, batch, plan)
    except NbtoolsError:
        raise
    except Exception as error:
        if not out_of_memory(error):
            columns = ", ".join(f"{name} {column}" for name, column in pack.columns.items())
            part = f"the network or its `batch` does not take the pack's {columns}"
            if outputs is not None:
                part = f"the loss or a metric does not take outputs {shape(outputs)}, y {shape(raw.get(TARGET))}"
            why = (str(error).splitlines() or [type(error).__name__])[0].rstrip(".")
            raise TrainError(f"{spoken(task)}: {part}: {why}; change it") from error


def score_batch(task: Any, outputs: Any, batch: Any, plan: Any) -> None:
    loss = task.loss(lambda *_, **__: outputs, batch, plan)
    if not isinstance(loss, Tensor) and not (isinstance(loss, tuple) and len(loss) == 2):
        rule = "loss must return (sum, count), or a tensor: the mean, or a term per sample"
        raise TrainError(f"{spoken(task)}: {rule}; got a {type(loss).__name__}")
    if task.card is not None:
        score(task.metrics, outputs, batch, task.card)


def shape(value: Any) -> str:
    return str(tuple(value.shape)) if isinstance(value, Tensor) else f"a {type(value).__name__}"
