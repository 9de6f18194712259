"""Response times of the dashboard: the first answer, a what-if, and the answers to 20 concurrent sessions.

    python benchmarks/dashboard.py [PART...] [--rounds 5] [--sessions 20] [--machine "2 cores, otherwise idle"]

Measures the parts, or all (`PARTS`), keeps each in build/dashboard, and prints what is known. Once no part is missing,
it writes the tables between the marks in research/2026-11-23-dashboard.md. Exits with 1 where a target is missed. All
but one part run in a real browser on the same machine. Needs the extra `app`, playwright and Chromium, as the browser
tests do. Each part takes about a minute.

*Sessions*, served: time until the server has sent the answer to each of the sessions that open a link at the same
moment, over Streamlit's own protocol, while four others search: the wait of users whose own machines draw the pages.
*Sessions*, drawn: the same in as many tabs of one browser, which shares the processors with the server; and *bare*, in
as many tabs with bare pages of Streamlit, whose time is the browser's alone.

*Verdict*: time until the browser shows it, in turns with a bare Streamlit page with a title and a box. It is measured
once from the start of the server's process, with the page's data on disk from an earlier start, and once in a new tab
of a running server. *What-if*: from a key press on a slider to the new time.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from importlib.metadata import version
from itertools import cycle
from pathlib import Path
from typing import Any

import websockets
from playwright.sync_api import Browser, Page, TimeoutError, sync_playwright
from streamlit.proto.BackMsg_pb2 import BackMsg
from streamlit.proto.ForwardMsg_pb2 import ForwardMsg

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.page import fill  # noqa: E402
from scripts.make_screenshots import DONE, PAGES, browser_path, free_port, wait_for  # noqa: E402
from tests.support.browser import children_of  # noqa: E402

PAGE = ROOT / "research" / "2026-11-23-dashboard.md"
TRACE, STREAMS = "googlenet-train-b8", 8
BARE = """
import streamlit as st
st.title("bare")
st.success("verdict")
"""
#: The same pages of Streamlit's own: a title with a box, or with a figure of two bars.
BARE_PAGES = """
import streamlit as st
def answer():
    st.title(page.title)
    st.success("answer")
def figure():
    import plotly.graph_objects as go
    st.title(page.title)
    st.plotly_chart(go.Figure(go.Bar(x=[1, 2], y=[3, 4])))
names = ("limits", "what-if", "timeline", "verdict")
page = st.navigation(
    [st.Page(figure if name == "timeline" else answer, title=name, url_path=name) for name in names])
page.run()
"""
BARE_FIGURE = ".js-plotly-plot"
BARE_ANSWER, ANSWER = "[data-testid=stAlert]", ".g-answer"
#: Selector of the element that shows a page's answer, by page.
ANSWERED = {
    "verdict": ANSWER,
    "limits": ANSWER,
    "what-if": "[aria-label='The step as it is and with the settings below']",
    "timeline": ".js-plotly-plot .barlayer path",
}
#: Kind and content of the element that carries a page's answer.
SENT = {
    "verdict": ("html", 'class="g-answer'),
    "limits": ("html", 'class="g-answer'),
    "what-if": ("html", "The step as it is and with the settings below"),
    "timeline": ("plotly_chart", ""),
}
#: Targets, in seconds and bytes.
MOST_OVER_BARE_S, MOST_WHAT_IF_S, MOST_ANSWER_S, MOST_BYTES = 0.8, 0.2, 5.0, 2e9
#: Parts, with their names in the table.
PARTS = {
    "start": "from the start",
    "tab": "new tab",
    "what-if": "a slider",
    "served": "{count} sessions, served",
    "drawn": "{count} sessions, drawn",
    "bare": "{count} sessions, bare pages",
}
#: Folder of what was measured so far, and of the dashboard's own data.
KEPT = ROOT / "build" / "dashboard"
WAIT_MS = 300_000
PRESSES, UNCHANGED_MS = 12, 3_000
SEARCHING = 4
IDLE_S = 2.0
#: Streamlit's status of a script that has run to its end.
FINISHED = ForwardMsg.ScriptFinishedStatus.Value("FINISHED_SUCCESSFULLY")
#: Script in a page: open another page by its link, and record when its answer is shown.
GO = """([label, question, answered]) => {
  const begin = performance.now();
  window.took = undefined;
  const look = () => {
    if (document.querySelector('h1')?.innerText === question && document.querySelector(answered))
      window.took = (performance.now() - begin) / 1000;
    else requestAnimationFrame(look);
  };
  const links = [...document.querySelectorAll('[data-testid=stSidebarNavLink]')];
  links.find((link) => link.innerText.trim().endsWith(label)).click();
  requestAnimationFrame(look);
}"""
CELL = "document.querySelector(\"[aria-label='The step as it is and with the settings below'] tbody tr:last-child td\")"


@contextmanager
def started(words: list[str], environment: dict[str, str]) -> Iterator[tuple[str, int]]:
    """Start a server, and yield its address and process id; it need not answer yet."""
    port = free_port()
    words = [word.replace("PORT", str(port)) for word in words]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, env=os.environ | environment) as process:
        try:
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()
            process.wait(30)


def new_tab(browser: Browser) -> Page:
    """Open a tab as a new user."""
    tab = browser.new_context(viewport={"width": 1280, "height": 800}).new_page()
    tab.set_default_timeout(WAIT_MS)
    return tab


def cpu_s(pid: int) -> float:
    """Return the processor time of a process so far, in s."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def peak_bytes(pid: int) -> int:
    """Return the peak memory of a process and its running children, in bytes."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024 + sum(peak_bytes(child) for child in children_of(pid))


def wait_until_idle(pid: int) -> None:
    """Wait until a process computes next to nothing."""
    before = -1.0
    while (now := cpu_s(pid)) > before + 0.05 * IDLE_S:
        before = now
        time.sleep(IDLE_S)


def link(page: str, trace: str = TRACE) -> str:
    """Return the query of a page about a bundled step."""
    return f"/?page={page}&trace={trace}&streams={STREAMS}"


def first_answer(browser: Browser, words: list[str], environment: dict[str, str], query: str, answer: str) -> float:
    """Return the seconds from the start of the process until its page shows an answer."""
    tab = new_tab(browser)
    begin = time.perf_counter()
    with started(words, environment) as (address, _):
        wait_for(address)
        tab.goto(f"{address}{query}", wait_until="commit")
        tab.locator(answer).first.wait_for()
        answer_s = time.perf_counter() - begin
        tab.wait_for_selector(DONE)
        tab.context.close()
    return answer_s


def answer_in_new_tab(browser: Browser, address: str, answer: str) -> float:
    """Return the seconds from address to answer, for a running server."""
    tab = new_tab(browser)
    begin = time.perf_counter()
    tab.goto(address, wait_until="commit")
    tab.locator(answer).first.wait_for()
    answer_s = time.perf_counter() - begin
    tab.wait_for_selector(DONE)
    tab.context.close()
    return answer_s


def what_if(browser: Browser, address: str) -> list[float]:
    """Return the seconds from a key press on the slider of SMs until the page shows another time."""
    tab = new_tab(browser)
    tab.goto(f"{address}{link('what-if')}")
    tab.locator(ANSWERED["what-if"]).wait_for()
    tab.wait_for_selector(DONE)
    tab.wait_for_timeout(2_000)
    tab.locator("[data-testid=stSlider]").filter(has_text="SMs").get_by_role("slider").focus()
    times_s = []
    for _ in range(PRESSES):
        before = tab.evaluate(f"{CELL}.innerText")
        begin = time.perf_counter()
        tab.keyboard.press("ArrowLeft")
        # Another SM need not change the displayed digits: such a press is not counted.
        with suppress(TimeoutError):
            changed = f"before => {CELL}?.innerText !== before"
            tab.wait_for_function(changed, arg=before, polling=5, timeout=UNCHANGED_MS)
            times_s.append(time.perf_counter() - begin)
        tab.wait_for_selector(DONE)
        tab.wait_for_timeout(300)
    tab.context.close()
    return times_s


async def served_session(address: str, page: str, trace: str) -> float:
    """Return the seconds until the server has sent a page's answer to a new session, which also waits for the rest."""
    begin = time.perf_counter()
    where = f"{address.replace('http', 'ws', 1)}/_stcore/stream"
    kind, words = SENT[page]
    took_s = math.nan
    async with websockets.connect(where, max_size=None, subprotocols=["streamlit"], origin=address) as socket:
        question = BackMsg()
        question.rerun_script.query_string = link(page, trace).removeprefix("/?")
        await socket.send(question.SerializeToString())
        while True:
            message = ForwardMsg()
            message.ParseFromString(await socket.recv())
            element = message.delta.new_element
            if element.WhichOneof("type") == kind and words in str(element.html.body) and math.isnan(took_s):
                took_s = time.perf_counter() - begin
            # A page that writes its settings into the address ends early; a second run follows.
            if message.WhichOneof("type") == "script_finished" and message.script_finished == FINISHED:
                return took_s


async def served(address: str, count: int) -> dict[str, list[float]]:
    """Return the seconds to each answer of the server, by page, for `count` concurrent sessions."""
    import gpusim

    steps = gpusim.list_traces()
    names = list(ANSWERED)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(len(names)):
        going = [names[(turn + number) % len(names)] for number in range(count)]
        asked = [served_session(address, name, steps[number % len(steps)]) for number, name in enumerate(going)]
        for name, took_s in zip(going, await asyncio.gather(*asked), strict=True):
            seconds[name].append(took_s)
    return seconds


@contextmanager
def searching(browser: Browser, address: str) -> Iterator[None]:
    """Tabs of other users whose searches run meanwhile."""
    tabs = [new_tab(browser) for _ in range(SEARCHING)]
    for tab in tabs:
        tab.goto(f"{address}{link('search')}&seconds=300")
        tab.get_by_test_id("stMain").get_by_role("button", name="Start", exact=True).click()
        tab.locator("[data-testid=stProgress]").wait_for()
    yield
    for tab in tabs:
        tab.context.close()


def served_sessions(browser: Browser, address: str, count: int, pid: int) -> tuple[dict[str, list[float]], int]:
    """Return the seconds to each answer of concurrent sessions, by page, as served, and the server's memory."""
    with searching(browser, address), ThreadPoolExecutor(1) as other:  # playwright's own loop runs in this thread
        answers = other.submit(asyncio.run, served(address, count)).result()
        return answers, peak_bytes(pid)


def drawn_sessions(browser: Browser, address: str, count: int) -> dict[str, list[float]]:
    """Return the seconds to each answer of concurrent sessions, by page, as drawn by one browser."""
    import gpusim

    with searching(browser, address):
        tabs = [new_tab(browser) for _ in range(count)]
        for tab, trace in zip(tabs, cycle(gpusim.list_traces()), strict=False):
            tab.goto(f"{address}{link('verdict', trace)}")
            tab.locator(ANSWER).wait_for()
        return drawn(tabs, {name: (PAGES[name].label, PAGES[name].question, ANSWERED[name]) for name in ANSWERED})


def drawn(tabs: list[Page], pages: dict[str, tuple[str, str, str]]) -> dict[str, list[float]]:
    """Seconds to each answer in the browser, by page, where all tabs go to another page at once; closes the tabs.

    `pages` has the label, the heading and the answer's selector of each page.
    """
    times_s: dict[str, list[float]] = {name: [] for name in pages}
    names = list(pages)
    for turn in range(1, len(names) + 1):
        going = [names[(turn + number) % len(names)] for number in range(len(tabs))]
        for tab, name in zip(tabs, going, strict=True):
            tab.evaluate(GO, pages[name])
        for tab, name in zip(tabs, going, strict=True):
            tab.wait_for_function("window.took !== undefined")
            times_s[name].append(tab.evaluate("window.took"))
        for tab in tabs:
            tab.wait_for_selector(DONE)
    for tab in tabs:
        tab.context.close()
    return times_s


def bare_sessions(browser: Browser, address: str, count: int) -> dict[str, list[float]]:
    """As `drawn` for bare pages."""
    tabs = [new_tab(browser) for _ in range(count)]
    for tab in tabs:
        tab.goto(f"{address}/verdict")
        tab.locator(BARE_ANSWER).wait_for()
    return drawn(tabs, {name: (name, name, BARE_FIGURE if name == "timeline" else BARE_ANSWER) for name in ANSWERED})


def seconds(values: list[float]) -> str:
    """Return best, median and worst, as cells of a table."""
    return f"{min(values):.2f} | {statistics.median(values):.2f} | {max(values):.2f}"


def targets_of(measured: dict[str, Any], count: int) -> Iterator[tuple[str, float, float]]:
    """Yield name, value and limit of each target whose parts were measured."""
    if "start" in measured:
        over = statistics.median(measured["start"]["verdict"]) - statistics.median(measured["start"]["bare"])
        yield "verdict over a bare page, from the start (s)", over, MOST_OVER_BARE_S
    if "tab" in measured:
        over = statistics.median(measured["tab"]["verdict"]) - statistics.median(measured["tab"]["bare"])
        yield "verdict over a bare page, new tab (s)", over, MOST_OVER_BARE_S
    if "what-if" in measured:
        yield "what-if, median (s)", statistics.median(measured["what-if"]["what-if"]), MOST_WHAT_IF_S
    if "served" in measured:
        slowest = max(max(measured["served"][name]) for name in ANSWERED)
        yield f"slowest answer of {count} sessions at once, served (s)", slowest, MOST_ANSWER_S
        yield "the server's most memory, with four searches (GB)", measured["served"]["bytes"] / 1e9, MOST_BYTES / 1e9


def report(measured: dict[str, Any], options: argparse.Namespace, browser: str) -> tuple[str, bool]:
    """Return the part of the page, and whether every target is met."""
    targets = list(targets_of(measured, options.sessions))
    rows = [
        (f"{PARTS[part]}: {name}".format(count=options.sessions), load_of, values)
        for part in PARTS
        if part in measured
        for load_of in [measured[part]["load"]]
        for name, values in measured[part].items()
        if name not in ("load", "bytes")
    ]
    software = ", ".join(f"{name} {version(name)}" for name in ("streamlit", "plotly", "numpy", "numba"))
    lines = [
        f"{datetime.date.today()}, {options.machine}. "
        f"Python {platform.python_version()}, {software}, Chromium {browser}.",
        "",
        "| what | measured | target | met |",
        "|---|--:|--:|---|",
        *(
            f"| {name} | {value:.2f} | {most:.1f} | {'yes' if value <= most else 'no'} |"
            for name, value, most in targets
        ),
        "",
        "| time to the answer, s | load before | best | median | slowest |",
        "|---|--:|--:|--:|--:|",
        *(f"| {name} | {load:.1f} | {seconds(values)} |" for name, load, values in rows),
    ]
    return "\n".join(lines), all(value <= most for _, value, most in targets)


def measure(part: str, browser: Browser, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one part."""
    app = [sys.executable, "-m", "gpusim.cli", "app", "--headless", "--port", "PORT"]
    kept = {"XDG_CACHE_HOME": str(folder / "cache")}
    quiet = ["--server.headless=true", "--server.address=127.0.0.1", "--server.fileWatcherType=none"]
    streamlit = [sys.executable, "-m", "streamlit", "run", "--server.port=PORT", "--browser.gatherUsageStats=false"]
    script = folder / "bare.py"
    script.write_text(BARE_PAGES if part == "bare" else BARE)
    bare = [*streamlit, *quiet, str(script)]
    if part == "bare":
        with started(bare, {}) as (plain, _):
            wait_for(plain)
            return bare_sessions(browser, plain, options.sessions)
    with started(app, kept) as (address, pid):  # explores the samples, and keeps what it measured
        wait_for(address)
        answer_in_new_tab(browser, f"{address}{link('verdict')}", ANSWER)
        time.sleep(4 * IDLE_S)
        wait_until_idle(pid)
        if part == "what-if":
            return {"what-if": what_if(browser, address)}
        if part == "served":
            answers, most = served_sessions(browser, address, options.sessions, pid)
            return {**answers, "bytes": most}
        if part == "drawn":
            return drawn_sessions(browser, address, options.sessions)
        times: dict[str, list[float]] = {"bare": [], "verdict": []}
        if part == "tab":
            with started(bare, {}) as (plain, _):
                wait_for(plain)
                for _ in range(options.rounds):
                    times["bare"].append(answer_in_new_tab(browser, plain, BARE_ANSWER))
                    times["verdict"].append(answer_in_new_tab(browser, f"{address}{link('verdict')}", ANSWER))
            return times
    for _ in range(options.rounds):
        times["bare"].append(first_answer(browser, bare, {}, "/", BARE_ANSWER))
        times["verdict"].append(first_answer(browser, app, kept, link("verdict"), ANSWER))
    return times


def main() -> None:
    """Measure the parts asked for, print all that are known, and write the page once none is missing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="these alone (default: all)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sessions", type=int, default=20)
    cores = f"{platform.machine()}, {os.cpu_count()} cores"
    parser.add_argument("--machine", default=cores, help="in words, such as what else ran on it")
    options = parser.parse_args()
    KEPT.mkdir(parents=True, exist_ok=True)
    state = KEPT / "measured.json"
    measured: dict[str, Any] = json.loads(state.read_text()) if state.exists() else {}
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        for part in options.parts or PARTS:
            load = os.getloadavg()[0]
            measured[part] = {**measure(part, browser, KEPT, options), "load": load}
            state.write_text(json.dumps(measured))
            print(f"{part}: measured", file=sys.stderr)
        text, met = report(measured, options, browser.version)
        browser.close()
    if set(PARTS) <= set(measured):
        fill(PAGE, "measured", text)
    print(text)
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
