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
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from nbtools.data import TARGET, Card, Pack
from nbtools.errors import PackError, TrainError
from nbtools.show import WRITTEN, html, note, number, plural, written
from nbtools.train import DATASET, Answer, TaskLike, TrainState, evaluation, meanings_of, readable, refuse_fixed, spoken

if TYPE_CHECKING:
    import pandas as pd

    from nbtools.figures import Sheet
    from nbtools.run import Run

CONFUSED, SHOWN = 20, 12  # classes of the figure; pictures of the worst samples
LOW = ("probability", "right", "IoU")  # what is worse the lower it is


class Scores(dict[str, Any]):
    """Metric → value; a notebook shows it as a table that says what each means. about: of what it is."""

    def __init__(self, values: Mapping[str, Any], about: str, task: TaskLike):
        super().__init__(values)
        self.about, self.task = about, task

    def _repr_html_(self) -> str:
        cells = {n: written(n if n in WRITTEN else f"val_{n}", value) for n, value in self.items()}
        meanings = meanings_of(self.task)
        rows = [[name, cell, meanings.get(name.removeprefix("val_"))] for name, cell in cells.items()]
        return html(["", "value", "what it says"], rows, self.about)


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
    return Scores(values, f"{counted} of the {split} split", run.task)


def require_like(run: Any, pack: Pack) -> None:
    """Raise PackError for a pack with other classes or preprocessing than the run's: its results would be wrong."""
    ours, theirs = of_use(run, run.card), of_use(run, pack.card)
    for name in (name for name in ours if ours[name] != theirs[name]):
        short = " and ".join(textwrap.shorten(str(each[name]), 120, placeholder=" …") for each in (theirs, ours))
        raise PackError(
            f"{pack.folder}: the pack's {name} are not the ones that the run was trained with ({short}); pack the data "
            "again with run.pack(source)",
            entry="Predictions differ between training and inference",
        )


def of_use(run: Any, card: Card) -> dict[str, Any]:
    """Return what of a data set a run's network depends on: its task, classes, and the options and columns of what it
    reads. Classes that were asked for are an option of some tasks; which there are is what counts."""
    reads, keys = run.task.inputs(run.plan, card.columns), run.task.COLUMN_OPTIONS
    unread = keys.keys() - set(reads) if reads else set()
    ignored = {"classes", "category_of"}.union(*(keys[column] for column in unread))
    if card.task == DATASET:
        ignored |= {"mean", "std", "random", "roles"}  # of one Dataset, and its training split
    options = {name: value for name, value in card.options.items() if name not in ignored}
    columns = {name: column for name, column in card.columns.items() if name not in unread}
    return {"task": card.task, "classes": card.classes, "options": options, "columns": columns}


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
        answers = self.run.predict_pack(self.pack, ids)
        drawn = [self.run.task.preview(self.pack, i, answer)[:3] for i, answer in zip(ids, answers, strict=True)]
        looks: list[Any] = [(image, *(judged(truth, said) if truth else (said, GREY))) for image, truth, said in drawn]
        return gallery(looks)

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

    ids, answers, shares = list(map(int, pack.ids(split))), [], []
    if not ids:
        raise PackError(f"{pack.folder}: the {split} split is empty; name another one with split=")
    for _, some, chances in run.answers((i, pack.sample(i)) for i in ids):
        answers += [answer.name if isinstance(answer, Answer) else answer for answer in some]
        shares += [] if chances is None else chances.tolist()
    truths = [right_answer(run.task, pack, i) for i in ids]
    judge = judge_of(run.task, truths, answers, pack.classes)
    form = pack.options.get("forms", {}).get(TARGET, {})
    if judge is of_values and truths[0].dtype == np.uint8 and (form["layout"] or form["scaled"]):
        truths = [truth / 255 for truth in truths]  # as regression answers in images
    scores, table, counts, name, quality = judge(truths, answers, pack.classes, shares)
    worst = pd.DataFrame({"file": [pack.names[i] for i in ids], name: quality}, pd.Index(ids, name="id"))
    worst = worst if np.ndim(answers[0]) > 1 else worst.assign(truth=truths, answer=answers)
    about = f"{plural(len(ids), 'sample')} of the {split} split: {scores}"
    return Report(about, table, counts, worst.sort_values(name, ascending=name in LOW, kind="stable"), run, pack)


def right_answer(task: TaskLike, pack: Pack, i: int) -> Any:
    """Return what `decode` should have answered for a sample."""
    if task.text_of is not None:
        return task.text_of(pack, i)
    value = pack.sample(i).get(TARGET if TARGET in pack.columns else "label")
    return pack.classes[int(value)] if value is not None and pack.options.get("kind") == "classes" else value


def judge_of(task: TaskLike, truths: Sequence[Any], answers: Sequence[Any], classes: Sequence[str]) -> Any:
    """Return the function that compares answers of this kind with the right ones. Raises TrainError for others."""
    truth, answer = truths[0], answers[0]
    if isinstance(truth, str) and isinstance(answer, str):
        return of_classes if {*truths, *answers} <= {*classes} else of_texts
    if not isinstance(answer, str | Tensor) and np.shape(answer) == np.shape(truth):
        kinds = np.asarray(truth).dtype.kind, np.asarray(answer).dtype.kind
        if kinds[0] in "iuf" and kinds[1] == "f":
            return of_values
        if kinds[0] in "iu" and kinds[1] in "iu":
            return of_maps
    missing = f"{spoken(task)} has no text_of(pack, i), the right answer of a sample as text"
    raise TrainError(f"{missing}, with which a report compares what decode answers; define it")


def of_classes(truths: list[str], answers: list[str], classes: Sequence[str], shares: list[list[float]]) -> Any:
    counts, right = counted(truths, answers, classes), np.array(truths) == np.array(answers)
    table, name, quality = by_class(counts), "right", right
    if shares:
        name, quality = "probability", [p[classes.index(truth)] for p, truth in zip(shares, truths, strict=True)]
    scores = f"accuracy {number(right.mean())}, mean F1 {number(table.F1['macro mean'])}"
    return scores, table, counts, name, quality


def of_texts(truths: list[str], answers: list[str], *_: Any) -> Any:
    import pandas as pd

    steps = [align(truth, answer) for truth, answer in zip(truths, answers, strict=True)]
    wrong, lengths = (np.array(n) for n in ([sum(a != b for a, b in pairs) for pairs in steps], list(map(len, truths))))
    pairs = Counter(pair for each in steps for pair in each)
    rows = [(*pair, n) for pair, n in pairs.most_common() if pair[0] != pair[1]]
    ones, others = zip(*pairs.elements(), strict=True)
    counts = counted(ones, others, sorted({*ones, *others}))
    scores = (
        f"CER {number(wrong.sum() / max(lengths.sum(), 1))}, {number((wrong == 0).mean())} of them without an error"
    )
    table = pd.DataFrame(rows, columns=["truth", "answer", "count"])
    return scores, table, counts, "CER", wrong / np.maximum(lengths, 1)


def of_maps(truths: list[np.ndarray], answers: list[np.ndarray], classes: Sequence[str], _: Any) -> Any:
    """Compare class maps (H, W) pixel by pixel; a label that is no class, such as 255, is ignored."""
    import pandas as pd

    if not classes:
        classes = [str(k) for k in range(1 + max(int(np.max(each)) for each in answers))]
    count, quality = len(classes), []
    total = np.zeros((count, count), np.int64)
    for truth, answer in zip(truths, answers, strict=True):
        valid = np.asarray(truth) < count
        cells = np.asarray(truth, np.int64)[valid] * count + np.asarray(answer, np.int64)[valid]
        counts = np.bincount(cells, minlength=count**2).reshape(count, count)
        either = counts.sum(0) + counts.sum(1) - counts.diagonal()
        quality.append((counts.diagonal()[either > 0] / either[either > 0]).mean() if valid.any() else 1.0)
        total += counts
    frame = pd.DataFrame(total, pd.Index(classes, name="truth"), pd.Index(classes, name="answer"))
    table, right = by_class(frame, iou=True), number(total.trace() / max(total.sum(), 1))
    return f"mean IoU {number(table.IoU['macro mean'])}, {right} of the pixels right", table, frame, "IoU", quality


def of_values(truths: list[Any], answers: list[Any], *_: Any) -> Any:
    """Compare numbers, or arrays of one shape, in the targets' unit; above 20 numbers a sample all together."""
    import pandas as pd

    y, guess = (np.array(each, np.float64).reshape(len(truths), -1) for each in (truths, answers))
    errors = np.sqrt(np.square(guess - y).mean(1))
    if y.shape[1] > CONFUSED:
        y, guess = y.reshape(-1, 1), guess.reshape(-1, 1)
    mean_square, variance = np.square(guess - y).mean(0), y.var(0)
    table = pd.DataFrame({"MAE": np.abs(guess - y).mean(0), "RMSE": np.sqrt(mean_square)})
    table["R²"] = 1 - mean_square / np.where(variance > 0, variance, np.nan)
    means = ", ".join(f"{name} {number(value)}" for name, value in table.mean().items())
    return means, table, None, "error", errors


def counted(truths: Sequence[str], answers: Sequence[str], names: Sequence[str]) -> pd.DataFrame:
    """Return how often each was answered (columns) for each (rows)."""
    import pandas as pd

    counts = pd.crosstab(pd.Series(truths, name="truth"), pd.Series(answers, name="answer"))
    return counts.reindex(index=names, columns=names, fill_value=0)


def by_class(counts: pd.DataFrame, iou: bool = False) -> pd.DataFrame:
    """Return precision, recall, F1 and support of the classes that are true or answered somewhere, as scikit-learn's
    `classification_report` does; 0 where there is nothing to divide by."""
    import pandas as pd

    right, true, said = pd.Series(np.diag(counts), counts.index), counts.sum(axis=1), counts.sum()
    scores = {"precision": right / said, "recall": right / true, "F1": 2 * right / (true + said)}
    frame = pd.DataFrame({**({"IoU": right / (true + said - right)} if iou else {}), **scores})[true + said > 0].fillna(
        0
    )
    true = true[frame.index]
    means = pd.DataFrame([frame.mean(), frame.mul(true, axis=0).sum() / true.sum()], ["macro mean", "weighted mean"])
    return pd.concat([frame, means]).assign(support=[*true, true.sum(), true.sum()])


def align(truth: str, answer: str) -> list[tuple[str, str]]:
    """Return (character, what was read for it) along a shortest edit; "" for a missing or an extra one."""
    if truth == answer:
        return list(zip(truth, answer, strict=True))
    costs = [list(range(len(answer) + 1))]
    for i, one in enumerate(truth):
        row = [i + 1]
        for j, other in enumerate(answer):
            row.append(min(costs[i][j] + (one != other), costs[i][j + 1] + 1, row[j] + 1))
        costs.append(row)
    pairs, i, j = [], len(truth), len(answer)
    while i or j:
        both = i and j and costs[i][j] == costs[i - 1][j - 1] + (truth[i - 1] != answer[j - 1])
        extra = not both and j and costs[i][j] == costs[i][j - 1] + 1
        i, j = i - (not extra), j - bool(both or extra)
        pairs.append(("" if extra else truth[i], answer[j] if both or extra else ""))
    return pairs[::-1]


def probabilities(outputs: Any, card: Card) -> Tensor | None:
    """Return the probabilities (B, K) of the classes where the first output holds one logit for each; else None."""
    logits = outputs[0] if isinstance(outputs, tuple) else getattr(outputs, "logits", outputs)
    logits = logits.get("out") if isinstance(logits, dict) else logits
    if not isinstance(logits, Tensor) or not card.classes or logits.shape[1:] != (len(card.classes),):
        return None
    return logits.float().softmax(1)
