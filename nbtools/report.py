"""How good a run is on a split: its metrics, and where it is right and wrong, by class, character, pixel or value.

Answers are those of `Task.decode`; the right ones `Task.text_of`, else the column `y` of an `nb.pack`, or `label`.
"""

from __future__ import annotations

import base64
import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from nbtools.data import TARGET, Card, Pack
from nbtools.errors import PackError, TrainError
from nbtools.show import WRITTEN, html, note, number, plural, written
from nbtools.train import (
    DATASET,
    Answer,
    Labels,
    TaskLike,
    TrainState,
    evaluation,
    readable,
    refuse_fixed,
    spoken,
)

if TYPE_CHECKING:
    import pandas as pd

    from nbtools.figures import Sheet
    from nbtools.run import Run

CONFUSED, SHOWN = 20, 12  # classes of the figure; pictures of the worst samples
LOW = ("probability", "right", "labels right", "IoU")  # what is worse the lower it is


class Scores(dict[str, Any]):
    """Metric → value; a notebook shows it as a table. about: of what it is."""

    def __init__(self, values: Mapping[str, Any], about: str):
        super().__init__(values)
        self.about = about

    def _repr_html_(self) -> str:
        rows = [[n, written(n if n in WRITTEN else f"val_{n}", value)] for n, value in self.items()]
        return html(["", "value"], rows, self.about)


def evaluate(run: Any, pack: Pack, split: str = "test", **knobs: Any) -> Scores:
    """Evaluate a run's best model (or a TrainState's current one) on a split of a pack: metric → value.

    knobs: settings of the plan that differ from training: `eval_scales=(0.5, 1.0)`. Raises PackError for a pack with
    other classes or preprocessing, PlanError for an unknown setting, TrainError for one on which the model depends.
    """
    require_like(run, pack)
    plan = run.plan.replace(**knobs)
    refuse_fixed(plan.changes_from(run.plan), plan, resumed=True)
    model = run.evaluated if isinstance(run, TrainState) else run.model()
    values = evaluation.evaluate(run.task, model, pack, plan, split)
    counted = plural(readable(run.task, pack, plan).splits[split], "sample")
    return Scores(values, f"{counted} of the {split} split")


def require_like(run: Any, pack: Pack) -> None:
    """Raise PackError for a pack with other classes or preprocessing than the run's: its results would be wrong."""
    ours, theirs = of_use(run.card), of_use(readable(run.task, pack, run.plan).card)
    for name in (name for name in ours if ours[name] != theirs[name]):
        short = " and ".join(textwrap.shorten(str(each[name]), 120, placeholder=" …") for each in (theirs, ours))
        raise PackError(
            f"{pack.folder}: the pack's {name} are not the ones that the run was trained with ({short}); pack the data "
            "again with run.pack(source)",
            entry="Predictions differ between training and inference",
        )


def of_use(card: Card) -> dict[str, Any]:
    """Return what of a data set a run's network depends on: its task, classes, options and columns. Classes that were
    asked for are an option of some tasks; which there are is what counts."""
    ignored = {"classes", "category_of"}
    if card.task == DATASET:
        ignored |= {"mean", "std", "random", "roles"}  # of one Dataset, and its training split
    options = {name: value for name, value in card.options.items() if name not in ignored}
    return {"task": card.task, "classes": card.classes, "options": options, "columns": card.columns}


@dataclass(frozen=True, eq=False)
class Report:
    """Where a run is right and wrong: shows as a sentence, a table, figures, and the worst samples.

    table: of classes precision, recall, F1 and support, with their mean and the one weighted by support; of
    segmentation also IoU, support in pixels; of texts which character was read as which, how often ("": a missing or
    an extra one); of values MAE, RMSE and R². counts: truth (rows) by answer; None of values. worst: every sample, the
    worst first: by the probability of its class, the CER of its text, its mean IoU or its error.
    """

    about: str
    table: pd.DataFrame
    counts: pd.DataFrame | None
    worst: pd.DataFrame
    run: Run
    pack: Pack

    @cached_property
    def confusion(self) -> Sheet | None:
        """A figure of the at most 20 most confused classes: what each was taken for. None of values."""
        from nbtools.figures import confusion_figure

        if self.counts is None:
            return None
        wrong = self.counts.to_numpy() * ~np.eye(len(self.counts), dtype=bool)
        places = np.sort((-wrong.sum(0) - wrong.sum(1)).argsort(kind="stable")[:CONFUSED])
        return confusion_figure(self.counts.iloc[places, places].rename(index={"": "(none)"}, columns={"": "(none)"}))

    @cached_property
    def pictures(self) -> Sheet | None:
        """A figure of the worst samples with truth and answer, where the task has a `preview`; else None."""
        from nbtools.figures import GREY, gallery, judged

        if self.run.task.preview is None:
            return None
        ids = list(map(int, self.worst.index[:SHOWN]))
        pictures: list[Any] = []
        for i, answer in zip(ids, self.run.predict_pack(self.pack, ids), strict=True):
            image, truth, said, *_ = self.run.task.preview(self.pack, i, answer)
            pictures.append((image, *(judged(truth, said) if truth else (said, GREY))))
        return gallery(pictures)

    def __repr__(self) -> str:
        return f"{self.about}\n\n{self.table.to_string()}\n\nThe worst:\n{self.worst.head(SHOWN).to_string()}"

    def _repr_html_(self) -> str:
        images = (base64.b64encode(sheet._repr_png_()).decode() for sheet in (self.confusion, self.pictures) if sheet)
        drawn = "".join(f'<img src="data:image/png;base64,{image}" style="max-width:100%">' for image in images)
        return note(self.about) + self.table.to_html() + drawn + self.worst.head(SHOWN).to_html()


def make_report(run: Run, pack: Pack, split: str) -> Report:
    """Return the report of a run on a split of a pack that it can read. Raises PackError for an empty split, TrainError
    where answers cannot be compared."""
    import pandas as pd

    if not (ids := list(map(int, pack.ids(split)))):
        raise PackError(f"{pack.folder}: the {split} split is empty; name another one with split=")
    _, answers, shares = zip(*run.answers((i, pack.sample(i)) for i in ids), strict=True)
    answers = [tuple(a.name for a in each) if isinstance(each, Labels) else each for each in answers]
    answers = [answer.name if isinstance(answer, Answer) else answer for answer in answers]
    truths = [right_answer(run.task, pack, i) for i in ids]
    scores, table, counts, name, quality = judge(run.task, pack, truths, answers)
    if name == "right" and shares[0]:
        name, quality = "probability", [share[pack.classes.index(t)] for share, t in zip(shares, truths, strict=True)]
    worst = pd.DataFrame({"file": [pack.names[i] for i in ids], name: quality}, pd.Index(ids, name="id"))
    worst = worst if np.ndim(answers[0]) > 1 else worst.assign(truth=truths, answer=answers)
    about = f"{plural(len(ids), 'sample')} of the {split} split: {scores}"
    return Report(about, table, counts, worst.sort_values(name, ascending=name in LOW, kind="stable"), run, pack)


def right_answer(task: TaskLike, pack: Pack, i: int) -> Any:
    """Return what `decode` should have answered for a sample."""
    if task.text_of is not None:
        return task.text_of(pack, i)
    value = pack.sample(i).get(TARGET if TARGET in pack.columns else "label")
    if value is not None and pack.options.get("kind") == "labels":
        return tuple(pack.classes[k] for k in np.flatnonzero(value))
    return pack.classes[int(value)] if value is not None and pack.options.get("kind") == "classes" else value


def judge(task: TaskLike, pack: Pack, truths: list[Any], answers: list[Any]) -> Any:
    """Return (scores, table, counts, name of a sample's quality, its values) of answers that are classes, texts, class
    maps or values. Raises TrainError for others."""
    truth, answer = truths[0], answers[0]
    if isinstance(truth, tuple) and isinstance(answer, tuple):
        return of_labels(truths, answers, pack.classes)
    if isinstance(truth, str) and isinstance(answer, str):
        known = {*truths, *answers} <= {*pack.classes}
        return of_classes(truths, answers, pack.classes) if known else of_texts(truths, answers)
    if not isinstance(answer, str | Tensor) and np.shape(answer) == np.shape(truth):
        kinds = np.asarray(truth).dtype.kind, np.asarray(answer).dtype.kind
        if kinds[0] in "iu" and kinds[1] in "iu":
            return of_maps(truths, answers, pack.classes or [*map(str, range(1 + int(max(map(np.max, answers)))))])
        if kinds[0] in "iuf" and kinds[1] == "f":
            form = pack.options.get("forms", {}).get(TARGET, {})
            scaled = np.asarray(truth).dtype == np.uint8 and (form["layout"] or form["scaled"])  # images
            return of_values(np.array(truths, np.float64) / (255 if scaled else 1), np.array(answers, np.float64))
    missing = f"{spoken(task)} has no text_of(pack, i), the right answer of a sample as text"
    raise TrainError(f"{missing}, with which a report compares what decode answers; define it")


def of_classes(truths: Sequence[str], answers: Sequence[str], classes: Sequence[str]) -> Any:
    counts, right = counted(truths, answers, classes), np.array(truths) == np.array(answers)
    table = by_class(counts).drop(columns="IoU")
    return f"accuracy {number(right.mean())}, mean F1 {number(table.F1['macro mean'])}", table, counts, "right", right


def of_labels(truths: Sequence[tuple[str, ...]], answers: Sequence[tuple[str, ...]], classes: Sequence[str]) -> Any:
    """Compare sets of labels, each label by itself."""
    import pandas as pd

    true, said = (np.array([[name in each for name in classes] for each in sets]) for sets in (truths, answers))
    right, support, count = (true & said).sum(0), true.sum(0), said.sum(0)
    scores = {"precision": right / count.clip(1), "recall": right / support.clip(1)}
    table = pd.DataFrame({**scores, "F1": 2 * right / (support + count).clip(1)}, pd.Index(classes))[
        support + count > 0
    ]
    table.loc["macro mean"] = table.mean()
    table["support"] = [*support[support + count > 0], support.sum()]
    return f"mean F1 {number(table.F1['macro mean'])}", table, None, "labels right", (true == said).mean(1)


def of_maps(truths: Sequence[np.ndarray], answers: Sequence[np.ndarray], classes: Sequence[str]) -> Any:
    """Compare class maps (H, W) pixel by pixel; a label that is no class, such as 255, is ignored."""
    numbers, names, quality = range(len(classes)), dict(enumerate(classes)), []
    total = counted([], [], numbers)
    for truth, answer in zip(truths, answers, strict=True):
        total += (counts := counted(np.ravel(truth), np.ravel(answer), numbers))
        quality.append(by_class(counts).IoU["macro mean"])
    total = total.rename(index=names, columns=names)
    table, right = by_class(total), f"{number(np.trace(total) / total.to_numpy().sum())} of the pixels right"
    return f"mean IoU {number(table.IoU['macro mean'])}, {right}", table, total, "IoU", quality


def of_texts(truths: Sequence[str], answers: Sequence[str]) -> Any:
    import pandas as pd

    pairs = [align(truth, answer) for truth, answer in zip(truths, answers, strict=True)]
    wrong = np.array([sum(one != other for one, other in each) for each in pairs])
    lengths = np.array([max(len(truth), 1) for truth in truths])
    ones, others = zip(*chain.from_iterable(pairs), strict=True)
    often = Counter(pair for pair in zip(ones, others, strict=True) if pair[0] != pair[1]).most_common()
    table = pd.DataFrame([(*pair, n) for pair, n in often], columns=["truth", "answer", "count"])
    scores = f"CER {number(wrong.sum() / lengths.sum())}, {number((wrong == 0).mean())} of them without an error"
    return scores, table, counted(ones, others, sorted({*ones, *others})), "CER", wrong / lengths


def of_values(truths: np.ndarray, answers: np.ndarray) -> Any:
    """Compare numbers, or arrays of one shape, in the targets' unit; above 20 numbers a sample all together."""
    import pandas as pd

    errors = np.sqrt(np.square(answers - truths).reshape(len(truths), -1).mean(1))
    columns = truths[0].size if truths[0].size <= CONFUSED else 1
    y, apart = truths.reshape(-1, columns), np.abs(answers - truths).reshape(-1, columns)
    mean_square, variance = np.square(apart).mean(0), y.var(0)
    table = pd.DataFrame({"MAE": apart.mean(0), "RMSE": np.sqrt(mean_square)})
    table["R²"] = 1 - mean_square / np.where(variance > 0, variance, np.nan)
    means = ", ".join(f"{name} {number(value)}" for name, value in table.mean().items())
    return means, table, None, "error", errors


def counted(truths: Any, answers: Any, names: Sequence[Any]) -> pd.DataFrame:
    """Return how often each name was answered (columns) for each (rows); a truth that is none of them is left out."""
    import pandas as pd

    index = pd.Index(names)
    rows, columns = index.get_indexer(truths), index.get_indexer(answers)
    counts = np.bincount((rows * len(index) + columns)[rows >= 0], minlength=len(index) ** 2)
    return pd.DataFrame(counts.reshape(len(index), -1), index=index.rename("truth"), columns=index.rename("answer"))


def by_class(counts: pd.DataFrame) -> pd.DataFrame:
    """Return IoU and, as scikit-learn's `classification_report` does, precision, recall, F1 and support of the classes
    that are true or answered somewhere; 0 where there is nothing to divide by."""
    import pandas as pd

    right, true, said = pd.Series(np.diag(counts), counts.index), counts.sum(axis=1), counts.sum()
    scores = {"precision": right / said, "recall": right / true, "F1": 2 * right / (true + said)}
    frame = pd.DataFrame({"IoU": right / (true + said - right), **scores})[true + said > 0].fillna(0)
    true = true[frame.index]
    means = pd.DataFrame([frame.mean(), frame.mul(true, axis=0).sum() / true.sum()], ["macro mean", "weighted mean"])
    return pd.concat([frame, means]).assign(support=[*true, true.sum(), true.sum()])


def align(truth: str, answer: str) -> list[tuple[str, str]]:
    """Return (character, what was read for it) along a shortest edit; "" for a missing or an extra one."""
    if truth == answer:
        return list(zip(truth, answer, strict=True))
    row: list[Any] = []  # of cells: the cost of an edit up to there, its last pair, the cell before it
    for i, one in enumerate(("", *truth)):
        above, row = row, []
        for j, other in enumerate(("", *answer)):
            ways = [(above[j - 1][0] + (one != other), (one, other), above[j - 1])] if i and j else []
            ways += [(row[j - 1][0] + 1, ("", other), row[j - 1])] if j else []
            ways += [(above[j][0] + 1, (one, ""), above[j])] if i else []
            row.append(min(ways, key=itemgetter(0), default=(0, None, None)))
    pairs, cell = [], row[-1]
    while cell[1]:
        pairs, cell = [cell[1], *pairs], cell[2]
    return pairs


def probabilities(outputs: Any, card: Card) -> Tensor | None:
    """Return the probabilities (B, K) of the classes where the first output holds one logit for each; else None."""
    logits = outputs[0] if isinstance(outputs, tuple) else getattr(outputs, "logits", outputs)
    logits = logits.get("out") if isinstance(logits, dict) else logits
    if not isinstance(logits, Tensor) or not card.classes or logits.shape[1:] != (len(card.classes),):
        return None
    return logits.float().sigmoid() if card.options.get("kind") == "labels" else logits.float().softmax(1)
