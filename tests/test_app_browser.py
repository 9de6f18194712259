"""The dashboard in a real browser: `gpusim app` as a user starts it, driven with Playwright in the system's Chromium.

Needs the package playwright and Chromium (Debian: apt-get install chromium), or its path in CHROMIUM. Left out unless
asked for with `-m browser`; then a machine without them fails, with what to install.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpusim.file_limits import MAX_UPLOAD_BYTES
from gpusim.trace.store import load_trace, write_trace
from tests.helpers import wide_trace
from tests.test_hostile_names import hostile_trace
from tests.test_measured import measurement_of, timeline_of

pytestmark = pytest.mark.browser

ROOT = Path(__file__).parent.parent
NEEDS = "pip install playwright, and a Chromium (apt-get install chromium, or its path in CHROMIUM)"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SMALL = "squeezenet1_1-infer-b1"
START_S, PAGE_MS = 60, 60_000
#: A server is idle by then; what it may use meanwhile, in ticks of 10 ms: it answers health checks.
IDLE_S, IDLE_TICKS = 10, 15
#: As Streamlit marks its own page while the script runs and when it is done.
DONE = "[data-testid=stApp][data-test-script-state=notRunning]"


#: The process of the dashboard that runs.
server_process: list[int] = []


def browser_path() -> str:
    """The system's Chromium."""
    found = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.fail(f"no browser: {NEEDS}")
    return found


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a dashboard that runs for these tests."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-m", "gpusim.cli", "app", "--headless", "--port", str(port)]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
    server_process.clear()
    with subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        address = f"http://127.0.0.1:{port}"
        try:
            wait_for(f"{address}/_stcore/health", process)
            server_process.append(process.pid)
            yield address
        finally:
            process.terminate()
            process.communicate(timeout=30)


def wait_for(address: str, process: subprocess.Popen[str]) -> None:
    """Until the server answers."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"gpusim app ended: {process.communicate()[0]}")
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(address, timeout=5).close()
            return
        time.sleep(0.05)
    pytest.fail(f"no answer from {address} within {START_S} s")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        pytest.fail(f"no playwright: {NEEDS}")
    with sync_playwright() as driver:
        # Containers seldom allow Chromium's sandbox; the only pages it sees are our own.
        chromium = driver.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """A tab of a new user; afterwards its console must hold no error, and nothing was asked of other machines."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.set_default_timeout(PAGE_MS)
    wrong: list[str] = []
    page.on("console", lambda message: wrong.append(problem_of(message)) if problem_of(message) else None)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: wrong.append(request.url) if is_foreign(request.url) else None)
    yield page
    context.close()
    assert wrong == []


def problem_of(message: Any) -> str:
    """An error in the console, but for one of Streamlit's own.

    Opened at `/limits`, its page first looks for the server under `/limits/_stcore/` and finds it under `/` when it is
    not there: the browser writes down each such request.
    """
    address = message.location.get("url", "")
    probing = re.search(r"127\.0\.0\.1:\d+/[\w-]+/_stcore/(health|host-config)$", address)
    return "" if message.type != "error" or probing else f"{message.text} {address}"


def is_foreign(address: str) -> bool:
    return not re.match(r"(https?|wss?)://127\.0\.0\.1[:/]|data:|blob:|about:", address)


def visit(tab: Any, address: str, **link: str) -> None:
    """Go to a page of the dashboard, and wait until it is complete."""
    tab.goto(f"{address}/?{'&'.join(f'{key}={value}' for key, value in link.items())}")
    settle(tab)


def settle(tab: Any) -> None:
    """Wait until the page's title is there and its script has ended."""
    tab.wait_for_selector("h1")
    tab.wait_for_selector(DONE)
    assert tab.locator("[data-testid=stException]").all_inner_texts() == []


def metric(tab: Any, label: str) -> str:
    """Value of the number with this label."""
    box = tab.locator("[data-testid=stMetric]").filter(has=tab.get_by_text(label, exact=True))
    text: str = box.locator("[data-testid=stMetricValue]").inner_text()
    return text


def upload(tab: Any, file: Path) -> None:
    tab.set_input_files("[data-testid=stSidebar] [data-testid=stFileUploaderDropzoneInput]", str(file))


def test_upload_is_analysed_and_can_be_explored(tab: Any, server: str, tmp_path: Path) -> None:
    write_trace(wide_trace(), tmp_path / "mine.json.gz")
    visit(tab, server, trace=SMALL, streams="2")
    upload(tab, tmp_path / "mine.json.gz")
    tab.get_by_text("tiny-infer-b1: tiny, infer").wait_for()
    settle(tab)
    assert "upload-" in tab.url
    tab.get_by_role("link", name="Explore").click()
    tab.get_by_role("button", name="Start").click()
    progress = tab.locator("[data-testid=stProgress]")
    progress.wait_for()
    tab.locator("[data-testid=stBaseButton-secondary]", has_text="Stop").click()
    progress.wait_for(state="detached")
    tab.get_by_text("Compare two schedules").wait_for()
    settle(tab)
    with tab.expect_download() as download:
        tab.get_by_role("button", name="Schedule (JSON)").click()
    assert "gpusim-schedule/1" in Path(download.value.path()).read_text(encoding="utf-8")


def test_downloads_work_again_and_again_after_a_search(tab: Any, server: str) -> None:
    visit(tab, server, page="explore", trace=SMALL, streams="2")
    tab.get_by_role("spinbutton", name="Schedules, at most").fill("40")
    tab.get_by_role("button", name="Start").click()
    tab.get_by_text("Compare two schedules").wait_for()
    settle(tab)
    for name in ("Schedule (JSON)", "Table (CSV)", "Timeline for Perfetto"):
        download_3_times(tab, name)
    tab.get_by_role("link", name="Limits", exact=True).click()
    tab.get_by_role("heading", name="Limits", exact=True).wait_for()
    tab.get_by_role("button", name="Losses (CSV)").wait_for()
    settle(tab)
    download_3_times(tab, "Losses (CSV)")


def download_3_times(tab: Any, name: str) -> None:
    """Each time the same file, with something in it. Chromium stops the 11th download in a row from one page."""
    files = set()
    for _ in range(3):
        with tab.expect_download() as download:
            tab.get_by_role("button", name=name).click()
        files.add(Path(download.value.path()).read_bytes())
    assert len(files) == 1
    assert files != {b""}


def test_broken_upload_is_a_message_in_the_place_of_the_page(tab: Any, server: str, tmp_path: Path) -> None:
    (tmp_path / "broken.sqlite").write_text("{", encoding="utf-8")
    visit(tab, server, trace=SMALL, streams="2")
    tab.locator("[data-testid=stMetric]").first.wait_for()
    upload(tab, tmp_path / "broken.sqlite")
    tab.locator("[data-testid=stMain]").get_by_text("broken.sqlite: is not valid JSON").wait_for()
    settle(tab)
    assert f"trace={SMALL}" in tab.url
    assert tab.locator("[data-testid=stMetric]").count() == 0
    tab.get_by_role("button", name="Go on without it").click()
    tab.locator("[data-testid=stMetric]").first.wait_for()
    settle(tab)


def test_a_reload_keeps_the_upload_and_the_what_if_settings(tab: Any, server: str, tmp_path: Path) -> None:
    write_trace(wide_trace(), tmp_path / "mine.json.gz")
    visit(tab, server, page="what-if", trace=SMALL, streams="2")
    upload(tab, tmp_path / "mine.json.gz")
    tab.get_by_text("tiny-infer-b1: tiny, infer").wait_for()
    settle(tab)
    slider = tab.locator("[data-testid=stSlider]").filter(has_text="SMs")
    slider.get_by_role("slider").press("PageDown")
    tab.wait_for_url(re.compile("[&]sms="))
    settle(tab)
    shown = slider.inner_text()
    tab.reload()
    tab.get_by_text("tiny-infer-b1: tiny, infer").wait_for()
    settle(tab)
    assert slider.inner_text() == shown
    assert "sms=" in tab.url


def test_a_file_over_the_limit_is_a_message(tab: Any, server: str, tmp_path: Path) -> None:
    with open(tmp_path / "huge.json", "wb") as file:
        file.truncate(MAX_UPLOAD_BYTES + 1)
    visit(tab, server, trace=SMALL, streams="2")
    upload(tab, tmp_path / "huge.json")
    tab.get_by_text(re.compile(r"must be 64(\.0)?\s?MB or smaller")).wait_for()
    assert tab.locator("h1").inner_text() == "Overview"


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
    assert tab.locator(".js-plotly-plot .y2title").inner_html() == "measured"


def test_the_bundled_replay_is_drawn_below_its_schedule(tab: Any, server: str) -> None:
    """GoogLeNet, training, batch 8: the one that ships with gpusim."""
    visit(tab, server, page="timeline", trace="googlenet-train-b8", streams="8", policy="critical_path")
    tab.locator(".js-plotly-plot .barlayer path").first.wait_for()
    assert tab.locator(".js-plotly-plot .y2title").inner_html() == "measured"
    assert metric(tab, "Measured") == "3.125 ms"
    settle(tab)


def test_partitions_are_searched_where_asked_for(tab: Any, server: str) -> None:
    visit(tab, server, page="explore", trace=SMALL, streams="2")
    tab.get_by_role("spinbutton", name="Schedules, at most").fill("40")
    box = tab.get_by_role("textbox", name="Partitions of the SMs")
    box.fill("64+68")
    box.press("Enter")
    tab.get_by_role("button", name="Start").click()
    tab.get_by_text(re.compile("^Partitions: ")).wait_for()
    settle(tab)
    assert "--partitions 64+68" in tab.locator("[data-testid=stCode]").last.inner_text()


def test_timeline_opens_and_a_click_says_why_a_kernel_did_not_start_sooner(tab: Any, server: str) -> None:
    visit(tab, server, page="timeline", trace=SMALL, streams="2", policy="wavefront")
    tab.locator(".js-plotly-plot .barlayer path").first.wait_for()
    tab.get_by_text("Click a bar").wait_for()
    click_bar(tab, 12)
    tab.get_by_text(re.compile(" started at .* and ran for ")).wait_for()
    settle(tab)


def click_bar(tab: Any, number: int) -> None:
    """Click the middle of a bar, which plotly's layer for dragging lies over."""
    box = tab.locator(".js-plotly-plot .barlayer path").nth(number).bounding_box()
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tab.wait_for_timeout(300)  # plotly picks what a click is on while the mouse moves
    tab.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)


def test_moving_a_slider_changes_the_result_and_not_the_baseline(tab: Any, server: str) -> None:
    visit(tab, server, page="what-if", trace=SMALL, streams="2")
    baseline = metric(tab, "Baseline")
    assert metric(tab, "What if") == baseline
    handle = tab.locator("[data-testid=stSlider]").filter(has_text="SMs").get_by_role("slider")
    handle.focus()
    for _ in range(3):
        handle.press("PageDown")
    tab.get_by_text("Uncalibrated: ").wait_for()
    settle(tab)
    assert metric(tab, "What if") != baseline
    assert metric(tab, "Baseline") == baseline


def test_a_link_opens_its_page_and_state_and_both_survive_a_reload_and_a_change_of_page(tab: Any, server: str) -> None:
    visit(tab, server, page="limits", trace=SMALL, hw="a100-80gb", streams="3", policy="round_robin")
    for _ in range(2):
        assert tab.locator("h1").inner_text() == "Limits"
        for part in ("page=limits", f"trace={SMALL}", "hw=a100-80gb", "policy=round_robin", "streams=3"):
            assert part in tab.url
        tab.reload()
        settle(tab)
    tab.get_by_role("link", name="Memory").click()
    tab.get_by_text(re.compile("Live at the peak of round_robin")).wait_for()
    settle(tab)
    tab.wait_for_url(re.compile(r"page=memory.*hw=a100-80gb"))


def test_a_broken_link_is_a_message(tab: Any, server: str) -> None:
    visit(tab, server, trace="nonsense", streams="2")
    tab.get_by_text("trace='nonsense': unknown trace").wait_for()
    assert tab.locator("h1").inner_text() == "Overview"


@pytest.mark.parametrize("name", ["overview", "explore", "timeline", "what-if", "limits", "memory", "fidelity"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_page_is_wider_than_the_window_or_shows_an_error(browser: Any, server: str, name: str, scheme: str) -> None:
    context = browser.new_context(viewport={"width": 1920, "height": 1000}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(PAGE_MS)
    visit(page, server, page=name, trace=SMALL, streams="2")
    for width in (1920, 1280):
        page.set_viewport_size({"width": width, "height": 1000})
        page.wait_for_timeout(300)  # figures follow the window's width
        assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.locator("[data-testid=stAlertContentError]").count() == 0
    context.close()


def cpu_ticks() -> int:
    """CPU time of the server so far."""
    fields = Path(f"/proc/{server_process[0]}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def wait_until_idle() -> None:
    """Until the server computes nothing for a second."""
    deadline = time.monotonic() + IDLE_S
    before, since = cpu_ticks(), time.monotonic()
    while time.monotonic() - since < 1.0:
        assert time.monotonic() < deadline, "the server goes on computing"
        time.sleep(0.1)
        if cpu_ticks() > before + IDLE_TICKS:
            before, since = cpu_ticks(), time.monotonic()


def test_a_closed_tab_ends_its_search(server: str, browser: Any) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(PAGE_MS)
    visit(page, server, page="explore", trace="googlenet-train-b8")
    page.get_by_label("Search, seconds").fill("300")
    page.get_by_label("Search, seconds").press("Tab")
    page.get_by_role("button", name="Start").click()
    page.get_by_role("button", name="Stop").and_(page.locator(":enabled")).wait_for()
    before = cpu_ticks()
    page.wait_for_timeout(3_000)
    assert cpu_ticks() > before + 100
    context.close()
    wait_until_idle()


def test_a_closed_tab_ends_its_simulation(server: str, browser: Any, tmp_path: Path) -> None:
    """A page whose script computes for a long time and draws nothing meanwhile."""
    path = tmp_path / "long.json.gz"
    write_trace(wide_trace(40_000), path)
    context = browser.new_context()
    page = context.new_page()
    page.set_default_timeout(PAGE_MS)
    visit(page, server, page="memory", trace=SMALL)
    page.locator("[data-testid=stFileUploaderDropzoneInput]").first.set_input_files(path)
    page.wait_for_selector("[data-testid=stApp][data-test-script-state=running]")
    page.wait_for_timeout(10_000)
    before = cpu_ticks()
    page.wait_for_timeout(2_000)
    assert cpu_ticks() > before + 2 * IDLE_TICKS
    context.close()
    wait_until_idle()


LIVELY = (
    "https://evil.example/a www.evil.example b@evil.example :smile: :material/home: :red[x] $x^2$ **b** `c` <b>d</b> "
    "![i](https://evil.example/i.png)"
)


def test_a_name_is_shown_as_it_is_and_becomes_no_link_icon_or_formula(server: str, tab: Any, tmp_path: Path) -> None:
    write_trace(hostile_trace(f"{LIVELY}\x1b\u202e"), tmp_path / "lively.json")
    visit(tab, server, trace=SMALL)
    tab.set_input_files(
        "[data-testid=stSidebar] [data-testid=stFileUploaderDropzoneInput]", str(tmp_path / "lively.json")
    )
    shown = f"{LIVELY}\\x1b\\u202e"
    tab.locator("[data-testid=stMarkdown]").filter(has_text=shown).first.wait_for()
    for page in ("Explore", "Timeline", "What-if", "Limits", "Memory", "Overview"):
        tab.locator("[data-testid=stSidebarNavLink]").filter(has_text=page).click()
        tab.locator("h1").filter(has_text=page).wait_for()
        settle(tab)
        tab.locator("[data-testid=stMarkdown]").filter(has_text=shown).first.wait_for()
        assert tab.locator("a[href*=evil], img[src*=evil], .katex").count() == 0
        assert not re.search("[\x1b\u202e]", tab.content())
