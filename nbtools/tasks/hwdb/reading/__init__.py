"""Beam search over a network's answers, with a language model of characters."""
