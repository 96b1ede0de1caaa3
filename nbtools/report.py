"""Where a run is right and wrong on a split, by class, character or pixel. Imported by `Run.report` alone.

Answers are those of `Task.decode`; the right ones `Task.text_of`, else the column `y` of an `nb.pack`, or `label`.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from nbtools.data import TARGET, Form, Pack
from nbtools.errors import MissingExtra, PackError, TrainError
from nbtools.figures import Sheet, confusion_figure, gallery, judged
from nbtools.show import note, number, plural
from nbtools.train import Answer, Labels, spoken

if TYPE_CHECKING:
    from nbtools.run import Run

CONFUSED, SHOWN = 20, 12  # classes of the figure; worst samples that are shown
Scores = tuple[str, pd.DataFrame, Any, str, Any]  # (sentence, table, counts, name of the samples' scores, scores)


@dataclass(frozen=True, eq=False)
class Report:
    """Where a run is right and wrong. table: of classes precision, recall, F1 and support; of segmentation also IoU,
    support in pixels; of texts which character was read as which ("": a missing or an extra one); of values MAE and
    RMSE. counts: truth (rows) by answer; None of sets of labels and of values. worst: every sample, the worst first: by
    the probability of its class, the CER of its text, its mean IoU or its mean absolute error."""

    about: str
    table: pd.DataFrame
    counts: pd.DataFrame | None
    worst: pd.DataFrame
    run: Run
    pack: Pack

    @cached_property
    def confusion(self) -> Sheet | None:
        """A figure of the at most 20 most confused classes: what each was taken for. None where `counts` is."""
        if self.counts is None:
            return None
        wrong = self.counts.to_numpy() * ~np.eye(len(self.counts), dtype=bool)
        places = np.sort((-wrong.sum(0) - wrong.sum(1)).argsort(kind="stable")[:CONFUSED])
        return confusion_figure(self.counts.iloc[places, places].rename(index={"": "(none)"}, columns={"": "(none)"}))

    @cached_property
    def pictures(self) -> Sheet | None:
        """A figure of the worst samples with truth and answer, where the task has a `preview`; else None."""
        if self.run.task.preview is None:
            return None
        ids = list(map(int, self.worst.index[:SHOWN]))
        answers = self.run.predict_pack(self.pack, ids)
        previews = [self.run.task.preview(self.pack, i, answer) for i, answer in zip(ids, answers, strict=True)]
        return gallery([(image, *judged(truth or text, text)) for image, truth, text, *_ in previews])

    def __repr__(self) -> str:
        return f"{self.about}\n\n{self.table.to_string()}\n\nThe worst:\n{self.worst.head(SHOWN).to_string()}"

    def _repr_html_(self) -> str:
        images = (base64.b64encode(sheet._repr_png_()).decode() for sheet in (self.confusion, self.pictures) if sheet)
        drawn = "".join(f'<img src="data:image/png;base64,{image}" style="max-width:100%">' for image in images)
        return note(self.about) + self.table.to_html() + drawn + self.worst.head(SHOWN).to_html()


def make_report(run: Run, pack: Pack, split: str) -> Report:
    """Return the report of a run on a split of a pack that it can read. Raises PackError for an empty split, TrainError
    where answers cannot be compared."""
    if not (ids := list(map(int, pack.ids(split)))):
        raise PackError(f"{pack.folder}: the {split} split is empty; name another one with split=")
    answers, shares = run.answers(pack.sample(i) for i in ids)
    answers = [tuple(one.name for one in each) if isinstance(each, Labels) else each for each in answers]
    answers = [each.name if isinstance(each, Answer) else each for each in answers]  # without its probability
    truths = [right_answer(run, pack, i) for i in ids]
    about, table, counts, name, score = compare_answers(run, pack, truths, answers)
    if name == "right" and shares:
        score = [share[pack.classes.index(truth)] for share, truth in zip(shares, truths, strict=True)]
        name = "probability"
    worst = pd.DataFrame({"file": [pack.names[i] for i in ids], name: score}, pd.Index(ids, name="id"))
    worst = worst if np.ndim(answers[0]) > 1 else worst.assign(truth=truths, answer=answers)
    worst = worst.sort_values(name, ascending=name not in ("CER", "error"), kind="stable")
    return Report(f"{plural(len(ids), 'sample')} of the {split} split: {about}", table, counts, worst, run, pack)


def right_answer(run: Run, pack: Pack, i: int) -> Any:
    """Return what `decode` should have answered for a sample."""
    if run.task.text_of is not None:
        return run.task.text_of(pack, i)
    value, kind = pack.sample(i).get(TARGET if TARGET in pack.columns else "label"), pack.options.get("kind")
    if value is None or kind not in ("classes", "labels"):
        return value
    return pack.classes[int(value)] if kind == "classes" else tuple(pack.classes[k] for k in np.flatnonzero(value))


def compare_answers(run: Run, pack: Pack, truths: list[Any], answers: list[Any]) -> Scores:
    """Compare answers that are classes, sets of labels, texts, class maps or values. Raises TrainError for others."""
    truth, answer, classes = truths[0], answers[0], pack.classes
    if isinstance(truth, tuple) and isinstance(answer, tuple):
        return of_labels(truths, answers, classes)
    if isinstance(truth, str) and isinstance(answer, str):
        return of_classes(truths, answers, classes) if truth in classes else of_texts(truths, answers)
    if np.ndim(answer) == 2 and np.shape(answer) == np.shape(truth) and answer.dtype.kind in "iu":
        return of_maps(truths, answers, classes or [*map(str, range(1 + int(max(map(np.max, answers)))))])
    if pack.options.get("kind") == "values" and np.shape(answer) == np.shape(truth):
        return of_values(truths, answers, pack)
    rule = (
        "a report compares classes, labels, texts, class maps and values; of a task of its own define text_of(pack, i)"
    )
    raise TrainError(f"{spoken(run.task)} answers with {type(answer).__name__}: {rule}, the right answer as text")


def of_classes(truths: Sequence[str], answers: Sequence[str], classes: Sequence[str]) -> Scores:
    counts, right = count_pairs(truths, answers, classes), np.array(truths) == np.array(answers)
    table = by_class(counts).drop(columns="IoU")
    about = f"accuracy {number(right.mean())}, mean F1 {number(table.F1['macro mean'])}"
    return about, table, counts, "right", right


def of_labels(truths: Sequence[tuple[str, ...]], answers: Sequence[tuple[str, ...]], classes: Sequence[str]) -> Scores:
    """Compare sets of labels, each label by itself."""
    true, read = (np.array([[name in each for name in classes] for each in sets]) for sets in (truths, answers))
    right, support, count = (pd.Series(each.sum(0), pd.Index(classes)) for each in (true & read, true, read))
    table = class_scores(right, support, count).drop(columns="IoU").drop(index="weighted mean")
    return f"mean F1 {number(table.F1['macro mean'])}", table, None, "labels right", (true == read).mean(1)


def of_maps(truths: Sequence[np.ndarray], answers: Sequence[np.ndarray], classes: Sequence[str]) -> Scores:
    """Compare class maps (H, W) pixel by pixel; a label that is no class, such as 255, is ignored."""
    each = [count_pairs(np.ravel(t), np.ravel(a), range(len(classes))) for t, a in zip(truths, answers, strict=True)]
    names = dict(enumerate(classes))
    total = sum(each[1:], each[0]).rename(index=names, columns=names)
    table, ious = by_class(total), [by_class(one).IoU["macro mean"] for one in each]
    return f"mean IoU {number(table.IoU['macro mean'])}", table, total, "IoU", ious


def of_values(truths: Sequence[Any], answers: Sequence[Any], pack: Pack) -> Scores:
    """Compare values in the target's own unit, those of a vector also each by itself."""
    unit = Form.of(pack.options["forms"][TARGET]).unit
    errors = [np.ravel(np.asarray(a, float) - np.asarray(t) / unit) for a, t in zip(answers, truths, strict=True)]
    goals, width = pack.options["roles"]["target"], len(errors[0])
    named = goals if isinstance(goals, list) and len(goals) == width else range(width)
    columns: dict[Any, Any] = dict(zip(named, np.transpose(errors), strict=True)) if np.ndim(truths[0]) == 1 else {}
    columns["all"] = np.concatenate(errors)
    scores = {name: (np.abs(each).mean(), np.sqrt(np.square(each).mean())) for name, each in columns.items()}
    table = pd.DataFrame.from_dict(scores, orient="index", columns=["MAE", "RMSE"])
    about = f"MAE {number(table.MAE['all'])}, RMSE {number(table.RMSE['all'])}"
    return about, table, None, "error", [np.abs(each).mean() for each in errors]


def of_texts(truths: Sequence[str], answers: Sequence[str]) -> Scores:
    """Compare texts character by character, along a shortest edit."""
    pairs = [align(truth, answer) for truth, answer in zip(truths, answers, strict=True)]
    wrong, lengths = np.array([sum(a != b for a, b in each) for each in pairs]), np.array([*map(len, truths)])
    every = pd.DataFrame(chain.from_iterable(pairs), columns=["truth", "answer"])
    table = every[every.truth != every.answer].value_counts().reset_index()
    counts = count_pairs(every.truth, every.answer, sorted({*every.truth, *every.answer}))
    about = f"CER {number(wrong.sum() / max(lengths.sum(), 1))}, {number((wrong == 0).mean())} of them without an error"
    return about, table, counts, "CER", wrong / lengths.clip(1)


def count_pairs(truths: Any, answers: Any, names: Sequence[Any]) -> pd.DataFrame:
    """Return how often each name was answered (columns) for each (rows); a truth that is none of them is left out."""
    index = pd.Index(names)
    rows, columns = index.get_indexer(truths), index.get_indexer(answers)
    counts = np.bincount((rows * len(index) + columns)[rows >= 0], minlength=len(index) ** 2)
    return pd.DataFrame(counts.reshape(len(index), -1), index=index.rename("truth"), columns=index.rename("answer"))


def by_class(counts: pd.DataFrame) -> pd.DataFrame:
    """Return the scores of a table of counts, see `class_scores`."""
    return class_scores(pd.Series(np.diag(counts), counts.index), counts.sum(axis=1), counts.sum())


def class_scores(right: Any, true: Any, read: Any) -> pd.DataFrame:
    """Return IoU and, as scikit-learn's `classification_report` does, precision, recall, F1 and support of the classes
    that are true or answered somewhere; 0 where there is nothing to divide by. right, true, read: Series by class."""
    scores = {"precision": right / read, "recall": right / true, "F1": 2 * right / (true + read)}
    frame = pd.DataFrame({"IoU": right / (true + read - right), **scores})[true + read > 0].fillna(0)
    true = true[frame.index]
    means = pd.DataFrame([frame.mean(), frame.mul(true, axis=0).sum() / true.sum()], ["macro mean", "weighted mean"])
    return pd.concat([frame, means]).assign(support=[*true, true.sum(), true.sum()])


def align(truth: str, answer: str) -> list[tuple[str, str]]:
    """Return (character, what was read for it) along a shortest edit; "" for a missing or an extra one."""
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError:
        raise MissingExtra("a report on texts needs rapidfuzz: pip install rapidfuzz, or nbtools[text]") from None
    steps = Levenshtein.opcodes(truth, answer)
    ranges = [(truth[s.src_start : s.src_end], answer[s.dest_start : s.dest_end]) for s in steps]
    return [pair for true, read in ranges for pair in zip_longest(true, read, fillvalue="")]
