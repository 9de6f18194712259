"""Traces in which every possible fusion is a variant, not measured."""

from __future__ import annotations

import msgspec

from gpusim.formats.trace import Trace, Variant
from gpusim.gpu.replay.fusion import chains_of
from gpusim.trace.check import check_trace
from tests.support.helpers import kernel


def with_chains(trace: Trace) -> Trace:
    """Return the trace with every possible fusion as its only variants."""
    chains = chains_of(trace)

    def variants(index: int) -> tuple[Variant, ...]:
        return tuple(
            Variant(name=name, settings=chain.settings, kernels=(kernel(1000),), covers=chain.covers)
            for name, chain in chains.get(index, {}).items()
        )

    ops = tuple(msgspec.structs.replace(op, variants=variants(index)) for index, op in enumerate(trace.ops))
    trace_with_chains = msgspec.structs.replace(trace, ops=ops)
    check_trace(trace_with_chains, "chains")
    return trace_with_chains


def chosen_by_name(trace: Trace, name: str) -> list[int]:
    """Return each op's number of the variant with this name, or 0."""
    return [next((n for n, variant in enumerate(op.variants, 1) if variant.name == name), 0) for op in trace.ops]
