"""The captcha task: demo data, both layouts, bad files, the three networks, and the faults of the guide's scripts."""

import pickle
import shutil
import sys

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from torch.nn import functional as F

import nbtools as nb
from nbtools.data import IMAGES, Card, Draws, collate, open_feed
from nbtools.errors import MissingExtra, NbtoolsError, PackError, PlanError
from nbtools.measure import Machine, decide
from nbtools.tasks import captcha
from nbtools.train.evaluation import evaluate

pytestmark = pytest.mark.usefixtures("one_cache")

LETTERS = "0123456789abcdefghijklmnopqrstuvwxyz"


@pytest.fixture(scope="module")
def packs(tmp_path_factory):
    """60 captchas of four digits, small so that even the guide's network is quick, and 40 lines."""
    demos = {
        "fixed": captcha.demo(tmp_path_factory.mktemp("fixed"), 60, size=(24, 64)),
        "lines": captcha.demo(tmp_path_factory.mktemp("lines"), 40, alphabet=LETTERS, length=(4, 8)),
    }
    return {layout: captcha.pack(folder, progress=False) for layout, folder in demos.items()}


@pytest.fixture
def fixed(packs):
    return packs["fixed"]


@pytest.fixture
def lines(packs):
    return packs["lines"]


@pytest.fixture(params=["fixed", "lines"])
def pack(request, packs):
    return packs[request.param]


def raw_batch(pack, ids):
    raw = collate([pack.sample(i) for i in ids], pack.columns)
    return {**raw, "id": torch.tensor(list(ids))}


def png(path, size=(64, 24), colour=255, mode="L"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)
    return path


def card_of(layout):
    options = {"layout": layout, "size": [60, 160], "length": 4, "height": 32}
    return Card("captcha", list(LETTERS), options, {}, {"train": 100, "val": 10, "test": 10})


# Demo


def test_demo_writes_the_raw_format_and_the_same_bytes_for_the_same_seed(tmp_path):
    first = captcha.demo(tmp_path / "a", 30, alphabet="XY7", length=5)
    again = captcha.demo(tmp_path / "b", 20, alphabet="XY7", length=5)
    other = captcha.demo(tmp_path / "c", 20, alphabet="XY7", length=5, seed=1)
    names, fewer, different = (sorted(path.name for path in folder.glob("*.png")) for folder in (first, again, other))
    assert sorted(int(name.removesuffix(".png").split("_")[1]) for name in names) == list(range(30))
    assert all(set(name.split("_")[0]) <= set("XY7") and len(name.split("_")[0]) == 5 for name in names)
    assert all((again / name).read_bytes() == (first / name).read_bytes() for name in fewer)
    assert different != fewer
    with Image.open(first / names[0]) as image:
        assert image.size == (160, 60)


def test_demo_without_the_captcha_package_tells_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "captcha", None)
    with pytest.raises(MissingExtra, match="pip install captcha"):
        captcha.demo(tmp_path, 2)


@pytest.mark.parametrize("wrong", [{"count": 0}, {"alphabet": ""}, {"length": (8, 4)}])
def test_demo_refuses_an_impossible_request(tmp_path, wrong):
    with pytest.raises(PackError, match=f"{next(iter(wrong))} must be"):
        captcha.demo(tmp_path / "never", **{"count": 2, **wrong})
    assert not (tmp_path / "never").exists()


# Packing


def test_a_fixed_pack_holds_the_grey_image_and_the_text_of_the_name(fixed):
    assert (fixed.options["layout"], fixed.columns["image"].kind) == ("fixed", "fixed")
    for i in (0, 17, 59):
        with Image.open(fixed.raw.source / fixed.names[i]) as image:
            assert np.array_equal(fixed.sample(i)["image"], np.asarray(image.convert("L")))
        assert captcha.text_of(fixed, i) == fixed.names[i].split("_")[0]


def test_lines_keep_their_own_width_and_length(lines):
    assert (lines.options["layout"], lines.card.bucket_by) == ("lines", "image")
    samples = [lines.sample(i) for i in range(len(lines))]
    assert {len(s["label"]) for s in samples} == {4, 5, 6, 7, 8}
    assert len({len(s["image"]) for s in samples}) > 5
    assert {s["image"].shape[1] for s in samples} == {32}
    for name in lines.names[:8]:
        with Image.open(lines.raw.source / name) as image:
            assert image.width == 40 * len(name.split("_")[0])  # the demo's grow with their texts


@pytest.mark.parametrize(
    ("options", "name", "classes"),
    [
        ({}, "Ab3_17_x.png", "3Ab"),
        ({"label": "-"}, "Ab3-0.png", "3Ab"),
        ({"label": r"^\d+\.(\w+)$"}, "0017.Ab3.png", "3Ab"),
        ({"case": "lower"}, "Ab3_1.png", "3ab"),
        ({"case": "upper"}, "Ab3_1.png", "3AB"),
    ],
)
def test_the_label_pattern_and_the_case_are_the_callers(tmp_path, options, name, classes):
    png(tmp_path / name)
    pack = captcha.pack(tmp_path, layout="fixed", progress=False, **options)
    assert "".join(pack.classes) == classes
    assert pack.sample(0)["label"].tolist() == [1, 2, 0]
    assert sum(pack.splits.values()) == 1


def test_every_bad_file_is_in_the_table_with_its_rule_and_the_rest_is_packed(fixed, tmp_path):
    source = shutil.copytree(fixed.raw.source, tmp_path / "source")
    (source / "1111_t.png").write_bytes((source / fixed.names[0]).read_bytes()[:-300])
    (source / "2222_n.png").write_text("not an image")
    (source / "notes.txt").write_text("notes")
    png(source / "3333_s.png", size=(65, 24))
    for name in ("44O4_u.png", "5555.png", "_e.png", "66666_l.png"):
        png(source / name)
    (source / ".hidden.png").write_text("")
    pack = captcha.pack(source, classes="0123456789", progress=False)
    rows = {row["file"]: (row["value"], row["rule"], row["fix"]) for row in pack.bad.to_dict("records")}
    assert len(pack) == 60
    assert rows.pop("1111_t.png")[1] == rows.pop("2222_n.png")[1] == "the file must be a whole image"
    assert rows.pop("notes.txt")[:2] == (".txt", f"images must end in {', '.join(IMAGES)}")
    assert rows.pop("3333_s.png") == (
        "24 × 65 pixels (height × width)",
        "images must be 24 × 64 pixels (height × width)",
        'resize it, or pack with layout="lines"',
    )
    assert rows.pop("44O4_u.png")[:2] == ("O", "characters must be in classes")
    assert rows.pop("5555.png")[1] == "the name must match the label pattern '_'"
    assert rows.pop("_e.png")[1] == "the label must not be empty"
    assert rows.pop("66666_l.png")[:2] == ("66666", "labels must have 4 characters")
    assert rows == {}


def test_a_folder_where_nothing_is_usable_tells_why(tmp_path):
    for name, content, message in (
        (None, "", f"{tmp_path} holds no files"),
        (".DS_Store", "", rf"{tmp_path}: no image \(\.png.* whose name holds its text; it is empty"),
        ("1234.png", "", r"the first of 1 file is 1234\.png.* give label="),
        ("1234_1.png", "no image", r"none of 1 file is a readable image, from 1234_1\.png on"),
    ):
        if name:
            (tmp_path / name).write_text(content)
        with pytest.raises(NbtoolsError, match=message):
            captcha.pack(tmp_path, progress=False)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"layout": "grid"}, "layout must be one of auto, fixed, lines, got 'grid'"),
        ({"height": 8}, "height must be at least 16, got 8"),
        ({"classes": "aab"}, "classes must be single characters, each once, got 'a'"),
        ({"label": "(x"}, "not a regular expression"),
    ],
)
def test_a_wrong_option_is_named(tmp_path, wrong, message):
    png(tmp_path / "a_1.png")
    with pytest.raises(PackError, match=message):
        captcha.pack(tmp_path, progress=False, **wrong)


# Ink


@pytest.fixture
def ink_of(tmp_path):
    """What a pack holds of a drawing, whose pen is given a page (W, H) and its colour."""

    def read(draw, size=(200, 60), colour=(255, 255, 255), height=32):
        image = Image.new("RGB", size, colour)
        draw(ImageDraw.Draw(image))
        image.save(tmp_path / "drawn.png")
        return captcha.read(tmp_path / "drawn.png", {"layout": "lines", "height": height})["image"]

    return read


def test_black_hairlines_go_and_black_text_stays(ink_of):
    box = (50, 20, 70, 40)
    clean = ink_of(lambda pen: pen.rectangle(box, fill=(200, 80, 80)))
    crossed = ink_of(lambda pen: (pen.rectangle(box, fill=(200, 80, 80)), pen.line((0, 5, 199, 50), fill=0)))
    assert crossed.shape == clean.shape
    assert np.abs(crossed.astype(int) - clean).mean() < 3  # a pixel or two at the glyph's edge
    assert ink_of(lambda pen: pen.rectangle(box, fill=0)).max() == 255


# Networks


def test_the_guides_network_has_its_19_07_million_parameters():
    with torch.device("meta"):
        network = captcha.model(card_of("fixed"), captcha.PLAN)
    assert round(sum(p.numel() for p in network.parameters()) / 1e6, 2) == 19.07


@pytest.mark.parametrize(
    ("network", "loss", "lr", "steps"),
    [
        ("guide", "soft_margin", 1e-3, 8),
        ("small", "cross_entropy", 5e-3, 30),
        ("ctc", "soft_margin", 3e-3, 40),
    ],
)
def test_each_network_overfits_one_batch(packs, network, loss, lr, steps):
    pack = packs["lines" if network == "ctc" else "fixed"]
    plan = captcha.Plan(network=network, loss=loss)
    torch.manual_seed(0)
    model = captcha.model(pack, plan)
    for module in model.modules():
        if isinstance(module, (torch.nn.Dropout, torch.nn.Dropout2d)):
            module.p = 0.0
    optimizer = torch.optim.AdamW(model.parameters(), lr)
    ids = sorted(range(len(pack)), key=lambda i: len(pack.sample(i)["image"]))[:3]  # the shortest lines
    batch = captcha.batch(raw_batch(pack, ids), plan, None)
    for _ in range(steps):
        optimizer.zero_grad()
        loss_sum, count = captcha.loss(model, batch, plan)
        (loss_sum / count).backward()
        optimizer.step()
    assert captcha.decode(model(batch), pack) == [captcha.text_of(pack, i) for i in ids]


@pytest.mark.parametrize(("network", "layout"), [("guide", "lines"), ("small", "lines"), ("ctc", "fixed")])
def test_a_network_that_cannot_read_the_layout_is_refused(network, layout):
    with pytest.raises(PlanError, match=f'network = "{network}" cannot read captchas of layout "{layout}"'):
        captcha.model(card_of(layout), captcha.PLAN.replace(network=network))


# Loss, metrics, decoding


def test_the_losses_are_sums_of_torchs_own():
    logits, labels = torch.randn(5, 4, 10), torch.randint(10, (5, 4))
    one_hot = F.one_hot(labels, 10).float().view(5, 40)
    wanted = {
        "soft_margin": torch.nn.MultiLabelSoftMarginLoss()(logits.view(5, 40), one_hot),
        "cross_entropy": F.cross_entropy(logits.view(20, 10), labels.view(20)),
    }
    for name, mean in wanted.items():
        total, count = captcha.loss(lambda _: logits, {"label": labels}, captcha.Plan(loss=name))
        assert torch.isclose(total / count, mean)


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
        found = evaluate(captcha, model, fixed, captcha.Plan(network="small", batch_size=batch_size), "train")
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


# Batches as the loop meets them


def test_the_data_set_can_be_sent_to_workers_and_gives_the_packs_values(fixed):
    """The guide's class was local to a function, which workers cannot unpickle."""
    copy = pickle.loads(pickle.dumps(fixed.raw))
    assert np.array_equal(copy[3]["image"], fixed.sample(3)["image"])
    ids = np.arange(9)
    plan = captcha.Plan(feed="workers", workers=1, batch_size=9)
    [raw] = open_feed(fixed, plan, torch.device("cpu"))([ids])
    for column in ("image", "label"):
        assert torch.equal(raw[column], torch.from_numpy(fixed.arrays[column][ids]))


def test_augmentation_changes_samples_in_any_batch_alike_and_evaluation_never(pack):
    plan = captcha.Plan(augment=1.0)
    together, alone = raw_batch(pack, range(5)), raw_batch(pack, [3])
    plain, again = (captcha.batch(together, plan, None)["image"] for _ in range(2))
    a = captcha.batch(together, plan, Draws(1, 2, together["id"]))
    b = captcha.batch(alone, plan, Draws(1, 2, alone["id"]))
    assert torch.equal(plain, again)
    assert (a["image"][..., : plain.shape[3]] - plain).abs().mean() > 0.02
    width = min(a["image"].shape[3], b["image"].shape[3])
    assert torch.allclose(a["image"][3, ..., :width], b["image"][0, ..., :width], atol=2e-3)
    if "image_length" in a:  # a line never has fewer steps than it had
        assert a["image_length"][3] == b["image_length"][0]
        assert (together["image_length"] <= a["image_length"]).all()
        assert (a["image_length"] <= a["image"].shape[3]).all()


# Advice, pictures


@pytest.mark.parametrize("layout", ["fixed", "lines"])
@pytest.mark.parametrize("accelerator", ["cuda", "cpu"])
def test_advice_fits_the_layout_and_gives_every_number_a_reason(layout, accelerator):
    card = card_of(layout)
    advice = decide(captcha, card, Machine(accelerator, "x", 40 if accelerator == "cuda" else 0, 1, 2, (8, 0)))
    network = captcha.model(card, captcha.Plan.from_dict(advice.plan.to_dict()))
    assert (type(network).__name__ == "Ctc") == (layout == "lines")
    assert all(reason for reason in advice.reasons.values())


def test_the_baseline_is_the_guides_and_runs_on_both_layouts(pack):
    guide = {"batch_size": 64, "lr": 2e-4, "optimizer": "adam", "amp": "off", "feed": "workers", "workers": 0}
    guide |= {"epochs": 150, "min_lr": 1e-6, "eval_every": 5, "schedule": "cosine"}
    assert captcha.BASELINE.to_dict() | guide == captcha.BASELINE.to_dict()
    state = nb.TrainState(captcha, pack, captcha.BASELINE.replace(batch_size=4))
    assert next(record.kind for record in nb.train(captcha, state, pack)) == "step"


def test_show_draws_truth_and_marks_what_was_misread(pack):
    truth = [captcha.text_of(pack, i) for i in range(3)]
    sheet = captcha.show(pack, [0, 1, 2], predicted=[truth[0], "??", truth[2]])
    captions = {text.get_text(): text.get_color() for text in sheet.axes[0].texts if text.get_text()}
    assert list(captions) == [truth[0], f"{truth[1]} ≠ ??", truth[2]]
    assert captions[truth[0]] == captions[truth[2]] != captions[f"{truth[1]} ≠ ??"]
    assert captcha.preview(pack, 1, "??")[1:] == (truth[1], "??")
    assert captcha.preview(pack, 1, "??")[0].mean() > 128, "dark on light"
    with pytest.raises(PackError, match="predicted must be one text for each id, got 1 for 2 ids"):
        captcha.show(pack, [0, 1], ["a"])
