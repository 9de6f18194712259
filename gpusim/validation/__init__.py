"""Validation recipes: which steps to capture, explore and replay, and how the results are kept."""
