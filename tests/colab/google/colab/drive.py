"""drive.mount as notebooks see it, without a mount: nbtools' NBTOOLS_DRIVE leads to the folder."""

import os


def mount(mountpoint: str, force_remount: bool = False) -> None:
    assert mountpoint == "/content/drive", "Colab's files pane shows this place"
    os.environ["NBTOOLS_DRIVE"] = os.environ["COLAB_DRIVE"]
    print(f"Mounted at {mountpoint}")


def flush_and_unmount() -> None:
    print("Drive is written out")
