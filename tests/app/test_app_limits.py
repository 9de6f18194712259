"""The dashboard's page Limits ends in a sentence and agrees with the command."""

from __future__ import annotations

import re

import pytest

from gpusim.units import format_ns
from tests.support.pages import answer, commanded, metrics, page, table, time_ns


def test_limits_end_in_a_sentence_and_are_those_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    app = page("limits")
    step = commanded(app, capsys)["scopes"][-1]
    assert metrics(app)["Best list schedule"] == format_ns(step["best"]["makespan_ns"])
    assert metrics(app)["Ops at once, most"] == str(step["parallelism"]["max"])
    assert re.match(r"\d+% of what there is to win is won; \d+% is lost to dependencies", answer(app))
    rows = table(app, "Where the potential goes")
    losses = {row["part"].removeprefix("+ "): row for row in rows}
    for loss in step["losses"]:
        assert time_ns(losses[loss["limit"]], "time") == pytest.approx(loss["loss_ns"], abs=600)
