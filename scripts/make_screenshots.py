"""Take the pictures of the dashboard in docs/images: `app_<page>_<light|dark>.png`.

    python scripts/make_screenshots.py            the pages that the documentation shows
    python scripts/make_screenshots.py --all -o FOLDER    every page at three widths, light and dark, to look at

Needs the extra `app`, playwright and Chromium, as tests/app/test_app_browser.py does.
"""

from __future__ import annotations

import argparse
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, sync_playwright

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "app"))

from gpusim_dashboard.pages import PAGES  # noqa: E402

#: Pictures in the documentation: page, scheme, height of the window.
SHOWN = (("verdict", "light", 1000), ("timeline", "dark", 1000), ("what-if", "light", 1000))
TRACE, STREAMS = "googlenet-train-b8", 8
WIDTH = 1280
WIDTHS = (390, WIDTH, 1920)
DONE = "[data-testid=stApp][data-test-script-state=notRunning]"
HEIGHT = "document.querySelector('[data-testid=stMain]').scrollHeight"
#: Time for figures to settle after their script has ended.
REST_MS = 2_000


def free_port() -> int:
    """Return an unused port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def browser_path() -> str:
    """Return the system's Chromium, or the program named in CHROMIUM."""
    program = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if program is None:
        raise SystemExit("no browser: apt-get install chromium, or its path in CHROMIUM")
    return program


def wait_for(address: str) -> None:
    """Wait until the dashboard answers."""
    for _ in range(3_000):
        try:
            urllib.request.urlopen(f"{address}/_stcore/health", timeout=5).close()
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.02)
    raise SystemExit(f"no answer from {address}")


@contextmanager
def dashboard() -> Iterator[str]:
    """Run a dashboard, and yield its address."""
    port = free_port()
    words = [sys.executable, "-m", "gpusim.cli", "app", "--headless", "--port", str(port)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        address = f"http://127.0.0.1:{port}"
        try:
            wait_for(address)
            yield address
        finally:
            process.terminate()
            process.wait(30)


def shoot(browser: Browser, address: str, scheme: str, size: tuple[int, int | None], path: Path) -> None:
    """Take one picture; without a height, of the whole page."""
    width, height = size
    context = browser.new_context(viewport={"width": width, "height": height or 900}, color_scheme=scheme)
    tab = context.new_page()
    tab.goto(address)
    tab.wait_for_selector("h1", timeout=120_000)
    tab.wait_for_selector(DONE, timeout=120_000)
    tab.wait_for_timeout(REST_MS)
    if height is None:
        tall = 0
        # A taller window may need another step, since tables and figures are drawn once visible.
        while (now := int(tab.evaluate(HEIGHT))) > tall:
            tall = now
            tab.set_viewport_size({"width": width, "height": tall})
            tab.wait_for_selector(DONE, timeout=120_000)
            tab.wait_for_timeout(REST_MS)
    tab.screenshot(path=path)
    context.close()
    compress(path)
    print(f"{path}: {path.stat().st_size / 1024:.0f} KiB")


def compress(path: Path) -> None:
    """Reduce a PNG without changing a colour: fewer colours would merge those of the legends."""
    from PIL import Image

    with Image.open(path) as image:
        small = image.convert("RGB")
    small.save(path, optimize=True)


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every page, width and scheme, whole pages")
    parser.add_argument("--pages", nargs="*", default=list(PAGES), help="with --all, these alone")
    parser.add_argument("--trace", default=TRACE, help="the step that pages are about")
    parser.add_argument("-o", "--output", type=Path, default=ROOT / "docs" / "images", help="folder of the pictures")
    options = parser.parse_args()
    options.output.mkdir(parents=True, exist_ok=True)
    every = [(page, scheme, width, None) for page in options.pages for width in WIDTHS for scheme in ("light", "dark")]
    shown = [(page, scheme, WIDTH, height) for page, scheme, height in SHOWN]
    with dashboard() as address, sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=browser_path(), args=["--no-sandbox"])
        for page, scheme, width, height in every if options.all else shown:
            name = f"app_{page}_{width}_{scheme}.png" if options.all else f"app_{page}_{scheme}.png"
            link = f"{address}/?page={page}&trace={options.trace}&streams={STREAMS}"
            shoot(browser, link, scheme, (width, height), options.output / name)
        browser.close()


if __name__ == "__main__":
    main()
