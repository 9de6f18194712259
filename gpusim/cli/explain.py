"""`gpusim explain`: causes of the time above the critical path."""

from __future__ import annotations

import re

import click

from gpusim.cli.common import (
    chosen_schedule,
    hardware_option,
    json_option,
    launch_option,
    load_step,
    policy_option,
    print_json,
    progress_bar,
    streams_option,
)
from gpusim.errors import OptionError
from gpusim.text import short_value

_TIME = re.compile(r"^([0-9]{1,15}(?:\.[0-9]{0,15})?)(ns|us|ms)$")
_UNITS = {"ns": 1, "us": 1_000, "ms": 1_000_000}


@click.command()
@click.argument("trace")
@hardware_option
@policy_option("Explain")
@streams_option
@click.option("--schedule", "schedule_file", metavar="FILE", help="Explain this schedule instead of a policy's.")
@launch_option
@click.option("--window", metavar="FROM:TO", help="Explain an interval of the timeline, for example 100us:200us.")
@click.option("--ops", "ops", metavar="A,B", help="Explain two ops: names, numbers, or `LAYER OPERATOR`.")
@json_option
def explain(
    trace: str,
    hardware: str | None,
    policy: str | None,
    streams: int | None,
    schedule_file: str | None,
    launch: str,
    window: str | None,
    ops: str | None,
    as_json: bool,
) -> None:
    """Explain why a schedule of TRACE is not faster: causes of the time between its critical path and its makespan.

    Covers the whole step, an interval (--window) or two ops (--ops). docs/commands/explain.md lists the causes.
    """
    import gpusim
    from gpusim.report import explain_table as table

    if window is not None and ops is not None:
        raise OptionError("give either --window or --ops")
    schedule, most_streams = chosen_schedule(policy, streams, schedule_file)
    between = None if window is None else _window(window)
    names = None if ops is None else _two(ops)
    step = load_step(trace, hardware)
    with progress_bar(not as_json) as report:
        explained = gpusim.explain(step, schedule, streams=most_streams, launch=launch, progress=report)
    if between is not None and between[0] >= explained.timeline.makespan_ns:
        raise OptionError(f"--window {short_value(window)}: the schedule ends at {explained.timeline.makespan_ns} ns")
    pair = None if names is None else explained.between(*names)
    if pair is not None:
        document = table.pair_document(explained, pair)
    elif between is not None:
        document = table.window_document(explained, *between)
    else:
        document = table.step_document(explained)
    if as_json:
        print_json(document)
    elif pair is not None:
        table.print_pair(document)
    elif between is not None:
        table.print_window(document)
    else:
        table.print_step(document)


def _window(text: str) -> tuple[int, int]:
    """Parse an interval and return its start and end in ns."""
    parts = text.split(":")
    times = [_TIME.match(part.strip()) for part in parts]
    if len(parts) != 2 or not all(times):
        raise OptionError(f"--window {short_value(text)}: give two times with units, such as 100us:200us")
    begin, end = (round(float(m[1]) * _UNITS[m[2]]) for m in times if m)
    if begin >= end:
        raise OptionError(f"--window {short_value(text)}: it ends before it begins")
    return begin, end


def _two(text: str) -> tuple[str, str]:
    names = [name.strip() for name in text.split(",")]
    if len(names) != 2 or not all(names):
        raise OptionError(f"--ops {short_value(text)}: give two ops, such as convolution_3,relu_2")
    return names[0], names[1]
