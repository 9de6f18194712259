"""Output of `gpusim parallel`: plans for several GPUs, layer by layer."""

from __future__ import annotations

from typing import Any, Final

from gpusim.layerwise.dtensor import export_dtensor
from gpusim.layerwise.explore import LayerRow, Parallel, PlanResult
from gpusim.layerwise.fixed_plans import SEARCHED
from gpusim.report.fit import print_table
from gpusim.report.terminal import Table, console, styled
from gpusim.text import short_value
from gpusim.units import counted, format_bytes, format_ns, format_times_ns

#: Source of the times of collectives, in words.
COMMUNICATION: Final = {
    "measured": "measured curves",
    "scaled": "curves measured for another number of GPUs",
    "links": "latency and bandwidth of links (not measured)",
}
#: Parts of the time of a simulated step.
PARTS: Final = ("kernels", "slowed by collectives", "waiting for transfers", "waiting for sums", "gaps")
#: Maximum number of groups of consecutive equal layers in the table; `--json` has each layer.
_MOST_GROUPS: Final = 40


def parallel_document(parallel: Parallel) -> dict[str, Any]:
    """Return the document of `parallel --json`: times in ns, as integers."""
    problem, searched = parallel.problem, parallel.searched
    rows = {plan.name: parallel.rows(plan.name) for plan in parallel.plans}
    return {
        "trace": parallel.name,
        "hardware": problem.hardware.label,
        "calibrated": problem.hardware.calibrated,
        "gpus": parallel.gpus,
        "topology": problem.topology.name,
        "batch_norm": problem.batch_norm,
        "computation": problem.times.basis,
        "communication": parallel.communication,
        "plans": [_plan_document(plan) for plan in parallel.plans],
        "search": {
            "cost_ns": round(searched.cost_ns),
            "bound_ns": round(searched.bound_ns),
            "exact": searched.exact,
            "layers_left": searched.kernel_layers,
            "configurations": searched.configurations,
            "next_best_ns": [round(cost) for cost, _ in searched.ranked[1:]],
        },
        "layers": [
            _layer_document(row, parallel.gpus, {name: str(others[number].config) for name, others in rows.items()})
            for number, row in enumerate(rows[SEARCHED])
        ],
        "dtensor": _dtensor_document(parallel),
        "notes": list(parallel.notes),
    }


def _plan_document(plan: PlanResult) -> dict[str, Any]:
    span = plan.makespan
    return {
        "plan": plan.name,
        "step_ns": round(plan.step_ns),
        "additive_ns": round(plan.additive_ns),
        "compute_ns": round(plan.compute_ns),
        "transfer_ns": round(plan.transfer_ns),
        "sync_ns": round(plan.sync_ns),
        "bytes": plan.bytes,
        "transfer_bytes": plan.transfer_bytes,
        "sync_bytes": plan.sync_bytes,
        "memory_bytes": plan.memory_bytes,
        "error_ns": round(plan.error_ns),
        "simulated": {
            "compute_ns": round(span.compute_ns),
            "slowed_ns": round(span.slowed_ns),
            "transfer_ns": round(span.transfer_ns),
            "sync_ns": round(span.sync_ns),
            "gaps_ns": round(span.gaps_ns),
            "hidden_ns": round(span.hidden_ns),
        },
        "kinds_of_gpus": plan.roles,
        "all_kinds_simulated": plan.all_roles,
    }


def _layer_document(row: LayerRow, gpus: int, in_plans: dict[str, str]) -> dict[str, Any]:
    config, cost = row.config, row.cost
    return {
        "name": row.name,
        "kind": row.kind,
        "output": list(row.output),
        "n": config.n,
        "c": config.c,
        "h": config.h,
        "w": config.w,
        "replicated": config.replicated,
        "devices": config.computing(gpus),
        "forward_ns": round(cost.forward_ns),
        "backward_ns": round(cost.backward_ns),
        "optimizer_ns": round(cost.optimizer_ns),
        "transfer_ns": round(row.transfer_ns),
        "sync_ns": round(cost.sync_ns + cost.statistics_ns),
        "error": cost.error,
        "memory_bytes": row.memory_bytes,
        "in_plans": in_plans,
    }


def _dtensor_document(parallel: Parallel) -> dict[str, Any]:
    exported = export_dtensor(parallel.problem.graph, parallel.best.choice, parallel.gpus)
    return {
        "mesh": list(exported.mesh),
        "placements": {
            each.layer: {"output": list(each.output), "weights": list(each.weights)}
            for each in exported.layers
            if not each.cannot
        },
        "parallelize_plan": exported.parallelize_plan,
        "cannot": list(exported.cannot),
    }


def print_parallel(parallel: Parallel) -> None:
    """Print the plan layer by layer, the comparison of plans, and the parts of the simulated time."""
    out = console()
    best, data = parallel.best, parallel.plan("data")
    gpus = counted(parallel.gpus, "GPU")
    out.print(
        styled(
            (f"{parallel.name} on {gpus}: ", "bold"),
            f"{format_ns(best.step_ns)} a step, {data.step_ns / best.step_ns:.2f}x over data parallelism",
        )
    )
    out.print(_basis(parallel))
    out.print("The layer-wise plan:")
    print_table(out, _layers_table(parallel), drop=("kinds", "GPUs"), fold=("layers",))
    out.print("All plans:")
    print_table(out, _plans_table(parallel), drop=("memory", "sums", "transfers", "computation"))
    for line in explanation(best):
        out.print(line)
    out.print(search_line(parallel))
    for note in parallel.notes:
        out.print(f"note: {note}")


def _basis(parallel: Parallel) -> str:
    problem = parallel.problem
    text = f"Computation: {problem.times.basis}. Communication ({short_value(problem.topology.name)}): "
    return f"{text}{COMMUNICATION[parallel.communication]}."


def search_line(parallel: Parallel) -> str:
    """Return what the search proved, in a sentence."""
    searched = parallel.searched
    if searched.exact:
        return f"By the sum of costs, no plan is faster than {format_ns(searched.cost_ns)} (exact)."
    gap = 1 - searched.bound_ns / searched.cost_ns if searched.cost_ns else 0.0
    best = f"By the sum of costs, the best plan found takes {format_ns(searched.cost_ns)}"
    return f"{best}; no plan is faster than {format_ns(searched.bound_ns)} (bounded, {gap:.1%} apart)."


def explanation(plan: PlanResult) -> list[str]:
    """Return sentences on the difference between the sum of costs and the simulated step."""
    span = plan.makespan
    lines = [
        f"Simulated {format_ns(span.step_ns)}: kernels {format_ns(span.compute_ns)}, slowed by collectives "
        f"{format_ns(span.slowed_ns)}, gaps {format_ns(span.gaps_ns)}, waiting for transfers "
        f"{format_ns(span.transfer_ns)}, for sums of gradients {format_ns(span.sync_ns)}."
    ]
    lines.append(
        f"Sum of costs {format_ns(plan.additive_ns)}: there nothing overlaps; simulated, "
        f"{format_ns(span.hidden_ns)} of collectives run concurrently with kernels."
    )
    return lines


def plan_parts_ns(plan: PlanResult) -> dict[str, float]:
    """Return the simulated time of a plan by `PARTS`, in ns."""
    span = plan.makespan
    times = (span.compute_ns, span.slowed_ns, span.transfer_ns, span.sync_ns, span.gaps_ns)
    return dict(zip(PARTS, times, strict=True))


def layer_groups(parallel: Parallel) -> list[list[LayerRow]]:
    """Return the layers of the best plan, grouped if consecutive ones have equal splits."""
    groups: list[list[LayerRow]] = []
    for row in parallel.rows():
        if groups and groups[-1][-1].config == row.config:
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _times(times_ns: list[float]) -> list[str]:
    """Format times of plans: in one unit, or each in its own if in one the shortest would have too few digits.

    On many GPUs model parallelism may take a thousand times as long as the others.
    """
    shortest = min((time_ns for time_ns in times_ns if time_ns > 0), default=0.0)
    if max(times_ns) >= 1000 * shortest > 0:
        return [format_ns(time_ns) for time_ns in times_ns]
    return format_times_ns(times_ns)


def _plans_table(parallel: Parallel) -> Table:
    table = Table()
    for name in ("plan", "step", "over data", "sum of costs", "computation", "transfers", "sums", "moved", "memory"):
        table.add_column(name, justify="left" if name == "plan" else "right")
    plans, data = parallel.plans, parallel.plan("data")
    steps = _times([plan.step_ns for plan in plans])
    columns = [
        _times([getattr(plan, name) for plan in plans])
        for name in ("additive_ns", "compute_ns", "transfer_ns", "sync_ns")
    ]
    for number, plan in enumerate(plans):
        table.add_row(
            plan.name,
            steps[number],
            f"{data.step_ns / plan.step_ns:.2f}x",
            *(column[number] for column in columns),
            format_bytes(plan.bytes),
            format_bytes(plan.memory_bytes),
            style="bold" if plan.name == SEARCHED else "",
        )
    return table


def _layers_table(parallel: Parallel) -> Table:
    """Return a table with one line per group of consecutive layers with equal splits."""
    table = Table()
    for name in ("layers", "kinds", "split", "GPUs", "computation", "transfers", "sums"):
        table.add_column(name, justify="right" if name in ("GPUs", "computation", "transfers", "sums") else "left")
    groups = layer_groups(parallel)
    shown = groups[:_MOST_GROUPS]
    computed = format_times_ns([sum(row.cost.compute_ns for row in group) for group in shown])
    moved = format_times_ns([sum(row.transfer_ns for row in group) for group in shown])
    summed = format_times_ns([sum(row.cost.sync_ns + row.cost.statistics_ns for row in group) for group in shown])
    for number, group in enumerate(shown):
        first, last = group[0].name, group[-1].name
        name = first if len(group) == 1 else f"{first} ... {last} ({len(group)})"
        kinds = ", ".join(dict.fromkeys(row.kind for row in group))
        config = group[0].config
        gpus = config.computing(parallel.gpus)
        table.add_row(name, kinds, str(config), str(gpus), computed[number], moved[number], summed[number])
    if len(groups) > len(shown):
        table.add_row(f"{len(groups) - len(shown)} more groups: --json", "", "", "", "", "", "")
    return table
