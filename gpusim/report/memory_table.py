"""Output of `gpusim memory`: a table, and a document for `--json`."""

from __future__ import annotations

from typing import Any

from gpusim.memplan.compare import MemoryComparison, PolicyRow, category_bytes
from gpusim.memplan.evaluate import Outcome
from gpusim.memplan.measured import MemorySnapshot
from gpusim.report.fit import print_table
from gpusim.report.terminal import Table, console
from gpusim.units import counted, format_bytes, format_ns

#: Maximum number of tensors named at the peak.
NAMED = 8


def memory_document(comparison: MemoryComparison, run: MemorySnapshot | None = None) -> dict[str, Any]:
    """Return the document of `memory --json`: times in ns, sizes in bytes; `run` is the snapshot of a measured run."""
    hardware = comparison.graph.hardware
    best = comparison.best
    return {
        "trace": comparison.graph.trace.name,
        "hardware": hardware.label,
        "calibrated": hardware.calibrated,
        "estimated": comparison.graph.trace.provenance.estimated,
        "capacity_bytes": comparison.capacity_bytes,
        "budget_bytes": comparison.budget_bytes,
        "pinned_budget_bytes": comparison.pinned_bytes,
        "workspaces_known": comparison.workspaces_known,
        "policies": [_row_document(comparison, row, row.outcome) for row in comparison.rows if row.outcome is not None],
        "without_plan": [
            {"policy": name, "problem": problem} for problem, names in comparison.without_plan.items() for name in names
        ],
        "front": [_front_document(comparison, row) for row in comparison.front],
        "bounds": [{"peak_bytes": peak, "step_ns": step} for peak, step in comparison.bounds],
        "best": None if best is None else _front_document(comparison, best),
        "peak": _peak_document(comparison, comparison.keep_all),
        "measured": None if run is None else _run_document(comparison, run),
    }


def _run_document(comparison: MemoryComparison, run: MemorySnapshot) -> dict[str, Any]:
    """Return the comparison of a measured run with keep_all."""
    return {
        "device": run.device,
        "events": len(run.events),
        "peak_bytes": run.peak_bytes,
        "requested_peak_bytes": run.requested_peak_bytes,
        "reserved_bytes": run.reserved_bytes,
        "simulated_reserved_bytes": run.simulated.reserved_bytes,
        "predicted_peak_bytes": comparison.keep_all.peak_bytes,
        "prediction_error": _error(comparison, run),
    }


def _error(comparison: MemoryComparison, run: MemorySnapshot) -> float:
    """Return the relative error of the predicted peak against the measured one."""
    return comparison.keep_all.peak_bytes / run.peak_bytes - 1


def _row_document(comparison: MemoryComparison, row: PolicyRow, outcome: Outcome) -> dict[str, Any]:
    return {
        "policy": row.policy,
        "source": row.source,
        "budget_bytes": row.budget_bytes or None,
        "peak_bytes": outcome.peak_bytes,
        "reserved_bytes": outcome.use.reserved_bytes,
        "step_ns": outcome.step_ns,
        "exposed_copy_ns": outcome.exposed_copy_ns,
        "recompute_ns": outcome.recompute_ns,
        "variants_ns": outcome.variants_ns,
        "h2d_bytes": outcome.h2d_bytes,
        "d2h_bytes": outcome.d2h_bytes,
        "pinned_bytes": outcome.pinned_bytes,
        "kept_for_pinned": row.kept_for_pinned,
        "fits": comparison.fits(outcome),
        "largest_batch": comparison.largest_batch(outcome),
    }


def _front_document(comparison: MemoryComparison, row: PolicyRow) -> dict[str, Any]:
    assert row.outcome is not None
    return {
        "policy": row.policy,
        "budget_bytes": row.budget_bytes or None,
        "peak_bytes": row.outcome.peak_bytes,
        "step_ns": row.outcome.step_ns,
        "bound_ns": comparison.bound_ns(row.outcome),
    }


def _peak_document(comparison: MemoryComparison, outcome: Outcome) -> dict[str, Any]:
    """Return the live storages at the peak of keep_all."""
    peak, trace = outcome.use.peak, comparison.graph.trace
    op = trace.ops[peak.op] if peak.op >= 0 else None
    return {
        "bytes": peak.allocated_bytes,
        "op": "" if op is None else op.name,
        "layer": "" if op is None else op.layer,
        "phase": "" if op is None else op.phase,
        "categories": category_bytes(outcome),
        "largest": [
            {
                "storage": storage,
                "bytes": comparison.storages.bytes[storage],
                "category": comparison.storages.category[storage],
                "made_by": _maker(comparison, storage),
            }
            for storage in peak.live[:NAMED]
        ],
    }


def _maker(comparison: MemoryComparison, storage: int) -> str:
    """Return the op that makes a storage, or the name of a tensor that exists before the step."""
    trace = comparison.graph.trace
    for op, storages in zip(trace.ops, comparison.storages.makes, strict=True):
        if storage in storages:
            return op.name
    return next((tensor.name for tensor in trace.tensors if tensor.storage == storage and tensor.name), "")


def print_memory(comparison: MemoryComparison, run: MemorySnapshot | None = None) -> None:
    """Print the policies, the front, and the live storages at the peak; `run` is the snapshot of a measured run."""
    out = console()
    graph, keep_all = comparison.graph, comparison.keep_all
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (
        "policy",
        "peak",
        "of keep_all",
        "step",
        "slower",
        "copies wait",
        "recompute",
        "out",
        "back",
        "pinned",
        "largest batch",
    ):
        table.add_column(name, justify="left" if name == "policy" else "right")
    table.add_column("")
    for row in comparison.rows:
        table.add_row(*_cells(comparison, row, keep_all))
    out.print(f"Memory of {graph.trace.name} on {graph.hardware.label}, {format_bytes(comparison.capacity_bytes)}")
    print_table(out, table, drop=("recompute", "copies wait", "pinned", "back", "of keep_all"), fold=("",))
    for problem, policies in comparison.without_plan.items():
        out.print(f"{', '.join(policies)}: {problem}")
    others = [(row.policy, row.outcome) for row in comparison.rows if row.outcome and row.outcome.plan.has_variants]
    if others:
        texts = (f"{policy} {outcome.variants_ns / keep_all.step_ns:+.1%}" for policy, outcome in others)
        out.print(f"Other kernels, of the time of keep_all: {', '.join(texts)}")
    out.print()
    front = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("front: least time for its peak", "budget", "peak", "step", "bound"):
        front.add_column(name, justify="left" if name.startswith("front") else "right")
    for row in comparison.front:
        assert row.outcome is not None
        budget = format_bytes(row.budget_bytes) if row.budget_bytes else ""
        bound_ns = comparison.bound_ns(row.outcome)
        bound = "" if bound_ns is None else format_ns(bound_ns)
        peak, step = format_bytes(row.outcome.peak_bytes), format_ns(row.outcome.step_ns)
        front.add_row(row.policy, budget, peak, step, bound)
    out.print(front)
    out.print(_half_text(comparison))
    out.print()
    categories = ", ".join(f"{name} {format_bytes(size)}" for name, size in category_bytes(keep_all).items())
    out.print(f"Peak of keep_all: {comparison.peak_text(keep_all)}: {categories}")
    if not comparison.workspaces_known:
        again = (
            "an estimate knows none" if comparison.graph.trace.provenance.estimated else "capture it anew to have them"
        )
        out.print(f"The trace has no workspaces of ops, so peaks leave them out; {again}.")
    if run is not None:
        out.print(
            f"Measured: {counted(len(run.events), 'event')} on device {run.device}, "
            f"peak {format_bytes(run.peak_bytes)}, reserved {format_bytes(run.reserved_bytes)}. "
            f"The peak predicted for keep_all is {_error(comparison, run):+.2%} off."
        )
    best = comparison.best
    limit = comparison.limit_bytes
    if best is None or best.outcome is None:
        out.print(f"None of these plans keeps {format_bytes(limit)}.")
    else:
        out.print(
            f"Fastest within {format_bytes(limit)}: {best.policy}, {format_ns(best.outcome.step_ns)}, "
            f"peak {format_bytes(best.outcome.peak_bytes)}, reserved {format_bytes(best.outcome.use.reserved_bytes)}"
        )


def _half_text(comparison: MemoryComparison) -> str:
    """Say what half the peak of keep_all costs, at least and by the plans found."""
    keep_all = comparison.keep_all
    half = keep_all.peak_bytes // 2
    least_bytes = comparison.lower_bound.least_bytes
    plans = "No plan of the captured kernels" if any(op.variants for op in comparison.graph.trace.ops) else "No plan"
    if half < least_bytes:
        least = format_bytes(least_bytes)
        return f"{plans} halves the peak of keep_all: one op alone takes {least} with what is there before the step."
    rows = [*comparison.rows, *comparison.front]
    within = [row.outcome.step_ns for row in rows if row.outcome and row.outcome.peak_bytes <= half]
    fastest = f"; the fastest found takes {min(within) / keep_all.step_ns - 1:+.1%}" if within else ""
    bound_ns = comparison.lower_bound.step_ns(half)
    if bound_ns is None:
        return f"{plans} with one stream and the recorded forward pass halves the peak of keep_all{fastest}."
    cost = f"{bound_ns / keep_all.step_ns - 1:+.1%} with one stream and the recorded forward pass"
    return f"Half the peak of keep_all costs at least {cost}{fastest}."


def _cells(comparison: MemoryComparison, row: PolicyRow, keep_all: Outcome) -> list[str]:
    outcome = row.outcome
    if outcome is None:
        return [row.policy, *[""] * 10, "no plan"]
    note = f"{row.kept_for_pinned} stay for want of pinned memory" if row.kept_for_pinned else ""
    return [
        row.policy,
        format_bytes(outcome.peak_bytes),
        f"{outcome.peak_bytes / keep_all.peak_bytes:.0%}",
        format_ns(outcome.step_ns),
        f"{outcome.step_ns / keep_all.step_ns - 1:+.1%}",
        format_ns(outcome.exposed_copy_ns) if outcome.d2h_bytes else "",
        format_ns(outcome.recompute_ns) if outcome.plan.redos else "",
        format_bytes(outcome.d2h_bytes) if outcome.d2h_bytes else "",
        format_bytes(outcome.h2d_bytes) if outcome.h2d_bytes else "",
        format_bytes(outcome.pinned_bytes) if outcome.pinned_bytes else "",
        f"{comparison.largest_batch(outcome):,}",
        note or ("" if comparison.fits(outcome) else "too large"),
    ]
