"""A run as one ONNX file, which onnxruntime and others read without nbtools: the network with its best weights, what it
reads and returns (`Task.tensors`), and the preprocessing. Its answers are those of torch, or it is not written.

The batch and the lengths of ragged columns are free. Floats are float32, whatever precision the run trained in.
"""

from __future__ import annotations

import io
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from nbtools.data import Pack, collate
from nbtools.errors import ExportError, MissingExtra
from nbtools.show import plural
from nbtools.train import Plan, Tensors, spoken
from nbtools.version import VERSION

if TYPE_CHECKING:
    from nbtools.run import Run

PARTS = 1, 2, 5  # samples of the batches on which answers are compared; torch takes an axis of length 1 for a fixed one
TOLERANCE = 1e-4  # of the largest value where that is above 1
INSTALL = "pip install 'onnx<1.23' onnxscript onnxruntime, or nbtools[onnx]"
INSTEAD = "run.export('model'), without .onnx, writes the weights as safetensors"


def to_onnx(run: Run, pack: Pack) -> tuple[bytes, str]:
    """Return (the content of the file, how its answers compare with torch's on samples of a pack).

    Raises MissingExtra without onnx and onnxruntime, ExportError for a network that cannot be exported or whose answers
    differ by more than TOLERANCE.
    """
    try:
        import onnx
        import onnxruntime  # noqa: F401
    except ImportError as error:
        raise MissingExtra(f"an ONNX file needs onnx and onnxruntime ({error}): {INSTALL}") from None
    inputs, outputs = run.task.tensors(run.card, run.plan)
    if not inputs:
        missing = f"{spoken(run.task)} has no tensors(card, plan), which says what an ONNX file reads and returns"
        raise ExportError(f"{missing}; define it, or leave .onnx out: {INSTEAD}")
    graph, batches, failures = Graph(run.model("cpu"), list(inputs)), list(samples(run, pack, list(inputs))), []
    inputs, outputs = shaped(run, graph, batches[-1], inputs, outputs)
    for dynamo in (False, True):  # the older exporter takes a second; the newer, which reads Python code, up to minutes
        try:
            with quiet():
                model = exported(graph, batches[-1], inputs, outputs, dynamo)
                onnx.helper.set_model_props(model, about(run, inputs, outputs))
                content = model.SerializeToString()
                return content, compared(graph, content, batches)
        except Exception as error:  # exporters raise all kinds, and explain their steps; the cause comes first
            while error.__cause__ is not None:
                error = error.__cause__
            failures.append(next(iter(str(error).strip().splitlines()), type(error).__name__))
    cannot = f"torch {torch.__version__} cannot export {type(graph.network).__name__} as ONNX"
    raise ExportError(f"{cannot}: {'; '.join(dict.fromkeys(failures))}; nothing was written. {INSTEAD}")


class Graph(nn.Module):
    """A network that takes its batch as tensors in the order of their names, and returns a tuple of tensors."""

    def __init__(self, network: nn.Module, names: list[str]):
        super().__init__()
        self.network, self.names = network, names
        self.eval()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = self.network(dict(zip(self.names, tensors, strict=True)))
        return tuple(one for one in tree_leaves(outputs) if isinstance(one, Tensor))


def samples(run: Run, pack: Pack, names: list[str]) -> Iterator[tuple[Tensor, ...]]:
    """Yield the network's input for batches of samples from all over a split."""
    pack = run.readable(pack)
    ids = next(filter(len, map(pack.ids, ("val", "test", "train"))))
    places = np.linspace(0, len(ids) - 1, sum(PARTS)).round().astype(int)
    for part in np.split(ids[places], np.cumsum(PARTS)[:-1]):
        raw = collate([pack.sample(int(i)) for i in part], pack.columns, pack.unread)
        batch = run.task.batch(raw, run.plan, None)
        yield tuple(batch[name] for name in names)


def shaped(
    run: Run, graph: Graph, batch: tuple[Tensor, ...], inputs: Tensors, outputs: Tensors
) -> tuple[Tensors, Tensors]:
    """Return both with names and shapes where the task leaves them out: of an `nb.pack` its columns say which axes are
    free."""
    ragged = {name for name, column in run.card.columns.items() if column.kind == "ragged"}
    named = {}
    for (name, (shape, text)), tensor in zip(inputs.items(), batch, strict=True):
        rest = [f"{name}_steps", *tensor.shape[2:]] if name in ragged else tensor.shape[1:]
        named[name] = shape or ("batch", *rest), text
    with torch.no_grad():
        names = [f"output_{n}" if n else "output" for n in range(len(graph(*batch)))]
    return named, outputs if len(outputs) == len(names) else dict.fromkeys(names, ((), ""))


def exported(graph: Graph, batch: tuple[Tensor, ...], inputs: Tensors, outputs: Tensors, dynamo: bool) -> Any:
    """Return the ModelProto of a graph by torch's exporter."""
    import onnx

    tensors = {**outputs, **inputs}.items()
    free = {name: {i: axis for i, axis in enumerate(shape) if isinstance(axis, str)} for name, (shape, _) in tensors}
    names: Any = {"input_names": list(inputs), "output_names": list(outputs), "opset_version": 17}  # layer norm
    if dynamo:
        shapes = (tuple(free[name] for name in inputs),)
        program: Any = torch.onnx.export(graph, batch, dynamic_shapes=shapes, dynamo=True, **names)
        return program.model_proto
    content: Any = io.BytesIO()
    torch.onnx.export(graph, batch, content, dynamic_axes=free, dynamo=False, **names)
    return onnx.load_model_from_string(content.getvalue())


def compared(graph: Graph, content: bytes, batches: list[tuple[Tensor, ...]]) -> str:
    """Return how a file's outputs compare with torch's: their largest difference, relative to the largest value where
    that is above 1. Raises ExportError for one above TOLERANCE."""
    import onnxruntime

    session, worst = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"]), 0.0
    reads = {one.name for one in session.get_inputs()}
    for batch in batches:
        given = {name: tensor.numpy() for name, tensor in zip(graph.names, batch, strict=True) if name in reads}
        with torch.no_grad():
            pairs = list(zip(graph(*batch), map(torch.from_numpy, session.run(None, given)), strict=True))
        for ours, theirs in pairs:
            if ours.shape != theirs.shape:
                raise ExportError(f"an output has the shape {tuple(theirs.shape)} instead of {tuple(ours.shape)}")
            apart = (ours.double() - theirs.double()).abs() / ours.double().abs().max().clamp(min=1)
            worst = max(worst, float(apart.max().nan_to_num(np.inf))) if ours.numel() else worst
    told = (
        f"on {plural(sum(PARTS), 'sample')} its outputs in onnxruntime {onnxruntime.__version__} differ from torch's by"
    )
    if worst > TOLERANCE:
        raise ExportError(f"{told} up to {worst:.2g}, and at most {TOLERANCE:g} is allowed")
    return f"{told} at most {worst:.1g}"


@contextmanager
def quiet() -> Iterator[None]:
    """No warnings, no log and no prints: an export that fails shows whole graphs."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def about(run: Run, inputs: Tensors, outputs: Tensors) -> dict[str, str]:
    """Return the file's metadata: name → JSON. plan: the settings that are the task's own."""
    card, settings = run.card.to_dict(), run.plan.to_dict()
    values = {
        "nbtools": VERSION,
        **{name: card[name] for name in ("task", "classes", "options", "columns")},
        "inputs": {name: {"shape": shape, "text": text} for name, (shape, text) in inputs.items()},
        "outputs": {name: {"shape": shape, "text": text} for name, (shape, text) in outputs.items()},
        "plan": {name: settings[name] for name in settings.keys() - Plan().to_dict().keys()},
        "validation": {name: value for name, value in run.best.items() if name.startswith("val_")},
    }
    return {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}
