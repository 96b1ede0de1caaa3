# %% [markdown]
# # Captcha 2 · Train
#
# {badge}
#
# Proposes a plan for your machine with a reason for every choice, trains, and ends with a receipt: how much faster than
# the guide's "before", on your data. Watch it and change its settings while it runs. Stop it, or lose the session, and
# the same cell resumes.
#
# **GPU:** any NVIDIA GPU (not tested yet); without one a small network is chosen. **Measured:** 1 min 58 s on two cores
# of an AMD EPYC (a cloud machine, no GPU), plus installation, with 6,000 generated images of four digits.
#
# ![A run while it trains]({repository}/raw/main/docs/run.png)

# {install}

# %% [markdown]
# ## Settings
# `CHANGES` overrides the advice: `{"epochs": 20, "batch_size": 256}`.

# %% tags=["parameters"]
import os

RAW = None  # your data as in 1_data: "drive:datasets/captcha.tar", a folder, an archive or a link
PACK = None  # or a pack of your own; None: the one that 1_data kept, otherwise demo images
OPTIONS = {}  # of your data, as in 1_data; a kept pack has its own
RUN, KEEP = "runs/captcha", "drive:nbtools-data/runs/captcha"  # on this machine, fast; and where checkpoints are kept
RELEASE_GPU = False  # True: on Colab, release the machine when training ends, so that it stops costing
COUNT = 6000  # demo images
MEASURE = True  # False: a plan by rules of thumb at once, and no receipt
CHANGES = {}
if not os.path.exists("/var/colab/hostname"):
    os.environ.setdefault("NBTOOLS_DRIVE", "drive")  # outside Colab, this folder stands in for Drive

# %% [markdown]
# ## The data
# The pack that `1_data` kept is copied from Drive. Where `RAW` names your data, or demo data are made here, the receipt
# below measures the raw files too.

# %%
import nbtools as nb
from nbtools.tasks import captcha

data = RAW or PACK or nb.kept("drive:nbtools-data/captcha.tar")
pack = captcha.pack(data or captcha.demo("data/captcha", count=COUNT), **OPTIONS)
if KEEP and data is RAW:  # it does not come from there
    pack.keep("drive:nbtools-data/captcha.tar")  # for 3_evaluate
pack

# %% [markdown]
# Some of its samples:

# %%
captcha.show(pack, pack.ids("train")[::100][:4])

# %% [markdown]
# ## The machine

# %%
nb.gpus()

# %% [markdown]
# ## The plan
# Measured here, on your data, within about three minutes, and kept next to the pack. Every choice has its reason next
# to it; where nothing was measured, the reason names the rule of thumb.

# %%
advice = nb.advise(captcha, pack, measure=MEASURE and not (KEEP and nb.kept(KEEP, "newly measured advice")))
advice

# %% [markdown]
# Change what you like. The form needs no click: *Run all* uses the plan as shown. (The form lives in the kernel; a
# saved page names what was changed.)

# %%
panel = nb.Panel(advice, **CHANGES)
panel

# %% [markdown]
# ## Train
# What you change takes effect at the next step, and is marked in the charts. *Stop*, or the notebook's own stop button,
# saves and returns the run; running this cell again resumes it.
#
# A line for each epoch stays in the cell's output: `whole_acc` is the share of captchas with every character right.
# `run.summary()` tabulates them.

# %%
run = nb.fit(captcha, pack, panel, run=RUN, keep=KEEP, receipt=MEASURE, release_gpu=RELEASE_GPU)

# %% [markdown]
# ## The receipt
# The guide's "before" ran for a few seconds on this machine and this data. See how your run compares.

# %%
run.receipt or print("Not measured: it needs MEASURE = True and a finished run; the training cell may say more")

# %% [markdown]
# Next: train again with another lr, in a folder of its own, and see which is better; then `3_evaluate`.
#
#     again = nb.fit(captcha, pack, panel.plan.replace(lr=panel.plan.lr / 2))
#     nb.compare(run, again)
