# %% [markdown]
# # Segment 3 · Evaluate
#
# {badge}
#
# Shows which classes are recognised and which are mistaken for another, which images are worst, what several scales and
# mirror images gain and what they cost, and how long one prediction takes. Without a trained run on your Drive it
# trains a short one first.
#
# **GPU:** none needed. **Measured:** 11 s on two cores of an AMD EPYC (a cloud machine, no GPU), installation aside,
# after `2_train`.

# {install}

# %% [markdown]
# ## Settings

# %% tags=["parameters"]
import os

PACK = None  # a pack of your own; None: the one that 1_data kept, otherwise demo images
RUN = None  # another run; None: the one that 2_train kept, otherwise a short one
SPLIT = "test"  # "val" where there is no test split
COUNT, SIDES, EPOCHS = 700, (128, 96), 12  # of the short run, if there is no other
if "COLAB_RELEASE_TAG" not in os.environ:
    os.environ.setdefault("NBTOOLS_DRIVE", "drive")  # off Colab this folder stands for Drive

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
    trained = nb.fit(segment, pack, plan, run="runs/short", receipt=False).folder
run = nb.Run.open(nb.stage(trained))

# %% [markdown]
# ## How good is it?
# On images that training never saw. mIoU: the overlap of prediction and truth divided by their union, per class over
# the whole set, then averaged. boundary_f: how much of the class boundaries is where it should be.
#
# `nb.evaluate(run, run.pack("folder", test=1.0))` does the same for data that this run has not seen: all of it is test.

# %%
found = nb.evaluate(run, pack, split=SPLIT)
found

# %% [markdown]
# For comparison, what the position of a pixel alone predicts: the most frequent class there in training.

# %%
segment.position_prior(pack, SPLIT)

# %% [markdown]
# ## Class by class

# %%
ids = pack.ids(SPLIT)
read = run.predict_pack(pack, ids, batch_size=16)
segment.by_class(pack, ids, read)

# %% [markdown]
# What is mistaken for what.

# %%
segment.confused(segment.confusion(pack, ids, read))

# %% [markdown]
# ## The worst images

# %%
worst = segment.worst(pack, ids, read, 4)
segment.show(pack, worst, run.predict_pack(pack, worst))

# %% [markdown]
# ## What several scales cost, and what they gain
# Each image at more scales and mirrored, the predictions averaged. The gain is in mIoU; `ms` is the time per image
# here, `times` and `pixels` are relative to the single pass.

# %%
segment.costs(run.model(), pack, run.plan, split=SPLIT, ids=ids[:40]).round(4)

# %% [markdown]
# ## How long does one prediction take?

# %%
segment.latency(run.model(), pack, run.plan, ids[:20])

# %% [markdown]
# ## Export the model

# %%
run.export("segment-model")
