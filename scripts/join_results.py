"""Put the steps of newer runs into a results file, in place of its own: python scripts/join_results.py FILE RUN...

    python scripts/join_results.py validate/results/fair_h200_20261128.json run/fair_h200_20261201.json --step NAME

A step's rows are replaced all together, with their replayed schedules, and keep the date and versions of their run;
steps that FILE lacks come last. `--step` names the only steps to take, and may be repeated. FILE is written in place.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from gpusim.errors import GpusimError, OptionError
from gpusim.formats.results import Results, read_results
from gpusim.io.files import write_document
from gpusim.validation.replayed import SUFFIX, ReplayedSchedule, read_replayed, write_replayed

Steps = Collection[str]


class OfStep(Protocol):
    """A row, or a schedule, of a step."""

    @property
    def trace(self) -> str:
        """Name of the step."""


Row = TypeVar("Row", bound=OfStep)


def joined(into: Results, run: Results, steps: Steps = ()) -> Results:
    """Return `into` with the rows of a run's steps: of all, or of `steps`. Raises `OptionError`."""
    for field in ("recipe", "gpu"):
        ours, theirs = getattr(into, field), getattr(run, field)
        if ours != theirs:
            raise OptionError(f"{field} '{theirs}' cannot be joined to '{ours}'")
    dated = [
        msgspec.structs.replace(case, date=case.date or run.date, versions=case.versions or run.versions)
        for case in run.cases
    ]
    return msgspec.structs.replace(into, cases=tuple(_replaced(into.cases, dated, steps)))


def joined_schedules(
    into: Sequence[ReplayedSchedule], run: Sequence[ReplayedSchedule], steps: Steps = ()
) -> list[ReplayedSchedule]:
    """Return replayed schedules as `joined` does rows. Raises `OptionError`."""
    return _replaced(into, run, steps)


def _replaced(into: Sequence[Row], run: Sequence[Row], steps: Steps) -> list[Row]:
    taken: dict[str, list[Row]] = {}
    for row in run:
        if not steps or row.trace in steps:
            taken.setdefault(row.trace, []).append(row)
    missing = sorted(set(steps) - set(taken))
    if missing:
        raise OptionError(f"step '{missing[0]}' is not in the run")
    rows: list[Row] = []
    left = dict(taken)
    for row in into:
        if row.trace not in taken:
            rows.append(row)
        else:
            rows += left.pop(row.trace, [])
    return [*rows, *(row for of_step in left.values() for row in of_step)]


def schedules_of(results: Path) -> tuple[ReplayedSchedule, ...]:
    """Return the replayed schedules beside a results file; none where there is no such file."""
    path = results.with_name(results.stem + SUFFIX)
    return read_replayed(path) if path.exists() else ()


def main(arguments: Sequence[str] | None = None) -> int:
    """Join the files; return 2 after a line for a user's mistake."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--step", action="append", default=[])
    given = parser.parse_args(arguments)
    try:
        results, schedules = read_results(given.file), list(schedules_of(given.file))
        for path in given.runs:
            run = read_results(path)
            results = joined(results, run, given.step)
            if schedules:
                replayed = schedules_of(path)
                if not replayed:
                    raise OptionError(f"{path}: no replayed schedules are beside it")
                schedules = joined_schedules(schedules, replayed, given.step)
        if schedules and [each.trace for each in schedules] != [case.trace for case in results.cases]:
            raise OptionError(f"{given.file}: a run lacks the schedules of its rows")
        write_document(given.file, results, indent=1)
        if schedules:
            write_replayed(schedules, given.file)
    except GpusimError as error:
        print(f"join_results: {error}", file=sys.stderr)
        return 2
    print(f"{given.file}: {len(results.cases)} rows of {len({case.trace for case in results.cases})} steps")
    return 0


if __name__ == "__main__":
    sys.exit(main())
