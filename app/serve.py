"""What `gpusim app` runs: Streamlit on `Home.py`, and meanwhile what the first page needs.

A browser takes a second to load Streamlit's own page; until it asks for ours, what the first page shows is read or
computed, and once it is there, the engine is loaded. Arguments are those of `streamlit run`, without the script.
"""

import sys
import threading
import time
from pathlib import Path
from typing import Any

from streamlit.web.cli import main

#: After so long, go on without having seen the server start, or a page.
PATIENCE_S = 20.0
#: How long a browser may take to fetch and draw the figures of a page whose script has ended; the engine waits.
DRAWING_S = 4.0
SWITCH_S = 0.001


def prepare() -> None:
    """Into the caches that every session shares."""
    wait_for_server()
    from gpusim_dashboard import ready

    ready.first_page()
    ready.shown().wait(PATIENCE_S)
    time.sleep(DRAWING_S)
    ready.other_pages()


def wait_for_server() -> None:
    """Until browsers are answered: what begins before only makes that later, as Python runs one thread at a time."""
    from streamlit.runtime import Runtime, RuntimeState

    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if Runtime.exists() and Runtime.instance().state is not RuntimeState.INITIAL:
            return
        time.sleep(0.01)


class HostCheck:
    """Answers requests for the hosts in `server.allowedHosts` alone; Streamlit itself holds only WebSockets to them."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """As ASGI wants it."""
        from starlette.datastructures import Headers
        from starlette.responses import PlainTextResponse
        from streamlit.web.server.starlette.starlette_websocket import is_host_allowed

        if scope["type"] == "http" and not is_host_allowed(Headers(scope=scope).get("host")):
            refusal = PlainTextResponse("This name is not the dashboard's: gpusim app --allow-host NAME.", 403)
            await refusal(scope, receive, send)
            return
        await self.app(scope, receive, send)


def check_hosts() -> None:
    """Put the check before everything else that the server does."""
    from starlette.middleware import Middleware
    from streamlit.web.server.starlette import starlette_app

    own = starlette_app.create_streamlit_middleware
    starlette_app.create_streamlit_middleware = lambda: [Middleware(HostCheck), *own()]


if __name__ == "__main__":
    check_hosts()
    # The thread that sends pages must not wait long for one that computes (5 ms each time by default).
    sys.setswitchinterval(SWITCH_S)
    threading.Thread(target=prepare, name="prepare", daemon=True).start()
    sys.argv = ["streamlit", "run", str(Path(__file__).with_name("Home.py")), *sys.argv[1:]]
    sys.exit(main(prog_name="streamlit"))
