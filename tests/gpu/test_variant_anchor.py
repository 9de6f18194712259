"""Times of variants anchored to measured steps, one with the fastest of each name, on one stream."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from gpusim.engine.fast import FastEngine
from gpusim.formats.hardware import HardwareModel
from gpusim.formats.trace import Trace, Variant, VariantSettings
from gpusim.gpu.capture import variant_anchor
from gpusim.gpu.capture.variant_anchor import MOST_FACTOR, anchor_factor, anchored_variants, with_times
from gpusim.plan.graph import OpGraph
from gpusim.plan.ranking import ranked_variants
from tests.support.helpers import build_graph, kernel, lowered, make_trace, op


def step(*durations_ns: int, variants: str = "") -> Trace:
    """Make a chain of ops of 10 us, each with a variant of the given ns, named by the letters of `variants` (default
    `v`).
    """
    names = [f"op{number}" for number in range(len(durations_ns))]
    made = make_trace(
        [op(name, before, dur_ns=10_000) for name, before in zip(names, ["x", *names], strict=False)], outputs=names[-1]
    )
    ops = (
        msgspec.structs.replace(
            each, variants=(Variant(name=name, settings=VariantSettings(), kernels=(kernel(dur_ns),)),)
        )
        for each, dur_ns, name in zip(made.ops, durations_ns, variants or "v" * len(names), strict=True)
    )
    return msgspec.structs.replace(made, ops=tuple(ops))


def predicted(trace: Trace, variants: tuple[int, ...], hardware: HardwareModel | None = None) -> int:
    """Return the predicted time on one stream, in recorded order."""
    graph = build_graph(trace) if hardware is None else OpGraph.build(trace, hardware)
    n = len(graph)
    return FastEngine().run(lowered(graph, range(n), [0] * n, variants=variants), graph.hardware).makespan_ns


def test_graph_with_variants_is_predicted_right_by_the_factor() -> None:
    """It took 2 us more than predicted, with 9 us of variants: 11/9 of their times. But 1 % of the graph may be
    recording noise, and factors spread by 0.2: the weight is a variance of 9 us in 9 us and a twentieth of all.
    """
    trace = step(4000, 5000, 12_000)
    graph = build_graph(trace)
    chosen = ranked_variants(graph, 0.0)
    assert chosen == (1, 1, 0)
    varied_ns, all_ns = 9000, predicted(trace, chosen)
    weight = varied_ns**2 / (varied_ns**2 + (0.05 * all_ns) ** 2)
    assert weight > 0.98
    factor = anchor_factor(graph, chosen, predicted(trace, ()), all_ns + 2000)
    assert factor == pytest.approx(1 + weight * 2 / 9)
    found = with_times(trace, {"v": factor})
    assert predicted(found, chosen) == pytest.approx(all_ns + 2000 * weight, abs=2)
    assert predicted(found, ()) == predicted(trace, ())


def test_machine_that_is_slower_all_over_says_nothing_of_variants() -> None:
    trace = step(4000, 5000)
    graph = build_graph(trace)
    times = predicted(trace, ()), predicted(trace, (1, 1))
    assert anchor_factor(graph, (1, 1), *(round(1.1 * ns) for ns in times)) == pytest.approx(1.0, abs=1e-3)


def test_small_part_of_a_step_says_little_and_factors_have_limits() -> None:
    """A step that took 2 % longer tells nothing about 100 ns in 180 us; and no factor explains half of a step."""
    trace = step(100, *[20_000] * 18)
    graph = build_graph(trace)
    times = predicted(trace, ()), predicted(trace, ranked_variants(graph, 0.0))
    assert anchor_factor(graph, ranked_variants(graph, 0.0), times[0], round(1.02 * times[1])) < 1.01
    trace = step(4000)
    assert anchor_factor(build_graph(trace), (1,), 10_000, 90_000) == MOST_FACTOR
    assert anchor_factor(build_graph(trace), (1,), 90_000, 10_000) == pytest.approx(1 / MOST_FACTOR)


def test_each_name_has_a_factor_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured are a graph of the captured kernels, and one per name with a faster variant, with these alone.

    The first name takes 400 ns more than in isolation, the second as much, the third is never faster.
    """
    trace = step(4000, 5000, 12_000, variants="abc")
    asked: list[Any] = []

    def measured(work: Any, trace: Trace, schedules: Any, hardware: HardwareModel, _: int) -> list[int]:
        asked.extend(schedule.variants for schedule in schedules)
        chosen = ((), (1, 0, 0), (0, 1, 0))
        return [predicted(trace, each, hardware) + more for each, more in zip(chosen, (0, 400, 0), strict=True)]

    monkeypatch.setattr(variant_anchor, "alone", measured)
    said: list[str] = []
    found = anchored_variants(trace, say=said.append)
    assert asked == [(), (1, 0, 0), (0, 1, 0)]
    first, second, third = (each.variants[0].kernels[0].dur_ns for each in found.ops)
    assert 4300 < first < 4400
    assert (second, third) == (5000, 12_000)
    assert any("(a)" in line and "1.00 (b)" in line for line in said)


def test_step_whose_captured_kernels_are_fastest_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(variant_anchor, "alone", lambda *_: pytest.fail("asked for a GPU"))
    trace = step(12_000)
    assert anchored_variants(trace) is trace
    unknown = msgspec.structs.replace(trace.provenance, gpu=msgspec.structs.replace(trace.provenance.gpu, name="none"))
    assert anchored_variants(msgspec.structs.replace(trace, provenance=unknown)).provenance == unknown
