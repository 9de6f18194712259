"""The dashboard's page Search: a search runs, stops and is shown by other pages."""

from __future__ import annotations

import pytest

from tests.support.pages import SMALL, TIMEOUT_S, address, codes, errors, finished, page, unopened, widget


def test_search_runs_what_it_is_asked_to_and_keeps_it_for_the_verdict() -> None:
    app = page("search", policies="wavefront", schedules="64")
    assert widget(app.multiselect, "Policies").value == ["wavefront"]
    widget(app.button, "Start").click().run()
    app = finished(app)
    assert not app.exception
    result = app.session_state["job"].result
    assert {row.policy for row in result.rows} == {"sequential", "wavefront", "search"}
    assert "--evaluations 64" in codes(app)[-1]
    assert "left out here" in " ".join(caption.value for caption in app.caption)
    assert list(app.session_state["explorations"].values()) == [result]


def test_search_that_ends_while_another_page_is_open_is_what_that_page_shows() -> None:
    searched = page("search", policies="wavefront", schedules="64")
    widget(searched.button, "Start").click().run()
    job = searched.session_state["job"]
    job.wait(TIMEOUT_S)
    app = unopened(page="timeline", trace=SMALL, streams="3")
    for key in ("job", "job_key", "job_words"):
        app.session_state[key] = searched.session_state[key]
    app.run()
    assert not app.exception
    assert list(app.session_state["explorations"].values()) == [job.result]


def test_search_stops_when_told_to() -> None:
    app = page("search", seconds="300")
    widget(app.button, "Start").click().run()
    widget(app.button, "Stop").click().run()
    app = finished(app)
    assert not app.exception
    assert app.session_state["job"].stopped


def test_search_tries_partitions_and_says_what_they_gain() -> None:
    app = page("search", policies="wavefront", schedules="64")
    widget(app.text_input, "Partitions of the SMs").set_value(" 64+68 ").run()
    widget(app.button, "Start").click().run()
    app = finished(app)
    assert not app.exception
    assert "with partitions" in {row.policy for row in app.session_state["job"].result.rows}
    assert any(each.value.startswith("Partitions: ") for each in app.markdown)
    assert "--partitions 64+68" in codes(app)[-1]
    assert address(app)["partitions"] == "64+68"


@pytest.mark.parametrize("asked", ["64", "64+69", "64+68+", "8+8+8+108", "![x](y)"])
def test_partitions_that_the_gpu_cannot_have_are_a_message(asked: str) -> None:
    app = page("search")
    widget(app.text_input, "Partitions of the SMs").set_value(asked).run()
    assert not app.exception
    if asked == "64":  # one partition that leaves no SMs is not a split, but legal
        return
    assert [asked in error for error in errors(app)] == [True]
    assert widget(app.button, "Start").disabled


@pytest.mark.parametrize("name", ["search", "limits"])
def test_a_click_on_a_download_does_not_run_the_page_again(name: str) -> None:
    """Otherwise the file of the previous run would be gone before the browser requests it."""
    buttons = page(name).get("download_button")
    assert buttons
    assert all(button.proto.ignore_rerun for button in buttons)


def test_searched_schedule_is_shown_by_every_page_of_one_schedule() -> None:
    for name in ("timeline", "what-if", "memory"):
        app = page(name, policy="search")
        assert not app.exception
        assert not app.error
