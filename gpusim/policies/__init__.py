"""Policies: published systems that turn a step into a schedule, one file each."""
