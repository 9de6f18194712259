"""The dashboard's page Accuracy: how wrong steps like this one were."""

from __future__ import annotations

import re

from tests.support.pages import address, answer, kind_of_answer, opened, page, widget


def test_nobody_knows_how_wrong_predictions_for_a_gpu_are_that_nothing_was_measured_on() -> None:
    app = page("accuracy", hw="v100")
    assert kind_of_answer(app) == "trend"
    assert "Nothing was ever measured on Tesla V100" in answer(app)


def test_accuracy_says_how_wrong_steps_like_this_one_were() -> None:
    app = page("accuracy", trace="googlenet-train-b8")
    assert kind_of_answer(app) == "yes"
    assert re.search(r"Of \d+ replayed schedules of steps like this one \(googlenet, training\), half", answer(app))
    assert len(app.get("plotly_chart")) == 1


def test_accuracy_filters_are_in_the_address() -> None:
    app = page("accuracy")
    widget(app.multiselect, "Network").set_value(["googlenet"]).run()
    assert not app.exception
    assert set(app.dataframe[0].value["step"].str.partition("-")[0]) == {"googlenet"}
    widget(app.multiselect, "Policy").set_value(["search"]).run()
    assert set(app.dataframe[0].value["policy"]) == {"search"}
    assert (address(app)["network"], address(app)["policies"]) == ("googlenet", "search")
    assert set(opened(**address(app)).dataframe[0].value["policy"]) == {"search"}
