"""Clips in files: what they must be, which label is whose, all that is wrong with them, and the pack made of them."""
