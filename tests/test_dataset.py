"""nb.pack: one's own data of any kind give the right pack, or one sentence that names the way out."""

import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

import nbtools as nb

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
    assert (made.options["inputs"], made.options["kind"], made.options["layout"]) == (["x"], "classes", {"x": "chw"})
    train = x[made.ids("train")].double()
    np.testing.assert_allclose(made.options["mean"]["x"], train.mean((0, 2, 3)), rtol=1e-9)
    np.testing.assert_allclose(made.options["std"]["x"], train.std((0, 2, 3), correction=0), rtol=1e-9)
    assert same(made)


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
    assert made.options["layout"] == {"image": "hwc"}
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
    assert (file, value, rule) == ("row 3", "nothing", "rooms has a value")
    assert made.sample(0)["x"].tolist() == [frame.rooms[0], frame.town[0] == "a", frame.town[0] == "b", 18262]
    assert same(made)
