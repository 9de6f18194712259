"""Figures, drawn with plotly: functions from gpusim's values to `plotly.graph_objects.Figure`.

This is the only package that imports plotly; the command line imports it only for commands that draw. Times are on
linear axes in us, except measurements of steps of all sizes. Memory is in MiB, and every axis has its unit. Colours are
in `theme.py`, files in `output.py`.
"""

import pandas  # noqa: F401  # plotly uses it once it is in sys.modules, even half-way through its import by a thread
