# %% [markdown]
# # Segment 3 · Evaluate
#
# {badge}
#
# Shows which classes are recognised and which are confused, which images are worst, and what test-time
# scaling and mirroring gain and cost. Without a trained run on your Drive it trains a short one first.
#
# **GPU:** any, or none. **Measured:** 11 s on two cores of an AMD EPYC (a cloud machine, no GPU), plus installation,
# after `2_train`.

# {install}

# %% [markdown]
# ## Settings

# %% tags=["parameters"]
import os

PACK = None  # a pack of your own; None: the one that 1_data kept, otherwise demo images
RUN = None  # another run; None: the one that 2_train kept, otherwise a short one
SPLIT = "test"  # "val" where there is no test split
COUNT, SIDES, EPOCHS = 700, (128, 96), 12  # for the short run, if there is no other
if not os.path.exists("/var/colab/hostname"):
    os.environ.setdefault("NBTOOLS_DRIVE", "drive")  # outside Colab, this folder stands in for Drive

# %% [markdown]
# ## The data and the run
# Whatever is missing on Drive is reported, and made here on a small scale, so that this notebook also runs on its own.

# %%
import nbtools as nb
from nbtools.tasks import segment

data = PACK or nb.kept("drive:nbtools-data/segment.tar")
pack = segment.pack(data or segment.demo("data/short", count=COUNT, size=SIDES))
trained = RUN or (data and nb.kept("drive:nbtools-data/runs/segment", "a short run"))
if not trained:
    plan = nb.advise(segment, pack, measure=False).plan.replace(epochs=EPOCHS, warmup_epochs=0.5)
    trained = nb.fit(segment, pack, plan, receipt=False).folder
run = nb.Run.open(nb.stage(trained))

# %% [markdown]
# ## How good is it?
# On images that training never saw. mIoU: the overlap of prediction and truth divided by their union, per class over
# the whole set, then averaged.
#
# `nb.evaluate(run, run.pack("folder", test=1.0))` does the same for unseen data, all of it as the test split.

# %%
found = nb.evaluate(run, pack, split=SPLIT)
found

# %% [markdown]
# ## Class by class
# IoU, precision and recall, and how many pixels there are of each class.

# %%
report = run.report(pack, split=SPLIT)
report.table

# %% [markdown]
# What is mistaken for what.

# %%
report.confusion

# %% [markdown]
# ## The worst images

# %%
worst = report.worst.index[:4]
segment.show(pack, worst, run.predict_pack(pack, worst))

# %% [markdown]
# ## What scaling and mirroring gain and cost
# Evaluates each image at several scales and mirrored, averages the predictions, and times the split.

# %%
import time

for looks in ({}, {"eval_flip": True}, {"eval_flip": True, "eval_scales": (0.75, 1.0, 1.25)}):
    start = time.perf_counter()
    miou = nb.evaluate(run, pack, SPLIT, **looks)["miou"]
    print(f"mIoU {miou:.4f} in {time.perf_counter() - start:.1f} s: {looks or 'a single pass'}")

# %% [markdown]
# ## Export the model

# %%
run.export("segment-model")
