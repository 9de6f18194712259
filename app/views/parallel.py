"""Several GPUs: how each layer would be split, the gain over data parallelism, and the assumptions."""

import streamlit as st
from gpusim_dashboard import html, results, view
from gpusim_dashboard.address import Settings
from gpusim_dashboard.cache import cached
from gpusim_dashboard.charts import numbers_of
from gpusim_dashboard.choice import Choice, current
from gpusim_dashboard.html import Head

import gpusim
from gpusim.api.dashboard import bundled_topologies
from gpusim.errors import GpusimError
from gpusim.io.files import encode_json
from gpusim.report.parallel_table import (
    COMMUNICATION,
    PARTS,
    explanation,
    layer_groups,
    plan_parts_ns,
    search_line,
)
from gpusim.units import NS_PER_MS, counted, format_bytes, format_ns, format_times_ns

GPUS = (2, 4, 8, 16, 32, 64)
OWN = "of this GPU"
#: Smaller gains count as none.
SAME = 1.005
#: Groups of layers shown at first.
MOST_GROUPS = 12
#: Descriptions of the plans.
PLANS = {
    "data": "every GPU has all layers and its part of the samples",
    "model": "every layer is split by channels",
    "owt": "fully connected layers by channels, others by samples",
    "layer": "each layer its own way, as searched",
}
#: Colours of `PARTS`, readable on both backgrounds.
COLOURS = ("light-dark(#0072B2, #56B4E9)", "#D55E00", "#E69F00", "#CC79A7", "#7A7A7A")


@cached
def _plans(content: str, hardware: str, gpus: int, topology: str, _choice: Choice) -> gpusim.Parallel:
    links = None if topology == OWN else topology
    return gpusim.parallel(results.step_of(_choice), gpus=gpus, topology=links)


choice = current()
view.heading(choice)
if not choice.trace.tensors:
    view.unanswered("It has kernels and no tensors, so it does not say what each layer would send. Capture the step.")
cells = st.columns(2)
settings = Settings("parallel", choice.content, choice.hardware.name)
gpus = settings.select(cells[0], "GPUs", "gpus", GPUS, GPUS[1], help="The step's batch is that of one of them.")
topology = settings.select(
    cells[1], "Topology", "links", [OWN, *bundled_topologies()], OWN, help="GPUs of a node, and links."
)
settings.finish()
try:
    with st.spinner("Searching plans and simulating them ..."):
        explored = _plans(choice.content, choice.hardware.name, gpus, topology, choice)
except GpusimError as error:
    st.error(view.plain(str(error)))
    st.stop()
best, data = explored.best, explored.plan("data")
gain = data.step_ns / best.step_ns
words = "Data parallelism is as fast." if gain < SAME else f"That is {gain:.2f}x over data parallelism."
html.answer(
    "no",
    f"On {counted(explored.gpus, 'GPU')} a step takes {format_ns(best.step_ns)}, for {explored.gpus} times the "
    f"samples: {explored.gpus * data.compute_ns / best.step_ns:.2f}x the work of one GPU.",
    f"{words} Each GPU runs its kernels on one stream.",
)
st.caption(
    f"Computation: {explored.problem.times.basis}. Communication ({view.plain(explored.problem.topology.name)}): "
    f"{COMMUNICATION[explored.communication]}."
)
for note in explored.notes:
    st.caption(view.plain(note))

st.header("Where a step's time goes", anchor=False)
html.show(html.legend(zip(PARTS, COLOURS, strict=True)))
longest = max(plan.step_ns for plan in explored.plans)
numbers, unit = numbers_of(format_times_ns(plan.step_ns for plan in explored.plans))
cells = []
for plan, number in zip(explored.plans, numbers, strict=True):
    parts = [time_ns / longest for time_ns in plan_parts_ns(plan).values()]
    about = html.small(PLANS.get(plan.name, "")) + html.stack(zip(parts, COLOURS, strict=True))
    cells.append(
        (
            (
                f"{html.text(plan.name)}{about}",
                number,
                f"{data.step_ns / plan.step_ns:.2f}x",
                format_bytes(plan.bytes),
                format_bytes(plan.memory_bytes),
            ),
            plan is best,
        )
    )
heads = (
    Head("plan"),
    Head(f"step, {unit}", True),
    Head("over data", True),
    Head("moved", True),
    Head("memory of a GPU", True),
)
html.table("Plans", heads, cells)
with st.expander("The sums behind it"):
    view.table(
        [
            {
                "plan": plan.name,
                "sum of costs, ms": plan.additive_ns / NS_PER_MS,
                "computation, ms": plan.compute_ns / NS_PER_MS,
                "transfers, ms": plan.transfer_ns / NS_PER_MS,
                "sums, ms": plan.sync_ns / NS_PER_MS,
            }
            for plan in explored.plans
        ],
        "Sums of costs",
    )
    for line in (*explanation(best), search_line(explored)):
        st.caption(line)
st.header("How the layers are split", anchor=False)
rows = []
for group in layer_groups(explored):
    first, last = group[0], group[-1]
    name = html.text(first.name if len(group) == 1 else f"{first.name} to {last.name}")
    used = first.config.computing(explored.gpus)
    rows.append(((name, f"{len(group)}", html.text(str(first.config)), f"{used}"), False))
split = (Head("layers"), Head("number", True), Head("split"), Head("GPUs", True))
html.table("How the layers are split", split, rows[:MOST_GROUPS])
if rows[MOST_GROUPS:]:
    st.caption(f"{len(rows) - MOST_GROUPS} more groups of layers are in the table below.")
st.caption("n: samples, c: channels, h: height, w: width; numbers of parts.")
if box := view.folded("Layer by layer", "layer by layer"):
    with box:
        view.table(
            [
                {
                    "layer": row.name,
                    "kind": row.kind,
                    "split": str(row.config),
                    "GPUs": row.config.computing(explored.gpus),
                    "computation, ms": row.cost.compute_ns / NS_PER_MS,
                    "transfers, ms": row.transfer_ns / NS_PER_MS,
                    "sums, ms": (row.cost.sync_ns + row.cost.statistics_ns) / NS_PER_MS,
                    "may be off by": f"{row.cost.error:.0%}",
                }
                for row in explored.rows()
            ],
            "Layers of the best plan",
        )
name = view.file_name(explored.name, f"{explored.gpus}gpus.plan.json")
view.download(st, "Plan (JSON)", lambda: encode_json(explored.document()), name, "application/json")
links = [] if topology == OWN else ["--topology", topology]
view.command("parallel", choice.words, *view.hardware_words(choice), "--gpus", str(gpus), *links, "--html", "plan.html")
