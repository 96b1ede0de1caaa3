"""What the tasks share: metrics, CTC, source files, lists, the table of broken rules, demo folders."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from acting import refused
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tape import cudnn_ctc
from torch.nn import functional as F

from nbtools.errors import PackError
from nbtools.tasks import captcha
from nbtools.tasks.common import ctc, files, metrics


def test_cer_ar_and_cr_by_their_definitions_over_all_characters():
    guesses, truths = ["abd", "ab", "xabc", "abc"], ["abc", "abc", "abc", "abc"]  # S, D, I, right: 12 characters
    expected = {"cer": (3, 12), "ar": (9, 12), "cr": (10, 12), "whole_accuracy": (1, 4)}
    assert metrics.text_metrics(guesses, truths) == expected
    assert metrics.text_metrics(["aaaaaa"], ["b"])["ar"] == (-5, 1)
    predicted, target = torch.tensor([[1, 2, 0], [1, 1, 1], [0, 2, 2]]), torch.tensor([[1, 2, 0], [1, 0, 1], [2, 2, 0]])
    counts = captcha.metrics(F.one_hot(predicted), {"label": target})
    assert counts == {"char_accuracy": (6, 9), "whole_accuracy": (1, 3)}


@given(st.lists(st.integers(0, 2), max_size=6), st.integers(1, 9))
def test_a_text_fits_exactly_where_its_ctc_loss_is_finite(text, steps):
    labels = torch.tensor([text + [text[-1] if text else 0] * 2])  # padding that looks like a repeat
    length = torch.tensor([len(text)])
    fits = ctc.feasible(torch.tensor([steps]), labels, length)
    loss = ctc.loss((torch.zeros(steps, 1, 4), torch.tensor([steps])), labels, length)
    assert bool(fits) == bool(torch.isfinite(loss)) == (steps >= ctc.needed_steps(text))


def test_greedy_decoding_merges_repeats_drops_blanks_and_ends_with_the_sample():
    path = torch.tensor([[1, 1, 0, 1, 2, 2, 0, 3], [0, 0, 3, 3, 0, 2, 2, 2]])
    read = ctc.greedy((F.one_hot(path.t(), 4).float(), torch.tensor([8, 5])))
    assert read == ctc.texts(torch.tensor([[0, 0, 1, 2], [2, 9, 9, 9]]), torch.tensor([4, 1]))


def test_the_nearest_folder_that_names_a_split_gives_it():
    splits = {
        "train": ["train/a.png", "test/train/a.png"],
        "val": ["Validation/x/a.png", "FSL105_val/clip.npz"],
        "test": ["HWDB2.0Test.zip/001-P16.dgrl#3", "testing-1/a.png"],
        None: ["contest/a.png", "trainers/a.png", "train.png"],
    }
    found = {split: {*map(files.split_of, names)} for split, names in splits.items()}
    assert found == {split: {split} for split in splits}


def test_hidden_colours_of_transparent_pixels_do_not_show(tmp_path):
    for mode, colour in (("RGBA", (0, 0, 0, 0)), ("LA", (0, 0)), ("P", 0)):
        image = Image.new(mode, (4, 4), colour)
        image.info = {"transparency": 0} if mode == "P" else {}
        image.save(tmp_path / "clear.png")
        for wanted in ("RGB", "L"):
            assert np.asarray(files.decode_image(tmp_path / "clear.png", wanted)).min() == 255


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("separator", files.SEPARATORS)
def test_a_list_is_cut_at_the_separator_with_which_its_rows_fit_and_quotes_hide_others(separator, encoding):
    text = 'name#n\r\n\r\n"a,;|\tz "# 1\r\ndir\\b#2#""\r\n'.replace("#", separator)
    rows = files.read_rows(files.decode_text(text.encode(encoding), ""), "", lambda cells: cells[1:2] in (["1"], ["2"]))
    assert rows == [(3, ["a,;|\tz" if separator != " " else "a,;| z", "1"]), (4, ["dir\\b", "2", ""])]


def test_a_table_that_is_no_utf_8_names_the_file_and_the_place():
    with pytest.raises(PackError, match=r"labels\.csv: .*UTF-8 text, got byte 0xff at offset 12; save it as UTF-8"):
        files.decode_text(b"file,label\na\xff,1\n", "labels.csv")


def test_a_demo_replaces_a_demo_and_neither_mixes_with_other_data_nor_removes_it(tmp_path, monkeypatch):
    def contents(*names):
        return ((name, name.encode) for name in names)

    monkeypatch.setenv("HOME", str(tmp_path))
    folder = files.write_demo("~/new", contents("train/a.png", "val/b.png", "labels.csv"), (".png",))
    assert (tmp_path / "new/val/b.png").read_bytes() == b"val/b.png"
    files.write_demo(folder, contents("train/c.png"), (".png",))
    assert files.walk(folder) == ["train/c.png"]
    (tmp_path / "real").mkdir()
    for place, name in ((folder, "planted.png"), (tmp_path / "real", "1.PNG")):
        (place / name).write_text("mine")
        refused(PackError, rf"{name} was not written by this demo", files.write_demo, place, contents(name), (".png",))
        assert (place / name).read_text() == "mine"


T, B, N, C = 20, 6, 5, 9


def operator(logits, texts, steps, lengths, blank, deterministic, zero_infinity):
    """As cuDNN's operator: the gradient of logits is anything beyond a sample's steps."""
    assert (texts.dtype, steps.dtype, lengths.dtype) == (torch.int32,) * 3
    assert len(texts) == B * N
    assert deterministic
    assert min(lengths) > 0
    each, gradient = cudnn_ctc(logits, texts, steps, lengths, blank, deterministic, zero_infinity)
    for b, last in enumerate(steps.tolist()):
        gradient[last:, b] = torch.nan
    return each, gradient


@pytest.fixture
def batch(monkeypatch):
    monkeypatch.setattr(torch.ops.aten, "_cudnn_ctc_loss", SimpleNamespace(Tensor=operator), raising=False)
    torch.manual_seed(0)
    logits = torch.randn(T, B, C, requires_grad=True)
    lengths, steps = torch.tensor([5, 1, 3, 5, 0, 4]), torch.tensor([20, 7, 3, 4, 9, 12])
    return logits, torch.randint(C - 1, (B, N)), steps, lengths


def test_losses_and_gradients_by_cudnn_are_torchs_own_where_the_text_fits(batch):
    """By torch's own loss in the operator's place; tests/cuda compares the operator itself."""
    logits, labels, steps, lengths = batch
    labels[2, :3] = torch.tensor([1, 2, 3])  # just fits
    fits = ctc.feasible(steps, labels, lengths)
    assert fits.tolist() == [True, True, True, False, True, True]
    each = ctc.cudnn_losses(logits, labels, steps, lengths)
    expected = F.ctc_loss(logits.log_softmax(2), labels + 1, steps, lengths, reduction="none")
    used = fits & (lengths > 0)
    torch.testing.assert_close(each[used], expected[used])
    assert each.isinf().tolist() == expected.isinf().tolist() == (~fits).tolist()
    assert each[4] == 0
    weights = torch.arange(1.0, B + 1) * used
    [mine] = torch.autograd.grad((each.nan_to_num(posinf=0.0) * weights).sum(), logits)
    [theirs] = torch.autograd.grad((expected[used] * weights[used]).sum(), logits)
    torch.testing.assert_close(mine[:, used], theirs[:, used], atol=1e-5, rtol=1e-4)
    assert not mine[:, ~used].any()


def test_an_operator_of_cudnn_that_disagrees_or_is_missing_is_not_used(batch, monkeypatch):
    monkeypatch.setattr(f"{__name__}.B", 3)
    monkeypatch.setattr(f"{__name__}.N", 3)
    agrees = ctc.cudnn_agrees.__wrapped__
    assert agrees(torch.device("cpu"))

    def doubled(*values):
        each, gradient = operator(*values)
        return 2 * each, gradient

    for other in (SimpleNamespace(Tensor=doubled), SimpleNamespace()):
        monkeypatch.setattr(torch.ops.aten, "_cudnn_ctc_loss", other)
        assert not agrees(torch.device("cpu"))
