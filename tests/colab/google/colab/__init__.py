"""Stand-in for Colab's own package in the kernel of a test: COLAB_DRIVE names the folder that becomes Drive."""

from google.colab import drive, files, runtime

__all__ = ["drive", "files", "runtime"]
