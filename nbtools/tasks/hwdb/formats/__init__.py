"""CASIA-HWDB's files: pages of lines, and the older format of words."""
