"""The public API and the only layer called by `import gpusim`, the command line, the dashboard and sweeps.

Public functions of `import gpusim` are in `predict`, `what_if`, `transfer` (no GPU) and `gpu`. In addition, `commands`
is for the command line, `dashboard` for the dashboard's pages, `sweeps` for workers of a sweep, which simulate
thousands of schedules of one step, and `other_tools` for files of other tools. Import contracts in `pyproject.toml` and
`tests/repo/test_front_door.py` enforce this.
"""
