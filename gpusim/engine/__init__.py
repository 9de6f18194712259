"""Engines: plan and hardware model in, timeline out."""
