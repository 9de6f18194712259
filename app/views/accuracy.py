"""Accuracy: errors of predictions for steps like this one, and all replays behind them."""

from typing import Any

import msgspec
import streamlit as st
from gpusim_dashboard import html, results, view
from gpusim_dashboard.address import Settings
from gpusim_dashboard.choice import current

from gpusim.api import dashboard
from gpusim.report.advice import OPTIMIZE
from gpusim.report.figures.accuracy import accuracy_figure
from gpusim.text import message
from gpusim.units import NS_PER_MS

#: Recipe of most networks that are not image networks.
OTHER_KINDS = "kinds"
choice = current()
view.heading(choice)
settings = Settings("accuracy")
files = results.results_files()
if not files:
    st.info("This installation has no results: they are in `validate/results` of the repository.")
    st.stop()
model = choice.trace.model
mode = "training" if model.mode == "train" else "inference"
replayed = [case for each in files.values() if each.gpu == choice.hardware.gpu for case in each.cases]
everything = dashboard.counted_replays(replayed)
optimized = [case for case in everything if case.policy == OPTIMIZE and case.ablation is None]
everything = [case for case in everything if case.policy != OPTIMIZE]
# Networks without convolutions are predicted worse; others would make them look better.
other_kinds = {case.network for each in files.values() if each.recipe == OTHER_KINDS for case in each.cases}
if any("convolution" in op.target for op in choice.trace.ops):
    kind = f"{mode}, {model.dtype}"
    alike = [case for case in everything if (case.mode, case.dtype) == (model.mode, model.dtype)]
else:
    kind = f"{mode}, other kinds"
    alike = [case for case in everything if case.mode == model.mode and case.network in other_kinds]
own = [case for case in everything if (case.mode, case.network) == (model.mode, model.network)]
groups = [
    (f"{view.option(model.network)}, {mode}", own),
    (kind, alike),
    ("all replays", everything),
    ("gpusim.optimize", optimized),
]
groups = [(name, cases) for name, cases in groups if cases]
if not everything:
    html.answer(
        "trend",
        f"Nothing was ever measured on {view.option(choice.hardware.gpu)}.",
        "Predictions for it are a trend: nobody knows how wrong they are.",
    )
elif choice.trace.provenance.estimated:
    html.answer(
        "trend",
        "No replay says: the kernel times of this step are estimated.",
        "Below are errors of captured steps, whose kernels were timed. Capture this one to compare it with them.",
    )
    view.show(accuracy_figure(groups, view.theme()), "accuracy")
else:
    name, cases = groups[0]
    accuracy = dashboard.fidelity(cases)
    assert accuracy is not None
    html.answer(
        "yes",
        f"Of {accuracy.schedules:,} replayed schedules of steps like this one ({name}), half were predicted within "
        f"{accuracy.median:.1%} and nine of ten within {accuracy.p90:.1%}.",
        f"The worst was {accuracy.largest:.1%} off; on average predictions are {abs(accuracy.bias):.1%} too "
        f"{'long' if accuracy.bias > 0 else 'short'}.",
    )
    view.show(accuracy_figure(groups, view.theme()), "accuracy")


def pick(cell: Any, label: str, name: str, values: set[str]) -> list[str]:
    """A filter; an empty selection keeps everything."""
    picked = settings.choose_several(cell, label, name, sorted(values), placeholder="all")
    return picked or sorted(values)


st.header("Every replay", anchor=False)
cells = st.columns(4)
sources = pick(cells[0], "Results", "results", set(files))
chosen = [files[name] for name in sources]
gpus = pick(cells[1], "GPU", "gpu", {each.gpu for each in chosen})
networks = pick(cells[2], "Network", "network", {case.network for each in chosen for case in each.cases})
policies = pick(cells[3], "Policy", "policies", {case.policy for each in chosen for case in each.cases})
settings.finish()
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
    other = dashboard.gpu_model(gpu)
    if other is not None and other.name != choice.hardware.name:
        view.uncalibrated(other)
accuracy = dashboard.fidelity(cases)
if accuracy is None:
    st.caption("Sequential graphs only: no errors of concurrent schedules to sum up.")
else:
    view.metrics(
        ("Concurrent schedules", f"{accuracy.schedules:,}", ""),
        ("Median error", f"{accuracy.median:.1%}", ""),
        ("90 % within", f"{accuracy.p90:.1%}", ""),
        ("Largest", f"{accuracy.largest:.1%}", ""),
        ("Bias", f"{accuracy.bias:+.1%}", ""),
    )
view.table(
    [
        {
            "step": case.trace,
            "policy": case.way,
            "streams": case.streams,
            "predicted, ms": case.predicted_ns / NS_PER_MS,
            "measured, ms": case.measured_ns / NS_PER_MS,
            "error, %": 100 * case.error,
            "predicted, x": case.predicted_speedup,
            "measured, x": case.speedup,
            "outputs": "equal" if case.outputs_equal else "DIFFERENT",
            "GPU": each.gpu,
        }
        for each in shown
        for case in each.cases
    ],
    "Every replayed schedule, predicted and measured",
)
with st.expander("Where each result comes from"):
    for each in shown:
        st.caption(view.plain(message(f"{each.gpu}, {each.date}, model {each.hardware}: {each.command}")))
view.command("figure", "fidelity", "--html", "fidelity.html")
