"""Presentation of results: tables, figures and timelines."""
