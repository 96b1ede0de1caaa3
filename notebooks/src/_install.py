# %% [markdown]
# ## Install
# `SOURCE` in the folded cell says where nbtools comes from: its repository, your fork, or a copy on your Drive (a
# folder, a wheel, or `"drive:nbtools-main.zip"` as downloaded from GitHub).

# %% cellView="form" jupyter={"source_hidden": true}
SOURCE = "{repository}"
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ADDRESS = SOURCE if SOURCE.endswith((".zip", ".whl")) else f"git+{SOURCE}"
MISSING = getattr(importlib.util.find_spec("nbtools"), "origin", None) is None  # a folder of that name has none
print(f"nbtools comes from {SOURCE}" if MISSING else "nbtools is already installed")

# %% [markdown]
# If `SOURCE` is a copy on Drive, Colab asks for your permission here.

# %% cellView="form" jupyter={"source_hidden": true}
COPY, PROBLEM = Path(SOURCE).expanduser(), ""
if MISSING and SOURCE.startswith("drive:"):
    try:
        if "NBTOOLS_DRIVE" not in os.environ:  # a folder that stands for Drive
            from google.colab import drive

            drive.mount("/content/drive")
    except Exception as error:  # declined, or this is not Colab
        PROBLEM = f"Drive cannot be opened ({error}); outside Colab, set NBTOOLS_DRIVE to a folder to use instead"
    COPY = Path(os.environ.get("NBTOOLS_DRIVE", "/content/drive/MyDrive"), SOURCE.removeprefix("drive:"))
if not (PROBLEM or "://" in SOURCE or COPY.is_file() or (COPY / "pyproject.toml").is_file()):
    PROBLEM = f"{SOURCE} {'holds packs and runs, not a copy of nbtools' if COPY.is_dir() else 'does not exist'}"

# %% [markdown]
# No package that came with Colab is replaced. If the installation fails, one sentence gives the reason, and *Run all*
# stops here.

# %% cellView="form" jupyter={"source_hidden": true}
if MISSING and not PROBLEM:
    if COPY.is_dir():  # a build writes next to its sources, which a shared folder on Drive does not allow
        COPY = Path(shutil.copytree(COPY, tempfile.mkdtemp(), ignore=shutil.ignore_patterns(".*"), dirs_exist_ok=True))
    wanted = f"nbtools[captcha,segment,text] @ {COPY.resolve().as_uri() if COPY.exists() else ADDRESS}"
    print("installing it, which takes a minute or two …")
    pip = subprocess.run([sys.executable, "-m", "pip", "install", "-q", wanted], capture_output=True, text=True)
    said = [line.strip() for line in pip.stderr.splitlines() if "ERROR" in line or "fatal" in line]
    PROBLEM = (said or ["pip failed"])[0] if pip.returncode else ""
if MISSING and PROBLEM:
    stop = RuntimeError(f"nbtools was not installed: {PROBLEM}. Correct SOURCE above, then Run all again.")
    stop._render_traceback_ = [str(stop)].copy  # shown without a traceback
    raise stop
