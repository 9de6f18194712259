"""Code that a file brings along runs only where the user says that it may: one check, one text."""

from __future__ import annotations

from gpusim.errors import TrustError
from gpusim.trace.schema import Trace


def check_trace_code(trace: Trace, file: str, trust_code: bool) -> None:
    """Raise `TrustError` for a trace with kernels as code (front end `inductor`), unless it is trusted."""
    if trace.model.frontend == "inductor":
        require_trust(file, "$.model.frontend", "a trace of the front end 'inductor' runs the code in it", trust_code)


def names_code(spec: str) -> bool:
    """Whether a model's SPEC is a function in a file, `file.py:function`, and not a name in an installed library."""
    kind, _, _ = spec.partition(":")
    return kind not in ("torchvision", "timm")


def require_trust(file: str, place: str, what: str, trust_code: bool) -> None:
    """Raise `TrustError` for a file that brings code along, unless it is trusted; `what` says what would run."""
    if not trust_code:
        problem = f"{what}, with all your rights; read it, and add --trust-code (trust_code=True in Python) to allow it"
        raise TrustError(file, problem, place=place)
