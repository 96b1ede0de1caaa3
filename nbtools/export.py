"""A run as one ONNX file, which onnxruntime and others read without nbtools: the network with its best weights, what it
reads and returns, and the preprocessing. Its answers are those of torch, or it is not written.

The graph reads the tensors that the network takes out of a batch after the task's `batch`; `Task.tensors` describes
them. The batch and the lengths of ragged columns are free. Floats are float32, whatever precision the run trained in.
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
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from nbtools.data import Pack, collate
from nbtools.errors import ExportError, MissingExtra
from nbtools.table import plural
from nbtools.train import Batch, Plan, Tensors
from nbtools.version import VERSION

if TYPE_CHECKING:
    from nbtools.run import Run

PARTS = 1, 2, 5  # samples of the batches on which answers are compared; torch takes an axis of length 1 for a fixed one
TOLERANCE = 1e-4  # of the largest value where that is above 1
INSTALL = "pip install 'onnx<1.23' onnxscript onnxruntime, or nbtools[onnx]"
OPSET = 17  # the first with layer norm
MORE = 64  # steps added to ragged columns, to see which axes of the input they lengthen


def to_onnx(run: Run, pack: Pack) -> tuple[bytes, str]:
    """Return (the content of the file, how its answers compare with torch's on samples of a pack).

    Raises MissingExtra without onnx and onnxruntime, ExportError for a network that cannot be exported or whose answers
    differ by more than TOLERANCE.
    """
    try:
        import onnx
        import onnxruntime
    except ImportError as error:
        raise MissingExtra(f"an ONNX file needs onnx and onnxruntime ({error}): {INSTALL}") from None
    raws = list(raw_batches(run.readable(pack)))
    graph, failures = Graph(run.model("cpu")), []
    inputs, outputs = describe(run, graph, raws[-1])
    batches = [[run.task.batch(raw, run.plan, None)[name] for name in graph.names] for raw in raws]
    for dynamo in (False, True):  # the older exporter takes a second; the newer, which reads Python code, up to minutes
        try:
            with quiet():
                model = exported(graph, batches[-1], inputs, outputs, dynamo)
                onnx.helper.set_model_props(model, about(run, inputs, outputs))
                content = model.SerializeToString()
                session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
                worst = max(difference(graph, session, batch) for batch in batches)
        except Exception as error:  # exporters raise all kinds, and explain their steps; the cause comes first
            while error.__cause__ is not None:
                error = error.__cause__
            failures.append(next(iter(str(error).strip().splitlines()), type(error).__name__))
            continue
        told = f"on {plural(sum(PARTS), 'sample')} its outputs in onnxruntime {onnxruntime.__version__}"
        if worst <= TOLERANCE:
            return content, f"{told} differ from torch's by at most {worst:.1g}"
        failures.append(f"{told} differ from torch's by up to {worst:.2g}, and at most {TOLERANCE:g} is allowed")
    why, name = "; ".join(dict.fromkeys(failures)), type(graph.network).__name__
    fix = "run.export('model'), without .onnx, writes the weights as safetensors"
    raise ExportError(f"torch {torch.__version__} cannot export {name} as ONNX: {why}; nothing was written. {fix}")


class Graph(nn.Module):
    """A network that takes its batch as tensors in the order of their names, and returns a tuple of tensors."""

    def __init__(self, network: nn.Module):
        super().__init__()
        self.network, self.names = network, []
        self.eval()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = self.network(dict(zip(self.names, tensors, strict=True)))
        return tuple(one for one in tree_leaves(outputs) if isinstance(one, Tensor))


class Noting(dict[str, Tensor]):
    """A batch that notes which of its tensors a network takes."""

    def __init__(self, batch: Batch):
        super().__init__(batch)
        self.names: dict[str, None] = {}

    def __getitem__(self, name: str) -> Tensor:
        self.names[name] = None
        return super().__getitem__(name)


def raw_batches(pack: Pack) -> Iterator[Batch]:
    """Yield batches of samples from all over a split."""
    ids = next(filter(len, map(pack.ids, ("val", "test", "train"))))
    places = np.linspace(0, len(ids) - 1, sum(PARTS)).round().astype(int)
    for part in np.split(ids[places], np.cumsum(PARTS)[:-1]):
        yield collate([pack.sample(int(i)) for i in part], pack.columns, pack.unread)


def describe(run: Run, graph: Graph, raw: Batch) -> tuple[Tensors, Tensors]:
    """Return what the network reads and returns as `Task.tensors` has it; where that leaves names or shapes out, by a
    try: free axes of inputs are those that grow with the padding of ragged columns, which changes no answer."""
    inputs, outputs = run.task.tensors(run.card, run.plan)
    if inputs and all(shape for shape, _ in inputs.values()):
        graph.names = list(inputs)
        return inputs, outputs
    batch = Noting(run.task.batch(raw, run.plan, None))
    with torch.no_grad():
        count = sum(isinstance(one, Tensor) for one in tree_leaves(graph.network(batch)))
    ragged = [name for name, column in run.card.columns.items() if column.kind == "ragged" and name in raw]
    longer = {name: F.pad(raw[name], (*(0, 0) * (raw[name].dim() - 2), 0, MORE)) for name in ragged}
    after, known = run.task.batch({**raw, **longer}, run.plan, None), inputs
    graph.names, inputs = list(batch.names or batch), {}
    for name in graph.names:
        sizes = zip(batch[name].shape, after[name].shape, strict=True)
        shape = ["batch", *(size if size == now else f"length_of_{size}" for size, now in [*sizes][1:])]
        inputs[name] = shape, known.get(name, ((), ""))[1]
    names = [f"output_{n + 1}" if n else "output" for n in range(count)]
    return inputs, {name: outputs.get(name, ((), "")) for name in names}


def exported(graph: Graph, batch: list[Tensor], inputs: Tensors, outputs: Tensors, dynamo: bool) -> Any:
    """Return the ModelProto of a graph by torch's exporter."""
    import onnx

    free = {
        n: {i: axis for i, axis in enumerate(s) if isinstance(axis, str)} for n, (s, _) in {**outputs, **inputs}.items()
    }
    names: Any = {"input_names": list(inputs), "output_names": list(outputs), "opset_version": OPSET}
    if dynamo:
        shapes = (tuple(free[name] for name in inputs),)
        program: Any = torch.onnx.export(graph, tuple(batch), dynamic_shapes=shapes, dynamo=True, **names)
        return program.model_proto
    content: Any = io.BytesIO()
    torch.onnx.export(graph, tuple(batch), content, dynamic_axes=free, dynamo=False, **names)
    return onnx.load_model_from_string(content.getvalue())


def difference(graph: Graph, session: Any, batch: list[Tensor]) -> float:
    """Return the largest difference of two networks' outputs, relative to the largest value where that is above 1."""
    given = session.run(None, {name: tensor.numpy() for name, tensor in zip(graph.names, batch, strict=True)})
    with torch.no_grad():
        outputs = [output.numpy().astype(np.float64) for output in graph(*batch)]
    if [output.shape for output in outputs] != [other.shape for other in given]:
        return np.inf
    pairs = ((o, g) for o, g in zip(outputs, given, strict=True) if o.size)
    return max(
        (float(np.nan_to_num(abs(o - g).max() / max(abs(o).max(), 1), nan=np.inf)) for o, g in pairs), default=0.0
    )


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
