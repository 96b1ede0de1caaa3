"""nb.pack: one's own data of any kind give the right pack, or one sentence that names the way out."""

import io
import math
import os
import pickle
import subprocess
import sys
import tarfile
from dataclasses import dataclass, replace
from decimal import Decimal
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

import nbtools as nb
from nbtools.data import open_feed

pytestmark = pytest.mark.usefixtures("own_cache")
RNG = np.random.default_rng(0)


def pack(data=None, **options) -> nb.Pack:
    return nb.pack(data, **{"progress": False, **options})


def same(pack: nb.Pack) -> bool:
    """Whether the Dataset gives the arrays of the pack."""
    for i in range(len(pack)):
        raw, packed = pack.raw[i], pack.sample(i)
        assert raw.pop("id") == i
        assert list(raw) == list(packed)
        for name in packed:
            assert raw[name].dtype == packed[name].dtype
            np.testing.assert_array_equal(raw[name], packed[name])
    return True


def pictures(folder, classes=("cat", "dog"), count=10, size=(6, 5)):
    for name in classes:
        (folder / name).mkdir(parents=True)
        for i in range(count):
            array = RNG.integers(0, 255, (*size, 3), dtype=np.uint8)
            Image.fromarray(array).save(folder / name / f"{i}.png")
    return folder


def test_a_tensor_dataset_becomes_x_and_y_with_the_training_split_s_mean_and_deviation():
    x, y = torch.randn(200, 3, 4, 5) * 3 + 1000, torch.randint(0, 4, (200,))
    made = pack(TensorDataset(x, y))
    assert (str(made.columns["x"]), str(made.columns["y"])) == ("float32 (3, 4, 5)", "int64 ()")
    assert made.classes == ["0", "1", "2", "3"]
    assert (made.options["inputs"], made.options["kind"], made.options["forms"]["x"]["layout"]) == (
        ["x"],
        "classes",
        "chw",
    )
    train = x[made.ids("train")].double()
    np.testing.assert_allclose(made.options["mean"]["x"], train.mean((0, 2, 3)), rtol=1e-9)
    np.testing.assert_allclose(made.options["std"]["x"], train.std((0, 2, 3), correction=0), rtol=1e-9)
    assert same(made)


@pytest.mark.parametrize(
    ("x", "axes", "unit"),
    [
        (RNG.integers(0, 255, (40, 5, 4, 3), dtype=np.uint8), (0, 1, 2), 255),  # (N, H, W, C)
        (RNG.normal(1e6, 1, (40, 7)).astype(np.float32), (0,), 1),
        (RNG.normal(1e6, 1, (40, 7, 2)).astype(np.float32), (0, 1, 2), 1),  # images, for all that is known
        (np.ones((40, 3), np.float32), (0,), 1),
    ],
)
def test_means_and_deviations_are_those_of_numpy_in_float64(x, axes, unit):
    made = pack(list(x), val=5, test=5)
    train = x[made.ids("train")].astype(np.float64) / unit
    mean, std = np.atleast_1d(train.mean(axes)), np.atleast_1d(train.std(axes))
    np.testing.assert_allclose(made.options["mean"]["x"], mean, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(made.options["std"]["x"], np.where(std > 0, std, 1), rtol=1e-9)


def test_a_list_of_sequences_becomes_a_ragged_column_by_which_batches_are_grouped():
    items = [(RNG.normal(size=(int(n), 3)), "ab"[n % 2]) for n in RNG.integers(2, 9, 40)]
    made = pack(items)
    assert str(made.columns["x"]) == "float32 (·, 3)"
    assert made.card.bucket_by == "x"
    assert made.classes == ["a", "b"]
    train = np.concatenate([items[i][0] for i in made.ids("train")])
    np.testing.assert_allclose(made.options["mean"]["x"], train.mean(0), atol=1e-6)
    assert same(made)


def test_a_folder_of_images_by_class_is_read_as_it_is(tmp_path):
    made = pack(pictures(tmp_path / "pictures"))
    assert (str(made.columns["image"]), made.classes) == ("uint8 (6, 5, 3)", ["cat", "dog"])
    assert made.names[0] == "cat/0.png"
    assert made.options["forms"]["image"]["layout"] == "hwc"
    assert same(made)


def test_a_data_frame_becomes_numbers_by_its_columns_roles():
    frame = pd.DataFrame(
        {
            "rooms": RNG.integers(1, 9, 50),
            "town": RNG.choice(["a", "b"], 50),
            "when": pd.date_range("2020-01-01", periods=50),
            "price": RNG.normal(size=50),
        }
    )
    frame.loc[3, "rooms"] = np.nan
    made = pack(frame, target="price")
    assert made.options["features"] == ["rooms", "town=a", "town=b", "when in days"]
    assert (str(made.columns["x"]), str(made.columns["y"])) == ("float32 (4)", "float32 ()")
    assert (made.options["kind"], made.classes) == ("values", [])
    [(file, value, rule, _)] = made.bad.to_numpy().tolist()
    assert (file, value, rule) == ("row 3", "nothing", "rooms must have a value")
    assert made.sample(0)["x"].tolist() == [frame.rooms[0], frame.town[0] == "a", frame.town[0] == "b", 18262]
    assert same(made)


# Odd items: each gives the right pack, or the right row, or the right sentence


class Items(Dataset):
    """A Dataset of what a function returns for each number."""

    def __init__(self, item, count: int = 20, **attributes):
        self.item, self.count = item, count
        vars(self).update(attributes)

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return self.item(i)


def but(odd, usual, places=(7,)):
    """A Dataset whose items at these places are odd: values, or errors to raise."""

    def item(i):
        if i in places and isinstance(odd, Exception):
            raise odd
        return odd if i in places else usual(i)

    return Items(item)


def image(mode: str, size=(5, 4)) -> Image.Image:
    """(W, H) = size."""
    values = np.arange(size[0] * size[1] * 3, dtype=np.uint8).reshape(size[1], size[0], 3)
    return Image.fromarray(values).convert(mode)


def opened(i: int) -> Image.Image:
    """One that is not decoded yet, and whose file 7 is cut off."""
    file = io.BytesIO()
    image("L", (40, 40)).save(file, "PNG")
    return Image.open(io.BytesIO(file.getvalue()[: -40 if i == 7 else None]))


@dataclass
class Reading:
    signal: list[float]
    label: bool


def vector(i: int) -> np.ndarray:
    return np.full(3, i, np.float32)


def frame(**columns) -> pd.DataFrame:
    return pd.DataFrame({"a": np.arange(20.0), "y": np.arange(20) % 2, **columns})


PACKED = {
    # name: (data, options of pack, its columns, its classes)
    "a tensor of bfloat16": (
        Items(lambda i: (torch.full((2,), i, dtype=torch.bfloat16), i % 2)),
        {},
        "x float32 (2), y int64 ()",
        "01",
    ),
    "float64 and float16": (
        Items(lambda i: (np.zeros(2, np.float16 if i % 2 else np.float64), i / 2)),
        {},
        "x float32 (2), y float32 ()",
        "",
    ),
    "big-endian 16 bits": (
        Items(lambda i: (np.array([i, 60000], ">u2"), np.uint8(i % 3))),
        {},
        "x int32 (2), y int64 ()",
        "012",
    ),
    "no target": (Items(vector), {}, "x float32 (3)", ""),
    "rows of an array": (np.zeros((20, 3)), {}, "x float32 (3)", ""),
    "a dataclass": (Items(lambda i: Reading([1.0, i], i > 9)), {}, "signal float32 (2), y int64 ()", ["False", "True"]),
    "a nested dict": (
        Items(lambda i: {"eye": {"left": vector(i), "right": vector(-i)}, "who is it": i, "label": "ab"[i % 2]}),
        {},
        "eye_left float32 (3), eye_right float32 (3), who_is_it int64 (), y int64 ()",
        "ab",
    ),
    "a target first": (Items(lambda i: (i % 2, vector(i))), {"target": 0}, "x float32 (3), y int64 ()", "01"),
    "a target of many values": (
        Items(lambda i: (vector(i), {"boxes": np.zeros((i + 1, 4)), "names": [i] * (i + 1)})),
        {},
        "x float32 (3), y_boxes float32 (·, 4), y_names int64 (·)",
        "",
    ),
    "classes with gaps": (
        Items(lambda i: (0.5, [9, 10, 200][i % 3])),
        {},
        "x float32 (), y int64 ()",
        ["9", "10", "200"],
    ),
    "texts with commas, quotes and lines": (
        Items(lambda i: (0.5, ["a,b", 'c"d', "e\nf", "=1", "中"][i % 5])),
        {},
        "x float32 (), y int64 ()",
        sorted(["a,b", 'c"d', "e\nf", "=1", "中"]),
    ),
    "classes as numbers with names": (
        Items(lambda i: (0.5, i % 2), classes=["cat", "dog", "eel"]),
        {},
        "x float32 (), y int64 ()",
        ["cat", "dog", "eel"],
    ),
    "classes asked for": (
        Items(lambda i: (0.5, "ab"[i % 2])),
        {"classes": ["c", "b", "a"]},
        "x float32 (), y int64 ()",
        "cba",
    ),
    "palettes, greys and colours": (
        Items(lambda i: (image(["P", "L", "1", "RGB", "RGBA", "CMYK", "LA"][i % 7]), 0)),
        {},
        "x uint8 (4, 5, 3), y int64 ()",
        "0",
    ),
    "16-bit images": (
        Items(lambda i: (Image.fromarray(np.full((4, 5), 65535, np.uint16)), 0)),
        {},
        "x float32 (4, 5), y int64 ()",
        "0",
    ),
    "images of many sizes": (
        Items(lambda i: (image("RGB", (5 + i, 4)), 0)),
        {"size": (6, 7)},
        "x uint8 (6, 7, 3), y int64 ()",
        "0",
    ),
    "floats that are bytes": (
        Items(lambda i: (torch.arange(256, dtype=torch.uint8).view(1, 16, 16) / 255, i / 2)),
        {"as_bytes": True},
        "x uint8 (1, 16, 16), y float32 ()",
        "",
    ),
    "one like Hugging Face's": (
        Items(
            lambda i: {"image": image("L"), "label": i % 2}, features={"label": SimpleNamespace(names=["cat", "dog"])}
        ),
        {},
        "image uint8 (4, 5), y int64 ()",
        ["cat", "dog"],
    ),
    "a Subset": (
        Subset(Items(lambda i: (vector(i), i % 2), classes=["cat", "dog"]), [3, 4, 5]),
        {},
        "x float32 (3), y int64 ()",
        ["cat", "dog"],
    ),
    "a DataFrame of categories, dates and booleans": (
        frame(
            b=pd.Categorical(["u", "v"] * 10, ["u", "v", "w"]),
            c=pd.date_range("2020", periods=20),
            d=[True, False] * 10,
            e=pd.array(range(20), "Int64"),
            f=[Decimal(i) / 3 for i in range(20)],
        ),
        {},
        "x float32 (8), y int64 ()",
        "01",
    ),
}


@pytest.mark.parametrize("name", PACKED)
def test_odd_items_give_the_right_pack(name):
    data, options, columns, classes = PACKED[name]
    made = pack(data, **options)
    assert ", ".join(f"{column} {kind}" for column, kind in made.columns.items()) == columns
    assert made.classes == list(classes)
    assert made.bad.empty
    assert len(made) == len(data)
    assert same(made)


LEFT_OUT = {
    # name: (data, value, rule) of the one row of the table of bad samples
    "an item that raises": (but(ZeroDivisionError("no"), lambda i: (vector(i), 0)), "ZeroDivisionError: no", "return"),
    "an item that is None": (but(None, lambda i: (vector(i), 0)), "None", "an item must hold arrays"),
    "another shape": (
        but((np.zeros(4), 0), lambda i: (vector(i), 0)),
        "(4,)",
        "x must have the shape (3), as in other items",
    ),
    "other keys": (but({"a": 0.5}, lambda i: {"a": 0.5, "b": 1.5}), "a", "an item must have a, b, like the others"),
    "an object": (but((object(), 0), lambda i: (vector(i), 0)), "object", "x must hold numbers"),
    "an empty array": (but((np.zeros(0), 0), lambda i: (np.zeros(i + 1), 0)), "shape (0,)", "x must not be empty"),
    "a number that is not one": (but((np.full(3, np.nan), 0), lambda i: (vector(i), 0)), "nan", "of x must be finite"),
    "a class that is None": (but((0.5, None), lambda i: (0.5, "ab"[i % 2])), "None", "every sample must have a class"),
    "an image of another size": (
        but((image("L", (9, 9)), 0), lambda i: (image("L"), 0)),
        "(9, 9)",
        "as in other items",
    ),
    "an image cut off": (Items(lambda i: (opened(i), 0)), "OSError: ", "the Dataset must return each item"),
}


@pytest.mark.parametrize("name", LEFT_OUT)
def test_an_odd_item_is_a_row_of_the_table_of_bad_samples(name):
    data, value, rule = LEFT_OUT[name]
    made = pack(data)
    rows = made.bad.to_numpy().tolist()
    [(file, came, broken, fix)] = rows
    assert file == "item 7"
    assert came.startswith(value or "")
    assert rule in broken
    assert fix
    assert len(made) == 19
    assert same(made)


class Endless(Dataset):
    def __getitem__(self, i):
        return vector(i), 0


REFUSED = {  # and those of the table in docs/your-own.md, in test_your_own
    "a Dataset without a length": (Endless(), {}, "Endless has none; define __len__"),
    "complex numbers": (Items(lambda i: torch.zeros(3, dtype=torch.cfloat)), {}, r"complex64 numbers; .*view_as_real"),
    "texts as inputs": (
        Items(lambda i: {"text": "abc", "x": 0.5, "label": 1}),
        {},
        r"text must hold numbers, got the text 'abc'; leave it out with inputs=\['x'\]",
    ),
    "shapes that differ": (Items(lambda i: (np.zeros((2, i + 1)), 0)), {}, r"one shape, apart from its first axis"),
    "all items raise": (
        but(ValueError("no"), vector, range(20)),
        {},
        "none of the 20 items read can be used: .* got ValueError: no",
    ),
    "the target as an input": (
        [(0.5, 1)] * 20,
        {"inputs": [0, 1]},
        "must not be an input, got 1; leave it out of inputs",
    ),
    "Unix seconds": (
        [(np.array([1.7e9 + i, 0.5]), 0) for i in range(40)],
        {},
        r"numbers of x such as 17\d{8} are equal in float32.*; subtract an offset",
    ),
    "an unknown target": (Items(lambda i: {"x": 0.5}), {"target": "z"}, "the item must have 'z', got x"),
    "a size of one number": (Items(vector), {"size": 8}, r"size must be \(height, width\) in pixels, got 8"),
    "a share of 2": (Items(vector), {"val": 0.7, "test": 0.6}, "val and test must be"),
    "a DataFrame without the column": (frame(), {"target": "prize"}, "no column 'prize'; its columns are a, y"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_packed_is_one_sentence_that_names_the_way_out(name):
    data, options, words = REFUSED[name]
    with pytest.raises(nb.NbtoolsError, match=words):
        pack(data, **options)


def test_a_number_that_is_no_class_is_never_taken_for_the_place_of_one():
    made = pack([(float(i), label) for i, label in enumerate([0, 2, 3, 1] * 10)], classes=["0", "2", "3"])
    assert len(made.bad) == 10
    assert {made.classes[k] for k in made.arrays["y"]} == {"0", "2", "3"}
    assert [made.arrays["x"][k] % 4 for k in range(3)] == [0, 1, 2]


def test_what_is_missing_in_a_data_frame_is_a_row_that_names_its_column():
    data = frame(
        b=pd.Categorical(["u"] * 20),
        c=pd.date_range("2020", periods=20),
        d=pd.array([True, False] * 10, "boolean"),
        e=["s"] * 20,
        y=pd.array([0, 1] * 10, "Int64"),
    )
    for row, name in enumerate("bcdey"):
        data.loc[row, name] = None
    data.loc[5, "a"] = np.inf
    made = pack(data)
    rules = dict(zip(made.bad.file, made.bad.rule, strict=True))
    assert [rules.pop(f"row {i}") for i in range(4)] == [f"{n} must have a value" for n in "bcde"]
    assert rules == {
        "row 4": "every sample must have a class: a string or a whole number",
        "row 5": "all numbers of x must be finite",
    }
    assert made.classes == ["0", "1"]


# Folders


def test_folders_of_splits_are_the_splits(tmp_path):
    for split, count in (("train", 4), ("valid", 2), ("Test", 3)):
        pictures(tmp_path / "all" / split, count=count)
    made = pack(tmp_path / "all")
    assert made.splits == {"train": 8, "val": 4, "test": 6}
    apart = pack(train=tmp_path / "all" / "train", test=str(tmp_path / "all" / "Test"), val=2)
    assert apart.splits == {"train": 6, "val": 2, "test": 6}
    assert apart.classes == made.classes == ["cat", "dog"]
    assert same(made)


def test_files_that_are_no_images_of_a_class_are_rows_of_the_table(tmp_path):
    folder = pictures(tmp_path / "pictures")
    (folder / "eel").mkdir()
    (folder / ".DS_Store").write_bytes(b"")
    (folder / "cat" / "notes.txt").write_text("")
    (folder / "loose.png").write_bytes((folder / "cat" / "0.png").read_bytes())
    (folder / "dog" / "3.png").write_bytes(b"no image")
    made = pack(folder)
    assert sorted(made.bad.file) == ["cat/notes.txt", "dog/3.png", "eel", "loose.png"]
    assert len(made) == 19
    assert same(made)


def test_a_folder_of_one_class_or_none_is_refused(tmp_path):
    folder = pictures(tmp_path / "pictures", ["cat"])
    with pytest.raises(nb.NbtoolsError, match=r"got one folder, 'cat'; name the folder above them"):
        pack(folder)
    with pytest.raises(nb.NbtoolsError, match="got no folder with images"):
        pack(folder / "cat")


def test_a_pack_opens_from_the_archive_that_it_was_kept_as_and_pictures_from_theirs(tmp_path):
    folder = pictures(tmp_path / "pictures")
    made = pack(folder)
    again = pack(made.keep(tmp_path / "kept"))
    assert again.card == made.card
    with tarfile.open(tmp_path / "pictures.tar", "w") as tar:
        tar.add(folder, "pictures")
    assert pack(tmp_path / "pictures.tar").card.digest == made.card.digest


# A pack like another one, and items to predict


LIKE = {
    # name: (data, options, other data, the same once more)
    "fewer categories, and whole prices": (
        pd.DataFrame({"a": ["u", "v"] * 10, "price": np.arange(20) + 0.5}),
        {"target": "price"},
        pd.DataFrame({"price": [3, 4, 5], "b": 1, "a": ["v", "v", "w"]}),
        ["row 2"],
    ),
    "greys of another size": (
        Items(lambda i: (image("RGB"), "ab"[i % 2])),
        {"size": (6, 7)},
        [(image("L", (9, 9)), "b")],
        [],
    ),
    "bytes as they were kept": (
        Items(lambda i: (i % 2, torch.full((1, 2, 2), i / 255))),
        {"as_bytes": True, "target": 0},
        [(0, np.full((1, 2, 2), 7, np.uint8)), (1, np.full((1, 2, 2), 1 / 255)), (1, np.full((1, 2, 2), 0.3))],
        ["item 2"],
    ),
}


@pytest.mark.parametrize("name", LIKE)
def test_a_pack_like_another_has_its_columns_classes_and_preprocessing(name):
    data, options, other, bad = LIKE[name]
    made = pack(data, **options)
    state = nb.TrainState(Flat, made, nb.Plan())
    again = pack(other, test=1.0, **state.task.pack_options(made.card))
    assert (again.columns, again.classes, again.bad.file.tolist()) == (made.columns, made.classes, bad)
    assert len(again) == len(other) - len(bad)
    assert nb.evaluate(state, again)["loss"] > 0
    assert same(again)


class Flat(nb.Task):
    def model(self, card, plan):
        [name] = card.options["inputs"]
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(math.prod(card.columns[name].shape), 1))

    def loss(self, model, batch, plan):
        return model(batch).square().mean()


# Splits, identity, parallel reading


def test_splits_given_share_their_classes_and_drawn_ones_hash_the_number():
    train, other = [(0.5, "b")] * 30, [(0.5, "a")] * 10
    made = pack(train=train, val=other, test=[(1.5, "c")])
    assert made.splits == {"train": 30, "val": 10, "test": 1}
    assert made.classes == ["a", "b", "c"]
    assert made.names[30] == "val/item 0"
    assert pack({"train": train, "validation": other}).splits == {"train": 30, "val": 10, "test": 0}
    assert pack(train, val=5, test=1).splits == {"train": 24, "val": 5, "test": 1}
    assert pack(train, test=1.0).splits["test"] == 30
    assert same(made)


def test_tables_given_apart_are_encoded_as_that_for_training():
    kinds = pd.Categorical([10, 20] * 10)
    other = frame(b="u", c=pd.Categorical([20] * 20)).iloc[:4].astype({"a": object})
    other.loc[0, "b"], other.loc[1, "a"] = "v", "many"
    made = pack(train=frame(b="u", c=kinds), val=other, test=0)
    assert made.options["encoding"] == {"a": "number", "b": ["u"], "c": ["10", "20"]}
    assert made.splits == {"train": 20, "val": 2, "test": 0}
    assert made.bad[["file", "value", "rule"]].to_numpy().tolist() == [
        ["val/row 0", "v", "b must be one of u, as in the training data"],
        ["val/row 1", "many", "a must be a number"],
    ]
    assert made.sample(20)["x"].tolist() == [2, 1, 0, 1]


def test_a_second_call_opens_the_pack_and_another_number_share_or_value_is_another_pack():
    made = pack([(i / 2, 0) for i in range(100)])
    assert pack([(i / 2, 0) for i in range(100)]).folder == made.folder
    changed = [(i / 2, int(i == 7)) for i in range(100)]
    assert made.folder not in [pack(data).folder for data in (changed, [(i / 2, 0) for i in range(101)])]
    assert pack([(i / 2, 0) for i in range(100)], val=0.2).folder != made.folder


def test_whole_numbers_get_the_names_that_their_own_dataset_has():
    """As torchvision's ImageFolder numbers a split that lacks a class."""
    some = [Items(lambda i: (0.5, i % 2), 6, classes=names) for names in (["ant", "bee"], ["eel", "bee"])]
    for options in ({"train": some[0], "val": some[1]}, {"data": ConcatDataset(some), "val": 0}):
        made = pack(**options, test=0)
        assert made.classes == ["ant", "bee", "eel"]
        assert [made.classes[y] for y in made.arrays["y"]] == ["ant", "bee"] * 3 + ["eel", "bee"] * 3


def test_random_items_are_packed_when_asked_and_read_anew_each_time():
    data = Items(lambda i: (np.random.rand(3), i % 2))
    made = pack(data, random=True)
    assert made.options["random"]
    assert pack(data, random=True).folder == made.folder
    assert (made.raw[0]["x"] != made.raw[0]["x"]).all()
    assert made.raw[3]["y"] == made.sample(3)["y"] == 1


def test_random_numbers_of_workers_follow_the_seed_and_the_place_in_training():
    made = pack(Items(lambda i: (np.random.rand(3), i % 2)), random=True)

    def drawn(seed, batches):
        plan = nb.Plan(feed="workers", workers=1, seed=seed)
        return next(iter(open_feed(made, plan, torch.device("cpu"))(batches)))["x"].tolist()

    start, later = [np.array([3, 5]), np.array([7, 8])], [np.array([7, 8])]
    assert drawn(0, start) == drawn(0, start)
    assert drawn(0, start) != drawn(1, start)
    assert drawn(0, start) != drawn(0, later)


NOTEBOOK = """
import nbtools as nb
from nbtools.data import open_feed
import numpy as np, torch
from torch.utils.data import Dataset

class Mine(Dataset):
    def __len__(self):
        return 70
    def __getitem__(self, i):
        return i / 2, i % 2

made = nb.pack(Mine(), progress=False)
print(made.classes)
plan = nb.Plan(feed="workers", workers=1)
for raw in open_feed(made, plan, torch.device("cpu"))([np.array([3, 5])]):
    print(raw["x"].tolist())
"""


@pytest.mark.full  # a process that imports torch
def test_a_dataset_of_a_notebook_is_packed_and_read_by_forked_workers():
    """Code without a file, as in a notebook, is not imported again by a process that is not forked."""
    done = subprocess.run([sys.executable, "-c", NOTEBOOK], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines() == ["['0', '1']", "[1.5, 2.5]"], done.stderr


def test_the_dataset_travels_to_workers_and_gives_the_batches_of_the_pack():
    items = [(vector(i), "ab"[i % 2]) for i in range(30)] + [(None, "a")]
    made = pack(items)
    made = replace(made, raw=pickle.loads(pickle.dumps(made.raw)))
    order = [np.array([3, 0, 29]), np.array([7])]
    read, kept = (open_feed(made, nb.Plan(feed=feed, workers=0), torch.device("cpu")) for feed in ("workers", "auto"))
    for raw, packed in zip(read(order), kept(order), strict=True):
        assert raw.keys() == packed.keys()
        assert all(raw[name].dtype == packed[name].dtype and raw[name].equal(packed[name]) for name in raw)


def test_a_hugging_face_dataset_gives_images_names_of_classes_and_its_splits(monkeypatch, tmp_path):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    datasets = pytest.importorskip("datasets")
    features = {
        "image": datasets.Image(),
        "label": datasets.ClassLabel(names=["cat", "dog"]),
        "text": datasets.Value("string"),
    }
    columns = {"image": [image("RGB")] * 20, "label": [i % 2 for i in range(20)], "text": ["a"] * 20}
    data = datasets.Dataset.from_dict(columns, features=datasets.Features(features))
    with pytest.raises(nb.NbtoolsError, match=r"got the text 'a'; leave it out with inputs=\['image'\]"):
        pack(data)
    made = pack(data.train_test_split(0.25), inputs=["image"])
    assert (made.classes, made.splits["test"], sum(made.splits.values())) == (["cat", "dog"], 5, 20)
    assert str(made.columns["image"]) == "uint8 (4, 5, 3)"
    with pytest.raises(nb.NbtoolsError, match=r"got IterableDataset; pass list\(dataset\)"):
        pack(data.to_iterable_dataset())
    assert same(made)


def test_data_that_do_not_fit_on_the_disk_are_refused_before_they_are_written(monkeypatch):
    monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1, f_frsize=1000))
    with pytest.raises(nb.NbtoolsError, match=r"needs 8\.0 MB, only 1\.0 kB are free"):
        pack(Items(lambda i: np.zeros(100_000), 20))
