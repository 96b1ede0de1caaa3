"""Segmentation: images to a class of each pixel, by BiSeNetV2 with a boundary-aware loss."""
