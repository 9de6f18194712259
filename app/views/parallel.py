"""Several GPUs: how each layer would be split, what that gains over data parallelism, and what it rests on."""

import streamlit as st
from gpusim_dashboard import results, view
from gpusim_dashboard.address import Settings
from gpusim_dashboard.cache import cached
from gpusim_dashboard.choice import Choice, current

import gpusim
from gpusim.api.dashboard import bundled_topologies
from gpusim.errors import GpusimError
from gpusim.io.files import encode_json
from gpusim.report.figures.parallel import parallel_figure
from gpusim.report.parallel_table import COMMUNICATION, explanation, search_line
from gpusim.units import NS_PER_MS, counted, format_bytes, format_ns

GPUS = (2, 4, 8, 16, 32, 64)
OWN = "of this GPU"


@cached
def _plans(content: str, hardware: str, gpus: int, topology: str, _choice: Choice) -> gpusim.Parallel:
    links = None if topology == OWN else topology
    return gpusim.parallel(results.step_of(_choice), gpus=gpus, topology=links)


choice = current()
view.heading(choice)
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
words = "the same as data parallelism" if gain < 1.005 else f"{gain:.2f}x over data parallelism"
st.markdown(
    f"**{format_ns(best.step_ns)} a step on {counted(explored.gpus, 'GPU')}: {words}.** {search_line(explored)}"
)
st.caption(
    f"Computation: {explored.problem.times.basis}. Communication ({view.plain(explored.problem.topology.name)}): "
    f"{COMMUNICATION[explored.communication]}."
)
for note in explored.notes:
    st.caption(view.plain(note))
view.show(parallel_figure(explored, view.theme()), "parallel")
view.table(
    [
        {
            "plan": plan.name,
            "step, ms": plan.step_ns / NS_PER_MS,
            "over data, x": data.step_ns / plan.step_ns,
            "sum of costs, ms": plan.additive_ns / NS_PER_MS,
            "computation, ms": plan.compute_ns / NS_PER_MS,
            "transfers, ms": plan.transfer_ns / NS_PER_MS,
            "sums, ms": plan.sync_ns / NS_PER_MS,
            "moved": format_bytes(plan.bytes),
            "memory of a GPU": format_bytes(plan.memory_bytes),
        }
        for plan in explored.plans
    ],
    "Plans",
)
for line in explanation(best):
    st.caption(line)
with st.expander("Layer by layer"):
    view.table(
        [
            {
                "layer": row.name,
                "kind": row.kind,
                "split": str(row.config),
                "GPUs": explored.gpus if row.config.replicated else row.config.parts,
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
