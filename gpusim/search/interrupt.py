"""Ending a search early: Ctrl-C, or a request."""

from __future__ import annotations

from typing import Final


class Cancelled(BaseException):  # as `KeyboardInterrupt`, so that no handler of errors takes it for one
    """Somebody asked the work to end. What a search has found until then is its result."""


#: What ends a search early, which then keeps the best found.
STOPS: Final = (KeyboardInterrupt, Cancelled)
