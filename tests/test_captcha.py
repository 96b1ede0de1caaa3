"""The captcha task: demo data, both layouts, bad files, the three networks, and the faults of the guide's scripts."""

import pickle
import shutil
import sys

import numpy as np
import pytest
import torch
from IPython.core.formatters import DisplayFormatter
from PIL import Image, ImageDraw
from torch.nn import functional as F

from nbtools.data import Card, Draws, collate, open_feed
from nbtools.data.pack import Column
from nbtools.errors import MissingExtra, NbtoolsError, PackError, PlanError
from nbtools.measure import Machine, decide
from nbtools.tasks import captcha
from nbtools.tasks.captcha import augment, ink, networks
from nbtools.tasks.common import ctc
from nbtools.train.scoring import evaluate

LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NBTOOLS_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def fixed(tmp_path_factory):
    """60 captchas of four digits, small so that even the guide's network is quick."""
    folder = captcha.demo(tmp_path_factory.mktemp("fixed"), 60, size=(24, 64))
    return captcha.pack(folder, progress=False)


@pytest.fixture(scope="module")
def lines(tmp_path_factory):
    folder = captcha.demo(tmp_path_factory.mktemp("lines"), 40, alphabet=LETTERS, length=(4, 8))
    return captcha.pack(folder, progress=False)


def raw_batch(pack, ids):
    raw = collate([pack.sample(i) for i in ids], pack.columns)
    return {**raw, "id": torch.tensor(list(ids))}


def png(path, size=(64, 24), colour: int | tuple[int, ...] = 255, mode="L"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)
    return path


def opened(path):
    with Image.open(path) as image:
        return image.copy()


# -- demo


def test_demo_writes_the_raw_format_and_the_same_bytes_for_the_same_seed(tmp_path):
    first = captcha.demo(tmp_path / "a", 30, alphabet="XY7", length=5)
    again = captcha.demo(tmp_path / "b", 20, alphabet="XY7", length=5)
    other = captcha.demo(tmp_path / "c", 20, alphabet="XY7", length=5, seed=1)
    files = sorted(path.name for path in first.iterdir())
    assert sorted(int(name.removesuffix(".png").split("_")[1]) for name in files) == list(range(30))
    assert all(set(name.split("_")[0]) <= set("XY7") and len(name.split("_")[0]) == 5 for name in files)
    for path in again.iterdir():
        assert path.read_bytes() == (first / path.name).read_bytes()
    assert {p.name for p in other.iterdir()} != {p.name for p in again.iterdir()}
    assert opened(first / files[0]).size == (160, 60)


def test_demo_of_varying_length_grows_in_width(tmp_path):
    widths = {}
    for path in captcha.demo(tmp_path, 30, length=(4, 8)).iterdir():
        widths[len(path.name.split("_")[0])] = opened(path).size
    assert {length: size[0] for length, size in widths.items()} == {length: 40 * length for length in widths}
    assert len(widths) > 2


def test_demo_gives_the_captcha_package_its_own_randomness_back(tmp_path):
    from captcha import image

    before = vars(image)["secrets"]
    captcha.demo(tmp_path, 2)
    assert vars(image)["secrets"] is before


def test_demo_without_the_captcha_package_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "captcha", None)
    with pytest.raises(MissingExtra, match="pip install captcha"):
        captcha.demo(tmp_path, 2)


@pytest.mark.parametrize("wrong", [{"count": 0}, {"alphabet": ""}, {"length": 0}, {"length": (8, 4)}])
def test_demo_refuses_an_impossible_request(tmp_path, wrong):
    with pytest.raises(PackError, match=r"count ≥ 1, an alphabet, and length ≥ 1"):
        captcha.demo(tmp_path / "never", **{"count": 2, **wrong})
    assert not (tmp_path / "never").exists()


# -- pack


def test_a_fixed_pack_holds_the_grey_image_and_the_text_of_the_name(fixed):
    assert fixed.options["layout"] == "fixed"
    assert fixed.columns["image"] == Column("fixed", "|u1", (24, 64))
    for i in (0, 17, 59):
        path = fixed.raw.source / fixed.names[i]
        assert np.array_equal(fixed.sample(i)["image"], np.asarray(opened(path).convert("L")))
        assert "".join(fixed.classes[k] for k in fixed.sample(i)["label"]) == path.name.split("_")[0]


def test_lines_keep_their_own_width_and_length(lines):
    assert (lines.options["layout"], lines.card.bucket_by) == ("lines", "image")
    samples = [lines.sample(i) for i in range(len(lines))]
    assert {len(s["label"]) for s in samples} == {4, 5, 6, 7, 8}
    assert len({len(s["image"]) for s in samples}) > 5
    assert {s["image"].shape[1] for s in samples} == {32}


def test_packing_again_opens_the_finished_pack(fixed):
    again = captcha.pack(fixed.raw.source, progress=False)
    assert again.folder == fixed.folder
    assert captcha.pack(fixed.folder, progress=False).card == fixed.card


def test_test_takes_exactly_as_many_as_asked(fixed):
    pack = captcha.pack(fixed.raw.source, val=7, test=11, progress=False)
    assert pack.splits == {"train": 42, "val": 7, "test": 11}


def test_the_sources_own_folders_are_its_splits(tmp_path):
    for folder, names in {"train": "abcd", "valid": "ef", "test": "g"}.items():
        for k, text in enumerate(names):
            png(tmp_path / folder / f"{text}{text}_{k}.png")
    assert captcha.pack(tmp_path, progress=False).splits == {"train": 4, "val": 2, "test": 1}


@pytest.mark.parametrize(
    ("label", "name"),
    [
        ("_", "Ab3_17_x.png"),
        ("-", "Ab3-0.png"),
        (r"^\d+\.(\w+)$", "0017.Ab3.png"),
        (r"(?:img )([^ ]+)", "img Ab3 2.png"),
    ],
)
def test_the_label_pattern_is_the_callers(tmp_path, label, name):
    png(tmp_path / name)
    pack = captcha.pack(tmp_path, label=label, layout="fixed", progress=False)
    assert pack.classes == ["3", "A", "b"]
    assert pack.sample(0)["label"].tolist() == [1, 2, 0]


def test_case_can_be_folded(tmp_path):
    png(tmp_path / "Aa_1.png")
    assert captcha.pack(tmp_path, case="lower", progress=False).classes == ["a"]
    assert captcha.pack(tmp_path, case="upper", progress=False).classes == ["A"]


def test_every_bad_file_is_in_the_table_with_its_rule_and_the_rest_is_packed(fixed, tmp_path):
    source = shutil.copytree(fixed.raw.source, tmp_path / "source")
    good = next(source.iterdir())
    (source / "1111_t.png").write_bytes(good.read_bytes()[:-300])
    (source / "2222_n.png").write_text("not an image")
    (source / "notes.txt").write_text("notes")
    png(source / "3333_s.png", size=(65, 24))
    png(source / "44O4_u.png")
    png(source / "5555.png")
    png(source / "_e.png")
    png(source / "66666_l.png")
    (source / ".hidden.png").write_text("")
    pack = captcha.pack(source, classes="0123456789", progress=False)
    rules = {row["file"]: (row["value"], row["rule"], row["fix"]) for row in pack.bad.to_dict("records")}
    assert len(pack) == 60
    assert rules.pop("1111_t.png")[1] == rules.pop("2222_n.png")[1] == "the file is a whole image"
    assert rules.pop("notes.txt")[1].startswith("images end in .png")
    assert rules.pop("3333_s.png") == (
        "24 × 65 pixels (height × width)",
        "images are 24 × 64 pixels (height × width)",
        'resize it, or pack with layout="lines"',
    )
    assert rules.pop("44O4_u.png")[:2] == ("O", "characters are in classes")
    assert rules.pop("5555.png")[1] == "the name fits the label pattern '_'"
    assert rules.pop("_e.png")[1] == "the label is not empty"
    assert rules.pop("66666_l.png")[:2] == ("66666", "labels have 4 characters")
    assert rules == {}


def test_a_line_too_short_for_ctc_is_reported_when_it_is_packed(lines, tmp_path):
    source = shutil.copytree(lines.raw.source, tmp_path / "source")
    png(source / "aabbccddee_9.png", size=(40, 40))
    pack = captcha.pack(source, height=16, progress=False)
    [row] = pack.bad.to_dict("records")
    assert (row["file"], row["value"]) == ("aabbccddee_9.png", "2 steps")
    assert row["rule"] == "15 time steps of 4 pixels for 'aabbccddee'"


@pytest.mark.parametrize(
    ("text", "columns", "fits"),
    [("abc", 12, True), ("abc", 8, False), ("abc", 9, True), ("aab", 12, False), ("aab", 13, True), ("aaa", 17, True)],
)
def test_a_reported_line_is_one_whose_ctc_loss_is_infinite(text, columns, fits):
    from nbtools.tasks.captcha.data import infeasible

    steps = torch.tensor([-(-columns // 4)])
    logits = torch.zeros(int(steps), 1, 5)
    target = torch.tensor([["abc".index(c) for c in text]])
    loss = ctc.loss((logits, steps), target, torch.tensor([len(text)]))
    assert (infeasible(text, columns) is None) == bool(torch.isfinite(loss)) == fits


def test_an_empty_folder_names_itself_and_what_was_looked_for(tmp_path):
    with pytest.raises(NbtoolsError, match=f"{tmp_path} holds no files"):
        captcha.pack(tmp_path, progress=False)
    (tmp_path / ".DS_Store").write_text("")
    with pytest.raises(PackError, match=rf"{tmp_path}: no image \(\.png.* whose name holds its text; it is empty"):
        captcha.pack(tmp_path, progress=False)


def test_a_folder_where_nothing_is_usable_says_why(tmp_path):
    (tmp_path / "1234.png").write_text("")
    with pytest.raises(PackError, match=r"the first of 1 file is 1234\.png.* give label="):
        captcha.pack(tmp_path, progress=False)
    (tmp_path / "1234_1.png").write_text("no image")
    with pytest.raises(PackError, match="none of 1 file is a readable image"):
        captcha.pack(tmp_path, progress=False)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"layout": "grid"}, "layout must be one of auto, fixed, lines, got 'grid'"),
        ({"case": "title"}, "case must be one of keep, lower, upper"),
        ({"height": 8}, "height must be ≥ 16, got 8"),
        ({"classes": "aab"}, "single characters, each once"),
        ({"label": "(x"}, "no regular expression"),
        ({"label": "abc"}, "have a group around the text"),
    ],
)
def test_a_wrong_option_is_named(fixed, wrong, said):
    with pytest.raises(PackError, match=said):
        captcha.pack(fixed.raw.source, progress=False, **wrong)


def test_one_sample_is_a_pack(tmp_path):
    png(tmp_path / "77_1.png")
    assert sum(captcha.pack(tmp_path, progress=False).splits.values()) == 1


# -- ink


def paper(width=200, height=60, colour=(255, 255, 255)):
    image = Image.new("RGB", (width, height), colour)
    return image, ImageDraw.Draw(image)


def test_hidden_colours_of_transparent_pixels_do_not_show(tmp_path):
    path = png(tmp_path / "a_1.png", colour=(0, 0, 0, 0), mode="RGBA")
    assert captcha.read(path, {"layout": "fixed", "size": [24, 64]})["image"].min() == 255


def test_black_hairlines_go_and_black_text_stays():
    coloured, pen = paper()
    pen.rectangle((50, 20, 70, 40), fill=(200, 80, 80))
    clean = ink.line_of(np.asarray(coloured), 32)
    pen.line((0, 5, 199, 50), fill=0)
    crossed = ink.line_of(np.asarray(coloured), 32)
    assert crossed.shape == clean.shape
    assert np.abs(crossed.astype(int) - clean).mean() < 3  # a pixel or two at the glyph's edge
    written, pen = paper()
    pen.rectangle((50, 20, 70, 40), fill=0)
    assert ink.line_of(np.asarray(written), 32).max() == 255


def test_a_pale_stroke_is_as_strong_as_a_dark_one_on_any_paper():
    for colour in ((255, 255, 255), (20, 30, 60)):
        image, pen = paper(colour=colour)
        pen.rectangle((40, 20, 60, 40), fill=tuple(abs(c - 200) for c in colour))
        pen.rectangle((120, 20, 140, 40), fill=tuple(abs(c - 40) for c in colour))
        line = ink.line_of(np.asarray(image), 32)
        half = len(line) // 2
        assert line[:half].max() == line[half:].max() == 255


def test_margins_and_wide_gaps_are_cut_to_a_few_columns():
    image, pen = paper(width=400)
    pen.rectangle((100, 14, 119, 45), fill=(200, 0, 0))
    pen.rectangle((300, 14, 319, 45), fill=(0, 0, 200))
    columns = ink.line_of(np.asarray(image), 38).max(1) > 0
    assert (columns.sum(), len(columns)) == (40, 40 + ink.GAP + 2 * ink.MARGIN)


def test_a_blank_image_is_a_blank_line():
    image, _ = paper(width=90, height=30)
    line = ink.line_of(np.asarray(image), 32)
    assert line.shape[1] == 32
    assert len(line) >= 1
    assert line.max() == 0


# -- networks


def card_of(layout, **options):
    return Card("captcha", list(LETTERS), {"layout": layout, **options}, {}, {"train": 100, "val": 10, "test": 10})


def test_the_guides_network_has_its_19_07_million_parameters():
    card = card_of("fixed", size=[60, 160], length=4)
    network = captcha.model(card, captcha.PLAN)
    assert round(sum(p.numel() for p in network.parameters()) / 1e6, 2) == 19.07
    assert network({"image": torch.zeros(2, 1, 60, 160)}).shape == (2, 4, 36)


@pytest.mark.parametrize(
    ("network", "loss", "lr", "steps"),
    [
        ("guide", "soft_margin", 1e-3, 16),
        ("guide", "cross_entropy", 1e-3, 12),
        ("small", "soft_margin", 5e-3, 80),
        ("small", "cross_entropy", 5e-3, 80),
        ("ctc", "soft_margin", 3e-3, 70),
    ],
)
def test_each_network_overfits_one_batch(fixed, lines, network, loss, lr, steps):
    pack = lines if network == "ctc" else fixed
    plan = captcha.Plan(network=network, loss=loss)
    torch.manual_seed(0)
    model = captcha.model(pack, plan)
    for module in model.modules():
        if isinstance(module, (torch.nn.Dropout, torch.nn.Dropout2d)):
            module.p = 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    batch = captcha.batch(raw_batch(pack, range(4)), plan, None)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_sum, count = captcha.loss(model, batch, plan)
        (loss_sum / count).backward()
        optimizer.step()
    read = captcha.decode(model(batch), pack)
    assert read == [pack.names[i].split("_")[0] for i in range(4)]


@pytest.mark.parametrize("network", ["guide", "small", "ctc"])
def test_recomputing_activations_changes_no_gradient_and_no_running_average(fixed, lines, network):
    pack = lines if network == "ctc" else fixed
    results = []
    for recompute in (False, True):
        plan = captcha.Plan(network=network, checkpoint_activations=recompute)
        torch.manual_seed(0)
        model = captcha.model(pack, plan)
        captcha.loss(model, captcha.batch(raw_batch(pack, range(3)), plan, None), plan)[0].backward()
        results.append([*model.buffers(), *(p.grad for p in model.parameters())])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize(("network", "layout"), [("guide", "lines"), ("small", "lines"), ("ctc", "fixed")])
def test_a_network_that_cannot_read_the_layout_is_refused(network, layout):
    card = card_of(layout, size=[60, 160], length=4, height=32)
    with pytest.raises(PlanError, match=f'network = "{network}" cannot read captchas of layout "{layout}"'):
        captcha.model(card, captcha.PLAN.replace(network=network))


# -- loss, metrics, decoding


def test_the_losses_are_sums_of_torchs_own(fixed):
    logits = torch.randn(5, 4, 10)
    labels = torch.randint(10, (5, 4))
    batch = {"label": labels}
    total, count = captcha.loss(lambda _: logits, batch, captcha.Plan(loss="soft_margin"))
    wanted = torch.nn.MultiLabelSoftMarginLoss()(logits.view(5, 40), F.one_hot(labels, 10).float().view(5, 40))
    assert torch.isclose(total / count, wanted)
    total, count = captcha.loss(lambda _: logits, batch, captcha.Plan(loss="cross_entropy"))
    assert torch.isclose(total / count, F.cross_entropy(logits.view(20, 10), labels.view(20)))


def test_ctc_counts_each_lines_own_steps_and_not_the_padding():
    torch.manual_seed(0)
    logits, steps = torch.randn(12, 3, 6), torch.tensor([12, 7, 9])
    labels, lengths = torch.tensor([[0, 1, 2, 3], [4, 4, 0, 0], [2, 0, 0, 0]]), torch.tensor([4, 2, 1])
    together = ctc.loss((logits, steps), labels, lengths)
    alone = [
        F.ctc_loss(logits[:t, b].log_softmax(1), labels[b, :n] + 1, torch.tensor(t), torch.tensor(n), reduction="sum")
        for b, (t, n) in enumerate(zip(steps.tolist(), lengths.tolist(), strict=True))
    ]
    assert torch.isclose(together, torch.stack(alone).sum())


def test_ctc_leaves_autocast():
    logits = torch.randn(9, 1, 4).bfloat16().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = ctc.loss((logits, torch.tensor([9])), torch.tensor([[0, 1]]), torch.tensor([2]))
    loss.backward()
    assert loss.dtype == torch.float32
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def test_greedy_decoding_merges_repeats_drops_blanks_and_ends_with_the_line():
    path = torch.tensor([[1, 1, 0, 1, 2, 2, 0, 3], [0, 0, 3, 3, 0, 2, 2, 2]])
    logits = F.one_hot(path.t(), 4).float()
    card = Card("captcha", ["a", "b", "c"], {}, {}, {})
    assert captcha.decode((logits, torch.tensor([8, 5])), card) == ["aabc", "c"]


def test_scores_count_samples_and_not_batches(fixed):
    torch.manual_seed(0)
    model = captcha.model(fixed, captcha.Plan(network="small")).eval()
    truth = {i: fixed.sample(i)["label"].tolist() for i in fixed.ids("train")}
    with torch.no_grad():
        guesses = {
            i: model(captcha.batch(raw_batch(fixed, [i]), captcha.PLAN, None))[0].argmax(1).tolist() for i in truth
        }
    characters = sum(a == b for i in truth for a, b in zip(guesses[i], truth[i], strict=True)) / (4 * len(truth))
    for batch_size in (1, 7, len(truth)):
        plan = captcha.Plan(network="small", batch_size=batch_size)
        found = evaluate(captcha, model, fixed, plan, "train")
        assert found["char_accuracy"] == pytest.approx(characters)
        assert found["whole_accuracy"] == sum(guesses[i] == truth[i] for i in truth) / len(truth)


def test_a_line_reads_the_same_in_any_batch(lines):
    """Padding must not leak into what is read, beyond rounding."""
    torch.manual_seed(0)
    model = captcha.model(lines, captcha.PLAN).eval()
    with torch.no_grad():
        logits, steps = model(captcha.batch(raw_batch(lines, range(5)), captcha.PLAN, None))
        alone, [own] = model(captcha.batch(raw_batch(lines, [2]), captcha.PLAN, None))
    assert steps[2] == own == len(alone)
    assert torch.allclose(logits[: own - 16, 2], alone[: own - 16, 0], atol=1e-4)


# -- data as the loop meets it


def test_the_data_set_can_be_sent_to_workers_and_gives_the_packs_values(fixed):
    """The guide's class was local to a function, which workers cannot unpickle."""
    copy = pickle.loads(pickle.dumps(fixed.raw))
    assert np.array_equal(copy[3]["image"], fixed.sample(3)["image"])
    ids = np.arange(9)
    plan = captcha.Plan(feed="workers", workers=1, batch_size=9)
    [raw] = open_feed(fixed, plan, torch.device("cpu"))([ids])
    assert torch.equal(raw["image"], torch.from_numpy(fixed.arrays["image"][ids]))
    assert torch.equal(raw["label"], torch.from_numpy(fixed.arrays["label"][ids]))


def test_augmentation_changes_samples_and_evaluation_never_does(fixed, lines):
    for pack in (fixed, lines):
        raw, plan = raw_batch(pack, range(4)), captcha.Plan(augment=1.0)
        plain, again = captcha.batch(raw, plan, None), captcha.batch(raw, plan, None)
        changed = captcha.batch(raw, plan, Draws(0, 0, raw["id"]))
        assert torch.equal(plain["image"], again["image"])
        width = plain["image"].shape[3]
        assert (changed["image"][..., :width] - plain["image"]).abs().mean() > 0.02


@pytest.mark.parametrize("name", ["fixed", "lines"])
def test_augmentation_of_a_sample_does_not_depend_on_its_batch(name, request):
    pack = request.getfixturevalue(name)
    plan = captcha.Plan(augment=1.0)
    together, alone = raw_batch(pack, range(5)), raw_batch(pack, [3])
    a = captcha.batch(together, plan, Draws(1, 2, together["id"]))
    b = captcha.batch(alone, plan, Draws(1, 2, alone["id"]))
    width = min(a["image"].shape[3], b["image"].shape[3])
    assert torch.allclose(a["image"][3, ..., :width], b["image"][0, ..., :width], atol=2e-3)
    if name == "lines":
        assert a["image_length"][3] == b["image_length"][0]


def test_a_bent_line_has_never_fewer_steps_than_it_had():
    lengths = torch.tensor([40, 64, 17])
    for epoch in range(20):
        ids = torch.arange(3)
        moved, new = augment.distort(torch.ones(3, 1, 32, 64), lengths, Draws(0, epoch, ids), 1.5)
        assert (new >= lengths).all()
        assert (new <= moved.shape[3]).all()


# -- advice, pictures


@pytest.mark.parametrize("layout", ["fixed", "lines"])
@pytest.mark.parametrize("accelerator", ["cuda", "mps", "cpu"])
def test_advice_fits_the_layout_and_gives_every_number_a_reason(layout, accelerator):
    card = card_of(layout, size=[60, 160], length=4, height=32)
    machine = Machine(accelerator, "x", 40 if accelerator == "cuda" else 0, 1, 2, (8, 0))
    advice = decide(captcha, card, machine)
    network = captcha.model(card, captcha.Plan.from_dict(advice.plan.to_dict()))
    assert isinstance(network, networks.Ctc) == (layout == "lines")
    assert all(reason for reason in advice.reasons.values())


def test_the_baseline_is_the_guides_and_runs_on_both_layouts(fixed, lines):
    base = captcha.BASELINE
    assert (base.batch_size, base.lr, base.optimizer, base.amp, base.feed, base.workers) == (
        64,
        2e-4,
        "adam",
        "off",
        "workers",
        0,
    )
    assert (base.epochs, base.min_lr, base.eval_every, base.schedule) == (150, 1e-6, 5, "cosine")
    assert isinstance(captcha.model(fixed, base), networks.Guide)
    assert isinstance(captcha.model(lines, base), networks.Ctc)


def test_show_draws_truth_and_marks_what_was_misread(fixed, lines, tmp_path):
    for pack in (fixed, lines):
        truth = ["".join(pack.classes[k] for k in pack.sample(i)["label"]) for i in range(3)]
        figure = captcha.show(pack, [0, 1, 2], predicted=[truth[0], "??", truth[2]])
        assert [axes.get_title() for axes in figure.axes] == [truth[0], f"{truth[1]} ≠ ??", truth[2]]
        assert len({axes.title.get_color() for axes in figure.axes}) == 2
        figure.savefig(tmp_path / "figure.png")
        assert [axes.get_title() for axes in captcha.show(pack, np.array([1])).axes] == [truth[1]]


def test_where_nothing_is_wrong_a_notebook_shows_a_sentence_and_no_empty_strip(fixed):
    for sheet in (captcha.show(fixed, []), captcha.show(fixed, [], [])):
        shown, _ = DisplayFormatter().format(sheet)
        assert shown == {"text/plain": "No samples to show: the list of ids is empty."}
