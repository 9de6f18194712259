"""Start: a description of gpusim, one action, and a sample of each kind of step."""

import streamlit as st
from gpusim_dashboard import choice, html, kinds, shelf, uploads, view
from gpusim_dashboard.charts import numbers_of
from gpusim_dashboard.html import Head
from gpusim_dashboard.kinds import KINDS, OTHER

from gpusim.io.file_limits import MAX_UPLOAD_BYTES
from gpusim.report.code_lines import CAPTURE
from gpusim.units import MIB, format_times_ns

UPLOADER = "upload"
#: Cards in a row.
ACROSS = 4
pages = st.session_state.pages
st.markdown(
    "gpusim predicts one PyTorch step on a GPU: what you would gain by running independent operations at the same "
    "time, why not more, and what to change in your code. It needs no GPU here."
)


def take(data: bytes, file: str) -> None:
    """Select an uploaded step, if it can be read."""
    choice.take_upload(data, file)
    st.session_state.just_uploaded = True


with st.container(border=True):
    st.header("Analyse my step", anchor=False)
    left, right = st.columns(2, gap="large")
    with left:
        file = st.file_uploader(
            "A trace of gpusim, a profile of torch.profiler (Kineto) or Nsight Systems (.sqlite), a Chakra trace",
            key=UPLOADER,
            help=f"Up to {MAX_UPLOAD_BYTES // MIB} MiB, under any file name: its content counts. Nothing in it is "
            f"executed. {shelf.BOUNDS}, in memory: a reload finds yours again, and so does anybody with its address.",
        )
        with st.spinner("Reading the file ..."):
            uploads.take(file, UPLOADER, take)
        if st.session_state.pop("just_uploaded", False):
            st.switch_page(pages["verdict"])
    with right:
        st.markdown("**or capture one** on your GPU, with your model, data and optimizer:")
        html.code("Capture a step", CAPTURE, python=True)
if wrong := uploads.error(UPLOADER):
    st.error(view.plain(wrong), icon=":material/error:")
    st.markdown(
        "No answer is shown for this file. Upload another one, capture the step with the lines above, or begin with a "
        "sample."
    )

st.header("Or begin with a sample", anchor=False)


def card(cell: st.delta_generator.DeltaGenerator, kind: str, entries: list[dict[str, object]]) -> None:
    """Draw one kind of step: picture, sentence, a button for its first sample, and the others."""
    about = KINDS.get(kind, OTHER)
    with cell.container(border=True, height="stretch"):
        html.show(html.picture(kinds.picture(about), f"Sketch: {about.title}"))
        st.subheader(about.title, anchor=False)
        st.markdown(about.sentence)
        open_button(entries[0])
        if entries[1:]:
            with st.popover(f"{len(entries) - 1} more", width="stretch"):
                for entry in entries[1:]:
                    open_button(entry)


def open_button(entry: dict[str, object]) -> None:
    """Draw a button that opens the verdict on a sample."""
    if st.button(kinds.label(entry), key=f"sample {entry['name']}", width="stretch"):
        choice.look_at(str(entry["name"]))
        st.switch_page(pages["verdict"])


by_kind = list(kinds.samples().items())
for begin in range(0, len(by_kind), ACROSS):
    for cell, (kind, entries) in zip(st.columns(ACROSS), by_kind[begin : begin + ACROSS], strict=False):
        card(cell, kind, entries)

with st.expander("All bundled steps"):
    entries = [entry for _, group in by_kind for entry in group]
    numbers, unit = numbers_of(format_times_ns(e[name] for e in entries for name in ("eager_ns", "graph_ns")))
    heads = (
        Head("step"),
        Head("kind"),
        Head("GPU"),
        Head("kernels", True),
        Head(f"eager, {unit}", True),
        Head(f"one CUDA graph, {unit}", True),
    )
    rows = [
        (
            (
                html.text(entry["name"]),
                html.text(KINDS.get(entry["kind"], OTHER).title),
                html.text(entry["gpu"]),
                f"{entry['kernels']:,}",
                numbers[2 * place],
                numbers[2 * place + 1],
            ),
            False,
        )
        for place, entry in enumerate(entries)
    ]
    html.table("All bundled steps", heads, rows)
