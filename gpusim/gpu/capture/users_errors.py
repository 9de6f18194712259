"""Errors of the user's own code: one line with its place, its type and its message."""

from __future__ import annotations

import os
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import torch

from gpusim.errors import CaptureError, GpusimError

#: Folders. They end in a separator: torchvision is not torch.
TORCH: Final = os.path.join(Path(torch.__file__).parent, "")
GPUSIM: Final = os.path.join(Path(__file__).parents[2], "")
#: What a call of torch's, or of a function with other parameters, raises at the line of the call. No `KeyError`: at a
#: line of gpusim, that is a key that gpusim lacks.
_OF_CALLS: Final = (RuntimeError, TypeError, ValueError, AttributeError, IndexError)
_PYTHON: Final = os.path.join(sysconfig.get_path("stdlib"), "")


@contextmanager
def users_code(doing: str = "", file: Path | None = None) -> Iterator[None]:
    """Raise any error of the user's code, `sys.exit` too, as a `CaptureError`: `place: doing: type: message`.

    The place is the innermost line of the user's in the traceback, or `file`. Memory that the GPU lacks is no error of
    the code, and neither is what a line of gpusim raises.
    """
    try:
        yield
    except (torch.cuda.OutOfMemoryError, GpusimError):
        raise
    except (Exception, SystemExit) as cause:
        innermost = traceback.extract_tb(cause.__traceback__)[-1].filename
        if innermost.startswith(GPUSIM) and not isinstance(cause, _OF_CALLS):
            raise
        place = line_of(cause) or (str(file) if file else "")
        message = next((line for line in str(cause).splitlines() if line.strip()), "")
        parts = (place, doing, type(cause).__name__, message)
        raise CaptureError(": ".join(part for part in parts if part)) from cause


def line_of(cause: BaseException) -> str:
    """Return the innermost line of the user's that led to an error, as `file:line`; empty if there is none."""
    if isinstance(cause, SyntaxError) and cause.filename and cause.lineno:
        return f"{cause.filename}:{cause.lineno}"
    files = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(cause.__traceback__)]
    users = [f"{file}:{line}" for file, line in files if is_users(file)]
    return users[-1] if users else ""


def is_users(file: str) -> bool:
    """Whether a line of this file is the user's, or of a library that is neither torch nor Python's own."""
    is_pythons = file.startswith(_PYTHON) and "-packages" not in file
    return not file.startswith((TORCH, GPUSIM, "<")) and not is_pythons
