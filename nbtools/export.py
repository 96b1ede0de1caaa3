"""A run as one ONNX file, which onnxruntime and others read without nbtools: the network with its best weights, what it
reads and returns, and the preprocessing. Its answers are those of torch, or it is not written.

The graph reads the tensors that the network takes out of a batch after the task's `batch`; `Task.tensors` describes
them. The batch and the lengths of ragged columns are free. Floats are float32, whatever precision the run trained in.
"""

from __future__ import annotations

import io
import json
import logging
import math
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.jit import TracerWarning  # pyright: ignore[reportPrivateImportUsage]
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves

from nbtools.data import Pack, collate
from nbtools.errors import ExportError, MissingExtra
from nbtools.show import plural
from nbtools.train import Batch, Plan, Tensors
from nbtools.version import VERSION

if TYPE_CHECKING:
    from nbtools.run import Run

SAMPLES = 8  # real ones on which answers are compared, in batches of 1, 2 and the rest
TOLERANCE = 1e-4  # of the largest value where that is above 1
INSTALL = "pip install 'onnx<1.23' onnxscript onnxruntime, or nbtools[onnx]"
OPSET = 17  # the first with layer norm
INSTEAD = "run.export('model'), without .onnx, writes the weights as safetensors"
MORE = 64  # steps added to ragged columns, to see which axes of the input they lengthen


def to_onnx(run: Run, pack: Pack) -> tuple[bytes, str]:
    """(the content of the file, a sentence about its answers). pack: whose samples they are compared on.

    Raises MissingExtra without onnx, ExportError for a network that cannot be exported or whose answers differ by more
    than TOLERANCE.
    """
    try:
        import onnx
    except ImportError as error:
        raise MissingExtra(f"an ONNX file needs onnx ({error}): {INSTALL}") from None
    model, raws = run.model("cpu"), list(samples(run.readable(pack)))
    inputs, outputs = run.task.tensors(run.card, run.plan)
    if not (inputs and all(shape for shape, _ in inputs.values())):
        inputs = found(run, model, raws[-1], pack, inputs)
    graph, batches = Graph(model, list(inputs)), [prepared(run, raw, inputs) for raw in raws]
    count = len(answers(graph, batches[-1]))
    if not (outputs and all(shape for shape, _ in outputs.values())):
        names = [f"output_{n}" if n > 1 else "output" for n in range(1, count + 1)]
        outputs = {name: outputs.get(name, ((), "")) for name in names}
    failures: list[str] = []
    for exporter in (traced, captured):
        try:
            proto = exporter(graph, batches[-1], inputs, outputs)
            onnx.helper.set_model_props(proto, about(run, inputs, outputs))
            content = proto.SerializeToString()
            return content, compared(content, graph, batches)
        except ExportError as error:
            failures.append(str(error))
        except ImportError as error:  # of onnxscript
            failures.append(f"torch has another exporter, which needs onnxscript ({error}): {INSTALL}")
    raise ExportError(f"{'; '.join(dict.fromkeys(failures))}; nothing was written. {INSTEAD}")


class Graph(nn.Module):
    """A network that takes its batch as tensors in the order of their names, and returns a tuple of tensors."""

    def __init__(self, network: nn.Module, names: list[str]):
        super().__init__()
        self.network, self.names = network, names
        self.eval()

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        outputs = self.network(dict(zip(self.names, tensors, strict=True)))
        return tuple(one for one in tree_leaves(outputs) if isinstance(one, Tensor))


class Noted(dict[str, Tensor]):
    """A batch that notes which of its tensors are asked for."""

    def __init__(self, batch: Batch):
        super().__init__(batch)
        self.asked: dict[str, None] = {}

    def __getitem__(self, name: str) -> Tensor:
        self.asked[name] = None
        return super().__getitem__(name)


def samples(pack: Pack) -> Iterator[Batch]:
    """Raw batches of 1, 2 and the rest of SAMPLES samples from all over a split, at least two in the last: torch takes
    an axis of length 1 for one of fixed length."""
    ids = next(filter(len, map(pack.ids, ("val", "test", "train"))))
    ids = ids[np.linspace(0, len(ids) - 1, SAMPLES).round().astype(int)]
    for part in (ids[:1], ids[1:3], ids[3:]):
        yield collate([pack.sample(int(i)) for i in part], pack.columns, pack.unread)


def prepared(run: Run, raw: Batch, names: Iterable[str]) -> Batch:
    batch = run.task.batch(raw, run.plan, None)
    return {name: batch[name] for name in names}


def found(run: Run, model: nn.Module, raw: Batch, pack: Pack, known: Tensors) -> Tensors:
    """The inputs of a network that its task does not describe, or by texts only: what it takes out of a batch. Free
    axes are those that grow with the padding of ragged columns, which changes no answer."""
    batch = Noted(run.task.batch(raw, run.plan, None))
    with torch.no_grad():
        model(batch)
    ragged = {name for name, column in pack.columns.items() if column.kind == "ragged" and name in raw}
    longer = {name: F.pad(raw[name], (*(0, 0) * (raw[name].dim() - 2), 0, MORE)) for name in ragged}
    after, names = run.task.batch({**raw, **longer}, run.plan, None), {}

    def axis(place: int, size: int, now: int) -> int | str:
        if place == 0:
            return "batch"
        return size if size == now else names.setdefault(size, f"length_{len(names) + 1}" if names else "length")

    return {
        name: (
            tuple(map(axis, range(batch[name].dim()), batch[name].shape, after[name].shape)),
            known.get(name, ((), ""))[1],
        )
        for name in batch.asked or batch
    }


def traced(graph: Graph, batch: Batch, inputs: Tensors, outputs: Tensors) -> Any:
    """The ModelProto of a graph by torch's older exporter, in about a second: it records what happens to one batch.
    Raises ExportError where Python code outside of torch asks for values, which may differ in another batch."""
    import onnx

    content: Any = io.BytesIO()
    names: Any = {"input_names": list(inputs), "output_names": list(outputs), "opset_version": OPSET}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with explained(f"torch {torch.__version__} cannot trace {named(graph)}"):
            axes = free({**inputs, **outputs})
            torch.onnx.export(graph, tuple(batch.values()), content, dynamic_axes=axes, dynamo=False, **names)
            for warning in caught:
                own = not Path(warning.filename).is_relative_to(Path(torch.__file__).parent)
                if own and issubclass(warning.category, TracerWarning):
                    place = f"{warning.filename}:{warning.lineno}"
                    raise ValueError(f"{place} turns tensors into Python values, which may differ for another batch")
    return onnx.load_model_from_string(content.getvalue())


def captured(graph: Graph, batch: Batch, inputs: Tensors, outputs: Tensors) -> Any:
    """The same by `torch.export`, which follows sizes through Python code, and takes up to minutes. Raises ImportError
    without onnxscript, ExportError with the exporter's reason."""
    import onnxscript  # noqa: F401

    names: Any = {"input_names": list(inputs), "output_names": list(outputs), "verbose": False}
    axes = (tuple(free(inputs).values()),)
    with silence(), explained(f"torch {torch.__version__} cannot export {named(graph)} as ONNX"):
        program = torch.onnx.export(graph, tuple(batch.values()), dynamic_shapes=axes, dynamo=True, **names)
        return program.model_proto  # pyright: ignore[reportOptionalMemberAccess]


@contextmanager
def explained(what: str) -> Iterator[None]:
    """Errors of other packages as an ExportError: exporters and runtimes raise all kinds."""
    try:
        yield
    except Exception as error:
        while error.__cause__ is not None:  # torch's own explains its steps
            error = error.__cause__
        reason = next(filter(None, map(str.strip, str(error).splitlines())), type(error).__name__)
        raise ExportError(f"{what}: {reason}") from error


@contextmanager
def silence() -> Iterator[None]:
    """No warnings, no log and no prints: an export that fails shows whole graphs."""
    before = logging.root.manager.disable
    logging.disable()
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def free(tensors: Tensors) -> dict[str, dict[int, str]]:
    """Name → the names of those axes that may have any length."""
    return {n: {i: axis for i, axis in enumerate(shape) if isinstance(axis, str)} for n, (shape, _) in tensors.items()}


def about(run: Run, inputs: Tensors, outputs: Tensors) -> dict[str, str]:
    """The file's metadata: name → JSON. plan: the settings that are the task's own."""

    def each(tensors: Tensors) -> dict[str, dict[str, Any]]:
        pairs = {name: {"shape": shape, "text": text} for name, (shape, text) in tensors.items()}
        return {name: {key: value for key, value in pair.items() if value} for name, pair in pairs.items()}

    card, settings = run.card.to_dict(), run.plan.to_dict()
    values = {
        "nbtools": VERSION,
        **{name: card[name] for name in ("task", "classes", "options", "columns")},
        "inputs": each(inputs),
        "outputs": each(outputs),
        "plan": {name: settings[name] for name in settings.keys() - Plan().to_dict().keys()},
        "validation": {name: value for name, value in run.best.items() if name.startswith("val_")},
    }
    return {name: json.dumps(value, ensure_ascii=False) for name, value in values.items()}


def compared(content: bytes, graph: Graph, batches: list[Batch]) -> str:
    """How the answers of a file differ from torch's, in a sentence. Raises ExportError if by too much."""
    try:
        import onnxruntime
    except ImportError as error:
        return f"its outputs were not compared with torch's, which needs onnxruntime ({error}): {INSTALL}"
    runtime, worst = f"onnxruntime {onnxruntime.__version__}", 0.0
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = torch.get_num_threads(), 3
    with explained(f"{runtime} cannot run the exported {named(graph)}"):
        session = onnxruntime.InferenceSession(content, options, ["CPUExecutionProvider"])
        for batch in batches:
            given = session.run(None, {name: tensor.numpy() for name, tensor in batch.items()})
            worst = max([worst, *map(difference, answers(graph, batch), map(torch.from_numpy, given))])
    count = plural(sum(len(next(iter(batch.values()))) for batch in batches), "sample")
    if worst > TOLERANCE:
        raise ExportError(
            f"{named(graph)} has other outputs as ONNX: on {count} they differ by up to {worst:.2g} in {runtime}, and "
            f"at most {TOLERANCE:g} is allowed"
        )
    return f"on {count} its outputs in {runtime} differ from torch's by at most {worst:.1g}"


def answers(graph: Graph, batch: Batch) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return graph(*batch.values())


def difference(ours: Tensor, theirs: Tensor) -> float:
    """The largest, relative to the largest value where that is above 1; infinite for another shape or a NaN."""
    if ours.shape != theirs.shape:
        return math.inf
    if not ours.numel():
        return 0.0
    worst = (ours.double() - theirs.double()).abs().max() / ours.double().abs().max().clamp(min=1)
    return float(worst.nan_to_num(math.inf))


def named(graph: Graph) -> str:
    return type(graph.network).__name__
