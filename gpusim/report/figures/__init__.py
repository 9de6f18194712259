"""Figures, drawn with plotly: functions from gpusim's values to `plotly.graph_objects.Figure`.

The only package that imports plotly, and the command line imports it only for a command that draws. Times are on
linear axes in us, sizes in MiB, and every axis says its unit. Colours: `theme.py`; files: `output.py`.
"""

import pandas  # noqa: F401  # plotly uses it once it is in sys.modules, even half-way through its import by a thread
