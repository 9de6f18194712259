"""Trust in code from files: it runs only if the user allows it; one check, one message."""

from __future__ import annotations

import re
from typing import Final

from gpusim.errors import TrustError
from gpusim.formats.trace import Trace

LIBRARIES: Final = ("torchvision", "timm")
#: Names of models in a library, excluding paths and download hubs, which timm's names may also mean.
_MODEL: Final = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_-]+)?")


def check_trace_code(trace: Trace, file: str, trust_code: bool) -> None:
    """Raise `TrustError` for an untrusted trace with kernels as code (front end `inductor`)."""
    if trace.model.frontend == "inductor":
        require_trust(file, "$.model.frontend", "a trace of the front end 'inductor' runs the code in it", trust_code)


def names_code(spec: str) -> bool:
    """Return True if a model's SPEC is a function in a file, `file.py:function`, not a name in an installed library."""
    kind, _, _ = spec.partition(":")
    return kind not in LIBRARIES


def wrong_name(spec: str) -> str:
    """Return why the part of a SPEC after its colon, also used in file names, is no name, or an empty text."""
    kind, _, name = spec.partition(":")
    if kind in LIBRARIES:
        return "" if not name or _MODEL.fullmatch(name) else f"'{name[:200]}' is no name of a model in {kind}"
    if not kind.endswith(".py") or not name or name.isidentifier():
        return ""
    return f"'{name[:200]}' is no name of a function"


def require_trust(file: str, place: str, what: str, trust_code: bool) -> None:
    """Raise `TrustError` for an untrusted file with code; `what` describes what would run."""
    if not trust_code:
        problem = f"{what}, with all your rights; read it, and add --trust-code (trust_code=True in Python) to allow it"
        raise TrustError(file, problem, place=place)
