"""`gpusim app`: the dashboard."""

from __future__ import annotations

import importlib.util
import os
import re
import socket
import sys
from collections.abc import Iterable
from contextlib import suppress

import click

from gpusim.errors import GpusimError, OptionError
from gpusim.text import short_value

DEFAULT_PORT = 8501
#: This machine only: anyone who can open the dashboard can use its processors.
ADDRESS = "127.0.0.1"
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")
EVERY_ADDRESS = ("0.0.0.0", "::")
#: Maximum length of a DNS name.
HOST_CHARACTERS = 253
#: A host name or an IPv4 or IPv6 address, without patterns.
HOST_NAME = re.compile(r"[A-Za-z0-9._-]+|\[?[0-9A-Fa-f:.]+\]?")
#: Blue and sky of the figures (gpusim/report/figures/theme.py, which imports plotly): red is for errors.
PRIMARY_LIGHT, PRIMARY_DARK = "#0072B2", "#56B4E9"
MISSING = "the dashboard needs {package}, which is not installed (pip install 'gpusim[app]')"


@click.command()
@click.option("--port", type=click.IntRange(1, 65535), default=DEFAULT_PORT, show_default=True)
@click.option(
    "--address", default=ADDRESS, show_default=True, help="Address to listen on; by default this machine only."
)
@click.option(
    "--allow-host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="Further host name for browsers, besides localhost and --address; repeatable.",
)
@click.option("--headless", is_flag=True, help="Open no browser.")
def app(port: int, address: str, hosts: tuple[str, ...], headless: bool) -> None:
    """Open the dashboard in a browser, for what-if questions without code. Ctrl-C ends it."""
    from gpusim.io.file_limits import MAX_UPLOAD_BYTES
    from gpusim.io.resources import resource_dir
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
        # A full garbage collection of large steps takes up to a second after each rerun, while all sessions wait.
        "runner.postScriptGC": False,
        "browser.gatherUsageStats": False,
        "client.toolbarMode": "viewer",
        "client.showErrorLinks": False,
        "global.developmentMode": False,
        "theme.light.primaryColor": PRIMARY_LIGHT,
        "theme.dark.primaryColor": PRIMARY_DARK,
    }
    words = [f"--{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in options.items()]
    words += [f"--server.allowedHosts={host}" for host in allowed_hosts(address, hosts)]
    sys.stdout.flush()
    # Streamlit replaces this process: signals and exit codes are its own, and gpusim does not import it.
    os.execv(sys.executable, [sys.executable, str(serve), *words])


def allowed_hosts(address: str, more: Iterable[str] = ()) -> tuple[str, ...]:
    """Return the host names that browsers may use for the dashboard, which prevents DNS rebinding by other pages.

    These are the local names, `address` and `more`; if it listens on all addresses, also the machine's name and
    addresses. Raises `OptionError` for an invalid host name or address.
    """
    names = [*LOCAL_HOSTS, address, *more]
    if address in EVERY_ADDRESS:
        own = socket.gethostname()
        names += [own, socket.getfqdn()]
        with suppress(OSError):
            names += [str(info[4][0]) for info in socket.getaddrinfo(own, None)]
    for name in more:
        if len(name) > HOST_CHARACTERS or not HOST_NAME.fullmatch(name):
            raise OptionError(
                f"--allow-host '{short_value(name)}': give a name such as lab.example.org, or an address, and no port"
            )
    return tuple(dict.fromkeys(name.strip("[]").lower() for name in names))


def _check_port(address: str, port: int) -> None:
    """Raise `OptionError` if the dashboard cannot listen on this address and port."""
    try:
        family, kind, protocol, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            # Like the server itself: a port with closed connections that are timing out is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(where)
    except UnicodeError as cause:  # characters or length impossible in a host name
        raise OptionError("give the name or the address of this machine", argument="address", value=address) from cause
    except OSError as cause:
        problem = cause.strerror or str(cause)
        listen = f"cannot listen on {short_value(address)}"
        raise OptionError(f"--port {port}: {listen}: {problem}; choose another with --port") from cause
