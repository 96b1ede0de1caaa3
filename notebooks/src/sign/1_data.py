# %% [markdown]
# # Sign 1 · Data
#
# {badge}
#
# Checks clips of sign language, keypoints and features in `.npz` files with a list of labels, by every rule that
# training depends on, shows them as moving skeletons, and packs them: decompressed once, not at every access. Without
# data of your own it makes clips of invented signs. The pack is kept on your Drive as one file.
#
# **GPU:** none needed. **Measured:** 12 s on two cores of an Intel Xeon (a cloud machine, no GPU), installation
# aside, with 600 generated clips.

# {install}

# %% [markdown]
# ## Settings
# `RAW` may be a folder, an archive, `drive:…` for a path in your Drive, or a Drive link: of `train/` and `val/` with
# `.npz` clips and a `labels.csv` (`file,gloss,cat`) each.

# %% tags=["parameters"]
import os

RAW = None  # "drive:datasets/signs.tar"; None: make demo clips
KEEP = "drive:nbtools-data/sign.tar"  # where the pack is kept; None: nowhere
COUNT, GLOSSES = 600, 12  # demo clips, of so many signs
if "COLAB_RELEASE_TAG" not in os.environ:
    os.environ.setdefault("NBTOOLS_DRIVE", "drive")  # off Colab this folder stands for Drive

# %% [markdown]
# ## Bring it here
# The demo gets two faults planted, because real data has them too: a clip with a few wrong bytes, and a label without a
# clip.

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
# Every clip and every row of the labels, by the rules that the pack will hold them to. An error is what the pack leaves
# out; a warning stays in. The same in a terminal: `python -m nbtools validate sign FOLDER`.

# %%
nb.validate(sign, folder)

# %% [markdown]
# ## Pack

# %%
pack = sign.pack(folder)
pack

# %% [markdown]
# ## Watch one
# A clip as the network gets it: body, hands and face as points that may be missing.

# %%
sign.animate(pack, pack.ids("train")[0])

# %% [markdown]
# A few more, in moments from left to right.

# %%
sign.show(pack, pack.ids("train")[:4])

# %% [markdown]
# ## How long, how many
# Long clips cost time and padding; rare glosses cost accuracy.

# %%
sign.lengths(pack)

# %% [markdown]
# Clips of each gloss, glosses beside those of their category.

# %%
sign.classes(pack)

# %% [markdown]
# ## Keep it

# %%
kept = pack.keep(KEEP) if KEEP else None
kept

# %% [markdown]
# Next: `2_train`.
