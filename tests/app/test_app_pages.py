"""Every page of the dashboard in Streamlit's test harness: question, controls, default schedule, uncalibrated GPUs."""

from __future__ import annotations

import pytest
from streamlit.testing.v1 import AppTest

from gpusim.formats.hardware import load_hardware
from gpusim.units import format_bytes, format_ns
from tests.support.pages import (
    APP,
    BRANCHES,
    OF_A_STEP,
    PAGES,
    REGISTRY,
    address,
    answer,
    commanded,
    errors,
    kind_of_answer,
    markup,
    metrics,
    page,
    table,
    time_ns,
    widget,
)


@pytest.mark.parametrize("name", PAGES)
def test_page_opens_without_errors_under_its_question(name: str) -> None:
    app = page(name)
    assert not app.exception
    assert [error.value for error in app.error] == []
    assert app.title[0].value == REGISTRY.PAGES[name].question
    assert address(app)["page"] == name


def drawn(app: AppTest, kind: str) -> int:
    """Return the number of figures or tables on a page."""
    return len(app.dataframe if kind == "dataframe" else app.get(kind))


@pytest.mark.parametrize(
    ("name", "box", "kind"),
    [
        ("memory", "time against memory", "plotly_chart"),
        ("search", "time against memory", "plotly_chart"),
        ("limits", "by phase", "dataframe"),
        ("limits", "ops at once", "plotly_chart"),
        ("parallel", "layer by layer", "dataframe"),
    ],
)
def test_what_is_folded_is_drawn_once_it_is_opened(name: str, box: str, kind: str) -> None:
    app = page(name)
    before = drawn(app, kind)
    app.session_state[box] = True
    app.run()
    assert drawn(app, kind) == before + 1
    assert errors(app) == []


def test_every_page_is_a_file_in_the_folder_that_the_wheel_packs() -> None:
    files = {entry.file.name for entry in REGISTRY.PAGES.values()}
    assert files == {path.name for path in (APP / "views").glob("*.py")}


def test_links_to_pages_under_their_old_names_open() -> None:
    for old, new in REGISTRY.OLD_NAMES.items():
        app = page(old)
        assert errors(app) == []
        assert address(app)["page"] == new


def test_sidebar_has_what_a_page_takes_and_nothing_else() -> None:
    """Each control appears once: a page's own choice is not in the sidebar as well."""
    labels = {
        REGISTRY.STEP: "Step",
        REGISTRY.HARDWARE: "GPU",
        REGISTRY.SCHEDULE: "Schedule",
        REGISTRY.STREAMS: "Streams, at most",
    }
    for name, entry in REGISTRY.PAGES.items():
        sidebar = page(name).sidebar
        shown = {each.label for each in (*sidebar.selectbox, *sidebar.slider)}
        assert shown == {labels[control] for control in entry.controls}, name


@pytest.mark.parametrize("name", ["timeline", "memory", "what-if", "limits"])
def test_every_page_begins_with_the_recommended_schedule(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Compared by the number that each page shows: time or peak memory."""
    best = commanded(page("verdict", trace=BRANCHES), capsys)["best"]
    app = page(name, trace=BRANCHES)
    assert address(app)["policy"] == "recommended"
    label = f"{best['policy']}, {best['streams']} streams"
    if name == "timeline":
        assert f"add up to {format_ns(best['makespan_ns'])}." in " ".join(each.value for each in app.caption)
    elif name == "memory":
        assert format_bytes(best["peak_bytes"]) in " ".join(each.value for each in (*app.header, *app.subheader))
    elif name == "what-if":
        row = table(app, "The step as it is and with the settings below")[0]
        assert time_ns(row, "step") == pytest.approx(best["makespan_ns"], rel=1e-3)
        assert row["setting"] == f"as it is {label}"
    else:
        assert metrics(app)["Recommended"] == format_ns(best["makespan_ns"])
        assert widget(app.metric, "Recommended").delta == label


@pytest.mark.parametrize("name", [name for name in OF_A_STEP if name not in ("accuracy", "transfer")])
def test_uncalibrated_hardware_is_marked_on_every_page_that_uses_it(name: str) -> None:
    model = load_hardware("v100")
    assert not model.calibrated
    app = page(name, hw="v100")
    assert not app.exception
    if name == "verdict":
        assert kind_of_answer(app) == "trend"
        assert "No verdict" in answer(app)
    else:
        assert any("is uncalibrated" in each.value for each in app.warning)
    assert f"on <strong>{model.label}</strong>" in markup(app)
