"""Clips and answers as pictures and tables."""
