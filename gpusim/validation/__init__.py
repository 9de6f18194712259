"""Validation recipes: lists of steps to capture, explore and replay, and their stored results."""
