"""Sign language: clips of keypoints or features to a gloss and its category, by a Transformer or a GRU."""
