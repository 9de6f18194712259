"""Pages of the dashboard under test: opened at an address, and read."""

from __future__ import annotations

import html
import importlib.util
import json
import re
import shlex
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from streamlit.testing.v1 import AppTest

from gpusim.cli import main

APP = Path(__file__).parents[2] / "app"


def _registry() -> Any:
    """Load `gpusim_dashboard.pages`, which needs the dashboard's folder on the path."""
    spec = importlib.util.spec_from_file_location("dashboard_pages", APP / "gpusim_dashboard" / "pages.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


REGISTRY = _registry()
PAGES = tuple(REGISTRY.PAGES)
#: Pages about a step.
OF_A_STEP = tuple(name for name, entry in REGISTRY.PAGES.items() if entry.controls)
SMALL = "squeezenet1_1-infer-b1"
#: Steps with branches and without.
BRANCHES, CHAIN = "googlenet-infer-b1", "vgg16-infer-b1"
#: Name of the verdict's table.
WAYS = "Ways to run the step"
TIMEOUT_S = 120


def unopened(**link: str) -> AppTest:
    """Make a new session at an address, before its first run."""
    app = AppTest.from_file(str(APP / "Home.py"), default_timeout=TIMEOUT_S)
    for key, value in link.items():
        app.query_params[key] = value
    return app


def opened(**link: str) -> AppTest:
    """Open a new session at an address."""
    return unopened(**link).run()


def page(name: str, **link: str) -> AppTest:
    return opened(page=name, **{"trace": SMALL, "streams": "3", **link})


def address(app: AppTest) -> dict[str, str]:
    """Return the query of the page's address; some versions of Streamlit give lists of values."""
    return {key: value if isinstance(value, str) else value[0] for key, value in app.query_params.items()}


def metrics(app: AppTest) -> dict[str, str]:
    return {metric.label: metric.value for metric in app.metric}


def markup(app: AppTest) -> str:
    """Return all pieces of HTML of a page except its style."""
    return "".join(body for each in app.get("html") if not (body := each.proto.body).startswith("<style"))


def plain(text: str) -> str:
    """Return the visible text of HTML."""
    return html.unescape(" ".join(re.sub(r"<[^>]*>", " ", text).split()))


def answer(app: AppTest) -> str:
    """Return the answer to the page's question."""
    [text] = re.findall(r'<div class="g-answer \w+">(.*?)</div>', markup(app))
    return plain(text)


def kind_of_answer(app: AppTest) -> str:
    """Return `yes`, `no` or `trend`."""
    [word] = re.findall(r'<div class="g-answer (\w+)">', markup(app))
    kind: str = word
    return kind


def table(app: AppTest, name: str) -> list[dict[str, str]]:
    """Return a table by its name: for each row its cells by their heads."""
    match = re.search(rf'aria-label="{re.escape(html.escape(name))}"><table[^>]*>(.*?)</table>', markup(app))
    assert match is not None, re.findall(r'aria-label="([^"]*)"', markup(app))
    heads = [plain(head) for head in re.findall(r'<th scope="col"[^>]*>(.*?)</th>', match[1])]
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", match[1].partition("<tbody>")[2])
    return [dict(zip(heads, map(plain, re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)), strict=True)) for row in rows]


def codes(app: AppTest) -> list[str]:
    """Return the pieces of code on a page."""
    found = re.findall(r'<div class="g-code">.*?<code>(.*?)</code>', markup(app), re.DOTALL)
    return [html.unescape(re.sub(r"<[^>]*>", "", each)) for each in found]


def errors(app: AppTest) -> list[str]:
    """Return the page's errors as read by the user, without the marks that keep text from becoming Markdown."""
    return [re.sub(r"\\(.)", r"\1", error.value.replace(":small[]", "")) for error in app.error]


def widget(widgets: Any, label: str) -> Any:
    [match] = [each for each in widgets if each.label == label]
    return match


def commanded(app: AppTest, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the JSON output of the command that the page names."""
    words = shlex.split(codes(app)[-1])
    for option in ("--html", "-o"):
        if option in words:
            place = words.index(option)
            del words[place : place + 2]
    with patch.object(sys, "argv", [*words, "--json"]):
        main()
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def finished(app: AppTest) -> AppTest:
    job = app.session_state["job"]
    job.wait(TIMEOUT_S)
    assert not job.running
    return app.run()


def cell(row: dict[str, str], head: str) -> str:
    """Return the cell of the column whose head begins with this text."""
    [found] = [value for name, value in row.items() if name.startswith(head)]
    return found


def ms(text: str) -> float:
    """Convert a table's number in ms or us to ns."""
    return round(float(text) * 1e6)


def time_ns(row: dict[str, str], head: str) -> float:
    """Return a table's time in ns; the head has its unit."""
    [(name, value)] = [(name, value) for name, value in row.items() if name.startswith(head)]
    return float(value) * {"ms": 1e6, "us": 1e3, "ns": 1.0}[name.rpartition(", ")[2]]


def table_rows(app: AppTest) -> list[dict[str, str]]:
    """Return the rows of a page's last table."""
    last = markup(app).rpartition("<table")[2]
    heads = [plain(head) for head in re.findall(r'<th scope="col"[^>]*>(.*?)</th>', last)]
    rows = re.findall(r"<tr[^>]*>(.*?)</tr>", last.partition("<tbody>")[2])
    return [dict(zip(heads, map(plain, re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)), strict=True)) for row in rows]
