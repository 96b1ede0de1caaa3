"""Handwritten lines of text, from pages of CASIA-HWDB or any folder of lines to a recogniser: a CNN with CTC."""
