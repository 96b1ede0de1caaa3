# %% [markdown]
# # 9 · Your own task
#
# {badge}
#
# Trains your own network on your own data: images in one folder per class, any PyTorch Dataset, or a table. You get
# everything that the other notebooks have: the plan with reasons, the panel, the live picture, the receipt, and
# resuming.
#
# **GPU:** any; the generated pictures need none. **Measured:** 1 min 52 s on
# two cores of an AMD EPYC (a cloud machine, no GPU, with other work beside it), plus installation.
#
# ![A run while it trains]({repository}/raw/main/docs/run.png)

# {install}

# %% [markdown]
# ## Settings
# `DATA` names your own images: `"drive:datasets/flowers.zip"`, a folder, an archive or a link, in which each class has
# a folder, `rose/1.jpg`; folders `train`, `val` and `test` above these are kept as splits. With None, pictures are
# generated.

# %% tags=["parameters"]
import os

DATA = None
SIZE = (64, 64)  # height and width to which images are resized
RUN, KEEP = "runs/own", "drive:nbtools-data/runs/own"  # on this machine, fast; and where checkpoints are kept
COUNT, EPOCHS = 3000, 15  # generated pictures; passes over them, fewer than advised: they are easy
MEASURE = True  # False: a plan by rules of thumb at once, and no receipt
if not os.path.exists("/var/colab/hostname"):
    os.environ.setdefault("NBTOOLS_DRIVE", "drive")  # outside Colab, this folder stands in for Drive

# %% [markdown]
# ## The machine

# %%
import nbtools as nb

nb.gpus()

# %% [markdown]
# ## The data
# Generated pictures: triangles, squares and hexagons of any position, size, angle and colour. The class is the folder.

# %%
from PIL import Image, ImageDraw


def draw(corners, rng):
    image = Image.new("RGB", (64, 64), tuple(rng.choices(range(128), k=3)))
    circle = (rng.uniform(20, 44), rng.uniform(20, 44), rng.uniform(10, 18))
    colour = tuple(rng.choices(range(128, 256), k=3))
    ImageDraw.Draw(image).regular_polygon(circle, corners, rng.uniform(0, 360), fill=colour)
    return image


# %% [markdown]
# If `DATA` is set, nothing is drawn.

# %%
import random
from pathlib import Path

kinds, rng = {"triangle": 3, "square": 4, "hexagon": 6}, random.Random(0)
for i in range(0 if DATA else COUNT):
    kind = list(kinds)[i % 3]
    path = Path("data/pictures", kind, f"{i}.png")
    path.parent.mkdir(parents=True, exist_ok=True)
    draw(kinds[kind], rng).save(path)

# %% [markdown]
# Each image is decoded and resized once. What cannot be used is listed in `pack.bad`, with the reason.

# %%
pack = nb.pack(DATA or "data/pictures", size=SIZE)
pack

# %% [markdown]
# ## The task
# A network, or a function that makes one, and its loss: `nb.classify` adds cross entropy, accuracy and pictures of
# samples; `nb.regress` is its counterpart for numbers. The function gets what its parameters ask for: the number of
# `classes`, and `inputs`, here channels. `augment` changes each batch on the device, reproducibly for each sample.

# %%
from torch import nn


def network(inputs, classes):
    layers = []
    for width in (16, 32, 64, 64):
        layers += [nn.Conv2d(inputs, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, classes))


task = nb.classify(network, augment=["flip"])

# %% [markdown]
# A loss of your own needs a class with two methods; `batch` holds the pack's columns, as the table above names them:
#
#     class Mine(nb.Task):
#         metrics = ["accuracy"]
#         def model(self, card, plan): ...
#         def loss(self, model, batch, plan): ...  # returns (sum, number of terms)
#
# ## The plan
# As in the other notebooks: measured here, on your data and your network, with reasons.

# %%
advice = nb.advise(task, pack, measure=MEASURE and not (KEEP and nb.kept(KEEP, "newly measured advice")))
advice

# %% [markdown]
# Change what you like in the form; *Run all* needs no click.

# %%
panel = nb.Panel(advice, epochs=advice.plan.epochs if DATA else EPOCHS)
panel

# %% [markdown]
# ## Train
# The panel acts on the run. Run the cell again after *Stop*, or in tomorrow's session: it resumes where it stopped.

# %%
run = nb.fit(task, pack, panel, run=RUN, keep=KEEP, receipt=MEASURE)

# %% [markdown]
# ## The result
# The last three epochs. `val_accuracy` is the share of images with the right class; the best epoch's weights are kept.

# %%
run.summary().tail(3)

# %% [markdown]
# The receipt compares with a DataLoader that opens the same images one by one.

# %%
run.receipt or print("Not measured: it needs MEASURE = True and a finished run; the training cell may say more")

# %% [markdown]
# ## Use it
# On images that were never seen, then on files; with the classes and the preprocessing used in training.

# %%
nb.evaluate(run, pack, split="test" if pack.splits["test"] else "val")

# %% [markdown]
# Three files of one class, with the probability of each answer:

# %%
files = sorted(Path("data/pictures").glob("*/*.png"))[:3] if DATA is None else []
run.predict(files)

# %% [markdown]
# The weights to take away, as safetensors with a JSON card that says how to use them.

# %%
run.export("own.safetensors")

# %% [markdown]
# ## A table
# The same for a DataFrame: numbers in, a number out. This one is a formula with noise; yours is
# `pd.read_csv(nb.stage("drive:flats.zip") / "flats.csv")`.

# %%
import numpy as np
import pandas as pd

rng = np.random.default_rng(0)
flats = pd.DataFrame({"area": rng.uniform(30, 150, 2000), "floor": rng.integers(0, 9, 2000)})
flats["town"] = rng.choice(["Bonn", "Köln"], 2000)
rate = np.where(flats["town"] == "Köln", 14, 11)
flats["rent"] = flats["area"] * rate + 20 * flats["floor"] + rng.normal(0, 40, 2000)

# %% [markdown]
# pandas makes a column for each word, numbers are normalised, and `mae` is in the target's own unit; the noise alone
# is 32.

# %%
rents = nb.pack(pd.get_dummies(flats), target="rent")
mlp = nb.regress(lambda inputs: nn.Sequential(nn.Linear(inputs, 64), nn.ReLU(), nn.Linear(64, 1)))
rent_run = nb.fit(mlp, rents, nb.Plan(epochs=EPOCHS, lr=1e-2), receipt=False)
nb.evaluate(rent_run, rents)

# %% [markdown]
# More, side by side with a PyTorch loop and Lightning:
# [docs/your-own.md]({repository}/blob/main/docs/your-own.md).
