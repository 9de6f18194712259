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


def test_a_page_with_its_answer_waits_until_others_have_theirs_and_not_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The rest of one page does not delay the answer of another; a page that takes long delays the rest of none."""
    from gpusim_dashboard import lifetime

    monkeypatch.setattr(lifetime, "ANSWERS_S", 60.0)
    watch = lifetime.Watch()
    order: list[str] = []
    begun, go = threading.Event(), threading.Event()

    def other() -> None:
        with watch.script("another session"):
            begun.set()
            go.wait()
            order.append("their answer")
            watch.let_others_answer()

    def page() -> None:
        with watch.script("a session"):
            begun.wait()
            go.set()
            watch.let_others_answer()
            order.append("the rest")

    threads = [threading.Thread(target=each) for each in (other, page)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert order == ["their answer", "the rest"]
    monkeypatch.setattr(lifetime, "ANSWERS_S", 0.0)
    with watch.script("a session"):
        waiting = threading.Thread(target=other)
        go.clear()
        begun.clear()
        waiting.start()
        begun.wait()
        watch.let_others_answer()  # returns, though the other page has none
    go.set()
    waiting.join()
