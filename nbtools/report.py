"""Where a run is right and wrong on a split, by class, character or pixel. Imported by `Run.report` alone.

Answers are those of `Task.decode`; the right ones `Task.text_of`, else the column `y` of an `nb.pack`, or `label`.
"""

import base64
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, zip_longest
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from nbtools.data import TARGET, Pack
from nbtools.errors import MissingExtra, PackError, TrainError
from nbtools.figures import Sheet, gallery, judge, look, shorten
from nbtools.run import Run
from nbtools.show import note, number, plural
from nbtools.train import Answer, Labels, title_of

CONFUSED, SHOWN = 20, 12  # classes of the figure; worst samples that are shown


@dataclass(frozen=True, eq=False)
class Report:
    """Show where a run is right and wrong. table: for classes precision, recall, F1 and support; for segmentation also
    IoU and support in pixels; for texts which character was read as which ("": a missing or an extra one). counts:
    truth (rows) by answer. worst: every sample, the worst first: by the probability of its class, or the share of its
    labels, characters or pixels that are right."""

    about: str
    table: pd.DataFrame
    counts: pd.DataFrame
    worst: pd.DataFrame
    run: Run
    pack: Pack

    @cached_property
    def confusion(self) -> Sheet:
        """Return a figure of up to 20 of the most confused classes: for each true one (rows), the percentages predicted
        as each class. The colour is the root of the share, so that one sample in a hundred is still seen."""
        counts, named = self.counts.to_numpy(), [shorten(str(name) or "(none)", 7, 260) for name in self.counts]
        wrong = counts * ~np.eye(len(counts), dtype=bool)
        places = np.sort((-wrong.sum(0) - wrong.sum(1)).argsort(kind="stable")[:CONFUSED])
        shares, side = (counts / np.maximum(counts.sum(1, keepdims=True), 1))[np.ix_(places, places)], len(places)
        wide = max(4.5, 0.3 * side + 2.5)
        sheet = Sheet(figsize=(wide, wide), layout="constrained")
        axes = sheet.add_subplot(xlabel="answer", ylabel="truth", title="percentage of each true class")
        axes.imshow(np.sqrt(shares), cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        axes.set_xticks(range(side), [named[k] for k in places], rotation=90, **look(7))
        axes.set_yticks(range(side), [named[k] for k in places], **look(7))
        for row, column in zip(*np.nonzero(shares >= 0.005), strict=True):
            share, ink = shares[row, column], "white" if shares[row, column] > 0.45 else "black"
            axes.text(column, row, f"{100 * share:.0f}", ha="center", va="center", fontsize=6.5, color=ink)
        return sheet

    @cached_property
    def pictures(self) -> Sheet | None:
        """Return a figure of the worst samples with truth and answer, where the task has a `preview`; else None."""
        if self.run.task.preview is None:
            return None
        ids = list(map(int, self.worst.index[:SHOWN]))
        answers = self.run.predict_pack(self.pack, ids)
        previews = [self.run.task.preview(self.pack, i, answer) for i, answer in zip(ids, answers, strict=True)]
        return gallery([(image, *judge(truth or text, text)) for image, truth, text, *_ in previews])

    def __repr__(self) -> str:
        return f"{self.about}\n\n{self.table.to_string()}\n\nThe worst:\n{self.worst.head(SHOWN).to_string()}"

    def _repr_html_(self) -> str:
        images = (base64.b64encode(sheet._repr_png_()).decode() for sheet in (self.confusion, self.pictures) if sheet)
        drawn = "".join(f'<img src="data:image/png;base64,{image}" style="max-width:100%">' for image in images)
        return note(self.about) + self.table.to_html(max_rows=60) + drawn + self.worst.head(SHOWN).to_html()


def make_report(run: Run, pack: Pack, split: str) -> Report:
    """Return the report of a run on a split of a pack that it can read. Raises PackError, TrainError."""
    if not (ids := list(map(int, pack.ids(split)))):
        raise PackError(f"{pack.folder}: the {split} split is empty; name another one with split=")
    answers, shares = run.answers(pack.sample(i) for i in ids)
    answers = [tuple(one.name for one in each) if isinstance(each, Labels) else each for each in answers]
    answers = [each.name if isinstance(each, Answer) else each for each in answers]  # without its probability
    answers = [each.cpu().numpy() if isinstance(each, Tensor) else each for each in answers]
    truths = [right_answer(run, pack, i) for i in ids]
    kind, names, pairs = compare_answers(run, pack, truths, answers)
    counted = np.zeros((len(names), len(names)), int)
    for pair in pairs:
        np.add.at(counted, tuple(pair.T), 1)
    counts = pd.DataFrame(counted, pd.Index(names, name="truth"), pd.Index(names, name="answer"))
    if kind == "text":
        i, j = np.nonzero(counted)  # few of the thousands of characters squared
        every: Any = pd.DataFrame({"truth": counts.index[i], "answer": counts.columns[j], "count": counted[i, j]})
        table = every[every.truth != every.answer].sort_values("count", ascending=False, kind="stable")
        about = f"CER {number(table['count'].sum() / max(every['count'][every.truth != ''].sum(), 1))}"
    else:
        table, main = scores(counts, iou=kind == "map"), "IoU" if kind == "map" else "F1"
        share, mean = np.trace(counts) / counts.to_numpy().sum(), table[main].to_dict()["macro mean"]
        about = f"{number(share)} right, mean {main} {number(mean)}"
    right = [float(np.mean(each[:, 0] == each[:, 1])) if len(each) else 1.0 for each in pairs]
    if kind == "class" and shares:
        right = [float(share[pack.classes.index(truth)]) for share, truth in zip(shares, truths, strict=True)]
    worst = pd.DataFrame({"file": [pack.names[i] for i in ids], "right": right}, pd.Index(ids, name="id"))
    worst = (worst if kind == "map" else worst.assign(truth=truths, answer=answers)).sort_values("right", kind="stable")
    return Report(f"{plural(len(ids), 'sample')} of the {split} split: {about}", table, counts, worst, run, pack)


def right_answer(run: Run, pack: Pack, i: int) -> Any:
    if run.task.text_of is not None:
        return run.task.text_of(pack, i)
    value, kind = pack.sample(i).get(TARGET if TARGET in pack.columns else "label"), pack.options.get("kind")
    if value is None or kind not in ("classes", "labels"):
        return value
    return pack.classes[int(value)] if kind == "classes" else tuple(pack.classes[k] for k in np.flatnonzero(value))


def compare_answers(run: Run, pack: Pack, truths: list[Any], answers: list[Any]) -> tuple[str, list[str], list[Any]]:
    """Return the kind of the answers, the names that occur, and for each sample the places (N, 2) of a true and an
    answered one: of its class, or of each label, character or pixel; "" is missing or too much. Raises TrainError."""
    truth, answer, classes = truths[0], answers[0], pack.classes
    both = [*zip(truths, answers, strict=True)]
    if np.ndim(answer) == 2 and np.shape(answer) == np.shape(truth) and answer.dtype.kind in "iu":
        most = max(int(max(a.max(), t[t < 255].max(initial=0))) for t, a in both)
        names = classes or [*map(str, range(1 + most))]  # a label that is no class, such as 255 or -1, is ignored
        return "map", names, [np.stack([t, a], -1)[(t >= 0) & (t < len(names))] for t, a in both]
    if isinstance(truth, str) and isinstance(answer, str):
        kind = "class" if {*truths} <= {*classes} else "text"
        pairs = [[pair] if kind == "class" else align(*pair) for pair in both]
    elif isinstance(truth, tuple) and isinstance(answer, tuple):
        kind, pairs = "labels", [[(n * (n in t), n * (n in a)) for n in classes if n in (*t, *a)] for t, a in both]
    else:
        rule = "a report compares classes, labels, texts and class maps; for your own task, define text_of(pack, i)"
        raise TrainError(f"{title_of(run.task)} answers with {type(answer).__name__}: {rule}, the right answer as text")
    every = {*chain.from_iterable(chain.from_iterable(pairs))}
    names = [*dict.fromkeys([*(classes if kind != "text" else ()), *sorted(every)])]
    places = {name: k for k, name in enumerate(names)}
    return kind, names, [np.array([(places[t], places[a]) for t, a in each], int).reshape(-1, 2) for each in pairs]


def align(truth: str, answer: str) -> list[tuple[str, str]]:
    """Return (character, what was read for it) along a shortest edit; "" for a missing or an extra one."""
    try:
        from rapidfuzz.distance import Levenshtein
    except ImportError:
        raise MissingExtra("a report on texts needs rapidfuzz: pip install rapidfuzz, or the extra text") from None
    answer = answer.replace("\ufffd", "␦")  # hwdb's unknown, which is never right, as in its metrics
    steps = Levenshtein.opcodes(truth, answer)
    ranges = [(truth[s.src_start : s.src_end], answer[s.dest_start : s.dest_end]) for s in steps]
    return [pair for true, read in ranges for pair in zip_longest(true, read, fillvalue="")]


def scores(counts: pd.DataFrame, iou: bool = False) -> pd.DataFrame:
    """Return, as scikit-learn's `classification_report` does, precision, recall, F1 and support of the classes that are
    true or answered somewhere, 0 where there is nothing to divide by; with IoU in front for class maps."""
    right, true, read = pd.Series(np.diag(counts), counts.index), counts.sum(axis=1), counts.sum()
    frame = pd.DataFrame({"precision": right / read, "recall": right / true, "F1": 2 * right / (true + read)})
    if iou:
        frame.insert(0, "IoU", right / (true + read - right))
    frame = frame[(true + read > 0) & (counts.index != "")].fillna(0)
    true = true[frame.index]
    means = pd.DataFrame([frame.mean(), frame.mul(true, axis=0).sum() / true.sum()], ["macro mean", "weighted mean"])
    return pd.concat([frame, means]).assign(support=[*true, true.sum(), true.sum()])
