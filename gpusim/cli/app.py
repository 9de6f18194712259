"""`gpusim app`: the dashboard."""

from __future__ import annotations

import importlib.util
import os
import socket
import sys

import click

from gpusim.errors import GpusimError, OptionError

DEFAULT_PORT = 8501
#: This machine only: whoever can open the dashboard can use its processors.
ADDRESS = "127.0.0.1"
#: Blue and sky of the figures (gpusim/report/figures/theme.py, which imports plotly): red is for errors.
PRIMARY_LIGHT, PRIMARY_DARK = "#0072B2", "#56B4E9"
MISSING = "the dashboard needs {package}, which is not installed (pip install 'gpusim[app]')"


@click.command()
@click.option("--port", type=click.IntRange(1, 65535), default=DEFAULT_PORT, show_default=True)
@click.option(
    "--address", default=ADDRESS, show_default=True, help="Where to listen; by default for this machine only."
)
@click.option("--headless", is_flag=True, help="Open no browser.")
def app(port: int, address: str, headless: bool) -> None:
    """Open the dashboard in a browser: what-if questions without writing code. Ctrl-C ends it."""
    from gpusim.file_limits import MAX_UPLOAD_BYTES
    from gpusim.resources import resource_dir
    from gpusim.units import MIB

    for package in ("streamlit", "plotly"):
        if importlib.util.find_spec(package) is None:
            raise GpusimError(MISSING.format(package=package))
    _check_port(address, port)
    serve = resource_dir("app") / "serve.py"
    options = {
        "server.address": address,
        "server.port": port,
        "server.headless": headless,
        "server.maxUploadSize": MAX_UPLOAD_BYTES // MIB,
        "server.showEmailPrompt": False,
        "server.fileWatcherType": "none",
        "browser.gatherUsageStats": False,
        "client.toolbarMode": "viewer",
        "client.showErrorLinks": False,
        "global.developmentMode": False,
        "theme.light.primaryColor": PRIMARY_LIGHT,
        "theme.dark.primaryColor": PRIMARY_DARK,
    }
    words = [f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in options.items()]
    sys.stdout.flush()
    # Streamlit takes the place of this process: signals and exit codes are its own, and gpusim imports none of it.
    os.execv(sys.executable, [sys.executable, str(serve), *words])


def _check_port(address: str, port: int) -> None:
    """Raise `OptionError` where the dashboard could not listen."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # As the server itself does: a port whose last connections are just timing out is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except OSError as cause:
        problem = cause.strerror or str(cause)
        raise OptionError(
            f"--port {port}: cannot listen on {address}: {problem}; choose another with --port"
        ) from cause
