"""Files of images and masks: what they must be, how they are read, and the pack of them."""
