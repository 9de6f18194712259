"""Host names that the dashboard answers to: a real server on this machine, asked with raw requests."""

from __future__ import annotations

import base64
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusim.cli.app import allowed_hosts
from gpusim.errors import OptionError

ROOT = Path(__file__).parents[2]
START_S = 60
MORE = "lab.example.org"


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Start a dashboard for these tests, and return its port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        free: int = probe.getsockname()[1]
    words = [sys.executable, "-m", "gpusim.cli", "app", "--headless", "--port", str(free), "--allow-host", MORE]
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cache"))}
    with subprocess.Popen(
        words, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        try:
            deadline = time.monotonic() + START_S
            while True:
                assert process.poll() is None, "gpusim app ended"
                assert time.monotonic() < deadline, "no answer"
                try:
                    assert status(free, f"127.0.0.1:{free}", "/_stcore/health") == 200
                    break
                except OSError:
                    time.sleep(0.1)
            yield free
        finally:
            process.terminate()
            process.wait(timeout=30)


def status(port: int, host: str, path: str, *, origin: str | None = None, websocket: bool = False) -> int:
    """Return the status of a request."""
    lines = [f"GET {path} HTTP/1.1", f"Host: {host}"]
    if websocket:
        key = base64.b64encode(os.urandom(16)).decode()
        lines += ["Upgrade: websocket", "Connection: Upgrade", "Sec-WebSocket-Version: 13", f"Sec-WebSocket-Key: {key}"]
    else:
        lines.append("Connection: close")
    if origin is not None:
        lines.append(f"Origin: {origin}")
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode())
        return int(connection.recv(4096).split(b" ", 2)[1])


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]", MORE])
def test_own_names_are_answered(port: int, name: str) -> None:
    host = f"{name}:{port}"
    assert status(port, host, "/") == 200
    assert status(port, host, "/_stcore/stream", origin=f"http://{host}", websocket=True) == 101


@pytest.mark.parametrize("name", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "a@localhost"])
def test_other_names_are_refused_though_the_origin_agrees_with_the_host(port: int, name: str) -> None:
    host = f"{name}:{port}"
    for path in ("/", "/_stcore/health", "/_stcore/host-config"):
        assert status(port, host, path) == 403
    assert status(port, host, "/_stcore/stream", origin=f"http://{host}", websocket=True) == 403
    assert status(port, host, "/_stcore/stream", websocket=True) == 403


def test_foreign_origin_is_refused_under_the_own_name(port: int) -> None:
    host = f"127.0.0.1:{port}"
    assert status(port, host, "/_stcore/stream", origin="http://evil.example", websocket=True) == 403


def test_allowed_hosts_are_this_machine_the_address_and_those_given() -> None:
    assert allowed_hosts("127.0.0.1") == ("localhost", "127.0.0.1", "::1")
    assert allowed_hosts("10.0.0.5", ["Lab.Example.org", "[fe80::1]"]) == (
        "localhost",
        "127.0.0.1",
        "::1",
        "10.0.0.5",
        "lab.example.org",
        "fe80::1",
    )
    assert socket.gethostname().lower() in allowed_hosts("0.0.0.0")


@pytest.mark.parametrize("name", ["*", "*.example.org", "http://lab", "lab:8501/", "", "a b", "lab,evil"])
def test_host_pattern_or_url_is_refused(name: str) -> None:
    with pytest.raises(OptionError, match="--allow-host"):
        allowed_hosts("127.0.0.1", [name])
