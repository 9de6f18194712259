"""The script of `gpusim app`: runs Streamlit on `Home.py` and prepares the first page meanwhile.

A browser needs a second to load Streamlit itself; in that time the first page's results are read or computed, and the
engine is loaded after it is shown. Arguments are those of `streamlit run`, without the script.
"""

import contextlib
import gc
import importlib
import sys
import threading
import time
from pathlib import Path
from typing import Any

from streamlit.web.cli import main

#: Longest wait for the server to start and for a page to be shown.
PATIENCE_S = 20.0
#: Time for a browser to fetch and draw a page's figures after its script has ended; loading the engine waits for it.
DRAWING_S = 4.0
SWITCH_S = 0.001
#: When Python collects garbage. A step of 20,000 ops is millions of objects, of which hardly any is garbage: with the
#: defaults of 700, 10 and 10, a third of the time of its verdict went into collections.
COLLECT = (50_000, 20, 100)


def prepare(ended: threading.Event) -> None:
    """Fill the caches that all sessions share, until the server has ended."""
    wait_for_server()
    try:
        from gpusim_dashboard import ready

        ready.first_page()
        ready.shown().wait(PATIENCE_S)
        time.sleep(DRAWING_S)
        ready.other_pages()
    except RuntimeError:
        if not ended.is_set():
            raise
        # Ctrl-C has ended the server: Python starts no threads any more.


def wait_for_server() -> None:
    """Wait until the server answers browsers: earlier work would only delay that, as Python runs one thread at a
    time.
    """
    from streamlit.runtime import Runtime, RuntimeState

    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if Runtime.exists() and Runtime.instance().state is not RuntimeState.INITIAL:
            return
        time.sleep(0.01)


class HostCheck:
    """Rejects requests for hosts outside `server.allowedHosts`; Streamlit itself checks only WebSockets."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle an ASGI request."""
        from starlette.datastructures import Headers
        from starlette.responses import PlainTextResponse
        from streamlit.web.server.starlette.starlette_websocket import is_host_allowed

        if scope["type"] == "http" and not is_host_allowed(Headers(scope=scope).get("host")):
            refusal = PlainTextResponse("This name is not the dashboard's: gpusim app --allow-host NAME.", 403)
            await refusal(scope, receive, send)
            return
        await self.app(scope, receive, send)


def check_hosts() -> None:
    """Insert the check before all other middleware of the server."""
    from starlette.middleware import Middleware
    from streamlit.web.server.starlette import starlette_app

    own = starlette_app.create_streamlit_middleware
    starlette_app.create_streamlit_middleware = lambda: [Middleware(HostCheck), *own()]


def skip_scan() -> None:
    """Keep Streamlit from reading the metadata of all installed packages at its start, for components that they bring.

    The dashboard has components of its own alone; the scan takes 0.1 s, more with more packages.
    """
    with contextlib.suppress(ImportError):  # other versions of Streamlit scan nothing, or elsewhere
        scanner = importlib.import_module("streamlit.components.v2.manifest_scanner")
        scanner.scan_component_manifests = list  # type: ignore[attr-defined]


if __name__ == "__main__":
    check_hosts()
    skip_scan()
    # A thread that serves pages must not wait long for one that computes (5 ms by default).
    sys.setswitchinterval(SWITCH_S)
    gc.set_threshold(*COLLECT)
    ended = threading.Event()
    threading.Thread(target=prepare, args=(ended,), name="prepare", daemon=True).start()
    sys.argv = ["streamlit", "run", str(Path(__file__).with_name("Home.py")), *sys.argv[1:]]
    try:
        sys.exit(main(prog_name="streamlit"))
    finally:
        ended.set()
