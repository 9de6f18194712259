"""Write measured and predicted times into research/2026-11-23-stream-mode.md: python scripts/make_stream_page.py.

Launches into many streams: the stored table in tests/data, and those of `gpusim calibrate --rules` in
research/data/rules_*.json. Eager steps: every bundled trace and every trace of the recipe `fidelity`.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from pathlib import Path

from gpusim.formats.hardware import load_hardware
from gpusim.formats.hyper_q import HyperQ, read_hyper_q
from gpusim.formats.rules import read_rules
from gpusim.io.files import write_bytes
from gpusim.io.packed import files_in
from gpusim.plan.graph import OpGraph
from gpusim.search.eager import predict_eager
from gpusim.trace.store import bundled_traces, read_trace
from gpusim.validation.hyper_q import hyper_q_markdown, predict_hyper_q

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "research" / "2026-11-23-stream-mode.md"
STORED = ROOT / "tests" / "data" / "hyper_q_h200_20261120.json"
HARDWARE = "h200"


def tables() -> list[tuple[str, HyperQ]]:
    """Return every measured table with its file."""
    measured = [(STORED.relative_to(ROOT).as_posix(), read_hyper_q(STORED))]
    for path in sorted((ROOT / "research" / "data").glob("rules_*.json")):
        report = read_rules(path)
        if report.hyper_q is not None:
            measured.append((path.relative_to(ROOT).as_posix(), report.hyper_q))
    return measured


def launches() -> str:
    """Return the tables of launches into many streams."""
    hardware = load_hardware(HARDWARE)
    return "\n".join(
        f"From `{name}`. {hyper_q_markdown(table, predict_hyper_q(table, hardware))}" for name, table in tables()
    )


def eager(paths: Iterable[Path]) -> str:
    """Return eager steps, measured at the capture and predicted."""
    hardware = load_hardware(HARDWARE)
    rows, errors = [], []
    for path in paths:
        trace = read_trace(path)
        predicted_ns = predict_eager(OpGraph.build(trace, hardware))
        if trace.ground_truth is None or predicted_ns is None or trace.model.frontend != "aten":
            continue
        measured_ns = trace.ground_truth.eager.median_ns
        host = sum(op.host_ns for op in trace.ops) / measured_ns
        errors.append(abs(predicted_ns / measured_ns - 1))
        rows.append(
            f"| {trace.name} | {trace.provenance.date} | {measured_ns / 1e3:.0f} | {host:.2f} | "
            f"{predicted_ns / 1e3:.0f} | {predicted_ns / measured_ns - 1:+.1%} |"
        )
    head = [
        f"{len(errors)} steps, median error {statistics.median(errors):.1%}, largest {max(errors):.1%}.",
        "",
        "| step | captured | measured, us | host pace / measured | predicted, us | error |",
        "|---|---|--:|--:|--:|--:|",
    ]
    return "\n".join([*head, *rows]) + "\n"


def fill(page: str, name: str, text: str) -> str:
    """Replace the part of the page between the marks of `name`."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before, _, rest = page.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}\n{text.rstrip()}\n{end}{after}"


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    page = fill(page, "launches", launches())
    page = fill(page, "bundled", eager(bundled_traces().values()))
    page = fill(page, "validation", eager(files_in(ROOT / "validate" / "traces" / "fidelity", ".json.gz")))
    write_bytes(PAGE, page.encode())
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
