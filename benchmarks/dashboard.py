"""How long the dashboard's first page and its what-if answers take.

    python benchmarks/dashboard.py [--rounds 3] [--cold]

*First page*: from the start of the process `gpusim app` to what a browser that is already open shows of it, beside a
page of Streamlit's with a title and one small figure, started in the same way and in turns. What the page shows is then
on disk from a start before; a line under the table is that start, which explores. `--cold` adds one with no compiled
engine on disk either, as after an installation. *What-if*: from a key press on a slider to the new number, in the
browser; and the same work without one. Needs the extra `app`, playwright and Chromium, as the browser tests do.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from playwright.sync_api import Browser, Page, TimeoutError, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.make_screenshots import DONE, browser_path, free_port, wait_for  # noqa: E402

TRACE, STREAMS = "googlenet-train-b8", 8
BARE = """
import streamlit as st
import plotly.graph_objects as go
st.title("bare")
st.plotly_chart(go.Figure(go.Bar(x=[1, 2], y=[2, 1])))
st.success("verdict")
"""
PLOT, VERDICT = ".js-plotly-plot .barlayer path", "[data-testid=stAlert]"
WAIT_MS = 120_000
PRESSES, UNCHANGED_MS = 10, 3_000


@contextmanager
def started(words: list[str], environment: dict[str, str]) -> Iterator[tuple[str, int]]:
    """Address and process id of a server that has just been started, and need not answer yet."""
    port = free_port()
    words = [word.replace("PORT", str(port)) for word in words]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, env=os.environ | environment) as process:
        try:
            yield f"http://127.0.0.1:{port}", process.pid
        finally:
            process.terminate()
            process.wait(30)


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def first_page(browser: Browser, words: list[str], environment: dict[str, str]) -> dict[str, float]:
    """Seconds from the start of the process until each part of its first page is there."""
    tab = browser.new_page(viewport={"width": 1280, "height": 900})
    tab.set_default_timeout(WAIT_MS)
    begin = time.perf_counter()
    found = {}
    with started(words, environment) as (address, pid):
        wait_for(address)
        found["server answers"] = time.perf_counter() - begin
        tab.goto(address, wait_until="commit")
        for name, selector in (("title", "h1"), ("verdict", VERDICT), ("first figure", PLOT), ("complete", DONE)):
            tab.locator(selector).first.wait_for()
            found[name] = time.perf_counter() - begin
        found["server's processor time"] = cpu_s(pid)
    tab.close()
    return found


def what_if(tab: Page, address: str) -> list[float]:
    """Seconds from a key press on the slider of SMs until the page shows another time."""
    tab.goto(f"{address}/?page=what-if&trace={TRACE}&streams={STREAMS}")
    tab.wait_for_selector("[data-testid=stMetricValue]")
    tab.wait_for_selector(PLOT)
    tab.wait_for_selector(DONE)
    value = tab.locator("[data-testid=stMetric]").nth(1).locator("[data-testid=stMetricValue]")
    handle = tab.locator("[data-testid=stSlider]").filter(has_text="SMs").get_by_role("slider")
    handle.focus()
    found = []
    for _ in range(PRESSES):
        before = value.inner_text()
        begin = time.perf_counter()
        handle.press("ArrowLeft")
        # Another SM need not change the digits shown: such a press is not counted.
        with suppress(TimeoutError):
            tab.wait_for_function(
                "before => document.querySelectorAll('[data-testid=stMetricValue]')[1]?.innerText.trim() !== before",
                arg=before.strip(),
                polling=5,
                timeout=UNCHANGED_MS,
            )
            found.append(time.perf_counter() - begin)
        tab.wait_for_selector(DONE)
        tab.wait_for_timeout(300)
    return found


def what_if_alone() -> tuple[list[float], list[float]]:
    """Seconds for the changed result, and for the tornado plot's sensitivities."""
    from gpusim.hardware.model import load_hardware
    from gpusim.plan.graph import OpGraph
    from gpusim.search.simulation import simulate
    from gpusim.search.whatif import Change, changed_graph, policy_schedule, sensitivities
    from gpusim.trace.store import load_trace

    graph = OpGraph.build(load_trace(TRACE), load_hardware("h200"))
    simulate(graph, policy_schedule(graph, "critical_path", STREAMS))
    results, rows = [], []
    for fewer in range(PRESSES):
        begin = time.perf_counter()
        changed = changed_graph(graph, Change(sms=131 - fewer))
        found = simulate(changed, policy_schedule(changed, "critical_path", STREAMS))
        results.append(time.perf_counter() - begin)
        sensitivities(found)
        rows.append(time.perf_counter() - begin - results[-1])
    return results, rows


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="also start without a compiled engine on disk")
    options = parser.parse_args()
    app = [sys.executable, "-m", "gpusim.cli", "app", "--headless", "--port", "PORT"]
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        (Path(folder) / "bare.py").write_text(BARE)
        quiet = ["--server.headless=true", "--browser.gatherUsageStats=false", "--server.fileWatcherType=none"]
        bare = [sys.executable, "-m", "streamlit", "run", f"{folder}/bare.py", "--server.port=PORT", *quiet]
        browser = driver.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        kept = {"XDG_CACHE_HOME": f"{folder}/cache"}
        exploring = first_page(browser, app, kept)
        runs: dict[str, list[dict[str, float]]] = {"bare": [], "app": []}
        for _ in range(options.rounds):
            runs["bare"].append(first_page(browser, bare, {}))
            runs["app"].append(first_page(browser, app, kept))
        print(f"first page, s from the start: best (median) of {options.rounds}, load {os.getloadavg()[0]:.1f}")
        for part in runs["app"][0]:
            texts = [summary([run[part] for run in runs[name]]) for name in ("bare", "app")]
            print(f"  {part:24} bare {texts[0]}  gpusim {texts[1]}")
        ratio = min(run["complete"] for run in runs["app"]) / min(run["complete"] for run in runs["bare"])
        print(f"  complete, gpusim over bare: {ratio:.2f}")
        print("  nothing kept yet: " + ", ".join(f"{part} {seconds:.2f}" for part, seconds in exploring.items()))
        if options.cold:
            cold = {"NUMBA_CACHE_DIR": f"{folder}/numba", "XDG_CACHE_HOME": f"{folder}/empty"}
            found = first_page(browser, app, cold)
            print("  nothing compiled: " + ", ".join(f"{part} {seconds:.2f}" for part, seconds in found.items()))
        with started(app, kept) as (address, _):
            wait_for(address)
            tab = browser.new_page(viewport={"width": 1280, "height": 900})
            tab.set_default_timeout(WAIT_MS)
            presses = what_if(tab, address)
        browser.close()
    result, tornado = what_if_alone()
    print(f"what-if, s: key press to new number in the browser {summary(presses)}")
    print(f"  of that, library: result {summary(result)}, sensitivities {summary(tornado)}")


def summary(seconds: list[float]) -> str:
    """Best and median."""
    return f"{min(seconds):.3f} ({statistics.median(seconds):.3f})"


if __name__ == "__main__":
    main()
