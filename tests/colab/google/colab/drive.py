"""drive.mount as notebooks see it, without a mount: nbtools' NBTOOLS_DRIVE leads to the folder."""

import os


class MessageError(Exception):
    """What Colab raises where the browser answers that access was not granted."""


def mount(mountpoint: str, force_remount: bool = False) -> None:
    assert mountpoint == "/content/drive", "Colab's files pane shows this place"
    print("asking for Drive")
    if not os.environ.get("COLAB_DRIVE"):
        raise MessageError("Error: credential propagation was unsuccessful")
    os.environ["NBTOOLS_DRIVE"] = os.environ["COLAB_DRIVE"]
    print(f"Mounted at {mountpoint}")


def flush_and_unmount() -> None:
    print("Drive is written out")
