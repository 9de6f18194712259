"""Exports opened with their target tools: Holistic Trace Analysis, from the package `traceinsight`.

Left out unless asked for with `-m viewers`: the package brings a hundred others, and CI installs them (`.ci/run`).
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

import gpusim
from gpusim.api.other_tools import export
from gpusim.importers import examine

pytestmark = [
    pytest.mark.viewers,
    # Its use of pandas is not tested here.
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]

#: Warnings of the tool for any file: its own run time.
TIMES = re.compile(r"^(Parsed |Overall parsing |leaving parse)")
#: Warnings for each file in nanoseconds, and for each of one step, torch.profiler's own included.
OF_ANY_PROFILE = (
    re.compile(r"^Rounding down ns resolution events"),
    re.compile(r"^There is only one iteration in the trace"),
)
SCHEDULES = [
    ("squeezenet1_1-infer-b1", "sequential", 1),
    ("squeezenet1_1-infer-b1", "critical_path", 4),
    ("googlenet-train-b8", "round_robin", 8),
]


def analysis(folder: Path) -> Any:
    from hta.trace_analysis import TraceAnalysis

    return TraceAnalysis(trace_dir=str(folder))


@pytest.mark.parametrize(("name", "policy", "streams"), SCHEDULES)
def test_traceinsight_opens_a_timeline_without_a_warning_and_finds_what_is_in_it(
    name: str, policy: str, streams: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    simulated = gpusim.simulate(name, policy, streams=streams)
    path = tmp_path / "rank0.json"
    export(simulated, {"kineto": path})
    logging.getLogger("hta").propagate = True
    with caplog.at_level(logging.WARNING):
        opened = analysis(tmp_path)
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    said = [line for line in said if not TIMES.match(line) and not any(known.match(line) for known in OF_ANY_PROFILE)]
    assert said == []

    report = examine([str(path)])
    frame = opened.t.get_trace(0)
    assert int((frame["stream"] >= 0).sum()) == len(simulated.timeline.plan.tasks)
    assert frame.loc[frame["stream"] >= 0, "stream"].nunique() == report.streams
    launches = opened.get_cuda_kernel_launch_stats(ranks=[0], visualize=False)[0]
    assert len(launches) == len(simulated.timeline.plan.tasks)
    assert (launches["launch_delay"] > 0).all()
    (row,) = opened.get_temporal_breakdown(visualize=False).to_dict("records")
    kernel_us = simulated.makespan_ns / 1000
    assert row["kernel_time(us)"] == pytest.approx(kernel_us, abs=2)
    # The tool truncates each end to whole microseconds.
    assert row["idle_time(us)"] <= kernel_us - report.busy_ns / 1000 + 2 * report.kernels
    kinds, names = opened.get_gpu_kernel_breakdown(visualize=False)
    assert "COMPUTATION" in set(kinds["kernel_type"])
    assert len(names)
    idle, _ = opened.get_idle_time_breakdown(ranks=[0], visualize=False)
    assert set(idle["stream"]) <= set(frame["stream"])


def test_two_exports_are_two_ranks_by_their_files(tmp_path: Path) -> None:
    """The rank is found in the text, which needs a blank after the colon."""
    from hta.common.trace_file import get_trace_files

    export(gpusim.simulate(SCHEDULES[0][0], "sequential"), {"kineto": tmp_path / "rank0.json.gz"})
    assert list(get_trace_files(str(tmp_path))) == [0]
