"""The front door: what `import gpusim`, the command line and the dashboard call, and nothing beneath it.

Public functions of `import gpusim` are in `predict`, `what_if`, `transfer` (no GPU) and `gpu`. Beyond them, `commands`
is for the command line, `dashboard` for the dashboard's pages, `other_tools` for files of other tools. Import contracts
in `pyproject.toml` and `tests/repo/test_front_door.py` hold callers to it. A sweep's worker evaluates thousands of
schedules of one step, and takes the shortest way that `explore` takes, too: `gpusim.engine.evaluate`.
"""
