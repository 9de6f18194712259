"""The dashboard's first page: one action, and a sample of each kind."""

from __future__ import annotations

import re

import pytest

from gpusim.api import dashboard
from gpusim.defaults import RECOMMENDED
from gpusim.trace.store import bundled_traces, read_manifest
from tests.support.pages import CHAIN, REGISTRY, markup, opened, table


def test_first_page_has_one_action_and_a_sample_of_each_bundled_kind() -> None:
    app = opened()
    assert app.title[0].value == REGISTRY.PAGES["start"].question
    assert len(app.file_uploader) == 1
    kinds = {entry["kind"] for entry in read_manifest()}
    cards = [each.value for each in app.subheader]
    assert len(cards) == len(kinds) == len(set(cards))
    assert not app.metric
    samples = [each for each in app.button if each.key.startswith("sample ")]
    assert {each.key.removeprefix("sample ") for each in samples} == set(bundled_traces())
    assert {row["step"] for row in table(app, "All bundled steps")} == set(bundled_traces())


def test_every_kind_has_a_picture_and_words_for_those_who_do_not_see_it() -> None:
    pictures = re.findall(r'<img[^>]*alt="([^"]+)"[^>]*src="data:image/svg\+xml;base64,', markup(opened()))
    assert len(pictures) == len({entry["kind"] for entry in read_manifest()})


def test_a_kind_that_nobody_has_described_is_offered_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:

    entries = [{**entry, "kind": "new"} for entry in read_manifest()]
    monkeypatch.setattr(dashboard, "manifest", lambda: entries)
    app = opened()
    assert [each.value for each in app.subheader] == ["Other steps"]
    assert {each.key for each in app.button if each.key.startswith("sample ")} == {
        f"sample {entry['name']}" for entry in entries
    }


def test_a_click_on_a_sample_is_a_verdict_on_it() -> None:
    app = opened()
    [button] = [each for each in app.button if each.key == f"sample {CHAIN}"]
    button.click().run()
    # Streamlit's harness does not follow a change of page, so the session state is checked.
    assert app.session_state["trace"] == CHAIN
    assert app.session_state["policy"] == RECOMMENDED
