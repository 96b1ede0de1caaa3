"""What training leaves behind: a run with its scores, network and answers; several in a table, or side by side."""

import inspect
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch

from nbtools import disk, live, show, train
from nbtools.data import SPLITS, Card, Pack, Sample, cache, collate, digest, in_notebook, items_of, local, retry, say
from nbtools.errors import CheckpointError, NbtoolsError, PackError, TrainError
from nbtools.measure import LrTrial, Receipt, Verdict
from nbtools.show import number, plural
from nbtools.train import History, Plan, Task, TaskLike, TrainState, checkpoint, evaluation

if TYPE_CHECKING:
    import pandas as pd

    from nbtools.report import Report

PLAN, CARD, HISTORY, RECEIPT, VERDICT = "plan.json", "card.json", "history.csv", "receipt.json", "verdict.json"
FREE = {
    "binary",
    "classes",
    "category_of",
    "mean",
    "std",
    "roles",
    "stored",
    "label",
    "case",
}  # options that no network reads


class Run:
    """A finished or interrupted run. events: the messages of `nb.fit`."""

    def __init__(self, folder: Path, task: TaskLike | None, card: Card, plan: Plan):
        self.folder, self.known, self.card, self.plan = folder, task, card, plan
        self.events: list[str] = []
        self.settle: Callable[[], object] = bool  # waits until what is to be saved is, for callbacks of a run

    @classmethod
    def open(cls, folder: str | Path, task: TaskLike | None = None) -> Self:
        """Open a run folder, also one that `keep=` keeps. task: of a run whose own cannot be imported by name, only
        for what needs its network: `predict`, `model`, `export`, `report`, `nb.evaluate`. Raises CheckpointError."""
        folder = Path(folder).expanduser()
        with disk.explained("opening a run", folder):
            if not (index := retry(lambda: checkpoint.read_index(folder), folder)):
                why = f"no {checkpoint.INDEX}, so this is not a run folder" if folder.is_dir() else "no such folder"
                raise CheckpointError(f"{folder}: {why}; nb.runs lists a folder's runs, nb.fit with run= trains one")
            card, plan = (retry(partial(read_json, folder / name), folder) for name in (CARD, PLAN))
        with suppress(CheckpointError):
            task = train.import_task(index.get("task", "none"), folder) if task is None else task
        kind = Plan if task is None else type(train.as_task(task).PLAN)
        return cls(folder, task, Card.from_dict(card), as_plan(kind, plan))

    @cached_property
    def task(self) -> Task:
        """Return what it trained. Raises CheckpointError for one that was not given and cannot be imported by name."""
        return train.bind(self.known or train.import_task(self.index.get("task", "none"), self.folder), self.card)

    @property
    def index(self) -> dict[str, Any]:
        """Return the content of `run.json`."""
        self.settle()
        return checkpoint.read_index(self.folder)

    @cached_property
    def history(self) -> History:
        """Return every row that was logged; `.frame("epoch")` is a DataFrame."""
        return History(self.folder / HISTORY)

    @property
    def receipt(self) -> Receipt | None:
        """Return how much faster it was than the task's baseline, on the machine that trained; None if not measured."""
        return Receipt.from_dict(read_json(path, "delete it")) if (path := self.folder / RECEIPT).exists() else None

    @property
    def verdict(self) -> Verdict | None:
        """Return what this run is bound by, and the one change worth making; None if it was not measured."""
        return Verdict.from_dict(read_json(path, "delete it")) if (path := self.folder / VERDICT).exists() else None

    @property
    def lr_trial(self) -> LrTrial | None:
        """Return which learning rates were tried before it, with their losses; None if none were."""
        return LrTrial.from_dict(tried) if (tried := self.index.get("lr_trial")) else None

    @property
    def state(self) -> str:
        """training: a process on this machine trains it; done: its last epoch ended, or early_stop ended it; stopped:
        by the user; diverged; failed: another error; interrupted: its process was lost. The last four resume."""
        return "training" if busy(self.folder) else self.index.get("ended", "interrupted")

    @property
    def over(self) -> bool:
        """Return whether its last epoch has ended, or early stopping ended it."""
        return self.index.get("ended") == "done"

    @property
    def metric(self) -> tuple[str, float]:
        """Return the metric that chooses the best weights, and its sign: -1 where lower is better."""
        best = self.index.get("metric", "-loss")
        return best.lstrip("-"), -1.0 if best.startswith("-") else 1.0

    @property
    def best(self) -> dict[str, Any]:
        """Return the epoch, from 1, of the weights that `model` returns, with its losses, metrics (val_…), lr, seconds
        and MiB; {} before an evaluation."""
        epoch, step = checkpoint.place(self.index.get("best", "0-0"))
        if step > (self.history.rows or [{"step": 0}])[-1]["step"]:  # trained on since it was read
            self.history.refresh()
        rows = [row for row in self.history.of("epoch") if row["step"] == step]
        return {**rows[-1], "epoch": epoch} if rows else {}

    @property
    def reached(self) -> str:
        """Return the best value: `whole accuracy 0.953 in epoch 7`; "" before the first evaluation."""
        best, metric = self.best, self.metric[0]
        return f"{metric.replace('_', ' ')} {number(best[f'val_{metric}'])} in epoch {best['epoch']}" if best else ""

    def summary(self) -> "pd.DataFrame":
        """Return a row per epoch, from 1: losses, metrics, samples/s, share of waiting, seconds, lr, batch, MiB."""
        frame = self.history.frame("epoch")
        frame.index = (frame.pop("epoch").astype(int) + 1) if len(frame) else frame.index
        speed = frame.filter(regex="^(lr|epoch_time|samples_per_s|data_wait|batch_size)$|^(?!(train|val)_).*memory")
        return frame.filter(regex="^(train|val)_").join(speed)

    def __fspath__(self) -> str:
        return str(self.folder)

    def __repr__(self) -> str:
        done = len(self.history.of("epoch"))
        best = f", best {self.reached}" if self.reached else ""
        return f"Run {self.folder}: {done} of {plural(max(done, self.plan.epochs), 'epoch')}{best}"

    def model(self, device: torch.device | str | None = None) -> torch.nn.Module:
        """Return the network with the weights that were best on the validation split, in eval mode, on a GPU if any."""
        with train.device.untouched(device := torch.device(device or train.device.pick())):
            model = train.build(self.task, self.card, self.plan)
        self.settle()
        try:
            model.load_state_dict(checkpoint.weights(self.folder))
        except RuntimeError as error:
            rule = f"{self.folder}: {train.title_of(self.task)} makes another network than the one that was trained"
            raise CheckpointError(f"{rule}; open the run with that task: nb.Run.open(folder, task)") from error
        own, trained = train.identity(self.task, self.card, model, self.plan), self.index.get("identity", {})
        for part in own.keys() & trained.keys() & {"network", "loss"}:  # by which answers are standardised
            if differing := [line for line in own[part] if line not in trained[part]]:
                say(f"{self.folder}: this is not quite what was trained; its {part} was not {differing[0]}")
        return model.to(device).eval()

    def readable(self, pack: Pack) -> Pack:
        """Return the part of a pack that this run's network can read: the pack itself, if it can read all."""
        return self.task.part(pack, self.plan)

    def pack(self, source: Any, **options: Any) -> Pack:
        """Pack a source with the classes, preprocessing, shares and seed of this run's; one that it has not seen as a
        test split: `nb.evaluate(run, run.pack("new", test=1.0))`. options: of the task's `pack`."""
        drawn = zip(("val", "test", "seed"), self.card.shares, strict=False)
        drawn = {name: each for name, each in drawn if each and name in inspect.signature(self.task.pack).parameters}
        return self.task.pack(source, **{**drawn, **self.task.pack_options(self.card), **options})

    def predict(self, files: Any, batch_size: int = 64, all: bool = False, root: str | Path | None = None) -> Any:
        """Return the answers to raw files as a list in their order, with the preprocessing of the run's training.

        files: a file, a list of files, or a folder, for which it is a dict: name → answer of every file in it and below
        that the task reads; a message names the others. For a run on a pack of `nb.pack`, also items as its Dataset
        returns them, with or without targets: one, a list, a Dataset, an array (B, …), a DataFrame or CSV; root: of its
        images. all: return each class's probability instead, as a DataFrame with one row per sample. Raises PackError
        naming a file that cannot be read, and TrainError for `all` where the answers are not classes.
        """
        names: list[str] | None = None  # of the files of a folder, once they are read
        if isinstance(files, str | Path) and files != "" and not self.card.options.get("text"):
            files = Path(files).expanduser()
        if isinstance(files, Path) and files.is_dir():
            samples = self.read_folder(files, names := [])
        elif self.task.card is None:
            samples = map(self.read, map(Path, [files] if isinstance(files, str | Path) else files))
        else:
            items = items_of(files, self.card, root)
            samples = (self.read(items[i], f"item {i}") for i in range(len(items)))
        answers, shares = self.answers(samples, batch_size)
        if not all:
            return answers if names is None else dict(zip(names, answers, strict=True))
        if len(shares) < len(answers):
            raise TrainError("predict(…, all=True) needs a task whose answers are classes; leave out all=")
        import pandas as pd

        rows: Any = getattr(files, "index", None)  # a list's is a method
        rows = rows if hasattr(files, "iloc") and len(rows) == len(shares) else None
        return pd.DataFrame(shares, rows if names is None else pd.Index(names, name="file"), self.card.classes, float)

    def predict_pack(self, pack: Pack, ids: Collection[int], batch_size: int = 64) -> list[Any]:
        pack = self.readable(pack)
        if lacking := [int(i) for i in ids if pack.split[i] >= len(SPLITS)]:
            rule = f"sample {lacking[0]} has nothing that this run's network reads"
            raise PackError(f"{rule}; take ids from run.readable(pack)")
        return self.answers((pack.sample(int(i)) for i in ids), batch_size)[0]

    def report(self, pack: Pack, split: str = "test") -> "Report":
        """Return where the best model is right and wrong on a split of a pack: `.table`, `.confusion`, `.worst` samples
        and their `.pictures`; it shows by itself. Raises PackError as `nb.evaluate` does."""
        from nbtools.report import make_report  # with pandas and matplotlib

        require_like(self, pack)
        return make_report(self, self.readable(pack), split)

    def export(self, path: str | Path, pack: Pack | None = None) -> Path:
        """Write the best weights as safetensors with a JSON card of all that is needed to use them; to a path that ends
        in `.onnx` the network itself, if its answers are torch's on samples of `pack` (None: that of its training).
        Raises TrainError if they differ or it cannot be exported, MissingExtra, and PackError if the pack is gone."""
        from nbtools.export import write  # which needs this module

        return write(self, local(str(path)), pack)

    def answers(self, samples: Iterable[Sample], size: int = 64) -> tuple[list[Any], list[Any]]:
        """Return the answers to samples, `size` at a time, and of those that are classes the probability of each."""
        model, samples, card = self.model(), iter(samples), self.card
        device, answers, shares = next(model.parameters()).device, [], []
        while chunk := list(islice(samples, size)):
            raw = {name: tensor.to(device) for name, tensor in collate(chunk, card.columns).items()}
            outputs = evaluation.forward(self.task, model, raw, self.plan)[1]
            answers += self.task.decode(outputs, card)
            with suppress(TrainError):  # of outputs that are no tensor
                logits = train.logits_of(outputs[0] if isinstance(outputs, tuple) else outputs).float()
                if card.classes and logits.shape[1:] == (len(card.classes),):
                    labels = card.options.get("kind") == "labels"
                    shares += [*(logits.sigmoid() if labels else logits.softmax(1)).cpu().numpy()]
        return answers, shares

    def read(self, item: Any, name: str = "") -> Sample:
        try:
            return self.task.read(item, self.card.options)
        except (OSError, PackError, AttributeError, LookupError, TypeError, ValueError) as error:  # text='s too
            where = item if isinstance(item, str | Path) and item != "" else f"{name} ({type(item).__name__})"
            raise PackError(f"{where}: {getattr(error, 'strerror', None) or error}") from error

    def read_folder(self, folder: Path, names: list[str]) -> Iterator[Sample]:
        """Yield a sample of each file below a folder that the task reads, and add its name to `names`."""
        files = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        files = [file for file in files if not any(part.startswith(".") for part in file.parts)]
        left_out: list[str] = []
        for file in files:
            try:
                sample = self.read(folder / file)
                names.append(file.as_posix())
                yield sample
            except PackError as error:
                left_out.append(str(error))
        if left_out:
            say(f"{folder}: {plural(len(left_out), 'file')} of {len(files):,} left out, the first: {left_out[0]}")


def evaluate(run: Run | str | Path | TrainState, pack: Pack, split: str = "test", **knobs: Any) -> dict[str, float]:
    """Evaluate a run's best model (or a TrainState's current one) on a split of a pack: metric → value.

    knobs: settings of the plan that differ from training: `eval_scales=(0.5, 1.0)`. Raises PackError for a pack with
    other classes or preprocessing, PlanError for an unknown setting, TrainError for one on which the model depends.
    """
    run = Run.open(run) if isinstance(run, str | Path) else run
    require_like(run, pack)
    plan = run.plan.replace(**knobs)
    plan.refuse_fixed(run.plan, resumed=True)
    model = run.model() if isinstance(run, Run) else run.evaluated
    return evaluation.evaluate(run.task, model, pack, plan, split)


def require_like(run: Any, pack: Pack) -> None:
    """Raise PackError for a pack with other classes or preprocessing, in what the network reads, than the run's."""
    if not isinstance(pack, Pack):
        raise PackError(f"pack must be an nb.Pack, got {type(pack).__name__}; make one with run.pack(source)")
    if not isinstance(run, Run | TrainState):
        raise TrainError(f"run must be a Run, its folder or a TrainState, got {type(run).__name__}; nb.fit returns one")
    if pack.card.content == run.card.content != "" and pack.card.digest != run.card.digest:
        say(f"{pack.folder} divides the run's data in another way: the run may have trained on what is evaluated here")
    pack = run.task.part(pack, run.plan)
    named = [each.card.options.get("columns") for each in (run, pack)]  # of images, folders have none, nor have arrays
    free = FREE if "x" in run.card.options.get("inputs", "x") and all(named) else {*FREE, "columns"}
    for name in ("task", "classes", "options", "columns"):
        ours, theirs = (getattr(each.card, name) for each in (run, pack))
        if isinstance(ours, dict):
            names = [n for n in {**ours, **theirs} if n not in free and ours.get(n) != theirs.get(n)]
            ours, theirs = ({n: each.get(n) for n in names} for each in (ours, theirs))
        if ours != theirs:
            rule = f"{pack.folder}: the pack's {name} differ from those that the run was trained with"
            why = f"{rule} ({theirs!s:.120} and {ours!s:.120}); pack the data with run.pack(source), or use run.predict"
            raise PackError(why, entry="Predictions differ between training and inference")


def validate(task: TaskLike, source: str | Path, **options: Any) -> Any:
    """Check a source before it is packed: a report of every rule that a file breaks, with the value and what to do;
    `.ok`: no errors. options: of the task's `validate`. Raises NbtoolsError for a task that checks while it packs."""
    with disk.explained(f"checking {source}", Path(f"{source}")):
        return train.as_task(task).validate(source, **options)


def read_json(path: Path, fix: str = "copy the whole run folder again") -> dict[str, Any]:
    """Return the content of a run's JSON file. Raises CheckpointError if it is missing or damaged."""
    try:
        return disk.from_json(path.read_text())
    except (FileNotFoundError, ValueError) as error:
        why = "missing" if isinstance(error, FileNotFoundError) else f"damaged, {error}"
        raise CheckpointError(f"{path} is {why}; {fix}") from None


def as_plan(kind: type[Plan], values: Mapping[str, Any]) -> Plan:
    """Return the plan in a run's file, without settings that are no longer those of its task."""
    return kind(**{name: value for name, value in values.items() if hasattr(kind, name)})


def what_next(run: Run) -> str:
    done, so_far = ("done: ", "") if run.over else ("", " so far")
    if (name := run.index.get("best")) is None:
        return f"{done}the newest weights are in {run.folder}; no evaluation has chosen a best model{so_far}"
    use = 'run.report(pack), run.predict(files), run.export("model.onnx")'
    return f"{done}{run.folder} has the best model{so_far}, {name}.safetensors ({run.reached}), plot.png …; next: {use}"


def busy(folder: Path) -> bool:
    """Return whether a process on this machine is training in a run folder now."""
    with suppress(TrainError), lock(folder):
        return False
    return True


def lock(folder: Path) -> AbstractContextManager[None]:
    """Return the lock of whoever trains in a run folder, which raises TrainError where another process does."""
    busy = TrainError(f"{folder}: another process is training this run; stop it, or name another run folder")
    return disk.lock(cache() / "locks" / f"run-{digest(str(folder.resolve()))}.lock", busy)


def runs(folder: str | Path = "runs") -> "pd.DataFrame":
    """Return a row for each run in a folder and below, the newest first: state, best metric, epochs, minutes,
    samples/s, when it last changed. A message names those that cannot be opened. Raises CheckpointError."""
    opened = open_runs(folder := Path(folder).expanduser())
    times = [datetime.fromtimestamp(int(os.path.getmtime(run.folder / checkpoint.INDEX))) for run in opened]
    return outcomes({run.folder.relative_to(folder).as_posix(): run for run in opened}).assign(changed=times)


def open_runs(folder: str | Path) -> list[Run]:
    """Open the run in a folder, or those below it, the newest first. Raises CheckpointError."""
    folder = Path(folder).expanduser()
    if not folder.is_dir() or (folder / checkpoint.INDEX).exists():
        return [Run.open(folder)]
    with disk.explained("looking for runs", folder):
        opened = []
        for path in sorted(retry(lambda: [*folder.glob(f"**/{checkpoint.INDEX}")], folder), key=os.path.getmtime):
            try:
                opened.insert(0, Run.open(path.parent))
            except NbtoolsError as error:
                say(f"left out: {path.parent}: {error}")
    return opened


def outcomes(runs: Mapping[str, Run]) -> "pd.DataFrame":
    import pandas as pd

    rows = []
    for run in runs.values():
        epochs, best, metric = len(run.history.of("epoch")), run.best, run.metric[0]
        last = next((row for row in reversed(run.history.rows) if row.get("wall")), {})  # also amid an epoch
        score = {f"best_{metric}": best.get(f"val_{metric}"), "best_epoch": best.get("epoch")}
        speed = {"minutes": last["wall"] / 60, "samples_per_s": last["samples"] / last["wall"]} if last else {}
        rows.append({"state": run.state, **score, "epochs": epochs, "minutes": 0.0, "samples_per_s": None, **speed})
    return pd.DataFrame(rows, pd.Index(runs, name="run"))


def compare(*runs: Run | str | Path | list[Any] | tuple[Any, ...]) -> "Comparison":
    """Compare runs, run folders, a list of these, or all runs in a folder (`nb.compare("runs")`). Raises TrainError if
    there is none, CheckpointError for a folder that cannot be opened."""
    given = [one for each in runs for one in (each if isinstance(each, list | tuple) else [each])]
    every = [run for one in given for run in ([one] if isinstance(one, Run) else open_runs(one)[::-1])]
    if not every:
        raise TrainError("compare needs at least one run, got none; give it runs, run folders or a folder of runs")
    return Comparison({str(run.folder): run for run in every})


@dataclass(frozen=True, eq=False)
class Comparison:
    """Runs by name; shown as a sentence about the best, a table, and charts like those of the live view."""

    runs: Mapping[str, Run]

    @cached_property
    def frame(self) -> "pd.DataFrame":
        """Return one row per run: its results, and each setting of the plan in which the runs differ."""
        frame = outcomes(self.runs)
        plans = type(frame)([run.plan.to_dict() for run in self.runs.values()], frame.index, dtype=object)
        differing = plans.loc[:, plans.map(repr).nunique() > 1].add_prefix("plan.")
        return frame.join(differing).dropna(axis="columns", how="all")

    @cached_property
    def conclusion(self) -> str:
        """Return which run is best and by how much; or that none is, e.g. where chance may explain it, see `alike`."""
        runs = self.runs.values()
        if len({(run.metric, run.card.digest) for run in runs}) > 1:
            return "No best run: they have different tasks, or were validated on different data."
        metric, sign = next(iter(runs)).metric
        values = {name: run.best[f"val_{metric}"] for name, run in self.runs.items() if run.best}
        if len(values) < 2:
            return "No best run: fewer than two have been evaluated."
        best, *others = sorted(values, key=lambda name: -sign * values[name])
        count = min(min(run.plan.eval_samples or math.inf, run.card.splits["val"]) for run in runs)
        share = metric not in ("loss", "mae", "mse") and all(0 <= value <= 1 for value in values.values())
        by = "validation loss" if metric == "loss" else metric.replace("_", " ")
        if level := [name for name in others if alike(values[best], values[name], count, share)]:
            list_of = ", ".join(f"{name} {number(values[name])}" for name in (best, *level))
            why = f"on {plural(int(count), 'validation sample')}, chance alone can explain such a difference"
            return f"No clear winner by {by}: {list_of}; {why}."
        apart = f"{number(abs(values[best] - values[others[0]]))} {'above' if sign > 0 else 'below'} {others[0]}"
        return f"{best} is the best: {by} {number(values[best])}, {apart}."

    def __repr__(self) -> str:
        return f"{self.conclusion}\n\n{self.frame.T.to_string(float_format=number)}".strip()

    def _ipython_display_(self) -> None:
        words = show.note(self.conclusion) + self.frame.T.to_html(float_format=number)
        live.show({"text/html": words, "text/plain": repr(self)})
        if in_notebook():
            columns = {name: live.Columns().follow(run.history) for name, run in self.runs.items()}
            charts = live.comparison(columns, next(iter(self.runs.values())).metric[0])
            live.keep(live.page(charts), *live.as_data(live.png(charts), "curves of the runs above"))


def alike(best: float, other: float, count: float, share: bool) -> bool:
    """Return whether chance can explain a difference, by a rule of thumb: up to two standard errors of that of two
    shares, else 1 / √count of the value, as of a loss that varies by as much as its mean, at least 2 %."""
    middle, count = (best + other) / 2, max(count, 1)
    limit = 2 * math.sqrt(2 * middle * (1 - middle) / count) if share else max(0.02, count**-0.5) * abs(best)
    return abs(best - other) <= limit
