# %% [markdown]
# # Sign 2 · Train
#
# {badge}
#
# Trains two models on the same clips, side by side: a Transformer on keypoints, and a GRU on ready-made image features,
# each with a plan and its reasons. The receipt shows how much faster training is than the guide's
# "before" on this machine.
#
# **GPU:** any NVIDIA GPU (not tested yet); the steps are small, and a CPU will do. **Measured:** 2 min 57 s on
# two cores of an AMD EPYC (a cloud machine, no GPU), plus installation, with 600 generated clips of 12 signs.
#
# ![A run while it trains]({repository}/raw/main/docs/run.png)

# {install}

# %% [markdown]
# ## Settings
# `CHANGES` overrides the advice: `{"epochs": 50, "mirror": 0.5}`. The Transformer trains `MORE` times the advised
# epochs, as the demo's signs differ only in the order of movements; write 1 for data of your own.

# %% tags=["parameters"]
import os

RAW = None  # your data as in 1_data: "drive:datasets/signs.tar", a folder, an archive or a link
PACK = None  # or a pack of your own; None: the one that 1_data kept, otherwise demo clips
OPTIONS = {}  # of your data, as in 1_data; a kept pack has its own
RUNS, KEEP = "runs", "drive:nbtools-data/runs"  # on this machine, fast; and where checkpoints are kept
RELEASE_GPU = False  # True: on Colab, release the machine when training ends, so that it stops costing
COUNT, GLOSSES = 600, 12  # demo clips, and how many signs
MEASURE = True  # False: a plan by rules of thumb at once, and no receipt
CHANGES, MORE = {}, 1.5
if not os.path.exists("/var/colab/hostname"):
    os.environ.setdefault("NBTOOLS_DRIVE", "drive")  # outside Colab, this folder stands in for Drive

# %% [markdown]
# ## The data
# The pack that `1_data` kept is copied from Drive. Where `RAW` names your data, or demo data are made here, the receipt
# below measures the raw clips too. With keypoints and features two models can be trained.

# %%
import nbtools as nb
from nbtools.tasks import sign

data = RAW or PACK or nb.kept("drive:nbtools-data/sign.tar")
source = data or sign.demo("data/sign", count=COUNT, glosses=GLOSSES, categories=2, features=True)
pack = sign.pack(source, **OPTIONS)
if KEEP and data is RAW:  # it does not come from there
    pack.keep("drive:nbtools-data/sign.tar")  # for 3_evaluate
both = {"x", "features"} <= set(pack.columns)
pack

# %% [markdown]
# Some of its samples:

# %%
sign.show(pack, pack.ids("train")[:2])

# %% [markdown]
# ## The machine

# %%
nb.gpus()

# %% [markdown]
# ## A plan for the Transformer
# Measured here, on your data: the precision, what a step spends its time on, and the learning rate. Above the table:
# how many steps that is, how many are warmup, and how long they take at the measured speed.

# %%
advice = nb.advise(sign, pack, measure=MEASURE and not (KEEP and nb.kept(f"{KEEP}/sign", "newly measured advice")))
advice

# %% [markdown]
# Change what you like. The form needs no click: *Run all* uses the plan as shown.

# %%
panel = nb.Panel(advice, **{"epochs": round(MORE * advice.plan.epochs), **CHANGES})
panel

# %% [markdown]
# ## Train the Transformer
# It reads the whole clip at once, every frame attending to all others, and averages over the valid
# frames.
#
# A line for each epoch stays in the cell's output.

# %%
places = {"run": f"{RUNS}/sign", "keep": KEEP and f"{KEEP}/sign"}
run = nb.fit(sign, pack, panel, **places, receipt=MEASURE, release_gpu=RELEASE_GPU and not both)

# %% [markdown]
# ## Train the GRU
# It reads one frame at a time, as the 2,048 features that an image network computes; it has about 100,000 weights.

# %%
runs = [run]
if both:
    kept = {name: getattr(panel.plan, name) for name in CHANGES}
    plan = sign.with_network(panel.plan, pack, "gru").turn(**kept)
    places = {"run": f"{RUNS}/sign-gru", "keep": KEEP and f"{KEEP}/sign-gru"}
    runs.append(nb.fit(sign, pack, plan, **places, receipt=False, release_gpu=RELEASE_GPU))
else:
    name, what = ("GRU", "features") if "x" in pack.columns else ("Transformer", "keypoints")
    print(f"The {name} is skipped: it needs {what}, and no clip has any.")

# %% [markdown]
# ## Side by side
# Every run stays in its folder. `nb.runs` lists them, newest first, with state, best value and time.

# %%
nb.runs(RUNS)

# %% [markdown]
# Which of the two is better, and what differs:

# %%
nb.compare(*runs)

# %% [markdown]
# ## The receipt
# The guide's "before" (every clip decompressed again at each access) ran for a few seconds on this machine and this
# data. See how the Transformer compares.

# %%
run.receipt or print("Not measured: it needs MEASURE = True and a finished run; the training cell may say more")

# %% [markdown]
# Next: train again with another lr, in a folder of its own, and see which is better; then `3_evaluate`.
#
#     again = nb.fit(sign, pack, panel.plan.replace(lr=panel.plan.lr / 2))
#     nb.compare(*runs, again)
