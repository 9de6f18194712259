"""The dashboard's page of memory plans agrees with the command."""

from __future__ import annotations

import json

import msgspec
import plotly.graph_objects as go
import pytest

from gpusim.formats.hardware import load_hardware
from gpusim.formats.trace import Variant, VariantSettings
from gpusim.report.figures.theme import SYMBOLS
from gpusim.units import format_bytes, format_ns
from tests.support.helpers import kernel
from tests.support.memory_steps import SIZE, chain_step, op_of
from tests.support.pages import (
    answer,
    commanded,
    errors,
    kind_of_answer,
    metrics,
    page,
    widget,
)

TRAINED = "resnet50-train-b8"


def test_page_has_the_fastest_plan_and_the_peak_and_the_words_of_the_command(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One session: plans take seconds, so the budget below every plan is set on the open page."""
    app = page("memory-plans", trace=TRAINED)
    assert not app.exception
    printed = commanded(app, capsys)
    assert metrics(app)["Keeps all"] == format_bytes(printed["peak"]["bytes"])
    assert metrics(app)["GPU memory"] == format_bytes(printed["capacity_bytes"])
    assert metrics(app)["Fastest that fits"] == format_ns(printed["best"]["step_ns"])
    assert kind_of_answer(app) == "yes"
    assert f"reserves {format_bytes(printed['policies'][0]['reserved_bytes'])} of" in answer(app)
    # The plan of a policy, with its copies, beside the step that keeps all.
    widget(app.selectbox, "Plan shown").set_value("vdnn_all").run()
    assert not app.exception
    memory, timeline = [json.loads(each.proto.spec) for each in app.get("plotly_chart")][-2:]
    assert [line["name"] for line in memory["data"]][:2] == ["keep_all", "vdnn_all"]
    assert "offload" in json.dumps(timeline)
    # A budget below every plan gets the command's message.
    widget(app.number_input, "Budget, MiB").set_value(100).run()
    assert not app.exception
    assert "no plan keeps 100 MiB; the smallest budget that works" in errors(app)[0]


def test_plan_with_variants_is_drawn_with_their_kernels() -> None:
    """The variant of b1 launches two kernels, the captured op one."""
    from gpusim_dashboard.shelf import shelf

    trace = chain_step(3, target="aten.convolution.default")
    ops = list(trace.ops)
    index = op_of(trace, "b1")
    variant = Variant(
        name="small",
        settings=VariantSettings(deterministic=True),
        kernels=(kernel(111_111), kernel(222_222)),
        workspace_bytes=0,
    )
    ops[index] = msgspec.structs.replace(ops[index], workspace_bytes=SIZE, variants=(variant,))
    trace = msgspec.structs.replace(trace, ops=tuple(ops))
    content = shelf().put("chain.json", msgspec.json.encode(trace))
    app = page("memory-plans", trace=f"upload-{content[:32]}")
    widget(app.selectbox, "Plan shown").set_value("vdnn_all_m").run()
    assert not app.exception
    assert not errors(app)
    _, timeline = [each.proto.spec for each in app.get("plotly_chart")][-2:]
    assert "k111111" in timeline
    assert "k222222" in timeline


def test_memory_peak_is_that_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    app = page("memory")
    printed = commanded(app, capsys)
    peak = format_bytes(printed["peak_bytes"])
    assert answer(app).startswith(f"Yes. At its peak the step needs {peak}: ")
    assert answer(app).partition(" of the ")[2].startswith(format_bytes(load_hardware("h200").memory.dram_bytes))
    assert f": {peak} at " in " ".join(each.value for each in app.header)


def test_every_shape_of_a_figures_points_is_in_the_legend_as_itself() -> None:
    from gpusim_dashboard.view import SHAPES

    assert set(SYMBOLS) == set(SHAPES)
    assert len(set(SHAPES.values())) == len(SHAPES)


def test_lines_of_one_colour_differ_in_the_legend() -> None:
    from gpusim_dashboard.view import legend_of

    figure = go.Figure(
        [go.Scatter(name=dash, line={"color": "grey", "dash": dash}) for dash in ("solid", "dot", "dash")]
    )
    assert len({tuple(entry[1:]) for entry in legend_of(figure)}) == 3
