# %% [markdown]
# ## Install
# Skipped where nbtools is there already. A copy of the repository on your Drive is used when Drive is mounted (the
# folder symbol at the left); nothing of Colab's own is replaced.

# %%
from importlib.util import find_spec
from pathlib import Path

COPY = Path("/content/drive/MyDrive/nbtools")
if find_spec("nbtools") is None:
    ADDRESS = COPY.as_uri() if COPY.exists() else "git+{repository}"
    print("installing from", ADDRESS)
    # %pip install -q "nbtools[captcha,segment,text] @ {ADDRESS}"
