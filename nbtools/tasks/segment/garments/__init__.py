"""Demo data: garments that are drawn, their outlines, cloth and scenes, and the files about them."""
