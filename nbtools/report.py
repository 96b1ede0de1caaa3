"""How good a run is on a split: its metrics, and where it is right and wrong, by class, character, pixel or value.

Answers are those of `Task.decode`; the right ones `Task.text_of`, else the column `y` of an `nb.pack`, or `label`.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from nbtools.data import TARGET, Pack
from nbtools.errors import PackError, TrainError
from nbtools.show import note, number, plural
from nbtools.train import Answer, Labels, TrainState, evaluation, readable, refuse_fixed, spoken

if TYPE_CHECKING:
    import pandas as pd

    from nbtools.figures import Sheet
    from nbtools.run import Run

CONFUSED, SHOWN = 20, 12  # classes of the figure; worst samples that are shown
LOW = ("probability", "right", "labels right", "IoU")  # what is worse the lower it is
ASKED = {"classes", "category_of", "mean", "std", "random", "roles", "stored"}  # of the training split


def evaluate(run: Any, pack: Pack, split: str = "test", **knobs: Any) -> dict[str, float]:
    """Evaluate a run's best model (or a TrainState's current one) on a split of a pack: metric → value.

    knobs: settings of the plan that differ from training: `eval_scales=(0.5, 1.0)`. Raises PackError for a pack with
    other classes or preprocessing, PlanError for an unknown setting, TrainError for one on which the model depends.
    """
    require_like(run, pack)
    plan = run.plan.replace(**knobs)
    refuse_fixed(plan.changes_from(run.plan), plan, resumed=True)
    model = run.evaluated if isinstance(run, TrainState) else run.model()
    return evaluation.evaluate(run.task, model, pack, plan, split)


def require_like(run: Any, pack: Pack) -> None:
    """Raise PackError for a pack with other classes or preprocessing than the run's: its results would be wrong.
    Options and columns that its network does not read may differ, and so may the classes that were asked for: which
    there are is what counts."""
    pack = readable(run.task, pack, run.plan)
    for name in ("task", "classes", "options", "columns"):
        ours, theirs = (getattr(each.card, name) for each in (run, pack))
        if isinstance(ours, dict):
            ours, theirs = ({n: v for n, v in each.items() if n not in ASKED} for each in (ours, theirs))
        if ours != theirs:
            raise PackError(
                f"{pack.folder}: the pack's {name} are not the ones that the run was trained with "
                f"({str(theirs)[:120]} and {str(ours)[:120]}); pack the data again with run.pack(source)",
                entry="Predictions differ between training and inference",
            )


@dataclass(frozen=True, eq=False)
class Report:
    """Where a run is right and wrong: shows as a sentence, a table, figures, and the worst samples.

    table: of classes precision, recall, F1 and support, with their means; of segmentation also IoU, support in pixels;
    of texts which character was read as which, how often ("": a missing or an extra one); of values MAE, RMSE and R².
    counts: truth (rows) by answer; None of values. worst: every sample, the worst first: by the probability of its
    class, the CER of its text, its mean IoU or its error.
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
        from nbtools.figures import gallery, judged

        if self.run.task.preview is None:
            return None
        ids = list(map(int, self.worst.index[:SHOWN]))
        answers = self.run.predict_pack(self.pack, ids)
        shown = [self.run.task.preview(self.pack, i, answer) for i, answer in zip(ids, answers, strict=True)]
        return gallery([(image, *judged(truth or said, said)) for image, truth, said, *_ in shown])

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
    answers, shares = run.answers(pack.sample(i) for i in ids)
    answers = [tuple(a.name for a in each) if isinstance(each, Labels) else each for each in answers]
    answers = [answer.name if isinstance(answer, Answer) else answer for answer in answers]
    truths = [right_answer(run, pack, i) for i in ids]
    scores, table, counts, name, quality = judge(run, pack, truths, answers)
    if name == "right" and shares:
        name, quality = "probability", [share[pack.classes.index(t)] for share, t in zip(shares, truths, strict=True)]
    worst = pd.DataFrame({"file": [pack.names[i] for i in ids], name: quality}, pd.Index(ids, name="id"))
    worst = worst if np.ndim(answers[0]) > 1 else worst.assign(truth=truths, answer=answers)
    about = f"{plural(len(ids), 'sample')} of the {split} split: {scores}"
    return Report(about, table, counts, worst.sort_values(name, ascending=name in LOW, kind="stable"), run, pack)


def right_answer(run: Run, pack: Pack, i: int) -> Any:
    """Return what `decode` should have answered for a sample."""
    if run.task.text_of is not None:
        return run.task.text_of(pack, i)
    value = pack.sample(i).get(TARGET if TARGET in pack.columns else "label")
    if value is not None and pack.options.get("kind") == "labels":
        return tuple(pack.classes[k] for k in np.flatnonzero(value))
    return pack.classes[int(value)] if value is not None and pack.options.get("kind") == "classes" else value


def judge(run: Run, pack: Pack, truths: list[Any], answers: list[Any]) -> Any:
    """Return (scores, table, counts, name of a sample's quality, its values) of answers that are classes, texts, class
    maps or values. Raises TrainError for others."""
    truth, answer = truths[0], answers[0]
    if isinstance(truth, tuple) and isinstance(answer, tuple):
        return of_labels(truths, answers, pack.classes)
    if isinstance(truth, str) and isinstance(answer, str):
        if truth not in pack.classes:
            return of_texts(truths, answers)
        counts, right = counted(truths, answers, pack.classes), np.array(truths) == np.array(answers)
        table = by_class(counts).drop(columns="IoU")
        return (
            f"accuracy {number(right.mean())}, mean F1 {number(table.F1['macro mean'])}",
            table,
            counts,
            "right",
            right,
        )
    if isinstance(answer, np.ndarray | float | int) and np.shape(answer) == np.shape(truth):
        if np.asarray(answer).dtype.kind in "iu":
            return of_maps(truths, answers, pack.classes or [*map(str, range(1 + int(max(map(np.max, answers)))))])
        form = pack.options.get("forms", {}).get(TARGET, {})
        scaled = np.asarray(truth).dtype == np.uint8 and form["layout"]  # images
        return of_values(np.array(truths, np.float64) / (255 if scaled else 1), np.array(answers, np.float64))
    missing = f"{spoken(run.task)} has no text_of(pack, i), the right answer of a sample as text"
    raise TrainError(f"{missing}, with which a report compares what decode answers; define it")


def of_labels(truths: Sequence[tuple[str, ...]], answers: Sequence[tuple[str, ...]], classes: Sequence[str]) -> Any:
    """Compare sets of labels, each label by itself."""
    import pandas as pd

    true, said = (np.array([[name in each for name in classes] for each in sets]) for sets in (truths, answers))
    right, support, count = (true & said).sum(0), true.sum(0), said.sum(0)
    scores = {"precision": right / count.clip(1), "recall": right / support.clip(1)}
    table = pd.DataFrame({**scores, "F1": 2 * right / (support + count).clip(1)}, pd.Index(classes))
    table, support = table[support + count > 0], support[support + count > 0]
    table.loc["macro mean"] = table.mean()
    table["support"] = [*support, support.sum()]
    return f"mean F1 {number(table.F1['macro mean'])}", table, None, "labels right", (true == said).mean(1)


def of_maps(truths: Sequence[np.ndarray], answers: Sequence[np.ndarray], classes: Sequence[str]) -> Any:
    """Compare class maps (H, W) pixel by pixel; a label that is no class, such as 255, is ignored."""
    each = [counted(np.ravel(t), np.ravel(a), range(len(classes))) for t, a in zip(truths, answers, strict=True)]
    names = dict(enumerate(classes))
    total = sum(each[1:], each[0]).rename(index=names, columns=names)
    table = by_class(total)
    return (
        f"mean IoU {number(table.IoU['macro mean'])}",
        table,
        total,
        "IoU",
        [by_class(c).IoU["macro mean"] for c in each],
    )


def of_texts(truths: Sequence[str], answers: Sequence[str]) -> Any:
    """Compare texts character by character, along a shortest edit."""
    import pandas as pd

    pairs = [align(truth, answer) for truth, answer in zip(truths, answers, strict=True)]
    wrong, lengths = np.array([sum(a != b for a, b in each) for each in pairs]), np.array([*map(len, truths)])
    every = pd.DataFrame(chain.from_iterable(pairs), columns=["truth", "answer"])
    table = every[every.truth != every.answer].value_counts().reset_index()
    counts = counted(every.truth, every.answer, sorted({*every.truth, *every.answer}))
    scores = (
        f"CER {number(wrong.sum() / max(lengths.sum(), 1))}, {number((wrong == 0).mean())} of them without an error"
    )
    return scores, table, counts, "CER", wrong / lengths.clip(1)


def of_values(truths: np.ndarray, answers: np.ndarray) -> Any:
    """Compare numbers, or arrays of one shape, in the targets' unit; above 20 numbers a sample all together."""
    import pandas as pd

    apart = (answers - truths).reshape(len(truths), -1)
    columns = apart.shape[1] if apart.shape[1] <= CONFUSED else 1
    y, each = truths.reshape(-1, columns), apart.reshape(-1, columns)
    square = np.square(each).mean(0)
    table = pd.DataFrame({"MAE": abs(each).mean(0), "RMSE": np.sqrt(square), "R²": 1 - square / y.var(0)})
    scores = ", ".join(f"{name} {number(value)}" for name, value in table.mean().items())
    return scores, table, None, "error", np.sqrt(np.square(apart).mean(1))


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
    cost = [[i + j for j in range(len(answer) + 1)] for i in range(len(truth) + 1)]  # of the first i and j characters
    for i, one in enumerate(truth, 1):
        for j, other in enumerate(answer, 1):
            cost[i][j] = min(cost[i - 1][j - 1] + (one != other), cost[i - 1][j] + 1, cost[i][j - 1] + 1)
    pairs, i, j = [], len(truth), len(answer)
    while i or j:
        missing = i > 0 and cost[i][j] == cost[i - 1][j] + 1
        if i and j and cost[i][j] == cost[i - 1][j - 1] + (truth[i - 1] != answer[j - 1]):
            i, j = i - 1, j - 1
            pairs.append((truth[i], answer[j]))
        else:
            i, j = i - missing, j - (not missing)
            pairs.append((truth[i], "") if missing else ("", answer[j]))
    return pairs[::-1]
