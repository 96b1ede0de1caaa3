"""files.download of a file that must be there, as in Colab."""

from pathlib import Path


def download(filename: str) -> None:
    if not Path(filename).is_file():
        raise FileNotFoundError(f"Cannot find file: {filename}")
    print(f"downloaded {filename}")
