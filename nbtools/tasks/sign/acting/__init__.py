"""Clips that nobody filmed: the movements of glosses, people who sign them, and a detector that loses their hands."""
