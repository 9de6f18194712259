"""The dashboard in a real browser: `gpusim app` as started by a user, driven with Playwright in the system's Chromium.

Runs only with `-m browser`; a machine without a browser then fails, with installation advice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import TimeoutError

from gpusim.io.file_limits import MAX_UPLOAD_BYTES
from gpusim.trace.store import load_trace, write_trace
from tests.report.test_measured import measurement_of, timeline_of
from tests.security.test_hostile_names import hostile_trace
from tests.support.browser import (
    SMALL,
    answer,
    heading,
    metric,
    navigate,
    own_button,
    settle,
    table,
    thread_ticks,
    threads_at_work,
    upload,
    visit,
    wait_until_ended,
)
from tests.support.helpers import wide_trace
from tests.support.pages import REGISTRY

pytestmark = pytest.mark.browser

#: While a verdict is computed.
EXPLORING = re.compile("^Running every policy and a short search")
QUESTION = {name: entry.question for name, entry in REGISTRY.PAGES.items()}


# --- Files ---


def test_an_upload_is_a_verdict_and_can_be_searched(tab: Any, server: str, tmp_path: Path) -> None:
    write_trace(wide_trace(), tmp_path / "mine.json.gz")
    visit(tab, server)
    upload(tab, tmp_path / "mine.json.gz")
    heading(tab, QUESTION["verdict"])
    tab.get_by_text("tiny-infer-b1").first.wait_for()
    settle(tab)
    assert "upload-" in tab.url
    navigate(tab, "search")
    own_button(tab, "Start").click()
    progress = tab.locator("[data-testid=stProgress]")
    progress.wait_for()
    own_button(tab, "Stop").click()
    progress.wait_for(state="detached")
    tab.get_by_role("heading", name="Take away").wait_for()
    settle(tab)
    with tab.expect_download() as download:
        tab.get_by_role("button", name="Schedule (JSON)").click()
    assert "gpusim-schedule/1" in Path(download.value.path()).read_text(encoding="utf-8")


def test_downloads_work_again_and_again_after_a_search(tab: Any, server: str) -> None:
    visit(tab, server, page="search", trace=SMALL, streams="2", schedules="40")
    before = tab.get_by_text("press Start to search longer")
    before.wait_for()
    own_button(tab, "Start").click()
    before.wait_for(state="detached")
    tab.get_by_role("heading", name="Take away").wait_for()
    settle(tab)
    for name in ("Schedule (JSON)", "Table (CSV)", "Timeline for Perfetto"):
        download_3_times(tab, name)
    navigate(tab, "limits")
    tab.get_by_role("button", name="Losses (CSV)").wait_for()
    settle(tab)
    download_3_times(tab, "Losses (CSV)")


def download_3_times(tab: Any, name: str) -> None:
    """Download the same non-empty file three times. Chromium stops the 11th download in a row from one page."""
    files = set()
    for _ in range(3):
        with tab.expect_download() as download:
            tab.get_by_role("button", name=name).click()
        files.add(Path(download.value.path()).read_bytes())
    assert len(files) == 1
    assert files != {b""}


def test_broken_upload_is_a_message_in_the_main_area_without_any_answer(tab: Any, server: str, tmp_path: Path) -> None:
    (tmp_path / "broken.sqlite").write_text("{", encoding="utf-8")
    visit(tab, server)
    upload(tab, tmp_path / "broken.sqlite")
    tab.locator("[data-testid=stMain]").get_by_text("broken.sqlite: is not valid JSON").wait_for()
    settle(tab)
    assert "page=start" in tab.url
    assert tab.locator("[data-testid=stMetric], .g-answer").count() == 0


def test_a_reload_keeps_the_upload_and_the_what_if_settings(tab: Any, server: str, tmp_path: Path) -> None:
    write_trace(wide_trace(), tmp_path / "mine.json.gz")
    visit(tab, server)
    upload(tab, tmp_path / "mine.json.gz")
    heading(tab, QUESTION["verdict"])
    navigate(tab, "what-if")
    slider = tab.locator("[data-testid=stSlider]").filter(has_text="SMs")
    slider.get_by_role("slider").press("PageDown")
    tab.wait_for_url(re.compile("[&]sms="))
    settle(tab)
    shown = slider.inner_text()
    tab.reload()
    tab.get_by_text("tiny-infer-b1").first.wait_for()
    settle(tab)
    assert slider.inner_text() == shown
    assert "sms=" in tab.url
    assert "upload-" in tab.url


def test_a_file_over_the_limit_is_a_message(tab: Any, server: str, tmp_path: Path) -> None:
    with open(tmp_path / "huge.json", "wb") as file:
        file.truncate(MAX_UPLOAD_BYTES + 1)
    visit(tab, server)
    upload(tab, tmp_path / "huge.json")
    tab.get_by_text(re.compile(r"must be 64(\.0)?\s?MB or smaller")).wait_for()
    assert tab.locator("h1").inner_text() == QUESTION["start"]


def test_a_replay_is_drawn_below_the_simulated_run(tab: Any, server: str, tmp_path: Path) -> None:
    trace = load_trace(SMALL)
    (tmp_path / "replay.json").write_bytes(timeline_of(trace, measurement_of(trace, 400_000)))
    visit(tab, server, page="timeline", trace=SMALL, streams="2", policy="wavefront")
    tab.get_by_role("button", name="Load a replay").click()
    box = tab.locator("[data-testid=stPopoverBody] [data-testid=stFileUploaderDropzoneInput]")
    box.set_input_files(str(tmp_path / "replay.json"))
    tab.get_by_text("dotted: 400 us, timed without a profiler").wait_for()
    settle(tab)
    assert metric(tab, "Measured") == "400 us"
    # SMALL has no known DRAM traffic: lanes, SMs, memory, and below them the measured lanes.
    assert tab.locator(".js-plotly-plot .y4title").inner_html() == "measured"


LIVELY = (
    "https://evil.example/a www.evil.example b@evil.example :smile: :material/home: :red[x] $x^2$ **b** `c` <b>d</b> "
    "![i](https://evil.example/i.png)"
)


def test_a_name_is_shown_as_it_is_and_becomes_no_link_icon_or_formula(server: str, tab: Any, tmp_path: Path) -> None:
    write_trace(hostile_trace(f"{LIVELY}\x1b\u202e"), tmp_path / "lively.json")
    visit(tab, server)
    upload(tab, tmp_path / "lively.json")
    heading(tab, QUESTION["verdict"])
    shown = f"{LIVELY}\\x1b\\u202e"
    for name, entry in REGISTRY.PAGES.items():
        if not entry.controls:
            continue
        navigate(tab, name)
        tab.locator(".g-step").filter(has_text=shown).first.wait_for()
        assert tab.locator("[data-testid=stMain] a[href*=evil], img[src*=evil], .katex").count() == 0
        assert not re.search("[\x1b\u202e]", tab.content())


# --- Timeline ---


def test_the_bundled_replay_is_drawn_folded_below_its_schedule(tab: Any, server: str) -> None:
    """GoogLeNet, training, batch 8: the one that ships with gpusim."""
    visit(tab, server, page="timeline", trace="googlenet-train-b8", streams="8", policy="critical_path")
    tab.locator(".js-plotly-plot .barlayer path").first.wait_for()
    settle(tab)
    assert tab.locator(".js-plotly-plot .y5title").inner_html() == "measured"
    assert tab.locator(".js-plotly-plot .y5tick").count() <= 8
    assert metric(tab, "Measured") == "3.125 ms"


def test_lanes_and_tracks_are_in_sight_on_a_laptop(tab: Any, server: str) -> None:
    """At 1280 x 800, without scrolling: SMs, DRAM and memory below eight streams."""
    visit(tab, server, page="timeline", trace="googlenet-train-b8", streams="8", policy="wavefront")
    lowest = tab.locator(".js-plotly-plot .nsewdrag[data-subplot=x4y4]")
    lowest.wait_for()
    settle(tab)
    box = lowest.bounding_box()
    assert box["height"] > 40
    assert box["y"] + box["height"] <= 800


def test_a_drag_over_the_lanes_zooms_and_all_goes_back(tab: Any, server: str) -> None:
    visit(tab, server, page="timeline", trace=SMALL, streams="2", policy="wavefront")
    tab.locator(".js-plotly-plot .barlayer path").first.wait_for()
    settle(tab)
    drag_over_lanes(tab, 0.25, 0.5)
    settle(tab)
    begin, end = map(float, re.search(r"window=([\d.]+)-([\d.]+)", tab.url).groups())
    assert 0.15 < (end - begin) / load_end_us(tab) < 0.35
    tab.get_by_role("button", name="All").click()
    tab.wait_for_url(lambda address: "window=" not in address)
    settle(tab)


def load_end_us(tab: Any) -> float:
    """Return the length of the step, from the sum below the critical path."""
    text = tab.get_by_text(re.compile("these add up to")).inner_text()
    number, unit = re.search(r"add up to ([\d.]+) (us|ms)", text).groups()
    return float(number) * {"us": 1.0, "ms": 1000.0}[unit]


def test_a_click_on_a_bar_says_why_it_did_not_start_sooner(tab: Any, server: str) -> None:
    visit(tab, server, page="timeline", trace=SMALL, streams="2", policy="wavefront")
    tab.locator(".js-plotly-plot .barlayer path").first.wait_for()
    settle(tab)
    reasons = tab.get_by_text(re.compile(" started at .* and ran for "))
    before = reasons.inner_text()
    click_bar(tab, 12)
    tab.wait_for_url(re.compile("&bar="))
    settle(tab)
    said = reasons.inner_text()
    assert said != before
    tab.reload()
    settle(tab)
    assert reasons.inner_text() == said


def hovered_bar(tab: Any, number: int) -> tuple[float, float]:
    """Return the middle of a bar once plotly shows its label there: a new figure may not respond yet."""
    label = tab.locator(".js-plotly-plot .hoverlayer .hovertext")
    for _ in range(60):
        box = tab.locator(".js-plotly-plot .barlayer path").nth(number).bounding_box()
        x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
        tab.mouse.move(x, y - 40)
        tab.mouse.move(x, y, steps=3)
        tab.wait_for_timeout(300)
        if label.count():
            return x, y
    pytest.fail("no label at the bar")


def click_bar(tab: Any, number: int) -> None:
    """Click the middle of a bar, below plotly's drag layer."""
    tab.mouse.click(*hovered_bar(tab, number))


def drag_over_lanes(tab: Any, begin_frac: float, end_frac: float) -> None:
    """Drag from one part of the streams' width to another, until the address has the window.

    A drag during a redraw is lost; like a user, the test drags again.
    """
    for _ in range(6):
        hovered_bar(tab, 12)
        lanes = tab.locator(".js-plotly-plot .nsewdrag").first.bounding_box()
        middle = lanes["y"] + lanes["height"] / 2
        tab.mouse.move(lanes["x"] + begin_frac * lanes["width"], middle)
        tab.mouse.down()
        for frac in (0.6, 0.9, 1.0):
            at = begin_frac + frac * (end_frac - begin_frac)
            tab.mouse.move(lanes["x"] + at * lanes["width"], middle, steps=4)
            tab.wait_for_timeout(100)
        tab.mouse.up()
        with suppress(TimeoutError):
            tab.wait_for_url(re.compile("window="), timeout=10_000)
            return
    pytest.fail("no drag over the lanes zooms")


#: Stand-in for Perfetto's page at a hand-over: it answers PING with PONG, and shows what it received.
PERFETTO = """<body>waiting<script>
addEventListener('message', async (event) => {
  if (event.data === 'PING') { event.source.postMessage('PONG', event.origin); return; }
  const stream = new Blob([event.data.perfetto.buffer]).stream().pipeThrough(new DecompressionStream('gzip'));
  window.given = JSON.parse(await new Response(stream).text());
  document.body.textContent = event.data.perfetto.title;
});
</script></body>"""


def test_one_click_hands_the_timeline_to_perfetto_from_tab_to_tab(tab: Any, server: str) -> None:
    tab.context.route(
        "https://ui.perfetto.dev/**", lambda route: route.fulfill(body=PERFETTO, content_type="text/html")
    )
    visit(tab, server, page="timeline", trace=SMALL, streams="2", policy="wavefront")
    with tab.expect_popup() as popup:
        tab.get_by_role("button", name="Open in Perfetto").click()
    viewer = popup.value
    viewer.wait_for_function("window.given !== undefined")
    assert viewer.inner_text("body").startswith(f"{SMALL}, wavefront")
    given = viewer.evaluate("window.given")
    kernels = [event for event in given["traceEvents"] if event["ph"] == "X"]
    assert len(kernels) == sum(len(op.kernels) for op in load_trace(SMALL).ops)
    assert given["otherData"]["trace"] == SMALL


# --- What-if, search ---


def test_moving_a_slider_changes_the_result_and_not_the_baseline(tab: Any, server: str) -> None:
    visit(tab, server, page="what-if", trace=SMALL, streams="2")
    name = "The step as it is and with the settings below"
    base, what_if = table(tab, name)
    assert what_if[1] == base[1]
    handle = tab.locator("[data-testid=stSlider]").filter(has_text="SMs").get_by_role("slider")
    handle.focus()
    for _ in range(3):
        handle.press("PageDown")
    tab.get_by_text("uncalibrated: a trend").first.wait_for()
    settle(tab)
    after_base, after = table(tab, name)
    assert after_base[1] == base[1]
    assert after[1] != base[1]


def test_partitions_are_searched_where_asked_for(tab: Any, server: str) -> None:
    visit(tab, server, page="search", trace=SMALL, streams="2", schedules="40", partitions="64%2B68")
    own_button(tab, "Start").click()
    tab.get_by_text(re.compile("^Partitions: ")).wait_for()
    settle(tab)
    assert "--partitions 64+68" in tab.locator(".g-code code").last.inner_text()


def test_code_is_copied_by_its_button(tab: Any, server: str) -> None:
    tab.context.grant_permissions(["clipboard-read", "clipboard-write"])
    visit(tab, server, page="verdict", trace=SMALL, streams="2")
    code = tab.locator(".g-code").last
    code.get_by_role("button").click()
    code.get_by_text("Copied").wait_for()
    assert tab.evaluate("navigator.clipboard.readText()") == code.locator("code").inner_text()


# --- Addresses ---


def test_a_link_opens_its_page_and_state_and_both_survive_a_reload_and_a_change_of_page(tab: Any, server: str) -> None:
    visit(tab, server, page="limits", trace=SMALL, hw="a100-80gb", streams="3", policy="round_robin")
    for _ in range(2):
        assert tab.locator("h1").inner_text() == QUESTION["limits"]
        for part in ("page=limits", f"trace={SMALL}", "hw=a100-80gb", "policy=round_robin", "streams=3"):
            assert part in tab.url
        tab.reload()
        settle(tab)
    navigate(tab, "timeline")
    tab.wait_for_url(re.compile(r"page=timeline.*hw=a100-80gb.*policy=round_robin"))


def test_a_broken_link_is_a_message(tab: Any, server: str) -> None:
    visit(tab, server, page="verdict", trace="nonsense", streams="2")
    tab.get_by_text("trace='nonsense': unknown trace").wait_for()
    assert tab.locator("h1").inner_text() == QUESTION["verdict"]


# --- The end of a session ---


def test_a_closed_tab_ends_its_search(server: str, tabs: Callable[[], Any]) -> None:
    known = thread_ticks()
    page = tabs()
    visit(page, server, page="search", trace="googlenet-infer-b1", seconds="300")
    own_button(page, "Start").click()
    page.locator("[data-testid=stProgress]").wait_for()
    found = threads_at_work(known)
    page.context.close()
    wait_until_ended(found)


def test_a_closed_tab_ends_its_simulation(server: str, tabs: Callable[[], Any], tmp_path: Path) -> None:
    """The page's script computes for a long time and draws nothing meanwhile."""
    path = tmp_path / "long.json.gz"
    write_trace(wide_trace(40_000), path)
    known = thread_ticks()
    page = tabs()
    visit(page, server)
    upload(page, path)
    page.locator("h1").filter(has_text=QUESTION["verdict"]).wait_for()  # the file has been read, in another process
    page.get_by_text(EXPLORING).wait_for()
    found = threads_at_work(known)
    assert page.locator(".g-answer").count() == 0
    page.context.close()
    wait_until_ended(found)


def test_a_search_of_another_user_does_not_hold_up_an_answer(server: str, tabs: Callable[[], Any]) -> None:
    """Two sessions search; a third opens a verdict that no one has opened before."""
    known = thread_ticks()
    pages = []
    for number in range(2):
        page = tabs()
        visit(page, server, page="search", trace="googlenet-infer-b1", streams=str(2 + number), seconds="300")
        own_button(page, "Start").click()
        page.locator("[data-testid=stProgress]").wait_for()
        pages.append(page)
    found = threads_at_work(known)
    last = tabs()
    visit(last, server, page="verdict", trace="vgg16-infer-b1", streams="7")
    assert answer(last).startswith("No.")
    for page in (*pages, last):
        page.context.close()
    wait_until_ended(found)


def test_the_first_page_loads_no_figure(tab: Any, server: str) -> None:
    """Neither does the verdict: plotly's script is most of what a browser would wait for."""
    asked: list[str] = []
    tab.on("request", lambda request: asked.append(request.url))
    visit(tab, server)
    navigate(tab, "verdict")
    assert not [address for address in asked if "plotly" in address.lower()]
    assert json.dumps(asked)
