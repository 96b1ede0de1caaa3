"""Run: what training leaves behind, opened from its folder: scores and history, the network, its answers."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import nn

from nbtools import disk, show, train
from nbtools.data import Card, Pack, Sample, cache, collate, is_kept, items_of, opened_copy, patient, say
from nbtools.errors import CheckpointError, PackError, TrainError
from nbtools.export import write_onnx, write_weights
from nbtools.measure import Receipt, Verdict
from nbtools.report import Report, Scores, make_report, probabilities, require_like
from nbtools.show import number, plural
from nbtools.train import History, Plan, TaskLike, checkpoint, evaluation

if TYPE_CHECKING:
    import pandas as pd

PLAN, CARD, HISTORY = "plan.json", "card.json", "history.csv"
RECEIPT, VERDICT, EVALUATION, NOTES = "receipt.json", "verdict.json", "evaluation.json", "notes.json"
SUMMARY = ("lr", "epoch_time", "samples_per_s", "data_wait", "batch_size")  # after losses and metrics


class Noted:
    """What the user writes about a run, kept in its folder: `run.notes = "new labels"`, `run.tags = ["baseline"]`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, run: Run | None, owner: type) -> Any:
        return self if run is None else run.stored(NOTES).get(self.name, "")

    def __set__(self, run: Run, value: Any) -> None:
        with disk.explained("writing notes", run.folder):
            disk.write_atomic(run.folder / NOTES, json.dumps({**run.stored(NOTES), self.name: value}, indent=1))


class Run:
    """A finished or interrupted run. events: what `nb.fit` said of it."""

    notes, tags = Noted(), Noted()

    def __init__(self, folder: Path, task: TaskLike, card: Card, plan: Plan):
        self.folder, self.task, self.card, self.plan = folder, train.bound(task, card), card, plan
        self.events: list[str] = []

    @classmethod
    def open(cls, folder: str | Path, task: TaskLike | None = None) -> Self:
        """Open a run folder, or the folder where `keep=` keeps one, whose weights are fetched when they are needed.
        task: only for one that cannot be imported by name. Raises CheckpointError; StageError for a kept run."""
        folder = given = Path(folder)
        with disk.explained("opening a run", given):
            if patient(lambda: is_kept(given), given):
                folder = opened_copy(given)
            index = patient(lambda: checkpoint.read_index(folder), folder)
            if not index:
                why = f"no {checkpoint.INDEX}, so this is not a run folder" if folder.is_dir() else "no such folder"
                raise CheckpointError(f"{folder}: {why}; nb.runs lists those of a folder, nb.fit with run= trains one")
            known = train.import_task(index.get("task", "none"), folder) if task is None else train.as_task(task)
            card, plan = (patient(partial(stored, folder / name), folder) for name in (CARD, PLAN))
        return cls(folder, known, Card.from_dict(card), type(known.PLAN).from_dict(plan))

    @cached_property
    def history(self) -> History:
        """Every row that was logged; `.frame("epoch")` is a DataFrame."""
        return History(self.folder / HISTORY)

    def stored(self, name: str) -> dict[str, Any]:
        """Return a JSON file of the folder; {} if there is none."""
        path = self.folder / name
        return stored(path, "delete it") if path.exists() else {}

    @property
    def receipt(self) -> Receipt | None:
        """Return how much faster it was than the task's baseline, on the machine that trained; None if not measured."""
        values = self.stored(RECEIPT)
        return Receipt.from_dict(values) if values else None

    @property
    def verdict(self) -> Verdict | None:
        """Return what this run is bound by, and the one change worth making; None if it was not measured."""
        values = self.stored(VERDICT)
        return Verdict.from_dict(values["verdict"]) if values else None

    @property
    def final(self) -> dict[str, Any]:
        """The best weights on the whole validation split, where evaluations during training did less: values (metric →
        value), seconds, epoch, plan; {} if they did not, or if other weights have become the best since."""
        values, row = self.stored(EVALUATION), self.best_row
        return {**values, "epoch": row["epoch"] + 1} if values and values["epoch"] == row.get("epoch") else {}

    @property
    def state(self) -> str:
        """training: a process on this machine trains it; done: its last epoch ended, or early_stop ended it; stopped:
        by the user; diverged; failed: in another error; interrupted: its process was lost. All but the first resume."""
        index, rows = checkpoint.read_index(self.folder), self.history.rows
        if busy(self.folder):
            return "training"
        if ended := "diverged" if index.get("diverged") else index.get("ended"):  # in an error
            return ended
        if len(self.history.of("epoch")) >= self.plan.epochs or checkpoint.stop_reason(self.folder):
            return "done"
        return "stopped" if rows and rows[-1].get("asked") == "stop" else "interrupted"

    @property
    def best(self) -> Scores:
        """The best epoch, from 1, with its losses, metrics (val_…), lr, seconds and MiB; {} before there is one."""
        row = {name: value for name, value in self.best_row.items() if name != "kind"}
        return Scores({**row, "epoch": row["epoch"] + 1} if row else {}, "the best epoch")

    @property
    def best_row(self) -> Mapping[str, Any]:
        """Its row in the history, where epochs count from 0: of the weights that `model` returns; where none are kept,
        the best of those up to the last checkpoint."""
        metric, sign = train.best_metric(self.task)
        rows = [row for row in self.history.of("epoch") if math.isfinite(row.get(f"val_{metric}", math.nan))]
        index = checkpoint.read_index(self.folder)
        best, last = (checkpoint.place(index.get(name, "").partition(".")[0] or "0-0")[1] for name in ("best", "last"))
        rows = [row for row in rows if row["step"] == best] or [row for row in rows if not last or row["step"] <= last]
        by = [(*train.order(row[f"val_{metric}"], row.get("val_loss"), sign), row["epoch"]) for row in rows]
        return rows[by.index(max(by))] if rows else {}

    @property
    def reached(self) -> str:
        """The best value: `whole accuracy 0.953 in epoch 7`; "" before the first evaluation."""
        best, metric = self.best, train.best_metric(self.task)[0]
        return f"{show.header(metric)} {number(best[f'val_{metric}'])} in epoch {best['epoch']}" if best else ""

    def summary(self) -> pd.DataFrame:
        """Return a row per epoch, from 1: losses, metrics, lr, seconds, samples/s, share of waiting, batch, MiB."""
        frame = self.history.frame("epoch")
        frame.index = (frame.pop("epoch").astype(int) + 1) if len(frame) else frame.index
        names = [str(name) for name in frame]
        scores = [name for name in names if name.startswith(("train_", "val_"))]
        return frame.loc[:, [*scores, *(n for n in SUMMARY if n in names), *(n for n in names if "memory" in n)]]

    def to_dict(self) -> dict[str, Any]:
        """Return what is known of it, for JSON: state, plan, epochs, best, final evaluation, receipt and verdict."""
        receipt, verdict = self.receipt, self.verdict
        about = {"run": str(self.folder), "task": self.card.task, "state": self.state, "plan": self.plan.to_dict()}
        scores = {"epochs": self.summary().reset_index().to_dict("records"), "best": {**self.best}, "final": self.final}
        measured = {"receipt": receipt and receipt.to_dict(), "verdict": verdict and verdict.to_dict()}
        return {**about, **scores, **measured}

    def __repr__(self) -> str:
        done = len(self.history.of("epoch"))
        best = f", best {self.reached}" if self.reached else ""
        return f"Run {self.folder}: {done} of {plural(max(done, self.plan.epochs), 'epoch')}{best}"

    def model(self, device: torch.device | str | None = None) -> nn.Module:
        """Return the network with the weights that were best on the validation split, in eval mode, on a GPU if any."""
        model = train.build(self.task, self.card, self.plan)
        model.load_state_dict(checkpoint.weights(self.folder))
        return model.to(device or train.device.pick()).eval()

    def readable(self, pack: Pack) -> Pack:
        """Return the part of a pack that this run's network can read: the pack itself, if it can read all."""
        return train.readable(self.task, pack, self.plan)

    def pack(self, source: str | Path, **options: Any) -> Pack:
        """Pack a source that this run has not seen, with its classes and preprocessing:
        `nb.evaluate(run, run.pack("new", test=1.0))`. options: of the task's `pack`."""
        return self.task.pack(source, **{**self.task.pack_options(self.card), **options})

    def trained_on(self) -> Pack:
        """Return the pack that this run was trained on. Raises PackError if it is gone."""
        place = checkpoint.read_index(self.folder).get("pack", "")
        with suppress(PackError):
            if (pack := Pack.open(place)).card.digest == self.card.digest:
                return pack
        gone = f"the pack that it was trained on is no longer at {place or 'a known place'}"
        raise PackError(f"{self.folder}: {gone}; name one with pack=, such as run.pack(source)")

    def predict(self, files: Any, batch_size: int = 64, all: bool = False) -> Any:
        """Return the answers to raw files as a list in their order, with the preprocessing of the run's training.

        files: a file, a list of files, or a folder, for which it is a dict: name → answer of every file in it and below
        that the task reads, sorted; a message names the others. Of a run on a pack of `nb.pack` also items as its
        Dataset returns them, with or without targets: one, a list, a Dataset, an array (B, …), rows of a DataFrame.
        all: return the probability of every class instead, a DataFrame with a row a sample and a column a class. Raises
        PackError naming a file that cannot be read, and TrainError for `all` where the answers are not classes.
        """
        folder = Path(files) if isinstance(files, str | Path) and Path(files).is_dir() else None
        if folder:
            samples = self.read_folder(folder)
        else:
            paths, own = [files] if isinstance(files, str | Path) else files, self.task.card is not None
            items = items_of(files, self.card) if own else [Path(path) for path in paths]
            samples = ((items[i], self.read(items[i])) for i in range(len(items)))
        results = list(self.answers(samples, batch_size))
        if not all:
            return {name: answer for name, answer, _ in results} if folder else [answer for _, answer, _ in results]
        if any(shares is None for *_, shares in results):
            raise TrainError("predict(…, all=True) needs answers that are classes, got others; leave all out")
        import pandas as pd

        names = pd.Index([name for name, *_ in results], name="file") if folder else None
        return pd.DataFrame([shares for *_, shares in results], names, self.card.classes)

    def predict_pack(self, pack: Pack, ids: Sequence[int] | np.ndarray, batch_size: int = 64) -> list[Any]:
        """Return the answers to samples of a pack."""
        pack = self.readable(pack)
        if lacking := [int(i) for i in ids if pack.wanted is not None and not pack.wanted[i]]:
            rule = f"sample {lacking[0]} has nothing that this run's network reads"
            raise PackError(f"{rule}; take ids of run.readable(pack)")
        return [answer for _, answer, _ in self.answers(((int(i), pack.sample(int(i))) for i in ids), batch_size)]

    def report(self, pack: Pack, split: str = "test") -> Report:
        """Return where the best model is right and wrong on a split of a pack: `.table`, `.confusion`, `.worst` samples
        and their `.pictures`; it shows by itself. Raises PackError as `nb.evaluate` does."""
        require_like(self, pack)
        return make_report(self, self.readable(pack), split)

    def answers(self, samples: Iterable[tuple[Any, Sample]], size: int = 64) -> Iterator[tuple[Any, Any, Any]]:
        """Yield (key, answer, the probability of each class) for (key, sample); None for answers that are not classes.
        size: samples a batch."""
        model, samples = self.model(), iter(samples)
        device = next(model.parameters()).device
        while chunk := list(islice(samples, size)):
            raw = collate([sample for _, sample in chunk], self.card.columns)
            raw = {name: tensor.to(device) for name, tensor in raw.items()}
            outputs = evaluation.forward(self.task, model, raw, self.plan, device)[1]
            shares, keys = probabilities(outputs, self.card), [key for key, _ in chunk]
            rows = [None] * len(keys) if shares is None else shares.tolist()
            yield from zip(keys, self.task.decode(outputs, self.card), rows, strict=True)

    def read(self, item: Any) -> Sample:
        """Return the sample of a file, or of an item in its place. Raises PackError."""
        where = item if isinstance(item, str | Path) else f"an item ({type(item).__name__})"
        try:
            return self.task.read(item, self.card.options)
        except OSError as error:
            raise PackError(f"{where}: {error.strerror or error}; name a readable file") from None
        except PackError as error:
            if len(error.args) != 3:
                raise
            value, rule, fix = error.args
            raise PackError(f"{where}: {rule}, got {value}; {fix}") from None

    def read_folder(self, folder: Path) -> Iterator[tuple[str, Sample]]:
        """Yield (name, sample) of each file below a folder that the task reads; hidden files are passed over."""
        names = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
        names = [name for name in names if not any(part.startswith(".") for part in name.parts)]
        left_out: list[str] = []
        for name in names:
            try:
                yield name.as_posix(), self.read(folder / name)
            except PackError as error:
                left_out.append(str(error))
        if len(left_out) == len(names):
            raise PackError(f"{folder} has no file that can be read; {left_out[0] if left_out else 'it is empty'}")
        if left_out:
            say(f"{plural(len(left_out), 'file')} of {len(names):,} left out, the first: {left_out[0]}")

    def export(self, path: str | Path, pack: Pack | None = None) -> Path:
        """Write the best weights as safetensors with a JSON card of all that is needed to use them; to a path that ends
        in `.onnx` the network itself, if its answers are torch's on samples of `pack` (None: that of its training).

        Raises ExportError if they differ or it cannot be exported, MissingExtra without nbtools[onnx]; nothing is
        written then.
        """
        if (path := Path(path)).suffix != ".onnx":
            return write_weights(self, path)
        return write_onnx(self, path, pack or self.trained_on())


def validate(task: TaskLike, source: str | Path, **options: Any) -> Any:
    """Check a source before it is packed: a report of every rule that a file breaks, with the value and what to do;
    `.ok`: no errors. options: of the task's `pack`. Raises NbtoolsError for a task that checks while it packs."""
    act = train.as_task(task).validate
    known = inspect.signature(act).parameters
    with disk.explained(f"checking {source}", Path(source)):  # splits and place break no rule
        return act(source, **{n: v for n, v in options.items() if n in known or n not in ("val", "test", "into")})


def stored(path: Path, fix: str = "copy the whole run folder again") -> dict[str, Any]:
    """Return a JSON file of a run. Raises CheckpointError with what to do (fix) if it is missing or damaged."""
    if not path.exists():
        raise CheckpointError(f"{path} is missing; {fix}")
    try:
        return disk.from_json(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is damaged, {error}; {fix}") from None


def what_next(run: Run, over: bool) -> str:
    """Return where the model is, and what to do with it. over: the run has no more epochs to train."""
    done, so_far = ("done: ", "") if over else ("", " so far")
    name = checkpoint.read_index(run.folder).get("best")
    if name is None:
        return f"{done}the newest weights are in {run.folder}; no evaluation chose the best{so_far}"
    uses = 'run.report(pack), run.predict(files), run.export("model.onnx")'
    return f"{done}the best model{so_far} is {run.folder / name}.safetensors ({run.reached}); next: {uses}"


def busy(folder: Path) -> bool:
    """Return whether a process on this machine is training in a run folder now."""
    return lock(folder).held()


def lock(folder: Path) -> disk.Lock:
    """Return the lock of whoever trains in a run folder, who notes in it what it does: evaluating, measuring, …"""
    key = hashlib.blake2b(str(folder.resolve()).encode(errors="surrogateescape"), digest_size=8).hexdigest()
    return disk.Lock(cache() / "locks" / f"run-{key}.lock", wait=False)
