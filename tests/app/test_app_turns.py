"""Sessions that end while waiting for a turn, or while watched, block no other session."""

from __future__ import annotations

import threading
import time

import pytest

from tests.support.pages import APP


@pytest.fixture(autouse=True)
def dashboard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the dashboard's package on the path."""
    monkeypatch.syspath_prepend(str(APP))


class Ended(BaseException):
    """Exception in the thread of a closed tab."""


def test_a_session_that_ends_while_it_waits_leaves_the_turn_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The session may have consumed the wake-up meant for the next."""
    from gpusim_dashboard import lifetime, turns

    one = threading.BoundedSemaphore(1)
    monkeypatch.setattr(turns, "_turns", lambda: one)
    worked: list[str] = []

    def work(name: str) -> None:
        try:
            with turns.work():
                worked.append(name)
        except Ended:
            return

    with turns.work():
        threads = {name: threading.Thread(target=work, args=(name,)) for name in ("closed", "open")}
        for thread in threads.values():
            thread.start()
        time.sleep(0.1)
        ident = threads["closed"].ident
        assert ident is not None
        lifetime.interrupt(ident, Ended)
    for thread in threads.values():
        thread.join(10)
        assert not thread.is_alive()
    assert "open" in worked


def test_a_watched_script_that_is_interrupted_is_forgotten() -> None:
    """Wherever the interrupt hits, no lock stays taken, and a page of another session begins at once."""
    from gpusim_dashboard import lifetime

    watch = lifetime.Watch()
    entered = threading.Event()

    def script() -> None:
        try:
            with watch.script("closed"):
                entered.set()
                while True:
                    time.sleep(0.001)
        except Ended:
            return

    thread = threading.Thread(target=script)
    thread.start()
    assert entered.wait(10)
    assert thread.ident is not None
    lifetime.interrupt(thread.ident, Ended)
    thread.join(10)
    assert not thread.is_alive()
    with watch.script("open"):
        pass
    assert watch._scripts == {}
