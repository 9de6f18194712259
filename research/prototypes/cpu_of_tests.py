"""A plugin of pytest that writes the CPU time of each file of tests, with child processes that have ended, in s.

CPU_OUT=times.csv PYTHONPATH=research/prototypes python -m pytest -p no:cacheprovider -p cpu_of_tests FOLDER...
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

_seconds: defaultdict[str, float] = defaultdict(float)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    before = sum(os.times()[:4])
    result = yield
    _seconds[item.nodeid.partition("::")[0]] += sum(os.times()[:4]) - before
    return result


def pytest_sessionfinish() -> None:
    rows = [f"{file},{seconds:.1f}" for file, seconds in sorted(_seconds.items())]
    Path(os.environ["CPU_OUT"]).write_text("\n".join(("file,cpu_s", *rows)) + "\n")
