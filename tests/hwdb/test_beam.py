"""Prefix beam search against all texts that there are, and the n-gram model against probabilities by hand."""

import itertools
import math

import numpy as np
import pytest
import torch
from acting import refused
from torch.nn import functional as F

from nbtools.errors import NbtoolsError, PackError
from nbtools.tasks import hwdb
from nbtools.tasks.hwdb import NGram, peaks_of, search
from nbtools.tasks.hwdb.data import UNKNOWN
from nbtools.tasks.hwdb.decode import find_peaks
from tests.packs import pack_of


def beam(log_probs, steps, classes, lm=None, width=10, alpha=0.4, beta=0.0, **limits):
    batch = np.arange(len(steps)), find_peaks(log_probs, torch.as_tensor(steps), **limits)
    return search([batch], classes, lm, width, alpha, beta)


def answers(rng, steps, lines, classes, peak=2.0):
    return torch.tensor(rng.normal(0, peak, (steps, lines, classes))).log_softmax(2)


def lines_of(rng, classes, count):
    weights = 1 / np.arange(1, len(classes) + 1)
    return ["".join(rng.choice([*classes], rng.integers(1, 12), p=weights / weights.sum())) for _ in range(count)]


def spelled(lm, text):
    """Log-probabilities of a line's characters and of its end, one step after another."""
    state, steps = np.array([lm.start]), []
    for symbol in [*(lm.classes.index(c) for c in text), lm.end]:
        score, state = lm.step(state, np.array([symbol]))
        steps.append(score[0])
    return steps


def test_probabilities_are_those_by_hand_and_sum_to_one_after_whatever_context():
    """Of a text of one line, which is too small to estimate discounts: 0.5 of 1 goes to what was never seen."""
    lm = NGram.train(["ab"], "ab", 2)
    first, _ = lm.step(np.full(3, lm.start), np.arange(3))
    np.testing.assert_allclose(np.exp(first), [0.5 + 0.5 / 3, 0.5 / 3, 0.5 / 3], rtol=1e-6)
    lm = NGram.train(lines_of(np.random.default_rng(0), "abcde", 300), "abcde", 3)
    states = np.arange(len(lm.back_off))
    total = sum(np.exp(lm.step(states, np.full(len(states), symbol))[0]) for symbol in range(6))
    np.testing.assert_allclose(total, 1, atol=1e-5)


def test_a_text_is_lines_or_a_file_and_other_characters_are_the_unknown_class_or_left_out(tmp_path):
    (tmp_path / "text.txt").write_bytes("\ufeffabX\r\n\r\n  baY\r\nb\u3000b".encode())
    given = NGram.train([f"ab{UNKNOWN}", f"ba{UNKNOWN}", "bb"], ["a", "b", UNKNOWN])
    for text in (tmp_path / "text.txt", ["abX", "", "baY", "bb"]):
        assert np.array_equal(NGram.train(text, ["a", "b", UNKNOWN]).log_probs, given.log_probs)
    assert np.array_equal(NGram.train(["aXb"], "ab").log_probs, NGram.train(["ab"], "ab").log_probs)
    refused(PackError, "at least one character of the classes", NGram.train, ["\n \n"], "ab")


@pytest.mark.parametrize("peak", [0.5, 6.0])
@pytest.mark.parametrize("with_lm", [False, True])
def test_the_search_finds_the_best_of_all_texts(peak, with_lm):
    """By their CTC losses, with their length and what the model thinks of them."""
    rng, frames = np.random.default_rng(7), 4
    lm = NGram.train(lines_of(rng, "abc", 60), "abc", 3) if with_lm else None
    texts = ["".join(text) for n in range(frames + 1) for text in itertools.product("abc", repeat=n)]
    labels = [torch.tensor([1 + "abc".index(c) for c in text], dtype=torch.long) for text in texts]
    for _ in range(30):
        logits = answers(rng, frames, 1, 4, peak)
        score = [
            -F.ctc_loss(logits[:, 0], label, torch.tensor(frames), torch.tensor(len(text)), reduction="sum").item()
            + 0.4 * len(text)
            + (1.5 * sum(spelled(lm, text)) if lm else 0.0)
            for text, label in zip(texts, labels, strict=True)
        ]
        settings = {"width": 200, "alpha": 1.5, "beta": 0.4, "candidates": 3, "least": 0.0}
        assert beam(logits, [frames], "abc", lm, **settings) == [texts[int(np.argmax(score))]]


def test_logits_padding_and_batches_give_the_same_texts():
    rng = np.random.default_rng(1)
    log_probs, steps = answers(rng, 12, 30, 8, 4.0).float(), torch.tensor(rng.integers(0, 13, 30))
    classes = "abcdefg"
    lm = NGram.train(lines_of(rng, classes, 50), classes)
    whole = beam(log_probs, steps, classes, lm)
    assert beam(log_probs + torch.randn(12, 30, 1), steps, classes, lm) == whole  # logits
    assert [beam(log_probs[:, [i]], steps[[i]], classes, lm)[0] for i in range(30)] == whole
    padded = torch.cat([log_probs, torch.full((6, 30, 8), math.nan)])  # beyond a line's own steps nothing is read
    assert beam(padded, steps, classes, lm) == whole
    refused(NbtoolsError, "train it with the pack's classes", beam, log_probs, steps, classes, NGram.train(["b"], "ba"))


class Spelling(torch.nn.Module):
    """Takes a picture's columns for log-probabilities: what it answers is what was drawn."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor(6.0))

    def forward(self, batch):
        assert not self.training
        return batch["image"][:, 0].permute(2, 0, 1) * self.scale, batch["image_length"]


def test_a_language_model_helps(tmp_path):
    """With 60 lines of a language of four characters, blurred, from 3 to 24 columns wide."""
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
    pack = pack_of(samples, tmp_path, task="hwdb", split="val", options={"height": 6}, **shape)
    lm = NGram.train(texts[:30], classes, 2)
    peaks = peaks_of(Spelling(), pack, hwdb.Plan(amp="bf16"), np.arange(30, 60))
    alone = (peaks_of(Spelling(), pack, hwdb.Plan(amp="bf16"), [i]) for i in range(30, 60))
    assert search(peaks, classes) == [search(each, classes)[0] for each in alone]
    plain, better = (hwdb.scores(texts[30:], search(peaks, classes, lm, 10, alpha))["cer"] for alpha in (0.0, 0.5))
    assert better < 0.7 * plain


def test_scores_of_texts_are_those_of_an_evaluation():
    scores = hwdb.scores(["手写中文", f"手{UNKNOWN}", "文"], ["手中文a", f"手{UNKNOWN}", "文"])
    assert scores == {"cer": 3 / 7, "ar": 4 / 7, "cr": 5 / 7, "whole_accuracy": 1 / 3}
