"""Schedules, op graphs, plans, and how one becomes the other."""
