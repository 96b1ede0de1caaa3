"""Prefix beam search and the n-gram model, against slow obvious versions: dictionaries, one text at a time."""

import itertools
import math
from collections import Counter, defaultdict

import numpy as np
import pytest
import torch

from nbtools.errors import NbtoolsError, PackError
from nbtools.tasks import hwdb
from nbtools.tasks.hwdb import NGram, peaks_of, search
from nbtools.tasks.hwdb.data import UNKNOWN
from nbtools.tasks.hwdb.decode import find_peaks
from nbtools.tasks.hwdb.language_model import FALLBACK
from tests.packs import pack_of

END = "\n"


class Slow:
    """Modified Kneser-Ney in dictionaries: the formulas of Chen & Goodman, one n-gram at a time."""

    def __init__(self, lines, classes, order):
        self.symbols, self.order = [*classes, END], order
        seen = [Counter() for _ in range(order + 1)]
        for line in lines:
            for n, i in itertools.product(range(1, order + 1), range(len(line) + 1)):
                if i - n + 1 >= -1:  # the line's start is a context, and no character
                    seen[n][(END + line + END)[i - n + 2 : i + 2]] += 1
        self.counts = [dict(counts) for counts in seen]
        for n in range(1, order):
            contexts = Counter(gram[1:] for gram in seen[n + 1])
            at_start = n > 1
            self.counts[n] = {g: seen[n][g] if at_start and g[0] == END else contexts[g] for g in seen[n]}
        self.discounts = [self.estimate(counts.values()) for counts in self.counts]

    @staticmethod
    def estimate(counts):
        n = [0, *(sum(count == k for count in counts) for k in (1, 2, 3, 4))]
        y = n[1] / max(n[1] + 2 * n[2], 1)
        discounts = [k - (k + 1) * y * n[k + 1] / max(n[k], 1) for k in (1, 2, 3)]
        return [0, *(discounts if min(n[1:] + discounts) > 0 else FALLBACK)]

    def probability(self, context, symbol):
        """P(symbol | context)."""
        n = len(context) + 1
        lower = self.probability(context[1:], symbol) if context else 1 / len(self.symbols)
        grams = [gram for gram in self.counts[n] if gram[:-1] == context]
        if not grams:
            return lower
        counts, discounts = self.counts[n], self.discounts[n]
        total = sum(counts[gram] for gram in grams)
        saved = sum(discounts[min(counts[gram], 3)] for gram in grams)
        count = counts.get(context + symbol, 0)
        return (count - discounts[min(count, 3)] + saved * lower) / total

    def line(self, text, end=True):
        """Log-probability of a line."""
        whole = END + text + (END if end else "")
        pairs = [(whole[max(0, i - self.order + 1) : i], whole[i]) for i in range(1, len(whole))]
        return sum(math.log(self.probability(*pair)) for pair in pairs)


def slow_beam(log_probs, classes, lm, width, alpha, beta, candidates, least):
    """Hannun et al.'s algorithm 1 for one line (T, C), a dictionary of texts a frame."""
    beams = {"": (0.0, -math.inf)}

    def rank(text, ways, end=False):
        value = np.logaddexp(*ways) + beta * len(text)
        return value + (alpha * lm.line(text, end) if lm else 0.0)

    for frame in log_probs:
        best = sorted(range(1, len(frame)), key=lambda c: -frame[c])[:candidates]
        best = [c for c in best if frame[c] >= (math.log(least) if least else -math.inf)]
        texts = defaultdict(lambda: [-math.inf, -math.inf])
        for text, (blank, char) in beams.items():
            both = np.logaddexp(blank, char)
            texts[text][0] = np.logaddexp(texts[text][0], both + frame[0])
            for c in best:
                character = classes[c - 1]
                if text.endswith(character):
                    texts[text][1] = np.logaddexp(texts[text][1], char + frame[c])
                grown = blank if text.endswith(character) else both
                texts[text + character][1] = np.logaddexp(texts[text + character][1], grown + frame[c])
        live = [text for text in texts if max(texts[text]) > -math.inf]
        beams = {t: texts[t] for t in sorted(live, key=lambda text: -rank(text, texts[text]))[:width]}
    return max(beams, key=lambda text: rank(text, beams[text], end=True))


def beam(log_probs, steps, classes, lm=None, width=10, alpha=0.4, beta=0.0, **limits):
    batch = np.arange(len(steps)), find_peaks(log_probs, torch.as_tensor(steps), **limits)
    return search([batch], classes, lm, width, alpha, beta)


def answers(rng, steps, lines, classes, peak=2.0):
    """Random log-probabilities (T, B, C); a larger peak makes clearer ones."""
    return torch.tensor(rng.normal(0, peak, (steps, lines, classes))).log_softmax(2)


def lines_of(rng, classes, count, longest=12):
    weights = 1 / np.arange(1, len(classes) + 1)
    return [
        "".join(rng.choice(list(classes), rng.integers(1, longest), p=weights / weights.sum())) for _ in range(count)
    ]


def spelled(lm, text):
    """Log-probabilities of a line's characters and of its end, one step after another."""
    state, steps = np.array([lm.start]), []
    for symbol in [*(lm.classes.index(c) for c in text), lm.end]:
        score, state = lm.step(state, np.array([symbol]))
        steps.append(score[0])
    return steps


@pytest.mark.parametrize(("order", "count"), [(2, 300), (3, 300), (3, 5)])
def test_every_probability_is_that_of_the_formulas_in_dictionaries(order, count):
    rng = np.random.default_rng(order)
    lines = lines_of(rng, "abcde", count)
    lm, slow = NGram.train(lines, "abcde", order), Slow(lines, "abcde", order)
    poor = [discounts == [0, *FALLBACK] for discounts in slow.discounts[1:]]
    assert all(poor) == ((order, count) != (3, 300))  # both are in play: the estimates, the fallback
    for text in ["", *lines[:5], *lines_of(rng, "edcba", 30)]:
        assert sum(spelled(lm, text)) == pytest.approx(slow.line(text), abs=1e-5)


def test_a_text_is_lines_or_a_file_and_other_characters_are_the_unknown_class_or_left_out(tmp_path, monkeypatch):
    monkeypatch.setenv("NBTOOLS_DRIVE", str(tmp_path))
    (tmp_path / "text.txt").write_bytes("\ufeffabX\r\n\r\n  baY\r\nb\u3000b".encode())
    given = NGram.train([f"ab{UNKNOWN}", f"ba{UNKNOWN}", "bb"], ["a", "b", UNKNOWN])
    for text in (tmp_path / "text.txt", "drive:text.txt", ["abX", "", "baY", "bb"]):
        lm = NGram.train(text, ["a", "b", UNKNOWN])
        assert (np.array_equal(lm.keys, given.keys), np.array_equal(lm.log_probs, given.log_probs)) == (True, True)
    assert np.array_equal(NGram.train(["aXb"], "ab").log_probs, NGram.train(["ab"], "ab").log_probs)
    for text, message in (
        (["\n \n"], "at least one character of the classes"),
        (tmp_path / "none.txt", "none.txt: .*"),
    ):
        with pytest.raises(PackError, match=message):
            NGram.train(text, "ab")


@pytest.mark.parametrize("peak", [0.5, 6.0])
@pytest.mark.parametrize("with_lm", [False, True])
def test_the_search_is_that_of_dictionaries_text_for_text(peak, with_lm):
    rng = np.random.default_rng(7)
    classes = "abcdef"
    lines = lines_of(rng, classes, 60)
    lm, slow = (NGram.train(lines, classes, 3), Slow(lines, classes, 3)) if with_lm else (None, None)
    for width, candidates, least in [(1, 3, 0.0), (5, 2, 0.05), (20, 6, 0.0)]:
        log_probs = answers(rng, 14, 6, 7, peak)
        steps = rng.integers(0, 15, 6)
        settings = {"width": width, "alpha": 0.6, "beta": 0.4, "candidates": candidates, "least": least}
        rows = log_probs.transpose(0, 1).numpy()
        wanted = [slow_beam(row[:n], classes, slow, **settings) for row, n in zip(rows, steps, strict=True)]
        assert beam(log_probs, steps, classes, lm, **settings) == wanted


def test_logits_half_precision_padding_and_batches_give_the_same_texts():
    rng = np.random.default_rng(1)
    log_probs, steps = answers(rng, 12, 30, 8, 4.0).float(), torch.tensor(rng.integers(0, 13, 30))
    classes = "abcdefg"
    lm = NGram.train(lines_of(rng, classes, 50), classes)
    whole = beam(log_probs, steps, classes, lm)
    assert beam(log_probs + torch.randn(12, 30, 1), steps, classes, lm) == whole  # logits
    assert [beam(log_probs[:, [i]], steps[[i]], classes, lm)[0] for i in range(30)] == whole
    half = log_probs.bfloat16()
    assert beam(half, steps, classes, lm) == beam(half.float(), steps, classes, lm)
    padded = torch.cat([log_probs, torch.full((6, 30, 8), math.nan)])  # beyond a line's own steps nothing is read
    assert beam(padded, steps, classes, lm) == whole
    with pytest.raises(NbtoolsError, match="not a number; check the weights"):
        beam(log_probs * math.nan, steps, classes)
    with pytest.raises(NbtoolsError, match="train it with the pack's classes"):
        beam(log_probs, steps, classes, NGram.train(["b"], "ba"))


class Spelling(torch.nn.Module):
    """Takes a picture's columns for log-probabilities: what it answers is what was drawn."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(6.0))

    def forward(self, batch):
        assert not self.training
        return batch["image"][:, 0].permute(2, 0, 1) * self.scale, batch["image_length"]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory):
    """(pack, texts, classes): 60 lines of a language of four characters, blurred, from 3 to 24 columns wide."""
    rng, classes = np.random.default_rng(0), ["a", "b", "c", "d", UNKNOWN]
    chain = np.array([[0, 0.9, 0.1, 0], [0, 0, 0.9, 0.1], [0.1, 0, 0, 0.9], [0.9, 0.1, 0, 0]])
    texts, samples = [], []
    for length in rng.integers(1, 9, 60):
        places = [int(rng.integers(4))]
        while len(places) < length:
            places.append(int(rng.choice(4, p=chain[places[-1]])))
        picture = rng.integers(0, 120, (3 * length, 6))
        picture[0::3, 0] = picture[2::3, 0] = 200
        picture[np.arange(1, 3 * length, 3), np.array(places) + 1] += 60
        texts.append("".join(classes[place] for place in places))
        samples.append({"image": picture.astype(np.uint8), "label": np.array(places)})
    shape = {"ragged": ("image", "label"), "bucket_by": "image", "classes": classes}
    pack = pack_of(samples, tmp_path_factory.mktemp("drawn"), task="hwdb", split="val", options={"height": 6}, **shape)
    return pack, texts, classes


def test_a_search_answers_in_the_order_of_the_ids_what_it_does_for_each_line_alone(drawn):
    pack, _, classes = drawn
    ids, model = np.array([7, 3, 59, 3, 20, 41, 0]), Spelling().train()
    texts = search(peaks_of(model, pack, hwdb.Plan(), ids, batch_size=3), classes)
    assert model.training  # as it was
    assert texts == [search(peaks_of(model, pack, hwdb.Plan(), [i]), classes)[0] for i in ids]
    assert len(set(texts)) > 4
    pictures = [torch.tensor(pack.sample(i)["image"] / 255 * 12) for i in ids]
    assert texts == [beam(picture[:, None], [len(picture)], classes)[0] for picture in pictures]


def test_a_language_model_helps(drawn):
    pack, texts, classes = drawn
    lm = NGram.train(texts[:30], classes, 2)
    peaks = peaks_of(Spelling(), pack, hwdb.Plan(amp="bf16"), np.arange(30, 60))
    plain, better = (hwdb.scores(texts[30:], search(peaks, classes, lm, 10, alpha))["cer"] for alpha in (0.0, 0.5))
    assert better < 0.7 * plain


def test_scores_of_texts_are_those_of_an_evaluation():
    scores = hwdb.scores(["手写中文", f"手{UNKNOWN}", "文"], ["手中文a", f"手{UNKNOWN}", "文"])
    assert scores == {"cer": 3 / 7, "ar": 4 / 7, "cr": 5 / 7, "whole_accuracy": 1 / 3}
    with pytest.raises(PackError, match="got 0 for 1 line"):
        hwdb.scores(["手"], [])
