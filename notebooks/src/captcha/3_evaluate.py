# %% [markdown]
# # Captcha 3 · Evaluate
#
# {badge}
#
# Measures the trained model on images that it has never seen, shows the ones it gets wrong, reads files of your own,
# and exports the model. Without a trained run on your Drive it trains a short one first.
#
# **GPU:** any, or none. **Measured:** 5 s on two cores of an AMD EPYC (a cloud machine, no GPU), plus installation,
# after `2_train`.

# {install}

# %% [markdown]
# ## Settings

# %% tags=["parameters"]
import os

PACK = None  # a pack of your own; None: the one that 1_data kept, otherwise demo images
RUN = None  # another run; None: the one that 2_train kept, otherwise a short one
FILES = []  # images of your own to read, e.g. ["mine.png"]; empty: a few fresh demo images
SPLIT = "test"  # "val" where there is no test split
EXPORT = "captcha-model"
COUNT, EPOCHS = 3000, 10  # for the short run, if there is no other
if not os.path.exists("/var/colab/hostname"):
    os.environ.setdefault("NBTOOLS_DRIVE", "drive")  # outside Colab, this folder stands in for Drive

# %% [markdown]
# ## The data and the run
# Whatever is missing on Drive is reported, and made here on a small scale, so that this notebook also runs on its own.

# %%
import nbtools as nb
from nbtools.tasks import captcha

data = PACK or nb.kept("drive:nbtools-data/captcha.tar")
pack = captcha.pack(data or captcha.demo("data/short", count=COUNT))
trained = RUN or (data and nb.kept("drive:nbtools-data/runs/captcha", "a short run"))
if not trained:
    small = {"network": "small", "loss": "cross_entropy", "batch_size": 64, "lr": 2e-3}  # on a GPU too
    small = small if pack.options["layout"] == "fixed" else {}
    plan = nb.advise(captcha, pack, measure=False).plan.replace(epochs=EPOCHS, warmup_epochs=0.0, **small)
    trained = nb.fit(captcha, pack, plan, receipt=False).folder
run = nb.Run.open(nb.stage(trained))

# %% [markdown]
# ## How good is it?
# On the test split, which neither training nor the choice of the best checkpoint has seen: the share of characters that
# are right, and the share of captchas with every character right.
#
# `nb.evaluate(run, run.pack("folder", test=1.0))` does the same for unseen data, all of it as the test split.

# %%
nb.evaluate(run, pack, split=SPLIT)

# %% [markdown]
# ## What it gets wrong
# Above each image: the truth, then what the model read. A pattern here (one letter for another, the last character
# missing) tells you more than the figure above.

# %%
ids = pack.ids(SPLIT)
read = dict(zip(ids, run.predict_pack(pack, ids), strict=True))
wrong = [i for i in ids if read[i] != captcha.text_of(pack, i)]
print(f"{len(wrong)} of {len(ids)} read wrong")
captcha.show(pack, wrong[:12], [read[i] for i in wrong[:12]])

# %% [markdown]
# ## Your own files
# `run.predict` prepares a raw image exactly as training did.

# %%
size = tuple(pack.options.get("size", (60, 160)))
files = FILES or sorted(captcha.demo("data/fresh", count=5, size=size, seed=1).glob("*.png"))
list(zip(map(str, files), run.predict(files), strict=True))

# %% [markdown]
# ## Export the model
# The weights as safetensors, and next to them a JSON card that describes how to use them.

# %%
exported = run.export(EXPORT)
exported

# %% [markdown]
# On Colab your browser downloads the files.

# %%
if os.path.exists("/var/colab/hostname"):
    from google.colab import files as browser

    browser.download(str(exported))
    browser.download(str(exported.with_suffix(".json")))
