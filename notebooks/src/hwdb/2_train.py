# %% [markdown]
# # HWDB 2 · Train
#
# {badge}
#
# Trains a convolutional network with CTC to read handwritten lines, with a plan measured on your
# machine and settings you can change live. It ends with a receipt: how much faster than the guide's "before",
# on your data.
#
# **GPU:** 24 GB or more (not tested yet) for the guide's network of 53 M parameters; else a slim network is
# chosen. **Measured:** 1 min 58 s on two cores of an AMD EPYC (a cloud machine, no GPU), plus installation, with 6,000
# generated lines of 60 characters.
#
# ![A run while it trains]({repository}/raw/main/docs/run.png)

# {install}

# %% [markdown]
# ## Settings
# `CHANGES` overrides the advice: `{"epochs": 20, "network": "slim"}`.

# %% tags=["parameters"]
import os

RAW = None  # your data as in 1_data: "drive:datasets/hwdb_full.tar", a folder, an archive or a link
PACK = None  # or a pack of your own; None: the one that 1_data kept, otherwise demo pages
OPTIONS = {}  # of your data, as in 1_data; a kept pack has its own
RUN, KEEP = "runs/hwdb", "drive:nbtools-data/runs/hwdb"  # on this machine, fast; and where checkpoints are kept
RELEASE_GPU = False  # True: on Colab, release the machine when training ends, so that it stops costing
COUNT = 6000  # demo lines
MEASURE = True  # False: a plan by rules of thumb at once, and no receipt
CHANGES = {}
if not os.path.exists("/var/colab/hostname"):
    os.environ.setdefault("NBTOOLS_DRIVE", "drive")  # outside Colab, this folder stands in for Drive

# %% [markdown]
# ## The data
# The pack that `1_data` kept is copied from Drive. Where `RAW` names your data, or demo data are made here, the receipt
# below measures the raw pages too.

# %%
import nbtools as nb
from nbtools.tasks import hwdb

data = RAW or PACK or nb.kept("drive:nbtools-data/hwdb.tar")
pack = hwdb.pack(data or hwdb.demo("data/hwdb", count=COUNT), **OPTIONS)
if KEEP and data is RAW:  # it does not come from there
    pack.keep("drive:nbtools-data/hwdb.tar")  # for 3_evaluate
pack

# %% [markdown]
# Some of its samples:

# %%
hwdb.show(pack, pack.ids("train")[::20][:4])

# %% [markdown]
# ## The machine

# %%
nb.gpus()

# %% [markdown]
# ## The plan
# Measured here, on your data, within about three minutes, and kept next to the pack. Every choice has its reason next
# to it; where nothing was measured, the reason names the rule of thumb. Above the table: how many steps that is, and
# how long they take at the measured speed.

# %%
advice = nb.advise(hwdb, pack, measure=MEASURE and not (KEEP and nb.kept(KEEP, "newly measured advice")))
advice

# %% [markdown]
# Change what you like. The form needs no click: *Run all* uses the plan as shown.

# %%
panel = nb.Panel(advice, **CHANGES)
panel

# %% [markdown]
# ## Train
# At first CTC predicts blank everywhere: the character error rate stays at 1 for a while, then falls quickly. The
# panel acts on the run. *Stop* saves and returns it; run it again to resume.
#
# A line per epoch stays: `cer` is the character error rate on unseen writers, `infeasible` the share of lines too
# narrow for their text.

# %%
run = nb.fit(hwdb, pack, panel, run=RUN, keep=KEEP, receipt=MEASURE, release_gpu=RELEASE_GPU)

# %% [markdown]
# ## The receipt
# The guide's "before" (batch 8, every line decoded again at each access, no mixed precision) ran for a few seconds on
# this machine and this data. See how your run compares.

# %%
run.receipt or print("Not measured: it needs MEASURE = True and a finished run; the training cell may say more")

# %% [markdown]
# Next: train again with another lr, in a folder of its own, and see which is better; then `3_evaluate`.
#
#     again = nb.fit(hwdb, pack, panel.plan.replace(lr=panel.plan.lr / 2))
#     nb.compare(run, again)
