# %% [markdown]
# # Captcha 1 · Data
#
# {badge}
#
# Fetches captchas from Drive, a link or an archive to fast local disk, checks each one, and packs them into a form that
# is fast to read. Without data of your own it generates some. The pack is kept on your Drive as one file.
#
# **GPU:** none needed; reading images is CPU work. **Measured:** 17 s on two cores of an AMD EPYC (a
# cloud machine, no GPU), plus installation, with 6,000 generated images.

# {install}

# %% [markdown]
# ## Settings
# `RAW` may be a folder, an archive (tar, tar.gz, tar.xz, zip), `drive:…` for a path in your Drive, or a Drive link.
# An image's text is its file name up to the first `_`: `7402_a.png` shows 7402. `OPTIONS` are those of `captcha.pack`,
# for names or labels in another format: `{"label": "-", "case": "upper"}`; `help(captcha.pack)` lists them.

# %% tags=["parameters"]
import os

RAW = None  # "drive:datasets/captcha.tar"; None: make demo images
OPTIONS = {}
KEEP = "drive:nbtools-data/captcha.tar"  # where the pack is kept; None: nowhere
COUNT = 6000  # demo images
if not os.path.exists("/var/colab/hostname"):
    os.environ.setdefault("NBTOOLS_DRIVE", "drive")  # outside Colab, this folder stands in for Drive

# %% [markdown]
# ## Fetch it
# Staging checks free space first, resumes after an interruption, verifies what arrived, and publishes it completely or
# not at all. A second call is instant. Two broken files are planted in the demo, because real data has them too.

# %%
import nbtools as nb
from nbtools.tasks import captcha

if RAW is None:
    RAW = captcha.demo("data/captcha", count=COUNT)
    (RAW / "1234_cut-off.png").write_bytes(b"\x89PNG\r\n\x1a\n, and then nothing")
    (RAW / "screenshot.png").write_bytes(next(RAW.glob("*_1.png")).read_bytes())
folder = nb.stage(RAW)
folder

# %% [markdown]
# ## Look at the raw images
# Before anything else: are these the images you expect, and do their names match what they show?

# %%
from IPython.display import Image, display

for path in sorted(folder.rglob("*.[jp][pn]*g"))[:400:100]:
    print(path.name)
    display(Image(path))

# %% [markdown]
# ## Pack
# Every image is decoded once into flat arrays on disk, with its label, the list of characters, and a split: by folders
# `train`, `val` and `test`, else by the file's name, about 80 % train, 10 % validation, 10 % test.

# %%
pack = captcha.pack(folder, **OPTIONS)
pack

# %% [markdown]
# ## What was left out
# Nothing is dropped silently. Each row names the file, the value, the rule it breaks, and what to do.

# %%
pack.bad

# %% [markdown]
# ## Look at the packed images
# The same check again, on what the model will see.

# %%
captcha.show(pack, pack.ids("train")[::100][:12])

# %% [markdown]
# ## Keep it
# One file on Drive. `captcha.pack` on that file opens it again: no decoding, no thousands of small reads.

# %%
kept = pack.keep(KEEP) if KEEP else None
kept

# %% [markdown]
# Next: `2_train`.
