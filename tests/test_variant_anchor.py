"""Times of variants are anchored to a measured step with the fastest of them, on one stream."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpusim.engine.fast import FastEngine
from gpusim.hardware.model import HardwareModel
from gpusim.plan.graph import OpGraph
from gpusim.plan.lower import lower
from gpusim.plan.ranking import ranked_variants
from gpusim.runtime import variant_anchor
from gpusim.runtime.variant_anchor import LEAST_SHARE, MOST_FACTOR, anchor_factor, anchored_variants, with_times
from gpusim.trace.schema import Trace, Variant, VariantSettings
from tests.helpers import build_graph, kernel, make_trace, op


def step(*durations_ns: int) -> Trace:
    """A chain of ops of 10 us with a variant of so many ns each."""
    names = [f"op{number}" for number in range(len(durations_ns))]
    made = make_trace(
        [op(name, before, dur_ns=10_000) for name, before in zip(names, ["x", *names], strict=False)], outputs=names[-1]
    )
    ops = (
        msgspec.structs.replace(
            each, variants=(Variant(name="v", settings=VariantSettings(), kernels=(kernel(dur_ns),)),)
        )
        for each, dur_ns in zip(made.ops, durations_ns, strict=True)
    )
    return msgspec.structs.replace(made, ops=tuple(ops))


def predicted(trace: Trace, variants: tuple[int, ...], hardware: HardwareModel | None = None) -> int:
    """The time on one stream, in recorded order."""
    graph = build_graph(trace) if hardware is None else OpGraph.build(trace, hardware)
    n = len(graph)
    return FastEngine().run(lower(graph, range(n), [0] * n, variants=variants), graph.hardware).makespan_ns


def test_both_graphs_are_predicted_right_by_the_factor() -> None:
    """The graph with variants took 2 us more than predicted, of 9 us of variants: they take 11/9 of their times."""
    trace = step(4000, 5000, 12_000)
    graph = build_graph(trace)
    chosen = ranked_variants(graph, 0.0)
    assert chosen == (1, 1, 0)
    factor = anchor_factor(graph, chosen, predicted(trace, ()), predicted(trace, chosen) + 2000)
    assert factor == pytest.approx(11 / 9)
    assert predicted(with_times(trace, factor), chosen) == pytest.approx(predicted(trace, chosen) + 2000, abs=2)
    assert predicted(with_times(trace, factor), ()) == predicted(trace, ())


def test_machine_that_is_slower_all_over_says_nothing_of_variants() -> None:
    trace = step(4000, 5000)
    graph = build_graph(trace)
    times = predicted(trace, ()), predicted(trace, (1, 1))
    assert anchor_factor(graph, (1, 1), *(round(1.1 * ns) for ns in times)) == pytest.approx(1.0, abs=1e-3)


def test_factor_has_limits() -> None:
    """Nothing follows from a small part of the step; and no factor makes up for what is no matter of context."""
    trace = step(100, *[20_000] * 9)
    graph = build_graph(trace)
    assert LEAST_SHARE * predicted(trace, ()) > 100
    assert anchor_factor(graph, ranked_variants(graph, 0.0), 100_000, 150_000) == 1.0
    trace = step(4000)
    assert anchor_factor(build_graph(trace), (1,), 10_000, 90_000) == MOST_FACTOR
    assert anchor_factor(build_graph(trace), (1,), 90_000, 10_000) == pytest.approx(1 / MOST_FACTOR)


def test_anchoring_measures_the_captured_kernels_and_the_fastest_variants(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = step(4000, 12_000)
    asked: list[Any] = []

    def measured(work: Any, trace: Trace, schedules: Any, hardware: HardwareModel, _: int) -> list[int]:
        asked.extend([placement.variant for placement in schedule.placements] for schedule in schedules)
        return [predicted(trace, (), hardware), predicted(trace, (1, 0), hardware) + 400]

    monkeypatch.setattr(variant_anchor, "alone", measured)
    said: list[str] = []
    found = anchored_variants(trace, say=said.append)
    assert asked == [["", ""], ["v", ""]]
    assert [each.variants[0].kernels[0].dur_ns for each in found.ops] == [4400, 13_200]
    assert any("1.10" in line for line in said)


def test_step_whose_captured_kernels_are_fastest_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variant_anchor, "alone", lambda *_: pytest.fail("asked for a GPU"))
    trace = step(12_000)
    assert anchored_variants(trace) is trace
    unknown = msgspec.structs.replace(trace.provenance, gpu=msgspec.structs.replace(trace.provenance.gpu, name="none"))
    assert anchored_variants(msgspec.structs.replace(trace, provenance=unknown)).provenance == unknown
