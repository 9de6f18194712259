"""Reasons for the start time of a kernel, in words."""

from __future__ import annotations

from gpusim.analysis.critical_path import Cause, Wait, waits
from gpusim.engine.base import Timeline
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.trace import Trace
from gpusim.report.perfetto import Run
from gpusim.text import shortened, visible
from gpusim.units import format_ns

#: Maximum length of the chain of reasons.
CHAIN = 5
_REASONS: dict[Cause, str] = {
    "start": "nothing held it: it started with the step",
    "dependency": "it needs the result of a kernel of another stream",
    "stream": "the kernel before it in its own stream had to end",
    "front end": "the front end was starting another kernel",
    "grid slot": "as many kernels as the GPU holds were running: one had to end",
    "copy engine": "the copy engine was busy",
    "launch": "the host had not launched it yet, or the head of its hardware queue blocked it",
}


def waiting_chain(timeline: Timeline, hardware: HardwareModel, task: int, length: int = CHAIN) -> tuple[Wait, ...]:
    """Return the wait that determined a task's start, then that of its blocker, and so on."""
    every = waits(timeline, hardware)
    chain = [every[task]]
    seen = {task}
    while len(chain) < length:
        blocker = chain[-1].blocker
        if blocker is None or blocker in seen:
            break
        seen.add(blocker)
        chain.append(every[blocker])
    return tuple(chain)


def waiting_text(timeline: Timeline, trace: Trace, hardware: HardwareModel, run: Run, task: int) -> str:
    """Return the chain as Markdown: the kernel, then a line per reason."""
    piece = run.slices[task]
    lines = [
        f"{_name(timeline, trace, task)} started at **{format_ns(piece.start_ns)}** on stream {piece.stream} and ran "
        f"for {format_ns(piece.dur_ns)} ({format_ns(timeline.plan.tasks[task].dur_ns)} alone).",
        "",
    ]
    for number, wait in enumerate(waiting_chain(timeline, hardware, task), 1):
        line = f"{number}. **{wait.cause}**: {_REASONS[wait.cause]}"
        if wait.blocker is not None:
            event = "started" if wait.cause == "front end" else "ended"
            line += (
                f": {_name(timeline, trace, wait.blocker)}, which {event} at {format_ns(wait.from_ns)}, "
                f"{format_ns(wait.wait_ns)} before"
            )
        lines.append(f"{line}.")
    return "\n".join(lines)


def _name(timeline: Timeline, trace: Trace, index: int) -> str:
    """Return op and layer as code, so that names of a trace never become markup."""
    task = timeline.plan.tasks[index]
    if task.op < 0:
        return _code(task.name)
    op = trace.ops[task.op]
    return f"{_code(op.name)} of {_code(op.layer)}" if op.layer else _code(op.name)


def _code(text: str) -> str:
    return "`" + shortened(visible(" ".join(text.replace("`", "'").split()))) + "`"
