"""Gap between the largest bound and the fastest replayed schedule (research/2026-11-23-limits.md)."""

from __future__ import annotations

from pathlib import Path

from gpusim.validation.again import trace_files
from gpusim.validation.gaps import gaps_markdown, measured_gaps, newest_of_each_step, search_files
from gpusim.validation.replayed import SUFFIX, ReplayedSchedule, write_replayed

ROOT = Path(__file__).parents[2]


def test_each_step_comes_from_the_newest_results_that_have_it(tmp_path: Path) -> None:
    """An interrupted run replaces an earlier one only for its finished steps."""

    def made(trace: str, measured_ns: int) -> ReplayedSchedule:
        return ReplayedSchedule(
            trace=trace,
            trace_hash="",
            policy="search",
            order=(),
            stream_of=(),
            measured_ns=measured_ns,
            sequential_ns=1,
        )

    old = write_replayed([made("a", 1), made("b", 2)], tmp_path / "search_h200_20250101.json")
    new = write_replayed([made("b", 3)], tmp_path / "search_a100_20250102.json")
    found = newest_of_each_step([new, old])
    assert {path: [each.measured_ns for each in mine] for path, mine in found.items()} == {old: [1], new: [3]}


SMALL = "squeezenet1_1-infer-b1"


def test_measured_gaps_in_the_documentation_are_those_of_the_newest_results() -> None:
    """All of its steps, with one row recomputed. Where this fails, run scripts/make_limits_page.py."""
    page = (ROOT / "research" / "2026-11-23-limits.md").read_text("utf-8")
    table = page.split("<!-- measured:begin -->")[1].split("<!-- measured:end -->")[0]
    newest = newest_of_each_step(search_files(ROOT / "validate" / "results"))
    assert all(path.name in table for path, schedules in newest.items() if schedules)
    schedules = [schedule for of_file in newest.values() for schedule in of_file]
    (source,) = (path for path, of_file in newest.items() if any(each.trace == SMALL for each in of_file))
    assert {schedule.trace for schedule in schedules} <= {
        line.split(" ")[1] for line in table.splitlines() if line.startswith("| ")
    }
    small = [schedule for schedule in newest[source] if schedule.trace == SMALL]
    files = trace_files(source.with_name(source.name.removesuffix(SUFFIX) + ".json"))
    assert gaps_markdown(measured_gaps(small, files))[2] in table
