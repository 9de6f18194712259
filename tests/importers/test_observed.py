"""The re-simulated step: starts worked out by hand, programs whose edges suffice, and files whose edges do not."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import gpusim
from gpusim.api.other_tools import export
from gpusim.importers import import_files
from gpusim.importers.edges import observed_edges
from gpusim.importers.model import Activity, Edge, Wait
from gpusim.importers.observed import makespan_ns, resimulated
from tests.support.importer_files import PROFILES

BUNDLED = ["squeezenet1_1-infer-b1", "googlenet-infer-b1", "googlenet-train-b8"]
POLICIES = ["sequential", "round_robin", "critical_path", "wavefront", "opara"]


def record(start: int, dur: int, stream: int = 7, launch: int | None = None, returns: int | None = None) -> Activity:
    end = None if launch is None else launch + 2 if returns is None else returns
    return Activity("kernel", "k", 0, stream, start, dur, correlation=start, launch_ns=launch, launch_end_ns=end)


def starts(records: Sequence[Activity], edges: Sequence[Edge] = ()) -> list[int]:
    return resimulated(records, edges).starts


def test_records_of_one_stream_follow_each_other_after_the_mean_gap() -> None:
    records = [record(0, 10), record(12, 10), record(26, 10)]  # gaps of 2 and 4
    assert starts(records) == [0, 13, 26]


def test_gap_on_another_stream_and_beside_others_is_told_from_one_alone() -> None:
    records = [record(0, 10), record(12, 30), record(20, 10, 8), record(35, 10, 8)]  # idle 2; on 8 with stream 7: 5
    assert starts(records, [Edge(0, 2, "event")]) == [0, 12, 20, 35]


def test_launch_on_an_idle_gpu_takes_the_usual_time_to_arrive() -> None:
    records = [record(0, 5), record(103, 5, launch=100), record(205, 5, launch=202), record(309, 5, launch=306)]
    assert starts(records) == [0, 103, 205, 309]


def test_no_launch_arrives_later_than_the_start_that_it_led_to() -> None:
    """A copy that the host waits for: its call began long before, and returns after the copy."""
    quick = [record(100 * n + 3, 5, launch=100 * n) for n in range(5)]
    copy = record(1000, 500, launch=600, returns=1600)
    assert starts([*quick, copy])[-1] == 1000


def test_call_that_was_kept_loading_a_module_launches_at_its_end() -> None:
    quick = [record(100 * n + 3, 5, launch=100 * n) for n in range(5)]
    loaded = record(5_003, 5, launch=1_000, returns=5_002)
    assert starts([*quick, loaded])[-1] == 5_003


def test_first_record_of_each_stream_starts_as_observed() -> None:
    records = [record(0, 100), record(40, 10, 8), record(52, 10, 8)]
    assert starts(records)[:2] == [0, 40]


def test_long_wait_is_no_gap_and_is_said() -> None:
    records = [record(12 * n, 10) for n in range(10)] + [record(500_000, 10)]
    again = resimulated(records, [])
    assert again.starts[-1] == 120
    assert (again.waits, again.waits_unlaunched) == (1, 1)
    assert "1 record waited 499.9 us" in again.reason()


def test_edge_that_the_times_contradict_is_said() -> None:
    records = [record(0, 50_000), record(100, 50_000, 8)]
    again = resimulated(records, [Edge(0, 1, "data")])
    assert again.early == 1
    assert "1 record began before the end" in again.reason()


@given(seed=st.integers(0, 10**6), streams=st.integers(1, 6), resolution=st.sampled_from([1, 1000]))
@settings(max_examples=60, deadline=None)
def test_program_with_recorded_waits_takes_what_it_took(seed: int, streams: int, resolution: int) -> None:
    """Queues that run ahead, an occasionally idle host, waits between streams, and jitter everywhere."""
    records, waits = program(random.Random(seed), streams, resolution)
    edges, quality, _ = observed_edges(records, waits, bool(waits), resolution)
    assert quality == ("stream" if len({r.stream for r in records}) == 1 else "event" if waits else "assumed")
    error = makespan_ns(records, starts(records, edges)) / makespan_ns(records) - 1
    assert abs(error) < 0.02


@given(seed=st.integers(0, 10**6), streams=st.integers(2, 6))
@settings(max_examples=60, deadline=None)
def test_program_without_recorded_waits_takes_what_it_took_by_its_order(seed: int, streams: int) -> None:
    records, _ = program(random.Random(seed), streams, 1)
    edges, _, _ = observed_edges(records, [], False, 1)
    assert abs(makespan_ns(records, starts(records, edges)) / makespan_ns(records) - 1) < 0.02


@given(seed=st.integers(0, 10**6), streams=st.integers(2, 6))
@settings(max_examples=60, deadline=None)
def test_program_whose_waits_name_no_record_keeps_every_order_that_it_needs(seed: int, streams: int) -> None:
    """Such waits order at least as much as waits that name their records, and less than no recorded waits."""
    records, waits = program(random.Random(seed), streams, 1)
    nameless = [Wait(wait.correlation, -1, None, wait.stream) for wait in waits]
    edges, quality, _ = observed_edges(records, nameless, True, 1)
    assert quality == ("assumed" if waits and len({r.stream for r in records}) > 1 else quality)
    needed, _, _ = observed_edges(records, waits, True, 1)
    most, _, _ = observed_edges(records, [], False, 1)
    before = reach(len(records), edges)
    for edge in needed:
        # A wait may end up to 2 us before the profiler's times show it.
        if records[edge.before].end_ns <= records[edge.after].start_ns:
            assert before[edge.after] >> edge.before & 1
    assert len(edges) <= len(most)


def reach(count: int, edges: list[Edge]) -> list[int]:
    """Return, by record, a bit per predecessor; edges go from earlier to later records."""
    after = [0] * count
    for edge in sorted(edges, key=lambda each: each.after):
        after[edge.after] |= after[edge.before] | 1 << edge.before
    return after


def program(rng: random.Random, streams: int, resolution: int) -> tuple[list[Activity], list[Wait]]:
    """Simulate a GPU with 400 launches on several streams, one in five of which waits for another stream first."""
    host_ns, free_ns, call = 0, [0] * streams, 0
    records: list[Activity] = []
    waits: list[Wait] = []
    last: list[int] = [-1] * streams  # correlation of the last launch
    for _ in range(400):
        host_ns += rng.choice([3_000, 3_000, 4_000, 5_000, 30_000 if rng.random() < 0.1 else 3_000])
        stream, ready_ns = rng.randrange(streams), 0
        other = rng.randrange(streams)
        if other != stream and last[other] >= 0 and rng.random() < 0.2:
            ready_ns = free_ns[other] + round(rng.gauss(1_500, 200))
            waits.append(Wait(call + 2, call + 1, other, stream))
            call += 2
        call += 1
        gap_ns = max(200, round(rng.gauss(1_000, 150)))
        start_ns = max(host_ns + max(2_000, round(rng.gauss(4_000, 300))), free_ns[stream] + gap_ns, ready_ns)
        dur_ns = round(rng.lognormvariate(9, 1))  # a median of 8 us
        free_ns[stream] = start_ns + dur_ns
        last[stream] = call
        begin, end = (resolution * (time // resolution) for time in (start_ns, start_ns + dur_ns))
        launch = resolution * (host_ns // resolution)
        records.append(
            Activity(
                "kernel", "k", 0, stream, begin, end - begin, call, launch_ns=launch, launch_end_ns=launch + 2_000
            )
        )  # fmt: skip
    records.sort(key=lambda found: (found.start_ns, found.lane))
    return records, waits


@pytest.mark.parametrize("name", BUNDLED)
@pytest.mark.parametrize("policy", POLICIES)
def test_exported_schedule_is_observed_exactly_and_simulated_again_within_a_hundredth(
    name: str, policy: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("exported")
    step = gpusim.load(name)
    simulated = gpusim.simulate(step, policy, streams=4)
    export(simulated, {"kineto": folder / "k.json", "execution_trace": folder / "e.json"})
    profile, operators = str(folder / "k.json"), str(folder / "e.json")
    imported = import_files([profile, operators])
    assert imported.source.observed_ns == simulated.makespan_ns
    assert imported.error is not None
    assert abs(imported.error) < 0.01
    alone = import_files([profile])
    assert alone.error is not None
    assert abs(alone.error) < 0.01
    if simulated.graph.may_lose_cache:  # its kernels are as long as beside these others, misses included
        return
    for other in ("sequential", policy):
        again = gpusim.simulate(imported.trace, other, streams=4).makespan_ns
        assert again == pytest.approx(gpusim.simulate(step, other, streams=4).makespan_ns, rel=0.01)


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.name[:40])
@pytest.mark.parametrize("step", [None, "all"], ids=["one step", "all"])
def test_step_simulated_as_observed_takes_what_the_file_shows(path, step) -> None:  # type: ignore[no-untyped-def]
    imported = import_files([str(path)], step=step)
    assert imported.error is not None
    assert abs(imported.error) < 0.01
