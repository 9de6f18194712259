"""Replay of a schedule on the GPU from a trace."""
