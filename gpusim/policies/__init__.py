"""Policies: each published system that turns a step into a schedule, one file each."""
