"""A dashboard as a user starts it, and a real browser to look at it: fixtures and what tests do with them.

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

ROOT = Path(__file__).parents[2]
NEEDS = "pip install playwright, and a Chromium (apt-get install chromium, or its path in CHROMIUM)"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
SMALL = "squeezenet1_1-infer-b1"
#: Patience for a slow machine: a test that passes does not wait for it.
START_S, PAGE_MS = 120, 120_000
#: As Streamlit marks its own page while the script runs and when it is done.
DONE = "[data-testid=stApp][data-test-script-state=notRunning]"
#: A page that is done and stays so for this long is complete.
SETTLED_MS = 100
#: A thread that computes uses as much in a second, in ticks of 10 ms, on a machine that is busy with other things too.
WORK_TICKS = 5
#: What a closed tab leaves behind has ended by then.
ENDED_S = 60
#: The process of the dashboard that runs.
server_process: list[int] = []


def browser_path() -> str:
    """The system's Chromium."""
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.fail(f"no browser: {NEEDS}")
    return path


@pytest.fixture(scope="session")
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
    """Gives a tab of another new user at each call; closed after the test, however it ends."""
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
    """A tab of a new user; afterwards its console must hold no error, and nothing was asked of other machines."""
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
    """An error in the console, but for one of Streamlit's own.

    Opened at `/limits`, its page first looks for the server under `/limits/_stcore/` and finds it under `/` when it is
    not there: the browser writes down each such request.
    """
    address = message.location.get("url", "")
    probing = re.search(r"127\.0\.0\.1:\d+/[\w-]+/_stcore/(health|host-config)$", address)
    return "" if message.type != "error" or probing else f"{message.text} {address}"


def is_foreign(address: str) -> bool:
    """Whether another machine is asked."""
    return not re.match(r"(https?|wss?)://127\.0\.0\.1[:/]|data:|blob:|about:", address)


def visit(tab: Any, address: str, **link: str) -> None:
    """Go to a page of the dashboard, and wait until it is complete."""
    tab.goto(f"{address}/?{'&'.join(f'{key}={value}' for key, value in link.items())}")
    settle(tab)


def settle(tab: Any) -> None:
    """Wait until the page's heading is there and its script has ended."""
    tab.wait_for_selector("h1")
    # A page is done before its first script, too, and for a moment between one that asks for another and that one.
    for _ in range(2):
        tab.wait_for_selector(DONE)
        tab.wait_for_timeout(SETTLED_MS)
    tab.wait_for_selector(DONE)
    assert tab.locator("[data-testid=stException]").all_inner_texts() == []


def heading(tab: Any, question: str) -> None:
    """Wait for the page with this heading, complete."""
    tab.locator("h1").filter(has_text=question).wait_for()
    settle(tab)


def metric(tab: Any, label: str) -> str:
    """Value of the number with this label."""
    box = tab.locator("[data-testid=stMetric]").filter(has=tab.get_by_text(label, exact=True))
    text: str = box.locator("[data-testid=stMetricValue]").inner_text()
    return text


def answer(tab: Any) -> str:
    """The answer to the page's question."""
    text: str = tab.locator(".g-answer").inner_text()
    return text


def table(tab: Any, name: str) -> list[list[str]]:
    """Cells of the rows of a table by its name."""
    rows = tab.get_by_role("region", name=name, exact=True).locator("tbody tr")
    rows.first.wait_for()
    return [[cell.strip() for cell in row.locator("th, td").all_inner_texts()] for row in rows.all()]


def upload(tab: Any, file: Path) -> None:
    """Give the first page a file."""
    tab.set_input_files("[data-testid=stMain] [data-testid=stFileUploaderDropzoneInput]", str(file))


def own_button(tab: Any, name: str) -> Any:
    """A button of the page: Streamlit's header has a Stop of its own while a script runs."""
    return tab.get_by_test_id("stMain").get_by_role("button", name=name, exact=True)


def thread_ticks() -> dict[str, int]:
    """The threads of the server and of its searches, and the CPU time of each so far in ticks of 10 ms."""
    ticks = {}
    for process in (server_process[0], *children_of(server_process[0])):
        for folder in Path("/proc").glob(f"{process}/task/*"):
            with contextlib.suppress(OSError):  # a thread that has ended meanwhile
                fields = _fields(folder)
                ticks[folder.name] = int(fields[11]) + int(fields[12])
    return ticks


def children_of(parent: int) -> list[int]:
    """The processes that a process has started and that still run."""
    children = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdigit() and int(_fields(folder)[1]) == parent:
                children.append(int(folder.name))
    return children


def _fields(folder: Path) -> list[str]:
    """What the system says of a process or a thread after its name: state, parent, and so on."""
    return (folder / "stat").read_text().rpartition(")")[2].split()


def threads_at_work(known: Collection[str]) -> set[str]:
    """Waits until threads that are not among the known ones compute; gives them.

    So what the server computes unasked does not count.
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
    """Until these threads have ended, or compute nothing for a second."""
    deadline = time.monotonic() + ENDED_S
    before, now = {}, thread_ticks()
    while any(now[each] > before.get(each, 0) for each in threads & now.keys()):
        assert time.monotonic() < deadline, "the server goes on computing"
        time.sleep(1.0)
        before, now = now, thread_ticks()
