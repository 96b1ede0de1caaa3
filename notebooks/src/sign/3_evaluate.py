# %% [markdown]
# # Sign 3 · Evaluate
#
# {badge}
#
# Shows which signs are recognised and which are confused, and what the model predicts
# while somebody is still signing. Without a trained run on your Drive it trains a short one first.
#
# **GPU:** any, or none. **Measured:** 5 s on two cores of an AMD EPYC (a cloud machine, no GPU), plus installation,
# after `2_train`.

# {install}

# %% [markdown]
# ## Settings

# %% tags=["parameters"]
import os

PACK = None  # a pack of your own; None: the one that 1_data kept, otherwise demo clips
RUN = None  # another run: "drive:nbtools-data/runs/sign-gru"; None: the one that 2_train kept
SPLIT = "val"  # "test" where there is one
COUNT, GLOSSES, EPOCHS = 400, 12, 20  # for the short run, if there is no other
if not os.path.exists("/var/colab/hostname"):
    os.environ.setdefault("NBTOOLS_DRIVE", "drive")  # outside Colab, this folder stands in for Drive

# %% [markdown]
# ## The data and the run
# Whatever is missing on Drive is reported, and made here on a small scale, so that this notebook also runs on its own.

# %%
import nbtools as nb
from nbtools.tasks import sign

data = PACK or nb.kept("drive:nbtools-data/sign.tar")
pack = sign.pack(data or sign.demo("data/short", count=COUNT, glosses=GLOSSES, categories=2))
trained = RUN or (data and nb.kept("drive:nbtools-data/runs/sign", "a short run"))
if not trained:
    plan = nb.advise(sign, pack, measure=False).plan.replace(epochs=EPOCHS, warmup_epochs=0.5)
    trained = nb.fit(sign, pack, plan, receipt=False).folder
run = nb.Run.open(nb.stage(trained))
pack = run.readable(pack)  # some clips may lack what its network reads

# %% [markdown]
# ## How good is it?
# On clips that training never saw, in the demo those of other signers: the share of clips with the right gloss, with
# the right category, and with the right gloss among the five most likely.
#
# `nb.evaluate(run, run.pack("folder", test=1.0))` does the same for unseen data, all of it as the test split.

# %%
nb.evaluate(run, pack, split=SPLIT)

# %% [markdown]
# ## Gloss by gloss
# Precision, recall and F1 of each gloss, which glosses are confused most, and the worst clips.

# %%
run.report(pack, split=SPLIT)

# %% [markdown]
# ## Look at the wrong ones

# %%
ids = pack.ids(SPLIT)
truth, read = [sign.text_of(pack, i) for i in ids], run.predict_pack(pack, ids)
wrong = [place for place in range(len(ids)) if read[place] != truth[place]][:4]
sign.show(pack, ids[wrong], [read[place] for place in wrong])

# %% [markdown]
# ## While somebody is still signing
# The same model on a window that slides over a clip: a prediction every five frames. It becomes certain once it has
# seen what distinguishes this sign from the others.

# %%
import pandas as pd

clip = {name: values for name, values in pack.sample(ids[0]).items() if name != "label"}
ends = range(5, len(next(iter(clip.values()))) + 1, 5)
windows = [{name: values[max(0, end - 45) : end] for name, values in clip.items()} for end in ends]
glosses, shares = run.answers(windows)
print("truth:", truth[0])
pd.DataFrame({"frame": ends, "gloss": glosses, "probability": [max(each) for each in shares]}).round(3)

# %% [markdown]
# ## Export the model

# %%
run.export("sign-model")
