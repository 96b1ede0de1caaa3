# %% [markdown]
# # Sign 1 · Data
#
# {badge}
#
# Checks clips of sign language, keypoints and features in `.npz` files with a list of labels, against every rule that
# training depends on, shows them as skeletons, and packs them. Without data of your own it generates clips of
# invented signs. The pack is kept on your Drive as one file.
#
# **GPU:** none needed. **Measured:** 11 s on two cores of an AMD EPYC (a cloud machine, no GPU), plus
# installation, with 600 generated clips.

# {install}

# %% [markdown]
# ## Settings
# `RAW` may be a folder, an archive, `drive:…` for a path in your Drive, or a Drive link: with `train/` and `val/`, of
# `.npz` clips and a `labels.csv` (`file,gloss,cat`) each. The guide's `data/processed` opens as it is. `OPTIONS` are
# those of `sign.pack`, such as `{"feature_key": None}` to pack keypoints only; `help(sign.pack)` lists them.

# %% tags=["parameters"]
import os

RAW = None  # "drive:datasets/signs.tar"; None: make demo clips
OPTIONS = {}
KEEP = "drive:nbtools-data/sign.tar"  # where the pack is kept; None: nowhere
COUNT, GLOSSES = 600, 12  # demo clips, and how many signs
if not os.path.exists("/var/colab/hostname"):
    os.environ.setdefault("NBTOOLS_DRIVE", "drive")  # outside Colab, this folder stands in for Drive

# %% [markdown]
# ## Fetch it
# Two faults are planted in the demo, because real data has them too: a clip with a few wrong bytes, and a label without
# a clip.

# %%
import nbtools as nb
from nbtools.tasks import sign

if RAW is None:
    RAW = sign.demo("data/sign", count=COUNT, glosses=GLOSSES, categories=2, features=True)
    whole = sorted((RAW / "train").glob("*.npz"))[0].read_bytes()
    (RAW / "train" / "damaged.npz").write_bytes(whole[:500] + b"?" * 9 + whole[509:])
    with open(RAW / "train" / "labels.csv", "a") as labels:
        labels.write("damaged,0,0\nnever-filmed,0,0\n")
folder = nb.stage(RAW)
folder

# %% [markdown]
# ## Validate
# Every clip and every row of the labels is checked against the pack's rules. A clip with an error is left out of the
# pack; one with a warning stays in. The same in a terminal: `python -m nbtools validate sign FOLDER`.

# %%
nb.validate(sign, folder, **{name: OPTIONS[name] for name in OPTIONS if name.endswith("_key")})

# %% [markdown]
# ## Pack

# %%
pack = sign.pack(folder, **OPTIONS)
pack

# %% [markdown]
# ## Look at some
# Clips as the network receives them, frames from left to right: body, hands and face as points, some of which may
# be missing.

# %%
sign.show(pack, pack.ids("train")[:4])

# %% [markdown]
# ## Length and number of clips
# Long clips cost time and padding; rare glosses cost accuracy.

# %%
import numpy as np
import pandas as pd

every = np.arange(len(pack))
frames = pack.lengths("x" if "x" in pack.columns else "features", every)
glosses = pd.Series([sign.text_of(pack, i) for i in every], name="gloss")
pd.Series(frames, name="frames").groupby(glosses).agg(["count", "min", "median", "max"])

# %% [markdown]
# ## Keep it

# %%
kept = pack.keep(KEEP) if KEEP else None
kept

# %% [markdown]
# Next: `2_train`.
