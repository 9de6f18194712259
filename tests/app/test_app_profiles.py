"""Profiles of other tools in the dashboard: uploaded unchanged, answered at once with their dependency quality."""

from __future__ import annotations

from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from tests.support.importer_files import SAMPLES, node, write_execution_trace
from tests.support.nsys_files import SCHEMAS, write_schema
from tests.support.pages import address, answer, codes, errors, markup, opened, table


def uploaded(name: str, data: bytes) -> AppTest:
    app = opened()
    (uploader,) = app.file_uploader
    return uploader.upload(name, data, "application/octet-stream").run()


def shown(app: AppTest) -> str:
    """Return all text of the page."""
    return "\n".join(
        str(part.value) for part in [*app.markdown, *app.get("html"), *app.caption] if hasattr(part, "value")
    )


@pytest.mark.parametrize(
    ("name", "quality"),
    [
        ("hta__triton_example__triton_example.json.gz", "stream"),
        ("tl__traces__inference__vllm_decode_full__graph_execution.json.gz", "stream"),
        ("hta__critical_path__cuda_event_sync_multi_stream__event_sync_trace.json.gz", "event"),
        ("nsysai__healthy_1pct.sqlite", "stream"),
    ],
)
def test_first_page_of_an_uploaded_profile_answers_and_says_its_dependency_quality(name: str, quality: str) -> None:
    app = uploaded(name, (SAMPLES / name).read_bytes())
    assert not app.exception
    assert errors(app) == []
    assert address(app)["trace"].startswith("upload-")
    text = shown(app)
    assert (
        f"quality '{quality}'" in text
        or f"quality &#x27;{quality}&#x27;" in text
        or f"quality &#39;{quality}&#39;" in text
    )
    assert "execution trace" in text


def test_profile_of_several_streams_without_waits_says_assumed(tmp_path: Path) -> None:
    data = write_schema(tmp_path / "n.sqlite", SCHEMAS["trimmed"]).read_bytes()
    assert "assumed" in shown(uploaded("any name", data))


def test_file_without_a_step_is_one_line_in_the_place_of_the_answer(tmp_path: Path) -> None:
    path = write_execution_trace(tmp_path / "e.json", [node(1, "aten::mm", [0], [1])])
    app = uploaded("e.json", path.read_bytes())
    assert not app.exception
    (error,) = errors(app)
    assert "e.json: is an execution trace of PyTorch" in error
    assert "\n" not in error


def test_pages_that_a_profile_cannot_answer_say_so_and_lead_to_what_it_can(tmp_path: Path) -> None:
    """Neither network, batch nor memory are made up for it, and no command that does not give what is shown."""
    data = write_schema(tmp_path / "n.sqlite", SCHEMAS["trimmed"]).read_bytes()
    link = address(uploaded("any name", data))
    for name in ("memory", "memory-plans", "parallel", "transfer", "search"):
        app = opened(**{**link, "page": name})
        assert not app.exception, name
        assert errors(app) == [], name
        assert answer(app).startswith("This profile does not say. "), name
        assert "a profile of" in markup(app), name
        assert "batch" not in markup(app), name
    for name in ("timeline", "compare"):
        app = opened(**{**link, "page": name})
        assert errors(app) == [], name
        assert not any("best.json" in code for code in codes(app)), name
    assert [row["peak memory"] for row in table(app, "The two sides")] == ["unknown", "unknown"]
