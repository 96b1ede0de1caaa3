"""Lines that nobody wrote yet: demo pages, and lines composed of real handwriting."""
