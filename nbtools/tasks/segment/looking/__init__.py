"""Pictures, answers and what is read wrong: what a pack of segmentation holds, drawn and counted."""
