"""How captchas are shown, with their texts and with what a network read: by `common/texts.py`, as lines of hwdb are."""

from nbtools.tasks.common.texts import preview, show, text_of  # noqa: F401
