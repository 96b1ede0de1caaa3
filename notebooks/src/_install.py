# %% [markdown]
# ## Install
# Takes a minute or two; replaces no Colab package. `SOURCE`: GitHub, a fork, a zip or wheel on Drive
# (`"drive:nbtools-main.zip"`); switching needs a new runtime. Kaggle needs *Internet* on. If it fails, pip's `ERROR`
# line says why.

# %% cellView="form" jupyter={"source_hidden": true}
SOURCE = "{repository}/archive/main.zip"  # @param {type:"string"}
import importlib.util
from os import getenv

if getattr(importlib.util.find_spec("nbtools"), "origin", None) is None:  # as of a mere folder
    if SOURCE.startswith("drive:") and not getenv("NBTOOLS_DRIVE"):
        importlib.import_module("google.colab.drive").mount("/content/drive")
    url = SOURCE.replace("drive:", f"file://{getenv('NBTOOLS_DRIVE', '/content/drive/MyDrive')}/").replace(" ", "%20")
    # %pip install -q "nbtools[captcha,segment,text] @ {url}"
import nbtools
