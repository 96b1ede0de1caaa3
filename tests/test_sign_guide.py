"""The folders of the sign-language guide open as they are: together, each by itself, and named apart."""

import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from guide_layouts import FEATURES, GLOSSES, KEYPOINTS, VALIDATION, sign_folders, sign_labels

import nbtools as nb
from nbtools.__main__ import main
from nbtools.data import Pack, open_feed
from nbtools.errors import PackError, TrainError
from nbtools.tasks import sign

pytestmark = pytest.mark.usefixtures("one_cache")

BOTH = "transformer_only+iv3_gru_only"
NETWORKS = {"transformer": "x", "gru": "features"}


@pytest.fixture(scope="module")
def processed(tmp_path_factory):
    """30 train clips: 10 with both halves, 10 with keypoints alone, 10 with features alone; 10 to validate."""
    return sign_folders(tmp_path_factory.mktemp("guide"), 40, together=10)


def packed(source, **options) -> Pack:
    return sign.pack(source, progress=False, **options)


def counts(pack: Pack) -> tuple[int, int, int]:
    return pack.splits["train"], pack.splits["val"], pack.splits["test"]


def fitted(pack: Pack, network: str, folder: Path) -> nb.Run:
    plan = sign.BASELINE.replace(network=network, epochs=1, batch_size=4, feed="auto")
    return nb.fit(sign, pack, plan, folder, receipt=False, progress=False)


def arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path) as file:
        return {key: file[key] for key in file.files}


# Together


def test_the_three_folders_are_one_pack_whose_third_validates(processed, tmp_path):
    report = nb.validate(sign, processed, progress=False)
    assert (report.clips, report.labelled, report.errors) == (40, 40, 0)
    rows = [(row.key, row.value) for row in report.rows if row.rule.startswith("all clips should have")]
    assert sorted(rows) == [("X", "10 of 40 have none"), ("X2048", "10 of 40 have none")]
    made = packed(processed)
    assert (counts(made), len(made.bad)) == ((30, 10, 0), 0)
    assert made.classes == list(GLOSSES), "the names of clips hold them"
    assert "6: how are you, thank you, good morning, " in str(made)
    assert {Path(made.names[i]).parent.name for i in made.ids("val")} == {VALIDATION}
    assert {Path(made.names[i]).parent.name for i in made.ids("train")} == {KEYPOINTS, FEATURES, BOTH}
    with tarfile.open(tmp_path / "processed.tar", "w") as file:
        file.add(processed, "processed")
    assert packed(tmp_path / "processed.tar").card == made.card


def test_a_clip_in_both_train_folders_is_one_sample_of_both(processed):
    made = packed(processed)
    joined = [i for i, name in enumerate(made.names) if name.startswith(f"{BOTH}/")]
    assert len(joined) == 10
    for i in joined:
        name, sample = Path(made.names[i]).name, made.sample(i)
        np.testing.assert_array_equal(sample["x"], arrays(processed / KEYPOINTS / name)["X"])
        np.testing.assert_array_equal(sample["mask"], arrays(processed / KEYPOINTS / name)["mask"])
        np.testing.assert_array_equal(sample["features"], arrays(processed / FEATURES / name)["X2048"])
        again = made.raw[i] if made.raw is not None else {}
        assert all((again[column] == values).all() for column, values in sample.items()), "raw files read the same"


@pytest.mark.parametrize("title", ["{}_labels.csv", "{}.csv"])
def test_a_list_above_the_folders_covers_the_one_in_its_name(processed, title, tmp_path):
    """All three have a clip of one name, with another label each."""
    names = (KEYPOINTS, FEATURES, VALIDATION)
    for gloss, name in enumerate(names):
        (tmp_path / name).mkdir()
        shutil.copy(next((processed / name).glob("*.npz")), tmp_path / name / "a.npz")
        sign_labels(tmp_path / title.format(name), [("a", str(gloss), "0")])
    made = packed(tmp_path, val=1)  # a number, of which nothing is left to draw
    assert {Path(n).parent.name: int(made.sample(i)["label"][0]) for i, n in enumerate(made.names)} == {
        name: gloss for gloss, name in enumerate(names)
    }


@pytest.mark.parametrize("network", NETWORKS)
def test_each_network_trains_on_what_it_can_read_and_says_what_it_cannot(processed, network, tmp_path, capsys):
    made = packed(processed)
    run = fitted(made, network, tmp_path / "run")
    key = {"transformer": "X", "gru": "X2048"}[network]
    sentence = "this network reads 20 of 30 train, 10 of 10 val samples"
    assert sentence in run.events
    assert [row["samples"] for row in run.history.of("epoch")] == [20]
    part = run.readable(made)
    lengths = part.lengths(NETWORKS[network], part.ids("train"))
    assert (len(lengths), lengths.min() > 0, part.card.bucket_by) == (20, True, NETWORKS[network])
    assert run.card == part.card
    assert part.bytes < made.bytes
    for feed in ("resident", "streamed", "workers"):
        [raw] = open_feed(part, sign.PLAN.replace(feed=feed, workers=0), torch.device("cpu"))([part.ids("train")])
        read = {"transformer": {"x", "mask"}, "gru": {"features"}}[network]
        assert {name for name in raw if not name.endswith("_length")} == {"label", "id", *read}
    assert fitted(made, network, tmp_path / "run").history.rows == run.history.rows, "it resumes with the same pack"
    assert len(run.predict_pack(made, part.ids("train"))) == 20
    missing = sorted(set(made.ids("train")) - set(part.ids("train")))[0]
    with pytest.raises(PackError, match=rf"sample {missing} has nothing .*take ids of run\.readable\(pack\)"):
        run.predict_pack(made, [missing])
    with pytest.raises(PackError, match=f"must have {key}"):
        run.predict(processed / made.names[missing])
    with pytest.raises(TrainError, match=r"the test split is empty; choose one that is not \(train: 20, val: 10\)"):
        nb.evaluate(run, made)
    assert main(["evaluate", "sign", "--data", str(processed), "--run", str(tmp_path / "run"), "--split", "val"]) == 0
    assert sentence in capsys.readouterr().err


@pytest.mark.parametrize(("network", "folder"), [("transformer", FEATURES), ("gru", KEYPOINTS)])
def test_the_other_networks_folder_is_refused_by_what_it_lacks(processed, network, folder, tmp_path):
    made = packed(processed / folder, val=processed / VALIDATION)
    said = "training needs at least 2 samples, the train split has 0"
    with pytest.raises(TrainError, match=said):
        fitted(made, network, tmp_path / "run")


def test_the_advice_is_for_the_clips_that_are_read(processed):
    made = packed(processed)
    alone = packed(processed / KEYPOINTS, val=processed / VALIDATION)
    advice, other = (nb.advise(sign, pack, measure=False).plan for pack in (made, alone))
    assert isinstance(advice, sign.Plan)
    assert advice.network == "transformer"
    assert (advice.epochs, advice.batch_size) == (other.epochs, other.batch_size)
    assert sign.with_gru(advice, made).batch_size == 20, "all that there are, for the GRU"


# Each by itself


@pytest.mark.parametrize(("folder", "columns"), [(KEYPOINTS, {"x", "mask"}), (FEATURES, {"features"})])
def test_a_train_folder_alone_validates_packs_and_trains_its_network(processed, folder, columns, tmp_path, capsys):
    assert main(["validate", "sign", str(processed / folder)]) == 0
    assert "20 clips, 20 with a label: 0 errors" in capsys.readouterr().out
    made = packed(processed / folder, val=5)
    assert (set(made.columns), counts(made)) == ({*columns, "label"}, (15, 5, 0))
    run = fitted(made, "auto", tmp_path / "run")
    assert [row["samples"] for row in run.history.of("epoch")] == [15]
    assert nb.evaluate(run, made, split="val").keys() == {"loss", "gloss_accuracy", "cat_accuracy", "top5"}


def test_the_validation_folder_alone_is_val(processed, tmp_path):
    assert counts(packed(processed / VALIDATION)) == (0, 10, 0)
    with tarfile.open(tmp_path / "test_15fps.tar", "w") as file:
        file.add(processed / VALIDATION, VALIDATION)
    assert counts(packed(tmp_path / "test_15fps.tar")) == (0, 10, 0)


@pytest.mark.parametrize(
    ("network", "folder", "other"), [("transformer", KEYPOINTS, FEATURES), ("gru", FEATURES, KEYPOINTS)]
)
def test_a_run_of_both_is_evaluated_on_what_its_network_reads(processed, network, folder, other, tmp_path):
    run = fitted(packed(processed), network, tmp_path / "run")
    new = run.pack(processed / folder, test=1.0, progress=False)
    assert nb.evaluate(run, new).keys() == {"loss", "gloss_accuracy", "cat_accuracy", "top5"}
    with pytest.raises(PackError, match="a clip must have X"):
        nb.evaluate(run, run.pack(processed / other, test=1.0, progress=False))


def test_the_validator_of_the_guide_has_its_bare_flag(processed, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["validate", "sign", str(processed / VALIDATION), "--require-x2048"]) == 0
    assert main(["validate", "sign", "--require-x2048", str(processed / KEYPOINTS)]) == 1
    assert "a clip must have X2048" in capsys.readouterr().out


# Named apart


@pytest.mark.parametrize("network", NETWORKS)
def test_train_and_validation_are_named_apart_with_lists_of_their_own(processed, network, tmp_path):
    """As `--features-train D --features-val D --labels-train-csv F --labels-val-csv F`."""
    train, lists = tmp_path / "my clips", {}
    shutil.copytree(processed / {"transformer": KEYPOINTS, "gru": FEATURES}[network], train)
    for name, folder in (("train", train), ("val", processed / VALIDATION)):
        lists[name] = tmp_path / f"any name of {name}.csv"
        lists[name].write_text((folder / "labels.csv").read_text())
    (train / "labels.csv").write_text("file,gloss,cat\nclip_9,77,1\n")  # not the list that is named
    options = {"val": processed / VALIDATION, "labels": lists["train"], "labels_val": lists["val"]}
    made = packed(train, **options)
    assert (counts(made), len(made.bad), len(made.classes)) == ((20, 10, 0), 0, 6)
    assert packed(train, **options).folder == made.folder, "a second call opens the finished one"
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    assert nb.validate(sign, train, **options, progress=False).labelled == 30
    assert main(["validate", "sign", str(train), *words]) == 0
    settings = ["--network", network, "--epochs", "1", "--batch-size", "8", "--feed", "auto"]
    run = tmp_path / "run"
    assert main(["train", "sign", "--data", str(train), *words, "--run", str(run), *settings, "--no-receipt"]) == 0
    card = nb.Run.open(run).card
    assert card.splits == {"train": 20, "val": 10, "test": 0}
    assert card.bucket_by == NETWORKS[network], "the GRU's train clips have no length in keypoints"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"labels_val": "a.csv"}, "labels_val is the list of labels of val=, which is missing"),
        ({"val": "{}/test_15fps"}, r"test_15fps, the source of val, lies within .*, that of train"),
        ({"labels": "{}/test_15fps"}, "a list of labels must be a CSV file, and .*test_15fps is a folder"),
        (
            {"glosses": 3},
            r"glosses must be above the largest id, 5, since .*, got 3; give 6 or more, .* label of .*_red\.npz",
        ),
        ({"glosses": GLOSSES[::-1]}, f"glosses: id 0 must be '{GLOSSES[-1]}', and the source calls it '{GLOSSES[0]}'"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(processed, options, said):
    with pytest.raises(PackError, match=said):
        packed(processed, **{k: v.format(processed) if isinstance(v, str) else v for k, v in options.items()})


def test_classes_beyond_the_largest_id_are_outputs_too(processed):
    made = packed(processed, glosses=105, categories=10)
    assert (len(made.classes), len(made.options["categories"])) == (105, 10)
    network = sign.model(made, sign.PLAN.replace(network="transformer"))
    assert sum(p.numel() for p in network.parameters()) == 3_280_371, "the guide's network"
