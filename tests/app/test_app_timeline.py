"""The dashboard's page Timeline: delays, ops by name, one zoom."""

from __future__ import annotations

import json
import sys

import pytest

from gpusim.trace.store import load_trace
from gpusim.units import format_ns
from tests.support.pages import BRANCHES, address, commanded, errors, markup, opened, page, plain, widget


def test_timeline_adds_up_to_what_simulate_prints(capsys: pytest.CaptureFixture[str]) -> None:
    app = page("timeline", policy="wavefront")
    printed = commanded(app, capsys)
    assert f"add up to {format_ns(printed['makespan_ns'])}." in " ".join(caption.value for caption in app.caption)


def test_the_worst_delay_is_explained_without_a_click(capsys: pytest.CaptureFixture[str]) -> None:
    """The delay is the first one that `gpusim explain` lists."""
    app = page("timeline", trace=BRANCHES, policy="critical_path", streams="4")
    words = ["explain", BRANCHES, "--policy", "critical_path", "--streams", "4", "--json"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gpusim", *words])
        gpusim_main()
    worst = json.loads(capsys.readouterr().out)["delays"][0]
    assert f"Worst delay: {worst['layer']} " in plain(markup(app))
    assert f"lost {format_ns(worst['lost_ns'])}" in plain(markup(app))
    assert any(f"`{worst['op']}` of `{worst['layer']}` started at" in each.value for each in app.markdown)


def gpusim_main() -> None:
    from gpusim.cli import main

    main()


def test_an_op_is_found_by_name_and_the_timeline_goes_there() -> None:
    app = page("timeline", trace=BRANCHES)
    assert "window" not in address(app)
    op = next(op for op in load_trace(BRANCHES).ops if op.layer.startswith("inception4c"))
    box = widget(app.selectbox, "Find an op")
    assert any(op.layer in words and op.name in words for words in box.options)
    box.select(op.name).run()
    assert not app.exception
    assert address(app)["op"] == op.name
    assert any(f"`{op.name}` of `{op.layer}` started at" in each.value for each in app.markdown)
    begin, end = map(float, address(app)["window"].split("-"))
    assert 0 <= begin < end
    again = opened(**address(app))
    assert address(again) == address(app)
    widget(app.button, "All").click().run()
    assert "window" not in address(app)
    widget(app.button, "Closer").click().run()
    assert "window" in address(app)


def test_one_zoom_moves_lanes_and_tracks_together() -> None:
    app = page("timeline", trace="googlenet-train-b8", window="20-60")
    [figure] = [json.loads(each.proto.spec) for each in app.get("plotly_chart")]
    ranges = [axis["range"] for name, axis in figure["layout"].items() if name.startswith("xaxis")]
    assert ranges == [[20, 60]] * 4
    assert {axis["fixedrange"] for name, axis in figure["layout"].items() if name.startswith("yaxis")} == {True}
    widget(app.button, "Later").click().run()
    assert address(app)["window"] == "40-80"


@pytest.mark.parametrize("window", ["60-20", "a-b", "20", "0-999999999", "-5-20", "nan-20"])
def test_a_window_that_is_no_stretch_of_the_step_is_a_message(window: str) -> None:
    app = page("timeline", window=window)
    assert not app.exception
    assert ["a stretch of the step such as 0-" in error for error in errors(app)] == [True]
    assert "window" not in address(app)
