"""Policies: each published system that turns a step into a schedule, one file each."""

from gpusim.defaults import DEFAULT_POLICY, DEFAULT_STREAMS, RECOMMENDED

__all__ = ["DEFAULT_POLICY", "DEFAULT_STREAMS", "RECOMMENDED"]
