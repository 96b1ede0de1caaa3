"""A package, so that no other one is taken for it: IPython 7 puts a folder with `tests` of its own on the path."""
