"""Checks and conversions of arguments of `import gpusim` other than steps: schedules, launch modes, seeds, numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gpusim.arguments import whole
from gpusim.defaults import DEFAULT_STREAMS, LAUNCH_MODES, MAX_EVALUATIONS, RECOMMENDED
from gpusim.errors import OptionError, UnknownNameError
from gpusim.formats.trace import Trace
from gpusim.io.file_limits import MAX_INTEGER
from gpusim.io.opening import names_a_file
from gpusim.plan.schedule import check_streams as check_streams
from gpusim.step import Step, as_step
from gpusim.text import short_value
from gpusim.trace.store import TRACE_SUFFIXES

if TYPE_CHECKING:
    from gpusim.memplan.plan import MemoryPlan
    from gpusim.plan.schedule import Schedule
    from gpusim.plan.tasks import LaunchMode

AnyStep = Step | Trace | str | Path
Progress = Callable[[str, float, int], None]
"""Callback for progress: stage, share done, and best time so far in ns (0: none yet)."""
Say = Callable[[str], None]
"""Callback for each stage of work on a GPU."""


def ignore(*_: object) -> None:
    """Ignore all arguments, as a default callback."""


def launch_mode(launch: str) -> LaunchMode:
    """Return the launch mode of a name. Raises `UnknownNameError`."""
    if launch not in LAUNCH_MODES:
        raise UnknownNameError("launch mode", str(launch), LAUNCH_MODES)
    return "stream" if launch == "stream" else "graph"


def check_seed(seed: object) -> int:
    """Return the seed. Raises `OptionError` if it is out of range."""
    return whole("seed", seed, 0, MAX_INTEGER, f"a whole number between 0 and {MAX_INTEGER}")


def check_json_name(path: Path, what: str) -> None:
    """Raise `OptionError` unless the output file of `what`, such as a trace, is named as JSON, or is a device."""
    is_device = path.exists() and not path.is_file()
    if not path.name.endswith(TRACE_SUFFIXES) and not is_device:
        raise OptionError(f"-o {short_value(path)}: a {what}'s name ends in {' or '.join(TRACE_SUFFIXES)}")


def check_schedule_arguments(schedule: object, streams: object) -> int:
    """Refuse an unknown policy or a number of streams out of range before long work; return that number."""
    from gpusim.search.by_name import check_policy

    count = check_streams(streams)
    if is_policy(schedule):
        check_policy(str(schedule))
    return count


def is_policy(schedule: object) -> bool:
    """Return True if `schedule` is the name of a policy: any text that is no schedule file."""
    from gpusim.policies.registry import POLICIES

    if not isinstance(schedule, str):
        return False
    known = schedule == RECOMMENDED or schedule in POLICIES
    return known or not names_a_file(schedule, TRACE_SUFFIXES)


def count(argument: str, value: object) -> int | None:
    """Return a number of at least 1, or None. Raises `OptionError`."""
    if value is None:
        return None
    return whole(argument, value, 1, MAX_EVALUATIONS, f"a whole number from 1 to {MAX_EVALUATIONS:,}")


def resolve_plan(step: AnyStep, schedule: object) -> MemoryPlan | None:
    """Return the memory plan that `schedule` is, or that its file has, checked for the step; None for a schedule.

    Raises `ScheduleError`.
    """
    from gpusim.errors import ScheduleError
    from gpusim.formats.memory_plan import SCHEMA
    from gpusim.io.files import document_schema
    from gpusim.memplan.plan import MemoryPlan as PlanValue
    from gpusim.memplan.plan import read_memory_plan

    name = "memory plan"
    if isinstance(schedule, str | Path) and not is_policy(schedule):
        name = str(schedule)
        if document_schema(Path(schedule), ScheduleError) != SCHEMA:
            return None
        schedule = read_memory_plan(Path(schedule), as_step(step).trace)
    return checked_plan(as_step(step), schedule, name) if isinstance(schedule, PlanValue) else None


def checked_plan(step: Step, plan: MemoryPlan, name: str) -> MemoryPlan:
    """Return a memory plan that the step can run. Raises `ScheduleError` with the name."""
    from gpusim.errors import PlanError, ScheduleError
    from gpusim.memplan.checks import check_memory_plan, check_program
    from gpusim.memplan.program import program_of
    from gpusim.memplan.storages import Storages

    storages = Storages.of(step.trace)
    try:
        check_program(storages, program_of(storages, check_memory_plan(storages, plan)))
    except PlanError as cause:
        raise ScheduleError(name, str(cause)) from cause
    return plan


def resolve_schedule(
    step: AnyStep,
    schedule: str | Path | Schedule | MemoryPlan,
    streams: int = DEFAULT_STREAMS,
    progress: Progress | None = None,
) -> Schedule:
    """Return the schedule of a policy's name, a file or a `Schedule`, checked to be legal for the step.

    Raises `ScheduleError`, `UnknownNameError`, and `OptionError` for the number of streams.
    """
    from gpusim.memplan.plan import MemoryPlan as PlanValue
    from gpusim.plan.schedule import Schedule as ScheduleValue
    from gpusim.plan.schedule import read_schedule
    from gpusim.search.by_name import schedule_of

    step = as_step(step)
    streams = check_schedule_arguments(schedule, streams)
    if is_policy(schedule):
        return schedule_of(step.graph, str(schedule), streams, progress or ignore)
    if isinstance(schedule, str | Path):
        return read_schedule(Path(schedule), step.graph)
    if isinstance(schedule, PlanValue):
        raise OptionError("a schedule with memory actions goes to `gpusim.simulate` and `gpusim.replay` alone")
    if not isinstance(schedule, ScheduleValue):
        raise OptionError(f"{type(schedule).__name__} is no schedule: give a policy's name, a file or a Schedule")
    return schedule.check(step.graph)
