"""Tests of the task for signs."""
