"""docs/your-own.md is true: its cells learn in the promised lines, its blocks run, its tables name what there is."""

import html
import re
from pathlib import Path
from typing import Any

import numpy as np
import own
import pandas as pd
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import ChainDataset, DataLoader, Dataset, TensorDataset, random_split

import nbtools as nb
from nbtools.train.defaults import METRICS, STRENGTHS

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "docs" / "your-own.md").read_text()
CELLS = dict(re.findall(r"<!-- cell: (\w+), .*? -->\n```python\n(.*?)```", TEXT, re.S))
LINES = {"images": 6, "table": 8, "sequences": 15, "masks": 15}
EPOCHS = 2
PHOTOS = own.images(120)
Net = own.Small
pytestmark = pytest.mark.usefixtures("desk")


def run_cell(code: str, **given: Any) -> dict[str, Any]:
    found = {"__name__": "__main__", **given}
    exec(compile(code, "cell", "exec"), found)
    return found


def test_a_cell_has_no_more_lines_than_promised():
    for name, most in LINES.items():
        assert sum(bool(line.strip()) for line in CELLS[name].splitlines()) <= most
        assert f"<!-- cell: {name}, at most {most} lines -->" in TEXT


def test_a_folder_of_images_is_learned():
    for i, (image, name) in enumerate(own.images(450)):
        Path("shapes", name).mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(Path("shapes", name, f"{i}.png"))
    assert nb.evaluate(run_cell(CELLS["images"])["run"], nb.pack("shapes"), "test")["accuracy"] >= 0.95


class Photos(Dataset):
    """(image (3, 12, 12) float32, class)."""

    def __len__(self) -> int:
        return 120

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        image, name = PHOTOS[i]
        return torch.from_numpy(np.array(image, np.float32) / 255).permute(2, 0, 1), own.STRIPES.index(name)


def beside(title: str) -> list[str]:
    section = TEXT.split(f"\n## {title}\n")[1].split("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.S)


def names() -> dict[str, Any]:
    smooth = nn.CrossEntropyLoss(label_smoothing=0.1)
    given = {"photos": Photos(), "smooth": smooth, "device": "cpu", "random_split": random_split}
    given["DataLoader"] = lambda data, size, num_workers=0, **more: DataLoader(data, size, **more)
    return {**globals(), **given, "CosineAnnealingLR": CosineAnnealingLR}


def test_a_pytorch_loop_and_a_task_of_two_methods_train_the_same_network_and_leave_its_weights():
    theirs, ours = beside("From a PyTorch loop")
    run_cell(theirs, **names())
    run_cell(ours, **names())
    kept, exported = torch.load("net.pt", weights_only=True), load_file("net.safetensors")
    assert exported.keys() == kept.keys()
    Net(3).load_state_dict(exported)


def test_classify_trains_what_a_lightning_module_does_and_the_model_is_taken_away_as_shown():
    found = run_cell(beside("From Lightning")[0], **names())
    assert len(found["run"].history.of("epoch")) == EPOCHS
    again = nb.Run.open("runs/photos", task=found["task"])
    assert nb.evaluate(again, found["pack"], "val")["accuracy"] == found["run"].best["val_accuracy"]
    [take] = beside("Take it away")
    run_cell(take, **found)
    fresh, x = Net(3).eval(), torch.rand(2, 3, 12, 12)
    fresh.load_state_dict(load_file("net.safetensors"))
    torch.testing.assert_close(found["run"].model("cpu")(x), fresh(x))


def test_weights_and_biases_and_optuna_take_a_callback_as_shown(monkeypatch):
    """With the real packages, where they are installed; W&B offline."""
    wandb, optuna = pytest.importorskip("wandb"), pytest.importorskip("optuna")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    logs, prunes = beside("Callbacks and loggers")
    task, pack, plan = nb.classify(Net), nb.pack(Photos()), nb.Plan(epochs=EPOCHS, batch_size=16)
    kept, finish = [], wandb.finish
    monkeypatch.setattr(wandb, "finish", lambda: kept.append(dict(wandb.run.summary)) or finish())
    run = run_cell(logs, nb=nb, task=task, pack=pack, plan=plan)["run"]
    assert kept[0]["val_accuracy"] == run.history.of("epoch")[-2]["val_accuracy"], "the last is kept until the end"
    assert list(Path("runs", "wandb").glob("offline-run-*"))
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    objective = run_cell(prunes, optuna=optuna, task=task, pack=pack, nb=nb, EPOCHS=EPOCHS)["objective"]
    pruners = {"PRUNED": optuna.pruners.ThresholdPruner(lower=2.0), "COMPLETE": optuna.pruners.NopPruner()}
    for state, pruner in pruners.items():
        study = optuna.create_study(direction="maximize", pruner=pruner)
        study.optimize(objective, n_trials=1)
        assert [trial.state.name for trial in study.trials] == [state]


class Flipped(Photos):
    """At random, whenever they are read."""

    classes = own.STRIPES

    def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
        image, kind = super().__getitem__(i)
        return image.flip(2) if torch.rand(()) < 0.5 else image, kind


def refused() -> list[tuple[str, str]]:
    table = TEXT.split("<!-- refused -->")[1].split("<!-- /refused -->")[0]
    return re.findall(r"^\| `(nb\.pack\(.*?\))`, .*? \| (.*) \|$", table, re.M)


@pytest.mark.parametrize(("call", "said"), refused(), ids=[call for call, _ in refused()])
def test_what_cannot_be_packed_gets_the_sentence_of_the_table(call, said):
    x, y = torch.rand(6, 4), torch.zeros(6)
    given = {"nb": nb, "loader": DataLoader(TensorDataset(x, y)), "stream": ChainDataset([]), "x": x, "y": y}
    given |= {"augmented": Flipped(), "triples": [(0.5, 1, 2)] * 20}
    given["pictures"] = [(Image.new("RGB", (24 + i, 24)), "ab"[i % 2]) for i in range(20)]
    given["notes"] = pd.DataFrame({"area": 1.0, "note": [f"text {i}" for i in range(60)], "price": 2.0})
    with pytest.raises(nb.NbtoolsError) as caught:
        eval(call, given)
    parts = html.unescape(said.replace("\\_", "_")).split(" … ")
    pattern = ".*".join(re.escape(part).replace("…", ".*") for part in parts)
    assert re.search(pattern, str(caught.value)), str(caught.value)


def test_the_tables_name_the_metrics_augmentations_settings_and_calls_that_there_are():
    rows = dict(re.findall(r"^\| (metrics of \w+|augmentation) \| (.*?) \|$", TEXT, re.M))
    for kind in ("classes", "labels", "values"):
        named = set(re.findall(r"`(\w+)`", rows[f"metrics of {kind}"]))
        assert named == {name for name, (of, _, _) in METRICS.items() if kind in of}
    assert set(re.findall(r"`(\w+)`", rows["augmentation"])) == {*STRENGTHS}
    assert all(hasattr(nb.Run, name) for name in re.findall(r"\brun\.(\w+)\(", TEXT))
