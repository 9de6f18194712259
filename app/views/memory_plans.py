"""Memory plans: policies that offload or recompute, time against memory, whether the step fits, and one plan's run."""

import streamlit as st
from gpusim_dashboard import html, results, view
from gpusim_dashboard.address import Settings
from gpusim_dashboard.cache import cached
from gpusim_dashboard.choice import current

import gpusim
from gpusim.api.dashboard import category_bytes, is_large
from gpusim.report.figures.comparisons import memory_figure
from gpusim.report.figures.memory_front import memory_front_figure
from gpusim.report.figures.timeline import Look, timeline_figure
from gpusim.units import MIB, NS_PER_MS, format_bytes, format_ns


@cached
def compared(content: str, hardware: str, limit: int | None, _step: gpusim.Step) -> gpusim.MemoryComparison:
    """Cache `gpusim memory` of this step for each budget."""
    return gpusim.memory(_step, memory_limit=limit)


@cached
def simulated(content: str, hardware: str, plan: int, _plan: gpusim.MemoryPlan, _step: gpusim.Step) -> gpusim.Timeline:
    """Cache the timeline of a plan."""
    return gpusim.simulate(_step, _plan).timeline


@cached
def recorded(content: str, hardware: str, plan: int, _plan: gpusim.MemoryPlan, _step: gpusim.Step) -> gpusim.Timeline:
    """Cache the timeline of a plan with the causes that its figure shows, where that does not take long."""
    run = gpusim.simulate(_step, _plan)
    return run.timeline if is_large(_step) else run.recorded


choice = current()
view.heading(choice)
if not choice.trace.tensors:
    view.unanswered(view.NO_TENSORS)
step = results.step_of(choice)
capacity = choice.hardware.memory.dram_bytes
settings = Settings("memory-plans", choice.content, choice.hardware.name)
cells = st.columns(3)
limit_mib = (
    settings.number(cells[0], "Budget, MiB", "budget", 0, capacity // MIB, None, placeholder="all of the GPU's memory")
    or 0
)
policy = settings.select(
    cells[1],
    "Plan shown",
    "plan",
    ["", *gpusim.list_memory_policies()],
    "",
    format_func=lambda name: name or "the fastest that fits",
)
settings.finish()
with st.spinner("Planning with every memory policy ..."):
    try:
        comparison = compared(choice.content, choice.hardware.name, limit_mib * MIB or None, step)
    except gpusim.OptionError as problem:
        st.error(view.plain(problem.problem))
        st.stop()
keep_all, best = comparison.keep_all, comparison.best
numbers = [
    ("Keeps all", format_bytes(keep_all.peak_bytes), "allocated at the peak"),
    ("GPU memory", format_bytes(capacity), choice.hardware.label),
]
if best is not None and best.outcome is not None:
    outcome = best.outcome
    fastest = f"{best.policy}, {format_bytes(outcome.peak_bytes)}"
    numbers.append(("Fastest that fits", format_ns(outcome.step_ns), fastest))
if limit_mib:
    verb, limit = "allocates", f"a budget of {format_bytes(limit_mib * MIB)}"
else:  # a GPU must hold what is reserved
    verb, limit = "reserves", f"the {format_bytes(capacity)} of the GPU"
if comparison.fits(keep_all):
    html.answer(
        "yes", f"Yes, without a plan: the step {verb} {format_bytes(comparison.needed_bytes(keep_all))} of {limit}."
    )
elif best is not None and best.outcome is not None:
    cost, needed = best.outcome.step_ns / keep_all.step_ns - 1, comparison.needed_bytes(best.outcome)
    html.answer(
        "yes",
        f"Yes, with a plan: {best.policy} {verb} {format_bytes(needed)} of {limit}; its step takes {cost:+.1%} time.",
    )
else:
    html.answer("no", f"No plan brings the step under {limit}.")
view.metrics(*numbers)
st.caption(view.plain(f"The peak of the step that keeps all: {comparison.peak_text(keep_all)}."))
view.show(memory_front_figure(comparison, view.theme(), named=False), "memory_front")
view.table(
    [
        {
            "policy": row.policy,
            "peak, MiB": row.outcome.peak_bytes / MIB,
            "step, ms": row.outcome.step_ns / NS_PER_MS,
            "waits for copies, ms": row.outcome.exposed_copy_ns / NS_PER_MS,
            "computes again, ms": row.outcome.recompute_ns / NS_PER_MS,
            "other kernels, ms": row.outcome.variants_ns / NS_PER_MS,
            "out, MiB": row.outcome.d2h_bytes / MIB,
            "back, MiB": row.outcome.h2d_bytes / MIB,
            "pinned, MiB": row.outcome.pinned_bytes / MIB,
            "largest batch": comparison.largest_batch(row.outcome),
            "fits": comparison.fits(row.outcome),
        }
        for row in comparison.rows
        if row.outcome is not None
    ],
    "Memory plans",
)
row_shown = comparison.row(policy) if policy else best
if row_shown is not None and row_shown.outcome is not None:
    with st.spinner(view.SIMULATING):
        runs = [
            (name, simulated(choice.content, choice.hardware.name, hash(plan), plan, step))
            for name, plan in {"keep_all": keep_all.plan, row_shown.policy: row_shown.outcome.plan}.items()
        ]
    title = f"{row_shown.policy}: {choice.trace.name} on {choice.hardware.label}"
    view.show(memory_figure(runs, view.theme(), f"Memory over time of {title}"), "plan memory")
    st.caption("Tensors alone; the table counts workspaces and the allocator's rounding, too.")
    look = Look(theme=view.theme(), fold=True)
    plan = row_shown.outcome.plan
    timeline = recorded(choice.content, choice.hardware.name, hash(plan), plan, step)
    ran = step.graph.choosing(plan.variants).trace
    view.show(timeline_figure(timeline, ran, step.hardware, title=f"Timeline of {title}", look=look), "plan")
for reason, policies in comparison.without_plan.items():
    st.text(view.option(f"{', '.join(policies)}: {reason}"))
sizes = [f"{name.replace('_', ' ')} **{format_bytes(size)}**" for name, size in category_bytes(keep_all).items()]
st.markdown(
    "At the peak of the step that keeps all: " + ", ".join(size.replace(" ", "\N{NO-BREAK SPACE}") for size in sizes)
)
if not comparison.workspaces_known:
    st.caption("The trace has no workspaces of ops, so peaks leave them out.")
budget = ["--budget", f"{limit_mib}"] if limit_mib else []
view.command("memory", choice.words, *view.hardware_words(choice), *budget)
