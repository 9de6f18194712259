"""What the dashboard's pages compute and import: nothing twice, and nothing before the heading."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
from typing import Any

import pytest

from gpusim.engine.batch import BatchEngine
from gpusim.engine.fast import FastEngine
from gpusim.engine.reference import ReferenceEngine
from tests.support.pages import APP, CHAIN, PAGES, address, opened, page, widget


def test_the_dashboard_imports_nothing_of_the_command_line() -> None:
    for path in APP.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith("gpusim.cli") for name in names), path


@pytest.fixture
def simulations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record a line per engine call."""
    calls: list[str] = []
    for kind, method in ((ReferenceEngine, "run"), (FastEngine, "run"), (BatchEngine, "evaluate")):
        original = getattr(kind, method)

        def counted(self: Any, *args: Any, _original: Any = original, _name: str = kind.__name__, **kwargs: Any) -> Any:
            calls.append(_name)
            return _original(self, *args, **kwargs)

        monkeypatch.setattr(kind, method, counted)
    return calls


def test_no_page_simulates_again_what_any_page_has_simulated(simulations: list[str]) -> None:
    """Neither a rerun nor another user simulates again."""
    link = {"trace": CHAIN, "streams": "2", "policy": "round_robin"}
    first = {name: page(name, **link) for name in PAGES}
    assert len(simulations) > len(PAGES)
    simulations.clear()
    for name in PAGES:
        assert not first[name].run().exception
        assert simulations == [], name
        assert not page(name, **link).exception
        assert simulations == [], name


def test_a_slider_back_where_it_was_simulates_nothing(simulations: list[str]) -> None:
    app = page("what-if")
    widget(app.slider, "SMs").set_value(100).run()
    simulations.clear()
    widget(app.slider, "SMs").set_value(132).run()
    widget(app.slider, "SMs").set_value(100).run()
    assert simulations == []
    widget(app.slider, "SMs").set_value(101).run()
    assert simulations


def test_the_first_verdict_is_computed_before_anybody_asks(simulations: list[str]) -> None:
    from gpusim_dashboard.ready import first_page

    first_page()
    simulations.clear()
    app = opened(page="verdict")
    assert not app.exception
    assert address(app)["trace"] == "googlenet-train-b8"
    assert simulations == []


@pytest.mark.parametrize("name", ["limits", "timeline", "what-if"])
def test_the_pages_of_a_sample_are_computed_before_anybody_asks(name: str, simulations: list[str]) -> None:
    """A thread outside any session computes them."""
    from gpusim_dashboard import ready, results
    from gpusim_dashboard.choice import as_begun

    sample = as_begun("squeezenet1_1-infer-b1")
    prepare = {"limits": results.limits_of, "timeline": ready.timeline, "what-if": ready.what_if}
    for ahead in (ready.timeline, prepare[name]):
        thread = threading.Thread(target=ahead, args=(sample,))
        thread.start()
        thread.join()
    simulations.clear()
    app = opened(page=name, trace=sample.name)
    assert not app.exception
    assert simulations == []


def test_navigation_and_heading_do_not_wait_for_the_engine() -> None:
    """The frame that draws them imports no slow module."""
    code = f"import sys; sys.path.insert(0, {str(APP)!r}); import gpusim_dashboard.frame; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=APP.parent, capture_output=True, text=True, check=False)
    assert "'gpusim_dashboard.frame'" in done.stdout, done.stderr
    assert "'numba'" not in done.stdout
    assert "'gpusim.plan" not in done.stdout
