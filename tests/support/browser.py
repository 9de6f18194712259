"""A dashboard as started by a user, and a real browser: fixtures and helpers.

Needs the package playwright and Chromium (Debian: apt-get install chromium), or its path in CHROMIUM.
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
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import REGISTRY

ROOT = Path(__file__).parents[2]
NEEDS = "pip install playwright, and a Chromium (apt-get install chromium, or its path in CHROMIUM)"
#: The first needs half of the CPU time of a whole Chromium, which also draws windows that nobody sees.
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
SMALL = "squeezenet1_1-infer-b1"
#: Timeouts for a slow machine; a passing test does not wait that long.
START_S, PAGE_MS = 120, 120_000
#: Streamlit's mark of its page once the script is done.
DONE = "[data-testid=stApp][data-test-script-state=notRunning]"
#: A done page that stays so for this long is complete, in ms.
SETTLED_MS = 100
#: CPU time per second of a computing thread, in ticks of 10 ms, also on a busy machine.
WORK_TICKS = 5
#: Time by which the work of a closed tab has ended, in s.
ENDED_S = 60
#: Process of the running dashboard.
server_process: list[int] = []


def browser_path() -> str:
    """Return the system's Chromium."""
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.fail(f"no browser: {NEEDS}")
    return path


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a dashboard for these tests, and yield its address."""
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
    """Wait until the server answers."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"gpusim app ended: {process.communicate()[0]}")
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(address, timeout=5).close()
            return
        time.sleep(0.05)
    pytest.fail(f"no answer from {address} within {START_S} s")


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium."""
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
def tabs(browser: Any) -> Iterator[Callable[..., Any]]:
    """Yield a function that opens a tab of a new user; tabs are closed after the test."""
    contexts = []

    def another(**options: Any) -> Any:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(PAGE_MS)
        return page

    yield another
    for context in contexts:
        context.close()


@pytest.fixture
def tab(browser: Any) -> Iterator[Any]:
    """Open a tab of a new user; afterwards its console must have no error, and no other machine was contacted."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
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
    """Return an error in the console, except one of Streamlit's own.

    Opened at `/limits`, its page first looks for the server at `/limits/_stcore/`, then at `/`: the browser logs each
    such request.
    """
    address = message.location.get("url", "")
    probing = re.search(r"127\.0\.0\.1:\d+/[\w-]+/_stcore/(health|host-config)$", address)
    return "" if message.type != "error" or probing else f"{message.text} {address}"


def is_foreign(address: str) -> bool:
    """Whether an address is on another machine."""
    return not re.match(r"(https?|wss?)://127\.0\.0\.1[:/]|data:|blob:|about:", address)


def visit(tab: Any, address: str, **link: str) -> None:
    """Go to a page of the dashboard, and wait until it is complete."""
    tab.goto(f"{address}/?{'&'.join(f'{key}={value}' for key, value in link.items())}")
    settle(tab)


def settle(tab: Any) -> None:
    """Wait until the page's heading is shown and its script has ended."""
    tab.wait_for_selector("h1")
    # A page is also done before its first script, and briefly between two scripts.
    for _ in range(2):
        tab.wait_for_selector(DONE)
        tab.wait_for_timeout(SETTLED_MS)
    tab.wait_for_selector(DONE)
    assert tab.locator("[data-testid=stException]").all_inner_texts() == []


def heading(tab: Any, question: str) -> None:
    """Wait for the complete page with this heading."""
    tab.locator("h1").filter(has_text=question).wait_for()
    settle(tab)


def navigate(tab: Any, name: str) -> None:
    """Click a page in the navigation, and wait until it is complete."""
    entry = REGISTRY.PAGES[name]
    tab.locator("[data-testid=stSidebarNavLink]").filter(has_text=re.compile(f"{entry.label}$")).click()
    heading(tab, entry.question)


def metric(tab: Any, label: str) -> str:
    """Return the value of the number with this label."""
    box = tab.locator("[data-testid=stMetric]").filter(has=tab.get_by_text(label, exact=True))
    text: str = box.locator("[data-testid=stMetricValue]").inner_text()
    return text


def answer(tab: Any) -> str:
    """Return the answer to the page's question."""
    text: str = tab.locator(".g-answer").inner_text()
    return text


def table(tab: Any, name: str) -> list[list[str]]:
    """Return the cells of a table's rows by the table's name."""
    rows = tab.get_by_role("region", name=name, exact=True).locator("tbody tr")
    rows.first.wait_for()
    return [[cell.strip() for cell in row.locator("th, td").all_inner_texts()] for row in rows.all()]


def upload(tab: Any, file: Path) -> None:
    """Upload a file on the first page."""
    tab.set_input_files("[data-testid=stMain] [data-testid=stFileUploaderDropzoneInput]", str(file))


def own_button(tab: Any, name: str) -> Any:
    """Return a button of the page: Streamlit's header has its own Stop while a script runs."""
    return tab.get_by_test_id("stMain").get_by_role("button", name=name, exact=True)


def thread_ticks() -> dict[str, int]:
    """Return the threads of the server and its searches, with their CPU time in ticks of 10 ms."""
    ticks = {}
    for process in (server_process[0], *children_of(server_process[0])):
        for folder in Path("/proc").glob(f"{process}/task/*"):
            with contextlib.suppress(OSError):  # the thread may have ended
                fields = _fields(folder)
                ticks[folder.name] = int(fields[11]) + int(fields[12])
    return ticks


def children_of(parent: int) -> list[int]:
    """Return the running child processes of a process."""
    children = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and int(_fields(folder)[1]) == parent:
                children.append(int(folder.name))
    return children


def _fields(folder: Path) -> list[str]:
    """Return the system's fields of a process or thread after its name: state, parent, and so on."""
    return (folder / "stat").read_text().rpartition(")")[2].split()


def threads_at_work(known: Collection[str]) -> set[str]:
    """Wait until new threads compute, and return them.

    Work that the server does unasked is excluded as known.
    """
    deadline = time.monotonic() + PAGE_MS / 1000
    while time.monotonic() < deadline:
        before = thread_ticks()
        time.sleep(1.0)
        now = thread_ticks()
        at_work = {each for each in before.keys() & now.keys() - set(known) if now[each] >= before[each] + WORK_TICKS}
        if at_work:
            return at_work
    pytest.fail("nothing computes")


def wait_until_ended(threads: set[str]) -> None:
    """Wait until these threads have ended, or compute nothing for a second."""
    deadline = time.monotonic() + ENDED_S
    before, now = {}, thread_ticks()
    while any(now[each] > before.get(each, 0) for each in threads & now.keys()):
        assert time.monotonic() < deadline, "the server goes on computing"
        time.sleep(1.0)
        before, now = now, thread_ticks()
