"""Anytime search for schedules, its budget, and the verdict on the gain."""
