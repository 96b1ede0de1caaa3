# %% [markdown]
# # 0 · Start here
#
# {badge}
#
# Looks at the machine you were given, shows where data belongs on it, and trains a first small model in half a minute.
# A table of notebooks at the end shows what to open next.
#
# **GPU:** any, or none. **Measured:** 37 s on two cores of an Intel Xeon (a cloud machine, no GPU), plus installation.
#
# ![A run while it trains]({repository}/raw/main/docs/run.png)

# {install}

# %% [markdown]
# ## Settings
# Everything that you may want to change, in one place.

# %% tags=["parameters"]
COUNT = 1500  # images to make for the first run
EPOCHS = 6  # enough to see it learn; the advised number takes minutes

# %% [markdown]
# ## The machine
# One row per GPU: what it is, what is free on it, what holds it back. It also works without an NVIDIA GPU: nbtools then
# uses Apple's, or the processor's cores, and the table says so. On Colab you get a GPU with *Runtime → Change runtime
# type*.

# %%
import nbtools as nb

nb.gpus()

# %% [markdown]
# ## Where data goes
# A GPU waits for the slowest stage before it, which is usually where the files come from:
#
# | place | good for | bad for |
# | --- | --- | --- |
# | Google Drive | keeping **one** archive, pack or checkpoint for the next session | thousands of small files |
# | the machine's disk, `/tmp/nbtools` | the data set while you train | anything you want tomorrow |
# | the GPU's memory | a packed data set that fits | – |
#
# So: one archive on Drive → `nb.stage` copies and checks it → `task.pack` decodes every file once → training reads
# arrays.
# Staging a folder that is already on local disk copies nothing:

# %%
from nbtools.tasks import captcha

raw = captcha.demo("data/first", count=COUNT)
folder = nb.stage(raw)
folder

# %% [markdown]
# ## A first run
# These images are four-digit captchas. Packed, they become a few flat arrays; a second call opens the pack at once.

# %%
pack = captcha.pack(folder)
pack

# %% [markdown]
# `nb.advise` proposes a plan for this machine and this data, with its reasons: here rules of thumb, which
# take no time; `captcha/2_train` lets it measure.

# %%
advice = nb.advise(captcha, pack, measure=False)
advice

# %% [markdown]
# A few passes of a small network, with a batch and lr that suit it, show it learn; `captcha/2_train` does it properly.
# Stop it whenever you like; running the cell again resumes.

# %%
small = {"network": "small", "loss": "cross_entropy", "batch_size": 32, "lr": 2e-3}  # on a GPU too
run = nb.fit(captcha, pack, advice.plan.replace(epochs=EPOCHS, warmup_epochs=0.0, **small), receipt=False)

# %% [markdown]
# One row per epoch; `run.history` has every logged step.

# %%
run.summary()

# %% [markdown]
# ## Where to go next
# Each task has three notebooks: `1_data` checks and packs, `2_train` trains and measures the gain over a
# published guide's "before", `3_evaluate` looks at the mistakes and exports the model. Each also runs on its own.
#
# | first notebook | what it reads or recognises |
# | --- | --- |
# | [captcha/1_data]({open}captcha/1_data.ipynb) | captchas with a fixed or varying number of characters |
# | [hwdb/1_data]({open}hwdb/1_data.ipynb) | handwritten lines of Chinese, or of any other script |
# | [sign/1_data]({open}sign/1_data.ipynb) | signs, from keypoints or features of filmed clips |
# | [segment/1_data]({open}segment/1_data.ipynb) | the class of every pixel |
# | [9_your_own_task]({open}9_your_own_task.ipynb) | your own: images by class, any Dataset, a table; any network |
