"""Registry of the policies by name, with the properties that commands and searches need."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gpusim.errors import UnknownNameError
from gpusim.plan.graph import OpGraph
from gpusim.plan.schedule import Schedule
from gpusim.policies.critical_path import critical_path
from gpusim.policies.nimble import nimble
from gpusim.policies.ooo_backprop import ooo_backprop
from gpusim.policies.opara import opara
from gpusim.policies.round_robin import round_robin
from gpusim.policies.sequential import sequential
from gpusim.policies.shared.base import Policy
from gpusim.policies.shared.ios_blocks import MAX_GROUPS
from gpusim.policies.torchsched import torchsched
from gpusim.policies.trtllm import trtllm
from gpusim.policies.turbodl import turbodl
from gpusim.policies.wavefront import wavefront


def _ios(graph: OpGraph, streams: int) -> Schedule:
    """Import IOS when called: it loads compiled code, which listing policy names does not need."""
    from gpusim.policies.ios import ios

    return ios(graph, streams)


@dataclass(frozen=True, slots=True)
class RegisteredPolicy:
    """A named policy; calling it makes a schedule."""

    name: str
    make: Policy
    source: str
    """System and year, as cited in docs/policies.md."""
    summary: str = ""
    """Summary in one sentence."""
    max_streams: int | None = None
    """Maximum number of useful streams; None if unlimited."""
    slow: bool = False
    """True if a call may take seconds; explorations run it only on request."""
    linear: bool = False
    """True if its time grows linearly with the step; explorations of large steps run no others."""

    def __call__(self, graph: OpGraph, streams: int) -> Schedule:
        """Return a legal schedule on at most `streams` streams, with the policy's name."""
        return replace(self.make(graph, streams), policy=self.name)

    def stream_counts(self, counts: Iterable[int]) -> tuple[int, ...]:
        """Return the distinct stream counts to try out of `counts`, limited to `max_streams`."""
        limit = self.max_streams
        return tuple(sorted({count if limit is None else min(count, limit) for count in counts}))


POLICIES: dict[str, RegisteredPolicy] = {
    policy.name: policy
    for policy in (
        RegisteredPolicy(
            "sequential", sequential, "PyTorch", "All ops on one stream, in recorded order.", max_streams=1, linear=True
        ),
        RegisteredPolicy(
            "wavefront", wavefront, "Rammer, 2020", "Level by level, all ops of a level concurrently.", linear=True
        ),
        RegisteredPolicy(
            "round_robin",
            round_robin,
            "Taskflow, 2021",
            "Level by level, ops assigned to streams round-robin.",
            linear=True,
        ),
        RegisteredPolicy(
            "nimble", nimble, "Nimble, 2020", "As much concurrency as dependencies allow, with the fewest waits."
        ),
        RegisteredPolicy(
            "turbodl", turbodl, "TurboDL, 2021", "The critical path on its own stream, other paths on side streams."
        ),
        RegisteredPolicy(
            "ios",
            _ios,
            "IOS, 2021",
            "Stages of concurrent groups, by dynamic programming.",
            max_streams=MAX_GROUPS,
            slow=True,
        ),
        RegisteredPolicy(
            "ooo_backprop",
            ooo_backprop,
            "OOO-BackProp, 2022",
            "Weight gradients on a second stream, out of order.",
            max_streams=2,
        ),
        RegisteredPolicy("opara", opara, "Opara, 2025", "Streams passed along the graph, small demands first."),
        RegisteredPolicy(
            "torchsched", torchsched, "NVIDIA apex, 2025", "The deepest path on one stream, the rest on the others."
        ),
        RegisteredPolicy(
            "trtllm", trtllm, "TensorRT-LLM, 2025", "Longest distance to the end first, with costs guessed by kind."
        ),
        RegisteredPolicy(
            "critical_path",
            critical_path,
            "gpusim",
            "The op with the longest chain to the end starts first, if it fits.",
            linear=True,
        ),
    )
}


def policy_by_name(name: str) -> RegisteredPolicy:
    """Return a policy by name. Raises `UnknownNameError` with the nearest name."""
    if name not in POLICIES:
        raise UnknownNameError("policy", name, POLICIES)
    return POLICIES[name]


def stream_counts(limit: int) -> tuple[int, ...]:
    """Return the stream counts to try for each policy: small ones, then powers of two, and the limit."""
    return tuple(sorted({n for n in (2, 3, 4, 6, 8, 16, 32, 64, 128) if n < limit} | {limit}))
