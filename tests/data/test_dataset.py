"""nb.pack: one's own data of any kind give the right pack, or one sentence that names the way out."""

import unicodedata
from functools import partial
from pathlib import Path
from timeit import timeit
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from acting import refused
from archives import put
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

import nbtools as nb
from nbtools.data import items_of, open_image, options_like, sample_of

pytestmark = pytest.mark.usefixtures("own_cache")
RNG = np.random.default_rng(0)
pack: Any = partial(nb.pack, progress=False)


def same(pack: nb.Pack) -> bool:
    for i in range(-2, len(pack)):
        raw, packed = pack.raw[i], pack.sample(i)
        assert raw.pop("id") == i % len(pack)
        assert list(raw) == list(packed)
        for name in packed:
            np.testing.assert_array_equal(raw[name], packed[name], strict=True)
    return True


class Items(Dataset):
    def __init__(self, item, count: int = 20, **attributes):
        self.item, self.count = item, count
        vars(self).update(attributes)

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        return self.item(i)


def image(mode: str = "RGB", size=(5, 4)) -> Image.Image:
    values = np.arange(size[0] * size[1] * 3, dtype=np.uint8).reshape(size[1], size[0], 3)
    return Image.fromarray(values).convert(mode)


def vector(i: int) -> np.ndarray:
    return np.full(3, i, np.float32)


def test_of_large_items_few_are_looked_at_and_few_are_held_at_once(monkeypatch, tmp_path):
    def item(i):
        read.append(i)
        if i == 63:
            raise KeyboardInterrupt
        return np.full(4096, i, np.float32), i % 2

    read = list[int]()
    monkeypatch.setattr("nbtools.data.items.LOOKED", 2**17)  # bytes, of 2**20
    monkeypatch.setattr("nbtools.data.items.BLOCK", 2**15)  # two items
    pack(Items(item, 64), store=False, classes=["a", "b"])
    assert len({*read}) == 8
    with pytest.raises(KeyboardInterrupt):
        pack(Items(item, 64), into=tmp_path / "pack")
    sizes = [path.stat().st_size for path in tmp_path.glob("pack.part/*/*.npz")]
    assert len(sizes) > 3
    assert max(sizes) < 2**16


def frame(**columns) -> pd.DataFrame:
    return pd.DataFrame({"a": np.arange(20.0), "y": np.arange(20) % 2, **columns})


MEASURED = {  # x: (axes of one mean each, what 1 is kept as)
    "images (H, W, C)": (RNG.integers(0, 255, (40, 5, 4, 3), dtype=np.uint8), (0, 1, 2), 255),
    "images (C, H, W)": (RNG.normal(1e6, 1, (40, 3, 4, 5)).astype(np.float32), (0, 2, 3), 1),
    "series (T, F)": (RNG.normal(1e6, 1, (40, 6, 2)).astype(np.float32), (0, 1), 1),
    "series (F, T)": (RNG.normal(1e6, 1, (40, 2, 6)).astype(np.float32), (0, 2), 1),
    "square": (RNG.normal(1e6, 1, (40, 3, 3)).astype(np.float32), None, 1),
    "vectors": (RNG.normal(1e6, 1, (40, 7)).astype(np.float32), (0,), 1),
    "sequences": ([RNG.normal(9, 1, (int(n), 3)).astype(np.float32) for n in RNG.integers(2, 9, 40)], (0,), 1),
}


@pytest.mark.parametrize("store", [True, False])
@pytest.mark.parametrize("name", MEASURED)
def test_means_and_deviations_are_those_of_the_training_split_or_without_a_copy_of_64_items(name, store):
    x, axes, unit = MEASURED[name]
    made = pack([(one, i / 2) for i, one in enumerate(x)], val=5, test=5, store=store)
    train = [int(made.names[i].split()[1]) for i in made.ids("train")]
    join = np.concatenate if name == "sequences" else np.stack
    chosen = join([x[i] for i in (train if store else range(40))])
    for column, values in (("x", chosen.astype(float) / unit), ("y", np.array(train) / 2)):
        axis = axes if column == "x" else 0
        std, (mean, made_std) = values.std(axis), (np.ravel(made.options[each][column]) for each in ("mean", "std"))
        np.testing.assert_allclose(mean, values.mean(axis), rtol=1e-9, atol=1e-9)
        np.testing.assert_allclose(made_std, np.where(std > 0, std, 1), rtol=1e-9)
    assert made.card.bucket_by == ("x" if name == "sequences" else None)
    assert same(made)


NAMES = {"label": SimpleNamespace(names=["no", "yes"])}  # as a Hugging Face Dataset has them
LABELLED = Items(lambda i: {"image": image("L"), "label": i % 2}, features=NAMES)
MODES = ["P", "L", "1", "RGB", "RGBA", "CMYK", "LA"]
KINDS = frame(d=[True, False] * 10, e=pd.array(range(20), "Int64"), f=pd.array([True, False] * 10, "boolean"))
SPECIES = ["cat", "dog", "eel"]
PETS = Items(lambda i: (0.5, i % 2), classes=SPECIES)
NUMBERED = ConcatDataset([PETS, Subset(Subset(PETS, range(15)), range(12))])
PACKED = {  # its columns, and classes: (data, options of pack)
    "x float32 (3, 4, 5), y int64 (): 0 1": (TensorDataset(torch.zeros(20, 3, 4, 5), torch.arange(20) % 2), {}),
    "x int32 (2), y int64 (): 0 1": (Items(lambda i: (np.array([i, 60000], ">u2"), np.uint8(i % 2))), {}),
    "x float32 (3)": (np.zeros((20, 3)), {}),
    "x float32 (2), y int64 (): False True": (Items(lambda i: ([1.0, i], i > 9)), {}),
    "who_is_it int64 (), y int64 (): a b": (Items(lambda i: {"who is it": i, "label": "ab"[i % 2]}), {}),
    "x float32 (3), y int64 (): 0 1": (Items(lambda i: (i % 2, vector(i), "1.png")), {"target": 0, "inputs": [1]}),
    "x float32 (), y int64 (): 9 10 200": (Items(lambda i: (0.5, [9, 10, 200][i % 3])), {}),
    "x float32 (), y int64 (): cat dog eel": (NUMBERED, {}),
    "image uint8 (4, 5), y int64 (): no yes": (LABELLED, {}),
    "x float32 (), y int64 (): 1 10 2": (Items(lambda i: (0.5, i % 3), classes=["1", "10", "2"]), {}),
    "x float32 (), y int64 (): c b a": (Items(lambda i: (0.5, "ab"[i % 2])), {"classes": "cba"}),
    "x uint8 (4, 5, 3), y int64 (): 0": (Items(lambda i: (image(MODES[i % 7]), 0)), {}),
    "x uint8 (6, 7, 3), y int64 (): 0": (Items(lambda i: (image(size=(5 + i, 4)), 0)), {"size": (6, 7)}),
    "x float32 (4), y int64 (): 0 1": (KINDS, {}),
    "x uint8 (4, 5, 3), y int64 (): 1": (Items(lambda i: (image("L"), 1)), {"mean": [0.5] * 3, "std": [0.2] * 3}),
    "x float32 (1), y int64 (): no yes": (frame(y=[b"no", b"yes"] * 10), {}),  # as scipy reads an ARFF
    "x float32 (2), y int64 (): 0 1": (frame(user_id=np.arange(20) // 2), {}),
    "x float32 (), y int64 (): 0 1": (Items(PETS.item, classes=SPECIES, target_transform=int), {}),
    "x float32 (3), y uint8 (4, 5, 1)": (Items(lambda i: (vector(i), np.ones((4, 5, 1), np.uint8))), {}),
    "x float32 (2), y float32 (2)": (frame(p=1.5, q=np.arange(20)), {"target": ["p", "q"]}),
}


@pytest.mark.parametrize("said", PACKED)
def test_items_of_any_kind_give_the_right_columns_and_classes(said):
    data, options = PACKED[said]
    made, (columns, _, classes) = pack(data, **options), said.partition(": ")
    assert ", ".join(f"{column} {kind}" for column, kind in made.columns.items()) == columns
    assert (made.classes, made.bad.empty, len(made)) == (classes.split(), True, len(data))
    assert same(made)


def test_a_csv_as_people_write_it_gives_its_columns_and_its_rows_are_predicted_however_they_come(tmp_path, capsys):
    path = tmp_path / "rows.csv"
    lines = [f"{i}, {i + 9}, {i}.5, {i % 3}, {'ab'[i % 2]}\n" for i in range(19)]
    path.write_text("".join([", RowId, a, b, label\n", *lines, "19, 0, , 0, a\n"]))
    made = nb.pack(path)
    assert (made.classes, made.options["columns"], len(made)) == (["a", "b"], ["a", "b"], 19)
    said = capsys.readouterr().err
    assert "unnamed columns and row numbers are left out: Unnamed: 0, RowId; inputs=[…] includes them" in said
    assert "1 of 20 samples cannot be used, see pack.bad" in said
    path.write_text("b,a\n0,0.5\n1,1.5\n")
    rows = [{"a": 0.5, "b": 0}, {"a": 1.5, "b": 1, "label": None}]
    polars = SimpleNamespace(to_pandas=lambda: pd.read_csv(path))
    for given in (path, str(path), pd.read_csv(path), polars, rows, made.arrays["x"][:2]):
        assert [sample_of(item, made.card)["x"].tolist() for item in items_of(given, made.card)] == [[0.5, 0], [1.5, 1]]


WRITTEN = {"01 02 10": "01 02 10", "1 01 2": "01 1 2", "7  -1": "-1 7", "yes no yes\t": "no yes", "0.5  2": ""}
WRITTEN |= {f"{10**18 + 1}  {10**18}": f"{10**18} {10**18 + 1}", f"{10**20} 5 7": f"5 7 {10**20}"}


@pytest.mark.parametrize("labels", WRITTEN)
def test_labels_in_a_csv_are_what_is_written_and_a_first_line_of_data_is_no_header(tmp_path, labels):
    rows, path = [f"{i},{label}\n" for i, label in enumerate(labels.split(" ") * 8)], tmp_path / "t.csv"
    path.write_text("".join([" 2024, label \n", *rows]))
    made = pack(path)
    bad = 8 * ("  " in labels)
    assert (made.classes, len(made), len(made.bad)) == (WRITTEN[labels].split(), 24 - bad, bad)
    path.write_text("".join(["n,label\n", *(f"{row.strip()},\n" for row in rows)]))
    refused(nb.NbtoolsError, "got rows of more fields than the header has names; or pass", pack, path)
    path.write_text("".join(rows))
    with pytest.raises(nb.NbtoolsError, match=r"with a header line, got the first line 0, .*; or pass"):
        pack(path, target=rows[0][2:].strip())


def test_arrays_x_and_y_are_packed_as_their_pairs_are():
    x, y = np.arange(60.0).reshape(20, 3), [0, 1] * 10
    pairs = pack(list(zip(x, y, strict=True))).card.digest
    tables, sparse = (pd.DataFrame(x), pd.Series(y)), (SimpleNamespace(ndim=2, toarray=lambda: x), y)
    cuda = SimpleNamespace(ndim=2, cpu=lambda: torch.tensor(x)), y
    for columns in ((x, y), {"x": x, "y": y}, (torch.tensor(x).bfloat16(), torch.tensor(y)), tables, sparse, cuda):
        assert pack(columns).card.digest == pairs, type(columns)
    mixed, polars = frame(y=[True, False] * 10), SimpleNamespace(to_pandas=frame)
    made = pack((mixed, pd.DataFrame({"y": ["a", "b"] * 10})))  # with y as a table of one column
    assert (made.classes, made.arrays["x"][:, 1].tolist()) == (["a", "b"], y[1:] + y[:1])
    assert [*items_of(mixed, made.card)[3]] == made.arrays["x"][3].tolist()
    assert pack(polars).card.digest == pack(frame()).card.digest
    with pytest.raises(nb.NbtoolsError, match=r"one argument, got 2 arguments; write nb.pack\(\(x, y\)\), or train="):
        pack(x, y)


def test_the_columns_of_x_in_x_and_y_are_found_by_their_names():
    x, y = pd.DataFrame(RNG.normal(size=(40, 3)).astype(np.float32), columns=[*"abc"]), [0, 1] * 20
    other = x[["c", "a", "b"]]
    made = pack(train=(x, y), val=(other, y), test=0)
    assert (made.arrays["x"].reshape(2, 40, 3) == x.to_numpy()).all()
    for given in (other.assign(d="u"), x.to_numpy(), other.iloc[0], other.iloc[0].to_dict()):
        assert (sample_of(items_of(given, made.card)[0], made.card)["x"] == x.iloc[0]).all()
    for given in ((other, y), (x.to_numpy(), y), other.assign(y=y)):
        assert (pack(given, test=1.0, **options_like(made.card)).arrays["x"] == x.to_numpy()).all()
    renamed, said = x.set_axis([*"adc"], axis=1), "the table has no column 'b'; its columns are a, d, c"
    refused(nb.NbtoolsError, said, items_of, renamed, made.card)
    refused(nb.NbtoolsError, said, pack, train=(x, y), val=(renamed, y))


def test_columns_in_memory_are_packed_as_their_items_are():
    x, names, numbers = RNG.normal(size=(300, 3)), [f"c{i % 3}" for i in range(300)], torch.arange(300) % 3
    holes, large = np.where(RNG.random((300, 3)) < 0.02, np.nan, x), [*range(2**24 + 1, 2**24 + 300), 2.0]
    tensors = Subset(TensorDataset(torch.tensor(holes), numbers[:, None]), RNG.permutation(300)[:200].tolist())
    mixed, masked = [bool(i % 2) if i % 7 == 0 else i % 2 for i in range(300)], np.ma.masked_greater(x, 2.5)
    pictures, waves = [image("HSV")] * 300, np.array([np.arange(2000 + i % 2) / 7 for i in range(300)], object)
    columns = [(x, [None, *names[1:]]), (x, mixed), (x.astype(object), numbers), (masked, names), (large, names)]
    columns += [{0: x, 1: numbers, "y": names}, {"a": holes, "y": x}, (pictures, numbers), (waves, x), tensors]
    for data in columns:
        rows = [*data] if data is tensors else [*zip(*(data.values() if isinstance(data, dict) else data), strict=True)]
        rows = [dict(zip(data, row, strict=True)) for row in rows] if isinstance(data, dict) else rows
        assert pack(data).card.digest == pack(rows).card.digest  # with what is bad, and all splits
        assert pack(train=data, val=data, test=0).card.digest == pack(train=rows, val=rows, test=0).card.digest
    before, others = pack((waves, names)).folder, {"x": x[:3], "y": names[:3], "m": names[:3]}
    waves[65][1500] += 1e-9  # of no item that is looked at
    assert pack((waves, names)).folder != before
    assert [*pack(Subset(TensorDataset(numbers), [*range(100), 999])).bad["file"]] == ["item 100"]
    assert len(pack(train={"x": x, "y": names}, val=others, test=0).bad) == 3


@pytest.mark.alone
def test_columns_in_memory_are_packed_and_opened_in_a_fraction_of_the_time_of_their_items():
    columns = RNG.normal(size=(20000, 8)), np.arange(20000) % 5
    twice = [columns, [*zip(*columns, strict=True)]] * 2  # the second time they are only opened
    took = [timeit(partial(pack, data), number=1) for data in twice]
    assert took[0] < took[1] / 2, took
    assert took[2] < took[3] / 3, took


def test_what_a_mask_hides_is_missing():
    x, y = np.ma.masked_equal(np.ones((20, 2)), 0), np.ma.masked_equal([0, 1] * 10, 0)
    x[3] = np.ma.masked
    assert [bad.split()[1] for bad in pack((x, [0, 1] * 10)).bad["file"]] == ["3"]
    assert len(pack((np.ones((20, 2)), y), classes=["0", "1"]).bad) == 10
    assert len(pack(Items(lambda i: (x[i], i % 2))).bad) == 1


def test_a_word_that_may_be_a_class_or_nothing_is_neither_in_silence(tmp_path):
    rows = [f"{i},{('None', 'Insomnia')[i % 2]},{('NA', 'SE')[i // 20]}\n" for i in range(40)]
    (path := tmp_path / "t.csv").write_text("".join(["age,disorder,country\n", *rows]))
    with pytest.raises(nb.NbtoolsError, match="'None' in column 'disorder' may be a class, or mean nothing: name all"):
        pack(path, target="disorder")
    assert pack(path, target="disorder", inputs="age", sep=";").classes == ["Insomnia"]
    made = pack(path, target="disorder", classes=["Insomnia", "None"], inputs="age", groups="country")
    assert (len(made), made.splits["train"]) == (40, 20), "NA is a country, which stays in one split"


UNSAID = {
    "these columns are not numeric: wait": {"wait": pd.to_timedelta(np.arange(20), unit="min")},
    "these columns are not numeric: z": {"z": np.fft.fft(np.ones(20))},
    "y is missing in all 20 items looked at": {"y": [None] * 20},
    "nbtools has a column 'x' of its own; rename": {"x": ["some", "words"] * 10},
}


@pytest.mark.parametrize("said", UNSAID)
def test_no_column_is_changed_or_lost_in_silence(said):
    text = open_image if "rename" in said else None  # any function
    with pytest.raises(nb.NbtoolsError, match=said):
        pack(pd.DataFrame({"n": np.ones(20), "y": [0, 1] * 10} | UNSAID[said]), target="y", text=text)
    assert [*pack(pd.DataFrame({"x": ["a", "b"] * 10, "y": [0, 1] * 10}), text=ord).columns] == ["x", "y"]


def test_what_is_read_otherwise_than_it_may_be_meant_is_said(capsys):
    for said in (True, False):
        nb.pack(pd.DataFrame({"time": 1.7e9 + np.arange(40), "y": [0, 1] * 20}), progress=said)
    nb.pack([(np.ones((30, 21, 3), np.float32), i % 2) for i in range(20)])
    said = capsys.readouterr().err
    assert said.count("float32 cannot tell most values of time apart: subtract") == 1
    assert "x float32 (30, 21, 3) is read as images (H, W, C), and reaches the network as (C, H, W)" in said


def test_data_in_memory_whose_label_is_corrected_are_packed_anew_also_below_a_subset():
    x, y = torch.randn(200, 3), torch.arange(200) % 2
    made = [pack(Subset(TensorDataset(x, y), range(200))).folder]
    y[7] = 1 - y[7]
    made.append(pack(Subset(TensorDataset(x, y), range(200))).folder)
    made.append(pack(Subset(TensorDataset(x, y), [*range(199), 0])).folder)
    made.append(pack(ConcatDataset([Subset(TensorDataset(x, y), range(100)), TensorDataset(x, 1 - y)])).folder)
    y[9] = 1 - y[9]
    made.append(pack(ConcatDataset([Subset(TensorDataset(x, y), range(100)), TensorDataset(x, 1 - y)])).folder)
    assert len({*made}) == 5


def test_folds_keep_equal_samples_together():
    x = np.repeat(RNG.normal(size=(120, 2)).astype(np.float32), 3, 0)
    for fold in pack((x, [0, 0, 0, 1, 1, 1] * 60), folds=3, test=0):
        rows = [{fold.arrays["x"][i].tobytes() for i in fold.ids(split)} for split in ("train", "val")]
        assert (len(rows[0] & rows[1]) <= 4, fold.splits["val"]) == (True, 120), "at the ends of a fold, of each class"
    photos = pack([(np.full((4, 5, 3), i // 5, np.uint8), i % 2) for i in range(200)])
    for made in (photos, *photos.folds(3)):
        assert len({(x.tobytes(), split) for x, split in zip(made.arrays["x"], made.split, strict=True)}) == 40
        assert min(made.splits.values()) >= 20, "copies of an image stay together"


def test_a_list_beside_a_zip_may_name_its_folder_and_several_files_are_predicted_one_by_one(tmp_path):
    (tmp_path / "raw/images").mkdir(parents=True)
    for i in range(20):
        image().save(tmp_path / f"raw/images/{i}.avif")
    files = [f"images/{i}.avif" for i in range(20)]
    table = pd.DataFrame({"file": files, "y": [0, 1] * 10})
    made = pack(table, image="file", root=tmp_path / "raw/images", target="y")
    assert (len(made), len(made.bad)) == (20, 0)
    lacking = pack(table.replace(files[0], "images/none.avif"), image="file", root=tmp_path / "raw/images", target="y")
    assert (len(lacking), len(lacking.bad)) == (19, 1)
    paths = [tmp_path / "raw" / file for file in files]
    kinds = [(at.read_bytes(), {"bytes": at.read_bytes()}, Image.open(at))[i % 3] for i, at in enumerate(paths)]
    assert (pack(table.assign(file=kinds), image="file", target="y").arrays["image"] == made.arrays["image"]).all()
    assert len(items_of((*(str(tmp_path / "raw" / file) for file in files),), made.card)) == 20


def odd(value, usual=lambda i: (vector(i), "ab"[i % 2]), count=20):
    """A Dataset whose item 7 is odd; of 200 items it is not one that is looked at."""
    return Items(lambda i: (1 / 0 if value is ZeroDivisionError else value) if i == 7 else usual(i), count)


LEFT_OUT = {  # name: (data, value, rule) of the one row of the table of bad samples
    "an item that raises": (odd(ZeroDivisionError), "ZeroDivisionError: ", "the Dataset must return each item"),
    "an item that is None": (odd(None), "None", "an item must hold arrays"),
    "another shape": (odd((np.zeros(4), "a"), count=200), "float32 (4,)", "x must be float32 (3), as in other items"),
    "16 bits": (odd((Image.new("I;16", (5, 4)), "a"), lambda i: (image(), "a")), "I;16", "images must have 8 bits"),
    "an object": (odd((object(), "a")), "object", "x must hold numbers"),
    "a number that is not one": (odd((np.full(3, np.nan), "a")), "nan", "all numbers in x must be finite"),
    "a class that is None": (odd((vector(0), None)), "nothing", "every sample must have a class"),
    "several classes": (odd((vector(0), ["a", "b"]), count=200), "['a', 'b']", "every sample must have a class"),
    "a list of none": (odd((vector(0), []), count=200), "[]", "every sample must have a class"),
    "a number below 0": (Items(lambda i: (vector(i), -(i == 7)), 200, classes=["a", "b"]), "-1", "must be one of 2"),
    "a list among names": ([(0.5, ["a"] if i == 7 else "ab"[i % 2]) for i in range(20)], "['a']", "must have a class"),
}


@pytest.mark.parametrize(("data", "value", "rule"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_an_odd_item_is_a_row_of_the_table_of_bad_samples(data, value, rule):
    made = pack(data)
    [(file, came, broken, fix)] = made.bad.to_numpy().tolist()
    assert (file, bool(fix), len(made)) == ("item 7", True, len(data) - 1)
    assert came.startswith(value)
    assert rule in broken
    assert same(made)


ONCE = Items(lambda i: (vector(i), 3 if i == 7 else 1), 200, classes=SPECIES)  # not at an item that is looked at
REFUSED = {  # and those of the table in docs/your-own.md, in test_your_own; the sentence: (data, options)
    "got set; pass list": ({1, 2}, {}),
    "the same number of items, got 19, 20": ((np.zeros((20, 3)), [0] * 19), {}),
    "x must be one array, got several; return separate parts": ([((vector(0), vector(1)), 0)] * 20, {}),
    "which part of an item is its target": ([{"x": 0.5, "y": 1, "label": 2}] * 20, {}),
    "t must hold numbers, got the text 'abc'; .* text=function": (Items(lambda i: {"t": "abc", "y": 1}), {}),
    "no column 'prize'; its columns are a, y": (frame(), {"target": "prize"}),
    "val has no items; pass at least one": (Items(vector), {"val": []}),
    "with a size=": (Items(vector), {"resize": "crop"}),
    "the items hold none": (Items(vector), {"size": 8}),
    "one shape, apart from its first axis": (Items(lambda i: (np.zeros((2, i + 1)), 0)), {}),
    "the Dataset must return each item, got ZeroDivisionError": (Items(lambda i: 1 / 0), {}),
    "item 7: .* numbered from 0, and a label is 3; subtract 1": (ONCE, {}),
    "2 classes cat, dog are .* label is 2": ([(0.5, i % 2 + 1) for i in range(20)], {"classes": ["cat", "dog"]}),
    "a list of names, each once, .* got {'dog': 1}": ([(0.5, 0)] * 20, {"classes": {"dog": 1}}),
    "must be unique, got a, y, a": (pd.concat([frame(), frame()[["a"]]], axis=1), {}),
    "text= needs a text column, not a;": (frame(), {"text": len}),
    "several targets must be numeric, got a, b; name one": (frame(b="u"), {"target": ["a", "b"]}),
    "drive:x: data must go to a local disk": (frame(), {"into": "drive:x"}),
    "a column of a table or 20 values, got 2": (Items(vector), {"groups": [1, 2]}),
    "'p' has the splits: pass .*test=df.df.'p'. == 'test'": (frame(f="1.png", p=["dev", "test"] * 10), {"image": "f"}),
    "not numeric: b, c, d; .*get_dummies.*decimal": (frame(b="u", c=pd.Categorical([10, 20] * 10), d=np.nan), {}),
    "No such file or directory; check the path a/5.png, its ending": ([(Path("a/5.png"), 0)] * 20, {}),
    "no image; delete it, or copy it": ([(b"GIF", 0)] * 20, {}),
    "one argument, got target=Series; write": (frame()[["a"]], {"target": frame()["y"]}),
    "the same classes, got .*'dog'.*'bee'": (ConcatDataset([PETS, Items(PETS.item, classes=["ant", "bee"])]), {}),
    "sep= is for tables, got list; return images, and a list": ([(vector(0), "a b")] * 20, {"sep": " "}),
    "root= is for tables, got Items; return images": (Items(vector), {"root": "."}),
    "no column 'who'; its columns are a, y": (frame(), {"groups": "who"}),
    "must not be lists of numbers; return names": ([(0.5, [0, 2][i % 2 :]) for i in range(20)], {"classes": "abc"}),
    "text must be a module-level function": ([{"t": "a", "y": 0}] * 20, {"text": lambda text: [1]}),
    "must have 3 numbers, one per channel of x": ([(image(), 0)] * 20, {"mean": [0.5], "std": [0.5]}),
    "std > 0, of bytes in 0…1, got .* 0.0,": ([(image(), 0)] * 20, {"mean": [0.5] * 3, "std": [0.5, 0, 0.5]}),
    "the inputs hold none: x float32": (Items(vector), {"mean": [0.5], "std": [0.5]}),
    "std > 0, of bytes in 0…1, got .*123.0": ([(image(), 0)] * 20, {"mean": np.full(3, 123.0), "std": [58] * 3}),
}


@pytest.mark.parametrize("said", REFUSED)
def test_what_has_no_single_reading_is_one_sentence_that_names_the_way_out(said):
    data, options = REFUSED[said]
    refused(nb.NbtoolsError, said, pack, data, **options)


def test_a_number_that_is_no_class_is_never_taken_for_the_place_of_one():
    made = pack([(float(i), label) for i, label in enumerate([0, 2, 3, 1] * 10)], classes=["0", "2", "3"])
    assert (len(made.bad), {made.classes[k] for k in made.arrays["y"]}) == (10, {"0", "2", "3"})
    assert [made.arrays["x"][k] % 4 for k in range(3)] == [0, 1, 2]
    assert len(pack([(0.5, 2**25 + i) for i in range(20)], classes=False)) == 20, "as the nearest float32"


def test_what_a_table_lacks_is_a_row_of_the_table_of_bad_samples():
    data = frame(d=pd.array([True, False] * 10, "boolean"), y=pd.array([0, 1] * 10, "Int64"))
    data.loc[0, "a"], data.loc[1, "d"], data.loc[2, "y"], data.loc[3, "a"] = None, None, None, np.inf
    made = pack(train=data, val=frame(d=True).iloc[:4], test=0)
    assert made.bad.file.tolist() == [f"train/row {i}" for i in range(4)]
    assert made.bad.rule[2].startswith("every sample must have a class")
    assert made.sample(16)["x"].tolist() == [0, 1]


def pictures(folder, *names, count=6, size=(6, 5), form: Any = "NFC"):
    for name in names:
        where = folder / unicodedata.normalize(form, name)
        where.mkdir(parents=True)
        for i in range(count):
            Image.fromarray(RNG.integers(0, 255, (*size, 3), dtype=np.uint8)).save(where / f"{i}.png")
    return folder


FOLDERS = {  # name: (folders with 6 pictures each, classes, splits that are given)
    "below another folder": (["set/pets/cat", "set/pets/dog"], ["cat", "dog"], {}),
    "TrainData": (["TrainData/cat", "TrainData/dog", "devset/cat"], ["cat", "dog"], {"val": 6}),
    "training_set": (["training_set/cat", "training_set/dog", "test_set/cat"], ["cat", "dog"], {"test": 6}),
    "seg_train": (["seg_train/seg_train/a", "seg_train/seg_train/b", "seg_test/seg_test/b"], ["a", "b"], {"test": 6}),
    "an unlabelled test folder": (["train/cat", "train/dog", "test"], ["cat", "dog"], {}),
    "classes that sound like splits": (["bus", "car", "train"], ["bus", "car", "train"], {}),
    "classes with words of splits": (["bus", "test_tube", "bullet train"], ["bullet train", "bus", "test_tube"], {}),
    "classes with folders inside": (["cat/2020", "cat/2021", "dog/2020"], ["cat", "dog"], {}),
    "folders of images inside": (["cat/images", "dog/images"], ["cat", "dog"], {}),
    "accents of a Mac": (["Train/café", "Train/thé", "Valid/cafe\u0301"], ["café", "thé"], {"val": 6}),
    "splits below classes": (["cat/train", "cat/test", "dog/train", "dog/test"], ["cat", "dog"], {"test": 12}),
    "litter": (["cat", "dog", "__MACOSX/cat", "dog/@eaDir/1", "dog/.thumbs", ".ipynb"], ["cat", "dog"], {}),
}


@pytest.mark.parametrize(("folders", "classes", "given"), FOLDERS.values(), ids=FOLDERS)
def test_what_a_folder_is_follows_from_what_it_holds(tmp_path, capsys, folders, classes, given):
    for folder in folders:
        pictures(tmp_path / "data", folder, form="NFD" if "e\u0301" in folder else "NFC")
    put(tmp_path / "data" / "notes" / "readme.txt")
    made = nb.pack(tmp_path / "data", classes=classes if "train" in classes else None)
    assert made.classes == classes
    assert {split: made.splits[split] for split in given} == given
    ignored = ("/.", ".ipynb", "__MACOSX", "@eaDir")
    counted = [folder for folder in folders if folder != "test" and not any(each in folder for each in ignored)]
    assert (len(made), made.bad.empty) == (6 * len(counted), True)
    left_out = "7 files left out, such as notes/readme.txt: not images in class folders"
    assert (left_out in capsys.readouterr().err) == ("test" in folders)
    assert same(made)


NO_CLASSES = {  # what is said → folders with 6 pictures each, the one that is packed
    "'images' is not a class .folders: images, masks.; ": ("images masks", ""),
    "'a' is not a class .folders: a, b.; move it, or pass masks": ("a/images a/masks b/images", ""),
    "'mri' is not a class .folders: mri, no, yes.; move it": ("mri/no mri/yes no yes", ""),
    "'test' is not a class .folders: a, b, test.; move it, or name all classes=": ("a b test", ""),
    "got only train, val; name the": ("train val", ""),
    "got only cat; name the": ("cat", ""),
    r"got no folder with images, but 0\.png.*; name the": ("cat", "cat"),
}


@pytest.mark.parametrize("said", NO_CLASSES)
def test_folders_of_masks_of_splits_alone_or_of_one_class_are_refused_but_for_one_of_several_splits(tmp_path, said):
    folders, inner = NO_CLASSES[said]
    pictures(tmp_path / "data" / "set", *folders.split())
    refused(nb.NbtoolsError, said, pack, tmp_path / "data" / "set" / inner)
    refused(nb.NbtoolsError, "target= is for tables, got .*'labels.csv', target=", pack, tmp_path / "data", target="y")
    apart = pack(train=pictures(tmp_path / "more", "cat", "dog"), test=pictures(tmp_path / "test", "dog"), val=2)
    assert (apart.splits, apart.names[-1]) == ({"train": 10, "val": 2, "test": 6}, "test/dog/5.png")


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "TIFF"])
def test_images_are_upright_as_their_exif_says_in_packs_and_predictions(tmp_path, kind, orientation):
    """Pillow's own transposition is right; a picture red above and blue below."""
    upright = np.zeros((16, 24, 3), np.uint8)
    upright[:8], upright[8:] = (255, 0, 0), (0, 0, 255)
    back = {1: None, 2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}[orientation]
    stored = Image.fromarray(upright) if back is None else Image.fromarray(upright).transpose(Image.Transpose(back))
    exif, file = Image.Exif(), tmp_path / f"a.{kind}"
    exif[0x0112] = orientation
    stored.save(file, kind, exif=exif, **({"quality": 95, "subsampling": 0} if kind == "JPEG" else {}))
    for seen in (np.asarray(open_image(file)), pack([(Image.open(file), 0)] * 4).sample(0)["x"]):
        assert seen.shape == (16, 24, 3)
        assert np.abs(seen.astype(int) - upright).max() < 12


@pytest.mark.parametrize("resize", ["crop", "pad", "squash"])
@pytest.mark.parametrize("size", [(40, 40), (10, 30), (20, 40)])
def test_masks_and_boxes_are_resized_with_their_image(resize, size):
    """A picture with a bright square of 4 pixels, its mask, and its corners x1, y1, x2, y2."""
    array, mask, box = np.zeros((20, 40, 3), np.uint8), np.zeros((20, 40), np.uint8), np.array([16, 8, 20, 12])
    array[8:12, 16:20], mask[8:12, 16:20], mask[:2] = 255, 15, 255
    picture = Image.fromarray(array)
    palette = Image.fromarray(mask).convert("P")
    palette.frombytes(mask.tobytes())
    boxed, placed = (pack([(picture, box)] * 20, points=name, size=size, resize=resize) for name in ("target", 1))
    assert placed.sample(0)["y"].tolist() == boxed.sample(0)["y"].tolist()
    masks = [pack([(picture, one)] * 20, size=size, resize=resize) for one in (palette, Image.fromarray(mask))]
    x1, y1, x2, y2 = boxed.sample(0)["y"].round().astype(int)
    for sample in (made.sample(0) for made in masks):
        assert set(np.unique(sample["y"])) <= {0, 15, 255}
        bright = sample["x"][..., 0] > 127
        rows, columns = np.nonzero(bright)
        assert np.abs([columns.min() - x1, rows.min() - y1, columns.max() + 1 - x2, rows.max() + 1 - y2]).max() <= 1
        assert ((sample["y"] == 15) != bright).mean() < 0.02
    assert boxed.options["points"] == {"y": ["x", "boxes"]}
    inner = pack([{"x": picture, "b": box, "y": i % 2} for i in range(20)], points="b", size=size, resize=resize)
    assert (sample_of({"x": picture, "b": box}, inner.card)["b"] == inner.sample(0)["b"]).all(), "as to be predicted"
    assert boxed.options["resize"] == [*size, resize]


def test_how_images_are_resized_and_what_does_not_move_with_them_is_said(capsys):
    corners = np.ones((3, 2))
    for target, points in ((image("L"), None), (["a", "b"], None), (corners, "target"), (corners, None)):
        nb.pack([(image(), target)] * 20, size=8, points=points)
    said = capsys.readouterr().err
    assert said.count("the target float32 (3, 2) is left as it is: points='target'") == said.count("is left") == 1
    nb.pack([(image(), "ab"[i % 2]) if i else (None, None) for i in range(20)], size=3)
    assert "images are resized to 3 × 3 by resize='crop'" in capsys.readouterr().err
    made = nb.pack([(image(), i / 2) for i in range(20)], size=(2, 3), mean=(0.5, 0.4, 0.3), std=(0.2, 0.2, 0.1))
    assert "images are resized to 2 × 3 by resize='squash'" in capsys.readouterr().err
    assert (made.options["mean"]["x"], made.options["std"]["x"]) == ([0.5, 0.4, 0.3], [0.2, 0.2, 0.1])
    assert nb.pack([(image(), i / 2) for i in range(20)], size=(2, 3)).card.digest != made.card.digest


@pytest.mark.parametrize("sep", [",", ";"])
def test_images_from_a_table_lie_in_the_folder_of_the_csv_or_in_root(tmp_path, sep, monkeypatch, capsys):
    pictures(tmp_path, "files", count=12, size=(4, 4))
    data = pd.DataFrame({"filename": [f"files/.//{i}.png" for i in range(12)], "label": ["a", "b"] * 6, "age": 0.5})
    data.loc[3, "filename"], data.loc[4, "filename"] = "files/none.png", "files\\4.png"  # as on Windows
    data.to_csv(tmp_path / "labels.csv", sep=sep, index=False)
    monkeypatch.setenv("NBTOOLS_DRIVE", str(tmp_path))
    made = nb.pack("drive:labels.csv", image="filename")
    assert "are read from Drive one by one; a zip, root=" in capsys.readouterr().err
    assert (list(made.columns), made.classes, len(made)) == (["image", "y"], ["a", "b"], 11)
    assert made.bad.value.tolist() == ["No such file or directory"]
    both = pack(data, image="filename", root=tmp_path, inputs=["age"], groups="label")
    assert [str(both.columns[name]) for name in ("image", "x")] == ["uint8 (4, 4, 3)", "float32 (1)"]
    assert same(both)
    for item in (items_of(data, both.card, tmp_path)[0], {**data.iloc[0], "filename": tmp_path / "files" / "0.png"}):
        assert (sample_of(item, both.card)["image"] == both.sample(0)["image"]).all()
    put(tmp_path / "files" / "5.png", (tmp_path / "files" / "4.png").read_bytes())
    assert pack(tmp_path / "labels.csv", image="filename").folder != made.folder, "its files are part of the data"


def test_new_data_get_the_columns_of_a_run_whatever_they_have_in_common():
    series, grey = [(np.zeros((3 + i % 2, 2)), "a") for i in range(20)], np.asarray(image("L"))
    for old, new in ((series, series[::2]), ([(image(), 0)] * 20, [(image("L"), 0), (image(size=(5, 5)), 0)])):
        made = pack(old)
        again = pack(new, test=1.0, **options_like(made.card))
        assert (again.columns, len(again.bad)) == (made.columns, len(new) % 10 // 2)
    mixed = pack([(image("RGB" if i == 7 else "L"), 0) for i in range(200)])  # 7 is not looked at
    assert (len(mixed), (mixed.arrays["x"] == grey).all()) == (200, True), "as Pillow makes grey of colours"


SEA, TAGS = ["sea", "sky"], [["sea", "sky"], ["sea"], [], ["sky"]] * 5
LABELS = {
    "a separator": ({"tags": ["sea  sky", "sea", "", "sky"] * 5}, {"target": "tags", "sep": " "}),
    "lists": ({"tags": TAGS}, {"target": "tags"}),
    "lists of a parquet file": ({"tags": [np.array(each, object) for each in TAGS]}, {"target": "tags"}),
    "columns": ({"sky": [1, 0, 0, 1] * 5, "sea": np.arange(20) % 4 < 2}, {"target": SEA[::-1], "classes": SEA}),
    "items": ([(0.5, ["sky", "sea"]), (1.5, ["sea"]), (2.5, []), (3.5, {"sky"})] * 5, {}),
    "arrays": ([(0.5, np.array(y)) for y in [[1, 1], [1, 0], [0, 0], [0, 1]] * 5], {"classes": SEA}),
}


@pytest.mark.parametrize(("data", "options"), LABELS.values(), ids=LABELS)
def test_several_labels_of_a_sample_become_a_1_for_each(data, options):
    made = pack(frame(**data).drop(columns="y") if isinstance(data, dict) else data, **options)
    assert (made.options["kind"], made.classes, str(made.columns["y"])) == ("labels", SEA, "uint8 (2)")
    assert made.arrays["y"].tolist() == [[1, 1], [1, 0], [0, 0], [0, 1]] * 5
    assert same(made)
    assert pack([(0.5, [f"{i % 12}"]) for i in range(24)]).classes == [*map(str, range(12))]


def test_splits_given_share_their_classes():
    train, other = [(0.5, "b")] * 30, [(0.5, "a")] * 10
    made = pack(train=train, val=other, test=[(1.5, "c")])
    sizes, names = {"train": 30, "val": 10, "test": 1}, ["a", "b", "c"]
    assert (made.splits, made.classes, made.names[30]) == (sizes, names, "val/item 0")
    assert pack(frame(g=None), groups="g").splits["train"] == 16, "what has no group is one of its own"
    assert sorted(pack(frame(), groups=pd.Series(np.arange(20) // 5)).splits.values()) == [5, 5, 10]
    names = [Items(lambda i: (0.5, i % 2), 6, classes=names) for names in (["ant", "bee"], ["eel", "bee"])]
    made = pack(train=names[0], val=names[1], test=0)  # as ImageFolder numbers a split that lacks a class
    assert [made.classes[y] for y in made.arrays["y"]] == ["ant", "bee"] * 3 + ["eel", "bee"] * 3


def test_a_second_call_opens_the_pack_and_another_number_share_or_value_is_another_pack():
    def data(changed=-1, count=100):
        return [(i / 2, int(i == changed)) for i in range(count)]

    made, array = pack(data()), np.zeros((100, 2), np.float32)
    before = made.folder.stat().st_ino
    assert pack(data()).folder.stat().st_ino == before
    others = [pack(data(7)), pack(data(count=101)), pack(data(), val=0.2), pack(data(), groups=["a", "b"] * 50)]
    others += [pack(array), pack(array + (np.arange(100) == 7)[:, None].astype(np.float32))]
    for odd in (5, 7):  # of which neither is looked at
        others += [pack(Subset(Items(vector, 300, targets=[i == odd for i in range(300)]), range(300)))]
    assert len({made.folder, *(other.folder for other in others)}) == 9
    assert len(pack(made.folder, folds=5)) == 5
    for other in ({"size": 8}, {"classes": ["a"]}, {"target": 0, "inputs": (1,)}, {"mean": 0.5, "std": 0.5}):
        with pytest.raises(nb.NbtoolsError, match=f"is a pack, whose {'/'.join(other)} cannot change; pass the raw"):
            pack(made.folder, **other)
    assert pack(made.folder, classes=made.classes or False, test=0.2).splits == made.splits


def test_without_a_copy_the_pack_has_labels_and_splits_and_the_dataset_the_rest(tmp_path):
    folder = pictures(tmp_path / "pictures", "cat", "dog", count=10)
    made, whole = pack(folder, store=False), pack(folder)
    assert not (made.folder / "image.npy").exists()
    assert (made.columns, made.classes, made.names) == (whole.columns, whole.classes, whole.names)
    assert made.arrays["y"].tolist() == whole.arrays["y"].tolist()
    assert sum(made.splits.values()) == 20
    assert (made.raw[3]["image"] == whole.sample(3)["image"]).all()
    refused(nb.NbtoolsError, r"name the classes: classes=", pack, Items(lambda i: (vector(i), i % 2)), store=False)
    other = pack(Items(lambda i: (vector(i), i % 2), classes=["cat", "dog"]), store=False)
    assert (list(other.columns), other.options["stored"], other.raw[1]["y"]) == (["x", "y"], False, 1)
    random = Items(lambda i: (np.random.rand(3), i % 2), classes=["cat", "dog"])
    assert (pack(random, store=False).raw[0]["x"] != pack(random, store=False).raw[0]["x"]).all(), "read anew"
    changed = Items(lambda i: (vector(i) + 1, i % 2), classes=["cat", "dog"])
    assert pack(changed, store=False).card.digest != other.card.digest, "no run goes on with it"
    said = "the Dataset augments val and test too: pass val=… one without random transforms"
    assert (pack(random, store=False).remarks, pack(train=random, val=changed, store=False).remarks) == ([said], [])
