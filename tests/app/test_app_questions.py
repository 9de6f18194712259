"""Six questions, each answered within three clicks from the first page for every kind of step; accessibility.

In a real browser, at every width and in both themes. Samples are read from the manifest by kind.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from gpusim.cli import main
from gpusim.trace.store import read_manifest
from tests.support.browser import PAGE_MS, SMALL, answer, heading, navigate, settle, table, upload, visit
from tests.support.pages import REGISTRY

pytestmark = pytest.mark.browser

QUESTION = {name: entry.question for name, entry in REGISTRY.PAGES.items()}
WIDTHS = (375, 1280, 1920)
#: Severities of axe findings that exclude users.
GRAVE = ("serious", "critical")
MOST_CLICKS = 3


def samples() -> dict[str, str]:
    """Return kind -> its smallest bundled step of ATen's kernels."""
    found: dict[str, str] = {}
    for entry in sorted(read_manifest(), key=lambda entry: (entry["frontend"] != "aten", entry["kernels"])):
        found.setdefault(entry["kind"], entry["name"])
    return found


class Visitor:
    """A user who counts clicks."""

    def __init__(self, tab: Any, server: str) -> None:
        self.tab = tab
        self.server = server
        self.clicks = 0

    def begin(self) -> None:
        """Open the first page."""
        visit(self.tab, self.server)
        self.clicks = 0

    def click(self, target: Any) -> None:
        """Click once, and wait for the next page."""
        target.click()
        self.clicks += 1
        assert self.clicks <= MOST_CLICKS

    def open_sample(self, name: str) -> None:
        """Open a sample: one click where it is the first of its kind, otherwise two."""
        button = self.tab.locator(f".st-key-sample-{name} button")
        if not button.is_visible():
            entry = next(entry for entry in read_manifest() if entry["name"] == name)
            alike = [each for each in read_manifest() if each["kind"] == entry["kind"]]
            for more in self.tab.get_by_role("button", name=f"{len(alike) - 1} more").all():
                self.click(more)
                if button.is_visible():
                    break
                self.clicks -= 1  # the wrong kind with as many samples
                self.tab.keyboard.press("Escape")
        self.click(button)
        heading(self.tab, QUESTION["verdict"])

    def back_to_the_verdict(self, clicks: int) -> None:
        """Return to the verdict after so many clicks, from another page; a reload would take longer."""
        navigate(self.tab, "verdict")
        self.clicks = clicks

    def follow(self, words: str, page: str) -> None:
        """Follow a link below the verdict."""
        self.click(self.tab.locator(".st-key-next").get_by_text(words))
        heading(self.tab, QUESTION[page])


@pytest.fixture
def visitor(tab: Any, server: str) -> Visitor:
    return Visitor(tab, server)


@pytest.mark.parametrize(("kind", "name"), samples().items())
def test_six_questions_are_answered_within_three_clicks(kind: str, name: str, visitor: Visitor) -> None:
    tab = visitor.tab
    assert kind
    visitor.begin()
    visitor.open_sample(name)
    said = answer(tab)  # should I use streams, and what do I gain over what I run
    assert said.startswith(("Yes. ", "No. "))
    rows = table(tab, "Ways to run the step")
    assert [row[0].split("\n")[0].split(" (")[0] for row in rows[:2]] == ["eager", "one CUDA graph"]
    assert re.fullmatch(r"[\d.]+x", rows[1][2])
    tab.get_by_role("heading", name="What to change").wait_for()  # what do I change
    assert re.search("gpusim.optimize|torch.cuda.graph", tab.locator(".g-code code").first.inner_text())
    if said.startswith("Yes"):
        assert tab.get_by_text("No two kernels").count() or table(tab, "Modules that run side by side")
    clicks = visitor.clicks
    visitor.follow("Why not more?", "limits")
    assert re.search(r"\d+% of what there is to win is won", answer(tab))
    for words, page, check in (
        ("Does it fit?", "memory", "MiB"),
        ("What on another GPU?", "what-if", "a100-80gb"),
    ):
        visitor.back_to_the_verdict(clicks)
        visitor.follow(words, page)
        tab.get_by_text(re.compile(check)).first.wait_for()
        settle(tab)
    assert len(table(tab, "The same step on other GPUs")) > 3


def test_a_profile_of_torch_is_answered_too(visitor: Visitor, tmp_path: Path) -> None:
    profile = tmp_path / "profile.json"
    words = ["gpusim", "export", SMALL, "--policy", "critical_path", "--streams", "2", "--kineto", str(profile)]
    with patch.object(sys, "argv", words):
        main()
    tab = visitor.tab
    visitor.begin()
    upload(tab, profile)
    heading(tab, QUESTION["verdict"])
    assert "One CUDA graph" in answer(tab)
    assert "this profile cannot say" in answer(tab)
    assert table(tab, "Ways to run the step")[0][0].startswith("as observed")
    tab.get_by_role("heading", name="What to change").wait_for()
    for text, page, said in (
        ("Why not more?", "limits", "no schedule is faster than"),
        ("Does it fit?", "memory", "This profile does not say|At its peak the step needs"),
        ("What on another GPU?", "what-if", ""),
    ):
        visitor.back_to_the_verdict(clicks=1)  # the upload
        visitor.follow(text, page)
        assert tab.locator("[data-testid=stAlertContentError]").count() == 0
        assert not said or re.search(said, answer(tab))
    assert len(table(tab, "The same step on other GPUs")) > 3


@pytest.fixture(scope="module")
def tour(browser: Any, server: str) -> Iterator[Any]:
    """A tab that goes from page to page: opened once, as to load Streamlit takes longer than most pages."""
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(PAGE_MS)
    visit(page, server, page="start", trace=SMALL, streams="2")
    yield page
    context.close()


@pytest.mark.parametrize("name", REGISTRY.PAGES)
def test_a_page_keeps_nobody_out_and_fits_every_width(tour: Any, name: str) -> None:
    """No serious or critical finding of axe-core, no error, no sideways scrolling, no overlapping text."""
    page = tour
    page.emulate_media(color_scheme="light")
    page.set_viewport_size({"width": 1280, "height": 900})
    navigate(page, name)
    assert page.locator("[data-testid=stAlertContentError]").count() == 0
    assert grave_findings(page) == []
    for width in WIDTHS:
        page.set_viewport_size({"width": width, "height": 900})
        page.wait_for_function(FITS)  # figures follow the window's width
        assert page.evaluate(OVERLAPPING) == [], width
    light = page.evaluate(BACKGROUND)
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"light => {BACKGROUND} !== light", arg=light)
    settle(page)
    assert grave_findings(page) == []


def grave_findings(page: Any) -> list[tuple[str, list[str]]]:
    """Return axe-core's findings that exclude users, with the elements."""
    from axe_playwright_python.sync_playwright import Axe

    page.wait_for_timeout(300)  # new elements fade in
    found = Axe().run(page).response["violations"]
    return [(each["id"], [node["html"][:200] for node in each["nodes"]]) for each in found if each["impact"] in GRAVE]


BACKGROUND = "getComputedStyle(document.querySelector('[data-testid=stApp]')).backgroundColor"
#: Nothing scrolls sideways.
FITS = """() => [document.documentElement, document.querySelector('[data-testid=stMain]')]
  .every((each) => each.scrollWidth <= each.clientWidth)"""
#: Texts of the main area that overlap: their boxes share more than a sliver.
OVERLAPPING = """() => {
  const main = document.querySelector('[data-testid=stMain]');
  const texts = [];
  const walk = document.createTreeWalker(main, NodeFilter.SHOW_TEXT);
  for (let node = walk.nextNode(); node; node = walk.nextNode()) {
    const host = node.parentElement;
    if (!node.textContent.trim()) continue;
    if (host.closest('[data-testid=stDataFrame], pre, style, script, .g-stack thead')) continue;
    if (!host.checkVisibility({ opacityProperty: true, visibilityProperty: true })) continue;
    const range = document.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects())
      if (box.width > 3 && box.height > 3) texts.push({ box, text: node.textContent.trim().slice(0, 40), host });
  }
  const found = [];
  for (let i = 0; i < texts.length; i++)
    for (let j = i + 1; j < texts.length; j++) {
      const a = texts[i].box, b = texts[j].box;
      if (texts[i].host === texts[j].host) continue;
      const wide = Math.min(a.right, b.right) - Math.max(a.left, b.left);
      const high = Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top);
      if (wide > 4 && high > 0.4 * Math.min(a.height, b.height)) found.push([texts[i].text, texts[j].text]);
    }
  return found.slice(0, 5);
}"""


#: Text of the focused control; the page itself has the focus where it can be scrolled.
FOCUSED = """() => {
  const element = document.activeElement;
  return element.matches('a, button, input, [role=button]') ? element.innerText || element.ariaLabel || '' : '';
}"""


def test_the_keyboard_reaches_the_action_and_the_samples_first(tab: Any, server: str) -> None:
    """From the top of the page: navigation, then the upload, then the samples, each with a visible focus ring."""
    visit(tab, server)
    reached: list[str] = []
    for _ in range(40):
        tab.keyboard.press("Tab")
        reached.append(" ".join(tab.evaluate(FOCUSED).split()))
        if any("batch" in text for text in reached):
            break
    names = " | ".join(reached)
    assert "Verdict" in names
    assert re.search("Upload.*batch", names)
