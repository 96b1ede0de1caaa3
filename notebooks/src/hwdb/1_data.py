# %% [markdown]
# # HWDB 1 · Data
#
# {badge}
#
# Fetches handwritten lines (CASIA-HWDB pages, or any folder of line images with a list of their texts) to fast local
# disk, checks each one, and packs them into a form that is fast to read. Without data of your own it writes some
# pages. The pack is kept on your Drive as one file.
#
# **GPU:** the one to train on, whose memory decides the lines' height. **Measured:** 15 s on two cores
# of an AMD EPYC (a cloud machine, no GPU), plus installation, with 6,000 generated lines.

# {install}

# %% [markdown]
# ## Settings
# `RAW` may be a folder, an archive, `drive:…` for a path in your Drive, or a Drive link, with folders `HWDB2.0Train`
# … `HWDB2.2Test`, unpacked, or `train/`, `train_img_id_gt.txt` with `name,text` on each line, and `chars_list.txt`.
# `help(hwdb.pack)` lists the `OPTIONS`. The line height follows this machine's GPU; set `{"height": 96}` for
# training on another.

# %% tags=["parameters"]
import os

RAW = None  # "drive:datasets/hwdb_full.tar"; None: write demo pages
OPTIONS = {}
CHARACTERS = 60  # different characters in the demo
KEEP = "drive:nbtools-data/hwdb.tar"  # where the pack is kept; None: nowhere
COUNT = 6000  # demo lines
if not os.path.exists("/var/colab/hostname"):
    os.environ.setdefault("NBTOOLS_DRIVE", "drive")  # outside Colab, this folder stands in for Drive

# %% [markdown]
# ## A font for the demo
# On Colab this installs a Chinese font, so that the demo writes real characters. Elsewhere the demo uses one that is
# installed; where there is none, shapes drawn from a seed stand in for the characters, and a message says so.

# %%
if RAW is None and os.path.exists("/var/colab/hostname"):
    print("installing the font LXGW WenKai")
    # !apt-get install -qq fonts-lxgw-wenkai > /dev/null

# %% [markdown]
# ## Fetch it
# Staging checks free space first, resumes after an interruption, verifies what arrived, and publishes it completely or
# not at all. A second call is instant. One page of the demo is cut off, because real data has such pages too.

# %%
import nbtools as nb
from nbtools.tasks import hwdb

if RAW is None:
    RAW = hwdb.demo("data/hwdb", count=COUNT, characters=CHARACTERS)
    whole = sorted(RAW.rglob("*.dgrl"))[0].read_bytes()
    (RAW / "HWDB2.0Train" / "999-P16.dgrl").write_bytes(whole[: len(whole) // 2])
folder = nb.stage(RAW)
folder

# %% [markdown]
# ## Pack
# Lines are located in their pages, scaled to one height, converted to ink (paper is 0, and so is padding), and
# written one after the other into flat arrays, with their texts as classes. Validation and test get whole writers, so
# that the score is on handwriting that training never saw.

# %%
pack = hwdb.pack(folder, **OPTIONS)
pack

# %% [markdown]
# ## What was left out
# Nothing is dropped silently. Each row names the file, the value, the rule it breaks, and what to do.

# %%
pack.bad

# %% [markdown]
# ## Look at it
# What the model will see, dark on light, with the text that it should read.

# %%
hwdb.show(pack, pack.ids("train")[:8])

# %% [markdown]
# ## Keep it
# One file on Drive. `hwdb.pack` on that file opens it again: no decoding, no thousands of small reads.

# %%
kept = pack.keep(KEEP) if KEEP else None
kept

# %% [markdown]
# Next: `2_train`.
