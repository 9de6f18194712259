"""Python's garbage collector around work that it would slow down."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_collection() -> Iterator[None]:
    """Collect garbage now and none within the block."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def quick_collections() -> Iterator[None]:
    """Exclude the objects of now from collections within the block.

    Recording a CUDA graph collects garbage, and a compiler leaves millions of objects to look at. Does nothing in a
    process that has frozen objects of its own.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
