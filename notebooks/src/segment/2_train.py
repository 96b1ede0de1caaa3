# %% [markdown]
# # Segment 2 · Train
#
# {badge}
#
# Trains BiSeNetV2, or on a CPU a slim version of it, to predict the class of every pixel. The plan has a reason for
# every choice. Predictions are drawn while it trains. The receipt shows how much faster it trains than the guide's
# "before" on this machine.
#
# **GPU:** any NVIDIA GPU (not tested yet). **Measured:** 2 min 44 s on two cores of an AMD EPYC (a cloud
# machine, no GPU), plus installation, with 1,400 generated images.
#
# ![A run while it trains]({repository}/raw/main/docs/run.png)

# {install}

# %% [markdown]
# ## Settings
# `CHANGES` overrides the advice. Here it shortens the demo's training from half an hour to minutes; write `{}` for data
# of your own.

# %% tags=["parameters"]
import os

RAW = None  # your data as in 1_data: "drive:datasets/garments.tar", a folder, an archive or a link
PACK = None  # or a pack of your own; None: the one that 1_data kept, otherwise demo images
OPTIONS = {}  # of your data, as in 1_data; a kept pack has its own
RUN, KEEP = "runs/segment", "drive:nbtools-data/runs/segment"  # on this machine, fast; and where checkpoints are kept
RELEASE_GPU = False  # True: on Colab, release the machine when training ends, so that it stops costing
COUNT, SIDES = 1400, (128, 96)  # demo images, and their height and width in pixels
MEASURE = True  # False: a plan by rules of thumb at once, and no receipt
CHANGES = {"epochs": 14, "warmup_epochs": 1.0, "scale_low": 0.8, "scale_high": 1.25, "jitter": 0.2}
if not os.path.exists("/var/colab/hostname"):
    os.environ.setdefault("NBTOOLS_DRIVE", "drive")  # outside Colab, this folder stands in for Drive

# %% [markdown]
# ## The data
# The pack that `1_data` kept is copied from Drive. Where `RAW` names your data, or demo data are made here, the receipt
# below measures the raw files too.

# %%
import nbtools as nb
from nbtools.tasks import segment

data = RAW or PACK or nb.kept("drive:nbtools-data/segment.tar")
pack = segment.pack(data or segment.demo("data/segment", count=COUNT, size=SIDES), **OPTIONS)
if KEEP and data is RAW:  # it does not come from there
    pack.keep("drive:nbtools-data/segment.tar")  # for 3_evaluate
pack

# %% [markdown]
# Some of its samples:

# %%
segment.show(pack, pack.ids("train")[::20][:4])

# %% [markdown]
# ## The machine

# %%
nb.gpus()

# %% [markdown]
# ## A plan
# Measured here, on your data: the precision, what a step spends its time on, and the learning rate. Above the table:
# how many steps that is, how many are warmup, and how long they take at the measured speed.

# %%
advice = nb.advise(segment, pack, measure=MEASURE and not (KEEP and nb.kept(KEEP, "newly measured advice")))
advice

# %% [markdown]
# Change what you like. The form needs no click: *Run all* uses the plan as shown.

# %%
panel = nb.Panel(advice, **CHANGES)
panel

# %% [markdown]
# ## Train
# Evaluations during training are single passes; several scales and mirror images, if the plan asks for them, are left
# to `nb.evaluate`.
#
# A line for each epoch stays in the cell's output; `run.summary()` tabulates them.

# %%
run = nb.fit(segment, pack, panel, run=RUN, keep=KEEP, receipt=MEASURE, release_gpu=RELEASE_GPU)

# %% [markdown]
# ## The receipt
# The guide's "before" (every image decoded again at each access, no mixed precision) ran for a few seconds
# on this machine and this data. See how your run compares.

# %%
run.receipt or print("Not measured: it needs MEASURE = True and a finished run; the training cell may say more")

# %% [markdown]
# Next: train again with another lr, in a folder of its own, and see which is better; then `3_evaluate`.
#
#     again = nb.fit(segment, pack, panel.plan.replace(lr=panel.plan.lr / 2))
#     nb.compare(run, again)
