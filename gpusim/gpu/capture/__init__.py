"""Capture of one step of a model as a trace."""
