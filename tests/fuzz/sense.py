"""Plausibility of a command's output: times, rules of every step, and the written files."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import re
import sqlite3
from pathlib import Path
from typing import Any

from tests.fuzz.cases import Case

#: Keys of JSON output whose numbers are differences, and may be negative.
SIGNED = ("_frac", "error", "gain", "lost", "loss", "change", "saved", "gap.parts")
_NONSENSE = re.compile(r"(?<![\w.\[-])-?(?:nan|inf) ?(?:ns|us|µs|ms|s|MiB|GiB|KiB|B|kB|MB|GB)\b", re.IGNORECASE)
#: Text that a page would execute.
ACTIVE_HTML = ("<img src=x onerror", "</script><script>alert")


def nonsense(case: Case, folder: Path, code: int, out: str) -> str:
    """Return the problem with a command's answer and files; empty where there is none."""
    problem = files_problem(case, folder, code)
    if problem or code not in case.good_codes:
        return problem
    if case.argv[0] == "import" and (problem := _trace_problem(folder / case.outputs[0])):
        return problem
    if "--json" in case.argv:
        return _json_problem(out)
    # Names in the files may look like numbers; hence only numbers before a unit count.
    found = _NONSENSE.search(out)
    return f"'{found[0]}' in the output" if found and not _in_files(case, found[0]) else ""


def _trace_problem(path: Path) -> str:
    """Check that an imported trace is readable by the commands, and covers its step."""
    from gpusim.errors import TraceError
    from gpusim.trace.store import read_trace

    try:
        source = read_trace(path).provenance.imported_from
    except TraceError as error:
        return f"the imported trace is not read: {error}"
    if source is None:
        return "the imported trace does not say where it comes from"
    if not source.concurrent_ns <= source.busy_ns <= source.observed_ns:
        return f"{source.concurrent_ns} ns concurrent, {source.busy_ns} busy, {source.observed_ns} observed"
    return ""


def _in_files(case: Case, text: str) -> bool:
    return any(text.encode() in data for data in case.files.values()) or any(text in word for word in case.argv)


def _json_problem(out: str) -> str:
    try:
        document = json.loads(out)
    except ValueError as error:
        return f"--json prints no JSON: {error}"
    return _number_problem(document, "$")


def _number_problem(value: Any, place: str) -> str:
    if isinstance(value, dict):
        return next((p for key, part in value.items() if (p := _number_problem(part, f"{place}.{key}"))), "")
    if isinstance(value, list):
        return next((p for i, part in enumerate(value) if (p := _number_problem(part, f"{place}[{i}]"))), "")
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    if not math.isfinite(value):
        return f"{place} is {value}"
    timed = place.endswith(("_ns", "_bytes", "speedup")) or re.search(r"_ns\[\d+\]$", place)
    if timed and value < 0 and not any(word in place for word in SIGNED):
        return f"{place} is {value}"
    return ""


# --- Files ---


def files_problem(case: Case, folder: Path, code: int) -> str:
    """Find files left over, left by a refused command, or half written."""
    there = {path.name for path in folder.iterdir()} - set(case.files) - {"folder"}
    if case.outputs == ("*",):
        hidden = sorted(name for name in there if name.startswith(".") and not any(name in word for word in case.argv))
        return f"left over: {hidden}" if hidden else ""
    if left := sorted(there - set(case.outputs)):
        return f"left over: {left}"
    if code not in case.good_codes:
        return f"refused, but wrote {sorted(there)}" if there else ""
    if missing := sorted(set(case.outputs) - there):
        return f"did not write {missing}"
    return next((p for name in case.outputs if (p := file_problem(folder / name))), "")


def file_problem(path: Path) -> str:
    """Return the reason why a file is half written, by its kind."""
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if ".json" in path.suffixes:
            json.loads(data)
        elif path.suffix == ".html" and not data.rstrip().endswith(b"</html>"):
            return f"{path.name} does not end as a page does"
        elif path.suffix == ".csv" and not data.endswith(b"\n"):
            return f"{path.name} does not end with a whole line"
        elif path.suffix == ".sqlite":
            connection = sqlite3.connect(path)
            try:
                if connection.execute("PRAGMA integrity_check").fetchone()[0] != "ok":
                    return f"{path.name} is damaged"
            finally:
                connection.close()
    except (OSError, EOFError, ValueError, sqlite3.DatabaseError) as error:
        return f"{path.name}: {error}"
    return ""


def active_markup(case: Case, folder: Path) -> str:
    """Find markup of the input that is active in a written page or table."""
    for name in case.outputs:
        path = folder / name
        if path.suffix == ".html" and path.is_file():
            page = path.read_text(encoding="utf-8", errors="replace")
            if found := next((words for words in ACTIVE_HTML if words in page), ""):
                return f"{name} holds {found!r}"
        if path.suffix == ".csv" and path.is_file():
            for row in csv.reader(io.StringIO(path.read_text(encoding="utf-8", errors="replace"))):
                if cell := next((cell for cell in row if _is_formula(cell)), ""):
                    return f"{name} has the cell {cell!r}"
    return ""


def _is_formula(cell: str) -> bool:
    if not cell.startswith(("=", "+", "-", "@", "\t", "\r")):
        return False
    try:
        float(cell)
    except ValueError:
        return True
    return False


# --- Steps ---

#: Times are rounded to ns at each start and end.
ROUNDING_NS = 2.0


def step_problem(case: Case) -> str:
    """Check the rules of every step on the accepted case's trace, hardware model and schedule.

    Both engines agree; no schedule beats a bound or its longest kernel; one stream takes the sum of its kernels.
    """
    from gpusim.analysis.simulation import simulate_plan
    from gpusim.bounds.bounds import bounds
    from gpusim.engine.base import engine_by_name
    from gpusim.memplan.plan import read_memory_plan
    from gpusim.plan.lower import lower
    from gpusim.plan.schedule import read_schedule
    from gpusim.policies.registry import POLICIES
    from gpusim.step import load

    words = list(case.argv)

    def option(name: str) -> str | None:
        return words[words.index(name) + 1] if name in words else None

    graph = load(words[1], option("--hw")).graph
    mode: Any = option("--launch") or "graph"
    alone = POLICIES["sequential"](graph, 1)
    sequential = lower(graph, alone)
    file = option("--schedule")
    if file and case.family == "memory plan":
        simulated = simulate_plan(graph, read_memory_plan(Path(file), graph.trace))
        plan, chosen = simulated.timeline.plan, simulated.ran
    else:
        policy = POLICIES[option("--policy") or "critical_path"]
        schedule = read_schedule(Path(file), graph) if file else policy(graph, 4)
        plan, chosen = lower(graph, schedule, mode), graph.choosing(schedule.variants)
    fast, reference = engine_by_name("fast"), engine_by_name("reference")
    for name, each in (("sequential", sequential), ("schedule", plan)):
        one, other = fast.run(each, graph.hardware), reference.run(each, graph.hardware)
        apart = max((abs(a - b) for a, b in zip(one.end_ns, other.end_ns, strict=True)), default=0)
        if apart > max(ROUNDING_NS, 1e-9 * one.makespan_ns):
            return f"{name}: the engines differ by {apart} ns of {one.makespan_ns}"
        if min((*one.start_ns, *one.end_ns), default=0) < 0 or any(
            e < s for s, e in zip(one.start_ns, one.end_ns, strict=True)
        ):
            return f"{name}: a kernel starts before 0 or ends before its start"
        slack = ROUNDING_NS + 1e-9 * one.makespan_ns
        longest = max((task.dur_ns for task in each.tasks), default=0.0)
        if one.makespan_ns + slack < longest:
            return f"{name}: takes {one.makespan_ns} ns, its longest kernel {longest}"
        if name == "schedule" and mode == "graph":  # bounds apply to a CUDA graph
            limit, kind = bounds(chosen).largest
            if one.makespan_ns + slack < limit:
                return f"{name}: takes {one.makespan_ns} ns, the bound '{kind}' is {limit}"
        if name == "sequential":
            tasks = each.tasks
            total = sum(t.dur_ns + t.extra_ns for t in tasks) + graph.chain_ns * (len(tasks) - 1) - tasks[0].extra_ns
            slack += ROUNDING_NS * len(tasks)
            slow_front = graph.hardware.graph.front_end_ns > graph.chain_ns
            if one.makespan_ns + slack < total or (one.makespan_ns - slack > total and not slow_front):
                return f"sequential: takes {one.makespan_ns} ns, the sum of kernels and gaps is {total}"
    return ""
