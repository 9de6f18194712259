"""Fidelity: predicted against measured, for every replay that was kept."""

from typing import Any

import msgspec
import streamlit as st
from gpusim_dashboard import results, view

from gpusim.hardware.model import hardware_for_gpu
from gpusim.report.fidelity import fidelity
from gpusim.report.figures.comparisons import measured_figure
from gpusim.text import message
from gpusim.units import NS_PER_US

st.markdown("Schedules replayed on real GPUs: the time predicted beforehand, and the time measured.")
files = results.results_files()
if not files:
    st.info("This installation has no results: they are in `validate/results` of the repository.")
    st.stop()
cells = st.columns(4)


def pick(cell: Any, label: str, values: set[str]) -> list[str]:
    """A filter; nothing picked is everything."""
    picked: list[str] = cell.multiselect(label, sorted(values), placeholder="all")
    return picked or sorted(values)


sources = pick(cells[0], "Results", set(files))
chosen = [files[name] for name in sources]
gpus = pick(cells[1], "GPU", {each.gpu for each in chosen})
networks = pick(cells[2], "Network", {case.network for each in chosen for case in each.cases})
policies = pick(cells[3], "Policy", {case.policy for each in chosen for case in each.cases})
shown = [
    msgspec.structs.replace(
        each, cases=tuple(case for case in each.cases if case.network in networks and case.policy in policies)
    )
    for each in chosen
    if each.gpu in gpus
]
cases = [case for each in shown for case in each.cases]
if not cases:
    st.info("No replay matches all of these filters.")
    st.stop()
for gpu in sorted({each.gpu for each in shown}):
    model = hardware_for_gpu(gpu)
    if model is not None:
        view.uncalibrated(model)
found = fidelity(cases)
cells = st.columns(5)
if found is None:
    st.caption("Sequential graphs only: no errors of concurrent schedules to sum up.")
else:
    cells[0].metric("Concurrent schedules", f"{found.schedules}")
    cells[1].metric("Median error", f"{found.median:.1%}")
    cells[2].metric("90 % within", f"{found.p90:.1%}")
    cells[3].metric("Largest", f"{found.largest:.1%}")
    cells[4].metric("Bias", f"{found.bias:+.1%}")
view.show(measured_figure(shown, view.theme()), "measured")
view.table(
    [
        {
            "step": case.trace,
            "policy": case.policy,
            "streams": case.streams,
            "predicted, us": case.predicted_ns / NS_PER_US,
            "measured, us": case.measured_ns / NS_PER_US,
            "error, %": 100 * case.error,
            "predicted, x": case.predicted_speedup,
            "measured, x": case.speedup,
            "outputs": "equal" if case.outputs_equal else "DIFFERENT",
            "GPU": each.gpu,
        }
        for each in shown
        for case in each.cases
    ]
)
with st.expander("Where each result comes from"):
    for each in shown:
        st.caption(view.plain(message(f"{each.gpu}, {each.date}, model {each.hardware}: {each.command}")))
view.command("figure", "fidelity", "--html", "fidelity.html")
