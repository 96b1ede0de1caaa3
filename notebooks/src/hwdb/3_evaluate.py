# %% [markdown]
# # HWDB 3 · Evaluate
#
# {badge}
#
# Measures how well the trained network reads writers that it has never seen: which characters it confuses, which lines
# are worst, and what a character-level language model adds to greedy decoding. Without a trained run on your Drive it
# trains a short one first.
#
# **GPU:** any, or none. **Measured:** 14 s on two cores of an AMD EPYC (a cloud machine, no GPU), plus
# installation, after `2_train`.

# {install}

# %% [markdown]
# ## Settings
# `LANGUAGE` is a text file in the language that your lines are written in, one sentence or phrase per line, for the
# language model; without one, it is trained on the texts of the training lines.

# %% tags=["parameters"]
import os

PACK = None  # a pack of your own; None: the one that 1_data kept, otherwise demo pages
RUN = None  # another run; None: the one that 2_train kept, otherwise a short one
LANGUAGE = None  # "drive:texts/chinese.txt"
SPLIT = "test"  # "val" where there is no test split
FILES = []  # lines of your own to read: images, or pages as "page.dgrl#3"
COUNT, EPOCHS = 3000, 4  # for the short run, if there is no other
if not os.path.exists("/var/colab/hostname"):
    os.environ.setdefault("NBTOOLS_DRIVE", "drive")  # outside Colab, this folder stands in for Drive

# %% [markdown]
# ## The data and the run
# Whatever is missing on Drive is reported, and made here on a small scale, so that this notebook also runs on its own.

# %%
import nbtools as nb
from nbtools.tasks import hwdb

data = PACK or nb.kept("drive:nbtools-data/hwdb.tar")
pack = hwdb.pack(data) if data else hwdb.pack(hwdb.demo("data/short", count=COUNT), height=32)
trained = RUN or (data and nb.kept("drive:nbtools-data/runs/hwdb", "a short run"))
if not trained:
    small = {"batch_size": 16, "lr": 3e-3, "epochs": EPOCHS, "warmup_epochs": 0.2}  # many steps, on a GPU too
    plan = nb.advise(hwdb, pack, measure=False).plan.replace(**small)
    trained = nb.fit(hwdb, pack, plan, receipt=False).folder
run = nb.Run.open(nb.stage(trained))

# %% [markdown]
# ## How good is it?
# On writers that neither training nor the choice of the best checkpoint has seen. `cer` counts
# substituted, missing and inserted characters, `ar` is 1 - cer, and `cr` ignores insertions: the ICDAR competition's
# metrics.
#
# `nb.evaluate(run, run.pack("folder", test=1.0))` does the same for unseen data, all of it as the test split.

# %%
nb.evaluate(run, pack, split=SPLIT)

# %% [markdown]
# ## Truth and prediction
# The truth is above each line; where the prediction differs, it follows, in another colour.

# %%
ids = pack.ids(SPLIT)
truth, read = [hwdb.text_of(pack, i) for i in ids], run.predict_pack(pack, ids)
hwdb.show(pack, ids[:6], read[:6])

# %% [markdown]
# ## Where it is wrong
# What was read as what, how often, and the worst lines. Those often point to problems in the data: a wrong label, a
# crossed-out word, a line cut in half.

# %%
run.report(pack, split=SPLIT)

# %% [markdown]
# ## A language model
# Greedy decoding takes the best class at each step independently. A language model knows which character follows which.

# %%
text = LANGUAGE or [hwdb.text_of(pack, i) for i in pack.ids("train")]
lm = hwdb.NGram.train(text, pack.classes, order=3)

# %% [markdown]
# ## Beam search versus greedy decoding
# The beam keeps the ten best texts so far, each with all its alignments, and scores them with the language model.
# The weight of the language model is chosen on the validation lines, never on the test lines.

# %%
import itertools

val, weights = pack.ids("val"), itertools.product((0.0, 0.2, 0.4, 0.6, 0.8, 1.0), (0.0, 1.0, 2.0, 3.0))
peaks, truth = hwdb.peaks_of(run.model(), pack, run.plan, val), [hwdb.text_of(pack, i) for i in val]
cers = {pair: hwdb.scores(truth, hwdb.search(peaks, pack.classes, lm, 10, *pair))["cer"] for pair in weights}
alpha, beta = min(cers, key=cers.get)
print(f"log P(CTC) + {alpha} · log P(LM) + {beta} · length: CER {cers[alpha, beta]:.3f}, without {cers[0.0, 0.0]:.3f}")

# %% [markdown]
# All three decoders on the test lines.

# %%
import pandas as pd

peaks = hwdb.peaks_of(run.model(), pack, run.plan, ids)
ways = {
    "greedy": read,
    "beam": hwdb.search(peaks, pack.classes),
    "beam + language model": hwdb.search(peaks, pack.classes, lm, alpha=alpha, beta=beta),
}
pd.DataFrame({name: hwdb.scores(truth, answers) for name, answers in ways.items()}).T.round(4)

# %% [markdown]
# ## Your own lines
# `run.predict` prepares a raw line exactly as training did. Without files of your own, it reads generated
# lines.

# %%
if not FILES and os.path.exists("/var/colab/hostname"):
    print("installing the font LXGW WenKai")
    # !apt-get install -qq fonts-lxgw-wenkai > /dev/null
pages = sorted(hwdb.demo("data/fresh", count=24).rglob("HWDB2.0Test/*.dgrl"))
files = FILES or [f"{page}#{line}" for page in pages for line in (1, 2)]
list(zip(map(str, files), run.predict(files), strict=True))

# %% [markdown]
# ## Export the model
# The weights as safetensors, and next to them a JSON card that describes how to use them.

# %%
run.export("hwdb-model")
