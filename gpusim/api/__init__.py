"""The public API and the only layer called by `import gpusim`, the command line and the dashboard.

Public functions of `import gpusim` are in `predict`, `what_if`, `transfer` (no GPU) and `gpu`. In addition, `commands`
is for the command line, `dashboard` for the dashboard's pages, and `other_tools` for files of other tools. Import
contracts in `pyproject.toml` and `tests/repo/test_front_door.py` enforce this. Workers of a sweep evaluate thousands of
schedules of one step and use the same fast path as `explore`: `gpusim.engine.evaluate`.
"""
