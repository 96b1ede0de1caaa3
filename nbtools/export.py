"""A run as files for other programs: its best weights as safetensors, or the network itself as one ONNX file, which is
written only if onnxruntime answers as torch does; next to each a JSON card of what is needed to use it. An ONNX file's
batch size and ragged lengths are dynamic, and its floats are float32, whatever precision the run was trained in."""

import io
import json
import math
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from nbtools import disk
from nbtools.data import Pack, collate, say
from nbtools.errors import MissingExtra, PackError, TrainError
from nbtools.run import Run
from nbtools.train import checkpoint, classify, logits_of, title_of

SAMPLES = 8  # on which answers are compared, in batches of 1, 2 and 5; torch takes an axis of length 1 for a fixed one
TOLERANCE = 1e-4  # of the largest value where that is above 1
INSTEAD = "run.export('model'), without .onnx, writes the weights as safetensors"


def write(run: Run, path: Path, pack: Pack | None) -> Path:
    """Write a file, and next to it as JSON the card of the data, the plan, the scores on the validation split, and what
    an ONNX file reads and returns."""
    scores = {name: value for name, value in run.best.items() if name.startswith("val_")}
    card = {"task": run.index["task"], "card": run.card.to_dict(), "plan": run.plan.to_dict(), "validation": scores}
    if path.suffix == ".onnx":
        try:
            content = onnx_file(run, path, pack or Pack.open(run.index.get("pack", "")))
        except PackError as error:  # packed elsewhere, or without a copy
            raise error if pack else PackError(f"{error}; then pass it: run.export({str(path)!r}, pack)") from None
        for side, described in zip(("inputs", "outputs"), run.task.tensors(run.card, run.plan), strict=True):
            card[side] = {name: text for name, (_, text) in described.items()}
    else:
        path = path if path.suffix == ".safetensors" else path.with_name(f"{path.name}.safetensors")  # as model-v1.2
        content = save({name: each.contiguous() for name, each in checkpoint.weights(run.folder).items()})
    with disk.explained("exporting", path):
        disk.write_atomic(path, content)
        disk.write_atomic(path.with_suffix(".json"), json.dumps(card, indent=1, ensure_ascii=False))
    return path


class Graph(nn.Module):
    """A network that takes its batch as tensors in the order of their names, and returns a tuple of those `taken`."""

    def __init__(self, network: nn.Module, names: list[str], taken: Callable[[Any], Any]):
        super().__init__()
        self.network, self.names, self.taken = network, names, taken
        self.eval()  # the exporter puts back what it was

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = self.taken(self.network(dict(zip(self.names, tensors, strict=True))))
        return tuple(one for one in tree_leaves(outputs) if isinstance(one, Tensor))


def onnx_file(run: Run, path: Path, pack: Pack) -> bytes:
    """Return the network, and say how its answers compare with torch's on a pack. Raises MissingExtra, TrainError."""
    try:
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
    except ImportError as error:
        install = "pip install 'onnx<1.23' onnxruntime, or the extra onnx"
        raise MissingExtra(f"an ONNX file needs onnx and onnxruntime ({error}): {install}") from None
    inputs, outputs = run.task.tensors(run.card, run.plan)
    if not inputs:
        missing = f"{title_of(run.task)} has no tensors(card, plan), which says what an ONNX file reads and returns"
        raise TrainError(f"{missing}; define it, or leave .onnx out: {INSTEAD}")
    taken = logits_of if isinstance(run.task, classify) else tree_leaves
    pack, graph, file = run.readable(pack), Graph(run.model("cpu"), [*inputs], taken), cast(Any, io.BytesIO())
    ids = next(filter(len, map(pack.ids, ("val", "test", "train"))))
    parts = np.split(ids[np.linspace(0, len(ids) - 1, SAMPLES).round().astype(int)], (1, 3))  # from all over a split
    raws = (collate([pack.sample(int(i)) for i in part], pack.columns) for part in parts)
    batches = [tuple(run.task.batch(raw, run.plan, None)[name] for name in inputs) for raw in raws]
    free: dict[str, dict[int, str]] = {}  # axes that have a name, and of an `nb.pack` those that its columns say
    for name, (shape, _) in {**inputs, **outputs}.items():
        ragged = name in run.card.columns and run.card.columns[name].kind == "ragged"
        shape = shape or (("batch", f"{name}_steps") if ragged else ("batch",))
        free[name] = {i: axis for i, axis in enumerate(shape) if isinstance(axis, str)}
    names: dict[str, Any] = {"input_names": graph.names, "output_names": [*outputs], "dynamic_axes": free}
    with redirect_stdout(io.StringIO()) as quiet, redirect_stderr(quiet), warnings.catch_warnings(action="ignore"):
        try:
            # The exporter of traces takes a second, that of Python code up to minutes; 17: the first with layer norm.
            torch.onnx.export(graph, batches[-1], file, opset_version=17, dynamo=False, **names)
            apart = difference(graph, file.getvalue(), batches)
        except Exception as error:  # exporters raise all kinds
            why = next(iter(str(error).strip().splitlines()), type(error).__name__)
            cannot = f"torch {torch.__version__} cannot export {type(graph.network).__name__} as ONNX: {why}"
            raise TrainError(f"{cannot}; nothing was written. {INSTEAD}") from None
    say(f"{path}: on {SAMPLES} samples its outputs in onnxruntime differ from torch's by at most {apart:.1g}")
    return file.getvalue()


@torch.no_grad()
def difference(graph: Graph, content: bytes, batches: list[tuple[Tensor, ...]]) -> float:
    """Return the largest difference from torch's outputs, relative to values above 1. Raises TrainError."""
    import onnxruntime

    session, worst = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"]), 0.0
    for batch in batches:
        given = {one.name: batch[graph.names.index(one.name)].numpy() for one in session.get_inputs()}
        for ours, theirs in zip(graph(*batch), map(torch.from_numpy, session.run(None, given)), strict=True):
            apart = (ours.double() - theirs).abs().nan_to_num(math.inf) / max(1.0, float(ours.abs().max()))
            worst = max(worst, float(apart.max()))
    if worst > TOLERANCE:
        raise TrainError(f"on {SAMPLES} samples its outputs differ from torch's by {worst:.2g}, above {TOLERANCE:g}")
    return worst
