"""Run: what training leaves behind, opened from its folder: weights, history, receipt, and how to use them."""

from __future__ import annotations

import difflib
import hashlib
import inspect
import json
import math
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from safetensors.torch import save as save_tensors
from torch import nn

from nbtools import disk
from nbtools.data import EARLIER, LATEST, Card, Pack, Sample, cache, collate, is_kept, opened_copy, patient
from nbtools.errors import CheckpointError, DiskError, PackError, StageError
from nbtools.export import to_onnx
from nbtools.measure import Receipt, StepProfile, Verdict
from nbtools.show import WRITTEN, Table, number, plural, spelled, written
from nbtools.train import (
    DATASET,
    History,
    Plan,
    TaskLike,
    array_of,
    as_task,
    best_metric,
    bound,
    build,
    checkpoint,
    evaluation,
    import_task,
    items_of,
    kept_until,
    meanings_of,
    order,
    readable,
    refuse_fixed,
)
from nbtools.train import device as devices

if TYPE_CHECKING:
    import pandas as pd

PLAN, CARD, HISTORY = "plan.json", "card.json", "history.csv"
RECEIPT, VERDICT, EVALUATION = "receipt.json", "verdict.json", "evaluation.json"
NOTES = "notes.json"
TABLE = ("train_loss", "val_loss", "lr", "epoch_time", "samples_per_s", "data_wait", "batch_size")


class Run:
    """A finished or interrupted run. `model()` is the best one, as chosen on the validation split."""

    def __init__(self, folder: Path, task: TaskLike, card: Card, plan: Plan):
        self.folder, self.task, self.card, self.plan = folder, bound(task, card), card, plan
        self.events: list[str] = []

    @classmethod
    def open(cls, folder: str | Path, task: TaskLike | None = None) -> Self:
        """Open a run folder, or the folder where one is kept: its small files are copied at once, weights
        when something needs them. task: only for one that cannot be imported by name. Raises CheckpointError,
        StageError for a copy that cannot be staged."""
        folder = given = Path(folder)
        with disk.explained("opening a run", given):
            if patient(lambda: is_kept(given), given):
                folder = opened_copy(given)
        index = patient(lambda: checkpoint.read_index(folder), folder)
        if not index:
            raise CheckpointError(no_run(folder))
        if task is None and "task" not in index:
            raise CheckpointError(
                f"{folder / checkpoint.INDEX} names no task; give it, as in nb.Run.open(folder, task)"
            )
        known = as_task(task) if task is not None else import_task(index["task"], folder)
        with disk.explained("opening a run", folder):
            card, plan = (patient(partial(stored, folder / name), folder) for name in (CARD, PLAN))
        return cls(folder, known, Card.from_dict(card), type(known.PLAN).from_dict(plan))

    @cached_property
    def history(self) -> History:
        return History(self.folder / HISTORY)

    def stored(self, name: str) -> dict[str, Any]:
        """A JSON file of the folder; {} if there is none."""
        path = self.folder / name
        return stored(path, "delete it") if path.exists() else {}

    @property
    def receipt(self) -> Receipt | None:
        """How much faster than the task's baseline, on the machine that trained; None if it was not measured."""
        found = self.stored(RECEIPT)
        return Receipt.from_dict(found) if found else None

    @property
    def final(self) -> dict[str, Any]:
        """The evaluation of the best weights on the whole validation split with everything that the plan asks for,
        where evaluations during training did less: values (metric → value), seconds, epoch and plan. {} if they did not
        do less, or if other weights have become the best since."""
        found = self.stored(EVALUATION)
        return {**found, "epoch": self.best["epoch"]} if found and found["epoch"] == self.best_row.get("epoch") else {}

    @property
    def profile(self) -> StepProfile | None:
        """What a step of this run consists of; None if it was not measured."""
        found = self.stored(VERDICT)
        return StepProfile.from_dict(found["profile"]) if found else None

    @property
    def verdict(self) -> Verdict | None:
        """What this run is bound by, and the one change worth making; None if it was not measured."""
        found = self.stored(VERDICT)
        return Verdict.from_dict(found["verdict"]) if found else None

    @property
    def state(self) -> str:
        """training: a process on this machine trains it; done: its last epoch ended, or early_stop ended it; stopped:
        by the user; diverged; failed: in another error; interrupted: its process was lost in between. All but the first
        resume from the last checkpoint."""
        index, rows = checkpoint.read_index(self.folder), self.history.rows
        if busy(self.folder):
            return "training"
        if index.get("diverged"):
            return "diverged"
        if ended := index.get("ended"):  # in an error
            return ended
        if len(self.history.of("epoch")) >= self.plan.epochs or checkpoint.stopped(self.folder):
            return "done"
        return "stopped" if any(row.get("asked") == "stop" for row in rows[-1:]) else "interrupted"

    @property
    def kept(self) -> str:
        """What is kept of it in the folder that keep= named: `step 1,200`, or `nothing yet`; "" if none was named."""
        return kept_until(self.folder)

    @property
    def notes(self) -> str:
        """What the user wrote about it: `run.notes = "with the new labels"`, kept in its folder."""
        return self.stored(NOTES).get("notes", "")

    @notes.setter
    def notes(self, text: str) -> None:
        self.note(notes=str(text))

    @property
    def tags(self) -> tuple[str, ...]:
        """Words to find it by: `run.tags = ["baseline"]`, kept in its folder."""
        return tuple(self.stored(NOTES).get("tags", ()))

    @tags.setter
    def tags(self, words: str | Iterable[str]) -> None:
        self.note(tags=[words] if isinstance(words, str) else [str(word) for word in words])

    def note(self, **entries: Any) -> None:
        with disk.explained("writing notes", self.folder):
            disk.write_atomic(self.folder / NOTES, json.dumps({**self.stored(NOTES), **entries}, ensure_ascii=False))

    @property
    def best(self) -> Scores:
        """The best epoch, counted from 1, and its losses, metrics (val_…), lr, seconds and MiB of memory: a dict that a
        notebook shows as a table with units; {} before the first evaluation."""
        row = {name: value for name, value in self.best_row.items() if name != "kind"}
        values = {**row, "epoch": row["epoch"] + 1} if row else {}
        return Scores(values, "the best epoch" if row else "no evaluation yet", meanings_of(self.task))

    @property
    def best_row(self) -> Mapping[str, Any]:
        """Its row as the history has it, where epochs count from 0: of the weights that `model` returns, which the
        run's metric chose; where none are kept, the best of those that the last checkpoint has."""
        metric, sign = best_metric(self.task)
        rows = [row for row in self.history.of("epoch") if math.isfinite(row.get(f"val_{metric}", math.nan))]
        index = checkpoint.read_index(self.folder)
        if best := index.get("best"):
            step = checkpoint.place(best.partition(".")[0])[1]
            if chosen := [row for row in rows if row["step"] == step]:
                return chosen[-1]
        if last := index.get("last"):
            rows = [row for row in rows if row["step"] <= checkpoint.place(last)[1]]
        return max(
            rows, key=lambda row: (*order(row[f"val_{metric}"], row.get("val_loss"), sign), row["epoch"]), default={}
        )

    def to_dict(self) -> dict[str, Any]:
        """What is known of it, for JSON: state, plan, epochs, best, final evaluation, receipt and verdict."""
        epochs = self.summary().reset_index().to_dict("records")
        about = {"run": str(self.folder), "task": self.card.task, "state": self.state, "plan": self.plan.to_dict()}
        found = {"epochs": epochs, "best": dict(self.best), "final": self.final, "stopped": self.state == "stopped"}
        measured = {"receipt": self.receipt, "verdict": self.verdict}
        return {**about, **found, **{name: report and report.to_dict() for name, report in measured.items()}}

    def summary(self) -> pd.DataFrame:
        """One row per epoch, from 1: losses, metrics, lr, seconds, samples/s, share of waiting, batch, MiB memory."""
        import pandas as pd

        frame = self.history.frame("epoch")
        metrics = [c for c in frame.columns if c.startswith("val_") and c != "val_loss"]
        memory = [c for c in frame.columns if "memory" in c]
        order = [*TABLE[:2], *metrics, *TABLE[2:], *memory]
        frame.index = pd.Index([row["epoch"] + 1 for row in self.history.of("epoch")], name="epoch", dtype=int)
        return frame.loc[:, [name for name in order if name in frame.columns]]

    def model(self, device: torch.device | str | None = None) -> nn.Module:
        """The network with the best weights, in eval mode, on the GPU where there is one."""
        model = build(self.task, self.card, self.plan)
        model.load_state_dict(checkpoint.weights(self.folder))
        return model.to(device or devices.pick()).eval()

    def readable(self, pack: Pack) -> Pack:
        """The part of a pack that this run's network can read: the pack itself, if it can read all."""
        return readable(self.task, pack, self.plan)

    def pack(self, source: str | Path, **options: Any) -> Pack:
        """The pack of a source that this run has not seen, with its classes and preprocessing as far as the task's
        `pack_options` gives them: `nb.evaluate(run, run.pack("new", test=1.0))`. options: of the task's `pack`."""
        return self.task.pack(source, **{**self.task.pack_options(self.card), **options})

    def trained_on(self) -> Pack:
        """The pack that this run was trained on, where it still is. Raises PackError if it is gone."""
        place = checkpoint.read_index(self.folder).get("pack", "")
        with suppress(PackError):
            if (found := Pack.open(place)).card.digest == self.card.digest:
                return found
        gone = f"the pack that it was trained on is no longer at {place or 'a known place'}"
        raise PackError(f"{self.folder}: {gone}; name one with pack=, such as run.pack(source)")

    def predict(self, files: Any, batch_size: int = 64) -> list[Any]:
        """The run's predictions for raw files, in their order, with the preprocessing of its training; of a run on a
        pack of `nb.pack` also for items as its Dataset returns them, with or without their targets: one, a list, a
        Dataset, an array (B, …), or the rows of a DataFrame.

        Raises PackError naming the first file that cannot be read.
        """
        if self.task.card is not None:
            items = items_of(files, self.card)
            return self.answers(lambda i: self.read(items[i]), range(len(items)), batch_size)
        paths = [Path(files)] if isinstance(files, (str, Path)) else [Path(f) for f in files]
        return self.answers(self.read, paths, batch_size)

    def predict_pack(self, pack: Pack, ids: Sequence[int] | np.ndarray, batch_size: int = 64) -> list[Any]:
        """The run's predictions for samples of a pack."""
        return self.answers(pack.sample, ids, batch_size)

    def answers(self, read: Callable[[Any], Sample], samples: Sequence[Any] | np.ndarray, size: int) -> list[Any]:
        model, inputs = self.model(), self.task.inputs(self.plan, self.card.columns)

        def whole(which: Any) -> Sample:
            sample = read(which)
            if empty := [name for name in inputs if not len(sample[name])]:
                fix = "take another file" if isinstance(which, Path) else "take ids of run.readable(pack)"
                array = array_of(self.task, self.card, empty[0])
                raise PackError(f"sample {which} has no {array}, which this run's network reads; {fix}")
            return sample

        chunks = (samples[i : i + size] for i in range(0, len(samples), size))
        batches = (collate([whole(sample) for sample in chunk], self.card.columns) for chunk in chunks)
        return [answer for raw in batches for answer in self.decoded(model, raw)]

    def decoded(self, model: nn.Module, raw: dict[str, torch.Tensor]) -> list[Any]:
        device = next(model.parameters()).device
        raw = {name: tensor.to(device) for name, tensor in raw.items()}
        return self.task.decode(evaluation.forward(self.task, model, raw, self.plan, device)[1], self.card)

    def read(self, path: Any) -> Sample:
        where: Any = path if isinstance(path, (str, Path)) else f"an item ({type(path).__name__})"
        try:
            given: Any = path
            return self.task.read(given, self.card.options)
        except OSError as error:
            raise PackError(f"{where}: {error.strerror or error}; name a readable file") from None
        except PackError as error:
            if len(error.args) != 3:
                raise
            value, rule, fix = error.args
            raise PackError(f"{where}: {rule}, got {value}; {fix}") from None

    def export(self, path: str | Path, pack: Pack | None = None) -> Path:
        """Write the best weights as safetensors, and next to them a JSON card with all that is needed to use them.

        A path that ends in `.onnx` gets the network itself, its preprocessing described in the file. Before it is
        written, its answers are compared with torch's on samples of `pack`, by default the one that the run was trained
        on. Raises ExportError if they differ or the network cannot be exported, MissingExtra if packages of
        nbtools[onnx] are missing; nothing is written then.
        """
        path = Path(path)
        if path.suffix == ".onnx":
            content, compared = to_onnx(self, pack or self.trained_on())
            with disk.explained("exporting", path):
                disk.write_atomic(path, content)
            print(f"{path}: {compared}")
            return path
        if path.suffix != ".safetensors":
            path = path.with_name(f"{path.name}.safetensors")  # with_suffix would cut model-v1.2
        card = {
            "task": checkpoint.read_index(self.folder)["task"],
            "card": self.card.to_dict(),
            "plan": self.plan.to_dict(),
            "validation": {name: value for name, value in self.best.items() if name.startswith("val_")},
        }
        with disk.explained("exporting", path):
            tensors = {k: v.contiguous() for k, v in checkpoint.weights(self.folder).items()}
            disk.write_atomic(path, save_tensors(tensors))
            disk.write_atomic(path.with_suffix(".json"), json.dumps(card, indent=1, ensure_ascii=False))
        return path

    def __repr__(self) -> str:
        done, steps = len(self.history.of("epoch")), self.history.of("step")
        epochs = plural(max(done, self.plan.epochs), "epoch")
        within = bool(steps) and steps[-1]["epoch"] >= done
        progress = f"in epoch {done + 1} of {max(done + 1, self.plan.epochs)}" if within else f"{done} of {epochs}"
        weights = checkpoint.read_index(self.folder).get("best")
        best = f", best {self.reached}{f' ({weights}.safetensors)' if weights else ''}" if self.reached else ""
        return f"Run {self.folder}: {progress}{best}"

    @property
    def reached(self) -> str:
        """The best value: `whole accuracy 0.953 in epoch 7`; "" before the first evaluation."""
        best, metric = self.best, best_metric(self.task)[0]
        return f"{spelled(metric)} {number(best[f'val_{metric}'])} in epoch {best['epoch']}" if best else ""

    @property
    def changed(self) -> float:
        """When it last went on, in seconds since 1970."""
        path = self.folder / HISTORY
        return (path if path.exists() else self.folder / checkpoint.INDEX).stat().st_mtime


def stored(path: Path, fix: str = "copy the whole run folder again") -> dict[str, Any]:
    """A JSON file of a run. Raises CheckpointError with what to do (fix) if it is missing or damaged."""
    try:
        found = json.loads(path.read_text()) if path.exists() else None
        why = "is missing" if found is None else "is not a JSON object"
    except (ValueError, RecursionError) as error:
        found, why = None, f"is damaged, not JSON ({error})"
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} {why}; {fix}")
    return found


def what_next(run: Run, over: bool) -> str:
    """Where the model is, and what to do with it. over: the run has no more epochs to train."""
    done, so_far = ("done: ", "") if over else ("", " so far")
    name = checkpoint.read_index(run.folder).get("best")
    if name is None:
        return f"{done}the newest weights are in {run.folder}; no evaluation chose the best{so_far}"
    path = run.folder / f"{name}.safetensors"
    what = f"is {path} ({run.reached})" if path.exists() else f"has {run.reached}"  # it is fetched when it is needed
    uses = 'run.predict(files), nb.evaluate(run, pack, split="test"), run.export("model.onnx")'
    return f"{done}the best model{so_far} {what}; next: {uses}"


def busy(folder: Path) -> bool:
    """Whether a process on this machine is training in a run folder now."""
    return lock(folder).held()


def doing(folder: Path) -> str | None:
    """What the process that trains in a run folder does now: evaluating, measuring, …; "" before it has begun. None if
    there is none on this machine."""
    own = lock(folder)
    return own.noted() if own.held() else None


def lock(folder: Path) -> disk.Lock:
    key = hashlib.blake2b(str(folder.resolve()).encode(errors="surrogateescape"), digest_size=8).hexdigest()
    return disk.Lock(cache() / "locks" / f"run-{key}.lock", wait=False)


def no_run(folder: Path) -> str:
    """Why a folder is no run, and the runs that may be meant: those in it, or next to it under a similar name."""
    inside, siblings = runs_in(folder), runs_in(folder.parent)
    near = difflib.get_close_matches(folder.name, siblings, n=3, cutoff=0.5)
    why = f"no {checkpoint.INDEX}, so this is not a run folder" if folder.is_dir() else "there is no such folder"
    if inside:
        return f"{folder}: {why}; the runs in it are {', '.join(inside)}"
    if near:
        return f"{folder}: {why}; did you mean {' or '.join(str(folder.with_name(name)) for name in near)}?"
    others = f"; the runs in {folder.parent} are {', '.join(siblings)}" if siblings else ""
    return f"{folder}: {why}; train with run={str(folder)!r}{others}"


def runs_in(folder: Path) -> list[str]:
    return sorted(place.name for place in places(folder, "*"))


def places(folder: Path, below: str) -> set[Path]:
    """The folders of runs, and those where runs are kept."""
    return {path.parent for name in (checkpoint.INDEX, LATEST, EARLIER) for path in folder.glob(f"{below}/{name}")}


def opened(folder: Path, task: TaskLike | None = None) -> tuple[dict[str, Run], dict[str, str]]:
    """The runs in a folder and its subfolders by name, newest first; and name → why it cannot be opened."""
    found: dict[str, Run] = {}
    left_out: dict[str, str] = {}
    with disk.explained("looking for runs", folder):
        within = sorted(patient(lambda: places(folder, "**"), folder))
    for place in within:
        name = place.relative_to(folder).as_posix()
        if ".part" not in name:
            try:
                found[name] = Run.open(place, task)
            except (CheckpointError, DiskError, StageError) as error:
                left_out[name] = str(error)
    with disk.explained("comparing runs", folder):
        left_out |= copies(found)
        whole = {name: run for name, run in found.items() if name not in left_out}
        return dict(sorted(whole.items(), key=lambda each: each[1].changed, reverse=True)), left_out


def copies(found: Mapping[str, Run]) -> dict[str, str]:
    """Those of the runs that another of them has gone as far as, or further: what `keep=` copies, and not a copy that
    was trained on its own since. Name → of which it is a copy."""
    named: dict[str, list[str]] = {}
    for name, run in found.items():
        named.setdefault(checkpoint.read_index(run.folder).get("id", name), []).append(name)
    copied: dict[str, str] = {}
    for names in (names for names in named.values() if len(names) > 1):
        rows = {name: list(map(repr, found[name].history.rows)) for name in names}  # a NaN equals its text
        staged = {name: found[name].folder.is_relative_to(cache()) for name in names}
        ordered = sorted(names, key=lambda name: (-len(rows[name]), staged[name], name.count("/"), name))
        for place, name in enumerate(ordered):
            if whole := next((other for other in ordered[:place] if rows[other][: len(rows[name])] == rows[name]), ""):
                copied[name] = f"a copy of {whole}"
    return copied


class Scores(Table, dict[str, Any]):
    """Metric, or another column of an epoch → value; shows as a table. about: of what; meanings: metric → what it
    says."""

    def __init__(self, values: Mapping[str, Any], about: str, meanings: Mapping[str, str]):
        super().__init__(values)
        self.about, self.meanings = about, meanings

    def caption(self) -> str:
        return self.about

    def table(self) -> tuple[list[str], list[list[Any]]]:
        rows = []
        for name, value in self.items():
            cell = written(name if name in WRITTEN else f"val_{name}", value)  # a metric
            rows.append([name, cell, self.meanings.get(name.removeprefix("val_"))])
        return ["", "value", "what it says"], rows

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        printer.text(Table.__str__(self))


def evaluate(run: Any, pack: Pack, split: str = "test", **knobs: Any) -> Scores:
    """Metric → value of a run's best model (or of a TrainState's current one) over a whole split of a pack: a dict,
    which a notebook shows as a table.

    knobs: settings of the plan that differ from training: `eval_scales=(0.5, 1.0)`.
    Raises PackError if the pack was made with other classes or preprocessing than the run's: its results would be
    silently wrong; PlanError for an unknown setting, TrainError for one on which the model depends.
    """
    for name in ("task", "classes", "options", "columns"):
        ours, theirs = (compared(run, card, name) for card in (run.card, pack.card))
        if ours != theirs:
            short = " and ".join(textwrap.shorten(str(card), 120, placeholder=" …") for card in (theirs, ours))
            raise PackError(
                f"{pack.folder}: the pack's {name} are not the ones that the run was trained with ({short}); pack the "
                "data again with run.pack(source)",
                entry="Predictions differ between training and inference",
            )
    plan = run.plan.replace(**knobs)
    refuse_fixed(plan.changes_from(run.plan), plan, resumed=True)
    model = run.model() if isinstance(run, Run) else run.evaluated
    found = evaluation.evaluate(run.task, model, pack, plan, split)
    counted = f"{plural(readable(run.task, pack, plan).splits[split], 'sample')} of the {split} split"
    return Scores(found, counted, meanings_of(run.task))


def compared(run: Any, card: Card, name: str) -> Any:
    """What a run and a pack to evaluate it on must have in common. Classes that were asked for are an option of some
    tasks; what counts is which there are. Which category a class has is for display. Columns that the network does not
    read may differ, and so may the options that concern these alone."""
    reads, keys = run.task.inputs(run.plan, card.columns), run.task.COLUMN_OPTIONS
    unread = keys.keys() - set(reads) if reads else set()
    own = (
        {"mean", "std", "random", "roles"} if card.task == DATASET else set()
    )  # of one Dataset, and its training split
    ignored = {
        "options": {"classes", "category_of"}.union(own, *(keys[column] for column in unread)),
        "columns": unread,
    }
    value = getattr(card, name)
    return {n: v for n, v in value.items() if n not in ignored[name]} if name in ignored else value


def validate(task: TaskLike, source: str | Path, **options: Any) -> Any:
    """The task's report on a source, before it is packed: every rule that a file breaks, with the value and what to do.
    Shows as a table; `.ok` is True if there are no errors. options: those of the task's `pack`, of which splits and
    place break no rule.

    Raises NbtoolsError for a task that checks while it packs, DiskError for a disk that does not respond.
    """
    act = as_task(task).validate
    known = inspect.signature(act).parameters
    with disk.explained(f"checking {source}", Path(source)):
        return act(source, **{n: v for n, v in options.items() if n in known or n not in ("val", "test", "into")})
