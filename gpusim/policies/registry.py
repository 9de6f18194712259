"""The policies by name."""

from __future__ import annotations

from gpusim.errors import UnknownNameError
from gpusim.policies.base import Policy
from gpusim.policies.critical_path import critical_path
from gpusim.policies.round_robin import round_robin
from gpusim.policies.sequential import sequential
from gpusim.policies.wavefront import wavefront

POLICIES: dict[str, Policy] = {
    "sequential": sequential,
    "wavefront": wavefront,
    "round_robin": round_robin,
    "critical_path": critical_path,
}


def policy_by_name(name: str) -> Policy:
    """A policy. Raises `UnknownNameError` with the nearest name."""
    if name not in POLICIES:
        raise UnknownNameError("policy", name, POLICIES)
    return POLICIES[name]
