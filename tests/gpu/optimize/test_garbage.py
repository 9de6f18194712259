"""Python's garbage collector while something is timed or recorded: held off, and on again afterwards."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from gpusim.gpu.optimize.garbage import no_collection, quick_collections


class Ring:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _nothing_is_frozen() -> Iterator[None]:
    """Unlike in other tests: tests/conftest.py freezes what is imported."""
    gc.unfreeze()
    yield
    gc.enable()
    gc.freeze()


@pytest.mark.parametrize("on", [True, False])
def test_nothing_is_collected_while_contenders_take_turns(on: bool) -> None:
    (gc.enable if on else gc.disable)()
    ring = weakref.ref(Ring())
    with no_collection():
        assert ring() is None  # what was there before is gone
        assert not gc.isenabled()
    assert gc.isenabled() == on


def test_recordings_collect_their_own_garbage_and_look_at_nothing_older() -> None:
    with quick_collections():
        assert gc.get_freeze_count() > 0
        ring = weakref.ref(Ring())
        gc.collect()
        assert ring() is None
    assert gc.get_freeze_count() == 0


def test_objects_that_the_user_has_frozen_stay_frozen() -> None:
    gc.freeze()
    before = gc.get_freeze_count()
    with quick_collections():
        assert gc.get_freeze_count() == before
    assert gc.get_freeze_count() == before
