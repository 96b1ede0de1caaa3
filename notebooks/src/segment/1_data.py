# %% [markdown]
# # Segment 1 · Data
#
# {badge}
#
# Checks images and their labels (PNGs of class ids, lists, or CVAT's polygons) before training, shows them with their
# classes overlaid, and packs them: decoded once, polygons drawn once. Without data of your own it generates images of
# striped and dotted shapes. The pack is kept on your Drive as one file.
#
# **GPU:** none needed. **Measured:** 17 s on two cores of an AMD EPYC (a cloud machine, no GPU), plus
# installation, with 1,400 generated images.

# {install}

# %% [markdown]
# ## Settings
# `RAW` may be a folder, an archive, `drive:…` for a path in your Drive, or a Drive link: with `images/` and `labels/`,
# `train/` and `trainannot/`, lists of `image,label` lines, or images with CVAT's `annotations.xml`.
# `OPTIONS` gives what the labels' numbers mean and the size, where the source does not:
# `{"classes": ["background", "garment"], "ignore": [2], "size": (384, 384)}`.

# %% tags=["parameters"]
import os

RAW = None  # "drive:datasets/garments.tar"; None: make demo images
OPTIONS = {}
KEEP = "drive:nbtools-data/segment.tar"  # where the pack is kept; None: nowhere
COUNT, SIDES = 1400, (128, 96)  # demo images, and their height and width in pixels
if not os.path.exists("/var/colab/hostname"):
    os.environ.setdefault("NBTOOLS_DRIVE", "drive")  # outside Colab, this folder stands in for Drive

# %% [markdown]
# ## Fetch it
# Two faults are planted in the demo, because real data has them too: a truncated photograph, and a label
# with an id that no class has.

# %%
from PIL import Image

import nbtools as nb
from nbtools.tasks import segment

if RAW is None:
    RAW = segment.demo("data/segment", count=COUNT, size=SIDES)
    images, labels = RAW / "images/train", RAW / "labels/train"
    for name, end in {"cut-off": 900, "odd": None}.items():
        (images / f"{name}.jpg").write_bytes((images / "00000.jpg").read_bytes()[:end])
        Image.new("L", SIDES[::-1], 7).save(labels / f"{name}.png")
folder = nb.stage(RAW)

# %% [markdown]
# ## Validate
# Every image and every label is checked against the pack's rules. A file with an error is left out of the pack; one
# with a warning stays in. The same in a terminal: `python -m nbtools validate segment FOLDER`.

# %%
nb.validate(segment, folder, **{name: OPTIONS[name] for name in OPTIONS if name not in ("val", "test")})

# %% [markdown]
# ## Pack

# %%
pack = segment.pack(folder, **OPTIONS)
pack

# %% [markdown]
# ## Look
# Images with their classes drawn over them.

# %%
segment.show(pack, pack.ids("train")[:6])

# %% [markdown]
# ## Keep it

# %%
kept = pack.keep(KEEP) if KEEP else None
kept

# %% [markdown]
# Next: `2_train`.
