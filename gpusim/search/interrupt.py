"""Early end of a search, by Ctrl-C or on request."""

from __future__ import annotations

from typing import Final


class Cancelled(BaseException):  # like `KeyboardInterrupt`, not caught by error handlers
    """A request to end the work; a search then returns its best result so far."""


#: Exceptions that end a search early with its best result so far.
STOPS: Final = (KeyboardInterrupt, Cancelled)
